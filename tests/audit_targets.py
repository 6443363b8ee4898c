"""A small attention with the faults that an audit must find, one at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import emulator, external
from attn_jax.formats import E4M3FN, TF32, round_to
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EAGER_BF16, FLASH2

RECIPES = {"flash2": FLASH2, "attn_jax": ATTN_JAX, "eager_bf16": EAGER_BF16}
HONEST = (*RECIPES, "jax_nn", "plain")
TILE = 16


def honest(name: str, mask: Mask):
    if name == "plain":
        return attend(mask)
    if name == "jax_nn":
        return lambda q, k, v: (
            external.attention(q, k, v, mask=mask, backend="xla"),
            None,
        )
    recipe = RECIPES[name]
    return lambda q, k, v: emulator.attention(q, k, v, recipe=recipe, mask=mask)


def attend(mask: Mask, fault: str = "", out_dtype=None):
    """FP32 but for P, dS and results in the inputs' type; delta from unrounded O."""

    @jax.custom_vjp
    def call(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        p, lse = softmax(q, k)
        rounded = p.astype(q.dtype).astype(jnp.float32)
        seen = rounded
        if fault == "values of the last tile dropped":
            seen = seen.at[..., -TILE:].set(0)
        if fault == "values rounded to TF32":
            seen, v = round_to(seen, TF32), round_to(v, TF32)
        out = dot("bnts,bsnh->btnh", seen, wide(v))
        returned = out.astype(out_dtype or q.dtype)
        if fault == "irreproducible":
            returned = jax.pure_callback(
                last_place, returned, returned, vmap_method="sequential"
            )
        if fault == "batch position":
            scale = 1 + 0.05 * jnp.arange(len(out))[:, None, None, None]
            returned = (out * scale).astype(q.dtype)
        given = lse
        if fault == "LSE in BF16":
            given = round_lse(lse)
        if fault == "LSE in log2":
            given = lse * np.float32(np.log2(np.e))
        if fault == "LSE constant":
            given = jnp.where(jnp.isneginf(lse), lse, 5.0)
        kept = returned if fault == "delta from rounded out" else out
        return (returned, given), (q, k, v, p, lse, kept)

    def backward(residuals, cotangents):
        q, k, v, p, lse, out = residuals
        do, dlse = (c.astype(jnp.float32) for c in cotangents)
        dlse = jnp.where(jnp.isneginf(lse), 0, dlse)
        if fault == "LSE without gradient":
            dlse = 0 * dlse
        delta = (do * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        if fault == "delta too small":
            delta = 0.9 * delta
        dp = dot("btnh,bsnh->bnts", do, wide(v))
        ds = p * (dp - (delta - dlse)[..., None])
        ds_of_dq = ds_of_dk = ds.astype(q.dtype).astype(jnp.float32)
        if fault.startswith("LSE gradient in"):
            without = p * (dp - delta[..., None])
            without = without.astype(q.dtype).astype(jnp.float32)
            if "dQ" in fault:
                ds_of_dk = without
            else:
                ds_of_dq = without
        p = p.astype(q.dtype).astype(jnp.float32)
        if fault == "last queries miss in dV":
            p = p.at[:, :, -TILE:].set(0)
        scale = q.shape[-1] ** -0.5
        dq = scale * dot("bnts,bsnh->btnh", ds_of_dq, wide(k))
        dk = scale * narrow(dot("bnts,btnh->bsnh", ds_of_dk, q.astype(jnp.float32)), k)
        if fault == "dLSE in dV":
            do = do + dlse.swapaxes(1, 2)[..., None]
        dv = narrow(dot("bnts,btnh->bsnh", p, do), v)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def softmax(q, k):
        if fault == "keys in FP8":
            k = round_to(k.astype(jnp.float32), E4M3FN.saturating())
        wide_q = q.astype(jnp.float32)
        k = jnp.repeat(k.astype(jnp.float32), q.shape[2] // k.shape[2], 2)
        x = q.shape[-1] ** -0.5 * dot("btnh,bsnh->bnts", wide_q, k)
        visible = mask.materialise(*x.shape[2:])
        if visible is not None:
            x = jnp.where(visible, x, -jnp.inf)
        if fault == "last tile dropped":
            x = x.at[..., -TILE:].set(-jnp.inf)
        m = x.max(-1, keepdims=True)
        m = jnp.where(jnp.isneginf(m), 0, m)
        if fault == "no maximum":
            m = 0 * m
        e = jnp.exp(x - m)
        total = e.sum(-1, keepdims=True)
        lse = (m + jnp.log(total))[..., 0]
        if fault != "divides by 0":
            total = jnp.where(total == 0, 1, total)
        return e / total, lse

    def wide(x):
        return jnp.repeat(x.astype(jnp.float32), groups[0], 2)

    def narrow(x, like):
        return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(3)

    groups = [1]

    def target(q, k, v):
        groups[0] = q.shape[2] // k.shape[2]
        return call(q, k, v)

    call.defvjp(forward, backward)
    return target


dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def round_lse(lse):
    return lse.astype(jnp.bfloat16).astype(jnp.float32)


_runs = np.random.default_rng(0)


def last_place(x):
    x = np.asarray(x)
    return (x.astype(np.float32) * (1 + 2**-7 * _runs.integers(0, 2, x.shape))).astype(
        x.dtype
    )
