"""What results on parts of the keys are worth when merged, as rings and split keys do.

With out_w and LSE_w of part w of W equal parts of the keys,
    LSE = log(sum_w exp LSE_w)        out = sum_w exp(LSE_w - LSE) out_w
in FP32; a part that a query does not see has LSE_w = -inf and weight 0. The backward
pass goes through the merge: dO_w = exp(LSE_w - LSE) dO and
dLSE_w = exp(LSE_w - LSE) dO . (out_w - out), so LSE must carry a gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.audit import programs
from attn_jax.audit.alone import ALONE
from attn_jax.audit.error import correctly_rounded, unit_error
from attn_jax.audit.finding import MERGE, Finding
from attn_jax.audit.judge import POOR, WORSE
from attn_jax.audit.lse_gradient import THROUGH_LSE, of_shares, share
from attn_jax.audit.partial import (
    Combination,
    Partial,
    exact_parts,
    in_parts,
    lower_parts,
    part_mask,
    predict,
    summed,
    weights_of,
)
from attn_jax.audit.problem import GRADIENTS, Problem
from attn_jax.audit.raised import contained
from attn_jax.audit.target import Attend
from attn_jax.formats import BF16, FP16, FP32, NumberFormat
from attn_jax.mask import Mask
from attn_jax.reference import golden
from attn_jax.xla_options import NO_GRAPHS

PARTS = (2, 4, 8, 16, 32, 64)
_RESULTS = "out", "lse", *GRADIENTS
# T S above which errors are taken against the target's own result in one part.
GOLDEN_LIMIT = 2**18
# RMS of a rounding at the bottom of a binade over that of a log-uniform number is
# 1.36: what other binades may do to the P of parts. LSE itself is off by a few units
# of the last place in FP32, which is as much for out in FP32.
_FITS = {"16 bits": 1.5, "32 bits": 6.0}
# How far an error may be from that of a format and still be taken for it.
_NEAR = 4.0
# Combinations whose predictions are closer than this cannot be told apart.
_ALIKE = 1.05


@dataclasses.dataclass(frozen=True)
class MergeAudit:
    """Errors by number of parts, and what explains them.

    against       "golden", or "one part" where that is too long
    errors        of out, lse, dquery, dkey, dvalue by W, from 1, in units of error (of
                  FP32 for LSE)
    growth        exponents g of error ~ W^g, fitted to all W
    predicted     units of out by (format of out_w, format of LSE_w): exact partial
                  results rounded to these, and the target's error in one part
    combination   the one that fits best; None if none does or there are none
    lse_gradient  the share of the gradient through LSE that dquery and dkey have: 1 is
                  right; without those of which it cannot be told
    verdict       in words
    """

    against: str
    errors: Mapping[str, Mapping[int, float]]
    growth: Mapping[str, float]
    predicted: Mapping[Combination, Mapping[int, float]]
    combination: Combination | None
    lse_gradient: Mapping[str, float]
    verdict: str
    findings: tuple[Finding, ...]


def merge_audit(
    attend_of: Callable[[Mask], Attend],
    problem: Problem,
    *,
    parts: tuple[int, ...] = PARTS,
    golden_limit: int = GOLDEN_LIMIT,
    gradients: bool = True,
) -> MergeAudit:
    """Calls the target on parts of the keys of `problem`, all parts as one batch.

    `attend_of(mask)` makes the target for the mask of parts; masks with a band have a
    `query_offset` there. The merged out and the summed dQ are rounded once, to the
    format of the problem; dK and dV are those of the parts. Without `gradients` there
    are out and LSE alone.

    Raises ValueError if the keys cannot be cut into so many parts, or without LSE.
    """
    S = problem.shape.key_length
    bad = [w for w in parts if w < 2 or S % w]
    if bad or not parts:
        raise ValueError(f"parts must be divisors of {S} above 1, got {parts}")
    numbers = 1, *parts
    names = _RESULTS if gradients else _RESULTS[:2]
    exact = S * problem.shape.query_length <= golden_limit
    calls = {w: _call(attend_of, problem, w, names) for w in numbers}
    lower = [call.lowered for call in calls.values()]
    if exact:
        lower += [functools.partial(lower_parts, problem, w) for w in numbers]
    programs.compile_each(lower)
    measured = {w: _merged_results(problem, call) for w, call in calls.items()}
    if exact:
        whole = problem.exact()
        base = {name: getattr(whole, name) for name in names}
    else:
        base = {name: measured[1][name] for name in names}
    errors = {
        name: {
            w: _units(problem, name, x[name], base[name], exact)
            for w, x in measured.items()
            if exact or w > 1
        }
        for name in base
    }
    growth = {name: _exponent(of) for name, of in errors.items()}
    if not exact:
        verdict = "not judged: too long for exact partial results"
        return MergeAudit("one part", errors, growth, {}, None, {}, verdict, ())
    halves = (BF16, FP16) if problem.format == FP32 else (problem.format,)
    partial = {w: exact_parts(problem, w) for w in numbers}
    of_out, of_lse = (FP32, *halves), tuple(dict.fromkeys((FP32, BF16, *halves)))
    predicted = predict(problem, partial, base["out"], of_out, of_lse, errors["out"][1])
    possible = _possible(problem, predicted, measured[1], base["lse"], errors["lse"][1])
    combination = _best_fit(problem, possible, errors["out"])
    shares: dict[str, float] = {}
    if gradients:
        shares = _lse_gradient(problem, measured, base, partial[parts[0]], parts[0])
    findings = _findings(errors, predicted, combination, shares)
    verdict = "; ".join(_verdict(combination, findings))
    return MergeAudit(
        "golden", errors, growth, predicted, combination, shares, verdict, findings
    )


class _Call(NamedTuple):
    """The target on the parts of a problem as one batch: Q, K and V of these, dO of the
    whole."""

    attend: Attend
    parts: int
    names: tuple[str, ...]
    arrays: list[np.ndarray]

    def lowered(self) -> jax.stages.Lowered:
        attend, parts, names, arrays = self
        if parts == 1:
            return programs.lowered(attend, names == _RESULTS, arrays)
        with contained():
            return _merge.lower(attend, parts, names, *arrays)

    def results(self) -> Mapping[str, np.ndarray]:
        attend, parts, names, arrays = self
        if parts == 1:
            return programs.run(attend, arrays, gradients=names == _RESULTS)
        self.lowered().compile()
        with ALONE:
            return jax.device_get(_merge(attend, parts, names, *arrays))


def _call(attend_of, problem: Problem, parts: int, names: tuple[str, ...]) -> _Call:
    query, key, value, dout = problem.inputs
    attend = attend_of(part_mask(problem.rules, parts, *key.shape[:2]))
    inputs = np.repeat(query, parts, 0), in_parts(key, parts), in_parts(value, parts)
    return _Call(attend, parts, names, [*inputs, dout])


def _merged_results(problem: Problem, call: _Call) -> dict[str, np.ndarray]:
    results, names, parts = call.results(), call.names, call.parts
    if "lse" not in results:
        raise ValueError("merging needs LSE, and the target returns none")
    x = {name: results[name].astype(np.float64) for name in names}
    # In one part out and LSE are the target's own.
    x["returned"], x["out"] = x["out"], correctly_rounded(x["out"], problem.format)
    if "dquery" in x:
        whole = summed(x["dquery"], parts)
        x["dquery"] = correctly_rounded(whole, problem.format)
        inputs = problem.inputs
        shapes = {"dkey": inputs.key.shape, "dvalue": inputs.value.shape}
        x |= {name: x[name].reshape(shape) for name, shape in shapes.items()}
    return x


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=NO_GRAPHS)
def _merge(attend, parts, names, query, key, value, dout):
    """As `programs.run` gives them: out [B, T, N, H] and LSE [B, N, T] in FP32, and the
    gradients of the parts if names are of these, too."""

    def merged(query, key, value):
        out, lse = attend(query, key, value)
        if lse is None:
            raise ValueError("merging needs LSE, and the target returns none")
        # As they are returned: XLA would leave a rounding out that is widened here.
        out, lse = jax.lax.optimization_barrier((out, lse))
        out, lse = (
            x.astype(jnp.float32).reshape(-1, parts, *x.shape[1:]) for x in (out, lse)
        )
        hidden = jnp.isneginf(lse)
        largest = jax.lax.stop_gradient(lse.max(1, keepdims=True))
        top = jnp.where(jnp.isneginf(largest), 0.0, largest)
        # Zeros under a `where`, or the gradient of a hidden part would be 0 times inf.
        safe = jnp.where(hidden, 0.0, lse)
        total = jnp.where(hidden, 0.0, jnp.exp(safe - top)).sum(1, keepdims=True)
        sees = total > 0
        whole = top + jnp.log(jnp.where(sees, total, 1.0))
        weight = jnp.where(hidden, 0.0, jnp.exp(safe - whole))
        weight = weight.swapaxes(2, 3)[..., None]
        lse = jnp.where(sees, whole, -jnp.inf)[:, 0]
        return (weight * out).sum(1), lse

    if names != _RESULTS:
        return dict(zip(names, merged(query, key, value), strict=True))
    out, pullback, lse = jax.vjp(merged, query, key, value, has_aux=True)
    found = out, lse, *pullback(dout.astype(jnp.float32))
    return dict(zip(_RESULTS, found, strict=True))


def _units(problem: Problem, name: str, x, base, exact: bool) -> float:
    fmt = FP32 if name == "lse" else problem.format
    finite = np.isfinite(base)
    if not np.array_equal(np.isneginf(x), np.isneginf(base)):
        return np.inf
    x, base = x[finite], base[finite]
    if not base.any():
        return 0.0 if np.array_equal(x, base) else np.inf
    if exact:
        absolute = None
        if name != "lse":
            absolute = getattr(problem.exact(absolute=True), name)
        else:
            absolute = np.abs(base)
        return unit_error(x, base, fmt, absolute)
    # Its own result is a number of the format: the unit is that of numbers like it.
    size = fmt.rms_roundoff * np.sqrt(np.mean(base**2))
    return float(np.sqrt(np.mean((x - base) ** 2)) / size)


def _exponent(errors: Mapping[int, float]) -> float:
    """Least squares of log error over log W; nan if an error is 0 or not finite."""
    if len(errors) < 2 or not all(0 < e < np.inf for e in errors.values()):
        return np.nan
    return float(np.polyfit(np.log(list(errors)), np.log(list(errors.values())), 1)[0])


def _possible(problem: Problem, predicted, alone, lse, error: float):
    """Combinations that the target's results in one part, as returned, do not exclude.

    Numbers that all are of a 16-bit format were rounded to it; an LSE that is more
    accurate than a format allows was not. An LSE worse than BF16 leaves none.
    """

    def is_in(name: str, of: NumberFormat) -> bool:
        x = alone[name][np.isfinite(alone[name])]
        return np.array_equal(correctly_rounded(x, of), x)

    finite = lse[np.isfinite(lse)]
    formats = {fmt.name: fmt for fmt in (FP32, BF16, FP16)}
    halves = [fmt for fmt in formats.values() if fmt != FP32]
    coarse = {
        fmt.name: _units(problem, "lse", correctly_rounded(finite, fmt), finite, True)
        for fmt in halves
    }
    if not error <= _NEAR * max(coarse["bf16"], 1.0):
        return {}
    rounded = {name: [f.name for f in halves if is_in(name, f)] for name in alone}
    return {
        (of_out, of_lse): units
        for (of_out, of_lse), units in predicted.items()
        if (not rounded["returned"] or of_out in rounded["returned"])
        and (
            of_lse in rounded["lse"]
            if rounded["lse"]
            else of_lse == FP32.name or error > coarse[of_lse] / _NEAR
        )
    }


def _best_fit(problem: Problem, predicted, errors) -> Combination | None:
    """Smallest sum of squared log ratios; None where an error is above what it fits."""

    def distance(units):
        ratios = [max(errors[w], 1e-3) / max(e, 1e-3) for w, e in units.items()]
        return np.square(np.log(ratios)).sum()

    if not predicted or not all(np.isfinite(e) for e in errors.values()):
        return None
    best = min(predicted, key=lambda combination: distance(predicted[combination]))
    # The plainest of those that predict the same.
    for combination, units in predicted.items():
        if all(
            1 / _ALIKE < units[w] / max(e, 1e-300) < _ALIKE
            for w, e in predicted[best].items()
        ):
            best = combination
            break
    allowed = _FITS["32 bits" if problem.format == FP32 else "16 bits"]
    fits = all(errors[w] <= allowed * max(e, 1.0) for w, e in predicted[best].items())
    return best if fits else None


def _lse_gradient(
    problem: Problem, measured, whole, partial: Partial, parts: int
) -> dict[str, float]:
    """How much of what dLSE adds to dQ and dK the measured ones have. To dV it adds
    nothing: that of parts is P_w^T dO_w."""
    weight = weights_of(partial.lse)
    dout = problem.inputs.dout.astype(np.float64)[:, None] * weight
    dout = dout.reshape(partial.inputs.dout.shape)
    with ALONE:
        of = golden(*partial.inputs[:3], dout, mask=partial.mask, scale=problem.scale)
    without = {
        "dquery": summed(of.dquery, parts),
        "dkey": of.dkey.reshape(problem.shape.key),
    }
    shares = {
        name: share(
            measured[parts][name] - whole[name],
            whole[name] - without[name],
            measured[1][name] - whole[name],
        )
        for name in THROUGH_LSE
    }
    return {name: x for name, x in shares.items() if x is not None}


def _findings(errors, predicted, combination, shares) -> tuple[Finding, ...]:
    findings = of_shares(shares, "when parts are merged", (MERGE,))
    worst = max(errors["out"], key=lambda w: errors["out"][w])
    evidence: dict[str, float | str] = {
        f"out, {w} parts": e for w, e in errors["out"].items()
    }
    if combination is None:
        findings.append(
            Finding(
                WORSE,
                "parts do not merge",
                f"out merged from {worst} parts is {errors['out'][worst]:.3g} units "
                "off, which no rounding of partial results explains: out or LSE of a "
                "part is not that of its keys",
                ("out", "lse"),
                (MERGE,),
                evidence,
            )
        )
        return tuple(findings)
    of_out, of_lse = combination
    causes = []

    def harms(other: Combination) -> bool:
        units = predicted[combination]
        return any(units[w] > _ALIKE * e for w, e in predicted[other].items())

    if of_out != FP32.name and harms((FP32.name, of_lse)):
        causes.append(("16-bit partial results", "out", f"out of parts in {of_out}"))
    # dV is as far off as the weights of parts, also where out hardly is.
    if of_lse != FP32.name:
        label = of_lse.upper()
        causes.append((f"LSE in {label}", "lse", f"LSE of parts in {label}"))
    for cause, tensor, what in causes:
        seen_in = "dvalue" if tensor == "lse" and "dvalue" in errors else "out"
        units = errors[seen_in]
        says = (
            f"{what} give up to {max(units.values()):.3g} units of error of {seen_in}, "
            f"against {units[1]:.3g} in one part: return it in FP32"
        )
        findings.append(Finding(POOR, cause, says, (tensor,), (MERGE,), evidence))
    return tuple(findings)


def _verdict(combination, findings: tuple[Finding, ...]) -> list[str]:
    words = {
        "16-bit partial results": "out of each part is rounded to 16 bits",
        "LSE in BF16": "LSE is rounded to BF16",
        "LSE in FP16": "LSE is rounded to FP16",
        "parts do not merge": "no rounding of partial results explains the error",
    }
    said: list[str] = [words.get(f.cause) or f.cause for f in findings]
    if combination is not None and all(f.kind != POOR for f in findings):
        said.append("merging adds no error" + (" to out" if said else ""))
    return said
