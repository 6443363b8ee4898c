"""Which blocks a warpgroup of the one-pass backward kernel multiplies with its keys."""

from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.kernels import architecture
from attn_jax.kernels.hopper_fused_work import (
    KEY_TILE,
    KEYS,
    QUERIES,
    WARPGROUPS,
    Item,
    Shapes,
    Work,
)
from attn_jax.kernels.tilings import Plan
from attn_jax.kernels.visibility import Band

LENGTHS = 1, 64, 65, 128, 200, 257, 320, 512, 640
# None: a causal mask.
WINDOWS = [None, Band(0, 0), Band(30, 0), Band(64, 63), Band(127, 128), Band(9, 300)]


def _visible(length: int, window: Band | None) -> np.ndarray:
    i, j = np.arange(length)[:, None], np.arange(length)
    if window is None:
        return j <= i
    assert window.left is not None and window.right is not None
    return (j >= i - window.left) & (j <= i + window.right)


@pytest.mark.parametrize("multiprocessors", [7, 132])
@pytest.mark.parametrize("head_dim", QUERIES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_warpgroup_takes_the_blocks_that_see_its_keys(
    window, head_dim, multiprocessors
):
    """Those, and no others; and a causal mask hides nothing of them but of the one that
    is said to be on the diagonal."""
    is_causal = window is None
    for length in LENGTHS:
        shapes = Shapes(1, length, length, 3, 3, head_dim)
        with patch.object(architecture, "H100_MULTIPROCESSORS", multiprocessors):
            ring = shapes.ring(Plan(), is_causal=is_causal, window=window)
        work = Work.of(jnp.int32(0), shapes, ring)
        all_dealt = [ring.dealt(cta) for cta in range(ring.ctas)]
        items = [dealt.item(n) for dealt in all_dealt for n in range(int(dealt.items))]
        nothing = jnp.zeros(len(items), jnp.int32)
        _pair, *fields = map(jnp.int32, zip(*items, strict=True))
        item = Item(nothing, nothing, nothing, *fields, nothing)
        visible = _visible(length, window)
        for warpgroup in range(WARPGROUPS):
            found = work.seen(item, jnp.int32(warpgroup))
            diagonals = work.diagonal(item, *found) if is_causal else nothing
            rows = zip(items, *map(np.asarray, (*found, diagonals)), strict=True)
            for (_, tile, first, stride, blocks), begin, end, diagonal in rows:
                key = int(tile) * KEY_TILE + warpgroup * KEYS
                for i in range(int(blocks)):
                    query = int(ring.block(first, stride, i)) * shapes.queries
                    seen = visible[query : query + shapes.queries, key : key + KEYS]
                    assert (begin <= i < end) == seen.any()
                    if is_causal and begin <= i < end and i != diagonal:
                        assert seen.all()
