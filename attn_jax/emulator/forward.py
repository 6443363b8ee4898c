"""The emulator's forward pass over one device's keys, block by block."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from attn_jax.emulator.exponential import clipped, times_power_of_two
from attn_jax.emulator.sums import read, walk
from attn_jax.emulator.tiles import Operands, divide_or_zero, finite_shift
from attn_jax.varying import varying_alike


class State(NamedTuple):
    """m, l [B, K, G, T, 1] and A [B, K, G, T, D or more] after some blocks."""

    row_max: Array
    row_sum: Array
    total: Array


def values_and_keys(x: Operands):
    """V [B, K, S, D], with K appended where the recipe wants the rows' own centres.

    The centre sum_j P_ij K_j is made as the output is.
    """
    if x.recipe.dq_centre == "row" and x.static.wants_centre:
        return jnp.concatenate([x.value, x.key], -1)
    return x.value


def start(x: Operands, columns: int, with_sink=True) -> State:
    """State before any key; a sink is as a first key with value 0."""
    B, K, G, T, _ = x.shape
    m = jnp.full((B, K, G, T, 1), -jnp.inf, x.static.carrier)
    l = jnp.zeros_like(m)  # noqa: E741
    total = jnp.zeros((B, K, G, T, columns), x.static.carrier)
    if x.sinks is not None:
        m = jnp.where(with_sink, x.sinks, m)
        l = jnp.where(with_sink, x.recipe.probability_scale, l)  # noqa: E741
    return varying_alike(State(m, l, total), x.query)[0]


def add_keys(x: Operands, state: State) -> State:
    """The state after all keys of `x`."""
    step = functools.partial(_add_block, x, values_and_keys(x))
    backwards = x.recipe.kv_order == "reverse"
    return walk(step, state, x.key_length, x.recipe.block_kv, backwards)


def finish(x: Operands, state: State):
    """O, not yet rounded by `output`, and LSE."""
    m, l, total = state  # noqa: E741
    scale = x.recipe.probability_scale
    lse = finite_shift(m) / x.static.log_unit + jnp.log(l / scale)
    out = divide_or_zero(total, l) if x.recipe.normalise == "once" else total
    return out, x.round(lse, "lse")


def carried_on(x: Operands, state: State, nothing: State) -> State:
    """The state with these keys, as ring_merge 'carry' or 'carry_whole' adds them;
    `nothing` is that before any key."""
    if x.recipe.ring_merge == "carry":
        return add_keys(x, state)
    return joined(state, with_whole_max(x, add_keys(x, nothing)))


def with_whole_max(x: Operands, state: State) -> State:
    """The same with m rounded to a whole number, the even one of two equally near."""
    m, l, total = state  # noqa: E741
    whole = jnp.round(m)
    undo = x.exp(finite_shift(m) - finite_shift(whole))
    return State(whole, undo * l, undo * total)


def joined(a: State, b: State) -> State:
    """Of the keys of both, whose maxima are whole numbers or -inf.

    A power of two is a number of the carrier, 0 below its normal range.
    """
    m = jnp.maximum(a.row_max, b.row_max)
    shift = finite_shift(m)

    def scaled(part: State):
        power = times_power_of_two(jnp.ones_like(m), clipped(part.row_max - shift))
        return power * part.row_sum, power * part.total

    sums = (x + y for x, y in zip(scaled(a), scaled(b), strict=True))
    return State(m, *sums)


def softmax_block(x: Operands, logits, m, l, *at):  # noqa: E741
    """(m', l', c, P) of one tile of logits, P times `probability_scale`."""
    recipe = x.recipe
    new_m = renewed_max(x, logits, m, *at)
    shift = finite_shift(new_m)
    difference = logits - shift
    if recipe.probability_scale > 1 and not recipe.rescale_threshold:
        # XLA may not round what it subtracts m from, as kernels do not, and a logit of
        # 1e7 may then lie above m: P times its scale would leave the format.
        difference = jnp.minimum(difference, 0.0)
    p = x.exp_of_logits(x.round(difference, "shifted", *at))
    p = x.round(p, "exponentiated", *at) * recipe.probability_scale
    correction = x.exp(x.round(m - shift, "correction", *at, site="difference"))
    correction = x.round(correction, "correction", *at)
    counted = p
    if recipe.row_sum_of == "rounded":
        counted = x.round(p, "probability", *at)
    block_sum = x.row_sum(counted, *at, site="row_sum")
    block_sum = x.round(block_sum, "row_sum", *at, site="block")
    kept = x.round(correction * l, "row_sum", *at, site="corrected")
    return new_m, x.round(kept + block_sum, "row_sum", *at), correction, p


def renewed_max(x: Operands, logits, m, *at):
    recipe = x.recipe
    largest = logits.max(-1, keepdims=True)
    if recipe.repeated_max_factor is not None:
        # Where all keys are hidden, each of them "repeats" -inf: nothing to mend.
        repeats = (logits == largest).sum(-1, keepdims=True) > 1
        raised = jnp.where(largest > 0, largest * recipe.repeated_max_factor, 0.0)
        largest = jnp.where(repeats & ~jnp.isneginf(largest), raised, largest)
    new_m = x.round(jnp.maximum(m, largest), "row_max", *at)
    # At threshold 0 m' stays where it would fall: below a sink, which may lie between
    # two numbers of row_max's format. Another m is one of them and no m' is below it.
    if recipe.rescale_threshold or x.sinks is not None:
        threshold = recipe.rescale_threshold * x.static.log_unit / math.log2(math.e)
        new_m = jnp.where(new_m - m <= threshold, m, new_m)
    return new_m


def _add_block(x: Operands, values, state: State, start, size: int) -> State:
    recipe = x.recipe
    m, l, acc = state  # noqa: E741
    at = 0, start
    logits, _ = x.logits(0, start, x.shape[3], size)
    v = read(values, 2, start, size)
    new_m, new_l, correction, p = softmax_block(x, logits, m, l, *at)
    if recipe.normalise == "before_product":
        p = divide_or_zero(p, new_l)
    site = "normalised" if recipe.normalise == "before_product" else ""
    operand = x.round(p, "probability", *at, site=site)
    product = x.dot("bkgts,bksh->bkgth", operand, v, *at, site="product")
    product = x.round(product, "product", *at)

    def kept(value, site=""):
        return x.round(value, "accumulator", *at, site=site)

    if recipe.normalise == "once":
        new_acc = kept(kept(correction * acc, "corrected") + product)
    elif recipe.normalise == "each_step":
        total = kept(kept(l * correction, "weight") * acc, "weighted")
        total = kept(total + product, "sum")
        new_acc = kept(divide_or_zero(total, new_l))
    else:
        new_acc = product
    return State(new_m, new_l, new_acc)
