"""How the two warpgroups of a CTA of Ampere's backward kernels work together.

They hand each other tiles by way of shared memory, and meet once a step. A tile lies
there as the threads of a warpgroup hold it in registers, 16 bytes of each thread side
by side, so that nothing waits for a bank; thread i of one warpgroup reads what thread i
of the other wrote.
"""

import functools

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from attn_jax.kernels.ampere_tiles import ACCUMULATOR, wait_for_copies

_THREADS = 128  # of a warpgroup
_BYTES = 16  # that a thread reads or writes at once


def tiles_in_smem(count: int, shape: tuple[int, int], dtype):
    """Shared memory for `count` tiles in accumulator layout."""
    return plgpu.SMEM((count, shape[0] * shape[1]), dtype)


def meeting_point():
    """Shared memory that `meet` needs: none, but in JAX's interpreter (`internals`)."""
    return None


def meet(point) -> None:
    """Waits for the copies this warpgroup has started, and for the other warpgroup.

    Past it each sees what the other has written or copied to shared memory.
    """
    wait_for_copies(0)
    both_warpgroups(point)


def both_warpgroups(point) -> None:
    """A barrier of all threads of the CTA."""
    del point
    plgpu.inline_mgpu()(_barrier)()


def put(tile, x: jax.Array) -> None:
    """Stores `x`, in accumulator layout, in a tile of `tiles_in_smem`."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR))(_put)(tile, x)


def get(tile, shape: tuple[int, int], dtype) -> jax.Array:
    """What the same thread of the other warpgroup has put there."""
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=ACCUMULATOR)
    code = functools.partial(_get, shape=shape, dtype=dtype)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(code)(
        tile
    )


def _barrier(context):
    del context
    gpu.barrier()


def _parts(tile, count: int):
    """Addresses of this thread's parts of a tile."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(utils.thread_idx(), utils.c(_THREADS, i32))
    part = ir.VectorType.get((_BYTES,), ir.IntegerType.get_signless(8))
    own = utils.getelementptr(utils.memref_ptr(tile), [thread], part)
    return [utils.getelementptr(own, [i * _THREADS], part) for i in range(count)]


def _put(context, tile, x: mgpu.FragmentedArray):
    del context
    registers = list(x.registers.flat)
    together = _BYTES // (2 * utils.bytewidth(x.mlir_dtype))
    parts = _parts(tile, len(registers) // together)
    for i, address in enumerate(parts):
        group = registers[i * together : (i + 1) * together]
        llvm.store(utils.vector_concat(group), address, alignment=_BYTES)


def _get(context, tile, *, shape: tuple[int, int], dtype) -> mgpu.FragmentedArray:
    del context
    element = utils.dtype_to_ir_type(dtype)
    layout = mgpu.MMALayouts(jnp.bfloat16).acc
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    together = _BYTES // (2 * utils.bytewidth(element))
    whole = ir.VectorType.get((2 * together,), element)
    for i, address in enumerate(_parts(tile, registers.size // together)):
        part = llvm.load(whole, address, alignment=_BYTES)
        for j in range(together):
            pair = utils.vector_slice(part, slice(2 * j, 2 * j + 2))
            registers.flat[i * together + j] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
