"""Kernel for rowsum(dO O) and the norm of dO, per row, on Ampere (sm_80).

    excess = rowsum(dO * O')      dout_norm = sqrt(rowsum(dO * dO))

with O' of out and what its rounding dropped (`low_part`), or out itself, in one launch,
at the speed of memory: a CTA has a tile of rows of one head and reads it once, straight
to registers. The norms are made on request.

Where it rounds: all is FP32, u = 2^-24, added in an order that shapes fix: two runs
give the same bits.
  excess: O' is exact, its product with dO rounds at most once (the compiler may fuse
    it with an addition). Threads and lanes then add as `hopper_row_sums` says: no
    product is in more than `Lanes.additions`, 10 for head dimension 64, 11 for 128. So
    the sum is off by at most (additions + 1) u times sum |dO| |O'|, to first order.
  dout_norm: the same additions; dO * dO is exact, short of underflow. Then as
    `lanes.row_norms` says.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int8

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels import low_part
from attn_jax.kernels.lanes import Lanes, read, row_norms
from attn_jax.kernels.tiles import widen, write_tile

# Values of each array in a tile, about: 32 of a thread.
ELEMENTS = 4096


def row_sums(
    out: Float[Array, "B T N D"],
    low: Int8[Array, "B T N D"] | None,
    dout: Float[Array, "B T N D"],
    *,
    norms: bool = False,
) -> tuple[Float32[Array, "B N T"], Float32[Array, "B N T"] | None]:
    """(excess, dout_norm or, if not `norms`, None), as the module says.

    `dout` is BF16 or FP16; `out` has its format or is FP32; `low` is None where the
    latter, or for zero."""
    batch, count, heads, head_dim = out.shape
    lanes = Lanes.of_rows(head_dim, 4 if out.dtype == jnp.float32 else 8)
    rows = max(ELEMENTS // head_dim // lanes.strip, 1) * lanes.strip
    layout = lanes.layout()

    def attention_row_sums(out_gmem, low_gmem, dout_gmem, excess_gmem, norm_gmem):
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        start = lax.axis_index("tile") * rows
        first = jnp.minimum(start, out_gmem.shape[1] - rows)

        def tile(gmem):
            own = tiles.head_rows(gmem, b, first, rows, n, head_dim)
            return read(own, layout=layout)

        def write(gmem, values):
            write_tile(gmem.at[b, n, pl.ds(start, rows)], values)

        out = tile(out_gmem)
        low = None if low_gmem is None else tile(low_gmem)
        dout = widen(tile(dout_gmem))
        total = widen(out) if low is None else low_part.completed(out, low)
        write(excess_gmem, (dout * total).sum(axis=1))
        if norm_gmem is not None:
            write(norm_gmem, row_norms(dout))

    def flat(x):
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, max(rows - count, 0)), (0, 0), (0, 0)))
        return x.reshape(*x.shape[:2], -1)

    blocks = pl.cdiv(count, rows)
    whole, rest = divmod(count, rows)

    def in_order(sums):
        if not (whole and rest):
            return sums[:, :, :count]
        # The last tile is the last rows there are, of which the first are another
        # one's.
        parts = sums[:, :, : whole * rows], sums[:, :, blocks * rows - rest :]
        return jnp.concatenate(parts, axis=2)

    of_rows = jax.ShapeDtypeStruct((batch, heads, blocks * rows), jnp.float32)
    excess, dout_norm = plgpu.kernel(
        attention_row_sums,
        out_type=[of_rows, of_rows if norms else None],
        grid=(batch, blocks, heads),
        grid_names=("batch", "tile", "head"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(*map(flat, (out, low, dout)))
    return in_order(excess), in_order(dout_norm) if norms else None
