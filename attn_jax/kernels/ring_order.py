"""Which CTA of Hopper's fused backward kernel has which tiles; the order of additions.

CTAs that share a (batch, key head) pair are a *ring*; rings with successive numbers
take one pair after the other. Tiles of keys are dealt to the members of a ring; each
member goes over the blocks of queries that see its tile, for one query head of the
group after the other, and at every *step* adds a tile to dQ's block. Under a local
window there are no rings: `sliding_order` says how it is there.

Under a causal mask who has a long tile has a short one, too: first it goes up the long
one from its diagonal, then down the short one to its. If those are tiles c and n - c of
n, nobody has more steps than tile 0, which is alone. For an odd n that is a ring of
(n + 1) / 2 members. For an even n it takes n + 1 for two pairs, a *double ring*, whose
middle member has tile n / 2 of both; a ring of n / 2 members has c and n - 1 - c, which
is a block or two longer. First rings take pairs, then double rings the others, as many
as takes the least time.

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

In a double ring (a) and (b) are steps of either pair. One member has steps of both: its
tile of the first ends at the time at which that of the second begins, so times order
all of them. A double ring begins when its CTAs are done with rings, which wait for no
double ring. A grid that has any has no more CTAs than the card has multiprocessors, so
that all come to run.

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
from collections.abc import Callable
from typing import NamedTuple

from attn_jax.kernels import architecture
from attn_jax.kernels.integers import (
    Number,
    ceil_div,
    div,
    least,
    most,
    pick,
    rem,
)


class Dealt(NamedTuple):
    """What a CTA has: `items` of them, and `item(number)` is (pair, tile, first block,
    from a block to the next, number of blocks of a query head)."""

    items: Number
    item: Callable[[Number], tuple[Number, Number, Number, Number, Number]]


@dataclasses.dataclass(frozen=True)
class Ring:
    """How the tiles of a pair are dealt to the members of a ring, or of two pairs to
    those of a double ring.

    Attributes:
      tiles: of keys, in a pair.
      blocks: of queries, in a query head.
      pairs: (batch, key head).
      group: query heads of a pair.
      ratio: under a causal mask block i sees the tiles 0 ... i // ratio; None: no mask.
      size: members of a ring.
      count: rings.
      apart: under a causal mask long and short tiles are added to sums of their own
        (`part`): where they meet, neither waits for the other.
      single_pairs: the first so many pairs are taken by rings, the others by double
        rings.
      double_rings: how many.
    """

    tiles: Number
    blocks: Number
    pairs: int
    group: int
    ratio: int | None
    size: Number
    count: Number
    apart: bool
    single_pairs: int
    double_rings: int = 0

    @property
    def long_tiles(self) -> int:
        """Under a causal mask: the tiles before this one are long."""
        return -(-self.tiles // 2)

    @property
    def mate(self) -> int:
        """Under a causal mask: who has long tile c has the short one mate - c, too, as
        far as there is one."""
        return self.tiles - 1 + self.tiles % 2

    def part(self, tile: Number) -> Number:
        """Which of the sums of a block a tile is added to."""
        return pick(tile < self.long_tiles, 0, 1) if self.apart else 0

    def passes(self, member: Number) -> Number:
        """How many tiles of a pair a member has.

        Without a mask tiles m, m + size, ...; under a causal mask m (long) and
        mate - m (short). Of an even number of tiles these are together equally long for
        all m; of an odd one the first member has the longest tile alone.
        """
        if self.ratio is None:
            return div(self.tiles - 1 - member, self.size) + 1
        return pick(member == 0, 1, 2) if self.tiles % 2 else 2

    @property
    def ctas(self) -> int:
        return most(self.count * self.size, self.double_rings * (self.tiles + 1))

    @property
    def steps(self) -> int:
        """Of a pair, and of one query head of it."""
        if self.ratio is None:
            return self.blocks * self.tiles
        return sum(self.blocks - self.ratio * tile for tile in range(self.tiles))

    def dealt(self, cta: Number) -> Dealt:
        """What a CTA has."""
        number = div(cta, self.size)
        member = rem(cta, self.size)
        singles = self.single_pairs
        turns = div(singles + self.count - 1 - number, self.count)
        passes = self.passes(member)

        def item(n: Number):
            pair = number + self.count * div(n, passes)
            return pair, *self.item(member, rem(n, passes))

        if not self.double_rings:
            return Dealt(turns * passes, item)
        doubled = self._dealt_by_two(cta)
        before = pick(number < self.count, turns * passes, 0) if singles else 0

        def any_item(n: Number):
            pair, *of_pair = doubled.item(most(n - before, 0))
            then = singles + pair, *of_pair
            if not singles:
                return then
            both = zip(item(n), then, strict=True)
            return tuple(pick(n < before, x, y) for x, y in both)

        return Dealt(before + doubled.items, any_item)

    def _dealt_by_two(self, cta: Number) -> Dealt:
        """What a CTA has of the pairs that double rings take, counted from the first.

        Members 0 ... tiles / 2 - 1 have the first of two pairs, the last as many the
        second: tile m and, but for m = 0, tile tiles - m, where m counts from the first
        of them. The member between has tile tiles / 2 of both, one after the other.
        """
        middle, pairs = self.tiles // 2, self.pairs - self.single_pairs
        number, member = div(cta, self.tiles + 1), rem(cta, self.tiles + 1)
        of_both = member == middle
        second = pick(member > middle, 1, 0)
        tile = member - second * (middle + 1)
        passes = pick(tile == 0, 1, 2)

        def turns(which: Number) -> Number:
            turns = ceil_div(pairs - which - 2 * number, 2 * self.double_rings)
            return pick(number < self.double_rings, turns, 0)

        def item(n: Number):
            turn, index = div(n, passes), rem(n, passes)
            pair = 2 * (number + self.double_rings * turn)
            pair += pick(of_both, index, second)
            of_turn = pick(index == 0, tile, self.tiles - tile)
            return pair, *self._causal(of_turn, index)

        items = pick(of_both, turns(0) + turns(1), turns(second) * passes)
        return Dealt(items, item)

    def share(self) -> float:
        """How much of the time of all multiprocessors goes into tiles, if all steps
        take equally long: below 1 where some have none, or fewer."""
        in_all = architecture.H100_MULTIPROCESSORS * self.longest()
        return self.pairs * self.steps / in_all

    def longest(self) -> int:
        """Steps, for one query head of each pair, of the CTA that has most."""
        # Without a mask the first member of a ring has most, under a causal one all but
        # the first have the same.
        of_single = max(
            sum(int(self.item(member, i)[3]) for i in range(int(self.passes(member))))
            for member in (0, self.size - 1)
        )
        steps = -(-self.single_pairs // self.count) * of_single
        if self.double_rings:
            doubled = self.pairs - self.single_pairs
            steps += -(-doubled // (2 * self.double_rings)) * self.blocks
        return steps

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
        return self._causal(pick(index == 0, member, self.mate - member), index)

    def _causal(self, tile: Number, index: Number):
        """As `item`, of what a member has first (0) or then (1)."""
        assert self.ratio is not None
        blocks = self.blocks - tile * self.ratio
        first = pick(index == 0, self.blocks - blocks, self.blocks - 1)
        return tile, first, 1 - 2 * index, blocks

    def block(self, first: Number, stride: Number, i: Number) -> Number:
        """The i-th block of a tile."""
        if self.ratio is not None:
            return first + stride * i
        block = first + i
        return pick(block >= self.blocks, block - self.blocks, block)

    def rank(self, pair: Number, tile: Number, head: Number, block: Number):
        """(how many tiles are added to a block of the pair's `head` before `tile`, how
        many before the last one); to the tile's part of it."""
        if self.ratio is None:
            return self._rank_full(tile, block)
        return self._rank_causal(pair, tile, head, block)

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

    def _rank_causal(self, pair: Number, tile: Number, head: Number, block: Number):
        """At equal speed tile c is at block s of head h at the time

            long    h * (blocks - ratio * c) + s - ratio * c
            short   group * (blocks - ratio * (mate - c))
                    + h * (blocks - ratio * c) + blocks - 1 - s

        and adds after those that are there earlier; at the same time the long one goes
        first. For one block times of long tiles fall with c, those of short ones rise.
        In a double ring `mate` is `tiles`, and tile tiles / 2 of the first pair goes
        up, as long ones do. It is there before all short ones, so that, apart, it can
        be counted with these.
        """
        ratio, blocks, group = self.ratio, self.blocks, self.group
        assert ratio is not None
        long_tiles, mate = self.long_tiles, self.mate
        last = div(block, ratio)
        if self.apart:
            long_last = least(last, long_tiles - 1)
            is_long = tile < long_tiles
            rank = pick(is_long, long_last - tile, tile - long_tiles)
            return rank, pick(is_long, long_last, last - long_tiles)
        if self.double_rings:
            number = pair - self.single_pairs
            mate = pick(number >= 0, self.tiles, mate)
            is_first = (number >= 0) & (rem(number, 2) == 0)
            long_tiles += pick(is_first, 1, 0)
        long_last = least(last, long_tiles - 1)
        is_long = tile < long_tiles
        long_zero = head * blocks + block  # time of long tile 0
        long_step = (head + 1) * ratio
        short_zero = group * (blocks - ratio * mate)
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
    """The ring for so many pairs.

    Args:
      passes: without a mask, the fewest tiles of a pair that a member is to have,
        where that costs nothing: with more, rings are smaller and their members farther
        apart.
      rings: how many, and no double ones; None: rings and double rings, as takes the
        least time.
      apart: as `Ring.apart`, where there are short tiles.
      multiprocessors: None: an H100's.

    Raises:
      ValueError: a causal ring that does not fit the card (`causal_fits`).
    """
    multiprocessors = multiprocessors or architecture.H100_MULTIPROCESSORS
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
    ring = Ring(
        tiles, blocks, pairs, group, ratio, size, count, apart, single_pairs=pairs
    )
    doubles = multiprocessors // (tiles + 1)
    if ratio is None or tiles % 2 or rings is not None or not doubles:
        return ring
    ways = [ring]
    # As few by double rings as take the least time.
    for turns in range((pairs - 1) // count, -1, -1):
        singles = turns * count
        some = min(doubles, ceil_div(pairs - singles, 2))
        way = dataclasses.replace(ring, single_pairs=singles, double_rings=some)
        ways.append(way)
    return min(ways, key=Ring.longest)


def causal_fits(tiles: int, multiprocessors: int | None = None) -> bool:
    """True if a ring with two tiles a member can run at the same time."""
    return -(-tiles // 2) <= (multiprocessors or architecture.H100_MULTIPROCESSORS)
