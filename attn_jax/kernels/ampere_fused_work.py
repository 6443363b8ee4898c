"""Which tile of keys a CTA of Ampere's one-pass backward kernel has, or which part.

Some (batch, key head) pairs are dealt out together, the first tile of each, then the
second: under a causal mask tiles see fewer queries the later they are, so that the last
CTAs to start have the least to do. Of all pairs at once what they read and add to would
not stay in the L2 cache.

Without a mask all tiles take as long, and while the last of them are made the card is
half idle: 2048 tiles are 15.5 to each of 132 multiprocessors, and take the time of 16.
So the last tiles are cut into parts, of a CTA each, that share the blocks of queries.
How many depends on the card's multiprocessors, and so do the last bits of dK and dV.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Tiles of keys that are dealt out together, about: as many as a card has places for.
TILES_TOGETHER = 128
# What a CTA takes besides its blocks, in blocks: 9 us of 4.1 at head dim 128, by the
# times of `results/prototypes/ampere_patches.csv`. Of a part it is an estimate: some 3
# us more for tiles of dK and dV that are written, or read, in FP32.
BESIDES = 2.2
BESIDES_OF_PART = 3.0
MOST_PARTS = 8
# Of all time, what cutting tiles must save.
LEAST_SAVED = 0.01


class Share(NamedTuple):
    """Of a tile that is cut: `number` among those, `part`. A tile that one CTA has to
    itself has a number below 0, and the last part."""

    number: jax.Array
    part: jax.Array


@dataclasses.dataclass(frozen=True)
class Deal:
    """Of `key_tiles` of each of `pairs`: the first `whole` are a CTA's each, the others
    those of `parts` CTAs each."""

    pairs: int
    key_tiles: int
    whole: int
    parts: int

    @property
    def cut(self) -> int:
        """How many tiles are shared."""
        return self.pairs * self.key_tiles - self.whole

    @property
    def ctas(self) -> int:
        return self.whole + self.cut * self.parts

    @property
    def together(self) -> int:
        """How many pairs' tiles are dealt out together."""
        return max(1, TILES_TOGETHER // self.key_tiles)

    def of(self, cta: jax.Array) -> tuple[jax.Array, jax.Array, Share | None]:
        """(pair, tile, share) of a CTA; None if no tile is cut. Parts of a tile are
        neighbours."""
        if not self.cut:
            return *self._place(cta), None
        past = cta - self.whole
        number, part = (f(past, jnp.int32(self.parts)) for f in (lax.div, lax.rem))
        share = Share(
            jnp.where(past < 0, -1, number), jnp.where(past < 0, self.parts - 1, part)
        )
        return *self._place(jnp.where(past < 0, cta, self.whole + number)), share

    def turns(self, steps: jax.Array, share: Share | None):
        """(the first, how many) of a tile's blocks a CTA goes over."""
        if share is None:
            return 0, steps
        first, end = (
            lax.div(steps * (share.part + i), jnp.int32(self.parts)) for i in range(2)
        )
        first = jnp.where(share.number < 0, 0, first)
        return first, end - first

    def _place(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(pair, tile)"""
        i32 = jnp.int32
        most = self.together
        lot, i = (f(number, i32(most * self.key_tiles)) for f in (lax.div, lax.rem))
        together = jnp.minimum(i32(most), self.pairs - lot * most)
        return lot * most + lax.rem(i, together), lax.div(i, together)


def deal(
    pairs: int,
    key_tiles: int,
    steps: int,
    multiprocessors: int,
    *,
    is_causal: bool,
    side_by_side: int = 1,
) -> Deal:
    """How tiles that take `steps` blocks each, or fewer under a causal mask, are dealt
    to CTAs, of which a multiprocessor has so many side by side.

    Under a causal mask none is cut. Nor is one if CTAs are side by side and there are
    enough: then the last have a multiprocessor to themselves, and are faster.
    """
    tiles = pairs * key_tiles
    places = multiprocessors * side_by_side
    last = tiles % places

    def time(cut: int, parts: int) -> float:
        """In blocks, from when the tiles before have been made."""
        besides = BESIDES if parts == 1 else BESIDES_OF_PART
        turns = math.ceil(cut * parts / places)
        return turns * (math.ceil(steps / parts) + besides)

    parts = min(range(1, min(MOST_PARTS, steps) + 1), key=lambda n: time(last, n))
    is_enough = side_by_side > 1 and tiles > multiprocessors
    saved = time(last, 1) - time(last, parts)
    if is_causal or is_enough or saved < LEAST_SAVED * time(tiles, 1):
        return Deal(pairs, key_tiles, tiles, 1)
    return Deal(pairs, key_tiles, tiles - last, parts)
