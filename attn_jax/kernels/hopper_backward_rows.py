"""What the backward pass sums over its inputs, for Hopper (sm_90a), in one launch.

    excess = rowsum(dO * (out + low))      dout_squares = rowsum(dO * dO)
    over chunks of keys: the sums of K and of K * K, the largest |K| and |V|

at the speed of memory: every array is read once, by TMA, some tiles ahead, by a grid
whose CTAs stay. A *fill* is what one slot of shared memory takes: the tiles of dO, out
and low for some rows and heads, or as many tiles of K or of V. A CTA first takes its
chunks of K and V, some fills each, then its share of the rows (`Deal`).

Where it rounds: all is FP32, u = 2^-24, added in an order that shapes and plan fix (no
atomics): two runs give the same bits.
  excess: out + low rounds once, its product with dO at most once (the compiler may fuse
    it with an addition). A thread holds 8 columns of a row (4 where out is FP32 or the
    head dimension no multiple of 64), and as many some lanes further right where it is
    wide; it adds the latter to the former, then the 8 from left to right; then lanes
    add in pairs. No product is in more than `Tiles.row_depth` additions: 10 for head
    dimension 64, 11 for 128. So the sum is off by at most (row_depth + 2) u times
    sum |dO| |out + low|, to first order.
  dout_squares: the same additions; dO * dO is exact, short of underflow.
  key_sums, key_squares: K * K is exact, short of underflow. A thread adds every 8th row
    of a chunk (in general every `Lanes.strip`-th) from first to last, then lanes add in
    pairs, then warps. No key is in more than `Tiles.key_depth` additions, 27 by the
    default plan with three 16-bit arrays. The chunks are the caller's to add.
  key_largest, value_largest: exact.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.hopper_backward_rows_plan import Plan, Tiles
from attn_jax.kernels.tiles import widen


class Sums(NamedTuple):
    """What `backward_rows` returns; C counts chunks of keys, the same in all four."""

    excess: Float32[Array, "B N T"]
    dout_squares: Float32[Array, "B N T"]
    key_sums: Float32[Array, "B C K H"]
    key_squares: Float32[Array, "B C K H"]
    key_largest: Float32[Array, "B C K H"]
    value_largest: Float32[Array, "B C K H"]


def _split(index, *sizes: int):
    """The index's digits, the last ones below `sizes`."""
    digits = []
    for size in reversed(sizes):
        digits.append(lax.rem(index, jnp.int32(size)))
        index = lax.div(index, jnp.int32(size))
    return (index, *reversed(digits))


def tiles_of(out, low, dout, key, plan: Plan) -> Tiles:
    """How `backward_rows` cuts its arguments."""
    batch, query_count, heads, head_dim = out.shape
    wide = out.dtype != dout.dtype
    return Tiles(
        batch=batch,
        query_count=query_count,
        key_count=key.shape[1],
        heads=heads,
        key_heads=key.shape[2],
        head_dim=head_dim,
        arrays=1 + (not wide) + (low is not None),
        wide=wide,
        plan=plan,
    )


def backward_rows(
    out: Float[Array, "B T N H"],
    low: Float[Array, "B T N H"] | None,
    dout: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    plan: Plan = Plan(),
) -> Sums:
    """Sums over rows, and over chunks of keys, as the module says.

    `dout`, `key` and `value` are BF16 or FP16; `out` has their format or is FP32; `low`
    has their format, or is None for zero.

    Raises:
      NotImplementedError: lengths that are no multiples of 8.
    """
    tiles = tiles_of(out, low, dout, key, plan)
    if tiles.query_count % 8 or tiles.key_count % 8:
        raise NotImplementedError("T and S must be multiples of 8; pad with zeros")
    deal, stages = tiles.deal, plan.stages
    rows, width, group = tiles.rows, tiles.width, tiles.group
    head_dim, arrays = tiles.head_dim, tiles.arrays
    row_layout, key_layout = tiles.row_lanes.layout(), tiles.key_lanes.layout()
    key_strip = tiles.key_lanes.strip
    head_groups, key_groups = tiles.heads // group, tiles.key_heads // group

    def attention_backward_rows(
        out_gmem, low_gmem, dout_gmem, key_gmem, value_gmem,
        excess_gmem, dout_squares_gmem,
        key_sums_gmem, key_squares_gmem, key_largest_gmem, value_largest_gmem,
        smem, barriers,
    ):  # fmt: skip
        tiles_smem, wide_smem, results_smem = smem
        tiles_ready, wide_ready = barriers
        matrices = [dout_gmem, None if tiles.wide else out_gmem, low_gmem]
        matrices = [x for x in matrices if x is not None]
        cta = lax.axis_index("cta")
        my_chunks, my_rows = deal.counts(cta)
        chunk_steps = my_chunks * tiles.fills
        steps = chunk_steps + my_rows

        def slot(step):
            return lax.rem(step, jnp.int32(stages))

        def chunk_of(i):
            """(0 for K or 1 for V, (batch entry, chunk, columns))"""
            item = deal.chunk_item(cta, i)
            # The chunks at the end, which may be short, are dealt last: each CTA gets
            # as many of them.
            chunk, array, b, g = _split(item, 2, tiles.batch, key_groups)
            return array, (b, chunk, pl.ds(g * width, width))

        def rows_of(i):
            """(batch entry, rows, columns, heads)"""
            item = deal.row_item(cta, i)
            b, block, g = _split(item, tiles.row_blocks, head_groups)
            columns, heads = pl.ds(g * width, width), pl.ds(g * group, group)
            return b, pl.ds(block * rows, rows), columns, heads

        def load_chunk(step):
            now = slot(step)
            i, fill = _split(step, tiles.fills)
            array, (b, chunk, columns) = chunk_of(i)
            first = (chunk * tiles.fills + fill) * tiles.fill_keys
            for number, gmem in enumerate((key_gmem, value_gmem)):

                @pl.when(array == number)
                def _():
                    for a in range(arrays):
                        plgpu.copy_gmem_to_smem(
                            gmem.at[b, pl.ds(first + a * rows, rows), columns],
                            tiles_smem.at[now, a],
                            tiles_ready.at[now],
                        )

        def load_rows(step):
            now = slot(step)
            b, span, columns, _ = rows_of(step - chunk_steps)
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

        def load(step):
            @pl.when(step < chunk_steps)
            def _():
                load_chunk(step)

            @pl.when(jnp.logical_and(step >= chunk_steps, step < steps))
            def _():
                load_rows(step)

        for step in range(stages):
            load(jnp.int32(step))

        @pl.loop(0, my_chunks)
        def _(i):
            def add_fill(fill, found):
                sums, squares, largest = found
                step = i * tiles.fills + fill
                now = slot(step)
                plgpu.barrier_wait(tiles_ready.at[now])
                for a in range(arrays):
                    for row in range(0, rows, key_strip):
                        strip = tiles_smem.at[now, a, pl.ds(row, key_strip)]
                        x = widen(read(strip, key_layout))
                        sums, squares = sums + x, squares + x * x
                        largest = jnp.maximum(largest, jnp.abs(x))
                # All have read: here it is a barrier.
                plgpu.commit_smem()
                load(step + stages)
                return sums, squares, largest

            # Rows past the last key are zero here, which changes none of the three.
            zero = jnp.zeros((key_strip, width), jnp.float32)
            zero = plgpu.layout_cast(zero, key_layout)
            sums, squares, largest = lax.fori_loop(
                jnp.int32(0), jnp.int32(tiles.fills), add_fill, (zero, zero, zero)
            )
            array, at = chunk_of(i)

            @pl.when(array == 0)
            def _():
                key_sums_gmem[at] = sums.sum(axis=0)
                key_squares_gmem[at] = squares.sum(axis=0)
                key_largest_gmem[at] = largest.max(axis=0)

            # V's sums nobody wants: made all the same, since memory is what is waited
            # for, and the loop is one.
            @pl.when(array == 1)
            def _():
                value_largest_gmem[at] = largest.max(axis=0)

        @pl.loop(0, my_rows)
        def _(i):
            step = chunk_steps + i
            now, buffer = slot(step), lax.rem(i, jnp.int32(2))
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
                    widen(read(tiles_smem.at[now, a, :, columns], row_layout))
                    for a in range(arrays)
                ]
                if tiles.wide:
                    part = read(wide_smem.at[now, :, columns], row_layout)
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
            b, span, _, heads = rows_of(i)
            for a, gmem in enumerate((excess_gmem, dout_squares_gmem)):
                plgpu.copy_smem_to_gmem(
                    results_smem.at[buffer, a], gmem.at[b, heads, span]
                )
            load(step + stages)

        plgpu.wait_smem_to_gmem(0)

    # Copies of a single axis, of one head's rows, do not stop at an array's end.
    of_rows = (tiles.batch, tiles.heads, tiles.row_blocks * rows)
    of_rows = jax.ShapeDtypeStruct(of_rows, jnp.float32)
    of_keys = (tiles.batch, tiles.chunks, tiles.key_heads * head_dim)
    of_keys = jax.ShapeDtypeStruct(of_keys, jnp.float32)
    tile = (rows, width)
    swizzled = functools.partial(swizzled_smem, head_dim=head_dim)
    wide_tiles = wide_ready = None
    if tiles.wide:
        wide_tiles = swizzled((stages, *tile), out.dtype)
        wide_ready = plgpu.Barrier(num_barriers=stages)
    kernel = plgpu.kernel(
        attention_backward_rows,
        out_type=[of_rows] * 2 + [of_keys] * 4,
        scratch_types=[
            (
                swizzled((stages, arrays, *tile), dout.dtype),
                wide_tiles,
                plgpu.SMEM((2, 2, group, rows), jnp.float32),
            ),
            (
                plgpu.Barrier(num_arrivals=arrays, num_barriers=stages),
                wide_ready,
            ),
        ],
        grid=(deal.ctas,),
        grid_names=("cta",),
        # Nothing here is both read and written by threads; where a copy follows on
        # reading or writing there is a barrier.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    flat = [None if x is None else _flat(x) for x in (out, low, dout, key, value)]
    excess, dout_squares, *parts = kernel(*flat)
    excess, dout_squares = (x[..., : tiles.query_count] for x in (excess, dout_squares))
    parts = (x.reshape(*x.shape[:2], -1, head_dim) for x in parts)
    return Sums(excess, dout_squares, *parts)


def swizzled_smem(shape: tuple[int, ...], dtype, head_dim: int):
    """Shared memory for tiles of which 8 rows and a head's columns are read at a time:
    what a swizzle permutes lies in both."""
    size = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(128, head_dim * size)
    # Pyright takes JAX's transforms for abstract classes.
    tiling = plgpu.TilingTransform((8, swizzle // size))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))


def read(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _flat(x: Float[Array, "B L N H"]) -> Float[Array, "B L NH"]:
    return x.reshape(*x.shape[:2], -1)
