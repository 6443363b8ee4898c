"""What loads, and what adds up dQ, in Hopper's fused backward kernel."""

import functools
from collections.abc import Callable

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels import turns
from attn_jax.kernels.hopper_fused_work import (
    KEY_TILE,
    KEYS,
    STAGES,
    WARPGROUPS,
    Barriers,
    Memory,
    Way,
    Work,
    slot,
)
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tilings import Plan


def load(
    work: Work, smem: Memory, barriers: Barriers, keys, columns, values, queries, douts
) -> None:
    """A warpgroup or a warp that loads. `queries` and `douts` are a matrix and its
    rows' LSE or delta, `keys` and `values` an array and the index of a leading axis, if
    it has one, `columns` two arrays of a number for each column of a head's K, in
    global memory."""
    block_size = work.shapes.queries

    def load_block(source, target, index, ready, free, item, turn, step):
        matrix, rows = source
        now = slot(step)

        @pl.when(step >= STAGES)
        def _():
            plgpu.barrier_wait(free.at[now])

        head, _index, block = work.block_of(item, turn)
        first = work.shapes.first_query + block * block_size
        span = pl.ds(first, block_size)
        plgpu.copy_gmem_to_smem(
            matrix.at[item.b, span, head], target.at[now], ready.at[now]
        )
        plgpu.copy_gmem_to_smem(
            rows.at[item.b, head, span], smem.rows.at[index, now], ready.at[now]
        )

    def load_tile(source, target, free, item, first):
        @pl.when(first > 0)
        def _():
            plgpu.barrier_wait(free)

        gmem, plane = source
        first_key = work.shapes.first_key + item.tile * KEY_TILE
        for w in range(WARPGROUPS):
            place = item.b, pl.ds(first_key + w * KEYS, KEYS), item.kv_head
            plgpu.copy_gmem_to_smem(
                gmem.at[(*plane, *place)], target.at[w], barriers.tile_ready
            )

    def load_item(item, first, number):
        del number

        @pl.loop(0, item.steps)
        def _(turn):
            at = (item, turn, first + turn)
            load_block(queries, smem.q, 0, barriers.q_ready, barriers.q_free, *at)
            load_block(
                douts, smem.dout, 1, barriers.dout_ready, barriers.dout_free, *at
            )

            @pl.when(turn == 0)
            def _():
                load_tile(keys, smem.k, barriers.k_free, item, first)
                # What was there has been read since the other keys came.
                for i, source in enumerate(columns):
                    plgpu.copy_gmem_to_smem(
                        source.at[item.b, item.kv_head],
                        smem.columns.at[i],
                        barriers.tile_ready,
                    )
                load_tile(values, smem.v, barriers.v_free, item, first)

    end = work.for_each(load_item)
    # Every release of a CTA that has items is awaited: no barrier may be left with an
    # arrival nobody saw.
    for free in (barriers.q_free, barriers.dout_free):
        for back in range(STAGES, 0, -1):

            @pl.when(end >= back)
            def _():
                plgpu.barrier_wait(free.at[slot(end - back)])

    @pl.when(end > 0)
    def _():
        plgpu.barrier_wait(barriers.k_free)
        plgpu.barrier_wait(barriers.v_free)


def store(
    work: Work,
    plan: Plan,
    smem: Memory,
    barriers: Barriers,
    dqs,
    semaphores,
    begun: bool,
    beside: Callable[[], None] | None,
) -> None:
    """The storing warpgroup: adds tiles of dQ to `dqs`, in global memory, in turn: one
    array, or one for each part of the ring (`Ring.part`), the second without the
    queries that see no short tile. `semaphores`: one for each block of each. `begun`:
    something is there already. `beside`: what another of its warps does meanwhile, or
    None."""
    shapes, storers = work.shapes, plan.storers
    i32 = jnp.int32
    blocks_in_all = shapes.batch * shapes.query_heads * shapes.blocks
    # What the first step waits for: its predecessor is read.
    plgpu.barrier_arrive(barriers.dq_free.at[storers - 1])

    def put_into(dq, first_row, item, turn, reduction_op):
        head, _index, block = work.block_of(item, turn)
        for piece in range(WARPGROUPS):
            row, column = block * shapes.queries - first_row, piece * 64
            row += shapes.first_query
            if shapes.head_dim == 64:
                row, column = row + column, 0
            target = (item.b, pl.ds(row, 64), head, pl.ds(column, 64))
            plgpu.copy_smem_to_gmem(
                smem.dq.at[piece],
                dq.at[target],
                reduction_op=reduction_op,
                commit_group=piece == WARPGROUPS - 1,
            )

    def put(item, turn, reduction_op):
        if len(dqs) == 1:
            put_into(dqs[0], 0, item, turn, reduction_op)
            return
        first_rows = [0, work.ring.long_tiles * KEY_TILE]
        for part, (dq, first_row) in enumerate(zip(dqs, first_rows, strict=True)):
            pl.when(work.ring.part(item.tile) == part)(
                functools.partial(put_into, dq, first_row, item, turn, reduction_op)
            )

    def turn_of(item, turn):
        """(semaphore of a step's block, rank, rank of the last)."""
        head, index, block = work.block_of(item, turn)
        number = (item.b * shapes.query_heads + head) * shapes.blocks + block
        number += work.ring.part(item.tile) * blocks_in_all
        index = index if shapes.group > 1 else 0
        pair = item.b * shapes.key_parts + item.key_part
        return semaphores.at[number], *work.ring.rank(pair, item.tile, index, block)

    def await_turn(item, turn):
        """Waits until those before this tile have added to the block."""
        semaphore, rank, _last = turn_of(item, turn)

        @pl.when(rank > 0)
        def _():
            turns.await_count(semaphore, rank)

    def put_in_turn(item, turn):
        _semaphore, rank, _last = turn_of(item, turn)
        if begun:
            put(item, turn, "add")
            return
        pl.when(rank == 0)(lambda: put(item, turn, None))
        pl.when(rank > 0)(lambda: put(item, turn, "add"))

    def end_turn(item, turn):
        """Lets the next tile add to the block, once this one's addition is done."""
        semaphore, rank, last = turn_of(item, turn)

        @pl.when(rank < last)
        def _():
            plgpu.wait_smem_to_gmem(0)
            turns.count_up(semaphore)

    def store_item(me, item, first, number):
        # The turns start, start + storers, ... of the item are one's own.
        start = rem(first + me, storers) if storers > 1 else i32(0)

        @pl.loop(0, lax.div(item.steps - start + (storers - 1), i32(storers)))
        def _(i):
            turn = start + storers * i
            await_turn(item, turn)
            plgpu.barrier_wait(barriers.dq_ready.at[me])
            put_in_turn(item, turn)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            goes_on = (number < work.items - 1) | (turn < item.steps - 1)

            @pl.when(goes_on)
            def _():
                plgpu.barrier_arrive(barriers.dq_free.at[me])

            end_turn(item, turn)

    def store_all(me):
        work.for_each(functools.partial(store_item, me))
        plgpu.wait_smem_to_gmem(0)

    if plan.storing_warps:

        @plgpu.warp_map
        def _(warp):
            pl.when(warp < storers)(lambda: store_all(warp))
            if beside is not None:
                pl.when(warp == storers)(beside)
    else:
        store_all(i32(0))


def leave_zeros(way: Way, ctas: int, dq, dk, dv) -> None:
    """By all warpgroups of all CTAs: what there is that the way does not go over. `dq`:
    None, if something is there already."""
    i32, shapes = jnp.int32, way.shapes
    in_cta = lax.axis_size("warpgroup")
    takers = ctas * in_cta
    me = lax.axis_index("cta") * in_cta + lax.axis_index("warpgroup")

    def fill(targets, heads: int, count: int, first, skipped) -> None:
        """Rows of each head, so many, but those skipped from the first on."""
        zeros = jnp.zeros((KEYS, shapes.head_dim), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        pieces = lax.div(count - skipped, i32(KEYS))
        in_all = shapes.batch * heads * pieces

        @pl.loop(0, lax.div(in_all - me + (takers - 1), i32(takers)))
        def _(i):
            number = me + i * takers
            head, row = lax.div(number, pieces), lax.rem(number, pieces) * KEYS
            row = jnp.where(row < first, row, row + skipped)
            b, n = lax.div(head, i32(heads)), lax.rem(head, i32(heads))
            for target in targets:
                target[b, pl.ds(row, KEYS), n] = zeros

    if dq is not None:
        of_rows = shapes.query_count, shapes.first_query, way.queries
        fill([dq], shapes.query_heads, *of_rows)
    fill([dk, dv], shapes.key_parts, shapes.tiles * KEY_TILE, i32(0), way.keys)
