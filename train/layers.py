"""Normalisations and the activation, with gradients that keep their inputs only.

JAX's own gradients of these keep FP32 copies of what lies between, several times the
width of the input, and read it in more passes than are needed. Here what lies between
is made again from the input. The barrier before that keeps XLA from seeing that the
forward pass made it already, and from storing it all the same.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

EPS = 1e-6
_ROOT, _CUBIC = (2.0 / math.pi) ** 0.5, 0.044715  # of the activation


def modulated_norm(
    x: Float[Array, "B L d"],
    scale: Float[Array, "B 1 d"],
    shift: Float[Array, "B 1 d"],
    dtype: DTypeLike,
) -> Float[Array, "B L d"]:
    """(1 + scale) n + shift, where n is x with zero mean and unit variance over the
    last axis (layer normalisation with nothing learned), rounded to `dtype` from the
    format of x.

    With g the gradient of the result, h = (1 + scale) g and r = 1 / sqrt(variance):
    dx = r (h - mean(h) - n mean(h n)), dscale and dshift the sums of g n and of g.
    """
    return _modulated_norm(x, scale, shift, dtype)


def _modulated(x, scale, shift, dtype):
    # One pass over x for both sums. In FP32 this costs the variance (mean / spread)^2
    # units roundoff: less than the result's rounding to 16 bits up to a mean of 100
    # times the spread.
    mean, square = (y.mean(-1, keepdims=True) for y in (x, jnp.square(x)))
    root = jax.lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0.0) + EPS)
    result = (x - mean) * root * (1.0 + scale) + shift
    return result.astype(dtype), (x, scale, mean, root)


def _modulated_backward(dtype, kept, gradient):
    # The gradient behind the barrier, too: if three products make it, all are added by
    # the products, and no pass here reads two of them.
    x, scale, mean, root, gradient = jax.lax.optimization_barrier((*kept, gradient))
    gradient = gradient.astype(x.dtype)
    normal, inner = (x - mean) * root, gradient * (1.0 + scale)
    # Sums of the same pass over x and the gradient.
    along, offset = (y.mean(-1, keepdims=True) for y in (inner * normal, inner))
    dx = root * (inner - offset - normal * along)
    return dx, (gradient * normal).sum(1, keepdims=True), gradient.sum(1, keepdims=True)


_modulated_norm = jax.custom_vjp(lambda *x: _modulated(*x)[0], nondiff_argnums=(3,))
_modulated_norm.defvjp(_modulated, _modulated_backward)


@jax.custom_vjp
def gated_sum(
    x: Float[Array, "B L d"], gate: Float[Array, "B 1 d"], update: Float[Array, "B L d"]
) -> Float[Array, "B L d"]:
    """x + gate update, in the format of x.

    With g the gradient of the result: dupdate = gate g, dgate the sum of g update.
    """
    return x + gate * update.astype(x.dtype)


def _gated_sum_backward(kept, gradient):
    gate, update = kept
    # One pass makes both gradients; without the barrier XLA takes two.
    g = jax.lax.optimization_barrier(gradient)
    dgate = (g * update.astype(g.dtype)).sum(1, keepdims=True)
    return gradient, dgate, (gate * g).astype(update.dtype)


gated_sum.defvjp(
    lambda x, gate, update: (gated_sum(x, gate, update), (gate, update)),
    _gated_sum_backward,
)


class Stream(NamedTuple):
    """The residual stream: x + gate update, or x. The sum is left to the norm that
    comes next, which reads it anyway."""

    x: Float[Array, "B L d"]
    gate: Float[Array, "B 1 d"] | None = None
    update: Float[Array, "B L d"] | None = None

    def summed(self) -> Float[Array, "B L d"]:
        """The sum itself."""
        if self.gate is None or self.update is None:
            return self.x
        return gated_sum(self.x, self.gate, self.update)


def gated_norm(
    stream: Stream,
    scale: Float[Array, "B 1 d"],
    shift: Float[Array, "B 1 d"],
    dtype: DTypeLike,
) -> tuple[Float[Array, "B L d"], Float[Array, "B L d"]]:
    """(the stream's sum, `modulated_norm` of it)"""
    x = stream.summed()
    return x, modulated_norm(x, scale, shift, dtype)


def rms_norm(
    x: Float[Array, "B L N H"], scale: Float[Array, " H"], dtype: DTypeLike
) -> Float[Array, "B L N H"]:
    """Unit root mean square over the last axis, times a learned scale, at least in
    FP32, rounded to `dtype`.

    With g the gradient of the result, h = scale g, r = 1 / sqrt(mean square) and
    n = r x: dx = r (h - n mean(h n)), dscale the sum of g n.
    """
    return _rms_norm(x, scale, dtype)


def _rms(x, scale, dtype):
    wide = _wide(x)
    root = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPS)
    return (wide * root * _wide(scale)).astype(dtype), (x, scale)


def _rms_backward(dtype, kept, gradient):
    x, scale = jax.lax.optimization_barrier(kept)
    gradient = _wide(gradient)
    wide, inner = _wide(x), gradient * _wide(scale)
    square, along = (
        y.mean(-1, keepdims=True) for y in (jnp.square(wide), inner * wide)
    )
    root = jax.lax.rsqrt(square + EPS)
    dx = root * (inner - wide * (jnp.square(root) * along))
    dscale = (gradient * (wide * root)).sum(range(x.ndim - 1))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


_rms_norm = jax.custom_vjp(lambda *x: _rms(*x)[0], nondiff_argnums=(2,))
_rms_norm.defvjp(_rms, _rms_backward)


class Norms(NamedTuple):
    """The norms of a model: those of this module, or kernels for them."""

    gated_norm: Callable[..., tuple[Array, Array]] = gated_norm
    rms_norm: Callable[..., Array] = rms_norm


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """x s(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3) and s(y) = 1 / (1 + exp(-y)), which
    is x / 2 (1 + tanh(u)): computed at least in FP32, rounded to the format of x.

    The gradient is s + 2 x s (1 - s) sqrt(2 / pi) (1 + 3 * 0.044715 x^2), s = s(2 u).
    """
    wide = _wide(x)
    return (wide * _gate(wide)).astype(x.dtype)


def _gate(wide: Array) -> Array:
    return jax.nn.sigmoid(2.0 * _ROOT * (wide + _CUBIC * wide**3))


def _gelu_backward(x, gradient):
    wide = _wide(jax.lax.optimization_barrier(x))
    gate = _gate(wide)
    inner = 2.0 * _ROOT * (1.0 + 3.0 * _CUBIC * jnp.square(wide))
    slope = gate + wide * gate * (1.0 - gate) * inner
    return ((gradient * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)
