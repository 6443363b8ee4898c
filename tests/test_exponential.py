"""Powers of two in plain arithmetic, where XLA makes their argument more than once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.emulator import exponential
from attn_jax.emulator.exponential import POLYNOMIAL_ERRORS

FUNCTIONS = {"exp2": (exponential.exp2, 2 * 2.0**-23)} | {
    f"polynomial of degree {degree}": (
        functools.partial(exponential.exp2_polynomial, degree=degree),
        # The polynomial's, and of Horner's rule.
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_is_within_2_ulp_over_the_whole_range(dtype):
    exp2 = jax.jit(exponential.exp2)
    with jax.enable_x64(dtype == np.float64):
        least = np.log2(np.finfo(dtype).tiny.astype(np.float64)) + 1
        x = np.random.default_rng(0).uniform(least, -least, 20_000).astype(dtype)
        exact = np.exp2(x.astype(np.longdouble))
        found = np.asarray(exp2(x))
        ulp = np.spacing(exact.astype(dtype)).astype(np.longdouble)
        assert found.dtype == dtype
        assert np.max(np.abs(found - exact) / ulp) <= 2
        whole = np.arange(int(least), 1 - int(least)).astype(dtype)
        np.testing.assert_array_equal(exp2(whole), np.exp2(whole))
        ends = np.array([-np.inf, 5 * least, np.inf, -5 * least, np.nan], dtype)
        np.testing.assert_array_equal(exp2(ends), [0, 0, np.inf, np.inf, np.nan])
