"""The checks that `looks` names, run on a target, as rows of findings.

    P           read from it, for what is random or hidden (`probability`)
    probes      identities that need no exact result (`probes`)
    invariance  what should change no bit (`invariance`)
    merging     keys in parts, put together by LSE (`merge`); the gradient through LSE
                alone (`lse_gradient`)
    x64         the other mode of `jax_enable_x64`
    again       a problem on which it is wrong

Rows are plain data. What the target raises is a finding, too: of what was not run,
where it is a refusal, and else that it fails there (`refusal`).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attn_jax.audit import lse_gradient, probes, programs
from attn_jax.audit.exact import exact
from attn_jax.audit.finding import (
    BLIND_WEIGHTS,
    HIDDEN_PAIRS,
    SEES_NO_KEY,
    Finding,
)
from attn_jax.audit.inputs import HIDES
from attn_jax.audit.invariance import invariances, same_bits
from attn_jax.audit.measure import Outcome, Runner, measured
from attn_jax.audit.merge import GOLDEN_LIMIT, merge_audit
from attn_jax.audit.probability import in_fp32, of_probabilities, probabilities
from attn_jax.audit.problem import (
    MASKS,
    SYMBOLS,
    TENSORS,
    TOGETHER,
    Problem,
    made_of,
)
from attn_jax.audit.raised import said
from attn_jax.audit.refusal import is_excused, is_refusal, refuses_arguments
from attn_jax.audit.target import Attend, Target
from attn_jax.mask import Mask
from attn_jax.store import Row

# Keys with which P is read, at most: it takes as many calls as they go into a head.
_READ = 512
_PARTS = (2, 8, 64)
# A result that is this many times as far from exact in the other mode is no rounding.
_MARKEDLY = 1.5
# Runs of what is wrong, and how many times the median error is far off.
_RUNS, _FAR = 5, 8
# Units of error of rows that are right, whatever the algorithm.
_RIGHT = 4


def read(target: Target, problems: Iterable[Problem]) -> Iterator[Row]:
    """Findings of P, as the target makes it: one row for each problem of a mask; where
    it has more keys, on shorter sequences. That a mask is refused its own problems
    say."""
    left_out = _LeftOut("P")
    pairs = [(whole, _short(whole, target.adapter.shards)) for whole in problems]
    _compile(target, [problem for _, problem in pairs], gradients=False)
    for whole, problem in pairs:
        query, key, _, _, *bias = (jnp.asarray(x) for x in problem.arrays)
        try:
            found = probabilities(target.on(problem), query, key, *bias)
        except Exception as error:  # A function of somebody's may raise anything.
            # What refuses a mask, which `measure` says of the mask's own problems.
            if not refuses_arguments(error):
                left_out.add(f"under {problem.mask}", error)
            continue
        right, where = exact(problem), (str(whole),)
        findings = of_probabilities(
            *(found, right.probability, right.logits > HIDES, problem.format),
            where=where,
            of_logits=in_fp32(right),
        )
        broken = ~np.isfinite(found).all(-1)
        # Some have the mean of V where no key is seen, `jax.nn` too; of other masks
        # that is said. Past a query length there are zeros, also in `jax.nn`.
        if problem.mask in TOGETHER and problem.mask != "query lengths":
            findings = [f for f in findings if f.cause != BLIND_WEIGHTS]
        # Of other masks their own problems say so.
        if broken.any() and problem.mask in TOGETHER:
            cause = "" if (broken & ~right.sees_none).any() else SEES_NO_KEY
            says = f"{int(broken.sum())} rows of out are not finite"
            findings = [Finding("not finite", cause, says, ("out",), where)]
        said = "" if problem.mask == "full" else f"under {problem.mask}, "
        if problem is not whole:
            s = problem.shape
            said += f"with {s.query_length} queries and {s.key_length} keys, "
        findings = [dataclasses.replace(f, says=said + f.says) for f in findings]
        yield {"mask": problem.mask, "findings": _rows(findings)}
    yield left_out.row()


def _compile(target: Target, problems: Iterable[Problem], *, gradients: bool) -> None:
    """What `programs.run` runs on these, side by side."""

    def lowered(problem: Problem) -> jax.stages.Lowered:
        return programs.lowered(target.on(problem), gradients, problem.arrays)

    programs.compile_each(functools.partial(lowered, x) for x in problems)


def _short(problem: Problem, shards: int) -> Problem:
    """One whose P can be read, and whose sequence so many devices can share."""
    shape = problem.shape
    if shape.key_length <= _READ:
        return problem
    most = max(_READ // (2 * shards), 1) * 2 * shards
    shape = dataclasses.replace(
        shape,
        query_length=min(shape.query_length, most),
        key_length=min(shape.key_length, most),
    )
    return dataclasses.replace(problem, shape=shape)


def of_read(
    rows: Iterable[tuple[str | None, list[Finding]]],
    spoilt: set[str],
    broken: Collection[str] = (),
) -> list[Finding]:
    """What to say of what `read` found, by mask. Under a `spoilt` one, where out is
    recognised, it is a consequence; but what is wrong without a mask hides nothing, and
    so shows nothing that a mask hides. What is said of a mask goes for those that are
    made of it. Of one in `broken` the measurements say that out is not finite."""
    found, named = [], set(spoilt)
    for mask, findings in rows:
        if mask is not None:
            known = named if mask in TOGETHER else spoilt
            if not known.isdisjoint(made_of(mask)):
                continue
            if "full" in spoilt:
                findings = [f for f in findings if f.cause == HIDDEN_PAIRS]
            if findings:
                named.add(mask)
            if mask in broken:
                findings = [f for f in findings if f.kind != "not finite"]
        found += findings
    return found


def probe(
    target: Target,
    problem: Problem,
    *,
    masks: Iterable[str] = MASKS,
    gradients: bool = True,
) -> Iterator[Row]:
    """One row for each identity; of keys that `masks` hide, of these masks."""
    attend, left_out, masks = target.on(problem), _LeftOut("probes"), tuple(masks)
    _compile(
        target, [problem, *probes.other_problems(problem, masks)], gradients=gradients
    )
    for result in probes.probe(
        *(attend, problem),
        attend_of=target.on,
        masks=masks,
        refused=left_out.add,
        gradients=gradients,
    ):
        yield {
            "name": result.name,
            "measured": result.measured,
            "bound": result.bound,
            "unit": result.unit,
            "passed": result.finding is None,
            "findings": _rows([result.finding]),
        }
    yield left_out.row()


def vary(target: Target, problem: Problem, *, gradients: bool = True) -> Iterator[Row]:
    """One row for each change that should change nothing, and result."""
    left_out = _LeftOut("invariance under")

    def with_scale(scale: float) -> Attend:
        return target.attend(problem.rules, scale=scale)

    records = invariances(
        *(target.on(problem), problem),
        attend_of=_attend_of(target, problem),
        with_scale=with_scale if target.takes_scale else None,
        refused=left_out.add,
        gradients=gradients,
    )
    for record in records:
        yield {
            "name": record.name,
            "tensor": record.tensor,
            "bit_equal": record.bit_equal,
            "largest_difference": record.ulps,
            "measured": record.measured,
            "bound": record.bound,
            "findings": _rows([record.finding]),
        }
    yield left_out.row()


class _LeftOut:
    """What of a part the target would not be run for, or failed at, by reason."""

    def __init__(self, part: str):
        self._part = part
        self._names: dict[tuple[str, bool], list[str]] = {}

    def add(self, name: str, error: Exception) -> None:
        why = said(error), is_excused(name, error)
        self._names.setdefault(why, []).append(name)

    def row(self) -> Row:
        return {
            "findings": _rows(
                _not_run(f"{self._part} {', '.join(names)}", *why)
                for why, names in self._names.items()
            )
        }


def _not_run(what: str, reason: str, excused: bool) -> Finding:
    """A refusal is no fault where the target takes the problems themselves, which are
    judged."""
    if excused:
        cause = f"{what} not run"
        return Finding("not taken", cause, f"{cause}: {reason}", (), (what,))
    cause = f"{what} failed"
    return Finding("fails", cause, f"{cause}: {reason}", (), (what,))


def merge(target: Target, problem: Problem, *, gradients: bool = True) -> Iterator[Row]:
    """One row for each number of parts and result."""
    keys = problem.shape.key_length
    shards = target.adapter.shards
    parts = tuple(
        n
        for n in _PARTS
        if keys % n == 0
        and problem.shape.is_cut(shards)
        and dataclasses.replace(problem.shape, key_length=keys // n).is_cut(shards)
    )
    if not target.has_lse or not parts:
        return
    attend_of = _attend_of(target, problem)
    found = merge_audit(attend_of, problem, parts=parts, gradients=gradients)
    predicted = found.predicted.get(found.combination, {}) if found.combination else {}
    for tensor, errors in found.errors.items():
        for count, units in errors.items():
            yield {
                "parts": count,
                "tensor": tensor,
                "units": units,
                "predicted": predicted.get(count) if tensor == "out" else None,
                "findings": [],
            }
    # What an out in the inputs' format costs those who merge is a figure, no fault.
    faults = [x for x in found.findings if x.cause != "16-bit partial results"]
    yield {
        "merging": found.verdict,
        "growth": dict(found.growth),
        "findings": _rows(faults),
    }


def through_lse(target: Target, problems: Iterable[Problem]) -> Iterator[Row]:
    """Findings of the gradient through LSE, one row for each problem of a mask, until
    there are some: a gradient that is missing is so under most."""
    left_out = _LeftOut("LSE's gradient")
    problems = [
        x for x in problems if x.shape.query_length * x.shape.key_length <= GOLDEN_LIMIT
    ]
    for i, problem in enumerate(problems if target.has_lse else ()):
        if i == 1:
            # The first has no findings, and it is likely that all are wanted.
            programs.compile_each(
                functools.partial(lse_gradient.lowered, target.on(x), x)
                for x in problems[1:]
            )
        try:
            findings = lse_gradient.read(target.on(problem), problem)
        except Exception as error:  # A function of somebody's may raise anything.
            # What refuses a mask its own problems say.
            if not refuses_arguments(error):
                left_out.add(f"under {problem.mask}", error)
            continue
        yield {"findings": _rows(findings)}
        if findings:
            break
    yield left_out.row()


def other_mode(
    target: Target, problem: Problem, masks: Iterable[str] = (), *, gradients: bool
) -> Iterator[Row]:
    """Findings of the other x64 mode; under those of the `masks` that are not the
    problem's, whether it gets as far as to be compiled."""
    here = bool(jax.config.read("jax_enable_x64"))

    def runner() -> Runner:
        return Runner(target.on(problem), gradients=gradients)

    this = runner()
    before, again = this(problem), this(problem)
    with jax.enable_x64(not here):
        after = runner()(problem)
    mode = f"with jax_enable_x64 {'off' if here else 'on'}"
    if before.status != "measured":
        return
    findings = []
    for mask in (x for x in masks if x != problem.mask):
        other = dataclasses.replace(problem, mask=mask)
        with jax.enable_x64(not here):
            fails = _not_lowered(target, other, gradients)
        if fails and not _not_lowered(target, other, gradients):
            says = f"under {mask} it fails {mode}, and not without: {fails}"
            findings.append(Finding("fails", "x64 mode", says, (), (str(other),)))
    lost = after.reason or after.no_gradients
    if after.status != "measured" or lost and not before.no_gradients:
        says = f"it fails {mode}, and not without: {lost}"
        findings.append(Finding("fails", "x64 mode", says, (), (str(problem),)))
    else:
        one, other = (measured(problem, x.results) for x in (before, after))
        differ = [
            tensor
            for tensor in TENSORS
            if tensor in one
            # The reference has an FP64 LSE there, for all to see.
            and before.results[tensor].dtype == after.results[tensor].dtype
            and not same_bits(before.results[tensor], after.results[tensor])
            # Of what differs from run to run that says nothing.
            and same_bits(before.results[tensor], again.results[tensor])
        ]
        if differ:
            says = (
                f"{_have(differ)} other bits {mode}: a constant or a cast follows the "
                "mode; give each its type, and not float64, which is float32 where "
                "the mode is off"
            )
            places = (str(problem),)
            kind = "not reproducible"
            findings.append(Finding(kind, "x64 mode", says, tuple(differ), places))
        for tensor in differ:
            units = one[tensor].errors.units, other[tensor].errors.units
            if max(units) > _MARKEDLY * min(units) and max(units) > _MARKEDLY:
                says = (
                    f"{SYMBOLS[tensor]} is {units[1]:.3g} units from exact {mode}, and "
                    f"{units[0]:.3g} in the other mode"
                )
                kind = "worse than its algorithm allows"
                places = (str(problem),)
                findings.append(Finding(kind, "x64 mode", says, (tensor,), places))
    yield {"findings": _rows(findings)}


def _not_lowered(target: Target, problem: Problem, gradients: bool) -> str:
    """Why it cannot be compiled in the mode that this thread is in, or ""."""
    try:
        programs.lowered(target.on(problem), gradients, problem.arrays)
    except Exception as error:  # A function of somebody's may raise anything.
        return said(error)
    return ""


def again(
    target: Target, problem: Problem, tensors: Sequence[str], *, gradients: bool = True
) -> Iterator[Row]:
    """A problem on which results are wrong, run again: whether they are so each time,
    and in which rows. One row for each result, the first with what more runs show."""
    runner = Runner(target.on(problem), gradients=gradients)
    outcome = runner(problem)
    findings = unequal(runner, problem, outcome, _RUNS)
    for tensor in tensors:
        if tensor not in outcome.results:
            continue
        x = np.asarray(outcome.results[tensor], np.float64)
        rows = ""
        if tensor != "lse":  # Whose unit is that of its own format.
            unit = problem.yardstick(tensor, problem.format).unit
            errors = _by_row(tensor, x - getattr(problem.exact(), tensor))
            rows = _concentrated(errors / unit) if unit else ""
        yield {
            "tensor": tensor,
            "rows": rows,
            "findings": _rows(findings),
        }
        findings = []


def unequal(
    runner: Runner, problem: Problem, outcome: Outcome, runs: int | None = None
) -> list[Finding]:
    """One finding, if results have not always the bits of the first in `runs` more: on
    a GPU `_RUNS`, else one."""
    if runs is None:
        runs = 1 if jax.default_backend() == "cpu" else _RUNS
    others = [runner(problem).results for _ in range(runs if outcome.results else 0)]
    differ = {}
    for tensor, x in outcome.results.items():
        if times := sum(not same_bits(x, other[tensor]) for other in others):
            differ[tensor] = times
    if not differ:
        return []
    most = max(differ.values())
    up_to = "up to " if min(differ.values()) < most else ""
    says = (
        f"{_have(differ)} other bits in {up_to}{most} of {runs} more runs on "
        f"{problem}: it reads what is not there yet, or sums up in no fixed order"
    )
    kind, places = "not reproducible", (str(problem),)
    return [Finding(kind, "re-run", says, tuple(differ), places)]


def _have(tensors: Collection[str]) -> str:
    symbols = ", ".join(SYMBOLS[tensor] for tensor in tensors)
    return f"{symbols} {'has' if len(tensors) == 1 else 'have'}"


def _by_row(tensor: str, e: np.ndarray) -> Float[np.ndarray, "B L N"]:
    """RMS over columns."""
    rms = np.sqrt(np.mean(e**2, axis=-1))
    return rms.swapaxes(1, 2) if tensor == "dbias" else rms


def _concentrated(errors: Float[np.ndarray, "B L N"]) -> str:
    """Which positions and heads hold the error (in units), if only a part of them."""
    # Where most rows are exactly right no error of theirs is a measure.
    far = errors > max(_FAR * np.median(errors), _RIGHT)
    # Where the rest is far off, too, these are only the worst.
    if not far.any() or np.sqrt(np.mean(errors[~far] ** 2)) > _RIGHT:
        return ""
    _, positions, heads = np.nonzero(far)
    named = ", ".join(map(str, np.unique(heads)))
    first, last = positions.min(), positions.max()
    # What reaches from end to end says nothing of where.
    span = f"positions {first} to {last} of heads"
    if first == last:
        span = f"position {first} of heads"
    elif last - first == far.shape[1] - 1:
        span = "heads"
    return f"{100 * far.mean():.2g} % of its rows are far off, {span} {named}"


def guarded(what: str, make: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Rows as they come, and what is raised as the last one. There is one at least."""
    yield {"findings": []}
    try:
        yield from make()
    except Exception as error:  # A function of somebody's may raise anything.
        yield {"findings": _rows([_not_run(what, said(error), is_refusal(error))])}


def _attend_of(target: Target, problem: Problem) -> Callable[[Mask], Attend]:
    return lambda mask: target.attend(mask, scale=problem.scale)


def _rows(findings) -> list[Row]:
    return [dataclasses.asdict(finding) for finding in findings if finding is not None]
