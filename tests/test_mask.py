"""Mask rules against a direct loop, tile by tile, and as pytree and argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.mask import Mask

B, N, T, S = 2, 3, 10, 12


def arrays():
    rng = np.random.default_rng(0)
    return dict(
        dense=jnp.asarray(rng.random((B, 1, T, S)) < 0.7),
        query_lengths=jnp.array([10, 4], jnp.int32),
        key_value_lengths=jnp.array([5, 12], jnp.int32),
        query_segment_ids=jnp.asarray(rng.integers(0, 2, (B, T)), jnp.int32),
        key_value_segment_ids=jnp.asarray(rng.integers(0, 2, (B, S)), jnp.int32),
        query_offset=jnp.array([3, -2], jnp.int32),
    )


def select(*names):
    return {name: x for name, x in arrays().items() if name in names}


MASKS = {
    "causal": Mask(is_causal=True),
    "window": Mask(window=(2, 1)),
    "left": Mask(window=(3, None)),
    "causal_window": Mask(is_causal=True, window=(4, 2)),
    "dense": Mask(**select("dense")),
    "lengths": Mask(**select("query_lengths", "key_value_lengths")),
    "segments": Mask(**select("query_segment_ids", "key_value_segment_ids")),
    "causal_offset": Mask(is_causal=True, **select("query_offset")),
    "window_offset": Mask(window=(2, 1), **select("query_offset")),
    "all": Mask(is_causal=True, window=(6, 0), **arrays()),
}


def sees(mask: Mask, b, n, i, j) -> bool:
    left, right = mask.window or (None, None)
    p = i if mask.query_offset is None else i + mask.query_offset[b]
    rules = [
        not mask.is_causal or j <= p,
        left is None or j >= p - left,
        right is None or j <= p + right,
        mask.dense is None or mask.dense[b, n % mask.dense.shape[1], i, j],
        mask.query_lengths is None or i < mask.query_lengths[b],
        mask.key_value_lengths is None or j < mask.key_value_lengths[b],
        mask.query_segment_ids is None
        or mask.query_segment_ids[b, i] == mask.key_value_segment_ids[b, j],
    ]
    return all(rules)


def by_hand(mask: Mask):
    mask = jax.tree_util.tree_map(np.asarray, mask)
    return np.array(
        [
            [[[sees(mask, b, n, i, j) for j in range(S)] for i in range(T)]
             for n in range(N)]
            for b in range(B)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_rules_and_tiles(name):
    mask, want = MASKS[name], by_hand(MASKS[name])
    whole = mask.materialise(T, S)
    assert whole.shape[2:] == (T, S)
    np.testing.assert_array_equal(np.broadcast_to(whole, want.shape), want)

    @jax.jit
    def tile(mask, i, j):  # traced starts
        return mask.block(i, j, 5, 4)

    for i in range(0, T, 5):
        for j in range(0, S, 4):
            want_tile = want[:, :, i : i + 5, j : j + 4]
            for got in (tile(mask, i, j), mask.block(i, j, 5, 4, np)):
                np.testing.assert_array_equal(
                    np.broadcast_to(got, want_tile.shape), want_tile
                )


@pytest.mark.parametrize("name", MASKS)
def test_in_numpy_nothing_is_compiled(name):
    """A program for each shape takes longer than what it is for."""
    mask = jax.tree_util.tree_map(np.asarray, MASKS[name])
    whole = mask.materialise(T, S, np)
    assert type(whole) is np.ndarray
    np.testing.assert_array_equal(whole, mask.materialise(T, S))
    if mask.is_interval:
        for x, y in zip(mask.interval(T, S, np), mask.interval(T, S), strict=True):
            assert type(x) is np.ndarray and x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "name",
    ["causal", "window", "left", "causal_window", "lengths", "causal_offset"]
    + ["window_offset"],
)
def test_interval_bounds_exactly_the_visible_keys(name):
    start, stop = MASKS[name].interval(T, S)
    j = np.arange(S)
    inside = (j >= start[..., None]) & (j < stop[..., None])
    want = by_hand(MASKS[name])[:, 0]
    np.testing.assert_array_equal(np.broadcast_to(inside, want.shape), want)


def test_a_tile_never_builds_the_whole_mask():
    mask = Mask(is_causal=True, **select("query_segment_ids", "key_value_segment_ids"))
    jaxpr = jax.make_jaxpr(lambda m: m.block(0, 0, 5, 4))(mask)
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    assert max(sizes) <= B * 5 * 4


def test_no_rule_is_no_mask():
    assert Mask().is_empty and Mask().materialise(T, S) is None
    assert all(not mask.is_empty for mask in MASKS.values())
    alone = Mask(**select("query_offset"))
    assert alone.is_empty and alone.materialise(T, S) is None


def test_is_a_pytree_with_static_rules():
    leaves, treedef = jax.tree_util.tree_flatten(MASKS["all"])
    assert len(leaves) == 6
    again = jax.tree_util.tree_unflatten(treedef, leaves)
    assert (again.is_causal, again.window) == (True, (6, 0))
    # As static structure, two masks with other rules compile separately.
    assert treedef != jax.tree_util.tree_structure(MASKS["dense"])


def test_bad_masks_are_refused():
    with pytest.raises(ValueError, match="given together"):
        Mask(query_segment_ids=jnp.zeros((B, T), jnp.int32))
    with pytest.raises(ValueError, match="at least 0"):
        Mask(window=(-1, 2))
    with pytest.raises(ValueError, match="is_interval|needs a mask"):
        MASKS["dense"].interval(T, S)


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize("window", [3, (2,), (1, 2, 3), (1.5, 2), (-1, 2), [1, 2]])
def test_a_window_that_is_no_pair_is_refused_in_one_line(window):
    with pytest.raises(ValueError, match="window must be") as caught:
        Mask(window=window)
    assert "\n" not in str(caught.value)
