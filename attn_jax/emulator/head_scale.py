"""Powers of two that bring dS into the range of `dq_dlogits`, one for a key head."""

import jax.numpy as jnp
from jax import Array

from attn_jax.emulator.tiles import Operands
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT


def head_scale(x: Operands, dout, dlse, on_dlogits: float) -> Array | None:
    """r [B, K, 1, 1, 1] of the recipe's definition; None where it is 1.

    `dout` is rounded like an input, `dlse` is 0 where LSE is -inf, and `on_dlogits` is
    the definition's f. `x` holds all devices' queries and keys.
    """
    step = x.recipe.dq_dlogits
    if step is None or not x.recipe.scales_heads:
        return None
    of_values = _norm(jnp.abs(x.value).max(2, keepdims=True))[:, :, None]
    bound = abs(on_dlogits) * (2 * _norm(dout) * of_values + jnp.abs(dlse))
    finite = jnp.isfinite(dout).all(-1, keepdims=True) & jnp.isfinite(dlse)
    bound = jnp.where(finite, bound, 0.0)
    largest = bound.max((2, 3), keepdims=True)
    # Infinity has no exponent, and NaN, of V, no bound.
    most = jnp.finfo(bound.dtype).max
    bound = jnp.where(largest <= most, largest, most)
    exponent = step.format.max_exponent - jnp.frexp(bound)[1]
    exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    scale = jnp.where(bound > 0, jnp.ldexp(jnp.ones_like(bound), exponent), 1.0)
    if x.recipe.dq_sum == "numbers":
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
