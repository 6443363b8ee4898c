"""Powers of two of the emulator: accurate on any backend, or as wrong as a kernel's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.emulator import exponential
from attn_jax.emulator.exponential import (
    POLYNOMIAL_ERRORS,
    POLYNOMIALS,
    exp2,
    exp2_polynomial,
)


def arguments(dtype, low, high):
    rng = np.random.default_rng(0)
    wide, near = rng.uniform(low, high, 200_000), rng.uniform(-1, 1, 200_000)
    return np.concatenate([wide, near, np.arange(low, high + 1)]).astype(dtype)


def ulps(got, x):
    """Distance from 2^x in ulps of the result; NumPy's own is exact to a fraction."""
    want = np.exp2(x.astype(np.longdouble))
    return np.abs(np.asarray(got) - want) / np.spacing(want.astype(x.dtype))


@pytest.mark.parametrize("compiled", [False, True])
def test_exp2_within_two_ulps(compiled):
    x = arguments(np.float32, -126, 127)
    got = (jax.jit(exp2) if compiled else exp2)(jnp.asarray(x))
    assert ulps(got, x).max() <= 2
    whole = np.arange(-126, 128, dtype=np.float32)
    np.testing.assert_array_equal(
        exp2(jnp.asarray(whole)), np.ldexp(1.0, whole.astype(int))
    )


def test_exp2_within_two_ulps_in_float64(x64):
    x = arguments(np.float64, -1022, 1023)
    assert ulps(jax.jit(exp2)(jnp.asarray(x)), x).max() <= 2


@pytest.mark.parametrize("function", [exp2, lambda x: exp2_polynomial(x, 3)])
def test_ends_of_the_range(function):
    x = jnp.array([-jnp.inf, -1e30, -400.0, 128.0, 1e30, jnp.inf], jnp.float32)
    np.testing.assert_array_equal(function(x), [0, 0, 0, np.inf, np.inf, np.inf])
    assert jnp.isnan(function(jnp.array(jnp.nan, jnp.float32)))
    # Just below 2^128, where 2^n alone would overflow for n the nearest whole number.
    assert jnp.isfinite(function(jnp.array(127.9, jnp.float32)))


@pytest.mark.parametrize("degree", POLYNOMIALS)
def test_polynomials_err_by_what_their_table_says(degree, x64):
    x = np.linspace(-3, 3, 60_001)
    error = np.asarray(exp2_polynomial(jnp.asarray(x), degree)) / np.exp2(x) - 1
    # The table gives four digits; the grid misses the peaks by less.
    np.testing.assert_allclose(
        np.abs(error).max(), POLYNOMIAL_ERRORS[degree], rtol=2e-4
    )
    # The level is reached with either sign, as only the best polynomial does.
    np.testing.assert_allclose(error.max(), -error.min(), rtol=2e-4)
    whole = jnp.arange(-5.0, 6.0)
    np.testing.assert_array_equal(exp2_polynomial(whole, degree), 2.0**whole)


def test_a_float32_polynomial_adds_its_own_roundings_only():
    x = arguments(np.float32, -126, 127)
    for degree, bound in POLYNOMIAL_ERRORS.items():
        got = np.asarray(exp2_polynomial(jnp.asarray(x), degree))
        error = np.abs(got / np.exp2(x.astype(np.float64)) - 1).max()
        # Horner: p(f) in [1, 2) is a sum of f times less than 1; the last addition
        # rounds by 2^-24 and what came before by half of it and less, summing to it.
        assert bound < error * 1.001 < bound * 1.002 + 2 * 2.0**-24


FUNCTIONS = {"exp2": (exp2, 2 * 2.0**-23)} | {
    f"polynomial of degree {degree}": (
        functools.partial(exp2_polynomial, degree=degree),
        # The polynomial's own, and a sum and a product in each step of Horner's rule,
        # of numbers below 2 where the result is at least 1.
        error + 2 * (degree + 1) * 2.0**-24,
    )
    for degree, error in POLYNOMIAL_ERRORS.items()
}


@pytest.mark.parametrize("to", [-np.inf, np.inf])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_weight_doubles_where_its_argument_is_made_twice(name, to, monkeypatch):
    """A weight of a ring in a loop was doubled, x = -0.5000003: 2^n was made in another
    kernel than 2^(x - n), and there x was on the other side of -0.5."""
    function, error = FUNCTIONS[name]
    whole_part = exponential._whole_part

    def of_a_neighbour(x, about):
        return whole_part(jnp.nextafter(x, x.dtype.type(to)), about)

    monkeypatch.setattr(exponential, "_whole_part", of_a_neighbour)
    near = -np.arange(1, 32, dtype=np.float32)[:, None] / 2
    steps = np.arange(-8, 9, dtype=np.int32)
    x = jnp.asarray((near.view(np.int32) + steps).view(np.float32))
    exact = np.exp2(np.asarray(x, np.float64))
    assert np.abs(function(x) / exact - 1).max() <= error < 0.01
