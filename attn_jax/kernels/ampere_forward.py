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
  out is rounded once. With `residual`, what that rounding dropped is kept in one byte
  (`low_part`): the two carry some 16 bits into the backward pass.
exp2 with scale * log2(e) folded in replaces exp, so m is kept in units of log2.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int8

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels import low_part
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    LN_2,
    LOG2_E,
    block_counts,
    capped,
    finite,
    head_of,
    read_tile,
    smem_tile,
)
from attn_jax.kernels.tilings import Tiling
from attn_jax.kernels.visibility import (
    Band,
    Pairs,
    Rules,
    block_lists,
    hide,
    pad_to_tiles,
    whole_tiles,
)


def forward(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: Tiling,
    out_dtype: jnp.dtype,
    residual: bool,
    mask: Rules | None = None,
    band: Band = Band(None, None),
    sinks: Float32[Array, "1 N"] | None = None,
    soft_cap: float | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
) -> tuple[
    Float[Array, "B T N D"], Int8[Array, "B T N D"] | None, Float32[Array, "B N T"]
]:
    """Returns (out, what rounding dropped from out or None, LSE in natural log).

    `query_count` and `key_count` say how many rows are real; any padding will do.
    `scale` is not negative. A causal row i sees the keys j <= i. With `mask` it is that
    and `band` which say what is seen, and `is_causal` is False; a `bias` comes with
    one.
    """
    batch, _, query_heads, head_dim = query.shape
    key_heads, value_dim = value.shape[2:]
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    query = tiles.join_heads(query[:, :query_count], rows)
    key = tiles.join_heads(key[:, :key_count], columns)
    value = tiles.join_heads(value[:, :key_count], columns)
    tile_count = query.shape[1] // rows
    # What logits are multiplied by in the exponent: capped ones are in units of log2.
    unit = scale * LOG2_E if soft_cap is None and bias is None else 1.0
    keep_low = residual and out_dtype != jnp.float32
    # Q and K are read, and out is written, in strips of their rows.
    strip = tiles.swizzled(dtype, columns, head_dim, value_dim)
    value_strip = tiles.swizzled(dtype, columns, value_dim)

    pairs = None
    if mask is not None:
        lists = block_lists(
            mask,
            band,
            query_count=query_count,
            key_count=key_count,
            query_tile=rows,
            key_tile=columns,
        )
        pairs = Pairs(pad_to_tiles(mask, rows, columns), lists)
    if bias is not None:
        bias = whole_tiles(bias, rows, columns)

    def attention_forward(
        q_gmem, k_gmem, v_gmem, pairs, sinks_gmem, bias_gmem, out_gmem, low_gmem,
        lse_gmem, smem,
    ):  # fmt: skip
        q_smem, k_smem, v_smem = smem
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        # Heavy tiles first: with a causal mask the last rows see the most keys.
        tile = jnp.int32(tile_count - 1) - lax.axis_index("tile")
        first_row = tile * rows
        kv_head = lax.div(n, jnp.int32(query_heads // key_heads))
        if pairs is None:
            full_blocks, blocks = block_counts(
                first_row, rows, columns, key_count, is_causal
            )
        else:
            listed = pairs.entries(b, n, tile)
            full_blocks, blocks = jnp.int32(0), listed[0]

        def slot(j):
            return rem(j, stages)

        def block_of(j):
            return j if pairs is None else lax.div(listed[j + 1], jnp.int32(2))

        def start(gmem, smem, j):
            first_key, dim = block_of(j) * columns, smem.shape[-1]
            block = tiles.head_rows(gmem, b, first_key, columns, kv_head, dim)
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

        def hide_last(j, s):
            """-inf where a key does not exist or comes after its query.

            One bound per row, so that few registers are spent on positions.
            """
            end = tiles.per_row(rows, key_count - j * columns)
            if is_causal:
                visible = first_row - j * columns + 1
                end = jnp.minimum(end, tiles.row_index(rows) + visible)
            seen = tiles.column_index(s.shape) < tiles.along_rows(end, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        def shown(j, s):
            """The logits of block j, capped, and -inf where they are hidden."""
            if pairs is None:
                s, _ = capped(s, scale, soft_cap)
                return lax.cond(
                    j < full_blocks, lambda s: s, lambda s: hide_last(j, s), s
                )
            first_key, added = block_of(j) * columns, None
            if bias_gmem is not None:
                added = head_of(bias_gmem, b, n)
                added = read_tile(added, first_row, first_key, s.shape, tiles.MMA)
            s, _ = capped(s, scale, soft_cap, added)

            def hide_some(s):
                assert pairs is not None
                at = (b, n, first_row, first_key)
                return hide(s, pairs, band, *at, fragments=tiles.MMA)

            is_whole = lax.rem(listed[j + 1], jnp.int32(2)) == 0
            return lax.cond(is_whole, lambda s: s, hide_some, s)

        def finish(row_max, row_sum):
            """(1 / l, LSE), the sink included; (0, -inf) for rows that see nothing."""
            before, shrink = row_max, 1.0
            if sinks is not None:
                sink = sinks_gmem[0, n] * LOG2_E
                row_max = jnp.maximum(row_max, sink)
            if pairs is not None:
                row_max = finite(row_max)
            if sinks is not None:
                shrink = jnp.exp2(before - row_max)
                row_sum = row_sum * shrink + jnp.exp2(sink - row_max)
            inverse = shrink / row_sum
            if pairs is not None:
                inverse = jnp.where(row_sum == 0.0, 0.0, inverse)
            lse = row_max * LN_2 + jnp.log(row_sum)
            if pairs is not None and sinks is not None:
                # To the bit where the sink is all there is: dQ is to be 0 there.
                lse = jnp.where(before == -jnp.inf, sinks_gmem[0, n], lse)
            return inverse, lse

        def own_rows(gmem, dim):
            return tiles.head_rows(gmem, b, first_row, rows, n, dim)

        tiles.start_copy(own_rows(q_gmem, head_dim), q_smem)
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
            for k in range(0, head_dim, strip):
                part = pl.ds(k, strip)
                s = plgpu.mma(
                    s,
                    tiles.load_left(q_smem.at[:, part]),
                    tiles.load_right(k_smem.at[slot(j), :, part].transpose((1, 0))),
                )
            wait_for_block(j)
            # All warps have done Q K^T of block j.
            start_if_any(k_gmem, k_smem, j + stages)
            row_max, row_sum, p, correction = tiles.online_softmax(
                *(shown(j, s), row_max, row_sum, unit),
                may_see_nothing=pairs is not None,
            )
            acc = acc * tiles.along_rows(correction, acc.shape)
            acc = tiles.multiply(acc, p.astype(dtype), v_smem.at[slot(j)])
            return acc, row_max, row_sum

        acc, row_max, row_sum = lax.fori_loop(
            jnp.int32(0),
            blocks,
            step,
            (
                tiles.accumulator(rows, value_dim),
                tiles.per_row(rows, -jnp.inf),
                tiles.per_row(rows, 0.0),
            ),
        )
        if pairs is None and sinks is None:
            out = acc / tiles.along_rows(row_sum, acc.shape)
            lse = row_max * LN_2 + jnp.log(row_sum)
        else:
            inverse, lse = finish(row_max, row_sum)
            out = acc * tiles.along_rows(inverse, acc.shape)
        lse_gmem[b, n, pl.ds(first_row, rows)] = lse

        if out_dtype == jnp.float32:
            own_rows(out_gmem, value_dim)[...] = out
            return
        # Q is no longer needed: its tile carries out to whole rows. In parts, since out
        # and what it is rounded to do not fit in the registers beside each other.
        for k in range(0, value_dim, strip):
            whole = lax.slice(out, (0, k), (rows, k + strip))
            rounded = whole.astype(dtype)
            buffer = q_smem.at[:, pl.ds(k % head_dim, strip)]
            place = own_rows(out_gmem, value_dim).at[:, pl.ds(k, strip)]
            tiles.store_rows(rounded, buffer, place, strip)
            if keep_low:
                place = low_gmem.at[b, pl.ds(first_row, rows), n, pl.ds(k, strip)]
                rest = query_count - first_row
                low_part.store(place, whole, rounded, rest, tiles.MMA)

    out_shape = (batch, query.shape[1], query_heads * value_dim)
    low_shape = (batch, query_count, query_heads, value_dim)
    low = jax.ShapeDtypeStruct(low_shape, low_part.DTYPE)
    out, low, lse = plgpu.kernel(
        attention_forward,
        out_type=[
            jax.ShapeDtypeStruct(out_shape, out_dtype),
            low if keep_low else None,
            jax.ShapeDtypeStruct((batch, query_heads, query.shape[1]), jnp.float32),
        ],
        scratch_types=[
            (
                smem_tile((rows, head_dim), dtype, strip),
                smem_tile((stages, columns, head_dim), dtype, strip),
                smem_tile((stages, columns, value_dim), dtype, value_strip),
            )
        ],
        grid=(query_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value, pairs, sinks, bias)

    out = out.reshape(batch, -1, query_heads, value_dim)
    return out[:, :query_count], low, lse[:, :, :query_count]
