"""What backward kernels scale dS by, and the centre that comes off the keys.

From the numbers of K and V, and from dO; for Hopper and Ampere."""

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
    dout_norm: Float32[Array, "B N T"] | None,
    dlse: Float32[Array, "B N T"] | None,
    key: Float[Array, "B S K H"],
    *,
    centred: bool = True,
    scaled: bool = True,
) -> Range:
    """`dout_norm`: of rows of dO, as `row_sums` has it. `dlse`: None for 0. Not
    `scaled`, no power of two: so for FP16 inputs, since P, which has dS's, too, is
    rounded to their format. c is 0 if not `centred`. What is not made use of may be
    None.

    r brings |dS| below 2^15. FP16 goes up to nearly twice that, which is room for all
    that is rounded on the way to the bound. A row whose dO or dLSE is infinite or NaN
    has no say: it has no finite dS, whatever r is."""
    batch, _, heads, head_dim = key.shape
    centre = jnp.zeros((batch, heads, head_dim), jnp.float32)
    if centred:
        assert numbers is not None
        centre = numbers.centre
    if not scaled:
        zero = jnp.zeros((batch, heads), jnp.int32)
        return Range(centre, jnp.ones_like(centre), zero)
    assert numbers is not None and dout_norm is not None

    def of_group(x):  # [B, N, T] -> [B, K]
        x = jnp.where(jnp.isfinite(x), x, 0)
        return x.reshape(batch, heads, -1).max(axis=2)

    norm, of_value = of_group(dout_norm), numbers.value_norm[..., 0]
    bound, none = 2 * (norm * of_value), (norm == 0) | (of_value == 0)
    # FP32's largest number stands for larger norms, too, and V may be infinite or NaN:
    # r is the smallest then.
    known = (none | (norm < FP32.max_finite)) & (bound <= FP32.max_finite)
    # Unscaled, what is below FP32's range would be less than any FP16 number.
    bound = jnp.where(none, bound, jnp.maximum(bound, FP32.min_normal))
    bound = jnp.where(known, bound, FP32.max_finite)
    if dlse is not None:
        bound += of_group(jnp.abs(dlse))
    # Infinity has no exponent.
    bound = jnp.minimum(bound, FP32.max_finite)
    exponent = FP16.max_exponent - jnp.frexp(bound)[1]
    exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    return Range(centre, numbers.key_factor, jnp.where(bound > 0, exponent, 0))


def power_of_two(exponent: Int32[Array, "B K"]) -> Float32[Array, "B K"]:
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent)
