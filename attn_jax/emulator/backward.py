"""The backward pass of the emulator: explicit, since autodiff knows no roundings."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from attn_jax.emulator.centre import mean_centre, with_centred_keys
from attn_jax.emulator.forward import softmax_block, start
from attn_jax.emulator.head_scale import head_scale
from attn_jax.emulator.ring import over_hops
from attn_jax.emulator.sums import read, walk, write
from attn_jax.emulator.tiles import Operands, divide_or_zero, finite_shift
from attn_jax.mask import slice_tile


class Rows(NamedTuple):
    """What the backward pass knows of each query, axes [B, K, G, T, H or 1]."""

    dout: Array
    lse: Array
    excess: Array  # delta - dLSE
    scale: Array | None = None  # r of dS as dQ's operand [B, K, 1, 1, 1], None for 1

    def of(self, share: Operands) -> "Rows":
        """The rows of the queries that a device of the ring has."""
        queries = share.origin[0], share.shape[3]
        dout, lse, excess = (read(rows, 3, *queries) for rows in self[:3])
        return Rows(dout, lse, excess, self.scale)


class _Sums(NamedTuple):
    """Running sums, each written block by block.

    `row_sum` is that of dS as dQ's operand; both are times the heads' scale on the way.
    """

    dquery: Array  # [B, K, G, T, H]
    dkey: Array  # [B, K, S, H], or [B, K, G, S, H] where each query head has its own
    dvalue: Array
    row_sum: Array
    dbias: Array | None


def gradients(x: Operands, lse, for_delta, row_centre, dout, dlse):
    """dQ, dK, dV, dbias and dsinks in the carrier, the first three rounded as told.

    `for_delta` is the output that delta is taken from (None for delta_source 'p_dp'),
    `row_centre` the rows' own centres (None unless dq_centre is 'row').
    """
    recipe, static = x.recipe, x.static
    before, x = x.drawing(x.noise, 1), x.drawing(x.noise, 2)
    dout = x.group(x.take_in(dout))
    # The LSE of a query that sees nothing is a constant, whatever its cotangent.
    dlse = dlse.astype(static.carrier).reshape(lse.shape)
    dlse = jnp.where(jnp.isneginf(lse), 0.0, dlse)
    rows = Rows(dout, lse, jnp.zeros_like(lse))
    if recipe.delta_source == "p_dp":
        delta = _delta_from_probabilities(before, rows)
    else:
        delta = x.row_sum(dout * for_delta, site="delta")
    delta = x.round(delta, "delta")
    rows = rows._replace(excess=delta - dlse)

    sink_probability = 0.0
    dsinks = None
    if x.sinks is not None:
        # A row that sees nothing beside a sink of -inf has LSE -inf.
        sink_probability = x.exp(x.sinks - finite_shift(lse * static.log_unit))
        B, K, G, T, _ = x.shape
        dsinks = -(sink_probability * rows.excess).sum((0, 3, 4)).reshape(K * G)
    on_dlogits = recipe.dlogits_scale
    at_end = 1.0
    if recipe.gradient_scale_at == "logits":
        on_dlogits *= static.scale
    else:
        at_end = static.scale
    at_end /= recipe.dlogits_scale
    rows = rows._replace(scale=head_scale(x, dout, dlse, on_dlogits))
    correction = None
    # In exact arithmetic dS, with the sink's share, sums to dLSE over each row.
    expected = (dlse + sink_probability * rows.excess) * on_dlogits
    by_keys = static.wants_centre and recipe.dq_centre == "keys"
    if by_keys:
        x, centre = with_centred_keys(x)
        correction = -expected * centre
    if recipe.ring_size == 1:
        sums = sum_tiles(x, rows, no_sums(x))
    else:
        sums = _sum_hops(x, rows, at_end)
    dquery, dkey, dvalue = sums.dquery, sums.dkey, sums.dvalue
    if static.wants_centre and not by_keys:
        centre = mean_centre(x) if row_centre is None else row_centre
        correction = (sums.row_sum - expected) * centre
    if recipe.ring_size == 1:
        dquery = dquery if correction is None else dquery - correction
        dquery, dkey = dquery * at_end, dkey * at_end
        dkey, dvalue = over_group(x, dkey, "dkey"), over_group(x, dvalue, "dvalue")
    elif correction is not None:
        dquery = dquery - correction * at_end
    if x.query_scale is not None:
        # Of Q' so far, and kept as Q' is.
        dquery = x.round(dquery, "scaled_query", site="dquery") * x.query_scale
    return (
        x.ungroup(x.round(dquery, "gradient", site="dquery")),
        x.round(dkey, "gradient", site="dkey").swapaxes(1, 2),
        x.round(dvalue, "gradient", site="dvalue").swapaxes(1, 2),
        sums.dbias,
        dsinks,
    )


def _probability(x: Operands, rows: Rows, q_start, kv_start, block_q, block_kv):
    """P of one tile before any rounding of its own, and the soft cap's slope."""
    at = q_start, kv_start
    logits, slope = x.logits(q_start, kv_start, block_q, block_kv)
    if x.recipe.probability_from == "lse":
        lse = read(rows.lse, 3, q_start, block_q) * x.static.log_unit
        if x.static.log_unit != 1.0:
            lse = x.round(lse, "lse", *at, site="unit")
        shifted = x.round(logits - finite_shift(lse), "shifted", *at)
        return x.exp_of_logits(shifted), slope
    first = (read(rows, 3, q_start, block_q) for rows in start(x, 0)[:2])
    _, total, _, p = softmax_block(x, logits, *first, *at)
    return divide_or_zero(p, total), slope


def _dprobability(x: Operands, dout, v, *at):
    product = x.dot("bkgth,bksh->bkgts", dout, v, *at, site="dprobability")
    return x.round(product, "dprobability", *at)


def _delta_from_probabilities(x: Operands, rows: Rows):
    """rowsum(P dP), in a pass over the keys of its own."""

    def over_keys(x: Operands, rows: Rows, delta):
        def step(delta, start, size):
            at = 0, start
            p, _ = _probability(x, rows, 0, start, x.shape[3], size)
            p = x.round(p, "softmax_probability", *at)
            dp = _dprobability(x, rows.dout, read(x.value, 2, start, size), *at)
            return delta + x.row_sum(p * dp, *at, site="delta")

        return walk(step, delta, x.key_length, x.recipe.backward_block_kv)

    def hop(delta, share: Operands):
        queries = 3, share.origin[0]
        old = read(delta, *queries, share.shape[3])
        return write(delta, over_keys(share, rows.of(share), old), *queries)

    zero = jnp.zeros_like(rows.lse)
    if x.recipe.ring_size == 1:
        return over_keys(x, rows, zero)
    return over_hops(x, hop, zero)


def no_sums(x: Operands, *, of_hops: bool = False) -> _Sums:
    """Zeros for sums over tiles; `of_hops`: over the results of hops."""

    def zeros(like):
        if x.recipe.group_gradient is not None and not of_hops:
            like = jnp.repeat(like[:, :, None], x.shape[2], axis=2)
        return jnp.zeros_like(like)

    return _Sums(
        jnp.zeros_like(x.query),
        zeros(x.key),
        zeros(x.value),
        jnp.zeros_like(x.query[..., :1]),
        None if x.bias is None else jnp.zeros_like(x.bias),
    )


def over_group(x: Operands, sums: Array, site: str) -> Array:
    """[B, K, S, H] of the sums dK g, or dV, that query heads may have of their own."""
    if x.recipe.group_gradient is None:
        return sums
    rounded = x.round(sums, "group_gradient", site=site)
    if x.recipe.group_accumulator is None:
        # One addition after the other: a sum over an axis may be made in any order.
        return functools.reduce(jnp.add, jnp.unstack(rounded, axis=2))

    def add(total, head):
        n, of_head = head
        return x.round(total + of_head, "group_accumulator", n, site=site), None

    heads = jnp.moveaxis(rounded, 2, 0)
    total = x.round(heads[0], "group_accumulator", 0, site=site)
    if len(heads) == 1:  # JAX runs no scan of none without jit.
        return total
    # Written out, 32 roundings one of the other take XLA many minutes to compile.
    return lax.scan(add, total, (jnp.arange(1, len(heads)), heads[1:]))[0]


def _sum_hops(x: Operands, rows: Rows, scale: float) -> _Sums:
    """Sums of the hops' own results, dQ and dK of each with its scale."""

    def hop(total: _Sums, share: Operands) -> _Sums:
        at_query, at_key = (3, share.origin[0]), (2, share.origin[1])
        part = no_sums(share)._replace(dbias=total.dbias)
        part = sum_tiles(share, rows.of(share), part)

        of_group = functools.partial(over_group, share)

        def add(old, new, axis, start, site):
            new = share.round(new, "ring_gradient_partial", site=site)
            new = read(old, axis, start, new.shape[axis]) + new
            new = share.round(new, "ring_gradient_accumulator", site=site)
            return write(old, new, axis, start)

        row_sum = read(total.row_sum, *at_query, share.shape[3]) + part.row_sum
        return _Sums(
            add(total.dquery, part.dquery * scale, *at_query, "dquery"),
            add(total.dkey, of_group(part.dkey * scale, "dkey"), *at_key, "dkey"),
            add(total.dvalue, of_group(part.dvalue, "dvalue"), *at_key, "dvalue"),
            write(total.row_sum, row_sum, *at_query),
            part.dbias,
        )

    first = x.recipe.backward_hops(x.recipe.ring_size).start
    return over_hops(x, hop, no_sums(x, of_hops=True), first)


def sum_tiles(x: Operands, rows: Rows, sums: _Sums) -> _Sums:
    recipe = x.recipe
    # Blocks of queries change no dQ, and dK and dV only where additions round; a
    # carrier-wide accumulator takes all queries in one product.
    kept = recipe.dk_accumulator, recipe.dv_accumulator, recipe.dot_accumulator
    narrow = {step.format for step in kept} != {recipe.carrier}
    narrow = narrow or recipe.dot_alignment is not None
    block_q = recipe.backward_block_q if narrow else None
    if x.integer_scale is not None:
        sums = sums._replace(dquery=jnp.zeros_like(sums.dquery, jnp.int32))

    def over_keys(sums, kv_start, block_kv):
        step = functools.partial(_add_tile, x, rows, kv_start, block_kv)
        return walk(step, sums, x.shape[3], block_q)

    sums = walk(over_keys, sums, x.key_length, recipe.backward_block_kv)
    if x.integer_scale is not None:
        dquery = sums.dquery.astype(x.static.carrier) / x.integer_scale
        dquery = jnp.where(jnp.isfinite(rows.excess), dquery, jnp.nan)
        sums = sums._replace(dquery=dquery)
    if rows.scale is None:
        return sums
    return sums._replace(
        dquery=sums.dquery / rows.scale, row_sum=sums.row_sum / rows.scale
    )


def _add_tile(
    x: Operands, rows: Rows, kv_start, block_kv, sums: _Sums, q_start, block_q
):
    recipe = x.recipe
    at = q_start, kv_start
    q = read(x.query, 3, q_start, block_q)
    k = read(x.dq_key, 2, kv_start, block_kv)
    v = read(x.value, 2, kv_start, block_kv)
    dout = read(rows.dout, 3, q_start, block_q)
    excess = read(rows.excess, 3, q_start, block_q)
    p, slope = _probability(x, rows, q_start, kv_start, block_q, block_kv)
    dp = _dprobability(x, dout, v, *at)
    ds = x.round(p, "softmax_probability", *at) * (dp - excess)
    if slope is not None:
        ds = ds * slope
    dbias = sums.dbias
    if dbias is not None:
        first = q_start + x.origin[0], kv_start + x.origin[1]
        dbias = _add_bias_tile(dbias, ds, *first)
    factor = recipe.dlogits_scale
    if recipe.gradient_scale_at == "logits":
        factor *= x.static.scale
    dq_ds, ds = _rounded_dlogits(x, rows.scale, ds * factor, *at)
    p = x.round(p, "backward_probability", *at)

    def accumulate(total, part, axis, start, size, field):
        new = x.round(read(total, axis, start, size) + part, field, *at)
        return write(total, new, axis, start)

    at_query = 3, q_start, block_q
    at_key = sums.dkey.ndim - 2, kv_start, block_kv
    keys = "bksh" if recipe.group_gradient is None else "bkgsh"
    dquery = x.dot("bkgts,bksh->bkgth", dq_ds, k, *at, site="dquery")
    dkey = x.dot(f"bkgts,bkgth->{keys}", ds, q, *at, site="dkey")
    dvalue = x.dot(f"bkgts,bkgth->{keys}", p, dout, *at, site="dvalue")
    row_sum = read(sums.row_sum, *at_query) + dq_ds.sum(-1, keepdims=True)
    if x.integer_scale is not None:
        dquery = jnp.rint(dquery * x.integer_scale).astype(jnp.int32)
        dquery = write(sums.dquery, read(sums.dquery, *at_query) + dquery, 3, q_start)
    else:
        dquery = accumulate(sums.dquery, dquery, *at_query, "dq_accumulator")
    return _Sums(
        dquery,
        accumulate(sums.dkey, dkey, *at_key, "dk_accumulator"),
        accumulate(sums.dvalue, dvalue, *at_key, "dv_accumulator"),
        write(sums.row_sum, row_sum, 3, q_start),
        dbias,
    )


def _rounded_dlogits(x: Operands, scale: Array | None, ds, *at):
    """dS as operand of dQ, times the heads' scale, and of dK."""
    rounded = x.round(ds, "dlogits", *at)
    if x.recipe.dq_dlogits is None:
        return rounded, rounded
    if scale is not None:
        ds = ds * scale
    return x.round(ds, "dq_dlogits", *at), rounded


def _add_bias_tile(dbias, ds, q_start, kv_start):
    B, K, G, block_q, block_kv = ds.shape
    full = ds.reshape(B, K * G, block_q, block_kv)
    axes = [a for a in range(4) if dbias.shape[a] == 1]
    part = full.sum(axes, keepdims=True) if axes else full
    old = slice_tile(dbias, q_start, kv_start, block_q, block_kv)
    rows = read(dbias, 2, q_start, part.shape[2])
    rows = write(rows, old + part, 3, kv_start)
    return write(dbias, rows, 2, q_start)
