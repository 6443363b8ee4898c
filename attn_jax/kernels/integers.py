"""Integer helpers that work on kernel scalars, Python ints and NumPy alike.

What a kernel counts while it runs can so be tried without a kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

type Number = Any


def div(x: Number, y: Number) -> Number:
    """Of numbers that are not negative."""
    if isinstance(x, jax.Array) or isinstance(y, jax.Array):
        return lax.div(jnp.int32(x), jnp.int32(y))
    return x // y


def rem(x: Number, y: Number) -> Number:
    """Of numbers that are not negative.

    By a known power of two it is one instruction, where `lax.rem`, which minds signs,
    is four, one after the other, before what the remainder leads to.
    """
    if isinstance(y, int) and y & (y - 1) == 0:
        return x & (y - 1)
    if isinstance(x, jax.Array) or isinstance(y, jax.Array):
        return lax.rem(jnp.int32(x), jnp.int32(y))
    return x % y


def pick(condition, x: Number, y: Number) -> Number:
    if isinstance(condition, bool):
        return x if condition else y
    if isinstance(condition, jax.Array):
        return jnp.where(condition, jnp.int32(x), jnp.int32(y))
    return np.where(condition, x, y)


def least(x: Number, y: Number) -> Number:
    return pick(x < y, x, y)


def most(x: Number, y: Number) -> Number:
    return pick(x < y, y, x)


def ceil_div(x: Number, y: Number) -> Number:
    """0 for negative x."""
    return div(most(x, 0) + y - 1, y)
