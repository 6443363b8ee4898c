"""Adapters to attention that is not ours: XLA's and cuDNN's, as JAX offers them.

Both go through `jax.nn.dot_product_attention`. Whatever they cannot do exactly as
`attn_jax.dot_product_attention` promises they refuse in one line.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attn_jax.mask import Mask


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
    scale: float | None = None,
    backend: Literal["xla", "cudnn"],
) -> Float[Array, "B T N D"]:
    """jax.nn's attention: `xla` keeps S in FP32 and P in the inputs' format; `cudnn` is
    a fused kernel that takes 16-bit inputs on an NVIDIA GPU.

    For a query that sees no key jax.nn's `xla` gives the mean of V; here it gives 0.
    jax.nn wants D = H: where they differ, zeros fill up the smaller one.
    """
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if head_dim != value_dim:
        width = max(head_dim, value_dim)
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
            for x in (query, key, value)
        )
        out = attention(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            scale=head_dim**-0.5 if scale is None else scale,
            backend=backend,
        )
        return out[..., :value_dim]
    dense = mask.dense
    if mask.query_offset is not None:
        # jax.nn counts queries and keys from the first.
        band = Mask(mask.is_causal, mask.window, query_offset=mask.query_offset)
        seen = band.materialise(query.shape[1], key.shape[1])
        if seen is not None:
            dense = seen if dense is None else dense & seen
        plain = dataclasses.replace(
            mask, is_causal=False, window=None, query_offset=None, dense=dense
        )
        return attention(
            query, key, value, bias=bias, mask=plain, scale=scale, backend=backend
        )
    if mask.query_segment_ids is not None:
        segments = Mask(
            query_segment_ids=mask.query_segment_ids,
            key_value_segment_ids=mask.key_value_segment_ids,
        ).materialise(query.shape[1], key.shape[1])
        dense = segments if dense is None else dense & segments
    left, right = mask.window or (None, None)
    window = None
    if mask.window is not None:
        # jax.nn has no open side; a side as long as the keys or queries is the same.
        longest = max(query.shape[1], key.shape[1])
        window = (
            longest if left is None else left,
            longest if right is None else right,
        )
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        dense,
        scale=scale,
        is_causal=mask.is_causal,
        query_seq_lengths=mask.query_lengths,
        key_value_seq_lengths=mask.key_value_lengths,
        local_window_size=window,
        implementation=backend,
    )
    # A causal mask alone leaves every query its first key.
    if backend == "cudnn" or dataclasses.replace(mask, is_causal=False).is_empty:
        return out
    seen = mask.materialise(query.shape[1], key.shape[1])
    assert seen is not None  # Only an empty mask has nothing to materialise.
    return jnp.where(seen.any(axis=-1).swapaxes(1, 2)[..., None], out, 0)


def unsupported(
    backend: Literal["xla", "cudnn"],
    *,
    dtype,
    out_dtype,
    soft_cap,
    sinks,
    return_residual: bool,
    deterministic: bool | None,
) -> str | None:
    """Why `backend` cannot take these arguments, in one line, or None if it can."""
    others = "use implementation='emulated' or 'reference'"
    if backend == "cudnn" and jax.default_backend() != "gpu":
        return "'cudnn' needs an NVIDIA GPU; use implementation='xla' or 'emulated'"
    if backend == "cudnn" and dtype not in (jnp.bfloat16, jnp.float16):
        return f"'cudnn' takes bfloat16 or float16, not {dtype}; cast, or use 'xla'"
    if backend == "xla" and dtype == jnp.float16 and jax.default_backend() == "cpu":
        return "'xla' has no float16 products on a CPU; use bfloat16, or 'emulated'"
    if soft_cap is not None or sinks is not None:
        return f"'{backend}' has no soft cap and no sinks; {others}"
    if return_residual:
        return (
            f"'{backend}' rounds its LSE to 16 bit, and an FP32 one is promised here; "
            "use implementation='pallas', 'emulated' or 'reference'"
        )
    if out_dtype is not None and out_dtype != dtype:
        return f"'{backend}' returns {dtype}, not {out_dtype}; {others}"
    if backend == "cudnn" and deterministic:
        return (
            "'cudnn' adds up dQ in no fixed order; use 'pallas', or leave out "
            "deterministic and set XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        )
    return None
