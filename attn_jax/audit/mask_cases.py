"""Masks, sinks and soft caps that kernels are tried on, for any lengths."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from attn_jax.audit.error import unit
from attn_jax.formats import BF16, FP16
from attn_jax.mask import Mask
from attn_jax.reference import Golden

FORMATS = {"bfloat16": BF16, "float16": FP16}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class Case(NamedTuple):
    mask: Mask
    head_dim: int
    dtype: str = "bfloat16"
    sinks: tuple[float, ...] | None = None
    soft_cap: float | None = None
    batch: int = 1


def _ids(length: int, *ends: float) -> np.ndarray:
    """Ids that grow by one at each of `ends`, fractions of the length: [1, length]."""
    steps = [round(end * length) for end in ends]
    return np.searchsorted(steps, np.arange(length), side="right")[None].astype(
        np.int32
    )


def _dense(queries: int, keys: int, heads: int) -> np.ndarray:
    """Sparse; the last head's later rows, whole tiles of them, see nothing."""
    seen = np.random.default_rng(0).random((1, heads, queries, keys)) < 0.02
    seen[:, -1, queries * 64 // 150 :] = False
    return seen


def mask_cases(queries: int, keys: int, heads: int) -> dict[str, Case]:
    """Cases by name; `keys` must be larger than `queries`, both at least 100."""
    sinks = tuple(np.linspace(-2.0, 1.5, heads).tolist())
    last = np.array([keys - queries])  # Aligns the last query with the last key.
    return {
        "window": Case(Mask(window=(40, 10)), 64),
        # The first block of keys is not among those that are visited.
        "window-far": Case(Mask(window=(10, 10), query_offset=last), 64),
        "window-after-offset": Case(
            Mask(is_causal=True, window=(60, None), query_offset=np.array([-50])), 128
        ),
        "causal-to-the-last-key": Case(
            Mask(is_causal=True, query_offset=last), 64, sinks=sinks
        ),
        "lengths": Case(
            Mask(
                query_lengths=np.array([queries * 2 // 3, queries]),
                key_value_lengths=np.array([keys * 4 // 9, 0]),
            ),
            64,
            dtype="float16",
            sinks=sinks,
            batch=2,
        ),
        "documents": Case(
            Mask(
                is_causal=True,
                query_segment_ids=_ids(queries, 0.02, 0.6, 0.66),
                key_value_segment_ids=_ids(keys, 0.24, 0.31, 0.35),
            ),
            128,
        ),
        "unsorted": Case(
            Mask(
                query_segment_ids=np.arange(queries)[None].astype(np.int32) % 3,
                key_value_segment_ids=np.arange(keys)[None].astype(np.int32) % 5,
            ),
            64,
        ),
        "dense": Case(Mask(dense=_dense(queries, keys, heads)), 64),
        "soft-cap": Case(Mask(is_causal=True), 64, soft_cap=3.0),
        "soft-cap-window": Case(
            Mask(window=(70, 3)), 128, soft_cap=20.0, sinks=sinks, dtype="float16"
        ),
        "sink-alone": Case(Mask(), 128, sinks=sinks),
    }


def sink_gradient_bound(golden: Golden, sinks, dout, dtype: str) -> np.ndarray:
    """How far dsinks may be off, [N].

    dsink = -sum_i P_i (dO_i . out_i - dLSE_i): the error of out, which is random and at
    most 1.7 units, through the sum; four standard deviations.
    """
    off, _ = unit(golden.out, FORMATS[dtype])
    weight = np.exp(np.asarray(sinks)[:, None] - golden.lse) ** 2
    squares = (np.asarray(dout, np.float64) ** 2).sum(-1).swapaxes(1, 2)
    return 4 * 1.7 * off * np.sqrt((weight * squares).sum((0, 2)))
