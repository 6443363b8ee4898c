"""Number formats and one explicit rounding, `round_to`, for values carried wider.

A cast to a narrow type and back is not a rounding: under `jit` a compiler may drop
the pair, and a cast from float64 may round twice on its way. `round_to` works on the
bits of the float32 or float64 carrier instead, which no compiler may change.

What a carrier can hold: `round_to` itself is right down to the carrier's own smallest
subnormal, but XLA on the CPU flushes float32 subnormals (below 2**-126) to zero in any
arithmetic before or after it. BF16 and TF32 share float32's exponent range, so their
subnormals survive only in a float64 carrier; those of FP16, E4M3 and E5M2 are normal
float32 numbers and always survive.
"""

import dataclasses
import enum
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


class Rounding(enum.Enum):
    """How a value between two neighbours of a format is rounded."""

    NEAREST_EVEN = "nearest_even"
    TOWARD_ZERO = "toward_zero"
    STOCHASTIC = "stochastic"


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format.

    `mantissa_bits` counts the stored bits, without the leading one. A finite value that
    rounds beyond `max_finite`, and infinity, become: `max_finite` with their sign if
    `saturates`, else infinity if `has_inf`, else NaN. Rounding toward zero never
    leaves the finite range. Without `has_subnormals`, a result below `min_normal`
    becomes a zero of its sign.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_finite: float
    has_inf: bool = True
    has_subnormals: bool = True
    saturates: bool = False

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return math.frexp(self.max_finite)[1] - 1

    @property
    def min_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def min_positive(self) -> float:
        """Smallest positive value: subnormal where the format has subnormals."""
        bits = self.mantissa_bits if self.has_subnormals else 0
        return 2.0 ** (self.min_exponent - bits)

    @property
    def unit_roundoff(self) -> float:
        """Bound of the relative error of rounding to nearest: 2**-(mantissa_bits+1)."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def rms_roundoff(self) -> float:
        """RMS relative error of rounding to nearest a log-uniform random number.

        The error is uniform over one spacing u*2**e (u = 2**-mantissa_bits), so its
        variance is u**2 4**e / 12, and the mean of (2**e / x)**2 over a binade of
        log-uniform x is (1 - 1/4) / (2 ln 2) = 0.541.
        """
        return 2.0**-self.mantissa_bits * (0.75 / (2 * 0.6931471805599453) / 12) ** 0.5

    def saturating(self) -> "NumberFormat":
        """The same format with overflow clamped to `max_finite`, as satfinite does."""
        return dataclasses.replace(self, name=f"{self.name}_sat", saturates=True)


def number_format(exponent_bits: int, mantissa_bits: int) -> NumberFormat:
    """An IEEE-like format: the highest exponent code is kept for infinity and NaN.

    Raises ValueError outside 2..11 exponent bits and 1..52 mantissa bits.
    """
    if not (2 <= exponent_bits <= 11 and 1 <= mantissa_bits <= 52):
        raise ValueError(
            "number_format takes 2 to 11 exponent bits and 1 to 52 mantissa bits, got "
            f"({exponent_bits}, {mantissa_bits})"
        )
    max_exponent = 2 ** (exponent_bits - 1) - 1
    max_finite = (2.0 - 2.0**-mantissa_bits) * 2.0**max_exponent
    name = f"e{exponent_bits}m{mantissa_bits}"
    return NumberFormat(name, exponent_bits, mantissa_bits, max_finite)


def _named(name: str, exponent_bits: int, mantissa_bits: int) -> NumberFormat:
    fmt = number_format(exponent_bits, mantissa_bits)
    return dataclasses.replace(fmt, name=name)


FP64 = _named("fp64", 11, 52)
FP32 = _named("fp32", 8, 23)
TF32 = _named("tf32", 8, 10)
BF16 = _named("bf16", 8, 7)
FP16 = _named("fp16", 5, 10)
E5M2 = _named("e5m2", 5, 2)
# OCP FP8 E4M3: no infinity, one NaN code, so 448 and not 240 is the largest value.
# Overflow gives NaN as in JAX's own casts; hardware usually clamps: `.saturating()`.
E4M3FN = NumberFormat("e4m3fn", 4, 3, 448.0, has_inf=False)
FORMATS = {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, E4M3FN, E5M2)}

# Carrier dtype -> (its format, unsigned type of the same width).
_CARRIERS = {
    np.dtype("float32"): (FP32, np.uint32),
    np.dtype("float64"): (FP64, np.uint64),
}


def carrier_dtype(fmt: NumberFormat) -> np.dtype:
    """float32 if every value of `fmt` fits it, else float64."""
    fits = fmt.exponent_bits <= 8 and fmt.mantissa_bits <= 23
    return np.dtype("float32" if fits else "float64")


def round_to(
    x: Float[Array, "..."],
    fmt: NumberFormat,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    *,
    key: Array | None = None,
) -> Float[Array, "..."]:
    """Rounds `x` once to the nearest value of `fmt`, in its carrier dtype.

    Signed zeros and NaN are kept; overflow follows `NumberFormat`. A format at least
    as wide as the carrier leaves `x` as it is. STOCHASTIC rounds up in magnitude with
    probability equal to the distance to the lower neighbour in spacings, and needs
    `key`. It has no derivative, since that of a staircase is zero: differentiating
    raises TypeError, so a caller writes its own backward rule.

    Raises TypeError for a carrier other than float32 or float64 or one that does not
    hold `fmt`, ValueError for a key that is missing or of no use.
    """
    if x.dtype not in _CARRIERS:
        raise TypeError(
            f"round_to takes float32 or float64, got {x.dtype}; widen it first"
        )
    if not isinstance(rounding, Rounding):
        raise TypeError(f"rounding must be a Rounding, got {rounding!r}")
    if (key is not None) != (rounding is Rounding.STOCHASTIC):
        raise ValueError("round_to takes a key for STOCHASTIC rounding, and only then")
    return _round(x, key, fmt, rounding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _round(x, key, fmt: NumberFormat, rounding: Rounding):
    carrier, uint = _CARRIERS[x.dtype]
    # A carrier exponent below which the target cannot have numbers of its own.
    narrow_range = fmt.exponent_bits < carrier.exponent_bits
    if fmt.mantissa_bits >= carrier.mantissa_bits and not narrow_range:
        return x
    if (
        fmt.mantissa_bits > carrier.mantissa_bits
        or fmt.exponent_bits > carrier.exponent_bits
    ):
        raise TypeError(f"a {carrier.name} carrier does not hold {fmt.name} values")
    bits = lax.bitcast_convert_type(x, uint)
    width = carrier.exponent_bits + carrier.mantissa_bits
    sign = bits & uint(1 << width)
    magnitude = bits ^ sign
    infinity = uint(((1 << carrier.exponent_bits) - 1) << carrier.mantissa_bits)
    if narrow_range:
        rounded = _round_narrow(magnitude, key, fmt, carrier, uint, rounding)
    else:
        drop = carrier.mantissa_bits - fmt.mantissa_bits
        rounded = _round_bits(magnitude, uint(drop), key, uint, rounding)
    largest = _bits_of(fmt.max_finite, carrier, uint)
    if fmt.saturates:
        overflow = largest
    elif fmt.has_inf:
        overflow = infinity
    else:
        overflow = infinity | uint(1 << (carrier.mantissa_bits - 1))
    if rounding is Rounding.TOWARD_ZERO:
        rounded = jnp.where(
            rounded > largest,
            jnp.where(magnitude == infinity, overflow, largest),
            rounded,
        )
    else:
        rounded = jnp.where(rounded > largest, overflow, rounded)
    if not fmt.has_subnormals:
        smallest = _bits_of(fmt.min_normal, carrier, uint)
        rounded = jnp.where(rounded < smallest, uint(0), rounded)
    result = lax.bitcast_convert_type(rounded | sign, x.dtype)
    return jnp.where(magnitude > infinity, x, result)


@_round.defjvp
def _round_jvp(fmt, rounding, primals, tangents):
    raise TypeError(
        f"round_to(..., {fmt.name}) has no derivative; give the function around it a "
        "backward rule of its own (jax.custom_vjp)"
    )


def with_low_byte(
    x: Float[Array, "..."], rounded: Float[Array, "..."], fmt: NumberFormat
) -> Float[Array, "..."]:
    """`rounded`, which is `x` rounded to `fmt`, and eight bits of what it lacks.

    With the carrier's bits taken for whole numbers, sign apart,

        q = floor((bits(x) - bits(rounded)) / u + 1/2), at least -128, at most 127
        bits(result) = bits(rounded) + q u

    where u is 2^(c - m - 8), or 1 if that is less, with c and m the mantissa bits of
    carrier and `fmt`: for numbers that are normal in `fmt` a 256th of its spacing at x.
    So x to within half of that, or all of it where `rounded` is nearly half a spacing
    too small; subnormals of `fmt` to within half their spacing at least. NaN where
    either is not finite. Only q rounds.
    """
    carrier, uint = _CARRIERS[x.dtype]
    signed = np.dtype(f"int{8 * np.dtype(uint).itemsize}").type
    unit = signed(1 << max(carrier.mantissa_bits - fmt.mantissa_bits - 8, 0))
    exact, base = (lax.bitcast_convert_type(y, signed) for y in (x, rounded))
    # Signs are alike, and cancel.
    q = jnp.floor_divide(exact - base + unit // 2, unit)
    result = base + jnp.clip(q, -128, 127) * unit
    finite = jnp.isfinite(x) & jnp.isfinite(rounded)
    return jnp.where(finite, lax.bitcast_convert_type(result, x.dtype), jnp.nan)


def _bits_of(value: float, carrier: NumberFormat, uint):
    """Bit pattern of a positive finite number that is normal in the carrier."""
    half_mantissa, exponent = math.frexp(value)
    field = exponent - carrier.min_exponent
    mantissa = int((2.0 * half_mantissa - 1.0) * 2.0**carrier.mantissa_bits)
    return uint((field << carrier.mantissa_bits) + mantissa)


def _round_bits(significand, drop, key, uint, rounding: Rounding):
    """Rounds integers to a multiple of 2**drop; a carry runs into the exponent."""
    one = uint(1)
    low = (one << drop) - one
    if rounding is Rounding.NEAREST_EVEN:
        odd = (significand >> drop) & low & one
        significand = significand + (low >> one) + odd
    elif key is not None:
        noise = jax.random.bits(key, significand.shape, uint)
        significand = significand + (noise & low)
    return significand & ~low


def _round_narrow(magnitude, key, fmt, carrier, uint, rounding: Rounding):
    """As `_round_bits`, for a target with fewer exponents than the carrier.

    Below the target's smallest normal number its spacing stays the same, so the number
    of dropped bits grows as the exponent falls. There the leading one must take part in
    the rounding: the significand is taken apart from the exponent and put back.
    """
    stored = carrier.mantissa_bits
    field = jnp.maximum(magnitude >> stored, uint(1))
    base = (field - uint(1)) << stored
    significand = magnitude - base
    lowest = uint(fmt.min_exponent - carrier.min_exponent + 1)
    below = jnp.where(field < lowest, lowest - field, uint(0))
    # From here down |x| is below half of the smallest subnormal; shifts stay defined.
    tiny = below >= uint(fmt.mantissa_bits + 2)
    drop = uint(stored - fmt.mantissa_bits) + below
    drop = jnp.minimum(drop, uint(stored + 2))
    tail_key = None if key is None else jax.random.fold_in(key, 1)
    rounded = _round_bits(significand, drop, key, uint, rounding)
    result = jnp.where(rounded == 0, uint(0), rounded + base)
    if tail_key is None:
        return jnp.where(tiny, uint(0), result)
    # Each octave further down halves the probability of rounding up: that many more
    # random bits must be zero.
    halvings = jnp.minimum(below - uint(fmt.mantissa_bits + 2), uint(31))
    more = jax.random.bits(tail_key, magnitude.shape, uint)
    up = (rounded != 0) & (more & ((uint(1) << halvings) - uint(1)) == 0)
    smallest = _bits_of(2.0 ** (fmt.min_exponent - fmt.mantissa_bits), carrier, uint)
    return jnp.where(tiny, jnp.where(up, smallest, uint(0)), result)
