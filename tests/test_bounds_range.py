"""Bounds where numbers leave a range, and where errors are larger than exact values."""

import dataclasses

import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16, E4M3FN, FP16, FP32
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EAGER_BF16, FLASH2, RECIPES
from attn_jax.recipe_schema import Step
from tests.bounds_outcome import RESULTS, computed, errors, excess


def row(*numbers):
    return np.array(numbers, np.float32).reshape(1, 1, 1, -1)


def keys(*rows):
    return np.array(rows, np.float32).reshape(1, len(rows), 1, -1)


_ONE, _HUGE = row(1, 1, 1, 1), 2.0**64
_TWO_KEYS = keys([1, 0, 0, 0], [0, 0, 0, 0])
_VALUES = keys([1, 1, 1, 1], [0, 0, 0, 0])
_E4M3, _E4M3_SAT = Step(E4M3FN), Step(E4M3FN.saturating())
_HIDES_ONE = Mask(dense=np.array([True, False]).reshape(1, 1, 1, 2))
# (recipe, inputs, mask, what overflows, results for which no finite bound is true)
BEYOND_RANGE = {
    "products that overflow": (
        FLASH2,
        (row(_HUGE, _HUGE, 0, 0), keys([_HUGE, -_HUGE, 0, 0], [0] * 4)),
        (_VALUES, _ONE), Mask(), "carrier", RESULTS,
    ),
    "a sum that overflows": (
        FLASH2, (_ONE, _TWO_KEYS), (_VALUES * 0 + 1.75 * 2.0**127, _ONE), Mask(),
        "carrier", ("out", "dquery", "dkey"),
    ),
    "P times a scale that overflows": (
        dataclasses.replace(
            FLASH2, probability_scale=2.0**125, rescale_threshold=8.0, block_kv=1
        ),
        (_ONE, _TWO_KEYS[:, ::-1] * 8), (_VALUES, _ONE), Mask(), "carrier",
        RESULTS,
    ),
    "a divisor whose reciprocal underflows": (
        dataclasses.replace(FLASH2, probability_scale=2.0**126),
        (_ONE, _TWO_KEYS * 2.0**-20), (_VALUES, _ONE), Mask(), "carrier",
        ("out", "dquery", "dkey"),
    ),
    "high and low part saturate": (
        dataclasses.replace(FLASH2, delta_source="o_hi_lo", output=_E4M3_SAT),
        (_ONE, _TWO_KEYS), (_VALUES * 500 + 500, _ONE), Mask(), "output", (),
    ),
    "high and low part overflow": (
        dataclasses.replace(FLASH2, delta_source="o_hi_lo", output=_E4M3),
        (_ONE, _TWO_KEYS), (_VALUES * 500 + 500, _ONE), Mask(), "output",
        ("out", "dquery", "dkey"),
    ),
    "high part and low byte saturate": (
        dataclasses.replace(FLASH2, delta_source="o_hi_lo8", output=_E4M3_SAT),
        (_ONE, _TWO_KEYS), (_VALUES * 500 + 500, _ONE), Mask(), "output", (),
    ),
    "high part and low byte overflow": (
        dataclasses.replace(FLASH2, delta_source="o_hi_lo8", output=_E4M3),
        (_ONE, _TWO_KEYS), (_VALUES * 500 + 500, _ONE), Mask(), "output",
        ("out", "dquery", "dkey"),
    ),
    # P = 0 times an infinite dP.
    "dP of a hidden key overflows": (
        EAGER_BF16.with_inputs(FP16),
        (_ONE, _TWO_KEYS), (keys([1] * 4, [400] * 4), _ONE * 100), _HIDES_ONE,
        "dprobability", ("dquery", "dkey"),
    ),
}  # fmt: skip


def test_keys_too_large_for_a_centre_are_bounded_without_one():
    """K - c would overflow, so there is no c."""
    recipe = dataclasses.replace(FLASH2.with_inputs(FP16), dq_centre="keys")
    operands = row(1, 1, 1, 0), keys(*[[0, 0, 0, 6e4]] * 3, [0, 0, 0, -6e4])
    others = keys(*[[1, 1, 1, 1]] * 3, [0] * 4), _ONE
    limits = bound(recipe, *operands, *others)
    assert limits.overflows == ()
    assert np.isfinite(limits.dquery).all()


@pytest.mark.parametrize("name", BEYOND_RANGE)
def test_no_bound_is_finite_where_a_range_is_left(name):
    recipe, operands, others, mask, step, unbounded = BEYOND_RANGE[name]
    inputs = *operands, *others
    limits = bound(recipe, *inputs, mask=mask)
    assert step in limits.overflows
    results = computed(recipe, inputs, mask=mask)
    found = errors(results, reference.golden(*inputs, mask=mask))
    assert max(excess(found, limits).values()) <= 1
    for result in RESULTS:
        assert np.isinf(getattr(limits, result)).any() == (result in unbounded), result


@pytest.mark.parametrize("name", ["exact_fp32", "jax_nn"])
def test_what_underflows_in_fp64_may_be_computed_as_another_number(name):
    """FP32 may lose a logit of -2000 among products of 2^36: P = 1/2, not e^-2000."""
    operands = row(2**18, 1, 2**18), keys([0] * 3, [2**18, -4000, -(2**18)])
    limits = bound(RECIPES[name], *operands, keys([0] * 3, [1] * 3), row(1, 1, 1))
    assert (limits.out >= 0.5).all() and (limits.dvalue >= 0.5).all()


def test_a_rounded_product_of_errors_alone_has_their_size():
    """One key: dS is nothing but error, and dQ its product with the key, rounded.

    The product's size is that of the errors, which the centre then takes away.
    """
    inputs = make_inputs("normal", 0, Shape(32, 1, 1, 1, 1, 1))
    inputs = inputs._replace(key=abs(inputs.key) + 8)
    recipe = dataclasses.replace(
        ATTN_JAX,
        inputs=FP32,
        dot_accumulator=Step(BF16),
        dlogits=Step(FP32),
        output=Step(FP32),
    )
    found = errors(computed(recipe, inputs), reference.golden(*inputs))
    assert excess(found, bound(recipe, *inputs))["dquery"] <= 1
