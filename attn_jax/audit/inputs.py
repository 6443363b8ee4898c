"""Families of attention inputs that separate accurate kernels from inaccurate ones.

Arrays come from NumPy's Philox generator and depend on the seed alone, not on a device.
They are already rounded to the 16-bit type, so the exact result on them is well
defined.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one problem: B, T, S, N, K, H.

    Raises ValueError for sizes below 1, and for N that K does not divide.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    key_heads: int
    head_dim: int

    def __post_init__(self):
        sizes = dataclasses.astuple(self)
        if min(sizes) < 1:
            raise ValueError(f"sizes of a shape are numbers from 1, not {sizes}")
        if self.heads % self.key_heads:
            raise ValueError(
                f"{self.key_heads} key heads do not divide {self.heads} query heads"
            )

    @property
    def query(self) -> tuple[int, int, int, int]:
        return self.batch, self.query_length, self.heads, self.head_dim

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.batch, self.key_length, self.key_heads, self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads for each key head."""
        return self.heads // self.key_heads

    def is_cut(self, shards: int) -> bool:
        """Whether any layout cuts the sequence into so many equal parts: zigzag deals
        two chunks to each."""
        parts = 2 * shards if shards > 1 else 1
        return self.query_length % parts == 0 == self.key_length % parts


class Inputs(NamedTuple):
    """query and dout [B, T, N, H], key and value [B, S, K, H]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray


# What is below it is a logit of -inf to any softmax: so is FP16's least number.
HIDES = -1e4

# Lengths of the documents of a packed sequence, in 64ths of it.
_DOCUMENTS = (24, 16, 10, 6, 4, 2, 1, 1)


def documents(length: int) -> np.ndarray:
    """The number of each position's document in a packed sequence, [length] int32:
    eight documents of unequal length."""
    ends = np.cumsum(_DOCUMENTS) * length // sum(_DOCUMENTS)
    return np.searchsorted(ends, np.arange(length), side="right").astype(np.int32)


Family = Callable[
    [np.random.Generator, Shape], tuple[np.ndarray, np.ndarray, np.ndarray]
]


def make_inputs(
    family: str, seed: int, shape: Shape, dtype=ml_dtypes.bfloat16
) -> Inputs:
    """One draw of a family as arrays of `dtype` (BF16 or FP16); dO ~ N(0, 1).

    Raises ValueError for a family that does not exist.
    """
    if family not in FAMILIES:
        raise ValueError(f"no input family {family!r}; there are {', '.join(FAMILIES)}")
    rng = np.random.Generator(np.random.Philox(seed))
    arrays = *FAMILIES[family](rng, shape), rng.standard_normal(shape.query)
    return Inputs(*(x.astype(np.float32).astype(dtype) for x in arrays))


def make_bias(
    seed: int, shape: Shape, dtype=ml_dtypes.bfloat16, *, hides: bool = False
) -> np.ndarray:
    """A bias ~ 2 N(0, 1) as an array [1, N, T, S] of `dtype`, the same for the whole
    batch, so that its gradient sums over that.

    `hides`: of each query a quarter of the keys, and of every third the first half of
    them, which are whole tiles, in turn by -inf and by the least finite number of the
    format; the last key none does not see.
    """
    # Not the inputs' numbers.
    rng = np.random.Generator(np.random.Philox([seed, 1]))
    T, S = shape.query_length, shape.key_length
    size = 1, shape.heads, T, S
    bias = (2 * rng.standard_normal(size, np.float32)).astype(dtype)
    if hides:
        hidden = rng.random(size, np.float32) < 0.25
        hidden[:, :, ::3, : S // 2] = True
        hidden[..., -1] = False
        by = np.where(np.arange(T) % 2, ml_dtypes.finfo(dtype).min, -np.inf)
        bias = np.where(hidden, by.astype(dtype)[:, None], bias)
    return bias


def most_of_a_bias(bias: np.ndarray) -> float:
    """The largest absolute value of those that do not hide what they are added to."""
    shows = bias > HIDES
    return float(np.abs(bias[shows].astype(np.float64)).max(initial=0.0))


def _normal(rng, shape: Shape):
    return (
        rng.standard_normal(shape.query),
        rng.standard_normal(shape.key),
        rng.standard_normal(shape.key),
    )


def _uniform(rng, shape: Shape):
    """U[0, 1): every average is far from zero, so dQ is a small difference."""
    return rng.random(shape.query), rng.random(shape.key), rng.random(shape.key)


def _offset(rng, shape: Shape):
    """A constant added to K (no effect on the softmax) and to V."""
    q, k, v = _normal(rng, shape)
    return q, k + 1, v + 1


def _outlier(rng, shape: Shape):
    """One entry in a thousand has a tenfold normal added (FlashAttention-3's test)."""
    return tuple(
        x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
        for x in _normal(rng, shape)
    )


def _wide(rng, shape: Shape):
    """Logits of standard deviation 16: nearly one-hot rows."""
    q, k, v = _normal(rng, shape)
    return 4 * q, 4 * k, v


def _very_negative_lse(rng, shape: Shape):
    """One channel shifts every logit by -1600 / sqrt(H): LSE about -130 at H = 128."""
    q, k, v = _normal(rng, shape)
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 40, -40
    return q, k, v


def _very_positive_lse(rng, shape: Shape):
    """The same with the other sign: LSE about +150 at H = 128."""
    q, k, v = _very_negative_lse(rng, shape)
    return q, -k, v


def _repeated_maximum(rng, shape: Shape):
    """Two equal keys share the maximum of every row; eight columns of V are negative.

    P is exactly 1 twice, and all other keys together weigh about 1e-3: the setting in
    which rounding P V is biased (Qiu & Yao, arXiv 2510.04212).
    """
    q, k, v = _normal(rng, shape)
    q[..., 0] = 8
    k[..., 0] = 0
    # The logit that leaves 1e-3 to the others; half their unit variance is the 0.5.
    lead = np.log(500 * shape.key_length) + 0.5
    k[:, :2] = 0
    k[:, :2, :, 0] = lead * shape.head_dim**0.5 / 8
    v[..., :8] = -abs(2.3 + 0.35 * v[..., :8])
    return q, k, v


def _sink(rng, shape: Shape):
    """The first key draws most of the attention and has a small value."""
    q, k, v = _normal(rng, shape)
    q[..., 0] += 3
    k[:, 0, :, 0] += 30
    v[:, 0] *= 0.1
    return q, k, v


def _zero_key_unit_value(rng, shape: Shape):
    """K = 0 and V = 1: the output is 1, dQ and dK vanish exactly."""
    return rng.standard_normal(shape.query), np.zeros(shape.key), np.ones(shape.key)


def _drift(rng, shape: Shape):
    """Keys whose mean moves along the sequence, from 0 to 4, and V with a mean."""
    q, k, v = _normal(rng, shape)
    position = np.arange(shape.key_length)[:, None, None] / shape.key_length
    return q, k + 4 * position, v + 1


def _own_means(rng, shape: Shape):
    """Each of eight documents has means of its own in K and V, of deviation 2."""
    q, k, v = _normal(rng, shape)
    of = documents(shape.key_length)
    means = 2 * rng.standard_normal((2, of.max() + 1, shape.key_heads, shape.head_dim))
    return q, k + means[0][of], v + means[1][of]


FAMILIES: dict[str, Family] = {
    "normal": _normal,
    "uniform": _uniform,
    "offset": _offset,
    "outlier": _outlier,
    "wide": _wide,
    "lse-130": _very_negative_lse,
    "lse+150": _very_positive_lse,
    "repeated_max": _repeated_maximum,
    "sink": _sink,
    "zero_k_one_v": _zero_key_unit_value,
    "drift": _drift,
    "own_means": _own_means,
}
