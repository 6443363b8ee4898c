"""Differentiable attention on the kernels: which, padding, delta, centre, sharding.

`architecture` says whose kernels run. They run on one device's arrays or on sharded
ones (`partition`): batch and heads may be sharded, sequences may not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from attn_jax.formats import BF16, FP16
from attn_jax.kernels import (
    ampere_backward,
    ampere_forward,
    architecture,
    hopper_backward,
    hopper_forward,
    tuning,
)
from attn_jax.kernels.partition import Layout, partitioned, varying_alike
from attn_jax.kernels.tuning import Tiling
from attn_jax.recipe import ATTN_JAX, Architecture, Recipe
from attn_jax.reference import check_arguments, default_scale

_FORWARD = {"ampere": ampere_forward, "hopper": hopper_forward}
_BACKWARD = {"ampere": ampere_backward, "hopper": hopper_backward}

# TMA reads 16-bit tiles in groups of 8 rows.
SEQUENCE_MULTIPLE = 8


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    scale: float,
    is_causal: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "B T N H"], Float32[Array, "B N T"]]:
    """out = softmax(scale * Q K^T) V and LSE = logsumexp(scale * Q K^T), natural log.

    Query head n reads key/value head n // (N / K). With `is_causal` query i sees the
    keys j <= i. Both results are differentiable. Where it rounds is said in
    `<architecture>_forward` and `<architecture>_backward`; besides, a cotangent wider
    than the inputs is rounded to their format, and gradients come in that format.

    Args:
      scale: a Python number; it is compiled into the kernel.
      out_dtype: the inputs' dtype (default) or float32, the accumulator unrounded.

    Raises:
      NotImplementedError: `unsupported` names a reason.
      ValueError: shapes or a scale that do not fit.
    """
    check_arguments(query, key, value)
    reason = unsupported(query, key, value, out_dtype=out_dtype)
    if reason is not None:
        raise NotImplementedError(reason)
    out_dtype = jnp.dtype(query.dtype if out_dtype is None else out_dtype)
    scale = default_scale(scale, query.shape[-1])
    if scale < 0:
        # The kernels take the row maximum before they scale. The sign is exact in Q.
        query, scale = -query, -scale
    if scale == 0:
        # Masked logits are -inf, and 0 * -inf would be NaN.
        query, scale = jnp.zeros_like(query), 1.0
    query, key, value = varying_alike(query, key, value)
    target = architecture.chosen()
    return _attention(query, key, value, target, scale, bool(is_causal), out_dtype)


def unsupported(
    query: Array, key: Array, value: Array, *, out_dtype=None
) -> str | None:
    """Why the kernels cannot take these arguments, in one line, or None if they can."""
    dtypes = {jnp.dtype(x.dtype) for x in (query, key, value)}
    head_dim = query.shape[-1]
    if len(dtypes) > 1 or dtypes.pop() not in (jnp.bfloat16, jnp.float16):
        return (
            "the kernels take query, key and value all bfloat16 or all float16, not "
            f"{query.dtype}, {key.dtype}, {value.dtype}; cast them, or use "
            "implementation='emulated' or 'xla'"
        )
    if head_dim not in tuning.HEAD_DIMS or value.shape[-1] != head_dim:
        return (
            f"the kernels take head dims {tuning.HEAD_DIMS}, the same for query, key "
            f"and value, not {head_dim} and {value.shape[-1]}; use "
            "implementation='emulated' or 'xla'"
        )
    if query.shape[0] == 0:
        return "the kernels take no empty batch"
    out_dtype = jnp.dtype(query.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (query.dtype, jnp.float32):
        return (
            f"the kernels return {query.dtype} or float32, not {out_dtype}; "
            "cast the result"
        )
    return None


def declared_recipe(dtype, head_dim: int, target: Architecture | None = None) -> Recipe:
    """The kernels' recipe for 16-bit inputs of `dtype`, their block sizes included.

    `target` is whose kernels are meant; None: those that would run here. Running
    `emulator.attention` under it predicts their results up to the order of additions
    inside a product; a test holds the two together.
    """
    inputs = {jnp.dtype(jnp.bfloat16): BF16, jnp.dtype(jnp.float16): FP16}[
        jnp.dtype(dtype)
    ]
    target = architecture.chosen() if target is None else target
    return dataclasses.replace(
        ATTN_JAX.with_inputs(inputs),
        block_q=tuning.FORWARD[target][head_dim].rows,
        block_kv=tuning.FORWARD[target][head_dim].columns,
        # Queries that share a centre. The dK, dV kernel may take them in other blocks,
        # which is but another order of additions.
        backward_block_q=tuning.BACKWARD_DQ[target][head_dim].rows,
        backward_block_kv=tuning.BACKWARD_DQ[target][head_dim].columns,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _attention(query, key, value, target, scale, is_causal, out_dtype):
    run = _forward_program(target, scale, is_causal, out_dtype, False)
    return run(query, key, value)


def _attention_fwd(query, key, value, target, scale, is_causal, out_dtype):
    run = _forward_program(target, scale, is_causal, out_dtype, True)
    out, *low, lse = run(query, key, value)
    return (out, lse), (query, key, value, out, low, lse)


def _attention_bwd(target, scale, is_causal, out_dtype, residuals, cotangents):
    query, key, value, out, low, lse = residuals
    dout, dlse = cotangents
    run = _backward_program(target, scale, is_causal, bool(low))
    return run(query, key, value, dout, lse, dlse, out, *low)


_attention.defvjp(_attention_fwd, _attention_bwd)


# Cached, so that calls outside `jax.jit` compile once.
@functools.cache
def _forward_program(target, scale, is_causal, out_dtype, residual):
    low = ("BTNH",) if residual and out_dtype != jnp.float32 else ()
    local = functools.partial(
        _local_forward,
        target=target,
        scale=scale,
        is_causal=is_causal,
        out_dtype=out_dtype,
        residual=residual,
    )
    operands = {"query": "BTNH", "key": "BSKH", "value": "BSKH"}
    return jax.jit(partitioned(local, Layout(operands, ("BTNH", *low, "BNT"))))


@functools.cache
def _backward_program(target, scale, is_causal, has_low):
    local = functools.partial(
        _local_backward, target=target, scale=scale, is_causal=is_causal
    )
    operands = {"query": "BTNH", "key": "BSKH", "value": "BSKH", "dout": "BTNH"}
    operands |= {"lse": "BNT", "dlse": "BNT", "out": "BTNH"}
    operands |= {"out_low": "BTNH"} if has_low else {}
    return jax.jit(partitioned(local, Layout(operands, ("BTNH", "BSKH", "BSKH"))))


def _local_forward(query, key, value, *, target, scale, is_causal, out_dtype, residual):
    """(out, out_low if kept, LSE) of one device's arrays."""
    query_count, key_count = query.shape[1], key.shape[1]
    out, low, lse = _FORWARD[target].forward(
        *(_pad_sequence(x) for x in (query, key, value)),
        query_count=query_count,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        tiling=tuning.FORWARD[target][query.shape[-1]],
        out_dtype=out_dtype,
        residual=residual,
    )
    return (out, lse) if low is None else (out, low, lse)


def _local_backward(
    query, key, value, dout, lse, dlse, out, *low, target, scale, is_causal
):
    """(dQ, dK, dV) of one device's arrays."""
    backward = _BACKWARD[target]
    head_dim, dtype = query.shape[-1], query.dtype
    query_count, key_count = query.shape[1], key.shape[1]
    # The barrier keeps XLA from using the unrounded dout for delta while the products
    # see the rounded one: rows of dS would no longer sum to zero.
    dout = lax.optimization_barrier(dout.astype(dtype))
    wide_out = sum(x.astype(jnp.float32) for x in (out, *low))
    delta = jnp.sum(dout.astype(jnp.float32) * wide_out, axis=-1).swapaxes(1, 2) - dlse
    dq_tiling = tuning.BACKWARD_DQ[target][head_dim]
    seen = key
    if is_causal and target != "hopper":
        # No query sees the later ones. Hopper's last tile counts those that rows past
        # the last query would see; any centre is right, and that one keeps its bits.
        seen = key[:, :query_count]
    centre = _mean_key(seen, is_causal, dq_tiling, query_count)
    query, key, value, dout = map(_pad_sequence, (query, key, value, dout))
    dq = backward.backward_dq(
        query,
        key,
        value,
        dout,
        lse,
        delta,
        dlse,
        centre,
        query_count=query_count,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        tiling=dq_tiling,
    )
    dk, dv = backward.backward_dkv(
        query,
        key,
        value,
        dout,
        lse,
        delta,
        query_count=query_count,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        tiling=tuning.BACKWARD_DKV[target][head_dim],
    )
    return dq, dk, dv


def _mean_key(
    key: Float[Array, "B S K H"], is_causal: bool, tiling: Tiling, query_count: int
) -> Float32[Array, "B K C H"]:
    """Mean of the keys that a row sees, in FP32: the centre that dQ's cure subtracts.

    One for all rows (C = 1) or, with a causal mask, one for every `tiling.rows`:
    the mean over the keys up to the last of them.
    """
    wide = key.astype(jnp.float32)
    if not is_causal:
        return wide.mean(axis=1)[:, :, None]
    batch, key_count, heads, head_dim = key.shape
    rows = tiling.rows
    count = -(-query_count // tiling.tile) * tiling.warpgroups
    wide = wide[:, : count * rows]
    wide = jnp.pad(wide, ((0, 0), (0, count * rows - wide.shape[1]), (0, 0), (0, 0)))
    sums = wide.reshape(batch, count, rows, heads, head_dim).sum(axis=2).cumsum(axis=1)
    seen = jnp.minimum((jnp.arange(count) + 1) * rows, key_count).astype(jnp.float32)
    return (sums / seen[:, None, None]).swapaxes(1, 2)


def _pad_sequence(x: Float[Array, "B L N H"]) -> Float[Array, "B M N H"]:
    """Adds zero rows up to what TMA reads; the kernels mask them or cut them off."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % SEQUENCE_MULTIPLE), (0, 0), (0, 0)))
