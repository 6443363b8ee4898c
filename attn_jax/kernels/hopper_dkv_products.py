"""What the warpgroups of Hopper's kernel for dK and dV do.

`hopper_backward_dkv` has the formulas, and says where they round.

A step is a block of queries against a warpgroup's rows of keys. Tiles are transposed:
keys down the rows, queries along the columns.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels.hopper_backward_form import BackwardForm
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    COLUMNS,
    LOG2_E,
    accumulator,
    along_columns,
    capped,
    found_anew,
    head_of,
    hide_before,
    read_tile,
    row_positions,
    smem_tile,
    stream,
    visible,
)
from attn_jax.kernels.visibility import Pairs, hide


@dataclasses.dataclass(frozen=True)
class Form(BackwardForm):
    """A call as it is known when it is compiled; `group`: query heads of a key head."""

    group: int

    @property
    def query_blocks(self) -> int:
        return pl.cdiv(self.query_count, self.tiling.columns)

    @property
    def teams(self) -> int:
        """Of `split` warpgroups that have the same keys, each some columns of dK and
        dV."""
        return self.tiling.warpgroups // self.tiling.split

    @property
    def head_part(self) -> int:
        return self.head_dim // self.tiling.split

    @property
    def value_part(self) -> int:
        return self.value_dim // self.tiling.split


class Memory(NamedTuple):
    """Shared memory: K and V by team, the others by slot."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any

    @classmethod
    def scratch(cls, form: Form) -> "Memory":
        tiling = form.tiling
        # S^T = K Q^T and dS^T Q, a sum over `columns`, both read Q; with V and dO
        # likewise.
        k, q, v, dout = (
            smem_tile((*lead, dim), form.dtype, tiling.columns, dim // tiling.split)
            for dim in (form.head_dim, form.value_dim)
            for lead in ((form.teams, tiling.rows), (tiling.stages, tiling.columns))
        )
        row = plgpu.SMEM((tiling.stages, tiling.columns), jnp.float32)
        return cls(k, v, q, dout, row, row)


class Barriers(NamedTuple):
    """By team `tile_ready` and, where several warpgroups have the same keys,
    `team_here`; the others by slot."""

    tile_ready: Any
    q_ready: Any
    dout_ready: Any
    q_free: Any
    dout_free: Any
    team_here: Any

    @classmethod
    def scratch(cls, form: Form) -> "Barriers":
        tiling = form.tiling
        ready = plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages)
        free = plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=tiling.stages)
        team_here = plgpu.Barrier(num_arrivals=tiling.split, num_barriers=form.teams)
        return cls(
            tile_ready=plgpu.Barrier(num_arrivals=2, num_barriers=form.teams),
            q_ready=ready,
            dout_ready=ready,
            q_free=free,
            dout_free=free,
            team_here=team_here if tiling.split > 1 else None,
        )


@dataclasses.dataclass(frozen=True)
class Work:
    """The tile of keys that a CTA has, and the steps that it takes: `blocks` of queries
    of each query head, one head after the other.

    Attributes:
      first, whole: without `pairs`: blocks from `first` to `whole` see part of the
        tile, the later ones all of it.
      listed: with `pairs`, how many blocks see the tile, and which.
    """

    form: Form
    b: jax.Array
    kv_head: jax.Array
    tile: jax.Array
    first: jax.Array
    whole: jax.Array
    blocks: jax.Array
    pairs: Pairs | None
    listed: Any

    @classmethod
    def of(cls, form: Form, pairs: Pairs | None) -> "Work":
        """That of the CTA which runs this."""
        b, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        tile = lax.axis_index("tile")
        columns, keys = form.tiling.columns, form.tiling.tile
        first, whole = jnp.int32(0), jnp.int32(0)
        if form.is_causal:
            first = lax.div(tile * keys, jnp.int32(columns))
            last_key = (tile + 1) * keys - 1
            whole = lax.div(last_key + jnp.int32(columns - 1), jnp.int32(columns))
            first, whole = (
                jnp.minimum(x, jnp.int32(form.query_blocks)) for x in (first, whole)
            )
        blocks, listed = jnp.int32(form.query_blocks) - first, None
        if pairs is not None:
            listed = pairs.entries(b, kv_head, tile)
            blocks = listed[0]
        return cls(form, b, kv_head, tile, first, whole, blocks, pairs, listed)

    @property
    def steps(self) -> jax.Array:
        return self.blocks * self.form.group

    def slot(self, step: jax.Array) -> jax.Array:
        return rem(step, self.form.tiling.stages)

    def block_of(self, step: jax.Array) -> jax.Array:
        """Which block of queries a step takes."""
        turn = lax.rem(step, self.blocks)
        if self.listed is None:
            return self.first + turn
        return lax.div(self.listed[turn + 1], jnp.int32(2))

    def head_of(self, step: jax.Array) -> jax.Array:
        """And of which query head."""
        return self.kv_head * self.form.group + lax.div(step, self.blocks)

    def is_partial(self, step: jax.Array, block: jax.Array) -> jax.Array:
        """Whether some of a step's pairs are not seen."""
        if self.listed is None:
            return block < self.whole
        entry = self.listed[lax.rem(step, self.blocks) + 1]
        return lax.rem(entry, jnp.int32(2)) == 1


@dataclasses.dataclass(frozen=True)
class Products:
    """A warpgroup that multiplies, and what it does, from the whole to its parts.

    Attributes:
      team: whose keys it has.
      part: which part of their columns it sums, of as many as the team has warpgroups.
    """

    work: Work
    smem: Memory
    barriers: Barriers
    bias_gmem: Any
    team: jax.Array
    part: jax.Array
    first_row: jax.Array

    @classmethod
    def of(cls, warpgroup, work: Work, smem, barriers, bias_gmem) -> "Products":
        tiling = work.form.tiling
        team, part = warpgroup, jnp.int32(0)
        if tiling.split > 1:
            team = lax.div(warpgroup, jnp.int32(tiling.split))
            part = lax.rem(warpgroup, jnp.int32(tiling.split))
        first_row = work.tile * tiling.tile + team * tiling.rows
        return cls(work, smem, barriers, bias_gmem, team, part, first_row)

    def make(self, k_gmem, v_gmem, dk_gmem, dv_gmem) -> None:
        """dK and dV of the warpgroup's keys."""
        self._load_tile(k_gmem, v_gmem)
        form = self.work.form
        dk, dv = pl.run_scoped(
            self._sums,
            accumulator(form.tiling.rows, form.head_part),
            accumulator(form.tiling.rows, form.value_part),
        )
        if form.wide:
            self._leave_wide(dk, dv, dk_gmem, dv_gmem)
        else:
            self._leave(dk, dv, dk_gmem, dv_gmem)

    def _keys(self):
        """Where the warpgroup's keys are in K, V, dK and dV."""
        work = self.work
        return work.b, pl.ds(self.first_row, work.form.tiling.rows), work.kv_head

    def _own(self, matrix, columns: int):
        """The warpgroup's part of a matrix's columns."""
        if self.work.form.tiling.split == 1:
            return matrix
        return matrix.at[:, pl.ds(self.part * columns, columns)]

    def _once_in_a_team(self, do) -> None:
        if self.work.form.tiling.split == 1:
            do()
        else:
            pl.when(self.part == 0)(do)

    def _load_tile(self, k_gmem, v_gmem) -> None:
        ready = self.barriers.tile_ready.at[self.team]
        keys = self._keys()

        def load():
            for gmem, smem in ((k_gmem, self.smem.k), (v_gmem, self.smem.v)):
                plgpu.copy_gmem_to_smem(gmem.at[keys], smem.at[self.team], ready)

        self._once_in_a_team(load)
        plgpu.barrier_wait(ready)

    def _sums(self, dk_acc, dv_acc):
        @pl.loop(0, self.work.steps)
        def _(step):
            self._take(step, dk_acc, dv_acc)

        return dk_acc[...], dv_acc[...]

    def _take(self, step, dk_acc, dv_acc) -> None:
        """A step: what a block of queries adds to dK and dV."""
        work, smem, barriers = self.work, self.smem, self.barriers
        form, tiling = work.form, work.form.tiling
        now, block, n = work.slot(step), work.block_of(step), work.head_of(step)
        is_partial = work.is_partial(step, block)
        plgpu.barrier_wait(barriers.q_ready.at[now])
        at = found_anew(self.team) if form.saves_registers else self.team

        def products(s_acc, dp_acc):
            plgpu.wgmma(s_acc, smem.k.at[at], smem.q.at[now].transpose((1, 0)))
            plgpu.barrier_wait(barriers.dout_ready.at[now])
            plgpu.wgmma(dp_acc, smem.v.at[at], smem.dout.at[now].transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            p, p_slope = self._probabilities(s, block, n, is_partial, now)
            return p, p_slope, dp_acc[...]

        of_block = accumulator(tiling.rows, tiling.columns)
        p, p_slope, dp = pl.run_scoped(products, of_block, of_block)
        dout = self._own(smem.dout.at[now], form.value_part)
        plgpu.wgmma(dv_acc, p.astype(form.dtype), dout)
        row_delta = plgpu.load(smem.delta.at[now], layout=COLUMNS)
        ds = p_slope * (dp - along_columns(row_delta, dp.shape))
        ds = ds.astype(form.dtype)
        plgpu.wgmma(dk_acc, ds, self._own(smem.q.at[now], form.head_part))
        plgpu.wgmma_wait(0)
        # Orders the reads of LSE and delta before TMA's next write to them.
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.dout_free.at[now])
        plgpu.barrier_arrive(barriers.q_free.at[now])

    def _probabilities(self, s, block, n, is_partial, now):
        """P^T of a block from its products, and the same times the soft cap's slope."""
        work, form = self.work, self.work.form
        bias = None
        if self.bias_gmem is not None:
            start = block * form.tiling.columns
            of_head = head_of(self.bias_gmem, work.b, n)
            bias = read_tile(of_head, self.first_row, start, s.shape)
        s, slope = capped(s, form.scale, form.soft_cap, bias)
        if form.is_causal or work.pairs is not None:
            s = lax.cond(is_partial, lambda s: self._hide(s, block, n), lambda s: s, s)
        row_lse = plgpu.load(self.smem.lse.at[now], layout=COLUMNS) * LOG2_E
        p = jnp.exp2(s * form.unit - along_columns(row_lse, s.shape))
        return p, p if slope is None else p * slope

    def _hide(self, s, block, n):
        """Logits of a block, -inf where the query does not see the key."""
        work, form = self.work, self.work.form
        start = block * form.tiling.columns
        if work.pairs is not None:
            places = work.b, n, start, self.first_row
            return hide(s, work.pairs, form.band, *places, queries_first=False)
        if form.saves_registers:
            diagonal = row_positions(form.tiling.rows) + (self.first_row - start)
            return hide_before(s, diagonal)
        seen = visible(
            s.shape,
            query_start=start,
            key_start=self.first_row,
            key_count=None,
            is_causal=True,
            queries_first=False,
        )
        return jnp.where(seen, s, -jnp.inf)

    def _leave_wide(self, dk, dv, dk_gmem, dv_gmem) -> None:
        form, keys = self.work.form, self._keys()
        self._own(dk_gmem.at[keys], form.head_part)[...] = dk * form.scale
        self._own(dv_gmem.at[keys], form.value_part)[...] = dv

    def _leave(self, dk, dv, dk_gmem, dv_gmem) -> None:
        """Rounded; in the place of K and V, once nobody reads those."""
        form, keys = self.work.form, self._keys()
        k_tile, v_tile = self.smem.k.at[self.team], self.smem.v.at[self.team]
        self._meet()
        self._own(k_tile, form.head_part)[...] = (dk * form.scale).astype(form.dtype)
        self._own(v_tile, form.value_part)[...] = dv.astype(form.dtype)
        plgpu.commit_smem()
        self._meet()

        def store():
            plgpu.copy_smem_to_gmem(k_tile, dk_gmem.at[keys])
            plgpu.copy_smem_to_gmem(v_tile, dv_gmem.at[keys])
            plgpu.wait_smem_to_gmem(0)

        self._once_in_a_team(store)

    def _meet(self) -> None:
        """Until the whole team is here."""
        if self.barriers.team_here is not None:
            plgpu.barrier_arrive(self.barriers.team_here.at[self.team])
            plgpu.barrier_wait(self.barriers.team_here.at[self.team])


def load_blocks(
    work: Work,
    smem: Memory,
    barriers: Barriers,
    q_gmem,
    dout_gmem,
    lse_gmem,
    delta_gmem,
) -> None:
    """What the warpgroup that loads does: Q with LSE, dO with delta, block by block."""
    columns = work.form.tiling.columns

    def load(matrix, rows_gmem, matrix_smem, rows_smem, ready, step):
        head = work.head_of(step)
        queries = pl.ds(work.block_of(step) * columns, columns)
        now = work.slot(step)
        plgpu.copy_gmem_to_smem(
            matrix.at[work.b, queries, head], matrix_smem.at[now], ready.at[now]
        )
        plgpu.copy_gmem_to_smem(
            rows_gmem.at[work.b, head, queries], rows_smem.at[now], ready.at[now]
        )

    def load_q(step):
        load(q_gmem, lse_gmem, smem.q, smem.lse, barriers.q_ready, step)

    def load_dout(step):
        of = dout_gmem, delta_gmem, smem.dout, smem.delta, barriers.dout_ready
        load(*of, step)

    buffers = [(load_q, barriers.q_free), (load_dout, barriers.dout_free)]
    stream(work.steps, work.form.tiling.stages, buffers)
