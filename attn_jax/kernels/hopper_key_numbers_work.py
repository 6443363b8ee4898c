"""What the two warpgroups of `hopper_key_numbers` do: one takes K, the other V.

Each loads its own tiles by TMA, some ahead, and of a head tells the other CTAs of the
cluster what it found. That module says what is computed, and where it rounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.centre import centre_from
from attn_jax.formats import FP16, NumberFormat
from attn_jax.kernels import turns
from attn_jax.kernels.integers import rem
from attn_jax.kernels.lanes import Lanes, read
from attn_jax.kernels.tiles import widen
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT

# Of V, which no recipe scales: a power of two and its inverse are normal numbers of
# FP32, and BF16's largest still fits.
_MOST_VALUE_EXPONENT = 120


class Tiles(NamedTuple):
    """Of K or V: `count` tiles of `rows` keys are a CTA's share."""

    lanes: Lanes
    rows: int
    count: int
    width: int

    @classmethod
    def of(cls, keys: int, width: int, rows_of: Callable) -> "Tiles":
        """With all keys in one share."""
        # With 16 lanes to a row a strip is 8 rows. 4 columns are what Mosaic GPU can
        # add across warps at once.
        lanes = Lanes(math.gcd(width // 4, 16), 4)
        rows = rows_of(width, lanes.strip)
        return cls(lanes, rows, pl.cdiv(keys, rows), width)

    def shared(self, parts: int) -> "Tiles":
        return self._replace(count=pl.cdiv(self.count, parts))

    @property
    def shape(self) -> tuple[int, int]:
        return self.lanes.strip, self.width

    def zero(self, dtype=jnp.float32):
        zero = jnp.zeros(self.shape, dtype)
        return plgpu.layout_cast(zero, self.lanes.layout())

    def strips(self, tile):
        """Row of a tile, 16-bit values: strip after strip."""
        for row in range(0, self.rows, self.lanes.strip):
            part = tile.at[pl.ds(row, self.lanes.strip)]
            yield row, read(part, layout=self.lanes.layout())

    def over_head(self, columns, reduce):
        """One number of all columns, all over a strip."""
        x = lax.broadcast_in_dim(columns, self.shape, [1])
        x = reduce(plgpu.layout_cast(x, self.lanes.layout()), axis=1)
        x = lax.broadcast_in_dim(x, self.shape, [0])
        return plgpu.layout_cast(x, self.lanes.layout())


@dataclasses.dataclass(frozen=True)
class Cta:
    """One of the `parts` that share a head. It takes `mine` heads, one after the other.

    Attributes:
      cluster, clusters: its own, and how many there are; heads are dealt round.
      heads: key heads of a batch entry.
    """

    parts: int
    part: Any
    cluster: Any
    clusters: int
    heads: int
    mine: Any

    def head(self, turn):
        """(batch entry, key head)"""
        number, heads = self.cluster + turn * self.clusters, jnp.int32(self.heads)
        return lax.div(number, heads), lax.rem(number, heads)

    def rows(self, tiles: Tiles, tile):
        """Of a tile, in global memory."""
        return pl.ds((self.part * tiles.count + tile) * tiles.rows, tiles.rows)

    def told(self, gmem, b, n, tiles: Tiles, combine: Callable, *index) -> jax.Array:
        """What all found, combined; their numbers are on their way together."""
        columns = tiles.lanes.layout().reduce(0)
        found = [
            read(gmem.at[b, n, other, *index], layout=columns)
            for other in range(self.parts)
        ]
        return functools.reduce(combine, found)

    @staticmethod
    def all_have_told(barrier) -> None:
        """One thread alone says so to each of the other CTAs."""
        plgpu.commit_smem()
        turns.fence()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        turns.fence()


@dataclasses.dataclass(frozen=True)
class Keys:
    """The warpgroup that takes K: sums, squares and the largest of each column.

    Attributes:
      tiles: of a CTA; shared memory holds `stages` of them.
      key_count, inputs: how many keys there are, and their format.
      found: where CTAs of a cluster tell each other, and `told` the barrier.
      copy: where the keys go as they are, or None.
    """

    cta: Cta
    tiles: Tiles
    stages: int
    key_count: int
    inputs: NumberFormat
    gmem: Any
    smem: Any
    ready: Any
    found: Any
    told: Any
    centre: Any
    key_factor: Any
    copy: Any

    def begin(self) -> None:
        for step in range(self.stages):
            self._load(jnp.int32(step))

    def nothing(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What `sums` begins with."""
        tiles = self.tiles
        return tiles.zero(), tiles.zero(), tiles.zero(jnp.int16)

    def sums(self, turn):
        """(sums, squares, rank of the largest) of the CTA's keys of a head; each thread
        has some of the rows."""
        # Rows past the last key are zero here, which changes none of these.
        start, count = self.nothing(), self.tiles.count
        first = turn * count
        return lax.fori_loop(first, first + count, self._add, start)

    def tell(self, turn, found) -> None:
        """The numbers of a head, of what the CTAs found."""
        cta = self.cta
        b, n = cta.head(turn)
        sums, squares, largest = found
        sums, squares = sums.sum(axis=0), squares.sum(axis=0)
        found = sums, squares, _of_rank(largest, self.smem.dtype).max(axis=0)
        if cta.parts > 1:
            for i, x in enumerate(found):
                self.found[b, n, cta.part, i] = x
            cta.all_have_told(self.told)

        @pl.when(cta.part == 0)
        def _():
            total, squares_in_all, top = found
            if cta.parts > 1:
                combine = jnp.add, jnp.add, jnp.maximum
                total, squares_in_all, top = (
                    cta.told(self.found, b, n, self.tiles, x, i)
                    for i, x in enumerate(combine)
                )
            # |K - c| is at most twice the largest key, which might overflow.
            keys = into_range(self.tiles.over_head(top, jnp.max), doublings=1)
            mean, square = total / self.key_count, squares_in_all / self.key_count
            self.centre[b, n] = centre_from(mean, square, top, self.inputs)
            self.key_factor[b, n] = power(keys).max(axis=0)

    def _slot(self, step):
        return rem(step, self.stages)

    def _load(self, step) -> None:
        """A tile; steps are counted on across heads."""
        count = self.tiles.count

        @pl.when(step < self.cta.mine * count)
        def _():
            now = self._slot(step)
            plgpu.copy_gmem_to_smem(
                self.gmem.at[self._place(step)], self.smem.at[now], self.ready.at[now]
            )

    def _place(self, step):
        """Of a tile, in global memory."""
        count = jnp.int32(self.tiles.count)
        b, n = self.cta.head(lax.div(step, count))
        return b, self.cta.rows(self.tiles, lax.rem(step, count)), n

    def _add(self, step, found):
        sums, squares, largest = found
        now = self._slot(step)
        plgpu.barrier_wait(self.ready.at[now])
        for _, x in self.tiles.strips(self.smem.at[now]):
            largest = jnp.maximum(largest, _rank(x))
            x = widen(x)
            sums, squares = sums + x, squares + x * x
        # All have read: here it is a barrier.
        plgpu.commit_smem()
        if self.copy is None:
            self._load(step + self.stages)
            return sums, squares, largest
        plgpu.copy_smem_to_gmem(self.smem.at[now], self.copy.at[self._place(step)])
        # The tile before has left its place.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(step > 0)(lambda: self._load(step - 1 + self.stages))
        return sums, squares, largest


@dataclasses.dataclass(frozen=True)
class Values:
    """The warpgroup that takes V: the largest of each column, and V as FP16 numbers.

    Attributes:
      tiles: of a CTA; shared memory holds `stages` of them. If these are not all, the
        last are still there when V is scaled, from the last to the first, and the
        others are read again.
      half: where V as FP16 numbers goes, as bits of V's format, or None.
      beside: where what these are to be multiplied by goes in V's format, or None.
      found, told: as of `Keys`.
    """

    cta: Cta
    tiles: Tiles
    stages: int
    gmem: Any
    smem: Any
    ready: Any
    found: Any
    told: Any
    norm: Any
    unscale: Any
    half: Any
    beside: Any

    @property
    def read_again(self) -> int:
        return self.tiles.count - self.stages

    def begin(self) -> None:
        for tile in range(self.stages):
            self._load(jnp.int32(0), jnp.int32(tile))

    def take(self, turn) -> None:
        """A head's V."""
        cta, tiles = self.cta, self.tiles
        b, n = cta.head(turn)
        largest = lax.fori_loop(
            jnp.int32(0),
            jnp.int32(tiles.count),
            functools.partial(self._larger, turn),
            tiles.zero(jnp.int16),
        )
        largest = _of_rank(largest, self.smem.dtype).max(axis=0)
        if cta.parts > 1:
            self.found[b, n, cta.part] = largest
            cta.all_have_told(self.told)
            largest = cta.told(self.found, b, n, tiles, jnp.maximum)
        exponent = into_range(
            tiles.over_head(largest, jnp.max), most=_MOST_VALUE_EXPONENT
        )
        if self.half is not None:
            self._scale(turn, power(exponent))

        @pl.when(cta.part == 0)
        def _():
            # Squares of the scaled ones stay in range.
            unscale = power(-exponent).max(axis=0)
            scaled = largest / unscale
            norm = jnp.sqrt(tiles.over_head(scaled * scaled, jnp.sum))
            self.norm[b, n] = norm.max(axis=0) * unscale
            self.unscale[b, n] = unscale
            if self.beside is not None:
                self.beside[b, n] = unscale.astype(self.smem.dtype)

    def _slot(self, tile):
        return lax.rem(tile, jnp.int32(self.stages))

    def _load(self, turn, tile) -> None:
        @pl.when(turn < self.cta.mine)
        def _():
            b, n = self.cta.head(turn)
            now = self._slot(tile)
            plgpu.copy_gmem_to_smem(
                self.gmem.at[b, self.cta.rows(self.tiles, tile), n],
                self.smem.at[now],
                self.ready.at[now],
            )

    def _larger(self, turn, tile, largest):
        slot, again = self._slot, self.read_again
        plgpu.barrier_wait(self.ready.at[slot(tile)])
        for _, x in self.tiles.strips(self.smem.at[slot(tile)]):
            largest = jnp.maximum(largest, _rank(x))
        if again or self.half is None:
            plgpu.commit_smem()
        if again:
            pl.when(tile < again)(lambda: self._load(turn, tile + self.stages))
        if self.half is None:
            pl.when(tile >= again)(lambda: self._load(turn + 1, slot(tile)))
        return largest

    def _scale(self, turn, factor) -> None:
        """V of a head times a power of two, all over a strip."""
        count = self.tiles.count

        @pl.loop(jnp.int32(0), jnp.int32(count))
        def _(done):
            tile = count - 1 - done
            if self.read_again:

                @pl.when(tile < self.read_again)
                def _():
                    plgpu.barrier_wait(self.ready.at[self._slot(tile)])

            self._scale_tile(turn, tile, factor)
            # The tile before has left its place.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            pl.when(done > 0)(lambda: self._follow(turn, tile + 1))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._follow(turn, jnp.int32(0))

    def _scale_tile(self, turn, tile, factor) -> None:
        """In place; the result goes as bits of V's format."""
        b, n = self.cta.head(turn)
        here = self.smem.at[self._slot(tile)]
        for row, x in self.tiles.strips(here):
            x = lax.bitcast_convert_type(
                (widen(x) * factor).astype(jnp.float16), self.smem.dtype
            )
            here[pl.ds(row, self.tiles.lanes.strip)] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            here, self.half.at[b, self.cta.rows(self.tiles, tile), n]
        )

    def _follow(self, turn, tile) -> None:
        """What comes in a tile's place."""
        if self.read_again:
            again = tile - self.stages
            pl.when(again >= 0)(lambda: self._load(turn, again))
        pl.when(tile < self.stages)(lambda: self._load(turn + 1, tile))


def _rank(x: jax.Array) -> jax.Array:
    """A 16-bit integer that grows with |x|, and is negative where x is not finite: one
    instruction takes the larger ones of two pairs."""
    bits = lax.bitcast_convert_type(x, jnp.int16)
    return (bits & jnp.int16(0x7FFF)) + jnp.int16(_beyond(x.dtype))


def _of_rank(rank: jax.Array, dtype) -> jax.Array:
    """|x|; 0 where nothing was finite."""
    bits = jnp.maximum(rank - jnp.int16(_beyond(dtype)), jnp.int16(0))
    return widen(lax.bitcast_convert_type(bits, dtype))


def _beyond(dtype) -> int:
    """What takes the bits of infinity to 2^15, which is negative."""
    return 0x8000 - int(np.array(np.inf, dtype).view(np.uint16))


def into_range(
    bound: jax.Array, doublings: int = 0, most: int = MOST_HEAD_EXPONENT
) -> jax.Array:
    """The exponent of the power of two that brings bound * 2^doublings below 2^15, by
    its bits. What is subnormal ends at `most` either way."""
    bits = lax.bitcast_convert_type(bound, jnp.int32)
    exponent = FP16.max_exponent - ((bits >> 23) - 126 + doublings)
    exponent = jnp.minimum(jnp.maximum(exponent, -most), most)
    return jnp.where(bound > 0.0, exponent, 0)


def power(exponent: jax.Array) -> jax.Array:
    """2^exponent, a normal number."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
