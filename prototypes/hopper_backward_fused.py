"""Backward attention for Hopper in one pass: five matrix products instead of seven.

A thread block (CTA) owns 128 keys of one key head and goes over all blocks of queries
that see them, of all query heads of the group. Tiles are transposed, keys down the
rows, as in `hopper_backward.backward_dkv`:

    S^T = K Q^T     P^T = exp(S^T - LSE)     dP^T = V dO^T     dS^T = P^T (dP^T - delta)
    dV += P^T dO    dK += dS^T Q             dQ[block] += dS K   (in global memory)

dQ collects one FP32 tile from every CTA that sees the block, by TMA with addition. The
order of these additions is fixed with `Plan.ordered`, by one semaphore for each block
of queries. Roundings are those of `hopper_backward`, but for the order in which dQ is
summed: within 128 keys in the tensor cores, over tiles of keys in FP32.

The order, and why nobody waits for ever
----------------------------------------
`Plan.ordered`: tile c adds to a block after those tiles that are due before it, its
*rank* many. Not causal: tile c starts at block c * r (r blocks to a tile) and wraps, so
block i is reached first by the tile that starts there, then by the one before it, and so
on: tile c waits for tile c + 1, the last for the first. Tiles come in groups of at most
`GROUP`; a group adds after the groups before it. Causal: every other head goes *up* from
its diagonal (tile c waits for c + 1, launched in the order of falling c), the others go
*down* to it (tile c waits for c - 1, launched in the order of rising c). So causal CTAs
wait only for CTAs launched before them. In the full case those that wait for each other
are one group of one head; CTAs are launched in the order of their number (assumed, as all
kernels of this kind do), so when the oldest unfinished group is not all launched, only it
occupies multiprocessors, with fewer CTAs than there are: the next one can start.
"""

import dataclasses
from typing import Literal

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.tiles import (
    COLUMNS,
    LOG2_E,
    accumulator,
    along_columns,
    smem_tile,
    stream,
    visible,
)

KEYS = 64  # of a consumer warpgroup
GROUP = 128  # key tiles that wait for each other; all on the card at once


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the fused kernel goes about it.

    Attributes:
      queries: block of queries, 64 or 128.
      stages: blocks of Q and dO in shared memory.
      order: of the work on a block.
        "plain": S, dP | P, dS | dV, dK, dQ | store dQ.
        "late": S, dQ of the block before | P, store dQ | dP, dV | dS | dK.
        "pair": "plain" for two blocks, then dQ of one of them for each warpgroup.
        "ahead": "pair", with S and dP of both blocks issued at the start.
        "third": a third warpgroup makes and stores dQ, which consumers never wait for.
      tight: dV starts after dS is made, so that P is held once (fewer registers).
      store: who adds the dQ tile, "consumer" or "storer" (a warpgroup of its own).
      ordered: additions to dQ in a fixed order.
      excess: also sum the rounded dS over keys.
      shift: tile c starts at a block of its own (not causal); implied by `ordered`.
      schedule: of causal tiles: "heavy" first going up, or "alternate", as `ordered` has it.
      bare: without the barriers that Pallas puts around stores and before copies; what the
        kernel waits for by itself is enough.
      registers: of consumer, dQ and loading/storing warpgroups; None for the default.
    """

    queries: int = 64
    stages: int = 2
    order: Literal["plain", "late", "pair", "ahead", "third"] = "plain"
    tight: bool = False
    store: Literal["consumer", "storer"] = "consumer"
    ordered: bool = False
    excess: bool = True
    shift: bool = True
    schedule: Literal["heavy", "alternate"] = "heavy"
    bare: bool = False
    warpgroups: int = 2
    registers: tuple[int, ...] | None = None


def add_tile(tile, target) -> None:
    """Adds a tile in shared memory to one in global memory, asynchronously."""
    plgpu.copy_smem_to_gmem(tile, target, reduction_op="add")


def opaque(index: jax.Array) -> jax.Array:
    """`index`, but the compiler cannot know so: it asks the warp's first lane.

    The compiler would otherwise keep all descriptors of a tile that stays in shared
    memory, 16 registers for 64 x 128, and spill others.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def first_lane(_, value):
        (register,) = value.registers.flat
        asked = mgpu_utils.inline_ptx(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;",
            register,
            result_types=register.type,
            has_side_effects=True,
            convergent=True,
        )
        return FragmentedArray.splat(asked, (), is_signed=True)

    return first_lane(index)


def semaphores(count: int):
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def fused_backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    dout: Float[Array, "B T N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    *,
    scale: float,
    is_causal: bool,
    plan: Plan,
):
    """(dQ, excess, dK, dV); dQ in FP32 and unscaled, excess[b, n, t] = sum dS (or None).

    Lengths must be multiples of the key tile and of the block of queries.
    """
    batch, query_count, query_heads, head_dim = query.shape
    _, key_count, key_heads, _ = key.shape
    group = query_heads // key_heads
    dtype = query.dtype
    queries, stages, warpgroups = plan.queries, plan.stages, plan.warpgroups
    key_tile = KEYS * warpgroups
    tiles = key_count // key_tile
    query_blocks = query_count // queries
    assert tiles * key_tile == key_count and query_blocks * queries == query_count
    log2_scale = scale * LOG2_E
    assert not is_causal or query_count >= key_count, "a tile that no query sees"
    third = plan.order == "third"
    pair = plan.order in ("pair", "ahead")
    # dQ is made in pieces of 64 queries and all columns, or of 64 columns of the block.
    by_rows = queries == 128
    dq_rows, dq_columns = 64, head_dim if by_rows or pair else 64
    pieces = 2 if by_rows or pair else head_dim // 64
    assert third or pieces == warpgroups
    assert not pair or (queries == 64 and query_blocks % 2 == 0)
    turns = 2 if pair else 1  # blocks to a round of the loops that make and store dQ
    # Where the pieces are columns, a warpgroup sums dS over its own keys alone.
    sum_parts = warpgroups if not (third or by_rows or pair) else 1
    storer = plan.store == "storer" and not third
    assert plan.store == "storer" or third or not plan.ordered
    threads = warpgroups + 1 + third + storer
    registers = plan.registers or default_registers(plan, head_dim)
    alternate = is_causal and (plan.ordered or plan.schedule == "alternate")
    shift = not is_causal and (plan.ordered or plan.shift)
    tile_group = min(GROUP, tiles, query_blocks)
    ds_buffers = 2

    def attention_backward_fused(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, ones_gmem, dq_gmem,
        excess_gmem, dk_gmem, dv_gmem, smem, barriers,
    ):  # fmt: skip
        k_smem, v_smem, q_smem, dout_smem, rows_smem, ds_smem, dq_smem, *sums = smem
        ones_smem, excess_smem = sums or (None, None)
        (
            tile_ready, q_ready, dout_ready, q_free, dout_free, ds_ready, ds_free,
            dq_ready, dq_free, all_done,
        ) = barriers  # fmt: skip
        i32 = jnp.int32
        cta = lax.axis_index("cta")
        head_index, position = lax.div(cta, i32(tiles)), lax.rem(cta, i32(tiles))
        b, kv_head = (
            lax.div(head_index, i32(key_heads)),
            lax.rem(head_index, i32(key_heads)),
        )
        warpgroup = lax.axis_index("warpgroup")
        up = lax.rem(head_index, i32(2)) == 0 if alternate else True
        tile = jnp.where(up, tiles - 1 - position, position) if alternate else position
        first, whole = i32(0), i32(0)
        if is_causal:
            first = lax.div(tile * key_tile, i32(queries))
            whole = lax.div((tile + 1) * key_tile + i32(queries - 2), i32(queries))
            first, whole = (jnp.minimum(x, i32(query_blocks)) for x in (first, whole))
        blocks = i32(query_blocks) - first
        steps = blocks * group
        # Not causal: where this tile starts, and where the others of its group do.
        group_number = lax.div(tile, i32(tile_group))
        group_start = group_number * tile_group
        group_size = jnp.minimum(i32(tiles) - group_start, i32(tile_group))
        stride = lax.div(i32(query_blocks), group_size)
        member = tile - group_start
        start = member * stride if shift else i32(0)

        # Once: every call of get_global is another array.
        if plan.ordered:
            turn_semaphores = semaphores(batch * query_heads * query_blocks)

        def block_of(step):
            """(query head, block of queries) of a step."""
            head = kv_head * group + lax.div(step, blocks)
            turn = lax.rem(step, blocks)
            if not is_causal:
                block = start + turn
                block = jnp.where(block >= query_blocks, block - query_blocks, block)
                return head, block
            rising = first + turn
            if not alternate:
                return head, rising
            return head, jnp.where(up, rising, query_blocks - 1 - turn)

        def rank_of(block):
            """(tiles that add to the block before this one, whether it is the last)."""
            if is_causal:
                last_tile = lax.div(block * queries + i32(queries - 1), i32(key_tile))
                last_tile = jnp.minimum(last_tile, i32(tiles - 1))
                rank = jnp.where(up, last_tile - tile, tile)
                return rank, rank == last_tile
            rank = jnp.minimum(lax.div(block, stride), group_size - 1) - member
            rank += jnp.where(block < start, group_size, 0) + group_start
            return rank, rank == tiles - 1

        def slot(step):
            return lax.rem(step, i32(stages))

        def buffer(step):
            return lax.rem(step, i32(ds_buffers))

        def dq_product(dq_acc, sum_acc, step, part, columns, summed):
            """dq_acc += dS K, and sum_acc += dS 1, over all keys of the CTA.

            `step` says which dS, `part` which queries of it, `summed` over which keys,
            by warpgroup.
            """

            def left(at):
                return ds_smem.at[buffer(step), at, :, part].transpose((1, 0))

            for w in range(warpgroups):
                at = w + opaque(i32(0))
                plgpu.wgmma(dq_acc, left(at), k_smem.at[at, :, columns])
            if sum_acc is not None:
                for w in summed:
                    at = w + opaque(i32(0))
                    plgpu.wgmma(sum_acc, left(at), ones_smem.at[0].transpose((1, 0)))

        def put_dq(dq, sums, half):
            dq_smem[half] = dq
            if sums is not None:
                # Eight columns alike; the sum over them is exact.
                excess_smem[half] = sums.sum(axis=1) * 0.125
            plgpu.commit_smem()

        def add_dq(step, half):
            """Adds one half of the dQ tile of a step to global memory."""
            head, block = block_of(step)
            row, column = block * queries, 0
            if pair:
                pass
            elif by_rows:
                row += half * dq_rows
            else:
                column += half * dq_columns
            add_tile(
                dq_smem.at[half],
                dq_gmem.at[b, pl.ds(row, dq_rows), head, pl.ds(column, dq_columns)],
            )
            if plan.excess and (sum_parts > 1 or by_rows or pair or half == 0):
                sum_part = half if sum_parts > 1 else 0
                add_tile(
                    excess_smem.at[half],
                    excess_gmem.at[sum_part, b, head, pl.ds(row, dq_rows)],
                )

        def turn_of(step):
            """(semaphore of a step's block, rank, whether it is the block's last)."""
            head, block = block_of(step)
            index = (b * query_heads + head) * query_blocks + block
            return turn_semaphores.at[index], *rank_of(block)

        def await_turn(step):
            """Waits until the tiles due before this one have added to the block."""
            if not plan.ordered:
                return
            semaphore, rank, last = turn_of(step)

            @pl.when(jnp.logical_not(last))
            def _():
                plgpu.semaphore_wait(
                    semaphore, rank, decrement=False, memory_scope="gpu"
                )

            @pl.when(last)
            def _():  # Leaves zero behind.
                plgpu.semaphore_wait(
                    semaphore, rank, decrement=True, memory_scope="gpu"
                )

        def end_turn(step):
            """Lets the next tile add to the block; the addition must be complete."""
            if not plan.ordered:
                return
            semaphore, _, last = turn_of(step)

            @pl.when(jnp.logical_not(last))
            def _():
                plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(registers[0], action="increase")
            ready = tile_ready.at[warpgroup]
            k_tile, v_tile = k_smem.at[warpgroup], v_smem.at[warpgroup]
            first_row = tile * key_tile + warpgroup * KEYS
            kv_slice = (b, pl.ds(first_row, KEYS), kv_head)
            plgpu.copy_gmem_to_smem(k_gmem.at[kv_slice], k_tile, ready)
            plgpu.copy_gmem_to_smem(v_gmem.at[kv_slice], v_tile, ready)
            if plan.excess:
                plgpu.copy_gmem_to_smem(ones_gmem, ones_smem.at[0], ready)
            plgpu.barrier_wait(ready)
            summed = (warpgroup,) if sum_parts > 1 else range(warpgroups)
            if pair:
                part, columns = slice(None), slice(None)
            elif by_rows:
                part, columns = pl.ds(warpgroup * dq_rows, dq_rows), slice(None)
            else:
                part, columns = slice(None), pl.ds(warpgroup * dq_columns, dq_columns)
            sums_here = plan.excess and not third

            def probabilities(s, step):
                """P^T of a block from its logits."""
                _, block = block_of(step)

                def hide(s):
                    seen = visible(
                        s.shape,
                        query_start=block * queries,
                        key_start=first_row,
                        key_count=None,
                        is_causal=True,
                        queries_first=False,
                    )
                    return jnp.where(seen, s, -jnp.inf)

                if is_causal:
                    s = lax.cond(block < whole, hide, lambda s: s, s)
                row_lse = plgpu.load(rows_smem.at[0, slot(step)], layout=COLUMNS)
                return jnp.exp2(
                    s * log2_scale - along_columns(row_lse * LOG2_E, s.shape)
                )

            def gradient(p, dp, step):
                row_delta = plgpu.load(rows_smem.at[1, slot(step)], layout=COLUMNS)
                return (p * (dp - along_columns(row_delta, dp.shape))).astype(dtype)

            def put_ds(ds, step):
                ds_smem[buffer(step), warpgroup] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_ready.at[buffer(step)])

            def await_dq_smem():
                if storer:
                    plgpu.barrier_wait(dq_free.at[0])
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def store_dq(dq, sums, step):
                """Hands one's own piece of a dQ tile on."""
                put_dq(dq, sums, warpgroup)
                if storer:
                    plgpu.barrier_arrive(dq_ready.at[0])
                else:
                    add_dq(step, warpgroup)

            def with_dq(body):
                accs = [accumulator(dq_rows, dq_columns)]
                if sums_here:
                    accs.append(accumulator(dq_rows, 8))
                return pl.run_scoped(
                    lambda *accs: body(accs[0], accs[1] if sums_here else None), *accs
                )

            def released(step):
                # Orders the reads of LSE and delta before TMA's next write to them.
                plgpu.commit_smem()
                plgpu.barrier_arrive(dout_free.at[slot(step)])
                plgpu.barrier_arrive(q_free.at[slot(step)])

            block_acc = accumulator(KEYS, queries)

            def plain_step(step, dk_acc, dv_acc):
                now = slot(step)
                plgpu.barrier_wait(q_ready.at[now])

                def products(s_acc, dp_acc):
                    plgpu.wgmma(
                        s_acc,
                        k_smem.at[opaque(warpgroup)],
                        q_smem.at[now].transpose((1, 0)),
                    )
                    plgpu.barrier_wait(dout_ready.at[now])
                    plgpu.wgmma(
                        dp_acc,
                        v_smem.at[opaque(warpgroup)],
                        dout_smem.at[now].transpose((1, 0)),
                    )
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    p = probabilities(s, step)
                    # Waiting here, rather than where it is needed, keeps ptxas from moving
                    # the wait for dP above the exponentials.
                    if third:
                        plgpu.barrier_wait(ds_free.at[buffer(step)])
                    else:
                        await_dq_smem()
                    return p, dp_acc[...]

                p, dp = pl.run_scoped(products, block_acc, block_acc)
                p_rounded = p.astype(dtype)
                if not plan.tight:
                    plgpu.wgmma(dv_acc, p_rounded, dout_smem.at[now])
                ds = gradient(p, dp, step)
                put_ds(ds, step)
                if plan.tight:
                    plgpu.wgmma(dv_acc, p_rounded, dout_smem.at[now])
                plgpu.wgmma(dk_acc, ds, q_smem.at[now])
                if third:
                    plgpu.wgmma_wait(0)
                    released(step)
                    return

                def rest(dq_acc, sum_acc):
                    plgpu.barrier_wait(ds_ready.at[buffer(step)])
                    dq_product(dq_acc, sum_acc, step, part, columns, summed)
                    sums = None if sum_acc is None else sum_acc[...]
                    dq = dq_acc[...]
                    released(step)
                    return dq, sums

                dq, sums = with_dq(rest)
                store_dq(dq, sums, step)

            def finish(step, p, dp, dk_acc, dv_acc):
                """From P and dP on: dV, dS, dK."""
                plgpu.wgmma(dv_acc, p.astype(dtype), dout_smem.at[slot(step)])
                ds = gradient(p, dp, step)
                put_ds(ds, step)
                plgpu.wgmma(dk_acc, ds, q_smem.at[slot(step)])

            def start(step, s_acc, dp_acc):
                now = slot(step)
                here = opaque(warpgroup)
                plgpu.barrier_wait(q_ready.at[now])
                plgpu.wgmma(s_acc, k_smem.at[here], q_smem.at[now].transpose((1, 0)))
                plgpu.barrier_wait(dout_ready.at[now])
                plgpu.wgmma(
                    dp_acc, v_smem.at[here], dout_smem.at[now].transpose((1, 0))
                )

            def pair_step(turn, dk_acc, dv_acc):
                one, two = 2 * turn, 2 * turn + 1

                def products(step, s_acc, dp_acc):
                    start(step, s_acc, dp_acc)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    if step is two and head_dim != 128:
                        released(one)
                    p = probabilities(s, step)
                    if step is one:
                        plgpu.barrier_wait(ds_free.at[0])
                    else:
                        await_dq_smem()
                    return p, dp_acc[...]

                for step in (one, two):
                    p, dp = pl.run_scoped(
                        lambda *accs: products(step, *accs),  # noqa: B023
                        block_acc,
                        block_acc,
                    )
                    finish(step, p, dp, dk_acc, dv_acc)
                    if head_dim == 128:
                        # Too few registers to go on while dV and dK hold P and dS.
                        plgpu.wgmma_wait(0)
                        released(step)
                pair_dq(turn)

            def ahead_step(turn, dk_acc, dv_acc):
                one, two = 2 * turn, 2 * turn + 1

                def both(s_one, dp_one, s_two, dp_two):
                    start(one, s_one, dp_one)
                    start(two, s_two, dp_two)
                    s = plgpu.wgmma_accumulator_load(s_one, wait_n=3)
                    p = probabilities(s, one)
                    plgpu.barrier_wait(ds_free.at[0])
                    dp = plgpu.wgmma_accumulator_load(dp_one, wait_n=2)
                    finish(one, p, dp, dk_acc, dv_acc)
                    s = plgpu.wgmma_accumulator_load(s_two, wait_n=3)
                    p = probabilities(s, two)
                    await_dq_smem()
                    return p, plgpu.wgmma_accumulator_load(dp_two, wait_n=2)

                p, dp = pl.run_scoped(both, *[block_acc] * 4)
                finish(two, p, dp, dk_acc, dv_acc)
                pair_dq(turn)
                released(one)

            def pair_dq(turn):
                """dQ of the block that is this warpgroup's, 64 columns at a time."""
                mine = 2 * turn + warpgroup

                def product(dq_acc, sum_acc, columns, wanted):
                    dq_product(
                        dq_acc, sum_acc if wanted else None, mine, part, columns, summed
                    )
                    return dq_acc[...], sum_acc[...] if wanted else None

                for index in range(2):
                    plgpu.barrier_wait(ds_ready.at[index])
                sums = None
                for half in range(head_dim // 64):
                    columns = pl.ds(half * 64, 64)
                    accs = [accumulator(64, 64)]
                    wanted = sums_here and half == 0
                    accs += [accumulator(64, 8)] * wanted
                    dq, part_sums = pl.run_scoped(
                        lambda dq_acc, sum_acc=None: product(
                            dq_acc,
                            sum_acc,
                            columns,
                            wanted,  # noqa: B023
                        ),
                        *accs,
                    )
                    sums = part_sums if wanted else sums
                    dq_smem[warpgroup, :, columns] = dq
                if head_dim != 128:
                    released(2 * turn + 1)

                @pl.when(2 * turn + 2 < steps)
                def _():
                    plgpu.barrier_arrive(ds_free.at[0])

                if sums is not None:
                    excess_smem[warpgroup] = sums.sum(axis=1) * 0.125
                plgpu.commit_smem()
                if storer:
                    plgpu.barrier_arrive(dq_ready.at[0])
                else:
                    add_dq(mine, warpgroup)

            def late_step(step, dk_acc, dv_acc):
                now, before = slot(step), buffer(step + 1)
                plgpu.barrier_wait(q_ready.at[now])

                def first_products(s_acc):
                    def both(dq_acc, sum_acc):
                        plgpu.wgmma(
                            s_acc,
                            k_smem.at[opaque(warpgroup)],
                            q_smem.at[now].transpose((1, 0)),
                        )
                        plgpu.barrier_wait(ds_ready.at[before])
                        dq_product(dq_acc, sum_acc, step + 1, part, columns, summed)
                        count = warpgroups + (len(summed) if sums_here else 0)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=count)
                        p = probabilities(s, step)
                        # Keeps ptxas from moving the wait for dQ above the exponentials.
                        plgpu.barrier_wait(dout_ready.at[now])
                        return p, dq_acc[...], None if sum_acc is None else sum_acc[...]

                    return with_dq(both)

                p, dq, sums = pl.run_scoped(first_products, block_acc)

                @pl.when(step > 0)
                def _():
                    await_dq_smem()
                    store_dq(dq, sums, step - 1)

                def second_product(dp_acc):
                    plgpu.wgmma(
                        dp_acc,
                        v_smem.at[opaque(warpgroup)],
                        dout_smem.at[now].transpose((1, 0)),
                    )
                    if plan.tight:
                        return dp_acc[...]
                    plgpu.wgmma(dv_acc, p_rounded, dout_smem.at[now])
                    return plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)

                p_rounded = p.astype(dtype)
                dp = pl.run_scoped(second_product, block_acc)
                ds = gradient(p, dp, step)
                put_ds(ds, step)
                if plan.tight:
                    plgpu.wgmma(dv_acc, p_rounded, dout_smem.at[now])
                plgpu.wgmma(dk_acc, ds, q_smem.at[now])
                plgpu.wgmma_wait(0)
                released(step)

            def last_dq():
                def product(dq_acc, sum_acc):
                    now = buffer(steps - 1)
                    plgpu.barrier_wait(ds_ready.at[now])
                    dq_product(dq_acc, sum_acc, steps - 1, part, columns, summed)
                    return dq_acc[...], None if sum_acc is None else sum_acc[...]

                dq, sums = with_dq(product)

                @pl.when(steps > 0)
                def _():
                    await_dq_smem()
                    store_dq(dq, sums, steps - 1)

            def accumulate(dk_acc, dv_acc):
                if plan.order == "late":
                    # The block before the first one: dS = 0, its dQ is not stored.
                    ds_smem[ds_buffers - 1, warpgroup] = plgpu.layout_cast(
                        jnp.zeros((KEYS, queries), dtype), plgpu.Layout.WGMMA
                    )
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_ready.at[ds_buffers - 1])
                    step = late_step
                else:
                    step = plain_step

                if pair:
                    step = pair_step if plan.order == "pair" else ahead_step
                    plgpu.barrier_arrive(ds_free.at[0])

                @pl.loop(0, lax.div(steps, i32(turns)))
                def _(i):
                    step(i, dk_acc, dv_acc)

                if plan.order == "late":
                    last_dq()
                return dk_acc[...], dv_acc[...]

            total = accumulator(KEYS, head_dim)
            dk, dv = pl.run_scoped(accumulate, total, total)
            k_mine, v_mine = k_tile, v_tile
            # Other warpgroups read this K until the last dQ is made.
            plgpu.barrier_arrive(all_done.at[0])
            plgpu.barrier_wait(all_done.at[0])
            k_mine[...] = (dk * scale).astype(dtype)
            v_mine[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_mine, dk_gmem.at[kv_slice])
            plgpu.copy_smem_to_gmem(v_mine, dv_gmem.at[kv_slice])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(registers[1], action="decrease")

            def load(matrix, rows_gmem, matrix_smem, row, ready, step):
                head, block = block_of(step)
                span = pl.ds(block * queries, queries)
                now = slot(step)
                plgpu.copy_gmem_to_smem(
                    matrix.at[b, span, head], matrix_smem.at[now], ready.at[now]
                )
                plgpu.copy_gmem_to_smem(
                    rows_gmem.at[b, head, span], rows_smem.at[row, now], ready.at[now]
                )

            stream(
                steps,
                stages,
                [
                    (lambda i: load(q_gmem, lse_gmem, q_smem, 0, q_ready, i), q_free),
                    (
                        lambda i: load(
                            dout_gmem, delta_gmem, dout_smem, 1, dout_ready, i
                        ),
                        dout_free,
                    ),
                ],
            )

        if third:

            @pl.when(warpgroup == warpgroups + 1)
            def make_dq():
                plgpu.set_max_registers(registers[2], action="decrease")
                for w in range(warpgroups):
                    plgpu.barrier_wait(tile_ready.at[w])

                def added(step):
                    """Waits until the tile in shared memory is free again."""
                    plgpu.wait_smem_to_gmem(0, wait_read_only=not plan.ordered)
                    end_turn(step)

                for index in range(ds_buffers):

                    @pl.when(index < steps)
                    def _():
                        plgpu.barrier_arrive(ds_free.at[index])

                @pl.loop(0, steps)
                def _(step):
                    now = buffer(step)
                    plgpu.barrier_wait(ds_ready.at[now])
                    for half in range(pieces):
                        if by_rows:
                            part = pl.ds(half * dq_rows, dq_rows)
                            columns = slice(None)
                        else:
                            part = slice(None)
                            columns = pl.ds(half * dq_columns, dq_columns)
                        with_sums = plan.excess and (by_rows or half == 0)

                        def product(dq_acc, *sum_acc):
                            dq_product(
                                dq_acc,
                                sum_acc[0] if with_sums else None,
                                step,
                                part,
                                columns,
                                range(warpgroups),
                            )
                            return dq_acc[...], sum_acc[0][...] if with_sums else None

                        accs = [accumulator(dq_rows, dq_columns)]
                        accs += [accumulator(dq_rows, 8)] * with_sums
                        dq, sums = pl.run_scoped(product, *accs)
                        if half == 0:

                            @pl.when(step > 0)
                            def _():
                                added(step - 1)

                        put_dq(dq, sums, half)

                    @pl.when(step + ds_buffers < steps)
                    def _():
                        plgpu.barrier_arrive(ds_free.at[now])

                    await_turn(step)
                    for piece in range(pieces):
                        add_dq(step, piece)

                @pl.when(steps > 0)
                def _():
                    added(steps - 1)

                plgpu.barrier_arrive(all_done.at[0])
                plgpu.wait_smem_to_gmem(0)

        if storer:

            @pl.when(warpgroup == warpgroups + 1)
            def store():
                plgpu.set_max_registers(registers[2], action="decrease")
                plgpu.barrier_arrive(dq_free.at[0])

                @pl.loop(0, lax.div(steps, i32(turns)))
                def _(turn):
                    plgpu.barrier_wait(dq_ready.at[0])
                    step = turn * turns

                    # The tiles of both blocks of a pair follow on the same tiles.
                    for index in range(turns):
                        await_turn(step + index)
                    for piece in range(pieces):
                        add_dq(step + piece if pair else step, piece)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    @pl.when(step + turns < steps)
                    def _():
                        plgpu.barrier_arrive(dq_free.at[0])

                    if plan.ordered:
                        plgpu.wait_smem_to_gmem(0)
                        for index in range(turns):
                            end_turn(step + index)

                plgpu.wait_smem_to_gmem(0)

    sum_smem = (
        smem_tile((1, 8, 64), dtype),
        plgpu.SMEM((pieces, dq_rows), jnp.float32),
    )
    tile_smem = smem_tile((warpgroups, KEYS, head_dim), dtype)
    block = smem_tile((stages, queries, head_dim), dtype)
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    ready = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    out = jax.ShapeDtypeStruct(key.shape, dtype)
    kernel = plgpu.kernel(
        attention_backward_fused,
        out_type=[out, out],
        scratch_types=[
            (
                tile_smem,
                tile_smem,
                block,
                block,
                plgpu.SMEM((2, stages, queries), jnp.float32),
                smem_tile((ds_buffers, warpgroups, KEYS, queries), dtype),
                smem_tile((pieces, dq_rows, dq_columns), jnp.float32),
                *(sum_smem if plan.excess else ()),
            ),
            (
                plgpu.Barrier(num_arrivals=2 + plan.excess, num_barriers=warpgroups),
                ready,
                ready,
                free,
                free,
                plgpu.Barrier(num_arrivals=warpgroups, num_barriers=ds_buffers),
                plgpu.Barrier(
                    num_arrivals=1 if third else warpgroups, num_barriers=ds_buffers
                ),
                plgpu.Barrier(num_arrivals=warpgroups, num_barriers=1),
                plgpu.Barrier(num_arrivals=1, num_barriers=1),
                plgpu.Barrier(num_arrivals=warpgroups + third, num_barriers=1),
            ),
        ],
        grid=(batch * key_heads * tiles,),
        grid_names=("cta",),
        num_threads=threads,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=plan.bare
        ),
    )
    dq = jax.new_ref(jnp.zeros(query.shape, jnp.float32))
    excess = jax.new_ref(jnp.zeros((sum_parts, *lse.shape), jnp.float32))
    ones = jnp.ones((8, 64), dtype)
    dk, dv = kernel(query, key, value, dout, lse, delta, ones, dq, excess)
    return dq[...], excess[...].sum(axis=0) if plan.excess else None, dk, dv


def backward(
    query,
    key,
    value,
    dout,
    lse,
    dlse,
    out,
    *low,
    scale: float,
    is_causal: bool,
    plan: Plan,
):
    """(dQ, dK, dV) in the inputs' format; what `attention._local_backward` computes."""
    dtype = query.dtype
    dout = lax.optimization_barrier(dout.astype(dtype))
    wide_out = sum(x.astype(jnp.float32) for x in (out, *low))
    delta = jnp.sum(dout.astype(jnp.float32) * wide_out, axis=-1).swapaxes(1, 2) - dlse
    dq, excess, dk, dv = fused_backward(
        query, key, value, dout, lse, delta, scale=scale, is_causal=is_causal, plan=plan
    )
    if excess is not None:
        dq -= correction(
            key, (excess - dlse).swapaxes(1, 2)[..., None], dq.shape, is_causal
        )
    return (dq * scale).astype(dtype), dk, dv


def correction(key, excess, shape, is_causal):
    """excess * centre, the mean of the keys up to the end of each 64 rows (or of all)."""
    batch, query_count, query_heads, head_dim = shape
    group = query_heads // key.shape[2]
    wide = key.astype(jnp.float32)
    if not is_causal:
        return excess * jnp.repeat(wide.mean(axis=1, keepdims=True), group, axis=2)
    blocks = wide.reshape(batch, -1, 64, *key.shape[2:])
    sums = blocks.sum(axis=2).cumsum(axis=1)
    count = query_count // 64
    assert key.shape[1] == query_count, "prototype: as many keys as queries"
    centre = sums / ((jnp.arange(count) + 1) * 64.0)[:, None, None]
    centre = jnp.repeat(centre, group, axis=2)[:, :, None]
    product = excess.reshape(batch, count, 64, query_heads, 1) * centre
    return product.reshape(shape)


def default_registers(plan: Plan, head_dim: int) -> tuple[int, ...]:
    """Registers a thread of the consumers, the loader, and the dQ warpgroup or storer."""
    if plan.order == "third":
        return (208, 24, 72) if plan.queries == 64 else (200, 24, 88)
    if plan.store == "storer":
        return (232, 24, 24)
    return (240, 24)
