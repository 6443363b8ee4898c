"""What the backward pass sums over rows of its inputs, for Ampere (sm_80):

    excess = rowsum(dO * (out + low))

in one launch, at the speed of memory: a CTA has a tile of rows of one head and reads it
once, straight to registers.

Where it rounds: all is FP32, u = 2^-24, added in an order that shapes fix: two runs
give the same bits. out + low rounds once, its product with dO at most once (the
compiler may fuse it with an addition). Threads and lanes then add as `hopper_row_sums`
says: no product is in more than `Lanes.additions`, 10 for head dimension 64, 11 for
128. So the sum is off by at most (additions + 2) u times sum |dO| |out + low|, to first
order.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.lanes import Lanes, read
from attn_jax.kernels.tiles import widen, write_tile

# Values of each array in a tile, about: 32 of a thread.
ELEMENTS = 4096


def row_sums(
    out: Float[Array, "B T N D"],
    low: Float[Array, "B T N D"] | None,
    dout: Float[Array, "B T N D"],
) -> tuple[Float32[Array, "B N T"], None]:
    """(excess, as the module says; None for the squares that Hopper's kernels want).

    `dout` is BF16 or FP16; `out` has its format or is FP32; `low` has its format, or is
    None for zero."""
    batch, count, heads, head_dim = out.shape
    lanes = Lanes.of_rows(head_dim, 4 if out.dtype == jnp.float32 else 8)
    rows = max(ELEMENTS // head_dim // lanes.strip, 1) * lanes.strip
    layout = lanes.layout()

    def attention_row_sums(out_gmem, low_gmem, dout_gmem, excess_gmem):
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        start = lax.axis_index("tile") * rows
        first = jnp.minimum(start, out_gmem.shape[1] - rows)

        def tile(gmem):
            own = tiles.head_rows(gmem, b, first, rows, n, head_dim)
            return widen(read(own, layout=layout))

        total = tile(out_gmem)
        if low_gmem is not None:
            total += tile(low_gmem)
        sums = (tile(dout_gmem) * total).sum(axis=1)
        write_tile(excess_gmem.at[b, n, pl.ds(start, rows)], sums)

    def flat(x):
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, max(rows - count, 0)), (0, 0), (0, 0)))
        return x.reshape(*x.shape[:2], -1)

    blocks = pl.cdiv(count, rows)
    excess = plgpu.kernel(
        attention_row_sums,
        out_type=jax.ShapeDtypeStruct((batch, heads, blocks * rows), jnp.float32),
        grid=(heads, blocks, batch),
        grid_names=("head", "tile", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(*map(flat, (out, low, dout)))
    whole, rest = divmod(count, rows)
    if not (whole and rest):
        return excess[:, :, :count], None
    # The last tile is the last rows there are, of which the first are another one's.
    parts = excess[:, :, : whole * rows], excess[:, :, blocks * rows - rest :]
    return jnp.concatenate(parts, axis=2), None
