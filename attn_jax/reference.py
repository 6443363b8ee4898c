"""Exact attention with its gradients in closed form, and the FP64 golden result.

With x = cap(scale Q K^T + bias), cap(y) = c tanh(y / c) under a soft cap c, hidden keys
at x = -inf and a sink z_n taking part in the softmax as a key whose value is zero:

    LSE = log(sum_j exp x_j + exp z)     P = exp(x - LSE)      O = P V
    dV = P^T dO      dP = dO V^T         delta = rowsum(P dP)
    dx = P (dP - delta + dLSE)           dz = sum_i P_z (dLSE - delta)
    dy = dx cap'(y)                      dbias = dy, summed over broadcast axes
    dQ = scale dy K                      dK = scale dy^T Q

With c the dP of a row's largest P, 0 of a sink, dP - delta = dP - c - rowsum(P (dP -
c)) + P_z c: so it is computed, as that loses nothing of a row that one key dominates.

The logits are materialised, one softmax in the compute type, nothing is rounded before
the end. `exp` and never `exp2`: the latter is off by up to 46 ulp on XLA's CPU backend.
"""

import functools
import math
import numbers
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from attn_jax.mask import Mask
from attn_jax.varying import varying_alike
from attn_jax.xla_options import RUN_ONCE


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Mask = Mask(),
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    out_dtype: Any = None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Attention output and log-sum-exp, both differentiable.

    Computes in float64 if `jax_enable_x64` is on, else in float32 with full-precision
    products, and rounds once, to `out_dtype` (default: the type of `query`). Gradients
    are rounded once to the types of their inputs. The LSE (natural logarithm) stays in
    the compute type and counts the sink. A query that sees no key gives zeros, LSE
    -inf (or the sink) and no gradient. `scale` defaults to H**-0.5; query head n reads
    key/value head n // (N / K).

    Raises ValueError, from `check_arguments`, for shapes that do not fit together.
    """
    check_arguments(
        query, key, value, bias=bias, mask=mask, soft_cap=soft_cap, sinks=sinks
    )
    static = _Static(
        default_scale(scale, query.shape[-1]),
        python_float(soft_cap),
        output_dtype(query.dtype if out_dtype is None else out_dtype),
    )
    arrays = varying_alike(query, key, value, bias, sinks, mask)
    return _attention(static, *arrays)


class Golden(NamedTuple):
    """FP64 results as NumPy arrays; `dbias` and `dsinks` are None without the input."""

    out: np.ndarray
    lse: np.ndarray
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None


def golden(
    query,
    key,
    value,
    dout,
    dlse=None,
    *,
    bias=None,
    mask: Mask = Mask(),
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks=None,
    absolute: bool = False,
) -> Golden:
    """`attention` and its gradients in FP64 on the inputs exactly as given.

    Takes JAX or NumPy arrays of any float type (not tracers), with cotangents `dout`
    [B, T, N, D] and `dlse` [B, N, T]. Runs under an x64 scope of its own, so the
    user's mode neither matters nor changes, and head by head, of as many entries of the
    batch as are small, so memory holds a few T x S arrays and not N of them.

    With `absolute`, `out`, `dquery`, `dkey`, `dvalue` and `dbias` are the same sums
    over the absolute values of their terms: the size against which to judge an error
    where the exact result vanishes. The other fields are unaffected.
    """
    check_arguments(
        query, key, value, bias=bias, mask=mask, soft_cap=soft_cap, sinks=sinks
    )
    B, T, N, H = query.shape
    G = N // key.shape[2]
    q, k, v, do = map(_to_numpy, (query, key, value, dout))
    bias = None if bias is None else _to_numpy(bias)
    sinks = None if sinks is None else _to_numpy(sinks)
    dlse = np.zeros((B, N, T)) if dlse is None else _to_numpy(dlse)
    mask = jax.tree_util.tree_map(np.asarray, mask)
    out, dq = np.zeros((B, T, N, v.shape[-1])), np.zeros(q.shape)
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    lse = np.zeros((B, N, T))
    dbias = None if bias is None else np.zeros(bias.shape)
    dsinks = None if sinks is None else np.zeros(sinks.shape)
    cap = python_float(soft_cap)
    static = _Static(default_scale(scale, H), cap, np.dtype(np.float64))
    with jax.enable_x64(True):
        count = _entries(B, T, key.shape[1])
        for b, n in np.ndindex(B // count, N):
            rows, head, kv_head = (
                slice(b * count, (b + 1) * count),
                slice(n, n + 1),
                slice(n // G, n // G + 1),
            )
            results = _golden_head(
                static,
                absolute,
                q[rows, :, head],
                k[rows, :, kv_head],
                v[rows, :, kv_head],
                None if bias is None else _pick(bias, rows, head),
                None if sinks is None else sinks[head],
                _pick_mask(mask, rows, head),
                do[rows, :, head],
                dlse[rows, head],
            )
            out[rows, :, head], lse[rows, head] = results[:2]
            dq[rows, :, head] = results[2]
            dk[rows, :, kv_head] += results[3]
            dv[rows, :, kv_head] += results[4]
            if dbias is not None:
                _pick(dbias, rows, head)[...] += results[5]
            if dsinks is not None:
                dsinks[head] += results[6]
    return Golden(out, lse, dq, dk, dv, dbias, dsinks)


# Pairs of a query and a key that `golden` takes at a time, if not one head has more.
_PAIRS = 2**20


def _entries(B: int, T: int, S: int) -> int:
    """Entries of a batch at a time: a divisor of B, so that there is one program."""
    most = max(1, _PAIRS // (T * S))
    return max(n for n in range(1, max(B, 1) + 1) if n <= most and B % n == 0)


def lower_golden(
    shape: tuple[int, int, int, int, int],
    *,
    mask: Mask,
    scale: float,
    bias: bool,
    absolute: bool = False,
) -> jax.stages.Lowered:
    """What `golden` runs for [B, T, S, H, D], with a bias [1, N, T, S] or without one.
    Compiled, which may be done beside what else goes on, it is found there."""
    B, T, S, H, D = shape
    count = _entries(B, T, S)

    def head(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, np.float64)

    def type_of(x) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    mask = jax.tree_util.tree_map(np.asarray, mask)
    mask = _pick_mask(mask, slice(count), slice(1))
    with jax.enable_x64(True):
        return _golden_head.lower(
            _Static(scale, None, np.dtype(np.float64)),
            absolute,
            *(head(count, T, 1, H), head(count, S, 1, H), head(count, S, 1, D)),
            head(1, 1, T, S) if bias else None,
            None,
            jax.tree_util.tree_map(type_of, mask),
            *(head(count, T, 1, D), head(count, 1, T)),
        )


def default_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, or 1 / sqrt(head_dim); ValueError unless it is a finite number."""
    if scale is None:
        return head_dim**-0.5
    if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(
            f"scale must be a finite Python number, which is compiled in, got {scale}; "
            "multiply query by an array instead"
        )
    return float(scale)


def python_float(x: float | None) -> float | None:
    """NumPy's numbers as Python's, which leave a product in the other factor's type."""
    return None if x is None else float(x)


def output_dtype(dtype) -> np.dtype:
    """ValueError unless it is a floating type that JAX has in this mode."""
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"out_dtype must be a floating type: {error}") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"out_dtype must be a floating type, got {dtype}")
    if dtype == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError("out_dtype=float64 needs jax_enable_x64")
    return dtype


def check_arguments(
    query, key, value, *, bias=None, mask=Mask(), soft_cap=None, sinks=None
) -> None:
    """Raises ValueError, one line, if shapes, types or the soft cap do not fit."""
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(
            "query must be [B, T, N, H], key [B, S, K, H] and value [B, S, K, D], got "
            f"{query.shape}, {key.shape} and {value.shape}"
        )
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    if key.shape != (B, S, K, H) or value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            "key must be [B, S, K, H] with the B and H of query and value [B, S, K, D] "
            f"beside it, got query {query.shape}, key {key.shape}, value {value.shape}"
        )
    # An empty batch gives an empty result; no other size 0 is worth code of its own.
    if 0 in (T, S, N, K, H, value.shape[-1]):
        raise ValueError(
            "T, S, N, K, H and D must be at least 1, got query, key and value of "
            f"shapes {query.shape}, {key.shape} and {value.shape}"
        )
    if N % K:
        raise ValueError(f"query heads ({N}) must be a multiple of key heads ({K})")
    full = (B, N, T, S)
    for name, x in (("bias", bias), ("mask.dense", mask.dense)):
        if x is not None and (
            x.ndim != 4 or any(a not in (1, b) for a, b in zip(x.shape, full))
        ):
            raise ValueError(
                f"{name} must broadcast to {full} axis by axis, got {x.shape}"
            )
    for name, x, shape in (
        ("sinks", sinks, (N,)),
        ("mask.query_lengths", mask.query_lengths, (B,)),
        ("mask.key_value_lengths", mask.key_value_lengths, (B,)),
        ("mask.query_segment_ids", mask.query_segment_ids, (B, T)),
        ("mask.key_value_segment_ids", mask.key_value_segment_ids, (B, S)),
        ("mask.query_offset", mask.query_offset, (B,)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    _check_types(query, key, value, bias, mask, sinks)
    if soft_cap is not None:
        if not isinstance(soft_cap, numbers.Real):
            raise ValueError(
                "soft_cap must be a Python number, which is compiled in, got a "
                f"{type(soft_cap).__name__}"
            )
        if not 0 < float(soft_cap) < math.inf:
            raise ValueError(f"soft_cap must be positive and finite, got {soft_cap}")


def _check_types(query, key, value, bias, mask: Mask, sinks) -> None:
    for name, x, kind, word in (
        ("query", query, jnp.floating, "floating"),
        ("key", key, jnp.floating, "floating"),
        ("value", value, jnp.floating, "floating"),
        ("bias", bias, jnp.floating, "floating"),
        ("sinks", sinks, jnp.floating, "floating"),
        ("mask.dense", mask.dense, jnp.bool_, "bool"),
        ("mask.query_lengths", mask.query_lengths, jnp.integer, "integer"),
        ("mask.key_value_lengths", mask.key_value_lengths, jnp.integer, "integer"),
        ("mask.query_segment_ids", mask.query_segment_ids, jnp.integer, "integer"),
        (
            "mask.key_value_segment_ids",
            mask.key_value_segment_ids,
            jnp.integer,
            "integer",
        ),
        ("mask.query_offset", mask.query_offset, jnp.integer, "integer"),
    ):
        if x is not None and not jnp.issubdtype(x.dtype, kind):
            raise ValueError(f"{name} must be {word}, got {x.dtype}; cast it")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value must have one type, got {query.dtype}, {key.dtype} "
            f"and {value.dtype}; cast them"
        )


class _Static(NamedTuple):
    scale: float
    soft_cap: float | None
    out_dtype: np.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, query, key, value, bias, sinks, mask):
    return _attention_fwd(static, query, key, value, bias, sinks, mask)[0]


def _attention_fwd(static, query, key, value, bias, sinks, mask):
    arrays = query, key, value, bias, sinks
    x = _grouped(static, arrays, mask)
    out = x.ungroup(_dot("bkgts,bskh->btkgh", x.probability, x.value))
    return (out.astype(static.out_dtype), x.lse), (*arrays, mask)


def _attention_bwd(static, residuals, cotangents):
    *arrays, mask = residuals
    x = _grouped(static, arrays, mask)
    dout, dlse = (c.astype(_compute_type()) for c in cotangents)
    grads = _gradients(x, dout, dlse)
    return *(
        None if a is None or g is None else g.astype(a.dtype)
        for g, a in zip(grads, arrays)
    ), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _compute_type():
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


def _grouped(static, arrays, mask) -> "_Grouped":
    wide = [None if a is None else a.astype(_compute_type()) for a in arrays]
    query, key, value, bias, sinks = wide
    return _Grouped(static, query, key, value, bias, sinks, mask)


def _dot(subscripts: str, x, y):
    return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)


class _Grouped:
    """The softmax with query heads split into K groups of G; axes b k g t s."""

    def __init__(self, static, query, key, value, bias, sinks, mask: Mask):
        B, T, N, H = query.shape
        S, K = key.shape[1:3]
        self.static, self.key, self.value = static, key, value
        self.shape = B, T, K, N // K, H
        self.query = query.reshape(self.shape)
        self.bias_shape = None if bias is None else bias.shape
        x = static.scale * _dot("btkgh,bskh->bkgts", self.query, key)
        if bias is not None:
            x = x + self.group_heads(bias)
        self.slope = None
        if static.soft_cap is not None:
            x = x / static.soft_cap
            # 1 - tanh^2 as 1 / cosh^2, which is not lost where tanh rounds to 1.
            decay = jnp.exp(-2 * jnp.abs(x))
            self.slope = 4 * decay / (1 + decay) ** 2
            x = static.soft_cap * jnp.tanh(x)
        visible = mask.materialise(T, S)
        if visible is not None:
            x = jnp.where(self.group_heads(visible), x, -jnp.inf)
        m = x.max(-1, keepdims=True)
        if sinks is not None:
            sinks = sinks.reshape(1, K, N // K, 1, 1)
            m = jnp.maximum(m, sinks)
        shift = jnp.where(jnp.isneginf(m), 0.0, m)
        p = jnp.exp(x - shift)
        p_sink = None if sinks is None else jnp.exp(sinks - shift)
        total = p.sum(-1, keepdims=True) + (0.0 if p_sink is None else p_sink)
        divisor = jnp.where(total == 0, 1.0, total)
        self.probability = p / divisor
        self.sink_probability = None if p_sink is None else (p_sink / divisor)[..., 0]
        # log(0) = -inf is the wanted LSE of a query that sees nothing.
        self.lse = (shift + jnp.log(total)).reshape(B, N, T)

    def group_heads(self, x):
        """[B or 1, N or 1, ...] to [B or 1, K or 1, G or 1, ...]."""
        K, G = self.shape[2:4]
        heads = (1, 1) if x.shape[1] == 1 else (K, G)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def ungroup(self, x):
        B, T, K, G, _ = self.shape
        return x.reshape(B, T, K * G, x.shape[-1])

    def to_bias(self, dx):
        """Summed over the axes that the bias is broadcast over; None without one."""
        if self.bias_shape is None:
            return None
        full = dx.reshape(dx.shape[0], -1, *dx.shape[3:])
        axes = [a for a in range(4) if self.bias_shape[a] == 1]
        return full.sum(axes, keepdims=True)


def _gradients(x: _Grouped, dout, dlse):
    B, T, K, G, H = x.shape
    p, scale = x.probability, x.static.scale
    dout = dout.reshape(*x.shape[:-1], dout.shape[-1])
    # The LSE of a query that sees nothing is a constant, whatever its cotangent.
    dlse = jnp.where(jnp.isneginf(x.lse), 0.0, dlse).reshape(B, K, G, T)
    dp = _dot("btkgh,bskh->bkgts", dout, x.value)
    # What has no weight is in no difference that might overflow.
    dp = jnp.where((p == 0) & jnp.isfinite(dp), 0.0, dp)
    dsinks, p_sink = None, 0.0
    if x.sink_probability is not None:
        excess = (p * dp).sum(-1) - dlse
        dsinks = -(x.sink_probability * excess).sum((0, 3)).reshape(K * G)
        p_sink = x.sink_probability[..., None]
    likeliest = jnp.take_along_axis(dp, p.argmax(-1, keepdims=True), -1)
    likeliest = jnp.where(p_sink > p.max(-1, keepdims=True), 0.0, likeliest)
    # Of two keys so far apart that their difference overflows neither stands out.
    fits = jnp.isfinite(dp - likeliest).all(-1, keepdims=True)
    likeliest = jnp.where(fits, likeliest, 0.0)
    rest = dp - likeliest
    mean = (p * rest).sum(-1) - (p_sink * likeliest)[..., 0]
    dx = p * (rest - (mean - dlse)[..., None])
    if x.slope is not None:
        dx = dx * x.slope
    dquery = x.ungroup(scale * _dot("bkgts,bskh->btkgh", dx, x.key))
    dkey = scale * _dot("bkgts,btkgh->bskh", dx, x.query)
    dvalue = _dot("bkgts,btkgh->bskh", p, dout)
    return dquery, dkey, dvalue, x.to_bias(dx), dsinks


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=RUN_ONCE)
def _golden_head(static, absolute, q, k, v, bias, sinks, mask, dout, dlse):
    x = _Grouped(static, q, k, v, bias, sinks, mask)
    out = x.ungroup(_dot("bkgts,bskh->btkgh", x.probability, v))
    grads = _gradients(x, dout, dlse)
    if absolute:
        out, *sums = _absolute_sums(x, q, k, v, dout, dlse)
        grads = *sums, grads[4]
    return out, x.lse, *grads


def _absolute_sums(x: _Grouped, q, k, v, dout, dlse):
    """out and gradients, but dsinks, with every term of every sum by its absolute
    value."""
    p, scale = x.probability, abs(x.static.scale)
    q, dout = (y.reshape(*x.shape[:-1], y.shape[-1]) for y in (q, dout))
    q, k, v, dout = map(jnp.abs, (q, k, v, dout))
    dp = _dot("btkgh,bskh->bkgts", dout, v)
    dlse = jnp.where(jnp.isneginf(x.lse), 0.0, jnp.abs(dlse))
    delta = (p * dp).sum(-1) + dlse.reshape(p.shape[:-1])
    dx = p * (dp + delta[..., None])
    if x.slope is not None:
        dx = dx * x.slope
    return (
        x.ungroup(_dot("bkgts,bskh->btkgh", p, v)),
        x.ungroup(scale * _dot("bkgts,bskh->btkgh", dx, k)),
        scale * _dot("bkgts,btkgh->bskh", dx, q),
        _dot("bkgts,btkgh->bskh", p, dout),
        x.to_bias(dx),
    )


def _to_numpy(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _pick(x: np.ndarray, rows: slice, head: slice) -> np.ndarray:
    """Entries of a batch and one head of an array broadcastable to [B, N, T, S]."""
    x = x if x.shape[0] == 1 else x[rows]
    return x if x.shape[1] == 1 else x[:, head]


def _pick_mask(mask: Mask, rows: slice, head: slice) -> Mask:
    per_batch = operator.itemgetter(rows)
    return Mask(
        mask.is_causal,
        mask.window,
        None if mask.dense is None else _pick(mask.dense, rows, head),
        *(
            None if x is None else per_batch(x)
            for x in (
                mask.query_lengths,
                mask.key_value_lengths,
                mask.query_segment_ids,
                mask.key_value_segment_ids,
                mask.query_offset,
            )
        ),
    )
