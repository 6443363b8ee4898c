"""The model's layers with gradients of their own, against JAX's of plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.layers import gated_sum, gelu, modulated_norm, rms_norm

# Of the largest result: sums of at most 30 terms, some of which cancel, of products of
# at most a dozen factors, each rounded once. A wrong formula is off by shares of it.
ROUNDING = 100 * np.finfo(np.float64).eps


def plain_modulated(x, scale, shift):
    normal = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return normal * (1 + scale) + shift


def plain_rms(x, scale):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def plain_gelu(x):
    inner = jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)
    return x / 2 * (1 + jnp.tanh(inner))


CASES = {
    "modulated_norm": (
        *(lambda *x: modulated_norm(*x, x[0].dtype), plain_modulated),
        ((3, 5, 8), (3, 1, 8), (3, 1, 8)),
    ),
    "gated_sum": (
        *(gated_sum, lambda x, gate, update: x + gate * update),
        ((3, 5, 8), (3, 1, 8), (3, 5, 8)),
    ),
    "rms_norm": (lambda *x: rms_norm(*x, x[0].dtype), plain_rms, ((3, 5, 2, 8), (8,))),
    "gelu": (gelu, plain_gelu, ((3, 5, 8),)),
}


def arrays(shapes, dtype):
    rng = np.random.default_rng(0)
    # Off zero: a mean that is left out shows.
    return [jnp.asarray(rng.normal(0.5, 2, shape), dtype) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_values_and_gradients_are_those_of_the_formula(name, transform):
    layer, plain, shapes = CASES[name]
    with jax.enable_x64(True):
        inputs = arrays(shapes, jnp.float64)
        out, pullback = jax.vjp(transform(layer), *inputs)
        expected, plain_pullback = jax.vjp(plain, *inputs)
        (gradient,) = arrays([out.shape], jnp.float64)
        found = [out, *pullback(gradient)]
        wanted = [expected, *plain_pullback(gradient)]
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == jnp.float64
            most = float(jnp.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDING * most)


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_inputs_and_numbers_of_rows_is_kept(name):
    layer, _, shapes = CASES[name]
    inputs = arrays(shapes, jnp.float32)
    _, pullback = jax.vjp(layer, *inputs)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size > 1]
    wide = [leaf for leaf in kept if leaf.shape == inputs[0].shape]
    of_backward = inputs[2 if name == "gated_sum" else 0]
    assert len(wide) == 1 and wide[0] is of_backward
    # Mean and root of a row, and the learned or given scale or gate.
    rows = inputs[0].size // inputs[0].shape[-1]
    beside = 2 * rows + sum(x.size for x in inputs[1:2])
    assert sum(leaf.size for leaf in kept if leaf is not wide[0]) <= beside


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_have_the_format_of_what_they_are_of(dtype):
    (x, scale) = arrays(((3, 5, 2, 8), (8,)), dtype)
    out, pullback = jax.vjp(lambda *y: rms_norm(*y, jnp.float32), x, scale)
    assert out.dtype == jnp.float32
    assert [g.dtype for g in pullback(out)] == [dtype, dtype]
    out, pullback = jax.vjp(gelu, x)
    assert out.dtype == dtype and pullback(out)[0].dtype == dtype
    (x, scale, update) = arrays(((3, 5, 8), (3, 1, 8), (3, 5, 8)), jnp.float32)
    normal, pullback = jax.vjp(lambda *y: modulated_norm(*y, dtype), x, scale, scale)
    wide = modulated_norm(x, scale, scale, x.dtype)
    assert normal.dtype == dtype and (normal == wide.astype(dtype)).all()
    assert {g.dtype for g in pullback(normal)} == {jnp.dtype(jnp.float32)}
    out, pullback = jax.vjp(gated_sum, x, scale, update.astype(dtype))
    assert out.dtype == jnp.float32
    assert [g.dtype for g in pullback(out)] == [jnp.float32, jnp.float32, dtype]
