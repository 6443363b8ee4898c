"""Whether LSE has its gradient: with dLSE, dS = P (dP - delta + dLSE).

What dLSE adds to dQ and dK is scale P dLSE times K and Q, and nothing to dV, since P
V does not depend on it. A share of 1 of what it adds is right.
"""

from collections.abc import Mapping

import numpy as np

from attn_jax.audit.finding import Finding
from attn_jax.audit.problem import SYMBOLS

# The results to which dLSE adds something.
THROUGH_LSE = "dquery", "dkey"
# An LSE gradient off by a tenth is none that rounding could have made.
_SHARE = 0.1


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
    cause = "LSE gets no gradient" if lost else "LSE gradient wrong"
    says = " and ".join(f"{SYMBOLS[n]} has {x:.2f} times" for n, x in wrong.items())
    says = f"{when} {says} the gradient through LSE"
    if lost:
        lack = "lack" if len(wrong) > 1 else "lacks"
        says = f"{when} {named} {lack} the gradient through LSE"
    if right:
        cause = f"LSE gradient wrong: {named}"
        says += f", and {' and '.join(SYMBOLS[n] for n in right)} has it"
    says += ": differentiate LSE, dS = P (dP - delta + dLSE)"
    # What cannot be told is made of the same dS.
    tensors = tuple(name for name in THROUGH_LSE if name not in right)
    evidence: dict[str, float | str] = {
        f"lse_gradient, {name}": x for name, x in shares.items()
    }
    return [Finding("wrong wiring", cause, says, tensors, where, evidence)]
