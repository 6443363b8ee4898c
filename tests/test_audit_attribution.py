"""Which recipe rounds as a target does, and which step costs what."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit import attribution
from attn_jax.audit.attribution import ALIKE, FAMILIES, FITS, Features
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Runner, measured
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import resolve
from attn_jax.formats import BF16, FP16
from attn_jax.kernels.attention import declared_recipe
from attn_jax.recipe import ATTN_JAX_HOPPER, FLASH2, RECIPES

SHAPE = Shape(2, 192, 192, 4, 2, 64)
PROBLEMS = tuple(Problem(SHAPE, family=family) for family in FAMILIES)
CANDIDATES = attribution.candidates(BF16)
# Recipes that round at the same steps, or nearly.
ALMOST = [
    {"flash2", "flash3", "flash4", "flash2 (dq_accumulator)", "flash2 (delta)"},
    {"flash1_paper", "flash2_op_by_op"},
    {"eager_op_by_op", "qiu_yao"},
]


@functools.cache
def profile(name: str):
    found = attribution.predict(CANDIDATES[name], PROBLEMS, gradients=True)
    return attribution.profile(dict(zip(FAMILIES, found, strict=True)))


def fits(found, names):
    return attribution.fits(found, {name: profile(name) for name in names})


SOME = ("flash2", "eager_bf16", "jax_nn", "attn_jax", "attn_jax_hopper", "exact_fp32")
SOME += ("flash2 (accumulator)", "flash2 (output cut off)", "flash2 (FP32 operands)")


@pytest.mark.parametrize("one", range(len(SOME)))
def test_recipes_that_round_elsewhere_do_not_fit(one):
    """With a margin, so that luck does not make them fit either."""
    for other in SOME[one + 1 :]:
        apart = attribution.distance(profile(SOME[one]), profile(other))
        assert apart > 1.2 * FITS, other


@pytest.mark.thorough
@pytest.mark.parametrize("same", ALMOST, ids=lambda names: sorted(names)[0])
def test_recipes_that_round_alike_fit_each_other_alone(same):
    for name in same:
        near = {fit.candidate for fit in fits(profile(name), CANDIDATES) if fit.fits}
        assert name in near and near <= same


@pytest.mark.parametrize("name", ["flash2", "attn_jax"])
def test_blocks_and_order_of_keys_change_no_verdict(name):
    other = dataclasses.replace(
        CANDIDATES[name], block_q=32, block_kv=128, kv_order="reverse"
    )
    found = attribution.predict(other, PROBLEMS, gradients=True)
    here = attribution.profile(dict(zip(FAMILIES, found, strict=True)))
    nearest, *_ = fits(here, SOME)
    assert nearest.candidate == name and nearest.distance <= 2 * ALIKE


def test_xla_on_a_cpu_is_recognised():
    """It rounds P and dP, and multiplies dS as it is."""
    target = resolve("xla")
    runner = Runner(target.attend(PROBLEMS[0].rules, scale=PROBLEMS[0].scale))
    found = {p.family: measured(p, runner(p).results) for p in PROBLEMS}
    here = attribution.profile(found)
    nearest, second = fits(here, (*SOME, "jax_nn (unrounded dS)"))[:2]
    assert nearest.candidate == "jax_nn (unrounded dS)" and nearest.distance < 0.02
    assert not second.fits


def test_nothing_fits_what_is_like_no_recipe():
    found = {
        cell: Features(3 * f.units, f.bias) for cell, f in profile("flash2").items()
    }
    assert not any(fit.fits for fit in fits(found, SOME))


def test_what_is_not_finite_or_missing_fits_nothing():
    found = {cell: Features(np.inf, 0.0) for cell in profile("flash2")}
    assert fits(found, ("flash2",))[0].distance == np.inf
    assert fits({}, ("flash2",))[0].distance == np.inf
    exact = {cell: Features(0.0, 0.0) for cell in profile("flash2")}
    assert attribution.distance(exact, exact) == 0.0


@pytest.mark.parametrize(
    ("family", "tensor", "step", "at_least"),
    [
        ("normal", "out", "probability", 0.3),
        ("normal", "dquery", "dlogits", 0.4),
        # FlashAttention's delta meets a mean of V and one of K.
        ("uniform", "dquery", "delta from the rounded output", 0.95),
    ],
)
def test_the_dearest_step_is_named(family, tensor, step, at_least):
    problems = (Problem(SHAPE, family=family),)

    def found(recipe):
        (of_problem,) = attribution.predict(recipe, problems, gradients=True)
        return of_problem

    better = {step: found(x) for step, x in attribution.better(FLASH2).items()}
    costs = attribution.costs(found(FLASH2), better)
    dearest = next(cost for cost in costs if cost.tensor == tensor)
    assert dearest.step == step and dearest.share >= at_least
    shares = [cost.share for cost in costs]
    assert shares == sorted(shares, reverse=True)


def test_candidates_are_of_the_inputs_format():
    half = attribution.candidates(FP16)
    assert half.keys() == CANDIDATES.keys()
    assert half["flash2"].probability.format == FP16
    assert "flash3_fp8" not in half and "te_ring" not in half


def test_the_hopper_recipe_is_that_of_the_kernels():
    """But for blocks: those of the kernels are tuned."""
    declared = declared_recipe(jnp.bfloat16, 64, 4096, target="hopper")
    blocks = {
        name: getattr(declared, name)
        for name in ("name", "source", "block_q", "block_kv")
        + ("backward_block_q", "backward_block_kv")
    }
    assert dataclasses.replace(ATTN_JAX_HOPPER, **blocks) == declared
    assert RECIPES["attn_jax_hopper"] is ATTN_JAX_HOPPER
