"""What the backward pass sums over rows of its inputs, for Hopper (sm_90a):

    excess = rowsum(dO * (out + low))      dout_squares = rowsum(dO * dO)

in one launch, at the speed of memory: every array is read once, by TMA, some tiles
ahead, by a grid whose CTAs stay. A fill is the tiles of dO, out and low for some rows
and heads.

Where it rounds: all is FP32, u = 2^-24, added in an order that shapes and plan fix (no
atomics): two runs give the same bits.
  excess: out + low rounds once, its product with dO at most once (the compiler may fuse
    it with an addition). A thread holds 8 columns of a row (4 where out is FP32 or the
    head dimension no multiple of 64), and as many some lanes further right where it is
    wide; it adds the latter to the former, then the 8 from left to right; then lanes
    add in pairs. No product is in more than `RowTiles.depth` additions: 10 for head
    dimension 64, 11 for 128. So the sum is off by at most (depth + 2) u times
    sum |dO| |out + low|, to first order.
  dout_squares: the same additions; dO * dO is exact, short of underflow.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.hopper_sums_plan import (
    Plan,
    RowTiles,
    dealt,
    flat,
    read,
    split,
    swizzled,
)
from attn_jax.kernels.tiles import widen


class RowSums(NamedTuple):
    """What `row_sums` returns."""

    excess: Float32[Array, "B N T"]
    dout_squares: Float32[Array, "B N T"]


def tiles_of(out, low, dout, plan: Plan) -> RowTiles:
    """How `row_sums` cuts its arguments."""
    batch, count, heads, head_dim = out.shape
    wide = out.dtype != dout.dtype
    arrays = 1 + (not wide) + (low is not None)
    return RowTiles(batch, count, heads, head_dim, arrays, wide, plan)


def row_sums(
    out: Float[Array, "B T N D"],
    low: Float[Array, "B T N D"] | None,
    dout: Float[Array, "B T N D"],
    *,
    plan: Plan = Plan(),
) -> RowSums:
    """Sums over rows, as the module says.

    `dout` is BF16 or FP16; `out` has its format or is FP32; `low` has its format, or is
    None for zero.

    Raises:
      NotImplementedError: a length that is no multiple of 8.
    """
    tiles = tiles_of(out, low, dout, plan)
    if tiles.count % 8:
        raise NotImplementedError("T must be a multiple of 8; pad with zeros")
    rows, width, group = tiles.rows, tiles.width, tiles.group
    head_dim, arrays, stages = tiles.head_dim, tiles.arrays, plan.stages
    layout = tiles.lanes.layout()
    ctas = min(plan.ctas, tiles.items)

    def attention_row_sums(
        out_gmem, low_gmem, dout_gmem, excess_gmem, squares_gmem, smem, barriers
    ):
        tiles_smem, wide_smem, results_smem = smem
        tiles_ready, wide_ready = barriers
        matrices = [dout_gmem, None if tiles.wide else out_gmem, low_gmem]
        matrices = [x for x in matrices if x is not None]
        cta = lax.axis_index("cta")
        steps = dealt(cta, tiles.items, ctas)

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def item(step):
            """(batch entry, rows, columns, heads)"""
            number = cta + step * ctas
            b, block, g = split(number, tiles.blocks, tiles.heads // group)
            columns, heads = pl.ds(g * width, width), pl.ds(g * group, group)
            return b, pl.ds(block * rows, rows), columns, heads

        def load(step):
            @pl.when(step < steps)
            def _():
                now = slot(step)
                b, span, columns, _ = item(step)
                for a, gmem in enumerate(matrices):
                    plgpu.copy_gmem_to_smem(
                        gmem.at[b, span, columns],
                        tiles_smem.at[now, a],
                        tiles_ready.at[now],
                    )
                if tiles.wide:
                    plgpu.copy_gmem_to_smem(
                        out_gmem.at[b, span, columns],
                        wide_smem.at[now],
                        wide_ready.at[now],
                    )

        for step in range(stages):
            load(jnp.int32(step))

        @pl.loop(0, steps)
        def _(step):
            now, buffer = slot(step), lax.rem(step, jnp.int32(2))
            plgpu.barrier_wait(tiles_ready.at[now])
            if tiles.wide:
                plgpu.barrier_wait(wide_ready.at[now])
            # What this buffer held has left: two stores, those of the other one, may
            # be under way.
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            found = []
            for head in range(group):
                columns = pl.ds(head * head_dim, head_dim)
                parts = [
                    widen(read(tiles_smem.at[now, a, :, columns], layout=layout))
                    for a in range(arrays)
                ]
                if tiles.wide:
                    part = read(wide_smem.at[now, :, columns], layout=layout)
                    parts.insert(1, part)
                d, o, *more = parts
                for part in more:
                    o = o + part
                found.append(((d * o).sum(axis=1), (d * d).sum(axis=1)))
            for head, values in enumerate(found):
                for a, value in enumerate(values):
                    results_smem[buffer, a, head] = value
            # All have read and written.
            plgpu.commit_smem()
            b, span, _, heads = item(step)
            for a, gmem in enumerate((excess_gmem, squares_gmem)):
                plgpu.copy_smem_to_gmem(
                    results_smem.at[buffer, a], gmem.at[b, heads, span]
                )
            load(step + stages)

        plgpu.wait_smem_to_gmem(0)

    # Copies of a single axis, of one head's rows, do not stop at an array's end.
    of_rows = (tiles.batch, tiles.heads, tiles.blocks * rows)
    wide_tiles = wide_ready = None
    if tiles.wide:
        wide_tiles = swizzled((stages, rows, width), out.dtype, head_dim)
        wide_ready = plgpu.Barrier(num_barriers=stages)
    kernel = plgpu.kernel(
        attention_row_sums,
        out_type=[jax.ShapeDtypeStruct(of_rows, jnp.float32)] * 2,
        scratch_types=[
            (
                swizzled((stages, arrays, rows, width), dout.dtype, head_dim),
                wide_tiles,
                plgpu.SMEM((2, 2, group, rows), jnp.float32),
            ),
            (
                plgpu.Barrier(num_arrivals=arrays, num_barriers=stages),
                wide_ready,
            ),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        # Nothing here is both read and written by threads; where a copy follows on
        # reading or writing there is a barrier.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    results = kernel(*(None if x is None else flat(x) for x in (out, low, dout)))
    return RowSums(*(x[..., : tiles.count] for x in results))
