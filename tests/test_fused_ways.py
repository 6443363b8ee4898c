"""What the one-pass backward kernel goes over where a device alone knows that."""

import itertools

import jax.numpy as jnp
import pytest

from attn_jax.kernels import tuning
from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.hopper_fused_work import KEY_TILE, Shapes, Work, picked, ways_of
from attn_jax.span import Chosen, Span

QUERIES = 128
SHAPES = Shapes(
    batch=2, query_count=1024, key_count=512, query_heads=4, key_heads=2, head_dim=64
)
SPANS = Span(512, 512, 512), Span(0, 0, 0), Span(0, 1024, 256)


def _ways():
    plan = tuning.fused(64, 512, is_causal=False)
    chosen = Chosen(SPANS, jnp.arange(3), jnp.int32(0))
    return ways_of(SHAPES, plan, chosen, is_causal=False, window=None)


@pytest.mark.parametrize("number", range(len(SPANS)))
def test_a_way_that_is_picked_goes_over_its_span_once(number):
    """Each of its pairs of a tile and a block, and the tiles of a block in an order."""
    span, ways = SPANS[number], _ways()
    way = picked(ways, (jnp.asarray([9, number, 9]), jnp.asarray([1])))
    assert (int(way.queries), int(way.keys)) == (span.queries, span.keys)
    assert int(way.shapes.first_query) == span.first_query
    # Semaphores are counted by all blocks that there are.
    assert way.shapes.blocks == SHAPES.query_count // QUERIES
    assert 0 <= int(way.ctas) <= max(x.ctas for x in ways) <= H100_MULTIPROCESSORS
    met, ranks = [], {}
    for cta in range(int(way.ctas)):
        work = Work.of(jnp.int32(cta), way.shapes, way.ring)
        for n in range(int(work.items)):
            item = work.item(jnp.int32(n))
            for turn in range(int(item.steps)):
                head, index, block = work.block_of(item, jnp.int32(turn))
                place = *map(int, (item.b, head, block)), int(item.tile)
                met.append(place)
                pair = item.b * way.shapes.key_parts + item.key_part
                rank, last = way.ring.rank(pair, item.tile, index, block)
                assert int(last) == span.keys // KEY_TILE - 1
                ranks.setdefault(place[:3], []).append(int(rank))
    blocks, tiles = span.queries // QUERIES, span.keys // KEY_TILE
    wanted = itertools.product(range(2), range(4), range(blocks), range(tiles))
    assert sorted(met) == list(wanted)
    assert all(sorted(found) == list(range(tiles)) for found in ranks.values())
