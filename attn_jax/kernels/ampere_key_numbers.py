"""Numbers of K and V that scale Ampere's one-pass backward kernel, by XLA.

As `hopper_key_numbers` defines them: one centre for all keys of a head, and powers of
two that bring K' and dS into the range of FP16. V stays what it is.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from attn_jax.centre import centre_of
from attn_jax.formats import BF16, FP16
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT


def key_numbers(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K D"]
) -> KeyNumbers:
    """Of BF16 keys and values. `key_factor` is NaN where a key is infinite or NaN:
    integers, which dQ is a sum of, would not show it."""
    centre = centre_of(key, BF16)
    wide = key.astype(jnp.float32)
    # Maxima on a CPU may pass over NaN.
    finite = jnp.isfinite(wide).all((1, 3))
    most = jnp.abs(wide).max((1, 3))
    # Of twice the largest key, which may overflow.
    exponent = FP16.max_exponent - (jnp.frexp(most)[1] + 1)
    exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    factor = jnp.ldexp(jnp.ones_like(most), jnp.where(most > 0, exponent, 0))
    factor = jnp.where(finite, factor, jnp.nan)
    columns = jnp.abs(value.astype(jnp.float32)).max(1)
    # Squares stay in range.
    _, exponent = jnp.frexp(columns.max(-1, keepdims=True))
    squares = jnp.square(jnp.ldexp(columns, -exponent)).sum(-1, keepdims=True)
    norm = jnp.ldexp(jnp.sqrt(squares), exponent)
    return KeyNumbers(
        centre=centre,
        key_factor=jnp.broadcast_to(factor[..., None], centre.shape),
        value_norm=jnp.broadcast_to(norm, columns.shape),
        unscale=jnp.ones_like(columns),
    )
