"""Which blocks a tile of a kernel's output visits, and what it hides in them.

A full or a causal mask is known when a kernel is compiled, which then counts its blocks
by itself; so does Hopper's forward kernel under a local window of as many queries as
keys (`Counted`). For every other mask XLA makes, before the kernel, a list for each
tile of the blocks in which some pair of query and key takes part (`block_lists`); in
those of them that are not seen whole, the kernel hides pairs one by one (`hide`).
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

from attn_jax.kernels import integers
from attn_jax.kernels.integers import Number
from attn_jax.kernels.tiles import (
    GROUP,
    WGMMA,
    Fragments,
    head_of,
    hide_before,
    hide_from,
    read_tile,
    row_positions,
)
from attn_jax.mask import Mask

# Columns of `Rules.spans`.
OFFSET, QUERY_LENGTH, KEY_LENGTH = range(3)


class Band(NamedTuple):
    """Query at position p sees the keys p - left <= j <= p + right; None: no limit."""

    left: int | None
    right: int | None

    @property
    def width(self) -> int:
        """How many keys a query sees at the most, if there is a limit on both sides."""
        assert self.left is not None and self.right is not None
        return self.left + self.right + 1


class Rules(NamedTuple):
    """What decides about a pair besides a `Band`, as arrays.

    Query i of batch entry b stands at position i + spans[b, 0] and sees keys if it is
    one of the first spans[b, 1]; keys from spans[b, 2] on are seen by none. Ids must be
    equal; dense must not be 0. None: no such rule.
    """

    spans: Int32[Array, "B 3"]
    query_ids: Int32[Array, "B T"] | None = None
    key_ids: Int32[Array, "B S"] | None = None
    dense: Array | None = None  # int8 [B or 1, N or 1, T, S]


def is_static(mask: Mask) -> bool:
    """True if a kernel can count its blocks by itself: a full or a causal mask."""
    return mask.window is None and not jax.tree.leaves(mask)


def window_of(mask: Mask, query_count: int, key_count: int) -> Band | None:
    """The band of a mask that hides nothing else, if it is bounded on both sides, of as
    many queries as keys, and so of one key at least for each query. Not wider than the
    sequence, so that sums with its bounds are numbers of 32 bits."""
    left, right = mask.band
    if left is None or right is None or jax.tree.leaves(mask):
        return None
    if query_count != key_count:
        return None
    return Band(min(int(left), key_count), min(int(right), key_count))


class Counted(NamedTuple):
    """Blocks of keys that a kernel counts by itself.

    Attributes:
      band: no limit at all, a causal mask, or what `window_of` finds.
      key_count: of the sequence.
      rows, columns: queries of a warpgroup, a multiple of which is the first one's
        position; keys in a block.
    """

    band: Band
    key_count: int
    rows: int
    columns: int

    @property
    def is_window(self) -> bool:
        return self.band.left is not None

    @property
    def blind(self) -> bool:
        """Whether a row may not see the last block that its warpgroup sees."""
        aligned = self.band.right == 0 and self.columns % self.rows == 0
        return self.is_window and not aligned

    def seen(self, start: Number, end: Number, blocks: Number) -> tuple[Number, Number]:
        """Of so many blocks, those that the rows start, ..., end - 1 see: the first
        one, and one past the last."""
        (left, right), columns = self.band, self.columns
        first = 0
        if left is not None:
            first = integers.div(integers.most(start - left, 0), columns)
        if right is not None:
            until = integers.div(end + (right + columns - 1), columns)
            blocks = integers.least(until, blocks)
        return first, blocks

    def by_tile(self, strips: Iterable[int], blocks: int) -> list[int]:
        """Of so many blocks, how many each tile sees. `strips`: of `rows` each, after
        how many of them each tile ends."""
        ends = itertools.pairwise([0, *(end * self.rows for end in strips)])
        seen = (self.seen(start, end, blocks) for start, end in ends)
        return [end - first for first, end in seen]

    @property
    def cut_twice(self) -> bool:
        """Whether the first block that a warpgroup meets, where its rows' right ends
        are, or the sequence's, may have left ends, too."""
        left, right = self.band
        if left is None or right is None:
            return False
        return left + min(right, self.rows) < self.rows + self.columns

    def is_cut(self, row: Number, block: Number) -> Number:
        """Under a window, whether one of a warpgroup's rows, from `row` on, does not
        see all of a block."""
        left, right = self.band
        assert left is not None and right is not None
        key_start = block * self.columns
        cut = key_start < row + (self.rows - 1 - left)
        if self.blind:  # Or else that is the first block that they meet.
            cut |= key_start + (self.columns - 1) > row + right
        return cut

    def hide(
        self, s: jax.Array, row: jax.Array, block: jax.Array, ends: "Ends | None" = None
    ) -> jax.Array:
        """s with -inf at keys past the `ends` of what the rows from `row` on see, and
        past the last key. `ends`: None, for those of any block but the first."""
        (left, right), rows = self.band, s.shape[0]
        key_start = block * self.columns
        if ends is None:
            ends = Ends(left=True, right=self.blind)

        def seen_to(bound: int):
            return row_positions(rows) + (row + bound - key_start)

        if ends.right:
            missing = self.key_count % self.columns
            seen = self.key_count - key_start if missing else None
            if right is not None:
                diagonal = seen_to(right + 1)
                seen = diagonal if seen is None else jnp.minimum(diagonal, seen)
            s = s if seen is None else hide_from(s, seen)
        if ends.left and left is not None:
            s = hide_before(s, seen_to(-left))
        return s


class Ends(NamedTuple):
    """Of a window."""

    left: bool
    right: bool


def rules(mask: Mask, batch: int, query_count: int, key_count: int) -> Rules:
    """The arrays of a mask, as kernels want them. Lengths beyond the arrays are cut."""

    def per_batch(x, default: int):
        x = default if x is None else x
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch,))

    lengths = (
        jnp.clip(per_batch(length, count), 0, count)
        for length, count in (
            (mask.query_lengths, query_count),
            (mask.key_value_lengths, key_count),
        )
    )
    dense = mask.dense
    if dense is not None:
        shape = (*dense.shape[:2], query_count, key_count)
        dense = jnp.broadcast_to(dense, shape).astype(jnp.int8)
    query_ids, key_ids = (
        None if x is None else jnp.asarray(x, jnp.int32)
        for x in (mask.query_segment_ids, mask.key_value_segment_ids)
    )
    spans = jnp.stack([per_batch(mask.query_offset, 0), *lengths], axis=1)
    return Rules(spans, query_ids, key_ids, dense)


def block_lists(
    rules: Rules,
    band: Band,
    *,
    query_count: int,
    key_count: int,
    query_tile: int,
    key_tile: int,
    by_key: bool = False,
    group: int = 1,
    last_first: bool = False,
) -> Int32[Array, "B N tiles entries"]:
    """For each tile of queries the blocks of keys to visit; N is 1 without dense.

    Entry 0 is how many there are, at least one. The others are 2 * block + (1 if some
    pair of it is hidden), in ascending order of the blocks, or descending with
    `last_first`. With `by_key` it is the blocks of queries to visit for each tile of
    keys, the same for the `group` query heads of a key/value head: N is their number.
    """
    some, whole = _kinds(rules, band, query_count, key_count, query_tile, key_tile)
    if by_key:
        some, whole = some.swapaxes(2, 3), whole.swapaxes(2, 3)
        if some.shape[1] > 1:
            heads = (some.shape[0], -1, group, *some.shape[2:])
            some, whole = some.reshape(heads).any(2), whole.reshape(heads).all(2)
    # A tile that sees nothing visits one block in vain, for its rows to be zero.
    none = ~some.any(axis=-1, keepdims=True)
    blocks = some.shape[-1]
    some |= none & (jnp.arange(blocks) == 0)
    entry = 2 * jnp.arange(blocks, dtype=jnp.int32) + (some & ~whole)
    if last_first:
        listed = -jnp.sort(jnp.where(some, -entry, 1), axis=-1)
    else:
        listed = jnp.sort(jnp.where(some, entry, 2 * blocks), axis=-1)
    count = some.sum(axis=-1, dtype=jnp.int32)
    return jnp.concatenate([count[..., None], listed], axis=-1)


def _kinds(
    rules: Rules,
    band: Band,
    query_count: int,
    key_count: int,
    query_tile: int,
    key_tile: int,
) -> tuple[Bool[Array, "B N tiles blocks"], Bool[Array, "B N tiles blocks"]]:
    """Blocks in which some pair may take part, and those in which all pairs do.

    A pair counts if it is in the arrays. Each rule by itself, so a block in which two
    rules hide everything between them may be visited in vain.
    """
    low, high = interval(rules, band, query_count, key_count)
    first_row = jnp.arange(0, query_count, query_tile)
    last_row = jnp.minimum(first_row + query_tile, query_count) - 1
    first_key = jnp.arange(0, key_count, key_tile, dtype=jnp.int32)
    end_key = jnp.minimum(first_key + key_tile, key_count)
    # Rows past a query length have an empty interval; bounds grow with the row before.
    real = low < high
    lowest = patches(jnp.where(real, low, key_count), query_tile, key_count).min(-1)
    highest = patches(jnp.where(real, high, 0), query_tile, 0).max(-1)
    some = (lowest[..., None] < end_key) & (highest[..., None] > first_key)
    all_low, all_high = low[:, last_row], high[:, first_row]
    whole = (all_low[..., None] <= first_key) & (all_high[..., None] >= end_key)
    whole &= patches(real, query_tile, True).all(-1)[..., None]
    # A block that runs over the last key has keys to hide.
    whole &= first_key + key_tile <= key_count
    some, whole = some[:, None], whole[:, None]
    if rules.query_ids is not None:
        assert rules.key_ids is not None
        queries = _extremes(rules.query_ids, query_tile)
        keys = _extremes(rules.key_ids, key_tile)
        (q_min, q_max), (k_min, k_max) = (
            (x[:, None, :, None] for x in queries),
            (x[:, None, None, :] for x in keys),
        )
        some &= (q_min <= k_max) & (k_min <= q_max)
        whole &= (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    if rules.dense is not None:
        seen = rules.dense != 0
        some = some & _tiles(seen, query_tile, key_tile, False).any((-3, -1))
        whole = whole & _tiles(seen, query_tile, key_tile, True).all((-3, -1))
    return some, whole


def interval(
    rules: Rules, band: Band, query_count: int, key_count: int
) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
    """First key and one past the last that a row sees by band and spans."""
    offset, query_length, key_length = (x[:, None] for x in rules.spans.T)
    row = jnp.arange(query_count, dtype=jnp.int32)
    position = row + offset
    low = jnp.zeros_like(position)
    high = jnp.broadcast_to(key_length, position.shape)
    if band.left is not None:
        low = jnp.clip(position - band.left, 0, key_count)
    if band.right is not None:
        high = jnp.minimum(high, jnp.maximum(position + band.right + 1, 0))
    return low, jnp.where(row < query_length, high, 0)


def patches(x: Array, size: int, fill) -> Array:
    """[..., L] as [..., patches, size], the last one filled up."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
    x = jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, size)


def _tiles(x: Array, rows: int, columns: int, fill) -> Array:
    """[..., T, S] as [..., tiles, rows, blocks, columns]."""
    x = patches(x, columns, fill)
    pad = [(0, 0)] * (x.ndim - 3) + [(0, -x.shape[-3] % rows), (0, 0), (0, 0)]
    x = jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:-3], -1, rows, *x.shape[-2:])


def _extremes(ids: Int32[Array, "B L"], size: int) -> tuple[Array, Array]:
    """Least and greatest id in each patch."""
    most = jnp.iinfo(jnp.int32)
    return (
        patches(ids, size, most.max).min(-1),
        patches(ids, size, most.min).max(-1),
    )


class Pairs(NamedTuple):
    """A mask as a kernel gets it: the arrays (references, inside) and the lists."""

    rules: Any
    lists: Any

    def entries(self, batch, head, tile):
        """The list of a tile."""
        return head_of(self.lists, batch, head).at[tile]


def listed_pairs(
    rules: Rules,
    band: Band,
    *,
    query_count: int,
    key_count: int,
    query_tile: int,
    key_tile: int,
    last_first: bool = False,
) -> Pairs:
    """Those of `block_lists`, by tiles of queries."""
    lists = block_lists(
        *(rules, band),
        query_count=query_count,
        key_count=key_count,
        query_tile=query_tile,
        key_tile=key_tile,
        last_first=last_first,
    )
    return Pairs(pad_to_tiles(rules, query_tile, key_tile), lists)


def hide(
    s: jax.Array,
    pairs: Pairs,
    band: Band,
    batch,
    head,
    query_start: jax.Array,
    key_start: jax.Array,
    *,
    queries_first: bool = True,
    fragments: Fragments = WGMMA,
) -> jax.Array:
    """s with -inf at the pairs of a tile that do not take part.

    `queries_first` says which axis the queries are on. The arrays of `rules` hold whole
    tiles (`pad_to_tiles`). Eight columns at a time: what is to be compared with all
    columns LLVM would keep in registers through the whole kernel.
    """
    rules = pairs.rules
    rows, columns = s.shape
    row_start, column_start = query_start, key_start
    row_ids, column_ids = rules.query_ids, rules.key_ids
    if not queries_first:
        row_start, column_start = column_start, row_start
        row_ids, column_ids = column_ids, row_ids
    column = fragments.positions((rows, GROUP), 1)
    low, high = _seen_columns(
        *(pairs, band, batch, rows, row_start, queries_first, fragments)
    )
    high = high - column_start
    low = None if low is None else low - column_start
    if row_ids is not None:
        ids = row_ids.at[batch, pl.ds(row_start, rows)]
        row_ids = plgpu.load(ids, layout=fragments.rows, optimized=False)
        row_ids = fragments.along_rows(row_ids, (rows, GROUP))

    def hidden(first: int):
        seen = column < high - first
        if low is not None:
            seen = jnp.logical_and(seen, column >= low - first)
        group = pl.ds(column_start + first, GROUP)
        if row_ids is not None:
            ids = plgpu.load(
                column_ids.at[batch, group], layout=fragments.columns, optimized=False
            )
            same = row_ids == fragments.along_columns(ids, (rows, GROUP))
            seen = jnp.logical_and(seen, same)
        part = jnp.where(
            seen, lax.slice(s, (0, first), (rows, first + GROUP)), -jnp.inf
        )
        if rules.dense is not None:
            dense = head_of(rules.dense, batch, head)
            shape = rows, GROUP
            tile = read_tile(dense, row_start, column_start + first, shape, fragments)
            part = jnp.where(tile != 0, part, -jnp.inf)
        return part

    return jnp.concatenate([hidden(i) for i in range(0, columns, GROUP)], axis=1)


def _seen_columns(
    pairs: Pairs,
    band: Band,
    batch,
    rows: int,
    start: jax.Array,
    queries_first: bool,
    fragments: Fragments,
):
    """First column and one past the last that each row sees by band and spans, the same
    in all 8 entries of a row; None for the first if it is the first of all."""
    offset, query_length, key_length = (pairs.rules.spans[batch, i] for i in range(3))
    row = fragments.positions((rows, GROUP), 0) + start
    # A query sees the keys position - back ... position + ahead; of a key it is seen by
    # the queries at position - ahead ... position + back.
    back, ahead = band
    count, end, position = query_length, key_length, row + offset
    if not queries_first:
        back, ahead = ahead, back
        count, end, position = key_length, query_length, row - offset
    low = None if back is None else position - back
    high = jnp.full_like(row, 0) + end
    if ahead is not None:
        high = jnp.minimum(high, position + (ahead + 1))
    return low, jnp.where(row < count, high, 0)


def pad_to_tiles(
    rules: Rules, query_tile: int, key_tile: int, *, by_key: bool = False
) -> Rules:
    """Arrays that hold whole tiles, which is how a kernel reads them.

    With `by_key` dense is transposed to [B, N, S, T].
    """
    query_ids, key_ids, dense = rules.query_ids, rules.key_ids, rules.dense
    if query_ids is not None:
        assert key_ids is not None
        query_ids = whole_tiles(query_ids, query_tile)
        key_ids = whole_tiles(key_ids, key_tile)
    if dense is not None:
        dense = whole_tiles(dense, query_tile, key_tile)
        dense = dense.swapaxes(2, 3) if by_key else dense
    return Rules(rules.spans, query_ids, key_ids, dense)


def whole_tiles(x: Array, *tiles: int) -> Array:
    """Zeros added to the last axes, up to multiples of `tiles`."""
    lead = [(0, 0)] * (x.ndim - len(tiles))
    ends = x.shape[len(lead) :]
    return jnp.pad(x, lead + [(0, -n % t) for n, t in zip(ends, tiles)])
