"""What travels between devices, packed into few arrays.

XLA has one message on its way at a time and waits for any other before it computes
anything."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# Unsigned integers, which nothing changes on their way.
_WORDS: dict[int, Any] = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def moved(x: Any, axis: str, steps: int) -> Any:
    """What lies `steps` devices before this one on a mesh axis."""
    if steps == 0:
        return x
    devices = lax.axis_size(axis)
    return lax.ppermute(
        x, axis, [(one, (one + steps) % devices) for one in range(devices)]
    )


def packed(key: Array, value: Array) -> Array:
    """Two arrays as one. Its second axis is theirs."""
    return jnp.concatenate([key, value], axis=-1)


def stacked(key: Array, value: Array) -> Array:
    """The same, one behind the other if their shapes are one: kernels that only read
    take them from where they lie (`internals.in_place` says which do not)."""
    if key.shape != value.shape:
        return packed(key, value)
    return jnp.stack([key, value])


def unpacked(
    both: Array, key_columns: int, keys: slice = slice(None)
) -> tuple[Array, Array]:
    """The inverse of either, of some keys; there may be more planes."""
    if both.ndim == 5:
        return both[0, :, keys], both[1, :, keys]
    return both[:, keys, :, :key_columns], both[:, keys, :, key_columns:]


def fit(keys: Array, sums: Sequence[Array]) -> bool:
    """Whether `together` takes them."""
    size = sums[0].dtype.itemsize
    return keys.shape[-1] * keys.dtype.itemsize % size == 0


def together(keys: Array, sums: Sequence[Array]) -> Array:
    """Keys and sums, of two types, as one array, bit for bit: sums as more planes of
    stacked keys, or one behind the other."""
    words = _WORDS[sums[0].dtype.itemsize]
    as_words = keys.view(words)
    # Behind the first two planes lies what came with these keys.
    shape = as_words.shape[1:] if keys.ndim == 5 else ()
    own = as_words[:2] if keys.ndim == 5 else as_words.reshape(-1)
    return jnp.concatenate([own, *(x.view(words).reshape(-1, *shape) for x in sums)])


def apart(
    message: Array, keys: Array, sums: Sequence[Array]
) -> tuple[Array, list[Array]]:
    """The inverse, for arrays of these shapes and types; stacked keys are the first two
    planes of all."""
    taken = math.prod(keys.shape[-4:]) * keys.dtype.itemsize // message.dtype.itemsize
    found, all_words = [], message.reshape(-1)
    if keys.ndim == 5:
        taken *= 2
        first = message.view(keys.dtype)
    else:
        first = all_words[:taken].reshape(*keys.shape[:-1], -1).view(keys.dtype)
    for x in sums:
        words = all_words[taken : taken + x.size]
        found.append(words.reshape(x.shape).view(x.dtype))
        taken += x.size
    return first, found
