"""dQ as a sum of integers: the error of that alone, in FP64, on any machine.

    python prototypes/integer_sums.py [LENGTH]

dS and K' = K - mean(K) times powers of two, at most 2^15 each; what a tile of 128 keys
adds to dQ is rounded to int32, and nothing else is rounded. For each family of inputs
and mask: RMS error in units of the exact result rounded once to BF16, the larger of two
heads of 64; then of the row where it is largest in that row's own unit.
"""

import sys

import ml_dtypes
import numpy as np

from attn_jax.audit.inputs import FAMILIES, Shape, make_inputs

TILE = 128


def rms(x, axis=None):
    return np.sqrt(np.mean(x**2, axis=axis))


def errors(q, k, v, dout, is_causal: bool) -> tuple[float, float]:
    """(in units, of the worst row in its own unit) of one head, [length, 64] each."""
    length, head_dim = q.shape
    scale = head_dim**-0.5
    s = scale * q @ k.T
    if is_causal:
        s = np.where(np.tril(np.ones_like(s)) > 0, s, -np.inf)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dp = dout @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    exact = scale * ds @ k
    keys = k - k.mean(axis=0)
    # Rows of |dS| sum to this at most.
    bound = 2 * np.linalg.norm(dout, axis=1).max() * np.linalg.norm(v, axis=1).max()
    of_ds, of_keys = (2.0 ** (15 - np.frexp(x)[1]) for x in (bound, np.abs(keys).max()))
    total = np.zeros_like(q)
    for start in range(0, length, TILE):
        tile = slice(start, start + TILE)
        total += np.rint((of_ds * ds[:, tile]) @ (of_keys * keys[tile]))
    assert np.abs(total).max() < 2.0**31
    error = scale * total / (of_ds * of_keys) - exact
    rounding = exact.astype(ml_dtypes.bfloat16).astype(float) - exact
    of_row = rms(error, 1) / np.where(rms(rounding, 1) > 0, rms(rounding, 1), np.inf)
    return rms(error) / rms(rounding), of_row.max()


def main(length: int = 1024) -> None:
    shape = Shape(1, length, length, 2, 2, 64)
    # Keys that are all 0 leave nothing to add.
    for family in (name for name in FAMILIES if name != "zero_k_one_v"):
        inputs = [x.astype(float) for x in make_inputs(family, 0, shape)]
        for is_causal in (False, True):
            heads = [
                errors(*(x[0, :, head] for x in inputs), is_causal) for head in range(2)
            ]
            units, of_row = map(max, zip(*heads, strict=True))
            mask = "causal" if is_causal else "full"
            print(f"{family:13} {mask:7} {units:.1e} units, worst row {of_row:.1e}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
