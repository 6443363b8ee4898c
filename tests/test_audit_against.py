"""Recipes that an audit is asked to compare with, and what is called a target's own."""

import jax.numpy as jnp
import pytest

from attn_jax.audit import audit_attention
from attn_jax.audit.attribution import Cost, Fit, candidates
from attn_jax.audit.finding import HIDDEN_PAIRS
from attn_jax.audit.problem import DTYPES
from attn_jax.audit.verdict import judge
from attn_jax.formats import BF16
from attn_jax.recipe import EXACT_FP32, FLASH2, JAX_NN
from tests.knobs import bfloat16, same
from tests.planted import honest
from tests.test_audit_verdict import cell

pytestmark = pytest.mark.ci

IDS = "query_segment_ids", "key_value_segment_ids"
SMALL = dict(shapes=[(1, 32, 32, 2, 2, 16)], families=["normal"], masks=["full"])


# Of those for BF16, which were taken for all, all other tests are.
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(x, marks=[pytest.mark.thorough] * (x == "bfloat16")) for x in DTYPES],
)
def test_recipes_are_those_for_the_inputs(dtype):
    """BF16's refused FP16, and stood for FP32's: dQ summed in BF16 was then as accurate
    as its algorithm allows."""

    def coarse(gradients, scale):
        dq, *others = gradients
        if dtype == "float32":
            dq = dq.astype(jnp.bfloat16).astype(dtype)
        return dq, *others

    report = audit_attention(
        honest(gradients=coarse), **SMALL, dtype=dtype, against=[FLASH2, JAX_NN]
    )
    kinds = {(f.kind, f.tensors) for f in report.findings}
    worse = "worse than its algorithm allows", ("dquery",)
    assert (worse in kinds) == (dtype == "float32")


def test_a_causal_default_is_overruled():
    """`is_causal` is False where no causal mask is asked for."""
    attend = honest()

    def causal(query, key, value, *, scale=None, is_causal=True):
        return attend(query, key, value, scale=scale, is_causal=is_causal)[0]

    report = audit_attention(
        causal, **SMALL | dict(masks=["full", "causal"]), gradients=False, against=[]
    )
    assert not [f for f in report.findings if f.kind == "wrong wiring"]


def test_an_audit_reads_masks_together():
    """All that its masks make up, not the first alone."""

    def own_ids(*arrays, query_segment_ids=None, key_value_segment_ids=None, **rules):
        del key_value_segment_ids
        both = dict.fromkeys(IDS, query_segment_ids)
        return honest()(*arrays, **rules, **both)

    options = SMALL | dict(masks=["full", "causal", "packed"])
    report = audit_attention(own_ids, **options, gradients=False, against=[])
    said = [f.says for f in report.findings if f.cause == HIDDEN_PAIRS]
    assert said and "packed apart" in said[0]


def test_what_a_target_does_not_have_is_not_its_step():
    """Where it is as good as the recipe without a step, the step is another's."""
    problem = cell().problem
    costs = [
        Cost("delta from the rounded output", "dquery", 40.4, 27.3),
        Cost("delta", "dquery", 40.4, 29.8),
    ]
    fit = Fit("flash2 (delta)", 0.1)
    (found,) = judge([cell(allowed=40.4, dquery=27.3)], fit, [(problem, costs)])
    assert found.cause == ""
    (found,) = judge([cell(allowed=40.4, dquery=39.0)], fit, [(problem, costs)])
    assert found.cause == "delta from the rounded output"


def test_a_rounded_delta_of_exact_outputs_is_its_own_step():
    """It was called delta from the rounded output, which it is not."""
    known = candidates(BF16)
    against = [known[f"flash2 ({x})"] for x in ("exact delta, rounded", "delta")]
    attend = honest(
        delta_from="unrounded out", delta=lambda delta, total: bfloat16(delta)
    )
    # Where P is nearly even dP is large beside dS.
    options = SMALL | dict(families=["normal", "uniform"])
    report = audit_attention(attend, **options, against=[FLASH2, *against])
    causes = {f.cause for f in report.findings if f.tensors == ("dquery",)}
    assert causes == {"delta"}
    assert report.fits


def test_a_step_that_explains_nothing_is_not_named():
    """The largest share was, though it was one of nothing."""
    here = cell(allowed=100.0, out=100.0)
    costs = [Cost("delta", "out", 100.0, 96.0), Cost("dlogits", "out", 100.0, 100.0)]
    (found,) = judge([here], Fit("flash2", 0.02), [(here.problem, costs)])
    assert found.cause == ""
    assert "; no step of flash2 explains it by itself; above" in found.says
    assert not costs[1].acts and costs[0].acts
    # Nothing is said of steps whose price is not known.
    (found,) = judge([here], Fit("flash2", 0.02))
    assert "by itself" not in found.says


def test_in_fp32_the_sums_are_what_an_error_is_made_of():
    """Delta from the rounded output, which FP32 rounds no further, was its cause, and
    that of out, which has no delta."""
    options = SMALL | dict(families=["normal", "lse-130"])
    report = audit_attention(
        honest(narrow=same, narrow_out=same),
        **options,
        dtype="float32",
        against=[FLASH2, EXACT_FP32],
    )
    assert report.fits and report.attribution == []
    poor = [f for f in report.findings if "units from exact" in f.says]
    assert {"out", "dquery"} <= {name for f in poor for name in f.tensors}
    assert {f.cause for f in poor} == {""}
    priced = [f for f in poor if "by itself" in f.says]
    assert priced and all("sums themselves, in FP32" in f.says for f in priced)
