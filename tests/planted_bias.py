"""What attention may do wrong with a bias [1, N, T, S].

Each calls an honest function with another bias, or differentiates that wrongly."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def _changed(change: Callable) -> Callable:
    """change(bias, query), differentiated, takes the place of the bias in FP32."""

    def around(function, query, *arrays, bias=None, **rules):
        if bias is not None:
            bias = change(bias.astype(jnp.float32), query)
        return function(query, *arrays, bias=bias, **rules)

    return around


def _ignored(function, *arrays, bias=None, **rules):
    return function(*arrays, **rules)


def _forgotten(function, *arrays, bias=None, **rules):
    """The backward pass computes P anew without the bias."""

    def of(*given):
        return function(*given[:3], bias=given[3], **rules)

    def forward(*given):
        return of(*given), (*given[:3], jnp.zeros_like(given[3]))

    half = jax.custom_vjp(of)
    half.defvjp(forward, lambda given, grads: jax.vjp(of, *given)[1](grads))
    return function(*arrays, **rules) if bias is None else half(*arrays, bias)


def _summed(total: Callable) -> Callable:
    """dbias is total(dS) [1, N, T, S] of dS [B, N, T, S] in FP32."""

    @jax.custom_vjp
    def spread(bias, query):
        return jnp.broadcast_to(bias, (len(query), *bias.shape[1:]))

    def backward(query, ds):
        return total(ds), jnp.zeros_like(query)

    spread.defvjp(lambda bias, query: (spread(bias, query), query), backward)
    return _changed(spread)


def _in_bfloat16(ds):
    total = ds[:1].astype(jnp.bfloat16)
    for b in range(1, len(ds)):
        total = (total + ds[b : b + 1]).astype(jnp.bfloat16)
    return total.astype(jnp.float32)


# By name: what is done, and the cause that a finding has.
WIRED: dict[str, tuple[Callable, str]] = {
    "bias ignored": (_ignored, "bias ignored"),
    "bias added before the scale": (
        _changed(lambda bias, query: bias * query.shape[-1] ** -0.5),
        "bias added before the scale",
    ),
    "bias in another base": (
        _changed(lambda bias, _: bias * np.log(2)),
        "bias in another base",
    ),
    "bias of another head": (
        _changed(lambda bias, _: bias[:, ::-1]),
        "bias of another place",
    ),
    "bias transposed": (
        _changed(lambda bias, _: bias.reshape(*bias.shape[:2], -1, bias.shape[2]).mT),
        "bias of another place",
    ),
    "bias ignored in the backward pass": (
        _forgotten,
        "bias ignored in the backward pass",
    ),
    "dbias of the first entry": (
        _summed(lambda ds: ds[:1]),
        "dbias not summed over the batch",
    ),
    "dbias is zero": (
        _summed(lambda ds: jnp.zeros_like(ds[:1])),
        "gradient is zero",
    ),
    "dbias with the scale": (
        _summed(lambda ds: ds.sum(0, keepdims=True) * 32**-0.5),
        "dbias with the scale",
    ),
}
in_bfloat16 = _summed(_in_bfloat16)
