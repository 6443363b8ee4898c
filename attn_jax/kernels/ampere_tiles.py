"""What the Ampere kernels share: mma.sync fragments, cp.async, the running softmax.

A CTA is one warpgroup (two in `ampere_backward_fused`). Its four warps share the rows
of every product but dQ's there (`ampere_fixed_point`): in a tile of R rows, rows 16 w
.. 16 w + 15 of every 64 are warp w's.
The right operand is needed whole by all four, so it comes from shared memory;
accumulators and left operands stay in registers.

Nothing here synchronises but `wait_for_copies`, and `cta_barrier` where there are two:
kernels are compiled without automatic barriers (`COMPILER_PARAMS`) and order every
reuse of shared memory by these calls.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxtyping import Array, Float32

from attn_jax.kernels.tiles import Fragments, finite, pad_rows, swizzle, write_tile

# Fragments of mma.sync for 16-bit operands (BF16 and FP16 alike) and FP32 sums, with
# one value per row and one per column of an accumulator.
ACCUMULATOR = plgpu.Layout.MMA_ACC(jnp.bfloat16)
LEFT = plgpu.Layout.MMA_LHS(jnp.bfloat16)
RIGHT = plgpu.Layout.MMA_RHS(jnp.bfloat16)
ROWS = ACCUMULATOR.reduce(1)
COLUMNS = ACCUMULATOR.reduce(0)
MMA = Fragments(ACCUMULATOR, ROWS, COLUMNS, is_default=False)

# Depth of one mma.sync.
STRIP = 16

# Shared memory of a CTA so that two fit a multiprocessor of an A100: it has 164 KiB, of
# which a CTA costs 1 KiB more than it asks for. One alone may ask for 163 KiB.
SMEM_LIMIT_FOR_TWO = 82_944

# Of a thread's registers what accumulators, left operands that are kept and two blocks
# of FP32 may take in the backward kernels: else those stay in shared memory.
REGISTERS_LEFT = 208

# Lane semantics: under the default, MLIR folds `as_left` away (same registers, other
# layout) and then finds the layouts in contradiction.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def start_copy(gmem, smem) -> None:
    """Starts copying a tile to shared memory (cp.async); all of it must exist.

    Every copy is a group of its own for `wait_for_copies`.
    """
    plgpu.copy_gmem_to_smem(gmem, smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def wait_for_copies(in_flight: int) -> None:
    """Waits until at most `in_flight` copies, the latest, are under way; a barrier.

    Past it every warp sees the copies that have ended, and has done all that it did
    before: what the warps have read until then may be overwritten.
    """
    plgpu.wait_gmem_to_smem(in_flight)


def by_block(
    lse2: Float32[Array, "B N T"], delta: Float32[Array, "B N T"], count: int, size: int
) -> Float32[Array, "B N count R size"]:
    """LSE in units of log2 and delta of each of `count` blocks of `size` queries.

    cp.async copies them with all 128 threads, 4 bytes each or a multiple of that, so
    there are zero rows behind the two where blocks are short.
    """
    rows = [pad_rows(x, count * size) for x in (lse2, delta)]
    rows += [jnp.zeros_like(rows[0])] * (max(2, -(-128 // size)) - 2)
    blocks = [x.reshape(*x.shape[:2], count, size) for x in rows]
    return jnp.stack(blocks, axis=3)


def head_rows(gmem, batch, start, count: int, head, head_dim: int):
    """Rows [start, start + count) of one head, of an array viewed as [B, L, heads H].

    cp.async wants the sliced axes next to each other.
    """
    return gmem.at[batch, pl.ds(start, count), pl.ds(head * head_dim, head_dim)]


def cta_barrier(warpgroups: int) -> None:
    """A barrier of all threads of a CTA of so many warpgroups."""
    plgpu.inline_mgpu()(CtaBarrier(warpgroups))()


@dataclasses.dataclass(frozen=True)
class CtaBarrier:
    """The code behind `cta_barrier`; the interpreter knows it by this class."""

    warpgroups: int

    # Mosaic GPU itself uses 0, and one for each warpgroup from 1 on.
    NUMBER: ClassVar[int] = 8

    def __call__(self, context) -> None:
        del context
        mgpu_utils.inline_ptx(
            f"bar.sync {self.NUMBER}, {128 * self.warpgroups};", has_side_effects=True
        )


def join_heads(x: jax.Array, rows: int) -> jax.Array:
    """[B, L, heads, H] as [B, M, heads H], M the multiple of `rows` that holds L.

    Zeros are added: cp.async reads whole tiles and fills in nothing.
    """
    batch, length, heads, head_dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % rows), (0, 0), (0, 0)))
    return x.reshape(batch, -1, heads * head_dim)


def accumulator(rows: int, columns: int) -> jax.Array:
    """An FP32 accumulator in registers, zero."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), ACCUMULATOR)


def read_accumulator(gmem) -> jax.Array:
    """What `write_tile` has left of an accumulator in global memory."""
    return plgpu.load(gmem, layout=ACCUMULATOR, optimized=False)


def per_row(rows: int, value: jax.Array | float) -> jax.Array:
    """One value, the same, for each row of an accumulator; a Python number is FP32."""
    dtype = value.dtype if isinstance(value, jax.Array) else jnp.float32
    return plgpu.layout_cast(jnp.full((rows,), value, dtype), ROWS)


def row_index(rows: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROWS)


def column_index(shape: tuple[int, int]) -> jax.Array:
    return MMA.positions(shape, 1)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value per row over an accumulator's tile."""
    return MMA.along_rows(x, shape)


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value per column over an accumulator's tile."""
    return MMA.along_columns(x, shape)


def swizzled(dtype, rows: int, *lengths: int) -> int:
    """Elements in a row of the parts that `tiles.smem_tile` cuts tiles of these lengths
    into: strips so wide can be addressed. cp.async deals a tile's parts to the four
    warps, so tiles of 16 rows want two of them in a row."""
    halves = [length // 2 for length in lengths] if rows < 32 else []
    return swizzle(dtype, *lengths, *halves) // jnp.dtype(dtype).itemsize


def hide_later_rows(s: jax.Array, first: jax.Array) -> jax.Array:
    """-inf where row + first > column."""
    rows, columns = s.shape
    start = row_index(rows) + first
    seen = column_index((rows, columns)) >= along_rows(start, s.shape)
    return jnp.where(seen, s, -jnp.inf)


def hide_rows_from(s: jax.Array, count: jax.Array) -> jax.Array:
    """-inf in all but the first `count` rows."""
    exists = row_index(s.shape[0]) < count
    return jnp.where(along_rows(exists, s.shape), s, -jnp.inf)


def load_left(smem) -> jax.Array:
    """A tile in shared memory, [rows, depth], as left operand (ldmatrix)."""
    return plgpu.load(smem, layout=LEFT)


def load_right(smem) -> jax.Array:
    """A tile in shared memory, [depth, columns], as right operand (ldmatrix).

    `smem` may be a transposed view.
    """
    return plgpu.load(smem, layout=RIGHT)


def multiply(acc: jax.Array, left: jax.Array, right_smem) -> jax.Array:
    """acc + left @ right: a 16-bit tile in accumulator layout, a tile [depth, columns].

    In strips of the depth, so that few fragments of `right` are in registers at once.
    """
    rows, depth = left.shape
    for k in range(0, depth, STRIP):
        strip = as_left(lax.slice(left, (0, k), (rows, k + STRIP)))
        acc = plgpu.mma(acc, strip, load_right(right_smem.at[pl.ds(k, STRIP)]))
    return acc


def left_strips(smem, strip: int) -> list[jax.Array]:
    """A tile in shared memory, [rows, H], as left operands: H in strips."""
    strips = range(0, smem.shape[1], strip)
    return [load_left(smem.at[:, pl.ds(k, strip)]) for k in strips]


def inner_products(left, right_smem, strip: int) -> jax.Array:
    """left @ right^T in FP32, of two tiles, [rows, H] and [columns, H].

    `left` are `left_strips` or, still in shared memory, what to make them from.
    """
    left = left if isinstance(left, list) else left_strips(left, strip)
    acc = accumulator(left[0].shape[0], right_smem.shape[0])
    for i, part in enumerate(left):
        right = right_smem.at[:, pl.ds(i * strip, strip)].transpose((1, 0))
        acc = plgpu.mma(acc, part, load_right(right))
    return acc


def fits_in_registers(
    rows: int, columns: int, *, accumulated: int, operands: int
) -> bool:
    """Whether left operands of so many columns can stay in registers through a loop,
    beside accumulators of so many and two blocks [rows, columns] of FP32."""
    return rows * (2 * accumulated + operands + 4 * columns) <= 2 * 128 * REGISTERS_LEFT


def store_rows(x: jax.Array, smem, gmem, strip: int) -> None:
    """Stores a 16-bit tile in accumulator layout, by way of shared memory.

    A thread of the accumulator holds pairs of elements; from shared memory it gets
    runs of 16 bytes, and a warp whole rows. `smem` must be free in this warp's rows, in
    rows of `strip` elements (`swizzled`).
    """
    smem[...] = x
    wait_for_copies(0)  # as barrier
    swizzle_bytes = strip * jnp.dtype(x.dtype).itemsize
    layout = plgpu.Layout.SMEM_GMEM_COPY(x.shape, x.dtype, swizzle_bytes)
    x = plgpu.load(smem, layout=layout)
    write_tile(gmem, x)
    wait_for_copies(0)


def store_in_strips(x: jax.Array, smem, gmem, strip: int) -> None:
    """As `store_rows`, of any width, strip by strip by way of a tile of another one."""
    rows, columns = x.shape
    for k in range(0, columns, strip):
        part = lax.slice(x, (0, k), (rows, k + strip))
        buffer = smem.at[:, pl.ds(k % smem.shape[1], strip)]
        store_rows(part, buffer, gmem.at[:, pl.ds(k, strip)], strip)


def as_left(x: jax.Array) -> jax.Array:
    """A 16-bit tile in accumulator layout as left operand, for free.

    Of 16 columns a thread of the accumulator holds the same elements, in the same
    registers, as of 16 columns of the left operand: two tiles of 8 columns side by
    side (PTX ISA, fragments of mma.m16n8k16).
    """
    return plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LEFT),
    )(rename_accumulator_to_left)(x)


def rename_accumulator_to_left(context, x: mgpu.FragmentedArray):
    """The code behind `as_left`; the interpreter knows it by this function."""
    del context
    layout = mgpu.MMALayouts(x.mlir_dtype).lhs
    return mgpu.FragmentedArray(
        _registers=x.registers.reshape(layout.registers_shape(x.shape)),
        _layout=layout,
        _is_signed=x.is_signed,
    )


def online_softmax(
    s: jax.Array,
    row_max: jax.Array,
    row_sum: jax.Array,
    unit: float,
    *,
    may_see_nothing: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the running softmax, FP32: (m', l', P, exp2(m - m')).

    m is kept in units of log2: P = exp2(unit * S - m'), l' = l exp2(m - m') +
    rowsum(P), P not rounded. With `may_see_nothing` m' is taken for 0 where it is -inf.
    """
    new_max = jnp.maximum(row_max, s.max(axis=1) * unit)
    base = finite(new_max) if may_see_nothing else new_max
    correction = jnp.exp2(row_max - base)
    p = jnp.exp2(s * unit - along_rows(base, s.shape))
    return new_max, row_sum * correction + p.sum(axis=1), p, correction
