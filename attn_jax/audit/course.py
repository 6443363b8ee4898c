"""An audit carried out: its parts one after the other, each kept when it is done.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from attn_jax.audit import (
    attribution,
    calls,
    lse_gradient,
    more,
    programs,
    verdict,
)
from attn_jax.audit.algorithms import Algorithms, judged_by, ordinary
from attn_jax.audit.attribution import Cost, Fit
from attn_jax.audit.audit import Audit
from attn_jax.audit.error import in_units
from attn_jax.audit.finding import Finding, in_order
from attn_jax.audit.looks import LOOKS, OF_OTHER_SHAPES, OF_PROBLEMS, look
from attn_jax.audit.measure import Outcome, Runner, measured
from attn_jax.audit.parts import Asked, Parts
from attn_jax.audit.plan import Group
from attn_jax.audit.predictions import Beside, Predictions, Prices
from attn_jax.audit.problem import FORMATS, Problem
from attn_jax.audit.rows import (
    Found,
    finding_of,
    findings_of,
    found_of,
    measured_of,
    rows_of,
)
from attn_jax.audit.verdict import Judged
from attn_jax.audit.wiring import one_cause, recognise
from attn_jax.store import Row

# A plain implementation in the inputs' format: FlashAttention's tests take one such for
# their measure.
SAME_FORMAT = "jax_nn"
# Problems whose steps are priced, at most; each takes a program for each step.
_PRICED = 2


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
    course = _Course(audit, parts)
    course.begin()
    ready()
    course.measure()
    return course.result()


class _Course:
    """An audit under way: parts of the target that were asked for, what of them is
    there, and recipes that were begun with the part that wants them, so that none is
    waited for after the other."""

    def __init__(self, audit: Audit, parts: Parts):
        self._audit, self._parts = audit, parts
        self._recipes = Beside(parts, audit.dtype, audit.gradients)
        self._predictions = Predictions(self._recipes, audit.recipes, audit.measured)
        self._prices = Prices(self._recipes, audit.recipes, None)
        self._asked: dict[Group | str, Asked] = {}
        self._rows: dict[Group, list[Row]] = {}
        self._looks: dict[str, list[Row]] = {}
        self._fits: list[Fit] = []
        # Problems whose steps were priced before all were measured.
        self._early: list[Problem] = []

    @property
    def _fit(self) -> Fit | None:
        return self._fits[0] if self._fits else None

    @property
    def _of_calls(self) -> Algorithms:
        """Recipes that another call may be of: it may be another algorithm."""
        fit, plain = self._fit, ordinary(FORMATS[self._audit.dtype])
        return Algorithms(fit.candidate if fit and fit.fits else None, plain)

    def begin(self) -> None:
        """Asks for every part of the target, and for the recipes that it is compared
        with."""
        audit, parts = self._audit, self._parts
        first, *others = audit.groups
        beside = audit.beside
        parts.expect(2 * len(audit.groups) + len(audit.looks) + len(audit.recipes))
        parts.expect(len(beside))
        if set(first.families) & set(attribution.FAMILIES):
            self._predictions.begin(audit.recipes, first)
        if not parts.apart:
            programs.compile_each(
                functools.partial(_lowered, audit, group)
                for group in audit.measured
                if not parts.has(str(group))
            )
        self._asked[first] = _begin(audit, parts, first)
        # The longest of all; where the target does nothing they end at once.
        looking = _begin_looks(audit, parts)
        # Long sequences, which come last, take longest, and so do recipes on them.
        for group in (*reversed(others), *beside):
            self._asked[group] = _begin(audit, parts, group)
        self._asked |= looking
        parts.start()

    def measure(self) -> None:
        """Waits for the parts, in the order in which they end."""
        audit, (first, *others) = self._audit, self._audit.groups
        self._measured(first)
        if not self._parts.apart:
            # To wait for recipes here would keep the target from its work.
            for group in others:
                self._measured(group)
        self._compare(found_of(self._rows[first]))
        for group in self._rows:
            self._begin_algorithms(group)
        waiting = {x: of for x, of in self._asked.items() if x not in self._rows}
        if _is_measured(self._rows[first]):
            # Most likely those are, too: there is time for recipes until then.
            for group in (x for x in audit.groups if x in waiting):
                names = _algorithms(audit, self._fit, group).names
                self._predictions.begin({*names, SAME_FORMAT}, group)
        else:
            waiting = {x: of for x, of in waiting.items() if x in audit.groups}
        unmeasured = {x for x in waiting if isinstance(x, Group)}
        for part in self._parts.as_they_end(waiting):
            if isinstance(part, str):
                self._looked(part)
                continue
            self._measured(part)
            self._begin_algorithms(part)
            unmeasured.remove(part)
            if not unmeasured:
                self._prices.begin(_poorest(audit, self._in_order))

    def _measured(self, group: Group) -> None:
        self._rows[group] = self._asked[group].rows()
        if group in self._audit.groups and _is_measured(self._rows[group]):
            self._predictions.begin([SAME_FORMAT], group)

    def _compare(self, here: Mapping[str, Found]) -> None:
        """With all recipes on the first group's problems."""
        audit, first = self._audit, self._audit.groups[0]
        compared = [x for x in here if x in attribution.FAMILIES and here[x]]
        predicted = self._predictions.of(audit.recipes, first) if compared else {}
        self._fits = attribution.fits(
            attribution.profile({family: here[family] for family in compared}),
            {name: attribution.profile(found) for name, found in predicted.items()},
        )
        self._prices = Prices(self._recipes, audit.recipes, self._fit)
        # It has all families, and so, mostly, the worst of all.
        self._early = _poorest(audit, {first: self._rows[first]})
        self._prices.begin(self._early)

    def _begin_algorithms(self, group: Group) -> None:
        """Recipes that a group's errors are judged by; of what is looked at beside, if
        they are poor."""
        rows = self._rows[group]
        algorithms = _algorithms(self._audit, self._fit, group)
        if group not in self._audit.groups:
            problem, found = _beside(self._audit, group, rows)
            self._predictions.begin_allowed(algorithms, problem, found)
        elif _is_measured(rows):
            self._predictions.begin(algorithms.names, group)

    def _looked(self, name: str) -> None:
        self._looks[name] = self._asked[name].rows()
        of_groups = [
            problem
            for group in self._audit.groups
            for problem in group.problems(self._audit.dtype)
        ]
        for call in calls.found_on(self._looks[name], of_groups):
            self._predictions.begin_allowed(self._of_calls, *call)

    @property
    def _in_order(self) -> dict[Group, list[Row]]:
        return {x: self._rows[x] for x in self._audit.measured if x in self._rows}

    def result(self) -> Result:
        """What all of it comes to."""
        audit, rows = self._audit, self._in_order
        poorest = _poorest(audit, rows)
        self._prices.begin(poorest)
        cells, reported = self._cells()
        costs = self._prices.of(dict.fromkeys([*poorest, *self._early]))
        names = [x for x in self._asked if isinstance(x, str) and x in self._looks]
        looks = {name: self._looks[name] for name in names}
        wiring = one_cause(_wiring(rows), [cell.problem for cell in cells])
        rows_of_p = [*looks.pop("P", []), *looks.pop("P together", [])]
        read = [(row.get("mask"), findings_of([row])) for row in rows_of_p]
        broken = {c.problem.mask for c in cells if verdict.is_broken(c, "out")}
        spoilt = verdict.masks_of(wiring, {"out"}, cells)
        wiring += more.of_read(read, spoilt, broken)
        suspect = attribution.suspect(self._fits)
        found = verdict.judge(cells, self._fit, costs, wiring, suspect)
        more_found = [
            finding
            for of_rows in (*rows.values(), *looks.values())
            for finding in findings_of(of_rows)
        ]
        if "again" in audit.looks:
            found, of_runs = _again(audit, self._parts, cells, found)
            more_found += of_runs
        more_found = lse_gradient.unexplained(more_found, wiring)
        more_found += calls.findings(
            looks.get("calls", ()),
            {str(cell.problem): cell for cell in cells},
            wiring,
            functools.partial(self._predictions.allowed, self._of_calls),
        )
        findings = in_order(verdict.together(found, more_found, cells))
        return Result(cells[:reported], self._fits, costs, looks, findings)

    def _cells(self) -> tuple[list[Judged], int]:
        """Every problem, and how many of them are a report's: what is looked at beside
        is judged, and no cell of it."""
        audit, predictions, cells = self._audit, self._predictions, []
        for group in audit.groups:
            rows = self._rows[group]
            algorithms = _algorithms(audit, self._fit, group)
            names = {*algorithms.names, SAME_FORMAT} if _is_measured(rows) else ()
            cells += _judged(
                audit, group, rows, predictions.of(names, group), algorithms
            )
        reported = len(cells)
        for group in (x for x in audit.beside if x in self._rows):
            problem, found = _beside(audit, group, self._rows[group])
            (row,) = self._rows[group]
            algorithms = _algorithms(audit, self._fit, group)
            allowed = predictions.allowed(algorithms, problem, found)
            outcome, alone = Outcome(**row["outcome"]), algorithms.is_alone
            cells.append(Judged(problem, outcome, found, allowed, alone=alone))
        return verdict.with_faults(cells), reported


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


def _beside(audit: Audit, group: Group, rows: list[Row]) -> tuple[Problem, Found]:
    """The one problem of a group that is looked at beside, and what was found."""
    (row,), (problem,) = rows, group.problems(audit.dtype)
    return problem, measured_of(row["found"])


def _is_measured(rows: list[Row]) -> bool:
    return any(row["found"] for row in rows)


def _algorithms(audit: Audit, fit: Fit | None, group: Group) -> Algorithms:
    inputs, compared = FORMATS[audit.dtype], audit.groups[0].shape
    return judged_by(audit.recipes, fit, inputs, group.shape, compared)


def _again(
    audit: Audit, parts: Parts, cells: list[Judged], found: list[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """What was found, with the rows where that is worse than its algorithm allows, and
    what more runs show."""
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
    return with_rows, new


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


def _lowered(audit: Audit, group: Group) -> jax.stages.Lowered:
    return _runner(audit, group).lowered(group.problems(audit.dtype)[0])


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
    algorithms: Algorithms,
) -> list[Judged]:
    """`predicted`: by recipe and family."""
    cells = []
    for problem, row in zip(group.problems(audit.dtype), rows, strict=True):
        found = measured_of(row["found"])
        here = {name: of[problem.family] for name, of in predicted.items() if found}
        counting = {name: here[name] for name in algorithms.names if found}
        allowed = algorithms.allowed(found, counting)
        twice = {
            tensor: in_units(m.errors.maximum, 2 * plain.errors.maximum)
            for tensor, m in found.items()
            if (plain := here[SAME_FORMAT][tensor]) and tensor != "lse"
        }
        outcome, alone = Outcome(**row["outcome"]), algorithms.is_alone
        cells.append(Judged(problem, outcome, found, allowed, twice, alone))
    return cells
