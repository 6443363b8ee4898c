"""One candidate on a GPU: whether it is right, then how fast. Runs in a worker.

Inputs of the timed problems stay where they are between runs, as those of `python -m
analysis speed`; time is that of the one kernel, by CUPTI.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.kernels import checks, tuning
from attn_jax.kernels.checks import Check
from attn_jax.kernels.compiler import Kernel as Report
from attn_jax.kernels.compiler import (
    UnreadableReport,
    compiled,
    reported,
    shared_memory,
)
from attn_jax.kernels.tune.candidates import GPUS, KERNELS, Kernel, spills_too_much
from attn_jax.kernels.tuning import KernelName, Tiling
from attn_jax.mask import Mask
from attn_jax.recipe import Architecture
from attn_jax.timing import device_time, interleaved, reason

# Queries that see so many keys at the most, in the mean, are in the class "few".
FEW_KEYS = 2048
LengthClass = Literal["few", "many"]
CLASSES: tuple[LengthClass, ...] = ("few", "many")
# Tokens in a timed problem, and the width of its heads together.
_TOKENS, _WIDTH = 16384, 2048


@dataclasses.dataclass(frozen=True)
class Problem:
    """Self-attention that is timed, over so many tokens."""

    length: int
    is_causal: bool

    @property
    def name(self) -> str:
        return f"{self.length} {'causal' if self.is_causal else 'full'}"

    @property
    def length_class(self) -> LengthClass:
        seen = tuning.keys_seen(self.length, is_causal=self.is_causal)
        return "few" if seen <= FEW_KEYS else "many"


PROBLEMS = (
    *(Problem(1024, False), Problem(2048, True)),
    *(Problem(4096, False), Problem(16384, True)),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tiling for one kernel at some head dims."""

    architecture: Architecture
    kernel: KernelName
    head_dim: int
    value_dim: int
    tiling: Tiling

    @property
    def of(self) -> Kernel:
        return KERNELS[self.architecture][self.kernel]

    def options(self, key_count: int, mask: Mask, listed: bool) -> dict[str, Any]:
        """What `attention` is given so that it uses this tiling."""
        table = tuning.configuration(
            *(self.architecture, self.head_dim, self.value_dim, key_count),
            is_causal=mask.is_causal,
            listed=listed,
        )
        tilings = table._replace(**{self.kernel: self.tiling})
        return {"tilings": tilings, **self.of.options}

    def too_large(self, taken: dict[str, Any]) -> str | None:
        """What is against it, going by what it took (`resources`), in one line."""
        limit = shared_memory(GPUS[self.architecture])
        if (taken["shared_memory"] or 0) > limit:
            return (
                f"takes {taken['shared_memory']} bytes of shared memory, a CTA has "
                f"{limit}"
            )
        need = self.of.need(self.tiling, self.head_dim, self.value_dim)
        return spills_too_much(need, taken["spilled_bytes"] or 0)


def attempt(
    candidate: Candidate, classes: Sequence[LengthClass], seconds: float, check: bool
) -> dict[str, Any]:
    """Checks a candidate and times it beside the table's, or says what is against it.

    With `refused` None: `units`, its errors; what ptxas says; and `times` by problem:
    milliseconds of the candidate, of the table's tiling, and `ratio`, the table's time
    over the candidate's, the median of rounds of at least `seconds` in all; `again` is
    that ratio for the table's tiling against itself.

    Raises:
      RuntimeError: a kernel failed when it ran; the process is of no more use.
    """
    row: dict[str, Any] = {"refused": None}
    if check:
        found, reports = None, []
        # What the compiler says is good to know, and no condition.
        with contextlib.suppress(UnreadableReport):
            with reported(machine_code=False) as reports:
                try:
                    found = _checked(candidate)
                except (NotImplementedError, ValueError, TypeError) as error:
                    row["refused"] = f"does not compile: {reason(error)}"
        if found is None:
            return row
        row |= {"units": found.units} | resources(candidate, reports)
        against = "; ".join(found.failed)
        against = against or candidate.too_large(row)
        if against:
            return row | {"refused": against}
    problems = [p for p in PROBLEMS if p.length_class in classes]
    return row | {"times": {p.name: _timed(candidate, p, seconds) for p in problems}}


def resources(candidate: Candidate, reports: Sequence[Report]) -> dict[str, Any]:
    """The most that the kernel takes in any of the programs; None if nothing is said,
    as without ptxas."""
    own = [report for report in reports if report.name == candidate.of.function]
    names = ("registers", "spilled_bytes", "shared_memory")
    return {
        name: max((getattr(report, name) for report in own), default=None)
        for name in names
    }


def features(architecture: Architecture) -> tuple[str, ...]:
    """What a candidate is tried on: Hopper's also with blocks that come in lists."""
    return ("full", "causal", "window")[: 3 if architecture == "hopper" else 2]


def _checked(candidate: Candidate) -> checks.Outcome:
    """All checks of a candidate, the largest error of each result."""
    units: dict[str, float] = {}
    failed: list[str] = []
    for feature in features(candidate.architecture):
        check = Check(candidate.head_dim, candidate.value_dim, feature)
        mask = check.case.mask
        outcome = checks.run(
            *(check, candidate.architecture, candidate.of.results),
            # The forward kernel stores one result more in training.
            training=candidate.kernel != "forward" or feature != "full",
            **candidate.options(check.keys, mask, listed=feature == "window"),
        )
        for name, size in outcome.units.items():
            units[name] = max(size, units.get(name, 0.0))
        failed += [f"{feature}: {line}" for line in outcome.failed]
    return checks.Outcome(units, not failed, tuple(failed))


def compile_only(candidate: Candidate) -> dict[str, Any]:
    """What ptxas says of a candidate, compiled for its architecture without a GPU."""
    check = Check(candidate.head_dim, candidate.value_dim, "causal")
    mask = check.case.mask
    function = checks.program(
        *(check, candidate.of.results),
        training=True,
        **candidate.options(check.keys, mask, listed=False),
    )
    shapes = checks.shapes(check)
    try:
        found = compiled(
            lambda *arrays: function(*arrays, mask, None),
            *shapes,
            gpu=GPUS[candidate.architecture],
            machine_code=False,
        )
    except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
        return {"refused": f"does not compile: {reason(error)}"}
    row = resources(candidate, found.kernels)
    return row | {"refused": candidate.too_large(row)}


def _timed(candidate: Candidate, problem: Problem, seconds: float) -> dict[str, Any]:
    place = candidate.architecture, candidate.kernel, candidate.head_dim
    times = {
        "present": _present(*place, candidate.value_dim, problem, 0),
        "again": _present(*place, candidate.value_dim, problem, 1),
        "candidate": _arm(candidate, problem),
    }
    found = interleaved(times, seconds)
    for name, taken in found.items():
        if isinstance(taken, str):
            raise RuntimeError(f"{name}, {problem.name}: {taken}")
    present, again, own = (np.asarray(found[name]) for name in times)
    return {
        "ms": float(np.median(own)),
        "present_ms": float(np.median(present)),
        "ratio": float(np.median(present / own)),
        "again": float(np.median(present / again)),
        "rounds": len(own),
    }


# Compiled once for all candidates of a kernel; `copy` tells two with buffers of their
# own apart.
@functools.lru_cache(maxsize=2 * len(PROBLEMS))
def _present(
    architecture: Architecture,
    kernel: KernelName,
    head_dim: int,
    value_dim: int,
    problem: Problem,
    copy: int,
) -> Callable[[int], float]:
    del copy
    table = tuning.configuration(
        *(architecture, head_dim, value_dim, problem.length),
        is_causal=problem.is_causal,
        listed=False,
    )
    tiling = getattr(table, kernel)
    return _arm(Candidate(architecture, kernel, head_dim, value_dim, tiling), problem)


def _arm(candidate: Candidate, problem: Problem) -> Callable[[int], float]:
    """Runs a kernel so many times: milliseconds of one run."""
    check = Check(
        *(candidate.head_dim, candidate.value_dim),
        "causal" if problem.is_causal else "full",
        queries=problem.length,
        keys=problem.length,
    )
    function = checks.program(
        *(check, candidate.of.results),
        training=candidate.kernel != "forward",
        **candidate.options(problem.length, check.case.mask, listed=False),
    )
    heads = max(1, _WIDTH // max(candidate.head_dim, candidate.value_dim))
    batch = _TOKENS // problem.length
    inputs = (*_drawn(candidate, problem, batch, heads), check.case.mask, None)
    program = checks.compile_for(candidate.architecture, function, inputs)
    only = candidate.of.function
    return lambda runs: device_time(program, inputs, runs, only)[0]


def _drawn(candidate: Candidate, problem: Problem, batch: int, heads: int) -> tuple:
    """query, key, value, dout, dlse on the GPU."""
    dims = candidate.head_dim, candidate.head_dim, *(candidate.value_dim,) * 2
    arrays = (
        jax.random.normal(key, (batch, problem.length, heads, dim), jnp.bfloat16)
        for key, dim in zip(jax.random.split(jax.random.key(0), 4), dims)
    )
    return *arrays, jnp.zeros((batch, heads, problem.length), jnp.float32)


def class_ratio(row: dict[str, Any], name: str, length_class: LengthClass) -> float:
    """The geometric mean of a ratio over the problems of a class."""
    logs = [
        math.log(row["times"][problem.name][name])
        for problem in PROBLEMS
        if problem.length_class == length_class
    ]
    return math.exp(sum(logs) / len(logs))
