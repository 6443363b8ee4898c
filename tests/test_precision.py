"""Precision policies: formats of every part, loss scaling, skipped updates."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.optimizer import make_optimizer
from train.precision import (
    LossScale,
    make_policy,
    start_loss_scale,
    update_loss_scale,
)
from train.presets import PRESETS
from train.state import TrainState, init_state, make_parts
from train.step import make_train_step

# The same step is compiled for several tests.
pytestmark = pytest.mark.usefixtures("shared_programs")
MODEL = dataclasses.replace(PRESETS["tiny"].model, width=64, heads=1, depth=1)
CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    model=MODEL,
    attention_inputs="compute",
    optimizer=dataclasses.replace(PRESETS["tiny"].optimizer, warmup=0),
)


def plain_attention(query, key, value):
    value = value.astype(query.dtype)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, -1), value)


def batch():
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    return {"image": jnp.asarray(images), "tokens": jnp.ones((4, 12), jnp.int32)}


def step_and_state(policy_of=lambda policy: policy, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    parts = make_parts(config, policy_of(make_policy(config)), vocab_size=8)
    optimizer = make_optimizer(config)
    step = make_train_step(parts, optimizer, plain_attention)
    return jax.jit(step), init_state(parts, optimizer, config.seed)


@pytest.mark.parametrize(
    ("precision", "params", "compute", "attention", "matmul"),
    [
        pytest.param(
            *("fp32", "float32", "float32", "float32", "highest"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *("tf32", "float32", "float32", "float32", "tensorfloat32"),
            marks=pytest.mark.thorough,
        ),
        ("bf16", "float32", "bfloat16", "bfloat16", "highest"),
        ("fp16", "float32", "float16", "float16", "highest"),
        pytest.param(
            *("bf16_pure", "bfloat16", "bfloat16", "bfloat16", "highest"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_policy_formats_reach_the_state_and_the_program(
    precision, params, compute, attention, matmul
):
    policy = make_policy(dataclasses.replace(CONFIG, precision=precision))
    assert np.dtype(policy.attention).name == attention
    assert policy.matmul == matmul
    step, state = step_and_state(precision=precision)
    formats = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
    averages = {leaf.dtype.name for leaf in jax.tree.leaves(state.average)}
    assert formats == {params} and averages == {"float32"}
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[compute]
    program = step.lower(state, batch()).as_text()
    # The feed-forward product: 4 x 28 tokens as rows, width 64 to 256.
    assert f"tensor<112x64x{short}>, tensor<64x256x{short}>" in program
    after, metrics = step(state, batch())
    assert bool(metrics["ok"]) and np.isfinite(float(metrics["loss"]))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after.params)} == {params}


def test_first_weights_are_the_same_in_every_precision():
    first = step_and_state(precision="bf16")[1].params
    narrow = step_and_state(precision="bf16_pure")[1].params
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), first)
    assert jax.tree.all(jax.tree.map(np.array_equal, rounded, narrow))


def test_every_preset_feeds_attention_16_bits():
    for name, config in PRESETS.items():
        assert np.dtype(make_policy(config).attention).itemsize == 2, name


def test_loss_scale_halves_and_doubles():
    policy = make_policy(dataclasses.replace(CONFIG, precision="fp16"))
    state = start_loss_scale(policy)
    assert float(state.scale) == 2**15
    state = update_loss_scale(state, jnp.array(False))
    assert float(state.scale) == 2**14
    state = update_loss_scale(state._replace(clean_steps=1999), jnp.array(True))
    assert float(state.scale) == 2**15 and int(state.clean_steps) == 0
    smallest = update_loss_scale(
        LossScale(jnp.float32(1), jnp.int32(0)), jnp.array(False)
    )
    assert float(smallest.scale) == 1


def overflowing(state: TrainState) -> TrainState:
    """A scale at which the gradients of any fp16 model are infinite."""
    return state._replace(loss_scale=LossScale(jnp.float32(2.0**120), jnp.int32(7)))


def test_overflow_leaves_weights_moments_average_and_count_alone():
    step, state = step_and_state(precision="fp16")
    state, _ = step(state, batch())
    after, metrics = step(overflowing(state), batch())
    assert not bool(metrics["applied"]) and bool(metrics["ok"])
    kept = (state.params, state.average, state.optimizer)
    got = (after.params, after.average, after.optimizer)
    chex.assert_trees_all_equal(kept, got)
    assert float(after.loss_scale.scale) < 2.0**120
    assert int(after.step) == int(state.step) + 1
    later, metrics = step(
        after._replace(loss_scale=LossScale(jnp.float32(2.0**10), jnp.int32(0))),
        batch(),
    )
    assert bool(metrics["applied"])
    assert not np.array_equal(
        later.params["embedding"], after.params["embedding"]
    ) or not np.array_equal(
        later.params["patch_out"]["kernel"], after.params["patch_out"]["kernel"]
    )


def test_overflow_with_a_static_scale_ends_the_run():
    settings = dataclasses.replace(CONFIG.optimizer, static_loss_scale=2.0**10)
    step, state = step_and_state(precision="fp16", optimizer=settings)
    assert float(state.loss_scale.scale) == 2**10
    _, metrics = step(overflowing(state), batch())
    assert not bool(metrics["ok"])


def test_a_power_of_two_scale_changes_no_bit_in_fp32():
    """Scaling is undone before clipping and Adam, whatever it is."""
    results = []
    for scale in (None, 2.0**12):
        step, state = step_and_state(
            lambda policy, scale=scale: dataclasses.replace(policy, loss_scale=scale)
        )
        for _ in range(3):
            state, metrics = step(state, batch())
        results.append((state.params, metrics["loss"], metrics["grad_norm"]))
    chex.assert_trees_all_equal(*results)
