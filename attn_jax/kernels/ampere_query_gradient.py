"""The end of dQ after Ampere's one-pass backward kernel: its integers become 16 bits.

Sums are read as they lie (`ampere_fixed_point`), multiplied by powers of two and scale,
and dQ is written in rows, at the speed of memory.

The backward kernel goes over (batch, key head) pairs from the first to the last. What
it wrote last may still be in the L2 cache (40 MB), so this one begins at the end.

Where it rounds: an integer beyond 2^24 to FP32; then as `hopper_query_gradient` does:
the factors that undo `hopper_range` are powers of two, and exact short of FP32's range;
row_sum * centre and its sum with that round to FP32 (the compiler may fuse the two),
scale times it does, and the result to its format.
"""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32

from attn_jax.kernels import ampere_fixed_point as fixed_point
from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.lanes import read
from attn_jax.kernels.tiles import pad_rows, write_tile

# Of rows that a warpgroup reads at a time, in a CTA: four times 8 elements a thread.
STRIPS = 4


def query_gradient(
    sums: Int32[Array, "B N groups 2 W"],
    numbers: Range,
    row_sum: Float32[Array, "B N T"],
    scale: float,
    dtype,
    *,
    query_count: int,
) -> Float[Array, "B T N H"]:
    """dQ of `sums` over keys of dS K', in `dtype`:

        dQ = scale * (sums * small * large + row_sum * centre)

    with the factors of `Range.undone`. `row_sum` is what rows of dS sum to.
    T queries lie in T / 8 groups, or more."""
    batch, heads, groups, _, width = sums.shape
    head_dim = width // 4
    group = heads // numbers.centre.shape[1]
    strip = fixed_point.strip_of(head_dim)
    strips = pl.cdiv(query_count, strip)
    count = strips * strip
    assert count <= groups * fixed_point.GROUP
    rows = strip * math.gcd(strips, STRIPS)
    blocks = count // rows
    fragments = fixed_point.fragments(head_dim)
    shape = strip, head_dim

    def attention_query_gradient(
        sums_gmem, small_gmem, large_gmem, row_sum_gmem, centre_gmem, out_gmem
    ):
        last = batch * heads * blocks - 1
        number = last - lax.axis_index("cta")
        pair, block = (f(number, jnp.int32(blocks)) for f in (lax.div, lax.rem))
        b, n = (f(pair, jnp.int32(heads)) for f in (lax.div, lax.rem))
        kv_head = lax.div(n, jnp.int32(group))
        starts = [block * rows + at for at in range(0, rows, strip)]

        def integers(start):
            first = lax.div(start, jnp.int32(fixed_point.GROUP))
            part = pl.ds(first, strip // fixed_point.GROUP)
            return fixed_point.read(sums_gmem.at[b, n, part], head_dim)

        def shift(start):
            """row_sum of the rows, to meet the centre."""
            rows = row_sum_gmem.at[b, n, pl.ds(start, strip)]
            return fragments.along_rows(read(rows, layout=fragments.rows), shape)

        # All loads are under way before the first of them is waited for.
        totals = [integers(start) for start in starts]
        small, large = small_gmem[b, kv_head], large_gmem[b, kv_head]
        # One after the other: their product may lie beyond FP32's range.
        totals = [x.astype(jnp.float32) * small * large for x in totals]
        centre = read(centre_gmem.at[b, kv_head], layout=fragments.columns)
        centre = fragments.along_columns(centre, shape)
        shifts = [shift(start) for start in starts]
        totals = [x + y * centre for x, y in zip(totals, shifts, strict=True)]
        for x, start in zip(totals, starts, strict=True):
            own = tiles.head_rows(out_gmem, b, start, strip, n, head_dim)
            write_tile(own, (x * scale).astype(dtype))

    out = plgpu.kernel(
        attention_query_gradient,
        out_type=jax.ShapeDtypeStruct((batch, count, heads * head_dim), dtype),
        grid=(batch * heads * blocks,),
        grid_names=("cta",),
        compiler_params=tiles.COMPILER_PARAMS,
    )(sums, *numbers.undone(), pad_rows(row_sum, count), numbers.centre)
    return out.reshape(batch, count, heads, head_dim)[:, :query_count]
