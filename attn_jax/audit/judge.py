"""From a measured deviation to a finding: which honest rounding, if any, explains it.

Tiers pair a cause with what it allows. The first has the cause "" and is what a good
algorithm does: within it there is no finding. Within a later one the result is as
accurate as its algorithm allows, which is poor; beyond all it is worse.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from attn_jax.audit.error import correctly_rounded, in_units
from attn_jax.audit.finding import NOT_THE_LOGITS, Finding, Kind
from attn_jax.audit.noise import Extent, Noise, rms_of_rounding
from attn_jax.audit.problem import Problem
from attn_jax.formats import BF16, FP16, FP32

POOR: Kind = "as accurate as its algorithm allows, which is poor here"
WORSE: Kind = "worse than its algorithm allows"
ALLOWED = "RMS of what rounding allows"
# Standard deviations of a mean of squares.
_CONFIDENCE = 6.0
# Positions of a result that are widened at a time.
_CHUNK = 4096

Tiers = Iterable[tuple[str, float | np.ndarray]]


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What one identity came to.

    `measured` above `bound`, both in `unit`, and nothing else makes a finding;
    `tensors` are the results that were looked at.
    """

    name: str
    measured: float
    bound: float
    unit: str
    finding: Finding | None
    tensors: tuple[str, ...]


def root_mean_square_bound(count: int) -> float:
    """What the RMS of `count` independent errors of RMS 1 stays below: 1 + 6 / sqrt(2
    count), six standard deviations."""
    return 1 + _CONFIDENCE / (2 * count) ** 0.5


def judge(
    name: str,
    tiers: Iterable[tuple[str, float, float]],
    unit: str,
    tensors: tuple[str, ...],
    cause: str,
    says: str | Mapping[str, str],
) -> ProbeResult:
    """`tiers` are (cause, measured, bound), made as they are needed.

    `cause` is the one of what exceeds all tiers, `says` its sentence, or sentences by
    tier; they may hold {measured} and {bound}, those of the first tier.
    """
    says = {"": says} if isinstance(says, str) else says
    first = None
    for tier, measured, bound in tiers:
        first = first or (measured, bound)
        if measured <= bound:
            if not tier:
                return ProbeResult(name, *first, unit, None, tensors)
            otherwise = (
                f"{name}: {{measured:.3g}} where rounding allows {{bound:.3g}} "
                f"({unit}), as much as {tier} explain"
            )
            kind, cause, says = POOR, tier, says.get(tier, otherwise)
            break
    else:
        kind, says = WORSE, says[""]
    assert first is not None
    measured, bound = first
    if np.isnan(measured):
        kind, cause, says = "not finite", "", f"{name}: a result is NaN"
    finding = Finding(
        kind,
        cause,
        says.format(measured=measured, bound=bound),
        tensors,
        (name,),
        {"measured": measured, "bound": bound},
    )
    return ProbeResult(name, measured, bound, unit, finding, tensors)


def by_rows(
    name: str,
    difference: np.ndarray,
    tiers: Tiers,
    noise: Noise,
    tensors: tuple[str, ...],
    cause: str,
    says: str | Mapping[str, str],
) -> ProbeResult:
    """RMS of a difference [B, R, N, ...] over its deviations, in rows that see a key.

    Columns of a row share roundings of P, so only rows count as independent.
    """
    difference = difference[noise.seen]
    bound = root_mean_square_bound(max(len(difference), 1))

    def measured():
        for tier, variance in tiers:
            yield tier, _ratio(difference**2, np.asarray(variance)[noise.seen]), bound

    return judge(name, measured(), ALLOWED, tensors, cause, says)


def pooled(
    name: str,
    squares: np.ndarray,
    tiers: Tiers,
    bound: float,
    tensors: tuple[str, ...],
    cause: str,
    says: str,
) -> ProbeResult:
    """Root of the sum of squares over the sum of variances."""
    total = squares.sum()

    def measured():
        for tier, variance in tiers:
            yield tier, in_units(total**0.5, np.sum(variance) ** 0.5), bound

    return judge(name, measured(), ALLOWED, tensors, cause, says)


def by_keys(
    name: str,
    before: np.ndarray,
    after: np.ndarray,
    tiers: Tiers,
    noise: Noise,
    problem: Problem,
    tensors: tuple[str, ...],
    cause: str,
    says: str,
) -> ProbeResult:
    """RMS of the change of dK or dV [B, S, K, H], all keys pooled.

    `tiers` hold the variance of one result, summed over keys [B, K, H]; its own
    rounding is added here, twice for groups, whose heads may be rounded one by one.
    Where rows were sampled, half as much again is allowed for the others.
    """
    times = 1 if problem.shape.heads == problem.shape.key_heads else 2
    squares = rounded = np.zeros(())
    for start in range(0, problem.shape.key_length, _CHUNK):
        here = slice(start, start + _CHUNK)
        old, new = (x[:, here].astype(np.float64) for x in (before, after))
        squares = squares + ((new - old) ** 2).sum(1)
        rounded = rounded + times * (rms_of_rounding(old, problem.format) ** 2).sum(1)
    sampled = problem.shape.query_length > len(noise.rows)
    bound = (1.5 if sampled else 1.0) * root_mean_square_bound(noise.seen.size)
    both = ((tier, 2 * (variance + rounded)) for tier, variance in tiers)
    return pooled(name, squares, both, bound, tensors, cause, says)


def by_lse(
    name: str,
    lse: tuple[np.ndarray, np.ndarray],
    moved: np.ndarray | np.float64,
    noises: Sequence[Noise | Extent],
    values: np.ndarray,
    inner: float,
) -> ProbeResult:
    """Largest miss of lse[1] - lse[0] = moved, all [B, R, N], over what FP32 allows.

    Allowed are the two `Noise.shift` and one rounding of each LSE; then, where all of
    `values`, LSEs as returned, are numbers of a 16-bit format, one of those; else
    logits rounded with the unit roundoff `inner`.
    """
    seen = noises[0].seen & noises[1].seen
    size = np.abs(lse[0][seen]) + np.abs(lse[1][seen])
    moved = np.broadcast_to(moved, seen.shape)[seen]
    off = np.abs(lse[1][seen] - lse[0][seen] - moved)
    fp32 = (noises[0].shift + noises[1].shift)[seen] + FP32.unit_roundoff * size
    extent = (noises[0].extent + noises[1].extent)[seen]
    finite = values[np.isfinite(values)].astype(np.float64)

    def measured():
        yield "", _largest_ratio(off, fp32), 1.0
        for fmt, label in ((BF16, "BF16"), (FP16, "FP16")):
            if np.array_equal(correctly_rounded(finite, fmt), finite):
                allowed = fp32 + fmt.unit_roundoff * size
                yield f"LSE in {label}", _largest_ratio(off, allowed), 1.0
                return
        yield "logits in 16 bits", _largest_ratio(off, fp32 + inner * extent), 1.0

    return judge(
        name,
        measured(),
        "of what FP32 allows",
        ("lse",),
        NOT_THE_LOGITS,
        {
            "": "LSE misses the amount by which all logits move by {measured:.3g} "
            "times what FP32 allows",
            "LSE in BF16": "LSE is rounded to BF16, which is {measured:.3g} times "
            "what FP32 allows: weights exp(LSE_1 - LSE_2) of merged parts are off by "
            "2^-9 of LSE; return it in FP32",
        },
    )


def count(name: str, number: int, cause: str, says: str) -> ProbeResult:
    """A number of values that must be 0; above, the finding is "not finite"."""
    finding = None
    if number:
        says = says.format(measured=number)
        finding = Finding(
            "not finite", cause, says, (), (name,), {"measured": float(number)}
        )
    return ProbeResult(name, float(number), 0.0, "values", finding, ())


def _ratio(squares: np.ndarray, variance: np.ndarray) -> float:
    """RMS of a ratio in which 0 / 0 is 0."""
    ratio = np.divide(
        squares, variance, out=np.where(squares > 0, np.inf, 0.0), where=variance > 0
    )
    return float(np.where(np.isnan(squares), np.nan, ratio).mean() ** 0.5)


def _largest_ratio(off: np.ndarray, allowed: np.ndarray) -> float:
    return float((off / allowed).max()) if allowed.size else 0.0
