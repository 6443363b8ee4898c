"""What rounding drops from out, in one byte, written from its definition alone
('o_hi_lo8' in `recipe_schema`): by counting FP32's numbers."""

import ml_dtypes
import numpy as np

# Bits behind the leading one, and the smallest normal number.
FORMATS = {np.dtype(ml_dtypes.bfloat16): (7, -126), np.dtype(np.float16): (10, -14)}


def _count(x: np.ndarray) -> np.ndarray:
    """Of FP32's numbers from 0 on to the size of some."""
    return np.abs(x.astype(np.float32)).view(np.int32).astype(np.int64)


def _unit(out: np.ndarray) -> int:
    return 2 ** (23 - FORMATS[out.dtype][0] - 8)


def low_part(exact: np.ndarray, out: np.ndarray) -> np.ndarray:
    """q of FP32 numbers and of what they are rounded to, both finite."""
    q = np.floor((_count(exact) - _count(out)) / _unit(out) + 0.5)
    return np.clip(q, -128, 127).astype(np.int8)


def whole(out: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Both parts of a number; `out` is finite."""
    count = _count(out) + low.astype(np.int64) * _unit(out)
    size = count.astype(np.int32).view(np.float32).astype(np.float64)
    return np.copysign(size, out.astype(np.float64))


def spacings(size: np.ndarray, dtype) -> np.ndarray:
    """Of the format's numbers, at positive numbers below infinity."""
    bits, least = FORMATS[np.dtype(dtype)]
    return 2.0 ** (np.maximum(np.frexp(size)[1] - 1.0, least) - bits)
