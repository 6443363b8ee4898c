"""P and V of the forward product as FP16 numbers, for BF16 inputs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.formats import FP16
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.hopper_half_values import P_SCALE, half_values
from attn_jax.kernels.internals import interpreted
from attn_jax.recipe import ATTN_JAX, Step
from tests.child_process import in_child_process

RECIPE = dataclasses.replace(
    ATTN_JAX, probability=Step(FP16), probability_scale=P_SCALE
)
TIME_LIMIT = 120  # seconds


@pytest.mark.parametrize("power", [-126, -60, 0, 100, 126])
def test_values_become_fp16_numbers_without_loss(power):
    """Down to 2^-31 of a head's largest, wherever that lies; heads for themselves."""
    rng = np.random.default_rng(0)
    least = max(-29, -125 - power)
    exponents = rng.integers(least, 2, (2, 50, 3, 64))
    value = np.ldexp(1 + rng.integers(0, 128, exponents.shape) / 128, exponents - 1)
    value = np.ldexp(value, power) * [[1], [0], [-1]]
    # The power of two that `hopper_range.key_numbers` finds, of each head.
    exponent = 15 - np.frexp(abs(value).max(axis=(1, 3)))[1]
    exponent = exponent.clip(-120, 120)
    value[0, 0, 0, 0] = np.nan  # such as rows that nobody sees may have
    half, unscale = half_values(jnp.asarray(value, jnp.bfloat16), jnp.asarray(exponent))
    assert half.dtype == jnp.float16
    again = np.asarray(half, np.float64) * np.asarray(unscale)[:, None, :, None]
    np.testing.assert_array_equal(again, value)


def _outs_of_multiples(factors: list[float]) -> list[np.ndarray]:
    shape = Shape(1, 70, 100, 2, 1, 64)
    query, key, value, _ = make_inputs("normal", 0, shape)

    @jax.jit
    def attend(value):
        return attention(query, key, value, scale=0.125, recipe=RECIPE)[0]

    with made_for("hopper"), interpreted():
        multiples = [value * value.dtype.type(factor) for factor in factors]
        return [np.asarray(attend(x), np.float64) for x in multiples]


def test_a_power_of_two_of_values_is_one_of_out():
    """To the bit, as far as BF16 reaches: P has nothing to do with the size of V."""
    factors = [1.0, 2.0**120, 2.0**-90]
    out, large, small = in_child_process(
        _outs_of_multiples, factors, seconds=TIME_LIMIT
    )
    np.testing.assert_array_equal(out * 2.0**120, large)
    np.testing.assert_array_equal(out * 2.0**-90, small)
