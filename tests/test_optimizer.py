"""What a step of training does to weights, beside NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax

from train.optimizer import make_optimizer, make_schedule
from train.presets import PRESETS

LR, MOMENTUM, DECAY, CLIP = 0.25, 0.5, 0.125, 100.0


def test_sgd_has_momentum_and_decays_matrices_apart_from_the_gradient():
    """All numbers are few bits: FP32 rounds none of them."""
    tiny = PRESETS["tiny"]
    optimizer = dataclasses.replace(
        tiny.optimizer,
        **{"rule": "sgd", "beta1": MOMENTUM, "weight_decay": DECAY, "clip": CLIP},
        **{"warmup": 0, "decay_fraction": 0.0},
    )
    config = dataclasses.replace(tiny, optimizer=optimizer, lr=LR, steps=8)
    rule = make_optimizer(config)
    assert make_schedule(config)(3) == LR
    weights = {"matrix": np.ones((2, 2)), "row": np.ones(2)}
    params = {name: jnp.asarray(x, jnp.float32) for name, x in weights.items()}
    state, sums = rule.init(params), dict.fromkeys(weights, 0.0)
    for gradient in (1.0, -2.0, 4.0):
        gradients = {name: jnp.full_like(x, gradient) for name, x in params.items()}
        updates, state = rule.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        for name in weights:
            sums[name] = MOMENTUM * sums[name] + gradient
            decay = DECAY * weights[name] if name == "matrix" else 0.0
            weights[name] = weights[name] - LR * (sums[name] + decay)
    for name, expected in weights.items():
        np.testing.assert_array_equal(params[name], expected)


def test_gradients_are_clipped_by_their_global_norm():
    tiny = PRESETS["tiny"]
    optimizer = dataclasses.replace(
        tiny.optimizer, rule="sgd", clip=1.0, warmup=0, weight_decay=0.0
    )
    config = dataclasses.replace(tiny, optimizer=optimizer, lr=1.0)
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    gradients = {"a": jnp.full(3, 30.0), "b": jnp.full((2, 2), -40.0)}
    rule = make_optimizer(config)
    updates, _ = rule.update(gradients, rule.init(params), params)
    norm = (3 * 30.0**2 + 4 * 40.0**2) ** 0.5
    for name, gradient in gradients.items():
        np.testing.assert_allclose(updates[name], -gradient / norm, rtol=1e-6)
