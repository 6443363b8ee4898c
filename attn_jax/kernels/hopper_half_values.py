"""V as FP16 numbers, for BF16 inputs whose P is to have three bits more in P V.

Both operands of a product have one format. BF16 numbers are FP16 ones if a power of two
brings them into its range, one for each key head: exactly, down to 2^-31 of the head's
largest that is finite (rows that nobody sees may hold anything).
"""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float16, Float32

from attn_jax.formats import FP16

# Of `Recipe.probability_scale`: P below 2^-14 of a row's largest would lose bits.
LOG2_P_SCALE = FP16.max_exponent
P_SCALE = 2.0**LOG2_P_SCALE
# A power of two and its inverse are normal numbers of FP32; BF16's largest still fits.
_MOST_EXPONENT = 120


def half_values(
    value: BFloat16[Array, "B S K D"],
) -> tuple[Float16[Array, "B S K D"], Float32[Array, "B K"]]:
    """(V times a power of two for each head, what undoes it)."""
    wide = value.astype(jnp.float32)
    size = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0)
    largest = size.max(axis=(1, 3), initial=0.0)
    exponent = FP16.max_exponent - jnp.frexp(largest)[1]
    exponent = jnp.clip(exponent, -_MOST_EXPONENT, _MOST_EXPONENT)
    exponent = jnp.where(largest > 0, exponent, 0)
    one = jnp.ones(largest.shape, jnp.float32)
    factor = jnp.ldexp(one, exponent)[:, None, :, None]
    return (wide * factor).astype(jnp.float16), jnp.ldexp(one, -exponent)
