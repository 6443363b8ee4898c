"""Attention over a sequence that is cut between devices, inside `jax.shard_map`."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from attn_jax.context_parallel import gather, ring
from attn_jax.context_parallel.all_keys import AllKeys, gather_over
from attn_jax.context_parallel.arguments import (
    Checked,
    Implementation,
    Strategy,
    Width,
    check_bias,
    check_heads,
    check_parts,
    checked,
)
from attn_jax.context_parallel.layouts import (
    Layout,
    check_length,
    from_layout,
    to_layout,
)
from attn_jax.context_parallel.local import (
    Local,
    Static,
    kept_bias,
    pairs_in,
    returned,
    widened,
)
from attn_jax.emulator import partial
from attn_jax.recipe import Recipe
from attn_jax.residuals import named_lse, named_out
from attn_jax.span import Ended
from attn_jax.varying import varying_alike


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    bias: Float[Array, "#B #N #T #L"] | None = None,
    axis_name: str | tuple[str, str],
    strategy: Strategy = "ring",
    layout: Layout = "contiguous",
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    recipe: Recipe | None = None,
    partials: Width = "fp32",
    wire: Width = "fp32",
    head_stride: int | None = None,
    out_dtype: Any = None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """out = softmax(scale Q K^T + bias) V and LSE of this device's queries over all
    keys.

    To be called inside `jax.shard_map`. T and S are what one of W devices has of the
    queries and keys, in the order of `layout` (`layouts.to_layout`); a mask is one of
    positions in the whole sequence, and segment ids are cut as the tokens are, so that
    documents may cross from shard to shard. Both results are differentiable, and named
    for `jax.checkpoint` (`residuals`). For W = 1 they are those of `emulator.attention`
    (`pallas`: `kernels.attention`) to the last bit. Every sum has a fixed order: two
    runs give the same bits.

    Strategies:
      ring: keys travel (Ring Attention, arXiv 2310.01889), dK and dV with them.
      all_gather: every device gathers all keys; one reduce-scatter of dK and dV.
      all_gather+ring: the forward pass of the one, the backward pass of the other, as
        ring-flash-attention's issue #42 proposes.
      ulysses: an all-to-all deals out heads instead of positions (DeepSpeed-Ulysses,
        arXiv 2309.14509), so that each device has some heads' whole attention.
      ring+ulysses: both (arXiv 2405.07719). `axis_name` is (ring axis, Ulysses axis),
        the sequence is sharded over both, in that order, and laid out for the first.

    Where it rounds: as `recipe` says of one device, and between parts as its `ring_*`
    fields do, by default to FP32 alone: the running maximum, sum and weighted sum go on
    from part to part, the maximum as a whole number of log2, so that what is carried on
    is scaled exactly (ring_merge 'carry_whole'; 'lse' rounds LSE at each merge, up to
    2.74 times one device's error at W = 64, some 1e-6), delta is taken from the
    finished O in FP32, dQ, and dK and dV on their way, are summed in FP32 and rounded
    once. The centre that the cure of dQ takes (`dq_centre` "mean") is the mean over the
    keys of all shards that a query can see, for "keys" that over all keys; the powers
    of two of a scaled `dq_dlogits` are one for all parts, of all keys and a device's
    rows.

    Args:
      bias: added to the scaled logits; -inf hides a key. Rows are this device's
        queries, in the layout's order, columns all L keys of the sequence, shard after
        shard (`to_layout` over axes 2 and 3). As on one device an axis of size one is
        one entry for all: of the batch, the heads, the queries here, the keys. Its
        gradient is summed in FP32 and rounded once, to its type; `partials` and `wire`
        do not touch it. Neither is sent anywhere, but that `shard_map` adds up the
        gradients of a bias that all devices have, and that under Ulysses its heads are
        dealt for rows (one for all heads: rows are gathered), in FP32, and a row for
        all queries of a device becomes one for each.
      scale: of the logits; 1 / sqrt(H) if None.
      implementation: of parts. `pallas`, our kernels (`kernels.partial`: Hopper), with
        dq_centre 'keys', of all keys, hidden or not; `emulated`, a recipe in
        plain JAX, any device. A named one runs or raises. None: `pallas` where it can
        run and no recipe is given.
      recipe: of `emulated`; `ATTN_JAX` with ring_merge 'carry_whole' and, of parts,
        delta_source 'o_f32' if None. Its ring_size is ignored: the mesh has it.
      partials: "16-bit" rounds what a part hands over, O, dQ, dK and dV, to the
        inputs' format, as kernels do that return nothing else: the error grows by one
        step, more where parts cancel. For comparison. Parts are then merged by 'lse'
        where nothing else is asked for; a recipe that carries sums on hands over no O.
      wire: "16-bit" sends the sums of dK and dV in the inputs' format: half of the
        bytes, an error that grows as sqrt(W).
      head_stride: of `all_gather` passes, how many key heads are gathered at once; all
        if None.
      out_dtype: of the output; the query's if None. float32 is the merged O.

    Raises:
      ValueError: shapes, names or lengths that do not fit, in one line.
      NotImplementedError: the recipe has what parts of a sequence cannot have.
    """
    given = checked(
        *(query, key, value, query_segment_ids, key_value_segment_ids),
        bias_dtype=None if bias is None else bias.dtype,
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
    ring_axis, ulysses_axis = _axes(axis_name, strategy)
    shards = 1 if ring_axis is None else _size(ring_axis)
    dealt = 1 if ulysses_axis is None else _size(ulysses_axis)
    for name, x in (("query", query), ("key", key)):
        if ring_axis is None:
            check_length(name, x.shape[1] * dealt, dealt, layout)
        else:
            check_length(name, x.shape[1] * dealt * shards, shards, layout)
        check_heads(name, x.shape[2], dealt, strategy)
    check_bias(bias, query, key.shape[1] * dealt * shards)
    if head_stride is not None and not (
        "all_gather" in strategy
        and head_stride >= 1
        and key.shape[2] % head_stride == 0
    ):
        raise ValueError(
            f"head_stride must divide the {key.shape[2]} key heads, under a strategy "
            f"that gathers, got {head_stride} under {strategy!r}"
        )
    arrays = query, key, value, query_segment_ids, key_value_segment_ids, widened(bias)
    arrays = varying_alike(*arrays, *map(lax.axis_index, _names(axis_name)))[:6]
    if ulysses_axis is not None:
        arrays = _heads_for_positions(ulysses_axis, *arrays)
    if shards > 1:
        assert ring_axis is not None
        static = given.static(ring_axis, shards, strategy, head_stride)
        out, lse = _sharded(static, *arrays)
    else:
        whole = layout if ring_axis is None else "contiguous"
        out, lse = _alone(given, whole, dealt, *arrays)
    if ulysses_axis is None:
        return out, lse
    exchange = functools.partial(lax.all_to_all, axis_name=ulysses_axis, tiled=True)
    return (
        exchange(out, split_axis=1, concat_axis=2),
        exchange(lse, split_axis=2, concat_axis=1),
    )


def _alone(
    given: Checked, layout: Layout, shards: int, *arrays: Any
) -> tuple[Array, Array]:
    """The plain implementation on whole sequences that lie in the order of a layout."""
    *rest, bias = arrays
    laid_out: list[Any] = [
        None if x is None else from_layout(x, shards, layout) for x in rest
    ]
    query, key, value, query_ids, key_ids = laid_out
    bias = pairs_in(from_layout, bias, shards, layout)
    mask = dataclasses.replace(
        given.mask, query_segment_ids=query_ids, key_value_segment_ids=key_ids
    )
    out, lse = given.block.attention(query, key, value, mask, bias, given.out_dtype)
    return to_layout(out, shards, layout), to_layout(lse, shards, layout, axis=2)


def _heads_for_positions(axis: str, *arrays: Any) -> tuple[Any, ...]:
    """All positions of the axis's devices, and of their heads a share."""
    *inputs, query_ids, key_ids, bias = arrays
    return (
        *(
            lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
            for x in inputs
        ),
        *(
            None if x is None else lax.all_gather(x, axis, axis=1, tiled=True)
            for x in (query_ids, key_ids)
        ),
        _bias_for_positions(axis, bias, inputs[0].shape[1]),
    )


def _bias_for_positions(axis: str, bias: Array | None, queries: int) -> Array | None:
    """The bias of all positions of the axis's devices, and of their heads a share."""
    if bias is None or _size(axis) == 1:
        return bias
    if bias.shape[1] == 1:
        rows = lax.all_gather(bias, axis, axis=2, tiled=True)
    else:
        rows = lax.all_to_all(bias, axis, split_axis=1, concat_axis=2, tiled=True)
    # Where a device had one row for all its queries it is one for each of them.
    return jnp.repeat(rows, queries * _size(axis) // rows.shape[2], axis=2)


def _sharded(static: Static, query, key, value, query_ids, key_ids, bias):
    check_parts(static.block, query, key, value)
    if key_ids is not None:
        # A few bytes, once, rather than with the keys from hop to hop.
        key_ids = lax.all_gather(key_ids, static.axis)
    found = _attention(static, query, key, value, query_ids, key_ids, bias)
    return cast(tuple[Array, Array], found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, *arrays):
    x = Local(*arrays)
    x = x._replace(bias=kept_bias(static, x.bias))
    found, _ = _forward(static, False, x)
    return _returned(static, found), named_lse(found.lse)


def _attention_fwd(static: Static, *arrays):
    x = Local(*arrays)
    x = x._replace(bias=kept_bias(static, x.bias))
    found, keys = _forward(static, True, x)
    assert found.exact is not None
    for_delta = named_out(partial.kept_for_delta(found.exact, static.block.recipe))
    out, lse = _returned(static, found), named_lse(found.lse)
    # Whoever saves LSE by name saves these, too: they are smaller.
    keys = jax.tree.map(named_lse, keys)
    return (out, lse), (x, lse, for_delta, keys)


def _attention_bwd(static: Static, residuals, cotangents):
    # Else XLA sees the forward pass's messages in these, and keeps what came in them:
    # all keys, on every device.
    residuals = lax.optimization_barrier(residuals)
    *found, dbias = _backward(static, *residuals, *cotangents)
    return *found, None, None, dbias


# Under `jax.jit` kernels, which take long, are traced and lowered once for all layers
# of a model.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(static: Static, differentiated: bool, x: Local) -> tuple[Ended, AllKeys]:
    """O, rounded or not, LSE, and the numbers of all keys that are wanted."""
    if static.forward_by == "ring":
        found = ring.forward(static, x, differentiated=differentiated)
    else:
        found = gather.forward(static, x)
    # Else XLA, which has one message on its way at a time, waits for keys to send it.
    (key, value), lse = lax.optimization_barrier(((x.key, x.value), found.lse))
    keys = static.block.of_all(key, value, gather_over(static.axis))
    return found._replace(lse=lse), keys


def _returned(static: Static, found: Ended) -> Array:
    if found.out is not None:
        return named_out(found.out.astype(static.out_dtype))
    assert found.exact is not None
    return named_out(returned(static, found.exact))


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: Static, *given) -> tuple[Array | None, ...]:
    made_by = ring if static.backward_by == "ring" else gather
    return made_by.backward(static, *given)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _names(axis_name: str | tuple[str, str]) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def _axes(axis_name, strategy: Strategy) -> tuple[str | None, str | None]:
    """Ring axis and Ulysses axis."""
    names = _names(axis_name)
    wanted = 2 if strategy == "ring+ulysses" else 1
    if len(names) != wanted:
        kind = "(ring axis, Ulysses axis)" if wanted == 2 else "one mesh axis"
        raise ValueError(
            f"strategy {strategy!r} takes {kind} for axis_name, got {axis_name!r}"
        )
    if wanted == 2:
        return names[0], names[1]
    return (None, names[0]) if strategy == "ulysses" else (names[0], None)


def _size(axis: str) -> int:
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"no axis {axis!r} here: call this inside a jax.shard_map over a mesh that "
            "has it"
        ) from None
