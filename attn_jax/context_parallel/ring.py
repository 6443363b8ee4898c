"""Keys and values travel round a ring of devices, and so do their gradients.

At hop h shard r has the keys of shard r - h. The next keys are sent before a hop's work
begins, and in the backward pass so are the sums of the hop before, in FP32: both travel
while the device computes. Hops at which no shard sees anything are left out; what
travels takes them in one step. Every sum has a fixed order, hop by hop.
"""

from itertools import pairwise

from jax import lax
from jaxtyping import Array

from attn_jax.context_parallel.local import (
    Local,
    Static,
    gradients,
    rows_of,
    sent,
)
from attn_jax.context_parallel.meeting import (
    Made,
    add_backward,
    add_forward,
    no_dbias,
    packed,
    stacked,
    unpacked,
    with_pairs,
)
from attn_jax.context_parallel.merge import Rows, kept, over_parts
from attn_jax.varying import varying_alike


def forward(static: Static, x: Local) -> Rows:
    """O, not yet rounded by `output`, and LSE of this device's queries."""
    meetings = static.schedule(x.query, x.key)
    rank, shards = lax.axis_index(static.axis), static.shards
    hops = [hop for hop in range(shards) if meetings.is_live(hop)]

    def visit(add, so_far):
        made = Made()
        both = stacked(x.key, x.value)
        if hops:
            both = _moved(both, static, hops[0])
        for hop, after in pairwise([*hops, None]):
            assert hop is not None
            ahead = both if after is None else _moved(both, static, after - hop)
            source = (rank - hop) % shards
            shard = x.meets(both, source)
            first = hop == hops[0]
            so_far = add_forward(
                *(meetings, add, so_far, shard, rank, source, hop),
                first=first,
                made=made,
            )
            both = ahead
        return so_far

    return over_parts(visit, static.block, x.query, x.value, x)


def backward(
    static: Static, x: Local, lse: Array, for_delta, centre, dout: Array, dlse: Array
) -> tuple[Array | None, ...]:
    """dQ, dK, dV and dbias of this device's arrays, rounded once."""
    block, shards = static.block, static.shards
    recipe = block.recipe
    meetings = static.schedule(x.query, x.key)
    rank = lax.axis_index(static.axis)
    rows, dlse = rows_of(block, dout, dlse, lse, for_delta, x.query, centre)
    nothing = block.nothing(x.query, x.key, x.value), no_dbias(block, x.bias)
    (total, dbias), _ = varying_alike(nothing, x)
    hops = [hop for hop in range(shards) if meetings.is_live(hop)]
    columns = x.key.shape[-1]
    both, sums = stacked(x.key, x.value), packed(total.dkey, total.dvalue)
    at, made = 0, Made()
    if hops:
        both = _moved(both, static, hops[0])
    for hop, after in pairwise([*hops, None]):
        assert hop is not None
        ahead = both if after is None else _moved(both, static, after - hop)
        arrived = _moved_sums(sums, static, hop - at)
        source = (rank - hop) % shards
        shard = x.meets(both, source)
        total, *part, of_bias = add_backward(
            *(block, meetings, total, shard, rows, rank, source, hop), made=made
        )
        sums = kept(arrived + packed(*part), recipe.ring_gradient_accumulator)
        dbias = with_pairs(dbias, of_bias, 0, source * x.key.shape[1])
        both, at = ahead, hop
    dkey, dvalue = unpacked(_moved_sums(sums, static, -at % shards), columns)
    total = total._replace(dkey=dkey, dvalue=dvalue, dbias=dbias)
    return gradients(block, total, rows, dlse, (x.query, x.key, x.value, x.bias))


def _moved(x: Array, static: Static, steps: int) -> Array:
    """What lies `steps` shards before this one."""
    if steps == 0:
        return x
    shards = static.shards
    return lax.ppermute(
        x, static.axis, [(one, (one + steps) % shards) for one in range(shards)]
    )


def _moved_sums(sums: Array, static: Static, steps: int) -> Array:
    if steps == 0:
        return sums
    return _moved(sent(static, sums), static, steps).astype(sums.dtype)
