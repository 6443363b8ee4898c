"""A shard's queries meet a shard's keys: calls of block-level attention, and sums.

What meets what is data of the `Schedule`; a hidden pair costs nothing. Nothing here is
communicated: `ring`, `gather` and `simulation` bring the arrays together.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from attn_jax.context_parallel.blocks import Block, WholeRows, carrier, rows_axis
from attn_jax.context_parallel.merge import Add, Carrying, Keys, RowArrays, kept
from attn_jax.context_parallel.messages import unpacked
from attn_jax.context_parallel.schedule import Call, Schedule
from attn_jax.emulator.partial import Partial
from attn_jax.emulator.sums import read, write
from attn_jax.mask import Mask, slice_tile
from attn_jax.recipe_schema import Step
from attn_jax.span import Chosen, Ended, Ending
from attn_jax.varying import varying_alike

# What JAX traces and lowers once for all hops that have it, by plan and by whether the
# queries have seen nothing, or by spans.
Made = dict[tuple, Callable[..., Any]]


class Shard(NamedTuple):
    """What a meeting has: the queries of one shard and the keys of one.

    The ids are of packed documents, or None; so may be the bias of these pairs.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K D"]
    query_ids: Int[Array, "B T"] | None = None
    key_ids: Int[Array, "B S"] | None = None
    bias: Float[Array, "#B #N #T #S"] | None = None

    @property
    def key_count(self) -> int:
        return self.key.shape[1]

    @property
    def planes(self) -> None:
        """What keys and values are planes of."""
        return None

    prepared = None

    def keys(self, first: int, count: int) -> tuple[Array, Array]:
        """So many of the keys and values."""
        return read(self.key, 1, first, count), read(self.value, 1, first, count)


class Arriving(NamedTuple):
    """The same, but that keys and values are `both` in a message, which is opened where
    kernels are called: XLA then hands a part of it to those that only read, and those
    that write in place take it whole, or a copy."""

    query: Float[Array, "B T N H"]
    both: Array
    query_ids: Int[Array, "B T"] | None
    key_ids: Int[Array, "B S"] | None
    bias: Float[Array, "#B #N #T #S"] | None

    @property
    def key_count(self) -> int:
        return self.both.shape[-3]

    @property
    def planes(self) -> Array | None:
        """What keys and values are planes of."""
        return self.both if self.both.ndim == 5 else None

    prepared = None

    def keys(self, first: int, count: int) -> tuple[Array, Array]:
        """So many of the keys and values."""
        return unpacked(self.both, self.query.shape[-1], slice(first, first + count))


class Ready(NamedTuple):
    """The same for a forward pass, keys and values as a block has `prepared` them."""

    query: Float[Array, "B T N H"]
    prepared: Any
    query_ids: Int[Array, "B T"] | None
    key_ids: Int[Array, "B S"] | None
    bias: Float[Array, "#B #N #T #S"] | None

    @property
    def key_count(self) -> int:
        return self.prepared.count

    def keys(self, first: int, count: int) -> tuple[Array, Array]:
        """So many of the keys and values."""
        return self.prepared.some(first, count)


AnyShard = Shard | Arriving | Ready


def _part(
    shard: AnyShard, call: Call, offset: Array
) -> tuple[Array, Array, Array, Mask, Array | None]:
    """Queries, keys and values that a call is about, its mask, and the bias of the
    pairs."""
    q, k = call.query, call.key
    ids = (None, None)
    if shard.query_ids is not None and shard.key_ids is not None:
        ids = read(shard.query_ids, 1, *q), read(shard.key_ids, 1, *k)
    batch = shard.query.shape[:1]
    mask = Mask(
        is_causal=call.is_causal,
        window=call.window,
        query_segment_ids=ids[0],
        key_value_segment_ids=ids[1],
        query_offset=jnp.broadcast_to(offset, batch) if call.shifted else None,
    )
    bias = None if shard.bias is None else pairs_of(shard.bias, q, k)
    return read(shard.query, 1, *q), *shard.keys(*k), mask, bias


def add_forward(
    schedule: Schedule,
    add: Add,
    so_far: RowArrays,
    shard: AnyShard,
    rank,
    source,
    hop: int | None = None,
    *,
    first: bool = False,
    made: Made | None = None,
    ending: Ending | None = None,
) -> RowArrays | Ended:
    """`so_far` with what the queries see of the keys of `source`, call after call.

    `rank` and `source` may be traced; `hop`, if known, is rank - source mod W, and only
    the plans of that hop are compiled. `first`: the queries have seen nothing so far.
    `made`: of one pass, for its other hops. `ending`: how rows may end, if these are
    the last keys; where the block does not do so they are left as ever.
    """

    def run(plan: tuple[Call, ...], offset, so_far, shard: AnyShard):
        for number, call in enumerate(plan):
            more = call.key[0], shard.prepared
            keys = Keys(*_part(shard, call, offset[number]), *more)
            nothing = first and not any(_overlap(call, old) for old in plan[:number])
            so_far = add(so_far, keys, nothing, call.query[0])
        return so_far

    if isinstance(add, Carrying) and hop is not None and not first:
        found = _carried(schedule, add.block, so_far, shard, rank, hop, made, ending)
        if found is not None:
            return found
    where = rank, source, hop
    return _choose(schedule, run, (so_far, shard), *where, made, first)


def _carried(
    schedule: Schedule,
    block: Block,
    so_far: RowArrays,
    shard: AnyShard,
    rank,
    hop: int,
    made: Made | None,
    ending: Ending | None,
) -> RowArrays | Ended | None:
    """`add_forward` with one kernel for all plans of a hop, where that can be, or None:
    with a `lax.switch` the host waits for its device to say which it is, and then the
    device for its host."""
    found = schedule.spans(hop)
    if found is None or shard.bias is not None or shard.query_ids is not None:
        return None
    spans, which = found
    made = {} if made is None else made

    def run(so_far, shard: AnyShard, which, rank):
        key, value = shard.keys(0, shard.key_count)
        chosen = Chosen(spans, which, rank)
        return block.carry_on_some(
            so_far, shard.query, key, value, chosen, shard.prepared, ending
        )

    if (spans, ending) not in made:
        made[spans, ending] = jax.jit(run)
    return made[spans, ending](so_far, shard, jnp.asarray(which), rank)


def _overlap(one: Call, other: Call) -> bool:
    """Whether they have queries in common."""
    (start, size), (first, count) = one.query, other.query
    return start < first + count and first < start + size


def add_backward(
    block: Block,
    schedule: Schedule,
    so_far: Partial,
    shard: Shard | Arriving,
    rows: WholeRows,
    rank,
    source,
    hop: int | None = None,
    *,
    in_place: bool = False,
    begins: bool = False,
    made: Made | None = None,
) -> tuple[
    Partial,
    Float[Array, "B S K H"],
    Float[Array, "B S K D"],
    Float[Array, "#B #N #T #S"] | None,
]:
    """The queries' sums with the keys of `source`, what these keys gain, and dbias of
    these pairs.

    The queries' sums are all of `so_far` but dkey, dvalue and dbias, which stay as they
    are. Rounds each part to `ring_gradient_partial` and dQ to
    `ring_gradient_accumulator`; dbias is not rounded. `in_place`: the block adds to dQ
    by itself. `begins`: these are the first keys that the queries meet.
    """
    recipe = block.recipe

    def add(total: Array, part: Array, axis: int, start: int, step: Step) -> Array:
        part = kept(part, recipe.ring_gradient_partial)
        new = kept(read(total, axis, start, part.shape[axis]) + part, step)
        return write(total, new, axis, start)

    def run(
        plan: tuple[Call, ...],
        offset,
        so_far: Partial,
        shard,
        rows: WholeRows,
    ):
        dkey, dvalue = (
            jnp.zeros(shape, so_far.dquery.dtype) for shape in _shapes(shard)
        )
        dbias = no_dbias(block, shard.bias)
        step = recipe.ring_gradient_accumulator
        for number, call in enumerate(plan):
            if in_place:
                key, value = shard.keys(*call.key)
                sums = so_far.dquery
                if begins and number == 0 and call.query == (0, sums.shape[1]):
                    sums = None  # Nothing is there that need be read.
                found = block.backward_in_place(
                    sums, shard.query, key, value, rows, call, shard.planes
                )
                assert found is not None
                dquery, *of_keys = found
                so_far = so_far._replace(dquery=dquery)
                dkey, dvalue = (
                    add(x, part, 1, call.key[0], step)
                    for x, part in zip((dkey, dvalue), of_keys, strict=True)
                )
                continue
            query, key, value, mask, bias = _part(shard, call, offset[number])

            def of_rows(x: Array, entries=call.query) -> Array:
                return read(x, rows_axis(x), *entries)

            mine = rows.of(of_rows)
            found = block.backward(query, key, value, mine, mask, bias)
            first, size = call.query
            sums = {"dquery": add(so_far.dquery, found.dquery, 1, first, step)}
            for name in ("row_sum", "key_sum", "key_count"):
                old, more = getattr(so_far, name), getattr(found, name)
                if old is None:
                    continue
                more = read(old, rows_axis(old), first, size) + more
                sums[name] = write(old, more, rows_axis(old), first)
            so_far = so_far._replace(**sums)
            dkey = add(dkey, found.dkey, 1, call.key[0], step)
            dvalue = add(dvalue, found.dvalue, 1, call.key[0], step)
            dbias = with_pairs(dbias, found.dbias, first, call.key[0])
        return so_far, dkey, dvalue, dbias

    if in_place and hop is not None:
        found = _added(schedule, block, so_far, shard, rows, rank, hop, begins, made)
        if found is not None:
            return *found, None
    operands = so_far, shard, rows
    return _choose(schedule, run, operands, rank, source, hop, made, begins)


def _added(
    schedule: Schedule,
    block: Block,
    so_far: Partial,
    shard: Shard | Arriving,
    rows: WholeRows,
    rank,
    hop: int,
    begins: bool,
    made: Made | None,
) -> tuple[Partial, Array, Array] | None:
    """`add_backward` in place with one kernel for all plans of a hop; as `_carried`."""
    found = schedule.spans(hop)
    if found is None or len(found[0]) == 1:
        return None
    spans, which = found
    made = {} if made is None else made

    def run(sums, shard: Shard | Arriving, rows, which, rank):
        key, value = shard.keys(0, shard.key_count)
        chosen = Chosen(spans, which, rank)
        return block.backward_in_place(
            *(None if begins else sums, shard.query, key, value, rows),
            *(chosen, shard.planes),
        )

    if (spans, begins) not in made:
        made[spans, begins] = jax.jit(run)
    which = jnp.asarray(which)
    added = made[spans, begins](so_far.dquery, shard, rows, which, rank)
    if added is None:
        return None
    dquery, dkey, dvalue = added
    return so_far._replace(dquery=dquery), dkey, dvalue


def adds_in_place(
    block: Block, schedule: Schedule, x: Any, hops: Iterable[int]
) -> bool:
    """Whether the block adds to dQ by itself wherever queries and keys of `x` (of one
    device) meet at these hops."""
    if x.bias is not None or x.query_ids is not None:
        return False
    used = np.unique([schedule.at_hop(hop) for hop in hops])
    calls = [call for number in used for call in schedule.plans[number]]
    return block.adds_in_place(x.query, x.value, calls)


def _shapes(shard: Shard | Arriving) -> list[tuple[int, ...]]:
    """Of keys and values."""
    if isinstance(shard, Shard):
        return [shard.key.shape, shard.value.shape]
    return [x.shape for x in unpacked(shard.both, shard.query.shape[-1])]


def _choose(
    schedule: Schedule,
    run: Callable,
    operands: tuple,
    rank,
    source,
    hop: int | None,
    made: Made | None,
    first: bool = False,
):
    """run(plan, offsets, *operands) for the plan of a meeting."""
    made = {} if made is None else made
    numbers = schedule.plan if hop is None else schedule.at_hop(hop)
    used = np.unique(numbers)
    offset = jnp.asarray(schedule.offset)[rank, source]
    branches = []
    for plan in (schedule.plans[number] for number in used):
        if (plan, first) not in made:
            of_plan = functools.partial(run, plan)
            made[plan, first] = jax.jit(functools.partial(_alike, of_plan))
        branches.append(made[plan, first])
    if len(used) == 1:
        return branches[0](offset, *operands)
    places = jnp.asarray(np.searchsorted(used, numbers).astype(np.int32))
    place = places[rank, source] if hop is None else places[rank]
    return lax.switch(place, branches, offset, *operands)


def _alike(run: Callable, *operands):
    """Branches return one type, the mesh axes that it varies over included."""
    return varying_alike(run(*operands), operands)[0]


def pairs_of(
    bias: Float[Array, "#B #N #T #S"], query: tuple[Any, int], key: tuple[Any, int]
) -> Float[Array, "#B #N #t #s"]:
    """The entries of (first, number of) queries and keys; axes of size 1 stay."""
    return slice_tile(bias, query[0], key[0], query[1], key[1])


def no_dbias(block: Block, bias: Array | None) -> Array | None:
    """What no pairs bring to dbias."""
    return None if bias is None else jnp.zeros(bias.shape, carrier(block))


def with_pairs(
    total: Float[Array, "#B #N #T #S"] | None,
    part: Float[Array, "#B #N #t #s"] | None,
    first_query,
    first_key,
) -> Float[Array, "#B #N #T #S"] | None:
    """dbias with that of some pairs, which is added where an axis has size 1."""
    if total is None or part is None:
        return total
    rows = read(total, 2, first_query, part.shape[2])
    new = read(rows, 3, first_key, part.shape[3]) + part
    return write(total, write(rows, new, 3, first_key), 2, first_query)
