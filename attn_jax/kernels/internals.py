"""Everything that leans on the inside of JAX, which changes without notice.

What JAX's interpreter of Mosaic GPU kernels lacks for ours. Which versions of JAX this
is known to fit is checked when the package is imported (`attn_jax/kernels/__init__`).
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax._src.pallas.mosaic_gpu import core as mgpu_core
from jax._src.pallas.mosaic_gpu import primitives as mgpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import (
    GPURaceDetectionState,
)
from jax._src.state import primitives as state_primitives
from jax._src.state.types import AbstractRef
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Runs the kernels traced inside on the CPU, in JAX's Mosaic GPU interpreter.

    It models warpgroups as threads, shared memory, barriers, TMA copies and wgmma with
    FP32 accumulation (in BLAS order); it does not model asynchronous wgmma, nor the
    hardware's approximate exp2. Slow: some 20 ms for a block of 64 x 128 logits. A
    missing arrival hangs, so give a run a time limit. One device.

    Raises:
      RuntimeError: with `detect_races`, when accesses to a buffer are not ordered.
    """
    race_states = []

    def recorded_race_state(**options):
        # 0.11.2 prints races and goes on; each kernel starts a new record.
        race_states.append(GPURaceDetectionState(**options))
        return race_states[-1]

    with (
        _replaced(JaxprInterpreter, "interpret", _interpret),
        _replaced(JaxprInterpreter, "_interpret_swap_p", _interpret_swap),
        _replaced(JaxprInterpreter, "_interpret_wgmma_ref_p", _interpret_wgmma),
        # The interpreter's callbacks are ordered effects, and JAX fails to lower those
        # inside a custom_partitioning. There is one device to run on.
        _replaced(custom_partitioning, "__call__", lambda self, *args: self.fun(*args)),
        _replaced(gpu_callbacks, "GPURaceDetectionState", recorded_race_state),
        plgpu.force_gpu_interpret_mode(
            plgpu.InterpretGPUParams(detect_races=detect_races)
        ),
    ):
        try:
            yield
            jax.effects_barrier()
        finally:
            # A failed kernel leaves its memory behind, which would fail the next one.
            gpu_callbacks.reset_gpu_interpret_mode_state()
    if any(state.races_found for state in race_states):
        raise RuntimeError("the interpreter found a data race; it is printed above")


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_stock_interpret = JaxprInterpreter.interpret
_stock_swap = JaxprInterpreter._interpret_swap_p
_stock_wgmma = JaxprInterpreter._interpret_wgmma_ref_p


def _interpret(self: JaxprInterpreter, jaxpr, token, *args):
    """Gap: `acc_ref[...] = x`. To the interpreter an accumulator is a buffer like any
    other, so the store becomes a swap, which is what a store to those is."""
    eqns = [
        eqn.replace(
            primitive=state_primitives.swap_p, params={"tree": jax.tree.structure(())}
        )
        if eqn.primitive is mgpu_primitives.wgmma_accumulator_store_p
        else eqn
        for eqn in jaxpr.eqns
    ]
    return _stock_interpret(self, jaxpr.replace(eqns=eqns), token, *args)


def _interpret_swap(self: JaxprInterpreter, eqn, token, get_invals):
    """A swap in registers is no matter for the race detector: it has no clock for
    them and takes two stores by one thread for a race."""
    if not isinstance(eqn.invars[0].aval, mgpu_core.WGMMAAbstractAccumulatorRef):
        return _stock_swap(self, eqn, token, get_invals)
    accumulator, value = get_invals()
    token = io_callback(
        functools.partial(_store_accumulator, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        key_as_array=accumulator,
        value=value,
    )
    return token, value  # What it held before is never used.


@gpu_callbacks.fail_on_exception
def _store_accumulator(
    *, token, mesh_location, thread, key_as_array, value, source_info
):
    memory = gpu_callbacks._get_shared_memory()
    key = shared_memory.HostAllocationKey.from_array(key_as_array)
    memory.store_buffer_content(
        key,
        memory.access(key, ()),
        np.asarray(value),
        thread,
        logging_info=shared_memory.GPULoggingInfo(mesh_location, thread, source_info),
    )
    return token


def _interpret_wgmma(self: JaxprInterpreter, eqn, token, get_invals):
    """Gap: wgmma with its left operand in registers. The interpreter reads operands
    from buffers, so the operand is put into one for the time of the product."""
    if isinstance(eqn.invars[1].aval, AbstractRef):
        return _stock_wgmma(self, eqn, token, get_invals)
    accumulator, left, *rest = get_invals()
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token,
        compute_unit=self.thread,
        memory_space_id=shared_memory.get_memory_space_idx(mgpu_core.MemorySpace.REGS),
    )
    token, buffer = gpu_callbacks.call_allocate_buffer(
        token, self.mesh_location, self.thread, request, left, eqn.source_info
    )
    token, results = _stock_wgmma(
        self, eqn, token, lambda: [accumulator, buffer, *rest]
    )
    token = gpu_callbacks.call_deallocate_buffer(
        token, self.mesh_location, self.thread, buffer, eqn.source_info
    )
    return token, results
