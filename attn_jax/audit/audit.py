"""The audit of a target: its parts one after the other, each kept when it is done.

    GROUP               the target on a group of problems, against FP64, and what of its
                        wiring can be recognised in the results
    probes, P, ...      the target looked at by itself (`looks`)
    RECIPE on GROUP     what a recipe gives there
    RECIPE but for STEP on PROBLEM
                        the recipe that fits, with a step done better, where the target
                        is poor

`verdict` makes findings of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from attn_jax.audit import attribution, calls, more, programs, verdict
from attn_jax.audit.attribution import Cost, Fit
from attn_jax.audit.error import in_units
from attn_jax.audit.finding import Finding, in_order
from attn_jax.audit.looks import LOOKS, OF_OTHER_SHAPES, OF_PROBLEMS, look
from attn_jax.audit.measure import Outcome, Runner, measured
from attn_jax.audit.parts import Asked, Parts
from attn_jax.audit.plan import Group, ragged
from attn_jax.audit.predictions import Beside, Predictions, Prices
from attn_jax.audit.problem import Problem
from attn_jax.audit.rows import (
    Found,
    finding_of,
    findings_of,
    found_of,
    measured_of,
    rows_of,
)
from attn_jax.audit.target import Target
from attn_jax.audit.verdict import Judged
from attn_jax.audit.wiring import one_cause, recognise
from attn_jax.recipe import Recipe
from attn_jax.store import Row

# A plain implementation in the inputs' format: FlashAttention's tests take one such for
# their measure.
SAME_FORMAT = "jax_nn"
# Problems whose steps are priced, at most; each takes a program for each step.
_PRICED = 2


@dataclasses.dataclass(frozen=True)
class Audit:
    """What is to be done: `target` on the `groups` of problems, in the mode that the
    process is in; the first group is compared with all `recipes`, `verdict.PLAIN` among
    them. `looks` names some of `LOOKS`; `code` is the target's `fingerprint`."""

    target: Target
    groups: tuple[Group, ...]
    dtype: str
    recipes: Mapping[str, Recipe]
    gradients: bool
    looks: tuple[str, ...] = LOOKS
    code: str = ""

    @property
    def beside(self) -> tuple[Group, ...]:
        """What is looked at, and no cell of a report."""
        if "ragged" not in self.looks:
            return ()
        try:
            takes = self.target.takes_scale
        except Exception:  # An object may raise anything, and does so on its problems.
            takes = False
        shards = self.target.adapter.shards
        return tuple(ragged(self.groups, shards, takes_scale=takes))

    @property
    def measured(self) -> tuple[Group, ...]:
        return (*self.groups, *self.beside)

    def settings(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "code": self.code,
            "adapter": _adapter(self.target),
            "dtype": self.dtype,
            "groups": [
                [list(dataclasses.astuple(g.shape)), g.mask, list(g.families)]
                for g in self.groups
            ],
            "recipes": list(self.recipes),
            "gradients": self.gradients,
            "looks": list(self.looks),
            "x64": bool(jax.config.read("jax_enable_x64")),
        }


def _adapter(target: Target) -> dict[str, Any]:
    fields = _plain(vars(target.adapter))
    if fields["shards"] == 1:
        # As before there were several: folders of that time are taken up.
        del fields["shards"]
    return fields


def _plain(x: Any) -> Any:
    """As JSON holds it; what has no form there as Python writes it."""
    if isinstance(x, Mapping):
        return {name: _plain(value) for name, value in x.items()}
    return x if x is None or isinstance(x, str | bool | int | float) else repr(x)


class Result(NamedTuple):
    """What came of it.

    Attributes:
      cells: every problem, in order.
      fits: of recipes, the nearest first; none where nothing could be compared.
      costs: by problem.
      looks: rows of the parts of `more`, by name.
      findings: in order.
    """

    cells: list[Judged]
    fits: list[Fit]
    costs: list[tuple[Problem, list[Cost]]]
    looks: dict[str, list[Row]]
    findings: list[Finding]


def carry_out(
    audit: Audit, parts: Parts, ready: Callable[[], Any] = lambda: None
) -> Result:
    """Does what is left of it. `ready` is called when everything is under way and
    before anything of the target is run, and what it raises ends the audit."""
    first, *others = audit.groups
    recipes = Beside(parts, audit.dtype, audit.gradients)
    predictions = Predictions(recipes, audit.recipes, audit.measured)
    beside = audit.beside
    parts.expect(2 * len(audit.groups) + len(audit.looks) + len(audit.recipes))
    parts.expect(len(beside))
    if set(first.families) & set(attribution.FAMILIES):
        predictions.begin(audit.recipes, first)
    if not parts.apart:
        for group in (*audit.groups, *beside):
            if not parts.has(str(group)):
                problem = group.problems(audit.dtype)[0]
                _runner(audit, group).begin(problem, parts.compiling)
        programs.wait()
    begun = {first: _begin(audit, parts, first)}
    # The longest of all; where the target does nothing they end at once.
    looking = _begin_looks(audit, parts)
    # Long sequences, which come last, take longest, and so do recipes on them.
    begun |= {group: _begin(audit, parts, group) for group in reversed(others)}
    looking_beside = {group: _begin(audit, parts, group) for group in beside}
    parts.start()
    ready()
    rows: dict[Group, list[Row]] = {}

    def measure(group: Group) -> None:
        rows[group] = begun[group].rows()
        if _is_measured(rows[group]):
            predictions.begin([SAME_FORMAT], group)

    measure(first)
    if not parts.apart:
        # To wait for recipes here would keep the target from its work.
        for group in others:
            measure(group)
    here = found_of(rows[first])
    compared = [x for x in here if x in attribution.FAMILIES and here[x]]
    predicted = predictions.of(audit.recipes, first) if compared else {}
    fits = attribution.fits(
        attribution.profile({family: here[family] for family in compared}),
        {name: attribution.profile(found) for name, found in predicted.items()},
    )
    fit = fits[0] if fits else None
    prices, by_group = Prices(recipes, audit.recipes, fit), {}
    # It has all families, and so, mostly, the worst of all.
    prices.begin(early := _poorest(audit, {first: rows[first]}))
    # Another call may be of another algorithm.
    of_calls = {*verdict.PLAIN, *([fit.candidate] if fit and fit.fits else [])}
    of_groups = [x for group in audit.groups for x in group.problems(audit.dtype)]
    looks: dict[str, list[Row]] = {}

    def begin_algorithms(group: Group) -> None:
        if _is_measured(rows[group]):
            by_group[group] = _algorithms(audit, fit, group)
            predictions.begin(by_group[group], group)

    for group in begun:
        if group in rows:
            begin_algorithms(group)
    waiting: dict[Group | str, Asked] = {x: begun[x] for x in begun if x not in rows}
    if any(here.values()):
        waiting |= {**looking_beside, **looking}
    unmeasured = {x for x in waiting if isinstance(x, Group)}
    # Recipes are begun with the part that wants them, not when they are read, one
    # after the other.
    for part in parts.as_they_end(waiting):
        if isinstance(part, str):
            looks[part] = looking[part].rows()
            for call in calls.found_on(looks[part], of_groups):
                predictions.begin_allowed(of_calls, *call)
            continue
        if part in begun:
            measure(part)
            begin_algorithms(part)
        else:
            rows[part] = looking_beside[part].rows()
            of = _beside(audit, part, rows[part])
            predictions.begin_allowed(_algorithms(audit, fit, part), *of)
        unmeasured.remove(part)
        if not unmeasured:
            prices.begin(_poorest(audit, _in_order(audit, rows)))
    looks = {name: looks[name] for name in looking if name in looks}
    rows = _in_order(audit, rows)
    poorest = _poorest(audit, rows)
    prices.begin(poorest)
    cells = []
    for group in audit.groups:
        algorithms = by_group.get(group, ())
        names = {*algorithms, SAME_FORMAT} if algorithms else ()
        known = predictions.of(names, group)
        cells += _judged(audit, group, rows[group], known, algorithms)
    # What is looked at beside is judged, and no cell of a report.
    reported = len(cells)
    for group in (x for x in beside if x in rows):
        problem, of = _beside(audit, group, rows[group])
        (row,) = rows[group]
        allowed = predictions.allowed(_algorithms(audit, fit, group), problem, of)
        cells.append(Judged(problem, Outcome(**row["outcome"]), of, allowed))
    cells = verdict.with_faults(cells)
    costs = prices.of(dict.fromkeys([*poorest, *early]))

    wiring = one_cause(_wiring(rows), [cell.problem for cell in cells])
    rows_of_p = [*looks.pop("P", []), *looks.pop("P together", [])]
    read = [(row.get("mask"), findings_of([row])) for row in rows_of_p]
    wiring += more.of_read(read, verdict.masks_of(wiring, {"out"}, cells))
    found = verdict.judge(cells, fit, costs, wiring, attribution.suspect(fits))
    if "again" in audit.looks:
        found = _again(audit, parts, cells, found)
    more_found = [
        finding
        for of_rows in (*rows.values(), *looks.values())
        for finding in findings_of(of_rows)
    ]
    more_found += calls.findings(
        looks.get("calls", ()),
        {str(cell.problem): cell for cell in cells},
        wiring,
        functools.partial(predictions.allowed, of_calls),
    )
    findings = in_order(verdict.together(found, more_found, cells))
    return Result(cells[:reported], fits, costs, looks, findings)


def _wiring(rows: Mapping[Group, list[Row]]) -> list[Finding]:
    """What was recognised. Of keys that are all zero every head's P is the same, and
    what is recognised there counts where nothing else shows it."""
    found = []
    for of_group in rows.values():
        known = {
            tensor
            for row in of_group
            for x in row["wiring"]
            for tensor in x["tensors"]
            if row["family"] != "zero_k_one_v"
        }
        for row in of_group:
            for finding in row["wiring"]:
                alike = row["family"] == "zero_k_one_v"
                if not (alike and known.issuperset(finding["tensors"])):
                    found.append(finding_of(finding))
    return found


def _in_order(audit: Audit, rows: Mapping[Group, list[Row]]) -> dict[Group, list[Row]]:
    return {group: rows[group] for group in audit.measured if group in rows}


def _beside(audit: Audit, group: Group, rows: list[Row]) -> tuple[Problem, Found]:
    """The one problem of a group that is looked at beside, and what was found."""
    (row,), (problem,) = rows, group.problems(audit.dtype)
    return problem, measured_of(row["found"])


def _is_measured(rows: list[Row]) -> bool:
    return any(row["found"] for row in rows)


def _algorithms(audit: Audit, fit: Fit | None, group: Group) -> Sequence[str]:
    """What a target is judged by on a group: the recipe that fits, or plain ones."""
    if fit and fit.fits:
        if attribution.runs_on(audit.recipes[fit.candidate], group.shape):
            return (fit.candidate,)
    return verdict.PLAIN


def _again(
    audit: Audit, parts: Parts, cells: list[Judged], found: list[Finding]
) -> list[Finding]:
    """What is worse than its algorithm allows, with what more runs show of it."""
    problems = {str(cell.problem): cell.problem for cell in cells}
    kind = "worse than its algorithm allows"
    # P may have been read on inputs that are among no cells.
    worse = [f for f in found if f.kind == kind and f.where[0] in problems]
    by_problem: dict[str, list[str]] = {}
    for finding in worse:
        by_problem.setdefault(finding.where[0], []).extend(finding.tensors)
    said, new = {}, []
    for place in list(by_problem)[:_PRICED]:
        target, problem = audit.target, problems[place]
        make = functools.partial(
            *(more.again, target, problem, by_problem[place]), gradients=audit.gradients
        )
        name = f"{place}, again"
        rows = parts.of_target(
            name,
            functools.partial(more.guarded, name, make),
            functools.partial(_died, name),
            problem.shape,
        ).rows()
        new += findings_of(rows)
        said |= {row["tensor"]: row["rows"] for row in rows if row.get("rows")}
    with_rows = [
        dataclasses.replace(f, says=f"{f.says}; {said[f.tensors[0]]}")
        if f in worse and f.tensors[0] in said
        else f
        for f in found
    ]
    return with_rows + new


def _begin(audit: Audit, parts: Parts, group: Group) -> Asked:
    return parts.of_target(
        str(group),
        functools.partial(_measure, audit, group),
        functools.partial(_crashed, audit, group),
        group.shape,
    )


def _begin_looks(audit: Audit, parts: Parts) -> dict[str, Asked]:
    wanted = [x for x in LOOKS if x in audit.looks and x not in OF_PROBLEMS]
    of = audit.target, audit.groups, audit.dtype
    return {
        name: parts.of_target(
            name,
            functools.partial(look, name, *of, gradients=audit.gradients),
            functools.partial(_died, name),
            None if name in OF_OTHER_SHAPES else audit.groups[0].shape,
        )
        for name in wanted
    }


def _died(part: str, why: str) -> list[Row]:
    finding = Finding("fails", "crash", f"{part}: {why}", (), (part,))
    return [{"findings": [dataclasses.asdict(finding)]}]


def _runner(audit: Audit, group: Group) -> Runner:
    problem = group.problems(audit.dtype)[0]
    attend, shards = audit.target.on(problem), audit.target.adapter.shards
    return Runner(attend, gradients=audit.gradients, shards=shards)


def _measure(audit: Audit, group: Group) -> Iterator[Row]:
    """The target on the problems of a group, the first of them more than once."""
    problems = group.problems(audit.dtype)
    runner = _runner(audit, group)
    for problem in problems:
        outcome = runner(problem)
        runs = more.unequal(runner, problem, outcome) if problem is problems[0] else []
        wiring = recognise(outcome.results, problem) if outcome.results else []
        yield {
            "family": problem.family,
            "outcome": outcome._replace(results={})._asdict(),
            "found": rows_of(measured(problem, outcome.results)),
            "wiring": [dataclasses.asdict(finding) for finding in wiring],
            "findings": [dataclasses.asdict(finding) for finding in runs],
        }


def _crashed(audit: Audit, group: Group, why: str) -> list[Row]:
    outcome = Outcome("failed", why, {}, "", 0.0)._asdict()
    nothing = {"outcome": outcome, "found": {}, "wiring": [], "findings": []}
    return [{"family": p.family, **nothing} for p in group.problems(audit.dtype)]


def _poorest(audit: Audit, rows: Mapping[Group, list[Row]]) -> list[Problem]:
    """The problems that a finding will name: for each result the one with the largest
    error, where that is poor, among those under whose mask it is not wired wrongly."""
    wired: dict[str, set[str]] = {}
    for group, of_group in rows.items():
        tensors = (t for row in of_group for x in row["wiring"] for t in x["tensors"])
        wired.setdefault(group.mask, set()).update(tensors)
    worst: dict[str, tuple[float, Problem]] = {}
    for group, of_group in rows.items():
        spoilt = wired[group.mask] | wired.get("full", set())
        for problem, row in zip(group.problems(audit.dtype), of_group, strict=True):
            for tensor, m in measured_of(row["found"]).items():
                if tensor == "lse" or spoilt & {"out", tensor}:
                    continue
                if m.errors.units > verdict.POOR_UNITS:
                    at = m.errors.units, problem
                    worst[tensor] = max(worst.get(tensor, at), at, key=lambda x: x[0])
    by_size = sorted(worst.values(), key=lambda x: -x[0])
    return list(dict.fromkeys(problem for _, problem in by_size))[:_PRICED]


def _judged(
    audit: Audit,
    group: Group,
    rows: list[Row],
    predicted: Mapping[str, Mapping[str, Found]],
    algorithms: Sequence[str],
) -> list[Judged]:
    """`predicted`: by recipe and family. The largest error of `algorithms` counts."""
    cells = []
    for problem, row in zip(group.problems(audit.dtype), rows, strict=True):
        found = measured_of(row["found"])
        here = {name: of[problem.family] for name, of in predicted.items() if found}
        allowed = {
            tensor: max(
                m.honest, *(here[name][tensor].errors.units for name in algorithms)
            )
            for tensor, m in found.items()
        }
        twice = {
            tensor: in_units(m.errors.maximum, 2 * plain.errors.maximum)
            for tensor, m in found.items()
            if (plain := here[SAME_FORMAT][tensor]) and tensor != "lse"
        }
        outcome = Outcome(**row["outcome"])
        cells.append(Judged(problem, outcome, found, allowed, twice))
    return cells
