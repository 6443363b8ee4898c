"""What the Ampere kernels share: mma.sync fragments, cp.async, the running softmax.

A CTA is one warpgroup. Its four warps share the rows of every product: in a tile of
R rows, rows 16 w .. 16 w + 15 of every 64 are warp w's. The right operand is needed
whole by all four, so it comes from shared memory; accumulators and left operands stay
in registers.

Nothing here synchronises but `wait_for_copies`: kernels are compiled without automatic
barriers (`COMPILER_PARAMS`) and order every reuse of shared memory by that call.
"""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

# Fragments of mma.sync for 16-bit operands (BF16 and FP16 alike) and FP32 sums, with
# one value per row and one per column of an accumulator.
ACCUMULATOR = plgpu.Layout.MMA_ACC(jnp.bfloat16)
LEFT = plgpu.Layout.MMA_LHS(jnp.bfloat16)
RIGHT = plgpu.Layout.MMA_RHS(jnp.bfloat16)
ROWS = ACCUMULATOR.reduce(1)
COLUMNS = ACCUMULATOR.reduce(0)

# Depth of one mma.sync, and elements in a row of the swizzled tiles of shared memory,
# which are not cut along it.
STRIP = 16
SWIZZLED = 64

# Shared memory of a CTA so that two fit a multiprocessor of an A100: it has 164 KiB, of
# which a CTA costs 1 KiB more than it asks for. One alone may ask for 163 KiB.
SMEM_LIMIT_FOR_TWO = 82_944

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


def head_rows(gmem, batch, start, count: int, head, head_dim: int):
    """Rows [start, start + count) of one head, of an array viewed as [B, L, heads H].

    cp.async wants the sliced axes next to each other.
    """
    return gmem.at[batch, pl.ds(start, count), pl.ds(head * head_dim, head_dim)]


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


def per_row(rows: int, value: jax.Array | float) -> jax.Array:
    """One value, the same, for each row of an accumulator; a Python number is FP32."""
    dtype = value.dtype if isinstance(value, jax.Array) else jnp.float32
    return plgpu.layout_cast(jnp.full((rows,), value, dtype), ROWS)


def row_index(rows: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROWS)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value per row over an accumulator's tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), ACCUMULATOR)


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value per column over an accumulator's tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), ACCUMULATOR)


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


def store_rows(x: jax.Array, smem, gmem) -> None:
    """Stores a 16-bit tile in accumulator layout, by way of shared memory.

    A thread of the accumulator holds pairs of elements; from shared memory it gets
    runs of 16 bytes, and a warp whole rows. `smem` must be free in this warp's rows.
    """
    smem[...] = x
    wait_for_copies(0)  # as barrier
    layout = plgpu.Layout.SMEM_GMEM_COPY(x.shape, x.dtype, 128)
    gmem[...] = plgpu.load(smem, layout=layout)
    wait_for_copies(0)


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
    s: jax.Array, row_max: jax.Array, row_sum: jax.Array, log2_scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the running softmax, FP32: (m', l', P, exp2(m - m')).

    m is kept in units of log2: P = exp2(log2_scale * S - m'), l' = l exp2(m - m') +
    rowsum(P), P not rounded.
    """
    new_max = jnp.maximum(row_max, s.max(axis=1) * log2_scale)
    correction = jnp.exp2(row_max - new_max)
    p = jnp.exp2(s * log2_scale - along_rows(new_max, s.shape))
    return new_max, row_sum * correction + p.sum(axis=1), p, correction
