"""Backward attention for Ampere (sm_80) in Mosaic GPU: the kernel for dK and dV.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)
    dK = scale * dS^T Q           dV    = P^T dO

It recomputes S and P from the LSE; nothing is added with atomics, so two runs give the
same bits. dK and dV of grouped heads are summed over the group in FP32.

A CTA is one warpgroup and owns `Tiling.rows` keys. It walks over blocks of
`Tiling.columns` queries; while it works on one, cp.async brings the next, where there
are two stages. P and dS become left operands in the registers where they were made
(`ampere_tiles.as_left`), which takes transposed tiles, S^T = K Q^T. Where registers
cannot hold both accumulators, dV is made first and dK after it, by a kernel each.

Where it rounds (16 bit: the inputs' format), as in `hopper_backward_dkv`:
  S, P, dP, dS, delta and both accumulators are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS^T Q;
  scale is applied to the FP32 accumulators, which are then rounded once.
"""

import functools

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
    capped,
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

# Of a thread's registers what both accumulators may take: else each has a kernel.
REGISTERS_FOR_BOTH = 160


def are_together(rows: int, head_dim: int, value_dim: int) -> bool:
    """Whether one kernel makes dK and dV."""
    return rows * (head_dim + value_dim) <= REGISTERS_FOR_BOTH * 128


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
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K D"]]:
    """(dK, dV). Tiles are transposed: keys down the rows, queries along the columns."""
    query_heads, key_heads = query.shape[2], key.shape[2]
    group = query_heads // key_heads
    rows, columns = tiling.rows, tiling.columns
    # Past the last query everything is zero: P = exp(0 - 0) = 1 meets dO = 0 there, and
    # dS = 1 * (0 - 0) = 0. Past the last key there are only rows of their own, which
    # are cut off. Neither needs a mask.
    dims = query.shape[-1], value.shape[-1]
    query, dout = (tiles.join_heads(x[:, :query_count], columns) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], rows) for x in (key, value))
    statistics = tiles.by_block(lse * LOG2_E, delta, query.shape[1] // columns, columns)
    pairs = None
    if mask is not None:
        lists = block_lists(
            mask,
            band,
            query_count=query_count,
            key_count=key_count,
            query_tile=columns,
            key_tile=rows,
            by_key=True,
            group=group,
        )
        pairs = Pairs(pad_to_tiles(mask, columns, rows, by_key=True), lists)
    if bias is not None:
        bias = whole_tiles(bias.swapaxes(2, 3), rows, columns)
    gradients = functools.partial(
        _gradients,
        *(query, key, value, dout, statistics, pairs, bias),
        key_heads=key_heads,
        dims=dims,
        scale=scale,
        is_causal=is_causal,
        tiling=tiling,
        band=band,
        soft_cap=soft_cap,
    )
    if are_together(rows, *dims):
        dk, dv = gradients(wants_dk=True, wants_dv=True)
    else:
        _, dv = gradients(wants_dk=False, wants_dv=True)
        dk, _ = gradients(wants_dk=True, wants_dv=False)

    def heads(x):
        return x.reshape(*x.shape[:2], key_heads, -1)

    dk, dv = heads(dk), heads(dv)
    return dk[:, :key_count], dv[:, :key_count]


def _gradients(
    query: Float[Array, "B M NH"],
    key: Float[Array, "B L KH"],
    value: Float[Array, "B L KD"],
    dout: Float[Array, "B M ND"],
    statistics: Float32[Array, "B N blocks R size"],
    pairs: Pairs | None,
    bias: Float[Array, "#B #N L M"] | None,
    *,
    key_heads: int,
    dims: tuple[int, int],
    scale: float,
    is_causal: bool,
    tiling: Tiling,
    band: Band,
    soft_cap: float | None,
    wants_dk: bool,
    wants_dv: bool,
) -> tuple[Float[Array, "B L KH"] | None, Float[Array, "B L KD"] | None]:
    """dK and dV as far as they are wanted, of whole tiles with joined heads."""
    batch, query_heads, query_blocks = statistics.shape[:3]
    group = query_heads // key_heads
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    head_dim, value_dim = dims
    tile_count = key.shape[1] // rows
    unit = scale * LOG2_E if soft_cap is None and bias is None else 1.0
    # K and V as left operands: kept where registers are left for them.
    in_registers = tiles.fits_in_registers(
        rows,
        columns,
        accumulated=head_dim * wants_dk + value_dim * wants_dv,
        operands=head_dim + value_dim * wants_dk,
    )
    # Without V its tile is no way out for dV, which leaves in strips by way of K's.
    value_strip = tiles.swizzled(dtype, columns, value_dim)
    strip = tiles.swizzled(
        dtype, columns, head_dim, *(() if wants_dk else (value_dim,))
    )

    def attention_backward_dkv(
        q_gmem, k_gmem, v_gmem, dout_gmem, statistics_gmem, pairs, bias_gmem, dk_gmem,
        dv_gmem, smem,
    ):  # fmt: skip
        k_smem, v_smem, q_smem, dout_smem, statistics_smem = smem
        b, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        # The first keys are seen by the most queries: heavy tiles come first.
        first_row = lax.axis_index("tile") * rows
        first, end = jnp.int32(0), query_blocks
        if is_causal:  # The block of the tile's first key, if there is one.
            first = jnp.minimum(
                lax.div(first_row, jnp.int32(columns)), jnp.int32(query_blocks)
            )
        blocks = jnp.int32(query_blocks) - first
        if pairs is not None:
            listed = pairs.entries(b, kv_head, lax.axis_index("tile"))
            blocks = end = listed[0]
        steps = blocks * group

        def slot(step):
            return rem(step, stages)

        def block_of(i):
            return i if pairs is None else lax.div(listed[i + 1], jnp.int32(2))

        def own_rows(gmem, dim):
            return tiles.head_rows(gmem, b, first_row, rows, kv_head, dim)

        def start(step, head, i):
            i = block_of(i)
            for gmem, smem in ((q_gmem, q_smem), (dout_gmem, dout_smem)):
                dim = smem.shape[-1]
                block = tiles.head_rows(gmem, b, i * columns, columns, head, dim)
                tiles.start_copy(block, smem.at[slot(step)])
            tiles.start_copy(
                statistics_gmem.at[b, head, i], statistics_smem.at[slot(step)]
            )

        def hide_first(i, s):
            """-inf where a key comes after its query."""
            start = tiles.row_index(rows) + (first_row - i * columns)
            seen = tiles.column_index(s.shape) >= tiles.along_rows(start, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        def shown(head, i, s):
            """(capped logits of a block, -inf where hidden; the cap's derivative)."""
            if pairs is None:
                s, slope = capped(s, scale, soft_cap)
                if is_causal:
                    s = lax.cond(
                        i * columns < first_row + (rows - 1),
                        lambda s: hide_first(i, s),
                        lambda s: s,
                        s,
                    )
                return s, slope
            first_query, added = block_of(i) * columns, None
            if bias_gmem is not None:
                added = head_of(bias_gmem, b, head)
                added = read_tile(added, first_row, first_query, s.shape, tiles.MMA)
            s, slope = capped(s, scale, soft_cap, added)

            def hide_some(s):
                assert pairs is not None
                at = (b, head, first_query, first_row)
                return hide(
                    *(s, pairs, band, *at), queries_first=False, fragments=tiles.MMA
                )

            is_whole = lax.rem(listed[i + 1], jnp.int32(2)) == 0
            return lax.cond(is_whole, lambda s: s, hide_some, s), slope

        tiles.start_copy(own_rows(k_gmem, head_dim), k_smem)
        if wants_dk:
            tiles.start_copy(own_rows(v_gmem, value_dim), v_smem)
        first_head = kv_head * group
        pl.when(blocks > 0)(lambda: start(jnp.int32(0), first_head, first))

        tiles.wait_for_copies(0)
        k, v = k_smem, v_smem
        if in_registers:
            k = tiles.left_strips(k_smem, strip)
            v = tiles.left_strips(v_smem, value_strip) if wants_dk else None

        def step(step, carry):
            head, i, dk, dv = carry
            now = slot(step)
            # This block has arrived, and all warps are done with the one before.
            tiles.wait_for_copies(0)
            is_last = i + 1 == end
            next_head = jnp.where(is_last, head + 1, head)
            next_i = jnp.where(is_last, first, i + 1)

            def start_next():
                pl.when(step + 1 < steps)(lambda: start(step + 1, next_head, next_i))

            def statistic(index, shape):
                x = plgpu.load(statistics_smem.at[now, index], layout=tiles.COLUMNS)
                return tiles.along_columns(x, shape)

            if stages > 1:
                start_next()
            s = tiles.inner_products(k, q_smem.at[now], strip)
            s, slope = shown(head, i, s)
            p = jnp.exp2(s * unit - statistic(0, s.shape))
            if wants_dv:
                dv = tiles.multiply(dv, p.astype(dtype), dout_smem.at[now])
            if wants_dk:
                dp = tiles.inner_products(v, dout_smem.at[now], value_strip)
                p = p if slope is None else p * slope
                ds = (p * (dp - statistic(1, dp.shape))).astype(dtype)
                dk = tiles.multiply(dk, ds, q_smem.at[now])
            if stages == 1:
                tiles.wait_for_copies(0)  # as barrier
                start_next()
            return next_head, next_i, dk, dv

        zeros = {dim: tiles.accumulator(rows, dim) for dim in dict.fromkeys(dims)}
        dk = zeros[head_dim] if wants_dk else None
        dv = zeros[value_dim] if wants_dv else None
        _, _, dk, dv = lax.fori_loop(
            jnp.int32(0), steps, step, (first_head, first, dk, dv)
        )
        if dk is not None:
            dk = (dk * scale).astype(dtype)
            tiles.store_rows(dk, k_smem, own_rows(dk_gmem, head_dim), strip)
        if dv is None:
            return
        dv, place = dv.astype(dtype), own_rows(dv_gmem, value_dim)
        if wants_dk:
            tiles.store_rows(dv, v_smem, place, value_strip)
        else:
            tiles.store_in_strips(dv, k_smem, place, strip)

    def own_and_blocks(dim, strip):
        shapes = (rows, dim), (stages, columns, dim)
        return (smem_tile(shape, dtype, strip) for shape in shapes)

    k_tile, q_blocks = own_and_blocks(head_dim, strip)
    v_tile, dout_blocks = own_and_blocks(value_dim, value_strip)
    statistics_smem = plgpu.SMEM((stages, *statistics.shape[3:]), jnp.float32)
    scratch = (k_tile, v_tile if wants_dk else None, q_blocks, dout_blocks)
    dk, dv = plgpu.kernel(
        attention_backward_dkv,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, dtype) if wanted else None
            for x, wanted in ((key, wants_dk), (value, wants_dv))
        ],
        scratch_types=[(*scratch, statistics_smem)],
        grid=(key_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value if wants_dk else None, dout, statistics, pairs, bias)
    return dk, dv
