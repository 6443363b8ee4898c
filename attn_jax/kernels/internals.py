"""`plgpu.kernel` with in-place operands, by JAX's private API.

That changes without notice; which versions of JAX this, and `interpreter`, are known to
fit is checked when the package is imported (`attn_jax/kernels/__init__`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax._src import config
from jax._src.pallas import mpmd
from jax.experimental import pallas as pl


def kernel(
    body: Callable[..., None],
    *,
    aliases: Mapping[int, int],
    out_type: Sequence[Any],
    scratch_types: Sequence[Any],
    compiler_params: plgpu.CompilerParams,
    thread_name: str,
    **mesh: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel`, where the results `aliases[i]` begin as the operands i, leaves of
    both counted, and lie there. XLA copies an operand first if it is used elsewhere,
    too.

    That function has no such option. JAX asks of results, too, over which axes of a
    `jax.shard_map` they vary, which a kernel does not say: hence `_check_vma(False)`.
    """
    if not aliases:
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch_types,
            compiler_params=compiler_params,
            thread_name=thread_name,
            **mesh,
        )

    def whole(*refs) -> None:
        run = functools.partial(body, *refs)
        pl.run_scoped(run, *scratch_types, collective_axes=thread_name)

    @in_place
    def called(*operands):
        interpreter = config.pallas_tpu_interpret_mode_context_manager.value
        with config._check_vma(False):
            return mpmd._mpmd_map(
                [(plgpu.Mesh(thread_name=thread_name, **mesh), whole)],
                out_type,
                input_output_aliases=aliases,
                compiler_params=compiler_params,
                interpret=interpreter or False,
                name=body.__name__,
            )(*operands)

    return called


def in_place(call: Callable[..., Any]) -> Callable[..., Any]:
    """Of a kernel some of whose results begin as operands: such as are carried on, and
    semaphores, which begin as zeros.

    XLA makes one program of a kernel and of slices that are its operands or that its
    results are put into (`xla_gpu_enable_dynamic_slice_fusion`, on by default since
    2026), and forgets there where results begin: they are whatever memory holds (JAX
    0.11.2 and 0.12.0.1). Barriers keep slices out.

    Inside, operands vary over no axis of a `jax.shard_map`: a warp by itself, of
    `plgpu.warp_map`, takes no references that do. Nor do results, which `varying_alike`
    mends.
    """

    @functools.wraps(call)
    def called(*operands):
        operands = lax.optimization_barrier(jax.tree.map(_unvarying, operands))
        results = call(*operands)
        return lax.optimization_barrier(results)

    return called


def _unvarying(x: jax.Array) -> jax.Array:
    """x, of which JAX does not know that it varies over axes of a `jax.shard_map`."""
    if not jax.typeof(x).manual_axis_type.varying:
        return x
    # Any operation does, but no reshape to the same shape, which is none. These two XLA
    # leaves out.
    with config._check_vma(False):
        return lax.reshape(lax.reshape(x, (1, *x.shape)), x.shape)
