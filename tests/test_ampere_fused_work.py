"""Which CTA of Ampere's one-pass backward kernel has which tile, or part of one."""

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.kernels.ampere_fused_work import Deal, deal

DEALS = [
    *(Deal(1, 1, 1, 1), Deal(7, 3, 21, 1), Deal(200, 2, 400, 1), Deal(3, 300, 900, 1)),
    *(Deal(1, 1, 0, 5), Deal(7, 3, 11, 2), Deal(200, 2, 264, 3), Deal(3, 300, 792, 4)),
]


@pytest.mark.parametrize("dealt", DEALS, ids=str)
@pytest.mark.parametrize("steps", [5, 16])
def test_every_block_of_every_tile_is_dealt_once(dealt, steps):
    pair, tile, share = dealt.of(jnp.arange(dealt.ctas))
    first, count = dealt.turns(jnp.full(dealt.ctas, steps), share)
    assert (count > 0).all()
    first = np.broadcast_to(first, dealt.ctas)
    found = sorted(
        (int(p), int(t), block)
        for p, t, start, n in zip(pair, tile, first, count, strict=True)
        for block in range(start, start + n)
    )
    assert found == [
        (p, t, block)
        for p in range(dealt.pairs)
        for t in range(dealt.key_tiles)
        for block in range(steps)
    ]
    if share is None:
        assert dealt.whole == dealt.ctas
        return
    # One CTA of each tile leaves it, the last one launched, and knows of the others.
    leaves = np.flatnonzero(share.part == dealt.parts - 1)
    assert len(leaves) == dealt.pairs * dealt.key_tiles
    for cta in leaves:
        number = int(share.number[cta])
        assert (number < 0) == (cta < dealt.whole)
        if number >= 0:
            mates = slice(cta - dealt.parts + 1, cta + 1)
            assert share.number[mates].tolist() == [number] * dealt.parts
            assert share.part[mates].tolist() == list(range(dealt.parts))


@pytest.mark.parametrize("dealt", DEALS, ids=str)
def test_of_pairs_that_are_dealt_together_the_longest_tiles_come_first(dealt):
    pair, tile, _ = map(np.asarray, dealt.of(jnp.arange(dealt.ctas)))
    for start in range(0, dealt.pairs, dealt.together):
        where = np.flatnonzero((pair >= start) & (pair < start + dealt.together))
        assert (np.diff(where) == 1).all()
        assert (np.diff(tile[where]) >= 0).all()


@pytest.mark.parametrize(
    ("multiprocessors", "steps", "options", "whole", "parts"),
    [
        # 15.5 tiles to each: the last half in fifths, three of which are 0.6.
        (132, 64, {}, 1980, 5),
        (132, 64, {"is_causal": True}, 2048, 1),
        (132, 64, {"side_by_side": 2}, 2048, 1),
        # What a CTA takes besides its blocks is more than would be saved.
        (132, 16, {}, 2048, 1),
        # As many to each.
        (128, 64, {}, 2048, 1),
        # Fewer than multiprocessors.
        (4096, 64, {}, 0, 2),
        (4096, 64, {"side_by_side": 2}, 0, 4),
        (100_000, 1, {}, 2048, 1),
        (100_000, 64, {}, 0, 8),
    ],
)
def test_as_many_tiles_are_cut_as_saves_time(
    multiprocessors, steps, options, whole, parts
):
    options = {"is_causal": False} | options
    dealt = deal(64, 32, steps, multiprocessors, **options)
    assert (dealt.whole, dealt.parts) == (whole, parts)
