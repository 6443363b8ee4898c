"""The fused backward kernel's sizes, shared memory, and what a CTA does."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from attn_jax.kernels.ring_order import Ring, ring_of
from attn_jax.kernels.tiles import smem_tile
from attn_jax.kernels.tuning import Plan

KEYS = 64  # of a consumer warpgroup
WARPGROUPS = 2
KEY_TILE = KEYS * WARPGROUPS
# Queries in a block, by head dim: dQ's tile is made in two pieces of 64 x 64.
QUERIES = {64: 128, 128: 64}
STAGES = 2  # blocks of Q and dO in shared memory
DS_BUFFERS = 2


class Shapes(NamedTuple):
    """Sizes that the kernel is compiled for; lengths as they are, not padded."""

    batch: int
    query_count: int
    key_count: int
    query_heads: int
    key_heads: int
    head_dim: int

    @classmethod
    def of(cls, query: tuple[int, ...], key: tuple[int, ...]) -> "Shapes":
        """Of [B, T, N, H] and [B, S, K, H]."""
        batch, query_count, query_heads, head_dim = query
        return cls(batch, query_count, key[1], query_heads, key[2], head_dim)

    def ring(self, plan: Plan, *, is_causal: bool) -> Ring:
        """How the tiles are dealt to CTAs."""
        return ring_of(
            tiles=self.tiles,
            blocks=self.blocks,
            pairs=self.pairs,
            group=self.group,
            ratio=KEY_TILE // self.queries if is_causal else None,
            passes=plan.passes,
            rings=plan.rings,
            apart=plan.apart,
        )

    @property
    def group(self) -> int:
        return self.query_heads // self.key_heads

    @property
    def pairs(self) -> int:
        """(batch, key head) pairs."""
        return self.batch * self.key_heads

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


class Memory(NamedTuple):
    """Shared memory. dQ's tile is one piece for each warpgroup."""

    k: Any
    v: Any
    keys: Any  # K'
    q: Any
    dout: Any
    rows: Any  # LSE and delta
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
            tile_ready=plgpu.Barrier(num_arrivals=2 * WARPGROUPS),
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
    tile: jax.Array
    first: jax.Array  # block
    stride: jax.Array  # from one to the next
    blocks: jax.Array  # of a query head
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Work:
    """A CTA's items, one after the other."""

    shapes: Shapes
    ring: Ring
    ring_number: jax.Array
    member: jax.Array
    passes: jax.Array  # tiles of a pair
    items: jax.Array

    @classmethod
    def of(cls, cta: jax.Array, shapes: Shapes, ring: Ring) -> "Work":
        i32 = jnp.int32
        number, member = lax.div(cta, i32(ring.size)), lax.rem(cta, i32(ring.size))
        pairs = lax.div(i32(shapes.pairs + ring.count - 1) - number, i32(ring.count))
        passes = i32(ring.passes(member))
        return cls(shapes, ring, number, member, passes, pairs * passes)

    def item(self, number: jax.Array) -> Item:
        i32 = jnp.int32
        pair = self.ring_number + self.ring.count * lax.div(number, self.passes)
        tile, first, stride, blocks = map(
            i32, self.ring.item(self.member, lax.rem(number, self.passes))
        )
        heads = i32(self.shapes.key_heads)
        b, kv_head = lax.div(pair, heads), lax.rem(pair, heads)
        steps = blocks * self.shapes.group
        return Item(b, kv_head, tile, first, stride, blocks, steps)

    def block_of(self, item: Item, turn: jax.Array):
        """(query head, its number in the group, block of queries) of a step."""
        group = self.shapes.group
        index, i = jnp.int32(0), turn
        if group > 1:
            index, i = lax.div(turn, item.blocks), lax.rem(turn, item.blocks)
        block = self.ring.block(item.first, item.stride, i)
        return item.kv_head * group + index, index, block

    def for_each(self, do: Callable) -> jax.Array:
        """`do(item, first step, number)` for each item; the number of steps in all."""

        def take(number, first):
            item = self.item(number)
            do(item, first, number)
            return first + item.steps

        return lax.fori_loop(jnp.int32(0), self.items, take, jnp.int32(0))


def slot(step: jax.Array) -> jax.Array:
    """Where a step's block of Q and dO is."""
    return lax.rem(step, jnp.int32(STAGES))
