"""Numbers of a key head that Hopper's kernels need before they start: the centre of the
keys, and the powers of two that bring V, K' and dS into FP16's range.

Those of K and V (`KeyNumbers`) are found in the forward pass and kept for the backward
pass: `attn_jax.recipe_schema` defines c, w (here 2^key_exponent), v and r
(2^row_exponent).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from attn_jax.centre import centre_from
from attn_jax.formats import FP16, FP32, NumberFormat
from attn_jax.kernels.hopper_column_sums import column_sums
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT

# Of V, which no recipe scales: a power of two and its inverse are normal numbers of
# FP32, and BF16's largest still fits.
_MOST_VALUE_EXPONENT = 120


class KeyNumbers(NamedTuple):
    """Of a key head, from one reading of K and V.

    Attributes:
      centre: c, that comes off the keys.
      key_exponent: K' is multiplied by 2 to this power.
      value_norm: v, of which a bound of dS is made.
      value_exponent: V is multiplied by 2 to this power.
    """

    centre: Float32[Array, "B K H"]
    key_exponent: Int32[Array, "B K"]
    value_norm: Float32[Array, "B K"]
    value_exponent: Int32[Array, "B K"]


class Range(NamedTuple):
    """What the one-pass kernel takes: c, and what K' and dS are scaled by."""

    centre: Float32[Array, "B K H"]
    key_exponent: Int32[Array, "B K"]
    row_exponent: Int32[Array, "B K"]


def key_numbers(
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    key_count: int,
    inputs: NumberFormat,
) -> KeyNumbers:
    """From K and V, padded with zeros from `key_count` on; `inputs` is their format."""
    if key.shape == value.shape:
        of_key, of_value = column_sums(key, value)
    else:
        (of_key,), (of_value,) = column_sums(key), column_sums(value)
    largest = of_key.largest.max(axis=1)
    centre = centre_from(
        of_key.sums.sum(axis=1) / key_count,
        of_key.squares.sum(axis=1) / key_count,
        largest,
        inputs,
    )
    value_largest = of_value.largest.max(axis=1)
    return KeyNumbers(
        centre,
        # |K - c| is at most twice the largest key. Doubled, that might overflow.
        _into_range(largest.max(axis=2), doublings=1),
        jnp.sqrt(jnp.square(value_largest).sum(axis=2)),
        _into_range(value_largest.max(axis=2), most=_MOST_VALUE_EXPONENT),
    )


def range_of(
    numbers: KeyNumbers | None,
    dout_squares: Float32[Array, "B N T"] | None,
    dlse: Float32[Array, "B N T"] | None,
    key: Float[Array, "B S K H"],
    *,
    centred: bool = True,
    scaled: bool = True,
) -> Range:
    """`dlse`: None for 0. Not `scaled`, no power of two: so for FP16 inputs, since P,
    which has dS's, too, is rounded to their format. c is 0 if not `centred`. What is
    not made use of may be None."""
    batch, _, heads, head_dim = key.shape
    zero = jnp.zeros((batch, heads), jnp.int32)
    centre = jnp.zeros((batch, heads, head_dim), jnp.float32)
    if centred:
        assert numbers is not None
        centre = numbers.centre
    if not scaled:
        return Range(centre, zero, zero)
    assert numbers is not None and dout_squares is not None

    def of_group(x):  # [B, N, T] -> [B, K]
        return x.reshape(batch, heads, -1).max(axis=2)

    # Where squares overflow so will dS, for all to see, and not vanish.
    squares = jnp.minimum(of_group(dout_squares), FP32.max_finite)
    bound = 2 * jnp.sqrt(squares) * numbers.value_norm
    if dlse is not None:
        bound += of_group(jnp.abs(dlse))
    return Range(centre, numbers.key_exponent, _into_range(bound))


def _into_range(
    bound: Float32[Array, "B K"], doublings: int = 0, most: int = MOST_HEAD_EXPONENT
) -> Int32[Array, "B K"]:
    """The exponent of the power of two that brings bound * 2^doublings below 2^15."""
    exponent = FP16.max_exponent - (jnp.frexp(bound)[1] + doublings)
    exponent = jnp.clip(exponent, -most, most)
    return jnp.where(bound > 0, exponent, 0)


def power_of_two(exponent: Int32[Array, "B K"]) -> Float32[Array, "B K"]:
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent)
