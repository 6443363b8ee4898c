"""Each device gathers all keys and values, a few heads at a time.

The forward pass is one call for each run of positions over all keys in their order, so
that it rounds as one device alone would and merges nothing (striped shards, whose
positions are no neighbours, meet the gathered shards one by one and merge). What a mask
hides the kernels skip, by their lists of blocks; the emulator computes and hides it.

In the backward pass each device has what its queries bring to all dK and dV, in FP32
(a `wire` may have 16 bits); they are added up and dealt out by one reduce-scatter.
(Llama 3, arXiv 2407.21783, section 3.3.2, gathers keys likewise.)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from attn_jax.context_parallel.blocks import WholeRows
from attn_jax.context_parallel.layouts import from_layout, to_layout
from attn_jax.context_parallel.local import (
    Local,
    Static,
    gradients,
    keys_in,
    rows_of,
    sent,
)
from attn_jax.context_parallel.meeting import (
    Arriving,
    Made,
    Shard,
    add_backward,
    add_forward,
    no_dbias,
    with_pairs,
)
from attn_jax.context_parallel.merge import over_parts
from attn_jax.context_parallel.messages import packed, unpacked
from attn_jax.context_parallel.schedule import Schedule, gathered, schedule
from attn_jax.emulator.partial import Partial
from attn_jax.span import Ended
from attn_jax.varying import varying_alike


def forward(static: Static, x: Local) -> Ended:
    """O, not yet rounded by `output`, and LSE of this device's queries."""
    groups = [_forward(static, part) for part in _by_heads(static, x)]
    _, outs, lses = zip(*groups, strict=True)
    return Ended(None, jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1))


def backward(
    static: Static, x: Local, lse: Array, for_delta, keys, dout: Array, dlse: Array
) -> tuple[Array | None, ...]:
    """dQ, dK, dV and dbias of this device's arrays, rounded once."""
    rows, dlse = rows_of(static.block, dout, dlse, lse, for_delta, x.query, keys)
    stride, groups = _query_stride(static, x), _by_heads(static, x)
    parts = []
    for number, part in enumerate(groups):
        heads = slice(number * stride, (number + 1) * stride)
        own = rows.of(
            lambda x, heads=heads: x[:, :, heads] if x.ndim > 3 else x[:, heads]
        )
        keys, ranges = jax.tree.map(
            lambda x, number=number: jnp.split(x, len(groups), axis=1)[number],
            (rows.keys, rows.ranges),
        )
        own = own._replace(keys=keys, ranges=ranges)
        parts.append(_backward(static, part, own))

    # Heads are axis 2 or 1 of all but what counts keys, which is the same for all; a
    # bias may be one for all heads.
    def joined(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        if name == "key_count" or found[0] is None:
            return found[0]
        if name == "dbias" and x.bias is not None and x.bias.shape[1] == 1:
            return functools.reduce(jnp.add, found)
        return jnp.concatenate(found, axis=1 if name in ("row_sum", "dbias") else 2)

    total = Partial(*map(joined, Partial._fields))
    inputs = x.query, x.key, x.value, x.bias
    return gradients(static.block, total, rows, dlse, inputs)


def _by_heads(static: Static, x: Local) -> list[Local]:
    """`head_stride` key heads and their query heads at a time."""
    heads = x.key.shape[2]
    stride, of_query = static.head_stride or heads, _query_stride(static, x)

    def of_group(n: int) -> Local:
        own = slice(n * of_query, (n + 1) * of_query)
        keys = slice(n * stride, (n + 1) * stride)
        bias = x.bias
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, own]
        return x._replace(
            query=x.query[:, :, own],
            key=x.key[:, :, keys],
            value=x.value[:, :, keys],
            bias=bias,
        )

    return [of_group(n) for n in range(heads // stride)]


def _query_stride(static: Static, x: Local) -> int:
    heads = x.key.shape[2]
    return (static.head_stride or heads) * (x.query.shape[2] // heads)


def _forward(static: Static, x: Local) -> Ended:
    rank, meetings = lax.axis_index(static.axis), _Meetings(static, x)

    def visit(add, so_far):
        made = Made()
        for number, source in enumerate(meetings.sources(rank)):
            shard, first = meetings.shard(source), number == 0
            so_far = add_forward(
                *(meetings.schedule, add, so_far, shard, rank, source),
                first=first,
                made=made,
            )
        return so_far

    return over_parts(visit, static.block, x.query, x.value, x)


def _backward(static: Static, x: Local, rows: WholeRows) -> Partial:
    rank, meetings = lax.axis_index(static.axis), _Meetings(static, x)
    block = static.block
    nothing = block.nothing(x.query, x.key, x.value), no_dbias(block, x.bias)
    (total, dbias), _ = varying_alike(nothing, x)
    found, made = [], Made()
    for source in meetings.sources(rank):
        total, *part, of_bias = add_backward(
            *(block, meetings.schedule, total, meetings.shard(source), rows),
            *(rank, source),
            made=made,
        )
        found.append(packed(*part))
        dbias = with_pairs(dbias, of_bias, 0, source * x.key.shape[1])
    sums = sent(static, meetings.in_layout(found, rank))
    scattered = lax.psum_scatter(
        sums, static.axis, scatter_dimension=1, tiled=True
    ).astype(total.dquery.dtype)
    dkey, dvalue = unpacked(scattered, x.key.shape[-1])
    if meetings.in_order:
        dbias = keys_in(to_layout, dbias, static.shards, static.layout)
    return total._replace(dkey=dkey, dvalue=dvalue, dbias=dbias)


class _Meetings:
    """The gathered keys as one source, in their order, or shard by shard."""

    def __init__(self, static: Static, x: Local):
        self.static, self.x = static, x
        shards = static.shards
        self.lengths = [y.shape[1] * shards for y in (x.query, x.key)]
        arguments = static.layout, shards, *self.lengths, static.rules.band
        alone = gathered(*arguments)
        self.in_order = alone is not None
        self.schedule: Schedule = schedule(*arguments) if alone is None else alone
        both = lax.all_gather(packed(x.key, x.value), static.axis, axis=1, tiled=True)
        self.ids = x.key_ids
        if self.in_order:
            both = from_layout(both, shards, static.layout)
            bias = keys_in(from_layout, x.bias, shards, static.layout)
            self.x = x._replace(bias=bias)
            if self.ids is not None:
                ids = self.ids.swapaxes(0, 1).reshape(len(x.query), -1)
                self.ids = from_layout(ids, shards, static.layout)
        self.both = both

    def sources(self, rank) -> list:
        """Shards to meet, in the order of a ring's hops."""
        if self.in_order:
            return [0]
        return [(rank - hop) % self.static.shards for hop in range(self.static.shards)]

    def shard(self, source) -> Shard | Arriving:
        x, both = self.x, self.both
        if self.in_order:
            key, value = unpacked(both, x.key.shape[-1])
            return Shard(x.query, key, value, x.query_ids, self.ids, x.bias)
        local = x.key.shape[1]
        both = lax.dynamic_slice_in_dim(both, source * local, local, axis=1)
        return x.meets(both, source)

    def in_layout(self, found: list[Array], rank) -> Array:
        """What all shards' keys gain, shard after shard, from what each source does."""
        if self.in_order:
            return to_layout(found[0], self.static.shards, self.static.layout)
        # That of shard c is number rank - c.
        stacked = jnp.stack(found, axis=1)
        shards = self.static.shards
        numbers = (rank - jnp.arange(shards, dtype=jnp.int32)) % shards
        stacked = jnp.take(stacked, numbers, axis=1)
        return stacked.reshape(len(stacked), -1, *stacked.shape[3:])
