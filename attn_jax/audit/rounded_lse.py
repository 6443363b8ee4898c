"""LSE that is right but for a rounding to 16 bits: its own, or that of the query."""

import math

import numpy as np

from attn_jax.audit.error import correctly_rounded, in_units, rms
from attn_jax.audit.exact import exact
from attn_jax.audit.finding import ROUNDED_LSE, ROUNDED_QUERY, Finding
from attn_jax.audit.judge import POOR
from attn_jax.audit.problem import Problem, Results
from attn_jax.formats import BF16, FP16, FP32

_FORMATS = dict(zip(ROUNDED_LSE, (BF16, FP16), strict=True))
# By what a query is multiplied, of which logits are made in one unit or the other.
_FACTORS = {"Q scale": 1.0, "Q scale log2(e)": math.log2(math.e)}
# What FP32's arithmetic leaves, of the size of LSE.
_EXACT = 2.0**6 * FP32.unit_roundoff
# How many times nearer a rounded query's LSE has to be than the right one.
_MARKEDLY = 4


def recognise(x: Results, problem: Problem) -> list[Finding]:
    """LSE is given as numbers of a 16-bit format, as near as these come to it."""
    found = _seen(x, problem)
    if found is None:
        return []
    lse, right = found
    off, size = abs(lse - right), rms(right)
    for cause, fmt in _FORMATS.items():
        # Numbers that are exact in either format, as FP32's arithmetic leaves them.
        if rms(off) <= _EXACT * size:
            continue
        nearest = fmt.unit_roundoff * (1 + 2.0**-6) * abs(right) + fmt.min_positive
        if (correctly_rounded(lse, fmt) == lse).all() and (off <= nearest).all():
            error = in_units(rms(off), size)
            says = (
                f"LSE is rounded to {fmt.name.upper()}, {error:.1e} of its size: "
                "return it in FP32, as it was computed"
            )
            evidence = {"matches": 0.0, "right": error}
            where = (str(problem),)
            return [Finding("wrong wiring", cause, says, ("lse",), where, evidence)]
    return []


def of_a_rounded_query(x: Results, problem: Problem) -> list[Finding]:
    """LSE is that of the scaled query as the inputs' format has it, which is what its
    algorithm allows: of kernels that let one number scale queries once."""
    found = _seen(x, problem)
    if found is None or problem.format == FP32:
        return []
    lse, right = found
    off, size = rms(lse - right), rms(right)
    if off <= _EXACT * size:
        return []
    attention = exact(problem)
    for what, unit in _FACTORS.items():
        factor = attention.scale * unit
        rounded = correctly_rounded(attention.query * factor, problem.format)
        if factor == 0 or not np.isfinite(rounded).all():
            continue
        given = _seen(x, problem, attention.replaced(query=rounded / factor).lse)
        if given and _MARKEDLY * (matches := rms(given[0] - given[1])) <= off:
            name = problem.format.name.upper()
            says = (
                f"LSE is that of {what} rounded to {name} before its product, which "
                f"makes it {in_units(off, size):.1e} of its size off, and "
                f"{in_units(matches, size):.1e} are left without: scale the logits, in "
                "FP32"
            )
            evidence = {
                "matches": in_units(matches, size),
                "right": in_units(off, size),
            }
            where = (str(problem),)
            return [Finding(POOR, ROUNDED_QUERY, says, ("lse",), where, evidence)]
    return []


def _seen(x: Results, problem: Problem, of: np.ndarray | None = None):
    """(LSE as given, the right one or `of`) where both are finite; None if there is
    nothing to compare."""
    right = problem.exact().lse if of is None else of
    if "lse" not in x or x["lse"].shape != right.shape:
        return None
    seen = np.isfinite(right) & np.isfinite(x["lse"])
    return (x["lse"][seen], right[seen]) if seen.any() else None
