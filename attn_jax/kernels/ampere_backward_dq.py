"""Backward attention for Ampere (sm_80) in Mosaic GPU: the kernel for dQ.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)        dQ = scale * dS K

It recomputes S and P from the LSE; nothing is added with atomics, so two runs give the
same bits.

A CTA is one warpgroup and owns `Tiling.rows` queries. It walks over blocks of
`Tiling.columns` keys; while it works on one, cp.async brings the next, where there are
two stages. dS becomes a left operand in the registers where it was made
(`ampere_tiles.as_left`).

Where it rounds (16 bit: the inputs' format), as in `hopper_backward_dq`:
  S, P, dP, dS, delta and the accumulator are FP32;
  dS is rounded to 16 bit as the operand of dS K;
  scale is applied to the FP32 accumulator, which is then rounded once.
What else dQ subtracts, (rowsum(rounded dS) - dLSE) * centre, is explained there.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    LOG2_E,
    block_counts,
    capped,
    head_of,
    pad_rows,
    read_tile,
    smem_tile,
    widen,
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
    mask: Rules | None = None,
    band: Band = Band(None, None),
    soft_cap: float | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """dQ. `centre` has one row for all queries (C = 1), one for each `tiling.rows`, or
    one for each query (C = T, with `mask`).

    `query_count` and `key_count` say how many rows are real; any padding will do. With
    `mask` it is that and `band` which say what is seen, and `is_causal` is False; LSE
    is +inf for queries that see nothing.
    """
    batch, _, query_heads, head_dim = query.shape
    key_heads, value_dim = value.shape[2:]
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    unit = scale * LOG2_E if soft_cap is None and bias is None else 1.0
    query, dout = (tiles.join_heads(x[:, :query_count], rows) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], columns) for x in (key, value))
    tile_count = query.shape[1] // rows
    lse, delta, dlse = (pad_rows(x, query.shape[1]) for x in (lse, delta, dlse))
    own_centres = mask is not None and centre.shape[2] == query_count
    row_centres = centre.shape[2] > 1 and not own_centres
    if own_centres:
        rows_more = query.shape[1] - query_count
        centre = jnp.pad(centre, ((0, 0), (0, 0), (0, rows_more), (0, 0)))
    in_registers = tiles.fits_in_registers(
        rows, columns, accumulated=head_dim, operands=head_dim + value_dim
    )
    dims = head_dim, value_dim
    strips = [tiles.swizzled(dtype, columns, dim) for dim in dims]
    strip, value_strip = strips
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

    def attention_backward_dq(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, dlse_gmem, centre_gmem,
        pairs, bias_gmem, dq_gmem, smem,
    ):  # fmt: skip
        q_smem, dout_smem, k_smem, v_smem = smem
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

        def own_rows(gmem, smem):
            return tiles.head_rows(gmem, b, first_row, rows, n, smem.shape[-1])

        def slot(j):
            return rem(j, stages)

        def first_key(j):
            block = j if pairs is None else lax.div(listed[j + 1], jnp.int32(2))
            return block * columns

        def start(j):
            for gmem, smem in ((k_gmem, k_smem), (v_gmem, v_smem)):
                block = tiles.head_rows(
                    gmem, b, first_key(j), columns, kv_head, smem.shape[-1]
                )
                tiles.start_copy(block, smem.at[slot(j)])

        def load_rows(gmem):
            gmem = gmem.at[b, n, pl.ds(first_row, rows)]
            return plgpu.load(gmem, layout=tiles.ROWS, optimized=False)

        tiles.start_copy(own_rows(q_gmem, q_smem), q_smem)
        tiles.start_copy(own_rows(dout_gmem, dout_smem), dout_smem)
        start(jnp.int32(0))
        row_lse, row_delta = load_rows(lse_gmem) * LOG2_E, load_rows(delta_gmem)

        def hide_last(j, s):
            """-inf where a key does not exist or comes after its query."""
            end = tiles.per_row(rows, key_count - j * columns)
            if is_causal:
                last_key = tiles.row_index(rows) + (first_row - j * columns)
                end = jnp.minimum(end, last_key + 1)
            seen = tiles.column_index(s.shape) < tiles.along_rows(end, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        def shown(j, s):
            """(capped logits of block j, -inf where hidden; the cap's derivative)."""
            if pairs is None:
                s, slope = capped(s, scale, soft_cap)
                s = lax.cond(j < full_blocks, lambda s: s, lambda s: hide_last(j, s), s)
                return s, slope
            added = None
            if bias_gmem is not None:
                added = head_of(bias_gmem, b, n)
                added = read_tile(added, first_row, first_key(j), s.shape, tiles.MMA)
            s, slope = capped(s, scale, soft_cap, added)

            def hide_some(s):
                assert pairs is not None
                at = (b, n, first_row, first_key(j))
                return hide(s, pairs, band, *at, fragments=tiles.MMA)

            is_whole = lax.rem(listed[j + 1], jnp.int32(2)) == 0
            return lax.cond(is_whole, lambda s: s, hide_some, s), slope

        # All but the two copies of block 0.
        tiles.wait_for_copies(2)
        q, dout = q_smem, dout_smem
        if in_registers:
            q = tiles.left_strips(q_smem, strip)
            dout = tiles.left_strips(dout_smem, value_strip)

        def step(j, carry):
            dq, ds_sum = carry
            now = slot(j)
            # Block j has arrived, and all warps are done with block j - 1.
            tiles.wait_for_copies(0)
            if stages > 1:
                pl.when(j + 1 < blocks)(lambda: start(j + 1))
            s = tiles.inner_products(q, k_smem.at[now], strip)
            s, slope = shown(j, s)
            p = jnp.exp2(s * unit - tiles.along_rows(row_lse, s.shape))
            # All that P is for here is dS = P (dP - delta) slope.
            p = p if slope is None else p * slope
            dp = tiles.inner_products(dout, v_smem.at[now], value_strip)
            exact = p * (dp - tiles.along_rows(row_delta, dp.shape))
            ds = exact.astype(dtype)
            dq = tiles.multiply(dq, ds, k_smem.at[now])
            added = widen(ds)
            if soft_cap is not None:
                added -= exact
            if stages == 1:
                tiles.wait_for_copies(0)  # as barrier
                pl.when(j + 1 < blocks)(lambda: start(j + 1))
            return dq, ds_sum + added.sum(axis=1)

        dq, ds_sum = lax.fori_loop(
            jnp.int32(0),
            blocks,
            step,
            (tiles.accumulator(rows, head_dim), tiles.per_row(rows, 0.0)),
        )
        if own_centres:
            of_head = centre_gmem.at[b, kv_head]
            centres = read_tile(of_head, first_row, 0, dq.shape, tiles.MMA)
        else:
            centre_index = tile if row_centres else jnp.int32(0)
            centre_row = plgpu.load(
                centre_gmem.at[b, kv_head, centre_index],
                layout=tiles.COLUMNS,
                optimized=False,
            )
        excess = ds_sum if soft_cap is not None else ds_sum - load_rows(dlse_gmem)
        excess = tiles.along_rows(excess, dq.shape)
        if not own_centres:
            centres = tiles.along_columns(centre_row, dq.shape)
        dq -= excess * centres
        dq = (dq * scale).astype(dtype)
        tiles.store_rows(dq, q_smem, own_rows(dq_gmem, q_smem), strip)

    scratch = tuple(
        smem_tile((*lead, dim), dtype, strip)
        for lead in ((rows,), (stages, columns))
        for dim, strip in zip(dims, strips)
    )
    dq = plgpu.kernel(
        attention_backward_dq,
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch_types=[scratch],
        grid=(query_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value, dout, lse, delta, dlse, centre, pairs, bias)
    return dq.reshape(batch, -1, query_heads, head_dim)[:, :query_count]
