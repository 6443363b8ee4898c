"""How `hopper_row_sums` and `hopper_column_sums` cut their arrays."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from attn_jax.kernels.ring_order import MULTIPROCESSORS

LANES = 32
WARPS = 4
# The most columns of a tile of TMA.
MOST_COLUMNS = 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernels go about it. A *fill* is what a slot of shared memory takes.

    Attributes:
      elements: of a tile, about; a fill is up to three tiles.
      columns: of a tile at most: as many whole heads as fit, one at least.
      stages: fills in shared memory.
      ctas: of the grid; twice the multiprocessors: two on each.
      fills: of a chunk of keys, at most.
    """

    elements: int = 4096
    columns: int = MOST_COLUMNS
    stages: int = 4
    ctas: int = 2 * MULTIPROCESSORS
    fills: int = 4

    def group(self, heads: int, head_dim: int) -> int:
        """Heads of a tile."""
        most = max(min(self.columns, MOST_COLUMNS) // head_dim, 1)
        return max(g for g in range(1, most + 1) if heads % g == 0)

    def tile_rows(self, width: int, unit: int) -> int:
        return min(max(self.elements // width // unit, 1) * unit, 256)


class Lanes(NamedTuple):
    """A layout of tiles: `lanes` threads to a row, each with `vector` columns, and with
    those `lanes * vector` further right, and so on. A warpgroup holds `strip` rows, and
    the `strip` rows below, and so on."""

    lanes: int
    vector: int

    @property
    def strip(self) -> int:
        return WARPS * LANES // self.lanes

    def layout(self):
        rows, columns = LANES // self.lanes, self.lanes * self.vector
        layout = mgpu.TiledLayout(
            mgpu.fragmented_array.Tiling(
                ((WARPS * rows, columns), (rows, columns), (1, self.vector))
            ),
            warp_dims=(-6,),
            lane_dims=(-4, -3),
            vector_dim=-1,
            _check_canonical=False,
        ).canonicalize()
        return plgpu.Layout.TILED(
            layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
        )


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Tiles of dO, out and low: `arrays` of 16 bit, beside `wide`, an FP32 out."""

    batch: int
    count: int
    heads: int
    head_dim: int
    arrays: int
    wide: bool
    plan: Plan

    @property
    def group(self) -> int:
        """Heads of a tile."""
        return self.plan.group(self.heads, self.head_dim)

    @property
    def width(self) -> int:
        return self.group * self.head_dim

    @property
    def lanes(self) -> Lanes:
        # Loads of 16 bytes.
        vector = 4 if self.wide or self.head_dim % 64 else 8
        return Lanes(math.gcd(self.head_dim // vector, LANES), vector)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        # TMA stores a tile's sums, 4 bytes for each row and head, from shared memory at
        # multiples of 128. Both are powers of two.
        unit = max(self.lanes.strip, 32 // math.gcd(self.group, 32))
        return self.plan.tile_rows(self.width, unit)

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.count, self.rows)

    @property
    def items(self) -> int:
        return self.batch * self.blocks * (self.heads // self.group)

    @property
    def depth(self) -> int:
        """How many additions a product takes part in, at most."""
        pieces = self.head_dim // (self.lanes.lanes * self.lanes.vector)
        return (
            (pieces - 1) + (self.lanes.vector - 1) + (self.lanes.lanes.bit_length() - 1)
        )


@dataclasses.dataclass(frozen=True)
class ColumnTiles:
    """Tiles of an array of keys, `PER_FILL` to a fill, some fills to a chunk."""

    batch: int
    count: int
    heads: int
    head_dim: int
    plan: Plan

    PER_FILL = 3

    @property
    def group(self) -> int:
        """Heads of a tile."""
        return self.plan.group(self.heads, self.head_dim)

    @property
    def width(self) -> int:
        return self.group * self.head_dim

    @property
    def lanes(self) -> Lanes:
        # 4 columns are what Mosaic GPU can add across warps at once. With 16 lanes to a
        # row a strip is 8 rows, which is what a swizzle permutes.
        return Lanes(math.gcd(self.width // 4, 16), 4)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.plan.tile_rows(self.width, self.lanes.strip)

    @property
    def fill_keys(self) -> int:
        return self.rows * self.PER_FILL

    @property
    def chunks(self) -> int:
        """Of the keys of a batch entry."""
        return pl.cdiv(pl.cdiv(self.count, self.fill_keys), self.plan.fills)

    @property
    def fills(self) -> int:
        """Of a chunk."""
        return pl.cdiv(pl.cdiv(self.count, self.fill_keys), self.chunks)

    @property
    def items(self) -> int:
        """Chunks of one array."""
        return self.batch * self.chunks * (self.heads // self.group)

    @property
    def depth(self) -> int:
        """How many additions a key takes part in, at most, within its chunk."""
        strips = self.fills * self.fill_keys // self.lanes.strip
        across = (LANES // self.lanes.lanes).bit_length() - 1 + WARPS.bit_length() - 1
        return strips + across


def split(index, *sizes: int):
    """The index's digits, the last ones below `sizes`."""
    digits = []
    for size in reversed(sizes):
        digits.append(lax.rem(index, jnp.int32(size)))
        index = lax.div(index, jnp.int32(size))
    return (index, *reversed(digits))


def dealt(cta, items: int, ctas: int):
    """How many items a CTA gets that are dealt round."""
    return lax.div(items - cta + (ctas - 1), jnp.int32(ctas))


def swizzled(shape: tuple[int, ...], dtype, head_dim: int):
    """Shared memory for tiles of which 8 rows and a head's columns are read at a time:
    what a swizzle permutes lies in both."""
    size = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(128, head_dim * size)
    # Pyright takes JAX's transforms for abstract classes.
    tiling = plgpu.TilingTransform((8, swizzle // size))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))


# Loads as the layout has them.
read = functools.partial(plgpu.load, optimized=False)


def flat(x: Float[Array, "B L N H"]) -> jax.Array:
    """[B, L, N H]"""
    return x.reshape(*x.shape[:2], -1)
