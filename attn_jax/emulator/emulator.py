"""Blockwise attention under a recipe, in plain JAX: what a kernel computes, bit by bit.

Values are carried in FP32 (or FP64) and rounded explicitly by `formats.round_to` at
every step that the recipe names. What stays open is only the order of additions inside
one matrix product or row sum. Memory grows linearly with the length.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attn_jax.emulator import forward, ring
from attn_jax.emulator.backward import gradients
from attn_jax.emulator.checks import check_recipe
from attn_jax.emulator.sums import walk
from attn_jax.emulator.tiles import Operands, Static
from attn_jax.formats import with_low_byte
from attn_jax.mask import Mask
from attn_jax.recipe_checks import check_is_recipe
from attn_jax.recipe_schema import Recipe
from attn_jax.reference import (
    check_arguments,
    default_scale,
    output_dtype,
    python_float,
)
from attn_jax.residuals import named_lse, named_out
from attn_jax.varying import varying_alike


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    recipe: Recipe,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    out_dtype: Any = None,
    rounding_key: Array | None = None,
    undifferentiated: Recipe | None = None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Attention output and LSE as `recipe` computes them, forward and backward.

    Same meaning of every argument as `reference.attention`. Where the recipe leaves
    room, the emulator does what follows.
    - Inputs and the output's cotangent are rounded to `recipe.inputs` first.
    - `out_dtype` float32 or float64 returns the output before `recipe.output` rounds
      it; gradients are rounded by `recipe.gradient` whatever the types.
    - A bias or a soft cap keeps the scale from being folded into the exponential. Both
      are applied in the format of `recipe.logits`, in the order scale, bias, cap, mask.
    - A sink starts the row maximum and sum, as a first key with value zero.
    - Rows are independent and each running sum has one order, so `loop_order` and
      `block_q` change nothing in the forward pass; in the backward pass
      `backward_block_q` matters where dK or dV is accumulated in a narrow format, and
      as the rows that share a centre.
    - The mean centre is taken over the keys that some query of the same block of
      queries sees; with a dense mask or segment ids, over those that the query itself
      sees; that of dq_centre 'keys' over all keys of the head, whatever the mask. Under
      a soft cap there is none: its identity does not hold.
    - `rounding_key`, a key of `jax.random`, is needed where a step of the recipe rounds
      stochastically, and refused elsewhere. The same key gives the same bits, in the
      backward pass too, whatever is compiled.
    - `undifferentiated` is the recipe of calls that are not differentiated (None: the
      same one), as kernels may have another forward pass for them.

    Raises ValueError for arguments that do not fit together or to the recipe, and
    NotImplementedError for a carrier that the emulator does not have.
    """
    check_arguments(
        query, key, value, bias=bias, mask=mask, soft_cap=soft_cap, sinks=sinks
    )
    scale = default_scale(scale, query.shape[-1])
    undifferentiated = recipe if undifferentiated is None else undifferentiated
    for one in (recipe, undifferentiated):
        check_is_recipe(one)
        check_recipe(one, query, key, value, scale, soft_cap, rounding_key)
    dtype = None if out_dtype is None else output_dtype(out_dtype)
    static = Static(recipe, scale, python_float(soft_cap), dtype)
    plain = static._replace(recipe=undifferentiated)
    arrays = varying_alike(query, key, value, bias, sinks, mask)
    return _attention(plain, static, *arrays, rounding_key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(plain: Static, static: Static, *operands):
    del static
    return _attention_fwd(plain, plain, *operands)[0]


def _attention_fwd(
    plain: Static, static: Static, query, key, value, bias, sinks, mask, noise
):
    del plain
    x = Operands(static, query, key, value, bias, sinks, mask, noise)
    x = x.drawing(noise, 0)
    exact, lse, row_centre = _forward(x)
    recipe = static.recipe
    wide = static.out_dtype is not None and static.out_dtype.itemsize >= 4
    out = named_out(exact if wide else x.round(exact, "output"))
    lse = named_lse(lse)
    row_centre = None if row_centre is None else named_out(row_centre)
    for_delta = None
    if recipe.delta_source == "o":
        for_delta = out
    elif recipe.delta_source == "o_f32":
        for_delta = named_out(exact)
    elif recipe.delta_source == "o_hi_lo":
        high = x.round(exact, "output")
        low = x.round(exact - high, "output", site="low")
        for_delta = named_out(high + low)
    elif recipe.delta_source == "o_hi_lo8":
        high = x.round(exact, "output")
        whole = with_low_byte(exact, high, recipe.output.format)
        for_delta = named_out(whole)
    B, K, G, T, H = x.shape
    result = x.ungroup(out).astype(static.out_dtype or query.dtype)
    inputs = query, key, value, bias, sinks
    residuals = (*inputs, mask, noise, lse, for_delta, row_centre)
    return (result, lse.reshape(B, K * G, T)), residuals


def _attention_bwd(plain: Static, static: Static, residuals, cotangents):
    del plain
    *inputs, mask, noise, lse, for_delta, row_centre = residuals
    query, key, value, bias, sinks = inputs
    x = Operands(static, query, key, value, bias, sinks, mask, noise)
    grads = gradients(x, lse, for_delta, row_centre, *cotangents)
    return (
        *(
            None if grad is None or given is None else grad.astype(given.dtype)
            for grad, given in zip(grads, inputs)
        ),
        None,
        None,
    )


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(x: Operands):
    """O before its last rounding, LSE [B, K, G, T, 1] and the rows' own centres."""
    D = x.value.shape[-1]
    if x.recipe.ring_size > 1:
        out, lse = ring.forward(x)
    else:
        columns = forward.values_and_keys(x).shape[-1]
        state = forward.start(x, columns)
        out, lse = forward.finish(x, forward.add_keys(x, state))
    return out[..., :D], lse, out[..., D:] if out.shape[-1] > D else None


def rescales(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    recipe: Recipe,
    mask: Mask = Mask(),
    scale: float | None = None,
) -> Int[Array, "B N T"]:
    """How many times each row's running maximum moves after the first key it sees.

    Each time what was summed so far is multiplied by exp(m - m') and rounded: the
    2024 study blames its deviations on that number. It is 0 for a single block, and a
    rescale_threshold lowers it.

    Raises ValueError for a ring (its devices have a maximum each) and for a recipe
    with stochastic steps, NotImplementedError as `attention` does.
    """
    check_arguments(query, key, key, mask=mask)
    check_is_recipe(recipe)
    if recipe.ring_size > 1:
        raise ValueError(
            f"recipe {recipe.name!r}: rescales counts on one device; set ring_size=1"
        )
    scale = default_scale(scale, query.shape[-1])
    check_recipe(recipe, query, key, key, scale)
    static = Static(recipe, scale, None, None)
    x = Operands(static, query, key, key, None, None, mask)

    def step(state, start, size):
        m, count = state
        logits, _ = x.logits(0, start, x.shape[3], size)
        new_m = forward.renewed_max(x, logits, m, 0, start)
        return new_m, count + ((new_m != m) & ~jnp.isneginf(m))

    first = forward.start(x, 0).row_max
    carry = first, jnp.zeros_like(first, jnp.int32)
    backwards = recipe.kv_order == "reverse"
    _, count = walk(step, carry, x.key_length, recipe.block_kv, backwards)
    B, K, G, T, _ = x.shape
    return count.reshape(B, K * G, T)
