"""Rectified flow: the loss on noised images and the sampler that undoes the noise.

A straight path joins an image x0 (t = 0) to Gaussian noise e (t = 1),
`x_t = (1 - t) x0 + t e`, with velocity `v = e - x0` (Liu et al., "Flow Straight and
Fast", 2022). The network outputs the clean image, the loss compares velocities
(Li and He, "Back to Basics: Let Denoising Generative Models Denoise", 2025): large
pixel patches cannot be predicted as noise, and they can be as images.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

Predict = Callable[[Array, Array, Array], Array]

# The velocity of an x-prediction divides by t; below this t by a constant instead.
SMALLEST_T = 0.05


def from_pixels(pixels: UInt8[Array, "B R R C"]) -> Float[Array, "B R R C"]:
    """Pixels 0..255 as fp32 in [-1, 1]."""
    return pixels.astype(jnp.float32) / 127.5 - 1.0


def to_pixels(images: Float[Array, "B R R C"]) -> UInt8[Array, "B R R C"]:
    """Images in [-1, 1] as pixels, rounded to nearest, clipped to 0..255."""
    return jnp.clip(jnp.round((images + 1.0) * 127.5), 0.0, 255.0).astype(jnp.uint8)


def draw_times(
    key: Key[Array, ""], batch: int, mean: float = 0.0, std: float = 1.0
) -> Float[Array, " B"]:
    """Logit-normal times (Esser et al., 2024): t = sigmoid(mean + std z), z ~ N(0, 1).

    The caption acts where the image does not yet show what it will be. The larger an
    object, the more noise hides it: of 64 x 64 pixels the layout is plain to see up to
    t = 0.9, which N(0, 1) exceeds once in 70 draws.
    """
    return jax.nn.sigmoid(mean + std * jax.random.normal(key, (batch,)))


def drop_captions(
    tokens: Int[Array, "B L"], dropped: Bool[Array, " B"]
) -> Int[Array, "B L"]:
    """Empties the captions chosen; an empty caption is all padding (token 0)."""
    return jnp.where(dropped[:, None], 0, tokens)


def velocity(
    output: Float[Array, "B R R C"],
    noised: Float[Array, "B R R C"],
    t: Float[Array, " B"],
    prediction: Literal["x", "v"],
) -> Float[Array, "B R R C"]:
    """Velocity an output stands for: (x_t - x0) / max(t, 0.05), or the output."""
    if prediction == "v":
        return output
    return (noised - output) / jnp.maximum(t, SMALLEST_T)[:, None, None, None]


def flow_losses(
    predict: Predict,
    images: Float[Array, "B R R C"],
    tokens: Int[Array, "B L"],
    t: Float[Array, " B"],
    noise: Float[Array, "B R R C"],
    prediction: Literal["x", "v"],
) -> Float[Array, " B"]:
    """Mean squared error of the velocity for each image, in fp32.

    Args:
      predict: (noised images, t, tokens) -> network output of the images' shape.
      images: clean images in [-1, 1].
      tokens: captions; empty ones (all 0) train the unguided model.
      t: times in (0, 1).
      noise: standard Gaussian.
      prediction: what the network outputs.
    """
    time = t[:, None, None, None]
    noised = (1.0 - time) * images + time * noise
    output = predict(noised, t, tokens).astype(jnp.float32)
    error = velocity(output, noised, t, prediction) - (noise - images)
    return jnp.square(error).mean((1, 2, 3))


def sample(
    predict: Predict,
    tokens: Int[Array, "B L"],
    noise: Float[Array, "B R R C"],
    *,
    steps: int,
    guidance: float,
    prediction: Literal["x", "v"],
) -> Float[Array, "B R R C"]:
    """Euler steps of equal size from t = 1 to 0, with classifier-free guidance.

    Each step uses `v = v_empty + guidance (v_caption - v_empty)` (Ho and Salimans,
    2022). Deterministic: the result depends on weights, tokens and noise alone.
    """
    batch = tokens.shape[0]
    both = jnp.concatenate([tokens, jnp.zeros_like(tokens)])

    def euler_step(index: Array, image: Array) -> Array:
        t = jnp.full((2 * batch,), 1.0 - index / steps, jnp.float32)
        doubled = jnp.concatenate([image, image])
        output = predict(doubled, t, both).astype(jnp.float32)
        captioned, empty = jnp.split(velocity(output, doubled, t, prediction), 2)
        return image - (empty + guidance * (captioned - empty)) / steps

    return jax.lax.fori_loop(0, steps, euler_step, noise)
