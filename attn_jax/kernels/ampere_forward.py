"""Forward attention for Ampere (sm_80) in Mosaic GPU.

    S = scale * Q K^T        P = exp(S - m), m = rowmax(S)        l = rowsum(P)
    out = P V / l            LSE = m + log(l)

A CTA is one warpgroup and owns `Tiling.tile` queries of one head. Its threads copy K
and V to shared memory themselves (cp.async), a block ahead of the products, which are
synchronous (mma.sync): one CTA's softmax runs beside another's products, as in
FlashAttention-2 (arXiv 2307.08691), so tiles are such that two fit a multiprocessor.

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

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.tiles import LN_2, LOG2_E, block_counts, smem_tile
from attn_jax.kernels.tuning import Tiling


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

    `query_count` and `key_count` say how many rows are real; any padding will do.
    `scale` is not negative. A causal row i sees the keys j <= i.
    """
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    query = tiles.join_heads(query[:, :query_count], rows)
    key = tiles.join_heads(key[:, :key_count], columns)
    value = tiles.join_heads(value[:, :key_count], columns)
    tile_count = query.shape[1] // rows
    log2_scale = scale * LOG2_E
    keep_low = residual and out_dtype != jnp.float32

    def attention_forward(q_gmem, k_gmem, v_gmem, out_gmem, low_gmem, lse_gmem, smem):
        q_smem, k_smem, v_smem = smem
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        # Heavy tiles first: with a causal mask the last rows see the most keys.
        tile = jnp.int32(tile_count - 1) - lax.axis_index("tile")
        first_row = tile * rows
        kv_head = lax.div(n, jnp.int32(query_heads // key_heads))
        full_blocks, blocks = block_counts(
            first_row, rows, columns, key_count, is_causal
        )

        def slot(j):
            return lax.rem(j, jnp.int32(stages))

        def start(gmem, smem, j):
            block = tiles.head_rows(gmem, b, j * columns, columns, kv_head, head_dim)
            tiles.start_copy(block, smem.at[slot(j)])

        def start_if_any(gmem, smem, j):
            pl.when(j < blocks)(lambda: start(gmem, smem, j))

        def wait_for_block(j):
            """Of K or V, while all copies after it, 2 (stages - 1), are under way."""
            if stages == 1:
                return tiles.wait_for_copies(0)
            ahead = j + (stages - 1) < blocks
            pl.when(ahead)(lambda: tiles.wait_for_copies(2 * (stages - 1)))
            # Near the end fewer follow, so counting them would wait for too little.
            pl.when(jnp.logical_not(ahead))(lambda: tiles.wait_for_copies(0))

        def hide(j, s):
            """-inf where a key does not exist or comes after its query.

            One bound per row, so that few registers are spent on positions.
            """
            end = tiles.per_row(rows, key_count - j * columns)
            if is_causal:
                visible = first_row - j * columns + 1
                end = jnp.minimum(end, tiles.row_index(rows) + visible)
            column = plgpu.broadcasted_iota(
                jnp.int32, s.shape, 1, layout=tiles.ACCUMULATOR
            )
            return jnp.where(column < tiles.along_rows(end, s.shape), s, -jnp.inf)

        def q_rows(gmem):
            return tiles.head_rows(gmem, b, first_row, rows, n, head_dim)

        tiles.start_copy(q_rows(q_gmem), q_smem)
        # K_0 V_0 K_1 V_1 ...: in this order, here and in the loop.
        start(k_gmem, k_smem, jnp.int32(0))
        for ahead in range(1, stages):
            start_if_any(v_gmem, v_smem, jnp.int32(ahead - 1))
            start_if_any(k_gmem, k_smem, jnp.int32(ahead))

        def step(j, carry):
            acc, row_max, row_sum = carry
            wait_for_block(j)
            # All warps have done P V of block j - 1: its slot is free.
            start_if_any(v_gmem, v_smem, j + (stages - 1))
            s = tiles.accumulator(rows, columns)
            for k in range(0, head_dim, tiles.SWIZZLED):
                part = pl.ds(k, tiles.SWIZZLED)
                s = plgpu.mma(
                    s,
                    tiles.load_left(q_smem.at[:, part]),
                    tiles.load_right(k_smem.at[slot(j), :, part].transpose((1, 0))),
                )
            wait_for_block(j)
            # All warps have done Q K^T of block j.
            start_if_any(k_gmem, k_smem, j + stages)
            s = lax.cond(j < full_blocks, lambda s: s, lambda s: hide(j, s), s)
            row_max, row_sum, p, correction = tiles.online_softmax(
                s, row_max, row_sum, log2_scale
            )
            acc = acc * tiles.along_rows(correction, acc.shape)
            acc = tiles.multiply(acc, p.astype(dtype), v_smem.at[slot(j)])
            return acc, row_max, row_sum

        acc, row_max, row_sum = lax.fori_loop(
            jnp.int32(0),
            blocks,
            step,
            (
                tiles.accumulator(rows, head_dim),
                tiles.per_row(rows, -jnp.inf),
                tiles.per_row(rows, 0.0),
            ),
        )
        out = acc / tiles.along_rows(row_sum, acc.shape)
        lse_gmem[b, n, pl.ds(first_row, rows)] = row_max * LN_2 + jnp.log(row_sum)

        if out_dtype == jnp.float32:
            q_rows(out_gmem)[...] = out
            return
        # Q is no longer needed: its tile carries out to whole rows. In parts, since out
        # and what it is rounded to do not fit in the registers beside each other.
        for k in range(0, head_dim, tiles.SWIZZLED):
            part = pl.ds(k, tiles.SWIZZLED)
            whole = lax.slice(out, (0, k), (rows, k + tiles.SWIZZLED))
            rounded = whole.astype(dtype)
            tiles.store_rows(rounded, q_smem.at[:, part], q_rows(out_gmem).at[:, part])
            if keep_low:
                low = (whole - rounded.astype(jnp.float32)).astype(dtype)
                tiles.store_rows(low, q_smem.at[:, part], q_rows(low_gmem).at[:, part])

    kv_smem = smem_tile((stages, columns, head_dim), dtype)
    out, low, lse = plgpu.kernel(
        attention_forward,
        out_type=[
            jax.ShapeDtypeStruct(query.shape, out_dtype),
            jax.ShapeDtypeStruct(query.shape, dtype) if keep_low else None,
            jax.ShapeDtypeStruct((batch, query_heads, query.shape[1]), jnp.float32),
        ],
        scratch_types=[(smem_tile((rows, head_dim), dtype), kv_smem, kv_smem)],
        grid=(query_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value)

    def heads(x):
        x = x.reshape(batch, -1, query_heads, head_dim)
        return x[:, :query_count]

    return heads(out), None if low is None else heads(low), lse[:, :, :query_count]
