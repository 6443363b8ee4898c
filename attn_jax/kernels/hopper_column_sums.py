"""What attention wants to know of all keys, or values, of a head, for Hopper (sm_90a):

    over chunks of rows: the sums of X and of X * X, the largest |X| that is finite

of K and V in one launch, at the speed of memory: both are read once, by TMA, some tiles
ahead, by a grid whose CTAs stay. A CTA takes a chunk after the other, each some fills.

Where it rounds: all is FP32, added in an order that shapes and plan fix (no atomics):
two runs give the same bits.
  sums, squares: X * X is exact, short of underflow. A thread adds every 8th row of a
    chunk (in general every `Lanes.strip`-th) from first to last, then lanes add in
    pairs, then warps. No row is in more than `ColumnTiles.depth` additions, 27 by the
    default plan. The chunks are the caller's to add.
  largest: exact.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.formats import FP32
from attn_jax.kernels.hopper_sums_plan import (
    ColumnTiles,
    Plan,
    dealt,
    flat,
    read,
    split,
    swizzled,
)
from attn_jax.kernels.tiles import widen


class ColumnSums(NamedTuple):
    """Of each column over each of C chunks of rows."""

    sums: Float32[Array, "B C K H"]
    squares: Float32[Array, "B C K H"]
    largest: Float32[Array, "B C K H"]


def column_sums(
    *arrays: Float[Array, "B S K H"], plan: Plan = Plan()
) -> tuple[ColumnSums, ...]:
    """The sums of each array, as the module says; all have one shape and one type, BF16
    or FP16.

    Raises:
      NotImplementedError: a length that is no multiple of 8.
    """
    batch, count, heads, head_dim = arrays[0].shape
    tiles = ColumnTiles(batch, count, heads, head_dim, plan)
    if tiles.count % 8:
        raise NotImplementedError("S must be a multiple of 8; pad with zeros")
    rows, width, group = tiles.rows, tiles.width, tiles.group
    per_fill, stages = tiles.PER_FILL, plan.stages
    layout, strip = tiles.lanes.layout(), tiles.lanes.strip
    items = len(arrays) * tiles.items
    ctas = min(plan.ctas, items)

    def attention_column_sums(
        arrays_gmem, sums_gmem, squares_gmem, largest_gmem, tiles_smem, ready
    ):
        cta = lax.axis_index("cta")
        chunks = dealt(cta, items, ctas)
        steps = chunks * tiles.fills

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def chunk_of(i):
            """(which array, batch entry, chunk, columns)"""
            # The chunks at the end, which may be short, are dealt last: each CTA gets
            # as many of them.
            sizes = len(arrays), tiles.batch, tiles.heads // group
            chunk, array, b, g = split(cta + i * ctas, *sizes)
            return array, b, chunk, pl.ds(g * width, width)

        def load(step):
            now = slot(step)
            i, fill = split(step, tiles.fills)
            array, b, chunk, columns = chunk_of(i)
            first = (chunk * tiles.fills + fill) * tiles.fill_keys
            for number, gmem in enumerate(arrays_gmem):

                @pl.when(jnp.logical_and(step < steps, array == number))
                def _():
                    for a in range(per_fill):
                        plgpu.copy_gmem_to_smem(
                            gmem.at[b, pl.ds(first + a * rows, rows), columns],
                            tiles_smem.at[now, a],
                            ready.at[now],
                        )

        for step in range(stages):
            load(jnp.int32(step))

        @pl.loop(0, chunks)
        def _(i):
            def add_fill(fill, found):
                sums, squares, largest = found
                step = i * tiles.fills + fill
                now = slot(step)
                plgpu.barrier_wait(ready.at[now])
                for a in range(per_fill):
                    for row in range(0, rows, strip):
                        part = tiles_smem.at[now, a, pl.ds(row, strip)]
                        x = widen(read(part, layout=layout))
                        sums, squares = sums + x, squares + x * x
                        size = jnp.abs(x)
                        size = jnp.where(size <= FP32.max_finite, size, 0.0)
                        largest = jnp.maximum(largest, size)
                # All have read: here it is a barrier.
                plgpu.commit_smem()
                load(step + stages)
                return sums, squares, largest

            # Rows past the last one are zero here, which changes none of the three.
            zero = jnp.zeros((strip, width), jnp.float32)
            zero = plgpu.layout_cast(zero, layout)
            sums, squares, largest = lax.fori_loop(
                jnp.int32(0), jnp.int32(tiles.fills), add_fill, (zero, zero, zero)
            )
            at = chunk_of(i)
            sums_gmem[at] = sums.sum(axis=0)
            squares_gmem[at] = squares.sum(axis=0)
            largest_gmem[at] = largest.max(axis=0)

    of_chunks = (len(arrays), tiles.batch, tiles.chunks, tiles.heads * head_dim)
    kernel = plgpu.kernel(
        attention_column_sums,
        out_type=[jax.ShapeDtypeStruct(of_chunks, jnp.float32)] * 3,
        scratch_types=[
            swizzled((stages, per_fill, rows, width), arrays[0].dtype, head_dim),
            plgpu.Barrier(num_arrivals=per_fill, num_barriers=stages),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        # As in `hopper_row_sums`.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    results = kernel([flat(x) for x in arrays])
    results = [x.reshape(*x.shape[:3], -1, head_dim) for x in results]
    return tuple(ColumnSums(*(x[i] for x in results)) for i in range(len(arrays)))
