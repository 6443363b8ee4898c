"""Lists of blocks against masks built whole: nothing seen is left out or hidden."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.kernels import key_means, visibility
from attn_jax.kernels.visibility import Band
from attn_jax.mask import Mask

B, N, K, T, S = 2, 4, 2, 300, 333
QUERIES, KEYS = 128, 64  # in a tile


def _documents(length: int, *counts: int):
    """A row of ids for each count, in ascending order, of uneven lengths."""
    rng = np.random.default_rng(0)
    rows = (np.sort(rng.integers(0, count, length)) for count in counts)
    return jnp.asarray(np.stack(list(rows)), jnp.int32)


def _patches():
    rng = np.random.default_rng(1)
    return np.kron(rng.random((B, N, 6, 7)) < 0.4, np.ones((50, 48)))[..., :T, :S] > 0


MASKS = {
    "causal": Mask(is_causal=True),
    "window": Mask(window=(40, 10)),
    "offset": Mask(is_causal=True, query_offset=jnp.array([33, -50])),
    "lengths": Mask(
        query_lengths=jnp.array([300, 10]), key_value_lengths=jnp.array([0, 100])
    ),
    "documents": Mask(
        is_causal=True,
        query_segment_ids=_documents(T, 4, 2),
        key_value_segment_ids=_documents(S, 4, 2),
    ),
    "sparse": Mask(
        dense=jnp.asarray(np.random.default_rng(2).random((1, N, T, S)) < 1e-3)
    ),
    "patches": Mask(window=(250, None), dense=jnp.asarray(_patches())),
}


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_lists_hold_what_is_seen(name, by_key, last_first):
    mask = MASKS[name]
    listed = visibility.block_lists(
        visibility.rules(mask, B, T, S),
        Band(*mask.band),
        query_count=T,
        key_count=S,
        query_tile=QUERIES,
        key_tile=KEYS,
        by_key=by_key,
        group=N // K,
        last_first=last_first,
    )
    heads = K if by_key else N
    listed = np.broadcast_to(listed, (B, heads, *listed.shape[2:]))
    seen = np.broadcast_to(mask.materialise(T, S), (B, N, T, S))
    if by_key:
        seen = seen.swapaxes(2, 3).reshape(B, K, N // K, S, T)
    else:
        seen = seen[:, :, None]
    rows, columns = (KEYS, QUERIES) if by_key else (QUERIES, KEYS)
    visits = needed = 0
    for b, n, tile in np.ndindex(listed.shape[:3]):
        count, *entries = listed[b, n, tile]
        blocks = [entry // 2 for entry in entries[:count]]
        assert count >= 1 and blocks == sorted(set(blocks), reverse=last_first)
        whole = {e // 2 for e in entries[:count] if e % 2 == 0}
        visits += count
        for block in range(-(-seen.shape[-1] // columns)):
            pairs = seen[b, n, :, tile * rows : (tile + 1) * rows]
            pairs = pairs[..., block * columns : (block + 1) * columns]
            if pairs.any():
                assert block in blocks
                needed += 1
            if block in whole:
                assert pairs.all()
                assert by_key or pairs.shape[-1] == columns
    tiles = B * heads * listed.shape[2]
    # Visits in vain: tiles that see nothing, and blocks that no rule hides alone.
    assert visits <= needed + tiles, (visits, needed, tiles)


@pytest.mark.parametrize("name", ["window", "offset", "lengths", "documents"])
def test_centre_is_the_mean_of_keys_that_are_seen(name):
    mask = MASKS[name]
    rng = np.random.default_rng(3)
    key = (rng.standard_normal((B, S, K, 8)) + 100).astype(np.float32)
    rows = 64
    rules = visibility.rules(mask, B, T, S)
    centre = key_means.mean_under(jnp.asarray(key), rules, Band(*mask.band), T, rows)
    if name == "documents":
        mask = Mask(
            query_segment_ids=mask.query_segment_ids,
            key_value_segment_ids=mask.key_value_segment_ids,
        )
        rows = 1
    seen = np.broadcast_to(mask.materialise(T, S), (B, 1, T, S))[:, 0]
    assert centre.shape == (B, K, -(-T // rows), 8)
    for b, block in np.ndindex(B, centre.shape[2]):
        keys = seen[b, block * rows : (block + 1) * rows].any(axis=0)
        want = key[b, keys].mean(0, float) if keys.any() else np.zeros((K, 8))
        # Half of the worst case of `_means`, and two roundings of the mean, near 100.
        apart = np.abs(key[b] - key[b, 0]).sum(0) / max(keys.sum(), 1)
        bound = ((2 * np.log2(S) + 6) * apart + 2 * 110) * 2.0**-24
        assert (np.abs(centre[b, :, block] - want) <= bound).all()


def test_a_document_that_comes_back_has_the_centre_of_its_longest_run():
    ids = np.repeat([3, 1, 3, 2, 1], [20, 30, 50, 28, 5])[None]
    key = np.random.default_rng(0).integers(-8, 9, (1, 133, K, 8)).astype(np.float32)
    queries = np.array([[1, 2, 3, 4, -1]])
    mask = Mask(query_segment_ids=queries, key_value_segment_ids=ids)
    rules = visibility.rules(mask, 1, 5, 133)
    centre = key_means.mean_under(jnp.asarray(key), rules, Band(None, None), 5, 64)
    for i, run in enumerate([slice(20, 50), slice(100, 128), slice(50, 100)]):
        # Sums of integers are exact. A quotient below 16 is rounded, and a sum below 8.
        want = key[0, run].mean(0, float)
        atol = (16 + 8) * 2.0**-24
        np.testing.assert_allclose(centre[0, :, i], want, rtol=0, atol=atol)
    assert not np.any(centre[0, :, 3:])  # Which see no key.


def test_more_documents_than_an_eighth_of_the_keys_leave_the_rest_without_a_centre():
    ids = np.arange(64)[None] // 4
    key = np.random.default_rng(0).integers(-8, 9, (1, 64, K, 8)).astype(np.float32)
    mask = Mask(query_segment_ids=ids, key_value_segment_ids=ids)
    rules = visibility.rules(mask, 1, 64, 64)
    centre = key_means.mean_under(jnp.asarray(key), rules, Band(None, None), 64, 64)
    of_documents = key[0].reshape(16, 4, K, 8).mean(1).swapaxes(0, 1)
    # Exact: quarters of integers.
    np.testing.assert_array_equal(centre[0, :, :32:4], of_documents[:, :8])
    assert not np.any(centre[0, :, 32:])


@pytest.mark.parametrize("name", ["lengths", "documents"])
def test_what_lies_past_the_lengths_is_in_no_centre(name):
    lengths = jnp.array([37, 100])
    mask = dataclasses.replace(MASKS[name], key_value_lengths=lengths)
    key = np.random.default_rng(0).standard_normal((B, S, K, 8)).astype(np.float32)
    real = np.arange(S) < np.asarray(lengths)[:, None]
    padded = np.where(real[..., None, None], key, np.float32(1e30))
    clean, found = (
        key_means.mean_under(
            *(jnp.asarray(x), visibility.rules(mask, B, T, S), Band(*mask.band), T, 64)
        )
        for x in (key, padded)
    )
    assert np.any(clean)
    np.testing.assert_array_equal(clean, found)


def test_a_full_or_causal_mask_needs_no_list():
    assert visibility.is_static(Mask()) and visibility.is_static(Mask(is_causal=True))
    assert not any(map(visibility.is_static, list(MASKS.values())[1:]))


def test_lengths_beyond_the_arrays_are_cut():
    mask = Mask(query_lengths=jnp.array([999, -1]), key_value_lengths=jnp.array([7, 9]))
    rules = visibility.rules(mask, 2, 5, 8)
    np.testing.assert_array_equal(rules.spans, [[0, 5, 7], [0, 0, 8]])
    assert jax.tree.leaves(rules)[1:] == []
