"""dQ of Ampere's fused backward kernel in global memory, and who adds to it when.

A tile of dQ lies in global memory as threads hold it in registers, so that a warp
reads or adds whole rows of 128 bytes; `in_order` undoes that in the end. Several CTAs
add to a tile, one after the other: a semaphore counts the additions that are done.

What a thread wrote is there for another CTA's once

    it has passed a barrier of its warpgroup, then one thread counts (red.release: a
    fence, for all that it has seen), another CTA's thread sees the count (ld.acquire),
    and a barrier of that warpgroup has been passed.

Loads go to the L2 cache, past an L1 cache that may hold what was there before.
"""

from typing import Literal

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

# Two warps down the rows, two side by side: each has 32 rows of 64 for a right operand.
WARPS = 2
ACCUMULATOR = plgpu.Layout.MMA_ACC(jnp.float16, m_warps=WARPS)
LEFT = plgpu.Layout.MMA_LHS(jnp.float16, m_warps=WARPS)
RIGHT = plgpu.Layout.MMA_RHS(jnp.float16, m_warps=WARPS)
COLUMNS = 64  # of a tile
THREADS = 128

# How a tile is added: as reductions in the L2 cache, loaded and stored, or reductions
# of integers, whose sum is the same in any order, to what begins at 0.
Adding = Literal["reduce", "load", "integers"]


def store(tile, x: jax.Array, adding: Adding) -> None:
    """Stores `x` ([rows, 64], `ACCUMULATOR`) to `tile`, which nobody else writes."""
    _inlined(_store if adding == "load" else _store_scalars, tile, x)


def add(tile, x: jax.Array, adding: Adding) -> None:
    """Adds `x` to what others have stored there; rounded to integers, if those."""
    codes = {"load": _load_and_add, "reduce": _reduce, "integers": _reduce_integers}
    _inlined(codes[adding], tile, x)


def in_order(x: jax.Array, adding: Adding) -> jax.Array:
    """dQ, [B, T, N, H], from tiles as they lie in memory, [B, N, blocks, H / 64, rows,
    64]. In one transposition, which XLA makes part of what follows."""
    batch, heads, blocks, beside, rows, columns = x.shape
    down, across = rows // 32, columns // 16
    # 32 x 16 at a time: warps down and beside, threads down and beside, then what one
    # of them has: 8 rows further or not, a pair of columns. Or the last two first.
    if adding == "load":
        inner, order = (2, 2, 8, 4, 2, 2), (2, 6, 4, 3, 5, 7)
    else:
        inner, order = (2, 2, 2, 2, 8, 4), (4, 2, 6, 5, 7, 3)
    x = x.reshape(batch, heads, blocks, beside, down, across, *inner)
    (warp_row, half, row), (warp_column, column, pair) = (
        tuple(4 + axis for axis in part) for part in (order[:3], order[3:])
    )
    x = x.transpose(
        *(0, 2, 4, warp_row, half, row),
        *(1, 3, 5, warp_column, column, pair),
    )
    return x.reshape(batch, blocks * rows, heads, beside * columns)


def semaphores(count: int):
    """Zero at the start of every call; to be called once in a kernel."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def await_count(semaphore, count: jax.Array) -> None:
    """Waits until `count` additions are done; a barrier of the warpgroup."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))(_await)(
        semaphore, count
    )


def count_up(semaphore) -> None:
    """One more; the warpgroup has passed a barrier since."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_count_up)(semaphore)


def barrier_scratch(warpgroups: int) -> list:
    """What `barrier` needs."""
    del warpgroups
    return []


def barrier(scratch: list, warpgroups: int) -> None:
    """Of all threads of a CTA."""
    del scratch

    def code(context):
        del context
        utils.inline_ptx(f"bar.sync 8, {THREADS * warpgroups};", has_side_effects=True)

    plgpu.inline_mgpu()(code)()


def _inlined(code, tile, x: jax.Array) -> None:
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR))(code)(tile, x)


def _address(tile, bytes_a_thread: int):
    """Of this thread's first part of a tile."""
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    base = llvm.ptrtoint(i64, utils.memref_ptr(tile))
    thread = arith.remui(utils.thread_idx(), utils.c(THREADS, i32))
    offset = arith.muli(thread, utils.c(bytes_a_thread, i32))
    return arith.addi(base, arith.extui(i64, offset))


def _scalars(x: mgpu.FragmentedArray) -> list:
    return [
        vector.extract(
            pair,
            dynamic_position=[],
            static_position=ir.DenseI64ArrayAttr.get([i]),
        )
        for pair in x.registers.flat
        for i in range(2)
    ]


def _store_scalars(context, tile, x: mgpu.FragmentedArray):
    del context
    address = _address(tile, 4)
    for i, value in enumerate(_scalars(x)):
        ptx = f"st.global.f32 [$0 + {i * 4 * THREADS}], $1;"
        utils.inline_ptx(ptx, address, value, has_side_effects=True)


def _reduce(context, tile, x: mgpu.FragmentedArray):
    del context
    address = _address(tile, 4)
    for i, value in enumerate(_scalars(x)):
        ptx = f"red.relaxed.gpu.global.add.f32 [$0 + {i * 4 * THREADS}], $1;"
        utils.inline_ptx(ptx, address, value, has_side_effects=True)


def _reduce_integers(context, tile, x: mgpu.FragmentedArray):
    del context
    address = _address(tile, 4)
    for i, value in enumerate(_scalars(x)):
        place = f"[$0 + {i * 4 * THREADS}]"
        ptx = "{ .reg .s32 n; cvt.rni.s32.f32 n, $1; "
        ptx += f"red.relaxed.gpu.global.add.s32 {place}, n; }}"
        utils.inline_ptx(ptx, address, value, has_side_effects=True)


def _put_fours(address, values: list) -> None:
    for i in range(0, len(values), 4):
        ptx = f"st.global.v4.f32 [$0 + {i * 4 * THREADS}], {{$1, $2, $3, $4}};"
        utils.inline_ptx(ptx, address, *values[i : i + 4], has_side_effects=True)


def _store(context, tile, x: mgpu.FragmentedArray):
    del context
    _put_fours(_address(tile, 16), _scalars(x))


def _load_and_add(context, tile, x: mgpu.FragmentedArray):
    del context
    address, values, before = _address(tile, 16), _scalars(x), []
    f32 = ir.F32Type.get()
    for i in range(0, len(values), 4):
        before += utils.inline_ptx(
            f"ld.global.cg.v4.f32 {{$0, $1, $2, $3}}, [$4 + {i * 4 * THREADS}];",
            address,
            result_types=[f32] * 4,
            has_side_effects=True,
        )
    _put_fours(address, [arith.addf(x, y) for x, y in zip(before, values, strict=True)])


def _await(context, semaphore, count: mgpu.FragmentedArray):
    del context
    i32 = ir.IntegerType.get_signless(32)
    address = utils.memref_ptr(semaphore)
    (wanted,) = count.registers.flat
    with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint(loop.before.blocks.append()):
            found = utils.inline_ptx(
                "ld.acquire.gpu.global.u32 $0, [$1];",
                address,
                result_types=i32,
                has_side_effects=True,
            )
            more = arith.cmpi(arith.CmpIPredicate.ult, found, wanted)
            scf.condition(more, [])
        with ir.InsertionPoint(loop.after.blocks.append()):
            scf.yield_([])
    utils.warpgroup_barrier()


def _count_up(context, semaphore):
    del context
    utils.inline_ptx(
        "red.release.gpu.global.add.u32 [$0], $1;",
        utils.memref_ptr(semaphore),
        utils.c(1, ir.IntegerType.get_signless(32)),
        predicate=utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
        has_side_effects=True,
    )
