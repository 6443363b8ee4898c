"""Masking inside Hopper's forward kernel: which logits are hidden.

Blocks of keys are counted, or a list names them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_jax.kernels.tiles import capped, head_of, read_tile
from attn_jax.kernels.visibility import Band, Counted, Ends, Pairs, hide


class Hidden(NamedTuple):
    """Of the rows from `row` on of batch entry b and query head n.

    Attributes:
      pairs, listed: the lists and that of the tile, whose first step is `first_step`;
        None: blocks are counted.
      band: of pairs in listed blocks.
      start, end: the step at which the rows' blocks begin, which are counted back, and
        the number after that of the first.
      in_links: whether another step than `start` may be a link's first.
      bias: [B, N, T, S] in global memory, or None. It comes with lists.
      scale, soft_cap: of logits that are capped, or that a bias is added to.
    """

    b: Any
    n: Any
    row: Any
    counted: Counted
    pairs: Pairs | None
    listed: Any
    band: Band
    first_step: Any
    start: Any
    end: Any
    in_links: bool
    bias: Any
    scale: float
    soft_cap: float | None

    def entry(self, step):
        """What the list says of a step's block; 0 past its end."""
        if self.pairs is None:
            return jnp.int32(0)
        return self.listed[jnp.minimum(step - self.first_step + 1, self.end)]

    def first(self, s: jax.Array, step) -> jax.Array:
        """Logits of a link's first block, -inf where they are not seen."""
        if self.pairs is not None:
            return self._of_listed(s, self.entry(step))
        s, _ = capped(s, self.scale, self.soft_cap)
        block = self.end - 1 - (step - self.start)
        ends = Ends(left=self.counted.cut_twice or self.in_links, right=True)
        return self.counted.hide(s, self.row, block, ends)

    def later(self, s: jax.Array, step, entry) -> jax.Array:
        """The same of a block that is not. `entry`: that of its step."""
        s = self._of_listed(s, entry)
        if not self.counted.is_window:
            return s
        block = self.end - 1 - (step - self.start)
        hide = functools.partial(self.counted.hide, row=self.row, block=block)
        is_cut = self.counted.is_cut(self.row, block)
        return lax.cond(is_cut, hide, lambda s: s, s)

    def _of_listed(self, s: jax.Array, entry) -> jax.Array:
        key_start = lax.div(entry, jnp.int32(2)) * self.counted.columns
        tile = None
        if self.bias is not None:
            tile = head_of(self.bias, self.b, self.n)
            tile = read_tile(tile, self.row, key_start, (s.shape[0], s.shape[1]))
        s, _ = capped(s, self.scale, self.soft_cap, tile)
        pairs = self.pairs
        if pairs is None:
            return s

        def hide_some(s):
            return hide(s, pairs, self.band, self.b, self.n, self.row, key_start)

        partial = lax.rem(entry, jnp.int32(2)) == 1
        return lax.cond(partial, hide_some, lambda s: s, s)
