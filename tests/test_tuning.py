"""The table of tilings, and that a call says which of them it took."""

import json
import logging
from pathlib import Path

import jax
import pytest

from attn_jax.kernels import tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask

TABLE = Path(tuning.__file__).with_name("tilings.json").read_text()


def test_the_table_is_written_as_it_is_read():
    assert tuning.write(tuning.read(TABLE)) == TABLE


def _changed(change) -> str:
    lines = json.loads(TABLE)
    change(lines)
    return json.dumps(lines)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: lines.pop(0), "no entry for .*'ampere', 'forward', 64"),
        (lambda lines: lines.append(lines[0]), "two entries"),
        (lambda lines: lines[2]["tiling"].pop("rows"), "entry 3 .*rows"),
        (lambda lines: lines[0]["tiling"].update(columns=0), "entry 1 .*columns"),
        (lambda lines: lines[1].pop("keys_seen"), "entry 2 .*keys_seen"),
        (lambda lines: lines.append(lines[1] | {"head_dim": 72}), "no such kernel"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(change, complaint):
    with pytest.raises(ValueError, match=complaint) as refused:
        tuning.read(_changed(change))
    assert len(str(refused.value).splitlines()) == 1


def test_what_is_no_json_is_refused():
    with pytest.raises(ValueError):
        tuning.read("{")


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
        _traced(2056, True)
    many, few = (record.getMessage() for record in caplog.records)
    table = tuning.FORWARD["hopper"][64]
    assert "[1, 4104, 2, 64]" in many and "full" in many and "hopper" in many
    assert f"forward {table}; " in many
    assert f"dq {tuning.BACKWARD_DQ['hopper'][64]}; " in many
    short = tuning.SHORT_FORWARD["hopper"][64, 64][1]
    assert "causal" in few and f"forward {short}; backward in one pass" in few


def test_given_tilings_are_those_of_the_call(caplog):
    table = tuning.configuration("hopper", 64, 64, 4104, is_causal=False, listed=False)
    given = table._replace(backward_dq=tuning.Tiling(64, 32, 1, 3))
    with caplog.at_level(logging.INFO, "attn_jax.kernels"):
        _traced(4104, True, tilings=given, backward="two_kernels")
    (record,) = caplog.records
    assert "dq 64 x 32, warpgroups 1, stages 3" in record.getMessage()
