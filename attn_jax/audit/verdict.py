"""From what was measured to what is said: the rules of a verdict.

A result is judged in the units of its unavoidable rounding, on each problem by itself,
against what its algorithm allows there (`algorithms`).

    not finite            a value is not finite where the exact one is, or the reverse
    worse than ...        error above `POOR_UNITS` units and above `allowance` of the
                          prediction
    as accurate as ...    error above `POOR_UNITS` units, and no more than that
    trustworthy           nothing else is found

Nothing is said of LSE within what it is allowed, but that its query was rounded.

One finding stands for all problems on which the same is wrong with the same result, and
names the worst.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attn_jax.audit.attribution import Cost, Fit
from attn_jax.audit.finding import (
    DEPENDS,
    EXTREME,
    HIDDEN_BY_LENGTHS,
    HIDDEN_KEYS,
    LARGE_HIDDEN,
    MERGE,
    NOT_THE_LOGITS,
    ON_WHAT_ALL_SHARE,
    P_CLIPPED,
    PAST_THE_LAST,
    ROUNDED_LSE,
    SEES_NO_KEY,
    Finding,
)
from attn_jax.audit.judge import POOR, WORSE
from attn_jax.audit.measure import Measured, Outcome
from attn_jax.audit.problem import SYMBOLS, TENSORS, Problem, made_of
from attn_jax.audit.raised import numberless
from attn_jax.audit.where import shared_alone
from attn_jax.formats import FP32, NumberFormat

# To the author of what raises a ValueError where that is a fault.
REFUSE = "if that is a refusal, raise NotImplementedError"
# What plain flash attention has on the problems that it is good at is 1.5.
POOR_UNITS = 1.7
# A step is named for an error if a tenth of its square goes with the step. Less is 5 %
# of the error itself, by which `merge` takes two predictions for the same.
REAL_SHARE = 0.1


class Judged(NamedTuple):
    """A problem: what the target gave there, and what is allowed, by result.

    `twice`: the largest error over twice that of a plain implementation in the same
    format, which FlashAttention's tests want to be at most 1. `alone`: what is allowed
    is what the recipe that fits has, if one does, and nobody else's.
    """

    problem: Problem
    outcome: Outcome
    found: dict[str, Measured]
    allowed: dict[str, float]
    twice: dict[str, float] = {}
    alone: bool = True


def allowance(fmt: NumberFormat) -> float:
    """How many times its predicted error an honest target may have, by the format of
    its inputs: roundings to 16 bits are in known places, sums in FP32 in any order.
    The most that tests have of either: 1.39 and 1.63."""
    return 4.0 if fmt == FP32 else 1.5


def with_faults(cells: Sequence[Judged]) -> list[Judged]:
    """What is raised on a problem that there is nothing to refuse of is no refusal on
    another: each problem was looked at by itself."""
    failed = (x.outcome.reason for x in cells if x.outcome.status == "failed")
    faults = {*map(numberless, failed)}
    return [
        x._replace(outcome=x.outcome._replace(status="failed"))
        if x.outcome.status == "not taken" and numberless(x.outcome.reason) in faults
        else x
        for x in cells
    ]


def judge(
    cells: Sequence[Judged],
    fit: Fit | None,
    costs: Sequence[tuple[Problem, Sequence[Cost]]] = (),
    wiring: Sequence[Finding] = (),
    suspect: str = "",
) -> list[Finding]:
    """Findings of the measurements. `costs`: what steps of the recipe that fits cost
    on some problems; `wiring`: what was recognised; `suspect`: a step that the target
    may do wrong (`attribution.suspect`). Under a mask where a result is wired wrongly,
    and under all if it is so without one, it is not judged any further, and no result
    if out is that of another attention: what else is wrong with it is most likely the
    same. What is wrong with P alone is so with out, and gradients are judged."""
    found = [*_refusals(cells), *_merged(wiring)]
    others = [finding for finding in wiring if finding.is_other_attention]
    out_spoilt = masks_of(others, {"out"}, cells)
    out_wrong = masks_of(wiring, {"out"}, cells)
    found += _not_finite([c for c in cells if not _is_of(c, out_spoilt)])
    for tensor in TENSORS:
        spoilt = out_spoilt | masks_of(wiring, {tensor}, cells)
        right = [cell for cell in cells if not _is_of(cell, spoilt)]
        here = [cell for cell in right if tensor in cell.found]
        poor = [cell for cell in here if cell.found[tensor].errors.units > POOR_UNITS]
        bad = [cell for cell in poor if _is_worse(cell, tensor)]
        if bad:
            first = cells[0].problem.mask
            found.append(_worse(bad, here, first, tensor, fit, suspect))
        # What FP32 leaves in LSE is many units, and so small that nobody need act.
        rest = [cell for cell in poor if cell not in bad and tensor != "lse"]
        # Of a wrong P gradients may be poor, which says nothing of its algorithm.
        rest = [cell for cell in rest if not _is_of(cell, out_wrong)]
        if rest:
            found.append(_poor(rest, here, tensor, fit, costs))
    return found


def together(
    found: Sequence[Finding], others: Sequence[Finding], cells: Sequence[Judged]
) -> list[Finding]:
    """Findings of the measurements, and those of `others`, under the first problem's
    mask, that they do not explain. What they do is added to where they were found."""
    bits = "not reproducible"
    places: dict[int, list[str]] = {}

    def is_new(finding: Finding) -> bool:
        explained = {i: _explained(x, finding, cells) for i, x in enumerate(found)}
        if not _of(finding) <= set().union(*explained.values()):
            return True
        for i in (i for i, tensors in explained.items() if tensors):
            places.setdefault(i, []).extend(finding.where)
        return False

    # Poor in one result is poor in those made of it, and one line says so. Bits that
    # differ in one say nothing of another, nor do merges of what is seen without them.
    others = [
        f for f in others if not (f.kind == bits or f.where == (MERGE,)) or is_new(f)
    ]
    new = [f for f in _merged(others) if f.kind == bits or is_new(f)]
    known = [_with_places(f, places.get(i, ())) for i, f in enumerate(found)]
    return [*known, *_wherever_keys_end(new)]


def _wherever_keys_end(found: Sequence[Finding]) -> list[Finding]:
    """Without what is said of the last key where the same is said of any: its places
    are added to that."""
    kept = [f for f in found if f.cause != PAST_THE_LAST]
    for past in (f for f in found if f.cause == PAST_THE_LAST):
        wider = [
            i
            for i, f in enumerate(kept)
            if f.cause == EXTREME
            or f.cause in (ON_WHAT_ALL_SHARE, NOT_THE_LOGITS)
            and _of(f) & _of(past)
            if f.kind == past.kind
        ]
        if wider:
            kept[wider[0]] = _with_places(kept[wider[0]], past.where)
        else:
            kept.append(past)
    return kept


def _with_places(finding: Finding, places: Iterable[str]) -> Finding:
    where = tuple(dict.fromkeys((*finding.where, *places)))
    return dataclasses.replace(finding, where=where)


def _of(finding: Finding) -> set[str]:
    """Its results; one without a name where it names none."""
    return set(finding.tensors) or {""}


def _explained(known: Finding, finding: Finding, cells: Sequence[Judged]) -> set[str]:
    """Of which of its results what is known explains a finding under the first mask.

    A result that is wired wrongly explains what is found in it, and out what is in any,
    but for what may hide more; under lengths what hidden keys change; a wrong LSE what
    merges show. A result that is not finite explains what is made of it, one that is
    worse what is poor in it, and any where that is out. What a result depends on is
    said of one that is worse for no known cause. What is known under other masks alone
    explains nothing, and what is wrong with P alone is so with out.
    """
    none: set[str] = set()
    if finding.kind in ("fails", "not taken"):
        # What was called a refusal there is none if it is a fault of a problem.
        same = known.kind in (finding.kind, "fails") and _says_why(known, finding)
        return _of(finding) if same else none
    if finding.where == (MERGE,) and _is_of_other_weights(known, cells):
        return _of(finding)
    every, shared = _of(finding), _of(finding) & set(known.tensors)
    is_out = "out" in known.tensors
    masks = masks_of([known], {*known.tensors}, cells)
    if known.kind == "wrong wiring":
        if finding.kind in ("not reproducible", "not finite"):
            return none
        hides = {HIDDEN_BY_LENGTHS, "hidden keys"}.issuperset(finding.where)
        by_lengths = bool(finding.where) and hides and "lengths" in masks
        if of_probe := _masks_of_hidden_keys(finding):
            here = of_probe <= masks or "full" in masks
        else:
            here = _is_of(cells[0], masks) or by_lengths
        if not here:
            return none
        if not known.is_other_attention:
            # A row's sum is off whichever keys are counted.
            return shared
        if is_out:
            return every
        return shared if finding.kind != "wrong wiring" else none
    # P may have been read on inputs that are among no cells.
    if masks and not _is_of(cells[0], masks):
        return none
    if known.kind == "not finite" and finding.kind != "not reproducible":
        # On ordinary inputs, so that nothing else that is made of it says more.
        first = cells[0].problem.mask
        normal = [c.problem for c in cells if c.problem.family == "normal"]
        ordinary = {str(problem) for problem in normal if problem.mask == first}
        return none if ordinary.isdisjoint(known.where) else every if is_out else shared
    if finding.cause.startswith(DEPENDS) and not (known.kind == WORSE and known.cause):
        return none
    if finding.kind == POOR and known.kind in (WORSE, POOR):
        # Poor in one is poor in those made of it.
        return every if shared or is_out and known.kind == WORSE else none
    if known.kind != finding.kind:
        return none
    whole = is_out and known.kind == WORSE and known.cause != P_CLIPPED
    return every if whole else shared


def _says_why(known: Finding, finding: Finding) -> bool:
    """Whether what a target raised in a part it has raised on a problem, too."""
    why = finding.says.removeprefix(f"{finding.cause}: ")
    says = numberless(known.says)
    return why != finding.says and says.endswith(f": {numberless(why)}")


def _masks_of_hidden_keys(finding: Finding) -> set[str]:
    """Those under which it was found that hidden keys are seen."""
    names = (x.removeprefix(LARGE_HIDDEN) for x in finding.where)
    masks = {x.partition(":")[0] for x in names}
    return masks if finding.cause == HIDDEN_KEYS else set()


def _is_of_other_weights(known: Finding, cells: Sequence[Judged]) -> bool:
    """Whether LSE is known to be wrong, so that merges are of parts with wrong weights,
    and show neither their results nor LSE's gradient. 16 bits leave weights about what
    they are; whether there is a gradient is also asked without merges."""
    if known.kind not in ("wrong wiring", WORSE) or "lse" not in known.tensors:
        return False
    masks = masks_of([known], {"lse"}, cells)
    return _is_of(cells[0], masks) and known.cause not in ROUNDED_LSE


def masks_of(
    wiring: Sequence[Finding], tensors: set[str], cells: Sequence[Judged]
) -> set[str]:
    """Names of the masks under which one of these results is wired wrongly."""
    places = {place for f in wiring if tensors & set(f.tensors) for place in f.where}
    return {c.problem.mask for c in cells if str(c.problem) in places}


def _is_of(cell: Judged, masks: set[str]) -> bool:
    """Without a mask all is seen: what is wrong there is so under every one."""
    mask = cell.problem.mask
    return not masks.isdisjoint(("full", mask, *made_of(mask)))


def _is_worse(cell: Judged, tensor: str) -> bool:
    allowed = cell.allowed.get(tensor, math.inf)
    units = cell.found[tensor].errors.units
    return units > allowance(cell.problem.format) * allowed


def _worst(cells: Sequence[Judged], tensor: str) -> Judged:
    return max(cells, key=lambda cell: cell.found[tensor].errors.units)


def _evidence(cell: Judged, tensor: str) -> dict[str, float | str]:
    m = cell.found[tensor]
    return {
        "units": m.errors.units,
        "allowed": cell.allowed.get(tensor, math.nan),
        "bias": m.bias,
        "directionality": m.errors.directionality,
    }


def _problems(cells: Iterable[Judged]) -> list[Problem]:
    return [cell.problem for cell in cells]


def _worse(
    bad, here, compared: str, tensor: str, fit: Fit | None, suspect: str
) -> Finding:
    """`compared`: the mask under which recipes were compared."""
    worst = max(
        bad, key=lambda c: c.found[tensor].errors.units / max(c.allowed[tensor], 1e-300)
    )
    units, allowed = worst.found[tensor].errors.units, worst.allowed[tensor]
    whose = "ordinary algorithms have"
    if fit and fit.fits and (worst.alone or tensor == "lse"):
        whose = f"{fit.candidate} has"
    place = ""
    if tensor == "lse":
        # Recipes are not compared by it.
        suspect = ""
        if allowed <= worst.found[tensor].honest:
            whose = "logits and sums in FP32 leave at most"
    elif fit and fit.fits:
        # Its steps are the target's, and what they come to is less.
        suspect, place = "", shared_alone(_problems(bad), _problems(here), compared)
    return Finding(
        WORSE,
        suspect or place,
        f"{SYMBOLS[tensor]} is {units:.3g} units from exact on {worst.problem}, where "
        f"{whose} {allowed:.3g}; so on {len(bad)} of {len(here)} problems: this is no "
        "rounding of a known algorithm"
        + (
            f"; the nearest to it is that of {fit.candidate}" if fit and suspect else ""
        ),
        (tensor,),
        tuple(str(cell.problem) for cell in sorted(bad, key=lambda c: c is not worst)),
        _evidence(worst, tensor),
    )


def _poor(poor, here, tensor: str, fit: Fit | None, costs) -> Finding:
    worst = _worst(poor, tensor)
    units = worst.found[tensor].errors.units
    cause, because = "", ""
    priced = [x for problem, x in costs if problem == worst.problem]
    candidates = [
        cost
        for of_problem in priced
        for cost in of_problem
        if cost.tensor == tensor
        if cost.share >= REAL_SHARE and not _is_without(units, cost)
    ]
    if candidates:
        dearest = max(candidates, key=lambda cost: cost.share)
        cause = dearest.step
        because = (
            f"; {100 * min(dearest.share, 1):.0f} % of it is {dearest.step}, without "
            f"which {dearest.without:.3g} are left"
        )
    elif not (fit and fit.fits):
        because = "; which step that is cannot be said, since no recipe fits"
    elif priced:
        because = f"; no step of {fit.candidate} explains it by itself"
        if worst.problem.format == FP32:
            # Where inputs have as many bits as sums no step has fewer.
            because += ": it is that of the sums themselves, in FP32"
    allowed = worst.allowed[tensor]
    algorithm = f"where ordinary algorithms have {allowed:.3g}"
    if fit and fit.fits and worst.alone:
        algorithm = f"where {fit.candidate} predicts {allowed:.3g}"
    if float(f"{units:.3g}") > float(f"{allowed:.3g}"):
        most = allowance(worst.problem.format)
        algorithm += f", of which up to {most:g} times are allowed"
    return Finding(
        POOR,
        cause,
        f"{SYMBOLS[tensor]} is {units:.3g} units from exact on {worst.problem}, "
        f"{algorithm}{because}; above {POOR_UNITS} on {len(poor)} of {len(here)} "
        "problems",
        (tensor,),
        tuple(str(cell.problem) for cell in poor),
        _evidence(worst, tensor),
    )


def _is_without(units: float, cost: Cost) -> bool:
    """Whether a target is nearer to the recipe without a step than with it, and so has
    nothing to gain there."""
    if not 0 < cost.without < cost.units or units <= 0:
        return False
    return units * units < cost.units * cost.without


def is_broken(cell: Judged, tensor: str) -> bool:
    """Whether values are not finite that should be, or the reverse."""
    return tensor in cell.found and cell.found[tensor].not_finite > 0


def _not_finite(cells: Sequence[Judged]) -> list[Finding]:
    """One for all results that are so on the same problems, and for the same reason."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for tensor in TENSORS:
        bad = [i for i, cell in enumerate(cells) if is_broken(cell, tensor)]
        unseen = all(_is_unseen(cells[i], tensor) for i in bad)
        if bad:
            alike.setdefault((SEES_NO_KEY * unseen, (*bad,)), []).append(tensor)
    findings = []
    for (cause, places), tensors in alike.items():
        bad = [cells[i] for i in places]
        instead = [cell.found[tensor].instead for cell in bad for tensor in tensors]
        # In words, since NaN is not equal to NaN.
        values = {"" if x is None else f": {x:.3g} in all of them" for x in instead}
        first = [bad[0].found[tensor].not_finite for tensor in tensors]
        says = (
            f"{', '.join(SYMBOLS[tensor] for tensor in tensors)}: not finite where the "
            "exact result is, or finite where that is infinite, in "
            f"{', '.join(map(str, first))} values on {bad[0].problem}, and on "
            f"{len(bad)} of {len(cells)} problems"
        ) + (values.pop() if len(values) == 1 else "")
        where, counts = tuple(str(cell.problem) for cell in bad), zip(tensors, first)
        evidence = {f"values, {tensor}": float(count) for tensor, count in counts}
        finding = Finding("not finite", cause, says, tuple(tensors), where, evidence)
        findings.append(finding)
    return findings


def _is_unseen(cell: Judged, tensor: str) -> bool:
    """Whether values are not finite because of rows that see no key: none is elsewhere.
    Sums over queries are only if a result by rows is, too, since under some masks all
    their values have such a query."""
    if (m := cell.found[tensor]).not_finite > m.unseen:
        return False
    rows = (cell.found[x] for x in ("out", "lse", "dquery") if x in cell.found)
    is_sum = tensor not in ("out", "lse", "dquery")
    return not is_sum or any(0 < x.not_finite == x.unseen for x in rows)


def _refusals(cells: Sequence[Judged]) -> list[Finding]:
    """What raised and what was not taken, once for each reason."""
    found = []
    by_reason: dict[tuple[str, str], list[tuple[str, Judged]]] = {}
    for cell in cells:
        said = []
        if cell.outcome.status != "measured":
            said.append((cell.outcome.status, cell.outcome.reason))
        if cell.outcome.no_gradients:
            said.append(("no gradients", cell.outcome.no_gradients))
        for status, reason in said:
            key = status, numberless(reason)
            by_reason.setdefault(key, []).append((reason, cell))
    ran = any(cell.outcome.status == "measured" for cell in cells)
    for (status, _), raised in by_reason.items():
        reason, those = raised[0][0], [cell for _, cell in raised]
        harmless = ran and status in ("not taken", "out of memory")
        cause = {"no gradients": "not differentiable"}.get(status, status)
        number = f"on {len(those)} of {len(cells)} problems"
        hint = ""
        if status == "failed" and reason.startswith("ValueError"):
            # Authors cannot know; one line is enough.
            told = any(REFUSE in finding.says for finding in found)
            hint = "" if told else f" ({REFUSE})"
        found.append(
            Finding(
                "not taken" if harmless else "fails",
                cause,
                f"{cause} {number}, such as {those[0].problem}{hint}: {reason}",
                (),
                tuple(str(cell.problem) for cell in those),
            )
        )
    return found


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One for each cause, the first of them with all places and results."""
    by_cause: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        by_cause.setdefault((finding.kind, finding.cause), []).append(finding)
    return [
        dataclasses.replace(
            same[0],
            tensors=tuple(dict.fromkeys(t for f in same for t in f.tensors)),
            where=tuple(dict.fromkeys(place for f in same for place in f.where)),
        )
        for same in by_cause.values()
    ]
