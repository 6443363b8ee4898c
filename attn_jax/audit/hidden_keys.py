"""A probe of keys that a mask hides and that are large: no row may tell."""

import dataclasses

import numpy as np

from attn_jax.audit.extremes import AttendOf
from attn_jax.audit.finding import HIDDEN_KEYS, LARGE_HIDDEN
from attn_jax.audit.inputs import Inputs
from attn_jax.audit.judge import ProbeResult
from attn_jax.audit.magnitudes import change
from attn_jax.audit.problem import GRADIENTS, SYMBOLS, Problem
from attn_jax.audit.programs import run
from attn_jax.audit.tiers import noise_of

# Masks of `problem.MASKS` under which it is looked at.
HIDDEN_BY = "causal", "window", "lengths", "packed"
# Logits of hidden keys are some hundreds, where exp in FP32 ends at 88.7; a power of
# two, so that keys are as many numbers of their format.
_LARGER = 128


def hidden_keys(
    attend_of: AttendOf, problem: Problem, *, mask: str, gradients: bool = True
) -> tuple[ProbeResult, ...]:
    """Keys that are hidden times 128 and -128: rows stay, and gradients.

    A row's largest logit taken before the mask is applied is that of a hidden key, and
    exp of all others is nothing, or a hidden logit is above the large negative number
    that is to hide it. Under lengths keys are hidden that lie past them; under other
    masks those that none of the first half of the queries sees, which are the only rows
    looked at and those that have a dO. RMS as in `magnitudes`; () where there is no
    such row or key.
    """
    problem = dataclasses.replace(problem, mask=mask)
    attend, s = attend_of(problem), problem.shape
    rows, inputs = s.query_length, problem.inputs
    if mask != "lengths":
        rows, dout = min(s.query_length, s.key_length) // 2, inputs.dout.copy()
        dout[:, rows:] = 0
        inputs = inputs._replace(dout=dout)
    noise = noise_of(problem, inputs)
    noise = noise._replace(seen=noise.seen & (noise.rows < rows)[:, None])
    seen = problem.rules.materialise(s.query_length, s.key_length, np)
    assert seen is not None  # The masks above hide something.
    seen = np.broadcast_to(seen, (s.batch, 1, s.query_length, s.key_length))
    hidden = ~seen[:, 0, :rows].any(axis=1)
    if not (noise.seen.any() and hidden.any()):
        return ()
    large = _with_large(inputs, hidden)
    first, second = (run(attend, x, gradients=gradients) for x in (inputs, large))
    found = []
    for tensor in ("out", *GRADIENTS) if gradients else ("out",):
        before, after = (x[tensor] for x in (first, second))
        says = (
            f"under {mask}, {SYMBOLS[tensor]} changes by {{measured:.3g}} times what "
            "rounding allows where keys that are hidden are large: apply the mask "
            "before the row's largest logit is taken, with -inf"
        )
        instead = (
            f"under {mask}, {{}} values of {SYMBOLS[tensor]} are not finite where keys "
            "that are hidden are large: apply the mask before exp"
        )
        name = f"{LARGE_HIDDEN}{mask}: {tensor}"
        named = name, tensor, HIDDEN_KEYS, says, instead
        found.append(change(problem, noise, before, after, *named))
    return tuple(found)


def _with_large(inputs: Inputs, hidden: np.ndarray) -> Inputs:
    """`hidden` [B, S], in pairs of opposites: a centre of all keys, or of those that a
    block of queries sees, with which an honest dQ may be computed, is no larger for
    them. One that is left over stays."""
    key = inputs.key.astype(np.float32)
    for of_batch, is_hidden in zip(key, hidden, strict=True):
        (places,) = np.nonzero(is_hidden)
        first, second = places[: len(places) // 2 * 2].reshape(-1, 2).T
        of_batch[first] *= _LARGER
        of_batch[second] = -of_batch[first]
    return inputs._replace(key=key.astype(inputs.key.dtype))
