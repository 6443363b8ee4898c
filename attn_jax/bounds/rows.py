"""Bounds of P, dS and delta as the backward pass makes them, for one query head."""

from typing import NamedTuple

import numpy as np

from attn_jax.bounds.arithmetic import (
    ONE,
    Arithmetic,
    Ball,
    Unit,
    exact,
    exponential,
    plus,
    quotient,
    scaled,
    times,
    where,
)
from attn_jax.bounds.forward import (
    Forward,
    Head,
    blocks,
    log_unit,
    logits,
    softmax_block,
    start,
)
from attn_jax.bounds.head_scale import on_dlogits
from attn_jax.bounds.ring import shares
from attn_jax.bounds.two_parts import high_and_low, with_low_byte
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT


class Shared(NamedTuple):
    """Errors that every key of a row shares, [T, 1]: worst, fixed and spread."""

    worst: np.ndarray
    fixed: np.ndarray
    spread: np.ndarray

    def of(self, coefficient: np.ndarray) -> Ball:
        """The error as a term of each entry, about zero."""
        size = np.abs(coefficient)
        return Ball(np.zeros(size.shape), *(size * e for e in self))


class Rows(NamedTuple):
    """One query head: values with their own errors, and what rows share."""

    probability: Ball  # as operand of P^T dO
    dlogits: Ball  # dS as operand of dK, scaled by the recipe's factor
    dq_dlogits: Ball  # dS as operand of dQ
    dq_unit: Unit  # what one computed unit of that is worth
    raw: Ball  # dS before all that
    relative: Shared
    delta: Shared
    exact_probability: np.ndarray
    delta_weight: np.ndarray  # what delta's error counts in dS: P, times a cap's slope
    factor: float
    row_sum: Ball  # what dS should add up to, [T, 1], and how far off it is taken to be
    dsink: Ball | None  # terms of the sink's gradient, [T, 1]


def with_shared(rows: Rows, own: Ball, dlogits: np.ndarray, factor: float) -> Ball:
    total = plus(own, rows.relative.of(dlogits), shared=True)
    by_delta = rows.delta.of(rows.delta_weight * factor)
    return plus(total, by_delta, shared=True)


def rows_of(
    arithmetic: Arithmetic,
    head: Head,
    fwd: Forward,
    dout: np.ndarray,
    dlse: np.ndarray | None,
    dq_unit: Unit,
) -> Rows:
    """`dlse` [T, 1] is the cotangent of LSE: dS = P (dP - delta + dLSE).

    `dq_unit` holds the interval of 1 / r, by which the recipe scales the key head.
    """
    recipe = arithmetic.recipe
    p, slope, relative = _probability(arithmetic, head, fwd, dq_unit)
    shared = relative.worst * p.value
    as_factor = arithmetic.step("softmax_probability", p, ONE, shared)
    as_operand = arithmetic.step("backward_probability", p, ONE, shared)
    dp = arithmetic.dot(exact(dout), exact(head.value.T), "dprobability")
    dp = arithmetic.step("dprobability", dp)
    # P = 0 hides a key's dP, but times infinity it is NaN.
    hidden = exact(np.zeros(p.value.shape))
    dp = where(head.visible | ~np.isfinite(dp.worst), dp, hidden)
    if recipe.delta_source == "p_dp":
        delta = _delta_from_probabilities(arithmetic, as_factor, dp, relative)
    else:
        delta = _delta_from_output(arithmetic, fwd, dout)
    delta = arithmetic.step("delta", delta)
    given = np.zeros(delta.value.shape) if dlse is None else dlse
    if head.sink is None:
        # The LSE of a query that sees nothing is a constant.
        given = np.where(head.visible.any(-1, keepdims=True), given, 0.0)
    if given.any():
        delta = arithmetic.carried(plus(delta, exact(-given)))
    row_sum, dsink = _sink_rows(arithmetic, head, fwd, delta, given)
    d = Shared(delta.worst, delta.fixed, delta.spread)

    difference = dp._replace(value=dp.value - delta.value)
    difference = arithmetic.carried(difference, 1, extra=d.worst)
    size = np.abs(difference.value)
    total_p = as_factor.worst + shared
    second = (
        total_p * (difference.worst + d.worst)
        + (np.exp(relative.worst) - 1 - relative.worst) * p.value * size
    )
    raw = Ball(
        p.value * difference.value,
        p.value * difference.worst + size * as_factor.worst + second,
        p.value * difference.fixed + size * as_factor.fixed + second,
        np.hypot(p.value * difference.spread, size * as_factor.spread),
    )
    common = np.abs(raw.value) * relative.worst + p.value * d.worst
    raw = arithmetic.carried(raw, 1, extra=common)
    delta_weight = p.value
    if slope is not None:
        more = common * slope.worst
        raw = times(raw, slope, shared=True)
        raw = raw._replace(worst=raw.worst + more, fixed=raw.fixed + more)
        delta_weight, common = p.value * slope.value, common * slope.value
        raw = arithmetic.carried(raw, 1, extra=common)
    factor = on_dlogits(recipe, head.scale)
    wide = arithmetic.carried(scaled(raw, factor), 2, extra=abs(factor) * common)
    spread = np.abs(raw.value) * relative.spread + delta_weight * d.spread
    shared = abs(factor) * common, abs(factor) * spread
    ds = dq_ds = arithmetic.step("dlogits", wide, ONE, *shared)
    if recipe.dq_dlogits is not None:
        if recipe.scales_heads:
            wide = arithmetic.carried(wide, 1, dq_unit, shared[0])
        dq_ds = arithmetic.step("dq_dlogits", wide, dq_unit, *shared)
    counts = head.visible | ~np.isfinite(difference.worst)
    raw, ds, dq_ds = (where(counts, x, hidden) for x in (raw, ds, dq_ds))
    row_sum = arithmetic.carried(scaled(row_sum, factor), 2)
    return Rows(
        *(as_operand, ds, dq_ds, dq_unit, raw, relative, d),
        *(p.value, delta_weight, factor, row_sum, dsink),
    )


def _sink_rows(
    arithmetic: Arithmetic, head: Head, fwd: Forward, excess: Ball, dlse: np.ndarray
) -> tuple[Ball, Ball | None]:
    """sum_j dS_ij = dLSE_i + P_z (delta - dLSE), and -P_z (delta - dLSE), the sink's.

    `excess` is delta - dLSE, and P_z = exp(z - LSE).
    """
    if head.sink is None:
        return exact(dlse), None
    # In units of log2 three products are rounded on the way.
    argument = plus(exact(np.full(dlse.shape, head.sink)), scaled(fwd.lse, -1.0))
    size = abs(head.sink) + fwd.lse.size
    argument = arithmetic.carried(argument, 4, extra=size)
    p = arithmetic.function(exponential(argument, 1.0))
    share = arithmetic.carried(times(p, excess, shared=True))
    if not dlse.any():
        return share, scaled(share, -1.0)
    row_sum = arithmetic.carried(plus(exact(dlse), share))
    return row_sum, scaled(share, -1.0)


def _probability(arithmetic: Arithmetic, head: Head, fwd: Forward, dq_unit: Unit):
    """P [T, S] with its entries' own errors, a cap's slope, what errors rows share.

    Kernels multiply P by r in the exponent, whose roundings are larger by its size.
    """
    unit = log_unit(arithmetic.recipe)
    y, slope = logits(arithmetic, head)
    if arithmetic.recipe.probability_from == "softmax":
        p, relative = _softmax(arithmetic, head, y)
        return p, slope, relative
    seen = head.visible.any(-1, keepdims=True)
    lse = where(seen, fwd.lse, exact(np.zeros(seen.shape)))
    ends = [np.log(np.maximum(x, 2.0**-MOST_HEAD_EXPONENT)) for x in dq_unit]
    lift = unit * float(np.max(np.abs(ends)))
    lse = arithmetic.carried(scaled(lse, unit), 2, extra=lift)
    if unit != 1:
        lse = arithmetic.step("lse", lse)
    extra = lse.worst
    argument = y._replace(value=np.where(head.visible, y.value - lse.value, 0.0))
    argument = arithmetic.carried(argument, 1, extra=extra + lift)
    argument = arithmetic.step("shifted", argument, ONE, extra)
    relative = Shared(*(e / unit for e in tuple(lse)[1:]))
    # The error of LSE is in the argument's for the terms of second order alone.
    p = exponential(argument._replace(worst=argument.worst + extra), 1 / unit)
    common = p.value * relative.worst
    p = arithmetic.exp(_less(p, common), extra=common)
    return where(head.visible, p, exact(np.zeros(p.value.shape))), slope, relative


def _softmax(arithmetic: Arithmetic, head: Head, y: Ball):
    """exp(y - m) / l: what rows share is the error of l."""
    state = start(arithmetic, head, 0)
    new = softmax_block(arithmetic, state, y, head.visible)
    p, total = new.probability, new.row_sum
    total = arithmetic.divisor(total, new.unit)
    divisor = np.where(total.value > 0, total.value, 1.0)
    relative = Shared(*(e / divisor for e in tuple(total)[1:]))
    result = quotient(p, total)
    common = result.value * relative.worst
    own = _less(result, common)._replace(
        fixed=np.maximum(result.fixed - result.value * relative.fixed, 0.0),
        spread=p.spread / divisor,
    )
    return arithmetic.carried(own, 1, extra=common), relative


def _less(p: Ball, common) -> Ball:
    return p._replace(worst=np.maximum(p.worst - common, 0.0))


def _delta_from_output(arithmetic: Arithmetic, fwd: Forward, dout: np.ndarray) -> Ball:
    """rowsum(dO O), [T, 1]; O's errors before its last rounding may be common ones."""
    recipe, wide = arithmetic.recipe, fwd.wide
    out = wide
    if recipe.delta_source == "o":
        out = fwd.out
    elif recipe.delta_source == "o_hi_lo":
        out = high_and_low(arithmetic, "output", wide)
    elif recipe.delta_source == "o_hi_lo8":
        out = with_low_byte(arithmetic, "output", wide)
    size = np.abs(dout)
    rounding = np.sqrt(np.maximum(out.spread**2 - wide.spread**2, 0.0))
    spread = np.hypot(
        (size * wide.spread).sum(-1, keepdims=True),
        np.sqrt(((size * rounding) ** 2).sum(-1, keepdims=True)),
    )
    terms = dout * out.value
    delta = Ball(
        terms.sum(-1, keepdims=True),
        (size * out.worst).sum(-1, keepdims=True),
        (size * out.fixed).sum(-1, keepdims=True),
        spread,
    )
    absolute = (size * out.size).sum(-1, keepdims=True)
    squares = (terms**2).sum(-1, keepdims=True)
    return arithmetic.summed_row(delta, absolute, squares, dout.shape[-1], "delta")


def _delta_from_probabilities(
    arithmetic: Arithmetic, p: Ball, dp: Ball, relative: Shared
) -> Ball:
    """rowsum(P dP), [T, 1]."""
    common = p.value * relative.worst
    full = p.worst + common
    size = np.abs(dp.value)
    growth = np.exp(relative.worst) - 1 - relative.worst
    second = full * dp.worst + growth * p.value * size
    # The rows' common error is among the terms' worst ones; its random part is not
    # independent from key to key and is added at the end.
    terms = Ball(
        p.value * dp.value,
        p.value * dp.worst + size * (p.worst + common) + second,
        p.value * dp.fixed + size * p.fixed + second,
        np.hypot(p.value * dp.spread, size * p.spread),
    )
    terms = arithmetic.carried(terms)
    total = exact(np.zeros((len(size), 1)))
    recipe = arithmetic.recipe
    for device in shares(size.shape[-1], recipe.ring_size):
        met = terms[:, device]
        for block in blocks(met.value.shape[-1], recipe.backward_block_kv):
            part = arithmetic.row_sum(met[:, block], "delta")
            total = arithmetic.carried(plus(total, part))
    more = relative.of(total.value)._replace(worst=np.zeros(total.value.shape))
    return plus(total, more, shared=True)
