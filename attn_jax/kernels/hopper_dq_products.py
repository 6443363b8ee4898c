"""What the warpgroups of Hopper's kernel for dQ do.

`hopper_backward_dq` has the formulas, and says where they round.

A step is a block of keys against a warpgroup's rows of queries.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels.hopper_backward_form import BackwardForm
from attn_jax.kernels.integers import rem
from attn_jax.kernels.tiles import (
    COLUMNS,
    GROUP,
    LOG2_E,
    ROWS,
    accumulator,
    along_columns,
    along_rows,
    block_counts,
    capped,
    found_anew,
    head_of,
    hide_from,
    partial_sum,
    read_tile,
    row_positions,
    smem_tile,
    stream,
    visible,
    widen,
)
from attn_jax.kernels.visibility import Pairs, hide

# What has a centre of its own: a key head, a warpgroup's rows, a query whatever its
# head, or a query of a query head.
Centre = Literal["head", "rows", "query", "query of head"]


@dataclasses.dataclass(frozen=True)
class Form(BackwardForm):
    """A call as it is known when it is compiled.

    Attributes:
      centre: what has one that dQ subtracts; None: dQ subtracts none.
      half_slots: blocks in flight of K as FP16 numbers; 0: dQ is made of K itself.
      makes_delta: rowsum(P dP) is what is made, and not dQ.
      wide: dQ leaves in FP32.
    """

    query_heads: int
    key_heads: int
    key_count: int
    centre: Centre | None
    half_slots: int
    makes_delta: bool

    @property
    def tile_count(self) -> int:
        return pl.cdiv(self.query_count, self.tiling.tile)

    @property
    def numbers(self) -> int:
        """Of a query, which come with it: LSE and, where dQ is made, delta and dLSE."""
        return 1 if self.makes_delta else 3

    @property
    def centre_is_shared(self) -> bool:
        """Between query heads: then it comes with the queries."""
        return self.centre not in (None, "query of head")


class Inputs(NamedTuple):
    """What is in global memory; None where a call has it not.

    `rows` are the `Form.numbers`. `half` is K as FP16 numbers and, of each key head,
    what undoes its and dS's powers of two: in sums of dS, and in two steps in dQ.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any
    centre: Any
    row_centre: Any
    half: Any
    pairs: Pairs | None
    bias: Any


class Memory(NamedTuple):
    """Shared memory: of the queries by warpgroup, of the keys by slot."""

    q: Any
    dout: Any
    k: Any
    v: Any
    half: Any
    rows: Any
    centre: Any

    @classmethod
    def scratch(cls, form: Form) -> "Memory":
        tiling = form.tiling
        warpgroups, columns = tiling.warpgroups, tiling.columns
        head_dim, value_dim = form.head_dim, form.value_dim
        half = None
        if form.half_slots:
            half = (form.half_slots, columns, head_dim)
            half = smem_tile(half, jnp.float16, columns)
        centre = plgpu.SMEM((warpgroups, head_dim), jnp.float32)
        return cls(
            # S = Q K^T and dS K, a sum over `columns`, both read K.
            q=smem_tile((warpgroups, tiling.rows, head_dim), form.dtype, columns),
            dout=smem_tile((warpgroups, tiling.rows, value_dim), form.dtype),
            k=smem_tile((tiling.stages, columns, head_dim), form.dtype, columns),
            v=smem_tile((tiling.stages, columns, value_dim), form.dtype),
            half=half,
            rows=plgpu.SMEM((warpgroups, form.numbers, tiling.rows), jnp.float32),
            centre=centre if form.centre_is_shared else None,
        )


class Barriers(NamedTuple):
    """`tile_ready` by warpgroup, the others by slot."""

    tile_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    half_ready: Any
    half_free: Any

    @classmethod
    def scratch(cls, form: Form) -> "Barriers":
        warpgroups, stages = form.tiling.warpgroups, form.tiling.stages
        copies = 2 + form.numbers + form.centre_is_shared
        free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
        half_ready = half_free = None
        if slots := form.half_slots:
            half_ready = plgpu.Barrier(num_barriers=slots)
            half_free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots)
        return cls(
            tile_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=warpgroups),
            k_ready=plgpu.Barrier(num_barriers=stages),
            v_ready=plgpu.Barrier(num_barriers=stages),
            k_free=free,
            v_free=free,
            half_ready=half_ready,
            half_free=half_free,
        )


@dataclasses.dataclass(frozen=True)
class Work:
    """The tile of queries that a CTA has, and the `blocks` of keys that they see.

    Attributes:
      whole: without `pairs`: so many first blocks are seen whole.
      listed: with `pairs`, how many blocks are seen, and which.
    """

    form: Form
    b: jax.Array
    n: jax.Array
    kv_head: jax.Array
    tile: jax.Array
    whole: jax.Array
    blocks: jax.Array
    pairs: Pairs | None
    listed: Any

    @classmethod
    def of(cls, form: Form, pairs: Pairs | None) -> "Work":
        """That of the CTA which runs this."""
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        tile = jnp.int32(form.tile_count - 1) - lax.axis_index("tile")
        kv_head = lax.div(n, jnp.int32(form.query_heads // form.key_heads))
        if pairs is None:
            listed, rows = None, form.tiling.tile
            whole, blocks = block_counts(
                *(tile * rows, rows, form.tiling.columns),
                *(form.key_count, form.is_causal),
            )
        else:
            listed = pairs.entries(b, n, tile)
            whole, blocks = jnp.int32(0), listed[0]
        return cls(form, b, n, kv_head, tile, whole, blocks, pairs, listed)

    def slot(self, j: jax.Array) -> jax.Array:
        return rem(j, self.form.tiling.stages)

    def half_slot(self, j: jax.Array) -> jax.Array:
        return rem(j, self.form.half_slots)

    def first_key(self, j: jax.Array) -> jax.Array:
        """Of a step's block."""
        if self.listed is not None:
            j = lax.div(self.listed[j + 1], jnp.int32(2))
        return j * self.form.tiling.columns

    def is_whole(self, j: jax.Array) -> jax.Array:
        """Whether a step's pairs are all seen."""
        if self.listed is None:
            return j < self.whole
        return lax.rem(self.listed[j + 1], jnp.int32(2)) == 0


class _Rows(NamedTuple):
    """LSE in units of log2, and delta, of a warpgroup's queries."""

    lse: jax.Array
    delta: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Products:
    """A warpgroup that multiplies, and what it does, from the whole to its parts."""

    work: Work
    gmem: Inputs
    smem: Memory
    barriers: Barriers
    warpgroup: jax.Array
    first_row: jax.Array

    @classmethod
    def of(cls, warpgroup, work: Work, gmem, smem, barriers) -> "Products":
        tiling = work.form.tiling
        first_row = work.tile * tiling.tile + warpgroup * tiling.rows
        return cls(work, gmem, smem, barriers, warpgroup, first_row)

    def make(self, result_gmem) -> None:
        """dQ of the warpgroup's queries, or delta."""
        self._load_tile()
        work, form, tiling = self.work, self.work.form, self.work.form.tiling
        lse = self._numbers(0)  # in units of log2 where dS is scaled
        if self.gmem.half is None:
            lse = lse * LOG2_E
        rows = _Rows(lse, None if form.makes_delta else self._numbers(1))
        if form.makes_delta:
            delta = self._row_sums(rows, None)
            result_gmem[work.b, work.n, pl.ds(self.first_row, tiling.rows)] = delta
            return

        def sums(dq_acc):
            ds_sum = self._row_sums(rows, dq_acc)
            return dq_acc[...], ds_sum

        total = accumulator(tiling.rows, form.head_dim)
        dq, ds_sum = pl.run_scoped(sums, total)
        if self.gmem.half is not None:
            of_sum, first, second = (x[work.b, work.kv_head] for x in self.gmem.half[1])
            dq, ds_sum = dq * first * second, ds_sum * of_sum
        if form.centre is not None:
            dq = self._centred(dq, ds_sum)
        self._leave(dq * form.scale, result_gmem)

    def _queries(self):
        """Where the warpgroup's queries are in Q, dO and dQ."""
        work = self.work
        return work.b, pl.ds(self.first_row, work.form.tiling.rows), work.n

    def _load_tile(self) -> None:
        work, gmem, smem, here = self.work, self.gmem, self.smem, self.warpgroup
        ready = self.barriers.tile_ready.at[here]
        queries = self._queries()
        plgpu.copy_gmem_to_smem(gmem.q.at[queries], smem.q.at[here], ready)
        plgpu.copy_gmem_to_smem(gmem.dout.at[queries], smem.dout.at[here], ready)
        for i, numbers in enumerate(gmem.rows):
            own = numbers.at[
                work.b, work.n, pl.ds(self.first_row, work.form.tiling.rows)
            ]
            plgpu.copy_gmem_to_smem(own, smem.rows.at[here, i], ready)
        if work.form.centre_is_shared:
            index = jnp.int32(0)
            if work.form.centre == "rows":
                index = work.tile * work.form.tiling.warpgroups + here
            centre = gmem.centre.at[work.b, work.kv_head, index]
            plgpu.copy_gmem_to_smem(centre, smem.centre.at[here], ready)
        plgpu.barrier_wait(ready)

    def _numbers(self, i: int):
        return plgpu.load(self.smem.rows.at[self.warpgroup, i], layout=ROWS)

    def _row_sums(self, rows: _Rows, dq_acc):
        """Over the keys: of rounded dS, whose product with K is added to `dq_acc`, or
        of P dP."""
        plgpu.barrier_wait(self.barriers.k_ready.at[0])
        row_sum = plgpu.layout_cast(
            jnp.zeros((self.work.form.tiling.rows, GROUP), jnp.float32),
            plgpu.Layout.WGMMA,
        )
        row_sum = lax.fori_loop(
            jnp.int32(0),
            self.work.blocks,
            lambda j, row_sum: self._take(j, row_sum, rows, dq_acc),
            row_sum,
        )
        return row_sum.sum(axis=1)

    def _take(self, j, row_sum, rows: _Rows, dq_acc):
        """A step: the row sums and dQ with a block of keys."""
        work, smem, barriers = self.work, self.smem, self.barriers
        form, tiling = work.form, work.form.tiling
        now, is_whole = work.slot(j), work.is_whole(j)
        at = found_anew(self.warpgroup) if form.saves_registers else self.warpgroup

        def products(s_acc, dp_acc):
            plgpu.wgmma(s_acc, smem.q.at[at], smem.k.at[now].transpose((1, 0)))
            plgpu.barrier_wait(barriers.v_ready.at[now])
            plgpu.wgmma(dp_acc, smem.dout.at[at], smem.v.at[now].transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            if smem.half is not None:
                plgpu.barrier_arrive(barriers.k_free.at[now])
            p = self._probabilities(s, j, is_whole, rows.lse)
            # As in the forward pass, these waits keep ptxas from moving the wait for dP
            # above the exponentials. A wait further down would have exponentials moved
            # below it.
            if smem.half is not None:
                plgpu.barrier_wait(barriers.half_ready.at[work.half_slot(j)])

            @pl.when(j + 1 < work.blocks)
            def _():
                plgpu.barrier_wait(barriers.k_ready.at[work.slot(j + 1)])

            return p, dp_acc[...]

        of_block = accumulator(tiling.rows, tiling.columns)
        p, dp = pl.run_scoped(products, of_block, of_block)
        plgpu.barrier_arrive(barriers.v_free.at[now])
        if rows.delta is None:
            plgpu.barrier_arrive(barriers.k_free.at[now])
            return row_sum + partial_sum(p * dp)
        exact = p * (dp - along_rows(rows.delta, dp.shape))
        if smem.half is None:
            keys, keys_free = smem.k.at[now], barriers.k_free.at[now]
        else:
            place = work.half_slot(j)
            keys, keys_free = smem.half.at[place], barriers.half_free.at[place]
        ds = exact.astype(keys.dtype)
        plgpu.wgmma(dq_acc, ds, keys)
        if form.centre is not None:
            added = widen(ds)
            if form.soft_cap is not None:
                added -= exact
            row_sum = row_sum + partial_sum(added)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(keys_free)
        return row_sum

    def _probabilities(self, s, j, is_whole, row_lse):
        """P of a block from its products; for dQ, times the soft cap's slope, since all
        that P is for there is dS = P (dP - delta) slope."""
        work, form = self.work, self.work.form
        bias = None
        if self.gmem.bias is not None:
            of_head = head_of(self.gmem.bias, work.b, work.n)
            bias = read_tile(of_head, self.first_row, work.first_key(j), s.shape)
        s, slope = capped(s, form.scale, form.soft_cap, bias)
        s = lax.cond(is_whole, lambda s: s, lambda s: self._hide(s, j), s)
        p = jnp.exp2(s * form.unit - along_rows(row_lse, s.shape))
        return p if slope is None or form.makes_delta else p * slope

    def _hide(self, s, j):
        """Logits of a block, -inf where the query does not see the key."""
        work, form = self.work, self.work.form
        first_key = work.first_key(j)
        if work.pairs is not None:
            places = work.b, work.n, self.first_row, first_key
            return hide(s, work.pairs, form.band, *places)
        if form.saves_registers:
            seen = form.key_count - first_key
            if form.is_causal:
                diagonal = self.first_row + 1 - first_key
                diagonal = row_positions(form.tiling.rows) + diagonal
                seen = jnp.minimum(diagonal, seen)
            return hide_from(s, seen)
        seen = visible(
            s.shape,
            query_start=self.first_row,
            key_start=first_key,
            key_count=form.key_count,
            is_causal=form.is_causal,
        )
        return jnp.where(seen, s, -jnp.inf)

    def _centred(self, dq, ds_sum):
        """dQ less what rounding left in the row sums, times the centre."""
        work, form = self.work, self.work.form
        own = None
        if form.centre == "query":
            queries = pl.ds(self.first_row, form.tiling.rows)
            own = self.gmem.centre.at[work.b, work.kv_head, queries]
        elif form.centre == "query of head":
            own = self.gmem.row_centre.at[self._queries()]
        if own is not None:
            centres = plgpu.load(own, layout=plgpu.Layout.WGMMA, optimized=False)
        else:
            row = plgpu.load(self.smem.centre.at[self.warpgroup], layout=COLUMNS)
            centres = along_columns(row, dq.shape)
        excess = ds_sum if form.soft_cap is not None else ds_sum - self._numbers(2)
        return dq - along_rows(excess, dq.shape) * centres

    def _leave(self, dq, result_gmem) -> None:
        """As it is or, by way of where Q was, rounded."""
        form, queries = self.work.form, self._queries()
        if form.wide:
            result_gmem[queries] = dq
            return
        q_tile = self.smem.q.at[self.warpgroup]
        q_tile[...] = dq.astype(form.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, result_gmem.at[queries])
        plgpu.wait_smem_to_gmem(0)


def load_blocks(work: Work, gmem: Inputs, smem: Memory, barriers: Barriers) -> None:
    """What the warpgroup that loads does: K and V, and K as FP16 numbers, by block."""
    columns, stages = work.form.tiling.columns, work.form.tiling.stages

    def load(of, tiles, ready, place, j):
        keys = pl.ds(work.first_key(j), columns)
        block = of.at[work.b, keys, work.kv_head]
        plgpu.copy_gmem_to_smem(block, tiles.at[place], ready.at[place])

    def load_k(j):
        load(gmem.k, smem.k, barriers.k_ready, work.slot(j), j)

    def load_v(j):
        load(gmem.v, smem.v, barriers.v_ready, work.slot(j), j)

    def load_half(j):
        load(gmem.half[0], smem.half, barriers.half_ready, work.half_slot(j), j)

    buffers = [(load_k, barriers.k_free), (load_v, barriers.v_free)]
    if smem.half is None:
        stream(work.blocks, stages, buffers)
    else:
        slots = stages, stages, work.form.half_slots
        stream(work.blocks, slots, [*buffers, (load_half, barriers.half_free)])
