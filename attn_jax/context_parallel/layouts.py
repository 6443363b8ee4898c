"""Which positions of a sequence lie on which shard, and how to put them there.

With W shards of L / W positions each, shard r holds

    contiguous   r L / W, ..., (r + 1) L / W - 1
    zigzag       of 2 W equal chunks the r-th and the (2 W - 1 - r)-th: under a causal
                 mask each shard has the same work
    striped      r, r + W, r + 2 W, ... (Striped Attention, arXiv 2311.09431)

Attention here knows positions by the layout's name. What else depends on them (position
embeddings, labels) is permuted as the tokens are.
"""

import typing
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[Layout, ...] = typing.get_args(Layout)


class Run(NamedTuple):
    """Entries `first`, ..., `first + size - 1` of a shard, one after the other.

    They hold the positions `start`, `start + stride`, ...
    """

    first: int
    size: int
    start: int
    stride: int


def order(length: int, shards: int, layout: Layout) -> Int[np.ndarray, " L"]:
    """Positions in the order in which the layout stores them, shard after shard.

    Raises ValueError if the layout is none, or cannot deal `length` positions evenly.
    """
    check_layout(layout)
    check_length("the sequence", length, shards, layout)
    runs = (run for r in range(shards) for run in shard_runs(length, shards, layout, r))
    parts = [run.start + run.stride * np.arange(run.size) for run in runs]
    return np.concatenate(parts).astype(np.int32)


def to_layout(
    x: Shaped[Array, "..."], shards: int, layout: Layout, axis: int = 1
) -> Shaped[Array, "..."]:
    """An array whose `axis` runs over positions, in the layout's order.

    Shard the result over `axis` and each device has its positions. Exact: nothing is
    computed. Positions themselves are `order`.

    Raises ValueError as `order` does.
    """
    return jnp.take(x, order(x.shape[axis], shards, layout), axis=axis)


def from_layout(
    x: Shaped[Array, "..."], shards: int, layout: Layout, axis: int = 1
) -> Shaped[Array, "..."]:
    """The inverse of `to_layout`. Raises ValueError as `order` does."""
    places = np.argsort(order(x.shape[axis], shards, layout)).astype(np.int32)
    return jnp.take(x, places, axis=axis)


def shard_runs(length: int, shards: int, layout: Layout, shard: int) -> tuple[Run, ...]:
    """The positions of one shard as runs of equal distance, in storage order."""
    local = length // shards
    if layout == "striped":
        return (Run(0, local, shard, shards),)
    if layout == "contiguous":
        return (Run(0, local, shard * local, 1),)
    half = local // 2
    late = (2 * shards - 1 - shard) * half
    return Run(0, half, shard * half, 1), Run(half, half, late, 1)


def check_layout(layout: str) -> None:
    """Raises ValueError, one line, unless there is such a layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def check_length(name: str, length: int, shards: int, layout: Layout) -> None:
    """Raises ValueError, one line, unless the layout deals the positions evenly."""
    parts = 2 * shards if layout == "zigzag" else shards
    if length % parts or length == 0:
        raise ValueError(
            f"layout {layout!r} over {shards} shards needs a multiple of {parts} "
            f"positions, and {name} has {length}: pad it, or use another layout"
        )
