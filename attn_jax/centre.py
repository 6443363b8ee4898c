"""One centre for all keys of a head: what dQ is made of is K - c, for dq_centre 'keys'.

Kernels and emulator both take c from here, since K - c is rounded.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from attn_jax.formats import FP32, NumberFormat
from attn_jax.pairwise import pairwise_mean


def centre_of(
    key: Float[Array, "B S K H"], inputs: NumberFormat
) -> Float32[Array, "B K H"]:
    """c of `Recipe`'s definition: the mean of the keys in few digits, or 0, by columns.

    `inputs` is their format. One reading of
    the keys gives both sums: the place that c is rounded to is the last one of a key of
    four times the column's root mean square, rather than of its largest key. So most
    key - c are exact. Sums are FP32; what overflows them has no centre, nor has a
    column with a key beyond a quarter of the format's range: K - c stays in it.
    """
    wide = key.astype(jnp.float32)
    return centre_from(
        pairwise_mean(wide, 1),
        pairwise_mean(jnp.square(wide), 1),
        jnp.abs(wide).max(axis=1),
        inputs,
    )


def counts_largest(inputs: NumberFormat) -> bool:
    """Whether `centre_from` reads `largest`: else squares overflow before K - c."""
    return inputs.max_finite < math.sqrt(FP32.max_finite)


def centre_from(
    mean: Float32[Array, "*columns"],
    square: Float32[Array, "*columns"],
    largest: Float32[Array, "*columns"],
    inputs: NumberFormat,
) -> Float32[Array, "*columns"]:
    """c from the keys' mean, mean square and largest absolute value, by columns."""
    # The root's exponent is half of the square's, rounded up. By bits, which kernels
    # can have; a subnormal number's are brought where they can be read.
    small = square < 2.0**-60
    bits = lax.bitcast_convert_type(
        jnp.where(small, square * 2.0**64, square), jnp.int32
    )
    exponent = (bits >> 23) - jnp.where(small, 126 + 64, 126)
    last = ((exponent + 1) >> 1) + 2 - (inputs.mantissa_bits + 1)
    last = jnp.minimum(jnp.maximum(last, -100), 100)
    place = lax.bitcast_convert_type((last + 127) << 23, jnp.float32)
    # mean^2 > variance / 16
    stands_out = 17 * mean * mean > square
    if counts_largest(inputs):
        stands_out &= 4 * largest <= inputs.max_finite
    return jnp.where(stands_out, jnp.rint(mean / place) * place, 0.0)
