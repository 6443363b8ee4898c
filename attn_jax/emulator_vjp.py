"""The backward pass of the emulator: explicit, since autodiff knows no roundings."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from attn_jax.emulator_tiles import (
    Operands,
    divide_or_zero,
    dot,
    finite_shift,
    read,
    rounded,
    walk,
    write,
)
from attn_jax.mask import slice_tile


class _Rows(NamedTuple):
    """What the backward pass knows of each query, axes [B, K, G, T, H or 1]."""

    dout: Array
    lse: Array
    excess: Array  # delta - dLSE


class _Sums(NamedTuple):
    """Running sums, each written block by block; `row_sum` is that of rounded dS."""

    dquery: Array
    dkey: Array
    dvalue: Array
    row_sum: Array
    dbias: Array | None


def gradients(x: Operands, lse, for_delta, row_centre, dout, dlse):
    """dQ, dK, dV, dbias and dsinks in the carrier, the first three rounded as told.

    `for_delta` is the output that delta is taken from (None for delta_source 'p_dp'),
    `row_centre` the rows' own centres (None unless dq_centre is 'row').
    """
    recipe, static = x.recipe, x.static
    dout = x.group(x.take_in(dout))
    # The LSE of a query that sees nothing is a constant, whatever its cotangent.
    dlse = dlse.astype(static.carrier).reshape(lse.shape)
    dlse = jnp.where(jnp.isneginf(lse), 0.0, dlse)
    rows = _Rows(dout, lse, jnp.zeros_like(lse))
    if recipe.delta_source == "p_dp":
        delta = _delta_from_probabilities(x, rows)
    else:
        delta = (dout * for_delta).sum(-1, keepdims=True)
    delta = rounded(delta, recipe.delta)
    rows = rows._replace(excess=delta - dlse)
    sums = _sum_tiles(x, rows)

    sink_probability = 0.0
    dsinks = None
    if x.sinks is not None:
        sink_probability = x.exp(x.sinks - lse * static.log_unit)
        B, K, G, T, _ = x.shape
        dsinks = -(sink_probability * rows.excess).sum((0, 3, 4)).reshape(K * G)
    on_dlogits = recipe.dlogits_scale
    at_end = 1.0
    if recipe.gradient_scale_at == "logits":
        on_dlogits *= static.scale
    else:
        at_end = static.scale
    at_end /= recipe.dlogits_scale
    dquery = sums.dquery
    if static.wants_centre:
        # In exact arithmetic dS, with the sink's share, sums to dLSE over each row.
        expected = (dlse + sink_probability * rows.excess) * on_dlogits
        centre = _mean_centre(x) if row_centre is None else row_centre
        dquery = dquery - (sums.row_sum - expected) * centre
    return (
        x.ungroup(rounded(dquery * at_end, recipe.gradient)),
        rounded(sums.dkey * at_end, recipe.gradient).swapaxes(1, 2),
        rounded(sums.dvalue, recipe.gradient).swapaxes(1, 2),
        sums.dbias,
        dsinks,
    )


def _probability(x: Operands, rows: _Rows, q_start, kv_start, block_q, block_kv):
    """P of one tile before any rounding of its own, and the soft cap's slope."""
    recipe = x.recipe
    logits, slope = x.logits(q_start, kv_start, block_q, block_kv)
    if recipe.probability_from == "lse":
        lse = read(rows.lse, 3, q_start, block_q) * x.static.log_unit
        shifted = rounded(logits - finite_shift(lse), recipe.shifted)
        return x.exp(shifted), slope
    m = logits.max(-1, keepdims=True)
    if x.sinks is not None:
        m = jnp.maximum(m, x.sinks)
    shift = finite_shift(rounded(m, recipe.row_max))
    p = x.exp(rounded(logits - shift, recipe.shifted))
    total = p.sum(-1, keepdims=True)
    if x.sinks is not None:
        total = total + x.exp(x.sinks - shift)
    return divide_or_zero(p, total), slope


def _dprobability(x: Operands, dout, v):
    return rounded(dot("bkgth,bksh->bkgts", dout, v), x.recipe.dprobability)


def _delta_from_probabilities(x: Operands, rows: _Rows):
    """rowsum(P dP), in a pass over the keys of its own."""

    def step(delta, start, size):
        p, _ = _probability(x, rows, 0, start, x.shape[3], size)
        p = rounded(p, x.recipe.softmax_probability)
        dp = _dprobability(x, rows.dout, read(x.value, 2, start, size))
        return delta + (p * dp).sum(-1, keepdims=True)

    zero = jnp.zeros_like(rows.lse)
    return walk(step, zero, x.key_length, x.recipe.backward_block_kv)


def _sum_tiles(x: Operands, rows: _Rows) -> _Sums:
    recipe = x.recipe
    dbias = None if x.bias is None else jnp.zeros_like(x.bias)
    sums = _Sums(
        jnp.zeros_like(x.query),
        jnp.zeros_like(x.key),
        jnp.zeros_like(x.value),
        jnp.zeros_like(rows.lse),
        dbias,
    )
    # Blocks of queries change no dQ, and dK and dV only where each addition rounds;
    # a carrier-wide accumulator takes all queries in one product.
    narrow = {recipe.dk_accumulator.format, recipe.dv_accumulator.format} != {
        recipe.carrier
    }
    block_q = recipe.backward_block_q if narrow else None

    def over_keys(sums, kv_start, block_kv):
        step = functools.partial(_add_tile, x, rows, kv_start, block_kv)
        return walk(step, sums, x.shape[3], block_q)

    return walk(over_keys, sums, x.key_length, recipe.backward_block_kv)


def _add_tile(
    x: Operands, rows: _Rows, kv_start, block_kv, sums: _Sums, q_start, block_q
):
    recipe = x.recipe
    q = read(x.query, 3, q_start, block_q)
    k = read(x.key, 2, kv_start, block_kv)
    v = read(x.value, 2, kv_start, block_kv)
    dout = read(rows.dout, 3, q_start, block_q)
    excess = read(rows.excess, 3, q_start, block_q)
    p, slope = _probability(x, rows, q_start, kv_start, block_q, block_kv)
    dp = _dprobability(x, dout, v)
    ds = rounded(p, recipe.softmax_probability) * (dp - excess)
    if slope is not None:
        ds = ds * slope
    dbias = sums.dbias
    if dbias is not None:
        dbias = _add_bias_tile(dbias, ds, q_start, kv_start)
    factor = recipe.dlogits_scale
    if recipe.gradient_scale_at == "logits":
        factor *= x.static.scale
    ds = rounded(ds * factor, recipe.dlogits)
    p = rounded(p, recipe.backward_probability)

    def accumulate(total, part, axis, start, size, kept):
        new = rounded(read(total, axis, start, size) + part, kept)
        return write(total, new, axis, start)

    at_query, at_key = (3, q_start, block_q), (2, kv_start, block_kv)
    dquery = dot("bkgts,bksh->bkgth", ds, k)
    dkey = dot("bkgts,bkgth->bksh", ds, q)
    dvalue = dot("bkgts,bkgth->bksh", p, dout)
    row_sum = read(sums.row_sum, *at_query) + ds.sum(-1, keepdims=True)
    return _Sums(
        accumulate(sums.dquery, dquery, *at_query, recipe.dq_accumulator),
        accumulate(sums.dkey, dkey, *at_key, recipe.dk_accumulator),
        accumulate(sums.dvalue, dvalue, *at_key, recipe.dv_accumulator),
        write(sums.row_sum, row_sum, 3, q_start),
        dbias,
    )


def _add_bias_tile(dbias, ds, q_start, kv_start):
    B, K, G, block_q, block_kv = ds.shape
    full = ds.reshape(B, K * G, block_q, block_kv)
    axes = [a for a in range(4) if dbias.shape[a] == 1]
    part = full.sum(axes, keepdims=True) if axes else full
    old = slice_tile(dbias, q_start, kv_start, block_q, block_kv)
    rows = read(dbias, 2, q_start, part.shape[2])
    rows = write(rows, old + part, 3, kv_start)
    return write(dbias, rows, 2, q_start)


def _mean_centre(x: Operands):
    """Mean of the keys that a query may see, broadcastable to [B, K, G, T, H]."""
    mask = x.mask
    if mask.is_empty:
        return x.key.mean(2)[:, :, None, None]
    if mask.is_interval:
        return _mean_over_intervals(x)

    def step(state, start, size):
        total, count = state
        visible = mask.block(0, start, x.shape[3], size)
        visible = x.group_heads(visible).astype(x.static.carrier)
        B, K = x.shape[:2]
        visible = jnp.broadcast_to(visible, (B, K, *visible.shape[2:]))
        total += dot("bkgts,bksh->bkgth", visible, read(x.key, 2, start, size))
        return total, count + visible.sum(-1, keepdims=True)

    B, K, G, T, H = x.shape
    heads = 1 if mask.dense is None or mask.dense.shape[1] == 1 else G
    total = jnp.zeros((B, K, heads, T, H), x.static.carrier)
    start = total, total[..., :1]
    total, count = walk(step, start, x.key_length, x.recipe.backward_block_kv)
    return divide_or_zero(total, count)


def _mean_over_intervals(x: Operands):
    """One mean for each block of queries, over the keys that any of them sees."""
    B, K, G, T, H = x.shape
    block = min(x.recipe.backward_block_q or T, T)
    start, stop = x.mask.interval(T, x.key_length)
    seen = start < stop
    pad = ((0, 0), (0, -T % block))
    start = jnp.pad(
        jnp.where(seen, start, x.key_length), pad, constant_values=x.key_length
    )
    stop = jnp.pad(jnp.where(seen, stop, 0), pad)
    start = start.reshape(start.shape[0], -1, block).min(-1)
    stop = stop.reshape(stop.shape[0], -1, block).max(-1)
    start = jnp.minimum(start, stop)
    sums = jnp.pad(x.key.cumsum(2), ((0, 0), (0, 0), (1, 0), (0, 0)))
    index = jnp.stack([start, stop])[:, :, None, :, None]
    low, high = (jnp.take_along_axis(sums, i, 2) for i in index)
    count = (stop - start).astype(x.static.carrier)[:, None, :, None]
    mean = jnp.repeat(divide_or_zero(high - low, count), block, 2)[:, :, :T]
    return mean[:, :, None]
