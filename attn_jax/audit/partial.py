"""Exact results on W equal parts of the keys, for checking merges (`merge`)."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from attn_jax.audit.alone import ALONE
from attn_jax.audit.error import correctly_rounded, in_units
from attn_jax.audit.inputs import Inputs
from attn_jax.audit.problem import Problem
from attn_jax.formats import NumberFormat
from attn_jax.mask import Mask
from attn_jax.reference import golden, lower_golden

# Names of the formats of out_w and LSE_w.
Combination = tuple[str, str]


def part_mask(mask: Mask, parts: int, batch: int, keys: int) -> Mask:
    """The mask of all parts as entries of a batch, part w of entry b at b parts + w."""
    if parts == 1:
        return mask
    starts = np.tile(np.arange(parts) * (keys // parts), batch)
    changes = {}
    for name in ("query_lengths", "query_segment_ids"):
        if getattr(mask, name) is not None:
            changes[name] = np.repeat(getattr(mask, name), parts, 0)
    if mask.key_value_lengths is not None:
        left = np.repeat(mask.key_value_lengths, parts) - starts
        changes["key_value_lengths"] = np.clip(left, 0, keys // parts).astype(np.int32)
    if mask.key_value_segment_ids is not None:
        ids = np.asarray(mask.key_value_segment_ids)
        changes["key_value_segment_ids"] = ids.reshape(batch * parts, -1)
    if mask.band != (None, None):
        offset = np.zeros(batch) if mask.query_offset is None else mask.query_offset
        changes["query_offset"] = (np.repeat(offset, parts) - starts).astype(np.int32)
    if mask.dense is not None:
        dense = np.broadcast_to(mask.dense, (batch, *mask.dense.shape[1:3], keys))
        dense = dense.reshape(*dense.shape[:3], parts, -1)
        changes["dense"] = np.moveaxis(dense, 3, 1).reshape(
            batch * parts, *dense.shape[1:3], -1
        )
    return dataclasses.replace(mask, **changes)


def in_parts(x: np.ndarray, parts: int) -> np.ndarray:
    """[B, S, ...] to [B parts, S / parts, ...]."""
    return x.reshape(len(x) * parts, -1, *x.shape[2:])


def summed(x: np.ndarray, parts: int) -> np.ndarray:
    return x.reshape(-1, parts, *x.shape[1:]).sum(1)


@dataclasses.dataclass(frozen=True)
class Partial:
    """Exact out [B, W, T, N, H] and LSE [B, W, N, T]; the folded inputs and mask."""

    out: np.ndarray
    lse: np.ndarray
    inputs: Inputs
    mask: Mask


def exact_parts(problem: Problem, parts: int) -> Partial:
    inputs = problem.inputs
    B, S = inputs.key.shape[:2]
    folded = Inputs(
        np.repeat(inputs.query, parts, 0),
        in_parts(inputs.key, parts),
        in_parts(inputs.value, parts),
        np.repeat(inputs.dout, parts, 0),
    )
    mask = part_mask(problem.rules, parts, B, S)
    with ALONE:
        of = golden(*folded, mask=mask, scale=problem.scale)
    out, lse = (x.reshape(B, parts, *x.shape[1:]) for x in (of.out, of.lse))
    return Partial(out, lse, folded, mask)


def lower_parts(problem: Problem, parts: int) -> jax.stages.Lowered:
    """What `exact_parts` runs."""
    s = problem.shape
    keys = s.key_length // parts
    return lower_golden(
        (s.batch * parts, s.query_length, keys, s.head_dim, s.head_dim),
        mask=part_mask(problem.rules, parts, s.batch, s.key_length),
        scale=problem.scale,
        bias=False,
    )


def weights_of(lse: np.ndarray) -> np.ndarray:
    """[B, W, N, T] to the weights of parts [B, W, T, N, 1], in the type given."""
    top = lse.max(1, keepdims=True)
    e = np.exp(lse - np.where(np.isneginf(top), lse.dtype.type(0), top))
    total = e.sum(1, keepdims=True)
    weight = e / np.where(total == 0, lse.dtype.type(1), total)
    return weight.swapaxes(2, 3)[..., None]


def _rounded(x: np.ndarray, fmt: NumberFormat) -> np.ndarray:
    """To the format, as float32; -inf stays."""
    return correctly_rounded(x, fmt).astype(np.float32)


def _merged_as(
    x: Partial, of_out: Iterable[NumberFormat], of_lse: Iterable[NumberFormat]
) -> dict[Combination, np.ndarray]:
    """out [B, T, N, H] of exact partial results in such formats, merged in FP32."""
    weights = {fmt.name: weights_of(_rounded(x.lse, fmt)) for fmt in of_lse}
    B, _, T, *rest = x.out.shape
    found = {
        (fmt.name, of_lse): np.empty((B, T, *rest), np.float32)
        for fmt in of_out
        for of_lse in weights
    }
    # By query: all parts of all are more than a cache holds, many times.
    for b, t in np.ndindex(B, T):
        of_parts = x.out[b, :, t]
        for fmt in of_out:
            rounded = _rounded(of_parts, fmt)
            for name, weight in weights.items():
                merged = (weight[b, :, t] * rounded).sum(0, dtype=np.float32)
                found[fmt.name, name][b, t] = merged
    return found


def predict(
    problem: Problem,
    partial: Mapping[int, Partial],
    whole: np.ndarray,
    of_out: Iterable[NumberFormat],
    of_lse: Iterable[NumberFormat],
    alone: float,
) -> dict[Combination, dict[int, float]]:
    """Units of out that exact partial results give when rounded so, by W.

    The target's error in one part, beyond that of this prediction, is independent and
    is added in squares: splitting the keys does not change how P rounds.
    """
    against = problem.yardstick("out", problem.format)
    units: dict[Combination, dict[int, float]] = {}
    for w, x in partial.items():
        for combination, out in _merged_as(x, of_out, of_lse).items():
            error = correctly_rounded(out, problem.format) - whole
            size = in_units(float(np.sqrt(np.mean(error**2))), against.unit)
            units.setdefault(combination, {})[w] = size
    for of_parts in units.values():
        inner = max(alone**2 - of_parts[1] ** 2, 0.0)
        of_parts |= {w: float(np.hypot(e, inner**0.5)) for w, e in of_parts.items()}
    return units
