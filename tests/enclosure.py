"""Interval arithmetic for what a program may compute in FP32 or FP64.

An `Interval` holds the value that any correct evaluation of a step gives, whatever the
order of the additions in its sums and whether a multiplication is contracted with the
addition after it. Where only one value is possible the two ends are equal.

Why this bounds an emulator tightly. Let y be a value of the emulator and [lo, hi] the
interval of the same step here.

1.  Sums. A matrix product or row sum of n terms in any order, products contracted or
    not, is off by at most gamma_n sum|a||b|, gamma_n = n u / (1 - n u), u = 2**-24 or
    2**-53 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5).
    It is exact in every order, and the interval is one point, if all terms are
    multiples of a q with sum|a||b| <= q / u: every partial sum is then a whole number
    of q below 2**24 (2**53) and fits the significand.
2.  One addition, product or difference is rounded once to the carrier, or, contracted
    with a neighbour, not at all: the interval covers both.
3.  Functions of hardware and compiler are a few ulp off: the constants below.
4.  Roundings are monotone: lo <= y <= hi gives round(lo) <= round(y) <= round(hi). So a
    narrow value can land on a neighbour only if a rounding boundary lies within its
    interval; all others are pinned to one number again. The number of flips is at most
    that of intervals wider than a point after a step, and their size is the width.

Ends are kept in a wider type (float64, or extended precision for FP64) and moved
outward by one ulp of that type where it had to round.
"""

from typing import NamedTuple

import numpy as np

from attn_jax.formats import FP32, NumberFormat, Rounding
from attn_jax.recipe import Step

# Errors in ulp of the carrier. XLA's exp and log stay below 2 on a CPU, and CUDA's
# manual gives 2 for expf and 1 for logf; exp2 is the emulator's own, 2. XLA on a CPU
# divides by a broadcast number by way of its rounded reciprocal (1.5 ulp, and wrong in
# the last bit for -0.5625 / 3), and on a GPU in a form that may be 2 ulp off.
EXP_ULP = EXP2_ULP = LOG_ULP = DIVIDE_ULP = 2


class Interval(NamedTuple):
    lo: np.ndarray
    hi: np.ndarray

    def at(self, *index) -> "Interval":
        return Interval(self.lo[index], self.hi[index])

    @property
    def T(self) -> "Interval":
        return Interval(self.lo.T, self.hi.T)

    @property
    def is_point(self) -> np.ndarray:
        return (self.lo == self.hi) | (np.isnan(self.lo) & np.isnan(self.hi))


def where(condition, x: Interval, y: Interval) -> Interval:
    return Interval(np.where(condition, x.lo, y.lo), np.where(condition, x.hi, y.hi))


def hull(x: Interval, y: Interval) -> Interval:
    return Interval(np.minimum(x.lo, y.lo), np.maximum(x.hi, y.hi))


def maximum(x: Interval, y: Interval) -> Interval:
    return Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi))


def negative(x: Interval) -> Interval:
    return Interval(-x.hi, -x.lo)


def round_by_definition(x: np.ndarray, fmt: NumberFormat, rounding: Rounding):
    """x rounded once, by the definition of the two deterministic roundings."""
    if rounding is Rounding.TOWARD_ZERO:
        return _round_to_multiple(x, fmt, np.trunc, keeps_finite=True)
    return _round_to_multiple(x, fmt, np.rint, keeps_finite=False)


def _round_to_multiple(x: np.ndarray, fmt: NumberFormat, whole_number, keeps_finite):
    """A multiple of the spacing at x, by scaling to whole numbers and back.

    Scaling by a power of two and rounding to a whole number are exact.
    """
    exponent = np.maximum(np.frexp(x)[1] - 1, fmt.min_exponent) - fmt.mantissa_bits
    whole = np.ldexp(x, -exponent)
    result = np.copysign(np.ldexp(whole_number(whole), exponent), x)
    if not fmt.has_subnormals:
        tiny = np.abs(result) < fmt.min_normal
        result = np.where(tiny, np.copysign(0, x), result)
    over = np.abs(result) > fmt.max_finite
    largest = np.copysign(fmt.max_finite, x)
    if fmt.saturates:
        beyond = largest
    else:
        beyond = np.copysign(np.inf, x) if fmt.has_inf else np.full_like(x, np.nan)
    if keeps_finite:
        beyond = np.where(np.isinf(x), beyond, largest)
    return np.where(over, beyond, result)


def with_low_byte(x: np.ndarray, step: Step) -> np.ndarray:
    """Numbers of a carrier rounded as a step says, and eight bits of what that dropped;
    monotone."""
    near = round_by_definition(x, step.format, step.rounding).astype(x.dtype)
    integer = np.dtype(f"i{x.itemsize}")
    lost = np.finfo(x.dtype).nmant - step.format.mantissa_bits - 8
    # In halves of units, so that they are whole numbers.
    halves = 2 * (np.abs(x).view(integer) - np.abs(near).view(integer))
    unit = 2 ** max(lost, 0)
    q = np.clip((halves + unit) // (2 * unit), -128, 127)
    size = (np.abs(near).view(integer) + q * unit).view(x.dtype)
    return np.copysign(size, x)


class Arithmetic:
    """The operations of a carrier on intervals."""

    def __init__(self, carrier: NumberFormat):
        self.carrier = carrier
        is_fp32 = carrier == FP32
        self.dtype = np.float32 if is_fp32 else np.float64
        self.wide = np.float64 if is_fp32 else np.longdouble
        self.unit = self.wide(2.0) ** (-24 if is_fp32 else -53)

    def point(self, x) -> Interval:
        x = np.asarray(x, self.wide)
        return Interval(x, x)

    def constant(self, x) -> Interval:
        """A number in the program, rounded to the carrier."""
        return self.settled(self.point(x))

    def settled(self, x: Interval) -> Interval:
        """x in the carrier: whatever was contracted ends with one rounding."""
        return Interval(*(end.astype(self.dtype).astype(self.wide) for end in x))

    def round(self, x: Interval, step: Step) -> Interval:
        if step.format == self.carrier:
            return x
        if step.rounding is Rounding.STOCHASTIC:  # one neighbour or the other
            return Interval(
                _round_to_multiple(x.lo, step.format, np.floor, keeps_finite=False),
                _round_to_multiple(x.hi, step.format, np.ceil, keeps_finite=False),
            )
        return Interval(
            *(round_by_definition(end, step.format, step.rounding) for end in x)
        )

    def _evaluated(self, x: Interval, ulp: int = 0, known=False) -> Interval:
        """The exact x, or x rounded to the carrier, or `ulp` of the carrier away.

        What the carrier holds exactly is left as it is: correctly rounded operations
        and all functions used here are exact where that is possible. `known` where x
        itself was not rounded to the wide type.
        """
        lo = self._outward(x.lo, -1, ulp, known)
        hi = self._outward(x.hi, 1, ulp, known)
        # XLA on a CPU flushes subnormals to zero.
        tiny = np.finfo(self.dtype).tiny
        lo = np.where((0 < lo) & (lo < tiny), 0, lo)
        hi = np.where((-tiny < hi) & (hi < 0), 0, hi)
        return Interval(lo, hi)

    def _outward(self, x, side: int, ulp: int, known):
        with np.errstate(over="ignore", under="ignore"):
            rounded = x.astype(self.dtype).astype(self.wide)
        exact = (rounded == x) | np.isnan(x)
        beyond = np.where(known, x, np.nextafter(x, self.wide(side * np.inf)))
        beyond = beyond + side * 2 * self.unit * ulp * np.abs(x)
        nearest = (
            np.maximum(rounded, beyond) if side > 0 else np.minimum(rounded, beyond)
        )
        return np.where(exact, x, nearest)

    def add(self, x: Interval, y: Interval) -> Interval:
        known = ((x.lo == 0) & (x.hi == 0)) | ((y.lo == 0) & (y.hi == 0))
        return self._evaluated(Interval(x.lo + y.lo, x.hi + y.hi), known=known)

    def sub(self, x: Interval, y: Interval) -> Interval:
        return self.add(x, negative(y))

    def mul(self, x: Interval, y: Interval) -> Interval:
        corners = [a * b for a in x for b in y]
        lo, hi = np.minimum.reduce(corners), np.maximum.reduce(corners)
        # Two significands of 24 bits: their product fits float64.
        known = self.carrier == FP32 and self._held(x) & self._held(y)
        return self._evaluated(Interval(lo, hi), known=known)

    def _held(self, x: Interval):
        """Where the carrier holds both ends."""
        settled = self.settled(x)
        return (settled.lo == x.lo) & (settled.hi == x.hi)

    def div(self, x: Interval, y: Interval) -> Interval:
        """x / y for y > 0; exact only for powers of two, whose reciprocal is."""
        corners = [a / b for a in x for b in y]
        lo, hi = np.minimum.reduce(corners), np.maximum.reduce(corners)
        slack = 2 * self.unit * DIVIDE_ULP
        power = y.is_point & (np.frexp(y.lo)[0] == 0.5)
        lo = np.where(power, lo, lo - slack * np.abs(lo))
        hi = np.where(power, hi, hi + slack * np.abs(hi))
        return self._evaluated(Interval(lo, hi))

    def exp(self, x: Interval) -> Interval:
        return self._evaluated(Interval(np.exp(x.lo), np.exp(x.hi)), EXP_ULP)

    def exp2(self, x: Interval) -> Interval:
        return self._evaluated(Interval(np.exp2(x.lo), np.exp2(x.hi)), EXP2_ULP)

    def exp2_polynomial(self, x: Interval, coefficients) -> Interval:
        """2^n p(x - n), n = floor x, p = 1 + c1 f + c2 f^2 + ..., all ci > 0."""
        n_lo, n_hi = np.floor(x.lo), np.floor(x.hi)
        same = n_lo == n_hi
        zero, one = np.zeros_like(n_lo), np.ones_like(n_lo)
        low = self._horner(
            Interval(x.lo - n_lo, np.where(same, x.hi - n_lo, one)), coefficients
        )
        high = self._horner(Interval(zero, x.hi - n_hi), coefficients)
        low, high = (
            self._evaluated(Interval(*(np.ldexp(e, n.astype(int)) for e in p)))
            for p, n in ((low, n_lo), (high, n_hi))
        )
        return where(same, low, hull(low, high))

    def _horner(self, f: Interval, coefficients) -> Interval:
        total = self.constant(coefficients[-1])
        for c in (*coefficients[-2::-1], 1.0):
            total = self.add(self.constant(c), self.mul(f, total))
        return total

    def log(self, x: Interval) -> Interval:
        """log x, -inf at 0."""
        with np.errstate(divide="ignore"):
            return self._evaluated(Interval(np.log(x.lo), np.log(x.hi)), LOG_ULP)

    def log1p(self, x: Interval) -> Interval:
        return self._evaluated(Interval(np.log1p(x.lo), np.log1p(x.hi)), LOG_ULP)

    def dot(
        self,
        x: Interval,
        y: Interval,
        step: Step,
        chunk: int | None,
        bits: int | None = None,
        least: tuple[int, ...] = (),
    ) -> Interval:
        """x @ y with the running sum rounded to `step` after every `chunk` terms.

        With `bits`, the sum and a run's terms are cut off that far below the largest
        exponent; `least` are the least exponents of x, y and the sum.
        """
        n = x.lo.shape[-1]
        if step.format == self.carrier and bits is None:
            return self._sum_in_any_order(x, y)
        total = self.point(np.zeros((x.lo.shape[0], y.lo.shape[1])))
        for start in range(0, n, chunk or n):
            part = slice(start, start + (chunk or n))
            a, b = x.at(slice(None), part), y.at(part)
            if bits is None:
                term = self._sum_in_any_order(a, b)
                total = self.add(total, term) if start else term
            else:
                total = self._add_aligned(total, a, b, bits, least)
            total = self.round(total, step)
        return total

    def _add_aligned(self, total, x: Interval, y: Interval, bits, least) -> Interval:
        a, b = x.at(slice(None), slice(None), None), y.at(None)
        exponents = (_exponents(z, e) for z, e in zip((a, b, total), least))
        unit = Interval(
            *(np.maximum((p + q).max(1), t) - bits for p, q, t in zip(*exponents))
        )
        terms, kept = (
            _cut(self.mul(a, b), unit.at(slice(None), None)),
            _cut(total, unit),
        )
        ends = (of_terms.sum(1) + k for of_terms, k in zip(terms, kept))
        return self._evaluated(Interval(*ends))

    def sum(self, x: Interval, step: Step, chunk: int | None) -> Interval:
        """Row sums, [R, C] to [R, 1]."""
        ones = self.point(np.ones((x.lo.shape[-1], 1)))
        return self.dot(x, ones, step, chunk)

    def sum_of(self, *terms: Interval) -> Interval:
        """Elementwise sum of a few arrays, in any order."""
        shape = np.broadcast_shapes(*(t.lo.shape for t in terms))
        columns = (
            np.stack([np.broadcast_to(end, shape).ravel() for end in ends], -1)
            for ends in zip(*terms)
        )
        total = self.sum(Interval(*columns), Step(self.carrier), None)
        return Interval(total.lo.reshape(shape), total.hi.reshape(shape))

    def _sum_in_any_order(self, x: Interval, y: Interval) -> Interval:
        n = x.lo.shape[-1]
        xm, xr = _middle(x)
        ym, yr = _middle(y)
        middle = xm @ ym
        size = (np.abs(xm) + xr) @ (np.abs(ym) + yr)
        exact = self._exact_in_any_order(x, y, size)
        gamma = n * self.unit / (1 - n * self.unit)
        # The wide type sums n terms itself, here and in `middle`: 2 n of its units.
        slack = 4 * n * np.finfo(self.wide).eps
        radius = xr @ np.abs(ym) + np.abs(xm) @ yr + xr @ yr + (gamma + slack) * size
        tiny = n * np.finfo(self.dtype).tiny  # terms and sums flushed to zero
        radius = np.where(exact, 0, radius + np.where(size > 0, tiny, 0))
        return Interval(middle - radius, middle + radius)

    def _exact_in_any_order(self, x: Interval, y: Interval, size):
        """Where each term is a multiple of one q and sum|a||b| <= q / unit."""
        rows = x.is_point.all(1)
        columns = y.is_point.all(0)
        q = _quantum(x.lo).min(1)[:, None] * _quantum(y.lo).min(0)[None]
        return (rows[:, None] & columns[None] & (size * self.unit <= q)) | (size == 0)


def _exponents(x: Interval, least: int) -> Interval:
    """Those of |x|, from `least` on; for zero far below all."""
    ends = np.abs(x.lo), np.abs(x.hi)
    smallest = np.where((x.lo <= 0) & (x.hi >= 0), 0, np.minimum(*ends))
    return Interval(
        *(
            np.where(y == 0, -4000, np.maximum(np.frexp(y)[1] - 1, least))
            for y in (smallest, np.maximum(*ends))
        )
    )


def _cut(x: Interval, unit: Interval) -> Interval:
    """x cut off toward zero to a multiple of 2**unit; a larger unit cuts off more."""

    def cut(y, inward):
        def to(exponent):
            return np.ldexp(np.trunc(np.ldexp(y, -exponent)), exponent)

        return np.where(inward, to(unit.hi), to(unit.lo))

    return Interval(cut(x.lo, x.lo > 0), cut(x.hi, x.hi < 0))


def _middle(x: Interval):
    middle = x.lo + (x.hi - x.lo) / 2
    return middle, np.maximum(x.hi - middle, middle - x.lo)


def _quantum(x: np.ndarray) -> np.ndarray:
    """The largest power of two of which x is a multiple; infinity for zero."""
    significand, exponent = np.frexp(x)
    bits = 53 if x.dtype == np.float64 else 64
    whole = np.ldexp(np.abs(significand), bits).astype(np.uint64)
    lowest = whole & (~whole + np.uint64(1))
    quantum = np.ldexp(lowest.astype(x.dtype), exponent - bits)
    return np.where(x == 0, np.inf, quantum)
