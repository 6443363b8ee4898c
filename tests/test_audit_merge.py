"""Merging of partial results: what explains the error, and wrong gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit.inputs import Shape
from attn_jax.audit.merge import merge_audit
from attn_jax.audit.partial import part_mask
from attn_jax.audit.problem import MASKS, SYMBOLS, Problem
from attn_jax.audit.target import resolve
from attn_jax.mask import Mask
from tests.audit_targets import attend, honest

SHAPE = Shape(2, 64, 128, 1, 1, 64)
PARTS = 2, 8
FEW = (4,)  # Each number of parts has programs to be compiled.
POOR = "as accurate as its algorithm allows, which is poor here"


def audit(fault="", problem=Problem(SHAPE), out_dtype=jnp.float32, parts=FEW, **kwargs):
    return merge_audit(
        lambda mask: attend(mask, fault, out_dtype), problem, parts=parts, **kwargs
    )


def kinds(result):
    return {(f.kind, f.cause) for f in result.findings}


def assert_differentiated(result):
    assert set(result.lse_gradient) == {"dquery", "dkey"}
    assert all(abs(share - 1) < 0.05 for share in result.lse_gradient.values())


@pytest.mark.parametrize(
    "family", ["normal", pytest.param("offset", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("mask", ["full", "causal", "lengths", "packed"])
def test_fp32_partial_results_merge_exactly(mask, family):
    shape = Shape(2, 128, 128, 1, 1, 64)
    result = audit(problem=Problem(shape, mask=mask, family=family), parts=PARTS)
    assert result.verdict == "merging adds no error" and not result.findings
    assert result.combination == ("fp32", "fp32") and result.against == "golden"
    # A tenth: what an error that does not grow is by how keys happen to be cut.
    assert abs(result.growth["out"]) < 0.1
    assert_differentiated(result)


@pytest.mark.parametrize("mask", ["full", "packed"])
def test_16_bit_partial_results_are_named(mask):
    result = audit(problem=Problem(SHAPE, mask=mask), out_dtype=None, parts=PARTS)
    assert kinds(result) == {(POOR, "16-bit partial results")}
    assert result.verdict == "out of each part is rounded to 16 bits"
    errors, predicted = result.errors["out"], result.predicted["bf16", "fp32"]
    # The prediction knows the roundings: it is an estimate, not a bound.
    for parts in PARTS:
        assert 0.85 < errors[parts] / predicted[parts] < 1.15
        # Documents that lie within one part are merged with nothing.
        assert mask == "packed" or errors[parts] > 1.1 * errors[1]


@pytest.mark.parametrize("family", ["normal", "offset"])
def test_lse_in_bf16_is_named(family):
    # Under offset V out hardly suffers, and dV does.
    result = audit("LSE in BF16", Problem(SHAPE, family=family))
    assert kinds(result) == {(POOR, "LSE in BF16")}
    assert result.combination == ("fp32", "bf16")
    assert result.errors["dvalue"][4] > 2 * result.errors["dvalue"][1]
    both = audit("LSE in BF16", Problem(SHAPE, family="offset"), out_dtype=None)
    assert both.combination == ("bf16", "bf16")


@pytest.mark.ci
@pytest.mark.parametrize(
    "numbers", [(8,), pytest.param((2, 8, 64), marks=pytest.mark.thorough)], ids=str
)
def test_a_rounding_that_is_undone_stays(numbers, fully_optimised):
    """XLA left out that LSE was rounded, which the merge undoes, and what was found
    was no BF16."""
    problem = Problem(Shape(1, 256, 256, 4, 2, 64))

    def xla(mask):
        return resolve("xla").attend(mask, scale=problem.scale)

    result = merge_audit(xla, problem, parts=numbers)
    assert result.combination == ("bf16", "bf16")
    for parts, units in result.predicted["bf16", "bf16"].items():
        assert 0.85 < result.errors["out"][parts] / units < 1.15


def test_lse_without_gradient_is_wrong_wiring():
    result = audit("LSE without gradient")
    assert kinds(result) == {("wrong wiring", "LSE gets no gradient")}
    assert result.verdict == "LSE gets no gradient; merging adds no error to out"
    assert set(result.lse_gradient) == {"dquery", "dkey"}
    assert all(abs(share) < 0.05 for share in result.lse_gradient.values())
    assert result.errors["dquery"][4] > 10 * result.errors["dquery"][1]


@pytest.mark.parametrize(
    ("fault", "wrong", "right"),
    [
        ("LSE gradient in dQ alone", "dkey", "dquery"),
        pytest.param(
            *("LSE gradient in dK alone", "dquery", "dkey"), marks=pytest.mark.thorough
        ),
    ],
)
def test_an_lse_gradient_that_one_result_lacks_is_wrong_wiring(fault, wrong, right):
    result = audit(fault)
    (found,) = result.findings
    cause = f"LSE gradient wrong: {SYMBOLS[wrong]}"
    assert (found.kind, found.cause) == ("wrong wiring", cause)
    assert found.tensors == (wrong,) and "lacks" in found.says
    assert abs(result.lse_gradient[wrong]) < 0.05
    assert abs(result.lse_gradient[right] - 1) < 0.05


@pytest.mark.parametrize("fault", ["LSE in log2", "LSE constant"])
def test_an_lse_that_does_not_merge_is_worse(fault):
    result = audit(fault)
    assert ("worse than its algorithm allows", "parts do not merge") in kinds(result)
    assert result.combination is None


@pytest.mark.parametrize(
    "name",
    [
        "attn_jax",
        "eager_bf16",
        pytest.param("flash2", marks=pytest.mark.thorough),
    ],
)
def test_recipes_lose_by_16_bits_and_by_nothing_else(name):
    result = merge_audit(lambda mask: honest(name, mask), Problem(SHAPE), parts=(4,))
    assert kinds(result) == {(POOR, "16-bit partial results")}
    assert_differentiated(result)


def test_float32_merges_exactly():
    result = audit(problem=Problem(SHAPE, "float32"))
    assert result.verdict == "merging adds no error"


def test_an_exact_zero_is_no_error():
    result = audit(problem=Problem(SHAPE, family="zero_k_one_v"))
    assert not result.findings and result.lse_gradient == {}


def test_long_problems_are_measured_against_one_part():
    result = audit("LSE without gradient", golden_limit=0, parts=PARTS)
    assert result.against == "one part" and result.lse_gradient == {}
    assert set(result.errors["out"]) == set(PARTS)
    # Both round out; only one has the gradient.
    assert result.errors["out"][8] < 2 < result.errors["dquery"][8]


def test_what_cannot_be_merged_is_refused():
    with pytest.raises(ValueError, match="returns none"):
        merge_audit(lambda mask: honest("jax_nn", mask), Problem(SHAPE), parts=(2,))
    for parts in ((), (1,), (3,)):
        with pytest.raises(ValueError, match="divisors of 128"):
            merge_audit(attend, Problem(SHAPE), parts=parts)


@pytest.mark.parametrize("mask", [*MASKS, "dense"])
def test_the_mask_of_parts_is_that_of_the_whole(mask):
    rng = np.random.default_rng(0)
    dense = Mask(is_causal=True, dense=rng.random((2, 1, 64, 128)) < 0.5)
    rules = dense if mask == "dense" else MASKS[mask](SHAPE)
    whole = rules.materialise(64, 128)
    whole = np.ones(1, bool) if whole is None else np.asarray(whole)
    whole = np.broadcast_to(whole, (2, 1, 64, 128))
    of_parts = part_mask(rules, 4, 2, 128).materialise(64, 32)
    got = np.ones(1, bool) if of_parts is None else np.asarray(of_parts)
    got = np.broadcast_to(got, (8, 1, 64, 32)).reshape(2, 4, 1, 64, 32)
    np.testing.assert_array_equal(np.concatenate(list(got.swapaxes(0, 1)), -1), whole)
