"""The warpgroups of Hopper's fused backward kernel that multiply.

`hopper_backward_fused` has the formulas, and says where they round.

A step is a block of queries against the warpgroup's 64 keys. Its dQ is made in the next
step, while logits are multiplied: by then all have put their dS into shared memory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels.hopper_fused_work import (
    DS_BUFFERS,
    KEY_TILE,
    KEYS,
    WARPGROUPS,
    Barriers,
    Item,
    Memory,
    Work,
    hide,
    hide_earlier,
    slot,
)
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import COLUMNS, LOG2_E, accumulator, along_columns, opaque


@dataclasses.dataclass(frozen=True)
class Products:
    """A warpgroup that multiplies, and what it does, from the whole to its parts.

    Attributes:
      scale: of the logits.
      dtype: of P and dS as operands of dV and dK.
      dq_dtype: of dS and K' as those of dQ.
      in_fp32: dK and dV leave as they are; else in `dtype`, whose bits are written into
        shared memory of type `dq_dtype`.
      storers: how many threads add tiles of dQ, in turns.
      piece, columns: which part of a block's dQ is made here, of queries or of columns.
    """

    work: Work
    smem: Memory
    barriers: Barriers
    scale: float
    dtype: jnp.dtype
    dq_dtype: jnp.dtype
    in_fp32: bool
    storers: int
    warpgroup: jax.Array
    piece: Any
    columns: Any

    @classmethod
    def of(cls, warpgroup: jax.Array, work: Work, **given: Any) -> "Products":
        own = {"piece": 0, "columns": pl.ds(warpgroup * 64, 64)}
        if work.shapes.queries == 128:
            own = {"piece": warpgroup, "columns": slice(None)}
        return cls(warpgroup=warpgroup, work=work, **own, **given)

    def make_all(self, row_unscale, dk_gmem, dv_gmem) -> None:
        """All items of the CTA. `row_unscale`: of each head, what undoes dS's scale."""

        def make(item, first, number):
            unscale = row_unscale[item.b, item.kv_head]
            dk, dv = self._sums(item, first)
            # Others read this K' and this dS until the last dQ is made. What comes
            # next into either is written by this warpgroup.
            plgpu.barrier_arrive(self.barriers.all_done)
            plgpu.barrier_wait(self.barriers.all_done)
            here = opaque(self.warpgroup)
            # Anew, rather than in registers all along.
            done = self.work.item(opaque(number))
            first_row = done.tile * KEY_TILE + here * KEYS
            out = (done.b, pl.ds(first_row, KEYS), done.key_part)
            dk, dv = dk * unscale, dv * unscale
            if self.in_fp32:
                dk_gmem[out], dv_gmem[out] = dk * self.scale, dv
                return
            self._leave(here, out, dk * self.scale, dv, dk_gmem, dv_gmem)

        self.work.for_each(make)
        plgpu.wait_smem_to_gmem(0)

    def _sums(self, item: Item, first: jax.Array):
        """dK and dV of an item, of whose steps in all `first` is the first."""
        shapes = self.work.shapes
        plgpu.barrier_wait(self.barriers.tile_ready)
        self._make_keys()

        def accumulate(dk_acc, dv_acc):
            # The block before the first one: dS = 0, its dQ goes nowhere.
            zero = jnp.zeros((KEYS, shapes.queries), jnp.float32)
            zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
            take = functools.partial(self._take, item, first, dk_acc, dv_acc)
            none = functools.partial(self._take_none, first)
            if self.work.is_masked:
                self._put_ds(zero, _buffer_before(first))
                self._take_seen(item, take, functools.partial(none, zero))
            else:
                self._take_all(item, first, zero, take, none)
            self._last_dq(first + item.steps - 1)
            return dk_acc[...], dv_acc[...]

        total = accumulator(KEYS, shapes.head_dim)
        return pl.run_scoped(accumulate, total, total)

    def _take_all(self, item: Item, first: jax.Array, zero, take, none) -> None:
        """The steps of an item without a mask."""
        steps = item.steps
        # A warpgroup without keys has nothing to multiply, and leaves the tensor cores
        # to the other.
        some_are_idle = self.work.some_are_idle
        if some_are_idle:
            has_keys = self.work.has_keys(item.tile, self.warpgroup)
            steps = jnp.where(has_keys, steps, 0)

            # The others read both buffers, and nothing more is written.
            @pl.when(~has_keys)
            def _():
                self._write_ds(zero, _buffer(first))
                self._release_tile()

        self._put_ds(zero, _buffer_before(first))
        pl.loop(0, steps)(functools.partial(take, None, steps - 1))
        if some_are_idle:
            pl.loop(steps, item.steps)(functools.partial(none, None))

    def _take_seen(self, item: Item, take, none) -> None:
        """The steps of an item under a mask, which may hide the keys of one warpgroup
        from the first blocks, or from the last ones."""
        begin, end = self.work.seen(item, self.warpgroup)
        # Else the last step that sees a key does.
        pl.when(begin >= end)(self._release_tile)

        def of_head(start, last):
            first, past = start + begin, start + end
            diagonal = start + self.work.diagonal(item, begin, end)
            pl.loop(start, first)(none)
            pl.loop(first, past)(functools.partial(take, diagonal, last))
            pl.loop(past, start + item.blocks)(none)

        group = self.work.shapes.group
        if group == 1:
            of_head(jnp.int32(0), end - 1)
        else:
            last = item.blocks * (group - 1) + end - 1
            pl.loop(0, group)(lambda head: of_head(head * item.blocks, last))

    def _take(self, item: Item, first, dk_acc, dv_acc, diagonal, last, turn) -> None:
        """A step: what a block adds to dK and dV, and the dQ of the block before.
        `diagonal`: the turn of a head at which a causal mask hides something; `last`:
        the one after which the warpgroup is done with K and V."""
        step = first + turn
        barriers, smem = self.barriers, self.smem
        now, before = slot(step), _buffer_before(step)
        block_acc = accumulator(KEYS, self.work.shapes.queries)
        plgpu.barrier_wait(barriers.q_ready.at[now])

        def first_products(s_acc, dq_acc):
            at = opaque(self.warpgroup)
            plgpu.wgmma(s_acc, smem.k.at[at], smem.q.at[now].transpose((1, 0)))
            plgpu.barrier_wait(barriers.ds_ready.at[before])
            self._dq_product(dq_acc, before)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=WARPGROUPS)
            pl.when(turn == last)(lambda: plgpu.barrier_arrive(barriers.k_free))
            p = self._probabilities(s, item, diagonal, turn, step)
            # Keeps ptxas from moving the wait for dQ above the exponentials.
            plgpu.barrier_wait(barriers.dout_ready.at[now])
            return p, dq_acc[...]

        p, dq = pl.run_scoped(first_products, block_acc, _DQ_PIECE)
        self._hand_on_dq_before(dq, turn, step)

        def second_products(dp_acc):
            at = opaque(self.warpgroup)
            plgpu.wgmma(dp_acc, smem.v.at[at], smem.dout.at[now].transpose((1, 0)))
            plgpu.wgmma(dv_acc, p.astype(self.dtype), smem.dout.at[now])
            return plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)

        dp = pl.run_scoped(second_products, block_acc)
        pl.when(turn == last)(lambda: plgpu.barrier_arrive(barriers.v_free))
        ds = self._gradient(p, dp, step)
        self._put_ds(ds, _buffer(step))
        plgpu.wgmma(dk_acc, ds.astype(self.dtype), smem.q.at[now])
        plgpu.wgmma_wait(0)
        self._release_block(step)

    def _take_none(self, first, zero, turn) -> None:
        """A step whose block sees none of one's own keys: a piece of the dQ of the
        block before, and 0 as this one's dS. `zero`: that 0, to be written. None: it is
        in both buffers already, and one's own keys add nothing to dQ (`_take_all`)."""
        step = first + turn
        barriers = self.barriers
        plgpu.barrier_wait(barriers.q_ready.at[slot(step)])

        def product(dq_acc):
            before = _buffer_before(step)
            plgpu.barrier_wait(barriers.ds_ready.at[before])
            of = WARPGROUPS if zero is not None else WARPGROUPS - 1
            self._dq_product(dq_acc, before, of)
            return dq_acc[...]

        dq = pl.run_scoped(product, _DQ_PIECE)
        if zero is not None:
            self._write_ds(zero, _buffer(step))
        plgpu.barrier_arrive(barriers.ds_ready.at[_buffer(step)])
        plgpu.barrier_wait(barriers.dout_ready.at[slot(step)])
        self._release_block(step)
        self._hand_on_dq_before(dq, turn, step)

    def _last_dq(self, step) -> None:
        """The dQ of an item's last block."""

        def product(dq_acc):
            last = _buffer(step)
            plgpu.barrier_wait(self.barriers.ds_ready.at[last])
            self._dq_product(dq_acc, last)
            return dq_acc[...]

        self._hand_on_dq(pl.run_scoped(product, _DQ_PIECE), step)

    def _dq_product(self, dq_acc, buffer, warpgroups: int = WARPGROUPS) -> None:
        """dq_acc += dS K' over the keys of the first `warpgroups`; dS of a buffer."""
        for w in range(warpgroups):
            at = w + opaque(jnp.int32(0))
            plgpu.wgmma(
                dq_acc,
                self.smem.ds.at[buffer, at, self.piece].transpose((1, 0)),
                self.smem.keys.at[at, :, self.columns],
            )

    def _hand_on_dq_before(self, dq, turn, step) -> None:
        @pl.when(turn > 0)
        def _():
            self._hand_on_dq(dq, step - 1)

    def _hand_on_dq(self, dq, step) -> None:
        """A piece of a step's tile of dQ, to who adds it, once the tile of the step
        before is read."""
        before = rem(step + self.storers - 1, self.storers)
        plgpu.barrier_wait(self.barriers.dq_free.at[before])
        self.smem.dq[opaque(self.warpgroup)] = dq
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.dq_ready.at[rem(step, self.storers)])

    def _probabilities(self, s, item: Item, diagonal, turn, step):
        """P^T of a block from its logits."""
        if self.work.is_causal:
            s = hide_earlier(s, self.work, turn == diagonal, self.warpgroup)
        else:
            _, _, block = self.work.block_of(item, turn)
            s = hide(s, self.work, item.tile, block, self.warpgroup)
        row_lse = plgpu.load(self.smem.rows.at[0, slot(step)], layout=COLUMNS)
        return jnp.exp2(s * (self.scale * LOG2_E) - along_columns(row_lse, s.shape))

    def _gradient(self, p, dp, step):
        """dS^T of a block."""
        row_delta = plgpu.load(self.smem.rows.at[1, slot(step)], layout=COLUMNS)
        return p * (dp - along_columns(row_delta, dp.shape))

    def _put_ds(self, ds, buffer) -> None:
        """dS for dQ, into shared memory."""
        self._write_ds(ds, buffer)
        plgpu.barrier_arrive(self.barriers.ds_ready.at[buffer])

    def _write_ds(self, ds, buffer) -> None:
        here = opaque(self.warpgroup)
        for i in range(self.work.shapes.queries // 64):
            piece = lax.slice(ds, (0, i * 64), (KEYS, (i + 1) * 64))
            self.smem.ds[buffer, here, i] = piece.astype(self.dq_dtype)
        plgpu.commit_smem()

    def _release_block(self, step) -> None:
        # Orders the reads of rows before TMA's next write to them.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.dout_free.at[slot(step)])
        plgpu.barrier_arrive(self.barriers.q_free.at[slot(step)])

    def _release_tile(self) -> None:
        plgpu.barrier_arrive(self.barriers.k_free)
        plgpu.barrier_arrive(self.barriers.v_free)

    def _make_keys(self) -> None:
        """K' of one's own keys; what is written next commits it."""
        smem, here = self.smem, opaque(self.warpgroup)
        wide = smem.k[here].astype(jnp.float32)
        row = plgpu.load(smem.columns.at[0], layout=COLUMNS)
        wide = wide - along_columns(row, wide.shape)
        wide = wide * smem.columns[1, 0]
        # dK and dV of the keys before have left.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.keys[here] = wide.astype(self.dq_dtype)

    def _leave(self, here, out, dk, dv, dk_gmem, dv_gmem) -> None:
        """dK and dV, rounded, by way of where K' and dS were."""
        of_dk = [self.smem.keys.at[here]]
        of_dv = [
            self.smem.ds.at[i, here, 0] for i in range(self.work.shapes.head_dim // 64)
        ]
        self._write(dk, of_dk)
        self._write(dv, of_dv)
        plgpu.commit_smem()
        self._put(of_dk, dk_gmem, out)
        self._put(of_dv, dv_gmem, out)

    def _write(self, x, targets) -> None:
        """A tile into shared memory, by columns. That has dQ's operands' type, so the
        bits go as such."""
        low = lax.bitcast_convert_type(x.astype(self.dtype), self.dq_dtype)
        width = self.work.shapes.head_dim // len(targets)
        for i, smem in enumerate(targets):
            smem[...] = lax.slice(low, (0, i * width), (KEYS, (i + 1) * width))

    def _put(self, targets, gmem, out) -> None:
        width = self.work.shapes.head_dim // len(targets)
        for i, smem in enumerate(targets):
            columns = pl.ds(i * width, width)
            plgpu.copy_smem_to_gmem(smem, gmem.at[(*out, columns)])


_DQ_PIECE = accumulator(64, 64)


def _buffer(step: jax.Array) -> jax.Array:
    """Where a step's dS is."""
    return rem(step, DS_BUFFERS)


def _buffer_before(step: jax.Array) -> jax.Array:
    """Where the dS of the step before is."""
    return rem(step + DS_BUFFERS - 1, DS_BUFFERS)
