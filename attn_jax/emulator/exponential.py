"""Powers of two in plain arithmetic: accurate ones, and kernels' polynomials."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# Degree -> coefficients of f, f^2, ... in 1 + c_1 f + c_2 f^2 + ..., the polynomial
# that comes nearest to 2^f on [0, 1] in relative error among those that give 1 at 0
# (so that a row's maximum keeps its weight of 1). By Remez exchange in extended
# precision; the errors below are the levels that it ends at, before the carrier rounds
# anything. FlashAttention-4's own cubic, 8.8e-5, is a neighbour of ours.
POLYNOMIALS: dict[int, tuple[float, ...]] = {
    2: (0.6659609408960434, 0.3299324044232816),
    3: (0.6951167864112018, 0.2276449912116234, 0.07706704198819904),
    4: (
        0.6930448449030171,
        0.24128020475132403,
        0.05224247422380401,
        0.01342668427156435,
    ),
    5: (
        0.6931513118046005,
        0.24016445015509574,
        0.05579991310372405,
        0.009017030322455693,
        0.0018671300698722226,
    ),
}
POLYNOMIAL_ERRORS = {2: 2.053e-3, 3: 8.559e-5, 4: 2.896e-6, 5: 8.227e-8}

# Carrier -> (exponent bits' position, bias, type of an integer as wide).
_LAYOUT = {
    np.dtype("float32"): (23, 127, np.int32),
    np.dtype("float64"): (52, 1023, np.int64),
}


def exp2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """2^x within 2 ulp of a float32 or float64 carrier, on any backend.

    2^x = 2^n exp((x - n) ln 2) with n the whole number nearest to x: x - n is exact
    and at most 1/2, where `exp` errs by about one ulp and the product with ln 2 adds
    less than another; 2^n is built from its bits. XLA's own exp2 on a CPU is off by up
    to 32 ulp in float32 and 46 in float64. Below the smallest normal number the result
    is what the carrier's arithmetic makes of it (XLA on a CPU: 0); -inf gives 0.
    """
    x = clipped(x)
    power = jnp.exp((x - jnp.round(x)) * math.log(2))
    # 1.4 (2^f - 1) is within 0.1 of f for all |f| <= 1/2.
    return times_power_of_two(power, _whole_part(x, 1.4 * (power - 1.0)))


def exp2_polynomial(x: Float[Array, "..."], degree: int) -> Float[Array, "..."]:
    """2^x = 2^n p(x - n), with n = floor(x) and p of `POLYNOMIALS`, by Horner's rule.

    Whether one step c + f p rounds once or twice is the compiler's choice.
    """
    x = clipped(x)
    fraction = x - jnp.floor(x)
    p = jnp.zeros_like(x)
    for coefficient in POLYNOMIALS[degree][::-1]:
        p = (p + coefficient) * fraction
    # p is still without its 1, and within 0.1 of f for all f in [0, 1].
    return times_power_of_two(p + 1.0, _whole_part(x, p))


def _whole_part(x, about):
    """n = x - f by what 2^f came out as, which tells f within 0.1 of `about`.

    Not by x alone, a second time. XLA makes x anew in each kernel that reads it, with
    an FMA in one and without in another: 2^f was of x below n + 1/2 and 2^n of x above,
    and a weight was doubled.
    """
    return jnp.round(x - about)


def clipped(x):
    """Where 2^x is 0 or infinite anyway, so that x - n stays finite for infinite x."""
    bias = _LAYOUT[x.dtype][1]
    return jnp.clip(x, 2.0 - 2 * bias, 2.0 * bias)


def times_power_of_two(x, whole):
    """x 2^whole in two exact factors, since one may lie outside the carrier's range:
    |whole| is at most about twice its largest exponent."""
    position, bias, integer = _LAYOUT[x.dtype]
    n = whole.astype(integer)
    half = n >> 1
    for part in (half, n - half):
        x = x * lax.bitcast_convert_type((part + bias) << position, x.dtype)
    return x
