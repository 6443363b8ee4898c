"""Backward attention for Hopper (sm_90a) in Mosaic GPU: the kernel for dK and dV.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)
    dK = scale * dS^T Q           dV    = P^T dO

It recomputes S and P from the LSE; nothing is added with atomics, so two runs give the
same bits. dK and dV of grouped heads are summed over the group in FP32. Where registers
cannot hold 64 rows of both accumulators, two warpgroups share the rows: each makes S
and dP whole, and half the columns of dK and dV.

Where it rounds (16 bit: the inputs' format):
  S, P, dP, dS, delta and both accumulators are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS^T Q;
  scale is applied to the FP32 accumulators, which are then rounded once.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.hopper_dkv_products import (
    Barriers,
    Form,
    Memory,
    Products,
    Work,
    load_blocks,
)
from attn_jax.kernels.tiles import pad_rows
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
    wide: bool = False,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K D"]]:
    """(dK, dV). With `wide` they are the accumulators in FP32, for those who add up
    parts of them."""
    batch, _, query_heads, head_dim = query.shape
    value_dim = value.shape[-1]
    key_heads = key.shape[2]
    dtype = query.dtype
    form = Form(
        query_count=query_count,
        group=query_heads // key_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        scale=scale,
        soft_cap=soft_cap,
        has_bias=bias is not None,
        is_causal=is_causal,
        band=band,
        tiling=tiling,
        wide=wide,
    )
    columns, warpgroups = tiling.columns, tiling.warpgroups
    tile_count = pl.cdiv(key_count, tiling.tile)
    # Past the last query everything is zero, read from memory or filled in by TMA:
    # P = exp(0 - 0) = 1 meets dO = 0 there, and dS = 1 * (0 - 0) = 0. Past the last key
    # there are only rows of their own, which are cut off. Neither needs a mask.
    lse, delta = (pad_rows(x, form.query_blocks * columns) for x in (lse, delta))
    pairs = None
    if mask is not None:
        lists = block_lists(
            mask,
            band,
            query_count=query_count,
            key_count=key_count,
            query_tile=columns,
            key_tile=tiling.tile,
            by_key=True,
            group=form.group,
        )
        pairs = Pairs(pad_to_tiles(mask, columns, tiling.tile, by_key=True), lists)
    if bias is not None:
        bias = whole_tiles(bias.swapaxes(2, 3), tiling.tile, columns)

    def attention_backward_dkv(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, pairs, bias_gmem,
        dk_gmem, dv_gmem, smem, barriers,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        work = Work.of(form, pairs)

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            products = Products.of(warpgroup, work, smem, barriers, bias_gmem)
            products.make(k_gmem, v_gmem, dk_gmem, dv_gmem)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            load_blocks(work, smem, barriers, q_gmem, dout_gmem, lse_gmem, delta_gmem)

    def result_type(dim: int) -> jax.ShapeDtypeStruct:
        if not wide:
            return jax.ShapeDtypeStruct((*key.shape[:3], dim), dtype)
        # A plain store, which does not stop at an array's end.
        shape = batch, tile_count * tiling.tile, key_heads, dim
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    dk, dv = plgpu.kernel(
        attention_backward_dkv,
        out_type=[result_type(dim) for dim in (head_dim, value_dim)],
        scratch_types=[Memory.scratch(form), Barriers.scratch(form)],
        grid=(key_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, lse, delta, pairs, bias)
    return dk[:, :key_count], dv[:, :key_count]
