"""The Wasserstein-1 distance of two samples of one size, exact or enclosed.

W1(a, b) = integral of |F_a - F_b| = mean |sort(a) - sort(b)|, F the share of numbers
not above x: what `scipy.stats.wasserstein_distance` returns. The paper ("Is Flash
Attention Stable?", arXiv 2405.02803) names the distance and gives no formula; this is
its standard reading. It ignores which weight is which: a permutation has W1 = 0.

Three ways, each fed slice by slice:

    Counting   types of at most 16 bits: every bit pattern is counted. Exact.
    Sorting    all numbers are kept and sorted. Exact.
    Binning    numbers are counted and summed in bins. An interval that holds W1.

Each has `add(a, b)`, for one more slice of each side: finite numbers, as many of one as
of the other, of any types. And `result()`: W1 and its error, so W1 lies within that of
what is returned. Exact means up to FP64 sums: relative 1e-12 at most, for up to 1e9
numbers.
"""

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from analysis.weights.moments import unit

_BINS = 2**20
_CHUNK = 2**16


def common_type(a: np.dtype, b: np.dtype) -> np.dtype:
    """The type both samples are kept in, which holds the numbers of either."""
    if a == b and a.itemsize <= 4:
        return a
    # bfloat16, float16 and narrower ones fit FP32.
    return np.dtype(np.float32 if max(a.itemsize, b.itemsize) <= 4 else np.float64)


def countable(dtype: np.dtype) -> bool:
    """Whether every bit pattern of a type can have a count of its own."""
    floating = jnp.issubdtype(dtype, np.floating)
    return (
        bool(floating)
        and dtype.itemsize <= 2
        and ml_dtypes.finfo(dtype).bits == 8 * dtype.itemsize
    )


class Counting:
    """Exact, for a type of 8 or 16 bits; memory does not grow."""

    def __init__(self, dtype: np.dtype):
        self._dtype = dtype
        self._bits = np.dtype(f"u{dtype.itemsize}")
        self._count = 256**dtype.itemsize
        self._more = np.zeros(self._count, np.int64)
        self._size = 0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Takes one more slice of each side."""
        self._size += a.size
        self._more += self._counts(a) - self._counts(b)

    def _counts(self, values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values, self._dtype).view(self._bits)
        return np.bincount(bits.ravel(), minlength=self._count)

    def result(self) -> tuple[float, float]:
        """W1 and its error."""
        patterns = np.arange(self._count).astype(self._bits).view(self._dtype)
        with np.errstate(invalid="ignore"):
            values = patterns.astype(np.float64)
        finite = np.flatnonzero(np.isfinite(values))
        order = finite[np.argsort(values[finite])]
        between = np.abs(np.cumsum(self._more[order])[:-1])
        apart = (between * np.diff(values[order])).sum()  # Pairwise.
        return float(apart) / max(self._size, 1), 0.0


class Sorting:
    """Exact; keeps every number of both samples in `dtype`.

    Raises:
      ValueError: more numbers were added than `size`.
    """

    def __init__(self, size: int, dtype: np.dtype):
        self._kept = np.empty((2, size), dtype)
        self._size = 0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Takes one more slice of each side."""
        stop = self._size + a.size
        self._kept[0, self._size : stop] = a.ravel()
        self._kept[1, self._size : stop] = b.ravel()
        self._size = stop

    def result(self) -> tuple[float, float]:
        """W1 and its error."""
        a, b = self._kept[:, : self._size]
        if not a.size:
            return 0.0, 0.0
        if a.size < _CHUNK:
            a.sort()
            b.sort()
        else:
            # NumPy sorts without holding the interpreter.
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(np.ndarray.sort, (a, b)))
        scale = unit(*(float(x) for side in (a, b) for x in (side[0], side[-1])))
        if scale != 1.0:
            a, b = a / scale, b / scale
        # Chunks that stay in the cache, each summed pairwise.
        sums = [
            np.abs(
                np.subtract(a[i : i + _CHUNK], b[i : i + _CHUNK], dtype=np.float64)
            ).sum()
            for i in range(0, a.size, _CHUNK)
        ]
        return float(np.sum(sums)) / a.size * scale, 0.0


class Binning:
    """An interval around W1 in memory that does not grow (32 MiB).

    With C = F_a - F_b known at the edges of each bin and the sum of the numbers in it,
    the integral D of C over the bin is known, and |D| <= integral of |C|: equal where C
    keeps its sign, that is if F_a at the left edge is not below F_b at the right one,
    or the other way round. Elsewhere the integral of |C| is at most w times the larger
    of |F_a(right) - F_b(left)| and |F_b(right) - F_a(left)|, w the width of the bin.
    Further, |mean a - mean b| <= W1 <= mean |a - b|, as any pairing bounds it.

    Args:
      low, high: no number of either sample lies outside; high above low.
    """

    def __init__(self, low: float, high: float):
        self._unit = unit(low, high)
        low, high = low / self._unit, high / self._unit
        self._low = low
        # Divided first: the range of all numbers may overflow where no bin does.
        self._width = max(high / _BINS - low / _BINS, np.finfo(np.float64).tiny)
        self._counts = np.zeros((2, _BINS), np.int64)
        self._above = np.zeros((2, _BINS))  # sum of (right edge - x)
        self._bounds = np.zeros(2)
        self._size = self._slices = self._largest = 0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Takes one more slice of each side."""
        pair = [side.ravel().astype(np.float64) for side in (a, b)]
        if self._unit != 1.0:
            pair = [side / self._unit for side in pair]
        for side, values in enumerate(pair):
            place = (values / 2 - self._low / 2) / (self._width / 2)
            index = np.clip(place.astype(np.int64), 0, _BINS - 1)
            self._counts[side] += np.bincount(index, minlength=_BINS)
            left = (index + 1) - place
            self._above[side] += np.bincount(index, left, minlength=_BINS)
        difference = pair[0] - pair[1]
        self._bounds += difference.sum(), np.abs(difference).sum()
        self._size += a.size
        self._slices += 1
        self._largest = max(self._largest, a.size)

    def result(self) -> tuple[float, float]:
        """W1 and its error."""
        if not self._size:
            return 0.0, 0.0
        right = np.cumsum(self._counts, axis=1)
        left = right - self._counts
        integral = np.abs((left[0] - left[1]) + (self._above[0] - self._above[1]))
        widest = np.maximum(
            np.abs(right[0] - left[1]), np.abs(right[1] - left[0])
        ).astype(np.float64)
        one_sign = (left[0] >= right[1]) | (left[1] >= right[0])
        scale = self._width / self._size
        least = scale * integral.sum()
        most = scale * np.where(one_sign, integral, np.maximum(widest, integral)).sum()
        mean, paired = np.abs(self._bounds) / self._size
        # Roundings: a slice's sum of parts of a bin, none above 1, has a relative error
        # of at most its length; slices and bins add theirs; a number's place is off by
        # 4 units of the range at most, which is _BINS bins.
        eps = np.finfo(np.float64).eps
        terms = self._largest + self._slices + 64
        slack = eps * terms * (most + 2 * self._width) + 8 * eps * _BINS * self._width
        # Where all differences are 0 so is this bound, and W1.
        top = min(most + slack, paired * (1 + eps * terms))
        floor = mean - eps * terms * paired
        bottom = min(max(least - slack, floor, 0.0), top)
        middle = bottom + (top - bottom) / 2
        # Half an interval, and what rounded the two sums.
        error = (top - bottom) / 2 + 2 * eps * middle
        return float(middle) * self._unit, float(error) * self._unit


Distance = Counting | Sorting | Binning


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Exact W1 of the flattened numbers of two arrays, by counting or sorting.

    Args:
      a, b: finite numbers of any floating-point types, as many in one as in the other.

    Raises:
      ValueError: their sizes differ.
    """
    if a.size != b.size:
        raise ValueError(f"{a.size} numbers against {b.size}: W1 here takes as many")
    dtype = common_type(a.dtype, b.dtype)
    kept = Counting(dtype) if countable(dtype) else Sorting(a.size, dtype)
    kept.add(a, b)
    return kept.result()[0]
