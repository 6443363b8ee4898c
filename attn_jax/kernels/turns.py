"""Semaphores in global memory: CTAs that add to the same place, one after the other.

A semaphore counts the additions to a block that are done. All CTAs of a kernel must be
able to run while one of them waits, or wait only for such as were launched before
(`ring_order`). JAX's interpreter knows none of this; `internals` says what is put in
its place.

In machine code a count is MEMBAR.ALL.GPU, which waits for what is under way to memory,
and then an addition to the semaphore; a wait is a loop of loads and CCTL.IVALL, which
empties the L1 cache. ptxas of CUDA 13 makes the same instruction of `wait_smem_to_gmem`
with and without `wait_read_only` (DEPBAR.LE on the scoreboard of UTMACMDFLUSH), and
adds CCTL.IVALL to the one without: machine code does not tell whether that waits until
TMA's additions are made, or MEMBAR does. So a count without the fence is for
experiments.
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
    """Waits until `count` additions are done."""
    plgpu.semaphore_wait(semaphore, count, decrement=False, memory_scope="gpu")


def count_up(semaphore, *, fenced: bool = True) -> None:
    """One more, after all copies that were waited for. Without the fence, of a warp,
    nothing promises that they are seen by who sees the count."""
    if fenced:
        plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")
    else:
        signal = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        signal(_signal_without_fence)(semaphore)


def glance(semaphore) -> jax.Array:
    """Has the count loaded, and goes on; `seen` waits for what comes."""
    load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_SCALAR)
    return load(_load)(semaphore)


def seen(count: jax.Array) -> jax.Array:
    """What `glance` found, the same for all threads of the warp: who branches on it
    must not part. What the counted additions wrote can be seen."""
    wait = plgpu.inline_mgpu(arg_types=(_SPLAT,), return_type=_SCALAR)
    return wait(_acquired)(count)


_SPLAT = plgpu.Layout.WG_SPLAT
_SCALAR = plgpu.ShapeDtypeStruct((), jnp.int32, _SPLAT)


def _load(_, semaphore) -> FragmentedArray:
    count = mgpu_utils.inline_ptx(
        "ld.relaxed.gpu.global.b32 $0, [$1];",
        mgpu_utils.memref_ptr(semaphore),
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )
    return FragmentedArray.splat(count, (), is_signed=True)


def _acquired(_, count) -> FragmentedArray:
    (register,) = count.registers.flat
    count = mgpu_utils.inline_ptx(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1; fence.acquire.gpu;",
        register,
        result_types=register.type,
        has_side_effects=True,
        convergent=True,
    )
    return FragmentedArray.splat(count, (), is_signed=True)


def _signal_without_fence(_, semaphore) -> None:
    pointer = mgpu_utils.memref_ptr(semaphore)
    mgpu_utils.SemaphoreRef(pointer).signal(
        1,
        predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARP),
        relaxed=True,
        memory_scope="gpu",
    )
