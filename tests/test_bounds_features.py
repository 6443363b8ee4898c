"""Bounds with soft caps, sinks, a cotangent of LSE and a kernel's own centre."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import emulator, reference
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16, FP16
from attn_jax.mask import Mask
from attn_jax.recipe import (
    ATTN_JAX,
    ATTN_JAX_HOPPER,
    EAGER_BF16,
    FLASH2_OP_BY_OP,
    TE_RING,
)
from attn_jax.recipe_schema import Recipe, Step
from tests.bounds_outcome import errors, excess

NAMES = ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")
SINKS = np.array([-2.0, 6.0], np.float32)
MASK = Mask(window=(7, 3), key_value_lengths=np.array([20], np.int32))


def problem(family: str):
    """Inputs and dLSE; rows from 28 on see nothing."""
    shape = Shape(1, 32, 40, 2, 1, 32)
    dlse = np.random.default_rng(0).standard_normal((1, 2, 32)).astype(np.float32)
    return make_inputs(family, 0, shape), dlse


@functools.partial(jax.jit, static_argnames=("recipe", "soft_cap"))
def computed(inputs, dlse, sinks, mask, recipe: Recipe, soft_cap):
    query, key, value, dout = inputs

    def attend(query, key, value, sinks):
        return emulator.attention(
            query, key, value, recipe=recipe, mask=mask, sinks=sinks, soft_cap=soft_cap
        )

    (out, lse), pullback = jax.vjp(attend, query, key, value, sinks)
    return out, lse, *pullback((dout.astype(out.dtype), dlse))


def shares(recipe: Recipe, judged: Recipe, family: str, soft_cap, sinks, **options):
    """The largest error of each result of `recipe` over its bound for `judged`."""
    inputs, dlse = problem(family)
    arrays = jax.tree.map(jnp.asarray, (inputs, dlse, sinks, MASK))
    found = dict(zip(NAMES, computed(*arrays, recipe, soft_cap)))
    found = {k: np.asarray(x, np.float64) for k, x in found.items() if x is not None}
    more = {"mask": MASK, "soft_cap": soft_cap, "sinks": sinks}
    exact = reference.golden(*inputs, dlse, **more)
    limits = bound(judged, *inputs, dlse, **more, **options)
    return excess(errors(found, exact), limits)


KEYS = dataclasses.replace(ATTN_JAX, name="attn_jax, keys centred", dq_centre="keys")
FP16_DS = dataclasses.replace(
    KEYS, name="attn_jax, dS of dQ in FP16", dq_dlogits=Step(FP16)
)
RECIPES = {r.name: r for r in (ATTN_JAX, KEYS, FP16_DS, FLASH2_OP_BY_OP, EAGER_BF16)}


# By what their names have in test ids; of every recipe one, the other in CI.
FEATURES = {"5.0-None": (5.0, None), "None-sinks1": (None, SINKS)}
CAPPED = {KEYS.name, FLASH2_OP_BY_OP.name}


@pytest.mark.parametrize("kind", ["deterministic", "probabilistic"])
@pytest.mark.parametrize("family", ["normal", "offset", "lse+150"])
@pytest.mark.parametrize(
    ("name", "soft_cap", "sinks"),
    [
        pytest.param(
            *(name, soft_cap, sinks),
            marks=[pytest.mark.ci] * ((sinks is None) != (name in CAPPED)),
            id=f"{name}-{feature}",
        )
        for name in RECIPES
        for feature, (soft_cap, sinks) in FEATURES.items()
    ],
)
def test_no_result_exceeds_its_bound(name, soft_cap, sinks, family, kind):
    recipe = RECIPES[name]
    options = {"kind": kind, "confidence": 0.9999}
    worst = shares(recipe, recipe, family, soft_cap, sinks, **options)
    assert max(worst.values()) <= 1, worst
    # Narrow logits of 150 leave nothing to be said.
    if family != "lse+150" or recipe in (ATTN_JAX, KEYS, FP16_DS):
        assert worst["out"] > 0.05 and worst["dvalue"] > 0.05, worst


@pytest.mark.parametrize(("soft_cap", "sinks"), [(5.0, None), (None, SINKS)])
def test_a_result_rounded_further_exceeds_the_bound(soft_cap, sinks):
    for changes, result in (
        ({"logits": Step(BF16)}, "lse"),
        ({"delta_source": "o", "dq_centre": "none"}, "dquery"),
    ):
        if result == "lse" or sinks is not None:
            wrong = dataclasses.replace(ATTN_JAX, **changes)
            worst = shares(wrong, ATTN_JAX, "offset", soft_cap, sinks)
            assert worst[result] > 1, (changes, worst)


def test_a_farther_centre_has_a_larger_bound():
    inputs, dlse = problem("offset")
    shape = 1, 32, 1, 32
    nothing = np.zeros(shape)
    own = bound(ATTN_JAX, *inputs, dlse, mask=MASK).dquery
    none = dataclasses.replace(ATTN_JAX, dq_centre="none")
    without = bound(none, *inputs, dlse, mask=MASK).dquery
    zero = bound(ATTN_JAX, *inputs, dlse, mask=MASK, centre=(nothing, nothing)).dquery
    np.testing.assert_allclose(zero, without)
    far = bound(ATTN_JAX, *inputs, dlse, mask=MASK, centre=(nothing - 5, nothing))
    assert own.sum() < without.sum() < far.dquery.sum()


def test_a_sink_of_minus_infinity_is_none():
    inputs, dlse = problem("normal")
    sinks = np.full(2, -np.inf, np.float32)
    limits = bound(ATTN_JAX, *inputs, dlse, sinks=sinks)
    plain = bound(ATTN_JAX, *inputs, dlse)
    np.testing.assert_array_equal(limits.out, plain.out)
    np.testing.assert_array_equal(limits.dquery, plain.dquery)
    assert not limits.dsinks.any()


@pytest.mark.parametrize("merge", ["lse", "carry", "carry_whole"])
def test_a_soft_cap_in_a_ring_is_bounded(merge):
    recipe = dataclasses.replace(
        TE_RING, ring_size=2, ring_merge=merge, exponential="exp2"
    )
    worst = shares(recipe, recipe, "wide", 5.0, None)
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("family", ["normal", "wide", "lse+150"])
def test_whole_maxima_in_a_ring_are_bounded(family):
    recipe = dataclasses.replace(
        ATTN_JAX_HOPPER,
        ring_size=4,
        ring_merge="carry_whole",
        block_kv=4,
        backward_block_kv=4,
    )
    worst = shares(recipe, recipe, family, None, None)
    assert max(worst.values()) <= 1, worst
    assert worst["out"] > 0.05 and worst["dvalue"] > 0.05, worst


def test_sinks_in_a_ring_are_refused():
    inputs, _ = problem("normal")
    with pytest.raises(NotImplementedError, match="ring"):
        bound(dataclasses.replace(TE_RING, ring_size=2), *inputs, sinks=SINKS)
