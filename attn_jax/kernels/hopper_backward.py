"""Backward attention for Hopper (sm_90a) in Mosaic GPU: one kernel dQ, one dK and dV.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)
    dQ = scale * dS K             dK = scale * dS^T Q             dV = P^T dO

Both kernels recompute S and P from the LSE; nothing is added with atomics, so two runs
give the same bits. dK and dV of grouped heads are summed over the group in FP32.

Where it rounds (16 bit: the inputs' format):
  S, P, dP, dS, delta and all accumulators are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS K and dS^T Q;
  scale is applied to the FP32 accumulators, which are then rounded once.

Rows of dS sum to dLSE in exact arithmetic; rounded ones do not, and what is left over
multiplies the mean of K, which can be far larger than what dQ should be. So dQ
subtracts (rowsum(rounded dS) - dLSE) * centre, zero in exact arithmetic, for a `centre`
near the keys that the row sees.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.tiles import (
    COLUMNS,
    LOG2_E,
    ROWS,
    accumulator,
    along_columns,
    along_rows,
    block_counts,
    pad_rows,
    smem_tile,
    stream,
    visible,
)
from attn_jax.kernels.tuning import Tiling

CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


def backward_dq(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K H"],
    dout: Float[Array, "B Tpad N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dlse: Float32[Array, "B N T"],
    centre: Float32[Array, "B K C H"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
) -> Float[Array, "B T N H"]:
    """dQ. `centre` has one row for all queries (C = 1) or one for each `tiling.rows`.

    Sequences are padded to a multiple of 8; `query_count` and `key_count` say how many
    rows are real.
    """
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    warpgroups = tiling.warpgroups
    tile_count = pl.cdiv(query_count, tiling.tile)
    log2_scale = scale * LOG2_E
    lse, delta, dlse = (
        pad_rows(x, tile_count * tiling.tile) for x in (lse, delta, dlse)
    )
    row_centres = centre.shape[2] > 1

    def attention_backward_dq(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, dlse_gmem, centre_gmem,
        dq_gmem, smem, barriers,
    ):  # fmt: skip
        q_smem, dout_smem, k_smem, v_smem, row_smem, centre_smem = smem
        tile_ready, k_ready, v_ready, k_free, v_free = barriers
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        tile = jnp.int32(tile_count - 1) - lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(n, jnp.int32(query_heads // key_heads))
        full_blocks, blocks = block_counts(
            tile * tiling.tile, tiling.tile, columns, key_count, is_causal
        )

        def slot(j):
            return lax.rem(j, jnp.int32(stages))

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            ready = tile_ready.at[warpgroup]
            q_tile, dout_tile = q_smem.at[warpgroup], dout_smem.at[warpgroup]
            first_row = tile * tiling.tile + warpgroup * rows
            q_slice = (b, pl.ds(first_row, rows), n)
            plgpu.copy_gmem_to_smem(q_gmem.at[q_slice], q_tile, ready)
            plgpu.copy_gmem_to_smem(dout_gmem.at[q_slice], dout_tile, ready)
            for i, gmem in enumerate((lse_gmem, delta_gmem, dlse_gmem)):
                plgpu.copy_gmem_to_smem(
                    gmem.at[b, n, pl.ds(first_row, rows)],
                    row_smem.at[warpgroup, i],
                    ready,
                )
            centre_index = jnp.int32(0)
            if row_centres:
                centre_index = tile * warpgroups + warpgroup
            plgpu.copy_gmem_to_smem(
                centre_gmem.at[b, kv_head, centre_index],
                centre_smem.at[warpgroup],
                ready,
            )
            plgpu.barrier_wait(ready)

            def load_rows(i):
                return plgpu.load(row_smem.at[warpgroup, i], layout=ROWS)

            row_lse, row_delta = load_rows(0) * LOG2_E, load_rows(1)

            def accumulate(dq_acc):
                def step(j, ds_sum):
                    now = slot(j)

                    def hide(s):
                        seen = visible(
                            s.shape,
                            query_start=first_row,
                            key_start=j * columns,
                            key_count=key_count,
                            is_causal=is_causal,
                        )
                        return jnp.where(seen, s, -jnp.inf)

                    def products(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, q_tile, k_smem.at[now].transpose((1, 0)))
                        plgpu.barrier_wait(v_ready.at[now])
                        plgpu.wgmma(dp_acc, dout_tile, v_smem.at[now].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        s = lax.cond(j < full_blocks, lambda s: s, hide, s)
                        p = jnp.exp2(s * log2_scale - along_rows(row_lse, s.shape))

                        # As in the forward pass, this wait keeps ptxas from moving the
                        # wait for dP above the exponentials.
                        @pl.when(j + 1 < blocks)
                        def _():
                            plgpu.barrier_wait(k_ready.at[slot(j + 1)])

                        return p, dp_acc[...]

                    block = accumulator(rows, columns)
                    p, dp = pl.run_scoped(products, block, block)
                    plgpu.barrier_arrive(v_free.at[now])
                    ds = (p * (dp - along_rows(row_delta, dp.shape))).astype(dtype)
                    plgpu.wgmma(dq_acc, ds, k_smem.at[now])
                    ds_sum = ds_sum + ds.astype(jnp.float32).sum(axis=1)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(k_free.at[now])
                    return ds_sum

                plgpu.barrier_wait(k_ready.at[0])
                ds_sum = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), ROWS)
                ds_sum = lax.fori_loop(jnp.int32(0), blocks, step, ds_sum)
                return dq_acc[...], ds_sum

            dq, ds_sum = pl.run_scoped(accumulate, accumulator(rows, head_dim))
            centre_row = plgpu.load(centre_smem.at[warpgroup], layout=COLUMNS)
            excess = ds_sum - load_rows(2)
            dq -= along_rows(excess, dq.shape) * along_columns(centre_row, dq.shape)
            q_tile[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, dq_gmem.at[q_slice])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(gmem, smem, ready, j):
                block = gmem.at[b, pl.ds(j * columns, columns), kv_head]
                plgpu.copy_gmem_to_smem(block, smem.at[slot(j)], ready.at[slot(j)])

            stream(
                blocks,
                stages,
                [
                    (lambda j: load(k_gmem, k_smem, k_ready, j), k_free),
                    (lambda j: load(v_gmem, v_smem, v_ready, j), v_free),
                ],
            )

    out_tile = smem_tile((warpgroups, rows, head_dim), dtype)
    block = smem_tile((stages, columns, head_dim), dtype)
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    dq = plgpu.kernel(
        attention_backward_dq,
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch_types=[
            (
                out_tile,
                out_tile,
                block,
                block,
                plgpu.SMEM((warpgroups, 3, rows), jnp.float32),
                plgpu.SMEM((warpgroups, head_dim), jnp.float32),
            ),
            (
                plgpu.Barrier(num_arrivals=6, num_barriers=warpgroups),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_barriers=stages),
                free,
                free,
            ),
        ],
        grid=(query_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, lse, delta, dlse, centre)
    return dq[:, :query_count]


def backward_dkv(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K H"],
    dout: Float[Array, "B Tpad N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """(dK, dV). Tiles are transposed: keys down the rows, queries along the columns."""
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    group = query_heads // key_heads
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    warpgroups = tiling.warpgroups
    tile_count = pl.cdiv(key_count, tiling.tile)
    query_blocks = pl.cdiv(query_count, columns)
    log2_scale = scale * LOG2_E
    # Past the last query everything is zero, read from memory or filled in by TMA:
    # P = exp(0 - 0) = 1 meets dO = 0 there, and dS = 1 * (0 - 0) = 0. Past the last key
    # there are only rows of their own, which are cut off. Neither needs a mask.
    lse, delta = (pad_rows(x, query_blocks * columns) for x in (lse, delta))

    def attention_backward_dkv(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, dk_gmem, dv_gmem,
        smem, barriers,
    ):  # fmt: skip
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem = smem
        tile_ready, q_ready, dout_ready, q_free, dout_free = barriers
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

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            ready = tile_ready.at[warpgroup]
            k_tile, v_tile = k_smem.at[warpgroup], v_smem.at[warpgroup]
            first_row = tile * tiling.tile + warpgroup * rows
            kv_slice = (b, pl.ds(first_row, rows), kv_head)
            plgpu.copy_gmem_to_smem(k_gmem.at[kv_slice], k_tile, ready)
            plgpu.copy_gmem_to_smem(v_gmem.at[kv_slice], v_tile, ready)
            plgpu.barrier_wait(ready)

            def accumulate(dk_acc, dv_acc):
                @pl.loop(0, blocks * group)
                def _(step):
                    now = slot(step)
                    i = first + lax.rem(step, blocks)

                    def hide(s):
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

                    def products(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, k_tile, q_smem.at[now].transpose((1, 0)))
                        plgpu.barrier_wait(dout_ready.at[now])
                        plgpu.wgmma(dp_acc, v_tile, dout_smem.at[now].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        if is_causal:
                            s = lax.cond(i < whole, hide, lambda s: s, s)
                        row_lse = plgpu.load(lse_smem.at[now], layout=COLUMNS) * LOG2_E
                        p = jnp.exp2(s * log2_scale - along_columns(row_lse, s.shape))
                        return p, dp_acc[...]

                    block = accumulator(rows, columns)
                    p, dp = pl.run_scoped(products, block, block)
                    plgpu.wgmma(dv_acc, p.astype(dtype), dout_smem.at[now])
                    row_delta = plgpu.load(delta_smem.at[now], layout=COLUMNS)
                    ds = (p * (dp - along_columns(row_delta, dp.shape))).astype(dtype)
                    plgpu.wgmma(dk_acc, ds, q_smem.at[now])
                    plgpu.wgmma_wait(0)
                    # Orders the reads of LSE and delta before TMA's next write to them.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(dout_free.at[now])
                    plgpu.barrier_arrive(q_free.at[now])

                return dk_acc[...], dv_acc[...]

            total = accumulator(rows, head_dim)
            dk, dv = pl.run_scoped(accumulate, total, total)
            k_tile[...] = (dk * scale).astype(dtype)
            v_tile[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_tile, dk_gmem.at[kv_slice])
            plgpu.copy_smem_to_gmem(v_tile, dv_gmem.at[kv_slice])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(matrix, rows_gmem, matrix_smem, rows_smem, ready, step):
                head = kv_head * group + lax.div(step, blocks)
                queries = pl.ds((first + lax.rem(step, blocks)) * columns, columns)
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

    tile_smem = smem_tile((warpgroups, rows, head_dim), dtype)
    block = smem_tile((stages, columns, head_dim), dtype)
    row_block = plgpu.SMEM((stages, columns), jnp.float32)
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    out = jax.ShapeDtypeStruct(key.shape, dtype)
    dk, dv = plgpu.kernel(
        attention_backward_dkv,
        out_type=[out, out],
        scratch_types=[
            (tile_smem, tile_smem, block, block, row_block, row_block),
            (
                plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                free,
                free,
            ),
        ],
        grid=(key_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, lse, delta)
    return dk[:, :key_count], dv[:, :key_count]
