"""Backward attention for Ampere in one pass: five matrix products instead of seven.

A thread block (CTA) owns 128 keys of a key head and goes over all blocks of queries
that see them. Tiles are transposed, keys down the rows:

    S^T = K Q^T     P^T = exp(S^T - LSE)     dP^T = V dO^T     dS^T = P^T (dP^T - delta)
    dV += P^T dO    dK += dS^T Q             dQ[block] += dS K'   (in global memory)

One warpgroup at head dim 64, two at 128 with 64 keys each. P^T and dS^T become left
operands in the registers where they were made; dS for dQ goes by way of shared memory,
and each warpgroup makes 64 columns of the CTA's tile of dQ from it.

dQ gets an FP32 tile from every CTA that sees the block. So that two runs give the same
bits the additions to a block are made in a fixed order, that of `ring_order`, by
semaphores (`ampere_fused_dq`). The first tile is stored and not added.

dS and K' for dQ are FP16, scaled by powers of two, and K' = K - c, as in
`hopper_backward_fused`, which says why; it rounds where that kernel does.

Why nobody waits for ever
-------------------------
As in `ring_order`, but that CTAs of a ring take one pair each and end; the next pair
has CTAs of its own. CTAs are launched in the order of their numbers and a ring's follow
on each other. Of the first ring that is not over all CTAs run: those before it have
ended, those after it were launched later, and it has no more members than the card has
multiprocessors. A CTA counts its addition before it waits for its next turn. What two
CTAs on a multiprocessor, or several rings, make of it is more room only.

A ring has at most `MULTIPROCESSORS` members, an A100's, on any card: how tiles are
dealt, and so the order of additions, is a function of the shapes alone.
"""

import dataclasses
from typing import Literal

import ampere_fused_dq as in_memory
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels import architecture, internals, ring_order
from attn_jax.kernels.hopper_range import Range, power_of_two
from attn_jax.kernels.tiles import LOG2_E, pad_rows, smem_tile

KEY_TILE = 128
STAGES = 2
# Columns of the strips that tiles are read in.
SWIZZLED = 64
MULTIPROCESSORS = 108

Walk = Literal["up", "down", "apart"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the kernel cuts its work.

    Attributes:
      queries: in a block.
      strip: of those at a time, but for dQ.
      registers: which of K (0) and V (1) are kept as fragments in registers.
      buffers: for dS. With two, a block's dQ is made at the next one's start, there is
        one barrier a block, and an addition is counted a block after it was made. With
        one, dQ follows at once, after a second barrier, and is counted with the next.
      adding: see `ampere_fused_dq`.
      turns: for measurements: False adds without order, and nobody waits.
      walk: of integers, which need no order: None as a ring; or a CTA has one tile, the
        longest of a pair first, and goes over the blocks "up" from where it sees the
        first, "down" from the last one, or, without a mask, up from as many blocks
        further as its tile's number modulo 8, "apart".
    """

    queries: int = 64
    strip: int = 64
    registers: tuple[int, ...] = ()
    buffers: int = 2
    adding: in_memory.Adding = "reduce"
    turns: bool = True
    walk: Walk | None = None


def backward_fused(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K H"],
    dout: Float[Array, "B Tpad N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    row_sum: Float32[Array, "B N T"],
    numbers: Range,
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    cut: Cut,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """(dQ, dK, dV). `row_sum` is what rows of dS sum to, `numbers` are those of
    `hopper_range.range_of`. Under a causal mask T = S."""
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    group = query_heads // key_heads
    dtype = query.dtype
    queries, strip = cut.queries, cut.strip
    warpgroups = head_dim // in_memory.COLUMNS
    keys = KEY_TILE // warpgroups
    exponent = jnp.repeat(numbers.row_exponent, group, axis=1)[..., None]
    # Past the last query everything is zero: P = exp(0 - 0) = 1 meets dO = 0 there, and
    # dS = 1 * (0 - 0) = 0.
    query, dout = (tiles.join_heads(x[:, :query_count], queries) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], KEY_TILE) for x in (key, value))
    blocks_in_all = query.shape[1] // queries
    statistics = _by_block(lse * LOG2_E - exponent, delta, blocks_in_all, queries)
    ring = ring_order.ring_of(
        tiles=key.shape[1] // KEY_TILE,
        blocks=blocks_in_all,
        pairs=batch * key_heads,
        group=group,
        ratio=KEY_TILE // queries if is_causal else None,
        rings=batch * key_heads,
        multiprocessors=min(MULTIPROCESSORS, architecture.H100_MULTIPROCESSORS),
    )
    log2_scale = scale * LOG2_E

    def attention_backward_fused(
        q_gmem, k_gmem, v_gmem, dout_gmem, statistics_gmem, centre_gmem, key_factor,
        row_divisor, zeros_gmem, dq_gmem, dk_gmem, dv_gmem, smem, barriers,
    ):  # fmt: skip
        del zeros_gmem
        k_smem, v_smem, keys_smem, q_smem, dout_smem, statistics_smem, ds_smem = smem
        i32 = jnp.int32
        members = ring.tiles if cut.walk else ring.size
        pair = lax.div(lax.axis_index("cta"), i32(members))
        member = lax.rem(lax.axis_index("cta"), i32(members))
        b, kv_head = lax.div(pair, i32(key_heads)), lax.rem(pair, i32(key_heads))
        warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else i32(0)
        semaphores = in_memory.semaphores(
            batch * query_heads * blocks_in_all * warpgroups
        )

        def barrier():
            """Of all threads."""
            in_memory.barrier(barriers, warpgroups)

        def all_copies():
            """All that was copied is there for all; a barrier."""
            tiles.wait_for_copies(0)
            if warpgroups > 1:
                barrier()

        def slot(turn):
            return lax.rem(turn, i32(STAGES))

        def buffer(turn):
            return lax.rem(turn, i32(cut.buffers))

        def take(index):
            """A tile of keys."""
            if cut.walk:
                tile = member
                least = tile * i32(ring.ratio or 0)
                blocks, stride = i32(blocks_in_all) - least, i32(1)
                first = least
                if cut.walk == "down":
                    first, stride = i32(blocks_in_all - 1), i32(-1)
                if cut.walk == "apart" and not is_causal:
                    first = lax.rem(lax.rem(tile, i32(8)), i32(blocks_in_all))
            else:
                tile, first, stride, blocks = map(i32, ring.item(member, index))
            steps = blocks * group
            first_key = tile * KEY_TILE + warpgroup * keys

            def own_rows(gmem):
                return tiles.head_rows(gmem, b, first_key, keys, kv_head, head_dim)

            def block_of(turn):
                """(query head, its number in the group, block of queries)"""
                in_group, i = i32(0), turn
                if group > 1:
                    in_group, i = lax.div(turn, blocks), lax.rem(turn, blocks)
                if cut.walk == "down":
                    block = first - i
                else:
                    block = ring.block(first, stride, i)
                return kv_head * group + in_group, in_group, block

            def start(turn):
                head, _index, block = block_of(turn)
                count = queries // warpgroups
                row = block * queries + warpgroup * count
                for gmem, smem in ((q_gmem, q_smem), (dout_gmem, dout_smem)):
                    rows = tiles.head_rows(gmem, b, row, count, head, head_dim)
                    tiles.start_copy(rows, smem.at[slot(turn), warpgroup])

                @pl.when(warpgroup == 0)
                def _():
                    tiles.start_copy(
                        statistics_gmem.at[b, head, block],
                        statistics_smem.at[slot(turn)],
                    )

            def turn_of(turn):
                """(its block's semaphore, tile of dQ, additions before it, before the
                last one)"""
                head, in_group, block = block_of(turn)
                number = (b * query_heads + head) * blocks_in_all + block
                rank, last = ring.rank(pair, tile, in_group if group > 1 else 0, block)
                semaphore = semaphores.at[number * warpgroups + warpgroup]
                target = dq_gmem.at[b, head, block, warpgroup]
                return semaphore, target, i32(rank), i32(last)

            def count(turn):
                """Lets the next tile add to a block, a barrier after this one was."""
                semaphore, _target, rank, last = turn_of(turn)
                if cut.turns and cut.adding != "integers":
                    pl.when(rank < last)(lambda: in_memory.count_up(semaphore))

            def add_dq(turn):
                dq = plgpu.layout_cast(
                    jnp.zeros((queries, in_memory.COLUMNS), jnp.float32),
                    in_memory.ACCUMULATOR,
                )
                columns = pl.ds(warpgroup * in_memory.COLUMNS, in_memory.COLUMNS)
                for w in range(warpgroups):
                    for k in range(0, keys, 64):
                        ds = ds_smem.at[buffer(turn), w, pl.ds(k, 64)]
                        left = plgpu.load(ds.transpose((1, 0)), layout=in_memory.LEFT)
                        right = plgpu.load(
                            keys_smem.at[w, pl.ds(k, 64), columns],
                            layout=in_memory.RIGHT,
                        )
                        dq = plgpu.mma(dq, left, right)
                if cut.buffers == 1:
                    pl.when(turn > 0)(lambda: count(turn - 1))
                semaphore, target, rank, _last = turn_of(turn)
                if cut.adding == "integers":
                    in_memory.add(target, dq, cut.adding)
                    return

                @pl.when(rank == 0)
                def _():
                    in_memory.store(target, dq, cut.adding)

                @pl.when(rank > 0)
                def _():
                    if cut.turns:
                        in_memory.await_count(semaphore, rank)
                    in_memory.add(target, dq, cut.adding)

            def hide(block, s, column):
                """-inf where a key comes after its query or does not exist."""
                if is_causal:
                    start = tiles.row_index(keys) + (
                        first_key - block * queries - column
                    )
                    index = plgpu.broadcasted_iota(
                        jnp.int32, s.shape, 1, layout=tiles.ACCUMULATOR
                    )
                    seen = index >= tiles.along_rows(start, s.shape)
                else:
                    exists = tiles.row_index(keys) < key_count - first_key
                    seen = tiles.along_rows(exists, s.shape)
                return jnp.where(seen, s, -jnp.inf)

            def masked(block, s, column):
                if is_causal:
                    partial = block * queries + column < first_key + (keys - 1)
                elif key_count % KEY_TILE:
                    partial = first_key + keys > key_count
                else:
                    return s
                return lax.cond(
                    partial, lambda s: hide(block, s, column), lambda s: s, s
                )

            tiles.start_copy(own_rows(k_gmem), k_smem.at[warpgroup])
            tiles.start_copy(own_rows(v_gmem), v_smem.at[warpgroup])
            start(i32(0))
            tiles.wait_for_copies(0)
            for k in range(0, head_dim, SWIZZLED):
                part = pl.ds(k, SWIZZLED)
                own = k_smem.at[warpgroup, :, part]
                own = plgpu.load(own, layout=tiles.ACCUMULATOR)
                row = plgpu.load(
                    centre_gmem.at[b, kv_head, part],
                    layout=tiles.ACCUMULATOR.reduce(0),
                    optimized=False,
                )
                wide = own.astype(jnp.float32)
                wide = wide - tiles.along_columns(row, wide.shape)
                wide = wide * key_factor[b, kv_head]
                keys_smem[warpgroup, :, part] = wide.astype(jnp.float16)
            k, v = (
                _fragments(x.at[warpgroup]) if i in cut.registers else x.at[warpgroup]
                for i, x in enumerate((k_smem, v_smem))
            )

            def step(turn, carry):
                dk, dv = carry
                now = slot(turn)
                _head, _index, block = block_of(turn)
                # This block has arrived, and all are done with the one before.
                all_copies()
                if cut.buffers > 1:
                    # While nothing is under way to or from memory, for which counting
                    # waits.
                    pl.when(turn > 1)(lambda: count(turn - 2))
                pl.when(turn + 1 < steps)(lambda: start(turn + 1))
                if cut.buffers > 1:
                    pl.when(turn > 0)(lambda: add_dq(turn - 1))
                kept = []
                for column in range(0, queries, strip):
                    rows = pl.ds(column, strip)

                    def strip_of(smem):
                        per = queries // warpgroups
                        if strip <= per:
                            w, within = divmod(column, per)
                            return [smem.at[now, w, pl.ds(within, strip)]]
                        return [smem.at[now, w] for w in range(warpgroups)]

                    def statistic(index, shape):
                        x = plgpu.load(
                            statistics_smem.at[now, index, rows],
                            layout=tiles.COLUMNS,
                        )
                        return tiles.along_columns(x, shape)

                    qs, douts = strip_of(q_smem), strip_of(dout_smem)
                    s = masked(block, _inner_products(k, qs), column)
                    p = jnp.exp2(s * log2_scale - statistic(0, s.shape))
                    dv = _multiply(dv, p.astype(dtype), douts)
                    dp = _inner_products(v, douts)
                    ds = p * (dp - statistic(1, dp.shape))
                    kept.append(ds.astype(jnp.float16))
                    dk = _multiply(dk, ds.astype(dtype), qs)
                whole = kept[0] if len(kept) == 1 else jnp.concatenate(kept, axis=1)
                ds_smem[buffer(turn), warpgroup] = whole
                if cut.buffers == 1:
                    if warpgroups > 1:
                        barrier()
                    else:
                        tiles.wait_for_copies(3)  # as barrier
                    add_dq(turn)
                return dk, dv

            zero = tiles.accumulator(keys, head_dim)
            dk, dv = lax.fori_loop(i32(0), steps, step, (zero, zero))
            all_copies()
            if cut.buffers > 1:
                pl.when(steps > 1)(lambda: count(steps - 2))
                add_dq(steps - 1)
                # All have added, and read K' and dS.
                all_copies()
            count(steps - 1)
            divisor = row_divisor[b, kv_head]
            dk, dv = dk * (divisor * scale), dv * divisor
            tiles.store_rows(
                dk.astype(dtype), k_smem.at[warpgroup], own_rows(dk_gmem), SWIZZLED
            )
            tiles.store_rows(
                dv.astype(dtype), v_smem.at[warpgroup], own_rows(dv_gmem), SWIZZLED
            )

        @pl.loop(0, i32(1 if cut.walk else ring.passes(member)))
        def _(index):
            take(index)

    block_smem = smem_tile((STAGES, warpgroups, queries // warpgroups, head_dim), dtype)
    tile_smem = smem_tile((warpgroups, keys, head_dim), dtype)
    scratch = (
        tile_smem,
        tile_smem,
        smem_tile((warpgroups, keys, head_dim), jnp.float16),
        block_smem,
        block_smem,
        plgpu.SMEM((STAGES, *statistics.shape[3:]), jnp.float32),
        smem_tile((cut.buffers, warpgroups, keys, queries), jnp.float16),
    )
    dq_shape = (
        *(batch, query_heads, blocks_in_all, warpgroups),
        *(queries, in_memory.COLUMNS),
    )
    dkv = jax.ShapeDtypeStruct(key.shape, dtype)
    by_integers = cut.adding == "integers"
    dq = jax.ShapeDtypeStruct(dq_shape, jnp.int32 if by_integers else jnp.float32)
    operands = (
        *(query, key, value, dout, statistics, numbers.centre),
        numbers.key_factor[..., 0],
        power_of_two(-numbers.row_exponent),
        # dS and K' are at most 2^15, and what rows of dS sum to, in absolute value, so
        # that the sum is within 2^30.
        jnp.zeros(dq.shape, dq.dtype) if by_integers else None,
    )
    total, dk, dv = internals.kernel(
        attention_backward_fused,
        aliases={len(operands) - 1: 0} if by_integers else {},
        out_type=[dq, dkv, dkv],
        scratch_types=[scratch, in_memory.barrier_scratch(warpgroups)],
        grid=(batch * key_heads * (ring.tiles if cut.walk else ring.size),),
        grid_names=("cta",),
        compiler_params=tiles.COMPILER_PARAMS,
        **{"num_threads": warpgroups, "thread_name": "warpgroup"},
    )(*operands)
    total = in_memory.in_order(total, cut.adding)[:, :query_count].astype(jnp.float32)
    # One after the other: their product may lie beyond FP32's range.
    for power in numbers.undone():
        power = jnp.repeat(power, group, axis=1)
        total = total * power[:, None, :, None]
    shift = row_sum.swapaxes(1, 2)[..., None]
    shift = shift * jnp.repeat(numbers.centre, group, axis=1)[:, None]
    dq = (scale * (total + shift)).astype(dtype)
    dk, dv = (x.reshape(batch, -1, key_heads, head_dim) for x in (dk, dv))
    return dq, dk[:, :key_count], dv[:, :key_count]


def _fragments(smem) -> list[jax.Array]:
    """A tile in shared memory, [rows, H], as left operands: H in strips."""
    strips = range(0, smem.shape[1], SWIZZLED)
    return [tiles.load_left(smem.at[:, pl.ds(k, SWIZZLED)]) for k in strips]


def _inner_products(left, rights: list) -> jax.Array:
    """left @ right^T in FP32, `rights` one below the other."""
    left = left if isinstance(left, list) else _fragments(left)
    found = []
    for smem in rights:
        acc = tiles.accumulator(left[0].shape[0], smem.shape[0])
        for i, strip in enumerate(left):
            part = pl.ds(i * SWIZZLED, SWIZZLED)
            right = tiles.load_right(smem.at[:, part].transpose((1, 0)))
            acc = plgpu.mma(acc, strip, right)
        found.append(acc)
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)


def _multiply(acc: jax.Array, left: jax.Array, rights: list) -> jax.Array:
    """acc + left @ right, `rights` one below the other."""
    start = 0
    for smem in rights:
        end = start + smem.shape[0]
        part = lax.slice(left, (0, start), (left.shape[0], end))
        acc = tiles.multiply(acc, part, smem)
        start = end
    return acc


def _by_block(
    lse2: Float32[Array, "B N T"], delta: Float32[Array, "B N T"], count: int, size: int
) -> Float32[Array, "B N count R size"]:
    """LSE in units of log2 and delta of each of `count` blocks of `size` queries, as
    `ampere_backward_dkv` has them."""
    rows = [pad_rows(x, count * size) for x in (lse2, delta)]
    rows += [jnp.zeros_like(rows[0])] * (max(2, -(-128 // size)) - 2)
    blocks = [x.reshape(*x.shape[:2], count, size) for x in rows]
    return jnp.stack(blocks, axis=3)
