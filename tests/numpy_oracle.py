"""Attention under a recipe, forward and backward, in NumPy, from its docstring alone.

One head after the other, one block of keys after the other. Every value is an interval
(see `enclosure`): a single number where the arithmetic before it is exact, else all
that a program may get that adds in another order. Rows do not meet in the forward
pass, so neither `block_q` nor `loop_order` appears there.
"""

from typing import NamedTuple

import numpy as np

from attn_jax.formats import FP32, NumberFormat
from attn_jax.mask import Mask
from attn_jax.recipe import Recipe, Step
from tests.enclosure import Arithmetic, Interval, where, with_low_byte
from tests.oracle_forward import ForwardOracle, Row, blocks, concatenate


class Result(NamedTuple):
    """Intervals in the shapes of `reference.Golden`'s arrays of the same names."""

    out: Interval
    lse: Interval
    dquery: Interval
    dkey: Interval
    dvalue: Interval


class _Gradients(NamedTuple):
    """Running sums: dQ and the row sums of its dS for each query head, dK and dV.

    The last two are lists of one, or of each query head's with a group_gradient."""

    query: list[Interval]
    excess: list[Interval]
    key: list[Interval]
    value: list[Interval]


def attention(
    query, key, value, dout, dlse=None, *, recipe: Recipe, mask=Mask(), scale=None
) -> Result:
    """Arrays as for `reference.golden`; the intervals hold what an emulator returns."""
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    G = N // K
    dlse = np.zeros((B, N, T)) if dlse is None else dlse
    visible = mask.materialise(T, S)
    visible = np.ones((1, 1, T, S), bool) if visible is None else np.asarray(visible)
    visible = np.broadcast_to(visible, (B, N, T, S))
    scale = H**-0.5 if scale is None else scale
    oracle = _Oracle(recipe, scale, mask.is_interval)
    q, k, v, do = (oracle.input(x) for x in (query, key, value, dout))
    q = oracle.scaled(q)
    results = [[], [], [], [], []]
    for b, n in np.ndindex(B, K):
        group = range(n * G, (n + 1) * G)
        with np.errstate(invalid="ignore"):  # NaN of a format without infinity
            of_head = oracle.attend(
                [q.at(b, slice(None), g) for g in group],
                k.at(b, slice(None), n),
                v.at(b, slice(None), n),
                [do.at(b, slice(None), g) for g in group],
                [oracle.a.point(dlse[b, g][:, None]) for g in group],
                [visible[b, g] for g in group],
            )
        for collected, part in zip(results, of_head):
            collected.extend(part)
    out, lse, dq, dk, dv = (_stack(x, B) for x in results)
    lse = Interval(*(end[..., 0].swapaxes(1, 2) for end in lse))
    return Result(out, lse, dq, dk, dv)


class _DqKeys(NamedTuple):
    """K' [S, H], the least exponent of its format, and w."""

    numbers: Interval
    least: int
    scale: float = 1.0

    def at(self, keys: slice) -> "_DqKeys":
        return self._replace(numbers=self.numbers.at(keys))


class _Oracle(ForwardOracle):
    """The backward pass of one key/value head with its group of query heads."""

    def probability(self, x: Interval, lse: Interval) -> Interval:
        """P of one tile in the backward pass, unrounded."""
        a = self.a
        if self.r.probability_from == "softmax":
            T = x.lo.shape[0]
            first = self.start(T, 1)
            _, p, _, _, total = self.softmax_lines(first.row_max, first.row_sum, x)
            return a.div(p, where(total.lo > 0, total, a.point(1)))
        nothing = ~np.isfinite(lse.lo)
        base = self.times(where(nothing, a.point(0), lse), self.unit)
        if self.unit != 1:
            base = a.round(base, self.r.lse)
        p = self.exponential_of(x, base, Step(a.carrier))
        return where(nothing, a.point(0), p)

    def delta(self, q, k, v, do, visible, row: Row) -> Interval:
        a, r = self.a, self.r
        if r.delta_source == "p_dp":
            parts = []
            for block in self.blocks_of_shares(r.backward_block_kv, k.lo.shape[0]):
                x = self.logits(q, k.at(block), visible[:, block])
                p = a.round(self.probability(x, row.lse), r.softmax_probability)
                dp = a.round(self.dot(do, v.at(block).T), r.dprobability)
                parts.append(self.row_dots(p, dp))
            return a.round(a.sum_of(*parts), r.delta)
        o = row.output
        if r.delta_source != "o_f32":
            o = a.round(o, r.output)
        if r.delta_source == "o_hi_lo":
            o = a.add(o, a.round(a.sub(row.output, o), r.output))
        if r.delta_source == "o_hi_lo8":
            ends = (end.astype(a.dtype) for end in row.output)
            o = Interval(*(with_low_byte(x, r.output).astype(a.wide) for x in ends))
        return a.round(self.row_dots(do, o), r.delta)

    def attend(self, queries, k, v, dout, dlse, visible):
        """Lists of out, lse, dQ (over the group), dK and dV (one each)."""
        a, r = self.a, self.r
        group = range(len(queries))
        rows = [self.forward(q, k, v, see) for q, see in zip(queries, visible)]
        dlse = [
            where(np.isfinite(row.lse.lo), d, a.point(0)) for d, row in zip(dlse, rows)
        ]
        delta = [
            self.delta(queries[n], k, v, dout[n], visible[n], rows[n]) for n in group
        ]
        # dS holds dP - (delta - dLSE).
        offset = [a.sub(x, y) for x, y in zip(delta, dlse)]
        factor = self.scale if r.gradient_scale_at == "logits" else 1.0
        g = (1.0 if r.gradient_scale_at == "logits" else self.scale) / r.dlogits_scale
        lse = [row.lse for row in rows]
        r_head = self.head_scale(dout, v, dlse)
        # Off all keys, or off dQ in the end.
        common = self.common_centre(k) if r.dq_centre == "keys" else a.point(0)
        moved = self.dq_keys(k, common)
        operands = queries, k, moved, v, dout
        sums = self.ring_sums(*operands, offset, visible, lse, r_head, g)
        dq = []
        for n in group:
            total = sums.query[n]
            exact = self.times(dlse[n], r.dlogits_scale * factor)
            if r.dq_centre == "keys":
                total = a.add(total, self.times(a.mul(exact, common), g))
            elif r.dq_centre != "none":
                excess = self.times(a.sub(sums.excess[n], exact), g)
                centre = self.centre(k, visible[n], rows[n])
                total = a.sub(total, a.mul(excess, centre))
            if r.scaled_query is not None:
                total = a.round(total, r.scaled_query)
                total = self.times(total, self.query_scale)
            dq.append(self.stored(total, r.gradient))
        dk, dv = (self.stored(x, r.gradient) for (x,) in (sums.key, sums.value))
        out = [self.stored(row.output, r.output) for row in rows]
        return out, lse, dq, [dk], [dv]

    def head_scale(
        self, dout: list[Interval], v: Interval, dlse: list[Interval]
    ) -> np.ndarray:
        """The power of two by which dS of all query heads is scaled as dQ's operand.

        From float64: other roundings of the norms give the same but by rare chance.
        """
        fmt = self.scaled_format
        if fmt is None:
            return np.ones(())
        norm_of_v = np.linalg.norm(np.abs(v.lo).max(0).astype(np.float64))
        b = 0.0
        for do, d in zip(dout, dlse):
            for row, of_lse in zip(do.lo.astype(np.float64), d.lo[:, 0]):
                b = max(b, 2 * np.linalg.norm(row) * norm_of_v + abs(of_lse))
        factor = self.scale if self.r.gradient_scale_at == "logits" else 1.0
        return _into_range(b * abs(factor) * self.r.dlogits_scale, fmt)

    @property
    def scaled_format(self) -> NumberFormat | None:
        """The format of dq_dlogits where dS is scaled for it."""
        fmt = self.r.dq_dlogits and self.r.dq_dlogits.format
        return None if fmt is None or fmt.exponent_bits >= 8 else fmt

    def dq_keys(self, k: Interval, common: Interval) -> _DqKeys:
        """K' for K [S, H]; K itself without a centre."""
        a, fmt = self.a, self.scaled_format
        if fmt is None or self.r.dq_centre != "keys":
            moved = a.round(a.sub(k, common), Step(self.r.inputs))
            return _DqKeys(moved, self.r.inputs.min_exponent)
        w = _into_range(2 * np.abs(k.lo).max(), fmt)
        moved = a.round(_scaled(a.sub(k, common), w), Step(fmt))
        least = fmt.min_exponent + 1 - np.frexp(w)[1]
        return _DqKeys(_scaled(moved, 1 / w), least, w)

    def common_centre(self, k: Interval) -> Interval:
        """c [1, H] of dq_centre 'keys', or all that it may be."""
        a = Arithmetic(FP32)
        k = a.settled(Interval(*(end.astype(a.wide) for end in k)))
        ones = a.point(np.ones((1, len(k.lo))))
        mean, square = (
            a.div(a.dot(ones, x, Step(FP32), None), a.point(len(k.lo)))
            for x in (k, a.mul(k, k))
        )
        roots = a.settled(Interval(*(np.sqrt(end) for end in square)))
        places = [1 + np.frexp(end)[1] - self.r.inputs.mantissa_bits for end in roots]
        units = [np.ldexp(1.0, np.clip(p, -100, 100)) for p in places]
        assert np.ptp(places, 0).max() < 2, "units between these would be left out"
        found = [np.rint(end / unit) * unit for end in mean for unit in units]
        lo, hi = np.min(found, 0), np.max(found, 0)
        large = a.mul(a.mul(a.point(17), mean), mean)
        sure, possible = large.lo > square.hi, large.hi > square.lo
        widest = np.maximum(np.abs(k.lo), np.abs(k.hi)).max(-2)
        if self.r.inputs.max_finite < 2.0**64:
            possible &= 4 * widest <= self.r.inputs.max_finite
        ends = (
            np.where(sure, lo, np.minimum(lo, 0)),
            np.where(sure, hi, np.maximum(hi, 0)),
        )
        return Interval(*(self.a.wide(1) * np.where(possible, end, 0) for end in ends))

    def ring_sums(
        self, queries, k, moved, v, dout, offset, visible, lse, r_head, g
    ) -> _Gradients:
        """Sums over all hops, dQ and dK times g; `excess` is not. `moved` is dQ's K."""
        a, r = self.a, self.r
        rows, keys = self.shares(queries[0].lo.shape[0]), self.shares(k.lo.shape[0])
        dq, excess = (
            [a.point(np.zeros(x.lo.shape)) for x in y] for y in (queries, lse)
        )
        dk = dv = a.point(np.zeros(k.lo.shape))
        carrier = Step(a.carrier)
        partial, step = carrier, carrier
        if r.ring_size > 1:
            partial, step = r.ring_gradient_partial, r.ring_gradient_accumulator
        order = list(range(r.ring_size))
        if r.ring_own_keys == "last":
            order = [*order[1:], 0]
        for hop in order:
            for device, i in enumerate(rows):
                j = keys[self.hops(device)[hop]]
                at_rows = ([x.at(i) for x in xs] for xs in (queries, dout, offset, lse))
                q, do, off, row_lse = at_rows
                see = [x[i, j] for x in visible]
                at_keys = (x.at(j) for x in (k, moved, v))
                part = self.tiles(q, *at_keys, do, off, see, row_lse, r_head)
                for n in range(len(queries)):
                    term = self.times(_scaled(part.query[n], 1 / r_head), g)
                    dq[n] = self.put(dq[n], i, a.round(term, partial), step)
                    term = _scaled(part.excess[n], 1 / r_head)
                    excess[n] = self.put(excess[n], i, term, carrier)
                for_key = self.of_group([self.times(x, g) for x in part.key])
                dk = self.put(dk, j, a.round(for_key, partial), step)
                for_value = self.of_group(part.value)
                dv = self.put(dv, j, a.round(for_value, partial), step)
        return _Gradients(dq, excess, [dk], [dv])

    def of_group(self, sums: list[Interval]) -> Interval:
        """dK g, or dV, of a key head."""
        if self.r.group_gradient is None:
            (only,) = sums
            return only
        total = self.a.point(0)
        for x in sums:
            total = self.a.add(total, self.a.round(x, self.r.group_gradient))
            if self.r.group_accumulator is not None:
                total = self.a.round(total, self.r.group_accumulator)
        return total

    def tiles(
        self, queries, k, moved, v, dout, offset, visible, lse, r_head
    ) -> _Gradients:
        """The sums over all tiles of these queries and keys; dQ's are scaled."""
        a, r = self.a, self.r
        T, S = visible[0].shape
        H = k.lo.shape[1]
        group = range(len(queries))
        dq = [a.point(np.zeros((T, H))) for _ in group]
        excess = [a.point(np.zeros((T, 1))) for _ in group]
        # Query heads that share one dK and dV.
        sets = [[n] for n in group] if r.group_gradient else [list(group)]
        dk, dv = ([a.point(np.zeros((S, H))) for _ in sets] for _ in range(2))
        for jb in blocks(r.backward_block_kv, S):
            kb, kb_moved, vb = k.at(jb), moved.at(jb), v.at(jb)
            for ib in blocks(r.backward_block_q, T):
                ds, p = [], []
                for n in group:
                    x = self.logits(queries[n].at(ib), kb, visible[n][ib, jb])
                    p.append(self.probability(x, lse[n].at(ib)))
                    dp = a.round(self.dot(dout[n].at(ib), vb.T), r.dprobability)
                    wide = self.dlogits(p[n], a.sub(dp, offset[n].at(ib)))
                    ds.append(a.round(wide, r.dlogits))
                    dq_ds, made = ds[n], r.dlogits
                    if r.dq_dlogits is not None:
                        made = r.dq_dlogits
                        dq_ds = a.round(_scaled(wide, r_head), made)
                    product = self.dot(dq_ds, kb_moved.numbers, made, kb_moved.least)
                    if r.dq_sum == "integers":
                        whole = _whole(_scaled(product, moved.scale))
                        dq[n] = _exactly_added(dq[n], ib, whole)
                    else:
                        dq[n] = self.put(dq[n], ib, product, r.dq_accumulator)
                    row_sum = a.sum(dq_ds, Step(a.carrier), None)
                    excess[n] = self.put(excess[n], ib, row_sum, Step(a.carrier))
                for i, heads in enumerate(sets):
                    q = concatenate([queries[n].at(ib) for n in heads])
                    do = concatenate([dout[n].at(ib) for n in heads])
                    every = concatenate([ds[n] for n in heads]).T
                    least = self.query_step.format.min_exponent
                    product = self.dot(every, q, r.dlogits, least)
                    dk[i] = self.put(dk[i], jb, product, r.dk_accumulator)
                    operand = concatenate([p[n] for n in heads])
                    operand = a.round(operand, r.backward_probability)
                    product = self.dot(operand.T, do, r.backward_probability)
                    dv[i] = self.put(dv[i], jb, product, r.dv_accumulator)
        if r.dq_sum == "integers":
            dq = [_scaled(a.settled(n), 1 / moved.scale) for n in dq]
        return _Gradients(dq, excess, dk, dv)

    def dlogits(self, p: Interval, inner: Interval) -> Interval:
        """D f."""
        a, r = self.a, self.r
        d = a.mul(a.round(p, r.softmax_probability), inner)
        factor = self.scale if r.gradient_scale_at == "logits" else 1.0
        return self.times(d, r.dlogits_scale * factor)

    def put(self, total: Interval, rows: slice, term: Interval, step: Step) -> Interval:
        """`total` with `term` added to some rows."""
        lo, hi = total.lo.copy(), total.hi.copy()
        lo[rows], hi[rows] = self.a.round(self.a.add(total.at(rows), term), step)
        return Interval(lo, hi)

    def centre(self, k: Interval, visible, row: Row) -> Interval:
        a = self.a
        if self.r.dq_centre == "row":
            return row.centre
        seen = visible.copy()
        if self.rows_share_centre:
            size = self.r.backward_block_q
            for block in self.blocks_of_shares(size, seen.shape[0]):
                seen[block] = visible[block].any(0)
        total = a.dot(a.point(seen), k, Step(a.carrier), None)
        count = np.maximum(seen.sum(1, keepdims=True), 1)
        return a.div(total, a.point(count))


def _whole(x: Interval) -> Interval:
    return Interval(*map(np.rint, x))


def _exactly_added(total: Interval, rows: slice, term: Interval) -> Interval:
    """`total` with whole numbers added to some rows, of which `wide` holds the sums."""
    lo, hi = total.lo.copy(), total.hi.copy()
    lo[rows] += term.lo
    hi[rows] += term.hi
    return Interval(lo, hi)


def _into_range(b, fmt: NumberFormat):
    """The power of two that brings b below the format's largest one, 1 for b = 0."""
    e = np.frexp(fmt.max_finite)[1] - 1
    power = np.ldexp(1.0, np.clip(e - np.frexp(b)[1], -100, 100))
    return np.where(b == 0, 1.0, power)


def _scaled(x: Interval, powers_of_two: np.ndarray) -> Interval:
    """Exact in any binary format whose range it stays in."""
    return Interval(x.lo * powers_of_two, x.hi * powers_of_two)


def _stack(parts: list[Interval], batch: int) -> Interval:
    """[rows, columns] of every head of every batch entry to [B, rows, heads, ...]."""
    lo, hi = (np.stack(ends) for ends in zip(*parts))
    shape = batch, len(parts) // batch, *lo.shape[1:]
    return Interval(*(e.reshape(shape).swapaxes(1, 2) for e in (lo, hi)))
