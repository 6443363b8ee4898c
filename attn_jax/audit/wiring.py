"""Wrong wiring, told from rounding: which mistake results are the exact results of.

Rounding errors lie around the right result, those of wrong wiring around another one.
Results that no rounding can explain are held against what every mistake in
`wrong_attention`, `wrong_masks`, `wrong_results` and `wrong_lse` makes in FP64, and a
mistake is claimed only where it explains almost all of the error. What is random, as
dropout is, is at no exact result: that is looked for in P itself (`probability`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attn_jax.audit import rounded_lse
from attn_jax.audit.error import in_units
from attn_jax.audit.exact import exact
from attn_jax.audit.finding import Finding
from attn_jax.audit.judge import WORSE
from attn_jax.audit.noise import gradient_noise
from attn_jax.audit.problem import (
    GRADIENTS,
    SYMBOLS,
    TENSORS,
    Problem,
    Results,
)
from attn_jax.audit.variant import (
    Registry,
    Setting,
    Variant,
    Wrong,
    in_the_backward_pass,
)
from attn_jax.audit.wrong_attention import ATTENTION
from attn_jax.audit.wrong_bias import BIASES, DBIAS
from attn_jax.audit.wrong_lse import LSES
from attn_jax.audit.wrong_masks import RULES
from attn_jax.audit.wrong_results import RESULTS
from attn_jax.formats import BF16

# Mistakes by the name that a finding has for its cause. Of a mistake of the attention
# there is also one "in the backward pass", and of LSE also what `rounded_lse` has.
_ATTENTION, _RESULTS = ATTENTION | RULES | BIASES, RESULTS | LSES | DBIAS
VARIANTS: Mapping[str, Variant] = Registry(_ATTENTION | _RESULTS)

# Rounded once to nearest, no term of a sum is off by more than this share of it. For
# all types: the coarsest format that 16-bit attention rounds to.
_ROUNDING = BF16.unit_roundoff
# A mistake is claimed if results lie this many times closer to it than to the right
# results, and closer than this part of its size. The rounding errors of right results
# would have to be parallel to its effect and as large, both to a quarter.
_MARKEDLY = 4
# Logits of all heads above which nothing is looked into: mistakes are held in FP64
# arrays of that many.
_MOST_LOGITS = 2**24

_BACKWARD = " in the backward pass"
_GRADIENTS = (*GRADIENTS, "dbias")


class _Far(NamedTuple):
    """A result that rounding does not explain.

    error: RMS distance from the right result, `relative` to the RMS of that.
    share: the largest that rounding explains, relative to the same.
    """

    x: np.ndarray
    error: float
    relative: float
    share: float


class _Match(NamedTuple):
    """A form of a mistake, and how far the results that it explains are off it.

    too_many: it would spoil another result as well, which is right.
    """

    cause: str
    variant: Variant
    wrong: Wrong
    errors: dict[str, float]
    too_many: bool


def recognise(results: Results, problem: Problem) -> list[Finding]:
    """Findings of kind "wrong wiring", one for each mistake that is recognised; and one
    of an LSE whose query was rounded, which is poor.

    `results` holds those of "out" [B, T, N, H], "lse" [B, N, T], "dquery", "dkey",
    "dvalue" and "dbias" [1, N, T, S] that there are, in any float type; gradients are
    for the cotangents `problem.inputs.dout` and dLSE = 0.

    A result is looked into if the RMS of its error is more than the unit roundoff of
    BF16 times the RMS of the sum of absolute values of its terms (of LSE: of itself and
    of its logits' terms), which is what rounding gives if every term is off by as much
    as it can be and all to the same side. What lies far off for a reason that is not
    known here gives no finding, but for gradients of another attention that are not its
    own: one of kind "worse than its algorithm allows". Of a problem of more than 2^24
    logits only an LSE of 16 bits is recognised. Queries that see no key are left out of
    LSE.
    """
    x = {n: np.asarray(results[n]).astype(np.float64) for n in TENSORS if n in results}
    findings = rounded_lse.recognise(x, problem)
    s = problem.shape
    if s.batch * s.heads * s.query_length * s.key_length > _MOST_LOGITS:
        return findings
    if not findings:
        findings = rounded_lse.of_a_rounded_query(x, problem)
    far = _far(x, problem)
    if not far:
        return findings
    right = Setting(problem, exact(problem))
    best = _cover(_matches(right, far, x), far)
    if "out" in far and not any("out" in match.errors for match in best):
        # Gradients of another attention, which may be near anything.
        best = [match for match in best if not match.errors.keys() & {*_GRADIENTS}]
    bases = [match.wrong.attention for match in best if match.wrong.attention]
    rest = {name: far[name] for name in far if not any(name in m.errors for m in best)}
    if bases and rest:
        # Another mistake on top of the wrong attention.
        of_results = _RESULTS.items()
        on_top = Setting(problem, bases[0])
        best += _cover(_of(of_results, on_top, rest, x, gate=None), rest)
    findings += [_finding(match, far, problem) for match in best]
    return findings + _neither(best, x, right)


def one_cause(
    findings: Sequence[Finding], problems: Iterable[Problem]
) -> list[Finding]:
    """Findings of several problems: a mistake of the attention that is recognised in
    out on one stands for those of results that it gives itself on another, where P
    hardly depends on it, under the same mask or, from none, under any."""
    by_name = {str(problem): problem for problem in problems}
    known = [f for f in findings if "out" in f.tensors and f.cause in _ATTENTION]

    def own(finding: Finding) -> Finding:
        problem = by_name.get(finding.where[0])
        # What was found beside the attention is on top of it.
        if problem is None or any(f.where[0] == finding.where[0] for f in known):
            return finding
        seen: set[str] = set()
        for other in known:
            mask = by_name[other.where[0]].mask if other.where[0] in by_name else ""
            if other.cause in seen or mask not in ("full", problem.mask):
                continue
            seen.add(other.cause)
            if _gives(other.cause, finding, problem):
                places = dict(tensors=finding.tensors, where=finding.where)
                return dataclasses.replace(other, **places)
        return finding

    return [own(f) if f.kind == "wrong wiring" else f for f in findings]


def _gives(cause: str, finding: Finding, problem: Problem) -> bool:
    """Whether a wrong attention, whose out no rounding tells from the right one, is
    markedly closer to what was recognised in other results than those are to right."""
    right = Setting(problem, exact(problem))
    claimed = [wrong.results for wrong in _forms(finding.cause, right)]

    def is_at(name: str, of: np.ndarray) -> bool:
        exactly = getattr(right.attention, name)
        found = (results[name]() for results in claimed if name in results)
        return any(_MARKEDLY * _distance(of, x) <= _distance(exactly, x) for x in found)

    for wrong in _ATTENTION[cause].make(right):
        out = _distance(wrong.results["out"](), right.attention.out)
        if out <= _ROUNDING * _size("out", problem) and all(
            name in wrong.results and is_at(name, wrong.results[name]())
            for name in finding.tensors
        ):
            return True
    return False


def _forms(cause: str, right: Setting) -> Iterator[Wrong]:
    if cause in _RESULTS:
        yield from _RESULTS[cause].make(right)
    base = _ATTENTION.get(cause.removesuffix(_BACKWARD))
    if base and cause.endswith(_BACKWARD):
        yield from _backward(base)(right)


def _neither(best: Sequence[_Match], x: Results, right: Setting) -> list[Finding]:
    """Gradients that are far from the right ones and from those of the attention that
    was recognised in out: markedly farther than roundings are."""
    known = {name for match in best for name in match.errors}
    of_out = (m for m in best if "out" in m.errors and m.wrong.attention)
    match = next(of_out, None)
    rest = [name for name in _GRADIENTS if name in x and name not in known]
    if match is None or match.wrong.attention is None or not rest:
        return []
    off: dict[str, tuple[float, float]] = {}
    pair = match.wrong.attention, right.attention
    spreads = [gradient_noise(attention, _ROUNDING) for attention in pair]
    for name in rest:
        if name not in match.wrong.results:
            continue
        both = match.wrong.results[name](), getattr(right.attention, name)
        errors = [_distance(x[name], of) for of in both]
        if all(
            _MARKEDLY * of[name] < error < np.inf for error, of in zip(errors, spreads)
        ):
            sizes = (_rms(of) for of in both)
            one, other = (in_units(e, size) for e, size in zip(errors, sizes))
            off[name] = one, other
    if not off:
        return []
    name = max(off, key=lambda name: off[name])
    symbols, (one, other) = ", ".join(SYMBOLS[name] for name in off), off[name]
    says = (
        f"{symbols}: neither right nor what {match.cause!r} gives; {SYMBOLS[name]} is "
        f"{one:.1e} of its size off that and {other:.1e} off the right result: look "
        "for another mistake, in the backward pass"
    )
    where, evidence = (str(right.problem),), {"matches": one, "right": other}
    return [Finding(WORSE, "", says, tuple(off), where, evidence)]


def _far(x: Results, problem: Problem) -> dict[str, _Far]:
    right = problem.exact()
    far = {}
    for name in x:
        of = getattr(right, name)
        error, size = _distance(x[name], of), _rms(of)
        # No sum is larger than that of absolute values.
        if error <= _ROUNDING * size:
            continue
        largest = _ROUNDING * _size(name, problem)
        if error > largest:
            relative, share = in_units(error, size), in_units(largest, size)
            far[name] = _Far(x[name], error, relative, share)
    return far


def _size(name: str, problem: Problem) -> float:
    """RMS of the sum of absolute values of the terms."""
    if name != "lse":
        return _rms(getattr(problem.exact(absolute=True), name))
    right = exact(problem)
    terms = right.replaced(query=abs(right.query), key=abs(right.key)).products
    of_logits = abs(right.scale) * terms
    if right.bias is not None:
        of_logits = of_logits + abs(right.bias)
    seen = right.probability > 0  # A bias of -inf is in no sum.
    of_logits = (right.probability * np.where(seen, of_logits, 0.0)).sum(-1)
    return _rms(abs(right.lse) + of_logits)


def _matches(right: Setting, far, x: Results) -> Iterator[_Match]:
    """Of every mistake, on top of the right attention."""
    yield from _of(_RESULTS.items(), right, far, x, gate=None)
    if "out" in far or "out" not in x:
        # What attends wrongly gives a wrong output, if it gives any.
        yield from _of(_ATTENTION.items(), right, far, x, gate="out")
    if "out" not in far and far.keys() & {*_GRADIENTS}:
        backward = [
            (
                cause + _BACKWARD,
                dataclasses.replace(variant, make=_backward(variant)),
            )
            for cause, variant in _ATTENTION.items()
        ]
        yield from _of(backward, right, far, x, gate="dvalue")


def _backward(variant: Variant) -> Callable[[Setting], Iterator[Wrong]]:
    def make(s: Setting):
        for wrong in variant.make(s):
            yield from in_the_backward_pass(s.attention, wrong)

    return make


def _of(
    variants: Iterable[tuple[str, Variant]],
    on: Setting,
    far: Mapping[str, _Far],
    x: Results,
    *,
    gate: str | None,
) -> Iterator[_Match]:
    """`gate`: a result which no form explains anything without, where there is it."""
    for cause, variant in variants:
        for wrong in variant.make(on):
            names = [name for name in wrong.results if name in far]
            if gate in wrong.results and gate in x:
                if gate not in far or not _errors(wrong, far, [gate]):
                    continue
            errors = _errors(wrong, far, names)
            if errors:
                spoils = any(
                    _distance(wrong.results[name](), getattr(on.attention, name))
                    > _ROUNDING * _size(name, on.problem)
                    for name in wrong.results
                    if name in x and name not in far
                )
                yield _Match(cause, variant, wrong, errors, spoils)


def _errors(wrong: Wrong, far: Mapping[str, _Far], names) -> dict[str, float]:
    """Relative errors to the wrong variant, of the results that are at it."""
    errors = {}
    for name in names:
        of = wrong.results[name]()
        if np.isfinite(of).mean() < 0.5:
            continue  # Where LSE is -inf, which says nothing.
        error, size = _distance(far[name].x, of), _rms(of)
        closest = min(1, _MARKEDLY**2 * far[name].share) / _MARKEDLY * size
        if error > min(far[name].error / _MARKEDLY, closest):
            continue
        # A factor close by is another mistake.
        if error <= _ROUNDING * size or not _is_multiple(far[name].x, of):
            errors[name] = in_units(error, size)
    return errors


def _is_multiple(x: np.ndarray, of: np.ndarray) -> bool:
    """Whether some multiple of an array is markedly closer than the array itself."""
    counts = np.isfinite(of)
    x, of = x[counts], of[counts]
    multiple = of * (np.vdot(of, x) / max(np.vdot(of, of), np.finfo(float).tiny))
    return _MARKEDLY * _rms(x - multiple) <= _rms(x - of)


def _cover(matches: Iterable[_Match], far: Mapping[str, _Far]) -> list[_Match]:
    """The fewest that explain all that is explained; the closest of those."""
    matches, chosen, rest = list(matches), [], set(far)

    def weight(match: _Match):
        explained = rest & match.errors.keys()
        ratios = (match.errors[name] / far[name].relative for name in explained)
        # Of one mistake, and of no more than it is, unless another is markedly closer.
        handicap = _MARKEDLY if match.wrong.twofold or match.too_many else 1
        return len(explained), -handicap * max(ratios, default=np.inf)

    while matches and weight(best := max(matches, key=weight))[0]:
        errors = {name: best.errors[name] for name in best.errors if name in rest}
        chosen.append(best._replace(errors=errors))
        rest -= errors.keys()
    return chosen


def _finding(match: _Match, far: Mapping[str, _Far], problem: Problem) -> Finding:
    # The result that it is least certain of.
    name = max(match.errors, key=lambda name: match.errors[name] / far[name].relative)
    matches, right = match.errors[name], far[name].relative
    detail = f" ({match.wrong.detail})" if match.wrong.detail else ""
    where = _BACKWARD if match.cause.endswith(_BACKWARD) else ""
    names = [SYMBOLS[name] for name in TENSORS if name in match.errors]
    return Finding(
        "wrong wiring",
        match.cause,
        f"{', '.join(names)}: {match.variant.does}{where}{detail}; {SYMBOLS[name]} is "
        f"{matches:.1e} of its size off that and {right:.1e} off the right result: "
        f"{match.variant.do}",
        tuple(name for name in TENSORS if name in match.errors),
        (str(problem),),
        {"matches": matches, "right": right},
    )


def _distance(x: np.ndarray, of: np.ndarray) -> float:
    """RMS of x - of; of LSE where that is finite. inf for another shape and for NaN."""
    if x.shape != of.shape:
        return np.inf
    counts = np.isfinite(of)
    if not np.isfinite(x[counts]).all():
        return np.inf
    return _rms(x[counts] - of[counts])


def _rms(x: np.ndarray) -> float:
    x = x[np.isfinite(x)]
    # Of a mistake that gives numbers beyond FP64's range nothing is near.
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
