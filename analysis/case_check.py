"""The check of random cases: attention run twice, FP64, bounds, and what fails.

For each case and tensor x^ (out, LSE, dQ, dK, dV, dbias, dsinks), with the exact x of
`reference.golden` on the same inputs and the deterministic bound b of
`attn_jax.bounds.bound` for the recipe that the kernels declare:

    |x^ - x| <= b + 2^-40 X         where b is finite; beside it FP64's own error, with
                                    X the larger of max |x| and, entry by entry, the
                                    sum of the absolute values of x's terms
    x^ finite                       where b and x are
    x^ = 0                          out and dQ of a row, dK and dV of a key, that
                                    take part in no pair; LSE is -inf there, or near
                                    the sink's logit
    a second run                    the same bits

Where numbers may leave a format's range b is infinite; such entries are counted and
not judged. The recipe's `output` is float32 where that is asked for. What the bounds
take from the kernels beside their recipe is the centre that dQ is corrected by, which
for dense masks, segment ids, causal masks and soft caps is another than the recipe's
(`kernel_centre`). dsinks is a sum over a batch, judged once for it and noted with each
of its cases.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from analysis import cases
from analysis.agreement import FORMATS
from analysis.cases import Batch, Case, Program
from analysis.record import Row
from attn_jax import dot_product_attention
from attn_jax.api import Implementation
from attn_jax.audit.error import correctly_rounded
from attn_jax.bounds import Bounds, bound
from attn_jax.formats import FP32
from attn_jax.mask import Mask
from attn_jax.recipe import Recipe, Step
from attn_jax.reference import Golden, golden

# Column -> field of `Golden` and `Bounds`.
TENSORS = {
    "out": "out",
    "lse": "lse",
    "dq": "dquery",
    "dk": "dkey",
    "dv": "dvalue",
    "dbias": "dbias",
    "dsinks": "dsinks",
}
# Those that are rounded once to a format, and so have an error in units of that.
ROUNDED = "out", "lse", "dq", "dk", "dv"
# FP64 sums of at most some thousand terms, n u of the sum of their absolute values.
_GOLDEN_ERROR = 2.0**-40
# An exact result this much smaller than the bound is FP64 noise about zero.
_VANISHING = 2.0**-24

# (query, key, value, mask, sinks, bias) -> out and, with `residual`, LSE [B, T, N].
Attention = Callable[..., Any]
Results = dict[str, Any]


def recipe_of(program: Program) -> Recipe:
    """The kernels' recipe for a program, with the output that it asks for."""
    # Imported on use: the kernels refuse a JAX that they do not know.
    from attn_jax.kernels.attention import declared_recipe

    recipe = declared_recipe(
        *(jnp.dtype(program.dtype), program.H, program.S, _rules(program)),
        query_length=program.T,
        soft_cap=program.soft_cap,
        has_bias=program.bias is not None,
        backward="fused" if program.one_pass else None,
        pairs=cases.BATCH * program.K,
        group=program.N // program.K,
    )
    if program.wide:
        recipe = dataclasses.replace(recipe, output=Step(FP32))
    return recipe


def _in_one_pass(program: Program) -> Attention:
    """The kernels, with that design of the backward pass where there is one."""
    from attn_jax.kernels.attention import attention

    def attend(query, key, value, mask: Mask, sinks, bias):
        out, lse = attention(
            query,
            key,
            value,
            scale=program.H**-0.5 if program.scale is None else program.scale,
            bias=bias,
            mask=mask,
            sinks=sinks,
            soft_cap=program.soft_cap,
            out_dtype=jnp.dtype(jnp.float32) if program.wide else None,
            backward="fused",
        )
        return out if program.residual == "no" else (out, lse.swapaxes(1, 2))

    return attend


def _rules(program: Program) -> Mask:
    """A mask with the program's rules; its arrays hold nothing."""
    some = np.zeros(1, np.int32)
    ids = some if program.ids else None
    return Mask(
        is_causal=program.is_causal,
        window=program.window,
        dense=some if program.dense else None,
        query_lengths=some if program.query_lengths else None,
        key_value_lengths=some if program.key_lengths else None,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        query_offset=some if program.offset else None,
    )


def attention_of(program: Program, implementation: Implementation) -> Attention:
    """The implementation under test, with what the program compiles in."""
    if implementation == "pallas" and program.one_pass:
        return _in_one_pass(program)
    recipe = recipe_of(program) if implementation == "emulated" else None

    def attend(query, key, value, mask: Mask, sinks, bias):
        return dot_product_attention(
            query,
            key,
            value,
            bias=bias,
            mask=mask.dense,
            scale=program.scale,
            is_causal=mask.is_causal,
            query_seq_lengths=mask.query_lengths,
            key_value_seq_lengths=mask.key_value_lengths,
            local_window_size=mask.window,
            implementation=implementation,
            return_residual=program.residual != "no",
            query_segment_ids=mask.query_segment_ids,
            key_value_segment_ids=mask.key_value_segment_ids,
            query_offset=mask.query_offset,
            soft_cap=program.soft_cap,
            sinks=sinks,
            out_dtype=jnp.float32 if program.wide else None,
            recipe=recipe,
        )

    return attend


def compiled(program: Program, attend: Attention, example: Batch):
    """A program that takes a `Batch`'s parts and gives `Results`.

    Raises what `attend` raises.
    """
    has_lse = program.residual != "no"

    def results(inputs, dlse, mask, sinks, bias):
        query, key, value, dout = inputs

        def run(query, key, value, bias, sinks):
            return attend(query, key, value, mask, sinks, bias)

        found, pullback = jax.vjp(run, query, key, value, bias, sinks)
        out, lse = found if has_lse else (found, None)
        dout = dout.astype(out.dtype)
        cotangent = dout if lse is None else (dout, dlse.swapaxes(1, 2))
        named = dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), pullback(cotangent)))
        named |= {"out": out, "lse": None if lse is None else lse.swapaxes(1, 2)}
        return {name: x for name, x in named.items() if x is not None}

    return jax.jit(results).lower(*example).compile()


def check(
    seed: int,
    program: Program,
    numbers: Sequence[int],
    implementation: Implementation,
) -> list[Row]:
    """One row for each case; `numbers` are whole runs of the program.

    Raises NotImplementedError if the implementation cannot do what the program asks.
    """
    batches = [
        [cases.case(seed, number, program) for number in numbers[i : i + cases.BATCH]]
        for i in range(0, len(numbers), cases.BATCH)
    ]
    run = None
    rows: list[Row] = []
    for of_run in batches:
        batch = cases.batch(seed, program, of_run)
        if run is None:
            attend = attention_of(program, implementation)
            run = compiled(program, attend, batch)
        first, second = (jax.device_get(run(*batch)) for _ in range(2))
        rows += judged(program, of_run, batch, first, second, implementation)
    return [{"seed": seed, **row} for row in rows]


def judged(
    program: Program,
    of_run: Sequence[Case],
    batch: Batch,
    first: Results,
    second: Results,
    implementation: Implementation,
) -> list[Row]:
    """The rows of one run from two computations of it."""
    of_batch = functools.partial(
        golden,
        *batch.inputs,
        batch.dlse,
        mask=batch.mask,
        scale=program.scale,
        soft_cap=program.soft_cap,
        sinks=batch.sinks,
        bias=batch.bias,
    )
    exact = of_batch()
    terms = functools.cache(lambda: of_batch(absolute=True))
    visible = seen_pairs(program, batch.mask)
    recipe, centre = recipe_of(program), None
    if implementation == "pallas" and recipe.dq_centre == "mean":
        centre = kernel_centre(program, batch)
    limits = bound(
        recipe,
        *batch.inputs,
        batch.dlse,
        mask=batch.mask,
        scale=program.scale,
        soft_cap=program.soft_cap,
        sinks=batch.sinks,
        bias=batch.bias,
        centre=centre,
    )
    return [
        _row(program, case, b, first, second, exact, limits, visible[b], terms)
        for b, case in enumerate(of_run)
    ]


def _row(
    program: Program,
    case: Case,
    b: int,
    first: Results,
    second: Results,
    exact: Golden,
    limits: Bounds,
    visible: np.ndarray,
    terms: Callable[[], Golden],
) -> Row:
    changed = "" if case.changed is None else f"{case.changed[0]} x {case.changed[1]:g}"
    row: Row = {"case": case.number, "family": case.family, "changed": changed}
    row |= {f"{name}_ratio": None for name in TENSORS}
    row |= {f"{name}_units": None for name in ROUNDED}
    row["unbounded"] = 0.0
    wrong: list[str] = []
    sizes = []
    for name, field in TENSORS.items():
        if name not in first:
            continue
        whole = name == "dsinks"
        x, again = first[name], second[name]
        true, limit = getattr(exact, field), getattr(limits, field)
        if not whole:
            x, again, true, limit = x[b], again[b], true[b], limit[b]
        if x.tobytes() != again.tobytes():
            wrong.append(f"{name} differs on a second run")
        x = np.asarray(x).astype(np.float64)
        strays = int((~np.isfinite(x) & np.isfinite(true) & np.isfinite(limit)).sum())
        if strays:
            wrong.append(f"{name} has {strays} values that are not finite")
        of_bound = ratios(x, true, limit)
        if name not in ("lse", "dsinks") and not of_bound.max() <= 1:
            # Summed only here, since it takes as long as the exact results do. Where
            # keys agree in a column, dQ's terms cancel there, and FP64 is off by what
            # they were.
            sums = getattr(terms(), field)[b]
            of_bound = np.minimum(of_bound, ratios(x, true, limit, sums))
        ratio = float(of_bound.max())
        row[f"{name}_ratio"] = ratio
        sizes.append(np.isinf(limit).mean())
        if not ratio <= 1:
            at = np.unravel_index(int(of_bound.argmax()), of_bound.shape)
            wrong.append(
                f"{name}{list(map(int, at))} is {x[at]:.6g}, {ratio:.3g} bounds of "
                f"{limit[at]:.3g} from {true[at]:.6g}"
            )
        if name in ROUNDED:
            fmt = FP32 if name == "lse" else FORMATS[program.dtype]
            row[f"{name}_units"] = _units(x, true, limit, fmt)
    wrong += _of_no_pair(program, b, first, visible)
    row["unbounded"] = float(max(sizes))
    row["failed"] = "; ".join(wrong)
    return row


def ratios(
    x: np.ndarray,
    exact: np.ndarray,
    limit: np.ndarray,
    terms: np.ndarray | None = None,
) -> np.ndarray:
    """|x - exact| in units of the bound; 0 where there is none, inf for a NaN.

    FP64 is off by 2^-40 of `terms`, the sums of the absolute values of what `exact`
    sums, or, without them, of the largest |exact|; that much goes uncounted.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(x == exact, 0.0, np.abs(x - exact))
        largest = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
        noise = _GOLDEN_ERROR * (largest if terms is None else terms)
        # Nothing to be off where nothing is rounded.
        noise = np.where((limit == 0) & (exact == 0), 0.0, noise)
        error = np.where(error <= noise, 0.0, error - noise)
        ratio = np.where(error == 0, 0.0, error / limit)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    return np.where(np.isinf(limit), 0.0, ratio)


def _units(x, exact, limit, fmt) -> float | None:
    """RMS error over that of the exact result rounded once; None where that vanishes,
    or is but FP64's noise, or something is not finite."""
    counted = np.isfinite(exact) & np.isfinite(limit)
    if not counted.any() or not np.isfinite(x[counted]).all():
        return None

    def rms(values) -> float:
        # Scaled, so that no square leaves the range.
        size = float(np.abs(values).max())
        return size * float(np.sqrt(np.mean((values / size) ** 2))) if size else 0.0

    x, exact, limit = x[counted], exact[counted], limit[counted]
    unit = rms(correctly_rounded(exact, fmt) - exact)
    if unit <= _VANISHING * rms(limit):
        return None
    return rms(x - exact) / unit


def _of_no_pair(
    program: Program, b: int, found: Results, visible: np.ndarray
) -> list[str]:
    """What is not zero, or not -inf, though it takes part in no pair."""
    group = program.N // program.K
    rows = ~visible.any(-1)  # [N, T]
    of_group = visible.reshape(program.K, group, *visible.shape[1:])
    keys = ~of_group.any((1, 2))  # [K, S]
    wrong = []
    for name, hidden in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
        values = np.asarray(found[name][b])[hidden.T]
        if values.astype(np.float32).any():
            wrong.append(f"{name} is not zero where nothing is seen")
    if "lse" in found and not program.sinks:
        if not np.array_equal(np.isneginf(found["lse"][b]), rows):
            wrong.append("LSE is -inf elsewhere than where nothing is seen")
    return wrong


def seen_pairs(program: Program, mask: Mask) -> np.ndarray:
    """The definition of `Mask` once more, in NumPy: [B, N, T, S] bool."""
    T, S = program.T, program.S
    i, j = np.arange(T)[:, None], np.arange(S)
    seen = np.ones((cases.BATCH, 1, T, S), bool)

    def each(x):
        return np.asarray(x, np.int64)[:, None, None, None]

    position = i + (0 if mask.query_offset is None else each(mask.query_offset))
    left, right = mask.window or (None, None)
    if mask.is_causal:
        seen &= j <= position
    if left is not None:
        seen &= j >= position - left
    if right is not None:
        seen &= j <= position + right
    if mask.query_lengths is not None:
        seen &= i < each(mask.query_lengths)
    if mask.key_value_lengths is not None:
        seen &= j < each(mask.key_value_lengths)
    if mask.query_segment_ids is not None:
        q_ids, k_ids = mask.query_segment_ids, mask.key_value_segment_ids
        seen &= (q_ids[:, :, None] == k_ids[:, None, :])[:, None]
    if mask.dense is not None:
        seen = seen & mask.dense
    return np.broadcast_to(seen, (cases.BATCH, program.N, T, S))


def kernel_centre(program: Program, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """What kernels of dq_centre 'mean' subtract from the keys in dQ, [B, T, K, H], and
    how far off.

    Without arrays, window or bias the mean of all keys or, with a causal mask, for
    every `rows` queries that of the keys up to their last one, which Hopper's take past
    the last query too. Otherwise with segment ids the mean of the longest of the first
    S / 8 runs of keys that has the query's id, and else, for every `rows` queries, of
    the keys from the first to the last that lengths, offset and window show to any of
    them.

    A mean of n numbers is taken as a difference of running sums of at most S. Allowed
    are (2 log2(S) + 6) u sum |K_j - K_0| / n, about half of what it may be off at worst
    (`kernels.key_means`), and two roundings of K_0, u = 2^-24.
    """
    from attn_jax.kernels import architecture, design, visibility

    target = architecture.chosen()
    key = np.asarray(batch.inputs.key).astype(np.float64)
    T, S, mask = program.T, program.S, batch.mask
    listed = program.bias is not None or not visibility.is_static(mask)
    tilings = design.configuration_of(
        *(target, program.H, program.H, S, mask),
        query_count=T,
        has_bias=program.bias is not None,
    )
    rows = tilings.backward_dq.rows
    weights = np.ones((cases.BATCH, T, S))
    if listed:
        if mask.query_segment_ids is not None:
            weights = _longest_runs(mask, T, S)
        else:
            of_rows = seen_pairs(program, dataclasses.replace(mask, dense=None))[:, 0]
            weights = _runs(of_rows, rows)
    elif mask.is_causal:
        last = (np.arange(T) // rows + 1) * rows
        if target != "hopper":
            last = np.minimum(last, T)
        weights = weights * (np.arange(S) < last[:, None])
    count = weights.sum(-1)[..., None, None]
    divisor = np.maximum(count, 1.0)
    flat = key.reshape(cases.BATCH, S, -1)
    shape = cases.BATCH, T, program.K, program.H
    centre = (weights @ flat).reshape(shape) / divisor
    spread = np.abs(key - key[:, :1]).sum(1)[:, None] / divisor
    error = (2 * np.log2(S) + 6) * spread + 2 * np.abs(key[:, :1])
    error = np.where(count > 0, 2.0**-24 * error, 0.0)
    return centre, error


def _longest_runs(mask: Mask, T: int, S: int) -> np.ndarray:
    """1 at the keys of the longest run that has a query's id, [B, T, S]."""
    result = np.zeros((cases.BATCH, T, S))
    for b, ids in enumerate(np.asarray(mask.key_value_segment_ids)):
        lengths = mask.key_value_lengths
        length = S if lengths is None else int(np.clip(lengths[b], 0, S))
        edges = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1, append=ids[-1] - 1))
        runs = [(n, min(m, length)) for n, m in zip(edges, edges[1:])][: -(-S // 8)]
        for i, of_query in enumerate(np.asarray(mask.query_segment_ids)[b]):
            own = [(n, m) for n, m in runs if ids[n] == of_query and n < m]
            if own:
                first, end = max(own, key=lambda run: run[1] - run[0])
                result[b, i, first:end] = 1
    return result


def _runs(seen: np.ndarray, rows: int) -> np.ndarray:
    """For every `rows` queries of [B, T, S] 1 from the first key seen to the last."""
    result = np.zeros(seen.shape)
    for first in range(0, seen.shape[1], rows):
        any_row = seen[:, first : first + rows].any(1)
        before = np.logical_or.accumulate(any_row, axis=1)
        after = np.logical_or.accumulate(any_row[:, ::-1], axis=1)[:, ::-1]
        result[:, first : first + rows] = (before & after)[:, None]
    return result
