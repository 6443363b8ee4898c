"""Masks, sinks, soft caps and biases that kernels are tried on, for any lengths."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from attn_jax.audit.error import unit
from attn_jax.formats import BF16, FP16
from attn_jax.mask import Mask
from attn_jax.reference import Golden, golden

FORMATS = {"bfloat16": BF16, "float16": FP16}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class Bias(NamedTuple):
    """N(0, 1) of a shape that broadcasts to [B, N, T, S].

    `hides`: a tenth is -inf, and so is all of the last head at one of its queries, or
    at its only entry for all of them, so that these see nothing.
    """

    shape: tuple[int, int, int, int]
    dtype: str = "float32"
    hides: bool = False

    def array(self) -> np.ndarray:
        rng = np.random.default_rng(3)
        x = rng.standard_normal(self.shape)
        if self.hides:
            x[rng.random(self.shape) < 0.1] = -np.inf
            x[:, -1, self.shape[2] // 3] = -np.inf
        return x.astype(DTYPES.get(self.dtype, self.dtype))


class Case(NamedTuple):
    mask: Mask
    head_dim: int
    dtype: str = "bfloat16"
    sinks: tuple[float, ...] | None = None
    soft_cap: float | None = None
    batch: int = 1
    bias: Bias | None = None


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


# The last few are kept: a check asks for its case again and again.
@functools.lru_cache(maxsize=4)
def mask_cases(queries: int, keys: int, heads: int) -> Mapping[str, Case]:
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
        "bias-for-all-heads": Case(
            Mask(is_causal=True),
            64,
            bias=Bias((1, 1, queries, keys), "bfloat16", hides=True),
        ),
        "bias-soft-cap": Case(
            Mask(
                window=(70, 3),
                query_segment_ids=_ids(queries, 0.4).repeat(2, 0),
                key_value_segment_ids=_ids(keys, 0.3).repeat(2, 0),
            ),
            128,
            soft_cap=20.0,
            dtype="float16",
            batch=2,
            bias=Bias((2, heads, queries, keys)),
        ),
        "bias-for-all-queries": Case(
            Mask(), 64, sinks=sinks, bias=Bias((1, heads, 1, keys), hides=True)
        ),
        "bias-for-all-keys": Case(
            Mask(key_value_lengths=np.array([keys, keys * 4 // 9])),
            64,
            batch=2,
            bias=Bias((2, 1, queries, 1)),
        ),
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


def bias_gradient_bound(case: Case, inputs: tuple, dlse: np.ndarray) -> np.ndarray:
    """How far dbias may be off, in the bias's shape; `inputs` are query, key, value and
    dout.

    dS = P (dP - delta) slope is off by P slope times the error of delta, as in
    `sink_gradient_bound`, and by what FP32 makes of P and of sums; dbias by no more
    than the sum of those, and by its own rounding. The sum of P slope is the gradient
    of LSE.
    """
    assert case.bias is not None
    bias = case.bias.array()
    query, key, value, dout = inputs
    sinks = None if case.sinks is None else np.asarray(case.sinks)
    results = functools.partial(
        golden, bias=bias, mask=case.mask, sinks=sinks, soft_cap=case.soft_cap
    )
    exact = results(query, key, value, dout, dlse)
    weight = results(query, key, value, np.zeros_like(dout), np.ones_like(dlse)).dbias
    assert exact.dbias is not None and weight is not None
    of_query, of_key, of_value, of_dout = (
        np.linalg.norm(x.astype(np.float64), axis=-1).max() for x in inputs
    )
    head_dim = query.shape[-1]
    logit = of_query * of_key * head_dim**-0.5
    added = dlse.size * key.shape[1] // bias.size
    small = 2.0**-24 * ((head_dim + 8) * logit + added)
    off = 4 * 1.7 * unit(exact.out, FORMATS[case.dtype])[0] * of_dout
    bound = weight * (off + small * (2 * of_dout * of_value + np.abs(dlse).max()))
    if case.bias.dtype in FORMATS:
        once = FORMATS[case.bias.dtype].unit_roundoff
        bound += once * (np.abs(exact.dbias) + bound)
    return bound
