"""What a consumer warpgroup of Hopper's forward kernel does: attention of its rows.

`hopper_forward` says what is computed, and where it rounds. In a *step* a warpgroup
meets a block of keys; the logits of one step are made while P V of the step before is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels import hopper_links
from attn_jax.kernels.hopper_forward_form import Form, Refs, Seen
from attn_jax.kernels.hopper_hidden import Hidden
from attn_jax.kernels.hopper_loads import Loaded, Stages
from attn_jax.kernels.hopper_outputs import Carried, Outputs
from attn_jax.kernels.hopper_softmax import State
from attn_jax.kernels.tiles import accumulator, along_rows


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One warpgroup of a CTA. `turns`: how many tiles the CTA has."""

    form: Form
    q: Loaded
    steps: Stages
    refs: Refs
    seen: Seen
    cta: Any
    warpgroup: Any
    turns: Callable[[], Any]

    def consume(self, for_each_tile: Callable) -> None:
        """Attention of the warpgroup's rows of all tiles."""
        form, start = self.form, jnp.int32(0)
        s_ahead = None
        if form.ahead:
            s_ahead = self.logits_ahead(start, start, lambda: None)
        end, _ = for_each_tile(self.tile, (start, s_ahead))
        if form.released_late:
            pl.when(end > 0)(lambda: self.release_kept(end))
        plgpu.wait_smem_to_gmem(0)

    def tile(self, turn, b, n, tile, carry):
        """Attention of the rows of one, for `hopper_loads.for_each_tile`. The result is
        the next first step, with the logits there if they are made ahead."""
        form, (first_step, s_ahead) = self.form, carry
        rows = self._rows(turn, b, n, tile, first_step)
        if form.ahead:
            yield
            yield rows.tile_last + 1, rows.attend_ahead(s_ahead)
            return
        if form.ends:
            yield
            meets = rows.start <= rows.last
            pl.when(meets)(lambda: rows.leave(*rows.attend()))
            pl.when(jnp.logical_not(meets))(rows.end_alone)
        elif form.strips.idle:
            # Where results come out of a branch, ptxas makes a slower loop in it: out
            # took 4 % longer at 4160 keys and head dim 64 (H200).
            yield
            has_rows = rows.row < form.query_count
            pl.when(has_rows)(lambda: rows.leave(*rows.attend()))
            pl.when(jnp.logical_not(has_rows))(rows.stand_by)
        else:
            found = rows.attend()
            yield
            rows.leave(*found)
        yield rows.tile_last + 1, None

    def _rows(self, turn, b, n, tile, first_step) -> "Rows":
        form, pairs, sinks = self.form, self.refs.pairs, self.refs.sinks
        row = form.strips.strip(tile, self.warpgroup) * form.tiling.rows
        if pairs is None:
            tile_first, tile_end = self.seen.of_tile(tile)
            listed, (first, end) = None, self.seen.of_rows(row, row + form.tiling.rows)
            if form.strips.idle:
                first = jnp.where(row < form.query_count, first, tile_first)
                end = jnp.where(row < form.query_count, end, tile_end)
        else:
            listed = pairs.entries(b, n, tile)
            tile_first = first = jnp.int32(0)
            tile_end = end = listed[0]
        tile_last = first_step + (tile_end - tile_first) - 1
        start = first_step + (tile_end - end)
        last = first_step + (tile_end - first) - 1
        hidden = Hidden(
            *(b, n, row, form.counted, pairs, listed, form.band, first_step),
            *(start, end, form.in_links, self.refs.bias, form.scale, form.soft_cap),
        )
        floor = None
        if sinks is not None and form.softmax.rescale_threshold:
            floor = form.softmax.of_sink(sinks[0, n])
        steps = first_step, start, last, tile_last
        return Rows(self, turn, b, n, row, *steps, hidden, floor)

    def release_kept(self, end) -> None:
        """Lets go of the last block before `end`, by way of which out has left."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.steps.release(self.steps.k, end - 1)

    def logits_ahead(self, step, turn, meanwhile: Callable[[], None]) -> jax.Array:
        """Logits of a tile's first block; `meanwhile()` is done under their product.
        After a CTA's last tile they are of what lies there, for nobody."""
        q, steps, tiling = self.q, self.steps, self.form.tiling
        there = turn < self.turns()

        @pl.when(there)
        def _():
            steps.await_block(steps.k, step)
            plgpu.barrier_wait(q.ready.at[self.warpgroup])

        def product(s_acc):
            plgpu.wgmma(s_acc, q.smem.at[self.warpgroup], steps.keys(step))
            meanwhile()
            return s_acc[...]

        s = pl.run_scoped(product, accumulator(tiling.rows, tiling.columns))
        pl.when(there)(lambda: steps.release(steps.k, step))
        return s


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that a warpgroup has of a tile, from `row` on.

    Attributes:
      turn: the tile's number in its CTA.
      b, n: batch entry and query head.
      first_step, tile_last: the tile's first and last step.
      start, last: those of these rows.
      floor: where a row's largest logit starts, if not at -inf.
    """

    of: Consumer
    turn: Any
    b: Any
    n: Any
    row: Any
    first_step: Any
    start: Any
    last: Any
    tile_last: Any
    hidden: Hidden
    floor: Any

    def attend(self) -> tuple[jax.Array, State]:
        """(sum of P V, state) of all blocks, and past those that others see."""
        form = self.of.form
        found = self._attend_in_links() if form.in_links else self._attend_once()
        if form.counted.is_window and form.tiling.warpgroups > 1:
            self.of.steps.skip(self.last + 1, self.tile_last + 1)
        return found

    def _attend_once(self) -> tuple[jax.Array, State]:
        """In one accumulator."""
        return pl.run_scoped(
            lambda acc: self._attend(self._q(), acc, self.start, self.last, None),
            self._accumulator(),
        )

    def _attend_in_links(self) -> tuple[jax.Array, State]:
        """By `hopper_links`."""
        of, form = self.of, self.of.form
        assert of.refs.sums is not None
        q = self._q()
        found = hopper_links.attend_in_links(
            functools.partial(self._attend, q),
            of.refs.sums.at[of.cta, of.warpgroup],
            self.start,
            self.last,
            link_steps=form.link_blocks,
            softmax=form.softmax,
            floor=self.floor,
        )
        if not form.tiling.q_registers:
            plgpu.barrier_arrive(of.q.free)
        return found

    def attend_ahead(self, s_ahead: jax.Array) -> jax.Array:
        """Attention with the first logits there, up to its results; meanwhile the next
        tile's first logits are made, which it returns."""
        of, steps = self.of, self.of.steps

        def attend(acc):
            state, p = self._go_on(self._q(), acc, s_ahead, self.start, self.last, None)
            self._add_last(acc, p, self.last)

            def meanwhile():
                total = plgpu.wgmma_accumulator_load(acc, wait_n=1)
                steps.release(steps.v, self.last)
                self.leave(total, state)

            return of.logits_ahead(self.last + 1, self.turn + 1, meanwhile)

        return pl.run_scoped(attend, self._accumulator())

    def stand_by(self) -> None:
        """Without rows: lets go of what the others multiply."""
        form, steps = self.of.form, self.of.steps
        self._q()
        if not form.tiling.q_registers:
            plgpu.barrier_arrive(self.of.q.free)

        @pl.loop(self.start, self.last + 1)
        def _(step):
            steps.await_block(steps.k, step)
            self._release_k(step)
            steps.await_block(steps.v, step)
            steps.release(steps.v, step)

        if form.out_by_key:
            self._await_place()
            self._release_place()

    def leave(self, acc: jax.Array, state: State) -> None:
        """The results of the rows."""
        of, form, refs, b, n = self.of, self.of.form, self.of.refs, self.b, self.n
        rows = form.tiling.rows
        own_rows = pl.ds(self.row, rows)
        if form.carries:
            unscale = 1.0
            if refs.unscale is not None:
                unscale = refs.unscale(b, n)
            new = acc, state, form.softmax, unscale, b, n, form.first_row + self.row
            if form.ends:
                refs.before.end(*new, refs.ended)
                return
            after = Carried(refs.lse, refs.row_sum, refs.out)
            keep = after.begin if refs.before is None else after.add
            keep(*new)
            return
        sink = None if refs.sinks is None else refs.sinks[0, n]
        inverse, refs.lse[b, n, own_rows] = form.softmax.finished(state, sink)
        out = acc * along_rows(inverse, acc.shape)
        if refs.unscale is not None:
            out *= refs.unscale(b, n)
        if form.wide_out:
            # Two FP32 tiles do not fit in shared memory beside K and V.
            refs.out[b, own_rows, n] = out
            return
        if form.out_by_key:
            k = of.steps.k
            place = pl.ds(pl.multiple_of(of.warpgroup * rows, rows), rows)
            self._await_place()
            tile = k.smem.at[of.steps.slot(self.tile_last), place]
        else:
            tile = refs.out_smem.at[of.warpgroup]
        stored = form.tiling.stored(form.value_dim)
        Outputs(refs.out, refs.low, tile).write(out, b, n, self.row, stored)
        if form.out_by_key:
            self._release_place()

    def end_alone(self) -> None:
        """The results of rows that meet none of these keys."""
        form, refs = self.of.form, self.of.refs
        shape = form.tiling.rows, form.value_dim
        refs.before.end_alone(
            shape, self.b, self.n, form.first_row + self.row, refs.ended
        )

    def _await_place(self) -> None:
        """Until all have read the last block of K, in whose place out may be then."""
        steps = self.of.steps
        plgpu.barrier_wait(steps.k.free.at[steps.count])

    def _release_place(self) -> None:
        if not self.of.form.released_late:
            self.of.release_kept(self.tile_last + 1)

    def _accumulator(self):
        return accumulator(self.of.form.tiling.rows, self.of.form.value_dim)

    def _q(self):
        """Q as a left operand, once the warpgroup's first block is next."""
        of, form, warpgroup = self.of, self.of.form, self.of.warpgroup
        if form.released_late:
            pl.when(self.turn > 0)(lambda: of.release_kept(self.first_step))
        if form.counted.band.right is not None and form.tiling.warpgroups > 1:
            of.steps.skip(self.first_step, self.start)
        if not form.ahead:
            plgpu.barrier_wait(of.q.ready.at[warpgroup])
        tile = of.q.smem.at[warpgroup]
        if not form.tiling.q_registers:
            return tile
        q = tile[...]
        # Orders the read before TMA's next write to the tile.
        plgpu.commit_smem()
        plgpu.barrier_arrive(of.q.free)
        return q

    def _release_k(self, step) -> None:
        """The tile's last one is kept: a barrier counts who has read it."""
        steps = self.of.steps
        place = steps.slot(step)
        if self.of.form.out_by_key:
            place = jnp.where(step == self.tile_last, jnp.int32(steps.count), place)
        plgpu.barrier_arrive(steps.k.free.at[place])

    def _await_k(self, step, last) -> None:
        @pl.when(step <= last)
        def _():
            self.of.steps.await_block(self.of.steps.k, step)

    def _attend(self, q, acc, first, last, before: State | None):
        """(sum of P V, state) of the blocks first, ..., last. `before`: the state of
        those before them."""
        steps = self.of.steps
        s = self._first_logits(q, first, last)
        state, p = self._go_on(q, acc, s, first, last, before)
        self._add_last(acc, p, last)
        plgpu.wgmma_wait(0)
        steps.release(steps.v, last)
        return acc[...], state

    def _first_logits(self, q, first, last) -> jax.Array:
        """Those of the first block of some."""
        tiling, steps = self.of.form.tiling, self.of.steps
        # There always is one. Without the branch ptxas makes another loop: 709 TFLOP/s
        # for 729 at 16 384 keys, no mask (H200, not in the same run).
        self._await_k(first, last)

        def product(s_acc):
            plgpu.wgmma(s_acc, q, steps.keys(first))
            return s_acc[...]

        s = pl.run_scoped(product, accumulator(tiling.rows, tiling.columns))
        self._release_k(first)
        return s

    def _go_on(self, q, acc, s, first, last, before: State | None):
        """(state, P of the last block): all products but that one's P V of the blocks
        first, ..., last, whose first logits are `s`."""
        form, steps, hidden = self.of.form, self.of.steps, self.hidden
        tiling, softmax = form.tiling, form.softmax
        state, p, _ = softmax.add(hidden.first(s, first), before, self.floor)
        self._await_k(first + 1, last)

        def step(now, carry):
            state, p, listed_as = carry
            following = hidden.entry(now + 1)

            def products(s_acc):
                plgpu.wgmma(s_acc, q, steps.keys(now))
                steps.await_block(steps.v, now - 1)
                plgpu.wgmma(acc, p, steps.values(now - 1))
                # S is ready while P V still runs under the softmax below.
                return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            s = pl.run_scoped(products, accumulator(tiling.rows, tiling.columns))
            self._release_k(now)
            s = hidden.later(s, now, listed_as)
            state, p, correction = softmax.add(s, state)
            # This wait between the softmax and the wait for P V keeps ptxas from moving
            # the latter above the exponentials.
            self._await_k(now + 1, last)
            plgpu.wgmma_wait(0)
            steps.release(steps.v, now - 1)
            assert correction is not None
            acc[...] = softmax.rescaled(acc[...], correction)
            return state, p, following

        state, p, _ = lax.fori_loop(
            first + 1, last + 1, step, (state, p, hidden.entry(first + 1))
        )
        if not tiling.q_registers and not form.in_links:
            plgpu.barrier_arrive(self.of.q.free)
        return state, p

    def _add_last(self, acc, p, last) -> None:
        """Issues the last P V."""
        steps = self.of.steps
        steps.await_block(steps.v, last)
        plgpu.wgmma(acc, p, steps.values(last))
