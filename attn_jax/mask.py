"""Which keys each query may see, kept as rules so that no T x S array is needed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "dense",
        "query_lengths",
        "key_value_lengths",
        "query_segment_ids",
        "key_value_segment_ids",
        "query_offset",
    ),
    meta_fields=("is_causal", "window"),
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """The conjunction of every rule given; `Mask()` lets every query see every key.

    With i a query position and j a key position, both counted from 0, query i of batch
    entry b and head n sees key j if
        is_causal               j <= i (aligned to the first key, as in jax.nn)
        window = (left, right)  i - left <= j <= i + right; None leaves a side open
        query_offset            both of these with i + query_offset[b] for i; int
        dense                   dense[b, n, i, j]; bool, axes of size 1 broadcast
        query_lengths           i < query_lengths[b]; int
        key_value_lengths       j < key_value_lengths[b]; int
        *_segment_ids           the two ids, [b, i] and [b, j], are equal; int
    The rules without arrays are static; the arrays are leaves of a pytree.

    Raises ValueError if only one of the two segment id arrays is given, or if the
    window is not a pair of numbers as above.
    """

    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    # Arrays as above, but a pytree of this shape may hold axes or partition specs.
    dense: Any = None
    query_lengths: Any = None
    key_value_lengths: Any = None
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    query_offset: Any = None

    def __post_init__(self):
        if (self.query_segment_ids is None) != (self.key_value_segment_ids is None):
            raise ValueError(
                "query_segment_ids and key_value_segment_ids must be given together"
            )
        if self.window is not None and not (
            isinstance(self.window, tuple)
            and len(self.window) == 2
            and all(
                w is None or (isinstance(w, int | np.integer) and w >= 0)
                for w in self.window
            )
        ):
            raise ValueError(
                "window must be (left, right), each None or an integer of at least 0, "
                f"got {self.window!r}"
            )

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(left, right) that is_causal and window come to together."""
        left, right = self.window or (None, None)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    @property
    def is_empty(self) -> bool:
        """True if no rule is set, so that every query sees every key."""
        return not (self.is_causal or self.window is not None or self._has_arrays)

    @property
    def is_interval(self) -> bool:
        """True if each query's keys are known to be one run of neighbours."""
        return self.dense is None and self.query_segment_ids is None

    @property
    def _has_arrays(self) -> bool:
        # An offset by itself hides nothing.
        return bool(
            jax.tree_util.tree_leaves(dataclasses.replace(self, query_offset=None))
        )

    def materialise(
        self, T: int, S: int, xp: Any = jnp
    ) -> Bool[Any, "#B #N #T #S"] | None:
        """The whole mask [B or 1, N or 1, T, S]; None if every query sees every key.
        `xp` is as `block` has it."""
        return self.block(0, 0, T, S, xp)

    def block(
        self, q_start, kv_start, block_q: int, block_kv: int, xp: Any = jnp
    ) -> Bool[Any, "#B #N #T #S"] | None:
        """The mask of one tile, [B or 1, N or 1, block_q, block_kv], or None.

        Only the tile is built. The starts may be traced; the tile must lie within the
        arrays, since a slice that runs over their end would be shifted back. With `np`
        for `xp` it is NumPy's, of a mask that is not traced, and nothing is compiled.
        """
        rules = []
        i = (q_start + xp.arange(block_q, dtype=xp.int32))[:, None]
        j = (kv_start + xp.arange(block_kv, dtype=xp.int32))[None, :]
        left, right = self.band
        p = i[None, None]
        if self.query_offset is not None:
            p = p + _int32(self.query_offset, xp)[:, None, None, None]
        if left is not None:
            rules.append(j >= p - left)
        if right is not None:
            rules.append(j <= p + right)
        if self.query_lengths is not None:
            lengths = _int32(self.query_lengths, xp)
            rules.append(i[None, None] < lengths[:, None, None, None])
        if self.key_value_lengths is not None:
            lengths = _int32(self.key_value_lengths, xp)
            rules.append(j[None, None] < lengths[:, None, None, None])
        if self.query_segment_ids is not None:
            q_ids = _slice(self.query_segment_ids, 1, q_start, block_q, xp)
            kv_ids = _slice(self.key_value_segment_ids, 1, kv_start, block_kv, xp)
            rules.append((q_ids[:, :, None] == kv_ids[:, None, :])[:, None])
        if self.dense is not None:
            tile = self.dense, q_start, kv_start, block_q, block_kv
            rules.append(slice_tile(*tile, xp))
        if not rules:
            return None
        tile = functools.reduce(xp.logical_and, rules)
        shape = (*tile.shape[:2], block_q, block_kv)
        return xp.broadcast_to(tile, shape)

    def interval(
        self, T: int, S: int, xp: Any = jnp
    ) -> tuple[Int[Any, "#B T"], Int[Any, "#B T"]]:
        """First key and one past the last key that each query sees, [B or 1, T] each;
        `xp` is as `block` has it.

        Equal bounds mean that a query sees nothing. Raises ValueError unless
        `is_interval`: only then are a query's keys one run of neighbours.
        """
        if not self.is_interval:
            raise ValueError(
                "Mask.interval needs a mask without dense and segment ids; use block"
            )
        i = xp.arange(T, dtype=xp.int32)[None]
        left, right = self.band
        p = i
        if self.query_offset is not None:
            p = p + _int32(self.query_offset, xp)[:, None]
        start = xp.zeros_like(p) if left is None else xp.clip(p - left, 0, S)
        stop = xp.full_like(p, S) if right is None else xp.clip(p + right + 1, 0, S)
        if self.key_value_lengths is not None:
            stop = xp.minimum(stop, _int32(self.key_value_lengths, xp)[:, None])
        if self.query_lengths is not None:
            stop = xp.where(i < _int32(self.query_lengths, xp)[:, None], stop, 0)
        stop = xp.maximum(start, stop)
        return xp.broadcast_to(start, stop.shape), stop


def slice_tile(
    array, q_start, kv_start, block_q: int, block_kv: int, xp: Any = jnp
) -> Any:
    """A tile of an array broadcastable to [B, N, T, S]; axes of size 1 stay."""
    array = _slice(array, 2, q_start, block_q, xp)
    return _slice(array, 3, kv_start, block_kv, xp)


def _int32(lengths, xp):
    """Positions are int32, also where x64 makes int64 the default."""
    return xp.asarray(lengths, xp.int32)


def _slice(array, axis: int, start, size: int, xp) -> Any:
    array = np.asarray(array) if xp is np else array
    if array.shape[axis] in (1, size):
        return array
    if xp is np:
        return array.take(range(start, start + size), axis)
    return lax.dynamic_slice_in_dim(array, start, size, axis)
