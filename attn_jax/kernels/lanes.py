"""Layouts of tiles whose rows or columns are summed, in kernels without a product."""

import functools
import math
from typing import NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu

LANES = 32
WARPS = 4

# Loads as the layout has them.
read = functools.partial(plgpu.load, optimized=False)


class Lanes(NamedTuple):
    """A layout of tiles: `lanes` threads to a row, each with `vector` columns, and with
    those `lanes * vector` further right, and so on. A warpgroup holds `strip` rows, and
    the `strip` rows below, and so on."""

    lanes: int
    vector: int

    @classmethod
    def of_rows(cls, columns: int, vector: int) -> "Lanes":
        """For sums over rows of so many columns, `vector` of them a load, or half as
        many where they are no multiple of 64."""
        vector = vector if columns % 64 == 0 else min(vector, 4)
        return cls(math.gcd(columns // vector, LANES), vector)

    def additions(self, columns: int) -> int:
        """How many additions a term of a row's sum takes part in, at most: with those
        of its thread further right, with its neighbours, then lanes in pairs."""
        pieces = columns // (self.lanes * self.vector)
        return (pieces - 1) + (self.vector - 1) + (self.lanes.bit_length() - 1)

    @property
    def strip(self) -> int:
        return WARPS * LANES // self.lanes

    def layout(self):
        rows, columns = LANES // self.lanes, self.lanes * self.vector
        tiling = (WARPS * rows, columns), (rows, columns), (1, self.vector)
        return tiled(tiling, warp_dims=(-6,), lane_dims=(-4, -3))


def tiled(
    tiling: tuple[tuple[int, ...], ...],
    *,
    warp_dims: tuple[int, ...],
    lane_dims: tuple[int, ...],
):
    """A layout that cuts a tile as `tiling` says, deals the axes so named of what
    comes of it to warps and lanes, and gives a thread vectors of the last one."""
    layout = mgpu.TiledLayout(
        mgpu.fragmented_array.Tiling(tiling),
        warp_dims=warp_dims,
        lane_dims=lane_dims,
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    )
