"""Which CTA of Hopper's fused backward kernel has which tiles; the order of additions.

CTAs that share a (batch, key head) pair are a *ring*; rings with successive numbers
take one pair after the other. Tiles of keys are dealt to the members of a ring; each
member goes over the blocks of queries that see its tile, for one query head of the
group after the other, and at every *step* adds a tile to dQ's block. Under a local
window there are no rings: `Sliding` says how it is there.

Everything is a function of the shapes alone.

The order
---------
Give each step of a pair the *time* at which it would happen if all steps took equally
long and nobody waited. Additions to a block are made in the order of their times
(equal times: see `Ring.rank`), so that at equal speed few have to wait.

Why nobody waits for ever
-------------------------
A step is over when its addition is done and counted. It may wait for

  (a) the step before it of its own CTA, which has an earlier time,
  (b) additions to its block that come earlier in the order,
  (c) its CTA to be launched.

(a) and (b) lie before it in one strict order of all steps of the pair: by time, and
among equal times by the rule of `Ring.rank`, under which a CTA has no two steps of the
same time. So of the steps of a pair that are not over the first one waits for neither,
once its CTA runs and is done with earlier pairs. By induction over the pairs of a ring
each ring ends whose CTAs all run; rings do not wait for each other. CTAs are launched
in the order of their numbers (assumed, as all kernels of this kind do), a ring's
numbers follow on each other, and it has no more members than the card has
multiprocessors: what runs beside the first ring that is not over belongs to later
rings, whose CTAs were launched after all of its own. So it does end, and then the next
one. Where a grid has more CTAs than the rings have members, the last ones end at once.

All this is of one kernel that has the card to itself. Two of them side by side, each
with half of the multiprocessors, could wait for each other: as two processes under MPS,
or on streams of their own. XLA runs kernels one after the other. NCCL's run beside them
and take multiprocessors, as under context parallelism. A message ends once all of its
devices send and receive; where one does not yet, this kernel has that whole card, and
ends; and messages come in the same order on all devices. So each message ends, and the
CTAs that it kept from being launched come after it: until then their ring stands still.

Several threads of a CTA may store by turns. Then (a) is that the step before it has
begun to be added, which is less.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from attn_jax.kernels.integers import (
    Number,
    ceil_div,
    div,
    least,
    most,
    pick,
    rem,
)

# SXM's H100 and H200. `attention.backward_of` keeps the kernel off cards with fewer.
MULTIPROCESSORS = 132


class Dealt(NamedTuple):
    """What a CTA has: `items` of them, and `item(number)` is (pair, tile, first block,
    from a block to the next, number of blocks of a query head)."""

    items: Number
    item: Callable[[Number], tuple[Number, Number, Number, Number, Number]]


@dataclasses.dataclass(frozen=True)
class Ring:
    """How the tiles of a pair are dealt to the members of a ring.

    Attributes:
      tiles: of keys, in a pair.
      blocks: of queries, in a query head.
      group: query heads of a pair.
      ratio: under a causal mask block i sees the tiles 0 ... i // ratio; None: no mask.
      size: members of a ring.
      count: rings.
      apart: under a causal mask long and short tiles are added to sums of their own
        (`part`): where they meet, neither waits for the other.
    """

    tiles: Number
    blocks: Number
    group: int
    ratio: int | None
    size: Number
    count: Number
    apart: bool = False

    @property
    def long_tiles(self) -> int:
        """Under a causal mask: the tiles before this one are long."""
        return -(-self.tiles // 2)

    def part(self, tile: Number) -> Number:
        """Which of the sums of a block a tile is added to."""
        return pick(tile < self.long_tiles, 0, 1) if self.apart else 0

    def passes(self, member: Number) -> Number:
        """How many tiles of a pair a member has.

        Without a mask tiles m, m + size, ...; under a causal mask m (long) and
        tiles - 1 - m (short), together equally long for all m, and the middle one of an
        odd number of tiles is alone.
        """
        if self.ratio is None:
            return div(self.tiles - 1 - member, self.size) + 1
        return pick(2 * member == self.tiles - 1, 1, 2)

    @property
    def ctas(self) -> int:
        return self.count * self.size

    @property
    def steps(self) -> int:
        """Of a pair, and of one query head of it."""
        if self.ratio is None:
            return self.blocks * self.tiles
        return sum(self.blocks - self.ratio * tile for tile in range(self.tiles))

    def dealt(self, cta: Number, pairs: int) -> Dealt:
        """What a CTA has of `pairs` pairs."""
        number = div(cta, self.size)
        member = rem(cta, self.size)
        turns = div(pairs + self.count - 1 - number, self.count)
        passes = self.passes(member)

        def item(n: Number):
            pair = number + self.count * div(n, passes)
            return pair, *self.item(member, rem(n, passes))

        return Dealt(turns * passes, item)

    def share(self, pairs: int) -> float:
        """How much of the time of all multiprocessors goes into tiles of `pairs` pairs,
        if all steps take equally long: below 1 where some have none, or fewer."""
        longest = max(
            sum(int(self.item(member, i)[3]) for i in range(int(self.passes(member))))
            for member in range(self.size)
        )
        turns = -(-pairs // self.count)
        return pairs * self.steps / (MULTIPROCESSORS * turns * longest)

    def start(self, member: Number) -> Number:
        """The block at which a member starts on a tile, without a mask."""
        return div(member * self.blocks, self.size)

    def item(
        self, member: Number, index: Number
    ) -> tuple[Number, Number, Number, Number]:
        """(tile, first block, from a block to the next, number of blocks) of a pass.

        Without a mask members start apart from each other and wrap round. Long causal
        tiles go up from their diagonal, short ones down to it.
        """
        if self.ratio is None:
            return index * self.size + member, self.start(member), 1, self.blocks
        tile = pick(index == 0, member, self.tiles - 1 - member)
        first = pick(index == 0, member * self.ratio, self.blocks - 1)
        return tile, first, 1 - 2 * index, self.blocks - tile * self.ratio

    def block(self, first: Number, stride: Number, i: Number) -> Number:
        """The i-th block of a tile."""
        if self.ratio is not None:
            return first + stride * i
        block = first + i
        return pick(block >= self.blocks, block - self.blocks, block)

    def rank(self, tile: Number, head: Number, block: Number):
        """(how many tiles are added to a block of the group's `head` before `tile`, how
        many before the last one); to the tile's part of it."""
        if self.ratio is None:
            return self._rank_full(tile, block)
        return self._rank_causal(self.ratio, tile, head, block)

    def _rank_full(self, tile: Number, block: Number):
        """A block meets the last member that starts at it or before, then the member
        before that one, and so on, wrapping round; at the same time the later member
        goes first. The tiles of a later pass follow those of an earlier one."""
        size = self.size
        index = div(tile, size)
        member = tile - index * size
        # Members with a tile in this pass: the last one may be short of some.
        members = least(self.tiles - index * size, size)
        nearest = least(div((block + 1) * size - 1, self.blocks), members - 1)
        wrapped = pick(self.start(member) > block, members, 0)
        rank = index * size + nearest - member + wrapped
        return rank, self.tiles - 1

    def _rank_causal(self, ratio: int, tile: Number, head: Number, block: Number):
        """At equal speed tile c is at block s of head h at the time

            long    h * (blocks - ratio * c) + s - ratio * c
            short   group * (blocks - ratio * (tiles - 1 - c))
                    + h * (blocks - ratio * c) + blocks - 1 - s

        and adds after those that are there earlier; at the same time the long one goes
        first. For one block times of long tiles fall with c, those of short ones rise.
        """
        tiles, blocks, group = self.tiles, self.blocks, self.group
        long_tiles = self.long_tiles
        last = div(block, ratio)
        long_last = least(last, long_tiles - 1)
        is_long = tile < long_tiles
        if self.apart:
            rank = pick(is_long, long_last - tile, tile - long_tiles)
            return rank, pick(is_long, long_last, last - long_tiles)
        long_zero = head * blocks + block  # time of long tile 0
        long_step = (head + 1) * ratio
        short_zero = group * (blocks - ratio * (tiles - 1))
        short_zero = short_zero + head * blocks + blocks - 1 - block
        short_step = (group - head) * ratio
        # Short tiles t >= long_tiles with short_zero + t * short_step < time of this.
        reached = ceil_div(long_zero - tile * long_step - short_zero, short_step)
        shorts = most(least(reached, last + 1) - long_tiles, 0)
        # Long tiles c with long_zero - c * long_step <= time of this one.
        time = short_zero + tile * short_step
        longs = most(long_last + 1 - ceil_div(long_zero - time, long_step), 0)
        rank = pick(is_long, long_last - tile + shorts, tile - long_tiles + longs)
        return rank, last


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
    in the module's argument: no more CTAs are launched than the card has
    multiprocessors.

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

    def dealt(self, cta: Number, pairs: int) -> Dealt:
        """What a CTA has of all pairs, which `pairs` are."""
        assert pairs == self.pairs and pairs % self.together == 0
        ctas = self.ctas

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

    def rank(self, tile: Number, head: Number, block: Number):
        """(how many tiles are added to a block before `tile`, how many before the last
        one)."""
        del head
        first, last = self.tiles_of(block)
        return last - tile, last - first

    def share(self, pairs: int) -> float:
        """As `Ring.share`, of all pairs, which `pairs` are."""
        place = np.arange(pairs * self.tiles)
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
        n: dataclasses.replace(of, together=n).share(pairs)
        for n in range(1, min(limit, pairs) + 1)
        if pairs % n == 0
    }
    together = next(n for n in some if some[n] >= 0.98 * max(some.values()))
    return dataclasses.replace(of, together=together)


def ring_of(
    *,
    tiles: int,
    blocks: int,
    pairs: int,
    group: int,
    ratio: int | None,
    passes: int = 1,
    rings: int | None = None,
    apart: bool = False,
    multiprocessors: int | None = None,
) -> Ring:
    """The ring for `pairs` pairs.

    Args:
      passes: without a mask, the fewest tiles of a pair that a member is to have,
        where that costs nothing: with more, rings are smaller and their members farther
        apart.
      rings: how many; None: as many as run at the same time.
      apart: as `Ring.apart`, where there are short tiles.
      multiprocessors: None: `MULTIPROCESSORS`.

    Raises:
      ValueError: a causal ring that does not fit the card (`causal_fits`).
    """
    multiprocessors = multiprocessors or MULTIPROCESSORS
    if ratio is not None:
        if not causal_fits(tiles, multiprocessors):
            raise ValueError(f"{tiles} tiles on {multiprocessors} multiprocessors")
        size = -(-tiles // 2)
    else:

        def cost(passes: int) -> int:
            size = -(-tiles // passes)
            if size > multiprocessors:
                return pairs * tiles + 1
            return -(-pairs // (multiprocessors // size)) * passes

        # Among those that cost the same the largest ring, but for `passes`.
        best = min(range(1, tiles + 1), key=lambda n: (cost(n), n < passes, n))
        size = -(-tiles // best)
    fitting = multiprocessors // size
    count = min(pairs, fitting if rings is None else rings)
    apart = apart and ratio is not None and tiles > 1
    return Ring(tiles, blocks, group, ratio, size, count, apart)


def causal_fits(tiles: int, multiprocessors: int | None = None) -> bool:
    """True if a ring with two tiles a member can run at the same time."""
    return -(-tiles // 2) <= (multiprocessors or MULTIPROCESSORS)
