"""Rectified flow: path, loss and sampler against cases solved by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.diffusion import (
    draw_times,
    drop_captions,
    flow_losses,
    from_pixels,
    sample,
    to_pixels,
    velocity,
)

SHAPE = (3, 4, 4, 3)


def gaussian(number: int):
    return jax.random.normal(jax.random.key(number), SHAPE)


def test_pixels_survive_the_round_trip():
    pixels = jnp.arange(256, dtype=jnp.uint8).reshape(1, 16, 16, 1).repeat(3, -1)
    np.testing.assert_array_equal(to_pixels(from_pixels(pixels)), pixels)
    assert from_pixels(pixels).min() == -1 and from_pixels(pixels).max() == 1
    beyond = jnp.full((1, 1, 1, 3), 1.7)
    np.testing.assert_array_equal(to_pixels(beyond), 255)


@pytest.mark.parametrize("prediction", ["x", "v"])
def test_a_perfect_network_has_no_loss(prediction):
    images, noise, t = gaussian(0), gaussian(1), jnp.array([0.1, 0.5, 0.9])
    answer = images if prediction == "x" else noise - images
    losses = flow_losses(
        lambda *_: answer, images, jnp.zeros((3, 2), int), t, noise, prediction
    )
    # (x_t - x0) / t: fp32 rounding 2^-24 of values up to 5, over t = 0.1, squared.
    assert losses.shape == (3,)
    assert float(losses.max()) < (5 * 2**-22 / 0.1) ** 2


def test_losses_of_a_constant_network_are_the_formula():
    images, noise, t = gaussian(2), gaussian(3), jnp.array([0.02, 0.4, 0.8])
    losses = flow_losses(
        lambda *_: jnp.zeros(SHAPE), images, jnp.zeros((3, 2), int), t, noise, "x"
    )
    x, e = np.asarray(images, np.float64), np.asarray(noise, np.float64)
    time = np.asarray(t, np.float64)[:, None, None, None]
    predicted = ((1 - time) * x + time * e) / np.maximum(time, 0.05)
    expected = np.square(predicted - (e - x)).mean((1, 2, 3))
    # fp32 sums of 48 terms.
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_network_sees_the_noised_image():
    images, noise, t = gaussian(4), gaussian(5), jnp.array([0.0, 0.5, 1.0])
    seen = []

    def predict(noised, time, tokens):
        seen.append((noised, time, tokens))
        return noised

    tokens = jnp.ones((3, 2), int)
    flow_losses(predict, images, tokens, t, noise, "x")
    noised, time, caption = seen[0]
    np.testing.assert_array_equal(noised[0], images[0])
    np.testing.assert_array_equal(noised[2], noise[2])
    np.testing.assert_array_equal(time, t)
    np.testing.assert_array_equal(caption, tokens)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_sampler_ends_where_guidance_points(guidance):
    """With constant predictions the path is straight, so Euler steps are exact."""
    with_caption, without = gaussian(6), gaussian(7)

    def predict(noised, t, tokens):
        captioned = (tokens[:, 0] > 0)[:, None, None, None]
        both = jnp.concatenate([with_caption, with_caption])
        return jnp.where(captioned, both, jnp.concatenate([without, without]))

    tokens = jnp.ones((3, 2), int)
    images = sample(
        predict, tokens, gaussian(8), steps=10, guidance=guidance, prediction="x"
    )
    expected = without + guidance * (with_caption - without)
    # Ten fp32 steps on values up to about 20, errors divided by t >= 0.1.
    np.testing.assert_allclose(images, expected, atol=20 * 10 * 10 * 2**-23)


def test_velocity_divides_by_no_less_than_a_twentieth():
    noised, output = gaussian(0), gaussian(1)
    at = velocity(output, noised, jnp.array([0.01, 0.05, 0.1]), "x")
    np.testing.assert_allclose(at[0], (noised - output)[0] / 0.05, rtol=1e-6)
    np.testing.assert_allclose(at[2], (noised - output)[2] / 0.1, rtol=1e-6)


def test_times_are_logit_normal():
    count = 20_000
    t = np.asarray(draw_times(jax.random.key(0), count))
    assert 0 < t.min() and t.max() < 1
    # P(t < sigmoid(-1)) = Phi(-1) = 0.1587; four standard deviations of a share.
    share = (t < 1 / (1 + np.e)).mean()
    assert abs(share - 0.1587) < 4 * (0.1587 * 0.8413 / count) ** 0.5
    # The same quantile of logit(t) ~ N(1.2, 1.2**2) lies at logit(t) = 0.
    shifted = np.asarray(draw_times(jax.random.key(1), count, 1.2, 1.2))
    share = (shifted < 0.5).mean()
    assert abs(share - 0.1587) < 4 * (0.1587 * 0.8413 / count) ** 0.5


def test_dropped_captions_are_all_padding():
    tokens = jnp.array([[1, 2], [3, 4]])
    dropped = drop_captions(tokens, jnp.array([True, False]))
    np.testing.assert_array_equal(dropped, [[0, 0], [3, 4]])
