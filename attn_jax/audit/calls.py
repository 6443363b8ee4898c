"""The same attention called with less: without LSE, as models train, or a scale.

Everything else asks for LSE where that can be had and gives the scale, and a function
may be another one where it is not asked. What such a call gives is judged as any other
result, and of what the usual call has, too, nothing is said again. Equal bits have the
same error, so that nothing is said of them.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attn_jax.audit import verdict
from attn_jax.audit.finding import Finding
from attn_jax.audit.judge import POOR, WORSE
from attn_jax.audit.measure import Outcome, Runner, measured
from attn_jax.audit.plan import Group
from attn_jax.audit.problem import Problem
from attn_jax.audit.rows import Found, finding_of, measured_of, rows_of
from attn_jax.audit.target import Target
from attn_jax.audit.verdict import Judged
from attn_jax.audit.wiring import recognise
from attn_jax.store import Row

DEFAULT_SCALE = "default scale wrong"
# Under these.
_MASKS = "full", "causal"
_REQUIRED = inspect.Parameter.empty


def called(groups: Sequence[Group]) -> list[Group]:
    """Those of the first shape without a mask and under a causal one; the first if
    there are none."""
    of_shape = [x for x in groups if x.shape == groups[0].shape]
    return [x for x in of_shape if x.mask in _MASKS] or of_shape[:1]


def without_lse(target: Target) -> Target | None:
    """The target, not asked for its LSE; None where nobody asks for that."""
    adapter = target.adapter
    if adapter.lse in (None, "always") or not target.has_lse:
        return None
    more = dict(adapter.more)
    if _default(target, adapter.lse, False):
        # Whatever it gives by default, this is how not to ask.
        more[adapter.lse] = False
    return _called(target, lse=None, more=more)


def without_scale(target: Target) -> Target | None:
    """The target, not told the scale, in the shortest call that it takes; None where it
    has to be told, or says by its default that the scale is a number of its own."""
    name = target.adapter.renamed.get("scale", "scale")
    by_name = target.adapter.scale == "keyword" and target.takes(name)
    if not by_name or _default(target, name, None) is not None:
        return None
    return _called(without_lse(target) or target, scale="none")


def _called(target: Target, **changes: Any) -> Target:
    adapter = dataclasses.replace(target.adapter, **changes)
    # `resolve` would make the adapter anew.
    return dataclasses.replace(target, adapter=adapter, resolved=False)


def _default(target: Target, name: str, unknown: Any) -> Any:
    """The default of an argument, `_REQUIRED` if it has none; `unknown` where the
    signature does not say."""
    try:
        parameters = inspect.signature(target.function).parameters
    except (TypeError, ValueError):  # Some builtins have none.
        return unknown
    return parameters[name].default if name in parameters else unknown


def measure(
    target: Target, problems: Sequence[Problem], *, gradients: bool
) -> Iterator[Row]:
    """One row for each call and problem; without a scale the first one's out alone."""
    adapter = target.adapter
    scale = f"without {adapter.renamed.get('scale', 'scale')}"
    others = (
        (f"without {adapter.lse}", without_lse(target), problems, gradients, ""),
        (scale, without_scale(target), problems[:1], False, DEFAULT_SCALE),
    )
    for call, other, of_call, differentiated, cause in others:
        for problem in of_call if other else ():
            assert other is not None
            run = Runner(
                other.on(problem), gradients=differentiated, shards=adapter.shards
            )
            outcome = run(problem)
            results = {n: x for n, x in outcome.results.items() if n != "lse"}
            wiring = recognise(results, problem) if results else []
            if outcome.status == "failed" and target.arguments is None:
                # It may want the argument, which its signature does not say.
                outcome = outcome._replace(status="not taken")
            yield {
                "call": call,
                "cause": cause,
                "problem": str(problem),
                "outcome": outcome._replace(results={})._asdict(),
                "found": rows_of(measured(problem, results)),
                "wiring": [dataclasses.asdict(finding) for finding in wiring],
                "findings": [],
            }


def found_on(
    rows: Sequence[Row], problems: Sequence[Problem]
) -> Iterator[tuple[Problem, Found]]:
    """What other calls gave, by their `measure`, with the problem of each."""
    by_name = {str(problem): problem for problem in problems}
    for row in (row for row in rows if "call" in row):
        yield by_name[row["problem"]], measured_of(row["found"])


def findings(
    rows: Sequence[Row],
    cells: Mapping[str, Judged],
    usual: Sequence[Finding],
    allowed: Callable[[Problem, Found], Mapping[str, float]],
) -> list[Finding]:
    """What is wrong with other calls, by their `measure`, and not with the usual one on
    the same problem. `cells`: of that, by problem; `usual`: what of its wiring was
    recognised; `allowed`: what algorithms come to, by result, where something is far
    off: the call may be of another one than the usual."""
    found = []
    of_calls = [row for row in rows if "call" in row]
    for call in dict.fromkeys(row["call"] for row in of_calls):
        pairs = [
            (row, cells[row["problem"]]) for row in of_calls if row["call"] == call
        ]
        # Of a problem that the usual call does not take nothing can be said.
        pairs = [(row, x) for row, x in pairs if x.outcome.status == "measured"]
        refused = [row for row, _ in pairs if row["outcome"]["status"] in _HARMLESS]
        found += [
            Finding("not taken", f"{call} not run", f"{call} not run: {reason}")
            for reason in dict.fromkeys(row["outcome"]["reason"] for row in refused)
        ]
        pairs = [(row, x) for row, x in pairs if row not in refused]
        places = {str(x.problem) for _, x in pairs}
        wiring = [f for f in usual if places & set(f.where)]
        known = verdict.judge([x for _, x in pairs], None, (), wiring)
        others = [_judged(row, x.problem, allowed) for row, x in pairs]
        wiring = [finding_of(x) for row, _ in pairs for x in row["wiring"]]
        judged = verdict.judge(others, None, (), wiring)
        new = [f for f in judged if not any(_says(x, f) for x in known)]
        found += [_of_call(f, call, pairs[0][0]["cause"]) for f in new]
    return found


_HARMLESS = "not taken", "out of memory"


def _judged(
    row: Row,
    problem: Problem,
    allowed: Callable[[Problem, Found], Mapping[str, float]],
) -> Judged:
    found = measured_of(row["found"])
    return Judged(
        problem, Outcome(**row["outcome"]), found, dict(allowed(problem, found))
    )


def _says(known: Finding, finding: Finding) -> bool:
    """Whether what is known of the usual call is what was found of another. A result
    that is known to be worse is poor, too, wherever luck makes it a little better."""
    kinds = {known.kind} | ({POOR} if known.kind == WORSE else set())
    if finding.kind not in kinds or not set(finding.tensors) <= set(known.tensors):
        return False
    return finding.kind != "wrong wiring" or finding.cause == known.cause


def _of_call(finding: Finding, call: str, cause: str) -> Finding:
    """With the call in it, and the `cause` that another result of it alone has."""
    says = f"{call}, {finding.says}"
    if cause and finding.kind in ("wrong wiring", WORSE):
        says = f"{call}, {finding.cause or finding.kind}: {finding.says}"
    else:
        cause = "" if finding.kind == "fails" else finding.cause
    where = tuple(f"{place}, {call}" for place in finding.where)
    return dataclasses.replace(finding, cause=cause or call, says=says, where=where)
