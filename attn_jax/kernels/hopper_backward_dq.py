"""Backward attention for Hopper (sm_90a) in Mosaic GPU: the kernel for dQ.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)        dQ = scale * dS K

It recomputes S and P from the LSE; nothing is added with atomics, so two runs give the
same bits.

Where it rounds (16 bit: the inputs' format):
  S, P, dP, dS, delta and the accumulator are FP32;
  dS is rounded to FP16 as the operand of dS K, or on request to 16 bit;
  scale is applied to the FP32 accumulator, which is then rounded once.

dS as FP16 numbers has three bits more than as BF16 ones. Both operands of a product
have one format, so K comes a second time, as FP16 numbers. Each is scaled by a power of
two of its head (`hopper_range`): K before the kernel, dS by way of LSE. The sums
of dS and dQ lose them again in the end.

Rows of dS sum to dLSE in exact arithmetic; rounded ones do not, and what is left over
multiplies the mean of K, which can be far larger than what dQ should be. So dQ
subtracts (rowsum(rounded dS) - dLSE) * centre, zero in exact arithmetic, for a `centre`
near the keys that the row sees. Under a soft cap rows sum to nothing known, so there it
is what rounding adds to them, rowsum(rounded dS - dS); the error of delta stays.

The same loop makes delta from P and dP on request (`backward_delta`).
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.hopper_range import Range, power_of_two
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    COLUMNS,
    GROUP,
    LOG2_E,
    ROWS,
    accumulator,
    along_columns,
    along_rows,
    block_counts,
    capped,
    found_anew,
    head_of,
    hide_from,
    pad_rows,
    partial_sum,
    read_tile,
    row_positions,
    smem_tile,
    stream,
    visible,
    widen,
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
# Bytes of a CTA, less what rows, centres and barriers take at the most.
TILE_MEMORY = 232448 - 8192


def half_stages(tiling: Tiling, head_dim: int, value_dim: int) -> int:
    """Blocks in flight of K as FP16 numbers, beside those of K and V: one where shared
    memory has no more. It is wanted last in a step, so that a block comes while the
    next one's logits are made."""
    rows = tiling.warpgroups * tiling.rows * (head_dim + value_dim)
    columns = tiling.stages * tiling.columns * (2 * head_dim + value_dim)
    return tiling.stages if 2 * (rows + columns) <= TILE_MEMORY else 1


def backward_dq(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    dout: Float[Array, "B Tpad N D"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dlse: Float32[Array, "B N T"],
    centre: Float32[Array, "B K C H"] | None,
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
    row_centre: Float32[Array, "B T N H"] | None = None,
    numbers: Range | None = None,
    wide: bool = False,
) -> Float[Array, "B T N H"]:
    """dQ. `centre` has one row for all queries (C = 1), one for each `tiling.rows`, or
    one for each query (C = T, with `mask`); `row_centre`, in its place, one for each
    query of each query head. Without either nothing is subtracted. With `numbers` dS
    and K are FP16 in their product, scaled as it says, whose centre is not used.

    Sequences are padded to a multiple of 8; `query_count` and `key_count` say how many
    rows are real. With `mask` it is that and `band` which say what is seen, and
    `is_causal` is False; LSE is +inf for queries that see nothing. With `wide` dQ is
    the accumulator in FP32, for those who add up parts of it.
    """
    return _over_keys(
        *(query, key, value, dout, (lse, delta, dlse), centre, row_centre, numbers),
        wide=wide,
        query_count=query_count,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        tiling=tiling,
        mask=mask,
        band=band,
        soft_cap=soft_cap,
        bias=bias,
    )


def backward_delta(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    dout: Float[Array, "B Tpad N D"],
    lse: Float32[Array, "B N T"],
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
) -> Float32[Array, "B N T"]:
    """rowsum(P * dP) in FP32, each sum over the keys in the kernel's order: what
    rowsum(dO * out) is, of the P and dP that dQ, dK and dV are made of. Arguments as of
    `backward_dq`."""
    return _over_keys(
        *(query, key, value, dout, (lse,), None, None, None),
        query_count=query_count,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        tiling=tiling,
        mask=mask,
        band=band,
        soft_cap=soft_cap,
        bias=bias,
    )


def _over_keys(
    query, key, value, dout, rows_of, centre, row_centre, numbers: Range | None,
    *, query_count: int, key_count: int, scale: float, is_causal: bool, tiling: Tiling,
    mask: Rules | None, band: Band, soft_cap: float | None, bias: Array | None,
    wide: bool = False,
) -> Array:  # fmt: skip
    """`backward_dq` or, where `rows_of` is LSE alone, `backward_delta`."""
    batch, _, query_heads, head_dim = query.shape
    value_dim = value.shape[-1]
    key_heads = key.shape[2]
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    warpgroups = tiling.warpgroups
    tile_count = pl.cdiv(query_count, tiling.tile)
    saves_registers = (head_dim, value_dim) not in PLENTY_OF_REGISTERS
    unit = scale * LOG2_E if soft_cap is None and bias is None else 1.0
    tile_rows = tile_count * tiling.tile
    makes_delta = len(rows_of) == 1
    has_centre = centre is not None or row_centre is not None
    half, half_slots = None, 1
    if numbers is not None:
        half_slots = half_stages(tiling, head_dim, value_dim)
        half_key = key.astype(jnp.float32) * numbers.key_factor[:, None]
        half_key = half_key.astype(jnp.float16)
        half = half_key, (power_of_two(-numbers.row_exponent), *numbers.undone())
        # P = exp(S - LSE), and so dS, has the power of two.
        group = query_heads // key_heads
        exponent = jnp.repeat(numbers.row_exponent, group, axis=1)[..., None]
        rows_of = rows_of[0] * LOG2_E - exponent, *rows_of[1:]
    rows_of = [pad_rows(x, tile_rows) for x in rows_of]
    row_centres, own_centres, rows_more = False, False, tile_rows - query_count
    if centre is not None:
        own_centres = mask is not None and centre.shape[2] == query_count
        row_centres = centre.shape[2] > 1 and not own_centres
        if own_centres:
            centre = jnp.pad(centre, ((0, 0), (0, 0), (0, rows_more), (0, 0)))
    if row_centre is not None:
        row_centre = jnp.pad(row_centre, ((0, 0), (0, rows_more), (0, 0), (0, 0)))
    pairs = None
    if mask is not None:
        lists = block_lists(
            mask,
            band,
            query_count=query_count,
            key_count=key_count,
            query_tile=tiling.tile,
            key_tile=columns,
        )
        pairs = Pairs(pad_to_tiles(mask, tiling.tile, columns), lists)
    if bias is not None:
        bias = whole_tiles(bias, tiling.tile, columns)

    def attention_backward_dq(
        q_gmem, k_gmem, v_gmem, dout_gmem, rows_gmem, centre_gmem, row_centre_gmem,
        half_gmem, pairs, bias_gmem, result_gmem, smem, barriers,
    ):  # fmt: skip
        q_smem, dout_smem, k_smem, v_smem, half_smem, row_smem, centre_smem = smem
        tile_ready, k_ready, v_ready, k_free, v_free, half_ready, half_free = barriers
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        tile = jnp.int32(tile_count - 1) - lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(n, jnp.int32(query_heads // key_heads))
        if pairs is None:
            full_blocks, blocks = block_counts(
                tile * tiling.tile, tiling.tile, columns, key_count, is_causal
            )
        else:
            listed = pairs.entries(b, n, tile)
            full_blocks, blocks = jnp.int32(0), listed[0]

        def slot(j, slots=stages):
            return rem(j, slots)

        def block_of(j):
            return j if pairs is None else lax.div(listed[j + 1], jnp.int32(2))

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            ready = tile_ready.at[warpgroup]
            q_tile, dout_tile = q_smem.at[warpgroup], dout_smem.at[warpgroup]
            first_row = tile * tiling.tile + warpgroup * rows
            q_slice = (b, pl.ds(first_row, rows), n)
            plgpu.copy_gmem_to_smem(q_gmem.at[q_slice], q_tile, ready)
            plgpu.copy_gmem_to_smem(dout_gmem.at[q_slice], dout_tile, ready)
            for i, gmem in enumerate(rows_gmem):
                plgpu.copy_gmem_to_smem(
                    gmem.at[b, n, pl.ds(first_row, rows)],
                    row_smem.at[warpgroup, i],
                    ready,
                )
            if centre_gmem is not None:
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

            row_lse = load_rows(0)  # in units of log2 where dS is scaled
            if half_gmem is None:
                row_lse = row_lse * LOG2_E
            row_delta = None if makes_delta else load_rows(1)

            def centred(dq, ds_sum):
                """dq less what rounding left in the row sums, times the centre."""
                own = None
                if own_centres:
                    own = centre_gmem.at[b, kv_head, pl.ds(first_row, rows)]
                elif row_centre_gmem is not None:
                    own = row_centre_gmem.at[q_slice]
                if own is not None:
                    layout = plgpu.Layout.WGMMA
                    centres = plgpu.load(own, layout=layout, optimized=False)
                else:
                    centre_row = plgpu.load(centre_smem.at[warpgroup], layout=COLUMNS)
                    centres = along_columns(centre_row, dq.shape)
                excess = ds_sum if soft_cap is not None else ds_sum - load_rows(2)
                return dq - along_rows(excess, dq.shape) * centres

            def accumulate(dq_acc):
                def step(j, row_sum):
                    now = slot(j)

                    if pairs is None:
                        whole = j < full_blocks
                    else:
                        whole = lax.rem(listed[j + 1], jnp.int32(2)) == 0

                    def hide_some(s):
                        if pairs is not None:
                            key_start = block_of(j) * columns
                            return hide(s, pairs, band, b, n, first_row, key_start)
                        if saves_registers:
                            seen = key_count - j * columns
                            if is_causal:
                                diagonal = first_row + 1 - j * columns
                                diagonal = row_positions(rows) + diagonal
                                seen = jnp.minimum(diagonal, seen)
                            return hide_from(s, seen)
                        seen = visible(
                            s.shape,
                            query_start=first_row,
                            key_start=j * columns,
                            key_count=key_count,
                            is_causal=is_causal,
                        )
                        return jnp.where(seen, s, -jnp.inf)

                    q, dout = q_tile, dout_tile
                    if saves_registers:
                        here = found_anew(warpgroup)
                        q, dout = q_smem.at[here], dout_smem.at[here]

                    def products(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, q, k_smem.at[now].transpose((1, 0)))
                        plgpu.barrier_wait(v_ready.at[now])
                        plgpu.wgmma(dp_acc, dout, v_smem.at[now].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        if half_gmem is not None:
                            plgpu.barrier_arrive(k_free.at[now])
                        tile_bias = None
                        if bias_gmem is not None:
                            tile_bias = read_tile(
                                head_of(bias_gmem, b, n),
                                first_row,
                                block_of(j) * columns,
                                s.shape,
                            )
                        s, slope = capped(s, scale, soft_cap, tile_bias)
                        s = lax.cond(whole, lambda s: s, hide_some, s)
                        p = jnp.exp2(s * unit - along_rows(row_lse, s.shape))
                        # All that P is for here is dS = P (dP - delta) slope.
                        if slope is not None and not makes_delta:
                            p = p * slope

                        # As in the forward pass, these waits keep ptxas from moving
                        # the wait for dP above the exponentials. A wait further down
                        # would have exponentials moved below it.
                        if half_gmem is not None:
                            plgpu.barrier_wait(half_ready.at[slot(j, half_slots)])

                        @pl.when(j + 1 < blocks)
                        def _():
                            plgpu.barrier_wait(k_ready.at[slot(j + 1)])

                        return p, dp_acc[...]

                    block = accumulator(rows, columns)
                    p, dp = pl.run_scoped(products, block, block)
                    plgpu.barrier_arrive(v_free.at[now])
                    if row_delta is None:
                        plgpu.barrier_arrive(k_free.at[now])
                        return row_sum + partial_sum(p * dp)
                    exact = p * (dp - along_rows(row_delta, dp.shape))
                    if half_gmem is None:
                        keys, keys_free = k_smem.at[now], k_free.at[now]
                    else:
                        place = slot(j, half_slots)
                        keys, keys_free = half_smem.at[place], half_free.at[place]
                    ds = exact.astype(keys.dtype)
                    plgpu.wgmma(dq_acc, ds, keys)
                    if has_centre:
                        added = widen(ds)
                        if soft_cap is not None:
                            added -= exact
                        row_sum = row_sum + partial_sum(added)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(keys_free)
                    return row_sum

                plgpu.barrier_wait(k_ready.at[0])
                row_sum = plgpu.layout_cast(
                    jnp.zeros((rows, GROUP), jnp.float32), plgpu.Layout.WGMMA
                )
                row_sum = lax.fori_loop(jnp.int32(0), blocks, step, row_sum)
                dq = None if makes_delta else dq_acc[...]
                return dq, row_sum.sum(axis=1)

            if makes_delta:
                _, row_sum = accumulate(None)
                result_gmem[b, n, pl.ds(first_row, rows)] = row_sum
                return
            dq, ds_sum = pl.run_scoped(accumulate, accumulator(rows, head_dim))
            if half_gmem is not None:
                of_sum, first, second = (x[b, kv_head] for x in half_gmem[1])
                dq, ds_sum = dq * first * second, ds_sum * of_sum
            if has_centre:
                dq = centred(dq, ds_sum)
            if wide:
                result_gmem[b, pl.ds(first_row, rows), n] = dq * scale
                return
            q_tile[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, result_gmem.at[q_slice])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(gmem, smem, ready, j, slots=stages):
                place = slot(j, slots)
                block = gmem.at[b, pl.ds(block_of(j) * columns, columns), kv_head]
                plgpu.copy_gmem_to_smem(block, smem.at[place], ready.at[place])

            def load_half(j):
                assert half_gmem is not None
                load(half_gmem[0], half_smem, half_ready, j, half_slots)

            buffers = [
                (lambda j: load(k_gmem, k_smem, k_ready, j), k_free),
                (lambda j: load(v_gmem, v_smem, v_ready, j), v_free),
            ]
            if half_gmem is None:
                stream(blocks, stages, buffers)
            else:
                slots = stages, stages, half_slots
                stream(blocks, slots, [*buffers, (load_half, half_free)])

    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    half_smem = half_ready = half_free = None
    if half is not None:
        half_smem = smem_tile((half_slots, columns, head_dim), half[0].dtype, columns)
        half_ready = plgpu.Barrier(num_barriers=half_slots)
        half_free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=half_slots)
    out_type = jax.ShapeDtypeStruct(query.shape, dtype)
    # Plain stores do not stop at an array's end.
    if wide:
        shape = batch, tile_rows, query_heads, head_dim
        out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    if makes_delta:
        out_type = jax.ShapeDtypeStruct((batch, query_heads, tile_rows), jnp.float32)
        attention_backward_dq.__name__ = "attention_backward_delta"
    copies = 2 + len(rows_of) + (centre is not None)
    centre_smem = plgpu.SMEM((warpgroups, head_dim), jnp.float32)
    result = plgpu.kernel(
        attention_backward_dq,
        out_type=out_type,
        scratch_types=[
            (
                # S = Q K^T and dS K, a sum over `columns`, both read K.
                smem_tile((warpgroups, rows, head_dim), dtype, columns),
                smem_tile((warpgroups, rows, value_dim), dtype),
                smem_tile((stages, columns, head_dim), dtype, columns),
                smem_tile((stages, columns, value_dim), dtype),
                half_smem,
                plgpu.SMEM((warpgroups, len(rows_of), rows), jnp.float32),
                None if centre is None else centre_smem,
            ),
            (
                plgpu.Barrier(num_arrivals=copies, num_barriers=warpgroups),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_barriers=stages),
                free,
                free,
                half_ready,
                half_free,
            ),
        ],
        grid=(query_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, rows_of, centre, row_centre, half, pairs, bias)
    return result[:, :, :query_count] if makes_delta else result[:, :query_count]
