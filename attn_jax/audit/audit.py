"""The audit of a target: its parts one after the other, each kept when it is done.

    GROUP               the target on a group of problems, against FP64, and what of its
                        wiring can be recognised in the results
    RECIPE on GROUP     what a recipe gives there
    costs on PROBLEM    of the steps of the recipe that fits, where the target is poor

`verdict` makes findings of them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from attn_jax.audit import attribution, more, verdict
from attn_jax.audit.attribution import Cost, Fit
from attn_jax.audit.error import Errors, in_units
from attn_jax.audit.finding import Finding, in_order
from attn_jax.audit.measure import Measured, Outcome, Runner, measured
from attn_jax.audit.plan import Group
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import Target
from attn_jax.audit.verdict import Judged
from attn_jax.audit.wiring import recognise
from attn_jax.recipe import Recipe
from attn_jax.store import Row, Store

# A plain implementation in the inputs' format: FlashAttention's tests take one such for
# their measure.
SAME_FORMAT = "jax_nn"
# Problems whose steps are priced, at most; each takes a program for each step.
_PRICED = 2

Found = dict[str, Measured]
# Parts of `more`, and those that need no gradients.
LOOKS = ("P", "x64", "probes", "invariances", "merging")
FORWARD = ("P", "x64")


@dataclasses.dataclass(frozen=True)
class Audit:
    """What is to be done: `target` on the `groups` of problems, in the mode that the
    process is in; the first group is compared with all `recipes`, `verdict.PLAIN` among
    them. `looks` names parts of `more`."""

    target: Target
    groups: tuple[Group, ...]
    dtype: str
    recipes: Mapping[str, Recipe]
    gradients: bool
    looks: tuple[str, ...] = LOOKS

    def settings(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "adapter": repr(self.target.adapter),
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


class Parts:
    """Rows of parts that are done. With a `store` they are kept there, and those that
    it has are not made again. `tell` is called with the name of each."""

    def __init__(self, store: Store | None, tell: Callable[[str], None]):
        self._store, self._tell = store, tell

    def __call__(self, name: str, make: Iterable[Row]) -> list[Row]:
        cell = {"part": name}
        if self._store is None:
            self._tell(name)
            return list(make)
        if cell not in self._store:
            self._tell(name)
            self._store.add(cell, list(make))
        return self._store.rows([cell])


def carry_out(audit: Audit, parts: Parts) -> Result:
    """Does what is left of it."""
    first = audit.groups[0]
    rows = {g: parts(str(g), _measure(audit, g)) for g in audit.groups}
    compared = [
        family
        for row in rows[first]
        if (family := row["family"]) in attribution.FAMILIES and row["found"]
    ]
    predicted = {}
    if compared:
        predicted = {
            name: _found(parts(f"{name} on {first}", _predict(audit, recipe, first)))
            for name, recipe in audit.recipes.items()
        }
    here = _found(rows[first])
    fits = attribution.fits(
        attribution.profile({family: here[family] for family in compared}),
        {name: attribution.profile(found) for name, found in predicted.items()},
    )
    fit = fits[0] if fits else None
    algorithms = (fit.candidate,) if fit and fit.fits else verdict.PLAIN
    cells = []
    for group in audit.groups:
        known = predicted if group == first else {}
        if any(row["found"] for row in rows[group]):
            for name in {*algorithms, SAME_FORMAT} - known.keys():
                part = _predict(audit, audit.recipes[name], group)
                known[name] = _found(parts(f"{name} on {group}", part))
        cells += _judged(audit, group, rows[group], known, algorithms)
    looks = _looked(audit, parts) if any(cell.found for cell in cells) else {}
    wiring = [
        _finding(finding)
        for of_group in rows.values()
        for row in of_group
        for finding in row["wiring"]
    ]
    read = _findings(looks.pop("P", []))
    if not any("out" in finding.tensors for finding in wiring):
        wiring += read  # Of what is recognised they are consequences.
    costs = []
    if fit and fit.fits:
        costs = [
            (
                problem,
                [Cost(*(row[x] for x in Cost._fields)) for row in parts(name, make)],
            )
            for problem in _poorest(cells)
            for name, make in [
                (
                    f"costs on {problem}",
                    _price(audit, audit.recipes[fit.candidate], problem),
                )
            ]
        ]
    suspect = attribution.suspect(fits)
    found = verdict.judge(cells, fit, costs, wiring, suspect)
    others = [x for rows in looks.values() for x in _findings(rows)]
    return Result(cells, fits, costs, looks, in_order(verdict.together(found, others)))


def _looked(audit: Audit, parts: Parts) -> dict[str, list[Row]]:
    """What a target is looked at for by itself, on the first group's shape and mask."""
    target, group = audit.target, audit.groups[0]
    problem = Problem(group.shape, audit.dtype, "normal", group.mask)
    gradients = audit.gradients
    looks = {
        "P": lambda: more.read(target, problem),
        "x64": lambda: more.other_mode(target, problem, gradients=gradients),
        "probes": lambda: more.probe(target, problem),
        "invariances": lambda: more.vary(target, problem),
        "merging": lambda: more.merge(target, problem),
    }
    wanted = audit.looks if gradients else [x for x in audit.looks if x in FORWARD]
    return {name: parts(name, more.guarded(looks[name])) for name in wanted}


def _findings(rows: list[Row]) -> list[Finding]:
    return [_finding(x) for row in rows for x in row["findings"]]


def _finding(row: Row) -> Finding:
    """A file has no tuples."""
    plain: dict[str, Any] = dict(row)
    plain |= {name: tuple(row[name]) for name in ("tensors", "where")}
    return Finding(**plain)


def _measure(audit: Audit, group: Group) -> Iterator[Row]:
    """The target on the problems of a group."""
    problems = group.problems(audit.dtype)
    first = problems[0]
    attend = audit.target.attend(first.rules, scale=first.scale)
    runner = Runner(attend, gradients=audit.gradients)
    for problem in problems:
        outcome = runner(problem)
        wiring = recognise(outcome.results, problem) if outcome.results else []
        yield {
            "family": problem.family,
            "outcome": outcome._replace(results={})._asdict(),
            "found": _rows_of(measured(problem, outcome.results)),
            "wiring": [dataclasses.asdict(finding) for finding in wiring],
        }


def _predict(audit: Audit, recipe: Recipe, group: Group) -> Iterator[Row]:
    problems = group.problems(audit.dtype)
    found = attribution.predict(recipe, tuple(problems), gradients=audit.gradients)
    for problem, of_problem in zip(problems, found, strict=True):
        yield {"family": problem.family, "found": _rows_of(of_problem)}


def _price(audit: Audit, recipe: Recipe, problem: Problem) -> Iterator[Row]:
    for cost in attribution.costs(recipe, problem, gradients=audit.gradients):
        yield cost._asdict()


def _poorest(cells: list[Judged]) -> list[Problem]:
    """The problems that a finding will name: for each result the one with the largest
    error, where that is poor."""
    worst: dict[str, tuple[float, Problem]] = {}
    for cell in cells:
        for tensor, m in cell.found.items():
            if tensor != "lse" and m.errors.units > verdict.POOR_UNITS:
                at = m.errors.units, cell.problem
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
        found = _measured(row["found"])
        here = {name: of[problem.family] for name, of in predicted.items() if found}
        allowed = {
            tensor: max(here[name][tensor].errors.units for name in algorithms)
            for tensor in found
        }
        twice = {
            tensor: in_units(m.errors.maximum, 2 * plain.errors.maximum)
            for tensor, m in found.items()
            if (plain := here[SAME_FORMAT][tensor]) and tensor != "lse"
        }
        outcome = Outcome(**row["outcome"])
        cells.append(Judged(problem, outcome, found, allowed, twice))
    return cells


def _rows_of(found: Found) -> dict[str, Row]:
    return {
        tensor: m._asdict() | {"errors": dataclasses.asdict(m.errors)}
        for tensor, m in found.items()
    }


def _measured(rows: dict[str, Row]) -> Found:
    return {
        tensor: Measured(
            Errors(**row["errors"]), row["bias"], row["bias_ci"], row["not_finite"]
        )
        for tensor, row in rows.items()
    }


def _found(rows: list[Row]) -> dict[str, Found]:
    """By family."""
    return {row["family"]: _measured(row["found"]) for row in rows}
