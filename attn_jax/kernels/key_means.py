"""Means of the keys that rows see: the centres that dQ's cure subtracts in two kernels.

Made by XLA before the kernel, of additions in an order of ours (`attn_jax.pairwise`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from attn_jax.kernels.tilings import Tiling
from attn_jax.kernels.visibility import KEY_LENGTH, Band, Rules, interval, patches
from attn_jax.pairwise import pairwise_cumsum, pairwise_mean, pairwise_sum


def mean(
    key: Float[Array, "B S K H"], is_causal: bool, tiling: Tiling, query_count: int
) -> Float32[Array, "B K C H"]:
    """Mean of the keys that a row sees, in FP32: the centre that dQ's cure subtracts.

    One for all rows (C = 1) or, with a causal mask, one for every `tiling.rows`:
    the mean over the keys up to the last of them.
    """
    wide = key.astype(jnp.float32)
    if not is_causal:
        return pairwise_mean(wide, 1)[:, :, None]
    batch, key_count, heads, head_dim = key.shape
    rows = tiling.rows
    count = -(-query_count // tiling.tile) * tiling.warpgroups
    wide = wide[:, : count * rows]
    wide = jnp.pad(wide, ((0, 0), (0, count * rows - wide.shape[1]), (0, 0), (0, 0)))
    sums = pairwise_sum(wide.reshape(batch, count, rows, heads, head_dim), 2)
    sums = pairwise_cumsum(sums, 1)
    seen = jnp.minimum((jnp.arange(count) + 1) * rows, key_count).astype(jnp.float32)
    return (sums / seen[:, None, None]).swapaxes(1, 2)


def mean_under(
    key: Float[Array, "B S K H"],
    rules: Rules,
    band: Band,
    query_count: int,
    rows: int,
) -> Float32[Array, "B K C H"]:
    """Mean of keys that a row sees, in FP32: the centre that dQ's cure subtracts.

    With ids one for each query (C = T), over the longest run of keys of its id that
    follow each other (`_Runs`); otherwise one for every `rows` queries, over the
    keys that band and spans show to any of them. Zero where there are none.
    """
    if rules.query_ids is not None:
        assert rules.key_ids is not None
        runs = _Runs.of(rules.key_ids, rules.spans[:, KEY_LENGTH])
        of_runs = _means(key, runs.edges[:, :-1], runs.edges[:, 1:])
        run, found = runs.of_queries(rules.query_ids)
        centre = jnp.take_along_axis(of_runs, run[..., None, None], axis=1)
        centre = jnp.where(found[..., None, None], centre, 0.0)
    else:
        low, high = interval(rules, band, query_count, key.shape[1])
        real = low < high
        low = patches(jnp.where(real, low, key.shape[1]), rows, key.shape[1]).min(-1)
        high = patches(jnp.where(real, high, 0), rows, 0).max(-1)
        centre = _means(key, jnp.minimum(low, high), high)
    return centre.swapaxes(1, 2)


class _Runs(NamedTuple):
    """The first S / 8 runs of keys with the same id: run r is the keys edges[r] ...
    edges[r + 1] - 1, none if those are the same.

    A packed sequence has a run for each document. Those of shorter documents than eight
    keys on average, and of ids that come back, are too many, and queries whose id is in
    none of the first get no centre: what the kernel then computes is right, and rounds
    as it does without the cure. An array of S / 8 rows costs next to nothing, one of S
    as much as the kernel's own.
    """

    edges: Int32[Array, "B runs+1"]
    ids: Int32[Array, "B runs"]

    @classmethod
    def of(cls, ids: Int32[Array, "B S"], length: Int32[Array, " B"]) -> "_Runs":
        count = -(-ids.shape[1] // 8)
        changes = ids[:, 1:] != ids[:, :-1]
        number = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
        wanted = jnp.arange(count + 1, dtype=jnp.int32)
        edges = jax.vmap(lambda x: _first_at_least(x, wanted))(number)
        first = jnp.minimum(edges[:, :-1], ids.shape[1] - 1)
        of_runs = jnp.take_along_axis(ids, first, axis=1)
        return cls(jnp.minimum(edges, length[:, None]), of_runs)

    def of_queries(self, ids: Int32[Array, "B T"]) -> tuple[Array, Array]:
        """Longest run of each query's id, and whether there is one."""
        lengths = self.edges[:, 1:] - self.edges[:, :-1]
        number = jnp.broadcast_to(jnp.arange(lengths.shape[1]), lengths.shape)
        empty = lengths == 0
        # Empty ones last, whatever their id; of one id the longest first.
        order = empty, self.ids, -lengths, number.astype(jnp.int32)
        empty, sorted_ids, _, number = jax.lax.sort(order, num_keys=3)
        last = jnp.iinfo(jnp.int32).max
        sorted_ids = jnp.where(empty, last, sorted_ids)
        place = jax.vmap(_first_at_least)(sorted_ids, ids)
        place = jnp.minimum(place, lengths.shape[1] - 1)
        found = jnp.take_along_axis(sorted_ids, place, axis=1) == ids
        found &= ~jnp.take_along_axis(empty, place, axis=1)
        return jnp.take_along_axis(number, place, axis=1), found


def _first_at_least(ascending: Int32[Array, " n"], x: Int32[Array, " m"]):
    """Where the entries begin that are x or more; n if there are none. Steps are
    written out: a loop is two kernels a step."""
    found = jnp.searchsorted(ascending, x, method="scan_unrolled")
    return found.astype(jnp.int32)


def _means(
    key: Float[Array, "B S K H"], low: Int32[Array, "B C"], high: Int32[Array, "B C"]
) -> Float32[Array, "B C K H"]:
    """Means of the keys low ... high - 1 in FP32, zero where there are none.

    Differences of running sums, at multiples of 16 keys, and of those up to 15 that are
    left over. Sums lose digits where keys have a mean, so the first key is taken out of
    all before, and added at the end. Each of the two sums has at most 2 log2(S) - 2
    roundings on the way of a term, so that their difference over the number of keys is
    off by at most 4 log2(S) u times the sum of |K_j - K_0| up to `high`, over that
    number (u = 2^-24), and the result by its own rounding besides.
    """
    step = 16
    batch, key_count, *heads = key.shape
    shift = key[:, :1].astype(jnp.float32)
    groups = jnp.pad(key, ((0, 0), (0, -key_count % step), (0, 0), (0, 0)))
    groups = groups.reshape(batch, -1, step, *heads)
    apart = groups.astype(jnp.float32) - shift[:, :, None]
    sums = pairwise_cumsum(pairwise_sum(apart, 2), 1)
    sums = jnp.pad(sums, ((0, 0), (1, 0), (0, 0), (0, 0)))
    edges = jnp.concatenate([low, high], axis=1)
    group = jnp.minimum(edges // step, groups.shape[1] - 1)
    left = (edges - step * group)[..., None, None, None]
    of_edges = jnp.take_along_axis(groups, group[..., None, None, None], axis=1)
    rest = of_edges.astype(jnp.float32) - shift[:, :, None]
    rest = jnp.where(jnp.arange(step)[:, None, None] < left, rest, 0.0)
    before = jnp.take_along_axis(sums, group[..., None, None], axis=1)
    bottom, top = jnp.split(before + pairwise_sum(rest, 2), 2, axis=1)
    count = (high - low)[..., None, None]
    return jnp.where(count > 0, (top - bottom) / jnp.maximum(count, 1) + shift, 0.0)
