"""The transformer: its size, its layout, what it must not contain."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train.config import Config, image_tokens
from train.model import patchify, unpatchify
from train.precision import make_policy
from train.presets import PRESETS
from train.state import ModelParts, make_parts

MODEL = dataclasses.replace(PRESETS["tiny"].model, width=64, heads=1, depth=2)
CONFIG = dataclasses.replace(PRESETS["tiny"], model=MODEL)
VOCAB = 40


def plain_attention(query, key, value):
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, -1), value)


def parts_of(config: Config) -> ModelParts:
    return make_parts(config, make_policy(config), VOCAB)


def weights(parts: ModelParts, *, perturbed: bool):
    params = nnx.to_pure_dict(nnx.state(parts.build(jax.random.key(0))))
    if not perturbed:
        return params
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf + 0.05 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def inputs(batch: int = 2):
    images = jax.random.normal(jax.random.key(2), (batch, 32, 32, 3))
    tokens = jnp.zeros((batch, MODEL.text_length), jnp.int32).at[:, :3].set(5)
    return images, jnp.linspace(0.2, 0.8, batch), tokens


@pytest.mark.parametrize(
    ("name", "tokens", "millions"),
    [
        ("tiny", 28, 1.0),
        ("small", 320, 15.6),
        ("small-long", 1088, 15.6),
        ("base", 1088, 90),
        ("base-long", 4160, 90),
        ("large", 1152, 458),
    ],
)
def test_presets_have_the_stated_length_and_size(name, tokens, millions):
    config = PRESETS[name]
    assert config.model.text_length + image_tokens(config) == tokens
    parts = parts_of(config)
    abstract = nnx.eval_shape(lambda: parts.build(jax.random.key(0)))
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))]
    # The table counts 12 width^2 a block; modulation, patches and text come on top.
    assert millions * 1e6 * 0.97 < sum(sizes) < millions * 1e6 * 1.25
    blocks = 12 * config.model.width**2 * config.model.depth
    assert sum(sizes) > blocks


def test_attention_has_no_bias_and_gradient_no_scatter():
    parts = parts_of(CONFIG)
    params = weights(parts, perturbed=True)
    for layer in ("query", "key", "value", "out"):
        assert set(params["blocks"][0][layer]) == {"kernel"}
    images, t, tokens = inputs()

    def loss(params):
        return parts.merge(params)(images, t, tokens, plain_attention).sum()

    program = jax.jit(jax.grad(loss)).lower(params).as_text()
    assert "dot_general" in program
    assert "scatter" not in program


def test_starts_at_zero_and_gates_closed():
    parts = parts_of(CONFIG)
    model = parts.merge(weights(parts, perturbed=False))
    images, t, tokens = inputs()
    output = model(images, t, tokens, plain_attention)
    assert output.shape == images.shape
    np.testing.assert_array_equal(output, 0)


def test_calls_attention_once_a_block_over_text_and_image():
    parts = parts_of(CONFIG)
    model = parts.merge(weights(parts, perturbed=True))
    shapes = []

    def attention(query, key, value):
        shapes.append((query.shape, key.shape, value.shape))
        return plain_attention(query, key, value)

    model(*inputs(), attention)
    assert shapes == [((2, 28, 1, 64),) * 3] * 2


def test_output_depends_on_caption_time_and_every_patch():
    parts = parts_of(CONFIG)
    model = parts.merge(weights(parts, perturbed=True))
    images, t, tokens = inputs()
    base = model(images, t, tokens, plain_attention)
    assert not np.array_equal(base, model(images, t / 2, tokens, plain_attention))
    # One word, seen by every image token through attention alone.
    changed = model(images, t, tokens.at[:, 0].set(6), plain_attention)
    assert (np.asarray(base != changed).mean((1, 2, 3)) > 0.9).all()
    # The last patch reaches the first: attention is not causal.
    last = model(images.at[:, -1, -1].add(1.0), t, tokens, plain_attention)
    assert not np.array_equal(base[:, 0, 0], last[:, 0, 0])


def test_without_qk_norm_queries_and_keys_are_the_bare_projections():
    model = dataclasses.replace(MODEL, qk_norm=False)
    parts = parts_of(dataclasses.replace(CONFIG, model=model))
    params = weights(parts, perturbed=False)
    assert not {"query_scale", "key_scale"} & params["blocks"][0].keys()
    seen = []

    def attention(query, key, value):
        seen.append((query, key))
        return plain_attention(query, key, value)

    parts.merge(params)(*inputs(), attention)
    for block in params["blocks"].values():
        block["query"]["kernel"] *= 4
    parts.merge(params)(*inputs(), attention)
    # Linear in the weights: a power of two goes through every rounding.
    np.testing.assert_array_equal(seen[2][0], 4 * seen[0][0])
    np.testing.assert_array_equal(seen[2][1], seen[0][1])


def test_weights_have_the_names_of_earlier_checkpoints():
    """A checkpoint from before `qk_norm` was an option loads into the default."""
    block = weights(parts_of(CONFIG), perturbed=False)["blocks"][0]
    linear = {"query", "key", "value", "out", "up", "down"}
    assert block.keys() == linear | {"query_scale", "key_scale", "modulation"}


def test_queries_and_keys_are_normalised():
    """Any scale of the projections leaves logits at or below sqrt(head dim)."""
    parts = parts_of(CONFIG)
    params = weights(parts, perturbed=False)
    for block in params["blocks"].values():
        block["query"]["kernel"] *= 1e4
    seen = []

    def attention(query, key, value):
        seen.append(jnp.square(query).mean(-1))
        return plain_attention(query, key, value)

    parts.merge(params)(*inputs(), attention)
    # 1e-4: epsilon of the norm (1e-6) and a few fp32 roundings, far below.
    np.testing.assert_allclose(np.stack(seen), 1.0, atol=1e-4)


def test_patches_are_cut_row_by_row_and_put_back():
    images = jnp.arange(2 * 8 * 8 * 3, dtype=jnp.float32).reshape(2, 8, 8, 3)
    patches = patchify(images, 4)
    assert patches.shape == (2, 4, 48)
    np.testing.assert_array_equal(patches[:, 1], images[:, :4, 4:].reshape(2, 48))
    np.testing.assert_array_equal(patches[:, 2], images[:, 4:, :4].reshape(2, 48))
    np.testing.assert_array_equal(unpatchify(patches, 4), images)


def test_recomputation_changes_no_gradient():
    recomputed = dataclasses.replace(
        CONFIG, model=dataclasses.replace(MODEL, remat=True)
    )
    arguments = inputs()
    gradients = []
    for config in (CONFIG, recomputed):
        parts = parts_of(config)

        def loss(params, parts=parts):
            output = parts.merge(params)(*arguments, plain_attention)
            return jnp.square(output).mean()

        gradients.append(jax.jit(jax.grad(loss))(weights(parts, perturbed=True)))
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        # Same operations, possibly fused otherwise: a few fp32 roundings (2^-24
        # each) of sums with up to 2 x 28 x 256 terms; 1e-4 of the largest element.
        np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(one).max())
