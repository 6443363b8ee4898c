"""A tensor that can be read slice by slice, wherever it lies."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Numbers read at once: 8 MiB of FP64, and a few times that for what is made of them.
SLICE = 2**20


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of a tensor that is contiguous in C order.

    Attributes:
      start: first of its numbers in the flattened tensor.
      stop: one past the last.
      index: the same part, a slice for every axis.
    """

    start: int
    stop: int
    index: tuple[slice, ...]


def boxes(shape: tuple[int, ...], most: int = SLICE) -> Iterator[Box]:
    """Cuts a tensor into boxes of at most `most` numbers, in C order."""
    if 0 in shape:
        return
    cut, inner = len(shape), 1
    while cut and inner * shape[cut - 1] <= most:
        cut -= 1
        inner *= shape[cut]
    whole = (slice(None),) * (len(shape) - cut)
    if not cut:
        yield Box(0, inner, whole)
        return
    cut, rows, start = cut - 1, max(1, most // inner), 0
    for lead in np.ndindex(*shape[:cut]):
        for low in range(0, shape[cut], rows):
            high = min(low + rows, shape[cut])
            stop = start + (high - low) * inner
            before = tuple(slice(i, i + 1) for i in lead)
            yield Box(start, stop, (*before, slice(low, high), *whole))
            start = stop


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor.

    Attributes:
      shape: its shape.
      dtype: NumPy's type of its numbers (with those of ml_dtypes).
      read: the numbers of a box, of any shape, in C order. Boxes are asked for in
        rising order; a fall starts over.
      array: the tensor, if it is an array of JAX.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Box], np.ndarray]
    array: jax.Array | None = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether its numbers are real and of a floating-point type."""
        return bool(jnp.issubdtype(self.dtype, np.floating))


def leaves(tree: Any) -> dict[str, Leaf]:
    """The tensors of a pytree by their path, its parts joined with dots.

    A value that is a Leaf stays as it is; a key of JAX counts as its numbers.
    """
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, Leaf)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        if isinstance(leaf, Leaf)
        else of_array(leaf)
        for path, leaf in found
    }


def of_array(values: Any) -> Leaf:
    """The Leaf of an array or a number."""
    if isinstance(values, jax.Array):
        if jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
            values = jax.random.key_data(values)
        device, dtype = values, np.dtype(values.dtype)
        return Leaf(
            values.shape, dtype, lambda box: np.asarray(device[box.index]), device
        )
    host = np.asarray(values)
    return Leaf(host.shape, host.dtype, lambda box: np.asarray(host[box.index]))
