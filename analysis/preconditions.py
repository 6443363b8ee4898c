"""What makes low-precision attention fail, read off the Q, K, V and dO of one head.

Of a head, for every example b of a batch, x = s Q K^T with s = H^-1/2 and without a
mask, S = Q K^T, m the largest of a row, P = softmax(x), T rows (queries) and S keys. F
is the format that the arrays came in, 2^-p the spacing of its numbers below 1 (BF16
2^-8, FP16 2^-11). Everything is computed in FP64, one example and head at a time, so
memory holds a few T x S arrays.

Pooling: a share or a mean square is over the rows (or keys) of all examples. A mean
over keys is one example's, since no row sees another's keys.

    not_finite       values of Q, K, V and dO that are NaN or infinite; with any, all
                     that follows is empty
    tied_maxima      share of rows where two or more keys have the row's largest logit,
                     max_j FP32(S_ij), exactly. FP32(S) is the product rounded once: it
                     depends on no order of additions
    repeated_ones    share of rows where two or more keys have F(exp(s (FP32(S) - m))) =
                     1. It holds every tie. This is where Qiu & Yao (arXiv 2510.04212)
                     find rounding biased: several weights are exactly 1, so values of V
                     add in the same place and with one sign carry out of it
    faint_rest       share of rows whose weight but the largest, sum_j exp(x_j - m) less
                     the largest's 1, is below 2^-p / 2: half the spacing of F below 1.
                     Beside the largest weight nothing of the rest is seen in F
    v_coherence_max  |mean_j V_jh| / sqrt(mean_j V_jh^2) of column h and example b: 1 if
                     V is a constant, about S^-1/2 if its signs are random; the largest
    v_coherence_rms  its root mean square over columns and examples
    sink_weight      the largest mean_i P_ij of any key j and example: the sink's
    sink_key         j of that key, from 0
    sink_v           |V_j| of that key over the median |V| of the keys of its example
    logit_spread     sqrt(mean_i (max_j x_ij - mean_j x_ij)^2)
    logit_max        max_ij |x_ij|
    lse_min, lse_max the least and largest of log sum_j exp x_ij
    k_mean           sqrt(mean_b |mean_j K_bj|^2) / sqrt(mean_bj |K_bj - mean_j K_bj|^2)
    v_mean           the same of V
    dq_RECIPE        error of dQ as the emulator predicts it for a recipe, with F for
                     its inputs: RMS over that of the exact dQ rounded once to F
                     (`audit.error.unit`); empty where dO is zero, infinite where dQ
                     overflows. Captured arrays are taken as they are
    dq_ratio         dq_flash2 / dq_attn_jax_hopper; empty where this is infinite
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

from analysis.agreement import FORMATS
from analysis.record import Row
from attn_jax import emulator
from attn_jax.audit.error import correctly_rounded, in_units, unit_error
from attn_jax.audit.inputs import Inputs
from attn_jax.audit.programs import results
from attn_jax.formats import NumberFormat
from attn_jax.recipe import ATTN_JAX_HOPPER, FLASH2, Recipe
from attn_jax.reference import default_scale, golden

RECIPES = (FLASH2, ATTN_JAX_HOPPER)
DQ = tuple(f"dq_{recipe.name}" for recipe in RECIPES)
# In the order of a row.
COLUMNS = (
    *("tied_maxima", "repeated_ones", "faint_rest"),
    *("v_coherence_max", "v_coherence_rms"),
    *("sink_weight", "sink_key", "sink_v"),
    *("logit_spread", "logit_max", "lse_min", "lse_max"),
    *("k_mean", "v_mean"),
    *DQ,
    "dq_ratio",
)


def heads(inputs: Inputs) -> Iterator[Row]:
    """One row for each query head, with `not_finite` and `COLUMNS`.

    Arrays are BF16 or FP16: query and dout [B, T, N, H], key and value [B, S, K, H].
    """
    query_heads, key_heads = inputs.query.shape[2], inputs.key.shape[2]
    group = query_heads // key_heads
    fmt = FORMATS[inputs.query.dtype.name]
    for k in range(key_heads):
        # The heads that share keys are one problem to a kernel.
        queries, keys = slice(k * group, (k + 1) * group), slice(k, k + 1)
        query, key, value, dout = inputs
        of_group = Inputs(
            query[:, :, queries],
            key[:, :, keys],
            value[:, :, keys],
            dout[:, :, queries],
        )
        lost = [sum(map(_not_finite, arrays)) for arrays in _each(of_group)]
        # A head that lost a number would spoil what the others share with it, and one
        # without dO has no dQ to predict.
        chosen = [
            g
            for g, (*_, dout) in enumerate(_each(of_group))
            if not lost[g] and dout.astype(np.float32).any()
        ]
        predicted = dict(zip(chosen, _predicted(_only(of_group, chosen), fmt)))
        for g, arrays in enumerate(_each(of_group)):
            row: Row = {"head": k * group + g, "not_finite": lost[g]}
            row |= dict.fromkeys(COLUMNS)
            if not lost[g]:
                row |= _of_head(arrays, fmt) | predicted.get(g, {})
            yield row


def _only(group: Inputs, chosen: list[int]) -> Inputs:
    query, key, value, dout = group
    return Inputs(query[:, :, chosen], key, value, dout[:, :, chosen])


def _each(inputs: Inputs) -> Iterator[tuple[np.ndarray, ...]]:
    """query, key, value and dout, [B, T or S, H], of every head of a group."""
    for g in range(inputs.query.shape[2]):
        key, value = inputs.key[:, :, 0], inputs.value[:, :, 0]
        yield inputs.query[:, :, g], key, value, inputs.dout[:, :, g]


def _not_finite(x: np.ndarray) -> int:
    return int((~np.isfinite(x.astype(np.float32))).sum())


def _of_head(arrays: tuple[np.ndarray, ...], fmt: NumberFormat) -> Row:
    """All but dQ; of query, key, value and dout, [B, T or S, H]."""
    query, key, value, _ = (x.astype(np.float64) for x in arrays)
    scale = default_scale(None, query.shape[-1])
    found = [
        _of_example(q, k, v, scale, fmt)
        for q, k, v in zip(query, key, value, strict=True)
    ]
    sink = max(found, key=lambda one: one["sink_weight"])
    coherence = _coherence(value)
    row = {
        name: float(np.mean([one[name] for one in found]))
        for name in ("tied_maxima", "repeated_ones", "faint_rest")
    }
    return row | {
        "v_coherence_max": float(coherence.max()),
        "v_coherence_rms": _rms(coherence),
        **{name: sink[name] for name in ("sink_weight", "sink_key", "sink_v")},
        "logit_spread": _rms(np.array([one["logit_spread"] for one in found])),
        "logit_max": max(one["logit_max"] for one in found),
        "lse_min": min(one["lse_min"] for one in found),
        "lse_max": max(one["lse_max"] for one in found),
        "k_mean": _mean_over_spread(key),
        "v_mean": _mean_over_spread(value),
    }


def _of_example(
    query: Float64[np.ndarray, "T H"],
    key: Float64[np.ndarray, "S H"],
    value: Float64[np.ndarray, "S H"],
    scale: float,
    fmt: NumberFormat,
) -> Row:
    product = query @ key.T
    narrow = product.astype(np.float32).astype(np.float64)
    below = narrow - narrow.max(-1, keepdims=True)
    ties = (below == 0).sum(-1)
    # Ones lie next to the maximum: only there is there anything to round.
    near = scale * below > -1.0
    ones = np.zeros(product.shape, bool)
    ones[near] = correctly_rounded(np.exp(scale * below[near]), fmt) == 1
    x = scale * product
    del product, narrow, below, near
    largest = x.max(-1, keepdims=True)
    spread = largest[:, 0] - x.mean(-1)
    weights = np.exp(x - largest)
    rest = weights.copy()
    np.put_along_axis(rest, weights.argmax(-1)[:, None], 0.0, axis=-1)
    rest = rest.sum(-1)
    total = 1 + rest
    lse = largest[:, 0] + np.log(total)
    mean_weight = (weights / total[:, None]).mean(0)
    sink = int(mean_weight.argmax())
    sizes = np.linalg.norm(value, axis=-1)
    return {
        "tied_maxima": float((ties > 1).mean()),
        "repeated_ones": float((ones.sum(-1) > 1).mean()),
        "faint_rest": float((rest < fmt.unit_roundoff / 2).mean()),
        "sink_weight": float(mean_weight[sink]),
        "sink_key": sink,
        "sink_v": in_units(sizes[sink], np.median(sizes)),
        "logit_spread": _rms(spread),
        "logit_max": float(abs(x).max()),
        "lse_min": float(lse.min()),
        "lse_max": float(lse.max()),
    }


def _coherence(value: Float64[np.ndarray, "B S H"]) -> Float64[np.ndarray, "B H"]:
    mean, size = abs(value.mean(1)), np.sqrt(np.square(value).mean(1))
    # A column of zeros has no sign.
    return np.divide(mean, size, out=np.zeros_like(mean), where=size > 0)


def _mean_over_spread(x: Float64[np.ndarray, "B S H"]) -> float:
    mean = x.mean(1, keepdims=True)
    # |.| of vectors: H times both mean squares.
    return in_units(_rms(mean), _rms(x - mean))


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _predicted(inputs: Inputs, fmt: NumberFormat) -> list[Row]:
    """The columns of dQ of each query head, [B, T, G, H] and [B, S, 1, H]."""
    count = inputs.query.shape[2]
    if not count:
        return []
    exact = golden(*inputs).dquery
    # What dQ is measured by where it vanishes.
    sizes = golden(*inputs, absolute=True).dquery
    found: list[Row] = [{} for _ in range(count)]
    for recipe, name in zip(RECIPES, DQ, strict=True):
        result = emulated_dq(recipe.with_inputs(fmt), inputs)
        for g, row in enumerate(found):
            of_head = (result[:, :, g], exact[:, :, g], fmt, sizes[:, :, g])
            units = unit_error(*of_head)
            row[name] = math.inf if math.isnan(units) else units
    for row in found:
        flash2, ours = (row[name] for name in DQ)
        row["dq_ratio"] = in_units(flash2, ours) if math.isfinite(ours) else None
    return found


def emulated_dq(recipe: Recipe, inputs: Inputs) -> Float[np.ndarray, "B T N H"]:
    """dQ as a recipe rounds it, in the arrays' own type."""
    with jax.enable_x64(False):
        found = _program(recipe)(*map(jnp.asarray, inputs))
        return jax.device_get(found["dquery"])


@functools.cache
def _program(recipe: Recipe):
    # As `audit.attribution.predict` compiles it: the scale is the default, no mask.
    attend = functools.partial(emulator.attention, recipe=recipe)
    return jax.jit(functools.partial(results, attend, True))
