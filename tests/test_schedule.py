"""Tiles of a persistent grid: each worked off once, no CTA with far more to do."""

import heapq
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_jax.kernels import schedule
from attn_jax.kernels.tilings import ForwardTiling, Tiling
from attn_jax.span import Chosen, Span

# Pairs, costs of a pair's tiles, pairs taken together, multiprocessors.
PROBLEMS = (
    st.integers(1, 40),
    st.lists(st.integers(1, 50), min_size=1, max_size=30).map(tuple),
    st.integers(1, 40),
    st.integers(1, 140),
)
# What the start of a CTA takes, in blocks of keys.
START = 3


def tiles_of(table: np.ndarray) -> list[list[int]]:
    return [list(row[1 : 1 + row[0]]) for row in table]


@given(*PROBLEMS)
def test_every_tile_once_and_evenly(pairs, costs, group, multiprocessors):
    """The next tile goes to who has least, so nobody ends with more than the mean and
    one tile (Graham 1966)."""
    table = schedule.balanced(pairs, costs, group, multiprocessors)
    tiles = tiles_of(table)
    assert len(tiles) == min(multiprocessors, pairs * len(costs))
    assert sorted(itertools.chain(*tiles)) == list(range(pairs * len(costs)))
    # A CTA reads one tile ahead of its last.
    assert all(len(mine) + 2 <= table.shape[1] for mine in tiles)
    loads = [sum(costs[tile % len(costs)] for tile in mine) for mine in tiles]
    assert max(loads) <= pairs * sum(costs) / len(tiles) + max(costs)


@given(*PROBLEMS)
def test_what_is_not_dealt_comes_singly(pairs, costs, group, multiprocessors):
    table = schedule.then_singly(pairs, costs, group, multiprocessors)
    tiles = tiles_of(table)
    assert sorted(itertools.chain(*tiles)) == list(range(pairs * len(costs)))
    assert all(mine and len(mine) + 2 <= table.shape[1] for mine in tiles)
    loads = [sum(costs[tile % len(costs)] for tile in mine) for mine in tiles]
    dealt, singly = loads[:multiprocessors], tiles[multiprocessors:]
    assert all(len(mine) == 1 for mine in singly)
    if singly:
        assert sum(dealt) >= schedule.DEALT * sum(loads)


@pytest.mark.parametrize("singly", [False, True])
def test_a_chosen_span_is_worked_off_whole(singly):
    """Whichever it is; CTAs that the others need have nothing to do."""
    tiling, pairs, tiles = ForwardTiling(64, 128, 2, 2), 6, 8
    spans = Span(0, 8 * 128, 512), Span(4 * 128, 4 * 128, 1024), Span(0, 0, 0)
    none = jnp.zeros(1, jnp.int32), jnp.int32(0)
    chosen = Chosen(spans, *none)
    assert chosen.fit(tiling.tile, tiling.columns)
    made = [
        schedule.forward_table(
            *(pairs, [8] * tiles, 2**20),
            **dict(singly=singly, chosen=chosen, tiling=tiling, ends=ends),
        )
        for ends in (False, True)
    ]
    for table, span in zip(made[0], spans, strict=True):
        first = span.first_query // 128
        assert sorted(itertools.chain(*tiles_of(np.asarray(table)))) == [
            pair * tiles + tile
            for pair in range(pairs)
            for tile in range(first, first + span.queries // 128)
        ]
        assert set(np.asarray(table[:, -1])) == {span.keys // 128}
    # Where rows end, tiles are dealt that see no keys, too.
    for table, span in zip(made[1], spans, strict=True):
        dealt = sorted(itertools.chain(*tiles_of(np.asarray(table))))
        assert dealt == list(range(pairs * tiles))
        seen = span.first_query, span.first_query + span.queries, span.keys // 128
        assert {*map(tuple, np.asarray(table[:, -3:]))} == {seen}
    for odd in (Span(64, 128, 128), Span(0, 64, 128), Span(0, 128, 64)):
        assert not Chosen((spans[0], odd), *none).fit(tiling.tile, tiling.columns)


@settings(deadline=None)  # JAX takes its time over the first one.
@given(st.integers(1, 40), st.integers(1, 4))
def test_strips_are_spread_over_the_fewest_tiles(count, most):
    strips = schedule.Strips(count, most)
    of_tiles = [
        [int(strips.strip(np.int32(tile), np.int32(w))) for w in range(most)]
        for tile in range(strips.tiles)
    ]
    assert strips.tiles == -(-count // most)
    # Past the end, too, each is somebody's and nobody else's.
    assert sorted(itertools.chain(*of_tiles)) == list(range(strips.tiles * most))
    real = [[strip for strip in mine if strip < count] for mine in of_tiles]
    assert list(itertools.chain(*real)) == list(range(count))
    assert max(map(len, real)) - min(map(len, real)) <= 1
    assert sum(most - len(mine) for mine in real) == strips.idle
    assert strips.ends == [mine[-1] + 1 for mine in real]
    firsts = [int(strips.first(np.int32(tile))) for tile in range(strips.tiles)]
    assert firsts == [mine[0] for mine in real]


def test_whole_tiles_have_no_idle_warpgroup():
    tiling = Tiling(64, 128, 3, 2)
    assert schedule.strips(640, tiling, whole_tiles=False) == (10, 3)
    whole = schedule.strips(640, tiling, whole_tiles=True)
    assert whole == (12, 3) and whole.idle == 0 and whole.ends == [3, 6, 9, 12]


def makespan(table: np.ndarray, costs, held: int, until: int) -> int:
    """Of CTAs that start in order where one is free, some only from a time on."""
    free = [until if number < held else 0 for number in range(132)]
    heapq.heapify(free)
    for mine in tiles_of(table):
        taken = START + sum(costs[tile % len(costs)] for tile in mine)
        heapq.heapreplace(free, free[0] + taken)
    return max(free)


def test_held_multiprocessors_are_made_up_for():
    """A part of a ring: 8192 causal queries of 32 heads, and 16 multiprocessors that
    NCCL holds for a quarter of the time."""
    costs = tuple(1 + tile + 1 for tile in range(64))
    work, held = 32 * sum(costs), 16
    until = work // 132 // 4
    dealt, singly = (
        deal(32, costs, 16, 132) for deal in (schedule.balanced, schedule.then_singly)
    )
    # No multiprocessor is idle before the last CTA starts, which has one tile.
    least = (work + held * until + START * len(singly)) / 132
    assert makespan(singly, costs, held, until) <= least + START + max(costs)
    # One that is held has its whole list left.
    assert makespan(dealt, costs, held, until) > least + START + max(costs)


@pytest.mark.parametrize("length", [1024, 4096, 16384])
def test_causal_tiles_are_balanced(length):
    """16 heads of 128 on 132 multiprocessors, 16 384 tokens, tiles of 128 queries: the
    slowest CTA has at most 2 % more than the mean. (A falling list dealt round and
    round costs a fifth, back and forth a third and more: rounds and groups of heads
    fall in step.)"""
    pairs = 16 * 16384 // length
    costs = tuple(range(2, length // 128 + 2))
    group = schedule.heads_together(pairs, 2 * length * 128 * 2)
    loads = [
        sum(costs[tile % len(costs)] for tile in mine)
        for mine in tiles_of(schedule.balanced(pairs, costs, group, 132))
    ]
    assert max(loads) <= 1.02 * np.mean(loads)


def test_heads_that_run_together_fit_in_the_cache():
    assert schedule.heads_together(48, 2**20) == 24
    assert schedule.heads_together(48, 2**22) == 6
    assert schedule.heads_together(7, 2**22) == 1  # a divisor of 7
    assert schedule.heads_together(48, 2**30) == 1
