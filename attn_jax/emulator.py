"""Blockwise attention under a recipe, in plain JAX: what a kernel computes, bit by bit.

Values are carried in FP32 (or FP64) and rounded explicitly by `formats.round_to` at
every step that the recipe names. What stays open is only the order of additions inside
one matrix product or row sum. Memory grows linearly with the length.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attn_jax.emulator_tiles import (
    Operands,
    Static,
    check_recipe,
    divide_or_zero,
    dot,
    finite_shift,
    read,
    rounded,
    walk,
)
from attn_jax.emulator_vjp import gradients
from attn_jax.mask import Mask
from attn_jax.recipe import Recipe
from attn_jax.reference import check_arguments, default_scale
from attn_jax.varying import varying_alike


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    recipe: Recipe,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    out_dtype: Any = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
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
      sees. Under a soft cap there is none: its identity does not hold.

    Raises ValueError for arguments that do not fit together or to the recipe, and
    NotImplementedError for a setting of the recipe that the emulator does not run.
    """
    check_arguments(
        query, key, value, bias=bias, mask=mask, soft_cap=soft_cap, sinks=sinks
    )
    check_recipe(recipe, query, key, value)
    dtype = None if out_dtype is None else np.dtype(out_dtype)
    static = Static(recipe, default_scale(scale, query.shape[-1]), soft_cap, dtype)
    arrays = varying_alike(query, key, value, bias, sinks, mask)
    return _attention(static, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, query, key, value, bias, sinks, mask):
    return _attention_fwd(static, query, key, value, bias, sinks, mask)[0]


def _attention_fwd(static: Static, query, key, value, bias, sinks, mask):
    x = Operands(static, query, key, value, bias, sinks, mask)
    exact, lse, row_centre = _forward(x)
    recipe = static.recipe
    wide = static.out_dtype is not None and static.out_dtype.itemsize >= 4
    out = exact if wide else rounded(exact, recipe.output)
    for_delta = None
    if recipe.delta_source == "o":
        for_delta = out
    elif recipe.delta_source == "o_f32":
        for_delta = exact
    elif recipe.delta_source == "o_hi_lo":
        high = rounded(exact, recipe.output)
        for_delta = high + rounded(exact - high, recipe.output)
    B, K, G, T, H = x.shape
    result = x.ungroup(out).astype(static.out_dtype or query.dtype)
    residuals = (query, key, value, bias, sinks, mask, lse, for_delta, row_centre)
    return (result, lse.reshape(B, K * G, T)), residuals


def _attention_bwd(static: Static, residuals, cotangents):
    *inputs, mask, lse, for_delta, row_centre = residuals
    query, key, value, bias, sinks = inputs
    x = Operands(static, query, key, value, bias, sinks, mask)
    grads = gradients(x, lse, for_delta, row_centre, *cotangents)
    return *(
        None if grad is None or given is None else grad.astype(given.dtype)
        for grad, given in zip(grads, inputs)
    ), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(x: Operands):
    """O before its last rounding, LSE [B, K, G, T, 1] and the rows' own centres."""
    recipe = x.recipe
    B, K, G, T, H = x.shape
    with_centre = recipe.dq_centre == "row" and x.static.wants_centre
    # The row's own centre sum_j P_ij K_j is made as the output is, with K as value.
    values = jnp.concatenate([x.value, x.key], -1) if with_centre else x.value
    if x.sinks is None:
        m = jnp.full((B, K, G, T, 1), -jnp.inf, x.static.carrier)
        l = jnp.zeros_like(m)  # noqa: E741
    else:
        m = jnp.broadcast_to(x.sinks, (B, K, G, T, 1))
        l = jnp.full_like(m, recipe.probability_scale)  # noqa: E741
    acc = jnp.zeros((B, K, G, T, values.shape[-1]), x.static.carrier)
    step = functools.partial(_forward_block, x, values)
    m, l, acc = walk(  # noqa: E741
        step, (m, l, acc), x.key_length, recipe.block_kv, recipe.kv_order == "reverse"
    )
    lse = finite_shift(m) / x.static.log_unit + jnp.log(l / recipe.probability_scale)
    out = divide_or_zero(acc, l) if recipe.normalise == "once" else acc
    lse = rounded(lse, recipe.lse)
    return out[..., :H], lse, out[..., H:] if with_centre else None


def _forward_block(x: Operands, values, state, start, size: int):
    recipe = x.recipe
    m, l, acc = state  # noqa: E741
    logits, _ = x.logits(0, start, x.shape[3], size)
    v = read(values, 2, start, size)
    new_m = rounded(jnp.maximum(m, logits.max(-1, keepdims=True)), recipe.row_max)
    if recipe.rescale_threshold:
        threshold = recipe.rescale_threshold * x.static.log_unit / np.log2(np.e)
        new_m = jnp.where(new_m - m <= threshold, m, new_m)
    shift = finite_shift(new_m)
    p = x.exp(rounded(logits - shift, recipe.shifted)) * recipe.probability_scale
    correction = x.exp(rounded(m - shift, recipe.correction))
    correction = rounded(correction, recipe.correction)
    operand = rounded(p, recipe.probability)
    block_sum = (operand if recipe.row_sum_of == "rounded" else p).sum(
        -1, keepdims=True
    )
    block_sum = rounded(block_sum, recipe.row_sum)
    new_l = rounded(rounded(correction * l, recipe.row_sum) + block_sum, recipe.row_sum)
    if recipe.normalise == "before_product":
        operand = rounded(divide_or_zero(p, new_l), recipe.probability)
    product = rounded(dot("bkgts,bksh->bkgth", operand, v), recipe.product)
    kept = recipe.accumulator
    if recipe.normalise == "once":
        new_acc = rounded(rounded(correction * acc, kept) + product, kept)
    elif recipe.normalise == "each_step":
        total = rounded(rounded(l * correction, kept) * acc, kept)
        total = rounded(total + product, kept)
        new_acc = rounded(divide_or_zero(total, new_l), kept)
    else:
        new_acc = product
    return new_m, new_l, new_acc
