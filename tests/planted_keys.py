"""Attention whose keys and values are made more than they are: honestly, or not."""

import jax
import jax.numpy as jnp


def repeated(function, query, *keys, **rules):
    return function(query, *(_for_every_head(x, query) for x in keys), **rules)


def _for_every_head(x, query):
    return jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)


def filled_up(function, query, *arrays, return_residual=False, **rules):
    """dQ has the keys, zeros, that fill the last tile up: P is exp(0 - LSE)."""
    _, lse = function(query, *arrays, return_residual=True, **rules)

    @jax.custom_vjp
    def seen(query, lse):
        return query

    def backward(lse, g):
        more = jnp.exp(-lse.astype(jnp.float32))[..., None] * 0
        return (g + more if arrays[0].shape[1] % 128 else g).astype(g.dtype), None

    seen.defvjp(lambda query, lse: (query, lse), backward)
    query = seen(query, jax.lax.stop_gradient(lse))
    return function(query, *arrays, return_residual=return_residual, **rules)


def other_values(function, query, key, value, *arrays, **rules):
    """Query head n reads K's head n // (N / K), and V's head n % K."""
    N, K = query.shape[2], key.shape[2]
    key, value = jnp.repeat(key, N // K, 2), jnp.tile(value, (1, 1, N // K, 1))
    return function(query, key, value, *arrays, **rules)
