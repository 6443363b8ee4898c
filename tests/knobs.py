"""An honest attention, each of whose parts can be made another: see `Knobs`.

16-bit inputs, FP32 inside; one tile of keys after the other in the forward pass, all at
once in the backward pass; LSE differentiable.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_jax.formats import BF16, FP16, Rounding, round_to
from attn_jax.mask import Mask

LOG2E = 1.4426950408889634


def same(x, *_):
    return x


def narrow(x, like):
    """Rounded to nearest to the 16-bit type of `like`, in FP32; subnormals vanish."""
    bits = (8, 7) if like.dtype == jnp.bfloat16 else (5, 10)
    return lax.reduce_precision(x, *bits)


def truncated(x, like):
    fmt = BF16 if like.dtype == jnp.bfloat16 else FP16
    return round_to(x, fmt, Rounding.TOWARD_ZERO)


def bfloat16(x, *_):
    return lax.reduce_precision(x, 8, 7)


@dataclasses.dataclass(frozen=True)
class Knobs:
    """What an implementation does; as they stand, an honest one.

    Hooks take a part and return what it is replaced by: `seen` and `seen_backward` the
    mask [B, N, T, S] and the rules, `scale` the scale and H, `key_heads` N and K,
    `weights` exp(x - m), `applied` P where it weights V (or dO, dP), `finish` the
    accumulator, row sums and V, `lse` LSE, maximum and scale, `recomputed` logits and
    LSE in the backward pass, `delta` delta and row sums, `group` [B, S, N, H] and K,
    `gradients` dQ, dK, dV and the scale. `block` None takes all keys at once.
    """

    block: int | None = 64
    reverse: bool = False
    base_two: bool = False
    hidden: float = -np.inf
    narrow: Callable = narrow  # P, dS
    narrow_out: Callable = narrow
    delta_from: str = "out"  # or "unrounded out", "P dP"
    subtract_maximum: bool = True
    guard: bool = True
    rescale: bool = True
    pad: bool = False
    seen: Callable = same
    seen_backward: Callable = same
    scale: Callable = same
    key_heads: Callable = lambda N, K: [n // (N // K) for n in range(N)]
    logits: Callable = same
    weights: Callable = same
    applied: Callable = same
    accumulator: Callable = same
    row_sum: Callable = same
    finish: Callable = lambda acc, total, value: acc / total
    lse: Callable = same
    dlse: Callable = same
    recomputed: Callable = lambda x, lse: jnp.exp(x - lse)
    delta: Callable = same
    group: Callable = lambda x, K: x.reshape(*x.shape[:2], K, -1, x.shape[-1]).sum(3)
    gradients: Callable = same


def _dot(subscripts, x, y):
    return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)


def _wide(knobs, query, key, value):
    heads = jnp.asarray(knobs.key_heads(query.shape[2], key.shape[2]))
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    return query, key[:, :, heads], value[:, :, heads]


def _logits(knobs, scale, query, key, bias, seen):
    x = knobs.logits(scale * _dot("btnh,bsnh->bnts", query, key) + bias)
    return jnp.where(seen, x.astype(jnp.float32), knobs.hidden)


def _forward(knobs, scale, query, key, value, bias, seen):
    """Output, LSE and row sums [B, N, T]; the output unrounded, [B, T, N, H]."""
    like = query
    query, key, value = _wide(knobs, query, key, value)
    x = _logits(knobs, scale, query, key, bias, seen)
    S = x.shape[-1]
    block = knobs.block or S
    if knobs.pad:
        more = -S % block
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, more),))
        value = jnp.pad(value, ((0, 0), (0, more), (0, 0), (0, 0)))
    starts = list(range(0, x.shape[-1], block))
    m = jnp.full(x.shape[:3], -jnp.inf, jnp.float32)
    total = jnp.zeros_like(m)
    acc = jnp.zeros((*x.shape[:3], value.shape[-1]), jnp.float32)
    for start in reversed(starts) if knobs.reverse else starts:
        tile = x[..., start : start + block]
        higher = jnp.maximum(m, tile.max(-1))
        shift = jnp.where(jnp.isneginf(higher), 0.0, higher) if knobs.guard else higher
        if not knobs.subtract_maximum:
            shift = jnp.zeros_like(shift)
        if knobs.base_two:
            p = jnp.exp2(LOG2E * tile - LOG2E * shift[..., None])
        else:
            p = jnp.exp(tile - shift[..., None])
        p = knobs.weights(p)
        old = jnp.exp(m - shift) if knobs.subtract_maximum else jnp.ones_like(m)
        total = knobs.row_sum(old * total + p.sum(-1))
        applied = knobs.narrow(knobs.applied(p), like)
        added = _dot("bnts,bsnh->bnth", applied, value[:, start : start + block])
        rescaled = acc * old[..., None] if knobs.rescale else acc
        acc = knobs.accumulator(rescaled + added)
        m = higher
    divisor = jnp.where(total == 0, 1.0, total) if knobs.guard else total
    out = knobs.finish(acc, divisor[..., None], value.swapaxes(1, 2))
    lse = (shift if not knobs.subtract_maximum else m) + jnp.log(total)
    return out.swapaxes(1, 2), lse, divisor, m


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(knobs, scale, query, key, value, bias, seen, seen_backward):
    return _fwd(knobs, scale, query, key, value, bias, seen, seen_backward)[0]


def _fwd(knobs, scale, query, key, value, bias, seen, seen_backward):
    out, lse, total, m = _forward(knobs, scale, query, key, value, bias, seen)
    rounded = knobs.narrow_out(out, query)
    kept = rounded if knobs.delta_from == "out" else out
    residuals = query, key, value, bias, seen_backward, kept, lse, total
    return (rounded.astype(query.dtype), knobs.lse(lse, m, scale)), residuals


def _bwd(knobs, scale, residuals, cotangents):
    *inputs, bias, seen, out, lse, total = residuals
    query, key, value = _wide(knobs, *inputs)
    dout, dlse = (x.astype(jnp.float32) for x in cotangents)
    like = inputs[0]
    x = _logits(knobs, scale, query, key, bias, seen)
    guarded = jnp.where(jnp.isneginf(lse), jnp.inf, lse) if knobs.guard else lse
    p = knobs.recomputed(x, guarded[..., None])
    dp = knobs.applied(_dot("btnh,bsnh->bnts", dout, value))
    if knobs.delta_from == "P dP":
        delta = (p * dp).sum(-1)
    else:
        delta = _dot("btnh,btnh->bnt", dout, out)
    dlse = knobs.dlse(jnp.where(jnp.isneginf(lse), 0.0, dlse))
    delta = knobs.delta(delta, total) - dlse
    ds = p * (dp - delta[..., None])
    narrow_ds = knobs.narrow(ds, like)
    dq = scale * _dot("bnts,bsnh->btnh", narrow_ds, key)
    dk = scale * _dot("bnts,btnh->bsnh", narrow_ds, query)
    dv = _dot("bnts,btnh->bsnh", knobs.narrow(knobs.applied(p), like), dout)
    K = inputs[1].shape[2]
    grads = knobs.gradients((dq, knobs.group(dk, K), knobs.group(dv, K)), scale)
    return *(g.astype(like.dtype) for g in grads), ds.astype(bias.dtype), None, None


_attention.defvjp(_fwd, _bwd)


def attention(
    knobs: Knobs,
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    return_residual=False,
):
    """`jax.nn.dot_product_attention` as the knobs have it; LSE is [B, T, N]."""
    B, T, N, H = query.shape
    S = key.shape[1]
    if isinstance(local_window_size, int):
        local_window_size = local_window_size, local_window_size
    rules = Mask(
        is_causal,
        local_window_size,
        mask,
        query_seq_lengths,
        key_value_seq_lengths,
        query_segment_ids,
        key_value_segment_ids,
    )
    seen = rules.materialise(T, S)
    seen = jnp.broadcast_to(True if seen is None else seen, (B, N, T, S))
    bias = 0.0 if bias is None else bias
    bias = jnp.broadcast_to(jnp.asarray(bias, jnp.float32), (B, N, T, S))
    scale = float(knobs.scale(H**-0.5 if scale is None else scale, H))
    forward, backward = knobs.seen(seen, rules), knobs.seen_backward(seen, rules)
    if knobs.seen_backward is same:
        backward = forward
    arrays = query, key, value, bias, forward, backward
    given: Any = _attention(knobs, scale, *arrays)
    out, lse = given
    return (out, lse.swapaxes(1, 2)) if return_residual else out


def scaled_query(function, query, *arrays, scale=None, **rules):
    """An attention of a query that is scaled, and rounded, before."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scaled = narrow(query.astype(jnp.float32) * scale, query).astype(query.dtype)
    return function(scaled, *arrays, scale=1.0, **rules)
