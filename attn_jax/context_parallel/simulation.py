"""Context parallelism of any size on one device: the same meetings, one by one.

What devices would do at the same time is done in turn, hop by hop, with the same calls
and the same roundings in the same order. So a ring of 64 or 512 can be studied without
so many devices. Nothing is communicated, and a hidden meeting takes no time.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from attn_jax.context_parallel.all_keys import gather_here
from attn_jax.context_parallel.arguments import (
    Implementation,
    Strategy,
    Width,
    check_bias,
    check_heads,
    check_parts,
    checked,
    ring_of,
)
from attn_jax.context_parallel.blocks import Block, rows_axis
from attn_jax.context_parallel.layouts import (
    Layout,
    check_length,
    from_layout,
    to_layout,
)
from attn_jax.context_parallel.local import (
    Static,
    gradients,
    kept_bias,
    keys_in,
    pairs_in,
    returned,
    rows_of,
    sent,
    widened,
)
from attn_jax.context_parallel.meeting import (
    Shard,
    add_backward,
    add_forward,
    adds_in_place,
    no_dbias,
    pairs_of,
    with_pairs,
)
from attn_jax.context_parallel.merge import kept, over_parts
from attn_jax.context_parallel.messages import packed, unpacked
from attn_jax.context_parallel.schedule import Schedule, gathered
from attn_jax.emulator import partial
from attn_jax.emulator.partial import Partial
from attn_jax.emulator.sums import read, write
from attn_jax.recipe import Recipe


def simulate(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    shards: int,
    strategy: Strategy = "ring",
    ulysses: int = 2,
    layout: Layout = "contiguous",
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    recipe: Recipe | None = None,
    partials: Width = "fp32",
    wire: Width = "fp32",
    out_dtype: Any = None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """What `attention` returns on `shards` devices, and its gradients, on one.

    Takes and returns whole sequences, in the order of their positions. All else means
    what it means there. Under `ring+ulysses` `ulysses` of the `shards` devices deal out
    heads, and each head has a ring of `shards` / `ulysses`; other strategies do not
    read it. The reduce-scatter of `all_gather` adds the
    devices' sums in their order and, where the wire is narrow, rounds after each
    addition (what NCCL does is not known here). The gradient of a bias that is one for
    all queries is summed meeting by meeting, not first on each device.

    Raises ValueError and NotImplementedError as `attention` does.
    """
    given = checked(
        *(query, key, value, query_segment_ids, key_value_segment_ids),
        bias_dtype=None if bias is None else bias.dtype,
        strategy=strategy,
        layout=layout,
        is_causal=is_causal,
        local_window_size=local_window_size,
        scale=scale,
        implementation=implementation,
        recipe=recipe,
        partials=partials,
        wire=wire,
        out_dtype=out_dtype,
    )
    devices, dealt = shards, 1
    if strategy == "ring+ulysses":
        shards, dealt = ring_of(devices, ulysses), ulysses
    for name, x in (("query", query), ("key", key)):
        check_length(name, x.shape[1], shards, layout)
        check_length(name, x.shape[1], devices, "contiguous")
        check_heads(name, x.shape[2], dealt, strategy)
    check_bias(bias, query, key.shape[1])
    arrays = query, key, value, query_segment_ids, key_value_segment_ids
    bias = widened(bias)
    if strategy == "ulysses" or shards == 1:
        mask = dataclasses.replace(
            given.mask,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
        )
        return given.block.attention(query, key, value, mask, bias, given.out_dtype)
    static = given.static("", shards, strategy, None)
    check_parts(static.block, query, key, value)
    laid_out = (None if x is None else to_layout(x, shards, layout) for x in arrays)
    bias = pairs_in(to_layout, bias, shards, layout)
    out, lse = cast(tuple[Array, Array], _simulated(static, *laid_out, bias))
    return from_layout(out, shards, layout), from_layout(lse, shards, layout, axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _simulated(static: Static, *arrays: Any) -> tuple[Array, Array]:
    return _simulated_fwd(static, *arrays)[0]


def _simulated_fwd(static: Static, *arrays):
    x = Shard(*arrays)
    x = x._replace(bias=kept_bias(static, x.bias))
    meetings = _Meetings.of(static, x, static.forward_by, range(static.shards))

    def visit(add, so_far):
        def meet(so_far, pair):
            rank, source = pair
            mine = meetings.of_queries(so_far, rank)
            shard = meetings.shard(rank, source)
            mine = add_forward(meetings.schedule, add, mine, shard, rank, source)
            return meetings.with_queries(so_far, mine, rank), None

        return lax.scan(meet, so_far, meetings.pairs)[0]

    _, exact, lse = over_parts(visit, static.block, x.query, x.value, x)
    assert exact is not None
    for_delta = partial.kept_for_delta(exact, static.block.recipe)
    return (returned(static, exact), lse), (x, lse, for_delta)


def _simulated_bwd(static: Static, residuals, cotangents):
    (x, lse, for_delta), (dout, dlse) = residuals, cotangents
    block, recipe = static.block, static.block.recipe
    hops = recipe.backward_hops(static.shards)
    meetings = _Meetings.of(static, x, static.backward_by, hops)
    keys = block.of_all(x.key, x.value, gather_here)
    rows, dlse = rows_of(block, dout, dlse, lse, for_delta, x.query, keys)
    zero = block.nothing(x.query, x.key, x.value)
    in_place = meetings.adds_in_place(block)
    # Own keys' part travels, too, but for that of the last hop, which is at home.
    stay = meetings.ring and static.shards in hops

    def meet(carry, pair):
        total, sums, dbias = carry
        rank, source = pair
        mine, dkey, dvalue, of_bias = add_backward(
            block,
            meetings.schedule,
            Partial(*meetings.of_queries(total, rank)),
            meetings.shard(rank, source),
            rows.of(lambda x: meetings.of_queries([x], rank)[0]),
            rank,
            source,
            in_place=in_place,
        )
        new = packed(dkey, dvalue)
        new = kept(
            read(sums, 1, source * new.shape[1], new.shape[1]) + new,
            recipe.ring_gradient_accumulator,
        )
        stays = stay and rank == source
        new = jnp.where(stays, new, sent(static, new).astype(new.dtype))
        total = meetings.with_queries(total, mine, rank)
        first = meetings.first(rank, source)
        dbias = with_pairs(dbias, of_bias, *first)
        return (Partial(*total), write(sums, new, 1, first[1]), dbias), None

    start = zero, packed(zero.dkey, zero.dvalue), no_dbias(block, x.bias)
    total, sums, dbias = lax.scan(meet, start, meetings.pairs)[0]
    if meetings.in_order:
        sums = to_layout(sums, static.shards, static.layout)
        dbias = keys_in(to_layout, dbias, static.shards, static.layout)
    dkey, dvalue = unpacked(sums, x.key.shape[-1])
    total = total._replace(dkey=dkey, dvalue=dvalue, dbias=dbias)
    inputs = x.query, x.key, x.value, x.bias
    *found, dbias = gradients(block, total, rows, dlse, inputs, in_place=in_place)
    return *found, None, None, dbias


_simulated.defvjp(_simulated_fwd, _simulated_bwd)


class _Meetings(NamedTuple):
    """Who meets whom in one pass, and the arrays, in the layout's order.

    Attributes:
      pairs: (shard of the queries, source of the keys) [meetings] each, in turn.
      in_order: all keys are one source, in the order of their positions.
      ring: whether keys meet one shard after the other, the last sums where they stay.
    """

    schedule: Schedule
    pairs: tuple[Array, Array]
    arrays: Shard
    shards: int
    in_order: bool
    ring: bool

    @classmethod
    def of(cls, static: Static, x: Shard, how: str, hops: range) -> "_Meetings":
        shards, lengths = static.shards, (x.query.shape[1], x.key.shape[1])
        found = None
        if how == "all_gather":
            arguments = static.layout, shards, *lengths, static.rules.band
            found = gathered(*arguments)
        if found is not None:
            key, value, ids = (
                None if y is None else from_layout(y, shards, static.layout)
                for y in (x.key, x.value, x.key_ids)
            )
            assert key is not None and value is not None
            bias = keys_in(from_layout, x.bias, shards, static.layout)
            x = x._replace(key=key, value=value, key_ids=ids, bias=bias)
            pairs = [(rank, 0) for rank in range(shards)]
            return cls(found, _columns(pairs), x, shards, True, False)
        found = static.of_whole(*lengths)
        pairs = [
            (rank, (rank - hop) % shards)
            for hop in found.live_hops(hops)
            for rank in range(shards)
            if found.plans[found.plan[rank, (rank - hop) % shards]]
        ]
        ring = how == "ring"
        if not ring:
            # A device adds all that it has before anything is sent.
            pairs.sort(key=lambda pair: (pair[0], (pair[0] - pair[1]) % shards))
        return cls(found, _columns(pairs), x, shards, False, ring)

    def adds_in_place(self, block: Block) -> bool:
        """Whether the block adds to dQ by itself."""
        one = jax.eval_shape(self.shard, 0, 0)
        hops = range(1 if self.in_order else self.shards)
        return not self.in_order and adds_in_place(block, self.schedule, one, hops)

    def shard(self, rank, source) -> Shard:
        """The arrays of one meeting."""
        x, (T, S) = self.arrays, self.sizes
        row, column = self.first(rank, source)

        def part(y: Array | None, start, size: int):
            return None if y is None else read(y, 1, start, size)

        return Shard(
            read(x.query, 1, row, T),
            read(x.key, 1, column, S),
            read(x.value, 1, column, S),
            part(x.query_ids, row, T),
            part(x.key_ids, column, S),
            None if x.bias is None else pairs_of(x.bias, (row, T), (column, S)),
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys of a meeting."""
        x = self.arrays
        T = x.query.shape[1] // self.shards
        return T, x.key.shape[1] // (1 if self.in_order else self.shards)

    def first(self, rank, source):
        """Where those of a meeting begin."""
        T, S = self.sizes
        return rank * T, source * S

    def of_queries(self, arrays, rank) -> tuple[Any, ...]:
        """The rows of one shard's queries. dK and dV, which have none, are cut too."""

        def rows(y: Array) -> Array:
            size = y.shape[rows_axis(y)] // self.shards
            return read(y, rows_axis(y), rank * size, size)

        return tuple(None if y is None else rows(y) for y in arrays)

    def with_queries(self, arrays, parts, rank) -> tuple[Any, ...]:
        return tuple(
            None
            if y is None
            else write(y, part, rows_axis(y), rank * part.shape[rows_axis(y)])
            for y, part in zip(arrays, parts, strict=True)
        )


def _columns(pairs: list[tuple[int, int]]) -> tuple[Array, Array]:
    table = np.asarray(pairs, np.int32).reshape(-1, 2)
    return jnp.asarray(table[:, 0]), jnp.asarray(table[:, 1])
