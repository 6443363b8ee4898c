"""Each step and knob of a recipe alone, op by op, against the oracle of `test_oracle`.

An operation by itself leaves a compiler nothing to fuse, so these are not compiled as
for a user, except for those at the end, which are whole programs.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit.inputs import make_inputs
from attn_jax.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FP32,
    NumberFormat,
    Rounding,
    number_format,
)
from attn_jax.mask import Mask
from attn_jax.recipe import Recipe, Step
from tests import numpy_oracle
from tests.oracle_inputs import (
    EXACT,
    LN2,
    SHAPE,
    SMALL,
    exact_dlse,
    powers_of_two,
    random_dlse,
)
from tests.oracle_outcome import FIELDS, Outcome, all_in, check_exact_arithmetic

pytestmark = pytest.mark.ci

_BF16 = Step(BF16)


_COARSE = number_format(8, 2)  # few bits, for sums of small integers
_SHORT = number_format(3, 1)  # few exponents, for powers of two
_BIT = number_format(8, 1)  # 5 and 7 are not in it

EXACT_KNOBS = {
    "kv_outer": dict(loop_order="kv_outer"),
    "reverse": dict(kv_order="reverse", accumulator=Step(_COARSE)),
    "one_block": dict(block_kv=None, backward_block_kv=None, backward_block_q=None),
    "row_sum_of rounded": dict(row_sum_of="rounded", probability=Step(E5M2)),
    "rescale_threshold": dict(rescale_threshold=2.0, probability=Step(_SHORT)),
    "saturating": dict(
        probability=Step(E4M3FN.saturating()),
        probability_scale=2.0**7,
        rescale_threshold=4.0,
    ),
    "not saturating": dict(probability=Step(E4M3FN), probability_scale=2.0**10),
    "materialised": dict(
        block_kv=None,
        backward_block_kv=None,
        normalise="before_product",
        probability_from="softmax",
        delta_source="p_dp",
    ),
    "delta from o": dict(output=Step(_COARSE)),
    "delta from o_hi_lo": dict(delta_source="o_hi_lo", output=Step(_COARSE)),
    "delta from o_hi_lo8": dict(delta_source="o_hi_lo8", output=Step(_COARSE)),
    "delta from o_f32": dict(delta_source="o_f32", output=Step(_COARSE)),
    "delta from p_dp": dict(delta_source="p_dp", output=Step(_COARSE)),
    "centre mean": dict(dq_centre="mean", dlogits=Step(_COARSE), gradient=_BF16),
    "centre row": dict(dq_centre="row", dlogits=Step(_COARSE), gradient=_BF16),
    # Whole numbers up to 8 are in it, and c = -8 off all columns but one.
    "centre keys": dict(dq_centre="keys", inputs=_COARSE, gradient=_BF16),
    "centre keys, scaled": dict(
        dq_centre="keys", dq_dlogits=Step(number_format(4, 1)), gradient=_BF16
    ),
    "dlogits_scale": dict(dlogits=Step(E4M3FN), dlogits_scale=2.0**6),
    "dq_dlogits": dict(dq_dlogits=Step(number_format(4, 2)), dlogits=Step(_COARSE)),
    "dq_dlogits, subnormal": dict(
        dq_dlogits=Step(_SHORT),
        dlogits_scale=0.5,
        gradient_scale_at="logits",
        dq_centre="mean",
        gradient=_BF16,
    ),
    "carry": dict(ring_size=2, ring_merge="carry", gradient=_BF16),
    "group_gradient in a ring": dict(
        ring_size=2, ring_merge="carry", group_gradient=Step(_COARSE), gradient=_BF16
    ),
}


def test_exact_arithmetic_is_the_same_in_every_bit():
    check_exact_arithmetic(jit=False)


@pytest.mark.parametrize("name", EXACT_KNOBS)
def test_exact_arithmetic_under_every_knob(name):
    recipe = dataclasses.replace(EXACT, **EXACT_KNOBS[name])
    outcome = Outcome(recipe, powers_of_two(), exact_dlse(), scale=LN2, jit=False)
    outcome.check_bits(FIELDS)


class Single(NamedTuple):
    """A step alone in a narrow format, and what makes its rounding visible.

    What must be pinned to one value: `exact`, entirely, and all of the fields to the
    share `pinned`. It is below 1 where the step leaves a row sum that is no power of
    two, so that a division is not exact; the output in BF16 then pins most entries.
    """

    fmt: NumberFormat
    context: dict = {}
    exact: tuple[str, ...] = FIELDS
    pinned: float = 1.0
    mask: Mask = Mask()
    parts: int = 1
    scale: float = LN2


_INEXACT = dict(output=_BF16, gradient=_BF16)
_HALVES = np.kron(np.eye(2, dtype=bool), np.ones((8, 16), bool))[None, None]
# Every row sees the keys of one hop, so that merging is exact.
_ONE_HOP = Mask(dense=jnp.asarray(_HALVES))

SINGLE_STEPS = {
    "dot_accumulator": Single(_COARSE, dict(dot_chunk=8, **_INEXACT), ("lse",), 0.5),
    "rowsum_accumulator": Single(_COARSE, dict(dot_chunk=8, **_INEXACT), ("lse",), 0.5),
    "scaled_query": Single(_BIT, _INEXACT, ("lse",), 0.5),
    "logits": Single(_BIT, _INEXACT, ("lse",), 0.5),
    "shifted": Single(_BIT, _INEXACT, ("lse",), 0.5),
    # A row's maximum cancels out, except where P leaves the range of its format.
    "row_max": Single(
        _BIT,
        dict(probability=Step(number_format(2, 1)), probability_scale=0.5, block_kv=4),
    ),
    "row_sum": Single(_COARSE, _INEXACT, ("lse",), 0.5),
    "correction": Single(_SHORT, _INEXACT, ("lse",), 0.5),
    "exponentiated": Single(_SHORT, _INEXACT, ("lse",), 0.5),
    "probability": Single(_SHORT),
    "product": Single(_COARSE),
    "accumulator": Single(_COARSE),
    "output": Single(_COARSE),
    "lse": Single(
        _COARSE,
        dict(lse=Step(FP32), exponential="exp", **_INEXACT),
        ("lse",),
        0.5,
        scale=1.0,
    ),
    "softmax_probability": Single(_SHORT),
    "backward_probability": Single(_SHORT),
    "delta": Single(_COARSE),
    "dprobability": Single(_BIT),
    "dlogits": Single(_COARSE),
    "dq_dlogits": Single(_SHORT),
    "dq_accumulator": Single(_COARSE),
    "dk_accumulator": Single(_COARSE),
    "dv_accumulator": Single(_COARSE),
    "group_gradient": Single(_COARSE),
    "group_accumulator": Single(_COARSE, dict(group_gradient=Step(FP32))),
    "gradient": Single(_COARSE),
    "ring_partial": Single(
        _COARSE, dict(ring_size=2), ("out", "lse"), 0.0, _ONE_HOP, 2
    ),
    "ring_accumulator": Single(
        _COARSE, dict(ring_size=2), ("out", "lse"), 0.0, _ONE_HOP, 2
    ),
    "ring_gradient_partial": Single(_COARSE, dict(ring_size=2, ring_merge="carry")),
    "ring_gradient_accumulator": Single(_COARSE, dict(ring_size=2, ring_merge="carry")),
}


def test_every_step_has_its_single_case():
    steps = {
        f.name for f in dataclasses.fields(Recipe) if f.type in (Step, Step | None)
    }
    assert steps == set(SINGLE_STEPS)


# Op by op, a chain of chunks compiles a program for every shape in it.
_CHAINED = "dot_accumulator", "rowsum_accumulator"
_TRUNCATED = "row_max", "probability", "accumulator", "output", "dlogits", "gradient"


@pytest.mark.parametrize(
    "name, rounding",
    [(name, Rounding.NEAREST_EVEN) for name in SINGLE_STEPS if name not in _CHAINED]
    # Toward zero all at once by default, in test_oracle_knobs.
    + [
        pytest.param(name, Rounding.TOWARD_ZERO, marks=pytest.mark.thorough)
        for name in _TRUNCATED
    ],
)
def test_each_step_rounds_where_the_recipe_says(name, rounding):
    check_single_step(name, rounding, jit=False)


def check_single_step(name: str, rounding: Rounding, jit: bool) -> None:
    single = SINGLE_STEPS[name]
    base = dataclasses.replace(EXACT, **single.context)
    recipe = dataclasses.replace(base, **{name: Step(single.fmt, rounding)})
    inputs, dlse = powers_of_two(single.parts), exact_dlse()
    options = dict(mask=single.mask, scale=single.scale)
    outcome = Outcome(recipe, inputs, dlse, **options, jit=jit)
    outcome.check_bits(single.exact)
    outcome.check()
    assert min(outcome.pinned(field) for field in FIELDS) >= single.pinned
    wide = numpy_oracle.attention(*inputs, dlse, recipe=base, **options)
    unchanged = [all_in(outcome.got[field], getattr(wide, field)) for field in FIELDS]
    assert not all(unchanged)


def test_stochastic_steps_take_a_neighbour():
    narrow = Step(BF16, Rounding.STOCHASTIC)
    recipe = dataclasses.replace(
        SMALL, probability=narrow, output=narrow, dlogits=narrow, gradient=narrow
    )
    inputs = make_inputs("normal", 0, SHAPE)
    key = jax.random.key(0)
    outcome = Outcome(recipe, inputs, random_dlse(SHAPE), key=key, jit=False)
    outcome.check()
    nearest = dataclasses.replace(recipe, probability=_BF16, output=_BF16)
    arrays = (np.asarray(x, np.float32) for x in inputs)
    other = numpy_oracle.attention(*arrays, random_dlse(SHAPE), recipe=nearest)
    assert not all_in(outcome.got["out"], other.out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["dot_accumulator", "row_max", "accumulator", "dlogits", "gradient"]
)
def test_single_steps_on_a_gpu(name):
    check_single_step(name, Rounding.NEAREST_EVEN, jit=True)


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize("name", _CHAINED)
def test_each_chain_of_sums_rounds_where_the_recipe_says(name):
    check_single_step(name, Rounding.NEAREST_EVEN, jit=True)
