"""What JAX's interpreter of Mosaic GPU kernels lacks for ours, put in its place.

It leans on the inside of JAX, as `internals` does, and on nothing else there.
"""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src import callback as callbacks
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

from attn_jax.kernels import (
    ampere_fixed_point,
    ampere_tiles,
    architecture,
    low_part,
    tiles,
    turns,
)


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Runs the kernels traced inside on the CPU, in JAX's Mosaic GPU interpreter.

    It models warpgroups as threads, shared memory, barriers, TMA copies, wgmma and mma
    with FP32 accumulation (in BLAS order); it does not model asynchronous wgmma, the
    warps of a warpgroup, nor the hardware's approximate exp2. What cp.async copies is
    NaN until it is waited for. Slow: some 20 ms for a block of 64 x 128 logits. A
    missing arrival hangs, so give a run a time limit. One device, one multiprocessor:
    over more than 256 keys a causal mask has a backward pass in two kernels here.

    Raises:
      RuntimeError: a count is awaited that nobody will make; with `detect_races`, when
        accesses to a buffer are not ordered.
    """
    _copies.clear()
    race_states = []

    def recorded_race_state(**options):
        # 0.11.2 prints races and goes on; each kernel starts a new record.
        race_states.append(GPURaceDetectionState(**options))
        return race_states[-1]

    # A stack: a `with` of more than twenty items crashes Python 3.12.1's compiler.
    replaced = [
        *_gaps(),
        (gpu_callbacks, "GPURaceDetectionState", recorded_race_state),
    ]
    with contextlib.ExitStack() as stack:
        for entry in replaced:
            stack.enter_context(_replaced(*entry))
        stack.enter_context(
            plgpu.force_gpu_interpret_mode(
                plgpu.InterpretGPUParams(detect_races=detect_races)
            )
        )
        try:
            yield
            jax.effects_barrier()
        finally:
            # A failed kernel leaves its memory behind, which would fail the next one.
            gpu_callbacks.reset_gpu_interpret_mode_state()
    if any(state.races_found for state in race_states):
        raise RuntimeError("the interpreter found a data race; it is printed above")


def _gaps() -> list[tuple[object, str, object]]:
    """What stands in for something while kernels are interpreted: owner, name, it."""
    return [
        (JaxprInterpreter, "interpret", _interpret),
        (JaxprInterpreter, "_interpret_swap_p", _interpret_swap),
        (JaxprInterpreter, "_interpret_wgmma_ref_p", _interpret_wgmma),
        (JaxprInterpreter, "_interpret_copy_gmem_to_smem_p", _interpret_copy),
        (JaxprInterpreter, "_interpret_wait_smem_to_gmem_p", _interpret_wait),
        (JaxprInterpreter, "_interpret_copy_smem_to_gmem_p", _interpret_store),
        (JaxprInterpreter, "_interpret_inline_mgpu_p", _interpret_inline),
        (JaxprInterpreter, "_interpret_arithmetic_primitive", _interpret_arithmetic),
        # The interpreter's callbacks are ordered effects, and JAX fails to lower those
        # inside a custom_partitioning. There is one device to run on.
        (custom_partitioning, "__call__", lambda self, *args: self.fun(*args)),
        (callbacks, "api", SimpleNamespace(device_put=_operands)),
        (shared_memory, "_to_int", _to_int),
        # Semaphores of all CTAs. CTAs run one after the other here, so none may wait
        # for a later one: where they would, there is to be one.
        (architecture, "H100_MULTIPROCESSORS", 1),
        (turns, "semaphores", lambda count: _Semaphores()),
        (turns, "await_count", _on_semaphore(_await)),
        (turns, "await_count_by_all", _on_semaphore(_await)),
        (turns, "count_up", _on_semaphore(_count)),
        (turns, "fence", lambda: None),
    ]


class _Semaphores:
    """`at[index]` is its number: a kernel has one array of them."""

    @property
    def at(self) -> "_Semaphores":
        return self

    def __getitem__(self, index):
        return index


def _on_semaphore(function: Callable) -> Callable:
    def of(*numbers) -> None:
        types = (plgpu.Layout.WG_SPLAT,) * len(numbers)
        plgpu.inline_mgpu(arg_types=types)(function)(*map(jnp.int32, numbers))

    return of


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_stock_to_int = shared_memory._to_int
_stock_interpret = JaxprInterpreter.interpret
_stock_swap = JaxprInterpreter._interpret_swap_p
_stock_wgmma = JaxprInterpreter._interpret_wgmma_ref_p
_stock_copy = JaxprInterpreter._interpret_copy_gmem_to_smem_p
_stock_store = JaxprInterpreter._interpret_copy_smem_to_gmem_p
_stock_wait = JaxprInterpreter._interpret_wait_smem_to_gmem_p
_stock_inline = JaxprInterpreter._interpret_inline_mgpu_p
_stock_arithmetic = JaxprInterpreter._interpret_arithmetic_primitive

# For each thread, how to land its cp.async copies that nobody waited for yet.
_copies: dict[object, list[Callable[[], object]]] = {}
# Seconds that a count is awaited, when nothing else of the kernel has counted.
PATIENCE = 60.0


def _operands(args, device):
    """Of a callback, which takes NumPy's arrays as it takes JAX's; to put thousands of
    them on the device and to index them there took nearly half of all time. Copied,
    since what XLA lends may not be kept."""
    return tuple(map(np.array, args))


def _to_int(x):
    return x.item() if isinstance(x, np.ndarray) else _stock_to_int(x)


def _interpret(self: JaxprInterpreter, jaxpr, token, *args):
    """Gap: primitives that the interpreter hands to JAX as arithmetic. They take the
    place of one that it handles itself, and are told from it by their operands."""
    eqns = [_known(eqn) for eqn in jaxpr.eqns]
    return _stock_interpret(self, jaxpr.replace(eqns=eqns), token, *args)


def _known(eqn):
    if eqn.primitive is mgpu_primitives.wgmma_accumulator_store_p:
        # `acc_ref[...] = x`: an accumulator is a buffer like any other, so the store
        # becomes a swap, which is what a store to those is.
        return eqn.replace(
            primitive=state_primitives.swap_p, params={"tree": jax.tree.structure(())}
        )
    if eqn.primitive is mgpu_primitives.wait_gmem_to_smem_p:
        return eqn.replace(primitive=mgpu_primitives.wait_smem_to_gmem_p)
    return eqn


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


def _interpret_arithmetic(self: JaxprInterpreter, eqn, get_invals):
    """Gap: mma, whose operands are all in registers."""
    if eqn.primitive is not mgpu_primitives.mma_p:
        return _stock_arithmetic(self, eqn, get_invals)
    accumulator, left, right = get_invals()
    return accumulator + jnp.dot(left, right, preferred_element_type=accumulator.dtype)


def _interpret_inline(self: JaxprInterpreter, eqn, token, get_invals):
    """Gap: inlined code. Ours changes the layout, of which the interpreter has none,
    hides from the compiler what it returns, or asks the threads of a warp; there is
    one answer for a warpgroup here. Or it is a barrier of a CTA, which the interpreter
    has under another name, or adds to memory, which is no race with other additions."""
    function = eqn.params["mgpu_fn"]
    if function in (_count, _await):
        run = gpu_callbacks.fail_on_exception(function)
        return io_callback(
            run, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, *get_invals()
        ), []
    if isinstance(function, ampere_tiles.CtaBarrier):
        token = gpu_callbacks.call_named_barrier(
            *(token, self.mesh_location, self.thread, function.NUMBER),
            num_threads=128 * function.warpgroups,
            sync=True,
            source_info=eqn.source_info,
        )
        return token, []
    if function is ampere_fixed_point.add_rounded:
        target, x, *leaves = get_invals()
        view, _ = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
        x = ampere_fixed_point.as_stored(jnp.rint(x).astype(jnp.int32))
        return _add(self, eqn, token, target, view, values=x), []
    if function is ampere_fixed_point.interleave:
        stored = jnp.stack(get_invals(), axis=1)
        return token, [ampere_fixed_point.in_order(stored)]
    if function in (low_part.store_bytes, low_part.store_dropped):
        count = eqn.params["pytree_args"].num_leaves
        target, *kept, rows = get_invals()[:count]
        leaves = get_invals()[count:]
        view, *_ = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
        steps = kept[0] if len(kept) == 1 else low_part.dropped(*kept)
        given = {"values": low_part.byte_of(steps), "rows": rows}
        return _add(self, eqn, token, target, view, **given), []
    if function is tiles.vote:
        (x,) = get_invals()
        return token, [jnp.any(x != 0).astype(jnp.int32)]
    known = (ampere_tiles.rename_accumulator_to_left, tiles.first_lane)
    if function not in known:
        return _stock_inline(self, eqn, token, get_invals)
    return token, list(get_invals())


def _count(token, thread, semaphore):
    """`count_up`: all that a thread has done is done before what follows on a wait for
    this count."""
    memory = gpu_callbacks._get_shared_memory()
    _counted_in(memory)[int(semaphore)].append(memory.get_clock(thread))
    return token


def _await(token, thread, semaphore, count):
    memory = gpu_callbacks._get_shared_memory()
    counted = _counted_in(memory)
    found, seen, since = counted[int(semaphore)], -1, time.monotonic()
    while len(found) < count:
        memory.check_failed()
        if seen != (seen := sum(map(len, list(counted.values())))):
            since = time.monotonic()
        if time.monotonic() > since + PATIENCE:
            raise RuntimeError(
                f"semaphore {int(semaphore)} is at {len(found)}, and a thread waits "
                f"for {int(count)} and for ever"
            )
        time.sleep(1e-4)
    if memory.detect_races:
        for clock in found:
            memory.clocks[thread].update(clock)
    return token


def _counted_in(memory) -> defaultdict[int, list[Any]]:
    """Of the kernel whose memory it is: each has its own."""
    return vars(memory).setdefault("counted", defaultdict(list))


def _interpret_copy(self: JaxprInterpreter, eqn, token, get_invals):
    """Gap: copies without a barrier, which are cp.async."""
    if eqn.params["has_barrier"]:
        return _stock_copy(self, eqn, token, get_invals)
    source, target, *leaves = get_invals()
    trees = ("src_transforms_treedef", "dst_transforms_treedef")
    source_view, target_view = jax.tree.unflatten(
        jax.tree_util.treedef_tuple([eqn.params[name] for name in trees]), leaves
    )
    token = io_callback(
        functools.partial(_start_copy, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        source=source,
        source_view=source_view,
        target=target,
        target_view=target_view,
    )
    return token, []


@gpu_callbacks.fail_on_exception
def _start_copy(
    *,
    token,
    mesh_location,
    thread,
    source,
    source_view,
    target,
    target_view,
    source_info,
):
    def put(values):
        gpu_callbacks._swap(
            token,
            mesh_location,
            thread,
            target,
            target_view,
            values,
            None,
            source_info=source_info,
        )

    _, values = gpu_callbacks._get(
        token, mesh_location, thread, source, source_view, source_info=source_info
    )
    put(np.full_like(values, np.nan))
    _copies.setdefault(thread, []).append(functools.partial(put, values))
    return token


def _interpret_store(
    self: JaxprInterpreter, eqn, token, source, target, *rest, **params
):
    """Gap: copies that add to what is there; done at once, and for all."""
    if params["reduction_op"] is None:
        return _stock_store(self, eqn, token, source, target, *rest, **params)
    assert params["reduction_op"] == "add" and not params["has_user_predicate"]
    trees = ("src_transforms_treedef", "dst_transforms_treedef")
    source_view, target_view = jax.tree.unflatten(
        jax.tree_util.treedef_tuple([params[name] for name in trees]), rest
    )
    given = {"source": source, "source_view": source_view}
    return _add(self, eqn, token, target, target_view, **given), []


def _add(self: JaxprInterpreter, eqn, token, target, target_view, **given):
    """Adds `values`, or those in the buffer `source`, to what is in another one. With
    `rows` stores so many rows, which are to be those that the other one has."""
    return io_callback(
        functools.partial(_add_tile, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        target=target,
        target_view=target_view,
        **given,
    )


@gpu_callbacks.fail_on_exception
def _add_tile(
    *,
    token,
    mesh_location,
    thread,
    target,
    target_view,
    source_info,
    values=None,
    rows=None,
    source=None,
    source_view=None,
):
    added = values
    if added is None:
        assert source is not None
        _, added = gpu_callbacks._get(
            token, mesh_location, thread, source, source_view, source_info=source_info
        )
    memory = gpu_callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    key = shared_memory.HostAllocationKey.from_array(target)
    transforms = gpu_callbacks._remove_noop_transforms(target_view)
    access = memory.access(key, jax.tree.map(int, transforms))
    # What lies past the end of the array is left out, as TMA does.
    shape = tuple(memory.buffer_shape_and_dtype(key).shape)
    inside = gpu_callbacks._clip_store_to_shape(access, added, shape)
    if rows is not None:
        stored = 0 if inside is None else len(inside[1])
        assert stored == np.clip(rows, 0, len(added)), (stored, rows)
    if inside is not None:
        access, added = inside
        before, _, clock = memory.get_buffer_content(
            key, access, thread, logging_info=info
        )
        after = added if rows is not None else before + added
        memory.store_buffer_content(key, access, after, thread, logging_info=info)
        if memory.detect_races and values is None:
            assert clock is not None
            gpu_callbacks.get_races().check_write(
                thread, clock.generic_clock, key, access, source_info=source_info
            )
    return token


def _interpret_wait(self: JaxprInterpreter, eqn, token, get_invals):
    """Gap: the wait for cp.async."""
    if "wait_read_only" in eqn.params:
        return _stock_wait(self, eqn, token, get_invals)
    token = io_callback(
        functools.partial(_land_copies, in_flight=eqn.params["n"]),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        thread=self.thread,
    )
    return token, []


@gpu_callbacks.fail_on_exception
def _land_copies(*, token, thread, in_flight):
    copies = _copies.get(thread, [])
    while len(copies) > in_flight:
        copies.pop(0)()
    return token
