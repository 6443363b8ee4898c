"""Sums over a tensor's differences that can be joined: of slices, then of groups."""

import dataclasses
import math

import numpy as np

# A bin holds numbers of one binade that agree in 10 bits of the fraction.
SHIFT = 42
QUANTILE_ERROR = 2.0**-10


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
        edge = np.int64((self.start + place + 1) << SHIFT)
        return float(edge.view(np.float64))


@dataclasses.dataclass
class Moments:
    """Sums over pairs of finite weights, a the reference, b the other, d = b - a.

    Attributes:
      count: pairs n.
      low, high: least and largest weight of either side.
      max_abs: max |d|.
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
    mean: float = 0.0
    spread: float = 0.0
    reference_mean: float = 0.0
    reference_spread: float = 0.0
    square: float = 0.0
    reference_square: float = 0.0
    travels: tuple[float, float, float] | None = None
    sketch: Sketch = dataclasses.field(default_factory=Sketch)

    @classmethod
    def of(
        cls,
        a: np.ndarray,
        b: np.ndarray,
        starts: tuple[np.ndarray, np.ndarray] | None,
    ) -> "Moments":
        """Of flat FP64 arrays of finite numbers; `starts` are a0 and b0."""
        travels = None
        if starts is not None:
            gone, other_gone = a - starts[0], b - starts[1]
            travels = (
                _dot(gone, other_gone),
                _dot(gone, gone),
                _dot(other_gone, other_gone),
            )
        if not a.size:
            return cls(travels=travels)
        d = b - a
        mean, reference_mean = float(d.mean()), float(a.mean())
        square, reference_square = _dot(d, d), _dot(a, a)
        d_centred, a_centred = d - mean, a - reference_mean
        size = np.abs(d, out=d)
        return cls(
            count=a.size,
            low=float(min(a.min(), b.min())),
            high=float(max(a.max(), b.max())),
            max_abs=float(size.max()),
            mean=mean,
            spread=_dot(d_centred, d_centred),
            reference_mean=reference_mean,
            reference_spread=_dot(a_centred, a_centred),
            square=square,
            reference_square=reference_square,
            travels=travels,
            sketch=Sketch.of(size),
        )

    def join(self, other: "Moments") -> "Moments":
        """Of both samples together; means and spreads as Chan et al. (1979) join them.

        Travels are of the parts that have some.
        """
        count = self.count + other.count
        share = other.count / count if count else 0.0
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
    def sigma(self) -> float:
        """Standard deviation of the reference."""
        return math.sqrt(self.reference_spread / self.count) if self.count else 0.0


def _dot(x: np.ndarray, y: np.ndarray) -> float:
    """By one thread: those of a BLAS fight over the cores with the threads that compare
    other tensors, and their number would change the last bits."""
    return float(np.einsum("i,i->", x, y))
