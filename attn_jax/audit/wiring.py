"""Wrong wiring, told from rounding: which mistake results are the exact results of.

Rounding errors lie around the right result, those of wrong wiring around another one.
Results that no rounding can explain are held against what every mistake in
`wrong_attention` and `wrong_results` makes in FP64, and a mistake is claimed only where
it explains almost all of the error. What is random, as dropout is, is at no exact
result: P itself is read from the callable, with a V of ones, and looked at.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from attn_jax.audit.error import correctly_rounded, in_units
from attn_jax.audit.exact import exact
from attn_jax.audit.finding import Finding, Kind
from attn_jax.audit.problem import (
    GRADIENTS,
    SYMBOLS,
    TENSORS,
    Problem,
    Results,
)
from attn_jax.audit.programs import run_forward
from attn_jax.audit.variant import (
    Registry,
    Setting,
    Variant,
    Wrong,
    in_the_backward_pass,
)
from attn_jax.audit.wrong_attention import ATTENTION
from attn_jax.audit.wrong_bias import BIASES, DBIAS
from attn_jax.audit.wrong_results import RESULTS
from attn_jax.formats import BF16, FP16, FP32, NumberFormat

# Mistakes by the name that a finding has for its cause. Of a mistake of the attention
# there is also one "in the backward pass", and of LSE also the names of `_ROUNDED`.
_ATTENTION, _RESULTS = ATTENTION | BIASES, RESULTS | DBIAS
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

# How often a lost entry of P is the smaller one where there is a threshold. Tiles may
# have thresholds of their own, each for its turn's maximum.
_THRESHOLD = 0.9

_BACKWARD = " in the backward pass"
_GRADIENTS = (*GRADIENTS, "dbias")
_ROUNDED = {"LSE rounded to BF16": BF16, "LSE rounded to FP16": FP16}


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
    """A form of a mistake, and how far the results that it explains are off it."""

    cause: str
    variant: Variant
    wrong: Wrong
    errors: dict[str, float]


def recognise(results: Results, problem: Problem) -> list[Finding]:
    """Findings of kind "wrong wiring", one for each mistake that is recognised.

    `results` holds those of "out" [B, T, N, H], "lse" [B, N, T], "dquery", "dkey",
    "dvalue" and "dbias" [1, N, T, S] that there are, in any float type; gradients are
    for the cotangents `problem.inputs.dout` and dLSE = 0.

    A result is looked into if the RMS of its error is more than the unit roundoff of
    BF16 times the RMS of the sum of absolute values of its terms (of LSE: of itself and
    of its logits' terms), which is what rounding gives if every term is off by as much
    as it can be and all to the same side. What lies far off for a reason that is not
    known here gives no finding. Of a problem of more than 2^24 logits only an LSE of 16
    bits is recognised. Queries that see no key are left out of LSE.
    """
    x = {n: np.asarray(results[n]).astype(np.float64) for n in TENSORS if n in results}
    findings = _rounded_lse(x, problem)
    s = problem.shape
    if s.batch * s.heads * s.query_length * s.key_length > _MOST_LOGITS:
        return findings
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
    return findings + [_finding(match, far, problem) for match in best]


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
    of_logits = (right.probability * of_logits).sum(-1)
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
                yield _Match(cause, variant, wrong, errors)


def _errors(wrong: Wrong, far: Mapping[str, _Far], names) -> dict[str, float]:
    """Relative errors to the wrong variant, of the results that are at it."""
    errors = {}
    for name in names:
        of = wrong.results[name]()
        if np.isfinite(of).mean() < 0.5:
            continue  # Where LSE is -inf, which says nothing.
        error, size = _distance(far[name].x, of), _rms(of)
        closest = min(1, _MARKEDLY**2 * far[name].share) / _MARKEDLY * size
        if error <= min(far[name].error / _MARKEDLY, closest):
            errors[name] = in_units(error, size)
    return errors


def _cover(matches: Iterable[_Match], far: Mapping[str, _Far]) -> list[_Match]:
    """The fewest that explain all that is explained; the closest of those."""
    matches, chosen, rest = list(matches), [], set(far)

    def weight(match: _Match):
        explained = rest & match.errors.keys()
        ratios = (match.errors[name] / far[name].relative for name in explained)
        return len(explained), -max(ratios, default=np.inf)

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


def _rounded_lse(x: Results, problem: Problem) -> list[Finding]:
    """LSE is given as numbers of a 16-bit format, as near as these come to it."""
    right = problem.exact().lse
    if "lse" not in x or x["lse"].shape != right.shape:
        return []
    seen = np.isfinite(right) & np.isfinite(x["lse"])
    lse, right = x["lse"][seen], right[seen]
    off, size = abs(lse - right), _rms(right)
    for cause, fmt in _ROUNDED.items():
        # Numbers that are exact in either format, as FP32's arithmetic leaves them.
        if not lse.size or _rms(off) <= 2.0**6 * FP32.unit_roundoff * size:
            continue
        nearest = fmt.unit_roundoff * (1 + 2.0**-6) * abs(right) + fmt.min_positive
        if (correctly_rounded(lse, fmt) == lse).all() and (off <= nearest).all():
            error = in_units(_rms(off), size)
            says = (
                f"LSE is rounded to {fmt.name.upper()}, {error:.1e} of its size: "
                "return it in FP32, as it was computed"
            )
            evidence = {"matches": 0.0, "right": error}
            where = (str(problem),)
            return [Finding("wrong wiring", cause, says, ("lse",), where, evidence)]
    return []


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


def probabilities(
    attend: Callable,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    width: int | None = None,
) -> Float[np.ndarray, "B N T S"]:
    """P as `attend(query, key, value) -> (out, lse)` applies it, in FP64.

    Column h of V is 1 for key `start + h` and 0 for all others, so that column h of the
    output is that key's column of P, rounded as outputs are. One call for `width` keys
    (H if None), all compiled as one; for short sequences.
    """
    B, S, K = key.shape[:3]
    width = query.shape[-1] if width is None else width
    columns = []
    for start in range(0, S, width):
        ones = np.arange(S)[:, None] == start + np.arange(width)
        value = np.broadcast_to(ones[None, :, None], (B, S, K, width))
        out = run_forward(attend, query, key, jnp.asarray(value, key.dtype))["out"]
        columns.append(out.astype(np.float64).swapaxes(1, 2))
    return np.concatenate(columns, -1)[..., :S]


def of_probabilities(
    p: Float[np.ndarray, "B N T S"],
    right: Float[np.ndarray, "B N T S"],
    visible: Bool[np.ndarray, "#B #N T S"] | None,
    fmt: NumberFormat = BF16,
    where: tuple[str, ...] = (),
) -> list[Finding]:
    """What is wrong with P as it was read, by `probabilities`, against the exact P.

    `fmt` is the format of P and of the output: what is less than twice its smallest
    normal number may vanish, and rows may be off one by 4 unit roundoffs, for the
    roundings of P, of its normaliser and of the output. Says nothing of a P that is not
    finite.
    """
    if not np.isfinite(p).all():
        return []
    visible = np.broadcast_to(True if visible is None else visible, p.shape)
    least = 2 * fmt.min_normal
    sees = visible.any(-1, keepdims=True)
    weighty = visible & (right > least)
    lost, shown = weighty & (p == 0), ~visible & sees & (p > least)
    found = []

    def add(kind: Kind, cause: str, says: str, **evidence):
        figures = {name: float(x) for name, x in evidence.items()}
        found.append(Finding(kind, cause, says, ("out",), where, figures))

    if (~sees & (p > least)).any():
        rows = int(((~sees & (p > least)).any(-1)).sum())
        says = f"{rows} queries that see no key put weight on keys: give zeros there"
        add("wrong wiring", "queries that see no key", says, rows=rows)
    if shown.any():
        says = f"{_pairs(shown, ~visible & sees)}, which the mask hides, carry weight, "
        says += f"{p[shown].max():.1e} at most: apply the mask to the logits, as -inf"
        add("wrong wiring", "hidden pairs carry weight", says, pairs=shown.sum())
    if lost.any():
        _lost(p, right, lost, weighty, add)
    off = abs(p.sum(-1) - 1)[sees[..., 0]]
    if not found and off.size and off.max() > 4 * fmt.unit_roundoff:
        says = (
            f"rows of P are off a sum of one by up to {off.max():.1e}: divide by the "
        )
        says += "sum of the weights that are applied to V"
        add("wrong wiring", "rows do not sum to one", says, off=off.max())
    return found


def _lost(p, right, lost, weighty, add) -> None:
    """Why visible pairs have no weight: a pattern, their size, or chance."""
    share = lost.sum() / weighty.sum()
    kept = weighty & ~lost
    # Of none that are kept it cannot be told how the lost ones differ.
    scattered = not _pattern(lost, weighty) and kept.any()
    if scattered and _smaller(right, lost, kept) > _THRESHOLD:
        below = right[lost].max()
        says = f"{share:.1%} of P is zero, small entries of up to {below:.1e}: apply "
        says += "what the softmax gives without a threshold"
        kind = "worse than its algorithm allows"
        add(kind, "P clipped", says, share=share, below=below)
    elif scattered and lost.sum() >= 10 and _is_chance(lost, weighty):
        gain = np.median(p[kept] / right[kept])
        says = f"{share:.1%} of P, or of P V, is zero, of large and small entries "
        says += f"alike, and the others are {gain:.3f} times what they should be: turn "
        says += "dropout off"
        add("wrong wiring", "dropout left on", says, share=share, gain=gain)
    else:
        says = f"{_pairs(lost, weighty)}, which the mask shows, carry no weight: "
        says += "compare the bounds of loops and masks with the rules asked for"
        add("wrong wiring", "visible pairs carry none", says, pairs=lost.sum())


def _smaller(right, lost, kept) -> float:
    """Of a lost and a kept entry of a row, how often the lost one is smaller: always
    where there is a threshold, half of the time by chance."""
    counts = lost.sum(-1), kept.sum(-1)
    pairs = counts[0] * counts[1]
    if not pairs.any():
        return 0.5
    # Mann and Whitney's U. Neither lost nor kept are last.
    order = np.argsort(np.where(lost | kept, right, np.inf), axis=-1)
    is_kept = np.take_along_axis(kept, order, -1)
    is_lost = np.take_along_axis(lost, order, -1)
    return float((is_lost.cumsum(-1) * is_kept).sum() / pairs.sum())


def _is_chance(lost: np.ndarray, weighty: np.ndarray) -> bool:
    """Whether each pair may be lost with the same probability, whatever its query, key,
    distance, head and batch entry: chi-squared, each of them, within six standard
    deviations. One throw may serve all heads, or all entries."""
    for axis in (0, 1):
        first_lost, first_weighty = (np.take(x, [0], axis) for x in (lost, weighty))
        if ((lost == first_lost) | ~weighty | ~first_weighty).all():
            lost, weighty = first_lost, first_weighty
    share = lost.sum() / weighty.sum()
    if share == 1:
        return False
    counts = [
        [x.sum(others) for x in (lost, weighty)]
        for others in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2))
    ]
    T, S = lost.shape[2:]
    diagonal = (np.arange(S) - np.arange(T)[:, None] + T - 1).ravel()
    counts.append(
        [np.bincount(diagonal, x.sum((0, 1)).ravel()) for x in (lost, weighty)]
    )
    for missing, of in counts:
        missing, of = missing[of > 0], of[of > 0]
        squares = ((missing - share * of) ** 2 / (share * (1 - share) * of)).sum()
        if squares > of.size + 6 * np.sqrt(2 * of.size):
            return False
    return True


def _pairs(which: np.ndarray, of: np.ndarray) -> str:
    b, n, i, j = (int(x[0]) for x in np.nonzero(which))
    first = f"the first query {i}, key {j} of head {n}, batch entry {b}"
    pattern = _pattern(which, of)
    return f"{which.sum()} pairs ({pattern + '; ' if pattern else ''}{first})"


def _pattern(which: np.ndarray, of: np.ndarray) -> str:
    """Which diagonals or keys among `of`, and of which heads and entries, where they
    are all of these; "" otherwise."""
    B, N = which.shape[:2]
    entries, heads = (np.flatnonzero(which.any(x)) for x in ((1, 2, 3), (0, 2, 3)))
    some = np.ix_(entries, heads)
    which, of = which[some], of[some]
    among = ""
    if heads.size < N:
        among += f" of {_listed('head', heads)}"
    if entries.size < B:
        among += f" of {_listed('batch entry', entries)}"
    if found := _lines(which, of):
        return f"{found}{among}"
    each = [_lines(which[i : i + 1], of[i : i + 1]) for i in range(entries.size)]
    if all(each):
        said = (f"{x} of batch entry {b}" for x, b in zip(each, entries, strict=True))
        return f"{', '.join(said)}{among if entries.size == B else ''}"
    return ""


def _lines(which: np.ndarray, of: np.ndarray) -> str:
    """All of a few diagonals, or of keys that are a row or equally far apart, or ""."""
    T, S = which.shape[2:]
    distance = np.arange(S) - np.arange(T)[:, None]
    steps = np.unique(distance[which.any((0, 1))])
    neighbours = steps[-1] - steps[0] + 1 == steps.size
    few = steps.size <= 3 or neighbours and 2 * steps.size < T
    if T > 1 and few and np.array_equal(which, of & np.isin(distance, steps)):
        if neighbours and steps.size > 1:
            return f"all with j - i = {steps[0]} to {steps[-1]}"
        return f"all with j - i = {' and '.join(map(str, steps))}"
    some = which.any((0, 1, 2))
    keys = np.flatnonzero(some)
    if keys.size == S or not np.array_equal(which, of & some):
        return ""
    between = np.isin(np.arange(S), np.arange(keys[0], keys[-1] + 1))
    if np.array_equal(which, of & between):
        return f"all of keys {keys[0]} to {keys[-1]}"
    if np.unique(np.diff(keys)).size == 1:
        return f"every {keys[1] - keys[0]}th key from {keys[0]} on"
    return ""


def _listed(what: str, numbers: np.ndarray) -> str:
    several = {"head": "heads", "batch entry": "batch entries"}
    name = what if numbers.size == 1 else several[what]
    return f"{name} {', '.join(map(str, numbers))}"
