"""Backward attention for Ampere (sm_80) in Mosaic GPU: the kernel for dK and dV.

    P  = exp(S - LSE)             delta = rowsum(dO * out) - dLSE
    dP = dO V^T                   dS    = P * (dP - delta)
    dK = scale * dS^T Q           dV    = P^T dO

It recomputes S and P from the LSE; nothing is added with atomics, so two runs give the
same bits. dK and dV of grouped heads are summed over the group in FP32.

A CTA owns `Tiling.rows` keys and walks over blocks of `Tiling.columns` queries. It is
two warpgroups, for tiles of twice the keys that one has registers for, so that each
right operand read from shared memory meets twice as many keys: the first makes S, P and
dV, the second, a block behind it, dP, dS and dK, with P from the first
(`ampere_exchange`). P and dS become left operands in the registers where they were made
(`ampere_tiles.as_left`), which takes transposed tiles, S^T = K Q^T.

Where it rounds (16 bit: the inputs' format), as in `hopper_backward_dkv`:
  S, P, dP, dS, delta and both accumulators are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS^T Q;
  scale is applied to the FP32 accumulators, which are then rounded once.
"""

import ampere_exchange as exchange
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.tiles import LOG2_E, smem_tile
from attn_jax.kernels.tilings import Tiling


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
    late: bool = False,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K D"]]:
    """(dK, dV). Tiles are transposed: keys down the rows, queries along the columns."""
    query_heads, key_heads = query.shape[2], key.shape[2]
    group = query_heads // key_heads
    dtype = query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    unit = scale * LOG2_E
    # Past the last query everything is zero: P = exp(0 - 0) = 1 meets dO = 0 there, and
    # dS = 1 * (0 - 0) = 0. Past the last key there are only rows of their own, which
    # are cut off. Neither needs a mask.
    query, dout = (tiles.join_heads(x[:, :query_count], columns) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], rows) for x in (key, value))
    batch, query_blocks = query.shape[0], query.shape[1] // columns
    tile_count = key.shape[1] // rows
    statistics = tiles.by_block(lse * LOG2_E, delta, query_blocks, columns)
    strip = tiles.swizzled(dtype, columns, head_dim)
    value_strip = tiles.swizzled(dtype, columns, value_dim)

    def attention_backward_dkv(
        q_gmem, k_gmem, v_gmem, dout_gmem, statistics_gmem, dk_gmem, dv_gmem, smem,
    ):  # fmt: skip
        k_smem, v_smem, q_smem, dout_smem, statistics_smem, p_smem, point = smem
        b, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        # The first keys are seen by the most queries: heavy tiles come first.
        first_row = lax.axis_index("tile") * rows
        first = jnp.int32(0)
        if is_causal:  # The block of the tile's first key, if there is one.
            first = jnp.minimum(
                lax.div(first_row, jnp.int32(columns)), jnp.int32(query_blocks)
            )
        steps = (jnp.int32(query_blocks) - first) * group
        start_at = kv_head * group, first

        def after(position):
            """(head, index) of the block that comes next."""
            head, i = position
            is_last = i + 1 == query_blocks
            return jnp.where(is_last, head + 1, head), jnp.where(is_last, first, i + 1)

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def own_rows(gmem, dim):
            return tiles.head_rows(gmem, b, first_row, rows, kv_head, dim)

        def start(step, position, gmem, smem):
            """Starts copying a block of Q or dO, with Q its statistics."""
            head, i = position
            block = tiles.head_rows(gmem, b, i * columns, columns, head, smem.shape[-1])
            tiles.start_copy(block, smem.at[slot(step)])
            if smem is q_smem:
                tiles.start_copy(
                    statistics_gmem.at[b, head, i], statistics_smem.at[slot(step)]
                )

        def statistic(step, index, shape):
            x = plgpu.load(statistics_smem.at[slot(step), index], layout=tiles.COLUMNS)
            return tiles.along_columns(x, shape)

        def hide_first(i, s):
            """-inf where a key comes after its query."""
            start = tiles.row_index(rows) + (first_row - i * columns)
            seen = tiles.column_index(s.shape) >= tiles.along_rows(start, s.shape)
            return jnp.where(seen, s, -jnp.inf)

        def shown(position, s):
            _, i = position
            if not is_causal:
                return s
            return lax.cond(
                i * columns < first_row + (rows - 1),
                lambda s: hide_first(i, s),
                lambda s: s,
                s,
            )

        def weights():
            """S, P and dV, by the first warpgroup."""
            tiles.start_copy(own_rows(k_gmem, head_dim), k_smem)
            pl.when(steps > 0)(lambda: start(jnp.int32(0), start_at, q_gmem, q_smem))
            tiles.wait_for_copies(0)
            k = tiles.left_strips(k_smem, strip)

            def step(step, carry):
                position, dv = carry
                ahead = after(position)
                exchange.meet(point)
                pl.when(step + 1 < steps)(
                    lambda: start(step + 1, ahead, q_gmem, q_smem)
                )
                s = tiles.inner_products(k, q_smem.at[slot(step)], strip)
                s = shown(position, s)
                p = jnp.exp2(s * unit - statistic(step, 0, s.shape))
                exchange.put(p_smem.at[lax.rem(step, jnp.int32(2))], p)
                dv = tiles.multiply(dv, p.astype(dtype), dout_smem.at[slot(step)])
                return ahead, dv

            zero = tiles.accumulator(rows, value_dim)
            _, dv = lax.fori_loop(jnp.int32(0), steps, step, (start_at, zero))
            exchange.meet(point)
            exchange.both_warpgroups(point)
            tiles.store_rows(
                dv.astype(dtype), v_smem, own_rows(dv_gmem, value_dim), value_strip
            )

        def gradients():
            """dP, dS and dK, by the second warpgroup."""
            tiles.start_copy(own_rows(v_gmem, value_dim), v_smem)
            pl.when(steps > 0)(
                lambda: start(jnp.int32(0), start_at, dout_gmem, dout_smem)
            )
            tiles.wait_for_copies(0)
            v = tiles.left_strips(v_smem, value_strip)
            exchange.meet(point)
            ahead = after(start_at)
            pl.when(steps > 1)(lambda: start(jnp.int32(1), ahead, dout_gmem, dout_smem))

            def dlogits(step):
                dp = tiles.inner_products(v, dout_smem.at[slot(step)], value_strip)
                p = exchange.get(
                    p_smem.at[lax.rem(step, jnp.int32(2))], dp.shape, jnp.float32
                )
                return (p * (dp - statistic(step, 1, dp.shape))).astype(dtype)

            def step(step, carry):
                ahead, dk = carry
                ahead = after(ahead)
                exchange.meet(point)
                pl.when(step + 2 < steps)(
                    lambda: start(step + 2, ahead, dout_gmem, dout_smem)
                )
                dk = tiles.multiply(dk, dlogits(step), q_smem.at[slot(step)])
                return ahead, dk

            def late_step(step, carry):
                ahead, dk, ds = carry
                ahead = after(ahead)
                exchange.meet(point)
                pl.when(step + 2 < steps)(
                    lambda: start(step + 2, ahead, dout_gmem, dout_smem)
                )
                dk = lax.cond(
                    step > 0,
                    lambda dk: tiles.multiply(dk, ds, q_smem.at[slot(step - 1)]),
                    lambda dk: dk,
                    dk,
                )
                return ahead, dk, dlogits(step)

            zero = tiles.accumulator(rows, head_dim)
            if late:
                ds = tiles.accumulator(rows, columns).astype(dtype)
                _, dk, ds = lax.fori_loop(
                    jnp.int32(0), steps, late_step, (ahead, zero, ds)
                )
                dk = lax.cond(
                    steps > 0,
                    lambda dk: tiles.multiply(dk, ds, q_smem.at[slot(steps - 1)]),
                    lambda dk: dk,
                    dk,
                )
            else:
                _, dk = lax.fori_loop(jnp.int32(0), steps, step, (ahead, zero))
            exchange.both_warpgroups(point)
            tiles.store_rows(
                (dk * scale).astype(dtype), k_smem, own_rows(dk_gmem, head_dim), strip
            )

        is_first = lax.axis_index("warpgroup") == 0
        pl.when(is_first)(weights)
        pl.when(jnp.logical_not(is_first))(gradients)

    def own_and_blocks(dim, strip):
        shapes = (rows, dim), (stages, columns, dim)
        return (smem_tile(shape, dtype, strip) for shape in shapes)

    k_tile, q_blocks = own_and_blocks(head_dim, strip)
    v_tile, dout_blocks = own_and_blocks(value_dim, value_strip)
    statistics_smem = plgpu.SMEM((stages, *statistics.shape[3:]), jnp.float32)
    p_tiles = exchange.tiles_in_smem(2, (rows, columns), jnp.float32)
    dk, dv = plgpu.kernel(
        attention_backward_dkv,
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for x in (key, value)],
        scratch_types=[
            (
                *(k_tile, v_tile, q_blocks, dout_blocks, statistics_smem, p_tiles),
                exchange.meeting_point(),
            )
        ],
        grid=(key_heads, tile_count, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=tiles.COMPILER_PARAMS,
    )(query, key, value, dout, statistics)

    def heads(x):
        return x.reshape(*x.shape[:2], key_heads, -1)[:, :key_count]

    return heads(dk), heads(dv)
