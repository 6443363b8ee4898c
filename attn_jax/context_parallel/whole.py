"""Context parallelism of whole arrays, called as jax.nn's attention is.

For those who have the sequence in one place and want it on all devices for a moment:
tests, comparisons, `python -m attn_jax.audit context_parallel:ring`. A model keeps its
arrays sharded and calls `sharded.attention` in a `jax.shard_map` of its own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from attn_jax.context_parallel.arguments import (
    STRATEGIES,
    Implementation,
    Strategy,
    Width,
    check_bias,
    check_heads,
    ring_of,
)
from attn_jax.context_parallel.layouts import (
    Layout,
    check_layout,
    check_length,
    from_layout,
    to_layout,
)
from attn_jax.context_parallel.local import pairs_in
from attn_jax.context_parallel.sharded import attention
from attn_jax.context_parallel.simulation import simulate
from attn_jax.recipe import Recipe

_IDS = "query_segment_ids", "key_value_segment_ids"


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    return_residual: bool = False,
    strategy: Strategy = "ring",
    layout: Layout = "contiguous",
    shards: int | None = None,
    ulysses: int = 2,
    simulated: bool = False,
    implementation: Implementation | None = None,
    recipe: Recipe | None = None,
    partials: Width = "fp32",
    wire: Width = "fp32",
    out_dtype: Any = None,
) -> Float[Array, "B T N D"] | tuple[Array, Float[Array, "B T N"]]:
    """`sharded.attention` of whole sequences, in the order of their positions, on a
    mesh of this process's devices; with `return_residual` LSE, too, in FP32.

    Arguments up to `return_residual` mean what they mean in
    `jax.nn.dot_product_attention`; lengths become segment ids, and any axis of a bias
    may have size one. The others are those of `sharded.attention`, which has
    `head_stride` besides, and

    Args:
      shards: devices that the sequence is cut between; all that there are if None.
      ulysses: how many of them deal out heads under `ring+ulysses`; the ring has
        `shards` / `ulysses`.
      simulated: `shards` of them in turn on one device (`simulation.simulate`).

    Raises:
      ValueError: arguments that do not fit, or more shards than devices.
      NotImplementedError: an array for a mask; lengths that cannot be cut into so many
        parts, heads that cannot be dealt to so many devices.
    """
    if mask is not None:
        raise NotImplementedError(
            "context parallelism takes no mask as an array: use is_causal, "
            "local_window_size, lengths, segment ids, or a bias of 0 and -inf"
        )
    check_layout(layout)
    if strategy not in STRATEGIES:
        raise ValueError(
            f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
        )
    sizes = _sizes(strategy, shards, ulysses, simulated)
    _check_fits(query, key, strategy, layout, sizes)
    ids = _ids(
        *(query, key, query_segment_ids, key_value_segment_ids),
        *(query_seq_lengths, key_value_seq_lengths),
    )
    options: dict[str, Any] = dict(
        strategy=strategy,
        layout=layout,
        is_causal=is_causal,
        local_window_size=local_window_size,
        scale=scale,
        implementation=implementation,
        recipe=recipe,
        partials=partials,
        wire=wire,
        out_dtype=out_dtype,
    )
    if simulated:
        given: dict[str, Any] = {}
        if ids is not None:
            given |= zip(_IDS, ids, strict=True)
        arrays = {"query": query, "key": key, "value": value, "bias": bias}
        given |= dict(shards=int(np.prod(sizes)), ulysses=sizes[-1])
        out, lse = simulate(**arrays, **given, **options)
    else:
        check_bias(bias, query, key.shape[1])
        out, lse = _on_devices(sizes, options, query, key, value, bias, ids)
    return (out, lse.swapaxes(1, 2)) if return_residual else out


def _sizes(
    strategy: Strategy, shards: int | None, ulysses: int, simulated: bool
) -> tuple[int, ...]:
    """Of the mesh: the one axis, or (ring, Ulysses)."""
    present = jax.local_device_count()
    if simulated and shards is None:
        raise ValueError("simulated=True takes the number of shards: give shards=")
    shards = present if shards is None else shards
    if shards < 1 or (shards > present and not simulated):
        raise ValueError(
            f"shards must be from 1 to the {present} devices of this process, got "
            f"{shards}; simulated=True takes any number, in turn on one device"
        )
    if strategy != "ring+ulysses":
        return (shards,)
    return ring_of(shards, ulysses), ulysses


def _check_fits(
    query: Array, key: Array, strategy: Strategy, layout: Layout, sizes: tuple[int, ...]
) -> None:
    """Raises NotImplementedError, in one line, for arrays that cannot be cut so."""
    shards = int(np.prod(sizes))
    try:
        for name, x in (("query", query), ("key", key)):
            check_length(name, x.shape[1], sizes[0], layout)
            check_length(name, x.shape[1], shards, "contiguous")
            if "ulysses" in strategy:
                check_heads(name, x.shape[2], sizes[-1], strategy)
    except ValueError as error:
        raise NotImplementedError(str(error)) from error


def _ids(query, key, query_ids, key_ids, query_lengths, key_lengths):
    """Segment ids that say the lengths, too: what lies beyond one is of no document
    that the other side has. None if everything is of one."""
    if query_lengths is None and key_lengths is None:
        return None if query_ids is None and key_ids is None else (query_ids, key_ids)
    if query_ids is None and key_ids is None:
        query_ids, key_ids = (jnp.zeros(x.shape[:2], jnp.int32) for x in (query, key))
    if query_ids is None or key_ids is None:
        raise ValueError(f"{' and '.join(_IDS)} must be given together")
    least = jnp.minimum(jnp.min(query_ids), jnp.min(key_ids))
    return (
        _cut_off(query_ids, query_lengths, least - 1),
        _cut_off(key_ids, key_lengths, least - 2),
    )


def _cut_off(ids, lengths, beyond):
    if lengths is None:
        return ids
    kept = jnp.arange(ids.shape[1]) < jnp.asarray(lengths)[:, None]
    return jnp.where(kept, ids, beyond).astype(jnp.int32)


def _on_devices(
    sizes: tuple[int, ...], options: dict[str, Any], query, key, value, bias, ids
) -> tuple[Array, Array]:
    names = ("ring", "ulysses")[: len(sizes)]
    devices = np.asarray(jax.local_devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    axis: Any = names[0] if len(names) == 1 else names
    tokens, rows = P(None, names), P(None, None, names)

    def local(query, key, value, bias, ids):
        given = {} if ids is None else dict(zip(_IDS, ids, strict=True))
        given |= {"bias": bias, "axis_name": axis}
        return attention(query, key, value, **given, **options)

    # A bias that is one for all queries is the same on all devices.
    of_bias = P() if bias is None or bias.shape[2] == 1 else rows
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*(tokens,) * 3, of_bias, tokens),
        out_specs=(tokens, rows),
    )
    # The layout is that of the first axis's shards.
    cut: Any = {"shards": sizes[0], "layout": options["layout"]}
    to = functools.partial(to_layout, **cut)
    bias = pairs_in(to_layout, bias, **cut)
    out, lse = run(to(query), to(key), to(value), bias, jax.tree.map(to, ids))
    return from_layout(out, **cut), from_layout(lse, **cut, axis=2)
