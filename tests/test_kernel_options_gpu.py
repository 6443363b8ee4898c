"""Options of Hopper's kernels on a Hopper GPU: accuracy, the recipe, the same bits."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import emulator, reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.formats import BF16, FP16
from attn_jax.kernels.attention import attention, declared_recipe
from attn_jax.kernels.hopper_softmax import P_SCALE
from attn_jax.kernels.tuning import Backward
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX
from attn_jax.recipe_schema import Step
from tests.test_kernels_gpu import compiled, run

pytestmark = pytest.mark.gpu(capability="9.0")

SHAPES = [Shape(2, 1000, 1000, 8, 2, 64), Shape(1, 1337, 1337, 4, 4, 128)]
KEYS = dict(dq_centre="keys", dq_dlogits=Step(FP16))
FINE = dict(probability=Step(FP16), probability_scale=P_SCALE)
NO_CURES = dict(dq_centre="none", delta_source="o")
# Changes of ATTN_JAX, the design where both have them, and units of dQ on families
# whose mean key is far from zero; None: more than the project's bar.
OPTIONS: dict[str, tuple[dict[str, Any], Backward | None, float | None]] = {
    "mean": ({}, None, 1.7),
    "mean FP16": (dict(dq_dlogits=Step(FP16)), None, 1.2),
    "keys": (dict(dq_centre="keys"), None, 1.7),
    "keys FP16": (KEYS, None, 1.2),
    "row": (dict(dq_centre="row"), None, 1.7),
    "row FP16": (dict(dq_centre="row", dq_dlogits=Step(FP16)), None, 1.2),
    "row p_dp": (dict(dq_centre="row", delta_source="p_dp"), None, 1.7),
    "keys p_dp": (dict(dq_centre="keys", delta_source="p_dp"), None, 1.7),
    "no cures": (NO_CURES, "two_kernels", None),
    "one pass, no cures": (NO_CURES, "fused", None),
    "P in FP16": (FINE, None, 1.7),
    "P in FP16, FP16 dS": (FINE | KEYS, None, 1.2),
    "lazy": (dict(rescale_threshold=8.0), None, 1.7),
    "repeated": (dict(repeated_max_factor=2.0), None, 1.7),
}


def kernels(name: str, shape: Shape, mask: Mask):
    changes, backward, _ = OPTIONS[name]
    recipe = dataclasses.replace(ATTN_JAX, **changes)
    options: dict[str, Any] = {"recipe": recipe, "backward": backward}
    declared = declared_recipe(
        *(jnp.bfloat16, shape.head_dim, shape.key_length, mask),
        query_length=shape.query_length,
        **options,
    )

    def attend(query, key, value):
        scale = shape.head_dim**-0.5
        return attention(query, key, value, scale=scale, mask=mask, **options)

    return attend, declared


def names_and_results(results, golden):
    out, _, *gradients = results
    names = "out", "dquery", "dkey", "dvalue"
    exact = (getattr(golden, name) for name in names)
    return zip(names, (out, *gradients), exact, strict=True)


@pytest.mark.parametrize("family", ["normal", "offset"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_accurate_and_as_declared(name, shape, is_causal, family):
    mask = Mask(is_causal=is_causal)
    inputs = make_inputs(family, 0, shape)
    attend, recipe = kernels(name, shape, mask)
    results, dlse = run(attend, inputs)
    predicted, _ = run(
        lambda q, k, v: emulator.attention(q, k, v, recipe=recipe, mask=mask), inputs
    )
    golden = reference.golden(*inputs, np.asarray(dlse), mask=mask)
    for (result, got, exact), (_, emulated, _) in zip(
        names_and_results(results, golden), names_and_results(predicted, golden)
    ):
        units = unit_error(got, exact, BF16)
        # What differs is the order of FP32 additions and the hardware's exp2.
        assert abs(units - unit_error(emulated, exact, BF16)) <= 0.05 * units, result
        # A few heads scatter more than the bar, which is pooled over many.
        bar = {"dquery": OPTIONS[name][2], "dkey": None}.get(result, 1.7)
        assert bar is None or units <= bar + 0.3, result


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("source", ["o_hi_lo8", "p_dp"])
def test_a_rows_own_centre_is_for_rows_of_little_weight(source, is_causal):
    """Two keys far from the mean of all have nearly all the weight: what rounding
    leaves in rows of dS meets those two, and not the mean."""
    shape = Shape(1, 1024, 1024, 16, 4, 64)
    mask, inputs = Mask(is_causal=is_causal), make_inputs("repeated_max", 0, shape)
    golden = reference.golden(*inputs, mask=mask)

    def units(**changes):
        recipe = dataclasses.replace(ATTN_JAX, delta_source=source, **changes)

        @jax.jit
        def dquery(query, key, value, dout):
            def attend(query):
                options = {"mask": mask, "recipe": recipe}
                return attention(query, key, value, scale=64**-0.5, **options)[0]

            return jax.vjp(attend, query)[1](dout)[0]

        return unit_error(dquery(*map(jnp.asarray, inputs)), golden.dquery, BF16)

    own, of_all = units(dq_centre="row"), units(dq_centre="mean")
    assert own <= 1.3, (own, of_all)  # 1.20 and, causal, 1.22 by the emulator.
    assert of_all > own


@pytest.mark.parametrize("name", ["row p_dp", "one pass, no cures", "lazy"])
def test_runs_give_the_same_bits(name):
    shape = SHAPES[1]
    inputs = make_inputs("normal", 2, shape)
    program = compiled(kernels(name, shape, Mask(is_causal=True))[0], inputs)
    arrays = [jnp.asarray(x) for x in inputs]
    first, _ = program(*arrays)
    for _ in range(10):
        chex.assert_trees_all_equal(first, program(*arrays)[0])


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_options_with_masks_sinks_and_a_soft_cap(has_sinks, soft_cap):
    shape = SHAPES[0]
    inputs = make_inputs("offset", 3, shape)
    ids = jnp.broadcast_to(jnp.arange(1000, dtype=jnp.int32) // 300, (2, 1000))
    mask = Mask(
        is_causal=True,
        window=(200, None),
        query_segment_ids=ids,
        key_value_segment_ids=ids,
    )
    more: dict[str, Any] = {"mask": mask, "soft_cap": soft_cap}
    if has_sinks:
        more["sinks"] = jnp.linspace(-1.0, 3.0, 8)
    recipe = dataclasses.replace(
        ATTN_JAX, dq_centre="row", delta_source="p_dp", rescale_threshold=8.0
    )

    def attend(query, key, value):
        return attention(query, key, value, scale=0.125, recipe=recipe, **more)

    results, dlse = run(attend, inputs)
    host = jax.tree.map(np.asarray, {"mask": mask, "sinks": more.get("sinks")})
    host["soft_cap"] = soft_cap
    golden = reference.golden(*inputs, np.asarray(dlse), **host)
    for result, got, exact in names_and_results(results, golden):
        assert unit_error(got, exact, BF16) <= 2.0, result


@pytest.mark.usefixtures("x64")
def test_options_with_x64_on():
    shape = SHAPES[0]
    inputs = make_inputs("normal", 4, shape)
    attend, _ = kernels("row p_dp", shape, Mask())
    results, dlse = run(attend, inputs)
    golden = reference.golden(*inputs, np.asarray(dlse))
    for result, got, exact in names_and_results(results, golden):
        assert got.dtype == jnp.bfloat16
        assert unit_error(got, exact, BF16) <= 2.0, result


def test_what_a_factor_leaves_nothing_of_is_zero():
    """Logits near -130: where the maximum repeats it is taken for 0."""
    shape = Shape(1, 512, 512, 4, 4, 128)
    attend, _ = kernels("repeated", shape, Mask())
    (out, lse, *gradients), _ = run(attend, make_inputs("lse-130", 0, shape))
    gone = np.isneginf(lse)
    assert gone.any()
    assert not np.asarray(out, np.float32).swapaxes(1, 2)[gone].any()
    for x in gradients:
        assert np.isfinite(np.asarray(x, np.float32)).all()
