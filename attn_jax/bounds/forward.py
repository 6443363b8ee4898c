"""Bounds of the forward pass of a recipe: one head, exact values in FP64.

The running maximum cancels from O and LSE, so its error is none of theirs. With M_t the
exact maximum of the keys seen after block t and m_t the computed one, every computed
number of a block, p = s exp(y - m_t), l and A, is judged as the exact one times
exp(M_t - m_t) s, for which an interval is known: m_t - M_t is at most the error of the
logits and the rounding of m, and at least minus that and the rescale threshold.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from attn_jax.bounds.arithmetic import (
    ONE,
    Arithmetic,
    Ball,
    Unit,
    exact,
    exponential,
    logarithm,
    plus,
    scaled,
    times,
    where,
)
from attn_jax.recipe_schema import Recipe

# Largest absolute error of tanh in the carrier, in units of its unit roundoff; also
# that of 1 - 2 / (1 + exp(2 x)), of whose roundings at most so many count at any x.
TANH_ROUNDOFFS = 12
# Products of 16-bit numbers that one tensor core instruction adds (k16).
_TENSOR_CORE_DEPTH = 16


class Head(NamedTuple):
    """Exact inputs of one query head: [T, H], [S, H], [S, H], [T, S] or None each.

    With a scaled_query, `query` is scale Q and `query_error` bounds the error of Q',
    `scale` is 1 and `query_scale` what Q was scaled by.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    visible: np.ndarray
    scale: float
    soft_cap: float | None = None
    sink: float | None = None  # finite
    query_error: np.ndarray | None = None
    query_scale: float = 1.0

    @property
    def operand(self) -> Ball:
        """Q as products have it."""
        if self.query_error is None:
            return exact(self.query)
        # One rounding stands in all logits of a row: no independent errors.
        nothing = np.zeros(self.query.shape)
        return Ball(self.query, self.query_error, self.query_error, nothing)


class Forward(NamedTuple):
    """O [T, H] before its last rounding and after, LSE [T, 1] in natural logarithms.

    `columns` is what `wide` is, for the columns given beside V.
    """

    wide: Ball
    out: Ball
    lse: Ball
    columns: Ball


class State(NamedTuple):
    """After some blocks; row_sum and accumulator in units of exp(M - m) s."""

    maximum: np.ndarray  # M [T, 1], -inf where no key was seen
    low: np.ndarray  # m lies in M + [low, high]
    high: np.ndarray
    row_sum: Ball
    accumulator: Ball


def log_unit(recipe: Recipe) -> float:
    """Factor from natural logarithms to those of the recipe's exponential."""
    return 1.0 if recipe.exponential == "exp" else 1 / math.log(2)


def logits(arithmetic: Arithmetic, head: Head) -> tuple[Ball, Ball | None]:
    """y [T, S] in units of the exponential; keys that a row does not see hold 0.

    Also the soft cap's slope, None without one.
    """
    recipe, unit = arithmetic.recipe, log_unit(arithmetic.recipe)
    slope = None
    y = arithmetic.dot(head.operand, exact(head.key.T), "logits")
    y = arithmetic.step("logits", y)
    plain = head.bias is None and head.soft_cap is None
    if plain and recipe.scale_at == "exponent":
        y = arithmetic.carried(scaled(y, head.scale * unit), 2)
    else:
        y = arithmetic.carried(scaled(y, head.scale), 2)
        y = arithmetic.step("logits", y)
        if head.bias is not None:
            y = arithmetic.carried(plus(y, exact(head.bias)), 2)
            y = arithmetic.step("logits", y)
        if head.soft_cap is not None:
            y, slope = _capped(arithmetic, y, head.soft_cap)
            y = arithmetic.step("logits", y)
        if unit != 1.0:
            y = arithmetic.step("logits", arithmetic.carried(scaled(y, unit), 2))
    return where(head.visible, y, exact(np.zeros(y.value.shape))), slope


def _capped(arithmetic: Arithmetic, y: Ball, cap: float) -> tuple[Ball, Ball]:
    """cap tanh(y / cap) and its derivative, 1 - tanh^2.

    |tanh(x + e) - tanh x| <= |e| tanh' x + max |tanh''| e^2 / 2, and <= |e|.
    """
    x = arithmetic.carried(scaled(y, 1 / cap), 2)
    tanh = np.tanh(x.value)
    slope = 1 - tanh * tanh
    first = slope * x.worst
    worst = np.minimum(x.worst, first + 2 / 27**0.5 * x.worst**2)
    own = TANH_ROUNDOFFS * arithmetic.roundoff
    t = Ball(
        tanh,
        worst + own,
        slope * x.fixed + np.maximum(worst - first, 0.0) + own,
        slope * x.spread,
    )
    # The square is where the same errors meet twice.
    derivative = plus(exact(np.ones(tanh.shape)), scaled(times(t, t, shared=True), -1))
    rounding = 2 * arithmetic.roundoff
    derivative = derivative._replace(
        value=slope,
        worst=derivative.worst + rounding,
        fixed=derivative.fixed + rounding,
    )
    return arithmetic.carried(scaled(t, cap), 2), derivative


def forward(arithmetic: Arithmetic, head: Head, columns: np.ndarray) -> Forward:
    """O, LSE, and the result for more `columns` [S, ...] beside those of V."""
    state = start(arithmetic, head, head.value.shape[-1] + columns.shape[-1])
    wide, lse = finish(arithmetic, add_keys(arithmetic, head, columns, state))
    if arithmetic.kind == "order":
        lse = lse._replace(spread=np.hypot(lse.spread, _truncated(arithmetic, head)))
    return completed(arithmetic, wide, lse, head.value.shape[-1])


def _truncated(arithmetic: Arithmetic, head: Head) -> np.ndarray:
    """sum_j P_ij d_ij [T, 1]: how far tensor cores that truncate move LSE.

    They cut off a partial sum of q_i k_j after every 16 products, each time less than
    2 u of it, and toward zero: the errors d of one row's logits have one sign where
    the logits have. O does not feel a common shift, LSE moves by all of it.
    """
    n = head.query.shape[-1]
    cuts = math.ceil(n / _TENSOR_CORE_DEPTH)
    y = head.query @ head.key.T
    squares = head.query**2 @ (head.key**2).T
    # The partial sums' mean square over all orders, as in `carrier_sum`.
    partial = np.sqrt((n + 1) / n * (squares / 6 + y**2 / 3))
    d = cuts * 2 * arithmetic.roundoff * partial * head.scale
    x = y * head.scale + (0.0 if head.bias is None else head.bias)
    x = np.where(head.visible, x, -np.inf)
    top = x.max(-1, keepdims=True)
    weights = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    return (weights * d).sum(-1, keepdims=True) / np.where(total > 0, total, 1.0)


def completed(arithmetic: Arithmetic, wide: Ball, lse: Ball, D: int) -> Forward:
    out = arithmetic.step("output", wide[:, :D])
    return Forward(wide[:, :D], out, lse, wide[:, D:])


def add_keys(
    arithmetic: Arithmetic, head: Head, columns: np.ndarray, state: State
) -> State:
    recipe = arithmetic.recipe
    values = np.concatenate([head.value, columns], -1)
    y, _ = logits(arithmetic, head)
    backwards = recipe.kv_order == "reverse"
    for block in blocks(len(head.key), recipe.block_kv, reverse=backwards):
        visible = head.visible[:, block]
        state = _block(arithmetic, state, y[:, block], visible, values[block])
    return state


def finish(arithmetic: Arithmetic, state: State) -> tuple[Ball, Ball]:
    """O with the further columns before its last rounding, and LSE [T, 1]."""
    wide = state.accumulator
    if arithmetic.recipe.normalise == "once":
        unit = accumulator_unit(arithmetic.recipe, state)
        wide = arithmetic.divided(wide, state.row_sum, unit)
    return wide, _lse(arithmetic, state)


def blocks(
    length: int, block: int | None, *, reverse: bool = False, first: int = 0
) -> list[slice]:
    """Positions first, ..., first + length - 1 in blocks, the last one shorter."""
    end = first + length
    size = block or length
    steps = [slice(i, min(i + size, end)) for i in range(first, end, size)]
    return steps[::-1] if reverse else steps


def _lse(arithmetic: Arithmetic, state: State) -> Ball:
    """log l + m: the gauge drops out, its size counts where numbers are rounded."""
    base = 1 / log_unit(arithmetic.recipe)
    seen = np.isfinite(state.maximum)
    l = where(seen, state.row_sum, exact(np.ones(seen.shape)))  # noqa: E741
    off = base * np.maximum(np.abs(state.low), np.abs(state.high))
    shift = exact(np.where(seen, base * state.maximum, 0.0))
    shift = arithmetic.carried(shift, 2, extra=off)
    log = logarithm(arithmetic.carried(l))
    # The error of log is relative to its value, which the gauge moves by `off`.
    log = arithmetic.carried(arithmetic.function(log), 4, extra=off)
    lse = arithmetic.step("lse", arithmetic.carried(plus(shift, log)))
    nothing = exact(np.full(seen.shape, -np.inf))
    return where(seen, lse, nothing)


def start(arithmetic: Arithmetic, head: Head, columns: int) -> State:
    """Before any key. A sink is as a first key: m its logit z as rounded, l = 1.

    l stands for exp(z - m), which the rounding of z moves from 1. (A kernel that adds
    it last rounds it no more often.)
    """
    T = len(head.query)
    zero = np.zeros((T, 1))
    nothing = exact(np.zeros((T, columns)))
    if head.sink is None:
        return State(np.full((T, 1), -np.inf), zero, zero, exact(zero), nothing)
    recipe = arithmetic.recipe
    sink = exact(np.full((T, 1), head.sink * log_unit(recipe)))
    sink = arithmetic.step("row_max", arithmetic.carried(sink, 2))
    off = np.expm1(sink.worst / log_unit(recipe))
    total = exact(np.ones((T, 1)))._replace(worst=off, fixed=off)
    total = arithmetic.step("row_sum", arithmetic.function(total))
    return State(sink.value, -sink.worst, sink.worst, total, nothing)


class Softmax(NamedTuple):
    """One block's p, the new m and l; `corrected` multiplies a sum by exp(m - m')."""

    probability: Ball
    row_sum: Ball
    maximum: np.ndarray
    low: np.ndarray
    high: np.ndarray
    unit: Unit
    corrected: Callable[..., Ball]


def softmax_block(arithmetic: Arithmetic, state: State, y: Ball, visible) -> Softmax:
    """p = s exp(y - m) and l of one block of logits, in units of exp(M - m) s."""
    recipe = arithmetic.recipe
    base = 1 / log_unit(recipe)
    maximum, low, high, stays = _row_maximum(arithmetic, state, y, visible)
    reference = np.where(np.isfinite(maximum), maximum, 0.0)
    off = np.maximum(np.abs(low), np.abs(high))
    unit = _unit(base, low, high)

    argument = y._replace(value=np.where(visible, y.value - reference, 0.0))
    # Kernels multiply P by its scale in the exponent, which is that much larger then.
    lifted = off + math.log(recipe.probability_scale) / base
    argument = arithmetic.carried(argument, extra=lifted)
    argument = arithmetic.step("shifted", argument, extra=off)
    p = arithmetic.exp(exponential(argument, base), unit)
    p = arithmetic.step("exponentiated", p, unit)
    p = where(visible, p, exact(np.zeros(visible.shape)))
    unit = unit.times(1 / recipe.probability_scale)
    if recipe.probability_scale != 1.0:
        p = arithmetic.carried(p, 2, unit)
    summand = p
    if recipe.row_sum_of == "rounded":
        summand = arithmetic.step("probability", p, unit)
    block_sum = arithmetic.row_sum(summand, "row_sum", unit)
    block_sum = arithmetic.step("row_sum", block_sum, unit)

    jump = np.where(np.isfinite(state.maximum), state.maximum - reference, -np.inf)
    factor = _correction(arithmetic, jump, base, state, low, high)

    def corrected(name: str, total: Ball, *, rounded_already: bool = True) -> Ball:
        """Where m stays the factor is 1, and a product with it is exact."""
        still = scaled(total, np.exp(base * jump))
        if not rounded_already:
            still = arithmetic.step(name, still, unit)
        moved = arithmetic.carried(times(factor, total), 1, unit)
        return where(stays, still, arithmetic.step(name, moved, unit))

    row_sum = plus(corrected("row_sum", state.row_sum), block_sum)
    row_sum = arithmetic.step("row_sum", arithmetic.carried(row_sum, 1, unit), unit)
    return Softmax(p, row_sum, maximum, low, high, unit, corrected)


def _block(
    arithmetic: Arithmetic, state: State, y: Ball, visible, values: np.ndarray
) -> State:
    recipe = arithmetic.recipe
    new = softmax_block(arithmetic, state, y, visible)
    p, unit = new.probability, new.unit
    if recipe.normalise == "before_product":
        p, unit = arithmetic.divided(p, new.row_sum, unit), ONE
    operand = arithmetic.step("probability", p, unit)
    product = arithmetic.dot(operand, exact(values), "product", unit)
    total = product = arithmetic.step("product", product, unit)

    def add(total: Ball) -> Ball:
        total = arithmetic.carried(plus(total, product), 1, unit)
        return arithmetic.step("accumulator", total, unit)

    if recipe.normalise == "once":
        total = add(new.corrected("accumulator", state.accumulator))
    elif recipe.normalise == "each_step":
        same = recipe.accumulator == recipe.row_sum
        old = new.corrected("accumulator", state.row_sum, rounded_already=same)
        old = times(old, state.accumulator, shared=True)
        old = arithmetic.step("accumulator", arithmetic.carried(old, 1, unit), unit)
        total = arithmetic.divided(add(old), new.row_sum, unit)
        total = arithmetic.step("accumulator", total)
    after = State(new.maximum, new.low, new.high, new.row_sum, total)
    has_keys = visible.any(-1, keepdims=True)
    if recipe.normalise == "each_step" or has_keys.all():
        return after
    # A block of hidden keys adds zeros to numbers already rounded: nothing changes.
    return State(
        np.where(has_keys, after.maximum, state.maximum),
        np.where(has_keys, after.low, state.low),
        np.where(has_keys, after.high, state.high),
        where(has_keys, after.row_sum, state.row_sum),
        where(has_keys, after.accumulator, state.accumulator),
    )


def _unit(base: float, low, high) -> Unit:
    # Beyond exp(700) nothing finite is left to say.
    low, high = (np.exp(np.clip(base * x, -700.0, 700.0)) for x in (low, high))
    return Unit(low, high)


def accumulator_unit(recipe: Recipe, state: State) -> Unit:
    """What one computed unit of the state's accumulator is worth in the ball."""
    if recipe.normalise != "once":
        return ONE
    unit = _unit(1 / log_unit(recipe), state.low, state.high)
    return unit.times(1 / recipe.probability_scale)


def _row_maximum(arithmetic: Arithmetic, state: State, y: Ball, visible):
    """The new M, the interval of m about it, and where m surely does not move."""
    recipe = arithmetic.recipe
    top, lower, upper = (
        np.where(visible, x, -np.inf).max(-1, keepdims=True)
        for x in (y.value, y.value - y.worst, y.value + y.worst)
    )
    if recipe.repeated_max_factor is not None:
        factor = recipe.repeated_max_factor
        upper = np.where(upper > 0, np.maximum(upper, factor * upper), 0.0)
        lower = np.where(lower > 0, np.minimum(lower, factor * lower), lower)
    size = np.maximum(np.abs(lower), np.abs(upper))
    error = arithmetic.step("row_max", exact(np.where(np.isfinite(size), size, 0.0)))
    lower, upper = lower - error.worst, upper + error.worst
    threshold = recipe.rescale_threshold * math.log(2) * log_unit(recipe)
    slack = 4 * arithmetic.roundoff * (threshold + np.where(size < np.inf, size, 0.0))
    if threshold == 0:
        slack = 0.0
    old_low, old_high = state.maximum + state.low, state.maximum + state.high
    stays = upper <= old_low + threshold - slack
    new_low, new_high = np.maximum(old_low, lower), np.maximum(old_high, upper)
    if threshold > 0:
        new_low = np.where(lower <= old_high + threshold + slack, old_low, new_low)
    new_low = np.where(stays, old_low, new_low)
    new_high = np.where(stays, old_high, new_high)
    maximum = np.maximum(state.maximum, top)
    reference = np.where(np.isfinite(maximum), maximum, 0.0)
    low, high = (
        np.where(np.isfinite(maximum), m - reference, 0.0) for m in (new_low, new_high)
    )
    return maximum, low, high, stays


def _correction(arithmetic: Arithmetic, jump, base: float, state: State, low, high):
    """exp(m_old - m) as a ball about exp(M_old - M), 0 before the first key."""
    seen = np.isfinite(jump)
    extra = np.maximum(np.abs(low), np.abs(high))
    extra = extra + np.maximum(np.abs(state.low), np.abs(state.high))
    argument = exact(np.where(seen, jump, 0.0))
    argument = arithmetic.carried(argument, extra=extra)
    argument = arithmetic.step("correction", argument, extra=extra)
    unit = _unit(base, low - state.high, high - state.low)
    factor = arithmetic.function(exponential(argument, base), unit)
    factor = arithmetic.step("correction", factor, unit)
    return where(seen, factor, exact(np.zeros(seen.shape)))
