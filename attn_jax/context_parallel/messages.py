"""What travels between devices, packed into few arrays.

XLA has one message on its way at a time and waits for any other before it computes
anything."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

# Unsigned integers, which nothing changes on their way.
_WORDS: dict[int, Any] = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


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


def fit(keys: Array, sums: Array) -> bool:
    """Whether `together` takes them."""
    a, b = sums.dtype.itemsize, keys.dtype.itemsize
    return a % b == 0 if keys.ndim == 5 else keys.shape[-1] * b % a == 0


def together(keys: Array, sums: Array) -> Array:
    """Arrays of two types as one, bit for bit: sums as more planes of stacked keys, or
    one behind the other."""
    if keys.ndim == 5:
        words = _WORDS[keys.dtype.itemsize]
        of_sums = sums.view(words).reshape(-1, *keys.shape[1:])
        return jnp.concatenate([keys[:2].view(words), of_sums])
    words = _WORDS[sums.dtype.itemsize]
    return jnp.concatenate([x.view(words).reshape(-1) for x in (keys, sums)])


def apart(message: Array, keys: Array, sums: Array) -> tuple[Array, Array]:
    """The inverse, for arrays of these shapes and types; planes of keys may be those of
    the message, of which only the first two are."""
    if keys.ndim == 5:
        return message.view(keys.dtype), _seen_as(message[2:], sums)
    count = math.prod(keys.shape) * keys.dtype.itemsize // sums.dtype.itemsize
    return _seen_as(message[:count], keys), _seen_as(message[count:], sums)


def _seen_as(words: Array, like: Array) -> Array:
    columns = like.shape[-1] * like.dtype.itemsize // words.dtype.itemsize
    return words.reshape(*like.shape[:-1], columns).view(like.dtype)
