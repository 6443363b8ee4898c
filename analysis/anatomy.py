"""The error of dQ taken apart: what each rounding of FlashAttention-2 adds to it.

With e the error of delta, eps the rounding errors of dS and r their sums over rows,

    dQ as computed - dQ = - scale diag(e) P K             from delta
                          + scale r mean(K)               dS rounded: the mean of K
                          + scale eps (K - mean(K))       and what is left of it
                          + rounding of dQ itself

Everything but the roundings is exact (FP64), and each rounds what those before it
left, so that the parts add up to what an emulated kernel, which rounds to FP32
elsewhere, is off by.
"""

from collections.abc import Sequence

import numpy as np

from analysis import gradients
from analysis.inputs import Problem
from analysis.record import Row
from attn_jax.audit.error import correctly_rounded, unit_error
from attn_jax.audit.inputs import Inputs
from attn_jax.formats import BF16, NumberFormat
from attn_jax.recipe import FLASH2

O_ROUNDED = "O rounded, in delta"
P_ROUNDED = "P rounded, in delta"
DS_MEAN = "dS rounded, on the mean of K"
DS_REST = "dS rounded, on the rest of K"
DQ_ROUNDED = "dQ rounded"


def parts(inputs: Inputs, fmt: NumberFormat = BF16) -> dict[str, np.ndarray]:
    """The error that each rounding leaves in dQ [B, T, N, H], all heads with a key head
    of their own and no mask."""
    q, k, v, do = (np.asarray(x, np.float64).swapaxes(1, 2) for x in inputs)
    scale = 1 / np.sqrt(q.shape[-1])
    logits = scale * q @ k.swapaxes(2, 3)
    top = logits.max(-1, keepdims=True)
    # P is rounded relative to the largest logit so far, block by block of keys.
    largest = np.maximum.accumulate(logits, -1)
    block = np.arange(logits.shape[-1]) // FLASH2.block_kv
    so_far = largest[..., np.append(np.flatnonzero(np.diff(block)), -1)][..., block]
    weight = np.exp(logits - so_far)
    row_sum = np.exp(logits - top).sum(-1, keepdims=True)
    later = np.exp(so_far - top) / row_sum
    p = weight * later
    o = p @ v
    dp = do @ v.swapaxes(2, 3)
    delta = (p * dp).sum(-1, keepdims=True)
    from_rounded_p = (correctly_rounded(weight, fmt) * later) @ v
    changes = {
        O_ROUNDED: correctly_rounded(from_rounded_p, fmt) - from_rounded_p,
        P_ROUNDED: from_rounded_p - o,
    }
    of_delta = {n: (do * x).sum(-1, keepdims=True) for n, x in changes.items()}
    ds = p * (dp - delta - sum(of_delta.values()))
    eps = correctly_rounded(ds, fmt) - ds
    mean = k.mean(2, keepdims=True)
    dq = scale * (ds + eps) @ k
    found = {name: -scale * e * (p @ k) for name, e in of_delta.items()} | {
        DS_MEAN: scale * eps.sum(-1, keepdims=True) * mean,
        DS_REST: scale * eps @ (k - mean),
        DQ_ROUNDED: correctly_rounded(dq, fmt) - dq,
    }
    return {name: part.swapaxes(1, 2) for name, part in found.items()}


def measure(problem: Problem) -> tuple[list[Row], Row]:
    """The parts of a problem, draw by draw, and how they fit the emulator's flash2.

    A row has `part`, `seed` and `units`, the RMS over that of rounding the exact dQ
    once. The second table's line has `parts`, the root of the parts' summed squares,
    `flash2`, what the emulated kernel is off by, both in units, and `explained`, the
    share of its squared error that is gone once the parts are taken from it.
    """
    found, exact = parts(problem.inputs), problem.exact.dquery
    dq = gradients.results(FLASH2, problem.inputs)["dq"].astype(np.float64)
    rows = [
        {"part": name, "seed": seed, "units": unit_error(one + part[seed], one, BF16)}
        for name, part in found.items()
        for seed, one in enumerate(exact)
    ]
    left = dq - exact - sum(found.values())
    return rows, {
        "parts": float(np.sqrt(sum(pooled(rows, name) ** 2 for name in found))),
        "flash2": unit_error(dq, exact, BF16),
        "explained": float(1 - np.square(left).sum() / np.square(dq - exact).sum()),
    }


def pooled(rows: Sequence[Row], part: str) -> float:
    """The RMS over draws of one part's units."""
    return float(np.sqrt(np.mean([r["units"] ** 2 for r in rows if r["part"] == part])))
