"""The fused backward kernel's order of additions: one for each block, and it ends.

The schedule is run in plain Python, by the functions that the kernel computes it with.
"""

import collections
import dataclasses
import itertools
import random

import numpy as np
import pytest

from attn_jax.kernels.ring_order import Ring, causal_fits, ring_of
from attn_jax.kernels.sliding_order import Sliding, sliding_of

# Blocks of 64 (ratio 2) or 128 queries (1) for tiles of 128 keys.
CAUSAL = [
    (tiles, ratio * tiles - missing, group, ratio)
    for tiles, ratio, group in itertools.product((1, 2, 3, 4, 9, 16), (1, 2), (1, 3))
    # The last tile may be so short that it has one block of 64 queries.
    for missing in range(ratio)
]
FULL = [
    (tiles, blocks, group, None)
    for tiles, group in itertools.product((1, 2, 9, 17), (1, 3))
    for blocks in (1, 5, tiles, 2 * tiles - 1, 2 * tiles)
] + [(33, 65, 2, 2), (150, 20, 1, None)]
# One tile, an even number, as double rings take, an odd one, and several rings.
ALWAYS = {(1, 1), (2, 3), (3, 1), (9, 3)}  # tiles, group
SHAPES = [
    pytest.param(x, marks=[pytest.mark.ci] * ((x[0], x[2]) not in ALWAYS))
    for x in CAUSAL + FULL
]


def rings(tiles, blocks, group, ratio):
    """Some for a shape: as large as may be, on small cards, with smaller rings."""
    shape = {"tiles": tiles, "blocks": blocks, "group": group, "ratio": ratio}
    cases = ((4, 1, 132), (3, 2, 132), (2, 1, 17), (9, 2, 20), (7, 1, tiles + 4))
    for pairs, passes, multiprocessors in cases:
        # With sums apart, or with smaller rings.
        apart = ratio is not None and passes == 2
        if ratio is None or causal_fits(tiles, multiprocessors):
            ring = ring_of(
                pairs=pairs,
                passes=passes,
                apart=apart,
                multiprocessors=multiprocessors,
                **shape,
            )
            yield ring, multiprocessors
            # All by rings, all by double ones, and some by each.
            if ratio is not None and tiles % 2 == 0 and tiles < multiprocessors:
                some = {0, ring.count, pairs}
                some -= {ring.single_pairs} if ring.double_rings else set()
                for singles in some:
                    mixed = dataclasses.replace(
                        ring, single_pairs=singles, double_rings=1
                    )
                    yield mixed, multiprocessors


def steps_of(ring: Ring, cta: int) -> np.ndarray:
    """[(pair, tile, head, block), ...] of a CTA."""
    steps = [np.empty((0, 4), int)]
    dealt = ring.dealt(cta)
    for number in range(int(dealt.items)):
        pair, tile, first, stride, blocks = map(int, dealt.item(number))
        seen = ring.block(first, stride, np.arange(blocks))
        heads = np.repeat(np.arange(ring.group), blocks)
        of_item = 0 * heads + pair, 0 * heads + tile, heads, np.tile(seen, ring.group)
        steps.append(np.stack(of_item, 1))
    return np.concatenate(steps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_are_added_to_each_block_in_one_order(shape):
    tiles, blocks, group, ratio = shape
    for ring, multiprocessors in rings(*shape):
        assert ring.ctas <= multiprocessors
        dealt = [steps_of(ring, cta) for cta in range(ring.ctas)]
        steps = np.concatenate(dealt)
        assert sorted(map(tuple, steps.tolist())) == [
            (pair, tile, head, block)
            for pair, tile, head in itertools.product(
                range(ring.pairs), range(tiles), range(group)
            )
            for block in range(0 if ratio is None else tile * ratio, blocks)
        ]
        assert max(map(len, dealt)) == group * ring.longest()
        pair, tile, head, block = steps.T
        rank, last = ring.rank(pair, tile, head, block)
        head = head + group * (ring.part(tile) + 2 * pair)
        # Of each block: its ranks are 0, 1, ..., and the last one is known.
        order = np.lexsort((rank, block, head))
        counts = np.bincount(head * blocks + block)
        np.testing.assert_array_equal(
            rank[order], np.concatenate([np.arange(n) for n in counts])
        )
        np.testing.assert_array_equal(
            (last + 0 * rank)[order], np.repeat(counts - 1, counts)
        )


def programs_of(ring: Ring) -> list[list[tuple[int, int]]]:
    """(place, rank) of the additions of each CTA."""
    programs = []
    for cta in range(ring.ctas):
        pair, tile, head, block = steps_of(ring, cta).T
        rank, _last = ring.rank(pair, tile, head, block)
        head = head + ring.group * (ring.part(tile) + 2 * pair)
        place = head * ring.blocks + block
        programs.append(list(zip(place.tolist(), rank.tolist(), strict=True)))
    return programs


def run_rings(ring: Ring, room: int, seed: int) -> bool:
    """`run` of all CTAs of rings."""
    return run(programs_of(ring), room, seed)


def run(programs: list[list[tuple[int, int]]], room: int, seed: int) -> bool:
    """Runs all CTAs, `room` at a time, launched in their order, in random interleaving;
    True if all end. A program is the (place, rank) of its additions."""
    chosen = random.Random(seed)
    added = collections.Counter()
    position = [0] * len(programs)
    waiting = collections.deque(range(len(programs)))
    resident: list[int] = []
    while waiting or resident:
        while waiting and len(resident) < room:
            resident.append(waiting.popleft())
        chosen.shuffle(resident)
        went_on = False
        for cta in list(resident):
            program = programs[cta]
            while position[cta] < len(program):
                place, rank = program[position[cta]]
                # Not all that could be done at once is.
                if added[place] < rank or (went_on and chosen.random() < 0.1):
                    break
                added[place] += 1
                position[cta] += 1
                went_on = True
            if position[cta] == len(program):
                resident.remove(cta)
                went_on = True
        if not went_on:
            return False
    return True


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nobody_waits_for_ever(shape):
    """As many CTAs at a time as a card has multiprocessors, or no more than a ring has,
    so that several waves follow on each other. Of a double ring all CTAs are to end
    what rings they are in."""
    for ring, multiprocessors in rings(*shape):
        least = ring.size
        if ring.double_rings:
            least = min(ring.ctas, ring.tiles + 1 + ring.size)
        for room in {multiprocessors, least, least + 1}:
            assert run_rings(ring, room, seed=room)


@pytest.mark.parametrize("shape", CAUSAL, ids=str)
def test_at_equal_speed_nobody_waits(shape):
    """Or only who has fewer steps than others: all end when the CTA with most steps
    would if it were alone. A step takes a unit of time, at whose end it adds; those of
    the same time in the order of their ranks."""
    for ring, _ in rings(*shape):
        programs = programs_of(ring)
        added = collections.Counter()
        position = [0] * len(programs)
        time = 0
        while running := {n for n, p in enumerate(programs) if position[n] < len(p)}:
            moved = set()
            while ready := [
                cta
                for cta in running - moved
                for place, rank in [programs[cta][position[cta]]]
                if added[place] == rank
            ]:
                for cta in ready:
                    added[programs[cta][position[cta]][0]] += 1
                    position[cta] += 1
                moved.update(ready)
            assert moved
            time += 1
        assert time == ring.group * ring.longest()


def test_a_ring_larger_than_the_room_does_wait_for_ever():
    """What `ring_of` rules out: the simulation would see it."""
    ring = ring_of(tiles=8, blocks=8, pairs=1, group=1, ratio=None)
    assert ring.size == 8
    assert not run_rings(ring, room=7, seed=0)


@pytest.mark.parametrize(
    ("tiles", "pairs", "rings", "doubles", "singles", "longest"),
    # (size, count), double rings, pairs not taken by them, steps of who has most
    [
        # Tile 0 alone, 1 with 8, 2 with 7, ...
        (9, 64, (5, 26), 0, 64, 3 * 18),
        # 7 times 33 pairs by rings of 4, and the other 25 by 13 double rings of 9.
        (8, 256, (4, 33), 13, 231, 7 * 18 + 16),
        # All 132 multiprocessors have work, where 8 rings of 16 leave 4 without.
        (32, 64, (16, 8), 4, 0, 8 * 64),
        (128, 16, (64, 2), 1, 0, 8 * 256),
        (2, 264, (1, 132), 0, 264, 2 * 6),
        # A double ring does not fit.
        (140, 4, (70, 1), 0, 4, 4 * 282),
    ],
)
def test_causal_tiles_are_shared_evenly(tiles, pairs, rings, doubles, singles, longest):
    ring = ring_of(tiles=tiles, blocks=2 * tiles, pairs=pairs, group=1, ratio=2)
    assert (ring.size, ring.count) == rings
    assert (ring.double_rings, ring.single_pairs) == (doubles, singles)
    assert ring.longest() == longest
    assert ring.share() == pytest.approx(pairs * tiles * (tiles + 1) / (132 * longest))


@pytest.mark.parametrize(
    ("tiles", "pairs", "passes", "ring"),
    # (size, count): as many CTAs as may be, in the largest ring that is as fast.
    [
        (8, 256, 1, (8, 16)),
        (128, 16, 1, (128, 1)),
        (128, 16, 2, (64, 2)),
        (33, 128, 1, (33, 4)),
        (256, 8, 1, (128, 1)),
        (137, 64, 1, (6, 22)),
        (3, 4, 1, (3, 4)),
    ],
)
def test_ring_without_a_mask(tiles, pairs, passes, ring):
    found = ring_of(
        tiles=tiles, blocks=tiles, pairs=pairs, group=1, ratio=None, passes=passes
    )
    assert (found.size, found.count) == ring


def test_more_rings_than_fit_can_be_had():
    ring = ring_of(tiles=8, blocks=8, pairs=256, group=1, ratio=1, rings=256)
    assert ring.size * ring.count > 132
    assert run_rings(ring, 132, 0)


WINDOWS = [
    # (length, left, right, queries, pairs, group, multiprocessors)
    (1024, 255, 0, 64, 2, 1, 132),
    (1000, 100, 0, 128, 3, 2, 7),
    (1090, 0, 0, 64, 2, 3, 5),
    (1090, 127, 128, 64, 2, 1, 4),
    (530, 40, 700, 128, 4, 2, 3),
    (700, 5000, 3, 64, 1, 1, 132),
    (1, 3, 3, 128, 2, 1, 132),
    (129, 1, 0, 64, 1, 2, 1),
    # Several pairs at a time.
    (1200, 800, 0, 64, 8, 1, 17),
]


def _window(length, left, right, queries, pairs, group, multiprocessors) -> Sliding:
    return sliding_of(
        length=length,
        left=left,
        right=right,
        queries=queries,
        keys=128,
        pairs=pairs,
        group=group,
        multiprocessors=multiprocessors,
    )


def _window_steps(order: Sliding, cta: int):
    """[(pair, tile, head, block), ...] of a CTA."""
    dealt = order.dealt(cta)
    for n in range(int(dealt.items)):
        pair, tile, first, stride, blocks = map(int, dealt.item(n))
        for head in range(order.group):
            for i in range(blocks):
                yield pair, tile, head, order.block(first, stride, i)


@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_under_a_window_tiles_meet_the_blocks_that_see_them(shape):
    """Each tile and block of which some pair is seen, once, in one order for a block;
    and what is not seen of them is known to be partial."""
    order = _window(*shape)
    length, left, right, queries, pairs, group, multiprocessors = shape
    assert order.ctas <= multiprocessors
    i, j = np.arange(length)[:, None], np.arange(length)
    seen = np.pad(
        (j >= i - left) & (j <= i + right),
        [(0, -length % queries), (0, -length % 128)],
    )
    tiles = seen.reshape(seen.shape[0] // queries, queries, -1, 128)
    steps = [step for cta in range(order.ctas) for step in _window_steps(order, cta)]
    assert sorted(steps) == [
        (pair, tile, head, block)
        for pair in range(pairs)
        for tile in range(tiles.shape[2])
        for head in range(group)
        for block in range(tiles.shape[0])
        if tiles[block, :, tile].any()
    ]
    for block in range(tiles.shape[0]):
        of_block = np.flatnonzero(tiles[block].any(axis=(0, 2)))
        ranks = [order.rank(0, tile, 0, block) for tile in of_block[::-1]]
        assert ranks == [(n, len(ranks) - 1) for n in range(len(ranks))]
        for tile in of_block:
            rows = slice(0, length - block * queries)
            hidden = not tiles[block, rows, tile].all()
            # A key past the end that no real query could see need not be hidden.
            assert order.is_partial(tile, block) or not hidden


@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_under_a_window_nobody_waits_for_ever(shape):
    order = _window(*shape)
    programs = []
    blocks = -(-order.length // order.queries)
    for cta in range(order.ctas):
        places = []
        for pair, tile, head, block in _window_steps(order, cta):
            place = (pair * order.group + head) * blocks + block
            places.append((place, order.rank(pair, tile, head, block)[0]))
        programs.append(places)
    assert run(programs, room=order.multiprocessors, seed=1)


def test_under_a_window_ctas_share_the_short_tiles():
    """Half of the tiles are seen by all 4096 queries of a window, the others by fewer;
    each pair's tiles in turn would leave a quarter of the card without work."""
    mistral = (8192, 4095, 0, 64, 8, 4, 132)
    order = _window(*mistral)
    assert order.share() > 0.95
    assert dataclasses.replace(order, together=1).share() < 0.75
    steps = [len(list(_window_steps(order, cta))) for cta in range(order.ctas)]
    assert order.share() == pytest.approx(sum(steps) / (132 * max(steps)))
    # Where that costs nothing they stay one after the other.
    assert _window(4096, 1023, 0, 128, 128, 1, 132).together == 1
