"""One centre for all keys of a head: what dQ is made of is K - c, for dq_centre 'keys'.

Kernels and emulator both take c from here, since K - c is rounded.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def centre_of(
    key: Float[Array, "B S K H"], mantissa_bits: int
) -> Float32[Array, "B K H"]:
    """c of `Recipe`'s definition: the mean of the keys in few digits, or 0, by columns.

    `mantissa_bits` are those that the inputs' format stores, 7 for BF16. One reading of
    the keys gives both sums: the place that c is rounded to is the last one of a key of
    four times the column's root mean square, rather than of its largest key. So most
    key - c are exact. Sums are FP32; what overflows them has no centre.
    """
    wide = key.astype(jnp.float32)
    mean, square = wide.mean(axis=1), jnp.square(wide).mean(axis=1)
    last = jnp.frexp(jnp.sqrt(square))[1] + 2 - (mantissa_bits + 1)
    place = jnp.ldexp(jnp.float32(1), jnp.clip(last, -100, 100))
    # mean^2 > variance / 16
    return jnp.where(17 * mean * mean > square, jnp.rint(mean / place) * place, 0.0)
