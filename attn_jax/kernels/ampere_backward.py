"""Backward attention for Ampere (sm_80) in Mosaic GPU: one kernel dQ, one dK and dV.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)
    dQ = scale * dS K             dK = scale * dS^T Q             dV = P^T dO

Both kernels recompute S and P from the LSE; nothing is added with atomics, so two runs
give the same bits. dK and dV of grouped heads are summed over the group in FP32.

A CTA is one warpgroup and owns `Tiling.rows` rows of the result. It walks over blocks
of `Tiling.columns` rows of the other sequence; while it works on one, cp.async brings
the next. P and dS become left operands in the registers where they were made
(`ampere_tiles.as_left`). For dK and dV that takes transposed tiles, S^T = K Q^T.

Where it rounds (16 bit: the inputs' format), as in `hopper_backward_dq` and `_dkv`:
  S, P, dP, dS, delta and all accumulators are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS K and dS^T Q;
  scale is applied to the FP32 accumulators, which are then rounded once.
What else dQ subtracts, (rowsum(rounded dS) - dLSE) * centre, is explained there.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.tiles import LOG2_E, block_counts, pad_rows, smem_tile, widen
from attn_jax.kernels.tuning import Tiling

# Blocks in shared memory: the one worked on and the one under way.
STAGES = 2

# Of a thread's registers what dK, dV, K, V, S and P may take: else K and V stay in
# shared memory.
REGISTERS_LEFT = 208


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

    `query_count` and `key_count` say how many rows are real; any padding will do.
    """
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    dtype = query.dtype
    rows, columns = tiling.rows, tiling.columns
    log2_scale = scale * LOG2_E
    query, dout = (tiles.join_heads(x[:, :query_count], rows) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], columns) for x in (key, value))
    tile_count = query.shape[1] // rows
    lse, delta, dlse = (pad_rows(x, query.shape[1]) for x in (lse, delta, dlse))
    row_centres = centre.shape[2] > 1

    def attention_backward_dq(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, dlse_gmem, centre_gmem,
        dq_gmem, smem,
    ):  # fmt: skip
        q_smem, dout_smem, k_smem, v_smem = smem
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        # Heavy tiles first: with a causal mask the last rows see the most keys.
        tile = jnp.int32(tile_count - 1) - lax.axis_index("tile")
        first_row = tile * rows
        kv_head = lax.div(n, jnp.int32(query_heads // key_heads))
        full_blocks, blocks = block_counts(
            first_row, rows, columns, key_count, is_causal
        )

        def own_rows(gmem):
            return tiles.head_rows(gmem, b, first_row, rows, n, head_dim)

        def start(j):
            for gmem, smem in ((k_gmem, k_smem), (v_gmem, v_smem)):
                block = tiles.head_rows(
                    gmem, b, j * columns, columns, kv_head, head_dim
                )
                tiles.start_copy(block, smem.at[_slot(j)])

        def load_rows(gmem):
            gmem = gmem.at[b, n, pl.ds(first_row, rows)]
            return plgpu.load(gmem, layout=tiles.ROWS, optimized=False)

        tiles.start_copy(own_rows(q_gmem), q_smem)
        tiles.start_copy(own_rows(dout_gmem), dout_smem)
        start(jnp.int32(0))
        row_lse, row_delta = load_rows(lse_gmem) * LOG2_E, load_rows(delta_gmem)

        def hide(j, s):
            """-inf where a key does not exist or comes after its query."""
            end = tiles.per_row(rows, key_count - j * columns)
            if is_causal:
                last_key = tiles.row_index(rows) + (first_row - j * columns)
                end = jnp.minimum(end, last_key + 1)
            seen = _column_index(s.shape) < tiles.along_rows(end, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        # All but the two copies of block 0.
        tiles.wait_for_copies(2)
        q, dout = _fragments(q_smem), _fragments(dout_smem)

        def step(j, carry):
            dq, ds_sum = carry
            now = _slot(j)
            # Block j has arrived, and all warps are done with block j - 1.
            tiles.wait_for_copies(0)
            pl.when(j + 1 < blocks)(lambda: start(j + 1))
            s = _inner_products(q, k_smem.at[now])
            s = lax.cond(j < full_blocks, lambda s: s, lambda s: hide(j, s), s)
            p = jnp.exp2(s * log2_scale - tiles.along_rows(row_lse, s.shape))
            dp = _inner_products(dout, v_smem.at[now])
            ds = (p * (dp - tiles.along_rows(row_delta, dp.shape))).astype(dtype)
            dq = tiles.multiply(dq, ds, k_smem.at[now])
            return dq, ds_sum + widen(ds).sum(axis=1)

        dq, ds_sum = lax.fori_loop(
            jnp.int32(0),
            blocks,
            step,
            (tiles.accumulator(rows, head_dim), tiles.per_row(rows, 0.0)),
        )
        centre_index = tile if row_centres else jnp.int32(0)
        centre_row = plgpu.load(
            centre_gmem.at[b, kv_head, centre_index],
            layout=tiles.COLUMNS,
            optimized=False,
        )
        excess = tiles.along_rows(ds_sum - load_rows(dlse_gmem), dq.shape)
        dq -= excess * tiles.along_columns(centre_row, dq.shape)
        tiles.store_rows((dq * scale).astype(dtype), q_smem, own_rows(dq_gmem))

    tile_smem = smem_tile((rows, head_dim), dtype)
    block_smem = smem_tile((STAGES, columns, head_dim), dtype)
    dq = plgpu.kernel(
        attention_backward_dq,
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch_types=[(tile_smem, tile_smem, block_smem, block_smem)],
        grid=(query_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value, dout, lse, delta, dlse, centre)
    return dq.reshape(batch, -1, query_heads, head_dim)[:, :query_count]


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
    rows, columns = tiling.rows, tiling.columns
    log2_scale = scale * LOG2_E
    # Past the last query everything is zero: P = exp(0 - 0) = 1 meets dO = 0 there, and
    # dS = 1 * (0 - 0) = 0. Past the last key there are only rows of their own, which
    # are cut off. Neither needs a mask.
    query, dout = (tiles.join_heads(x[:, :query_count], columns) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], rows) for x in (key, value))
    tile_count, query_blocks = key.shape[1] // rows, query.shape[1] // columns
    statistics = _by_block(lse, delta, query_blocks, columns)

    def attention_backward_dkv(
        q_gmem, k_gmem, v_gmem, dout_gmem, statistics_gmem, dk_gmem, dv_gmem, smem
    ):
        k_smem, v_smem, q_smem, dout_smem, statistics_smem = smem
        b, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        # The first keys are seen by the most queries: heavy tiles come first.
        first_row = lax.axis_index("tile") * rows
        first = jnp.int32(0)
        if is_causal:  # The block of the tile's first key, if there is one.
            first = jnp.minimum(
                lax.div(first_row, jnp.int32(columns)), jnp.int32(query_blocks)
            )
        blocks = jnp.int32(query_blocks) - first
        steps = blocks * group

        def own_rows(gmem):
            return tiles.head_rows(gmem, b, first_row, rows, kv_head, head_dim)

        def start(step, head, i):
            for gmem, smem in ((q_gmem, q_smem), (dout_gmem, dout_smem)):
                block = tiles.head_rows(gmem, b, i * columns, columns, head, head_dim)
                tiles.start_copy(block, smem.at[_slot(step)])
            tiles.start_copy(
                statistics_gmem.at[b, head, i], statistics_smem.at[_slot(step)]
            )

        def hide(i, s):
            """-inf where a key comes after its query."""
            start = tiles.row_index(rows) + (first_row - i * columns)
            seen = _column_index(s.shape) >= tiles.along_rows(start, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        tiles.start_copy(own_rows(k_gmem), k_smem)
        tiles.start_copy(own_rows(v_gmem), v_smem)
        first_head = kv_head * group
        pl.when(blocks > 0)(lambda: start(jnp.int32(0), first_head, first))

        # K and V as left operands: kept where registers are left for them.
        tiles.wait_for_copies(0)
        in_registers = rows * (3 * head_dim + 2 * columns) <= REGISTERS_LEFT * 128
        k, v = (_fragments(x) if in_registers else x for x in (k_smem, v_smem))

        def step(step, carry):
            head, i, dk, dv = carry
            now = _slot(step)
            # This block has arrived, and all warps are done with the one before.
            tiles.wait_for_copies(0)
            is_last = i + 1 == query_blocks
            next_head = jnp.where(is_last, head + 1, head)
            next_i = jnp.where(is_last, first, i + 1)
            pl.when(step + 1 < steps)(lambda: start(step + 1, next_head, next_i))

            def statistic(index, shape):
                x = plgpu.load(statistics_smem.at[now, index], layout=tiles.COLUMNS)
                return tiles.along_columns(x, shape)

            s = _inner_products(k, q_smem.at[now])
            if is_causal:
                s = lax.cond(
                    i * columns < first_row + (rows - 1),
                    lambda s: hide(i, s),
                    lambda s: s,
                    s,
                )
            p = jnp.exp2(s * log2_scale - statistic(0, s.shape))
            dv = tiles.multiply(dv, p.astype(dtype), dout_smem.at[now])
            dp = _inner_products(v, dout_smem.at[now])
            ds = (p * (dp - statistic(1, dp.shape))).astype(dtype)
            dk = tiles.multiply(dk, ds, q_smem.at[now])
            return next_head, next_i, dk, dv

        zero = tiles.accumulator(rows, head_dim)
        _, _, dk, dv = lax.fori_loop(
            jnp.int32(0), steps, step, (first_head, first, zero, zero)
        )
        tiles.store_rows((dk * scale).astype(dtype), k_smem, own_rows(dk_gmem))
        tiles.store_rows(dv.astype(dtype), v_smem, own_rows(dv_gmem))

    tile_smem = smem_tile((rows, head_dim), dtype)
    block_smem = smem_tile((STAGES, columns, head_dim), dtype)
    statistics_smem = plgpu.SMEM((STAGES, *statistics.shape[3:]), jnp.float32)
    out = jax.ShapeDtypeStruct(key.shape, dtype)
    gradients = plgpu.kernel(
        attention_backward_dkv,
        out_type=[out, out],
        scratch_types=[(tile_smem, tile_smem, block_smem, block_smem, statistics_smem)],
        grid=(key_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value, dout, statistics)
    dk, dv = (x.reshape(batch, -1, key_heads, head_dim) for x in gradients)
    return dk[:, :key_count], dv[:, :key_count]


def _slot(step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(STAGES))


def _column_index(shape: tuple[int, int]) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tiles.ACCUMULATOR)


def _fragments(smem) -> list[jax.Array]:
    """A tile in shared memory, [rows, H], as left operands: H in strips."""
    strips = range(0, smem.shape[1], tiles.SWIZZLED)
    return [tiles.load_left(smem.at[:, pl.ds(k, tiles.SWIZZLED)]) for k in strips]


def _inner_products(left, right_smem) -> jax.Array:
    """left @ right^T in FP32, of two tiles, [rows, H] and [columns, H].

    `left` are `_fragments` or, still in shared memory, what to make them from.
    """
    left = left if isinstance(left, list) else _fragments(left)
    acc = tiles.accumulator(left[0].shape[0], right_smem.shape[0])
    for i, strip in enumerate(left):
        part = pl.ds(i * tiles.SWIZZLED, tiles.SWIZZLED)
        right = tiles.load_right(right_smem.at[:, part].transpose((1, 0)))
        acc = plgpu.mma(acc, strip, right)
    return acc


def _by_block(
    lse: Float32[Array, "B N T"], delta: Float32[Array, "B N T"], count: int, size: int
) -> Float32[Array, "B N count R size"]:
    """LSE in units of log2 and delta of each of `count` blocks of `size` queries.

    cp.async copies them with all 128 threads, 4 bytes each or a multiple of that, so
    there are zero rows behind the two where blocks are short.
    """
    rows = [pad_rows(x, count * size) for x in (lse * LOG2_E, delta)]
    rows += [jnp.zeros_like(rows[0])] * (max(2, -(-128 // size)) - 2)
    blocks = [x.reshape(*x.shape[:2], count, size) for x in rows]
    return jnp.stack(blocks, axis=3)
