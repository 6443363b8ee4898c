"""What rounding drops from out, in one byte, written from its definition alone
('o_hi_lo8' in `recipe_schema`), in NumPy's float64."""

import ml_dtypes
import numpy as np

# (bits behind the leading one, exponent of the smallest normal number)
_FORMATS = {np.dtype(ml_dtypes.bfloat16): (7, -126), np.dtype(np.float16): (10, -14)}


def spacings(size: np.ndarray, dtype) -> np.ndarray:
    """Of the format's numbers, at positive numbers below infinity."""
    bits, least = _FORMATS[np.dtype(dtype)]
    exponent = np.frexp(size)[1] - 1.0
    return 2.0 ** (np.where(size == 0, least, np.maximum(exponent, least)) - bits)


def low_part(exact: np.ndarray, out: np.ndarray) -> np.ndarray:
    """q of FP32 numbers and of what they are rounded to, both finite."""
    size = abs(exact.astype(np.float64))
    rest = size - abs(out.astype(np.float64))
    q = np.floor(rest / spacings(size, out.dtype) * 256 + 0.5)
    return np.minimum(q, 127).astype(np.int8)


def whole(out: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Both parts of a number; `out` is finite."""
    size, q = abs(out.astype(np.float64)), low.astype(np.float64)
    # What is less than a power of two is among numbers that lie closer.
    at = np.where(q < 0, np.nextafter(size, 0), size)
    return np.copysign(size + q * spacings(at, out.dtype) / 256, out.astype(np.float64))
