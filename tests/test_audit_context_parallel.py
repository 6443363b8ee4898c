"""The audit of attention over sequences that are cut between devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel
from attn_jax.audit import algorithms, attribution, audit_attention, command
from attn_jax.audit.audit import Audit
from attn_jax.audit.course import carry_out
from attn_jax.audit.inputs import Shape
from attn_jax.audit.parts import Parts
from attn_jax.audit.plan import Group
from attn_jax.audit.target import Adapter, Target, TargetError, resolve
from attn_jax.context_parallel import merge
from attn_jax.formats import BF16
from attn_jax.recipe import ATTN_JAX, RECIPES
from tests.parallel_runs import stale_keys

pytestmark = pytest.mark.ci

W = 4
SHAPE = Shape(2, 128, 128, 4, 2, 64)
RAGGED = Shape(1, 100, 133, 4, 2, 64)
CANDIDATES = attribution.candidates(BF16, W)
PARTS = f"attn_jax (parts in 16 bits, ring of {W})"
# Those that a ring of ours may be taken for.
NAMES = (*algorithms.PLAIN, "attn_jax", PARTS)
NAMES += (f"ring_flash_attn (ring of {W})",)
NAMES += (f"attn_jax (keys gathered forward, parts in 16 bits, ring of {W})",)
SOME = {name: CANDIDATES[name] for name in NAMES}
POOR = "as accurate as its algorithm allows, which is poor here"
WORSE = "worse than its algorithm allows"


def adapter(**more) -> Adapter:
    return Adapter(shards=W, more={"layout": "zigzag", **more})


@pytest.mark.parametrize(
    "masks",
    [
        ["full", "causal"],
        # A ring's bias itself is in `test_context_parallel_whole`.
        pytest.param(["full", "bias"], marks=pytest.mark.thorough),
    ],
    ids="-".join,
)
def test_a_ring_is_trustworthy_and_refuses_what_it_cannot_cut(masks):
    """What it cannot cut is said, and is no fault. Of two: hops are compiled one by
    one, for each of some twenty programs."""
    report = audit_attention(
        "context_parallel:ring",
        adapter=dataclasses.replace(adapter(), shards=2),
        shapes=[SHAPE, RAGGED],
        families=["normal"],
        masks=masks,
        against=[ATTN_JAX],
    )
    assert report.verdict == "trustworthy" and report.exit_code == 0, report.findings
    cells = {(c.query_length, c.mask): c for c in report.cells}
    assert {c.status for c in report.cells if c.query_length == 128} == {"measured"}
    for mask in masks:
        if mask == "bias":
            assert "dbias" in cells[128, "bias"].errors
            continue
        refused = cells[100, mask]
        assert refused.status == "not taken"
        assert "over 2 shards needs a multiple of 4 positions" in refused.reason
    assert any("multiple of 4" in finding.says for finding in report.findings)
    assert report.settings["adapter"]["shards"] == 2
    assert report.probes and all(probe["passed"] for probe in report.probes)
    again = [row for row in report.invariances if row["name"] == "re-run"]
    assert again and all(row["bit_equal"] for row in again)
    # Of keys that are cut in parts and again between devices.
    assert {row["parts"] for row in report.merges} == {1, 2, 8}


def audited(target: Target, *masks: str, families=attribution.FAMILIES, recipes=SOME):
    groups = tuple(Group(SHAPE, mask, families) for mask in masks or ("full",))
    with Parts() as parts:
        return carry_out(Audit(target, groups, "bfloat16", recipes, True, ()), parts)


OF_PARTS = {"out of parts in 16 bits", "gradients of parts in 16 bits"}
WAYS = [
    ("ring", "fp32", "attn_jax"),
    ("ring", "16-bit", PARTS),
    pytest.param("all_gather", "fp32", "attn_jax", marks=pytest.mark.thorough),
    pytest.param("ulysses", "fp32", "attn_jax", marks=pytest.mark.thorough),
    pytest.param("ring+ulysses", "16-bit", PARTS, marks=pytest.mark.thorough),
    pytest.param("all_gather+ring", "16-bit", NAMES[-1], marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("strategy", "partials", "recipe"), WAYS)
def test_what_a_ring_rounds_between_devices_is_named(strategy, partials, recipe):
    options = adapter(partials=partials)
    if "ulysses" in strategy:  # There are two key heads to be dealt: a ring of 4.
        options = dataclasses.replace(options, shards=2 if strategy == "ulysses" else 8)
    found = audited(resolve(f"context_parallel:{strategy}", options))
    nearest, second = found.fits[:2]
    assert nearest.candidate == recipe and nearest.fits, found.fits
    assert second.distance > 2 * nearest.distance, found.fits
    poor = [f for f in found.findings if f.kind == POOR]
    assert len(poor) == len(found.findings)
    if partials == "fp32":
        assert not poor, poor
    else:
        cause = {f.cause for f in poor if "dquery" in f.tensors}
        # One part has all keys, and its out is rounded.
        gathered = strategy.startswith("all_gather")
        whole = {"delta from the rounded output"}
        assert cause == whole if gathered else cause <= OF_PARTS and cause, poor


# ------------------------------------------------------- bugs that rings of others had


def a_ring(query, key, value, *, scale, query_seq_lengths=None, **more):
    """Parts are merged by their LSE, as those of the rings that had the bugs."""
    more |= dict(shards=W, layout="contiguous", query_seq_lengths=query_seq_lengths)
    more |= dict(recipe=ATTN_JAX)
    return context_parallel.dot_product_attention(
        query, key, value, scale=scale, **more
    )


def lse_in_base_2(monkeypatch):
    """Pallas's examples return it so: parts are weighted as if it were natural."""
    merged = merge.merged

    def wrong(so_far, part, recipe):
        return merged(so_far, (part[0], part[1] * np.float32(np.log2(np.e))), recipe)

    monkeypatch.setattr(merge, "merged", wrong)


def no_guard(monkeypatch):
    """A sigmoid of -inf less -inf, where a query has not seen anything yet."""

    def wrong(so_far, part, recipe):
        (out, lse), (part_out, part_lse) = so_far, part
        share = merge.over_head_dim(jax.nn.sigmoid(part_lse - lse))
        lse = lse - jax.nn.log_sigmoid(lse - part_lse)
        return out - share * (out - part_out), lse

    monkeypatch.setattr(merge, "merged", wrong)


PLAIN = {name: CANDIDATES[name] for name in algorithms.PLAIN}


@pytest.fixture
def nothing_compiled():
    """JAX's caches know nothing of what a test plants, nor of what another planted."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("plant", "mask", "kinds", "tensors"),
    [
        (stale_keys, "full", {WORSE}, {"dquery", "dkey", "dvalue"}),
        pytest.param(
            *(lse_in_base_2, "full", {WORSE, "wrong wiring"}, {"out", "dquery"}),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *(no_guard, "lengths", {"not finite"}, {"out", "lse"}),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_bug_of_a_ring_is_found(
    plant, mask, kinds, tensors, monkeypatch, nothing_compiled
):
    plant(monkeypatch)
    target = Target("a ring", a_ring, Adapter(shards=W))
    found = audited(target, mask, families=("normal", "uniform"), recipes=PLAIN)
    accused = [f for f in found.findings if f.kind not in (POOR, "not taken")]
    assert accused and accused[0].kind in kinds, found.findings
    assert {tensor for f in accused for tensor in f.tensors} >= tensors
    if plant is stale_keys:
        assert not any("out" in f.tensors for f in accused), accused


# ----------------------------------------------------------------- one's own function


def own(query, key, value, *, scale, is_causal=False):
    """Keys gathered; no layout, no LSE, and nothing said about lengths."""
    mesh = Mesh(np.asarray(jax.devices()[:W]), ("seq",))
    rows = P(None, "seq")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    def local(query, key, value):
        key, value = (
            lax.all_gather(x, "seq", axis=1, tiled=True) for x in (key, value)
        )
        size = query.shape[1]
        first = lax.axis_index("seq") * size
        seen = jnp.arange(key.shape[1]) <= first + jnp.arange(size)[:, None]
        mask = seen[None, None] if is_causal else None
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale)

    return local(query, key, value)


@pytest.mark.parametrize(
    ("shards", "status"),
    [(W, "not taken"), pytest.param(1, "failed", marks=pytest.mark.thorough)],
)
def test_ones_own_function_has_its_devices_in_another_process(shards, status):
    """Though no variable of the environment says how many there are."""
    report = audit_attention(
        f"{__name__}:own",
        adapter=Adapter(shards=shards),
        shapes=[SHAPE, RAGGED],
        families=["normal"],
        masks=["causal"],
        gradients=False,
        against=[],
        processes=1,
    )
    cell, ragged = report.cells
    assert cell.status == "measured" and cell.errors["out"]["units"] < 1.7
    assert ragged.status == status, ragged
    assert (report.verdict == "trustworthy") == (shards == W), report.findings


# -------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("star", {}, "no strategy 'star'; there are ring, all_gather"),
        ("ring", dict(shards=16), "needs 16 devices, and this process has 8: split"),
        ("ring", dict(more={"recipe": "mine"}), "no recipe 'mine'; there are flash2"),
    ],
)
def test_what_cannot_be_audited_is_said_in_one_line(name, options, says):
    with pytest.raises(TargetError, match=says) as error:
        resolve(f"context_parallel:{name}", Adapter(**options))
    assert "\n" not in str(error.value)


def test_one_device_is_told_how_to_be_several(monkeypatch):
    assert resolve("context_parallel:ring").adapter.shards == 8
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with pytest.raises(TargetError, match="device_count=8, or .* simulated=true"):
        resolve("context_parallel:ring")
    given = Adapter(shards=16, more={"simulated": True})
    assert resolve("context_parallel:ring", given).adapter.more["shards"] == 16


def test_rings_are_of_the_targets_size():
    plain = attribution.candidates(BF16)
    more = CANDIDATES.keys() - plain.keys()
    assert more and all(f"ring of {W}" in name for name in more)
    assert {CANDIDATES[name].ring_size for name in more} == {W}
    found = command._against(["te_ring", "flash2"], 8)
    assert found and [recipe.ring_size for recipe in found] == [8, 1]
    assert command._against(["te_ring"], 1) == [RECIPES["te_ring"]]
    assert command._against(None, 8) is None
    with pytest.raises(TargetError, match="ring of 4, which does not divide"):
        audit_attention(
            "xla", shapes=[(1, 30, 30, 2, 1, 16)], against=[RECIPES["te_ring"]]
        )


def test_figures_of_a_ring_are_not_asked_of_what_it_does_not_divide():
    """Plain recipes are what such lengths are judged by."""
    recipe = CANDIDATES[PARTS]
    assert attribution.runs_on(recipe, SHAPE)
    assert not attribution.runs_on(recipe, RAGGED)
    assert attribution.runs_on(ATTN_JAX, RAGGED)
