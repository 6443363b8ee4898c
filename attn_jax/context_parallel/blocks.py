"""Block-level attention: what context parallelism asks of an implementation.

A block takes some queries and some keys that one `Mask` describes, and the bias of
their pairs if there is one. It leaves O and LSE in FP32 (or FP64) forward, or O rounded
where it ends rows with their last keys, and takes LSE and delta of whole rows backward.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from attn_jax import emulator
from attn_jax.context_parallel.all_keys import AllKeys, Gather, of_all
from attn_jax.context_parallel.schedule import Call
from attn_jax.emulator import partial
from attn_jax.emulator.partial import Partial
from attn_jax.emulator.sums import read, write
from attn_jax.formats import FP32, carrier_dtype, round_to
from attn_jax.mask import Mask
from attn_jax.recipe_schema import Recipe
from attn_jax.span import Chosen, Ended, Ending


class WholeRows(NamedTuple):
    """What the backward pass knows of whole rows.

    Attributes:
      excess: delta - dLSE.
      keys: what there is besides the keys that rows meet.
      ranges: of `Block.ranges`, for all rows of this device.
    """

    dout: Float[Array, "B T N D"]
    lse: Float[Array, "B N T"]
    excess: Float[Array, "B N T"]
    keys: AllKeys
    ranges: Any

    def of(self, take: Callable[[Array], Array]) -> "WholeRows":
        """What `take` takes of each array of rows, and the rest as it is."""
        of_rows = take(self.dout), take(self.lse), take(self.excess)
        return WholeRows(*of_rows, self.keys, self.ranges)


@runtime_checkable
class Block(Protocol):
    """One way to compute parts of attention; hashable, compiled in.

    `recipe` says what is rounded where between parts (its `ring_*` fields, `lse`,
    `gradient`), and `scale` is that of the logits.
    """

    @property
    def recipe(self) -> Recipe: ...

    @property
    def scale(self) -> float: ...

    def attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: Mask,
        bias: Array | None,
        out_dtype: Any,
    ) -> tuple[Array, Array]:
        """(out, LSE) of all keys at once, differentiable: the plain implementation."""
        ...

    def forward(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: Mask,
        bias: Array | None = None,
    ) -> tuple[Array, Array]:
        """(O, LSE) of these keys, unrounded; 0 and -inf where they are hidden."""
        ...

    def carry_on(
        self,
        state: Any,
        query: Array,
        key: Array,
        value: Array,
        mask: Mask,
        bias: Array | None = None,
        *,
        nothing: bool,
        first: int,
        first_key: int,
        prepared: Any,
    ) -> tuple[Array, ...]:
        """(m, l, A) with these keys, for a ring_merge that carries them on, of rows of
        which the query is those from the `first` on; of no keys (-inf, 0, 0), and
        `nothing` where it is known that the state is that. `prepared`: of `prepared`,
        where these are the keys from `first_key` on."""
        ...

    def carry_on_some(
        self,
        state: Any,
        query: Array,
        key: Array,
        value: Array,
        chosen: Chosen,
        prepared: Any,
        ending: Ending | None,
    ) -> tuple[Array, ...] | Ended | None:
        """The same of what is `chosen`, without a mask; None if the block cannot tell
        on a device which it is. `ending`: how rows end that have met all keys then."""
        ...

    def prepared(self, key: Array, value: Array) -> Any:
        """Keys and values, an array or more, as all devices are to have them for these
        two, so that none makes anything of them that another has made; or None."""
        ...

    def finished(self, state: tuple[Array, ...], query: Array) -> tuple[Array, Array]:
        """(O, LSE) of what was carried over all keys."""
        ...

    def row_sums(
        self, dout: Array, out: Array, query: Array
    ) -> tuple[Array, Array | None]:
        """delta of whole rows, from the O that `partial.kept_for_delta` kept, and the
        norm of each row of dO, if `ranges` wants them."""
        ...

    def of_all(self, key: Array, value: Array, gather: Gather) -> AllKeys:
        """What `backward` has to know of all keys, from this device's."""
        ...

    def ranges(
        self, dout: Array, excess: Array, norm: Array | None, keys: AllKeys
    ) -> Any:
        """The powers of two of dS and K', one for all parts of these whole rows, so
        that what is added up is in the same units."""
        ...

    def backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: WholeRows,
        mask: Mask,
        bias: Array | None = None,
    ) -> Partial:
        """What these keys bring to the gradients of the rows."""
        ...

    def nothing(self, query: Array, key: Array, value: Array) -> Partial:
        """What no keys bring to them."""
        ...

    def adds_in_place(self, query: Array, value: Array, calls: Sequence[Call]) -> bool:
        """Whether `backward_in_place` makes the gradients of all these calls."""
        ...

    def backward_in_place(
        self,
        sums: Array | None,
        query: Array,
        key: Array,
        value: Array,
        rows: WholeRows,
        call: Call | Chosen,
        planes: Array | None,
    ) -> tuple[Array, Array, Array] | None:
        """(`sums` with what a call's keys bring to its rows, dK, dV). Queries, `rows`
        and `sums` are all there are, as are keys and values where a span is chosen.
        `sums` of no keys: 0, or None if the call has all queries or is a choice; of all
        keys `dquery` takes them, `in_place`. `planes`: an array whose first two are all
        keys and values. What is returned is None if the block cannot tell on a device
        what is chosen."""
        ...

    def dquery(
        self, total: Partial, dlse: Array, rows: WholeRows, *, in_place: bool
    ) -> Array:
        """dQ of whole rows, before its last rounding. `total` is the sum of their
        parts, `dlse` is 0 where LSE is -inf. `in_place`: that of `backward_in_place`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Emulated:
    """A recipe's roundings in plain JAX, on any device."""

    recipe: Recipe
    scale: float

    def attention(self, query, key, value, mask, bias, out_dtype):
        return emulator.attention(
            *(query, key, value),
            recipe=self._alone,
            bias=bias,
            mask=mask,
            scale=self.scale,
            out_dtype=out_dtype,
        )

    def forward(self, query, key, value, mask, bias=None):
        return partial.forward(
            *(query, key, value),
            recipe=self._alone,
            scale=self.scale,
            bias=bias,
            mask=mask,
        )

    def prepared(self, key, value):
        del key, value

    def carry_on(
        self, state, query, key, value, mask, bias=None, *, nothing, first, **prepared
    ):
        del nothing, prepared
        rows = partial.carry_on(
            *(rows_from(state, first, query.shape[1]), query, key, value),
            recipe=self._alone,
            scale=self.scale,
            bias=bias,
            mask=mask,
        )
        return with_rows(state, rows, first)

    def carry_on_some(self, state, query, key, value, chosen, prepared, ending):
        del state, query, key, value, chosen, prepared, ending

    def finished(self, state, query):
        m, l, total = state  # noqa: E741
        return partial.finished(
            (m, l, total), query, recipe=self._alone, scale=self.scale
        )

    def row_sums(self, dout, out, query):
        del query
        return partial.delta(dout, out, self.recipe), None

    def of_all(self, key, value, gather):
        """c is None unless of dq_centre 'keys': those that a query sees are counted as
        they come."""
        key, value = (
            round_to(x.astype(carrier(self)), self.recipe.inputs) for x in (key, value)
        )
        recipe = self.recipe
        return of_all(
            *(key, value, recipe.inputs, gather),
            centred=recipe.dq_centre == "keys",
            scaled=recipe.scales_heads,
        )

    def ranges(self, dout, excess, norm, keys):
        del norm
        return partial.head_scale(
            *(dout, excess, keys.value_largest), recipe=self._alone, scale=self.scale
        )

    def backward(self, query, key, value, rows, mask, bias=None):
        return partial.backward(
            *(query, key, value, rows.dout, rows.lse, rows.excess),
            recipe=self._alone,
            scale=self.scale,
            bias=bias,
            mask=mask,
            centre=rows.keys.centre,
            key_largest=rows.keys.key_largest,
            head_scale=rows.ranges,
        )

    def nothing(self, query, key, value):
        B, T, N, H = query.shape
        K, dtype = key.shape[2], carrier(self)
        return Partial(
            *_zeros(self, query, key, value),
            row_sum=jnp.zeros((B, N, T), dtype),
            key_sum=jnp.zeros((B, T, K, H), dtype),
            key_count=jnp.zeros((B, T), dtype),
        )

    def adds_in_place(self, query, value, calls):
        del query, value, calls
        return False

    def backward_in_place(self, sums, query, key, value, rows, call, planes):
        raise NotImplementedError

    def dquery(self, total, dlse, rows, *, in_place):
        assert not in_place
        return partial.corrected_dquery(
            total, dlse, recipe=self.recipe, scale=self.scale, centre=rows.keys.centre
        )

    @property
    def _alone(self) -> Recipe:
        """What the recipe says of one device."""
        return dataclasses.replace(self.recipe, ring_size=1)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The Pallas kernels (`kernels.partial`).

    `recipe` says what happens between parts; within them the kernels do what they do.
    dQ's cure takes the centre of all keys, hidden or not, on whatever device.
    """

    recipe: Recipe
    scale: float

    def attention(self, query, key, value, mask, bias, out_dtype):
        from attn_jax.kernels import attention as kernels  # Imported on use: slow.

        return kernels.attention(
            *(query, key, value),
            scale=self.scale,
            bias=bias,
            mask=mask,
            out_dtype=out_dtype,
        )

    def forward(self, query, key, value, mask, bias=None):
        from attn_jax.kernels import partial as kernels

        return kernels.forward(
            query, key, value, scale=self.scale, bias=bias, mask=mask
        )

    def prepared(self, key, value):
        from attn_jax.kernels import partial as kernels

        if self.recipe.ring_merge not in ("carry", "carry_whole"):
            return None
        return kernels.prepared(key, value)

    def carry_on(
        self, state, query, key, value, mask, bias=None, *, nothing, first, **prepared
    ):
        from attn_jax.kernels import partial as kernels

        all_rows = state[0].shape[-1] == query.shape[1]
        found = kernels.carry_on(
            *(None if nothing and all_rows else state, query, key, value),
            scale=self.scale,
            bias=bias,
            mask=mask,
            first=first,
            **prepared,
        )
        return tuple(found)  # As where a plan has no calls.

    def carry_on_some(self, state, query, key, value, chosen, prepared, ending):
        from attn_jax.kernels import partial as kernels

        if not kernels.takes(query, key, value, chosen):
            return None
        add = functools.partial(kernels.carry_on, chosen=chosen)
        if ending is not None:
            add = functools.partial(kernels.end_with, chosen=chosen, ending=ending)
        found = add(state, query, key, value, scale=self.scale, prepared=prepared)
        return found if isinstance(found, Ended) else tuple(found)

    def finished(self, state, query):
        from attn_jax.kernels import partial as kernels

        del query
        return kernels.finished(state)

    def row_sums(self, dout, out, query):
        from attn_jax.kernels import partial as kernels

        return kernels.row_sums(dout.astype(query.dtype), out)

    def of_all(self, key, value, gather):
        from attn_jax.kernels import partial as kernels

        scaled = kernels.scaled(key)
        key, value = (x.astype(jnp.float32) for x in (key, value))
        return of_all(
            *(key, value, self.recipe.inputs, gather),
            centred=True,
            scaled=scaled,
            finite=True,
        )

    def ranges(self, dout, excess, norm, keys):
        from attn_jax.kernels import partial as kernels

        return kernels.ranges(
            *(keys.centre, keys.key_largest, keys.value_largest, excess, norm)
        )

    def backward(self, query, key, value, rows, mask, bias=None):
        from attn_jax.kernels import partial as kernels

        found = kernels.backward(
            *(query, key, value, rows.dout, rows.lse, rows.excess, rows.ranges),
            scale=self.scale,
            bias=bias,
            mask=mask,
        )
        dquery, dkey, dvalue, dbias = found
        return Partial(dquery, dkey, dvalue, None, None, None, dbias)

    def nothing(self, query, key, value):
        dquery, dkey, dvalue = _zeros(self, query, key, value)
        return Partial(dquery, dkey, dvalue, None, None, None)

    def adds_in_place(self, query, value, calls):
        from attn_jax.kernels import partial as kernels

        recipe = self.recipe
        steps = recipe.ring_gradient_partial, recipe.ring_gradient_accumulator
        if any(step.format != FP32 for step in steps):
            return False

        shapes = query.shape, value.shape
        return all(
            not call.shifted
            and call.window is None
            and kernels.adds_in_place(
                *(*shapes, call.query, call.key), is_causal=call.is_causal
            )
            for call in calls
        )

    def backward_in_place(self, sums, query, key, value, rows, call, planes):
        from attn_jax.kernels import partial as kernels

        if isinstance(call, Chosen):
            if not kernels.adds_some(call, query, value):
                return None
            first, queries, is_causal = 0, (0, query.shape[1]), False
        else:
            first, queries, is_causal = call.key[0], call.query, call.is_causal
        keys = kernels.Keys(key, value, first, planes)
        return kernels.backward_in_place(
            *(sums, query, keys, rows.dout, rows.lse, rows.excess, rows.ranges),
            queries,
            scale=self.scale,
            is_causal=is_causal,
            chosen=call if isinstance(call, Chosen) else None,
        )

    def dquery(self, total, dlse, rows, *, in_place):
        if in_place:
            from attn_jax.kernels import partial as kernels

            return kernels.dquery(total.dquery, dlse, rows.ranges, self.scale)
        # Rows of dS sum to dLSE, and that much too much has been subtracted.
        centre = rows.keys.centre
        group = total.dquery.shape[2] // centre.shape[1]
        own = jnp.repeat(centre, group, axis=1)[:, None]
        return total.dquery + self.scale * dlse.swapaxes(1, 2)[..., None] * own


def rows_axis(x: Array) -> int:
    """Axis of the queries: the last of [B, N, T] and [B, T], else the second."""
    return x.ndim - 1 if x.ndim < 4 else 1


def rows_from(arrays: tuple[Any, ...], first, count: int) -> tuple[Any, ...]:
    """So many rows of each."""
    return tuple(read(x, rows_axis(x), first, count) for x in arrays)


def with_rows(arrays: tuple[Any, ...], new: tuple[Any, ...], first) -> tuple[Any, ...]:
    """Each with other rows from the `first` on."""
    return tuple(
        write(x, rows, rows_axis(x), first) for x, rows in zip(arrays, new, strict=True)
    )


def carrier(block: Block) -> jnp.dtype:
    """The type of what goes from part to part."""
    return jnp.dtype(carrier_dtype(block.recipe.carrier))


def _zeros(block: Block, *arrays: Array) -> list[Array]:
    return [jnp.zeros(x.shape, carrier(block)) for x in arrays]
