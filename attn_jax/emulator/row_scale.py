"""Powers of two that bring rows of dS into the range of `dq_dlogits`."""

import jax.numpy as jnp
from jax import Array

from attn_jax.emulator.tiles import Operands
from attn_jax.recipe_schema import MOST_ROW_EXPONENT


def row_scale(x: Operands, dout, dlse, on_dlogits: float) -> Array | None:
    """r [B, K, G, T, 1] of the recipe's definition; None where it is 1.

    `dout` is rounded like an input, `on_dlogits` is the definition's f.
    """
    step = x.recipe.dq_dlogits
    if step is None or not x.recipe.scales_rows:
        return None
    largest = _norm(x.value).max(2)[:, :, None, None]
    bound = abs(on_dlogits) * (2 * _norm(dout) * largest + jnp.abs(dlse))
    exponent = step.format.max_exponent - jnp.frexp(bound)[1]
    exponent = jnp.clip(exponent, -MOST_ROW_EXPONENT, MOST_ROW_EXPONENT)
    return jnp.where(bound > 0, jnp.ldexp(jnp.ones_like(bound), exponent), 1.0)


def _norm(x):
    """Over the last axis, which stays as one of size 1."""
    return jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
