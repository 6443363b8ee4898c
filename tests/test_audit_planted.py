"""Planted defects and honest functions through the audit: named, or not accused."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import pytest

from attn_jax.audit import algorithms, attribution, verdict
from attn_jax.audit.audit import Audit
from attn_jax.audit.course import carry_out
from attn_jax.audit.finding import HARMLESS
from attn_jax.audit.inputs import Shape
from attn_jax.audit.parts import Parts
from attn_jax.audit.plan import Group
from attn_jax.audit.target import Adapter, Target
from attn_jax.formats import BF16, FP32
from tests.planted import GROUPED, HONEST, PLANTED, Honest, honest

CANDIDATES = attribution.candidates(BF16)
# Those that the planted functions round like, with or without a defect.
SOME = (*algorithms.PLAIN, "exact_fp32", "attn_jax", "flash2 (logits)")
SOME += tuple(name for name in CANDIDATES if " (" in name)
RECIPES = {name: CANDIDATES[name] for name in SOME}
# What those that always run round like: to compile a recipe takes a second.
FEW = {
    name: recipe
    for name, recipe in RECIPES.items()
    if " (" not in name
    or "row_sum" in name
    or name in algorithms.PLAIN
    or name == "jax_nn (unrounded dS)"
}
FAMILIES = (*attribution.FAMILIES, "lse-130")
# For the suite's time the others run under --thorough: each takes several seconds. That
# mistakes of wiring are recognised in results is in `test_audit_wiring`, always.
ALWAYS = ("P clipped", "irreproducible")
IN_CI = ("BF16 row sum",)
POOR = "as accurate as its algorithm allows, which is poor here"
WORSE = "worse than its algorithm allows"
ACCUSED = ("fails", "not finite", "wrong wiring", "not reproducible")
ACCUSED += (WORSE,)


# Seen by no result for dLSE = 0 and one run. All look at P.
LOOKS = {
    "irreproducible": ("invariances",),
    "depends on the batch position": ("invariances",),
    "x64 changes the result": ("x64",),
    "LSE stop_gradient": ("merging",),
}


@pytest.fixture(autouse=True)
def recipes(request, monkeypatch):
    if not request.config.getoption("--thorough"):
        monkeypatch.setattr(sys.modules[__name__], "RECIPES", FEW)


def audit(
    function, group: Group, *looks: str, more: tuple[Group, ...] = (), dtype="bfloat16"
):
    adapter = Adapter(
        layout=getattr(function, "layout", "BTNH"),
        lse="return_residual" if getattr(function, "residual", True) else None,
    )
    target = Target("planted", function, adapter)
    looks = ("P", *looks)
    with Parts() as parts:
        wanted = Audit(target, (group, *more), dtype, RECIPES, True, looks)
        return carry_out(wanted, parts)


def some(names, always):
    marks = dict.fromkeys(always, []) | dict.fromkeys(IN_CI, [pytest.mark.ci])
    return [
        pytest.param(name, marks=marks.get(name, [pytest.mark.thorough]))
        for name in names
    ]


@pytest.mark.parametrize("name", some(PLANTED, ALWAYS))
def test_a_planted_defect_is_found_and_named(name):
    planted = PLANTED[name]
    problem = planted.problem
    families = tuple(dict.fromkeys((*FAMILIES, problem.family)))
    group = Group(problem.shape, problem.mask, families)
    found = audit(planted.function, group, *LOOKS.get(name, ()))
    # What a recipe of the library does, too, is its algorithm.
    if name == "LSE in another layout":  # Its shape says so before its values do.
        planted = dataclasses.replace(planted, expects="fails", cause=frozenset({""}))
    kinds = {planted.expects} | ({POOR} if planted.expects == WORSE else set())
    named = [
        finding
        for finding in found.findings
        if finding.kind in kinds
        and any(cause in finding.cause.lower() for cause in planted.cause)
    ]
    assert named, found.findings
    # It comes before all that follows from it, but for noise, which is in everything.
    first = found.findings[0].kind
    assert first in kinds or planted.expects == "not reproducible", found.findings


@pytest.mark.parametrize("name", some(HONEST, ("jax.nn",)))
def test_honest_functions_are_not_accused(name):
    """jax.nn's LSE, which is rounded and gets no gradient, is not asked for."""
    for mask in ("full", "lengths"):
        found = audit(HONEST[name], Group(GROUPED, mask, FAMILIES))
        accused = [f for f in found.findings if f.kind in ACCUSED]
        assert not accused, accused
        if mask == "full":
            assert found.fits[0].fits, found.fits[:3]
    assert set(ACCUSED).isdisjoint(HARMLESS)


def test_sums_over_query_heads_in_16_bits_are_no_fault():
    """Of eight to one key head; two heavy keys leave them no average. Nothing fits."""
    group = Group(Shape(1, 96, 160, 8, 1, 32), "causal", ("repeated_max",))
    found = audit(HONEST["textbook"], group)
    (cell,) = found.cells
    assert not found.fits and cell.found["dvalue"].errors.units > verdict.POOR_UNITS
    assert {f.kind for f in found.findings} <= {POOR}, found.findings


def online(query, key, value, *, scale=None, is_causal=False):
    """Over blocks of 8 keys, differentiated as it stands, through the maxima."""
    assert not is_causal
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    of_each = query.shape[2] // key.shape[2]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def blocks(x):
        x = jnp.repeat(x, of_each, 2)
        return jnp.moveaxis(x.reshape(len(x), -1, 8, *x.shape[2:]), 1, 0)

    def step(carried, block):
        highest, total, out = carried
        logits = scale * dot("btnh,bsnh->bnts", query, block[0])
        new = jnp.maximum(highest, logits.max(-1))
        old, p = jnp.exp(highest - new), jnp.exp(logits - new[..., None])
        more = dot("bnts,bsnh->bnth", p.astype(query.dtype), block[1])
        return (new, total * old + p.sum(-1), out * old[..., None] + more), None

    zero = jnp.zeros((len(query), query.shape[2], query.shape[1]))
    start = zero - 1e30, zero, jnp.zeros((*zero.shape, query.shape[3]))
    (_, total, out), _ = jax.lax.scan(step, start, (blocks(key), blocks(value)))
    return (out / total[..., None]).swapaxes(1, 2).astype(query.dtype)


@pytest.mark.ci
def test_online_softmax_differentiated_through_its_maxima_is_no_fault():
    """What it adds to dK is the most that honest 16-bit functions were seen to have of
    what is predicted."""
    group = Group(Shape(1, 333, 200, 8, 1, 48), "full", ("normal", "uniform"))
    found = audit(Honest(online, residual=False), group)
    cell = found.cells[1]
    assert not found.fits[0].fits
    assert 1.3 < cell.found["dkey"].errors.units / cell.allowed["dkey"] < 1.5
    accused = [f for f in found.findings if f.kind in ACCUSED]
    assert not accused, accused


def in_16_bits(x, K):
    """The sum over query heads, one after the other."""
    heads = x.reshape(*x.shape[:2], K, -1, x.shape[-1]).astype(jnp.bfloat16)
    return functools.reduce(jnp.add, jnp.moveaxis(heads, 3, 0)).astype(x.dtype)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("function", "few", "fitting"),
    [
        # Of two a sum in 16 bits is one in FP32, rounded.
        (
            HONEST["textbook"],
            Shape(2, 96, 160, 4, 2, 16),
            "jax_nn (gradients by query head, unrounded dS)",
        ),
        # Of three it is like one over blocks of queries.
        (
            honest(group=in_16_bits),
            Shape(2, 256, 128, 6, 2, 32),
            "flash2 (dk_accumulator)",
        ),
    ],
    ids=["two", "three"],
)
def test_sums_of_more_query_heads_than_were_compared_are_no_fault(
    monkeypatch, function, few, fitting
):
    """Of 24 it is several times worse than the recipe that fits few of them."""
    recipes = FEW | {fitting: CANDIDATES[fitting]}
    monkeypatch.setattr(sys.modules[__name__], "RECIPES", recipes)
    many = Shape(2, 64, 96, 24, 1, few.head_dim), "causal", ("normal",)
    found = audit(function, Group(few, "full", ("normal",)), more=(Group(*many),))
    assert found.fits[0].fits and found.fits[0].candidate == fitting
    worst = found.cells[-1].found["dvalue"].errors.units
    assert worst > 1.5 * found.cells[0].allowed["dvalue"]
    assert {f.kind for f in found.findings} <= {POOR}, found.findings


def test_the_order_of_sums_in_fp32_is_the_function_s_own(monkeypatch):
    """A recipe that fits may have a mean of ones exact by chance: XLA adds up 160 times
    1 / 160 in order, which is 61 units off."""
    known = attribution.candidates(FP32)
    recipes = {name: known[name] for name in (*algorithms.ordinary(FP32), "qiu_yao")}
    group = Group(GROUPED, "full", (*attribution.FAMILIES, "zero_k_one_v"))
    monkeypatch.setattr(sys.modules[__name__], "RECIPES", recipes)
    found = audit(HONEST["jax.nn"], group, dtype="float32")
    assert found.fits[0].candidate == "qiu_yao" and found.fits[0].fits
    of_ones = found.cells[-1]
    uniform = found.cells[group.families.index("uniform")]
    assert uniform.found["out"].errors.units > 1.5 * uniform.allowed["out"]
    assert of_ones.found["out"].errors.units > 50 and of_ones.allowed["out"] > 20
    assert {f.kind for f in found.findings} == {POOR}, found.findings


def in_fp16(x, like):
    return x.astype(jnp.float16).astype(x.dtype)


def test_p_and_ds_in_fp16_are_no_fault(monkeypatch):
    """They fit FP32's where recipes are compared, and cost dQ a few units where logits
    are far from 0."""
    known, group = attribution.candidates(BF16), Group(GROUPED, "full", FAMILIES)
    fine = honest(narrow=in_fp16, delta_from="unrounded out")

    def found(*names):
        recipes = FEW | {name: known[name] for name in names}
        monkeypatch.setattr(sys.modules[__name__], "RECIPES", recipes)
        return [(f.kind, f.tensors) for f in audit(fine, group).findings]

    assert found("exact_fp32") == [(WORSE, ("dquery",))]
    assert found("exact_fp32", "exact_fp32 (P and dS in FP16)") == [(POOR, ("dquery",))]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        pytest.param(lambda lse: lse, set(), marks=pytest.mark.ci),
        (lambda lse: lse + 1e-3, {WORSE}),
        (lambda lse: lse * (1 + jnp.sin(1e3 * lse) / 1e4), {WORSE}),
    ],
    ids=["right", "by the same", "noisy"],
)
def test_an_lse_that_is_a_little_off_is_found(change, wanted):
    """By too little for out or a merge to show it; by the same everywhere, so that it
    follows all that moves, and by other amounts, which logits in 16 bits would explain,
    had out not shown that they are not."""
    honest = HONEST["blocks of 64"]

    def attend(*arrays, return_residual=False, **rules):
        if not return_residual:
            return honest(*arrays, **rules)
        out, lse = honest(*arrays, return_residual=True, **rules)
        return out, change(lse)

    found = audit(attend, Group(GROUPED, "full", FAMILIES), "probes")
    of_lse = {f.kind for f in found.findings if f.tensors == ("lse",)}
    assert of_lse == wanted, found.findings


@pytest.mark.thorough
def test_a_defect_of_p_is_found_beside_a_bias_alone():
    group = Group(GROUPED, "bias", ("uniform",))
    found = audit(PLANTED["P clipped"].function, group, "again")
    assert "P clipped" in {finding.cause for finding in found.findings}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HONEST)
def test_honest_functions_with_a_bias_are_not_accused(name):
    found = audit(HONEST[name], Group(GROUPED, "bias", FAMILIES))
    assert all("dbias" in cell.found for cell in found.cells)
    accused = [f for f in found.findings if f.kind in ACCUSED]
    assert not accused, accused
    assert found.fits[0].fits, found.fits[:3]
