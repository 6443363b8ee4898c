"""The table of tilings, and that a call says which of them it took."""

import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest

from attn_jax.kernels import design, hopper_backward_fused, tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.hopper_fused_work import QUERIES
from attn_jax.kernels.tilings import Plan, Tiling
from attn_jax.mask import Mask

TABLE = Path(tuning.__file__).with_name("tilings.json").read_text()


def test_the_table_is_written_as_it_is_read():
    assert tuning.write(tuning.read(TABLE)) == TABLE


def _changed(change) -> str:
    lines = json.loads(TABLE)
    change(lines)
    return json.dumps(lines)


def _dq(lines):
    return next(line for line in lines if line["kernel"] == "backward_dq")


def _few(lines):
    return next(line for line in lines if line["keys_seen"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: lines.pop(0), "no entry for .*'ampere', 'forward', 32"),
        (lambda lines: lines.append(lines[0]), "two entries"),
        (lambda lines: lines[2]["tiling"].pop("rows"), "entry 3 .*rows"),
        (lambda lines: lines[0]["tiling"].update(columns=0), "entry 1 .*columns"),
        (lambda lines: lines[1].pop("keys_seen"), "entry 2 .*keys_seen"),
        (lambda lines: lines.append(lines[1] | {"head_dim": 72}), "no such kernel"),
        (lambda lines: lines.append(_dq(lines) | {"is_causal": True}), "no such kern"),
        (lambda lines: lines[0].pop("is_causal"), "no entry for .*'forward', 32.*Fal"),
        (lambda lines: lines[-1].update(value_dim=64), "no entry .*fused', 128.* True"),
        (lambda lines: lines.append(lines[-1] | {"value_dim": 64}), "no such kernel"),
        (lambda lines: lines[-1].pop("is_causal"), "no entry .*'backward_fused', 128"),
        (lambda lines: lines[-1]["tiling"].update(parts=2), "number of parts"),
        (lambda lines: lines[-1]["tiling"].update(rings=2), "unexpected .*'rings'"),
        (lambda lines: lines[-1]["tiling"].update(copiers=3), "3 warpgroups that co"),
        (lambda lines: lines[-1]["tiling"].update(storing_warps=0), "no warp that"),
        (lambda lines: lines[-1]["tiling"].update(passes=0), "passes of a plan"),
        # Of which one would never be taken.
        (lambda lines: lines.append(_few(lines) | {"keys_seen": 9}), "entries for few"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(change, complaint):
    with pytest.raises(ValueError, match=complaint) as refused:
        tuning.read(_changed(change))
    assert len(str(refused.value).splitlines()) == 1


def test_what_is_no_json_is_refused():
    with pytest.raises(ValueError):
        tuning.read("{")


@pytest.mark.parametrize(
    ("head_dim", "keys", "is_causal", "plan"),
    [
        (64, 64, False, Plan(storing_warps=2, apart=False, passes=2)),
        (64, 2048, False, Plan(storing_warps=2, apart=False, passes=2)),
        (64, 16384, False, Plan(storing_warps=2, apart=False, passes=2)),
        (64, 1, True, Plan(storing_warps=0, apart=False, passes=1)),
        (64, 2047, True, Plan(storing_warps=0, apart=False, passes=1)),
        (64, 2048, True, Plan(storing_warps=2, copiers=1, apart=True, passes=1)),
        (64, 16384, True, Plan(storing_warps=2, copiers=1, apart=True, passes=1)),
        (128, 2047, False, Plan(storing_warps=2, apart=False, passes=1)),
        (128, 2048, False, Plan(storing_warps=2, apart=False, passes=1)),
        (128, 1, True, Plan(storing_warps=2, copiers=1, apart=False, passes=1)),
        (128, 2046, True, Plan(storing_warps=2, copiers=1, apart=False, passes=1)),
        (128, 2047, True, Plan(storing_warps=2, copiers=1, apart=False, passes=1)),
        (128, 2048, True, Plan(storing_warps=2, copiers=1, apart=True, passes=1)),
        (128, 2049, True, Plan(storing_warps=2, copiers=1, apart=True, passes=1)),
    ],
)
def test_plans_are_those_that_were_measured(head_dim, keys, is_causal, plan):
    assert tuning.fused(head_dim, keys, is_causal=is_causal) == plan
    dims = head_dim, head_dim
    table = tuning.configuration(
        *("hopper", *dims, keys), is_causal=is_causal, listed=False
    )
    assert table.backward_fused == plan and plan.parts is None


@pytest.mark.parametrize(
    ("head_dims", "keys", "is_causal", "listed", "tilings"),
    [
        ((64, 64), 256, False, False, ("64 x 64", 4, "64 x 128", "64 x 64")),
        ((64, 64), 257, False, False, ("64 x 128", 3, "64 x 128", "64 x 64")),
        ((64, 64), 256, False, True, ("64 x 128", 3, "64 x 128", "64 x 64")),
        ((64, 64), 4097, True, False, ("64 x 64", 4, "64 x 128", "64 x 64")),
        ((64, 64), 4098, True, False, ("64 x 128", 3, "64 x 128", "64 x 64")),
        ((128, 128), 1024, True, False, ("64 x 128", 2, "64 x 64", "64 x 64")),
        ((128, 128), 1535, False, False, ("64 x 128", 2, "64 x 64", "64 x 64")),
        ((128, 128), 1536, False, False, ("64 x 192", 2, "64 x 64", "64 x 64")),
        ((128, 128), 1536, False, True, ("64 x 128", 2, "64 x 64", "64 x 64")),
        # A block of K has no room for an out of other width.
        ((64, 128), 4096, False, False, ("64 x 128", 2, "64 x 64", "64 x 64")),
        ((128, 32), 16384, True, False, ("64 x 128", 2, "64 x 64", "64 x 64")),
        ((128, 128), 6143, True, False, ("64 x 128", 2, "64 x 64", "64 x 64")),
        ((128, 128), 6144, True, False, ("64 x 192", 2, "64 x 64", "64 x 64")),
        ((192, 128), 4096, True, False, ("64 x 128", 2, "64 x 64", "64 x 32")),
        ((32, 256), 4096, False, False, ("64 x 64", 2, "64 x 32", "64 x 64")),
    ],
)
def test_tilings_are_those_that_were_measured(
    head_dims, keys, is_causal, listed, tilings
):
    """Rows and columns, of the forward kernel its warpgroups."""
    table = tuning.configuration(
        *("hopper", *head_dims, keys), is_causal=is_causal, listed=listed
    )
    sizes = [f"{x.rows} x {x.columns}" for x in table[:3]]
    assert (sizes[0], table.forward.warpgroups, *sizes[1:]) == tilings


@pytest.mark.parametrize(
    "entry", tuning.ENTRIES, ids=lambda x: " ".join(map(str, x.place))
)
def test_every_entry_is_what_some_call_gets(entry):
    table = tuning.configuration(
        entry.architecture,
        entry.head_dim,
        entry.value_dim,
        (entry.keys_seen or 2**20) * (2 if entry.is_causal else 1),
        is_causal=bool(entry.is_causal),
        listed=False,
    )
    assert getattr(table, entry.kernel) == entry.tiling


@pytest.mark.parametrize(
    ("queries", "keys", "mask", "warpgroups"),
    [
        (1024, 1024, Mask(), 4),
        (512, 4096, Mask(), 4),
        (1000, 1024, Mask(), 4),
        (0, 1024, Mask(), 3),
        # A thirty-third of three stands by; none does; of four more would.
        *((2048, 2048, Mask(), 3), (768, 768, Mask(), 3), (320, 320, Mask(), 3)),
        # Under a causal mask, and with lists, strips have other lengths, or none.
        (8192, 8192, Mask(is_causal=True), 3),
        (1024, 1024, Mask(key_value_lengths=np.array([900])), 3),
    ],
)
def test_warpgroups_stand_by_where_that_costs_little(queries, keys, mask, warpgroups):
    """512 and 1024 queries fill tiles of four warpgroups, and leave a ninth of three
    without rows."""
    found = design.configuration_of("hopper", 64, 64, keys, mask, query_count=queries)
    assert found.forward.warpgroups == warpgroups


@pytest.mark.parametrize(
    ("listed", "window", "short_blocks"),
    [(True, None, False), (False, 512, False), (False, None, True)],
)
def test_nothing_is_made_ahead_where_blocks_are_kept_short_for_many_keys(
    listed, window, short_blocks
):
    table = tuning.configuration(
        *("hopper", 128, 128, 2**14),
        is_causal=False,
        listed=listed,
        window=window,
        short_blocks=short_blocks,
    )
    assert not getattr(table.forward, "ahead")


@pytest.mark.parametrize(
    ("architecture", "head_dims", "listed"),
    [
        ("ampere", (96, 96), False),
        ("ampere", (64, 64), True),
        ("hopper", (96, 96), False),
        ("hopper", (64, 128), False),
        ("hopper", (64, 64), True),
    ],
)
def test_there_is_no_plan_without_a_fused_kernel(architecture, head_dims, listed):
    table = tuning.configuration(
        *(architecture, *head_dims, 4096), is_causal=True, listed=listed
    )
    assert table.backward_fused is None


def test_the_table_has_the_fused_kernels_head_dims():
    assert set(tuning.FUSED_HEAD_DIMS) == set(QUERIES)


def _traced(length: int, is_causal: bool, **options) -> None:
    shape = jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16")
    with made_for("hopper"):
        jax.eval_shape(
            lambda *x: attention(
                *x, scale=0.125, mask=Mask(is_causal=is_causal), **options
            ),
            *(shape,) * 3,
        )


def test_the_tilings_of_a_call_are_logged_once_for_a_shape(caplog):
    _traced(4104, False)  # At the usual level nothing is said, nor held back later.
    assert not caplog.records
    with caplog.at_level(logging.INFO, "attn_jax.kernels"):
        _traced(4104, False, backward="two_kernels")
        _traced(4104, False, backward="two_kernels")
        _traced(2056, True, backward="fused")
    many, few = (record.getMessage() for record in caplog.records)
    table = tuning.FORWARD["hopper"][64]
    assert "[1, 4104, 2, 64]" in many and "full" in many and "hopper" in many
    assert f"forward {table}; " in many
    assert f"dq {tuning.BACKWARD_DQ['hopper'][64]}; " in many
    short = tuning.SHORT["forward", True]["hopper"][64, 64][1]
    assert "causal" in few and f"forward {short}; backward in one pass" in few
    assert few.endswith(str(Plan(copiers=1, apart=True)))


def test_given_tilings_are_those_of_the_call(caplog):
    table = tuning.configuration("hopper", 64, 64, 4104, is_causal=False, listed=False)
    given = table._replace(backward_dq=Tiling(64, 32, 1, 3))
    with caplog.at_level(logging.INFO, "attn_jax.kernels"):
        _traced(4104, True, tilings=given, backward="two_kernels")
    (record,) = caplog.records
    assert "dq 64 x 32, warpgroups 1, stages 3" in record.getMessage()


@pytest.mark.parametrize("plan", [None, Plan(storing_warps=0, apart=True)])
def test_the_fused_kernel_runs_with_the_plan_of_the_call(plan, monkeypatch):
    taken: list = []

    def fake(query, key, value, *_, plan, **options):
        taken.append(plan)
        lengths = options["query_count"], options["key_count"], options["key_count"]
        return [x[:, :n] for x, n in zip((query, key, value), lengths)]

    monkeypatch.setattr(hopper_backward_fused, "backward_fused", fake)
    table = tuning.configuration("hopper", 64, 64, 1000, is_causal=True, listed=False)
    given = None if plan is None else table._replace(backward_fused=plan)

    def gradients(x):
        def attend(x):
            mask = Mask(is_causal=True)
            options = {"mask": mask, "tilings": given, "backward": "fused"}
            return attention(x, x, x, scale=0.25, **options)[0]

        return jax.vjp(attend, x)[1](x)

    with made_for("hopper"):
        jax.eval_shape(gradients, jax.ShapeDtypeStruct((1, 1000, 2, 64), "bfloat16"))
    assert taken == [plan or Plan(storing_warps=0)]
