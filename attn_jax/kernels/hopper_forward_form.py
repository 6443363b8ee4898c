"""What Hopper's forward kernel is told before it runs, and where it finds things."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from attn_jax.kernels import hopper_links, schedule
from attn_jax.kernels.hopper_softmax import Softmax
from attn_jax.kernels.tilings import ForwardTiling
from attn_jax.kernels.visibility import Band, Counted, Pairs
from attn_jax.span import Ended


@dataclasses.dataclass(frozen=True)
class Form:
    """What is known of a forward pass before it runs.

    Attributes:
      value_dim: of V and out.
      group: query heads of a key head.
      query_count: rows that are real.
      counted: which blocks of keys rows see where no list says it.
      listed: whether one does.
      band: of pairs in listed blocks.
      most_blocks: that a tile sees, of keys.
      scale, soft_cap: of logits that are capped, or that a bias is added to.
      wide_out: whether out is FP32.
      keeps_low: whether what rounding drops from out leaves, too.
      carries: whether `Carried` is what the rows leave, from `first_row` on.
      ends: whether what they leave instead is their end, with these keys or none.
    """

    tiling: ForwardTiling
    value_dim: int
    group: int
    query_count: int
    strips: schedule.Strips
    softmax: Softmax
    counted: Counted
    listed: bool
    band: Band
    most_blocks: int
    scale: float
    soft_cap: float | None
    wide_out: bool
    keeps_low: bool
    carries: bool
    ends: bool
    first_row: int

    @property
    def link_blocks(self) -> int:
        """Blocks of keys in a link of the sum of P V."""
        return pl.cdiv(hopper_links.KEYS, self.tiling.columns)

    @property
    def in_links(self) -> bool:
        """Whether there can be more than one."""
        return self.most_blocks > self.link_blocks

    @property
    def out_by_key(self) -> bool:
        """Whether out leaves by way of the tile's last block of K, and has no place of
        its own in shared memory."""
        return self.tiling.out_by_key and not (self.wide_out or self.carries)

    @property
    def released_late(self) -> bool:
        """Whether that block is let go of when the next tile begins, not when this one
        ends. At 16 384 keys that is faster under a causal mask, and slower without one
        (H200). Why is not known."""
        return self.out_by_key and self.counted.band.right is not None

    @property
    def ahead(self) -> bool:
        """Whether the logits of a tile's first block are made while the tile before it
        ends."""
        tiling, counted = self.tiling, self.counted
        # All warpgroups begin with a tile's first block, and go on to its last.
        whole = self.listed or self.softmax.rescale_threshold > 0
        together = counted.band == Band(None, None)
        together = together and not (whole or self.strips.idle)
        # Stores straight from registers, as `keeps_low` has them, take longer beside a
        # product: 3 % of both kernels of a forward pass at head dim 64 and 1024 keys.
        by_itself = not (
            self.out_by_key or self.wide_out or self.carries or self.keeps_low
        )
        # Where the last block is masked ptxas would wait for each product.
        unmasked = counted.key_count % tiling.columns == 0
        return (
            tiling.ahead and together and by_itself and unmasked and not self.in_links
        )


class Seen(NamedTuple):
    """Blocks of keys where they are counted, of `blocks` altogether. `some`: (the first
    row that sees any, one past the last), if not all do."""

    form: Form
    blocks: Any
    some: tuple[Any, Any] | None = None

    def of_rows(self, start, end):
        """The first that some queries see, and one past the last."""
        blocks = jnp.int32(self.blocks)
        if self.some is not None:
            first, past = self.some
            blocks = jnp.where((first <= start) & (start < past), blocks, 0)
        return map(jnp.int32, self.form.counted.seen(start, end, blocks))

    def of_tile(self, tile):
        strips, rows = self.form.strips, self.form.tiling.rows
        start, end = (strips.first(tile + i) * rows for i in range(2))
        return self.of_rows(start, end)


class Refs(NamedTuple):
    """Where a CTA finds and leaves things. In global memory: of lists `pairs`, of a
    sum in links `sums`, of what was carried in `before`, of results `out` to `row_sum`;
    in shared memory: a tile for the results of each warpgroup. `unscale`: what P V is
    multiplied by, of a batch entry and a query head. None: there is none."""

    pairs: Pairs | None
    sinks: Any
    bias: Any
    unscale: Callable[[Any, Any], Any] | None
    before: Any
    out: Any
    low: Any
    lse: Any
    row_sum: Any
    sums: Any
    out_smem: Any

    @property
    def ended(self) -> Ended:
        """Where the results are of rows that end: the rounded O in the place that what
        rounding drops has elsewhere, the exact one in that of A, LSE in that of m."""
        return Ended(self.low, self.out, self.lse)
