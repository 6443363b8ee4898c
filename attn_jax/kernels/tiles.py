"""What kernels share: shared-memory tiles, visibility, Hopper's loading loop.

Kernels work on one (batch, head) pair at a time. A *tile* is what one thread block
(CTA) owns; each of its consumer warpgroups owns `block` rows of it. What the Ampere
kernels use, too, is told how the registers of an accumulator lie (`Fragments`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from attn_jax.kernels.integers import rem

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# TMA reads 16-bit tiles in groups of so many rows.
SEQUENCE_MULTIPLE = 8

# In an accumulator of wgmma or of mma a thread holds columns c, c + 8, c + 16, ...
GROUP = 8


class Fragments(NamedTuple):
    """How a warpgroup's registers hold the accumulator of a matrix product.

    Attributes:
      tile: layout of the accumulator.
      rows, columns: of one value for each of its rows, and for each of its columns.
      is_default: JAX takes a broadcast of the latter two to have the layout `tile`.
    """

    tile: Any
    rows: Any
    columns: Any
    is_default: bool

    def along_rows(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcasts one value per row over a tile."""
        return self._as_tile(lax.broadcast_in_dim(x, shape, [0]))

    def along_columns(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcasts one value per column over a tile."""
        return self._as_tile(lax.broadcast_in_dim(x, shape, [1]))

    def positions(self, shape: tuple[int, int], axis: int) -> jax.Array:
        """Of each value of a tile, its index on an axis."""
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.tile)

    def _as_tile(self, x: jax.Array) -> jax.Array:
        return x if self.is_default else plgpu.layout_cast(x, self.tile)


# Row and column layouts of a wgmma accumulator: one value per row, one per column.
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
WGMMA = Fragments(plgpu.Layout.WGMMA, ROWS, COLUMNS, is_default=True)


def accumulator(rows: int, columns: int):
    """An FP32 wgmma accumulator, in registers, zero at the start."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def smem_tile(shape: tuple[int, ...], dtype, *pieces: int):
    """Shared memory for matrix tiles (the last two axes) that wgmma and TMA can read.

    Rows of 8 x (128 bytes), swizzled, which avoids bank conflicts. 64 or 32 bytes where
    no more divides a row of the tile and each of `pieces`, in columns: the parts that
    a row is cut into, and what else a product with it sums over, since both operands
    of a product want the same swizzle.
    """
    size = jnp.dtype(dtype).itemsize
    swizzle_bytes = swizzle(dtype, shape[-1], *pieces)
    # Pyright takes JAX's transforms for abstract classes.
    tiling = plgpu.TilingTransform(  # pyright: ignore[reportAbstractUsage]
        (8, swizzle_bytes // size)
    )
    swizzling = plgpu.SwizzleTransform(  # pyright: ignore[reportAbstractUsage]
        swizzle_bytes
    )
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))


def swizzle(dtype, *lengths: int) -> int:
    """The largest swizzle, in bytes, that divides rows of all these lengths."""
    size = jnp.dtype(dtype).itemsize
    return next(
        width
        for width in (128, 64, 32)
        if all(length * size % width == 0 for length in lengths)
    )


def found_anew(index: jax.Array) -> jax.Array:
    """The same index, which the compilers take for another one each time.

    What is found by it in a loop (wgmma descriptors, one for every 16 columns of an
    operand) is made there, and not kept in registers through the loop.
    """
    return lax.optimization_barrier(index)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value per row over a tile of wgmma."""
    return WGMMA.along_rows(x, shape)


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value per column over a tile of wgmma."""
    return WGMMA.along_columns(x, shape)


def widen(x: jax.Array) -> jax.Array:
    """x as FP32, for 16-bit values that are an operand of a product too.

    BF16 goes by way of its bits: a conversion back would make LLVM round the elements
    one by one (F2F, a quarter of the speed of exp2's unit, which it shares) instead of
    in pairs (F2FP).
    """
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def head_of(array, batch, head):
    """The part for a batch entry and head of an array in which those axes may have size
    one, whose entry is for all; `array` is a reference."""
    b = batch if array.shape[0] > 1 else 0
    n = head if array.shape[1] > 1 else 0
    return array.at[b, n]


def columns_at_once(rows: int, width: int) -> int:
    """Columns of a tile in global memory that a warpgroup reads while it holds another
    tile: few enough for the registers, and else as many as can be, since each time it
    waits for memory; they divide the width (`prototypes/carried_columns.py`)."""
    most = max(GROUP, 64 * 320 // rows - width)
    most = min(most, width)
    return max(x for x in range(GROUP, most + 1, GROUP) if width % x == 0)


def read_tile(
    array,
    row_start,
    column_start,
    shape: tuple[int, int],
    fragments: Fragments = WGMMA,
) -> jax.Array:
    """A tile of a matrix in global memory, in the layout of an accumulator."""
    rows, columns = shape
    tile = array.at[pl.ds(row_start, rows), pl.ds(column_start, columns)]
    return plgpu.load(tile, layout=fragments.tile, optimized=False)


def write_tile(gmem, x: jax.Array) -> None:
    """x to global memory, where its rows need not be whole cache lines: JAX 0.12 asks
    that it be said, and 0.11.2 has nothing to say it with."""
    store = getattr(plgpu, "store", None)
    if store is None:
        gmem[...] = x
    else:
        store(gmem, x, optimized=False)


def capped(
    s: jax.Array, scale: float, soft_cap: float | None, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """cap(scale * S + bias) in units of log2, and the cap's derivative or None.

    cap(x) = soft_cap * tanh(x / soft_cap). Without cap and bias it is S itself, not
    scaled. tanh(x) = 1 - 2 / (1 + exp(2 x)) is off by some 2**-23 at most where the
    hardware's is off by 2**-11.
    """
    if bias is not None:
        s = s * scale + bias.astype(jnp.float32)
        if soft_cap is None:
            return s * LOG2_E, None
        scale = 1.0
    elif soft_cap is None:
        return s, None
    tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2.0 * LOG2_E * scale / soft_cap)))
    return tanh * (soft_cap * LOG2_E), 1.0 - tanh * tanh


def finite(row_max: jax.Array) -> jax.Array:
    """0 for the maximum of a row that sees nothing: -inf - -inf would be NaN."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def row_positions(rows: int) -> jax.Array:
    """The row of each value of a tile [rows, 8]."""
    return plgpu.broadcasted_iota(
        jnp.int32, (rows, GROUP), 0, layout=plgpu.Layout.WGMMA
    )


def hide_from(s: jax.Array, seen: jax.Array) -> jax.Array:
    """s with -inf in all but the first `seen` columns.

    `seen` is one number, or [rows, 8] with the same in each row.
    """
    return _hide_columns(s, lambda position, column: position < seen - column)


def hide_before(s: jax.Array, hidden: jax.Array) -> jax.Array:
    """s with -inf in the first `hidden` columns, given as `seen` of `hide_from` is."""
    return _hide_columns(s, lambda position, column: position >= hidden - column)


def _hide_columns(s: jax.Array, is_seen) -> jax.Array:
    """s with -inf where is_seen(position, column) is False of column + position.

    Eight columns at a time against a number less `column`: against the number of every
    column LLVM would keep those numbers in registers through the whole kernel.
    """
    rows, columns = s.shape
    position = plgpu.broadcasted_iota(
        jnp.int32, (rows, GROUP), 1, layout=plgpu.Layout.WGMMA
    )
    return jnp.concatenate(
        [
            jnp.where(
                is_seen(position, column),
                lax.slice(s, (0, column), (rows, column + GROUP)),
                -jnp.inf,
            )
            for column in range(0, columns, GROUP)
        ],
        axis=1,
    )


def hide_columns_before(s: jax.Array, hidden: jax.Array) -> jax.Array:
    """s with -inf in the first `hidden` columns; [rows, 8] with the same in each row.
    Eight columns at a time, as `hide_from`."""
    rows, columns = s.shape
    position = plgpu.broadcasted_iota(
        jnp.int32, (rows, GROUP), 1, layout=plgpu.Layout.WGMMA
    )
    return jnp.concatenate(
        [
            jnp.where(
                position < hidden - column,
                -jnp.inf,
                lax.slice(s, (0, column), (rows, column + GROUP)),
            )
            for column in range(0, columns, GROUP)
        ],
        axis=1,
    )


def hide_rows_from(s: jax.Array, seen: jax.Array) -> jax.Array:
    """s with -inf in all but the first `seen` rows."""
    rows, columns = s.shape
    visible = row_positions(rows) < seen
    return jnp.concatenate(
        [
            jnp.where(
                visible, lax.slice(s, (0, column), (rows, column + GROUP)), -jnp.inf
            )
            for column in range(0, columns, GROUP)
        ],
        axis=1,
    )


def opaque(index: jax.Array) -> jax.Array:
    """`index`, but the compiler cannot know so: it asks the warp's first lane.

    The compiler would otherwise keep all descriptors of a tile that stays in shared
    memory, 16 registers for 64 x 128, and spill others.
    """
    return plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(first_lane)(index)


def first_lane(_, value):
    """The code of `opaque`; on its own, so that the interpreter knows it."""
    (register,) = value.registers.flat
    asked = mgpu_utils.inline_ptx(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;",
        register,
        result_types=register.type,
        has_side_effects=True,
        convergent=True,
    )
    return FragmentedArray.splat(asked, (), is_signed=True)


def any_of_warp(x: jax.Array) -> jax.Array:
    """1 if some number of a warp's rows is not 0, else 0, for int32 by `ROWS`.

    A branch on it may differ between the warps of a warpgroup, so there must be nothing
    in it that all of them are to do together.
    """
    return plgpu.inline_mgpu(
        arg_types=(ROWS,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(vote)(x)


def vote(_, value):
    """The code of `any_of_warp`; on its own, so that the interpreter knows it."""
    i32 = ir.IntegerType.get_signless(32)
    numbers = [
        vector.extract(register, dynamic_position=[], static_position=[0])
        for register in value.registers.flat
    ]
    asked = mgpu_utils.inline_ptx(
        "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, -1; "
        "selp.b32 $0, 1, 0, p;}",
        functools.reduce(arith.ori, numbers),
        result_types=i32,
        has_side_effects=True,
        convergent=True,
    )
    return FragmentedArray.splat(asked, (), is_signed=True)


def partial_sum(x: jax.Array) -> jax.Array:
    """Sums over every 8th column, [rows, 8]: additions that need no other thread."""
    rows, columns = x.shape
    return functools.reduce(
        jnp.add,
        [
            lax.slice(x, (0, column), (rows, column + GROUP))
            for column in range(0, columns, GROUP)
        ],
    )


def visible(
    shape: tuple[int, int],
    *,
    query_start: jax.Array,
    key_start: jax.Array,
    key_count: int | None,
    is_causal: bool,
    queries_first: bool = True,
) -> jax.Array:
    """Pairs of a tile that take part: key < key_count, and key <= query if causal.

    `queries_first` says which axis the queries are on (the dK, dV kernel works on
    transposed tiles).
    """

    def position(axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    queries, keys = (0, 1) if queries_first else (1, 0)
    limits = []
    if key_count is not None:
        limits.append(position(keys) < key_count - key_start)
    if is_causal:
        limits.append(position(keys) + (key_start - query_start) <= position(queries))
    return functools.reduce(jnp.logical_and, limits)


def block_counts(
    first_query: jax.Array,
    query_count: int,
    columns: int,
    key_count: int,
    is_causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Key blocks that queries [first_query, first_query + query_count) need.

    Returns (blocks at the front that every one of them sees whole, blocks in all);
    those in between need `visible`.
    """
    full = jnp.int32(key_count // columns)
    blocks = jnp.int32(-(-key_count // columns))
    if is_causal:
        first_hidden = first_query + jnp.int32(query_count)
        full = jnp.minimum(full, lax.div(first_query + 1, jnp.int32(columns)))
        blocks = jnp.minimum(
            blocks, lax.div(first_hidden + jnp.int32(columns - 1), jnp.int32(columns))
        )
    return full, blocks


def stream(count: jax.Array, stages: int | tuple[int, ...], buffers) -> None:
    """The loading warpgroup's loop: fills slot `step % stages` once it is released.

    `buffers` lists (load(step), barriers that say a slot is free), each with as many
    slots as `stages` says, of all or of each. They are released in this order. Every
    release is awaited, the last ones too: no barrier may be left with an arrival nobody
    saw.
    """
    if isinstance(stages, int):
        stages = (stages,) * len(buffers)
    for step in range(max(stages)):

        @pl.when(step < count)
        def _():
            for (load, _), slots in zip(buffers, stages, strict=True):
                if step < slots:
                    load(jnp.int32(step))

    @pl.loop(0, count)
    def _(step):
        for (load, free), slots in zip(buffers, stages, strict=True):
            plgpu.barrier_wait(free.at[rem(step, slots)])

            @pl.when(step + slots < count)
            def _():
                load(step + slots)


def pad_rows(x: jax.Array, count: int) -> jax.Array:
    """Pads the last axis (one value per query) with zeros to `count`.

    Copies of tiles (two axes) are tensor copies, which stop at an array's end. Copies
    of a single axis are plain ones: they would run on into the next head.
    """
    return jnp.pad(x, ((0, 0), (0, 0), (0, count - x.shape[-1])))
