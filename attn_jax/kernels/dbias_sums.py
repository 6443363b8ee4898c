"""Which tiles of S add up to a tile of dbias, and dbias from its tiles.

A bias whose axis has size one is one entry for all of that axis: its gradient is the
sum over it. A CTA owns a tile of the result, and adds the tiles of S that it is the sum
of in a fixed order.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from attn_jax.pairwise import pairwise_sum


class Sums(NamedTuple):
    """How many tiles there are along batch, heads, queries and keys: `kept` of them of
    the result, each the sum of `summed` of S."""

    kept: tuple[int, ...]
    summed: tuple[int, ...]

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        sizes: tuple[int, int, int, int],
        rows: int,
        columns: int,
    ) -> "Sums":
        """For a bias of `shape`, [#B, #N, #T, #S], where S is `sizes`, [B, N, T, S]."""
        tiles = *sizes[:2], pl.cdiv(sizes[2], rows), pl.cdiv(sizes[3], columns)
        kept = tuple(1 if size == 1 else n for size, n in zip(shape, tiles))
        return cls(kept, tuple(n // k for n, k in zip(tiles, kept)))

    @property
    def count(self) -> int:
        """Tiles of the result."""
        return math.prod(self.kept)

    @property
    def steps(self) -> int:
        """Tiles of S that each of them is the sum of."""
        return math.prod(self.summed)

    def place(self, owned: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        """(b, n, tile of queries, tile of keys) that a step of an owned tile takes."""
        place, mine = [], owned
        for n_kept, n_summed in zip(reversed(self.kept), reversed(self.summed)):
            place.append(lax.rem(mine, jnp.int32(n_kept)))
            mine = lax.div(mine, jnp.int32(n_kept))
            place[-1] += lax.rem(step, jnp.int32(n_summed))
            step = lax.div(step, jnp.int32(n_summed))
        return tuple(reversed(place))

    def gradient(
        self, owned: Float32[Array, "count rows columns"], shape: tuple[int, ...]
    ) -> Float32[Array, "#B #N #T #S"]:
        """dbias from its tiles, whose rows and columns are added where it has one."""
        rows, columns = owned.shape[1:]
        total = owned.reshape(*self.kept, rows, columns).swapaxes(3, 4)
        total = total.reshape(
            *self.kept[:2], self.kept[2] * rows, self.kept[3] * columns
        )
        if shape[2] == 1:
            total = pairwise_sum(total, 2, keepdims=True)
        if shape[3] == 1:
            total = pairwise_sum(total, 3, keepdims=True)
        return total[:, :, : shape[2], : shape[3]]
