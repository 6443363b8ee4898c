"""Probes of the range of numbers that an attention has inside: of dO and of V."""

from collections.abc import Iterator

import numpy as np

from attn_jax.audit.finding import Finding
from attn_jax.audit.inputs import Inputs
from attn_jax.audit.judge import ProbeResult, by_keys, by_rows
from attn_jax.audit.noise import Noise
from attn_jax.audit.problem import GRADIENTS, SYMBOLS, Problem, Results
from attn_jax.audit.programs import run
from attn_jax.audit.target import Attend
from attn_jax.audit.tiers import at, noise_of
from attn_jax.formats import FP16

# FP16 ends at 2^-24 and 2^16, BF16 and FP32 at 2^-126 and 2^128 or below: results of
# some 2^-15 to 2^10, and what they are made of, stay well inside at 2^30 more or less.
_POWER = 30


def magnitudes(
    attend: Attend, problem: Problem, *, gradients: bool = True
) -> tuple[ProbeResult, ...]:
    """dO times 2^-30 and 2^30: gradients times the same; V so: out.

    All are linear in these, and a power of two changes no rounding, unless numbers
    leave the range of a format: as where BF16 arrays are made FP16 inside. RMS over
    sampled rows of the change of out and dQ, and pooled of dK and dV, in units of what
    rounding allows two runs. () for FP16, where inputs and results would leave it.
    """
    if problem.format == FP16:
        return ()
    inputs = problem.inputs
    noise = noise_of(problem, inputs)
    first = run(attend, inputs, gradients=gradients)
    found: list[ProbeResult] = []
    for name, tensors in (
        ("dout", GRADIENTS if gradients else ()),
        ("value", ("out",)),
    ):
        for sign in (-1, 1) if tensors else ():
            scaled = _times(inputs, name, sign * _POWER)
            results = run(attend, scaled, gradients=gradients)
            found += _compared(
                problem, noise, name, sign, first, {n: results[n] for n in tensors}
            )
    return tuple(found)


def _times(inputs: Inputs, name: str, power: int) -> Inputs:
    x = getattr(inputs, name)
    larger = np.ldexp(x.astype(np.float32), power).astype(x.dtype)
    return inputs._replace(**{name: larger})


def _compared(
    problem: Problem, noise: Noise, of: str, sign: int, first: Results, results: Results
) -> Iterator[ProbeResult]:
    """Each result of what was scaled, scaled back, with the first."""
    factor = f"{'dO' if of == 'dout' else 'V'} times 2^{sign * _POWER}"
    size = "small" if sign < 0 else "large"
    what = f"gradients of {size} dO" if of == "dout" else f"out of {size} V"
    lost = "lost" if sign < 0 else "out of range"
    cause = f"range: {what} {'are' if of == 'dout' else 'is'} {lost}"
    mend = "keep what is made of it in FP32 or BF16 inside, not in FP16"
    for tensor, x in results.items():
        name, symbol = f"{factor}: {tensor}", SYMBOLS[tensor]
        back = np.ldexp(x.astype(np.float64), -sign * _POWER)
        says = (
            f"{symbol} of {factor} is not as many times {symbol}, by {{measured:.3g}} "
            f"times what rounding allows: {mend}"
        )
        instead = f"{{}} values of {symbol} are not finite for {factor}: {mend}"
        named = name, tensor, cause, says, instead
        yield change(problem, noise, first[tensor], back, *named)


def change(
    problem: Problem,
    noise: Noise,
    before: np.ndarray,
    after: np.ndarray,
    name: str,
    tensor: str,
    cause: str,
    says: str,
    instead: str,
) -> ProbeResult:
    """How far a result is from what it was, where nothing should change: `says` what
    was measured, or `instead` how many values are no numbers any more."""
    was = np.isfinite(before.astype(np.float64))
    broken = int((was & ~np.isfinite(after.astype(np.float64))).sum())
    if broken:
        # What is no number is as far off as can be.
        finding = Finding(
            "not finite", cause, instead.format(broken), (tensor,), (name,)
        )
        return ProbeResult(name, float(broken), 0.0, "values", finding, (tensor,))
    if tensor in ("out", "dquery"):
        difference = at(noise, after) - at(noise, before)
        tiers = [("", 2 * getattr(noise, tensor))]
        return by_rows(name, difference, tiers, noise, (tensor,), cause, says)
    tiers = [("", getattr(noise, tensor))]
    return by_keys(name, before, after, tiers, noise, problem, (tensor,), cause, says)
