"""Semaphores in global memory that fix the order of additions.

CTAs add to the same place one after the other, or add to what others have cleared, or
add up what others have left. A semaphore counts the additions to a block that are
done, the parts of it that are clear, or those that are there. All CTAs of a kernel must
be able to run while one of them waits, or wait only for such as were launched before
(`ring_order`). In JAX's interpreter `interpreter` says what is put in its place.

In machine code a count is MEMBAR.ALL.GPU, which waits for what is under way to memory,
and then an addition to the semaphore; a wait is a loop of loads and CCTL.IVALL, which
empties the L1 cache. Without that fence kernels were up to 5 % faster, and nothing
promises that who sees the count sees what was added.
"""

import dataclasses

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir


def semaphores(count: int):
    """One for all CTAs; zero at the start of every call, an operand of the kernel.

    To be called once in a kernel: every call makes another array.
    """
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def await_count(semaphore, count) -> None:
    """Waits until `count` additions are done."""
    plgpu.semaphore_wait(semaphore, count, decrement=False, memory_scope="gpu")


def await_count_by_all(semaphore, count: int) -> None:
    """As `await_count`, without a barrier: each thread waits by itself. Where all that
    was counted was written by threads themselves (not by copies) before a barrier that
    `count_up` follows on, all threads see it."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_Await(count))(semaphore)


def count_up(semaphore) -> None:
    """One more, after all copies that were waited for."""
    plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")


@dataclasses.dataclass(frozen=True)
class _Await:
    """The code behind `await_count_by_all`. nvdisasm cannot read for sm_80 what
    Mosaic's wait becomes."""

    count: int

    def __call__(self, _, semaphore: ir.Value) -> None:
        mgpu_utils.inline_ptx(
            "{ .reg .pred less; .reg .u32 n; again${:uid}: "
            "ld.acquire.gpu.global.u32 n, [$0]; "
            f"setp.lt.u32 less, n, {self.count}; @less bra again${{:uid}}; }}",
            mgpu_utils.memref_ptr(semaphore),
            has_side_effects=True,
        )


def fence() -> None:
    """What this thread has written, and what others had before a barrier that it has
    passed, is there before it says so next; and it reads next what others had written
    before they said so."""
    plgpu.inline_mgpu()(_fence)()


def _fence(_):
    mgpu_utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
