"""What a shard's queries see of a shard's keys: found before anything is compiled.

A shard is one run of positions, or two (`layouts`). Between a run of queries a + s i
and one of keys b + s j a causal mask and a window hide all pairs, none, or all but a
band

    low <= j - i <= high,

which is the same rule for the numbers i and j as for the positions, with the queries
moved along by `high` (or `low`). So a block-level attention takes the plain `Mask` of a
run, with a `query_offset`, whatever the layout, and hidden pairs of runs are no call.
"""

import functools
from typing import NamedTuple

import numpy as np

from attn_jax.context_parallel.layouts import Layout, Run, shard_runs
from attn_jax.span import Span


class Call(NamedTuple):
    """Attention of some local queries over some keys of a source, compiled in.

    Attributes:
      query, key: (first entry, number of entries) of the two shards.
      is_causal, window: the rules of a `Mask` for the two.
      shifted: whether that mask has a query_offset, which differs between shards.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    shifted: bool = False


class Schedule(NamedTuple):
    """All meetings of W shards.

    Attributes:
      plans: what meetings come to; () is one where everything is hidden.
      plan: which of them the meeting of shard r's queries and shard c's keys is [r, c].
      offset: the query_offset of each of its calls [r, c, call]; 0 where there is none.
    """

    plans: tuple[tuple[Call, ...], ...]
    plan: np.ndarray
    offset: np.ndarray

    def at_hop(self, hop: int) -> np.ndarray:
        """Plans of r's queries and the keys of r - hop, for r = 0, ..., W - 1."""
        ranks = np.arange(len(self.plan))
        return self.plan[ranks, (ranks - hop) % len(ranks)]

    def spans(self, hop: int) -> tuple[tuple[Span, ...], np.ndarray] | None:
        """The distinct plans of a hop and which of them shard r has, if each comes to
        keys from the first on that no mask hides from some queries."""
        numbers = self.at_hop(hop)
        used, which = np.unique(numbers, return_inverse=True)
        spans = []
        for plan in (self.plans[number] for number in used):
            call = plan[0] if plan else Call((0, 0), (0, 0))
            hides = call.is_causal or call.window is not None
            if len(plan) > 1 or hides or call.key[0] > 0:
                return None
            spans.append(Span(call.query[0], call.query[1], call.key[1]))
        return tuple(spans), which.astype(np.int32)

    def live_hops(self, hops: range) -> list[int]:
        """Those at which any shard sees anything."""
        return [
            hop
            for hop in hops
            if any(self.plans[number] for number in set(self.at_hop(hop)))
        ]


@functools.lru_cache(maxsize=64)
def schedule(
    layout: Layout,
    shards: int,
    query_length: int,
    key_length: int,
    band: tuple[int | None, int | None],
) -> Schedule:
    """For whole lengths T and S; `band` is that of `Mask.band`, in positions."""
    numbers: dict[tuple[Call, ...], int] = {}
    plan = np.zeros((shards, shards), np.int32)
    offsets = {}
    for rank in range(shards):
        queries = shard_runs(query_length, shards, layout, rank)
        for source in range(shards):
            keys = shard_runs(key_length, shards, layout, source)
            calls, shifts = _meeting(queries, keys, band)
            plan[rank, source] = numbers.setdefault(calls, len(numbers))
            offsets[rank, source] = shifts
    most = max(map(len, offsets.values()))
    offset = np.zeros((shards, shards, most), np.int32)
    for at, shifts in offsets.items():
        offset[at][: len(shifts)] = shifts
    return Schedule(tuple(numbers), plan, offset)


@functools.lru_cache(maxsize=64)
def gathered(
    layout: Layout,
    shards: int,
    query_length: int,
    key_length: int,
    band: tuple[int | None, int | None],
) -> Schedule | None:
    """Each shard's queries and all keys in their order, as the only source.

    One plan for all shards. None if no `Mask` says what the queries see: where they
    are no neighbours, and not everything is seen.
    """
    local, alone = query_length // shards, np.zeros((shards, 1), np.int32)
    if band == (None, None):
        plan = (Call((0, local), (0, key_length)),)
        return Schedule((plan,), alone, alone[..., None])
    if layout == "striped":
        return None
    # The rules are those of positions; a run's first one is its queries' offset. (A
    # window may have no negative right side, a causal mask ends at 0.)
    left, right = band
    causal = right == 0
    window = None if causal and left is None else (left, None if causal else right)
    of_shards = [shard_runs(query_length, shards, layout, r) for r in range(shards)]
    plan = tuple(
        Call(
            (run.first, run.size),
            (0, key_length),
            is_causal=causal,
            window=window,
            shifted=True,
        )
        for run in of_shards[0]
    )
    offset = [[[run.start for run in runs]] for runs in of_shards]
    return Schedule((plan,), alone, np.asarray(offset, np.int32))


def _meeting(
    queries: tuple[Run, ...],
    keys: tuple[Run, ...],
    band: tuple[int | None, int | None],
) -> tuple[tuple[Call, ...], tuple[int, ...]]:
    if queries == keys and band == (None, 0):
        # Positions grow within a shard, so its own causal mask is that of its entries.
        whole = 0, sum(run.size for run in queries)
        return (Call(whole, whole, is_causal=True),), (0,)
    found = [_pair(q, k, band) for q in queries for k in keys]
    calls = _joined([pair for pair in found if pair is not None])
    return tuple(call for call, _ in calls), tuple(shift for _, shift in calls)


def _pair(
    q: Run, k: Run, band: tuple[int | None, int | None]
) -> tuple[Call, int] | None:
    """The call of two runs and its offset; None where everything is hidden."""
    left, right = band
    ahead = q.start - k.start
    # Rounded to what is inside: s (j - i) <= ahead + right, >= ahead - left.
    high = None if right is None else (ahead + right) // q.stride
    low = None if left is None else -((left - ahead) // q.stride)
    least, most = -(q.size - 1), k.size - 1  # of j - i
    # A side that hides nothing is left open, so that other shards' calls are the same.
    low = None if low is None or low <= least else low
    high = None if high is None or high >= most else high
    if max(x for x in (low, least) if x is not None) > min(
        x for x in (high, most) if x is not None
    ):
        return None
    call = Call((q.first, q.size), (k.first, k.size))
    if high is not None:
        window = None if low is None else (high - low, None)
        return call._replace(is_causal=True, window=window, shifted=high != 0), high
    if low is not None:
        return call._replace(window=(0, None), shifted=low != 0), low
    return call, 0


def _joined(calls: list[tuple[Call, int]]) -> list[tuple[Call, int]]:
    """Calls without a mask on neighbouring runs made one."""
    for one in range(len(calls)):
        for other in range(one + 1, len(calls)):
            joined = _join(calls[one][0], calls[other][0])
            if joined is not None:
                rest = calls[:one] + calls[one + 1 : other] + calls[other + 1 :]
                return _joined([*rest, (joined, 0)])
    return calls


def _join(one: Call, other: Call) -> Call | None:
    if any(call.is_causal or call.window is not None for call in (one, other)):
        return None
    if one.key == other.key and sum(one.query) == other.query[0]:
        return one._replace(query=(one.query[0], one.query[1] + other.query[1]))
    if one.query == other.query and sum(one.key) == other.key[0]:
        return one._replace(key=(one.key[0], one.key[1] + other.key[1]))
    return None
