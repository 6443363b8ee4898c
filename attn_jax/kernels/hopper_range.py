"""What Hopper's backward kernels scale dS by, and the centre that comes off the keys.

From the numbers of K and V, and from dO."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from attn_jax.formats import FP16, FP32
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT


class Range(NamedTuple):
    """Of a key head: c, w and log2 r of `Recipe`'s definition."""

    centre: Float32[Array, "B K H"]
    key_factor: Float32[Array, "B K H"]  # w in each column
    row_exponent: Int32[Array, "B K"]

    def undone(self) -> tuple[Float32[Array, "B K"], Float32[Array, "B K"]]:
        """What dQ's sums are to be multiplied by, 1 / (w r), as two factors, which may
        lie beyond FP32's range together. The smaller one comes first: the larger one
        might take large sums there, too."""
        factors = 1 / self.key_factor[..., 0], power_of_two(-self.row_exponent)
        return jnp.minimum(*factors), jnp.maximum(*factors)


def range_of(
    numbers: KeyNumbers | None,
    dout_squares: Float32[Array, "B N T"] | None,
    dlse: Float32[Array, "B N T"] | None,
    key: Float[Array, "B S K H"],
    *,
    dout_largest: Float32[Array, "B K"] | None = None,
    centred: bool = True,
    scaled: bool = True,
) -> Range:
    """`dlse`: None for 0. Not `scaled`, no power of two: so for FP16 inputs, since P,
    which has dS's, too, is rounded to their format. c is 0 if not `centred`. What is
    not made use of may be None. `dout_largest`: of a key head the largest |dO|, or NaN;
    it bounds the norms whose squares leave FP32's range."""
    batch, _, heads, head_dim = key.shape
    centre = jnp.zeros((batch, heads, head_dim), jnp.float32)
    if centred:
        assert numbers is not None
        centre = numbers.centre
    if not scaled:
        zero = jnp.zeros((batch, heads), jnp.int32)
        return Range(centre, jnp.ones_like(centre), zero)
    assert numbers is not None and dout_squares is not None

    def of_group(x):  # [B, N, T] -> [B, K]
        return x.reshape(batch, heads, -1).max(axis=2)

    # Where squares overflow so will dS, for all to see, and not vanish. Nor is it to
    # vanish where they do: unscaled it would be less than any FP16 number.
    squares = of_group(dout_squares)
    norm = jnp.sqrt(jnp.clip(squares, FP32.min_normal, FP32.max_finite))
    if dout_largest is not None:
        width = numbers.value_norm.shape[-1]
        # Of those that vanished the sum is at most 2^-26 of this.
        in_range = (squares > width * 2.0**-100) & jnp.isfinite(squares)
        most = width**0.5 * dout_largest
        # No number has no bound: the smallest r, by which Ampere's kernel knows it.
        most = jnp.where(jnp.isfinite(most), most, FP32.max_finite / 2)
        norm = jnp.where(in_range, norm, most)
    bound = 2 * norm * numbers.value_norm[..., 0]
    if dlse is not None:
        bound += of_group(jnp.abs(dlse))
    # Infinity has no exponent.
    bound = jnp.minimum(bound, FP32.max_finite)
    exponent = FP16.max_exponent - jnp.frexp(bound)[1]
    exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    return Range(centre, numbers.key_factor, jnp.where(bound > 0, exponent, 0))


def power_of_two(exponent: Int32[Array, "B K"]) -> Float32[Array, "B K"]:
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent)
