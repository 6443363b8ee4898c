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

from attn_jax.kernels.hopper_dq_products import (
    Barriers,
    Centre,
    Form,
    Inputs,
    Memory,
    Products,
    Work,
    load_blocks,
)
from attn_jax.kernels.hopper_range import Range, power_of_two
from attn_jax.kernels.tiles import LOG2_E, pad_rows
from attn_jax.kernels.tilings import Tiling
from attn_jax.kernels.visibility import (
    Band,
    Pairs,
    Rules,
    block_lists,
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
    columns, warpgroups = tiling.columns, tiling.warpgroups
    makes_delta = len(rows_of) == 1
    half_slots = 0
    if numbers is not None:
        half_slots = half_stages(tiling, head_dim, value_dim)
    form = Form(
        query_heads=query_heads,
        key_heads=key_heads,
        query_count=query_count,
        key_count=key_count,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=query.dtype,
        scale=scale,
        soft_cap=soft_cap,
        has_bias=bias is not None,
        is_causal=is_causal,
        band=band,
        tiling=tiling,
        centre=_centre_of(centre, row_centre, query_count, listed=mask is not None),
        half_slots=half_slots,
        makes_delta=makes_delta,
        wide=wide,
    )
    tile_rows = form.tile_count * tiling.tile
    half = None
    if numbers is not None:
        half_key = key.astype(jnp.float32) * numbers.key_factor[:, None]
        half_key = half_key.astype(jnp.float16)
        half = half_key, (power_of_two(-numbers.row_exponent), *numbers.undone())
        # P = exp(S - LSE), and so dS, has the power of two.
        group = query_heads // key_heads
        exponent = jnp.repeat(numbers.row_exponent, group, axis=1)[..., None]
        rows_of = rows_of[0] * LOG2_E - exponent, *rows_of[1:]
    rows_of = [pad_rows(x, tile_rows) for x in rows_of]
    rows_more = tile_rows - query_count
    if form.centre == "query":
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

    def attention_backward_dq(gmem, result_gmem, smem, barriers):
        warpgroup = lax.axis_index("warpgroup")
        work = Work.of(form, gmem.pairs)

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            Products.of(warpgroup, work, gmem, smem, barriers).make(result_gmem)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            load_blocks(work, gmem, smem, barriers)

    out_type = jax.ShapeDtypeStruct(query.shape, query.dtype)
    # Plain stores do not stop at an array's end.
    if wide:
        shape = batch, tile_rows, query_heads, head_dim
        out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    if makes_delta:
        out_type = jax.ShapeDtypeStruct((batch, query_heads, tile_rows), jnp.float32)
        attention_backward_dq.__name__ = "attention_backward_delta"
    result = plgpu.kernel(
        attention_backward_dq,
        out_type=out_type,
        scratch_types=[Memory.scratch(form), Barriers.scratch(form)],
        grid=(query_heads, form.tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(Inputs(query, key, value, dout, rows_of, centre, row_centre, half, pairs, bias))
    return result[:, :, :query_count] if makes_delta else result[:, :query_count]


def _centre_of(
    centre: Array | None, row_centre: Array | None, query_count: int, *, listed: bool
) -> Centre | None:
    """What `centre`, or `row_centre` in its place, has one row for."""
    if row_centre is not None:
        return "query of head"
    if centre is None:
        return None
    if listed and centre.shape[2] == query_count:
        return "query"
    return "rows" if centre.shape[2] > 1 else "head"
