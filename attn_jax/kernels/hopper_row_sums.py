"""Kernel for rowsum(dO O) and the norm of dO, per row, on Hopper (sm_90a).

    excess = rowsum(dO * O')      dout_norm = sqrt(rowsum(dO * dO))

with O' of out and what its rounding dropped (`low_part`), or out itself, in one launch,
at the speed of memory: every array is read once, by TMA, some tiles ahead, by a grid
whose CTAs stay. A fill is the tiles of dO, out and low for some rows and heads. It
begins at the end: the last part of dO was written last and may still be in the L2
cache, and the first part, which the backward kernel wants first, then is.

Where it rounds: all is FP32, u = 2^-24, added in an order that shapes and plan fix (no
atomics): two runs give the same bits.
  excess: O' is exact, its product with dO rounds at most once (the compiler may fuse
    it with an addition). A thread holds 8 columns of a row (4 where out is FP32 or the
    head dimension no multiple of 64), and as many some lanes further right where it is
    wide; it adds the latter to the former, then the 8 from left to right; then lanes
    add in pairs. No product is in more than `RowTiles.depth` additions: 10 for head
    dimension 64, 11 for 128. So the sum is off by at most (depth + 1) u times
    sum |dO| |O'|, to first order.
  dout_norm: the same additions; dO * dO is exact, short of underflow. Then as
    `lanes.row_norms` says.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int8

from attn_jax.kernels import low_part
from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.integers import rem
from attn_jax.kernels.lanes import Lanes, read, row_norms
from attn_jax.kernels.tiles import widen

# The most columns of a tile of TMA.
MOST_COLUMNS = 256
# Bytes of shared memory for the fills of a CTA, of which a multiprocessor, with 228
# KiB, holds two.
MOST_BYTES = 110 * 1024


class RowSums(NamedTuple):
    """What `row_sums` returns."""

    excess: Float32[Array, "B N T"]
    dout_norm: Float32[Array, "B N T"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel goes about it. A *fill* is what a slot of shared memory takes.

    Attributes:
      elements: of a tile, about; a fill is up to three tiles.
      columns: of a tile at most: as many whole heads as fit, one at least.
      stages: fills in shared memory, if there is room for so many.
      ctas: of the grid; twice the multiprocessors: two on each.
    """

    elements: int = 4096
    columns: int = MOST_COLUMNS
    stages: int = 4
    ctas: int = 2 * H100_MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Tiles of dO, out and low: `arrays` of 16 bit, beside `wide`, an FP32 out, or
    `low`, of bytes."""

    batch: int
    count: int
    heads: int
    head_dim: int
    arrays: int
    wide: bool
    low: bool
    plan: Plan

    @property
    def group(self) -> int:
        """Heads of a tile."""
        most = max(min(self.plan.columns, MOST_COLUMNS) // self.head_dim, 1)
        return max(g for g in range(1, most + 1) if self.heads % g == 0)

    @property
    def width(self) -> int:
        return self.group * self.head_dim

    @property
    def lanes(self) -> Lanes:
        # Loads of 16 bytes.
        return Lanes.of_rows(self.head_dim, 4 if self.wide else 8)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        # TMA stores a tile's sums, 4 bytes for each row and head, from shared memory at
        # multiples of 128. Both are powers of two.
        unit = max(self.lanes.strip, 32 // math.gcd(self.group, 32))
        return min(max(self.plan.elements // self.width // unit, 1) * unit, 256)

    @property
    def stages(self) -> int:
        values = self.rows * self.width
        fill = values * (2 * self.arrays + 4 * self.wide + self.low)
        return max(min(self.plan.stages, MOST_BYTES // fill), 1)

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.count, self.rows)

    @property
    def items(self) -> int:
        return self.batch * self.blocks * (self.heads // self.group)

    @property
    def depth(self) -> int:
        """How many additions a product takes part in, at most."""
        return self.lanes.additions(self.head_dim)


def tiles_of(out, low, dout, plan: Plan) -> RowTiles:
    """How `row_sums` cuts its arguments."""
    batch, count, heads, head_dim = out.shape
    wide = out.dtype != dout.dtype
    shape = batch, count, heads, head_dim
    return RowTiles(*shape, 1 if wide else 2, wide, low is not None, plan)


def row_sums(
    out: Float[Array, "B T N D"],
    low: Int8[Array, "B T N D"] | None,
    dout: Float[Array, "B T N D"],
    *,
    plan: Plan = Plan(),
) -> RowSums:
    """Sums over rows, as the module says.

    `dout` is BF16 or FP16; `out` has its format or is FP32; `low` is None where the
    latter, or for zero.
    """
    tiles = tiles_of(out, low, dout, plan)
    rows, width, group = tiles.rows, tiles.width, tiles.group
    head_dim, arrays, stages = tiles.head_dim, tiles.arrays, tiles.stages
    layout = tiles.lanes.layout()
    ctas = min(plan.ctas, tiles.items)

    def attention_row_sums(
        out_gmem, low_gmem, dout_gmem, excess_gmem, norm_gmem, smem, barriers
    ):
        tiles_smem, wide_smem, low_smem, results_smem = smem
        tiles_ready, wide_ready = barriers
        matrices = [dout_gmem] if tiles.wide else [dout_gmem, out_gmem]
        cta = lax.axis_index("cta")
        # Tiles are dealt round.
        steps = lax.div(tiles.items - cta + (ctas - 1), jnp.int32(ctas))

        def slot(step):
            return rem(step, stages)

        def item(step):
            """(batch entry, rows, columns, heads)"""
            groups, blocks = jnp.int32(tiles.heads // group), jnp.int32(tiles.blocks)
            number = tiles.items - 1 - (cta + step * ctas)
            block, g = lax.div(number, groups), lax.rem(number, groups)
            b, block = lax.div(block, blocks), lax.rem(block, blocks)
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
                if tiles.low:
                    plgpu.copy_gmem_to_smem(
                        low_gmem.at[b, span, columns],
                        low_smem.at[now],
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
            now, buffer = slot(step), rem(step, 2)
            plgpu.barrier_wait(tiles_ready.at[now])
            if tiles.wide:
                plgpu.barrier_wait(wide_ready.at[now])
            # What this buffer held has left: two stores, those of the other one, may
            # be under way.
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            found = []
            for head in range(group):
                columns = pl.ds(head * head_dim, head_dim)
                d, *o = [
                    read(tiles_smem.at[now, a, :, columns], layout=layout)
                    for a in range(arrays)
                ]
                d = widen(d)
                if tiles.wide:
                    o = read(wide_smem.at[now, :, columns], layout=layout)
                elif tiles.low:
                    low = read(low_smem.at[now, :, columns], layout=layout)
                    o = low_part.completed(*o, low)
                else:
                    o = widen(*o)
                found.append(((d * o).sum(axis=1), row_norms(d)))
            for head, values in enumerate(found):
                for a, value in enumerate(values):
                    results_smem[buffer, a, head] = value
            # All have read and written.
            plgpu.commit_smem()
            b, span, _, heads = item(step)
            for a, gmem in enumerate((excess_gmem, norm_gmem)):
                plgpu.copy_smem_to_gmem(
                    results_smem.at[buffer, a], gmem.at[b, heads, span]
                )
            load(step + stages)

        plgpu.wait_smem_to_gmem(0)

    # Copies of a single axis, of one head's rows, do not stop at an array's end.
    of_rows = (tiles.batch, tiles.heads, tiles.blocks * rows)
    wide_tiles = wide_ready = low_tiles = None
    if tiles.wide:
        wide_tiles = _swizzled((stages, rows, width), out.dtype, head_dim)
        wide_ready = plgpu.Barrier(num_barriers=stages)
    if tiles.low:
        low_tiles = _swizzled((stages, rows, width), low_part.DTYPE, head_dim)
    kernel = plgpu.kernel(
        attention_row_sums,
        out_type=[jax.ShapeDtypeStruct(of_rows, jnp.float32)] * 2,
        scratch_types=[
            (
                _swizzled((stages, arrays, rows, width), dout.dtype, head_dim),
                wide_tiles,
                low_tiles,
                plgpu.SMEM((2, 2, group, rows), jnp.float32),
            ),
            (
                plgpu.Barrier(num_arrivals=arrays + tiles.low, num_barriers=stages),
                wide_ready,
            ),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        # Nothing here is both read and written by threads; where a copy follows on
        # reading or writing there is a barrier.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )

    def flat(x):
        """[B, Tpad, N D], zeros up to what TMA reads."""
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, -tiles.count % 8), (0, 0), (0, 0)))
        return x.reshape(*x.shape[:2], -1)

    results = kernel(*map(flat, (out, low, dout)))
    return RowSums(*(x[..., : tiles.count] for x in results))


def _swizzled(shape: tuple[int, ...], dtype, head_dim: int):
    """Shared memory for tiles of which 8 rows and a head's columns are read at a time:
    what a swizzle permutes lies in both."""
    size = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(128, head_dim * size)
    # Pyright takes JAX's transforms for abstract classes.
    tiling = plgpu.TilingTransform((8, swizzle // size))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))
