"""Bounds of the forward pass of a ring of devices, whose partial results are merged.

One device's queries meet the keys of every device, its own first. A merge weighs two
outputs by exp(LSE_h - LSE), whose relative error is that of the exponent. Where a whole
maximum is carried on, a part is multiplied by E(m - n), with that function's error, and
two sums by powers of two, exactly but for those below the normal range, which may be 0.
"""

import numpy as np

from attn_jax.bounds.arithmetic import Arithmetic, Ball, exact, plus, times, where
from attn_jax.bounds.forward import (
    Forward,
    Head,
    State,
    accumulator_unit,
    add_keys,
    completed,
    finish,
    log_unit,
    start,
)


def shares(length: int, ring_size: int) -> list[slice]:
    """The positions that each device has."""
    size = length // ring_size
    return [slice(i * size, (i + 1) * size) for i in range(ring_size)]


def forward(arithmetic: Arithmetic, head: Head, columns: np.ndarray) -> Forward:
    """O, LSE, and the result for more `columns` [S, ...] beside those of V."""
    W = arithmetic.recipe.ring_size
    keys = shares(len(head.key), W)
    wide, lse = [], []
    for rank, rows in enumerate(shares(len(head.query), W)):
        met = [
            (
                _share(head, rows, keys[(rank - hop) % W]),
                columns[keys[(rank - hop) % W]],
            )
            for hop in range(W)
        ]
        if arithmetic.recipe.ring_merge in ("carry", "carry_whole"):
            out = _carried_on(arithmetic, met)
        else:
            out = _merged(arithmetic, met)
        wide.append(out[0])
        lse.append(out[1])
    whole = (joined(wide), joined(lse))
    return completed(arithmetic, *whole, head.value.shape[-1])


def joined(parts: list[Ball]) -> Ball:
    return Ball(*(np.concatenate(field) for field in zip(*map(tuple, parts))))


def _share(head: Head, rows: slice, keys: slice) -> Head:
    error = head.query_error
    return head._replace(
        query=head.query[rows],
        key=head.key[keys],
        value=head.value[keys],
        bias=None if head.bias is None else head.bias[rows, keys],
        visible=head.visible[rows, keys],
        query_error=None if error is None else error[rows],
    )


def _carried_on(arithmetic: Arithmetic, met) -> tuple[Ball, Ball]:
    head, columns = met[0]
    state = start(arithmetic, head, head.value.shape[-1] + columns.shape[-1])
    nothing = state
    for head, columns in met:
        if arithmetic.recipe.ring_merge == "carry_whole":
            own = add_keys(arithmetic, head, columns, nothing)
            state = _joined(arithmetic, state, _with_whole_max(arithmetic, own))
        else:
            state = add_keys(arithmetic, head, columns, state)
        unit = accumulator_unit(arithmetic.recipe, state)
        total = arithmetic.step("ring_accumulator", state.accumulator, unit)
        state = state._replace(accumulator=total)
    return finish(arithmetic, state)


def _with_whole_max(arithmetic: Arithmetic, state: State) -> State:
    """E(m - n) and a product with it; m - n is exact, and moves m by 1/2 at most."""
    half = 0.5 * np.isfinite(state.maximum)
    state = state._replace(low=state.low - half, high=state.high + half)
    unit = accumulator_unit(arithmetic.recipe, state)
    sums = (
        arithmetic.carried(arithmetic.function(x, unit), 1, unit)
        for x in (state.row_sum, state.accumulator)
    )
    return State(*state[:3], *sums)


def _joined(arithmetic: Arithmetic, a: State, b: State) -> State:
    maximum = np.maximum(a.maximum, b.maximum)
    reference = np.where(np.isfinite(maximum), maximum, 0.0)
    low, high = (
        np.where(
            np.isfinite(maximum),
            np.maximum(a.maximum + of_a, b.maximum + of_b) - reference,
            0.0,
        )
        for of_a, of_b in ((a.low, b.low), (a.high, b.high))
    )
    state = State(maximum, low, high, *a[3:])
    unit = accumulator_unit(arithmetic.recipe, state)
    base = 1 / log_unit(arithmetic.recipe)

    def power(part: State) -> Ball:
        share = exact(np.exp(base * (part.maximum - reference)))
        # The computed one is that times E of how much further off the part's m is than
        # the new one, and 0 below the normal range.
        lost = arithmetic.recipe.carrier.min_normal * np.exp(base * (high - part.low))
        off = np.where(share.value < lost, share.value, 0.0)
        return share._replace(worst=off, fixed=off)

    (l, total), (more, addend) = (  # noqa: E741
        [times(x, power(part)) for x in part[3:]] for part in (a, b)
    )
    # Products with powers of two are rounded below the normal range.
    sums = (
        arithmetic.carried(plus(x, y), 3, unit) for x, y in ((l, more), (total, addend))
    )
    return State(maximum, low, high, *sums)


def _merged(arithmetic: Arithmetic, met) -> tuple[Ball, Ball]:
    parts = []
    for head, columns in met:
        state = start(arithmetic, head, head.value.shape[-1] + columns.shape[-1])
        out, lse = finish(arithmetic, add_keys(arithmetic, head, columns, state))
        parts.append((arithmetic.step("ring_partial", out), lse))
    lses = [parts[0][1]]
    for _, part_lse in parts[1:]:
        lses.append(_log_sum(arithmetic, lses[-1], part_lse))
    out = exact(np.zeros(parts[0][0].value.shape))
    if arithmetic.recipe.ring_merge == "two_pass":
        for part, part_lse in parts:
            out = _weighed(arithmetic, out, None, part, part_lse, lses[-1])
        return out, lses[-1]
    out = arithmetic.step("ring_accumulator", parts[0][0])
    for (part, part_lse), old, new in zip(parts[1:], lses, lses[1:]):
        out = _weighed(arithmetic, out, old, part, part_lse, new)
    return out, lses[-1]


def _log_sum(arithmetic: Arithmetic, a: Ball, b: Ball) -> Ball:
    """log(exp a + exp b): a mean of the two errors, and never above the larger."""
    seen, met = np.isfinite(a.value), np.isfinite(b.value)
    value = np.logaddexp(a.value, b.value)
    reference = np.where(np.isfinite(value), value, 0.0)
    u, v = np.exp(a.value - reference), np.exp(b.value - reference)
    worst = np.maximum(a.worst, b.worst)
    mean = u * a.worst + v * b.worst
    merged = Ball(
        reference,
        worst,
        u * a.fixed + v * b.fixed + np.maximum(worst - mean, 0.0),
        np.hypot(u * a.spread, v * b.spread),
    )
    size = 1 + _finite(a).size + _finite(b).size
    merged = arithmetic.carried(merged, 16, extra=size)
    merged = arithmetic.step("lse", merged)
    return where(seen & met, merged, where(seen, a, b))


def _weighed(
    arithmetic: Arithmetic,
    out: Ball,
    old: Ball | None,
    part: Ball,
    lse: Ball,
    new: Ball,
) -> Ball:
    """exp(old - new) out + exp(lse - new) part; out itself where old is None.

    The exponents differ from exact ones by the errors of old, lse and new, which may
    share roundings, and by the carrier's: relative errors of both weights.
    """
    met = np.isfinite(lse.value)
    total = np.where(np.isfinite(new.value), new.value, 0.0)
    v = np.exp(lse.value - total)
    if old is None:
        seen, u = np.ones(met.shape, bool), np.ones(met.shape)
        exponent = plus(_finite(lse), _finite(new), shared=True)
    else:
        seen, u = np.isfinite(old.value), np.exp(old.value - total)
        exponent = plus(_finite(lse), _finite(old), shared=True)
        exponent = plus(exponent, exponent, shared=True)
    exponent = exponent._replace(value=np.zeros(met.shape))
    size = np.abs(np.where(met, lse.value, 0.0)) + np.abs(total) + 1
    exponent = arithmetic.carried(exponent, 32, extra=size)
    weight = v * part.size
    growth = _growth(lse.value - total, exponent.worst) * part.size
    if old is not None:
        weight = weight + u * out.size
        growth = growth + _growth(old.value - total, exponent.worst) * out.size
    second = growth - (weight - v * part.worst) * exponent.worst
    merged = Ball(
        u * out.value + v * part.value,
        u * out.worst + v * part.worst + growth,
        u * out.fixed + v * part.fixed + weight * exponent.fixed + second,
        np.hypot(u * out.spread, v * part.spread) + weight * exponent.spread,
    )
    merged = arithmetic.carried(merged, 8, extra=out.size + part.size)
    merged = where(seen, merged, part)
    merged = arithmetic.step("ring_accumulator", merged)
    return where(met, merged, out)


def _growth(x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """exp(x + error) - exp(x), or as much as the former where the latter underflows."""
    normal = np.exp(x) >= np.finfo(np.float64).tiny
    return np.where(normal, np.exp(x) * np.expm1(error), np.exp(x + error))


def _finite(x: Ball) -> Ball:
    return where(np.isfinite(x.value), x, exact(np.zeros(x.value.shape)))
