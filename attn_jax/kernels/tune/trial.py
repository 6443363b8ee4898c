"""One candidate on a GPU: whether it is right, then how fast. Runs in a worker.

Inputs of the timed problems stay where they are between runs, as those of `python -m
analysis speed`; time is that of the one kernel, by CUPTI, or of the backward pass
(`Kernel.whole`).
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

from attn_jax.kernels import checks, design, tuning
from attn_jax.kernels.checks import Check
from attn_jax.kernels.compiler import Kernel as Report
from attn_jax.kernels.compiler import (
    UnreadableReport,
    compiled,
    reported,
    shared_memory,
)
from attn_jax.kernels.tilings import Choice
from attn_jax.kernels.tune.candidates import (
    GPUS,
    KERNELS,
    Kernel,
    kernel_of,
    spills_too_much,
)
from attn_jax.kernels.tuning import Group
from attn_jax.timing import device_time, interleaved, reason

# Queries that see so many keys at the most, in the mean, are in the class "few" where
# the table has no entry for few keys.
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

    def length_class(self, group: Group) -> LengthClass:
        seen = tuning.keys_seen(self.length, is_causal=self.is_causal)
        few = seen <= few_keys(group) or tuning.fills_better(group, self.length)
        return "few" if few else "many"


# By `Group.is_causal`. By mask on both sides of where the table's entries meet.
PROBLEMS: dict[bool | None, tuple[Problem, ...]] = {
    None: (
        *(Problem(1024, False), Problem(2048, True)),
        *(Problem(4096, False), Problem(16384, True)),
    ),
    False: (Problem(256, False), Problem(1024, False), Problem(4096, False)),
    True: (Problem(1024, True), Problem(2048, True), Problem(16384, True)),
}


def few_keys(group: Group) -> int:
    """How many keys the class "few" sees in the mean at the most."""
    return tuning.few_and_many(group)[0] or FEW_KEYS


def problems(group: Group, classes: Sequence[LengthClass] = CLASSES) -> list[Problem]:
    """What a group's candidates are timed on."""
    found = PROBLEMS[group.is_causal]
    return [problem for problem in found if problem.length_class(group) in classes]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tiling, or a plan, that may be what the table has for a group."""

    group: Group
    tiling: Choice

    @property
    def of(self) -> Kernel:
        return kernel_of(self.group)

    def options(self, check: Check) -> dict[str, Any]:
        """What `attention` is given so that it uses this tiling."""
        table = design.configuration_of(
            *(self.group.architecture, check.head_dim, check.value_dim, check.keys),
            check.case.mask,
            query_count=check.queries,
        )
        tilings = table._replace(**{self.group.kernel: self.tiling})
        return {"tilings": tilings, **self.of.options}

    def too_large(self, taken: dict[str, Any]) -> str | None:
        """What is against it, going by what it took (`resources`), in one line."""
        limit = shared_memory(GPUS[self.group.architecture])
        if (taken["shared_memory"] or 0) > limit:
            return (
                f"takes {taken['shared_memory']} bytes of shared memory, a CTA has "
                f"{limit}"
            )
        need = self.of.need(self.tiling, self.group.head_dim, self.group.value_dim)
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
    times = {
        problem.name: _timed(candidate, problem, seconds)
        for problem in problems(candidate.group, classes)
    }
    return row | {"times": times}


def resources(candidate: Candidate, reports: Sequence[Report]) -> dict[str, Any]:
    """The most that the kernel takes in any of the programs; None if nothing is said,
    as without ptxas."""
    own = [report for report in reports if report.name == candidate.of.function]
    names = ("registers", "spilled_bytes", "shared_memory")
    return {
        name: max((getattr(report, name) for report in own), default=None)
        for name in names
    }


def checks_of(group: Group) -> list[Check]:
    """What a candidate is tried on: Hopper's also with blocks that come in lists.

    The fused kernel on what it takes. Without a mask also on so many pairs of batch and
    key head, and tiles of keys, that rings of a half and of a quarter cost nothing:
    `Plan.passes` changes nothing else. Hopper's under a causal mask with an odd and
    with an even number of tiles, which are dealt to rings and to double rings.
    """
    dims = group.head_dim, group.value_dim
    if group.kernel != "backward_fused":
        features = ("full", "causal", "window")
        count = 3 if group.architecture == "hopper" else 2
        return [Check(*dims, feature) for feature in features[:count]]
    if group.is_causal:
        odd = Check(*dims, "causal", queries=checks.S)
        even = Check(*dims, "causal", keys=checks.T)
        return [odd, even] if group.architecture == "hopper" else [odd]
    if group.architecture == "ampere":
        return [Check(*dims)]
    return [Check(*dims), Check(*dims, queries=200, keys=1500, batch=22)]


def _checked(candidate: Candidate) -> checks.Outcome:
    """All checks of a candidate, the largest error of each result."""
    units: dict[str, float] = {}
    failed: list[str] = []
    group = candidate.group
    for check in checks_of(group):
        outcome = checks.run(
            *(check, group.architecture, candidate.of.results),
            # The forward kernel stores one result more in training.
            training=group.kernel != "forward" or check.feature != "full",
            **candidate.options(check),
        )
        for name, size in outcome.units.items():
            units[name] = max(size, units.get(name, 0.0))
        failed += [f"{check.feature}: {line}" for line in outcome.failed]
    return checks.Outcome(units, not failed, tuple(failed))


def compile_only(candidate: Candidate) -> dict[str, Any]:
    """What ptxas says of a candidate, compiled for its architecture without a GPU."""
    # The last one without blocks in lists: with a causal mask, where there is one.
    check = [c for c in checks_of(candidate.group) if c.feature != "window"][-1]
    mask = check.case.mask
    function = checks.program(
        *(check, candidate.of.results), training=True, **candidate.options(check)
    )
    shapes = checks.shapes(check)
    try:
        found = compiled(
            lambda *arrays: function(*arrays, mask, None),
            *shapes,
            gpu=GPUS[candidate.group.architecture],
            machine_code=False,
        )
    except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
        return {"refused": f"does not compile: {reason(error)}"}
    row = resources(candidate, found.kernels)
    return row | {"refused": candidate.too_large(row)}


def _timed(candidate: Candidate, problem: Problem, seconds: float) -> dict[str, Any]:
    times = {
        "present": _present(candidate.group, problem, 0),
        "again": _present(candidate.group, problem, 1),
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
@functools.lru_cache(maxsize=2 * max(map(len, PROBLEMS.values())))
def _present(group: Group, problem: Problem, copy: int) -> Callable[[int], float]:
    del copy
    _, few, many = tuning.few_and_many(group)
    tiling = few if problem.length_class(group) == "few" else many
    return _arm(Candidate(group, tiling), problem)


def _arm(candidate: Candidate, problem: Problem) -> Callable[[int], float]:
    """Runs a kernel so many times: milliseconds of one run."""
    group, kernel = candidate.group, candidate.of
    check = Check(
        *(group.head_dim, group.value_dim),
        "causal" if problem.is_causal else "full",
        queries=problem.length,
        keys=problem.length,
    )
    function = checks.program(
        *(check, kernel.results),
        training=group.kernel != "forward",
        **candidate.options(check),
    )
    heads = max(1, _WIDTH // max(group.head_dim, group.value_dim))
    batch = _TOKENS // problem.length
    inputs = (*_drawn(group, problem, batch, heads), check.case.mask, None)
    program = checks.compile_for(group.architecture, function, inputs)
    if not kernel.whole:
        return lambda runs: device_time(program, inputs, runs, kernel.function)[0]
    forward = KERNELS[group.architecture]["forward"].function

    def backward_time(runs: int) -> float:
        ms, kernels = device_time(program, inputs, runs, without=forward)
        if not any(kernel.function in name for name, _ in kernels):
            raise RuntimeError(f"{kernel.function} is not among the kernels")
        return ms

    return backward_time


def _drawn(group: Group, problem: Problem, batch: int, heads: int) -> tuple:
    """query, key, value, dout, dlse on the GPU."""
    dims = group.head_dim, group.head_dim, *(group.value_dim,) * 2
    arrays = (
        jax.random.normal(key, (batch, problem.length, heads, dim), jnp.bfloat16)
        for key, dim in zip(jax.random.split(jax.random.key(0), 4), dims)
    )
    return *arrays, jnp.zeros((batch, heads, problem.length), jnp.float32)


def class_ratio(
    group: Group, row: dict[str, Any], name: str, length_class: LengthClass
) -> float:
    """The geometric mean of a ratio over the problems of a class."""
    logs = [
        math.log(row["times"][problem.name][name])
        for problem in problems(group, [length_class])
    ]
    return math.exp(sum(logs) / len(logs))
