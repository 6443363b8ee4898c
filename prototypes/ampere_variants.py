"""Variants of the Ampere kernels, each a switch of `Options`, for measure_ampere.py."""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.tiles import (
    LN_2,
    LOG2_E,
    block_counts,
    pad_rows,
    smem_tile,
    widen,
)
from attn_jax.kernels.tilings import Tiling

# Blocks in shared memory, and columns of the strips that tiles are read in.
STAGES = 2
SWIZZLED = 64
_store_rows = functools.partial(tiles.store_rows, strip=SWIZZLED)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is tried.

    Attributes:
      q_registers: forward: Q as fragments in registers through the loop.
      peeled: masks in a loop of their own, over the blocks that need them.
      packed: dq: dS is summed from its bits.
      registers: dq, dkv: which of the two own tiles (0: Q or K, 1: dO or V) are kept
        as fragments in registers.
    """

    q_registers: bool = False
    peeled: bool = False
    packed: bool = False
    registers: tuple[int, ...] = ()


def _slot(step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(STAGES))


def forward(
    query,
    key,
    value,
    *,
    variant: Options,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
    out_dtype: jnp.dtype,
    residual: bool,
):
    """The next block's Q K^T beside this one's softmax; one barrier a block."""
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    dtype = query.dtype
    rows, columns = tiling.rows, tiling.columns
    stages = STAGES
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
            return lax.rem(j, jnp.int32(STAGES))

        def start(gmem, smem, j):
            block = tiles.head_rows(gmem, b, j * columns, columns, kv_head, head_dim)
            tiles.start_copy(block, smem.at[slot(j)])

        def start_if_any(gmem, smem, j):
            pl.when(j < blocks)(lambda: start(gmem, smem, j))

        def hide(j, s):
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

        parts = [pl.ds(k, SWIZZLED) for k in range(0, head_dim, SWIZZLED)]
        tiles.start_copy(q_rows(q_gmem), q_smem)
        start(k_gmem, k_smem, jnp.int32(0))
        tiles.wait_for_copies(0)
        start(v_gmem, v_smem, jnp.int32(0))
        start_if_any(k_gmem, k_smem, jnp.int32(1))
        kept = [tiles.load_left(q_smem.at[:, p]) for p in parts]

        def logits(j):
            s = tiles.accumulator(rows, columns)
            for part, q in zip(parts, kept):
                if not variant.q_registers:
                    q = tiles.load_left(q_smem.at[:, part])
                right = k_smem.at[slot(j), :, part].transpose((1, 0))
                s = plgpu.mma(s, q, tiles.load_right(right))
            return s

        def softmax_and_values(j, s, carry):
            acc, row_max, row_sum = carry
            row_max, row_sum, p, correction = tiles.online_softmax(
                s, row_max, row_sum, log2_scale
            )
            acc = acc * tiles.along_rows(correction, acc.shape)
            acc = tiles.multiply(acc, p.astype(dtype), v_smem.at[slot(j)])
            return acc, row_max, row_sum

        def step(is_masked, j, carry):
            s, *carry = carry
            # V of block j and K of block j + 1 are there; all warps have done with
            # block j - 1, and with K of block j.
            tiles.wait_for_copies(0)
            start_if_any(v_gmem, v_smem, j + 1)
            start_if_any(k_gmem, k_smem, j + 2)
            if is_masked:
                following = lax.cond(j + 1 < blocks, lambda: logits(j + 1), lambda: s)
                s = hide(j, s)
            else:
                following = logits(j + 1)
            return following, *softmax_and_values(j, s, carry)

        carry = (
            logits(jnp.int32(0)),
            tiles.accumulator(rows, head_dim),
            tiles.per_row(rows, -jnp.inf),
            tiles.per_row(rows, 0.0),
        )
        first_masked = jnp.minimum(full_blocks, blocks - 1)
        carry = lax.fori_loop(
            jnp.int32(0), first_masked, lambda j, c: step(False, j, c), carry
        )
        _, acc, row_max, row_sum = lax.fori_loop(
            first_masked, blocks, lambda j, c: step(True, j, c), carry
        )
        out = acc / tiles.along_rows(row_sum, acc.shape)
        lse_gmem[b, n, pl.ds(first_row, rows)] = row_max * LN_2 + jnp.log(row_sum)

        if out_dtype == jnp.float32:
            q_rows(out_gmem)[...] = out
            return
        # Q is no longer needed: its tile carries out to whole rows. In parts, since out
        # and what it is rounded to do not fit in the registers beside each other.
        for k in range(0, head_dim, SWIZZLED):
            part = pl.ds(k, SWIZZLED)
            whole = lax.slice(out, (0, k), (rows, k + SWIZZLED))
            rounded = whole.astype(dtype)
            _store_rows(rounded, q_smem.at[:, part], q_rows(out_gmem).at[:, part])
            if keep_low:
                low = (whole - rounded.astype(jnp.float32)).astype(dtype)
                _store_rows(low, q_smem.at[:, part], q_rows(low_gmem).at[:, part])

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


def backward_dq(
    query,
    key,
    value,
    dout,
    lse,
    delta,
    dlse,
    centre,
    *,
    variant: Options,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
):
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
            seen = tiles.column_index(s.shape) < tiles.along_rows(end, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        # All but the two copies of block 0.
        tiles.wait_for_copies(2)
        own = (q_smem, dout_smem)
        q, dout = (
            tiles.left_strips(x, SWIZZLED) if i in variant.registers else x
            for i, x in enumerate(own)
        )

        def step(is_masked, j, carry):
            dq, ds_sum = carry
            now = _slot(j)
            # Block j has arrived, and all warps are done with block j - 1.
            tiles.wait_for_copies(0)
            pl.when(j + 1 < blocks)(lambda: start(j + 1))
            s = tiles.inner_products(q, k_smem.at[now], SWIZZLED)
            if not variant.peeled:
                s = lax.cond(j < full_blocks, lambda s: s, lambda s: hide(j, s), s)
            elif is_masked:
                s = hide(j, s)
            p = jnp.exp2(s * log2_scale - tiles.along_rows(row_lse, s.shape))
            dp = tiles.inner_products(dout, v_smem.at[now], SWIZZLED)
            ds = (p * (dp - tiles.along_rows(row_delta, dp.shape))).astype(dtype)
            wide = widen(ds) if variant.packed else ds.astype(jnp.float32)
            dq = tiles.multiply(dq, ds, k_smem.at[now])
            return dq, ds_sum + wide.sum(axis=1)

        carry = tiles.accumulator(rows, head_dim), tiles.per_row(rows, 0.0)
        if variant.peeled:
            carry = lax.fori_loop(
                jnp.int32(0), full_blocks, lambda j, c: step(False, j, c), carry
            )
            carry = lax.fori_loop(
                full_blocks, blocks, lambda j, c: step(True, j, c), carry
            )
        else:
            carry = lax.fori_loop(
                jnp.int32(0), blocks, lambda j, c: step(True, j, c), carry
            )
        dq, ds_sum = carry
        centre_index = tile if row_centres else jnp.int32(0)
        centre_row = plgpu.load(
            centre_gmem.at[b, kv_head, centre_index],
            layout=tiles.COLUMNS,
            optimized=False,
        )
        excess = tiles.along_rows(ds_sum - load_rows(dlse_gmem), dq.shape)
        dq -= excess * tiles.along_columns(centre_row, dq.shape)
        _store_rows((dq * scale).astype(dtype), q_smem, own_rows(dq_gmem))

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
    query,
    key,
    value,
    dout,
    lse,
    delta,
    *,
    variant: Options,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
):
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
    statistics = tiles.by_block(lse * LOG2_E, delta, query_blocks, columns)

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
            seen = tiles.column_index(s.shape) >= tiles.along_rows(start, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        tiles.start_copy(own_rows(k_gmem), k_smem)
        tiles.start_copy(own_rows(v_gmem), v_smem)
        first_head = kv_head * group
        pl.when(blocks > 0)(lambda: start(jnp.int32(0), first_head, first))

        # K and V as left operands: kept where registers are left for them.
        tiles.wait_for_copies(0)
        k, v = (
            tiles.left_strips(x, SWIZZLED) if i in variant.registers else x
            for i, x in enumerate((k_smem, v_smem))
        )

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

            s = tiles.inner_products(k, q_smem.at[now], SWIZZLED)
            if is_causal:
                s = lax.cond(
                    i * columns < first_row + (rows - 1),
                    lambda s: hide(i, s),
                    lambda s: s,
                    s,
                )
            p = jnp.exp2(s * log2_scale - statistic(0, s.shape))
            dv = tiles.multiply(dv, p.astype(dtype), dout_smem.at[now])
            dp = tiles.inner_products(v, dout_smem.at[now], SWIZZLED)
            ds = (p * (dp - statistic(1, dp.shape))).astype(dtype)
            dk = tiles.multiply(dk, ds, q_smem.at[now])
            return next_head, next_i, dk, dv

        zero = tiles.accumulator(rows, head_dim)
        _, _, dk, dv = lax.fori_loop(
            jnp.int32(0), steps, step, (first_head, first, zero, zero)
        )
        _store_rows((dk * scale).astype(dtype), k_smem, own_rows(dk_gmem))
        _store_rows(dv.astype(dtype), v_smem, own_rows(dv_gmem))

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


def products(rows: int, from_smem: bool, steps: int):
    """mma.sync alone: [rows, 64] times [64, 64], again and again; 264 CTAs.

    `from_smem`: the right operand is loaded anew for each.
    """
    ctas = 264

    def attention_products(x_gmem, out_gmem, smem):
        (right_smem,) = smem
        for slot in range(STAGES):
            tiles.start_copy(x_gmem.at[pl.ds(0, 64), pl.ds(0, 64)], right_smem.at[slot])
        tiles.wait_for_copies(0)
        left = plgpu.layout_cast(jnp.ones((rows, 64), jnp.bfloat16), tiles.LEFT)
        kept = tiles.load_right(right_smem.at[0])

        def step(j, acc):
            right = tiles.load_right(right_smem.at[_slot(j)]) if from_smem else kept
            return plgpu.mma(acc, left, right)

        acc = tiles.accumulator(rows, 64)
        acc = lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, acc)
        block = out_gmem.at[lax.axis_index("cta")]
        block[...] = acc

    run = plgpu.kernel(
        attention_products,
        out_type=jax.ShapeDtypeStruct((ctas, rows, 64), jnp.float32),
        scratch_types=[(smem_tile((STAGES, 64, 64), jnp.bfloat16),)],
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=tiles.COMPILER_PARAMS,
    )
    return run, 2.0 * ctas * steps * rows * 64 * 64
