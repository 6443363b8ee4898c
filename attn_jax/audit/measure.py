"""Runs a target on a problem and says how far each result is from exact."""

import time
from typing import Literal, NamedTuple

import jax
import numpy as np

from attn_jax.audit import programs
from attn_jax.audit.error import Errors, in_units, measure, signed_bias
from attn_jax.audit.inputs import most_of_a_bias
from attn_jax.audit.noise import logit_extent
from attn_jax.audit.problem import Problem, Results
from attn_jax.audit.raised import names_an_argument, said, text_of
from attn_jax.audit.target import Attend
from attn_jax.formats import BF16, FP16, FP32, FP64, NumberFormat

Status = Literal["measured", "not taken", "failed", "out of memory"]
_FORMATS: dict[str, NumberFormat] = {
    "bfloat16": BF16,
    "float16": FP16,
    "float32": FP32,
    "float64": FP64,
}
# Numbers of a bias above which it is not tried: its gradient is held in FP64, twice.
_MOST_BIAS = 2**26


class Outcome(NamedTuple):
    """What became of a target on a problem.

    Attributes:
      status: "not taken", it has no argument for this, or refuses it, or cannot cut
        such lengths between its devices; "failed", it raised or gave something that is
        no attention; "out of memory".
      reason: why, in one line; "" where it was measured.
      results: what it gave.
      no_gradients: why there are no gradients though they were wanted; "" otherwise.
      seconds: of the first call, compilation included.
    """

    status: Status
    reason: str
    results: Results
    no_gradients: str
    seconds: float


class Measured(NamedTuple):
    """Of one result.

    Attributes:
      errors: as `error.measure` gives them, in units of the problem's format (LSE: of
        the format it came in).
      bias, bias_ci: mean of the difference from the exact result rounded once, in
        units, and half its 95 % interval (`error.signed_bias`).
      not_finite: how many values are not finite where the exact ones are, or the other
        way round; they are left out of the rest.
      instead: what is there in all of these, where it is one value; None otherwise.
      honest: what honest steps may come to whatever the recipe, in the same units: of
        LSE, whose error in FP32 no recipe predicts (order of sums, the hardware's
        exp2); 0 of others.
      unseen: how many of `not_finite` queries that see no key explain: those in their
        rows and, of dK, dV and dbias, which are sums over queries, in their heads.
    """

    errors: Errors
    bias: float
    bias_ci: float
    not_finite: int
    instead: float | None = None
    honest: float = 0.0
    unseen: int = 0


class Runner:
    """A function under a mask and scale, which problems of one shape are run on: in
    the mode that the process is in, compiled once. What it raises is caught and said;
    it cuts the sequence between `shards` devices.
    """

    def __init__(self, attend: Attend, *, gradients: bool = True, shards: int = 1):
        self._attend, self._wanted = attend, (True, False) if gradients else (False,)
        self._shards = shards
        self._no_gradients = ""

    def lowered(self, problem: Problem) -> jax.stages.Lowered:
        """What it runs, unless that raises."""
        return programs.lowered(self._attend, self._wanted[0], problem.arrays)

    def __call__(self, problem: Problem) -> Outcome:
        began = time.monotonic()
        s = problem.shape
        numbers = s.heads * s.query_length * s.key_length
        if problem.has_bias and numbers > _MOST_BIAS:
            reason = (
                f"a bias of {numbers} numbers is not tried: FP64 holds its gradient"
            )
            return Outcome("out of memory", f"{reason} as one array", {}, "", 0.0)
        for wanted in self._wanted:
            if wanted and self._no_gradients:
                continue
            try:
                found = programs.run(self._attend, problem.arrays, gradients=wanted)
            except Exception as error:  # A function of somebody's may raise anything.
                status, reason = _refusal(error, problem, self._shards)
                if status != "out of memory" and wanted:
                    self._no_gradients = reason
                    continue
                return Outcome(status, reason, {}, "", time.monotonic() - began)
            seconds = time.monotonic() - began
            return Outcome("measured", "", found, self._no_gradients, seconds)
        raise AssertionError("the last program returns")


def is_out_of_memory(error: Exception) -> bool:
    """Whether that is what it says: XLA does in two ways."""
    said = text_of(error)
    return "RESOURCE_EXHAUSTED" in said or "out of memory" in said.lower()


def _refusal(error: Exception, problem: Problem, shards: int) -> tuple[Status, str]:
    reason = said(error)
    if is_out_of_memory(error):
        return "out of memory", reason
    # Many refuse a mask so, and lengths that cannot be cut. Where there is neither
    # there is nothing to refuse.
    refusable = problem.mask not in ("full", "causal")
    refusable = refusable or not problem.shape.is_cut(shards)
    refuses = refusable and isinstance(error, ValueError)
    # One that takes any argument lets what it calls say which it has not, a causal mask
    # among them; without a mask none is given that it could do without.
    refuses |= problem.mask != "full" and names_an_argument(error)
    if refuses or isinstance(error, NotImplementedError):
        return "not taken", reason
    return "failed", reason


def measured(problem: Problem, results: Results) -> dict[str, Measured]:
    """By name of a result."""
    found = {}
    for name, x in results.items():
        fmt = _FORMATS[str(x.dtype)] if name == "lse" else problem.format
        axes = (0, 1) if name in ("lse", "dbias") else (0, 2)
        found[name] = _measured(np.asarray(x, np.float64), problem, name, fmt, axes)
        if name == "lse":
            found[name] = found[name]._replace(honest=_honest_lse(problem, fmt))
    return found


def _honest_lse(problem: Problem, fmt: NumberFormat) -> float:
    """What FP32 logits and sums leave in LSE (`noise.Extent`), and its own rounding, in
    units of that: RMS over rows."""
    largest = 0.0 if problem.bias is None else most_of_a_bias(problem.bias)
    noise = logit_extent(problem.inputs, problem.rules, problem.scale, largest)
    unit = problem.yardstick("lse", fmt).unit
    size = np.sqrt(np.mean(noise.shift[noise.seen] ** 2)) if noise.seen.any() else 0.0
    return 1 + in_units(float(size), unit)


def _measured(x, problem: Problem, name: str, fmt: NumberFormat, axes) -> Measured:
    # Rows that see nothing have an LSE of -inf, in both or else it counts.
    golden, against = getattr(problem.exact(), name), problem.yardstick(name, fmt)
    finite = np.isfinite(golden)
    wrong = np.where(finite, ~np.isfinite(x), x != golden)
    values = np.unique(x[wrong])
    instead = float(values[0]) if len(values) == 1 else None
    unseen = int((wrong & _unseen(problem, name)).sum()) if wrong.any() else 0
    x = np.where(finite & np.isfinite(x), x, against.golden)
    bias, bias_ci = signed_bias(x - against.rounded, against.unit)
    errors = measure(x, against, independent_axes=axes)
    found = Measured(errors, bias, bias_ci, int(wrong.sum()), instead)
    return found._replace(unseen=unseen)


def _unseen(problem: Problem, name: str) -> np.ndarray:
    """Which values of a result, broadcast, queries that see no key enter."""
    blind = np.isneginf(problem.exact().lse)
    if name == "lse":
        return blind
    if name == "dbias":
        return blind.any(0)[None, ..., None]
    if name in ("out", "dquery"):
        return blind.swapaxes(1, 2)[..., None]
    of_heads = blind.any(-1).reshape(len(blind), problem.shape.key_heads, -1)
    return of_heads.any(-1)[:, None, :, None]
