"""Backward attention for Hopper (sm_90a) in Mosaic GPU: the gradient of an added bias.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)

dbias is dS, summed over the axes along which the bias is one for all. A CTA owns a tile
of the result and walks over the tiles of S that are added to it, in a fixed order: two
runs give the same bits, and no array is larger than the bias.

Where it rounds: nowhere to 16 bit. S, P, dP, dS and the sums are FP32.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.dbias_sums import Sums
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    LOG2_E,
    ROWS,
    accumulator,
    along_rows,
    capped,
    head_of,
    pad_rows,
    read_tile,
    smem_tile,
    stream,
)
from attn_jax.kernels.visibility import (
    Band,
    Pairs,
    Rules,
    hide,
    pad_to_tiles,
    whole_tiles,
)

CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
# Rows a warpgroup, warpgroups and columns.
ROWS_OF_WARPGROUP, WARPGROUPS, COLUMNS = 64, 2, 64
TILE = ROWS_OF_WARPGROUP * WARPGROUPS


def backward_dbias(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    dout: Float[Array, "B Tpad N D"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    bias: Float[Array, "#B #N #T #S"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    mask: Rules,
    band: Band,
    soft_cap: float | None = None,
) -> Float32[Array, "#B #N #T #S"]:
    """dbias; arguments as of `backward_dq`. LSE is +inf where nothing is seen."""
    batch, _, query_heads, head_dim = query.shape
    value_dim = value.shape[-1]
    # Blocks in flight, as shared memory allows.
    stages = 2 if head_dim + value_dim <= 256 else 1
    group = query_heads // key.shape[2]
    dtype = query.dtype
    shape = bias.shape
    sizes = batch, query_heads, query_count, key_count
    sums = Sums.of(shape, sizes, TILE, COLUMNS)
    whole = jnp.broadcast_to(bias, (*shape[:2], query_count, key_count))
    whole = whole_tiles(whole, TILE, COLUMNS)
    lse, delta = (pad_rows(x, whole.shape[2]) for x in (lse, delta))
    pairs = Pairs(pad_to_tiles(mask, TILE, COLUMNS), None)

    def attention_backward_dbias(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, bias_gmem, pairs,
        dbias_gmem, smem, barriers,
    ):  # fmt: skip
        q_smem, dout_smem, k_smem, v_smem = smem
        ready, free = barriers
        owned = lax.axis_index("owned")
        warpgroup = lax.axis_index("warpgroup")

        def slot(step):
            return rem(step, stages)

        @pl.when(warpgroup < WARPGROUPS)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

            def add(step, total):
                now = slot(step)
                b, n, query_tile, key_tile = sums.place(owned, step)
                first_row = query_tile * TILE + warpgroup * ROWS_OF_WARPGROUP
                first_key = key_tile * COLUMNS

                def load_rows(gmem):
                    rows = gmem.at[b, n, pl.ds(first_row, ROWS_OF_WARPGROUP)]
                    return plgpu.load(rows, layout=ROWS, optimized=False)

                plgpu.barrier_wait(ready.at[now])

                def products(s_acc, dp_acc):
                    mine = pl.ds(warpgroup * ROWS_OF_WARPGROUP, ROWS_OF_WARPGROUP)
                    k, v = (x.at[now].transpose((1, 0)) for x in (k_smem, v_smem))
                    plgpu.wgmma(s_acc, q_smem.at[now, mine], k)
                    plgpu.wgmma(dp_acc, dout_smem.at[now, mine], v)
                    return s_acc[...], dp_acc[...]

                block = accumulator(ROWS_OF_WARPGROUP, COLUMNS)
                s, dp = pl.run_scoped(products, block, block)
                plgpu.barrier_arrive(free.at[now])
                added = read_tile(
                    head_of(bias_gmem, b, n), first_row, first_key, s.shape
                )
                s, slope = capped(s, scale, soft_cap, added)
                s = hide(s, pairs, band, b, n, first_row, first_key)
                row_lse = load_rows(lse_gmem) * LOG2_E
                p = jnp.exp2(s - along_rows(row_lse, s.shape))
                p = p if slope is None else p * slope
                return total + p * (dp - along_rows(load_rows(delta_gmem), dp.shape))

            shape = (ROWS_OF_WARPGROUP, COLUMNS)
            total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            total = lax.fori_loop(jnp.int32(0), jnp.int32(sums.steps), add, total)
            rows = pl.ds(warpgroup * ROWS_OF_WARPGROUP, ROWS_OF_WARPGROUP)
            dbias_gmem[owned, rows] = total

        @pl.when(warpgroup == WARPGROUPS)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(step):
                now = slot(step)
                b, n, query_tile, key_tile = sums.place(owned, step)
                queries = pl.ds(query_tile * TILE, TILE)
                keys = pl.ds(key_tile * COLUMNS, COLUMNS)
                kv_head = lax.div(n, jnp.int32(group))
                for gmem, smem, part in (
                    (q_gmem, q_smem, (b, queries, n)),
                    (dout_gmem, dout_smem, (b, queries, n)),
                    (k_gmem, k_smem, (b, keys, kv_head)),
                    (v_gmem, v_smem, (b, keys, kv_head)),
                ):
                    plgpu.copy_gmem_to_smem(gmem.at[part], smem.at[now], ready.at[now])

            stream(jnp.int32(sums.steps), stages, [(load, free)])

    q_tiles, dout_tiles, k_tiles, v_tiles = (
        smem_tile((stages, length, dim), dtype)
        for length in (TILE, COLUMNS)
        for dim in (head_dim, value_dim)
    )
    owned_tiles = plgpu.kernel(
        attention_backward_dbias,
        out_type=jax.ShapeDtypeStruct((sums.count, TILE, COLUMNS), jnp.float32),
        scratch_types=[
            (q_tiles, dout_tiles, k_tiles, v_tiles),
            (
                plgpu.Barrier(num_arrivals=4, num_barriers=stages),
                plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            ),
        ],
        grid=(sums.count,),
        grid_names=("owned",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, lse, delta, whole, pairs)
    return sums.gradient(owned_tiles, shape)
