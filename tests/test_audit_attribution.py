"""Which recipe rounds as a target does, and which step costs what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from attn_jax.audit import attribution
from attn_jax.audit.attribution import ALIKE, FAMILIES, FITS, Features
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Runner, measured
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import resolve
from attn_jax.formats import BF16, FP16, FP32
from attn_jax.kernels.attention import declared_recipe
from attn_jax.recipe import ATTN_JAX_HOPPER, FLASH2, RECIPES, Step
from tests.knobs import Knobs, attention, bfloat16, scaled_query
from tests.planted_keys import textbook

SHAPE = Shape(2, 192, 192, 4, 2, 64)
PROBLEMS = tuple(Problem(SHAPE, family=family) for family in FAMILIES)
GROUPS_OF_4 = tuple(
    Problem(Shape(1, 384, 192, 8, 2, 96), family=family) for family in FAMILIES
)
CANDIDATES = attribution.candidates(BF16)
# Recipes that round at the same steps, or nearly: a scale of 1 / 8 rounds no query.
ALMOST = [
    {"flash2", "flash3", "flash4", "flash2 (dq_accumulator)", "flash2 (delta)"}
    | {"flash2 (query rounded after scaling)"},
    {"flash1_paper", "flash2_op_by_op"},
    {"eager_op_by_op", "qiu_yao", "eager_op_by_op (query rounded after scaling, too)"}
    | {"eager_op_by_op (gradients by query head, softmax in 16 bits)"},
]


@functools.cache
def profile(name: str):
    found = attribution.predict(CANDIDATES[name], PROBLEMS, gradients=True)
    return attribution.profile(dict(zip(FAMILIES, found, strict=True)))


def fits(found, names):
    return attribution.fits(found, {name: profile(name) for name in names})


SOME = ("flash2", "eager_bf16", "jax_nn", "attn_jax", "attn_jax_hopper", "exact_fp32")
SOME += ("flash2 (accumulator)", "flash2 (output cut off)", "flash2 (FP32 operands)")
SOME += ("flash2 (gradients by query head)",)


@pytest.mark.ci
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


@pytest.mark.parametrize(
    "name", [pytest.param("flash2", marks=pytest.mark.ci), "attn_jax"]
)
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


def _sum_of_rounded(x, key_heads: int):
    """[B, S, N, H] to [B, S, K, H]."""
    x = bfloat16(x)
    return x.reshape(*x.shape[:2], key_heads, -1, x.shape[-1]).sum(3)


@pytest.mark.ci
@pytest.mark.parametrize("apart", [True, False], ids=["by query head", "at once"])
def test_gradients_that_query_heads_round_are_recognised(apart):
    """A group of 4. In fewer tiles of queries sums that are kept in 16 bits throughout
    ("dk_accumulator") have as many roundings."""
    problems = GROUPS_OF_4
    knobs = Knobs(group=_sum_of_rounded) if apart else Knobs()

    def attend(query, key, value):
        return attention(knobs, query, key, value, scale=problems[0].scale)

    names = ("flash2", "flash2 (gradients by query head)", "flash2 (dk_accumulator)")
    predictions = _predicted(names, problems)
    here = _measured(attend, problems)
    nearest, *others = attribution.fits(here, predictions)
    assert nearest.candidate == names[apart] and nearest.distance < FITS / 2
    assert all(fit.distance > 1.2 * FITS for fit in others)
    suspected = attribution.suspect([nearest, *others])
    assert suspected == ("gradients by query head" if apart else "")
    # Of what nothing is near the nearest says nothing.
    assert attribution.suspect([nearest._replace(distance=3 * FITS), *others]) == ""


def test_repeated_keys_in_fp32_are_recognised():
    """As it is often written: the step that costs is none of those within."""

    def function(query, key, value):
        groups = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)
        return out.astype(jnp.bfloat16)

    problems = tuple(
        Problem(Shape(1, 64, 64, 4, 2, 32), family=family) for family in FAMILIES
    )
    mine = "flash2 (gradients by query head, all else in FP32)"
    names = {mine, "exact_fp32", "attn_jax_hopper", "flash2 (FP32 operands)"}
    names |= {"flash2 (gradients by query head)"}
    nearest, *others = attribution.fits(
        _measured(function, problems), _predicted(names, problems)
    )
    assert nearest.candidate == mine and nearest.distance < FITS / 3
    # The kernels' own was the nearest, and its dS was said to cost what this does.
    far = [fit for fit in others if fit.candidate != "attn_jax_hopper"]
    assert all(fit.distance > 1.2 * FITS for fit in far), others
    assert set(attribution.better(CANDIDATES[mine])) == {"group_gradient"}


_BY_HEAD = "P normalised", "unrounded dS", "summed in 16 bits"
_SUMMED = "query heads' gradients summed in 16 bits"
_SCALED = "query rounded after scaling"


@pytest.mark.ci
def test_sums_over_query_heads_in_16_bits_are_recognised():
    """XLA's, on a CPU, of a group of eight."""
    problems = tuple(
        Problem(Shape(1, 96, 96, 8, 1, 64), family=family) for family in FAMILIES
    )
    mine = f"jax_nn ({_SCALED}, gradients by query head summed in 16 bits)"
    names = {mine, "jax_nn", "jax_nn (unrounded dS)", "eager_bf16"}
    names |= {f"jax_nn (gradients by query head, {x})" for x in _BY_HEAD}
    nearest, *others = attribution.fits(
        _measured(textbook, problems), _predicted(names, problems)
    )
    assert nearest.candidate == mine and nearest.fits
    assert all(fit.distance > 1.2 * FITS for fit in others), others
    better = attribution.better(CANDIDATES[mine])
    assert better[_SUMMED].group_gradient == Step(BF16)
    assert better[_SUMMED].group_accumulator == Step(FP32)


def _by_chunks(size: int):
    """Of queries, of which the keys are no argument: as is done to save memory."""

    def function(query, key, value):
        batch, length, heads, dim = query.shape
        # [chunks, B, size, K, G, H]
        rows = batch, length // size, size, key.shape[2], -1, dim
        chunks = query.reshape(rows).swapaxes(0, 1)

        @jax.checkpoint
        def step(carry, q):
            fp32 = dict(preferred_element_type=jnp.float32)
            logits = jnp.einsum("bckgh,bskh->bkgcs", q, key, **fp32) * dim**-0.5
            p = jax.nn.softmax(logits).astype(value.dtype)
            out = jnp.einsum("bkgcs,bskh->bckgh", p, value, **fp32)
            return carry, out.astype(query.dtype)

        out = jax.lax.scan(step, None, chunks)[1].swapaxes(0, 1)
        return out.reshape(batch, length, heads, dim)

    return function


@pytest.mark.ci
@pytest.mark.parametrize(("size", "named"), [(16, 16), (64, 64), (32, 16)])
def test_sums_over_chunks_of_queries_in_16_bits_are_recognised(size, named):
    """`lax.scan` adds up dK and dV of each chunk in their format, on any device; it was
    called no rounding of a known algorithm."""
    problems = tuple(
        Problem(Shape(1, 512, 256, 2, 1, 64), family=family) for family in FAMILIES
    )
    mine = f"jax_nn (dk_accumulator, chunks of {named}, unrounded dS)"
    names = {x for x in CANDIDATES if "dk_accumulator" in x}
    names |= {"flash2", "jax_nn", "jax_nn (unrounded dS)", "eager_bf16"}
    nearest, *others = attribution.fits(
        _measured(_by_chunks(size), problems), _predicted(names, problems)
    )
    assert nearest.candidate == mine and nearest.fits, (nearest, others)
    chunked = [fit.candidate for fit in others if fit.fits]
    assert all("chunks" in name for name in chunked), others


_SCALED_APART = "query rounded after scaling, gradients by query head"


@pytest.mark.parametrize(
    ("knobs", "scaled", "what"),
    [
        pytest.param(Knobs(), False, "", marks=pytest.mark.ci),
        (Knobs(), True, _SCALED),
        (Knobs(group=_sum_of_rounded), True, _SCALED_APART),
    ],
    ids=["logits scaled", "query scaled", "query scaled, by query head"],
)
def test_a_query_rounded_after_scaling_is_recognised(knobs, scaled, what):
    """At head dim 96: a power of two, as of 64, rounds nothing."""
    problems = GROUPS_OF_4
    function = functools.partial(attention, knobs)
    if scaled:
        function = functools.partial(scaled_query, function)
    here = _measured(function, problems)
    names = {f"flash2 ({x})" for x in (_SCALED, _SCALED_APART, "accumulator")}
    names |= {"flash2", "flash2 (gradients by query head)", "flash2 (FP32 operands)"}
    nearest, *others = attribution.fits(here, _predicted(names, problems))
    assert nearest.candidate == (f"flash2 ({what})" if what else "flash2")
    assert nearest.fits
    apart = nearest.distance + 2 * ALIKE
    assert all(fit.distance > apart for fit in others), others
    assert attribution.suspect([nearest, *others]) == what


@pytest.mark.ci
def test_flax_with_its_softmax_in_fp32_is_recognised():
    """flax.linen's: for as many key heads as query heads. One batch entry, since XLA on
    a CPU adds up dK in BF16 for more."""
    problems = tuple(
        Problem(Shape(1, 192, 192, 4, 4, 128), family=family) for family in FAMILIES
    )

    def function(query, key, value):
        arrays = query, key, value
        out = linen.dot_product_attention(*arrays, force_fp32_for_softmax=True)
        return out.astype(query.dtype)

    names = {"flash2", "jax_nn", "jax_nn (unrounded dS)", f"flash2 ({_SCALED})"}
    names |= {(mine := f"jax_nn ({_SCALED}, FP32 P)"), "flash2 (FP32 operands)"}
    nearest, *others = attribution.fits(
        _measured(function, problems), _predicted(names, problems)
    )
    assert nearest.candidate == mine and nearest.distance < FITS / 3
    assert all(fit.distance > 1.2 * FITS for fit in others), others


def test_rounding_the_query_is_priced():
    """It costs logits what P's rounding costs O, and more where they are large."""
    problems = (Problem(Shape(1, 128, 192, 4, 1, 96), family="wide"),)
    better = attribution.better(CANDIDATES[f"flash2 ({_SCALED_APART})"])
    assert better[_SCALED].scaled_query == Step(FP32)
    assert better[_SCALED_APART].scaled_query is None
    of = attribution.better(CANDIDATES[f"flash2 ({_SCALED})"])
    assert of[_SCALED] == FLASH2 and "scaled_query" not in of

    def found(recipe):
        return attribution.predict(recipe, problems, gradients=False)[0]

    with_it = found(CANDIDATES[f"flash2 ({_SCALED})"])
    costs = attribution.costs(with_it, {name: found(one) for name, one in of.items()})
    assert costs[0].step == _SCALED and costs[0].share > 0.8


def _measured(function, problems):
    runner = Runner(lambda *qkv: (function(*qkv), None))
    return attribution.profile(
        {p.family: measured(p, runner(p).results) for p in problems}
    )


@functools.cache
def _prediction(name, problems):
    found = attribution.predict(CANDIDATES[name], problems, gradients=True)
    return attribution.profile(dict(zip(FAMILIES, found, strict=True)))


def _predicted(names, problems):
    return {name: _prediction(name, problems) for name in sorted(names)}


def test_a_group_of_two_has_one_sum():
    """In 16 bits as in FP32, and rounded to 16 bits in the end."""
    problems = (Problem(Shape(1, 64, 96, 4, 2, 32)),)
    wide, narrow = (
        attribution.predict(CANDIDATES[name], problems, gradients=True)
        for name in (f"jax_nn (gradients by query head, {x})" for x in _BY_HEAD[::2])
    )
    assert wide == narrow


def test_a_group_of_one_has_nothing_to_tell_apart():
    problems = (Problem(Shape(2, 64, 96, 2, 2, 32)),)
    plain, apart = (
        attribution.predict(CANDIDATES[name], problems, gradients=True)
        for name in ("flash2", "flash2 (gradients by query head)")
    )
    # But for a sum in another order that rounds to a neighbour.
    assert attribution.distance(*map(_of_normal, (plain, apart))) < ALIKE / 10


def _of_normal(found):
    return attribution.profile({"normal": found[0]})


def test_a_change_is_priced_by_its_name():
    recipe = CANDIDATES["flash2 (gradients by query head)"]
    better = attribution.better(recipe)
    assert better["gradients by query head"].group_gradient is None
    assert "group_gradient" not in better
    assert set(better) - set(attribution.better(FLASH2)) == {"gradients by query head"}
    found = {
        name: attribution.predict(one, PROBLEMS[:1], gradients=True)[0]
        for name, one in better.items()
    }
    (of_recipe,) = attribution.predict(recipe, PROBLEMS[:1], gradients=True)
    costs = attribution.costs(of_recipe, found)
    for tensor in ("dkey", "dvalue"):
        # A half of each sum, rounded: as much as rounding the whole.
        cost = next(
            c
            for c in costs
            if c.step == "gradients by query head" and c.tensor == tensor
        )
        assert 0.25 < cost.share < 0.42


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


def test_a_bias_has_a_predicted_gradient():
    """FP32's is rounded once, to the bias's type."""
    problems = (Problem(SHAPE, mask="bias"),)
    units = {
        name: attribution.predict(CANDIDATES[name], problems, gradients=True)[0]
        for name in ("exact_fp32", "jax_nn")
    }
    assert units["exact_fp32"]["dbias"].errors.units == pytest.approx(1, abs=0.01)
    # dP is rounded to BF16, of entries that both have a share in the sum.
    assert 1.2 < units["jax_nn"]["dbias"].errors.units < 1.6


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
