"""Normalisations and the activation, with gradients that keep their inputs only.

JAX's own gradients of these keep FP32 copies of what lies between, several times the
width of the input, and read it in more passes than are needed. Here what lies between
is made again from the input. The barrier before that keeps XLA from seeing that the
forward pass made it already, and from storing it all the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_EPS = 1e-6


@jax.custom_vjp
def modulated_norm(
    x: Float[Array, "B L d"], scale: Float[Array, "B 1 d"], shift: Float[Array, "B 1 d"]
) -> Float[Array, "B L d"]:
    """(1 + scale) n + shift, where n is x with zero mean and unit variance over the
    last axis (layer normalisation with nothing learned), in the format of x.

    With g the gradient of the result, h = (1 + scale) g and r = 1 / sqrt(variance):
    dx = r (h - mean(h) - n mean(h n)), dscale and dshift the sums of g n and of g.
    """
    return _modulated(x, scale, shift)[0]


def _modulated(x, scale, shift):
    mean = x.mean(-1, keepdims=True)
    root = jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + _EPS)
    return (x - mean) * root * (1.0 + scale) + shift, (x, scale, mean, root)


def _modulated_backward(kept, gradient):
    x, scale, mean, root = jax.lax.optimization_barrier(kept)
    normal, inner = (x - mean) * root, gradient * (1.0 + scale)
    along = (inner * normal).mean(-1, keepdims=True)
    dx = root * (inner - inner.mean(-1, keepdims=True) - normal * along)
    dscale, dshift = (y.sum(1, keepdims=True) for y in (gradient * normal, gradient))
    return dx, dscale, dshift


modulated_norm.defvjp(_modulated, _modulated_backward)


@jax.custom_vjp
def rms_norm(
    x: Float[Array, "B L N H"], scale: Float[Array, " H"]
) -> Float[Array, "B L N H"]:
    """Unit root mean square over the last axis, times a learned scale, at least in
    FP32.

    With g the gradient of the result, h = scale g, r = 1 / sqrt(mean square) and
    n = r x: dx = r (h - n mean(h n)), dscale the sum of g n.
    """
    return _rms(x, scale)[0]


def _rms(x, scale):
    wide = _wide(x)
    root = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + _EPS)
    return wide * root * _wide(scale), (x, scale, root)


def _rms_backward(kept, gradient):
    x, scale, root = jax.lax.optimization_barrier(kept)
    normal, inner = _wide(x) * root, gradient * _wide(scale)
    dx = root * (inner - normal * (inner * normal).mean(-1, keepdims=True))
    dscale = (gradient * normal).sum(range(x.ndim - 1))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(_rms, _rms_backward)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), and JAX's gradient of it."""
    return jax.nn.gelu(x, approximate=True)


def _gelu_backward(x, gradient):
    x = jax.lax.optimization_barrier(x)
    _, pullback = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)
    return pullback(gradient)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)
