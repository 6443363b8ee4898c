"""dQ as a sum of integers: what it computes, what it costs, and what it cannot hold."""

import dataclasses

import jax
import numpy as np
import pytest

from attn_jax import emulator
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16, E4M3FN, FP16, FP32, number_format
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX_HOPPER, EXACT_FP32, EXACT_FP64, Recipe, Step

pytestmark = pytest.mark.ci

NUMBERS = dataclasses.replace(
    EXACT_FP32,
    name="numbers",
    inputs=BF16,
    backward_block_kv=32,
    dq_centre="keys",
    dq_dlogits=Step(FP16),
)
INTEGERS = dataclasses.replace(NUMBERS, name="integers", dq_sum="integers")
SHAPE = Shape(1, 48, 96, 2, 1, 16)


def dquery(recipe: Recipe, inputs: Inputs, **options) -> np.ndarray:
    def gradient(query, key, value, dout):
        def attend(query):
            return emulator.attention(query, key, value, recipe=recipe, **options)[0]

        return jax.vjp(attend, query)[1](dout)[0]

    return np.asarray(jax.jit(gradient)(*inputs))


def unit(inputs: Inputs, scale: float) -> float:
    """What one integer is worth in dQ, scale / (w r), of a single key head."""
    _, key, value, dout = (np.asarray(x, np.float64) for x in inputs)
    columns = np.abs(value[0, :, 0]).max(0)
    bound = 2 * np.linalg.norm(dout, axis=-1).max() * np.linalg.norm(columns)
    exponents = (np.frexp(x)[1] for x in (bound, 2 * np.abs(key).max()))
    return scale * 2.0 ** sum(e - FP16.max_exponent for e in exponents)


def in_fp32(inputs: Inputs) -> Inputs:
    """BF16 numbers, so that gradients are FP32's."""
    return Inputs(*(x.astype(np.float32) for x in inputs))


def test_dq_is_a_whole_number_of_units():
    """And at most 2^24 of them here, which FP32 holds."""
    inputs = in_fp32(make_inputs("normal", 0, SHAPE))
    found = dquery(INTEGERS, inputs, scale=0.25) / unit(inputs, 0.25)
    assert 2**12 < np.abs(found).max() < 2**24
    np.testing.assert_array_equal(found, np.rint(found))
    plain = dquery(NUMBERS, inputs, scale=0.25) / unit(inputs, 0.25)
    assert (plain != np.rint(plain)).mean() > 0.1


@pytest.mark.parametrize("mask", [Mask(), Mask(is_causal=True)], ids=["full", "causal"])
def test_each_block_of_keys_is_off_by_the_twelfth_of_a_squared_unit(mask):
    """In FP64, where nothing else rounds: a block of keys that a row sees adds an error
    that is uniform in half a unit to both sides. The square of a sum of up to four of
    these has a standard deviation of 0.89 to 1.31 times its mean, the mean of 6144 of
    at most 1.7 %, three of which are allowed, rounded down."""
    shape = Shape(1, 128, 128, 3, 1, 16)
    changes = {name: getattr(NUMBERS, name) for name in ("dq_centre", "dq_dlogits")}
    changes |= {"inputs": BF16, "backward_block_kv": 32}
    wide = dataclasses.replace(EXACT_FP64, **changes)
    inputs = Inputs(*(x.astype(np.float64) for x in make_inputs("normal", 0, shape)))
    with jax.enable_x64(True):
        found, exact = (
            dquery(dataclasses.replace(wide, dq_sum=kind), inputs, mask=mask, scale=1.0)
            for kind in ("integers", "numbers")
        )
    error = (found - exact) / unit(inputs, 1.0)
    blocks = 4.0 if not mask.is_causal else np.arange(128)[:, None, None] // 32 + 1.0
    assert abs((error**2 / blocks * 12).mean() - 1) < 0.05
    assert np.abs(error).max() <= 2  # Four halves.


def test_the_cost_is_small_beside_that_of_dlogits_in_16_bits():
    """A unit is 2^-30 of what dQ might be, dS's in FP16 2^-29 at the least."""
    inputs = make_inputs("uniform", 0, Shape(1, 128, 256, 2, 1, 64))
    inputs = in_fp32(inputs)
    recipe = dataclasses.replace(
        ATTN_JAX_HOPPER, backward_block_kv=128, gradient=Step(FP32)
    )
    numbers = dquery(recipe, inputs)
    integers = dquery(dataclasses.replace(recipe, dq_sum="integers"), inputs)
    rounding = np.asarray(jax.lax.reduce_precision(numbers, 8, 7)) - numbers
    assert (
        0 < np.square(integers - numbers).mean() < 0.02**2 * np.square(rounding).mean()
    )


@pytest.mark.parametrize(
    ("name", "at", "value", "lost"),
    [
        # delta of a row; the bound is that of the others.
        ("dout", (0, 5, 0, 3), np.nan, "row"),
        ("dout", (0, 5, 0, 3), np.inf, "row"),
        ("value", (0, 7, 0, 2), np.inf, "head"),
        ("value", (0, 7, 0, 2), np.nan, "head"),
        ("query", (0, 5, 0, 3), np.nan, "row"),
        ("key", (0, 7, 0, 2), np.nan, "head"),
        # Beyond what a power of two brings into range.
        ("value", (0, 7, 0, 2), 2.0**120, "head"),
        ("key", (0, 7, 0, 2), 2.0**120, "head"),
    ],
)
def test_what_integers_cannot_hold_is_nan(name, at, value, lost):
    """As it is where dQ is a sum of numbers, or more of it."""
    inputs = in_fp32(make_inputs("normal", 0, Shape(1, 24, 36, 2, 2, 16)))
    changed = getattr(inputs, name).copy()
    changed[at] = value
    inputs = inputs._replace(**{name: changed})
    found = np.isnan(dquery(INTEGERS, inputs))
    plain = ~np.isfinite(dquery(NUMBERS, inputs))
    assert found[plain].all() and plain.any()
    if value == 2.0**120:
        limits = bound(INTEGERS, *inputs)
        assert (name == "key") == ("dq_sum" in limits.overflows)
        assert np.isinf(limits.dquery[0, :, 0]).all()
        assert np.isfinite(limits.dquery[0, :, 1]).all()
    expected = np.zeros_like(found)
    expected[(0, slice(None) if lost == "head" else at[1], 0)] = True
    np.testing.assert_array_equal(found, expected)


def test_a_soft_cap_leaves_a_sum_of_numbers():
    inputs = in_fp32(make_inputs("normal", 0, SHAPE))
    found = dquery(INTEGERS, inputs, soft_cap=5.0)
    np.testing.assert_array_equal(found, dquery(NUMBERS, inputs, soft_cap=5.0))


def test_x64_mode_changes_no_bit():
    inputs = in_fp32(make_inputs("normal", 0, SHAPE))
    want = dquery(INTEGERS, inputs)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(dquery(INTEGERS, inputs), want)


@pytest.mark.parametrize(
    "changes",
    [
        dict(dq_centre="mean"),
        dict(dq_dlogits=None),
        dict(dq_dlogits=Step(BF16)),
        dict(dq_dlogits=Step(number_format(6, 5))),  # Its largest number is 2^32.
    ],
    ids=str,
)
def test_numbers_in_no_units_get_one_line(changes):
    with pytest.raises(ValueError, match="^dq_sum='integers' needs .*dq_centre='keys'"):
        dataclasses.replace(INTEGERS, **changes)
    dataclasses.replace(INTEGERS, dq_dlogits=Step(E4M3FN))


def test_another_name_gets_one_line(as_users_call_it):
    with pytest.raises(ValueError, match="^dq_sum must be one of numbers, integers"):
        dataclasses.replace(INTEGERS, dq_sum="floats")


def test_integers_that_wrap_round_are_no_surprise_to_the_bound():
    """By an LSE of 258, which is 258.8, P sums to 2.3 and dS' to more than 2^15."""
    key = np.full((1, 2048, 1, 16), -(1 - 2.0**-8), np.float32)
    key[:, :16] *= -1
    key[:, 128:144] *= -1
    query = np.full((1, 1, 1, 16), 16, np.float32)
    query[..., 0] = 16.375
    value, dlse = np.zeros_like(key), np.full((1, 1, 1), 0.99, np.float32)
    recipe = dataclasses.replace(INTEGERS, lse=Step(BF16), backward_block_kv=128)
    inputs = query, key, value, np.zeros_like(query)
    limits = bound(recipe, *inputs, dlse, scale=1.0)
    assert np.isinf(limits.dquery).all() and limits.overflows
    finer = bound(dataclasses.replace(recipe, lse=Step(FP32)), *inputs, dlse, scale=1.0)
    assert np.isfinite(finer.dquery).all()
