"""The power of two that scales a key head's dS, as an interval, for bounds of dQ."""

import math

import numpy as np

from attn_jax.bounds.arithmetic import ONE, Arithmetic, Unit
from attn_jax.bounds.forward import Forward, Head
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT, Recipe


def on_dlogits(recipe: Recipe, scale: float) -> float:
    """f of the recipe's definition."""
    at_logits = recipe.gradient_scale_at == "logits"
    return recipe.dlogits_scale * (scale if at_logits else 1.0)


def head_scale(
    arithmetic: Arithmetic,
    heads: list[Head],
    forwards: list[Forward],
    douts: list[np.ndarray],
    dlses: list[np.ndarray | None],
) -> Unit:
    """The interval of 1 / r, for all query heads of one key head; 0 at its lower end
    says that sums on the way to r may leave the carrier, and nothing is known of it.

    r follows from norms, and is the power of two for any number near the exact one.
    """
    step, carrier = arithmetic.recipe.dq_dlogits, arithmetic.recipe.carrier
    if step is None or not arithmetic.recipe.scales_heads:
        return ONE
    factor = abs(on_dlogits(arithmetic.recipe, heads[0].scale))
    least = most = reached = 0.0
    for head, fwd, dout, dlse in zip(heads, forwards, douts, dlses):
        given = np.zeros((len(dout), 1))
        if dlse is not None:
            given = np.where(np.isfinite(fwd.lse.value), np.abs(dlse), 0.0)
        squares = (dout**2).sum(-1, keepdims=True), (head.value**2).max(0).sum()
        # Squares and products below the normal range may be lost, together or not.
        lost = dout.shape[-1] * carrier.min_normal
        low, high = (
            2 * math.prod(np.sqrt(np.maximum(s - less, 0.0)) for s in squares)
            for less in (lost, 0.0)
        )
        # Kernels have another bound of the norm of dO there (`kernels.lanes`).
        width = dout.shape[-1]
        coarse = np.abs(dout).max(-1, keepdims=True) * math.sqrt(width * squares[1])
        high = np.where(squares[0] <= width * 2.0**-99, 2 * coarse, high)
        low, least_given = (
            np.where(x > 2 * carrier.min_normal, x, 0.0) for x in (low, given)
        )
        largest = high + given
        low, high = factor * (low + least_given), factor * largest
        # np.max, not max: it hands on what is no number.
        least, most = np.max([least, low.max()]), np.max([most, high.max()])
        on_the_way = (np.max(x) for x in (*squares, largest, high))
        reached = np.max([reached, *on_the_way])
    u = 2 * (douts[0].shape[-1] + 8) * arithmetic.roundoff
    least, most = (1 - u) * least, (1 + u) * most
    if not reached * (1 + u) <= carrier.max_finite:
        return Unit(0.0, 1.0)
    if most == 0:
        return ONE
    low, high = (
        np.clip(
            np.frexp(b)[1] - step.format.max_exponent,
            -MOST_HEAD_EXPONENT,
            MOST_HEAD_EXPONENT,
        )
        for b in (least, most)
    )
    if least <= 2 * carrier.min_normal:
        # A bound that is lost is 0, and r is 1 then.
        low, high = -MOST_HEAD_EXPONENT, np.maximum(high, 0)
    return Unit(np.ldexp(1.0, low), np.ldexp(1.0, high))
