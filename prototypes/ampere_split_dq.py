"""Backward attention for Ampere (sm_80) in Mosaic GPU: the kernel for dQ.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)        dQ = scale * dS K

It recomputes S and P from the LSE; nothing is added with atomics, so two runs give the
same bits.

A CTA owns `Tiling.rows` queries and walks over blocks of `Tiling.columns` keys. It is
two warpgroups, for tiles of twice the queries that one has registers for: the first
makes S, P and half of dQ's columns, the second, a block behind it, dP, dS and the other
half. P and dS go from one to the other by way of shared memory (`ampere_exchange`).

Where it rounds (16 bit: the inputs' format), as in `hopper_backward_dq`:
  S, P, dP, dS, delta and the accumulator are FP32;
  dS is rounded to 16 bit as the operand of dS K;
  scale is applied to the FP32 accumulator, which is then rounded once.
What else dQ subtracts, (rowsum(rounded dS) - dLSE) * centre, is explained there.
"""

import ampere_exchange as exchange
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.tiles import (
    LOG2_E,
    block_counts,
    pad_rows,
    smem_tile,
    widen,
)
from attn_jax.kernels.tilings import Tiling


def backward_dq(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    dout: Float[Array, "B Tpad N D"],
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
    """dQ. `centre` has one row for all queries (C = 1)."""
    batch, _, query_heads, head_dim = query.shape
    key_heads, value_dim = value.shape[2:]
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    unit = scale * LOG2_E
    query, dout = (tiles.join_heads(x[:, :query_count], rows) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], columns) for x in (key, value))
    tile_count = query.shape[1] // rows
    lse, delta, dlse = (pad_rows(x, query.shape[1]) for x in (lse, delta, dlse))
    first_part = head_dim // 2  # of the columns of dQ, the first warpgroup's
    strip = tiles.swizzled(dtype, columns, head_dim, first_part)
    value_strip = tiles.swizzled(dtype, columns, value_dim)

    def attention_backward_dq(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, dlse_gmem, centre_gmem,
        dq_gmem, smem,
    ):  # fmt: skip
        q_smem, dout_smem, k_smem, v_smem, p_smem, ds_smem, sum_smem, point = smem
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        # Heavy tiles first: with a causal mask the last rows see the most keys.
        tile = jnp.int32(tile_count - 1) - lax.axis_index("tile")
        first_row = tile * rows
        kv_head = lax.div(n, jnp.int32(query_heads // key_heads))
        full_blocks, blocks = block_counts(
            first_row, rows, columns, key_count, is_causal
        )

        def own_rows(gmem, smem):
            return tiles.head_rows(gmem, b, first_row, rows, n, smem.shape[-1])

        def slot(j, stages):
            return lax.rem(j, jnp.int32(stages))

        def start(j, gmem, smem):
            block = tiles.head_rows(
                gmem, b, j * columns, columns, kv_head, smem.shape[-1]
            )
            tiles.start_copy(block, smem.at[slot(j, smem.shape[0])])

        def load_rows(gmem):
            gmem = gmem.at[b, n, pl.ds(first_row, rows)]
            return plgpu.load(gmem, layout=tiles.ROWS, optimized=False)

        def hide_last(j, s):
            """-inf where a key does not exist or comes after its query."""
            end = tiles.per_row(rows, key_count - j * columns)
            if is_causal:
                last_key = tiles.row_index(rows) + (first_row - j * columns)
                end = jnp.minimum(end, last_key + 1)
            seen = tiles.column_index(s.shape) < tiles.along_rows(end, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        def add(dq, j, ds, start, width):
            """dQ of some columns, with block j added."""
            k = k_smem.at[slot(j, stages)]
            return tiles.multiply(dq, ds, k.at[:, pl.ds(start, width)])

        def finish(dq, ds_sum, start, width):
            """Takes the centre off, scales, rounds and stores some columns of dQ."""
            own_columns = pl.ds(start, width)
            centre_row = plgpu.load(
                centre_gmem.at[b, kv_head, 0, own_columns],
                layout=tiles.COLUMNS,
                optimized=False,
            )
            centres = tiles.along_columns(centre_row, dq.shape)
            excess = ds_sum - load_rows(dlse_gmem)
            dq -= tiles.along_rows(excess, dq.shape) * centres
            tiles.store_rows(
                (dq * scale).astype(dtype),
                q_smem.at[:, own_columns],
                own_rows(dq_gmem, q_smem).at[:, own_columns],
                strip,
            )

        def weights():
            """S, P and the first columns of dQ, by the first warpgroup."""
            tiles.start_copy(own_rows(q_gmem, q_smem), q_smem)
            start(jnp.int32(0), k_gmem, k_smem)
            row_lse = load_rows(lse_gmem) * LOG2_E
            tiles.wait_for_copies(0)
            q = tiles.left_strips(q_smem, strip)

            def late_add(j, dq):
                """With block j - 2, if there is one."""

                def added(dq):
                    ds = exchange.get(ds_smem.at[slot(j, 2)], (rows, columns), dtype)
                    return add(dq, j - 2, ds, 0, first_part)

                return lax.cond(j > 1, added, lambda dq: dq, dq)

            def step(j, dq):
                exchange.meet(point)
                pl.when(j + 1 < blocks)(lambda: start(j + 1, k_gmem, k_smem))
                s = tiles.inner_products(q, k_smem.at[slot(j, stages)], strip)
                s = lax.cond(j < full_blocks, lambda s: s, lambda s: hide_last(j, s), s)
                p = jnp.exp2(s * unit - tiles.along_rows(row_lse, s.shape))
                exchange.put(p_smem.at[slot(j, 2)], p)
                return late_add(j, dq)

            dq = tiles.accumulator(rows, first_part)
            dq = lax.fori_loop(jnp.int32(0), blocks, step, dq)
            for last in range(2):
                exchange.meet(point)
                dq = late_add(blocks + last, dq)
            ds_sum = plgpu.load(sum_smem, layout=tiles.ROWS, optimized=False)
            finish(dq, ds_sum, 0, first_part)

        def gradients():
            """dP, dS and the other columns of dQ, by the second warpgroup."""
            tiles.start_copy(own_rows(dout_gmem, dout_smem), dout_smem)
            row_delta = load_rows(delta_gmem)
            tiles.wait_for_copies(0)
            dout = tiles.left_strips(dout_smem, value_strip)
            exchange.meet(point)
            start(jnp.int32(0), v_gmem, v_smem)

            def step(j, carry):
                dq, ds_sum = carry
                exchange.meet(point)
                pl.when(j + 1 < blocks)(lambda: start(j + 1, v_gmem, v_smem))
                dp = tiles.inner_products(dout, v_smem.at[slot(j, 2)], value_strip)
                p = exchange.get(p_smem.at[slot(j, 2)], dp.shape, jnp.float32)
                ds = (p * (dp - tiles.along_rows(row_delta, dp.shape))).astype(dtype)
                exchange.put(ds_smem.at[slot(j, 2)], ds)
                dq = add(dq, j, ds, first_part, head_dim - first_part)
                return dq, ds_sum + widen(ds).sum(axis=1)

            dq = tiles.accumulator(rows, head_dim - first_part)
            dq, ds_sum = lax.fori_loop(
                jnp.int32(0), blocks, step, (dq, tiles.per_row(rows, 0.0))
            )
            sum_smem[...] = ds_sum
            exchange.meet(point)
            finish(dq, ds_sum, first_part, head_dim - first_part)

        is_first = lax.axis_index("warpgroup") == 0
        pl.when(is_first)(weights)
        pl.when(jnp.logical_not(is_first))(gradients)

    def own_and_blocks(dim, strip, stages):
        shapes = (rows, dim), (stages, columns, dim)
        return (smem_tile(shape, dtype, strip) for shape in shapes)

    q_tile, k_blocks = own_and_blocks(head_dim, strip, stages)
    dout_tile, v_blocks = own_and_blocks(value_dim, value_strip, 2)
    p_tiles, ds_tiles = (
        exchange.tiles_in_smem(2, (rows, columns), x) for x in (jnp.float32, dtype)
    )
    scratch = (
        *(q_tile, dout_tile, k_blocks, v_blocks, p_tiles, ds_tiles),
        *(plgpu.SMEM((rows,), jnp.float32), exchange.meeting_point()),
    )
    dq = plgpu.kernel(
        attention_backward_dq,
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch_types=[scratch],
        grid=(query_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value, dout, lse, delta, dlse, centre)
    return dq.reshape(batch, -1, query_heads, head_dim)[:, :query_count]
