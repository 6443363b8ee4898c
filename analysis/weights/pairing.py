"""Which checkpoints of two runs are compared."""

import dataclasses
from collections.abc import Sequence

from analysis.weights.compare import some_of
from analysis.weights.readers import Weights
from train.config import UsageError


@dataclasses.dataclass(frozen=True)
class Pairing:
    """The checkpoints of two runs that are compared.

    Attributes:
      steps: the step of each comparison, and what either side calls it.
      problems: a line if steps have no partner, or are two.
    """

    steps: Sequence[tuple[int | None, int | None, int | None]]
    problems: list[str]


def pair(a: Weights, b: Weights, names: tuple[str, str]) -> Pairing:
    """Steps that both have; of two single checkpoints these, whatever their steps.

    A step that neither name tells is None, and so is one of two.

    Raises:
      UsageError: they have no step in common.
    """
    if len(a.steps) == len(b.steps) == 1:
        (here,), (there,) = a.steps, b.steps
        known = {here, there} - {None}
        if len(known) == 2:
            line = f"step {here} of {names[0]} against step {there} of {names[1]}"
            return Pairing([(None, here, there)], [line])
        return Pairing([(known.pop() if known else None, here, there)], [])
    common = [step for step in a.steps if step in b.steps and step is not None]
    if not common:
        said = [some_of(list(one.steps)) for one in (a, b)]
        raise UsageError(
            f"{a.path} (steps {said[0]}) and {b.path} (steps {said[1]}) have no step "
            "in common: name one checkpoint of each, or runs saved at the same steps"
        )
    alone = [
        f"{some_of(left)} (only in {name})"
        for name, one in zip(names, (a, b), strict=True)
        if (left := [step for step in one.steps if step not in common])
    ]
    steps = [(step, step, step) for step in common]
    if not alone:
        return Pairing(steps, [])
    compared = f"{names[1]}: compared at {_steps(common)}, not at {' and '.join(alone)}"
    return Pairing(steps, [compared])


def _steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {some_of(steps)}"
