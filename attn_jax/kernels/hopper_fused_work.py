"""Hopper's fused backward kernel: sizes, shared memory, and what a CTA does."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels import architecture, ring_order
from attn_jax.kernels.integers import Number, rem
from attn_jax.kernels.ring_order import Dealt, Ring, ring_of
from attn_jax.kernels.sliding_order import Sliding, sliding_of
from attn_jax.kernels.tiles import (
    hide_columns_before,
    hide_from,
    hide_rows_from,
    row_positions,
    smem_tile,
)
from attn_jax.kernels.tilings import Plan
from attn_jax.kernels.visibility import Band
from attn_jax.span import Chosen

KEYS = 64  # of a consumer warpgroup
WARPGROUPS = 2
KEY_TILE = KEYS * WARPGROUPS
# Queries in a block, by head dim: dQ's tile is made in two pieces of 64 x 64.
QUERIES = {64: 128, 128: 64}
STAGES = 2  # blocks of Q and dO in shared memory

# What `Shapes.in_parts` goes by, by head dim. FP32 sums of a tile, for dK and dV, are
# written and added up again in the time of so many steps; and under a causal mask each
# query head of a part but the first adds a share to the time. (The members of a ring
# then are at different heads; that this is the cause is not proved.) From backward
# passes of 64 and of 32 query heads over 8 by number of parts, 2048 to 32 768 keys, on
# an H200 (`prototypes/measure_parts.py`).
SUMS_STEPS = {64: 1.5, 128: 3.5}
SPREAD = {64: 0.006, 128: 0.015}
DS_BUFFERS = 2


class Shapes(NamedTuple):
    """Sizes that the kernel is compiled for; lengths as they are, not padded.

    `parts`: the query heads of a key head are dealt to so many CTAs, each of which has
    sums of its own for dK and dV. `first_query`, `first_key`: where these begin in
    arrays of more.
    """

    batch: int
    query_count: int
    key_count: int
    query_heads: int
    key_heads: int
    head_dim: int
    parts: int = 1
    first_query: int = 0
    first_key: int = 0

    @classmethod
    def of(cls, query: tuple[int, ...], key: tuple[int, ...]) -> "Shapes":
        """Of [B, T, N, H] and [B, S, K, H]."""
        batch, query_count, query_heads, head_dim = query
        return cls(batch, query_count, key[1], query_heads, key[2], head_dim)

    def in_parts(
        self, plan: Plan, *, is_causal: bool, window: Band | None = None
    ) -> "Shapes":
        """With as many parts as the plan says, or else the fewest that take the least
        time (within 1 %: their sums take memory)."""
        if plan.parts is not None:
            return self._replace(parts=plan.parts)

        def time(shapes: Shapes) -> float:
            ring = shapes.ring(plan, is_causal=is_causal, window=window)
            steps = shapes.group * ring.steps / shapes.tiles  # of a tile, in the mean
            of_sums = SUMS_STEPS[self.head_dim] if shapes.parts > 1 else 0
            spread = SPREAD[self.head_dim] * (shapes.group - 1) if is_causal else 0
            return (1 + of_sums / steps) * (1 + spread) / ring.share()

        group = self.query_heads // self.key_heads
        ways = [self._replace(parts=n) for n in range(1, group + 1) if group % n == 0]
        times = list(map(time, ways))
        return next(w for w, t in zip(ways, times) if t <= 1.01 * min(times))

    def ring(
        self, plan: Plan, *, is_causal: bool, window: Band | None = None
    ) -> Ring | Sliding:
        """How the tiles are dealt to CTAs."""
        if window is not None:
            assert window.left is not None and window.right is not None
            return sliding_of(
                length=self.key_count,
                left=window.left,
                right=window.right,
                queries=self.queries,
                keys=KEY_TILE,
                pairs=self.pairs,
                group=self.group,
                multiprocessors=architecture.H100_MULTIPROCESSORS,
            )
        return ring_of(
            tiles=self.tiles,
            blocks=self.blocks,
            pairs=self.pairs,
            group=self.group,
            ratio=KEY_TILE // self.queries if is_causal else None,
            passes=plan.passes,
            apart=plan.apart,
        )

    @property
    def key_parts(self) -> int:
        """Of all key heads."""
        return self.key_heads * self.parts

    @property
    def group(self) -> int:
        """Query heads of a part."""
        return self.query_heads // self.key_parts

    @property
    def pairs(self) -> int:
        """(batch, part of a key head) pairs."""
        return self.batch * self.key_parts

    @property
    def queries(self) -> int:
        return QUERIES[self.head_dim]

    @property
    def blocks(self) -> int:
        """Blocks of queries in a head."""
        return -(-self.query_count // self.queries)

    @property
    def tiles(self) -> int:
        """Tiles of keys in a head."""
        return -(-self.key_count // KEY_TILE)


class Way(NamedTuple):
    """One way to go over queries and keys.

    Attributes:
      shapes: of all that there are; `first_query` is the way's own.
      ring: of the queries and keys that the way goes over.
      ctas: that have anything to do.
      queries, keys: how many it goes over.
    """

    shapes: Shapes
    ring: Ring | Sliding
    ctas: Number
    queries: Number
    keys: Number


def ways_of(
    shapes: Shapes, plan: Plan, chosen: Chosen | None, **mask: Any
) -> list[Way]:
    """Over all, or one for each of the spans, dealt to CTAs as suits the first that has
    any pairs."""
    if chosen is None:
        shapes = shapes.in_parts(plan, **mask)
        ring = shapes.ring(plan, **mask)
        return [Way(shapes, ring, ring.ctas, shapes.query_count, shapes.key_count)]
    some = next(span for span in chosen.spans if span.queries and span.keys)
    own = shapes._replace(query_count=some.queries, key_count=some.keys)
    parts = own.in_parts(plan, **mask).parts
    ways = []
    for first_query, queries, keys in chosen.spans:
        of_all = shapes._replace(first_query=first_query, parts=parts)
        # What goes over nothing has a ring like another's, without CTAs.
        count = (queries, keys) if queries and keys else (some.queries, some.keys)
        own = of_all._replace(query_count=count[0], key_count=count[1])
        ring = own.ring(plan, **mask)
        ctas = ring.ctas if queries and keys else 0
        ways.append(Way(of_all, ring, ctas, queries, keys))
    return ways


def picked(ways: Sequence[Way], chosen: tuple[Any, Any] | None) -> Way:
    """The way of number which[at], whose numbers are scalars of the kernel where others
    may be meant; `chosen`: (which, at) in global memory, or None: the only one."""
    if chosen is None:
        return ways[0]
    which, at = chosen
    number = which[at[0]]

    def pick(name: str) -> jax.Array:
        first, *others = map(operator.attrgetter(name), ways)
        found = jnp.int32(first)
        for i, other in enumerate(others, 1):
            found = jnp.where(number == i, jnp.int32(other), found)
        return found

    names = "tiles", "blocks", "size", "count"
    ring = {name: pick(f"ring.{name}") for name in names}
    shapes = ways[0].shapes._replace(first_query=pick("shapes.first_query"))
    some = map(pick, ("ctas", "queries", "keys"))
    return Way(shapes, dataclasses.replace(ways[0].ring, **ring), *some)


def reason_against(
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    *,
    is_causal: bool,
    window: Band | None = None,
) -> str | None:
    """Why the kernel does not take arrays of these shapes ([B, T, N, H], [B, S, K, D]),
    in one line, or None if it does. Any lengths will do without a mask."""
    _, query_count, _, head_dim = query_shape
    _, key_count, _, value_dim = value_shape
    if value_dim != head_dim:
        return f"head dim {head_dim} with one of {value_dim} for V"
    if head_dim not in QUERIES:
        return f"head dim {head_dim}, not {' or '.join(map(str, QUERIES))}"
    if query_count == 0 or key_count == 0:
        return "no query or no key"
    if (is_causal or window is not None) and query_count != key_count:
        mask = "causal mask" if is_causal else "window"
        return f"a {mask} with {query_count} queries and {key_count} keys"
    if is_causal and not ring_order.causal_fits(pl.cdiv(key_count, KEY_TILE)):
        return f"a causal mask with {key_count} keys, too many for a ring of CTAs"
    return None


class Memory(NamedTuple):
    """Shared memory. dQ's tile is one piece for each warpgroup."""

    k: Any
    v: Any
    keys: Any  # K'
    q: Any
    dout: Any
    rows: Any  # LSE and delta
    columns: Any  # what comes off the keys, and what they are scaled by
    ds: Any
    dq: Any

    @classmethod
    def scratch(cls, shapes: Shapes, dtype, dq_dtype) -> "Memory":
        queries, head_dim = shapes.queries, shapes.head_dim
        tile = smem_tile((WARPGROUPS, KEYS, head_dim), dtype)
        block = smem_tile((STAGES, queries, head_dim), dtype)
        # dS and K' for dQ have a type of their own.
        ds = (DS_BUFFERS, WARPGROUPS, queries // 64, KEYS, 64)
        return cls(
            k=tile,
            v=tile,
            keys=smem_tile((WARPGROUPS, KEYS, head_dim), dq_dtype),
            q=block,
            dout=block,
            rows=plgpu.SMEM((2, STAGES, queries), jnp.float32),
            columns=plgpu.SMEM((2, head_dim), jnp.float32),
            ds=smem_tile(ds, dq_dtype),
            dq=smem_tile((WARPGROUPS, 64, 64), jnp.float32),
        )


class Barriers(NamedTuple):
    """`dq_ready` and `dq_free`: one for each thread that stores, at its steps."""

    tile_ready: Any
    k_free: Any
    v_free: Any
    q_ready: Any
    dout_ready: Any
    q_free: Any
    dout_free: Any
    ds_ready: Any
    dq_ready: Any
    dq_free: Any
    all_done: Any

    @classmethod
    def scratch(cls, plan: Plan) -> "Barriers":
        ready = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
        free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES)
        both = plgpu.Barrier(num_arrivals=WARPGROUPS)
        return cls(
            tile_ready=plgpu.Barrier(num_arrivals=2 * WARPGROUPS + 2),
            k_free=both,
            v_free=both,
            q_ready=ready,
            dout_ready=ready,
            q_free=free,
            dout_free=free,
            ds_ready=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=DS_BUFFERS),
            dq_ready=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.storers),
            dq_free=plgpu.Barrier(num_barriers=plan.storers),
            all_done=both,
        )


class Item(NamedTuple):
    """What a CTA does at a time: a tile of keys against its blocks of queries."""

    b: jax.Array
    kv_head: jax.Array
    key_part: jax.Array  # among those of all key heads
    tile: jax.Array
    first: jax.Array  # block
    stride: jax.Array  # from one to the next
    blocks: jax.Array  # of a query head
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Work:
    """A CTA's items, one after the other."""

    shapes: Shapes
    ring: Ring | Sliding
    dealt: Dealt

    @classmethod
    def of(cls, cta: jax.Array, shapes: Shapes, ring: Ring | Sliding) -> "Work":
        return cls(shapes, ring, ring.dealt(cta))

    @property
    def items(self) -> jax.Array:
        return jnp.int32(self.dealt.items)

    def item(self, number: jax.Array) -> Item:
        i32 = jnp.int32
        pair, tile, first, stride, blocks = map(i32, self.dealt.item(number))
        of_entry = i32(self.shapes.key_parts)
        b, part = lax.div(pair, of_entry), lax.rem(pair, of_entry)
        parts = self.shapes.parts
        kv_head = part if parts == 1 else lax.div(part, i32(parts))
        steps = blocks * self.shapes.group
        return Item(b, kv_head, part, tile, first, stride, blocks, steps)

    def block_of(self, item: Item, turn: jax.Array):
        """(query head, its number in the part, block of queries) of a step."""
        group = self.shapes.group
        index, i = jnp.int32(0), turn
        if group > 1:
            index, i = lax.div(turn, item.blocks), lax.rem(turn, item.blocks)
        block = self.ring.block(item.first, item.stride, i)
        return item.key_part * group + index, index, block

    @property
    def is_causal(self) -> bool:
        return self.ring.ratio is not None

    @property
    def is_masked(self) -> bool:
        return self.is_causal or isinstance(self.ring, Sliding)

    @property
    def some_are_idle(self) -> bool:
        """Whether a warpgroup has no key in the last tile."""
        return 0 < self.shapes.key_count % KEY_TILE <= KEYS

    def has_keys(self, tile: jax.Array, warpgroup: jax.Array) -> jax.Array:
        """Whether a warpgroup has any in a tile."""
        return (tile * WARPGROUPS + warpgroup) * KEYS < self.shapes.key_count

    def seen(self, item: Item, warpgroup: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Under a mask: (first, past the last) of the blocks of a query head, numbered
        as they are taken, that see keys of a warpgroup."""
        has_keys = self.has_keys(item.tile, warpgroup)
        if isinstance(self.ring, Sliding):
            half = dataclasses.replace(self.ring, keys=KEYS)
            first, last = half.blocks_of(item.tile * WARPGROUPS + warpgroup)
            end = jnp.where(has_keys, last + 1 - item.first, 0)
            return jnp.minimum(first - item.first, end), end
        # Blocks go up from the diagonal, or down to it.
        hidden = warpgroup * (KEYS // self.shapes.queries)
        if self.some_are_idle:
            hidden = jnp.where(has_keys, hidden, item.blocks)
        begin = jnp.where(item.stride > 0, hidden, 0)
        return begin, begin + item.blocks - hidden

    def diagonal(self, item: Item, begin: jax.Array, end: jax.Array) -> jax.Array:
        """Which of the blocks that `seen` tells meets a warpgroup's keys on the
        diagonal of a causal mask."""
        return jnp.where(item.stride > 0, begin, end - 1)

    def for_each(self, do: Callable) -> jax.Array:
        """`do(item, first step, number)` for each item; the number of steps in all."""

        def take(number, first):
            item = self.item(number)
            do(item, first, number)
            return first + item.steps

        return lax.fori_loop(jnp.int32(0), self.items, take, jnp.int32(0))


def slot(step: jax.Array) -> jax.Array:
    """Where a step's block of Q and dO is."""
    return rem(step, STAGES)


def hide(
    s: jax.Array, work: Work, tile: jax.Array, block: jax.Array, warpgroup: jax.Array
) -> jax.Array:
    """S^T of a warpgroup's keys and a block, -inf where a query does not see a key,
    without a mask or under a window."""
    ring, queries, key_count = work.ring, work.shapes.queries, work.shapes.key_count
    first_row = tile * KEY_TILE + warpgroup * KEYS

    def hide_missing(s):
        return hide_rows_from(s, key_count - first_row)

    def hide_outside(s, window: Sliding):
        # The query at a row's own position, among those of the block.
        own = row_positions(KEYS) + (first_row - block * queries)
        s = hide_from(s, own + (window.left + 1))
        if window.right and key_count % KEY_TILE:
            s = hide_missing(s)
        return hide_columns_before(s, own - window.right)

    if isinstance(ring, Sliding):
        outside = functools.partial(hide_outside, window=ring)
        return lax.cond(ring.is_partial(tile, block), outside, lambda s: s, s)
    if key_count % KEY_TILE:
        last = tile == work.shapes.tiles - 1
        return lax.cond(last, hide_missing, lambda s: s, s)
    return s


def hide_earlier(
    s: jax.Array, work: Work, on_diagonal: jax.Array, warpgroup: jax.Array
) -> jax.Array:
    """S^T of a warpgroup's keys and a block, -inf where a causal mask hides a key.

    On the diagonal a block of 64 queries begins where the warpgroup's keys do, one of
    128 where the tile does. Rows past the last key are seen by no query, or by such as
    are past the last one.
    """
    first_row = warpgroup * KEYS if work.shapes.queries > KEYS else jnp.int32(0)

    def hide_some(s):
        return hide_columns_before(s, row_positions(KEYS) + first_row)

    return lax.cond(on_diagonal, hide_some, lambda s: s, s)
