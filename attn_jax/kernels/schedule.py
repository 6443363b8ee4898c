"""Which tiles of the output each CTA of a persistent grid works off, in which order.

A grid of one CTA a multiprocessor saves what starting a CTA costs, and its stores
overlap with the next tile; but nothing hands a tile to whoever is idle. So the tiles
are dealt out beforehand, as a scheduler would that knew what each costs: the next one
in the list to the CTA that has had the least. The same shapes get the same schedule,
and which CTA a tile is given to changes no bit of it.
"""

import functools
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.tilings import ForwardTiling, Tiling
from attn_jax.span import Chosen

# What K and V of the heads that run together may take of the L2 cache (50 MB on H100
# and H200).
L2_SHARE = 24 * 2**20


def heads_together(pairs: int, bytes_a_head: int) -> int:
    """How many (batch, head) pairs take turns: as many as keep K and V in `L2_SHARE`.

    A divisor of `pairs`, so that no small group is left over.
    """
    most = max(1, min(pairs, L2_SHARE // max(1, bytes_a_head)))
    return max(size for size in range(1, most + 1) if pairs % size == 0)


# What a tile costs besides its blocks of keys, in blocks: loading Q, storing out.
TILE_COST = 1

# What `then_singly` deals out beforehand.
DEALT = 0.75


class Strips(NamedTuple):
    """A sequence's strips, each the rows of one warpgroup, over the fewest tiles that
    hold them: as many in each as in any other, or one more in the first tiles. So a
    last tile does not run with one warpgroup, which has no other to overlap with.

    Attributes:
      count: strips of the sequence.
      most: strips of a tile, one for each warpgroup.
    """

    count: int
    most: int

    @property
    def tiles(self) -> int:
        return -(-self.count // self.most)

    @property
    def idle(self) -> int:
        """Warpgroups that have no strip, in all tiles."""
        return self.tiles * self.most - self.count

    @property
    def ends(self) -> list[int]:
        """After which strip each tile ends."""
        least, larger = divmod(self.count, self.tiles)
        sizes = [least + (tile < larger) for tile in range(self.tiles)]
        return list(itertools.accumulate(sizes))

    def first(self, tile):
        """A tile's first strip (int32)."""
        least, larger = divmod(self.count, self.tiles)
        return tile * jnp.int32(least) + jnp.minimum(tile, jnp.int32(larger))

    def strip(self, tile, warpgroup):
        """A warpgroup's strip in a tile; if there is none for it, one past the last
        that no other warpgroup has."""
        first, end = self.first(tile), self.first(tile + 1)
        past = self.count + tile * jnp.int32(self.most) - end + warpgroup
        return lax.select(warpgroup < end - first, first + warpgroup, past)


def strips(rows: int, tiling: Tiling, *, whole_tiles: bool) -> Strips:
    """Those of so many rows. `whole_tiles`: all tiles have as many as can be, the last
    one some that are past the end, too."""
    most = tiling.warpgroups
    if whole_tiles:
        return Strips(-(-rows // tiling.tile) * most, most)
    return Strips(-(-rows // tiling.rows), most)


def forward_table(
    pairs: int,
    blocks: Sequence[int],
    bytes_a_head: int,
    *,
    singly: bool,
    chosen: Chosen | None,
    tiling: ForwardTiling,
    ends: bool = False,
) -> jax.Array:
    """The table of `balanced`, or of `then_singly`, on the device. On a card with fewer
    multiprocessors the CTAs that do not fit wait their turn.

    `blocks`: of keys, that each tile sees. Of what is `chosen`: one table of each span;
    how many each tile sees is in a last column, and where another span has more CTAs
    some have no tiles. If that `ends` rows, tiles that see none are dealt, too, and the
    two columns before that one have the first row that sees any and one past the last.
    """
    together, tiles = heads_together(pairs, bytes_a_head), range(len(blocks))

    def deal(costs: Iterable[int]) -> np.ndarray:
        made_by = then_singly if singly else balanced
        return made_by(pairs, tuple(costs), together, H100_MULTIPROCESSORS)

    if chosen is None:
        table = deal(TILE_COST + count for count in blocks)
        # In a program of its own: custom_partitioning takes no function with constants.
        return jax.jit(functools.partial(jnp.asarray, table))()
    tables = []
    for first, queries, keys in chosen.spans:
        seen = range(first // tiling.tile, (first + queries) // tiling.tile)
        cost, least = TILE_COST + keys // tiling.columns, TILE_COST * ends
        tables.append(deal(cost if tile in seen else least for tile in tiles))
    ctas, width = np.max([table.shape for table in tables], axis=0)
    more = 1 + 2 * ends
    filled = np.zeros((len(tables), ctas, width + more), np.int32)
    for into, table, span in zip(filled, tables, chosen.spans, strict=True):
        into[: table.shape[0], : table.shape[1]] = table
        rows = span.first_query, span.first_query + span.queries
        into[:, -more:] = [*rows[: 2 * ends], span.keys // tiling.columns]
    return jnp.asarray(filled)


@functools.lru_cache(maxsize=64)
def balanced(
    pairs: int, costs: Sequence[int], group: int, multiprocessors: int
) -> np.ndarray:
    """int32 [CTAs, 1 + turns + 1]: how many tiles a CTA has, then the tiles.

    A tile is written as `pair * len(costs) + tile`; there is always one column more
    than the most turns, so that a CTA can read one tile ahead. `costs` (a tuple) is
    what each tile of a pair takes; one of 0 is left out. Pairs are taken `group` at a
    time; within a group the dear tiles come first, so that the cheap ones fill the gaps
    at the end.
    """
    order = _order(pairs, costs, group)
    return _table(_dealt(order, min(multiprocessors, len(order))))


@functools.lru_cache(maxsize=64)
def then_singly(
    pairs: int, costs: Sequence[int], group: int, multiprocessors: int
) -> np.ndarray:
    """The same of the first tiles, the share `DEALT` of the work, and a CTA for each of
    the others, which start as multiprocessors come free. Where something else holds
    some of them for a while (NCCL's kernels, which no CTA of ours fits beside), the
    rest do their work; CTAs start in the order of their numbers."""
    order = _order(pairs, costs, group)
    wanted = DEALT * sum(cost for _, cost in order)
    before = itertools.accumulate((cost for _, cost in order), initial=0)
    first = [tile for tile, done in zip(order, before) if done < wanted]
    dealt = _dealt(first, min(multiprocessors, len(first)))
    return _table([*dealt, *([tile] for tile, _ in order[len(first) :])])


def _order(pairs: int, costs: Sequence[int], group: int) -> list[tuple[int, int]]:
    """(number, cost) of all tiles, as they are to be taken."""
    dear_first = sorted(range(len(costs)), key=lambda tile: (-costs[tile], tile))
    return [
        (pair * len(costs) + tile, costs[tile])
        for first in range(0, pairs, group)
        for tile in dear_first
        if costs[tile]
        for pair in range(first, min(first + group, pairs))
    ]


def _dealt(order: Sequence[tuple[int, int]], ctas: int) -> list[list[int]]:
    """Each tile to the CTA that has had the least."""
    tiles: list[list[int]] = [[] for _ in range(ctas)]
    least = [(0, cta) for cta in range(ctas)]
    for tile, cost in order:
        load, cta = least[0]
        tiles[cta].append(tile)
        heapq.heapreplace(least, (load + cost, cta))
    return tiles


def _table(tiles: list[list[int]]) -> np.ndarray:
    most = max(map(len, tiles), default=0)
    table = np.zeros((len(tiles), 2 + most), np.int32)
    for cta, mine in enumerate(tiles):
        table[cta, 0] = len(mine)
        table[cta, 1 : 1 + len(mine)] = mine
    return table
