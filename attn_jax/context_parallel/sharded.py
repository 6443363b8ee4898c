"""Attention over a sequence that is cut between devices, inside `jax.shard_map`."""

import dataclasses
import functools
import typing
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from attn_jax.context_parallel import gather, ring
from attn_jax.context_parallel.blocks import Block, Emulated, Kernels, OverDevices
from attn_jax.context_parallel.layouts import (
    Layout,
    check_layout,
    check_length,
    from_layout,
    to_layout,
)
from attn_jax.context_parallel.local import (
    WIRES,
    Local,
    Pass,
    Static,
    kept_bias,
    pairs_in,
    returned,
    widened,
)
from attn_jax.emulator import partial
from attn_jax.formats import FP16, NumberFormat
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, Recipe, Step
from attn_jax.recipe_checks import check_is_recipe
from attn_jax.reference import check_arguments, default_scale, output_dtype
from attn_jax.residuals import named_lse, named_out
from attn_jax.varying import varying_alike

Strategy = Literal["ring", "all_gather", "all_gather+ring", "ulysses", "ring+ulysses"]
STRATEGIES: tuple[Strategy, ...] = typing.get_args(Strategy)
Width = Literal["fp32", "16-bit"]
Implementation = Literal["pallas", "emulated"]
_PASSES: dict[str, tuple[Pass, Pass]] = {
    "ring": ("ring", "ring"),
    "ring+ulysses": ("ring", "ring"),
    "all_gather": ("all_gather", "all_gather"),
    "all_gather+ring": ("all_gather", "ring"),
}


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
    fields do, by default not at all: the running maximum, sum and weighted sum go on
    from part to part in FP32 (ring_merge 'carry'; 'lse' rounds LSE at each merge, 2.4
    times one device's error at W = 64, some 1e-6), delta is taken from the finished O,
    dQ, and dK and dV on their way, are summed in FP32 and rounded once. The centre that
    the cure of dQ takes (`dq_centre` "mean") is the mean over the keys of all shards
    that a query can see.

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
      recipe: of `emulated`; `ATTN_JAX` with ring_merge 'carry' if None. Its ring_size
        is ignored: the mesh has it.
      partials: "16-bit" rounds what a part hands over, O, dQ, dK and dV, to the
        inputs' format, as kernels do that return nothing else: the error grows by one
        step, more where parts cancel. For comparison. Parts are then merged by 'lse'
        where nothing else is asked for.
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
    given: "Checked", layout: Layout, shards: int, *arrays: Any
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
    return _attention_fwd(static, *arrays)[0]


def _attention_fwd(static: Static, *arrays):
    x = Local(*arrays)
    x = x._replace(bias=kept_bias(static, x.bias))
    exact, lse, centre = _forward(static, x)
    for_delta = named_out(partial.kept_for_delta(exact, static.block.recipe))
    out, lse = named_out(returned(static, exact)), named_lse(lse)
    # Whoever saves LSE by name saves it, too: it is smaller.
    if centre is not None:
        centre = named_lse(centre)
    return (out, lse), (x, lse, for_delta, centre)


def _attention_bwd(static: Static, residuals, cotangents):
    # Else XLA sees the forward pass's messages in these, and keeps what came in them:
    # all keys, on every device.
    residuals = lax.optimization_barrier(residuals)
    *found, dbias = _backward(static, *residuals, *cotangents)
    return *found, None, None, dbias


# Under `jax.jit` kernels, which take long, are traced and lowered once for all layers
# of a model.
@functools.partial(jax.jit, static_argnums=0)
def _forward(static: Static, x: Local) -> tuple[Array, Array, Array | None]:
    """O, not yet rounded, LSE, and the centre of all keys, if one is wanted: here its
    message is hidden, and nothing would be there yet to hide it in the other pass."""
    made_by = ring if static.forward_by == "ring" else gather
    exact, lse = made_by.forward(static, x)
    return exact, lse, static.block.centre(x.key, OverDevices.of_axis(static.axis))


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: Static, *given) -> tuple[Array | None, ...]:
    made_by = ring if static.backward_by == "ring" else gather
    return made_by.backward(static, *given)


_attention.defvjp(_attention_fwd, _attention_bwd)


class Checked(NamedTuple):
    """Arguments that fit together; `mask` holds the ids as they came."""

    block: Block
    layout: Layout
    mask: Mask
    wire: NumberFormat | None
    out_dtype: np.dtype
    bias_dtype: np.dtype | None

    def static(
        self, axis: str, shards: int, strategy: str, head_stride: int | None
    ) -> Static:
        """What is compiled in, of a strategy that has parts."""
        return Static(
            *(self.block, axis, shards, self.layout, *_PASSES[strategy]),
            *(self.mask.is_causal, self.mask.window, self.wire, head_stride),
            *(self.out_dtype, self.bias_dtype),
        )


def checked(
    query,
    key,
    value,
    query_ids,
    key_ids,
    *,
    bias_dtype,
    strategy: str,
    layout: Layout,
    is_causal: bool,
    local_window_size,
    scale: float | None,
    implementation: str | None,
    recipe: Recipe | None,
    partials: str,
    wire: str,
    out_dtype,
) -> Checked:
    """Raises ValueError, one line, for arguments that do not fit on any number of
    devices."""
    check_layout(layout)
    if strategy not in STRATEGIES:
        raise ValueError(
            f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
        )
    size = local_window_size
    mask = Mask(
        is_causal=bool(is_causal),
        window=(size, size) if isinstance(size, int) else size,
        query_segment_ids=query_ids,
        key_value_segment_ids=key_ids,
    )
    check_arguments(query, key, value, mask=mask)
    scale = default_scale(scale, query.shape[-1])
    kind = _kind(implementation, recipe, query, key, value, scale)
    if recipe is None:
        half = query.dtype == jnp.float16
        recipe = ATTN_JAX.with_inputs(FP16) if half else ATTN_JAX
        if partials != "16-bit":  # Which is of the O that parts have.
            recipe = dataclasses.replace(recipe, ring_merge="carry")
    block = kind(_recipe(recipe, partials), scale)
    return Checked(
        *(block, layout, mask, _wire(block.recipe, wire)),
        output_dtype(query.dtype if out_dtype is None else out_dtype),
        None if bias_dtype is None else np.dtype(bias_dtype),
    )


def check_heads(name: str, heads: int, dealt: int, strategy: str) -> None:
    """Raises ValueError, one line, unless the heads can be dealt to so many devices."""
    if heads % dealt:
        raise ValueError(
            f"strategy {strategy!r} deals heads to {dealt} devices, which do not "
            f"divide the {heads} heads of {name}: use 'ring', or fewer devices"
        )


def check_bias(bias: Array | None, query: Array, keys: int) -> None:
    """Raises ValueError, one line, unless the bias is one of these queries and so many
    keys."""
    if bias is None:
        return
    B, T, N, _ = query.shape
    full = B, N, T, keys
    if bias.ndim != 4 or any(a not in (1, b) for a, b in zip(bias.shape, full)):
        raise ValueError(
            f"bias must broadcast to {full} axis by axis, [batch, heads, the queries "
            f"here, the keys of the whole sequence], got {bias.shape}"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"bias must be floating, got {bias.dtype}; cast it")


def check_parts(block: Block, query, key, value) -> None:
    """Raises NotImplementedError for a recipe that is not one of parts."""
    partial.check(block.recipe, query, key, value, block.scale)


def _kind(
    name: str | None, recipe: Recipe | None, query, key, value, scale: float
) -> type[Emulated | Kernels]:
    """Who computes parts; None is for the kernels where they can."""
    if name not in (None, *typing.get_args(Implementation)):
        raise ValueError(
            f"implementation must be 'pallas', 'emulated' or None, got {name!r}"
        )
    if name == "emulated" or name is None and recipe is not None:
        return Emulated
    if recipe is not None:
        raise ValueError(
            "recipe= is for implementation='emulated': the kernels for parts have one"
        )
    reason = _kernels_refusal(query, key, value, scale)
    if reason is None:
        return Kernels
    if name is None:
        return Emulated
    raise NotImplementedError(reason)


def _kernels_refusal(query, key, value, scale: float) -> str | None:
    try:  # Imported on use: a JAX that the kernels do not know is no harm to the rest.
        from attn_jax.kernels import architecture
    except ImportError as error:
        return str(error)
    device = architecture.default_device()
    if architecture.of_device(device) is None:
        return (
            "'pallas' needs a Hopper GPU here (compute capability 9.0), and this is "
            f"{device.device_kind}; use implementation='emulated'"
        )
    from attn_jax.kernels import partial as kernels

    return kernels.unsupported(query, key, value, scale)


def _recipe(recipe: Recipe, partials: str) -> Recipe:
    check_is_recipe(recipe)
    if not _narrow("partials", partials, recipe):
        return recipe
    step = Step(recipe.inputs)
    return dataclasses.replace(recipe, ring_partial=step, ring_gradient_partial=step)


def _wire(recipe: Recipe, wire: str):
    """The format on the wire; None: that of the sums."""
    if _narrow("wire", wire, recipe):
        return recipe.inputs
    # What is kept in 16 bits is sent in them.
    summed = recipe.ring_gradient_accumulator.format
    return summed if summed in WIRES else None


def _narrow(name: str, width: str, recipe: Recipe) -> bool:
    if width not in typing.get_args(Width):
        raise ValueError(f"{name} must be 'fp32' or '16-bit', got {width!r}")
    if width == "16-bit" and recipe.inputs not in WIRES:
        raise ValueError(
            f"{name}='16-bit' is for recipes of BF16 or FP16 inputs, and "
            f"{recipe.name!r} has {recipe.inputs.name}"
        )
    return width == "16-bit"


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
