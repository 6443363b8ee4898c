"""How far two correct runs may differ, by number format of inner steps."""

from collections.abc import Iterator

import numpy as np

from attn_jax.audit.inputs import Inputs
from attn_jax.audit.judge import ProbeResult, by_lse
from attn_jax.audit.noise import Noise, rounding_noise
from attn_jax.audit.problem import Problem
from attn_jax.formats import BF16, FP32, TF32, NumberFormat


def steps(fmt: NumberFormat, *, logits: bool) -> Iterator[tuple[NumberFormat, str]]:
    """Formats of inner steps and the cause they would be, the honest one first."""
    yield fmt, ""
    if fmt == FP32:
        yield TF32, "products in TF32"
        yield BF16, "products in BF16"
    elif logits:
        yield fmt, "logits in 16 bits"


def noise_of(problem: Problem, inputs: Inputs, inner=None) -> Noise:
    return rounding_noise(inputs, problem.rules, problem.scale, problem.format, inner)


def pair_tiers(problem, pair, noises, name, *, logits=True):
    """Variances of the difference of two runs, by the cause they stand for."""
    for fmt, cause in steps(problem.format, logits=logits):
        if fmt != problem.format:
            noises = [noise_of(problem, inputs, fmt) for inputs in pair]
        variance = sum(getattr(noise, name) for noise in noises)
        # What FP32 logits do is in `Noise.shift`.
        if cause:
            variance = variance + sum(noise.by_logits[name] for noise in noises)
        yield cause, variance


def at(noise: Noise, x: np.ndarray) -> np.ndarray:
    return x[:, noise.rows].astype(np.float64)


def lse_result(name, runs, moved, noises, problem: Problem) -> ProbeResult:
    rows = noises[0].rows
    pair = [x["lse"][..., rows].swapaxes(1, 2).astype(np.float64) for x in runs]
    # Of both runs, and more than a few: a row of LSEs may be round by chance.
    values = np.concatenate([x["lse"].ravel() for x in runs])
    u = problem.format.unit_roundoff
    return by_lse(name, (pair[0], pair[1]), moved, noises, values, u)
