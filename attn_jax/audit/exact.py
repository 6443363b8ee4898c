"""Attention by parts, in FP64 NumPy: what wrong variants of it are made of.

With query head n reading key head key_head[n] and hidden pairs at x = -inf:

    products = Q K^T                 x = scale products + bias
    m = max_j x
    weights = exp(x - m)             total = sum_j weights    LSE = m + log total
    P = weights / total              O = P V                  dV = P^T dO
    dP = dO V^T                      delta = rowsum(P dP)     dS = P (dP - delta)
    dQ = scale dS K                  dK = scale dS^T Q        dbias = sum_b dS

The right results are `reference.golden`'s, which shares no code with this; here every
part can be read, replaced and put together again. All heads are held at once: a few
arrays [B, N, T, S].
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from attn_jax.audit.problem import Problem
from attn_jax.mask import Mask

# Attention by query heads: of T queries, of S keys, of pairs.
PerRow = Float[np.ndarray, "B N T"]
PerPair = Float[np.ndarray, "B N T S"]


@dataclasses.dataclass(frozen=True)
class Exact:
    """One attention problem; parts are computed when they are first read.

    Attributes:
      query, dout: [B, T, N, H]; key, value: [B, S, K, H]; float64.
      visible: [B or 1, N or 1, T, S], True takes part; None if all do.
      scale: of the logits.
      key_head: the key head that each query head reads.
      bias: added to the scaled products; None if there is none.
      value_head: the head of V that each query head reads; None: that of K.
      empty: what P is for a query that sees no key: "zero", or "mean", 1 / S for all
        keys. Its LSE is -inf.
    """

    query: Float[np.ndarray, "B T N H"]
    key: Float[np.ndarray, "B S K H"]
    value: Float[np.ndarray, "B S K H"]
    dout: Float[np.ndarray, "B T N H"]
    visible: Bool[np.ndarray, "#B #N T S"] | None
    scale: float
    key_head: tuple[int, ...]
    bias: Float[np.ndarray, "1 #N T S"] | None = None
    empty: Literal["zero", "mean"] = "zero"
    value_head: tuple[int, ...] | None = None

    def replaced(self, **changes: Any) -> "Exact":
        """The same with other fields; keeps what these do not touch."""
        other = dataclasses.replace(self, **changes)
        if changes.keys() <= {"visible", "scale", "bias", "empty"}:
            for name in ("products", "dprobability"):
                if name in self.__dict__:
                    other.__dict__[name] = self.__dict__[name]
        return other

    @functools.cached_property
    def products(self) -> PerPair:
        return self._rows(self.query) @ self._keys(self.key).swapaxes(2, 3)

    @functools.cached_property
    def logits(self) -> PerPair:
        x = self.scale * self.products
        if self.bias is not None:
            x = x + self.bias
        return x if self.visible is None else np.where(self.visible, x, -np.inf)

    @functools.cached_property
    def sees_none(self) -> Bool[np.ndarray, "B N T"]:
        """Queries that see no key."""
        return np.isneginf(self.logits.max(-1))

    @functools.cached_property
    def maximum(self) -> PerRow:
        """Of the logits of each row; 0 where there are none."""
        return np.where(self.sees_none, 0.0, self.logits.max(-1))

    @functools.cached_property
    def weights(self) -> PerPair:
        return np.exp(self.logits - self.maximum[..., None])

    @functools.cached_property
    def total(self) -> PerRow:
        return self.weights.sum(-1)

    @functools.cached_property
    def lse(self) -> PerRow:
        with np.errstate(divide="ignore"):
            return self.maximum + np.log(self.total)

    @functools.cached_property
    def probability(self) -> PerPair:
        p = self.weights / np.where(self.sees_none, 1.0, self.total)[..., None]
        if self.empty == "mean":
            p[self.sees_none] = 1 / p.shape[-1]
        return p

    @functools.cached_property
    def out(self) -> Float[np.ndarray, "B T N H"]:
        return self.weighted(self.probability)

    @functools.cached_property
    def dprobability(self) -> PerPair:
        return self._rows(self.dout) @ self._values.swapaxes(2, 3)

    @functools.cached_property
    def delta(self) -> PerRow:
        return np.einsum("bnts,bnts->bnt", self.probability, self.dprobability)

    @functools.cached_property
    def dlogits(self) -> PerPair:
        return self.with_delta(self.delta)

    @functools.cached_property
    def dquery(self) -> Float[np.ndarray, "B T N H"]:
        return self.query_gradient(self.dlogits)

    @functools.cached_property
    def dkey(self) -> Float[np.ndarray, "B S K H"]:
        return self.to_key_heads(self.key_gradient(self.dlogits))

    @functools.cached_property
    def dvalue(self) -> Float[np.ndarray, "B S K H"]:
        return self.to_value_heads(self.value_gradient(self.probability))

    @functools.cached_property
    def dbias(self) -> Float[np.ndarray, "1 N T S"]:
        return self.bias_gradient(self.dlogits)

    def weighted(self, p: PerPair) -> Float[np.ndarray, "B T N H"]:
        """p V."""
        return (p @ self._values).swapaxes(1, 2)

    def with_delta(self, delta: PerRow) -> PerPair:
        """P (dP - delta)."""
        return self.probability * (self.dprobability - delta[..., None])

    def query_gradient(self, dlogits: PerPair) -> Float[np.ndarray, "B T N H"]:
        """scale dS K."""
        return self.scale * (dlogits @ self._keys(self.key)).swapaxes(1, 2)

    def key_gradient(self, dlogits: PerPair) -> Float[np.ndarray, "B S N H"]:
        """scale dS^T Q, not yet summed over the query heads of a key head."""
        product = dlogits.swapaxes(2, 3) @ self._rows(self.query)
        return self.scale * product.swapaxes(1, 2)

    def value_gradient(self, p: PerPair) -> Float[np.ndarray, "B S N H"]:
        """p^T dO, not yet summed over the query heads of a key head."""
        return (p.swapaxes(2, 3) @ self._rows(self.dout)).swapaxes(1, 2)

    def bias_gradient(self, dlogits: PerPair) -> Float[np.ndarray, "1 N T S"]:
        """Of a bias that the batch shares, whether one was added or not."""
        return dlogits.sum(0, keepdims=True)

    def to_key_heads(
        self, x: Float[np.ndarray, "B S N H"]
    ) -> Float[np.ndarray, "B S K H"]:
        """Sums over the query heads that read each key head."""
        return self._to_heads(x, self.key_head)

    def to_value_heads(
        self, x: Float[np.ndarray, "B S N H"]
    ) -> Float[np.ndarray, "B S K H"]:
        """The same of V's."""
        return self._to_heads(x, self.value_head or self.key_head)

    def _to_heads(self, x, heads):
        summed = np.zeros(self.key.shape)
        for n, k in enumerate(heads):
            summed[:, :, k] += x[:, :, n]
        return summed

    def _rows(self, x):
        return x.swapaxes(1, 2)

    @property
    def _values(self):
        heads = self.value_head or self.key_head
        return self.value[:, :, list(heads)].swapaxes(1, 2)

    def _keys(self, x):
        return x[:, :, list(self.key_head)].swapaxes(1, 2)


def exact(problem: Problem) -> Exact:
    """The right attention of a problem, by parts."""
    s = problem.shape
    group = s.group_size
    inputs = (np.asarray(x).astype(np.float64) for x in problem.inputs)
    query, key, value, dout = inputs
    bias = problem.bias
    return Exact(
        query=query,
        key=key,
        value=value,
        dout=dout,
        visible=visible(problem.rules, s.query_length, s.key_length),
        scale=problem.scale,
        key_head=tuple(n // group for n in range(s.heads)),
        bias=None if bias is None else bias.astype(np.float64),
    )


def visible(rules: Mask, T: int, S: int) -> Bool[np.ndarray, "#B #N {T} {S}"] | None:
    """`Mask.materialise` in NumPy."""
    return rules.materialise(T, S, np)
