"""V as FP16 numbers, for BF16 inputs whose P is to have three bits more in P V.

Both operands of a product have one format. BF16 numbers are FP16 ones if a power of two
brings them into its range, one for each key head (`hopper_range.KeyNumbers`): exactly,
down to 2^-31 of the head's largest that is finite (rows that nobody sees may hold
anything).
"""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float16, Float32, Int32

from attn_jax.formats import FP16
from attn_jax.kernels.hopper_range import power_of_two

# Of `Recipe.probability_scale`: P below 2^-14 of a row's largest would lose bits.
LOG2_P_SCALE = FP16.max_exponent
P_SCALE = 2.0**LOG2_P_SCALE


def half_values(
    value: BFloat16[Array, "B S K D"], exponent: Int32[Array, "B K"]
) -> tuple[Float16[Array, "B S K D"], Float32[Array, "B K"]]:
    """(V times 2^exponent of its head, what undoes it)."""
    factor = power_of_two(exponent)[:, None, :, None]
    half = (value.astype(jnp.float32) * factor).astype(jnp.float16)
    return half, power_of_two(-exponent)
