"""A head dim of V's own, in all that runs without a GPU.

The kernels' tests are in tests/test_kernels_head_dims.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import dot_product_attention, emulator, reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, FLASH2
from tests.bounds_outcome import computed, errors, excess

CAUSAL = Mask(is_causal=True)


def inputs(H: int, D: int, dtype=jnp.bfloat16):
    """query, key, value, dout; two query heads to a key/value head."""
    rng = np.random.default_rng(0)
    shapes = (1, 40, 4, H), (1, 56, 2, H), (1, 56, 2, D), (1, 40, 4, D)
    return tuple(jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)


@pytest.mark.parametrize("absolute", [False, True])
def test_golden_is_that_of_columns_of_a_wider_value(absolute):
    query, key, value, dout = inputs(16, 16, jnp.float32)
    narrow = value[..., :5], dout.at[..., 5:].set(0)
    dlse = np.ones((1, 4, 40))
    more = {"mask": CAUSAL, "absolute": absolute}
    want = reference.golden(query, key, value, narrow[1], dlse, **more)
    got = reference.golden(query, key, narrow[0], narrow[1][..., :5], dlse, **more)
    np.testing.assert_allclose(got.out, want.out[..., :5], rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.dvalue, want.dvalue[..., :5], rtol=0, atol=1e-12)
    for name in ("lse", "dquery", "dkey"):
        got_one, want_one = getattr(got, name), getattr(want, name)
        np.testing.assert_allclose(got_one, want_one, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("implementation", "H", "D"),
    [("reference", 48, 32), ("xla", 48, 32), ("xla", 32, 48)],
)
def test_public_function(implementation, H, D):
    query, key, value, dout = inputs(H, D)
    attend = functools.partial(
        dot_product_attention, is_causal=True, implementation=implementation
    )
    out, backward = jax.vjp(attend, query, key, value)
    golden = reference.golden(query, key, value, dout, mask=CAUSAL)
    wanted = golden.out, golden.dquery, golden.dkey, golden.dvalue
    for got, want in zip((out, *backward(dout)), wanted, strict=True):
        assert got.shape == want.shape
        # As in tests/test_api.py.
        limit = 4.0 if implementation == "xla" else 1.7
        assert unit_error(got, want, BF16) <= limit


RECIPES = {
    "one centre a row": dataclasses.replace(ATTN_JAX, dq_centre="row"),
    "ring": dataclasses.replace(ATTN_JAX, ring_size=4),
    "delta from P dP": dataclasses.replace(FLASH2, delta_source="p_dp"),
}


@pytest.mark.parametrize(
    ("name", "D"), [("one centre a row", 11), ("ring", 5), ("delta from P dP", 5)]
)
def test_emulator_and_bounds(name, D):
    recipe = RECIPES[name]
    query, key, value, dout = make_inputs("normal", 0, Shape(1, 8, 12, 2, 1, 11))
    given = Inputs(query[..., :8], key[..., :8], value[..., :D], dout[..., :D])
    results = computed(recipe, given, None, CAUSAL, jit=True)
    golden = reference.golden(*given, mask=CAUSAL)
    limits = bound(recipe, *given, mask=CAUSAL)
    assert limits.out.shape == golden.out.shape
    assert limits.dvalue is not None and limits.dvalue.shape == golden.dvalue.shape
    assert max(excess(errors(results, golden), limits).values()) <= 1


def test_rest_of_value_must_fit_key():
    query, key, value, _ = inputs(16, 8)
    twice = jnp.concatenate([value, value])
    for wrong in (value[:, :-1], value[:, :, :1], twice, value[0], value[..., :0]):
        with pytest.raises(ValueError, match="value") as error:
            reference.check_arguments(query, key, wrong)
        assert "\n" not in str(error.value)
    assert emulator.attention(query, key, value, recipe=FLASH2)[0].shape[-1] == 8
