"""Forward attention for Hopper (sm_90a) in Mosaic GPU.

    S = scale * Q K^T        P = exp(S - m), m = rowmax(S)        l = rowsum(P)
    out = P V / l            LSE = m + log(l)

A CTA owns `Tiling.tile` queries of one head: consumer warpgroups of 64 rows each, and
one warpgroup that feeds them K and V by TMA. Inside a warpgroup the softmax of block j
overlaps the product P V of block j - 1 (FlashAttention-3, arXiv 2407.08608, Alg. 2).

Where it rounds (16 bit: the inputs' format):
  S, m, l, the correction factors and the accumulator are FP32;
  P is rounded to 16 bit as the operand of P V; l sums the unrounded P;
  out is rounded once. With `residual`, what that rounding dropped is kept as a second
  16-bit tensor: out + out_low carries about 16 bits into the backward pass.
exp2 with scale * log2(e) folded in replaces exp, so m is kept in units of log2.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.tiles import (
    LN_2,
    LOG2_E,
    ROWS,
    accumulator,
    along_rows,
    block_counts,
    smem_tile,
    stream,
    visible,
)
from attn_jax.kernels.tuning import Tiling

# Registers a thread: setmaxnreg moves them from the loading warpgroup to the others.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


def forward(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K H"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
    out_dtype: jnp.dtype,
    residual: bool,
) -> tuple[
    Float[Array, "B T N H"], Float[Array, "B T N H"] | None, Float32[Array, "B N T"]
]:
    """Returns (out, what rounding dropped from out or None, LSE in natural log).

    Sequences are padded to a multiple of 8; `query_count` and `key_count` say how many
    rows are real. `scale` is not negative. A causal row i sees the keys j <= i.
    """
    batch, padded, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    tile_count = pl.cdiv(query_count, tiling.tile)
    log2_scale = scale * LOG2_E
    keep_low = residual and out_dtype != jnp.float32

    def attention_forward(
        q_gmem, k_gmem, v_gmem, out_gmem, low_gmem, lse_gmem, smem, barriers
    ):
        q_smem, k_smem, v_smem, low_smem, lse_smem = smem
        q_ready, k_ready, v_ready, k_free, v_free = barriers
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        # Heavy tiles first: with a causal mask the last rows see the most keys.
        tile = jnp.int32(tile_count - 1) - lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(n, jnp.int32(query_heads // key_heads))
        full_blocks, blocks = block_counts(
            tile * tiling.tile, tiling.tile, columns, key_count, is_causal
        )

        def slot(j):
            return lax.rem(j, jnp.int32(stages))

        @pl.when(warpgroup < tiling.warpgroups)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            q_tile = q_smem.at[warpgroup]
            first_row = tile * tiling.tile + warpgroup * rows
            q_slice = (b, pl.ds(first_row, rows), n)
            plgpu.copy_gmem_to_smem(q_gmem.at[q_slice], q_tile, q_ready.at[warpgroup])
            plgpu.barrier_wait(q_ready.at[warpgroup])

            def hide(j, s):
                seen = visible(
                    s.shape,
                    query_start=first_row,
                    key_start=j * columns,
                    key_count=key_count,
                    is_causal=is_causal,
                )
                return jnp.where(seen, s, -jnp.inf)

            def softmax(j, s, row_max, row_sum):
                # A branch, not a second loop for the masked blocks: between two loops
                # ptxas copies P's registers, which serialises every wgmma (C7513).
                s = lax.cond(j < full_blocks, lambda s: s, lambda s: hide(j, s), s)
                new_max = jnp.maximum(row_max, s.max(axis=1) * log2_scale)
                correction = jnp.exp2(row_max - new_max)
                p = jnp.exp2(s * log2_scale - along_rows(new_max, s.shape))
                row_sum = row_sum * correction + p.sum(axis=1)
                return new_max, row_sum, p.astype(dtype), correction

            def attend(acc):
                row_max = plgpu.layout_cast(
                    jnp.full((rows,), -jnp.inf, jnp.float32), ROWS
                )
                row_sum = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), ROWS)

                plgpu.barrier_wait(k_ready.at[0])

                def first_logits(s_acc):
                    plgpu.wgmma(s_acc, q_tile, k_smem.at[0].transpose((1, 0)))
                    return s_acc[...]

                s = pl.run_scoped(first_logits, accumulator(rows, columns))
                plgpu.barrier_arrive(k_free.at[0])
                row_max, row_sum, p = softmax(jnp.int32(0), s, row_max, row_sum)[:3]

                @pl.when(blocks > 1)
                def _():
                    plgpu.barrier_wait(k_ready.at[slot(jnp.int32(1))])

                def step(j, carry):
                    row_max, row_sum, p = carry
                    now, before = slot(j), slot(j - 1)

                    def products(s_acc):
                        plgpu.wgmma(s_acc, q_tile, k_smem.at[now].transpose((1, 0)))
                        plgpu.barrier_wait(v_ready.at[before])
                        plgpu.wgmma(acc, p, v_smem.at[before])
                        # S is ready while P V still runs under the softmax below.
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                    s = pl.run_scoped(products, accumulator(rows, columns))
                    plgpu.barrier_arrive(k_free.at[now])
                    row_max, row_sum, p, correction = softmax(j, s, row_max, row_sum)

                    # This wait between the softmax and the wait for P V keeps ptxas
                    # from moving the latter above the exponentials.
                    @pl.when(j + 1 < blocks)
                    def _():
                        plgpu.barrier_wait(k_ready.at[slot(j + 1)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(v_free.at[before])
                    old = acc[...]
                    acc[...] = old * along_rows(correction, old.shape)
                    return row_max, row_sum, p

                row_max, row_sum, p = lax.fori_loop(
                    jnp.int32(1), blocks, step, (row_max, row_sum, p)
                )
                last = slot(blocks - 1)
                plgpu.barrier_wait(v_ready.at[last])
                plgpu.wgmma(acc, p, v_smem.at[last])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v_free.at[last])
                return acc[...], row_max, row_sum

            acc, row_max, row_sum = pl.run_scoped(attend, accumulator(rows, head_dim))
            out = acc / along_rows(row_sum, acc.shape)
            lse_smem[warpgroup] = row_max * LN_2 + jnp.log(row_sum)
            if out_dtype == jnp.float32:
                # Two FP32 tiles do not fit in shared memory beside K and V.
                out_gmem[q_slice] = out
            else:
                rounded = out.astype(dtype)
                # Q is no longer needed: its tile carries out to the TMA store.
                q_tile[...] = rounded
            if keep_low:
                low_smem[warpgroup] = (out - rounded.astype(jnp.float32)).astype(dtype)
            plgpu.commit_smem()
            if out_dtype != jnp.float32:
                plgpu.copy_smem_to_gmem(q_tile, out_gmem.at[q_slice])
            if keep_low:
                plgpu.copy_smem_to_gmem(low_smem.at[warpgroup], low_gmem.at[q_slice])
            plgpu.copy_smem_to_gmem(
                lse_smem.at[warpgroup], lse_gmem.at[b, n, pl.ds(first_row, rows)]
            )
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == tiling.warpgroups)
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

    warpgroups = tiling.warpgroups
    kv_smem = smem_tile((stages, columns, head_dim), dtype)
    out_tile = (warpgroups, rows, head_dim)
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    # TMA stores drop what lies outside an array; plain stores (FP32 out) do not.
    whole_tiles = tile_count * tiling.tile
    out_rows = whole_tiles if out_dtype == jnp.float32 else padded
    low = jax.ShapeDtypeStruct(query.shape, dtype) if keep_low else None
    out, low, lse = plgpu.kernel(
        attention_forward,
        out_type=[
            jax.ShapeDtypeStruct((batch, out_rows, query_heads, head_dim), out_dtype),
            low,
            # A copy of one row axis is not cut off at the array's end: whole tiles.
            jax.ShapeDtypeStruct((batch, query_heads, whole_tiles), jnp.float32),
        ],
        scratch_types=[
            (
                smem_tile(out_tile, dtype),
                kv_smem,
                kv_smem,
                smem_tile(out_tile, dtype) if keep_low else None,
                plgpu.SMEM((warpgroups, rows), jnp.float32),
            ),
            (
                plgpu.Barrier(num_barriers=warpgroups),
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
    )(query, key, value)
    cut = slice(0, query_count)
    return out[:, cut], None if low is None else low[:, cut], lse[:, :, cut]
