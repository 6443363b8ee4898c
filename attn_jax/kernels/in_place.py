"""A kernel that writes results where operands of it lie, and leaves their rest."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
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
    both counted. XLA copies an operand first if it is used elsewhere, too.

    That function has no such option, and references, which it takes, may not vary over
    the axes of a `jax.shard_map` (JAX 0.11.2).
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
