"""Powers of two that bring dS into the range of `dq_dlogits`, one for a key head."""

import jax.numpy as jnp
from jax import Array

from attn_jax.emulator.tiles import Operands
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT, Recipe


def head_scale(x: Operands, dout, dlse, on_dlogits: float) -> Array | None:
    """r [B, K, 1, 1, 1] of the recipe's definition; None where it is 1.

    `dout` is rounded like an input, `dlse` is 0 where LSE is -inf, and `on_dlogits` is
    the definition's f. `x` holds all devices' queries and keys.
    """
    if not x.recipe.scales_heads:
        return None
    of_values = _norm(jnp.abs(x.value).max(2, keepdims=True))[:, :, None]
    bound = 2 * _norm(dout) * of_values + jnp.abs(dlse)
    return _into_range(x.recipe, abs(on_dlogits) * bound, dout, dlse)


def head_scale_of_rows(
    recipe: Recipe, dout, excess, value_largest, on_dlogits: float
) -> Array:
    """The same of some whole rows, [B, K, G, T, D or 1], and all values, of which
    [B, K, D] is the largest of each column, for |dS| <= |f| (|dO| v + |excess|)."""
    of_values = _norm(value_largest)[:, :, None, None]
    bound = _norm(dout) * of_values + jnp.abs(excess)
    return _into_range(recipe, abs(on_dlogits) * bound, dout, excess)


def _into_range(recipe: Recipe, bound, dout, of_rows) -> Array:
    """r for the largest of the rows' bounds, but for rows that are not finite."""
    step = recipe.dq_dlogits
    assert step is not None
    finite = jnp.isfinite(dout).all(-1, keepdims=True) & jnp.isfinite(of_rows)
    bound = jnp.where(finite, bound, 0.0)
    largest = bound.max((2, 3), keepdims=True)
    # Infinity has no exponent, and NaN, of V, no bound.
    most = jnp.finfo(bound.dtype).max
    bound = jnp.where(largest <= most, largest, most)
    exponent = step.format.max_exponent - jnp.frexp(bound)[1]
    exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    scale = jnp.where(bound > 0, jnp.ldexp(jnp.ones_like(bound), exponent), 1.0)
    if recipe.dq_sum == "numbers":
        return scale
    # What 32 bits cannot hold would end as some number.
    held = jnp.isfinite(largest) & (exponent > -MOST_HEAD_EXPONENT)
    return jnp.where(held, scale, jnp.nan)


def _norm(x):
    """Over the last axis, which stays as one of size 1."""
    # Squares stay in range.
    _, exponent = jnp.frexp(jnp.abs(x).max(-1, keepdims=True))
    squares = jnp.square(jnp.ldexp(x, -exponent)).sum(-1, keepdims=True)
    return jnp.ldexp(jnp.sqrt(squares), exponent)
