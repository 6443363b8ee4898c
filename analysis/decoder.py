"""A decoder like Llama's, in FP64 but for its attention, with any attention in it.

Of tokens t_1 ... t_T, with x = E[t] and for each layer

    n = x / sqrt(mean(x^2) + 1e-5)
    q = rope(n W_q)      k = rope(n W_k + b_k)      v = n W_v + s b_v
    x = x + attention(q, k, v) W_o
    n = x / sqrt(mean(x^2) + 1e-5)
    x = x + (silu(n W_g) n W_u) W_d

and at the end the mean over positions of the cross-entropy of norm(x) W_h with the next
token. b_k and b_v are 0 and s is 1 but for what a `Setting` says. Weights are random:
N(0, 1 / rows of the matrix), those that write to x by 1 / sqrt(2 layers) smaller, so
that x keeps its size at every depth. Layers are one `lax.scan`: 126 compile like 2.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

# Llama 3's.
_ROPE_BASE = 500_000.0
_NORM_EPSILON = 1e-5
# Of a key head these have a bias: the slowest of `rope`, so that it stays a mean.
_BIASED_PAIRS = 2

Attention = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; its width is heads times head_dim."""

    layers: int
    length: int
    heads: int
    head_dim: int
    vocabulary: int = 256

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class Setting:
    """What makes attention delicate.

    Attributes:
      sharpness: of W_q, a factor.
      key_bias: its size, in the four slowest columns of each head, signs at random.
      value_bias: standard deviation of that of each column.
      documents: runs of equal length whose values have the bias with one sign and the
        other in turns, so that outputs of parts cancel in that of the whole.
    """

    sharpness: float = 1.0
    key_bias: float = 0.0
    value_bias: float = 0.0
    documents: int = 1


class Layers(NamedTuple):
    """Weights of attention, of all layers: what gradients are taken of."""

    query: Float[Array | np.ndarray, "L C D"]
    key: Float[Array | np.ndarray, "L C D"]
    value: Float[Array | np.ndarray, "L C D"]
    out: Float[Array | np.ndarray, "L D C"]


class Rest(NamedTuple):
    """Everything else; no gradients of it are taken."""

    gate: Float[Array | np.ndarray, "L C F"]
    up: Float[Array | np.ndarray, "L C F"]
    down: Float[Array | np.ndarray, "L F C"]
    key_bias: Float[Array | np.ndarray, "L N H"]
    value_bias: Float[Array | np.ndarray, "L N H"]
    value_sign: Float[Array | np.ndarray, " T"]
    head: Float[Array | np.ndarray, "C M"]
    following: Int[Array | np.ndarray, " T"]


class Decoder(NamedTuple):
    """One draw: the embedded tokens, the weights of attention, and the rest."""

    embedded: Float[Array | np.ndarray, "T C"]
    layers: Layers
    rest: Rest


def draw(shape: Shape, setting: Setting, seed: int) -> Decoder:
    """Random tokens and weights, FP32 numbers as NumPy arrays.

    Draws of the same seed differ between settings in what the setting changes alone.
    """
    numbers = np.random.default_rng(seed)
    L, C, T = shape.layers, shape.width, shape.length
    heads = L, shape.heads, shape.head_dim
    F = 8 * C // 3  # Llama's
    written = 1 / np.sqrt(2 * L)

    def matrix(rows: int, columns: int, factor: float = 1.0) -> np.ndarray:
        plain = numbers.standard_normal((L, rows, columns), np.float32)
        return plain * np.float32(factor / np.sqrt(rows))

    layers = Layers(
        matrix(C, C, setting.sharpness),
        *(matrix(C, C), matrix(C, C), matrix(C, C, written)),
    )
    gate, up, down = matrix(C, F), matrix(C, F), matrix(F, C, written)
    signs = np.sign(numbers.standard_normal(heads, np.float32))
    # Pairs that `rope` turns are half a head apart.
    pair = np.arange(shape.head_dim) % (shape.head_dim // 2)
    slow = pair >= shape.head_dim // 2 - _BIASED_PAIRS
    value_bias = numbers.standard_normal(heads, np.float32) * setting.value_bias
    table = numbers.standard_normal((shape.vocabulary, C), np.float32)
    head = numbers.standard_normal((C, shape.vocabulary), np.float32)
    tokens = numbers.integers(0, shape.vocabulary, T + 1)
    document = np.arange(T) * setting.documents // T
    rest = Rest(
        *(gate, up, down),
        key_bias=np.where(slow, setting.key_bias * signs, 0).astype(np.float32),
        value_bias=value_bias.astype(np.float32),
        value_sign=(1 - 2 * (document % 2)).astype(np.float32),
        head=head / np.float32(np.sqrt(C)),
        following=tokens[1:],
    )
    return Decoder(table[tokens[:-1]], layers, rest)


def loss(
    embedded: Float[Array, "T C"], layers: Layers, rest: Rest, attention: Attention
) -> Float[Array, ""]:
    """The loss, in the type of its arrays.

    `attention` maps q, k, v [1, T, N, H] to an output of the same shape; whatever is
    rounded is rounded there.
    """
    T, C = embedded.shape
    N, H = rest.key_bias.shape[1:]
    cosine, sine = _turns(T, H)

    def rope(x: Array) -> Array:
        one, other = jnp.split(x, 2, axis=-1)
        turned = one * cosine - other * sine, one * sine + other * cosine
        return jnp.concatenate(turned, axis=-1)

    def layer(x, of):
        weights, rest = of
        n = _normed(x)
        q, k, v = ((n @ w).reshape(1, T, N, H) for w in weights[:3])
        v = v + rest.value_sign[:, None, None] * rest.value_bias
        out = attention(rope(q), rope(k + rest.key_bias), v)
        x = x + out.reshape(T, C) @ weights.out
        n = _normed(x)
        return x + (jax.nn.silu(n @ rest.gate) * (n @ rest.up)) @ rest.down, None

    L = layers.query.shape[0]
    shared = rest._replace(value_sign=jnp.broadcast_to(rest.value_sign, (L, T)))
    x, _ = lax.scan(
        layer, embedded, (layers, shared._replace(head=None, following=None))
    )
    logits = _normed(x) @ rest.head
    scores = jnp.take_along_axis(
        jax.nn.log_softmax(logits), rest.following[:, None], axis=1
    )
    return -scores.mean()


def _normed(x: Array) -> Array:
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + _NORM_EPSILON)


def _turns(length: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of each position's angles, [T, 1, H / 2]."""
    rates = _ROPE_BASE ** (-np.arange(head_dim // 2) / (head_dim // 2))
    angles = np.arange(length)[:, None, None] * rates
    return np.cos(angles), np.sin(angles)
