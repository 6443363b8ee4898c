"""`attn_jax.kernels.compiler` for tests, which compile with few optimisations.

Wants another process, as said there.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from attn_jax.kernels import compiler
from attn_jax.kernels.compiler import Gpu as Gpu
from attn_jax.kernels.compiler import Kernel as Kernel
from attn_jax.kernels.compiler import Program as Program
from tests.quick_lowering import lower_quickly

lower_quickly()


def h200_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...], axis_types) -> Mesh:
    devices = compiler.devices("h200", int(np.prod(shape)))
    return Mesh(np.array(devices).reshape(shape), axis_names, axis_types=axis_types)


def compiled(
    function: Callable, *arguments: jax.ShapeDtypeStruct, gpu: Gpu = "h200"
) -> Program:
    """`compiler.compiled`, fully optimised."""
    with _fully_optimised():
        return compiler.compiled(function, *arguments, gpu=gpu)


def partitioned(function: Callable, *arguments: jax.ShapeDtypeStruct) -> Program:
    """The same for arguments with shardings, but nothing is asked of the kernels, whose
    reports take a third of the time."""
    with _fully_optimised():
        return Program(
            jax.jit(function).lower(*arguments).compile().as_text() or "", []
        )


@contextlib.contextmanager
def _fully_optimised() -> Iterator[None]:
    """The other tests compile with few optimisations, also in this process: what it
    interprets after this must not differ in the last bit from what it did before."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
