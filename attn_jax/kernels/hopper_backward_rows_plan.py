"""How `hopper_backward_rows` cuts its arrays and which thread block (CTA) does what."""

import dataclasses
import math
from typing import NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu

from attn_jax.kernels.ring_order import MULTIPROCESSORS

LANES = 32
WARPS = 4
# The most columns of a tile of TMA.
MOST_COLUMNS = 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel goes about it.

    Attributes:
      elements: of a tile, about; a fill is up to three tiles.
      columns: of a tile at most: as many whole heads as fit, one at least.
      stages: fills in shared memory.
      ctas: of the grid; twice the multiprocessors: two on each.
      fills: of a chunk of K or V, at most.
    """

    elements: int = 4096
    columns: int = MOST_COLUMNS
    stages: int = 4
    ctas: int = 2 * MULTIPROCESSORS
    fills: int = 4


class Lanes(NamedTuple):
    """A layout of tiles: `lanes` threads to a row, each with `vector` columns, and with
    those `lanes * vector` further right, and so on. A warpgroup holds `strip` rows, and
    the `strip` rows below, and so on."""

    lanes: int
    vector: int

    @classmethod
    def of_rows(cls, head_dim: int, wide: bool) -> "Lanes":
        # Loads of 16 bytes.
        vector = 4 if wide or head_dim % 64 else 8
        return cls(math.gcd(head_dim // vector, LANES), vector)

    @classmethod
    def of_keys(cls, width: int) -> "Lanes":
        # 4 columns are what Mosaic GPU can add across warps at once. With 16 lanes to a
        # row a strip is 8 rows, which is what a swizzle permutes.
        return cls(math.gcd(width // 4, 16), 4)

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
class Tiles:
    """How arrays are cut; `arrays` of 16 bit to a fill, beside `wide`: an FP32 out."""

    batch: int
    query_count: int
    key_count: int
    heads: int
    key_heads: int
    head_dim: int
    arrays: int
    wide: bool
    plan: Plan

    @property
    def group(self) -> int:
        """Heads of a tile, of queries and of keys."""
        most = max(min(self.plan.columns, MOST_COLUMNS) // self.head_dim, 1)
        return max(g for g in range(1, most + 1) if self.key_heads % g == 0)

    @property
    def width(self) -> int:
        return self.group * self.head_dim

    @property
    def row_lanes(self) -> Lanes:
        return Lanes.of_rows(self.head_dim, self.wide)

    @property
    def key_lanes(self) -> Lanes:
        return Lanes.of_keys(self.width)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        # TMA stores a tile's sums, 4 bytes for each row and head, from shared memory at
        # multiples of 128.
        aligned = 32 // math.gcd(self.group, 32)
        # All are powers of two.
        unit = max(self.row_lanes.strip, self.key_lanes.strip, aligned)
        return min(max(self.plan.elements // self.width // unit, 1) * unit, 256)

    @property
    def fill_keys(self) -> int:
        return self.rows * self.arrays

    @property
    def chunks(self) -> int:
        """Of the keys of a batch entry, and of its values."""
        return pl.cdiv(pl.cdiv(self.key_count, self.fill_keys), self.plan.fills)

    @property
    def fills(self) -> int:
        """Of a chunk."""
        return pl.cdiv(pl.cdiv(self.key_count, self.fill_keys), self.chunks)

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.query_count, self.rows)

    @property
    def row_depth(self) -> int:
        """How many additions a product of a row takes part in, at most."""
        lanes, vector = self.row_lanes
        pieces = self.head_dim // (lanes * vector)
        return (pieces - 1) + (vector - 1) + (lanes.bit_length() - 1)

    @property
    def key_depth(self) -> int:
        """How many additions a key takes part in, at most, within its chunk."""
        lanes = self.key_lanes
        strips = self.fills * self.fill_keys // lanes.strip
        return strips + (LANES // lanes.lanes).bit_length() - 1 + WARPS.bit_length() - 1

    @property
    def deal(self) -> "Deal":
        row_items = self.batch * self.row_blocks * (self.heads // self.group)
        # Of K and of V.
        chunk_items = 2 * self.batch * self.chunks * (self.key_heads // self.group)
        return Deal(
            chunk_items=chunk_items,
            row_items=row_items,
            ctas=min(self.plan.ctas, chunk_items + row_items),
            # In bytes.
            worth=self.fills * self.arrays / (self.arrays + 2 * self.wide),
        )


class Deal(NamedTuple):
    """Which CTA does what: chunks of K and V are dealt round, the rows so that in the
    end all have the same. A chunk is as much work as `worth` items of rows.

    The CTAs from number `heavy` on, which got one chunk less, first share the rows
    before `ahead`; the others are dealt round to all.
    """

    chunk_items: int
    row_items: int
    ctas: int
    worth: float

    @property
    def heavy(self) -> int:
        return self.chunk_items % self.ctas

    @property
    def ahead(self) -> int:
        light = self.ctas - self.heavy
        return min(self.row_items, light * round(self.worth)) if self.heavy else 0

    def _ahead_of(self, cta):
        light = self.ctas - self.heavy
        mine = _dealt(cta - self.heavy, self.ahead, light)
        return jnp.where(cta >= self.heavy, mine, 0)

    def counts(self, cta):
        """(chunks, items of rows) of a CTA."""
        chunks = _dealt(cta, self.chunk_items, self.ctas)
        rows = _dealt(cta, self.row_items - self.ahead, self.ctas)
        return chunks, rows + self._ahead_of(cta)

    def chunk_item(self, cta, i):
        return cta + i * self.ctas

    def row_item(self, cta, i):
        mine = self._ahead_of(cta)
        early = cta - self.heavy + i * (self.ctas - self.heavy)
        return jnp.where(i < mine, early, self.ahead + cta + (i - mine) * self.ctas)


def _dealt(first, count: int, stride: int):
    """How many of first, first + stride, ... are below `count`."""
    return lax.div(jnp.maximum(count - first + (stride - 1), 0), jnp.int32(stride))
