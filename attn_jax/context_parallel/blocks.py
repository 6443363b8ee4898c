"""Block-level attention: what context parallelism asks of an implementation.

A block takes some queries and some keys that one `Mask` describes, and the bias of
their pairs if there is one. It leaves O and LSE in FP32 (or FP64) forward, and takes
LSE and delta of whole rows backward.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from attn_jax import emulator
from attn_jax.centre import centre_from, counts_largest
from attn_jax.emulator import partial
from attn_jax.emulator.partial import Partial
from attn_jax.emulator.sums import read, write
from attn_jax.formats import carrier_dtype, round_to
from attn_jax.mask import Mask
from attn_jax.pairwise import pairwise_mean
from attn_jax.recipe_schema import Recipe
from attn_jax.span import Span


class OverDevices(NamedTuple):
    """Of what each device has: the mean and the largest over all of them."""

    mean: Callable[[Array], Array]
    largest: Callable[[Array], Array]

    @classmethod
    def of_axis(cls, axis: str) -> "OverDevices":
        """Those of a mesh axis."""
        return cls(
            functools.partial(lax.pmean, axis_name=axis),
            functools.partial(lax.pmax, axis_name=axis),
        )

    @classmethod
    def here(cls) -> "OverDevices":
        """One device has it all."""
        return cls(lambda x: x, lambda x: x)


class WholeRows(NamedTuple):
    """What the backward pass knows of whole rows."""

    dout: Float[Array, "B T N D"]
    lse: Float[Array, "B N T"]
    excess: Float[Array, "B N T"]  # delta - dLSE
    dout_norm: Float[Array, "B N T"] | None = None  # as `Block.row_sums` gives them
    centre: Float[Array, "B K H"] | None = None  # of all keys, as the block wants it

    def of(self, take: Callable[[Array], Array]) -> "WholeRows":
        """What `take` takes of each array of rows, and the centre as it is."""
        norm = None if self.dout_norm is None else take(self.dout_norm)
        of_rows = take(self.dout), take(self.lse), take(self.excess)
        return WholeRows(*of_rows, norm, self.centre)


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
    ) -> tuple[Array, ...]:
        """(m, l, A) with these keys, for a ring_merge that carries them on, of rows of
        which the query is those from the `first` on; of no keys (-inf, 0, 0), and
        `nothing` where it is known that the state is that."""
        ...

    def carry_on_some(
        self,
        state: Any,
        query: Array,
        key: Array,
        value: Array,
        spans: tuple[Span, ...],
        which: Array,
    ) -> tuple[Array, ...] | None:
        """The same of one of some spans, without a mask, which is known on a device
        alone; None if the block cannot tell them apart there."""
        ...

    def finished(self, state: tuple[Array, ...], query: Array) -> tuple[Array, Array]:
        """(O, LSE) of what was carried over all keys."""
        ...

    def row_sums(
        self, dout: Array, out: Array, query: Array
    ) -> tuple[Array, Array | None]:
        """delta of whole rows, from the O that `partial.kept_for_delta` kept, and the
        norm of each row of dO, if `backward` wants them."""
        ...

    def of_keys(self, key: Array, value: Array, rows: WholeRows) -> Any:
        """What `backward` has to know of keys, of which it then takes some, and of
        rows."""
        ...

    def backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: WholeRows,
        of_keys: Any,
        mask: Mask,
        bias: Array | None = None,
    ) -> Partial:
        """What these keys bring to the gradients of the rows."""
        ...

    def nothing(self, query: Array, key: Array, value: Array) -> Partial:
        """What no keys bring to them."""
        ...

    def centre(self, key: Array, over: OverDevices) -> Array | None:
        """What `backward` has to know of all keys, from this device's."""
        ...

    def dquery(self, total: Partial, dlse: Array, centre: Array | None) -> Array:
        """dQ of whole rows, before its last rounding. `total` is the sum of their
        parts, `dlse` is 0 where LSE is -inf."""
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

    def carry_on(self, state, query, key, value, mask, bias=None, *, nothing, first):
        del nothing
        rows = partial.carry_on(
            *(rows_from(state, first, query.shape[1]), query, key, value),
            recipe=self._alone,
            scale=self.scale,
            bias=bias,
            mask=mask,
        )
        return with_rows(state, rows, first)

    def carry_on_some(self, state, query, key, value, spans, which):
        del state, query, key, value, spans, which

    def finished(self, state, query):
        m, l, total = state  # noqa: E741
        return partial.finished(
            (m, l, total), query, recipe=self._alone, scale=self.scale
        )

    def row_sums(self, dout, out, query):
        del query
        return partial.delta(dout, out, self.recipe), None

    def of_keys(self, key, value, rows):
        del key, value, rows

    def backward(self, query, key, value, rows, of_keys, mask, bias=None):
        del of_keys
        return partial.backward(
            *(query, key, value, rows.dout, rows.lse, rows.excess),
            recipe=self._alone,
            scale=self.scale,
            bias=bias,
            mask=mask,
            centre=rows.centre,
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

    def centre(self, key, over):
        """c of dq_centre 'keys'; else None: the keys that a query sees are counted as
        they come."""
        if self.recipe.dq_centre != "keys":
            return None
        wide = round_to(key.astype(jnp.float32), self.recipe.inputs)
        return _centre_of_all(wide, self.recipe, over)

    def dquery(self, total, dlse, centre):
        return partial.corrected_dquery(
            total, dlse, recipe=self.recipe, scale=self.scale, centre=centre
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

    def carry_on(self, state, query, key, value, mask, bias=None, *, nothing, first):
        from attn_jax.kernels import partial as kernels

        all_rows = state[0].shape[-1] == query.shape[1]
        found = kernels.carry_on(
            *(None if nothing and all_rows else state, query, key, value),
            scale=self.scale,
            bias=bias,
            mask=mask,
            first=first,
        )
        return tuple(found)  # As where a plan has no calls.

    def carry_on_some(self, state, query, key, value, spans, which):
        from attn_jax.kernels import partial as kernels
        from attn_jax.kernels.schedule import Chosen

        chosen = Chosen(spans, which)
        if not kernels.takes(query, key, value, chosen):
            return None
        found = kernels.carry_on(
            *(state, query, key, value), scale=self.scale, chosen=chosen
        )
        return tuple(found)

    def finished(self, state, query):
        from attn_jax.kernels import partial as kernels

        del query
        return kernels.finished(state)

    def row_sums(self, dout, out, query):
        from attn_jax.kernels import partial as kernels

        return kernels.row_sums(dout.astype(query.dtype), out)

    def of_keys(self, key, value, rows):
        from attn_jax.kernels import partial as kernels

        assert rows.dout_norm is not None and rows.centre is not None
        return kernels.ranges(*(key, value, rows.excess, rows.dout_norm, rows.centre))

    def backward(self, query, key, value, rows, of_keys, mask, bias=None):
        from attn_jax.kernels import partial as kernels

        found = kernels.backward(
            *(query, key, value, rows.dout, rows.lse, rows.excess),
            *(rows.centre, of_keys),
            scale=self.scale,
            bias=bias,
            mask=mask,
        )
        dquery, dkey, dvalue, dbias = found
        return Partial(dquery, dkey, dvalue, None, None, None, dbias)

    def nothing(self, query, key, value):
        dquery, dkey, dvalue = _zeros(self, query, key, value)
        return Partial(dquery, dkey, dvalue, None, None, None)

    def centre(self, key, over):
        """c of dq_centre 'keys'."""
        return _centre_of_all(key, self.recipe, over)

    def dquery(self, total, dlse, centre):
        # Rows of dS sum to dLSE, and that much too much has been subtracted.
        group = total.dquery.shape[2] // centre.shape[1]
        own = jnp.repeat(centre, group, axis=1)[:, None]
        return total.dquery + self.scale * dlse.swapaxes(1, 2)[..., None] * own


def _centre_of_all(
    key: Float[Array, "B S K H"], recipe: Recipe, over: OverDevices
) -> Float[Array, "B K H"]:
    """c of dq_centre 'keys', of all keys on whatever device, in one message."""
    wide = key.astype(jnp.float32)
    sums = [pairwise_mean(x, 1) for x in (wide, jnp.square(wide))]
    mean, square = over.mean(jnp.stack(sums))
    largest = jnp.zeros_like(mean)
    if counts_largest(recipe.inputs):  # Which alone might not hold K - c.
        largest = over.largest(jnp.abs(wide).max(axis=1))
    return centre_from(mean, square, largest, recipe.inputs)


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
