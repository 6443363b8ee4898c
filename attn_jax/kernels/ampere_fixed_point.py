"""Sums of dQ in 32-bit integers in global memory: how they lie, begin, end.

A sum of integers is the same in any order, so CTAs add when they please and two runs
give the same bits.

What is added is a tile of dS K', FP16 both and scaled: each at most 2^15
(`hopper_range`), and so is what a row of dS sums to in absolute value, which
2 |dO| |V| + |dLSE| bounds. So a sum over any of the keys is at most 2^30 in absolute
value, and int32 holds it, with the 1/2 that each tile's rounding adds, and with room
for a factor of two: bounds are of FP32, off by some last places. Its resolution of 1 is
2^-30 of the largest dQ that these bounds admit.

There are no integers for infinity and NaN, so they come in by way of `row_sum`, where
`is_held` says so: a row of dQ is NaN where its LSE or delta is not finite, as one of
them is if Q, dO or dLSE is not; the bounds are those of the other rows. So are all rows
of a head whose powers of two are as small as they get, so that dS or K' may exceed
FP16, or unknown: for K from 2^114 or so on, or dO V from 2^115, or K or V that is not
finite.

How they lie: as [B, N, T / 8, 2, W = 4 H], which is, of 8 queries at a time,

    (even or odd column, column // 8, query in the 8, column // 2 modulo 4).

A warp of a matrix product's accumulator adds 8 queries by 4 even, or odd, columns at a
time: the last two, 128 bytes in a row. Who reads the sums in the end takes 16 bytes of
even columns and as many of odd ones, which together are 8 neighbours of a row: no
thread needs what another one has read.
"""

import functools
import itertools
import math

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Bool, Float32, Int32

from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.lanes import tiled
from attn_jax.kernels.tiles import Fragments, write_tile
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT

# Fragments of the product that is added. Two warps down the rows, two side by side:
# each has 32 rows of 64 for a right operand.
M_WARPS = 2
ACCUMULATOR = plgpu.Layout.MMA_ACC(jnp.float16, m_warps=M_WARPS)
LEFT = plgpu.Layout.MMA_LHS(jnp.float16, m_warps=M_WARPS)
RIGHT = plgpu.Layout.MMA_RHS(jnp.float16, m_warps=M_WARPS)

COLUMNS = 64  # of a tile that is added
GROUP = 8  # queries that lie together
THREADS = 128
# Elements that a thread reads of even columns, and of odd ones.
VECTOR = 4
CLEARED = 8  # of what a warpgroup stores at once, 4 KiB: at a time, at most


def shape_of_sums(
    batch: int, heads: int, rows: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Of the sums for so many rows, a multiple of 8."""
    return batch, heads, rows // GROUP, 2, 4 * head_dim


def as_stored(x: Int32[Array, "T H"]) -> Int32[Array, "groups 2 W"]:
    """What lies how, said in JAX."""
    rows, columns = x.shape
    x = x.reshape(rows // GROUP, GROUP, columns // 8, 4, 2).transpose(0, 4, 2, 1, 3)
    return x.reshape(rows // GROUP, 2, 4 * columns)


def in_order(sums: Int32[Array, "groups 2 W"]) -> Int32[Array, "T H"]:
    """The inverse of `as_stored`."""
    groups, _, width = sums.shape
    x = sums.reshape(groups, 2, width // 32, GROUP, 4).transpose(0, 3, 2, 4, 1)
    return x.reshape(groups * GROUP, width // 4)


def is_held(
    lse: Float32[Array, "B N T"], delta: Float32[Array, "B N T"], numbers: Range
) -> Bool[Array, "B N T"]:
    """Whether integers hold what there is of a row of dQ."""
    least = -MOST_HEAD_EXPONENT
    in_range = numbers.key_factor[..., 0] > 2.0**least
    in_range &= numbers.row_exponent > least
    in_range = jnp.repeat(in_range, lse.shape[1] // in_range.shape[1], axis=1)
    return in_range[..., None] & jnp.isfinite(lse) & jnp.isfinite(delta)


def product(ds, keys, depth: int) -> jax.Array:
    """The sum of dS K' (`ACCUMULATOR`), of tiles in shared memory, [keys, queries] and
    [keys, 64], so many keys at a time."""
    rows, queries = ds[0].shape
    zero = jnp.zeros((queries, COLUMNS), jnp.float32)
    total = plgpu.layout_cast(zero, ACCUMULATOR)
    for part, key in zip(ds, keys, strict=True):
        for k in range(0, rows, depth):
            own = pl.ds(k, depth)
            left = plgpu.load(part.at[own].transpose((1, 0)), layout=LEFT)
            right = plgpu.load(key.at[own], layout=RIGHT)
            total = plgpu.mma(total, left, right)
    return total


def add(sums, x: jax.Array) -> None:
    """Adds `x`, [rows, 64] in FP32 (`ACCUMULATOR`), each number rounded to the nearest
    integer, halves to even, to `sums`: [rows / 8, 2, 256] of the whole array."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR))(add_rounded)(sums, x)


def add_rounded(context, sums: ir.Value, x: mgpu.FragmentedArray) -> None:
    """The code behind `add`; the interpreter knows it by this function."""
    del context
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    (of_group, of_odd, _), _ = ir.MemRefType(sums.type).get_strides_and_offset()

    def number(n: int) -> ir.Value:
        return utils.c(n, i32)

    thread = arith.remui(utils.thread_idx(), number(THREADS))
    warp, lane = (f(thread, number(32)) for f in (arith.divui, arith.remui))
    warp_row, warp_column = (
        f(warp, number(4 // M_WARPS)) for f in (arith.divui, arith.remui)
    )
    strides, offsets = places(x.shape, of_group, of_odd)
    place = functools.reduce(
        arith.addi,
        (
            arith.muli(index, number(4 * stride))
            for index, stride in zip((warp_row, warp_column, lane), strides)
        ),
    )
    base = llvm.ptrtoint(i64, utils.memref_ptr(sums))
    address = arith.addi(base, arith.extui(i64, place))
    for pair, of_pair in zip(x.registers.flat, offsets, strict=True):
        for i, offset in enumerate(of_pair):
            value = vector.extract(pair, dynamic_position=[], static_position=[i])
            utils.inline_ptx(
                "{ .reg .s32 n; cvt.rni.s32.f32 n, $1; "
                f"red.relaxed.gpu.global.add.s32 [$0 + {4 * offset}], n; }}",
                *(address, value),
                has_side_effects=True,
            )


def places(
    shape: tuple[int, ...], of_group: int, of_odd: int
) -> tuple[tuple[int, int, int], list[tuple[int, int]]]:
    """Where numbers of a tile in `ACCUMULATOR` go, in elements, where groups and odd
    columns are so far apart: (for a thread, to be multiplied by its warp's row, the
    warp's column, its lane; of each of its pairs, for both numbers)."""
    down, across = shape[0] // 32, shape[1] // 16
    # Of 32 rows by 16 columns at a time a thread has two pairs, 8 rows apart. A warp
    # has two groups, and 8 columns next to another warp's.
    starts = (
        of_group * (4 * i + half) + 64 * j
        for i, j, half in itertools.product(range(down), range(across), range(2))
    )
    return (2 * of_group, 32, 1), [(start, start + of_odd) for start in starts]


def clear(sums, part: jax.Array, parts: int) -> None:
    """Part number `part` of so many of `sums`, [heads, groups, 2, W], becomes zero, by
    one warpgroup."""
    heads, groups, _, width = sums.shape
    # As `read` has them: each thread 16 bytes at a time, which ptxas would otherwise
    # store in four goes where it does not see that addresses are multiples of 16.
    size = strip_of(width // 4) // GROUP
    layout = halves(width // 4)
    zero = plgpu.layout_cast(jnp.zeros((size, width), jnp.int32), layout)
    pieces = math.gcd(groups // size, CLEARED)
    of_head = groups // size // pieces
    i32 = jnp.int32

    def clear_pieces(i, _):
        head, piece = (f(part + i * parts, i32(of_head)) for f in (lax.div, lax.rem))
        for j, half in itertools.product(range(pieces), range(2)):
            own = pl.ds((piece * pieces + j) * size, size)
            write_tile(sums.at[head, own, half], zero)

    count = lax.div(heads * of_head - 1 - part + parts, i32(parts))
    lax.fori_loop(i32(0), count, clear_pieces, None)


def begun(shape: tuple[int, int, int, int, int], key_heads: int, pairs: int):
    """Sums of that shape (`shape_of_sums`), of which those of the first (batch, key
    head) pairs are zero, and the others whatever memory holds."""
    heads = shape[1] // key_heads
    size = strip_of(shape[4] // 4) // GROUP
    parts = max(1, heads * shape[2] // (size * CLEARED))

    def attention_clear(sums_gmem):
        pair = lax.axis_index("pair")
        b, head = (f(pair, jnp.int32(key_heads)) for f in (lax.div, lax.rem))
        own = sums_gmem.at[b, pl.ds(head * heads, heads)]
        clear(own, lax.axis_index("part"), parts)

    return plgpu.kernel(
        attention_clear,
        out_type=jax.ShapeDtypeStruct(shape, jnp.int32),
        grid=(pairs, parts),
        grid_names=("pair", "part"),
        compiler_params=tiles.COMPILER_PARAMS,
    )()


def strip_of(head_dim: int) -> int:
    """Rows that a warpgroup reads at a time, 8 elements a thread."""
    return THREADS * 2 * VECTOR // head_dim


def fragments(head_dim: int) -> Fragments:
    """Of `read`'s result: a warp has 8 rows by 32 columns, a thread 8 of a row."""
    of_warp = (GROUP, 4 * 2 * VECTOR)
    tiling = ((strip_of(head_dim), head_dim), of_warp, (1, 2 * VECTOR))
    # Threads as they read: down the 8 rows first.
    tile = tiled(tiling, warp_dims=(-6, -5), lane_dims=(-3, -4))
    return Fragments(tile, tile.reduce(1), tile.reduce(0), is_default=False)


def halves(head_dim: int):
    """Layout of the even, or the odd columns that `read` loads, [strip / 8, 4 H]."""
    strip = strip_of(head_dim)
    tiling = ((strip // GROUP, 4 * head_dim), (1, 32 * VECTOR), (1, VECTOR))
    return tiled(tiling, warp_dims=(-6, -5), lane_dims=(-3,))


def read(sums, head_dim: int) -> jax.Array:
    """The sums of `strip_of` rows, [strip / 8, 2, 4 H] in memory, as [strip, H] in
    int32 (`fragments`). All that a thread needs it loads itself, 16 bytes at a time."""
    layout = halves(head_dim)
    even, odd = (
        plgpu.load(sums.at[:, i], layout=layout, optimized=False) for i in range(2)
    )
    shape = strip_of(head_dim), head_dim
    result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=fragments(head_dim).tile)
    code = plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    return code(interleave)(even, odd)


def interleave(context, even: mgpu.FragmentedArray, odd: mgpu.FragmentedArray):
    """The code behind `read`; the interpreter knows it by this function."""
    del context
    head_dim = even.shape[1] // 4
    order = [i + part for i in range(VECTOR) for part in (0, VECTOR)]
    layout = fragments(head_dim).tile.to_mgpu()
    registers = even.registers.copy()
    for i, (x, y) in enumerate(
        zip(even.registers.flat, odd.registers.flat, strict=True)
    ):
        registers.flat[i] = vector.shuffle(x, y, order)
    shape = (even.shape[0] * GROUP, head_dim)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=even.is_signed,
    )
