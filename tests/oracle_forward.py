"""The forward pass of `numpy_oracle`, alone and in a ring."""

import math
from typing import NamedTuple

import numpy as np

from attn_jax.emulator.exponential import POLYNOMIALS
from attn_jax.recipe import Recipe, Step
from tests.enclosure import Arithmetic, Interval, hull, maximum, negative, where


class _State(NamedTuple):
    """Running maximum and sum [T, 1], sum of P V and, for the row's centre, of P K."""

    row_max: Interval
    row_sum: Interval
    output: Interval
    centre: Interval


class Row(NamedTuple):
    """What the backward pass needs of the forward: [T, H], [T, 1], [T, H]."""

    output: Interval
    lse: Interval
    centre: Interval


class ForwardOracle:
    """One key/value head with its group of query heads at a time.

    Matrices are [T, S], [T, H] or [S, H], what belongs to rows is [T, 1].
    """

    def __init__(self, recipe: Recipe, scale: float, rows_share_centre: bool):
        self.r, self.a = recipe, Arithmetic(recipe.carrier)
        in_base_2 = recipe.exponential != "exp"
        self.unit = math.log2(math.e) if in_base_2 else 1.0
        self.exact_exponential = self.a.exp2 if in_base_2 else self.a.exp
        self.scale = scale if recipe.scaled_query is None else 1.0
        self.query_scale = scale
        # Unless keys are hidden one by one, a block of queries has one mean of keys.
        self.rows_share_centre = rows_share_centre

    def input(self, x) -> Interval:
        wide = self.a.point(np.asarray(x).astype(np.float64))
        return self.a.round(wide, Step(self.r.inputs))

    @property
    def query_step(self) -> Step:
        """What has rounded Q as it is multiplied."""
        return self.r.scaled_query or Step(self.r.inputs)

    def scaled(self, q: Interval) -> Interval:
        """Q', and Q without a scaled_query."""
        if self.r.scaled_query is None:
            return q
        return self.a.round(self.times(q, self.query_scale), self.r.scaled_query)

    def dot(
        self,
        x: Interval,
        y: Interval,
        made: Step | None = None,
        least: int | None = None,
    ) -> Interval:
        """x @ y; `made` rounded x unless it is an input, as y is without a `least`."""
        r, step = self.r, self.r.dot_accumulator
        fmt = made.format if made else r.inputs
        of_y = r.inputs.min_exponent if least is None else least
        exponents = fmt.min_exponent, of_y, step.format.min_exponent
        return self.a.dot(x, y, step, r.dot_chunk, r.dot_alignment, exponents)

    def row_sums(self, x: Interval) -> Interval:
        return self.a.sum(x, self.r.rowsum_accumulator, self.r.dot_chunk)

    def row_dots(self, x: Interval, y: Interval) -> Interval:
        rows = [slice(i, i + 1) for i in range(x.lo.shape[0])]
        kept = self.r.rowsum_accumulator, self.r.dot_chunk
        return concatenate([self.a.dot(x.at(i), y.at(i).T, *kept) for i in rows])

    def stored(self, x: Interval, step: Step) -> Interval:
        """x as a number of the carrier: what is returned is no part of anything."""
        return self.a.settled(self.a.round(x, step))

    def times(self, x: Interval, factor: float) -> Interval:
        return self.a.mul(x, self.a.constant(factor))

    def exponential(self, x: Interval) -> Interval:
        if self.r.exponential == "exp2_polynomial":
            return self.a.exp2_polynomial(x, POLYNOMIALS[self.r.exp2_degree])
        return self.exact_exponential(x)

    def logits(self, q: Interval, k: Interval, see) -> Interval:
        a, r = self.a, self.r
        x = a.round(self.dot(q, k.T, self.query_step), r.logits)
        if r.scale_at == "exponent":
            x = self.times(x, self.scale * self.unit)
        else:
            x = a.round(self.times(x, self.scale), r.logits)
            if self.unit != 1:
                x = a.round(self.times(x, self.unit), r.logits)
        return where(see, x, a.point(-np.inf))

    def block_max(self, x: Interval) -> Interval:
        top = Interval(x.lo.max(1, keepdims=True), x.hi.max(1, keepdims=True))
        factor = self.r.repeated_max_factor
        if factor is None:
            return top
        zero = self.a.point(0)
        moved = self.times(where(np.isfinite(top.lo), top, zero), factor)
        moved = where(top.lo > 0, moved, where(top.hi < 0, zero, top))
        may = ((x.hi >= top.lo) & np.isfinite(x.hi)).sum(1, keepdims=True) > 1
        must = (x.is_point & (x.lo == top.hi)).sum(1, keepdims=True) > 1
        return where(must & may, moved, where(may, hull(moved, top), top))

    def new_max(self, m: Interval, x: Interval) -> Interval:
        new = self.a.round(maximum(m, self.block_max(x)), self.r.row_max)
        tau, started = self.r.rescale_threshold, np.isfinite(m.lo)
        if tau == 0 or not started.any():
            return new  # Without a sink m' is never below m: at 0 nothing moves.
        zero = self.a.point(0)
        rise = self.a.sub(where(started, new, zero), where(started, m, zero))
        rise = self.times(rise, math.log2(math.e) / self.unit)
        keep, may_keep = started & (rise.hi <= tau), started & (rise.lo <= tau)
        return where(keep, m, where(may_keep, hull(m, new), new))

    def softmax_lines(self, m: Interval, total: Interval, x: Interval):
        """m', P, P as operand, c, l' for one block of keys."""
        a, r = self.a, self.r
        new = self.new_max(m, x)
        zero = a.point(0)
        base = where(np.isfinite(new.lo), new, zero)
        p = self.times(
            self.exponential_of(x, base, r.exponentiated), r.probability_scale
        )
        started = np.isfinite(m.lo)
        fall = a.round(a.sub(where(started, m, base), base), r.correction)
        c = where(started, a.round(self.exact_exponential(fall), r.correction), zero)
        operand = a.round(p, r.probability)
        added = self.row_sums(operand if r.row_sum_of == "rounded" else p)
        kept = a.round(a.mul(c, total), r.row_sum)
        total = a.round(a.add(kept, a.round(added, r.row_sum)), r.row_sum)
        return new, p, operand, c, total

    def exponential_of(self, x: Interval, base: Interval, step: Step) -> Interval:
        """exp(x - base) rounded to `step`; 0 where x is -inf."""
        zero = self.a.point(0)
        see = np.isfinite(x.hi)
        shifted = self.a.sub(where(see, x, zero), base)
        e = self.exponential(self.a.round(shifted, self.r.shifted))
        return where(see, self.a.round(e, step), zero)

    def start(self, T: int, H: int) -> _State:
        minus_infinity = self.a.point(np.full((T, 1), -np.inf))
        return _State(
            minus_infinity, *(self.a.point(np.zeros((T, n))) for n in (1, H, H))
        )

    def visit(self, state: _State, q, k, v, visible) -> _State:
        """The state after these keys, block by block."""
        a, r = self.a, self.r
        order = 1 if r.kv_order == "forward" else -1
        for block in blocks(r.block_kv, k.lo.shape[0])[::order]:
            m, old_total, *sums = state
            x = self.logits(q, k.at(block), visible[:, block])
            m, p, operand, c, total = self.softmax_lines(m, old_total, x)
            divisor = where(total.lo > 0, total, a.point(1))
            if r.normalise == "before_product":
                operand = a.round(a.div(p, divisor), r.probability)
            for i, values in enumerate((v, k)):
                product = self.dot(operand, values.at(block), r.probability)
                product = a.round(product, r.product)
                if r.normalise == "before_product":
                    sums[i] = product
                    continue
                if r.normalise == "each_step":
                    c_and_l = a.round(a.mul(old_total, c), r.accumulator)
                    kept = a.mul(c_and_l, sums[i])
                else:
                    kept = a.mul(c, sums[i])
                kept = a.round(kept, r.accumulator)
                sums[i] = a.round(a.add(kept, product), r.accumulator)
                if r.normalise == "each_step":
                    sums[i] = a.round(a.div(sums[i], divisor), r.accumulator)
            state = _State(m, total, *sums)
        return state

    def finish(self, state: _State) -> Row:
        a, r = self.a, self.r
        m, total, output, centre = state
        if r.normalise == "once":
            divisor = where(total.lo > 0, total, a.point(1))
            output, centre = a.div(output, divisor), a.div(centre, divisor)
        nothing = ~np.isfinite(m.lo)
        m = self.times(where(nothing, a.point(0), m), 1 / self.unit)
        log = a.log(
            self.times(where(nothing, a.point(1), total), 1 / r.probability_scale)
        )
        lse = self.stored(a.add(m, log), r.lse)
        return Row(output, where(nothing, a.point(-np.inf), lse), centre)

    def shares(self, length: int) -> list[slice]:
        """What each device of the ring holds; the whole without a ring."""
        return blocks(length // self.r.ring_size, length)

    def blocks_of_shares(self, size: int | None, length: int) -> list[slice]:
        return [
            slice(share.start + block.start, share.start + block.stop)
            for share in self.shares(length)
            for block in blocks(size, share.stop - share.start)
        ]

    def hops(self, device: int) -> list[int]:
        """The shares of keys in the order in which a device meets them."""
        return [(device - h) % self.r.ring_size for h in range(self.r.ring_size)]

    def forward(self, q, k, v, visible) -> Row:
        queries, keys = self.shares(q.lo.shape[0]), self.shares(k.lo.shape[0])
        devices = []
        for device, i in enumerate(queries):
            hops = [
                (q.at(i), k.at(keys[c]), v.at(keys[c]), visible[i, keys[c]])
                for c in self.hops(device)
            ]
            merge = self.merge_partials
            if self.r.ring_size == 1 or self.r.ring_merge == "carry":
                merge = self.carry_state
            elif self.r.ring_merge == "carry_whole":
                merge = self.carry_by_powers
            devices.append(merge(hops))
        return Row(*(concatenate(parts) for parts in zip(*devices)))

    def carry_state(self, hops) -> Row:
        state = self.start(*hops[0][0].lo.shape)
        for hop in hops:
            state = self.visit(state, *hop)
            if self.r.ring_size > 1:
                rounded = (self.a.round(x, self.r.ring_accumulator) for x in state[2:])
                state = _State(*state[:2], *rounded)
        return self.finish(state)

    def carry_by_powers(self, hops) -> Row:
        """Of maxima that are no whole number and a half, within their intervals."""
        a, states = self.a, []
        for q, *keys in hops:
            m, *sums = self.visit(self.start(*q.lo.shape), q, *keys)
            seen, n = np.isfinite(m.lo), np.rint(m.lo)
            assert (n == np.rint(m.hi)).all()
            undo = self.exact_exponential(
                a.sub(where(seen, m, a.point(0)), a.point(np.where(seen, n, 0)))
            )
            sums = [a.mul(undo, x) for x in sums]
            if states:
                before, top = states[-1], np.maximum(n, states[-1].row_max.lo)
                base = np.where(np.isfinite(top), top, 0)
                old, new = (a.point(2.0 ** (x - base)) for x in (before.row_max.lo, n))
                pairs = zip(before[1:], sums)
                sums = [a.add(a.mul(old, x), a.mul(new, y)) for x, y in pairs]
                n = top
            kept = (a.round(x, self.r.ring_accumulator) for x in sums[1:])
            states.append(_State(a.point(n), sums[0], *kept))
        return self.finish(states[-1])

    def merge_partials(self, hops) -> Row:
        a, r = self.a, self.r
        rows = []
        for q, k, v, see in hops:
            row = self.finish(self.visit(self.start(*q.lo.shape), q, k, v, see))
            o, centre = (a.round(x, r.ring_partial) for x in (row.output, row.centre))
            rows.append(Row(o, row.lse, centre))
        zeros = a.point(np.zeros(rows[0].output.lo.shape))
        merged = Row(zeros, a.point(np.full(rows[0].lse.lo.shape, -np.inf)), zeros)
        for row in rows:
            merged = self.merged(merged, row)
        if r.ring_merge != "two_pass":
            return merged
        sums = [zeros, zeros]
        for row in rows:
            weight = self.weight(row.lse, merged.lse)
            for i, part in enumerate((row.output, row.centre)):
                sums[i] = a.round(
                    a.add(sums[i], a.mul(weight, part)), r.ring_accumulator
                )
        return Row(sums[0], merged.lse, sums[1])

    def weight(self, lse: Interval, of: Interval) -> Interval:
        """e^(lse - of), 0 where lse is -inf."""
        a = self.a
        zero = a.point(0)
        some = np.isfinite(lse.lo)
        change = a.sub(where(some, lse, zero), where(some, of, zero))
        return where(some, a.exp(change), zero)

    def merged(self, old: Row, new: Row) -> Row:
        """One step of ring_merge 'lse' or 'sigmoid'; what saw no key has LSE -inf."""
        a, r = self.a, self.r
        first, nothing = ~np.isfinite(old.lse.lo), ~np.isfinite(new.lse.lo)
        zero, one = a.point(0), a.point(1)
        x, y = where(first, zero, old.lse), where(nothing, zero, new.lse)

        def sigmoid(z):
            return a.div(one, a.add(one, a.exp(negative(z))))

        if r.ring_merge == "sigmoid":
            lse = a.sub(x, a.log(sigmoid(a.sub(x, y))))
        else:
            top, low = maximum(x, y), negative(maximum(negative(x), negative(y)))
            lse = a.add(top, a.log1p(a.exp(a.sub(low, top))))
        lse = a.round(lse, r.lse)

        def merge(o, o_new):
            if r.ring_merge == "sigmoid":
                total = a.sub(o, a.mul(sigmoid(a.sub(y, x)), a.sub(o, o_new)))
            else:
                total = a.add(
                    a.mul(a.exp(a.sub(x, lse)), o), a.mul(a.exp(a.sub(y, lse)), o_new)
                )
            total = where(first, o_new, total)
            return where(nothing, o, a.round(total, r.ring_accumulator))

        lse = where(nothing, old.lse, where(first, new.lse, lse))
        return Row(merge(old.output, new.output), lse, merge(old.centre, new.centre))


def blocks(size: int | None, length: int) -> list[slice]:
    size = length if size is None else min(size, length)
    return [slice(j, min(j + size, length)) for j in range(0, length, size)]


def concatenate(parts: list[Interval]) -> Interval:
    return Interval(*(np.concatenate(ends) for ends in zip(*parts)))
