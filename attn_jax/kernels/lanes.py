"""Register layouts of tiles for kernels that only sum rows or columns."""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

from attn_jax.formats import FP32

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


def row_norms(x: jax.Array) -> jax.Array:
    """Norms of an FP32 tile's rows: the root of the sum of squares, by an instruction
    that is off by up to 2^-23 of it.

    Where the sum is at most D 2^-100, or overflows, it is sqrt(D) max |x| instead,
    rounded twice: a bound of the norm, up to sqrt(D) times as large, or FP32's largest
    number for what is beyond. Of a row with infinity or NaN it is one of them. Some
    last places do no harm: the power of two made of it leaves a factor of two
    (`hopper_range`).
    """
    columns = x.shape[1]
    squares, largest = (x * x).sum(axis=1), jnp.abs(x).max(axis=1)
    # Squares that vanish come to 2^-26 of this at most.
    lost = squares <= columns * 2.0**-100
    lost |= (squares > FP32.max_finite) & (largest <= FP32.max_finite)
    bound = jnp.minimum(columns**0.5 * largest, FP32.max_finite)
    # NaN is in the sum, as it need not be in the maximum (XLA's on a CPU).
    return jnp.where(lost, bound, jnp.sqrt(squares))


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
