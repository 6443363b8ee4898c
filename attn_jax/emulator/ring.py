"""A ring of devices, one after another: who meets whose keys, and how parts merge."""

import jax
import jax.numpy as jnp
from jax import lax

from attn_jax.emulator import forward as blocks
from attn_jax.emulator.forward import State
from attn_jax.emulator.sums import read, write
from attn_jax.emulator.tiles import Operands


def over_hops(x: Operands, step, carry, first: int = 0):
    """carry = step(carry, share) for each device at the `first` hop, then at the next,
    and so on.

    One device after the other: at each moment there is one tile of one share.
    """
    size = x.recipe.ring_size

    def meeting(carry, number):
        return step(carry, x.share(number % size, first + number // size)), None

    numbers = jnp.arange(size * size, dtype=jnp.int32)
    return lax.scan(meeting, carry, numbers)[0]


def forward(x: Operands):
    """O [B, K, G, T, D or more] before its last rounding and LSE [B, K, G, T, 1]."""
    columns = blocks.values_and_keys(x).shape[-1]
    if x.recipe.ring_merge in ("carry", "carry_whole"):
        return _forward_carried(x, columns)
    B, K, G, T, _ = x.shape
    lse = jnp.full((B, K, G, T, 1), -jnp.inf, x.static.carrier)
    out = jnp.zeros((B, K, G, T, columns), x.static.carrier)
    if x.recipe.ring_merge == "two_pass":
        lse = over_hops(x, _merge_lse, lse)
        out = over_hops(x, lambda out, share: _add_weighted(share, out, lse), out)
        return out, lse
    return over_hops(x, _merge, (out, lse))


def _forward_carried(x: Operands, columns: int):
    def hop(whole: State, share: Operands):
        queries = 3, share.origin[0]
        state = State(*(read(part, *queries, share.shape[3]) for part in whole))
        nothing = blocks.start(share, columns, with_sink=share.hop == 0)
        state = blocks.carried_on(share, state, nothing)
        kept = share.round(state.total, "ring_accumulator")
        state = state._replace(total=kept)
        return State(*(write(old, new, *queries) for old, new in zip(whole, state)))

    # With whole maxima the sink is among the first hop's own keys.
    first = blocks.start(x, columns, with_sink=x.recipe.ring_merge == "carry")
    state = over_hops(x, hop, first)
    return blocks.finish(x, state)


def _partial(share: Operands):
    """O_h as handed over, and LSE_h, of one device at one hop."""
    columns = blocks.values_and_keys(share).shape[-1]
    # The sink is a key of its own and must count once: in the device's first hop.
    state = blocks.start(share, columns, with_sink=share.hop == 0)
    out, lse = blocks.finish(share, blocks.add_keys(share, state))
    return share.round(out, "ring_partial"), lse


def _merge(state, share: Operands):
    queries = 3, share.origin[0]
    out, lse = (read(part, *queries, share.shape[3]) for part in state)
    part, part_lse = _partial(share)
    if share.recipe.ring_merge == "sigmoid":
        merged = out - jax.nn.sigmoid(part_lse - lse) * (out - part)
        merged_lse = lse - jax.nn.log_sigmoid(lse - part_lse)
    else:
        merged_lse = _log_sum(lse, part_lse)
        merged = jnp.exp(lse - merged_lse) * out + jnp.exp(part_lse - merged_lse) * part
    first, nothing = jnp.isneginf(lse), jnp.isneginf(part_lse)
    merged = jnp.where(first, part, jnp.where(nothing, out, merged))
    merged_lse = share.round(merged_lse, "lse", site="merged")
    merged_lse = jnp.where(first, part_lse, jnp.where(nothing, lse, merged_lse))
    merged = share.round(merged, "ring_accumulator")
    return write(state[0], merged, *queries), write(state[1], merged_lse, *queries)


def _merge_lse(whole, share: Operands):
    """The LSE over all hops, before any output is weighed."""
    queries = 3, share.origin[0]
    lse = read(whole, *queries, share.shape[3])
    _, part_lse = _partial(share)
    merged = share.round(_log_sum(lse, part_lse), "lse", site="merged")
    # As in a merge, what comes first or brings nothing is no sum.
    merged = jnp.where(jnp.isneginf(part_lse), lse, merged)
    merged = jnp.where(jnp.isneginf(lse), part_lse, merged)
    return write(whole, merged, *queries)


def _add_weighted(share: Operands, whole, lse):
    queries = 3, share.origin[0]
    out, lse = (read(part, *queries, share.shape[3]) for part in (whole, lse))
    part, part_lse = _partial(share)
    weight = jnp.where(jnp.isneginf(part_lse), 0.0, jnp.exp(part_lse - lse))
    merged = share.round(out + weight * part, "ring_accumulator")
    return write(whole, merged, *queries)


def _log_sum(a, b):
    largest = jnp.maximum(a, b)
    return largest + jnp.log1p(jnp.exp(jnp.minimum(a, b) - largest))
