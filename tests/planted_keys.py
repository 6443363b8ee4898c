"""Attention whose keys and values are made more than they are: honestly, or not."""

import functools

import jax
import jax.numpy as jnp

from attn_jax.mask import Mask

_FIELDS = {
    "query_seq_lengths": "query_lengths",
    "key_value_seq_lengths": "key_value_lengths",
    "local_window_size": "window",
}


def repeated(function, query, *keys, **rules):
    return function(query, *(_for_every_head(x, query) for x in keys), **rules)


def _for_every_head(x, query):
    return jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)


def textbook(query, key, value, bias=0.0, *, scale=None, **rules):
    """The query scaled, P rounded; keys and values repeated, so that gradients of query
    heads are 16-bit numbers, which XLA adds up on a CPU in 16 bits."""
    assert not rules.pop("return_residual", False)
    rules = {_FIELDS.get(name, name): x for name, x in rules.items()}
    seen = Mask(**rules).materialise(query.shape[1], key.shape[1])
    seen = True if seen is None else seen
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = (jnp.float32(scale) * query).astype(query.dtype)
    key, value = (_for_every_head(x, query) for x in (key, value))
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    x = dot("btnh,bsnh->bnts", query, key) + bias
    p = jax.nn.softmax(jnp.where(seen, x, jnp.finfo(x.dtype).min))
    p = jnp.where(seen, p, 0.0).astype(query.dtype)
    return dot("bnts,bsnh->btnh", p, value).astype(query.dtype)


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
