"""Keys and values travel round a ring of devices, and so do their gradients.

At hop h shard r has the keys of shard r - h. A hop's message is sent before its work
begins and is there when it ends, so that it travels while the device computes: the
keys of the hop after, and in the backward pass the sums of the hop before, in the
recipe's format of those sums (FP32, if it is ours) unless a `wire` has 16 bits. There a
shard's own keys come last (`ring_own_keys`), so that no sums are left to travel then;
in the forward pass they come first, when no others are there yet. Hops at which no
shard sees anything are left out; what travels takes them in one step. Every sum has a
fixed order, hop by hop.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from jax import lax
from jaxtyping import Array

from attn_jax.context_parallel.local import (
    Local,
    Static,
    ending,
    gradients,
    rows_of,
    sent,
)
from attn_jax.context_parallel.meeting import (
    Made,
    add_backward,
    add_forward,
    adds_in_place,
    no_dbias,
    with_pairs,
)
from attn_jax.context_parallel.merge import kept, over_parts
from attn_jax.context_parallel.messages import (
    apart,
    fit,
    moved,
    packed,
    stacked,
    together,
    unpacked,
)
from attn_jax.span import Ended
from attn_jax.varying import varying_alike

# dK and dV.
Sums = Sequence[Array]


def forward(static: Static, x: Local, *, differentiated: bool) -> Ended:
    """O and LSE of this device's queries."""
    meetings = static.schedule(x.query, x.key)
    rank, shards = lax.axis_index(static.axis), static.shards
    hops = meetings.live_hops(range(shards))

    def visit(add, so_far):
        made = Made()
        prepared = static.block.prepared(x.key, x.value)
        both = stacked(x.key, x.value) if prepared is None else prepared
        if hops:
            both = moved(both, static.axis, hops[0])
        for hop, after in pairwise([*hops, None]):
            assert hop is not None
            ahead = None if after is None else moved(both, static.axis, after - hop)
            source = (rank - hop) % shards
            if prepared is not None:
                shard = x.meets_prepared(both, source)
            else:
                shard = x.meets(both if hop else None, source)
            first = hop == hops[0]
            so_far = add_forward(
                *(meetings, add, so_far, shard, rank, source, hop),
                first=first,
                made=made,
                ending=ending(static, x, differentiated) if after is None else None,
            )
            if ahead is not None:
                # Else XLA sends all keys on before any work, and waits for them.
                both, so_far = lax.optimization_barrier((ahead, so_far))
        return so_far

    return over_parts(visit, static.block, x.query, x.value, x)


def backward(
    static: Static, x: Local, lse: Array, for_delta, keys, dout: Array, dlse: Array
) -> tuple[Array | None, ...]:
    """dQ, dK, dV and dbias of this device's arrays, rounded once."""
    block, shards = static.block, static.shards
    recipe = block.recipe
    meetings = static.schedule(x.query, x.key)
    rank = lax.axis_index(static.axis)
    rows, dlse = rows_of(block, dout, dlse, lse, for_delta, x.query, keys)
    nothing = block.nothing(x.query, x.key, x.value), no_dbias(block, x.bias)
    (total, dbias), _ = varying_alike(nothing, x)
    hops = meetings.live_hops(recipe.backward_hops(shards))
    in_place = adds_in_place(block, meetings, x, hops)
    own = stacked(x.key, x.value)
    both, sums, made = own, None, Made()
    if hops and hops[0] < shards:
        # On their way while delta is computed.
        both, rows = lax.optimization_barrier((moved(own, static.axis, hops[0]), rows))
    for before, hop, after in zip([0, *hops], hops, [*hops[1:], shards], strict=False):
        # Own keys are at hand: none travel to them.
        onward = after - hop if after < shards else 0
        message, opened = _exchanged(static, both, onward, sums, hop - before)
        source = (rank - hop) % shards
        shard = x.meets(both if hop % shards else None, source)
        total, *part, of_bias = add_backward(
            *(block, meetings, total, shard, rows, rank, source, hop % shards),
            in_place=in_place,
            begins=in_place and hop == hops[0],
            made=made,
        )
        if after < shards:
            # As in `forward`: what comes next is not begun before this.
            message, dquery, part = lax.optimization_barrier(
                (message, total.dquery, part)
            )
            total = total._replace(dquery=dquery)
        ahead, arrived = opened(message)
        if ahead.ndim == 5 and not in_place:
            # A slice of a message, so that programs of all hops are the same; kernels
            # that add in place take it whole.
            ahead = ahead[:2]
        if arrived is not None:
            part = [old + new for old, new in zip(arrived, part, strict=True)]
        sums = [kept(new, recipe.ring_gradient_accumulator) for new in part]
        dbias = with_pairs(dbias, of_bias, 0, source * x.key.shape[1])
        both = ahead if after < shards else own
    if sums is not None:
        if hops[-1] < shards:
            sums = _moved_sums(static, sums, shards - hops[-1])
        dkey, dvalue = sums
        total = total._replace(dkey=dkey, dvalue=dvalue)
    total = total._replace(dbias=dbias)
    inputs = x.query, x.key, x.value, x.bias
    return gradients(block, total, rows, dlse, inputs, in_place=in_place)


def _moved_sums(static: Static, sums: Sums, steps: int) -> list[Array]:
    """In one message."""
    wire = packed(*(sent(static, x) for x in sums))
    found = unpacked(moved(wire, static.axis, steps), sums[0].shape[-1])
    return [x.astype(sums[0].dtype) for x in found]


def _exchanged(
    static: Static, both: Array, onward: int, sums: Sums | None, steps: int
) -> tuple[Any, Callable[[Any], tuple[Array, Sums | None]]]:
    """What comes when keys go onward and sums go some steps, in one message if it can
    be, and how to open it: (keys, sums)."""
    if sums is None:
        return moved(both, static.axis, onward), lambda ahead: (ahead, None)
    wire = [sent(static, x) for x in sums]
    if onward != steps or not fit(both, wire):
        if both.ndim == 5:  # Sums that came with these keys stay.
            both = both[:2]
        come = moved(both, static.axis, onward), _moved_sums(static, sums, steps)
        return come, lambda come: come

    def opened(message: Array) -> tuple[Array, list[Array]]:
        ahead, arrived = apart(message, both, wire)
        return ahead, [
            x.astype(old.dtype) for x, old in zip(arrived, sums, strict=True)
        ]

    return moved(together(both, wire), static.axis, steps), opened
