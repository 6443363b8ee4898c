"""Bounds of the backward pass of a recipe: the query heads of one key/value head.

Errors of LSE (relative ones e_i of a row's P) and of delta (d_i) are the same for every
key of a row, so they are kept apart from each entry's own:

    error of dS_ij = own_ij - e_i dS_ij - P_ij d_i

    error of dQ_i  = sum_j own_ij (K_j - C_i) - e_i dQ_i - d_i sum_j P_ij (K_j - C_i)
    error of dK_j  = sum_i (own_ij - e_i dS_ij - P_ij d_i) Q_i

with C the centre, 0 without one, and the roundings of the sums added to both; for
dq_centre 'keys' those of K' = K - C, times dS_ij, too, and for a scaled_query dS_ij
times the errors of Q' to dK. A sink or a cotangent of LSE gives the rows of dS a sum
R_i that is not zero: e_i's factor is dQ_i - R_i C_i then, and C_i times the error of
R_i is added. Under a soft cap P_ij has the cap's slope beside it, and rows sum to
nothing known: a kernel may subtract C times the sum of what rounding dS has changed,
which makes own_ij's factor K_j - C_i in part.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from attn_jax.bounds.arithmetic import (
    ONE,
    Arithmetic,
    Ball,
    Size,
    Unit,
    exact,
    plus,
    scaled,
)
from attn_jax.bounds.centre import DqKeys, centred_keys, keys_as_given
from attn_jax.bounds.forward import (
    Forward,
    Head,
    blocks,
)
from attn_jax.bounds.head_scale import head_scale
from attn_jax.bounds.ring import joined, shares
from attn_jax.bounds.rows import Rows, rows_of, with_shared
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT, Recipe


class Gradients(NamedTuple):
    """Of one key/value head with G query heads: dQ G x [T, H], dK and dV [S, H].

    `dlogits`, G x [T, S], is dS before it is scaled or rounded: the terms of dbias.
    """

    dquery: list[Ball]
    dkey: Ball
    dvalue: Ball
    dlogits: list[Ball]
    dsinks: list[Ball | None]  # terms of each head's, [T, 1]


def backward(
    arithmetic: Arithmetic,
    heads: list[Head],
    forwards: list[Forward],
    douts: list[np.ndarray],
    dlses: list[np.ndarray | None],
    centres: list[tuple[np.ndarray, np.ndarray]],
) -> Gradients:
    """Bounds of all gradients; `centres` holds C and the error of computing it."""
    recipe = arithmetic.recipe
    of_heads = heads, forwards, douts, dlses
    unit = head_scale(arithmetic, *of_heads)
    rows = [rows_of(arithmetic, *args, unit) for args in zip(*of_heads)]
    kept = recipe.dk_accumulator, recipe.dv_accumulator, recipe.dot_accumulator
    narrow = {step.format for step in kept} != {recipe.carrier}
    narrow = narrow or recipe.dot_alignment is not None
    block_q = recipe.backward_block_q if narrow else None
    query = [head.operand for head in heads]
    dlogits = [with_shared(r, r.dlogits, r.dlogits.value, r.factor) for r in rows]
    probability = [
        plus(r.probability, r.relative.of(r.exact_probability), shared=True)
        for r in rows
    ]
    at_end = _scale_at_end(recipe, heads[0].scale)
    dkey = _over_queries(arithmetic, dlogits, query, block_q, "dk_accumulator", at_end)
    dvalue = _over_queries(
        arithmetic, probability, map(exact, douts), block_q, "dv_accumulator", 1.0
    )
    return Gradients(
        [_dquery(arithmetic, *args) for args in zip(heads, rows, centres)],
        arithmetic.step("gradient", dkey),
        arithmetic.step("gradient", dvalue),
        [with_shared(r, r.raw, r.raw.value, 1.0) for r in rows],
        [r.dsink for r in rows],
    )


def _scale_at_end(recipe: Recipe, scale: float) -> float:
    at_end = 1.0 if recipe.gradient_scale_at == "logits" else scale
    return at_end / recipe.dlogits_scale


def _over_queries(
    arithmetic: Arithmetic,
    terms: list[Ball],
    factors: Iterable[Ball],
    block_q: int | None,
    name: str,
    at_end: float,
) -> Ball:
    """at_end sum_i terms_ij factors_i over the rows of all heads, block by block.

    In a ring each device's keys meet one device's queries after the other. With a
    group_gradient each query head has a sum of its own, rounded before they are added,
    and with a group_accumulator after each addition, too.
    """
    apart = arithmetic.recipe.group_gradient is not None
    heads = list(zip(terms, factors))
    T, S = terms[0].value.shape
    columns = heads[0][1].value.shape[-1]
    W = arithmetic.recipe.ring_size
    devices = shares(T, W)
    whole = []
    for rank, keys in enumerate(shares(S, W)):
        total = exact(np.zeros((keys.stop - keys.start, columns)))
        for hop in arithmetic.recipe.backward_hops(W):
            met = devices[(rank + hop) % W]
            tiles = blocks(T // W, block_q, first=met.start)
            at = arithmetic, tiles, keys, name, at_end
            if apart:
                part, *others = (
                    arithmetic.step("group_gradient", _over_tiles([head], *at))
                    for head in heads
                )
                part = _kept(arithmetic, part)
                for other in others:
                    part = _kept(arithmetic, arithmetic.carried(plus(part, other)))
            else:
                part = _over_tiles(heads, *at)
            total = _after_hop(arithmetic, total, part)
        whole.append(total)
    return joined(whole)


def _kept(arithmetic: Arithmetic, total: Ball) -> Ball:
    if arithmetic.recipe.group_accumulator is None:
        return total
    return arithmetic.step("group_accumulator", total)


def _over_tiles(
    heads: list[tuple[Ball, Ball]],
    arithmetic: Arithmetic,
    tiles: list[slice],
    keys: slice,
    name: str,
    at_end: float,
) -> Ball:
    """at_end times the sum over these rows of `heads`, terms and factors of each."""
    columns = heads[0][1].value.shape[-1]
    total = exact(np.zeros((keys.stop - keys.start, columns)))
    for tile in tiles:
        rows = joined([terms[tile, keys] for terms, _ in heads]).map(np.transpose)
        more = joined([factors[tile] for _, factors in heads])
        new = plus(total, arithmetic.dot(rows, more, name))
        total = arithmetic.step(name, arithmetic.carried(new))
    return arithmetic.carried(scaled(total, at_end), 2)


def _after_hop(
    arithmetic: Arithmetic,
    total: Ball,
    part: Ball,
    extra: Size = 0.0,
    spread: Size = 0.0,
) -> Ball:
    """What one hop of a ring adds; with one device, all there is."""
    if arithmetic.recipe.ring_size == 1:
        return part
    part = arithmetic.step("ring_gradient_partial", part, ONE, extra, spread)
    total = arithmetic.carried(plus(total, part), extra=extra)
    return arithmetic.step("ring_gradient_accumulator", total, ONE, extra, spread)


def _dquery(
    arithmetic: Arithmetic,
    head: Head,
    rows: Rows,
    centre: tuple[np.ndarray, np.ndarray],
) -> Ball:
    if arithmetic.recipe.dq_centre != "keys" or head.soft_cap is not None:
        keys = keys_as_given(arithmetic.recipe, head.key)
        return _dquery_from(arithmetic, head, rows, keys, centre)
    # All parts of the bound are convex in c: largest at an end of where it may be.
    c, width = centre
    ends = (c - width, c + width) if width.any() else (c,)
    found = []
    for end in ends:
        keys = centred_keys(arithmetic, head.key, end[0], width[0] == 0)
        found.append(_dquery_from(arithmetic, head, rows, keys, (end, width)))
    return Ball(
        found[0].value,
        *(np.max(field, 0) for field in list(zip(*map(tuple, found)))[1:]),
    )


def _dquery_from(
    arithmetic: Arithmetic,
    head: Head,
    rows: Rows,
    keys: DqKeys,
    centre: tuple[np.ndarray, np.ndarray],
) -> Ball:
    recipe, key = arithmetic.recipe, head.key
    ds = rows.dq_dlogits
    at_end = _scale_at_end(recipe, head.scale)
    everything = with_shared(rows, ds, ds.value, rows.factor)
    W = recipe.ring_size
    devices = shares(len(key), W)
    sums = []
    for rank, queries in enumerate(shares(len(head.query), W)):
        order = [devices[(rank - hop) % W] for hop in recipe.backward_hops(W)]
        terms = everything[queries]
        sums.append(
            _sum_over_keys(arithmetic, terms, rows.dq_unit, keys, order, at_end)
        )
    c, c_error = centre
    capped = head.soft_cap is not None
    # What the centre takes from errors that a row shares.
    taken = np.zeros_like(c) if capped else c
    weight = rows.delta_weight
    off = weight @ key - weight.sum(-1, keepdims=True) * taken
    along = ds.value @ key - rows.row_sum.value * taken
    shared = plus(
        rows.relative.of(along), rows.delta.of(rows.factor * off), shared=True
    )
    errors = plus(_against(ds, key, c, capped), shared, shared=True)
    if recipe.dq_centre == "keys":
        errors = plus(errors, _by_keys(everything, keys.numbers))
    dquery = plus(joined(sums), scaled(errors, at_end), shared=True)
    row_sum = rows.row_sum
    if recipe.dq_centre == "keys" and row_sum.size.any():
        # z c: what K - c has taken from a row whose dS does not sum to zero.
        product = scaled(arithmetic.carried(scaled(row_sum, c), 2), at_end)
        dquery = arithmetic.carried(plus(dquery, product, shared=True), 2)
    elif recipe.dq_centre in ("mean", "row") and c.any():
        if capped:
            # Of roundings alone, which are among the errors.
            nothing = np.zeros(everything.value.shape)
            everything = everything._replace(value=nothing)
            row_sum = exact(np.zeros(row_sum.value.shape))
        dquery = _subtract_centre(
            arithmetic, dquery, everything, rows.dq_unit, row_sum, c, c_error, at_end
        )
    if recipe.scaled_query is not None:
        # That was of Q'.
        dquery = arithmetic.step("scaled_query", arithmetic.carried(dquery))
        dquery = arithmetic.carried(scaled(dquery, head.query_scale), 2)
    return arithmetic.step("gradient", arithmetic.carried(dquery))


def _sum_over_keys(
    arithmetic: Arithmetic,
    terms: Ball,
    unit: Unit,
    keys: DqKeys,
    devices: list[slice],
    at_end: float,
) -> Ball:
    """at_end sum_j terms_ij K_j with the roundings of the sums; not the errors of both.

    Those count for what the running sums may have grown to, and are added elsewhere.
    """
    key, size = keys.numbers, keys.numbers.size
    large_enough = np.maximum(size, keys.least)
    shape = len(terms.value), size.shape[-1]
    total = exact(np.zeros(shape))
    before = before_spread = np.zeros(shape)
    for device in devices:
        sums = exact(np.zeros(shape))
        extra = variance = np.zeros(shape)
        width = device.stop - device.start
        block_kv = arithmetic.recipe.backward_block_kv
        for block in blocks(width, block_kv, first=device.start):
            values = terms.value[:, block]
            own = terms.worst[:, block] @ size[block]
            own = own + np.abs(values) @ key.worst[block]
            own_variance = terms.spread[:, block] ** 2 @ key.value[block] ** 2
            own_variance = own_variance + values**2 @ key.spread[block] ** 2
            part = arithmetic.summed(
                exact(values @ key.value[block]),
                terms.size[:, block] @ size[block],
                values**2 @ key.value[block] ** 2,
                values.shape[-1],
                "dq_accumulator",
                unit,
                arithmetic.aligned(
                    terms.size[:, block], large_enough[block], "dq_accumulator", unit
                ),
                extra=(own, np.sqrt(own_variance)),
            )
            extra = extra + own
            variance = variance + own_variance
            if keys.integer is not None:
                integer = unit.times(keys.integer)
                # Of a head that 32 bits may not hold dQ is NaN.
                if max(unit.high, keys.integer) >= 2.0**MOST_HEAD_EXPONENT:
                    integer = Unit(0.0, np.inf)
                part = arithmetic.whole(part, integer, np.sqrt(own_variance))
                sums = plus(sums, part)
                # Where a row of P sums to more than 1, as by an LSE of few bits.
                sums = arithmetic.in_range(sums, sums.size + extra, integer, 2.0**31)
                continue
            sums = arithmetic.carried(plus(sums, part), 1, unit, extra)
            spread = np.sqrt(variance)
            sums = arithmetic.step("dq_accumulator", sums, unit, extra, spread)
        if arithmetic.recipe.dq_dlogits is not None:
            # Divided by r, and integers now numbers: exact but for what leaves the
            # range, or their digits.
            sums = arithmetic.carried(sums, extra=extra)
        before = before + abs(at_end) * extra
        before_spread = np.hypot(before_spread, abs(at_end) * np.sqrt(variance))
        sums = arithmetic.carried(scaled(sums, at_end), 2, extra=before)
        total = _after_hop(arithmetic, total, sums, before, before_spread)
    return total


def _against(ds: Ball, key: np.ndarray, centre: np.ndarray, in_part: bool) -> Ball:
    """The errors of sum_j dS_ij (K_j - C_i), about zero.

    `in_part`: those of sum_j dS_ij K_j where that is larger.
    """
    shape = len(ds.value), key.shape[-1]
    worst, fixed, spread = (np.zeros(shape) for _ in range(3))
    # Rows of one centre make one product.
    moves = (centre[1:] != centre[:-1]).any(-1)
    ends = [0, *(np.flatnonzero(moves) + 1), shape[0]]
    for rows in map(slice, ends, ends[1:]):
        off = np.abs(key - centre[rows.start])
        if in_part:
            off = np.maximum(off, np.abs(key))
        worst[rows] = ds.worst[rows] @ off
        fixed[rows] = ds.fixed[rows] @ off
        spread[rows] = np.sqrt(ds.spread[rows] ** 2 @ off**2)
    return Ball(np.zeros(shape), worst, fixed, spread)


def _by_keys(terms: Ball, key: Ball) -> Ball:
    """The errors of sum_j terms_ij K'_j that come from those of K', about zero."""
    size = np.abs(terms.value)
    return Ball(
        np.zeros((len(size), key.value.shape[-1])),
        terms.size @ key.worst,
        size @ key.fixed + terms.worst @ key.worst,
        np.sqrt(size**2 @ key.spread**2),
    )


def _subtract_centre(
    arithmetic: Arithmetic,
    dquery: Ball,
    terms: Ball,
    unit: Unit,
    expected: Ball,
    centre: np.ndarray,
    centre_error: np.ndarray,
    at_end: float,
) -> Ball:
    """Roundings of rowsum(dS) - R, R `expected`, and of its product with the centre."""

    def over_keys(x):
        return x.sum(-1, keepdims=True)

    row_sum = arithmetic.carrier_sum(
        exact(over_keys(terms.value)),
        over_keys(terms.size),
        over_keys(terms.value**2),
        terms.value.shape[-1],
        unit,
    )
    if arithmetic.recipe.dq_dlogits is not None:
        row_sum = arithmetic.carried(row_sum, extra=over_keys(terms.worst))
    if expected.size.any():
        row_sum = plus(row_sum, scaled(expected, -1.0), shared=True)
        row_sum = row_sum._replace(value=np.zeros(row_sum.value.shape))
        row_sum = arithmetic.carried(row_sum, extra=over_keys(terms.worst))
    # In exact arithmetic the sum vanishes: what is left of it is its error.
    off = over_keys(terms.worst) + row_sum.worst
    product = scaled(row_sum._replace(value=np.zeros(off.shape)), centre)
    product = arithmetic.carried(product, 4, extra=off * np.abs(centre))
    second = off * centre_error
    product = product._replace(
        worst=product.worst + second, fixed=product.fixed + second
    )
    return arithmetic.carried(plus(dquery, scaled(product, at_end)), 2)
