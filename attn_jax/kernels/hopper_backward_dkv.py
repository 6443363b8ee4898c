"""Backward attention for Hopper (sm_90a) in Mosaic GPU: the kernel for dK and dV.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)
    dK = scale * dS^T Q           dV    = P^T dO

It recomputes S and P from the LSE; nothing is added with atomics, so two runs give the
same bits. dK and dV of grouped heads are summed over the group in FP32. Where registers
cannot hold 64 rows of both accumulators, two warpgroups share the rows: each makes S
and dP whole, and half the columns of dK and dV.

Where it rounds (16 bit: the inputs' format):
  S, P, dP, dS, delta and both accumulators are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS^T Q;
  scale is applied to the FP32 accumulators, which are then rounded once.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    COLUMNS,
    LOG2_E,
    accumulator,
    along_columns,
    capped,
    found_anew,
    head_of,
    hide_before,
    pad_rows,
    read_tile,
    row_positions,
    smem_tile,
    stream,
    visible,
)
from attn_jax.kernels.tuning import PLENTY_OF_REGISTERS, Tiling
from attn_jax.kernels.visibility import (
    Band,
    Pairs,
    Rules,
    block_lists,
    hide,
    pad_to_tiles,
    whole_tiles,
)

CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


def backward_dkv(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    dout: Float[Array, "B Tpad N D"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
    mask: Rules | None = None,
    band: Band = Band(None, None),
    soft_cap: float | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    wide: bool = False,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K D"]]:
    """(dK, dV). Tiles are transposed: keys down the rows, queries along the columns.

    With `wide` they are the accumulators in FP32, for those who add up parts of them.
    """
    batch, _, query_heads, head_dim = query.shape
    value_dim = value.shape[-1]
    key_heads = key.shape[2]
    group = query_heads // key_heads
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    warpgroups, split = tiling.warpgroups, tiling.split
    # A team of `split` warpgroups owns the same keys, each some columns of dK and dV.
    teams = warpgroups // split
    head_part, value_part = head_dim // split, value_dim // split
    tile_count = pl.cdiv(key_count, tiling.tile)
    query_blocks = pl.cdiv(query_count, columns)
    saves_registers = (head_dim, value_dim) not in PLENTY_OF_REGISTERS
    unit = scale * LOG2_E if soft_cap is None and bias is None else 1.0
    # Past the last query everything is zero, read from memory or filled in by TMA:
    # P = exp(0 - 0) = 1 meets dO = 0 there, and dS = 1 * (0 - 0) = 0. Past the last key
    # there are only rows of their own, which are cut off. Neither needs a mask.
    lse, delta = (pad_rows(x, query_blocks * columns) for x in (lse, delta))
    pairs = None
    if mask is not None:
        lists = block_lists(
            mask,
            band,
            query_count=query_count,
            key_count=key_count,
            query_tile=columns,
            key_tile=tiling.tile,
            by_key=True,
            group=group,
        )
        pairs = Pairs(pad_to_tiles(mask, columns, tiling.tile, by_key=True), lists)
    if bias is not None:
        bias = whole_tiles(bias.swapaxes(2, 3), tiling.tile, columns)

    def attention_backward_dkv(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, pairs, bias_gmem,
        dk_gmem, dv_gmem, smem, barriers,
    ):  # fmt: skip
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem = smem
        tile_ready, q_ready, dout_ready, q_free, dout_free, team_here = barriers
        b, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        tile = lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        # Query blocks [first, whole) see part of the tile, the later ones all of it.
        first, whole = jnp.int32(0), jnp.int32(0)
        if is_causal:
            first = lax.div(tile * tiling.tile, jnp.int32(columns))
            last_key = (tile + 1) * tiling.tile - 1
            whole = lax.div(last_key + jnp.int32(columns - 1), jnp.int32(columns))
            first, whole = (
                jnp.minimum(x, jnp.int32(query_blocks)) for x in (first, whole)
            )
        blocks = jnp.int32(query_blocks) - first
        if pairs is not None:
            listed = pairs.entries(b, kv_head, tile)
            blocks = listed[0]

        def slot(step):
            return rem(step, stages)

        def block_of(step):
            """Which block of queries a step takes, of one head after the other."""
            turn = lax.rem(step, blocks)
            return (
                first + turn
                if pairs is None
                else lax.div(listed[turn + 1], jnp.int32(2))
            )

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            team, part = warpgroup, jnp.int32(0)
            if split > 1:
                team = lax.div(warpgroup, jnp.int32(split))
                part = lax.rem(warpgroup, jnp.int32(split))
            ready = tile_ready.at[team]
            k_tile, v_tile = k_smem.at[team], v_smem.at[team]
            first_row = tile * tiling.tile + team * rows
            kv_slice = (b, pl.ds(first_row, rows), kv_head)

            def load_tile():
                plgpu.copy_gmem_to_smem(k_gmem.at[kv_slice], k_tile, ready)
                plgpu.copy_gmem_to_smem(v_gmem.at[kv_slice], v_tile, ready)

            if split == 1:
                load_tile()
            else:
                pl.when(part == 0)(load_tile)
            plgpu.barrier_wait(ready)

            def own(matrix, columns):
                """This warpgroup's part of a matrix's columns."""
                if split == 1:
                    return matrix
                return matrix.at[:, pl.ds(part * columns, columns)]

            def accumulate(dk_acc, dv_acc):
                @pl.loop(0, blocks * group)
                def _(step):
                    now = slot(step)
                    i = block_of(step)
                    n = kv_head * group + lax.div(step, blocks)
                    if pairs is not None:
                        partial = (
                            lax.rem(listed[lax.rem(step, blocks) + 1], jnp.int32(2))
                            == 1
                        )
                    else:
                        partial = i < whole

                    def hide_some(s):
                        if pairs is not None:
                            return hide(
                                s,
                                pairs,
                                band,
                                b,
                                n,
                                i * columns,
                                first_row,
                                queries_first=False,
                            )
                        if saves_registers:
                            diagonal = row_positions(rows) + (first_row - i * columns)
                            return hide_before(s, diagonal)
                        seen = visible(
                            s.shape,
                            query_start=i * columns,
                            key_start=first_row,
                            key_count=None,
                            is_causal=True,
                            queries_first=False,
                        )
                        return jnp.where(seen, s, -jnp.inf)

                    plgpu.barrier_wait(q_ready.at[now])

                    k, v = k_tile, v_tile
                    if saves_registers:
                        here = found_anew(team)
                        k, v = k_smem.at[here], v_smem.at[here]

                    def products(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, k, q_smem.at[now].transpose((1, 0)))
                        plgpu.barrier_wait(dout_ready.at[now])
                        plgpu.wgmma(dp_acc, v, dout_smem.at[now].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        tile_bias = None
                        if bias_gmem is not None:
                            tile_bias = read_tile(
                                head_of(bias_gmem, b, n),
                                first_row,
                                i * columns,
                                s.shape,
                            )
                        s, slope = capped(s, scale, soft_cap, tile_bias)
                        if is_causal or pairs is not None:
                            s = lax.cond(partial, hide_some, lambda s: s, s)
                        row_lse = plgpu.load(lse_smem.at[now], layout=COLUMNS) * LOG2_E
                        p = jnp.exp2(s * unit - along_columns(row_lse, s.shape))
                        return p, p if slope is None else p * slope, dp_acc[...]

                    block = accumulator(rows, columns)
                    p, p_slope, dp = pl.run_scoped(products, block, block)
                    dout = own(dout_smem.at[now], value_part)
                    plgpu.wgmma(dv_acc, p.astype(dtype), dout)
                    row_delta = plgpu.load(delta_smem.at[now], layout=COLUMNS)
                    ds = p_slope * (dp - along_columns(row_delta, dp.shape))
                    ds = ds.astype(dtype)
                    plgpu.wgmma(dk_acc, ds, own(q_smem.at[now], head_part))
                    plgpu.wgmma_wait(0)
                    # Orders the reads of LSE and delta before TMA's next write to them.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(dout_free.at[now])
                    plgpu.barrier_arrive(q_free.at[now])

                return dk_acc[...], dv_acc[...]

            dk, dv = pl.run_scoped(
                accumulate,
                accumulator(rows, head_part),
                accumulator(rows, value_part),
            )

            def meet():
                plgpu.barrier_arrive(team_here.at[team])
                plgpu.barrier_wait(team_here.at[team])

            def store_tile():
                plgpu.copy_smem_to_gmem(k_tile, dk_gmem.at[kv_slice])
                plgpu.copy_smem_to_gmem(v_tile, dv_gmem.at[kv_slice])
                plgpu.wait_smem_to_gmem(0)

            if wide:
                for gmem, own_columns, x in (
                    (dk_gmem, head_part, dk * scale),
                    (dv_gmem, value_part, dv),
                ):
                    place = gmem.at[b, pl.ds(first_row, rows), kv_head]
                    own(place, own_columns)[...] = x
                return
            # The results take the place of K and V, once nobody reads those.
            if split > 1:
                meet()
            own(k_tile, head_part)[...] = (dk * scale).astype(dtype)
            own(v_tile, value_part)[...] = dv.astype(dtype)
            plgpu.commit_smem()
            if split == 1:
                store_tile()
            else:
                meet()
                pl.when(part == 0)(store_tile)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(matrix, rows_gmem, matrix_smem, rows_smem, ready, step):
                head = kv_head * group + lax.div(step, blocks)
                queries = pl.ds(block_of(step) * columns, columns)
                now = slot(step)
                plgpu.copy_gmem_to_smem(
                    matrix.at[b, queries, head], matrix_smem.at[now], ready.at[now]
                )
                plgpu.copy_gmem_to_smem(
                    rows_gmem.at[b, head, queries], rows_smem.at[now], ready.at[now]
                )

            stream(
                blocks * group,
                stages,
                [
                    (
                        lambda i: load(q_gmem, lse_gmem, q_smem, lse_smem, q_ready, i),
                        q_free,
                    ),
                    (
                        lambda i: load(
                            dout_gmem, delta_gmem, dout_smem, delta_smem, dout_ready, i
                        ),
                        dout_free,
                    ),
                ],
            )

    # S^T = K Q^T and dS^T Q, a sum over `columns`, both read Q; with V and dO likewise.
    k_tiles, q_blocks, v_tiles, dout_blocks = (
        smem_tile((*lead, dim), dtype, columns, dim // split)
        for dim in (head_dim, value_dim)
        for lead in ((teams, rows), (stages, columns))
    )

    def result_type(dim: int) -> jax.ShapeDtypeStruct:
        if not wide:
            return jax.ShapeDtypeStruct((*key.shape[:3], dim), dtype)
        # A plain store, which does not stop at an array's end.
        shape = batch, tile_count * tiling.tile, key_heads, dim
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    row_block = plgpu.SMEM((stages, columns), jnp.float32)
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    team_here = plgpu.Barrier(num_arrivals=split, num_barriers=teams)
    dk, dv = plgpu.kernel(
        attention_backward_dkv,
        out_type=[result_type(dim) for dim in (head_dim, value_dim)],
        scratch_types=[
            (k_tiles, v_tiles, q_blocks, dout_blocks, row_block, row_block),
            (
                plgpu.Barrier(num_arrivals=2, num_barriers=teams),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                free,
                free,
                team_here if split > 1 else None,
            ),
        ],
        grid=(key_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, lse, delta, pairs, bias)
    return dk[:, :key_count], dv[:, :key_count]
