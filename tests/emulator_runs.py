"""Small arguments for the emulator, and a run of it forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import emulator
from attn_jax.mask import Mask

B, T, S, N, K, H = 2, 9, 13, 4, 2, 8
SPLIT = dict(block_q=4, block_kv=4, backward_block_q=4, backward_block_kv=5)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def small_arguments(dtype=jnp.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(jnp.asarray(normal(i, *s), dtype) for i, s in enumerate(shapes))


@functools.partial(jax.jit, static_argnames=("recipe", "scale", "soft_cap"))
def run(q, k, v, dout, dlse, extra, *, recipe, scale=None, soft_cap=None):
    """(out, lse) and the gradients with respect to q, k, v and what `extra` holds."""

    differentiated = {name: x for name, x in extra.items() if name != "mask"}
    options = {"recipe": recipe, "scale": scale, "soft_cap": soft_cap}
    options["mask"] = extra.get("mask", Mask())

    def forward(q, k, v, differentiated):
        return emulator.attention(q, k, v, **options, **differentiated)

    outputs, pull = jax.vjp(forward, q, k, v, differentiated)
    return outputs, pull((dout, dlse))
