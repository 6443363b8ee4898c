"""Properties that hold exactly whatever the inputs, at any length: no golden is needed.

Each probe calls `attend` (traceable; [B, T, N, H], [B, S, K, H] twice -> out and LSE
[B, N, T], natural, or None; closed over the mask and scale of `problem`, without sinks,
bias or soft cap) on inputs of the problem or altered ones, and measures how far an
identity is missed, in units of what honest rounding allows. Memory grows with T + S
times `noise.ROWS`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from attn_jax.audit.extremes import AttendOf, ending_inside, extremes, half_a_tile
from attn_jax.audit.finding import LARGE_HIDDEN, ON_WHAT_ALL_SHARE
from attn_jax.audit.hidden_keys import HIDDEN_BY, hidden_keys
from attn_jax.audit.inputs import Inputs
from attn_jax.audit.judge import (
    ProbeResult,
    by_keys,
    by_rows,
    judge,
    pooled,
    root_mean_square_bound,
)
from attn_jax.audit.magnitudes import magnitudes
from attn_jax.audit.noise import rms_of_rounding
from attn_jax.audit.problem import DTYPES, Problem
from attn_jax.audit.programs import run, run_forward
from attn_jax.audit.refusal import refuses_arguments
from attn_jax.audit.target import Attend
from attn_jax.audit.tiers import at, lse_result, noise_of, pair_tiers, steps
from attn_jax.audit.visible import counted, key_classes, shuffled
from attn_jax.formats import FP32

# Positions of a result that are widened at a time.
_CHUNK = 4096

Probe = Callable[..., tuple[ProbeResult, ...]]


def unit_value(attend: Attend, problem: Problem) -> tuple[ProbeResult, ...]:
    """V = 1: out is 1 in rows that see a key, 0 in others; largest deviation.

    Bound, worst case: u from rounding P where its sum is of unrounded numbers, u from
    rounding out, FP32 sums that lose 2^-23 in every 8 products, and half of the
    smallest positive number for each key, where P is subnormal.
    """
    s = problem.shape
    query, key, value, _ = problem.inputs
    ones = np.ones_like(value)
    out = run_forward(attend, query, key, ones)["out"]
    measured = 0.0
    for start, stop, seen in counted(problem.rules, s, np.zeros(s.key_length, int), 1):
        off = out[:, start:stop].astype(np.float64) - (seen > 0)
        measured = _largest(measured, off)

    return (
        judge(
            "V = 1",
            _sum_tiers(problem, measured),
            "absolute",
            ("out",),
            "rows of P do not sum to 1",
            "with V = 1 out is off from 1 (0 where nothing is seen) by {measured:.2g}, "
            "and rounding allows {bound:.2g}: the sum that normalises a row is not "
            "that of the weights V gets; look for keys or tiles that only one of the "
            "two has",
        ),
    )


def counted_keys(attend: Attend, problem: Problem) -> tuple[ProbeResult, ...]:
    """Q = K = 0 and V one-hot: column h is the share of class h among the keys seen.

    Keys are dealt in runs of at most 64 to the H columns, so a dropped tile of keys
    takes a sizeable part of one column at any length. The largest deviation relative to
    the share (to one key, in empty classes); bound as in `unit_value`.
    """
    s = problem.shape
    run_length = min(64, -(-s.key_length // s.head_dim))
    classes = np.arange(s.key_length) // run_length % s.head_dim
    dtype = DTYPES[problem.dtype]
    value = np.zeros(s.key, dtype)
    value[:, np.arange(s.key_length), :, classes] = 1
    out = run_forward(attend, np.zeros(s.query, dtype), np.zeros(s.key, dtype), value)
    measured = 0.0
    for start, stop, counts in counted(problem.rules, s, classes, s.head_dim):
        total = np.maximum(counts.sum(-1, keepdims=True), 1)
        got = out["out"][:, start:stop].astype(np.float64) * total
        measured = _largest(measured, (got - counts) / np.maximum(counts, 1))

    result = judge(
        "counted keys",
        _sum_tiers(problem, measured),
        "relative",
        ("out",),
        "keys dropped or counted twice",
        "with all logits 0 the share of some keys in a row is off by {measured:.2g} of "
        "itself, and rounding allows {bound:.2g}: keys are dropped, counted twice or "
        "masked wrongly",
    )
    if result.finding and measured > 8 * result.bound:
        wrong = dataclasses.replace(result.finding, kind="wrong wiring")
        result = dataclasses.replace(result, finding=wrong)
    return (result,)


def ones_column(attend: Attend, problem: Problem) -> tuple[ProbeResult, ...]:
    """K has a constant column c, where Q is 0: that column of dQ is
    scale c sum_j dS_ij, which vanishes in exact arithmetic.

    RMS over sampled rows of sum_j dS_ij in units of what rounding dS and P allows, row
    by row (`noise.rounding_noise`: row_sum). Within what rounding O allows besides, the
    cause is "delta": rowsum(dO O) from the rounded O, or with an O or a P that rounding
    puts off one way, as where all P of a row are equal and rounded after they are
    normalised.
    """
    constant = 16.0  # Keeps the column clear of FP16's subnormal numbers.
    query, key, value, dout = problem.inputs
    query, key = query.copy(), key.copy()
    query[..., -1], key[..., -1] = 0, constant
    inputs = Inputs(query, key, value, dout)
    dquery = run(attend, inputs)["dquery"][..., -1]
    size = problem.scale * constant
    lost = (problem.format.min_positive / size) ** 2
    noise = noise_of(problem, inputs)
    got = dquery[:, noise.rows].astype(np.float64) / size

    def tiers():
        yield "", noise.row_sum + lost
        yield "delta", noise.row_sum + noise.row_sum_of_o + lost
        for fmt, cause in list(steps(problem.format, logits=False))[1:]:
            coarse = noise_of(problem, inputs, fmt)
            yield cause, coarse.row_sum + coarse.row_sum_of_o + lost

    return (
        by_rows(
            "ones column of K",
            got,
            tiers(),
            noise,
            ("dquery",),
            "rows of dS do not sum to 0",
            {
                "delta": "sum_j dS_ij is {measured:.3g} times what rounding allows an "
                "exact delta, as much as delta from the rounded out gives: what keys "
                "have in common adds scale * mean(K) * sum_j dS_ij to dQ; take delta "
                "from an unrounded out, or a mean off the keys",
                "": "sum_j dS_ij is {measured:.3g} times what rounding allows, more "
                "than even delta from the rounded out explains: P of the backward pass "
                "is not that of the forward pass, or delta is wrong",
            },
        ),
    )


def sum_of_dvalue(attend: Attend, problem: Problem) -> tuple[ProbeResult, ...]:
    """sum_j dV_j = sum_i dO_i over the queries, of a group's heads, that see a key.

    RMS over columns in units of u sqrt(sum dO^2), since rounding changes a row's sum
    of P by at most u (and FP32 by about `Noise.shift`), and of rounding dV twice, as
    heads of a group may be.
    """
    s, inputs = problem.shape, problem.inputs
    dvalue = run(attend, inputs)["dvalue"]
    groups = s.batch, -1, s.key_heads, s.group_size, s.head_dim
    wanted, squares = np.zeros((2, s.batch, s.key_heads, s.head_dim))
    for start, stop, seen in counted(problem.rules, s, np.zeros(s.key_length, int), 1):
        part = inputs.dout[:, start:stop].astype(np.float64) * (seen > 0)
        part = part.reshape(groups)
        wanted += part.sum((1, 3))
        squares += (part**2).sum((1, 3))
    rounded = np.zeros_like(wanted)
    for start in range(0, s.key_length, _CHUNK):
        part = dvalue[:, start : start + _CHUNK].astype(np.float64)
        rounded += 2 * (rms_of_rounding(part, problem.format) ** 2).sum(1)
    difference = dvalue.sum(1, dtype=np.float64) - wanted
    longest = [np.abs(x.astype(np.float32)).max() for x in inputs[:2]]
    extent = problem.scale * s.head_dim * longest[0] * longest[1]
    shift = FP32.unit_roundoff * (8 + extent + max(s.query_length, s.key_length) / 8)

    def tiers():
        for fmt, cause in steps(problem.format, logits=False):
            yield cause, (fmt.unit_roundoff**2 + shift**2) * squares + rounded

    return (
        pooled(
            "sum of dV",
            difference**2,
            tiers(),
            root_mean_square_bound(difference.size),
            ("dvalue",),
            "columns of P do not add up",
            "sum_j dV_j differs from sum_i dO_i by {measured:.3g} times what rounding "
            "allows: dV misses queries or keys, or its P is not normalised",
        ),
    )


def shifted_keys(
    attend: Attend, problem: Problem, *, gradients: bool = True
) -> tuple[ProbeResult, ...]:
    """A vector c added to all keys: out and dQ stay, LSE moves by scale q.c.

    K is rounded to a grid of 8 bits at most, on which K + c is exact. RMS over sampled
    rows of the change of out and dQ in units of what rounding allows the two runs
    together (`noise.rounding_noise`); if logits in the inner format explain the excess,
    that is the cause. LSE: largest change over `Noise.shift` and one FP32 rounding.
    """
    query, key, value, dout = problem.inputs
    dtype = key.dtype
    grid = 2.0 ** np.ceil(np.log2(max(np.abs(key.astype(np.float64)).max(), 1) / 96))
    signs = np.random.default_rng(problem.seed).choice([-1, 1], problem.shape.head_dim)
    centre = 32 * grid * signs
    key = np.rint(key.astype(np.float64) / grid) * grid
    keys = key.astype(dtype), (key + centre).astype(dtype)
    pair = [Inputs(query, k, value, dout) for k in keys]
    noises = [noise_of(problem, inputs) for inputs in pair]
    first, second = (run(attend, x, gradients=gradients) for x in pair)
    results = []
    for name in ("out", "dquery") if gradients else ("out",):
        difference = at(noises[0], second[name]) - at(noises[0], first[name])
        results.append(
            by_rows(
                f"K + c: {name}",
                difference,
                pair_tiers(problem, pair, noises, name),
                noises[0],
                (name,),
                ON_WHAT_ALL_SHARE,
                {
                    "": f"{name} changes by {{measured:.3g}} times what rounding "
                    "allows when a constant is added to all keys, which a softmax "
                    "does not see"
                },
            )
        )
    if "lse" in first:
        moved = problem.scale * np.einsum(
            "btnh,h->btn", query.astype(np.float64)[:, noises[0].rows], centre
        )
        results.append(
            lse_result("K + c: lse", (first, second), moved, noises, problem)
        )
    return tuple(results)


def permuted_keys(
    attend: Attend, problem: Problem, *, gradients: bool = True
) -> tuple[ProbeResult, ...]:
    """Keys and values in another order: the same results, dK and dV in that order.

    Keys change places only with keys that every query sees or does not see alike;
    () under a mask where no two are sure to be alike (causal, window, dense). RMS over
    sampled rows of the change, in units of what rounding allows two runs; dK and dV are
    pooled, and half as much again is allowed for rows that were not sampled.
    """
    classes = key_classes(problem.rules, problem.shape)
    if classes is None:
        return ()
    rng = np.random.default_rng(problem.seed)
    order = np.stack([shuffled(rng, c) for c in classes])[..., None, None]
    inputs = problem.inputs
    moved = inputs._replace(
        key=np.take_along_axis(inputs.key, order, 1),
        value=np.take_along_axis(inputs.value, order, 1),
    )
    noise = noise_of(problem, inputs)
    first, second = (run(attend, x, gradients=gradients) for x in (inputs, moved))
    says = (
        "changes by {measured:.3g} times what rounding allows when keys and values "
        "change places together: some keys or tiles are treated otherwise than others"
    )
    results = [
        by_rows(
            f"permuted keys: {name}",
            at(noise, second[name]) - at(noise, first[name]),
            pair_tiers(problem, [inputs, moved], [noise, noise], name, logits=False),
            noise,
            (name,),
            "result depends on the order of keys",
            {"": f"{name} {says}"},
        )
        for name in ("out", "dquery")
        if name in first
    ]
    for name in ("dkey", "dvalue") if gradients else ():

        def tiers(name=name):
            for fmt, cause in steps(problem.format, logits=False):
                of = noise if fmt == problem.format else noise_of(problem, inputs, fmt)
                yield cause, getattr(of, name)

        results.append(
            by_keys(
                f"permuted keys: {name}",
                np.take_along_axis(first[name], order, 1),
                second[name],
                tiers(),
                noise,
                problem,
                (name,),
                "result depends on the order of keys",
                f"{name} {says}",
            )
        )
    return tuple(results)


PROBES: dict[str, Probe] = {
    "V = 1": unit_value,
    "counted keys": counted_keys,
    "ones column of K": ones_column,
    "sum of dV": sum_of_dvalue,
    "K + c": shifted_keys,
    "permuted keys": permuted_keys,
    "finite at extremes": extremes,
    "range": magnitudes,
}
# Those that look at gradients beside the rest, and at nothing else.
_BESIDE = shifted_keys, permuted_keys, extremes, magnitudes
_GRADIENTS = ones_column, sum_of_dvalue


def other_problems(problem: Problem, masks: Iterable[str]) -> list[Problem]:
    """What `probe` looks at beside the problem itself, of what `masks` hide."""
    hidden = [x for x in HIDDEN_BY if x in masks]
    of_masks = [dataclasses.replace(problem, mask=mask) for mask in hidden]
    return [ending_inside(problem), *of_masks]


def probe(
    attend: Attend,
    problem: Problem,
    *,
    attend_of: AttendOf | None = None,
    masks: Iterable[str] = HIDDEN_BY,
    refused: Callable[[str, Exception], None] | None = None,
    gradients: bool = True,
) -> Iterator[ProbeResult]:
    """The results of all `PROBES` and, if there is an `attend_of` other problems, of
    `half_a_tile` and, under those of `masks` that hide keys, of `hidden_keys`; without
    `gradients`, what needs none of them. `refused` is told the name of one and what the
    target raises of it, but for a mask that it refuses; without it that is raised."""
    beside = {"gradients": gradients}
    every = {
        name: functools.partial(each, attend, **(beside if each in _BESIDE else {}))
        for name, each in PROBES.items()
        if gradients or each not in _GRADIENTS
    }
    if attend_of is not None:
        probe_of = functools.partial(half_a_tile, attend_of, **beside)
        every["half a tile at extremes"] = probe_of
        for mask in (x for x in HIDDEN_BY if x in masks):
            probe_of = functools.partial(hidden_keys, attend_of, mask=mask, **beside)
            every[f"{LARGE_HIDDEN}{mask}"] = probe_of
    for name, each in every.items():
        try:
            results = each(problem)
        except Exception as error:  # A function of somebody's may raise anything.
            if refused is None:
                raise
            if not (refuses_arguments(error) and name.startswith(LARGE_HIDDEN)):
                # What refuses a mask its own problems say.
                refused(name, error)
            continue
        yield from results


def _sum_tiers(problem: Problem, measured: float):
    keys, outer = problem.shape.key_length, problem.format
    sums = 2 * FP32.unit_roundoff * (2 + keys / 8)
    for inner, cause in steps(outer, logits=False):
        lost = keys * inner.min_positive / 2
        yield cause, measured, inner.unit_roundoff + outer.unit_roundoff + sums + lost


def _largest(so_far: float, off: np.ndarray) -> float:
    """NaN stays: it exceeds every bound."""
    return float(np.maximum(so_far, np.abs(off).max()))
