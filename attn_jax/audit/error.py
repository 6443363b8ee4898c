"""Errors in units of the unavoidable rounding, with size, tail, sign and direction."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from attn_jax.formats import NumberFormat

# Under random signs A = |sum e| / sqrt(sum e^2) is |N(0, 1)|: 95 % lie below this.
DIRECTIONALITY_NULL_95 = 1.96

# A golden result whose own rounding error is this much smaller than that of the sum of
# absolute values is zero, or a machine number, but for FP64 noise; no family that
# merely cancels comes near (uniform dQ: about 2**-10).
_DEGENERATE = 2.0**-24
# That noise, of the sum itself: 2**-53 times a few thousand terms. An FP32 error is
# 2**-25, and 2**-24 of it would be less.
_NOISE = 2.0**-41
# The bits of an FP64 number that hold its exponent.
_EXPONENT = np.uint64(0x7FF << 52)
# Numbers that a core's cache holds with what is made of them.
_CACHED = 2**14


@dataclasses.dataclass(frozen=True)
class Errors:
    """Deviation e = x - golden of one result, pooled over everything it holds.

    units           RMS of e over the unit: 1 is the best a result in the format can do
    degenerate      the unit is that of the sum over absolute values (see `unit`)
    relative        RMS of e over RMS of golden; inf where golden vanishes
    maximum, p999   largest and 99.9th percentile of |e|, over the RMS of golden (of the
                    sum over absolute values if degenerate)
    signed_mean     mean of e, over the same
    signed_mean_ci  half width of its 95 % interval, from the scatter of the means of
                    the independent entries (batch and head); inf for a single one
    directionality  A = |sum e| / sqrt(sum e^2); see DIRECTIONALITY_NULL_95
    """

    units: float
    degenerate: bool
    relative: float
    maximum: float
    p999: float
    signed_mean: float
    signed_mean_ci: float
    directionality: float


def correctly_rounded(golden: np.ndarray, fmt: NumberFormat) -> np.ndarray:
    """FP64 values rounded once, to nearest even, to `fmt`, as FP64; in NumPy.

    Overflow follows the format: saturation, infinity or NaN.
    """
    golden = np.asarray(golden, np.float64, order="C")
    rounded = np.empty_like(golden)
    flat, into = golden.reshape(-1), rounded.reshape(-1)
    for start in range(0, flat.size, _CACHED):
        here = slice(start, start + _CACHED)
        into[here] = _rounded(flat[here], fmt)
    return rounded


def _rounded(golden: np.ndarray, fmt: NumberFormat) -> np.ndarray:
    # Without sign and significand a value is the power of two below it.
    power = (golden.view(np.uint64) & _EXPONENT).view(np.float64)
    place = np.clip(power, fmt.min_normal, 2.0**1023) * 2.0**-fmt.mantissa_bits
    rounded = np.rint(golden / place) * place
    if not fmt.has_subnormals:
        rounded = np.where(np.abs(rounded) < fmt.min_normal, 0.0, rounded)
    over = fmt.max_finite if fmt.saturates else np.inf if fmt.has_inf else np.nan
    beyond = np.abs(rounded) > fmt.max_finite
    return np.where(beyond, np.copysign(over, golden), rounded)


class Yardstick(NamedTuple):
    """An exact result, and what others are measured by, made once for all.

    Attributes:
      golden: the result in FP64.
      rounded: it, rounded once.
      unit, degenerate: as `unit` says.
      size: RMS of `golden`; of the sum over absolute values if degenerate.
    """

    golden: np.ndarray
    rounded: np.ndarray
    unit: float
    degenerate: bool
    size: float


def yardstick(
    golden: np.ndarray, fmt: NumberFormat, absolute: np.ndarray | None = None
) -> Yardstick:
    """Raises ValueError as `unit` does."""
    golden = np.asarray(golden, np.float64)
    rounded = correctly_rounded(golden, fmt)
    of, degenerate = _unit(golden, rounded, fmt, absolute)
    size = rms(absolute if degenerate and absolute is not None else golden)
    return Yardstick(golden, rounded, of, degenerate, size)


def unit(
    golden: np.ndarray, fmt: NumberFormat, absolute: np.ndarray | None = None
) -> tuple[float, bool]:
    """The unit of error, an RMS, and whether the degenerate rule gave it.

    It is the RMS error of the correctly rounded golden result. Where that result
    vanishes or is exactly representable, it is the expected rounding error of
    `absolute`, the same sums over the absolute values of their terms
    (`reference.golden(..., absolute=True)`): `fmt.rms_roundoff` times its RMS.

    Raises ValueError if that rule is needed and `absolute` is not given.
    """
    return _unit(golden, correctly_rounded(golden, fmt), fmt, absolute)


def _unit(golden, rounded, fmt: NumberFormat, absolute) -> tuple[float, bool]:
    usual = rms(rounded - golden)
    if absolute is None:
        if usual == 0:
            raise ValueError(
                "the golden result is exactly representable: pass absolute=, the sums "
                "of absolute values from reference.golden(..., absolute=True)"
            )
        return usual, False
    size = rms(absolute)
    of_size = fmt.rms_roundoff * size
    is_real = usual > max(_DEGENERATE * of_size, _NOISE * size)
    return (usual, False) if is_real else (of_size, True)


def unit_error(
    x: ArrayLike,
    golden: np.ndarray,
    fmt: NumberFormat,
    absolute: np.ndarray | None = None,
) -> float:
    """RMS of x - golden in units of the unavoidable rounding (see `unit`).

    Arrays of any shape, pooled: stack heads and seeds. An exact result measures 0 even
    where the unit is 0; any other result there measures inf.
    """
    return in_units(rms(_difference(x, golden)), unit(golden, fmt, absolute)[0])


def signed_bias(e: np.ndarray, size: float) -> tuple[float, float]:
    """Mean of e over `size`, and half the width of its 95 % interval.

    e [..., H] is a difference, signed as one likes: from the exact result rounded once,
    which has a bias of its own where results lie about a power of two. Rows, the
    vectors along the last axis, are taken as independent: entries of a row share what
    is summed and weighted, other rows only inputs. |mean| + half width below a margin
    is a test of equivalence to no bias at that margin, at 97.5 %.
    """
    means = e.mean(-1).ravel()
    spread = means.std(ddof=1) / means.size**0.5 if means.size > 1 else np.inf
    return in_units(means.mean(), size), in_units(1.96 * spread, size)


def measure(
    x: ArrayLike, against: Yardstick, *, independent_axes: tuple[int, ...] = (0, 2)
) -> Errors:
    """All of `Errors`; `independent_axes` hold batch (or seed) and head."""
    e, scale = _difference(x, against.golden), against.size
    others = tuple(set(range(e.ndim)) - {a % e.ndim for a in independent_axes})
    means = e.mean(others).ravel()
    spread = means.std(ddof=1) / means.size**0.5 if means.size > 1 else np.inf
    root = np.sqrt(np.square(e).sum())
    return Errors(
        units=in_units(rms(e), against.unit),
        degenerate=against.degenerate,
        relative=in_units(rms(e), rms(against.golden)),
        maximum=in_units(np.abs(e).max(), scale),
        p999=in_units(np.quantile(np.abs(e), 0.999), scale),
        signed_mean=in_units(e.mean(), scale),
        signed_mean_ci=in_units(1.96 * spread, scale),
        directionality=float(abs(e.sum()) / root) if root > 0 else 0.0,
    )


def _difference(x, golden) -> np.ndarray:
    x = np.asarray(x).astype(np.float64)
    if x.shape != np.shape(golden):
        raise ValueError(
            f"result {x.shape} and golden {np.shape(golden)} differ in shape"
        )
    return x - golden


def rms(x) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(x))))


def in_units(size, of) -> float:
    """`size` in units of `of`; 0 where an exact result is hit exactly."""
    if of > 0:
        return float(size / of)
    return 0.0 if size == 0 else float(np.copysign(np.inf, size))
