"""The emulator where nothing is rounded, and that each rounding of a recipe is felt."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.formats import BF16, FP16, FP32, Rounding
from attn_jax.mask import Mask
from attn_jax.recipe import EXACT_FP32, EXACT_FP64, FLASH2, Recipe, Step
from tests.emulator_runs import SPLIT, B, H, N, S, T, normal, run, small_arguments

EXACT = {
    "one block": EXACT_FP32,
    "blocks that do not fit": dataclasses.replace(EXACT_FP32, **SPLIT),
    "powers of two": dataclasses.replace(
        EXACT_FP32,
        **SPLIT,
        kv_order="reverse",
        exponential="exp2",
        scale_at="exponent",
        rescale_threshold=8.0,
        probability_scale=4.0,
        gradient_scale_at="logits",
        dlogits_scale=2.0,
    ),
    "each step, mean": dataclasses.replace(
        EXACT_FP32,
        **SPLIT,
        normalise="each_step",
        dq_centre="mean",
        delta_source="p_dp",
    ),
    "row": dataclasses.replace(
        EXACT_FP32, **SPLIT, dq_centre="row", delta_source="o_f32", exponential="exp2"
    ),
    "keys": dataclasses.replace(
        EXACT_FP32, **SPLIT, dq_centre="keys", exponential="exp2", dlogits_scale=2.0
    ),
    "by query head": dataclasses.replace(
        EXACT_FP32, **SPLIT, group_gradient=Step(FP32), gradient_scale_at="logits"
    ),
    "scaled query": dataclasses.replace(
        EXACT_FP32,
        **SPLIT,
        scaled_query=Step(FP32),
        exponential="exp2",
        scale_at="exponent",
        gradient_scale_at="logits",
        dlogits_scale=2.0,
        dq_centre="mean",
    ),
    "softmax": dataclasses.replace(
        EXACT_FP32,
        block_kv=None,
        backward_block_kv=None,
        normalise="before_product",
        probability_from="softmax",
        delta_source="p_dp",
    ),
}


def masks():
    rng = np.random.default_rng(3)
    dense = rng.random((B, N, T, S)) < 0.6
    dense[:, :, 4] = False
    ids = np.sort(rng.integers(0, 3, (B, S)), axis=1).astype(np.int32)
    return {
        "none": Mask(),
        "causal": Mask(is_causal=True),
        "window": Mask(window=(2, 3)),
        "dense": Mask(dense=jnp.asarray(dense)),
        "lengths": Mask(
            query_lengths=jnp.array([5, 9], jnp.int32),
            key_value_lengths=jnp.array([0, 7], jnp.int32),
        ),
        "segments": Mask(
            query_segment_ids=jnp.asarray(ids[:, :T]),
            key_value_segment_ids=jnp.asarray(ids),
        ),
    }


# Each setting meets each mask once, and each mask each kind of further input.
# By default each setting meets a dense mask, under which all further inputs are, and
# another.
CASES = [
    pytest.param(
        *(setting, mask, ("plain", "sinks and bias", "everything")[(i + j) % 3]),
        marks=[pytest.mark.thorough] * ((i + j) % 6 == 3 and mask != "dense"),
    )
    for i, setting in enumerate(EXACT)
    for j, mask in enumerate(masks())
    if (i + j) % 3 == 0 or mask == "dense"
]


@pytest.mark.parametrize(("setting", "mask", "further"), CASES)
def test_without_roundings_it_is_the_reference(setting, mask, further):
    extra: dict = {}
    soft_cap = None
    if further != "plain":
        shape = (B, 1, T, S) if further == "everything" else (1, N, T, 1)
        extra = dict(bias=jnp.asarray(normal(5, *shape)), sinks=normal(6, N))
    if further == "everything":
        soft_cap = 2.5
    cotangents = normal(7, B, T, N, H), normal(8, B, N, T)
    args = small_arguments()
    given = masks()[mask]
    got = run(
        *args, *cotangents, extra | {"mask": given}, recipe=EXACT[setting],
        soft_cap=soft_cap,
    )  # fmt: skip

    def exact(q, k, v, extra):
        return reference.attention(q, k, v, mask=given, soft_cap=soft_cap, **extra)

    want, pull = jax.vjp(exact, *args, extra)
    want = want, pull(cotangents)
    # FP32 both: at most B T N terms of size about one to ten are summed, each off by a
    # few 2^-24 (the exponentials, the two products before them).
    bound = 4 * B * T * N * 2.0**-24
    chex.assert_trees_all_close(got, want, rtol=bound, atol=bound)


def test_fp64_carrier(x64):
    q, k, v = small_arguments(jnp.float64)
    dout, dlse = normal(7, B, T, N, H).astype(np.float64), np.zeros((B, N, T))
    recipe = dataclasses.replace(EXACT_FP64, block_kv=4, backward_block_kv=4)
    got = run(q, k, v, dout, dlse, {}, recipe=recipe)
    want = reference.golden(q, k, v, dout)
    (out, lse), grads = got
    assert out.dtype == lse.dtype == jnp.float64
    for a, b in zip((out, lse, *grads[:3]), want):
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * B * T * N * 2.0**-53)


# That each format is felt is in test_oracle_steps, too.
@pytest.mark.ci
@pytest.mark.parametrize(
    "what", ["knobs", pytest.param("formats", marks=pytest.mark.thorough)]
)
def test_each_step_named_in_a_recipe_changes_the_result(what):
    """No knob is silently ignored: a coarse format in any step shows somewhere."""
    # Many recipes, each used once: op by op, with all tiles alike, they share nearly
    # all of what is compiled.
    whole, tile = 8, 4
    args = [jnp.asarray(normal(i, 1, whole, 1, H), jnp.bfloat16) for i in range(4)]
    args += [jnp.asarray(normal(8, 1, 1, whole)), {}]
    base = dataclasses.replace(
        FLASH2, **dict.fromkeys(SPLIT, tile), dq_centre="none", exponential="exp"
    )
    with jax.disable_jit():
        want = jax.tree.leaves(run(*args, recipe=base))
    e5m2 = Step(dataclasses.replace(BF16, name="coarse", mantissa_bits=2))
    formats: list[dict] = [
        {f.name: e5m2}
        for f in dataclasses.fields(Recipe)
        if isinstance(getattr(base, f.name), Step) and not f.name.startswith("ring_")
    ]
    formats += [{"dq_dlogits": e5m2}, {"scaled_query": e5m2}]
    formats += [{"group_gradient": e5m2}]
    knobs: list[dict] = [
        {"row_sum_of": "rounded"},
        {"group_gradient": Step(FP32), "group_accumulator": e5m2},
        {"normalise": "each_step", "accumulator": Step(BF16)},
        {"kv_order": "reverse", "accumulator": Step(BF16)},
        {"rescale_threshold": 8.0, "probability": e5m2},
        {"probability_scale": 3.0},
        {"gradient_scale_at": "logits", "dlogits": e5m2},
        {"delta_source": "o_f32"},
        {"delta_source": "o_hi_lo"},
        {"delta_source": "o_hi_lo8"},
        {"delta_source": "p_dp"},
        {"dq_centre": "mean"},
        {"dq_centre": "row"},
        {"dq_centre": "keys"},
        {"dq_dlogits": Step(FP16)},
        {"probability": Step(BF16, Rounding.TOWARD_ZERO)},
        {"block_kv": whole, "accumulator": Step(BF16)},
        {"backward_block_q": whole, "dk_accumulator": e5m2},
        {"exponential": "exp2", "shifted": e5m2},
        {"exponential": "exp2_polynomial", "exp2_degree": 2},
        {"dot_accumulator": e5m2, "dot_chunk": 3},
    ]
    for change in knobs if what == "knobs" else formats:
        with jax.disable_jit():
            recipe = dataclasses.replace(base, **change)
            got = jax.tree.leaves(run(*args, recipe=recipe))
        assert any((a != b).any() for a, b in zip(got, want, strict=True)), change
