"""Backward attention for Ampere (sm_80) in Mosaic GPU: the gradient of an added bias.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)

dbias is dS, summed over the axes along which the bias is one for all. A CTA is one
warpgroup and owns a tile of the result; it walks over the tiles of S that are added to
it, in a fixed order: two runs give the same bits, and no array is larger than the bias.
While it works on one, cp.async brings the next, where there are two stages.

Where it rounds: nowhere to 16 bit. S, P, dP, dS and the sums are FP32.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.dbias_sums import Sums
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    LOG2_E,
    capped,
    head_of,
    pad_rows,
    read_tile,
    smem_tile,
)
from attn_jax.kernels.visibility import (
    Band,
    Pairs,
    Rules,
    hide,
    pad_to_tiles,
    whole_tiles,
)

# Of the tiles of S, queries and keys.
ROWS, COLUMNS = 64, 64


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
    key_heads, value_dim = value.shape[2:]
    dims = head_dim, value_dim
    # So that two CTAs fit a multiprocessor, where that can be.
    stages = 2 if head_dim + value_dim <= 128 else 1
    group = query_heads // key_heads
    dtype = query.dtype
    sizes = batch, query_heads, query_count, key_count
    sums = Sums.of(bias.shape, sizes, ROWS, COLUMNS)
    query, dout = (tiles.join_heads(x[:, :query_count], ROWS) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], COLUMNS) for x in (key, value))
    whole = jnp.broadcast_to(bias, (*bias.shape[:2], query_count, key_count))
    whole = whole_tiles(whole, ROWS, COLUMNS)
    lse, delta = (pad_rows(x, query.shape[1]) for x in (lse, delta))
    pairs = Pairs(pad_to_tiles(mask, ROWS, COLUMNS), None)
    strips = [tiles.swizzled(dtype, ROWS, dim) for dim in dims]

    def attention_backward_dbias(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, bias_gmem, pairs,
        dbias_gmem, smem,
    ):  # fmt: skip
        q_smem, dout_smem, k_smem, v_smem = smem
        owned = lax.axis_index("owned")

        def slot(step):
            return rem(step, stages)

        def start(step):
            b, n, query_tile, key_tile = sums.place(owned, step)
            kv_head = lax.div(n, jnp.int32(group))
            for gmem, smem, first, head in (
                (q_gmem, q_smem, query_tile * ROWS, n),
                (k_gmem, k_smem, key_tile * COLUMNS, kv_head),
                (dout_gmem, dout_smem, query_tile * ROWS, n),
                (v_gmem, v_smem, key_tile * COLUMNS, kv_head),
            ):
                _, count, dim = smem.shape
                block = tiles.head_rows(gmem, b, first, count, head, dim)
                tiles.start_copy(block, smem.at[slot(step)])

        start(jnp.int32(0))

        def add(step, total):
            now = slot(step)
            b, n, query_tile, key_tile = sums.place(owned, step)
            first_row, first_key = query_tile * ROWS, key_tile * COLUMNS

            def load_rows(gmem):
                rows = gmem.at[b, n, pl.ds(first_row, ROWS)]
                return plgpu.load(rows, layout=tiles.ROWS, optimized=False)

            def start_next():
                pl.when(step + 1 < sums.steps)(lambda: start(step + 1))

            # These tiles have arrived, and all warps are done with those before.
            tiles.wait_for_copies(0)
            if stages > 1:
                start_next()
            s, dp = (
                tiles.inner_products(left.at[now], right.at[now], strip)
                for left, right, strip in zip(
                    (q_smem, dout_smem), (k_smem, v_smem), strips
                )
            )
            if stages == 1:
                tiles.wait_for_copies(0)  # as barrier
                start_next()
            added = head_of(bias_gmem, b, n)
            shape = ROWS, COLUMNS
            added = read_tile(added, first_row, first_key, shape, tiles.MMA)
            s, slope = capped(s, scale, soft_cap, added)
            at = (b, n, first_row, first_key)
            s = hide(s, pairs, band, *at, fragments=tiles.MMA)
            row_lse = load_rows(lse_gmem) * LOG2_E
            p = jnp.exp2(s - tiles.along_rows(row_lse, s.shape))
            p = p if slope is None else p * slope
            row_delta = tiles.along_rows(load_rows(delta_gmem), dp.shape)
            return total + p * (dp - row_delta)

        total = tiles.accumulator(ROWS, COLUMNS)
        total = lax.fori_loop(jnp.int32(0), jnp.int32(sums.steps), add, total)
        dbias_gmem[owned] = total

    scratch = tuple(
        smem_tile((stages, length, dim), dtype, strip)
        for length in (ROWS, COLUMNS)
        for dim, strip in zip(dims, strips)
    )
    owned_tiles = plgpu.kernel(
        attention_backward_dbias,
        out_type=jax.ShapeDtypeStruct((sums.count, ROWS, COLUMNS), jnp.float32),
        scratch_types=[scratch],
        grid=(sums.count,),
        grid_names=("owned",),
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value, dout, lse, delta, whole, pairs)
    return sums.gradient(owned_tiles, bias.shape)
