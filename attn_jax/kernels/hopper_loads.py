"""The warpgroup of Hopper's forward kernel that loads Q, K and V, by TMA.

It goes on across the borders of tiles, so that the first keys of a tile are there when
the last one ends."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels.integers import rem
from attn_jax.kernels.schedule import Strips
from attn_jax.kernels.tiles import smem_tile
from attn_jax.kernels.tilings import ForwardTiling


class Loaded(NamedTuple):
    """An operand: where it is, where it goes, and the barriers that say that it is
    there and that nobody reads it any more. Of Q a tile for each warpgroup, of K and V
    a block for each stage. `plane`: index of the leading axis, where there is one."""

    gmem: Any
    smem: Any
    ready: Any
    free: Any
    plane: tuple[int, ...] = ()


class Stages(NamedTuple):
    """Blocks of K and V, as many as there are stages. A step is a block of a CTA; steps
    are counted on across its tiles. `readers`: warpgroups that multiply."""

    k: Loaded
    v: Loaded
    count: int
    readers: int

    def slot(self, step):
        # ptxas makes other loops of the one instruction that `integers.rem` is: with it
        # out takes 0.302 ms instead of 0.308 where there are four warpgroups (1024
        # keys, head dim 64), and 0.83 for 0.79 of two (4096 keys, 128; H200, no mask).
        if self.readers == 4:
            return rem(step, self.count)
        return lax.rem(step, jnp.int32(self.count))

    def keys(self, step):
        """K^T of a step's block."""
        return self.k.smem.at[self.slot(step)].transpose((1, 0))

    def values(self, step):
        return self.v.smem.at[self.slot(step)]

    def await_block(self, of: Loaded, step) -> None:
        plgpu.barrier_wait(of.ready.at[self.slot(step)])

    def release(self, of: Loaded, step) -> None:
        plgpu.barrier_arrive(of.free.at[self.slot(step)])

    def skip(self, from_step, to_step) -> None:
        """Blocks that only other warpgroups see."""

        @pl.loop(from_step, to_step)
        def _(step):
            for of in (self.k, self.v):
                self.await_block(of, step)
                self.release(of, step)


def places(tiling: ForwardTiling, query, value) -> tuple:
    """Q, K and V in shared memory, the latter as `value`, the others as `query`."""
    columns, stages = tiling.columns, tiling.stages
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    return (
        smem_tile((tiling.warpgroups, tiling.rows, head_dim), query.dtype),
        smem_tile((stages, columns, head_dim), query.dtype),
        smem_tile((stages, columns, value_dim), value.dtype, columns),
    )


def barriers(tiling: ForwardTiling, *, keeps_last: bool) -> tuple:
    """`ready` of Q, K and V, then `free`. `keeps_last`: K has one more of these."""
    free = functools.partial(plgpu.Barrier, num_arrivals=tiling.warpgroups)
    stages = tiling.stages
    return (
        plgpu.Barrier(num_barriers=tiling.warpgroups),
        *[plgpu.Barrier(num_barriers=stages)] * 2,
        free(),
        *[free(num_barriers=stages + keeps_last), free(num_barriers=stages)],
    )


def for_each_tile(table, cta, tile_count: int, heads: int, work: Callable, carry):
    """`carry = work(turn, b, n, tile, carry)` for the tiles of a CTA in the `table`.

    `work` is a generator that pauses once, when there is something to do while the next
    tile's number comes from memory, and registers to keep it in.
    """

    def take(turn, both):
        index, carry = both
        pair = lax.div(index, jnp.int32(tile_count))
        tile = lax.rem(index, jnp.int32(tile_count))
        b = lax.div(pair, jnp.int32(heads))
        n = lax.rem(pair, jnp.int32(heads))
        working = work(turn, b, n, tile, carry)
        next(working)
        following = table[cta, turn + 2]
        return following, next(working)

    turns, first = table[cta, 0], table[cta, 1]
    return lax.fori_loop(jnp.int32(0), turns, take, (first, carry))[1]


def load(
    of_each_tile: Callable,
    blocks_of: Callable,
    strips: Strips,
    tiling: ForwardTiling,
    group: int,
    q: Loaded,
    stages: Stages,
    *,
    some_see_none: bool = False,
) -> None:
    """Loads what the consumers want, in their order.

    `of_each_tile(work, carry)`: `for_each_tile` of the CTA. `blocks_of(b, n, tile)`
    says how many blocks of keys a tile has, and which one its i-th is. Each has one,
    unless `some_see_none`.
    """
    columns, (k, v, count), slot = tiling.columns, stages[:3], stages.slot

    def load_block(of: Loaded, step, b, n, block):
        @pl.when(step >= count)
        def _():
            plgpu.barrier_wait(of.free.at[slot(step)])

        keys = pl.ds(block * columns, columns)
        kv_head = lax.div(n, jnp.int32(group))
        plgpu.copy_gmem_to_smem(
            of.gmem.at[(*of.plane, b, keys, kv_head)],
            of.smem.at[slot(step)],
            of.ready.at[slot(step)],
        )

    def load_tile(turn, b, n, tile, carry):
        first_step, *before = carry
        yield
        blocks, block_at = blocks_of(b, n, tile)
        end = first_step + blocks

        def block_of(step: jax.Array):
            return block_at(step - first_step)

        def load_all():
            # V is needed a step later than K.
            load_block(k, first_step, b, n, block_of(first_step))

            @pl.when((first_step if some_see_none else turn) > 0)
            def _():
                load_block(v, first_step - 1, *before)
                plgpu.barrier_wait(q.free)

            for index in range(tiling.warpgroups):
                rows = pl.ds((strips.first(tile) + index) * tiling.rows, tiling.rows)
                plgpu.copy_gmem_to_smem(
                    q.gmem.at[b, rows, n], q.smem.at[index], q.ready.at[index]
                )

            @pl.loop(first_step + 1, end)
            def _(step):
                load_block(k, step, b, n, block_of(step))
                load_block(v, step - 1, b, n, block_of(step - 1))

        after = b, n, block_of(end - 1)
        if some_see_none:
            pl.when(blocks > 0)(load_all)
            kept = zip(after, before, strict=True)
            yield end, *(jnp.where(blocks > 0, new, old) for new, old in kept)
            return
        load_all()
        yield end, *after

    end, *before = of_each_tile(load_tile, (jnp.int32(0),) * 4)

    @pl.when(end > 0)
    def _():
        load_block(v, end - 1, *before)
        # Every release is awaited: no arrival may be left that nobody saw.
        plgpu.barrier_wait(q.free)
        for free in (k.free, v.free):
            for back in range(count, 0, -1):

                @pl.when(end >= back)
                def _():
                    plgpu.barrier_wait(free.at[slot(end - back)])
