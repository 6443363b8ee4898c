"""A query that is scaled before its product, and rounded then."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import emulator, on_tensor_cores
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16, E4M3FN, FP16, FP32, Rounding
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import unsupported
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, FLASH2, JAX_NN, Step
from attn_jax.reference import golden
from tests.bounds_outcome import computed, errors, excess
from tests.oracle_inputs import BLOCKS, SMALL, random_dlse
from tests.oracle_outcome import FIELDS, Outcome

pytestmark = pytest.mark.ci

THOROUGH = pytest.mark.thorough
_BF16 = Step(BF16)
EIGHTS = dict.fromkeys(BLOCKS, 8)
# Changes, and how Q' is rounded.
CASES: dict[str, tuple[dict, Step]] = {
    "plain": ({}, _BF16),
    "few bits and exponents": (dict(dlogits=Step(E4M3FN)), Step(E4M3FN.saturating())),
    "scale of dS": (dict(gradient_scale_at="logits", dlogits_scale=8.0), _BF16),
    "centre, narrow dS": (
        dict(dq_centre="keys", dq_dlogits=Step(FP16)),
        Step(BF16, Rounding.TOWARD_ZERO),
    ),
    "by query head": (dict(group_gradient=_BF16), Step(FP16)),
    "ring": (dict(ring_size=2, ring_merge="carry", ring_gradient_partial=_BF16), _BF16),
}


def on_cores(changes: dict):
    settings = EIGHTS | dict(dot_chunk=4, output=_BF16, gradient=_BF16, dlogits=_BF16)
    base = on_tensor_cores(SMALL, "hopper")
    return dataclasses.replace(base, dot_alignment=10, **(settings | changes))


# What these two have is in the others, and E4M3 in the bounds below.
FURTHER = "plain", "few bits and exponents"


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[THOROUGH] * (x in FURTHER)) for x in CASES]
)
def test_every_bit_is_the_oracle_s(name, x64):
    """Sums of cut addends leave no freedom: all results are one number."""
    changes, step = CASES[name]
    shape = Shape(1, 16, 24, 4, 2, 8)
    inputs, dlse = make_inputs("normal", 0, shape), random_dlse(shape)
    base = on_cores(changes)
    scaled = dataclasses.replace(base, scaled_query=step)
    outcome, plain = (Outcome(recipe, inputs, dlse) for recipe in (scaled, base))
    outcome.check_bits(FIELDS)
    for field in FIELDS:
        assert (plain.got[field] != outcome.got[field]).any(), field


@pytest.mark.parametrize(
    "recipe",
    [FLASH2, ATTN_JAX, JAX_NN, dataclasses.replace(ATTN_JAX, name="ring", ring_size=2)],
    ids=lambda recipe: recipe.name,
)
def test_a_power_of_two_changes_no_bit(recipe):
    """It is exact wherever it is multiplied by; no number here is subnormal."""
    scaled = dataclasses.replace(recipe, scaled_query=_BF16)
    inputs = make_inputs("normal", 0, Shape(1, 32, 48, 4, 2, 64))
    mask = Mask(is_causal=True)
    plain, same = (computed(x, inputs, mask=mask, jit=True) for x in (recipe, scaled))
    for name in plain:
        np.testing.assert_array_equal(plain[name], same[name], name)
    # Nor the bounds of it, but for roundings of the carrier and dQ's of its own.
    limits, others = (bound(x, *inputs, mask=mask) for x in (recipe, scaled))
    for name in ("out", "dkey", "dvalue"):
        got, want = getattr(others, name), getattr(limits, name)
        np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize("recipe", [FLASH2, JAX_NN], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_it_is_what_scaling_a_query_and_differentiating_gives(recipe, dtype):
    """Outside of an attention of scale 1, in the type of the query; op by op, so that
    no compiler leaves a rounding out."""
    fmt = BF16 if dtype == jnp.bfloat16 else FP16
    recipe = recipe.with_inputs(fmt)
    inputs = make_inputs("normal", 0, Shape(1, 32, 48, 4, 2, 24), dtype)
    *qkv, dout = (jnp.asarray(x) for x in inputs)
    scale = 24**-0.5

    def outside(query, key, value):
        query = (query.astype(jnp.float32) * scale).astype(dtype)
        return emulator.attention(query, key, value, recipe=recipe, scale=1.0)

    def inside(query, key, value):
        within = dataclasses.replace(recipe, scaled_query=Step(fmt))
        return emulator.attention(query, key, value, recipe=within, scale=scale)

    found = []
    for attend in (outside, inside):
        (out, lse), pull = jax.vjp(attend, *qkv)
        found.append((out, lse, *pull((dout, jnp.ones_like(lse)))))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_stochastic_one_is_made_once_for_both_passes():
    """One key of 1: LSE is Q', and a cotangent of one row's LSE makes dK that Q'."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((1, 64, 1, 1)), jnp.bfloat16)
    key = value = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    recipe = dataclasses.replace(
        EXACT_FP32, scaled_query=Step(BF16, Rounding.STOCHASTIC)
    )

    def attend(query, key, value):
        options = {"scale": 1 / 3, "rounding_key": jax.random.key(0)}
        return emulator.attention(query, key, value, recipe=recipe, **options)

    (_, lse), pull = jax.vjp(attend, query, key, value)
    scaled = np.asarray(query, np.float32).ravel() / 3
    nearest = np.asarray(jnp.asarray(scaled, jnp.bfloat16), np.float32)
    assert (lse[0, 0] != nearest).any()
    for row in range(8):
        dlse = jnp.zeros_like(lse).at[0, 0, row].set(1.0)
        dkey = pull((jnp.zeros((1, 64, 1, 1), jnp.bfloat16), dlse))[1]
        assert dkey.item() == lse[0, 0, row]


@pytest.mark.parametrize(
    ("step", "ring_size"),
    [
        pytest.param(_BF16, 2, id="bf16-2"),
        pytest.param(Step(BF16, Rounding.TOWARD_ZERO), 1, id="toward zero-1"),
        pytest.param(Step(E4M3FN.saturating()), 1, id="e4m3-1"),
        *(
            pytest.param(step, ring_size, id=f"{name}-{ring_size}", marks=THOROUGH)
            for name, step, ring_size in (
                ("bf16", _BF16, 1),
                ("toward zero", Step(BF16, Rounding.TOWARD_ZERO), 2),
                ("e4m3", Step(E4M3FN.saturating()), 2),
            )
        ),
    ],
)
def test_its_roundings_are_bounded_and_need_their_term(step, ring_size):
    """In an otherwise exact recipe they are all the error."""
    inputs = make_inputs("normal", 0, Shape(1, 24, 20, 4, 2, 24))
    plain = dataclasses.replace(EXACT_FP32, ring_size=ring_size, inputs=BF16)
    recipe = dataclasses.replace(plain, scaled_query=step)
    found = errors(computed(recipe, inputs, jit=True), golden(*inputs))
    for kind in ("deterministic", "probabilistic"):
        worst = excess(found, bound(recipe, *inputs, kind=kind, confidence=0.9999))
        assert max(worst.values()) <= 1, (kind, worst)
        # Of E4M3 terms of second order are half of it.
        assert min(worst.values()) > 0.001, (kind, worst)
        worst = excess(found, bound(plain, *inputs, kind=kind, confidence=0.9999))
        assert min(worst.values()) > 1, (kind, worst)


def test_the_kernels_have_none_and_say_so():
    recipe = dataclasses.replace(ATTN_JAX, scaled_query=_BF16)
    query = jnp.zeros((1, 256, 2, 64), jnp.bfloat16)
    with made_for("hopper"):
        reason = unsupported(query, query, query, recipe=recipe)
    assert reason is not None and "\n" not in reason
    assert re.search("scaled_query=Step.bf16.*have None", reason)


def test_a_scale_is_not_folded_into_anything_else():
    """1e-37 over dlogits_scale, or in units of log2, may leave the carrier's range."""
    arrays = [jnp.ones((1, 2, 1, 8), jnp.bfloat16)] * 3
    recipe = dataclasses.replace(EXACT_FP32, dlogits_scale=2.0**20, inputs=BF16)
    with pytest.raises(ValueError, match="with dlogits_scale"):
        emulator.attention(*arrays, recipe=recipe, scale=1e-37)
    recipe = dataclasses.replace(recipe, scaled_query=Step(FP32))
    emulator.attention(*arrays, recipe=recipe, scale=1e-37)
