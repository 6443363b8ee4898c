"""LSE that is wrong beside an output that is right."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from attn_jax.audit.exact import Exact
from attn_jax.audit.variant import Registry, Setting, Wrong

LSES = Registry()


def log(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(x)


def _lse(name: str, does: str, do: str, of: Callable[[Exact], np.ndarray]):
    """A variant of LSE alone."""

    def make(s: Setting) -> Iterator[Wrong]:
        yield Wrong("", {"lse": lambda: of(s.attention)})

    LSES.add(name, does, do, on_top=True)(make)


_lse(
    "LSE in base 2",
    "LSE is a logarithm to base 2",
    "multiply it by ln(2)",
    lambda x: x.lse / math.log(2),
)
_lse(
    "LSE taken for base 2",
    "LSE is ln(2) times what it is",
    "it is a natural logarithm already: leave it, or --lse-base out",
    lambda x: x.lse * math.log(2),
)
_lse(
    "LSE negated",
    "LSE has the wrong sign",
    "return max + log(sum)",
    lambda x: np.where(np.isneginf(x.lse), x.lse, -x.lse),
)
_lse(
    "LSE without the maximum",
    "LSE is log(sum exp(x - max))",
    "add the maximum",
    lambda x: log(x.total),
)
_lse(
    "LSE is the maximum alone",
    "the maximum of the logits is returned for LSE",
    "add the logarithm of the row sum",
    lambda x: np.where(x.sees_none, -np.inf, x.maximum),
)
_lse(
    "LSE is the row sum",
    "the sum of exp(x - max) is returned for LSE",
    "return max + log(sum)",
    lambda x: x.total,
)


def _sum(maximum: np.ndarray, of_sum: np.ndarray, x: Exact) -> np.ndarray:
    return np.where(x.sees_none, -np.inf, maximum + of_sum)


@LSES.add(
    "LSE mixes bases",
    "LSE is max + log(sum) in two different bases",
    "bring both to base e before they are added",
    on_top=True,
)
def _(s: Setting):
    x = s.attention
    log_sum, ln2 = log(np.maximum(x.total, 1)), math.log(2)
    detail = "the maximum in base 2 and the natural logarithm of the sum"
    yield Wrong(detail, {"lse": lambda: _sum(x.maximum / ln2, log_sum, x)})
    detail = "the maximum in base e and the logarithm of the sum to base 2"
    yield Wrong(detail, {"lse": lambda: _sum(x.maximum, log_sum / ln2, x)})


@LSES.add(
    "LSE has the unscaled maximum",
    "LSE is the maximum of Q K^T without the scale + log(sum)",
    "scale the maximum before it is added",
    on_top=True,
)
def _(s: Setting):
    x = s.attention
    if math.isclose(x.scale, 1.0) or x.bias is not None:
        return
    log_sum = log(np.maximum(x.total, 1))
    yield Wrong("", {"lse": lambda: _sum(x.maximum / x.scale, log_sum, x)})


@LSES.add(
    "LSE of unscaled logits",
    "LSE is that of Q K^T without the scale",
    "take the scaled logits",
    on_top=True,
)
def _(s: Setting):
    x = s.attention
    if not math.isclose(x.scale, 1.0):
        yield Wrong("", {"lse": lambda: x.replaced(scale=1.0).lse})


@LSES.add(
    "LSE in another layout",
    "LSE is laid out as [B, T, N]",
    "return [B, N, T], or transpose it in the adapter",
    on_top=True,
)
def _(s: Setting):
    lse = s.attention.lse
    if 1 not in lse.shape[1:]:
        yield Wrong("", {"lse": lambda: lse.swapaxes(1, 2)})
        detail = "read as [B, N, T]"
        yield Wrong(detail, {"lse": lambda: lse.swapaxes(1, 2).reshape(lse.shape)})
