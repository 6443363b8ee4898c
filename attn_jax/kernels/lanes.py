"""Layouts of tiles whose rows or columns are summed, in kernels without a product."""

import functools
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
