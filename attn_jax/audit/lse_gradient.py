"""Whether LSE has its gradient: with dLSE, dS = P (dP - delta + dLSE).

What dLSE adds to dQ and dK is scale P dLSE times K and Q, and nothing to dV, since P
V does not depend on it. A share of 1 of what it adds is right.
"""

import functools
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from attn_jax.audit.alone import ALONE
from attn_jax.audit.finding import ROUNDED_LSE, Finding
from attn_jax.audit.problem import GRADIENTS, SYMBOLS, Problem
from attn_jax.audit.raised import contained
from attn_jax.audit.target import Attend
from attn_jax.reference import golden
from attn_jax.xla_options import NO_GRAPHS

# The results to which dLSE adds something.
THROUGH_LSE = "dquery", "dkey"
# An LSE gradient off by a tenth is none that rounding could have made.
_SHARE = 0.1
_WRONG = "LSE gradient wrong"


def share(missed: np.ndarray, added: np.ndarray, off: np.ndarray) -> float | None:
    """How much of `added` a result has that misses the exact one by `missed`: by
    projection, 1 + <missed, added> / <added, added>.

    None unless `added` is as large as four times `off`, the error where dLSE adds
    nothing, or the share is of noise; it also is where a result is not finite.
    """
    size = np.square(added).sum()
    if not size > 16 * np.square(off).sum():
        return None
    found = float(1 + (missed * added).sum() / size)
    return found if np.isfinite(found) else None


def of_shares(
    shares: Mapping[str, float], when: str, where: tuple[str, ...]
) -> list[Finding]:
    """Findings of shares by result, none if they are right. The cause names the result
    where another is right."""
    wrong = {name: x for name, x in shares.items() if not abs(x - 1) <= _SHARE}
    if not wrong:
        return []
    right = [name for name in shares if name not in wrong]
    named = " and ".join(SYMBOLS[name] for name in wrong)
    lost = all(abs(x) <= _SHARE for x in wrong.values())
    cause = "LSE gets no gradient" if lost else _WRONG
    says = " and ".join(f"{SYMBOLS[n]} has {x:.2f} times" for n, x in wrong.items())
    says = f"{when} {says} the gradient through LSE"
    if lost:
        lack = "lack" if len(wrong) > 1 else "lacks"
        says = f"{when} {named} {lack} the gradient through LSE"
    if right:
        cause = f"{_WRONG}: {named}"
        says += f", and {' and '.join(SYMBOLS[n] for n in right)} has it"
    says += ": differentiate LSE, dS = P (dP - delta + dLSE)"
    # What cannot be told is made of the same dS.
    tensors = tuple(name for name in THROUGH_LSE if name not in right)
    evidence: dict[str, float | str] = {
        f"lse_gradient, {name}": x for name, x in shares.items()
    }
    return [Finding("wrong wiring", cause, says, tensors, where, evidence)]


def unexplained(
    findings: Iterable[Finding], wiring: Iterable[Finding]
) -> list[Finding]:
    """But for wrong gradients of a result that is recognised as wired wrongly on the
    same problem: the same is wrong with them. So it is of an LSE that is something
    else, log2(e) times LSE, say, whose gradient is that of what it is. That one is
    missing altogether is not explained so."""
    known = list(wiring)

    def is_known(finding: Finding) -> bool:
        if not finding.cause.startswith(_WRONG):
            return False
        where, tensors = set(finding.where), set(finding.tensors)

        def is_of(wired: Finding) -> bool:
            explains = set(wired.tensors)
            is_lse = "lse" in explains and wired.cause not in ROUNDED_LSE
            if is_lse and wired.is_other_attention:
                explains |= {*THROUGH_LSE}
            return bool(where & set(wired.where) and tensors & explains)

        return any(map(is_of, known))

    return [x for x in findings if not is_known(x)]


def lowered(attend: Attend, problem: Problem) -> jax.stages.Lowered:
    """What `read` runs, traced in this thread."""
    arrays, dout = _arrays(problem), problem.inputs.dout
    with contained():
        return _gradients.lower(attend, arrays, dout, _dlse(problem))


def _arrays(problem: Problem) -> list[np.ndarray]:
    query, key, value, _, *bias = problem.arrays
    return [query, key, value, *bias]


def _dlse(problem: Problem) -> np.ndarray:
    return problem.inputs.dout.astype(np.float32).sum(-1).swapaxes(1, 2)


def read(attend: Attend, problem: Problem) -> list[Finding]:
    """Findings of the gradient through LSE alone, of a call with dO = 0, beside one
    with dLSE = 0; [] without LSE. It raises what the attention raises.

    dLSE is sum_h dO_h, about as large as dP, and 0 in rows that see no key. With dO = 0
    dV = P^T dO is 0 in any format, and nothing is allowed.
    """
    query, key, value, dout = problem.inputs
    arrays = _arrays(problem)
    lowered(attend, problem).compile()
    exact = problem.exact()
    dlse = np.where(np.isneginf(exact.lse), np.float32(0), _dlse(problem))
    nothing = np.zeros_like(dout)
    with ALONE:
        added = golden(
            *(query, key, value, nothing, dlse),
            bias=problem.bias,
            mask=problem.rules,
            scale=problem.scale,
        )
        pair = jax.device_get(
            [
                _gradients(attend, arrays, *cotangents)
                for cotangents in ((dout, np.zeros_like(dlse)), (nothing, dlse))
            ]
        )
    without, through = (
        {name: x.astype(np.float64) for name, x in of.items()} for of in pair
    )
    if not through:
        return []
    off = {name: without[name] - getattr(exact, name) for name in GRADIENTS}
    shares = {}
    for name in THROUGH_LSE:
        of = getattr(added, name)
        found = share(through[name] - of, of, off[name])
        if found is not None:
            shares[name] = found
    where = (str(problem),)
    findings = of_shares(shares, f"under {problem.mask},", where)
    # As of the others: where it is wrong without dLSE, that is said, and not this.
    is_right = np.square(exact.dvalue).sum() > 16 * np.square(off["dvalue"]).sum()
    largest = float(np.abs(through["dvalue"]).max())
    if is_right and largest > 0:
        says = (
            f"under {problem.mask}, dV is up to {largest:.3g} where dO is 0 and dLSE "
            "is not: dV = P^T dO, take dLSE to dS alone"
        )
        cause = f"{_WRONG}: dV"
        findings.append(Finding("wrong wiring", cause, says, ("dvalue",), where))
    return findings


@functools.partial(jax.jit, static_argnums=0, compiler_options=NO_GRAPHS)
def _gradients(attend, arrays, dout, dlse):
    """By name, none of a bias; none without LSE."""
    (out, lse), pullback = jax.vjp(attend, *arrays)
    if lse is None:
        return {}
    found = pullback((dout.astype(out.dtype), dlse.astype(lse.dtype)))
    return dict(zip(GRADIENTS, found[: len(GRADIENTS)], strict=True))
