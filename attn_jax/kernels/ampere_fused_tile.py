"""A tile of keys in Ampere's one-pass backward kernel, and the blocks of queries that
pass by it.

`ampere_backward_fused` has the formulas, and says where they round. All warpgroups of a
CTA, one or two, run what is here; branches on the warpgroup say what is one's alone.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels import ampere_fixed_point as fixed_point
from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.integers import Number
from attn_jax.kernels.tiles import LOG2_E, smem_tile

KEY_TILE = 128
# Blocks of queries, and of dS, in shared memory.
STAGES = 2
# Columns of the strips that tiles are read in.
SWIZZLED = 64
# Queries of a block of two warpgroups: V lies where two such blocks will. Those that
# their dP is made of at a time.
PAIRED_QUERIES = 64
PAIRED_STRIP = 32
# Keys up to which the second warpgroup passes over the block whose queries are all
# before its keys. On an H200 0.6 % of both passes at 1024; at 4096 and 16 384 the
# branch costs 0.3 and 1.2 % (`results/prototypes/ampere_patches.csv`), and between them
# nothing was measured.
PASSES_OVER = 2048


@dataclasses.dataclass(frozen=True)
class Form:
    """What is the same in all CTAs.

    Attributes:
      dtype: of P and dS as operands of dV and dK.
      queries: of a block.
      blocks: of a query head.
      group: query heads to a key head.
    """

    dtype: jnp.dtype
    head_dim: int
    queries: int
    blocks: int
    group: int
    key_count: int
    scale: float
    is_causal: bool

    @property
    def warpgroups(self) -> int:
        return self.head_dim // fixed_point.COLUMNS

    @property
    def paired(self) -> bool:
        return self.warpgroups == 2

    @property
    def keys(self) -> int:
        """Of a warpgroup."""
        return KEY_TILE // self.warpgroups

    @property
    def strip(self) -> int:
        """Queries that dP is made of at a time."""
        return PAIRED_STRIP if self.paired else self.queries

    @property
    def passes_over(self) -> bool:
        """Whether a block is left out that a warpgroup's keys do not see."""
        return self.is_causal and self.paired and self.key_count <= PASSES_OVER


class Memory(NamedTuple):
    """Shared memory."""

    k: Any
    v: Any  # None: V is in registers
    keys: Any  # K'
    blocks: Any  # Q, and then dO
    statistics: Any  # LSE and delta
    ds: Any

    @classmethod
    def scratch(cls, form: Form, statistics: tuple[int, ...]) -> "Memory":
        """`statistics`: the shape of a block's."""
        tile = form.warpgroups, form.keys, form.head_dim
        ds = STAGES, form.warpgroups, form.keys, form.queries
        blocks = 2 * STAGES, form.queries, form.head_dim
        return cls(
            k=smem_tile(tile, form.dtype),
            v=None if form.paired else smem_tile(tile[1:], form.dtype),
            keys=smem_tile(tile, jnp.float16),
            blocks=smem_tile(blocks, form.dtype),
            statistics=plgpu.SMEM((STAGES, *statistics), jnp.float32),
            ds=smem_tile(ds, jnp.float16, form.strip),
        )


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of queries that a CTA goes over, the last of a head first.

    Attributes:
      query, dout, statistics: where they come from.
      seen: how many of a head see the tile.
      skipped: how many of those of all heads are another CTA's, before one's own.
      steps: how many are one's own.
    """

    form: Form
    memory: Memory
    query: Any
    dout: Any
    statistics: Any
    warpgroup: jax.Array
    b: jax.Array
    kv_head: jax.Array
    seen: jax.Array
    skipped: Number
    steps: jax.Array
    last: Number

    @classmethod
    def of(cls, form: Form, *given: Any, skipped: Number, steps: jax.Array) -> "Blocks":
        last = form.blocks - 1 - (skipped if form.group == 1 else 0)
        return cls(form, *given, skipped=skipped, steps=steps, last=last)

    def place(self, turn):
        """(query head, block of queries)"""
        group = self.form.group
        if group == 1:
            return self.kv_head, self.last - turn
        in_group, i = (f(turn + self.skipped, self.seen) for f in (lax.div, lax.rem))
        return self.kv_head * group + in_group, self.last - i

    def q_smem(self, turn):
        return self.memory.blocks.at[slot(turn)]

    def dout_smem(self, turn):
        return self.memory.blocks.at[STAGES + slot(turn)]

    def lse(self, turn):
        """In units of log2, along the rows of P^T."""
        return self._statistic(turn, 0, 0, self.form.queries)

    def delta(self, turn, column: int):
        """Of a strip of queries, along the rows of dP^T."""
        return self._statistic(turn, 1, column, self.form.strip)

    def _statistic(self, turn, index: int, column: int, count: int):
        x = plgpu.load(
            self.memory.statistics.at[slot(turn), index, pl.ds(column, count)],
            layout=tiles.COLUMNS,
        )
        return tiles.along_columns(x, (self.form.keys, count))

    def start(self, turn) -> None:
        """Copies a block, if there is one: Q and its rows' numbers the first warpgroup,
        dO the last."""
        form = self.form
        head, block = self.place(turn)

        def if_own(number):
            exists = turn < self.steps
            if form.paired:
                exists &= self.warpgroup == number
            return pl.when(exists)

        def rows(gmem):
            own = block * form.queries, form.queries
            return tiles.head_rows(gmem, self.b, *own, head, form.head_dim)

        @if_own(0)
        def _():
            tiles.start_copy(rows(self.query), self.q_smem(turn))
            tiles.start_copy(
                self.statistics.at[self.b, head, block],
                self.memory.statistics.at[slot(turn)],
            )

        @if_own(form.warpgroups - 1)
        def _():
            tiles.start_copy(rows(self.dout), self.dout_smem(turn))


@dataclasses.dataclass(frozen=True)
class Tile:
    """A warpgroup's keys, against one block after the other.

    Attributes:
      v: V in shared memory, or its strips in registers.
      sums: of dQ, in global memory.
    """

    form: Form
    memory: Memory
    blocks: Blocks
    warpgroup: jax.Array
    first_key: jax.Array
    v: Any
    sums: Any

    def gradients(self):
        """(dK, dV), both without what undoes scaling. dQ is added to its sums."""
        form, steps = self.form, self.blocks.steps
        zero = tiles.accumulator(form.keys, form.head_dim)
        dk, dv = lax.fori_loop(jnp.int32(0), steps, self._step, (zero, zero))
        await_copies_of_all(form)
        self._add_dq(steps - 1)
        return dk, dv

    def _step(self, turn, carry):
        form = self.form
        _, block = self.blocks.place(turn)
        # This block has arrived, as has dS of the one before, with which all are done
        # but for that.
        await_copies_of_all(form)
        self.blocks.start(turn + 1)
        self._add_dq_before(turn, 0)
        if form.passes_over:
            is_hidden = (block + 1) * form.queries <= self.first_key
            carry = lax.cond(
                is_hidden,
                lambda carry: self._pass_over(turn, *carry),
                lambda carry: self._see(turn, block, *carry),
                carry,
            )
        else:
            carry = self._see(turn, block, *carry)
        if form.paired:
            self._add_dq_before(turn, 1)
        return carry

    def _see(self, turn, block, dk, dv):
        """dK and dV with what a block adds to them; its dS to shared memory."""
        form = self.form
        q, dout = self.blocks.q_smem(turn), self.blocks.dout_smem(turn)
        k = self.memory.k.at[self.warpgroup]
        s = self._masked(block, tiles.inner_products(k, q, SWIZZLED))
        p = jnp.exp2(s * (form.scale * LOG2_E) - self.blocks.lse(turn))
        dv = tiles.multiply(dv, p.astype(form.dtype), dout)
        for column in range(0, form.queries, form.strip):
            rows = pl.ds(column, form.strip)
            ds = self._dlogits(turn, p, column)
            place = slot(turn), self.warpgroup, slice(None), rows
            self.memory.ds[place] = ds.astype(jnp.float16)
            dk = tiles.multiply(dk, ds.astype(form.dtype), q.at[rows])
        return dk, dv

    def _pass_over(self, turn, dk, dv):
        """Of a block whose queries are all before this warpgroup's keys."""
        none = jnp.zeros((self.form.keys, self.form.queries), jnp.float16)
        none = plgpu.layout_cast(none, tiles.ACCUMULATOR)
        self.memory.ds[slot(turn), self.warpgroup] = none
        return dk, dv

    def _dlogits(self, turn, p, column: int):
        """dS of a strip of queries, FP32; P of all of them is at hand."""
        form = self.form
        part = lax.slice(p, (0, column), (form.keys, column + form.strip))
        douts = self.blocks.dout_smem(turn).at[pl.ds(column, form.strip)]
        dp = tiles.inner_products(self.v, douts, SWIZZLED)
        return part * (dp - self.blocks.delta(turn, column))

    def _masked(self, block, s):
        """-inf where a key comes after its query or does not exist."""
        form, first_key = self.form, self.first_key
        first_query = block * form.queries
        if form.is_causal:
            partial = first_query < first_key + (form.keys - 1)
        elif form.key_count % KEY_TILE:
            partial = first_key + form.keys > form.key_count
        else:
            return s

        def hide(s):
            if form.is_causal:
                return tiles.hide_later_rows(s, first_key - first_query)
            return tiles.hide_rows_from(s, form.key_count - first_key)

        return lax.cond(partial, hide, lambda s: s, s)

    def _add_dq_before(self, turn, number: int) -> None:
        """The dQ of the block before, if it is this warpgroup's time for that."""
        exists = turn > 0
        if self.form.paired:
            exists &= self.warpgroup == number
        pl.when(exists)(lambda: self._add_dq(turn - 1))

    def _add_dq(self, turn) -> None:
        """A block's dS K', 64 columns of it, to the sums."""
        form, memory = self.form, self.memory
        columns = pl.ds(self.warpgroup * fixed_point.COLUMNS, fixed_point.COLUMNS)
        # Two warpgroups have few registers left.
        dq = fixed_point.product(
            [memory.ds.at[slot(turn), w] for w in range(form.warpgroups)],
            [memory.keys.at[w, :, columns] for w in range(form.warpgroups)],
            tiles.STRIP if form.paired else 64,
        )
        head, block = self.blocks.place(turn)
        groups = form.queries // fixed_point.GROUP
        width = 4 * fixed_point.COLUMNS
        own = pl.ds(block * groups, groups), slice(None)
        own = *own, pl.ds(self.warpgroup * width, width)
        fixed_point.add(self.sums.at[self.blocks.b, head, *own], dq)


def key_numbers_of(form: Form, centre, factor):
    """(what comes off the keys, `SWIZZLED` columns at a time, what they are multiplied
    by): of the head, in global memory."""
    parts = [
        plgpu.load(centre.at[pl.ds(k, SWIZZLED)], layout=tiles.COLUMNS, optimized=False)
        for k in range(0, form.head_dim, SWIZZLED)
    ]
    return parts, factor[0]


def make_keys(form: Form, memory: Memory, warpgroup, centre, factor) -> None:
    """K' of one's own keys: K less `centre`, times `factor` (`key_numbers_of`)."""
    for k, row in zip(range(0, form.head_dim, SWIZZLED), centre, strict=True):
        part = pl.ds(k, SWIZZLED)
        own = plgpu.load(memory.k.at[warpgroup, :, part], layout=tiles.ACCUMULATOR)
        wide = own.astype(jnp.float32)
        wide = wide - tiles.along_columns(row, wide.shape)
        memory.keys[warpgroup, :, part] = (wide * factor).astype(jnp.float16)


def await_copies_of_all(form: Form) -> None:
    """All that was copied is there for all; a barrier of the CTA."""
    tiles.wait_for_copies(0)
    if form.paired:
        tiles.cta_barrier(form.warpgroups)


def slot(turn):
    """Where a block is in shared memory, or its dS."""
    return lax.rem(turn, jnp.int32(STAGES))
