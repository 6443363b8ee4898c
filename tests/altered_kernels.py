"""For what runs kernels that are altered, in a process that others share."""

import contextlib
from collections.abc import Iterator

import jax

from attn_jax.kernels import attention


@contextlib.contextmanager
def fresh_programs() -> Iterator[None]:
    """What is traced inside is not taken from before, and is not there after."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    attention._forward_program.cache_clear()
    attention._backward_program.cache_clear()
    jax.clear_caches()
