"""What should change no bit: re-runs, tuning, batch, padding, heads' places, loops."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.audit import programs
from attn_jax.audit.error import in_units
from attn_jax.audit.finding import (
    DEPENDS,
    HIDDEN_BY_LENGTHS,
    NOT_THE_LOGITS,
    Finding,
)
from attn_jax.audit.inputs import Inputs
from attn_jax.audit.judge import by_keys, by_lse, by_rows, root_mean_square_bound
from attn_jax.audit.noise import Noise, rms_of_rounding, rounding_noise
from attn_jax.audit.problem import SYMBOLS, TENSORS, Problem, Results
from attn_jax.audit.refusal import LAYERS, MAPPING
from attn_jax.audit.target import Attend
from attn_jax.formats import BF16, FP16, FP32, FP64
from attn_jax.mask import Mask
from attn_jax.xla_options import RUN_ONCE

# Queries or keys that are added, and runs of the same program.
PADDING = 64
RUNS = 3
# What differs from run to run is in every other comparison; so many times as much may
# be by luck.
_BY_LUCK = 4


@dataclasses.dataclass(frozen=True)
class Invariance:
    """Two results that are the same in exact arithmetic.

    bit_equal  whether they are the same bits
    ulps       largest difference in units of the last place of the larger of the two
    measured   RMS of the difference in units of what rounding allows two runs (for LSE
               the largest, in units of what FP32 allows); 0 to `bound` is noise
    finding    for re-runs and tuning, if bits differ; for all else if `measured`
               exceeds `bound`
    """

    name: str
    tensor: str
    bit_equal: bool
    ulps: float
    measured: float
    bound: float
    finding: Finding | None


def invariances(
    attend: Attend,
    problem: Problem,
    *,
    attend_of: Callable[[Mask], Attend] | None = None,
    with_scale: Callable[[float], Attend] | None = None,
    attends: Mapping[str, Attend] | None = None,
    refused: Callable[[str, Exception], None] | None = None,
    gradients: bool = True,
) -> tuple[Invariance, ...]:
    """All that apply, forward and, with `gradients`, of these, for the inputs of
    `problem`.

    re-run          the same program three times, nine without gradients
    tuning          the same, compiled by an XLA that tries nothing out; on a GPU
    batch size      the first entry alone; needs two entries
    batch position  entries rolled; needs two
    head position   key heads and their groups rolled, or the one group's heads
    layers          the last of two in a `lax.scan` over arrays stacked as layers are
    mapping         the last of two under `jax.vmap`, inside of one of the query alone
    scale           half of it for twice the query, by a power of two
    padded queries  more queries, with dO = 0
    padded keys     more keys, hidden by their lengths; dV there must be 0, and dK, but
                    for what rounding leaves of the sum over all keys in each one's
                    share, where their mean was taken off
    block size      each of `attends`, variants of one target, against the first

    `attend_of(mask)` makes the target for another mask. Without it there are no padded
    keys, and under a mask that holds arrays only re-run, head position and block size.
    `with_scale(scale)` makes it for another scale; without it there is none.
    `refused` is told the name of a change and what the target raises of it; without it
    that is raised.
    """
    run = functools.partial(programs.run, gradients=gradients)
    inputs, mask = problem.inputs, problem.rules
    noise = rounding_noise(inputs, mask, problem.scale, problem.format)
    first = run(attend, inputs)
    # A backward pass takes the time of two forward passes at least.
    runs = RUNS if gradients else 3 * RUNS
    again = [run(attend, inputs) for _ in range(runs - 1)]
    pairs = zip(
        *(_compare("re-run", first, x, noise, problem) for x in again), strict=True
    )
    most = [max(of_result, key=lambda record: record.ulps) for of_result in pairs]
    records = _bit_by_bit(most, _RERUN)
    unsteady = {r.tensor: r.measured for r in records if not r.bit_equal}
    steady = len(records)
    # What differs from run to run says nothing of how it was compiled.
    if (options := _untuned()) is not None and all(r.bit_equal for r in records):
        other = programs.run_compiled(attend, inputs, options, gradients=gradients)
        found = _compare("tuning", first, other, noise, problem)
        records += _bit_by_bit(found, _TUNING)
    for name, transformed in _transformed(run, attend, problem, attend_of, with_scale):
        try:
            results = transformed()
        except Exception as error:  # A function of somebody's may raise anything.
            if refused is None:
                raise
            refused(name, error)
            continue
        if hidden := results.pop("hidden keys", None):
            records += _hidden(hidden, first, noise, problem)
        entries = {n: x[: len(results["out"])] for n, x in first.items()}
        records += _compare(name, entries, results, noise, problem)
    if attends:
        (base, of_base), *rest = ((n, run(a, inputs)) for n, a in attends.items())
        for name, results in rest:
            what = f"block size, {name} against {base}"
            records += _compare(what, of_base, results, noise, problem)
    return *records[:steady], *(_less(r, unsteady) for r in records[steady:])


def _less(record: Invariance, unsteady: Mapping[str, float]) -> Invariance:
    """Without a finding of what is no more than re-runs differ by."""
    most = _BY_LUCK * unsteady.get(record.tensor, 0.0)
    if record.tensor in unsteady and record.measured <= most:  # NaN is not.
        return dataclasses.replace(record, finding=None)
    return record


def _transformed(
    run: Callable[[Attend, Inputs], Results],
    attend: Attend,
    problem: Problem,
    attend_of,
    with_scale,
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What makes the results of a transformed call, transformed back; entries may be
    fewer. Those of keys that are hidden come under a name of their own."""
    inputs, mask = problem.inputs, problem.rules
    B, T, N = inputs.query.shape[:3]
    S, K = inputs.key.shape[1:3]
    shared = not jax.tree_util.tree_leaves(mask)
    target = attend_of or (lambda changed: attend)

    def one_entry():
        alone = np.arange(1)
        return dict(run(target(_entries(mask, alone)), _pick(inputs, alone)))

    def other_entries():
        order = np.roll(np.arange(B), 1)
        rolled = run(target(_entries(mask, order)), _pick(inputs, order))
        return {name: x[np.argsort(order)] for name, x in rolled.items()}

    def more_queries():
        more = inputs._replace(query=_padded(inputs.query), dout=_padded(inputs.dout))
        more.dout[:, T:] = 0
        return _cut(run(target(_more_queries(mask)), more), T, S)

    def more_keys():
        more = inputs._replace(key=_padded(inputs.key), value=_padded(inputs.value))
        results = run(target(_more_keys(mask, B, S)), more)
        hidden = {n: results[n][:, S:] for n in ("dkey", "dvalue") if n in results}
        return {**_cut(results, T, S), "hidden keys": hidden}

    def half_scale():
        assert with_scale is not None
        twice = inputs._replace(query=inputs.query + inputs.query)
        results = run(with_scale(problem.scale / 2), twice)
        # Of twice the query it is half.
        return {n: x + x if n == "dquery" else x for n, x in results.items()}

    def other_heads():
        # Within the one group where there is but one.
        step = N // K if K > 1 else 1
        roll = {"query": step, "dout": step, "key": 1, "value": 1}
        moved = {n: np.roll(getattr(inputs, n), by, 2) for n, by in roll.items()}
        results = run(attend, Inputs(**moved))
        axes = {"out": 2, "dquery": 2, "lse": 1, "dkey": 2, "dvalue": 2}
        by = {"dkey": 1, "dvalue": 1}
        return {n: np.roll(x, -by.get(n, step), axes[n]) for n, x in results.items()}

    if (attend_of or shared) and B > 1:
        yield "batch size", one_entry
        yield "batch position", other_entries

    def last_of(several):
        stacked = Inputs(*(np.stack([np.roll(x, 1, 1), x]) for x in inputs))
        return {name: x[-1] for name, x in run(several(attend), stacked).items()}

    def mapped():
        try:
            return last_of(MappedTwice)
        # What cannot be mapped is not blamed, and gives no wrong result: the usual
        # vmap is looked at all the same, and raises if it cannot be had either.
        except Exception:
            return last_of(Mapped)

    if with_scale:
        yield "scale, half of it for twice the query", half_scale
    if attend_of or shared:
        yield "padded queries", more_queries
    if attend_of:
        yield HIDDEN_BY_LENGTHS, more_keys
    if N > 1 and (mask.dense is None or mask.dense.shape[1] == 1):
        yield "head position", other_heads
    yield LAYERS, lambda: last_of(Layers)
    yield MAPPING, mapped


@dataclasses.dataclass(frozen=True)
class Layers:
    """An attention of arrays [layer, ...], in a loop over layers.

    So models of many layers are written. XLA may make one program of a kernel and of
    the slices that it reads and writes, and forgets there (JAX 0.11.2) that results
    begin as operands. Equal bits do not exclude that: `results/upstream/README.md`.
    """

    attend: Attend

    def __call__(self, *stacked):
        return jax.lax.map(lambda arrays: self.attend(*arrays), stacked)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """An attention of arrays [layer, ...], by `jax.vmap`."""

    attend: Attend

    def __call__(self, *stacked):
        return jax.vmap(self.attend)(*stacked)


@dataclasses.dataclass(frozen=True)
class MappedTwice:
    """The same, in a second `jax.vmap`, of the query alone: of others that are not
    asked for, and of these."""

    attend: Attend

    def __call__(self, query, *others):
        both = jnp.stack([jnp.roll(query, 1, 2), query])
        each = jax.vmap(lambda x: Mapped(self.attend)(x, *others))(both)
        return jax.tree_util.tree_map(lambda x: x[-1], each)


def _pick(inputs: Inputs, order: np.ndarray) -> Inputs:
    return Inputs(*(x[order] for x in inputs))


def _padded(x: np.ndarray, axis: int = 1) -> np.ndarray:
    """A third of the entries again at the end, as often as it takes: finite, not
    special, and not all as often, which would leave weights what they are."""
    more = np.resize(np.arange(-(-x.shape[axis] // 3)), PADDING)
    return np.concatenate([x, np.take(x, more, axis)], axis)


def _cut(results: Results, T: int, S: int) -> dict[str, Any]:
    return {
        n: x[..., :T] if n == "lse" else x[:, : S if n in ("dkey", "dvalue") else T]
        for n, x in results.items()
    }


def _entries(mask: Mask, order: np.ndarray) -> Mask:
    def pick(x):
        return np.asarray(x)[order if len(x) > 1 else slice(None)]

    return jax.tree_util.tree_map(pick, mask)


def _more_queries(mask: Mask) -> Mask:
    """What the added queries see does not matter."""
    return _longer(mask, "query_segment_ids", 2)


def _more_keys(mask: Mask, B: int, S: int) -> Mask:
    lengths = mask.key_value_lengths
    if lengths is None:
        lengths = np.full(B, S, np.int32)
    longer = _longer(mask, "key_value_segment_ids", 3)
    return dataclasses.replace(longer, key_value_lengths=np.asarray(lengths))


def _longer(mask: Mask, ids: str, axis: int) -> Mask:
    changes = {}
    if getattr(mask, ids) is not None:
        changes[ids] = _padded(np.asarray(getattr(mask, ids)))
    if mask.dense is not None and mask.dense.shape[axis] > 1:
        changes["dense"] = _padded(np.asarray(mask.dense), axis)
    return dataclasses.replace(mask, **changes)


def _compare(
    name: str, before: Results, after: Results, noise: Noise, problem: Problem
) -> list[Invariance]:
    noise = _first(noise, len(before["out"]))
    cause = f"{DEPENDS} {name.partition(',')[0]}"
    records = []
    for tensor in (t for t in TENSORS if t in before):
        old, new = before[tensor], after[tensor]
        says = (
            f"{SYMBOLS.get(tensor, tensor)} changes by {{measured:.3g}} times what "
            f"rounding allows: {name}"
        )
        if tensor == "lse":
            rows = [x[..., noise.rows].swapaxes(1, 2).astype(float) for x in (old, new)]
            values = np.concatenate([old.ravel(), new.ravel()])
            u = problem.format.unit_roundoff
            pair, none = (rows[0], rows[1]), np.zeros(())
            judged = by_lse(name, pair, none, (noise, noise), values, u)
            if (found := judged.finding) and found.cause == NOT_THE_LOGITS:
                # No logit moves here.
                found = dataclasses.replace(
                    found, cause=cause, says=says.format(measured=judged.measured)
                )
                judged = dataclasses.replace(judged, finding=found)
        elif tensor in ("out", "dquery"):
            # Logits that round to 16 bits may round otherwise after another sum.
            variance = 2 * (getattr(noise, tensor) + noise.by_logits[tensor])
            change = _rows(new, noise) - _rows(old, noise)
            tiers = [("", variance)]
            judged = by_rows(name, change, tiers, noise, (tensor,), cause, says)
        else:
            tiers = [("", getattr(noise, tensor))]
            judged = by_keys(
                name, old, new, tiers, noise, problem, (tensor,), cause, says
            )
        records.append(
            Invariance(
                name,
                tensor,
                same_bits(old, new),
                largest_ulps(old, new),
                judged.measured,
                judged.bound,
                judged.finding,
            )
        )
    return records


def _rows(x: np.ndarray, noise: Noise) -> np.ndarray:
    return x[:, noise.rows].astype(np.float64)


def _first(noise: Noise, entries: int) -> Noise:
    """The noise of the first entries of the batch."""
    cut = {n: x[:entries] for n, x in noise._asdict().items() if n in _BATCHED}
    by_logits = {n: x[:entries] for n, x in noise.by_logits.items()}
    return noise._replace(**cut, by_logits=by_logits)


_BATCHED = set(Noise._fields) - {"rows", "by_logits"}


_RERUN = (
    "other bits from run to run of one program on the same inputs, by up to {ulps:.3g} "
    "ulp: sums are added up in no fixed order"
)
_TUNING = (
    "other bits, by up to {ulps:.3g} ulp, when XLA compiles it without trying out what "
    "is fastest (xla_gpu_autotune_level=0): two compilations may differ, as the order "
    "of a sum depends on what was fastest that time"
)


def _untuned() -> Mapping[str, Any] | None:
    """XLA's options to try nothing out; None where it never does."""
    return RUN_ONCE if jax.default_backend() == "gpu" else None


def _bit_by_bit(records: Sequence[Invariance], says: str) -> list[Invariance]:
    """Other bits are a finding, the same of all results, and nothing else is."""
    others = [record for record in records if not record.bit_equal]
    if not others:
        return [dataclasses.replace(record, finding=None) for record in records]
    name, ulps = others[0].name, max(record.ulps for record in others)
    finding = Finding(
        "not reproducible",
        name,
        f"{', '.join(SYMBOLS[x.tensor] for x in others)}: {says.format(ulps=ulps)}",
        tuple(record.tensor for record in others),
        (name,),
        {"ulps": ulps},
    )
    return [
        dataclasses.replace(record, finding=None if record.bit_equal else finding)
        for record in records
    ]


def _hidden(
    results: Results, seen: Results, noise: Noise, problem: Problem
) -> list[Invariance]:
    """`results` of hidden keys; `seen`: of the others, without them."""
    records = []
    for tensor, x in results.items():
        largest = float(np.abs(x.astype(np.float64)).max())
        finding, measured, bound = None, largest, 0.0
        if largest != 0 and tensor == "dkey":
            measured, bound = _of_centre(x, seen[tensor], noise, problem)
        # NaN is not at most anything.
        if largest != 0 and not measured <= bound:
            measured, bound = largest, 0.0
            finding = Finding(
                "wrong wiring",
                "hidden keys get a gradient",
                f"{tensor} of keys beyond their length is {largest:.3g}, not 0",
                (tensor,),
                ("hidden keys",),
                {"largest": largest},
            )
        zero = np.zeros_like(x)
        ulps = largest_ulps(x, zero)
        records.append(
            Invariance(
                "hidden keys", tensor, largest == 0, ulps, measured, bound, finding
            )
        )
    return records


def _of_centre(
    x: np.ndarray, seen: np.ndarray, noise: Noise, problem: Problem
) -> tuple[float, float]:
    """RMS of dK of hidden keys in units of what rounding allows those who take the mean
    of all keys off, and its bound; inf in units of it where keys do not all have the
    same, as only that mean gives each.

    The mean passes sum_j dK_j = scale sum_i (sum_j dS_ij) q_i on to all keys alike. It
    is 0 but for the row sums of dS (`Noise.row_sum`) and the rounding of each dK_j.
    """
    if not (x == x[:, :1]).all():
        return np.inf, 0.0
    of_rows = (noise.row_sum + noise.row_sum_of_o)[..., None]
    query = problem.inputs.query[:, noise.rows].astype(np.float64)
    T, S = problem.inputs.query.shape[1], seen.shape[1]
    by_head = (of_rows * query**2).sum(1) * T / len(noise.rows)
    groups = by_head.reshape(len(x), seen.shape[2], -1, seen.shape[3]).sum(2)
    rounded = (rms_of_rounding(seen.astype(np.float64), problem.format) ** 2).sum(1)
    variance = (problem.scale**2 * groups + rounded).sum() / (S + x.shape[1]) ** 2
    size = np.square(x[:, 0].astype(np.float64)).sum()
    # As `judge.by_keys`: for rows that were sampled half as much again.
    sampled = 1.5 if T > len(noise.rows) else 1.0
    bound = sampled * root_mean_square_bound(noise.seen.size)
    return in_units(size**0.5, variance**0.5), bound


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays hold the same bits; NaN equals itself, and 0 not -0."""
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


def largest_ulps(x: np.ndarray, y: np.ndarray) -> float:
    """Largest |x - y| in units of the last place of the larger; inf if one is not
    finite and the other is anything else."""
    formats = {"bfloat16": BF16, "float16": FP16, "float32": FP32, "float64": FP64}
    fmt = formats[str(x.dtype)]
    differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    a, b = x[differ].astype(np.float64), y[differ].astype(np.float64)
    if not a.size:
        return 0.0
    if not (np.isfinite(a) & np.isfinite(b)).all():
        return np.inf
    exponent = np.frexp(np.maximum(np.abs(a), np.abs(b)))[1] - 1
    place = np.maximum(exponent, fmt.min_exponent) - fmt.mantissa_bits
    return float(np.ldexp(np.abs(a - b), -place).max())
