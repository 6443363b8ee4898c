"""Which CTA of Hopper's fused backward kernel has which tiles under a local window, and
the order of additions: what `ring_order` says of other masks."""

import dataclasses
import functools

import numpy as np

from attn_jax.kernels.integers import Number, div, least, most, pick, rem
from attn_jax.kernels.ring_order import Dealt


@dataclasses.dataclass(frozen=True)
class Sliding:
    """How tiles are dealt, and added, under a local window.

    Tiles are dealt to the CTAs in turn, of a few pairs at a time (`together`): the last
    tile of each of them, then the last but one of each, and so on; and from the first
    CTA to the last and back again, since tiles near an end of the sequence are seen by
    fewer queries, and no CTA is to have those alone. A CTA goes up from the first block
    that sees its tile.

    So at equal speed a tile is at a block before the tile to its left is there, and
    additions to a block are made from its last tile to its first. A step may wait for
    tiles dealt before its own, and for the step before it of its own CTA, whose tile is
    the same or was dealt before. By induction over the deal nobody waits for ever, as
    `ring_order` argues: no more CTAs are launched than the card has multiprocessors.

    Attributes:
      length: of the sequence, queries and keys.
      left, right: query i sees the keys i - left ... i + right.
      queries: in a block.
      keys: in a tile.
      pairs: (batch, key head).
      group: query heads of a pair.
      multiprocessors: of the card.
      together: pairs at a time, a divisor of `pairs`.
    """

    length: int
    left: int
    right: int
    queries: int
    keys: int
    pairs: int
    group: int
    multiprocessors: int
    together: int = 1

    apart = False
    long_tiles = 0
    ratio = None  # No causal mask.

    @property
    def tiles(self) -> int:
        """Of keys, in a pair."""
        return -(-self.length // self.keys)

    @property
    def ctas(self) -> int:
        return min(self.multiprocessors, self.pairs * self.tiles)

    @property
    def steps(self) -> int:
        """As `Ring.steps`."""
        first, last = self.blocks_of(np.arange(self.tiles))
        return int((last - first + 1).sum())

    def blocks_of(self, tile: Number) -> tuple[Number, Number]:
        """(first, last) block of queries that sees a tile."""
        start = tile * self.keys
        end = least(start + self.keys, self.length)  # past the last key
        last = least(end - 1 + self.left, self.length - 1)
        return (
            div(most(start - self.right, 0), self.queries),
            div(last, self.queries),
        )

    def tiles_of(self, block: Number) -> tuple[Number, Number]:
        """(first, last) tile that a block of queries sees."""
        start = block * self.queries
        end = least(start + self.queries, self.length)
        last = least(end - 1 + self.right, self.length - 1)
        return div(most(start - self.left, 0), self.keys), div(last, self.keys)

    def is_partial(self, tile: Number, block: Number) -> Number:
        """Whether a block does not see all keys of its tile, as far as they exist."""
        key, query = tile * self.keys, block * self.queries
        hidden = (query + self.right < key + self.keys - 1) | (
            query + self.queries - 1 - self.left > key
        )
        if self.right and self.length % self.keys:
            hidden |= tile == self.tiles - 1
        return hidden

    def part(self, tile: Number) -> int:
        """As `Ring.part`: all are added to one sum."""
        del tile
        return 0

    def tile_at(self, place: Number) -> tuple[Number, Number]:
        """(pair, tile) of a place in the deal."""
        lot = div(place, self.together * self.tiles)
        within = rem(place, self.together * self.tiles)
        pair = lot * self.together + rem(within, self.together)
        return pair, self.tiles - 1 - div(within, self.together)

    def dealt(self, cta: Number) -> Dealt:
        """What a CTA has."""
        pairs, ctas = self.pairs, self.ctas
        assert pairs % self.together == 0

        def place(n: Number) -> Number:
            return ctas * n + pick(rem(n, 2) == 0, cta, ctas - 1 - cta)

        def item(n: Number):
            pair, tile = self.tile_at(place(n))
            first, last = self.blocks_of(tile)
            return pair, tile, first, 1, last - first + 1

        rounds = pairs * self.tiles // ctas
        more = pick(place(rounds) < pairs * self.tiles, 1, 0)
        return Dealt(rounds + more, item)

    def block(self, first: Number, stride: Number, i: Number) -> Number:
        """The i-th block of a tile."""
        del stride
        return first + i

    def rank(self, pair: Number, tile: Number, head: Number, block: Number):
        """(how many tiles are added to a block before `tile`, how many before the last
        one)."""
        del pair, head
        first, last = self.tiles_of(block)
        return last - tile, last - first

    def share(self) -> float:
        """As `Ring.share`."""
        place = np.arange(self.pairs * self.tiles)
        _pair, tile = self.tile_at(place)
        first, last = self.blocks_of(tile)
        turn = place % self.ctas
        cta = np.where(place // self.ctas % 2 == 0, turn, self.ctas - 1 - turn)
        steps = np.bincount(cta, last - first + 1)
        return float(steps.sum() / (self.multiprocessors * steps.max()))


@functools.cache
def sliding_of(
    *,
    length: int,
    left: int,
    right: int,
    queries: int,
    keys: int,
    pairs: int,
    group: int,
    multiprocessors: int,
) -> Sliding:
    """With so few pairs at a time as leave CTAs nearly the same work (2 % or less is
    lost to the best share).

    Neighbouring tiles are seen by nearly the same queries: of many pairs at a time
    those would be read from memory for each tile, and not once for many: `analysis
    speed --cases h64-4k-window` on an H200 had 280 TFLOP/s with all 128 pairs at a time
    (commit afcfdef), and has 324. So a window's queries of all pairs at a time are to
    be no more than twice the keys that all CTAs have at a time.
    """
    limit = max(1, 2 * multiprocessors * keys // (left + right + 1))
    of = Sliding(length, left, right, queries, keys, pairs, group, multiprocessors)
    some = {
        n: dataclasses.replace(of, together=n).share()
        for n in range(1, min(limit, pairs) + 1)
        if pairs % n == 0
    }
    together = next(n for n in some if some[n] >= 0.98 * max(some.values()))
    return dataclasses.replace(of, together=together)
