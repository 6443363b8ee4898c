"""Arguments of attention over a cut sequence, and what is said where none fits."""

import dataclasses
import typing
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attn_jax.context_parallel.blocks import Block, Emulated, Kernels
from attn_jax.context_parallel.layouts import Layout, check_layout
from attn_jax.context_parallel.local import WIRES, Pass, Static
from attn_jax.emulator import partial
from attn_jax.formats import FP16, NumberFormat
from attn_jax.mask import Mask
from attn_jax.on_device import lacks_kernels
from attn_jax.recipe import ATTN_JAX, Recipe, Step
from attn_jax.recipe_checks import check_is_recipe
from attn_jax.reference import check_arguments, default_scale, output_dtype

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


class Checked(NamedTuple):
    """Arguments that fit together; `mask` holds the ids as they came, `block` is what
    one device has alone, `parts` what it has of parts."""

    block: Block
    parts: Block
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
            *(self.parts, axis, shards, self.layout, *_PASSES[strategy]),
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
    if strategy == "ulysses" and "16-bit" in (partials, wire):
        raise ValueError(
            "partials and wire are for strategies with parts: under 'ulysses' a device "
            "has whole sequences of some heads"
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
    of_parts: dict[str, Any] = {}
    if recipe is None:
        half = query.dtype == jnp.float16
        recipe = ATTN_JAX.with_inputs(FP16) if half else ATTN_JAX
        # The merged O is there in FP32.
        of_parts = {"delta_source": "o_f32"}
        if partials != "16-bit":  # Which is of the O that parts have.
            recipe = dataclasses.replace(recipe, ring_merge="carry_whole")
    recipe = _recipe(recipe, partials)
    return Checked(
        kind(recipe, scale),
        kind(dataclasses.replace(recipe, **of_parts), scale),
        *(layout, mask, _wire(recipe, wire)),
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


def ring_of(shards: int, ulysses: int) -> int:
    """Devices of the ring under 'ring+ulysses', of which `shards` are all. Raises
    ValueError, one line, unless so many can deal out heads."""
    if ulysses < 1 or shards % ulysses:
        raise ValueError(
            f"ulysses must divide the {shards} devices of 'ring+ulysses', got {ulysses}"
        )
    return shards // ulysses


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
    reason = lacks_kernels(
        "a Hopper GPU here (compute capability 9.0)", "implementation='emulated'"
    )
    if reason is not None:
        return reason
    from attn_jax.kernels import partial as kernels

    return kernels.unsupported(query, key, value, scale)


def _recipe(recipe: Recipe, partials: str) -> Recipe:
    check_is_recipe(recipe)
    # The mesh has it, and parts have queries of one device.
    recipe = dataclasses.replace(recipe, ring_size=1)
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
