"""A bias that is wired wrongly, and gradients dbias of the right attention."""

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from attn_jax.audit.variant import Registry, Setting, Wrong, whole

Move = Callable[[np.ndarray], np.ndarray]

# Of the attention, and of its dbias alone.
BIASES, DBIAS = Registry(), Registry()


@BIASES.add("bias ignored", "no bias is added", "add it to the scaled logits")
def _(s: Setting):
    if s.attention.bias is not None:
        without = whole(s.attention.replaced(bias=None))
        yield without
        zero = {"dbias": lambda: np.zeros_like(s.attention.bias)}
        yield without._replace(results={**without.results, **zero})


def _times(s: Setting, factor: float, detail: str = "") -> Iterator[Wrong]:
    """x = scale Q K^T + factor bias; dbias is dS, or its factor is not forgotten."""
    if s.attention.bias is None or math.isclose(factor, 1.0):
        return
    bias = s.attention.bias
    bias = np.where(np.isneginf(bias), bias, factor * bias)  # Hidden, whatever it is.
    x = s.attention.replaced(bias=bias)
    wrong = whole(x, detail)
    yield wrong
    yield wrong._replace(results={**wrong.results, "dbias": lambda: factor * x.dbias})


@BIASES.add(
    "bias added before the scale",
    "the bias is scaled with Q K^T",
    "scale first, then add the bias",
)
def _(s: Setting):
    yield from _times(s, s.attention.scale)


@BIASES.add(
    "bias in another base",
    "the bias is off by a factor of ln(2)",
    "where log2(e) is folded into the scale for exp2, multiply the bias by it, too",
)
def _(s: Setting):
    yield from _times(s, math.log(2), "too small")
    yield from _times(s, 1 / math.log(2), "too large")


@BIASES.add("bias subtracted", "the bias has the wrong sign", "add it")
def _(s: Setting):
    yield from _times(s, -1.0)


def _places(shape: tuple[int, ...]) -> Iterator[tuple[str, Move, Move]]:
    """What a bias [1, N, T, S] becomes where heads or positions are confused, and what
    the derivative of that makes of dS."""
    _, N, T, S = shape
    if N > 1:
        back, on = (functools.partial(np.roll, shift=by, axis=1) for by in (1, -1))
        yield "that of the next head", on, back
        yield "that of the head before", back, on
        reverse = functools.partial(np.flip, axis=1)
        yield "heads in reverse order", reverse, reverse
        yield "the first head's for all", lambda x: x[:, :1].repeat(N, 1), _to_first
    if T == S:
        exchange = functools.partial(np.swapaxes, axis1=2, axis2=3)
        yield "queries and keys exchanged", exchange, exchange
    elif min(T, S) > 1:
        yield (
            "read as [1, N, S, T]",
            lambda x: x.reshape(1, N, S, T).swapaxes(2, 3),
            lambda x: x.swapaxes(2, 3).reshape(1, N, T, S),
        )


def _to_first(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x.sum(1, keepdims=True), np.zeros_like(x[:, 1:])], 1)


@BIASES.add(
    "bias of another place",
    "the bias of another head or pair is added",
    "add bias[:, n, i, j] to the logit of head n, query i and key j",
)
def _(s: Setting):
    bias = s.attention.bias
    if bias is None:
        return
    for detail, move, derivative in _places(bias.shape):
        x = s.attention.replaced(bias=move(bias))
        wrong = whole(x, detail)
        yield wrong
        moved = {"dbias": lambda x=x, f=derivative: f(x.dbias)}
        yield wrong._replace(results={**wrong.results, **moved})


@DBIAS.add(
    "dbias not summed over the batch",
    "dbias is not the sum over the batch, which shares the bias",
    "add up dS of all entries",
    on_top=True,
)
def _(s: Setting):
    x, B = s.attention, s.problem.shape.batch
    if x.bias is not None and B > 1:
        yield Wrong("the first entry's", {"dbias": lambda: x.dlogits[:1]})
        yield Wrong("the last entry's", {"dbias": lambda: x.dlogits[-1:]})
        yield Wrong("their mean", {"dbias": lambda: x.dbias / B})


@DBIAS.add(
    "dbias with the scale",
    "dbias is multiplied by the scale, as dQ and dK are",
    "return dS, summed over the batch",
    on_top=True,
)
def _(s: Setting):
    x = s.attention
    if x.bias is not None:
        yield Wrong("", {"dbias": lambda: x.scale * x.dbias})


@DBIAS.add(
    "dbias of another place",
    "dbias is that of another head or pair",
    "write dS of head n, query i and key j to dbias[:, n, i, j]",
    on_top=True,
)
def _(s: Setting):
    x = s.attention
    if x.bias is not None:
        for detail, move, _ in _places(x.bias.shape):
            yield Wrong(detail, {"dbias": lambda f=move: f(x.dbias)})
