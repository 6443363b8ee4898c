"""Numbers of a key head that Hopper's backward kernels need before they start: the
centre of the keys (one pass alone), and the powers of two that bring dS and K' into
FP16's range."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from attn_jax.centre import centre_from
from attn_jax.formats import FP16, FP32, NumberFormat
from attn_jax.kernels.hopper_backward_rows import Sums
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT


class Range(NamedTuple):
    """Of a key head: c, log2 w and log2 r of `Recipe`'s definition.

    Attributes:
      centre: c, that comes off the keys.
      key_exponent: K' is multiplied by 2 to this power.
      row_exponent: dS is.
    """

    centre: Float32[Array, "B K H"]
    key_exponent: Int32[Array, "B K"]
    row_exponent: Int32[Array, "B K"]

    def undone(self) -> tuple[Float32[Array, "B K"], Float32[Array, "B K"]]:
        """What dQ's sums are to be multiplied by: 2 to the power of -(key_exponent +
        row_exponent) as two factors, which may lie beyond FP32's range together. The
        smaller one comes first: the larger one might take large sums there, too."""
        exponents = self.key_exponent, self.row_exponent
        first, second = jnp.maximum(*exponents), jnp.minimum(*exponents)
        return power_of_two(-first), power_of_two(-second)


def range_of(
    sums: Sums,
    dlse: Float32[Array, "B N T"] | None,
    key_count: int,
    inputs: NumberFormat,
    *,
    centred: bool = True,
    scaled: bool = True,
) -> Range:
    """From one reading of the inputs; `dlse`: None for 0. For FP16 inputs nothing is
    scaled: P, which has dS's power of two, too, is rounded to their format. c is 0 if
    not `centred`."""
    batch, _, key_heads, _ = sums.key_sums.shape
    largest = sums.key_largest.max(axis=1)
    centre = centre_from(
        sums.key_sums.sum(axis=1) / key_count,
        sums.key_squares.sum(axis=1) / key_count,
        largest,
        inputs,
    )
    if not centred:
        centre = jnp.zeros_like(centre)
    if inputs == FP16 or not scaled:
        zero = jnp.zeros((batch, key_heads), jnp.int32)
        return Range(centre, zero, zero)

    def of_group(x):  # [B, N, T] -> [B, K]
        return x.reshape(batch, key_heads, -1).max(axis=2)

    # Where squares overflow so will dS, for all to see, and not vanish. Nor is it to
    # vanish where they do: unscaled it would be less than any FP16 number.
    squares = of_group(sums.dout_squares)
    squares = jnp.clip(squares, FP32.min_normal, FP32.max_finite)
    value = jnp.sqrt(jnp.square(sums.value_largest.max(axis=1)).sum(axis=2))
    bound = 2 * jnp.sqrt(squares) * value
    if dlse is not None:
        bound += of_group(jnp.abs(dlse))
    # |K - c| is at most twice the largest key. Doubled, that might overflow.
    keys = _into_range(largest.max(axis=2), doublings=int(centred))
    return Range(centre, keys, _into_range(bound))


def sums_of(
    dout: Float[Array, "B T N D"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
) -> Sums:
    """What `range_of` reads of `backward_rows`' sums, by XLA, with all keys as one
    chunk: for a head dim of V's own. `excess` is 0."""
    wide_dout, wide_key, wide_value = (
        x.astype(jnp.float32) for x in (dout, key, value)
    )
    dout_squares = jnp.square(wide_dout).sum(axis=3).swapaxes(1, 2)
    return Sums(
        excess=jnp.zeros_like(dout_squares),
        dout_squares=dout_squares,
        key_sums=wide_key.sum(axis=1, keepdims=True),
        key_squares=jnp.square(wide_key).sum(axis=1, keepdims=True),
        key_largest=jnp.abs(wide_key).max(axis=1, keepdims=True),
        value_largest=jnp.abs(wide_value).max(axis=1, keepdims=True),
    )


def no_range(key: Float[Array, "B S K H"]) -> Range:
    """No centre, and nothing scaled."""
    batch, _, heads, head_dim = key.shape
    zero = jnp.zeros((batch, heads), jnp.int32)
    return Range(jnp.zeros((batch, heads, head_dim), jnp.float32), zero, zero)


def _into_range(
    bound: Float32[Array, "B K"], doublings: int = 0
) -> Int32[Array, "B K"]:
    """The exponent of the power of two that brings bound * 2^doublings below 2^15."""
    exponent = FP16.max_exponent - (jnp.frexp(bound)[1] + doublings)
    exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    return jnp.where(bound > 0, exponent, 0)


def power_of_two(exponent: Int32[Array, "B K"]) -> Float32[Array, "B K"]:
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent)
