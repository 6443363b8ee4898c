"""Semaphores in global memory: CTAs that add to the same place, one after the other.

A semaphore counts the additions to a block that are done. All CTAs of a kernel must be
able to run while one of them waits, or wait only for such as were launched before
(`ring_order`). JAX's interpreter knows none of this; `internals` says what is put in
its place.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir


def semaphores(count: int):
    """One for all CTAs; zero at the start of every call, an operand of the kernel.

    To be called once in a kernel: every call makes another array.
    """
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def await_count(semaphore, count) -> None:
    """Waits until `count` additions are done, and sees what they wrote."""
    plgpu.semaphore_wait(semaphore, count, decrement=False, memory_scope="gpu")


def count_up(semaphore) -> None:
    """One more; all that this thread waited for is done for who sees it."""
    plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")


def count_now(semaphore) -> jax.Array:
    """The count, not waited for; what those additions wrote can be seen."""
    read = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    return read(_read_count)(semaphore)


def _read_count(_, semaphore):
    count = mgpu_utils.inline_ptx(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        mgpu_utils.memref_ptr(semaphore),
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )
    return FragmentedArray.splat(count, (), is_signed=True)
