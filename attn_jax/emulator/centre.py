"""Means of keys, which dQ is corrected by afterwards or its keys are before."""

import copy

import jax.numpy as jnp
from jax import Array

from attn_jax.centre import centre_of
from attn_jax.emulator.sums import dot, read, walk
from attn_jax.emulator.tiles import Operands, divide_or_zero
from attn_jax.formats import NumberFormat, round_to
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT
from attn_jax.varying import varying_alike


def with_centred_keys(
    x: Operands, centre: Array | None = None, key_largest: Array | None = None
) -> tuple[Operands, Array]:
    """The operands with K' as dQ's keys, and c [B, K, 1, 1, H].

    Where others have more keys c [B, K, H] of all is the `centre`, and `key_largest`
    the largest |K| of each column.
    """
    if centre is None:
        centre = centre_of(x.key.swapaxes(1, 2), x.recipe.inputs)
    centre = centre.astype(x.static.carrier)[:, :, None]
    new = copy.copy(x)
    step = x.recipe.dq_dlogits
    if step is None or not x.recipe.scales_heads:
        new.dq_key = x.take_in(x.key - centre)
    else:
        largest = jnp.abs(x.key).max(2) if key_largest is None else key_largest
        exponent = _into_range(largest, step.format)
        w = jnp.ldexp(jnp.ones((), x.static.carrier), exponent)
        new.dq_key = round_to((x.key - centre) * w, step.format) / w
        new.dq_key_least = step.format.min_exponent - exponent[..., None]
        if x.recipe.dq_sum == "integers":
            # What 32 bits cannot hold would end as some number.
            held = jnp.isfinite(x.key).all((2, 3), keepdims=True)
            w = jnp.where(held & (exponent > -MOST_HEAD_EXPONENT), w, jnp.nan)
        new.dq_key_scale = w[:, :, None]
    return new, centre[:, :, None]


def _into_range(largest, fmt: NumberFormat):
    """log2 w [B, K, 1, 1] of the recipe's definition, from columns' largest |K|."""
    largest = largest.max(-1)[..., None, None]
    # Of twice the largest key, which may overflow.
    exponent = fmt.max_exponent - (jnp.frexp(largest)[1] + 1)
    exponent = jnp.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    return jnp.where(largest > 0, exponent, 0)


def mean_centre(x: Operands):
    """Mean of the keys that a query may see, broadcastable to [B, K, G, T, H]."""
    if x.mask.is_empty:
        return x.key.mean(2)[:, :, None, None]
    return divide_or_zero(*seen_keys(x))


def seen_keys(x: Operands) -> tuple[Array, Array]:
    """Sum and number of the keys that `mean_centre` is the mean of.

    Those of parts of the keys add up to those of all. Broadcastable to [B, K, G, T, H].
    """
    mask = x.mask
    if mask.is_empty:
        total = x.key.sum(2)[:, :, None, None]
        return total, jnp.full((1,) * 5, x.key_length, x.static.carrier)
    if mask.is_interval:
        return _seen_in_intervals(x)

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
    start = varying_alike((total, total[..., :1]), x.key)[0]
    return walk(step, start, x.key_length, x.recipe.backward_block_kv)


def _seen_in_intervals(x: Operands):
    """The same for all of a block of queries, of the keys that any of them sees."""
    B, K, G, T, H = x.shape
    # Blocks are cut within shares.
    share = T // x.recipe.ring_size
    block = min(x.recipe.backward_block_q or share, share)
    start, stop = x.mask.interval(T, x.key_length)
    seen = start < stop

    def in_blocks(bound, of_nothing):
        """Rows as [..., blocks of all shares, a block's rows]."""
        bound = jnp.where(seen, bound, of_nothing).reshape(len(bound), -1, share)
        pad = ((0, 0), (0, 0), (0, -share % block))
        bound = jnp.pad(bound, pad, constant_values=of_nothing)
        return bound.reshape(len(bound), -1, block)

    start = in_blocks(start, x.key_length).min(-1)
    stop = in_blocks(stop, 0).max(-1)
    start = jnp.minimum(start, stop)
    sums = jnp.pad(x.key.cumsum(2), ((0, 0), (0, 0), (1, 0), (0, 0)))
    index = jnp.stack([start, stop])[:, :, None, :, None]
    low, high = (jnp.take_along_axis(sums, i, 2) for i in index)
    count = (stop - start).astype(x.static.carrier)[:, None, :, None]

    def of_rows(of_blocks):
        rows = jnp.repeat(of_blocks, block, 2)
        rows = rows.reshape(*rows.shape[:2], T // share, -1, rows.shape[-1])
        rows = rows[..., :share, :]
        return rows.reshape(*rows.shape[:2], 1, T, rows.shape[-1])

    return of_rows(high - low), of_rows(count)
