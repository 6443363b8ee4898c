"""Sums for distances of two tensors that can be joined: of slices, then of groups.

FP64 squares overflow from 1e154 on, and vanish below 1e-162. So a slice's are taken of
numbers scaled by a power of two where that is needed, and sums are kept as Decimals,
whose 28 digits are more than FP64's 16 and whose exponents end nowhere near.
"""

import dataclasses
import math
from decimal import Decimal

import numpy as np

# A bin holds numbers of one binade that agree in 10 bits of the fraction.
SHIFT = 42
QUANTILE_ERROR = 2.0**-10
# Numbers beyond LARGE are divided by UNIT before they are subtracted and summed:
# twice the largest FP64 number, 2^64 times, is then still one.
LARGE, UNIT = 2.0**900, 2.0**65
# A sum of products of this size has lost nothing to the ends of FP64's range.
_LEAST = 1e-200
NO_TRAVELS = (Decimal(0), Decimal(0), Decimal(0))
_INFINITY = np.int64(0x7FF << 52)


@dataclasses.dataclass
class Sketch:
    """Counts of numbers >= 0 by the leading bits of their FP64 pattern.

    Attributes:
      zeros: how many are 0.
      start: leading bits of the first bin.
      counts: [bins], how many lie in each.
    """

    zeros: int = 0
    start: int = 0
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))

    @classmethod
    def of(cls, values: np.ndarray) -> "Sketch":
        """Of FP64 numbers >= 0."""
        bits = values.view(np.int64)
        some = bits[bits > 0]
        zeros = values.size - some.size
        if not some.size:
            return cls(zeros)
        some >>= SHIFT
        start = int(some.min())
        some -= start
        return cls(zeros, start, np.bincount(some))

    def join(self, other: "Sketch") -> "Sketch":
        """Of both samples together."""
        zeros = self.zeros + other.zeros
        pair = [one for one in (self, other) if one.counts.size]
        if not pair:
            return Sketch(zeros)
        start = min(one.start for one in pair)
        stop = max(one.start + one.counts.size for one in pair)
        counts = np.zeros(stop - start, np.int64)
        for one in pair:
            counts[one.start - start :][: one.counts.size] += one.counts
        return Sketch(zeros, start, counts)

    def quantile(self, share: float) -> float:
        """The least number that this share of the sample does not exceed.

        It is never below the true one, and above it by 2^-10 of it at most.
        """
        total = self.zeros + int(self.counts.sum())
        rank = math.ceil(share * total)
        if rank <= self.zeros:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self.counts), rank - self.zeros))
        # Differences beyond FP64's range are infinite, and lie in the last bin.
        edge = min(np.int64((self.start + place + 1) << SHIFT), _INFINITY)
        return float(edge.view(np.float64))


@dataclasses.dataclass
class Moments:
    """Sums over pairs of finite weights, a the reference, b the other, d = b - a.

    Attributes:
      count: pairs n.
      low, high: least and largest weight of either side.
      max_abs: max |d|, infinite beyond FP64's range.
      mean, spread: mean of d, and sum of (d - mean)^2.
      reference_mean, reference_spread: the same of a.
      square, reference_square: sum of d^2 and of a^2.
      travels: sums of (a - a0)(b - b0), (a - a0)^2 and (b - b0)^2; None without a
        start.
      sketch: of |d|.
    """

    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    max_abs: float = 0.0
    mean: Decimal = Decimal(0)
    spread: Decimal = Decimal(0)
    reference_mean: Decimal = Decimal(0)
    reference_spread: Decimal = Decimal(0)
    square: Decimal = Decimal(0)
    reference_square: Decimal = Decimal(0)
    travels: tuple[Decimal, Decimal, Decimal] | None = None
    sketch: Sketch = dataclasses.field(default_factory=Sketch)

    @classmethod
    def of(
        cls,
        a: np.ndarray,
        b: np.ndarray,
        starts: tuple[np.ndarray, np.ndarray] | None,
    ) -> "Moments":
        """Of flat FP64 arrays of finite numbers; `starts` are a0 and b0."""
        if not a.size:
            return cls(travels=None if starts is None else NO_TRAVELS)
        low, high = float(min(a.min(), b.min())), float(max(a.max(), b.max()))
        with np.errstate(over="ignore"):
            d = whole = b - a
        ends = [float(end) for x in starts or () for end in (x.min(), x.max())]
        scale = unit(low, high, *ends)
        if scale != 1.0:
            a, b = a / scale, b / scale
            d = b - a
            starts = starts and (starts[0] / scale, starts[1] / scale)
        one = Decimal(scale)
        two = one * one
        travels = None
        if starts is not None:
            gone, other_gone = a - starts[0], b - starts[1]
            travels = (
                _dot(gone, other_gone) * two,
                _dot(gone, gone) * two,
                _dot(other_gone, other_gone) * two,
            )
        mean, reference_mean = _mean(d), _mean(a)
        d_centred, a_centred = d - mean, a - reference_mean
        square = _dot(d, d) * two
        size = np.abs(whole, out=whole)
        return cls(
            count=a.size,
            low=low,
            high=high,
            max_abs=float(size.max()),
            mean=Decimal(mean) * one,
            spread=_dot(d_centred, d_centred) * two,
            reference_mean=Decimal(reference_mean) * one,
            reference_spread=_dot(a_centred, a_centred) * two,
            square=square,
            reference_square=_dot(a, a) * two,
            travels=travels,
            sketch=Sketch.of(size),
        )

    def join(self, other: "Moments") -> "Moments":
        """Of both samples together; means and spreads as Chan et al. (1979) join them.

        Travels are of the parts that have some.
        """
        count = self.count + other.count
        share = Decimal(other.count) / count if count else Decimal(0)
        cross = self.count * share
        step = other.mean - self.mean
        reference_step = other.reference_mean - self.reference_mean
        both = [one for one in (self.travels, other.travels) if one is not None]
        sums = tuple(map(sum, zip(*both, strict=True))) if both else None
        return Moments(
            count=count,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            max_abs=max(self.max_abs, other.max_abs),
            mean=self.mean + step * share,
            spread=self.spread + other.spread + step * step * cross,
            reference_mean=self.reference_mean + reference_step * share,
            reference_spread=self.reference_spread
            + other.reference_spread
            + reference_step * reference_step * cross,
            square=self.square + other.square,
            reference_square=self.reference_square + other.reference_square,
            travels=sums,  # pyright: ignore[reportArgumentType]
            sketch=self.sketch.join(other.sketch),
        )

    @property
    def sigma(self) -> Decimal:
        """Standard deviation of the reference."""
        return (self.reference_spread / max(self.count, 1)).sqrt()


def _mean(x: np.ndarray) -> float:
    """That of equal numbers is the number, so that their spread is 0 and not what a
    rounded mean leaves of each."""
    first = x[0]
    return float(first if (x == first).all() else x.mean())


def unit(*values: float) -> float:
    """What numbers up to these are divided by so that sums of them stay finite."""
    return UNIT if max(map(abs, values)) > LARGE else 1.0


def _dot(x: np.ndarray, y: np.ndarray) -> Decimal:
    """By one thread: those of a BLAS fight over the cores with the threads that compare
    other tensors, and their number would change the last bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        plain = float(np.einsum("i,i->", x, y))
    if _LEAST < abs(plain) < math.inf:
        return Decimal(plain)
    if not (x.any() and y.any()):
        return Decimal(0)
    exponents = [_exponent(side) for side in (x, y)]
    scaled = [np.ldexp(*pair) for pair in zip((x, y), np.negative(exponents))]
    power = Decimal(2) ** sum(exponents)
    return Decimal(float(np.einsum("i,i->", *scaled))) * power


def _exponent(values: np.ndarray) -> int:
    """Of the power of two above all of them."""
    return math.frexp(max(values.max(), -values.min()))[1]
