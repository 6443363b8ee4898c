"""What recipes give on problems of an audit, as parts that run beside the rest."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from attn_jax.audit import attribution, verdict
from attn_jax.audit.algorithms import Algorithms
from attn_jax.audit.attribution import Cost, Fit
from attn_jax.audit.parts import Parts
from attn_jax.audit.plan import Group
from attn_jax.audit.problem import Problem
from attn_jax.audit.rows import Found, found_of, measured_of, rows_of
from attn_jax.recipe import Recipe
from attn_jax.store import Row


@dataclasses.dataclass(frozen=True)
class Beside:
    """How recipes are run: on inputs of `dtype`, with `gradients` or without."""

    parts: Parts
    dtype: str
    gradients: bool

    def begin(self, name: str, recipe: Recipe, group: Group) -> Future[list[Row]]:
        """A part of that name."""
        return self.parts.beside(name, self._rows(recipe, group))

    def _rows(self, recipe: Recipe, group: Group) -> Iterator[Row]:
        problems = tuple(group.problems(self.dtype))
        found = attribution.predict(recipe, problems, gradients=self.gradients)
        for problem, of_problem in zip(problems, found, strict=True):
            yield {"family": problem.family, "found": rows_of(of_problem)}


class Predictions:
    """What recipes give on some of `groups` of problems, each begun once."""

    def __init__(
        self, beside: Beside, recipes: Mapping[str, Recipe], groups: Sequence[Group]
    ):
        self._beside, self._recipes, self._groups = beside, recipes, groups
        self._begun: dict[tuple[str, Group], Future[list[Row]]] = {}

    def begin(self, names: Iterable[str], group: Group) -> None:
        for name in names:
            if (name, group) not in self._begun:
                of = f"{name} on {group}", self._recipes[name], group
                self._begun[name, group] = self._beside.begin(*of)

    def of(self, names: Iterable[str], group: Group) -> dict[str, dict[str, Found]]:
        """By recipe and family; waits for those that are not there yet."""
        names = tuple(names)
        self.begin(names, group)
        return {name: found_of(self._begun[name, group].result()) for name in names}

    def begin_allowed(
        self, algorithms: Algorithms, problem: Problem, found: Found
    ) -> bool:
        """Begins what `allowed` will wait for, if it does."""
        poor = verdict.POOR_UNITS
        if any(m.errors.units > max(poor, m.honest) for m in found.values()):
            self.begin(algorithms.names, self._group(problem))
            return True
        return False

    def allowed(
        self, algorithms: Algorithms, problem: Problem, found: Found
    ) -> dict[str, float]:
        """`Algorithms.allowed`, of results among which one is found to be poor, for the
        sake of time."""
        predicted = {}
        if self.begin_allowed(algorithms, problem, found):
            of_all = self.of(algorithms.names, self._group(problem))
            predicted = {name: of[problem.family] for name, of in of_all.items()}
        return algorithms.allowed(found, predicted)

    def _group(self, problem: Problem) -> Group:
        """Parts have the names of groups, which say nothing of families."""
        return next(x for x in self._groups if x.has(problem))


# A recipe on a problem, and without each of its steps.
Pricing = tuple[Future[list[Row]], dict[str, Future[list[Row]]]]


class Prices:
    """What steps of the recipe that fits cost on problems, each begun once; nothing if
    none fits."""

    def __init__(self, beside: Beside, recipes: Mapping[str, Recipe], fit: Fit | None):
        self._beside = beside
        self._recipe = recipes[fit.candidate] if fit and fit.fits else None
        self._begun: dict[Problem, Pricing] = {}

    def begin(self, problems: Iterable[Problem]) -> None:
        if self._recipe is None:
            return
        recipe, better = self._recipe, attribution.better(self._recipe)
        for problem in problems:
            if problem not in self._begun:
                self._beside.parts.expect(1 + len(better))
                self._begun[problem] = (
                    self._part(recipe.name, recipe, problem),
                    {
                        step: self._part(f"{recipe.name} but for {step}", x, problem)
                        for step, x in better.items()
                    },
                )

    def _part(self, name: str, recipe: Recipe, problem: Problem) -> Future[list[Row]]:
        group = Group(
            *(problem.shape, problem.mask, (problem.family,), problem.scale_factor)
        )
        return self._beside.begin(f"{name} on {problem}", recipe, group)

    def of(self, problems: Iterable[Problem]) -> list[tuple[Problem, list[Cost]]]:
        """Of those that were begun; waits for what is not there yet."""

        def found(part: Future[list[Row]]) -> Found:
            (row,) = part.result()
            return measured_of(row["found"])

        def costs(whole, without) -> list[Cost]:
            steps = {step: found(part) for step, part in without.items()}
            return attribution.costs(found(whole), steps)

        begun = self._begun
        return [(x, costs(*begun[x])) for x in problems if x in begun]
