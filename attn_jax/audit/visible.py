"""Which keys queries see, counted without a T x S array."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from attn_jax.audit.inputs import Shape
from attn_jax.mask import Mask

# Numbers of a tile of the mask, and of the counts of an interval.
_TILE = 2**24


def counted(
    mask: Mask, shape: Shape, classes: Int[np.ndarray, " S"], number: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """How many keys of each class queries start:stop see, [B or 1, n, N or 1, number].

    Yields (start, stop, counts) for runs of queries; `classes` are below `number`.
    """
    T, S = shape.query_length, shape.key_length
    one_hot = classes[:, None] == np.arange(number)
    if mask.is_interval:
        before = np.zeros((S + 1, number), np.int32)
        np.cumsum(one_hot, 0, out=before[1:])
        first, last = mask.interval(T, S, np)
        step = max(1, _TILE // (number * shape.batch * shape.heads))
        for start in range(0, T, step):
            here = slice(start, min(start + step, T))
            counts = before[last[:, here]] - before[first[:, here]]
            yield here.start, here.stop, counts[:, :, None]
        return
    if key_classes(mask, shape) is not None:
        yield from _counted_by_id(mask, shape, classes, number)
        return
    step = max(1, _TILE // (S * shape.batch * shape.heads))
    matrix = one_hot.astype(np.float32)
    for start in range(0, T, step):
        size = min(step, T - start)
        tile = mask.block(start, 0, size, S, np)
        assert tile is not None  # A mask without rules is an interval.
        # Whole numbers below 2^24: exact in FP32.
        counts = tile.astype(np.float32) @ matrix
        yield start, start + size, counts.swapaxes(1, 2).astype(np.int32)


def _counted_by_id(mask: Mask, shape: Shape, classes, number: int):
    """Of segments without a band: queries of one id see the same keys."""
    B, T, S = shape.batch, shape.query_length, shape.key_length
    ids = [np.asarray(x) for x in (mask.query_segment_ids, mask.key_value_segment_ids)]
    known, index = np.unique(np.concatenate(ids, 1), return_inverse=True)
    index = index.reshape(B, T + S)
    of_query, of_key = index[:, :T], index[:, T:]
    keys = np.full(B, S) if mask.key_value_lengths is None else mask.key_value_lengths
    queries = np.full(B, T) if mask.query_lengths is None else mask.query_lengths
    table = np.zeros((B, len(known), number), np.int32)
    for b in range(B):
        length = min(int(keys[b]), S)
        np.add.at(table[b], (of_key[b, :length], classes[:length]), 1)
    step = max(1, _TILE // (number * B * shape.heads))
    for start in range(0, T, step):
        stop = min(start + step, T)
        counts = np.take_along_axis(table, of_query[:, start:stop, None], 1)
        counts[np.arange(start, stop) >= np.asarray(queries)[:, None]] = 0
        yield start, stop, counts[:, :, None]


def key_classes(mask: Mask, shape: Shape) -> Int[np.ndarray, "B S"] | None:
    """Keys of one class are seen by the same queries; None if the mask's band or dense
    array sets every key apart."""
    if mask.dense is not None or mask.band != (None, None):
        return None
    classes = np.zeros((shape.batch, shape.key_length), int)
    if mask.key_value_segment_ids is not None:
        classes += np.asarray(mask.key_value_segment_ids)
    if mask.key_value_lengths is not None:
        hidden = (
            np.arange(shape.key_length) >= np.asarray(mask.key_value_lengths)[:, None]
        )
        classes[hidden] = classes.max() + 1
    return classes


def shuffled(
    rng: np.random.Generator, classes: Int[np.ndarray, " S"]
) -> Int[np.ndarray, " S"]:
    """An order of keys in which each has the place of one of its class."""
    order = np.arange(len(classes))
    for one in np.unique(classes):
        members = np.flatnonzero(classes == one)
        order[members] = rng.permutation(members)
    return order
