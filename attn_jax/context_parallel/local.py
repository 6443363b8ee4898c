"""One device's static and array arguments, and steps that all strategies share."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attn_jax.context_parallel.all_keys import AllKeys
from attn_jax.context_parallel.blocks import Block, WholeRows
from attn_jax.context_parallel.layouts import Layout
from attn_jax.context_parallel.meeting import Arriving, Ready, Shard, pairs_of
from attn_jax.context_parallel.schedule import Schedule, schedule
from attn_jax.emulator import partial
from attn_jax.emulator.partial import Partial
from attn_jax.formats import BF16, FP16, NumberFormat, Rounding, round_to
from attn_jax.mask import Mask
from attn_jax.span import Ending

Pass = Literal["ring", "all_gather"]
# Formats of 16 bits, and the types that carry them.
WIRES = {BF16: jnp.bfloat16, FP16: jnp.float16}


class Static(NamedTuple):
    """The hashable part of a call.

    Attributes:
      axis: mesh axis over which sequences are cut into `shards`.
      forward_by, backward_by: how keys come to queries in each pass.
      wire: format of dK and dV on their way between devices; None: the carrier's.
      head_stride: key heads that are gathered at once; None: all.
      out_dtype: of the output.
      bias_dtype: in which a bias is kept and read; None without one.
    """

    block: Block
    axis: str
    shards: int
    layout: Layout
    forward_by: Pass
    backward_by: Pass
    is_causal: bool
    window: tuple[int | None, int | None] | None
    wire: NumberFormat | None
    head_stride: int | None
    out_dtype: np.dtype
    bias_dtype: np.dtype | None

    @property
    def rules(self) -> Mask:
        """The mask but for its ids, in positions of the whole sequence."""
        return Mask(is_causal=self.is_causal, window=self.window)

    def schedule(self, query: Array, key: Array) -> Schedule:
        """Of one device's arrays."""
        return self.of_whole(*(x.shape[1] * self.shards for x in (query, key)))

    def of_whole(self, query_length: int, key_length: int) -> Schedule:
        """Of whole sequences."""
        return schedule(
            self.layout, self.shards, query_length, key_length, self.rules.band
        )


class Local(NamedTuple):
    """One device's arrays; `key_ids` are those of all shards, [W, B, S], and the bias
    is for the L = W S keys of all shards, one after the other."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K D"]
    query_ids: Int[Array, "B T"] | None
    key_ids: Int[Array, "W B S"] | None
    bias: Float[Array, "#B #N #T #L"] | None

    def meets(self, both: Array | None, source) -> Arriving | Shard:
        """This device's queries and the keys of a shard, as a message has them, or
        (None) its own."""
        ids, bias = self._beside(source)
        if both is None:
            return Shard(self.query, self.key, self.value, self.query_ids, ids, bias)
        return Arriving(self.query, both, self.query_ids, ids, bias)

    def meets_prepared(self, prepared: Any, source) -> Ready:
        """The same, of keys as a block has them prepared."""
        return Ready(self.query, prepared, self.query_ids, *self._beside(source))

    def _beside(self, source) -> tuple[Array | None, Array | None]:
        """Ids and bias of a shard's keys."""
        ids = None if self.key_ids is None else self.key_ids[source]
        bias, (T, S) = self.bias, (x.shape[1] for x in (self.query, self.key))
        if bias is not None:
            bias = pairs_of(bias, (0, T), (source * S, S))
        return ids, bias


def ending(static: Static, x: Local, differentiated: bool) -> Ending | None:
    """How the block may end rows by itself, or None: rounded as `returned` does, short
    of its last cast, and with the exact O for the backward pass."""
    if static.out_dtype.itemsize >= 4:
        return Ending(None, exact=True)
    known = WIRES.get(static.block.recipe.output.format)
    nearest = static.block.recipe.output.rounding == Rounding.NEAREST_EVEN
    if not nearest or known is None or jnp.dtype(known) != x.query.dtype:
        return None
    return Ending(x.query.dtype, exact=differentiated)


def returned(static: Static, out: Array) -> Array:
    """The merged O as it is returned: rounded as `output` says, unless wide."""
    if static.out_dtype.itemsize < 4:
        out = partial.rounded(out, static.block.recipe.output)
    return out.astype(static.out_dtype)


def rows_of(
    block: Block, dout, dlse, lse, for_delta, query, keys: AllKeys
) -> tuple[WholeRows, Array]:
    """What the backward pass knows of rows, and dLSE without that of empty ones."""
    # The LSE of a query that sees nothing is a constant, whatever its cotangent.
    dlse = jnp.where(jnp.isneginf(lse), 0.0, dlse.astype(lse.dtype))
    delta, norm = block.row_sums(dout, for_delta, query)
    excess = delta - dlse
    ranges = block.ranges(dout, excess, norm, keys)
    return WholeRows(dout, lse, excess, keys, ranges), dlse


def gradients(
    block: Block,
    total: Partial,
    rows: WholeRows,
    dlse: Array,
    inputs,
    *,
    in_place: bool = False,
) -> tuple[Array | None, ...]:
    """dQ, dK and dV of the summed parts, each rounded once as `gradient` says, and
    dbias, which is rounded to its type by who widened the bias."""
    dquery = block.dquery(total, dlse, rows, in_place=in_place)
    found = dquery, total.dkey, total.dvalue
    *inputs, bias = inputs
    dbias = total.dbias
    if dbias is not None:
        dbias = dbias.astype(wide(bias.dtype))
    return *(
        partial.rounded(x, block.recipe.gradient).astype(given.dtype)
        for x, given in zip(found, inputs, strict=True)
    ), dbias


def widened(bias: Array | None) -> Array | None:
    """The bias so that whatever adds up its gradients does so before they are rounded
    to its type."""
    return None if bias is None else bias.astype(wide(bias.dtype))


def wide(dtype) -> np.dtype:
    """FP32, or a wider type."""
    return jnp.promote_types(dtype, jnp.float32)


def kept_bias(static: Static, bias: Array | None) -> Array | None:
    """The bias in its own type again."""
    return None if bias is None else bias.astype(static.bias_dtype)


def keys_in(
    order: Callable[..., Array], bias: Array | None, shards: int, layout: Layout
) -> Array | None:
    """A bias whose keys `to_layout` or `from_layout` puts in another order."""
    if bias is None or bias.shape[3] == 1:
        return bias
    return order(bias, shards, layout, axis=3)


def pairs_in(
    order: Callable[..., Array], bias: Array | None, shards: int, layout: Layout
) -> Array | None:
    """A bias whose queries and keys are put in another order."""
    if bias is not None and bias.shape[2] > 1:
        bias = order(bias, shards, layout, axis=2)
    return keys_in(order, bias, shards, layout)


def sent(static: Static, sums: Array) -> Array:
    """Sums of gradients as they travel."""
    if static.wire is None:
        return sums
    return round_to(sums, static.wire).astype(WIRES[static.wire])
