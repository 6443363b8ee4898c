"""Others' attentions, with the signature of `jax.nn.dot_product_attention`."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def attention_mgpu(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    scale: float,
    is_causal: bool = False,
) -> Float[Array, "B T N H"]:
    """JAX's example of a FlashAttention-3 in Mosaic GPU,
    `jax.experimental.pallas.ops.gpu.attention_mgpu`.

    It does not scale: the query is scaled in FP32 and rounded to its type, as its
    users have to.

    Raises:
      NotImplementedError: inputs that are not FP16, which are all that compiles.
      ValueError, NotImplementedError: lengths that its blocks do not divide, H not a
        multiple of 64, a causal mask in the backward pass.
    """
    if query.dtype != jnp.float16:
        raise NotImplementedError(
            f"attention_mgpu compiles for FP16, not for {query.dtype}: --dtype float16"
        )
    # Imported on use: it wants CUDA's libraries.
    from jax.experimental.pallas.ops.gpu import attention_mgpu as theirs

    # Of its own example, and its tests' for the backward pass: what fits for H = 256.
    config = theirs.TuningConfig(
        block_q=64,
        block_kv=64 if query.shape[-1] > 128 else 128,
        max_concurrent_steps=2,
        causal=is_causal,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    return theirs.attention(scaled, key, value, config)
