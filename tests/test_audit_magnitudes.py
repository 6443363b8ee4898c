"""The range of numbers inside an attention: small and large dO and V."""

import jax.numpy as jnp
import pytest

from attn_jax.audit.inputs import Shape
from attn_jax.audit.magnitudes import magnitudes
from attn_jax.audit.problem import GRADIENTS, Problem
from tests.audit_targets import honest
from tests.planted import HONEST, attend, wrapped

SHAPE = Shape(2, 48, 64, 4, 2, 32)
WORSE = "worse than its algorithm allows"


def through_fp16(function, *arrays, **rules):
    """For any inputs a kernel for FP16 alone: results are as good as BF16's."""
    dtype = arrays[0].dtype
    given = function(*(x.astype(jnp.float16) for x in arrays), **rules)
    if rules.get("return_residual"):
        return given[0].astype(dtype), given[1]
    return given.astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_fp16_inside_loses_is_found(dtype):
    """With dO of about 1 all of it was right, and trustworthy."""
    problem = Problem(SHAPE, dtype=dtype)
    found = magnitudes(attend(wrapped(through_fp16), problem), problem)
    blamed = {}
    for x in found:
        if x.finding is not None:
            of = x.finding.kind, x.finding.cause
            blamed.setdefault(of, []).extend(x.finding.tensors)
    assert blamed == {
        (WORSE, "range: gradients of small dO are lost"): [*GRADIENTS],
        ("not finite", "range: gradients of large dO are out of range"): [*GRADIENTS],
        (WORSE, "range: out of small V is lost"): ["out"],
        ("not finite", "range: out of large V is out of range"): ["out"],
    }
    of_out = magnitudes(
        attend(wrapped(through_fp16), problem), problem, gradients=False
    )
    assert [x.tensors for x in of_out] == [("out",)] * 2
    assert all(x.finding is not None for x in of_out)


def test_a_part_that_is_lost_is_found():
    """Of dP, and not of dV."""

    def of(function, query, key, value, **rules):
        value = value.astype(jnp.float16).astype(value.dtype)
        return function(query, key, value, **rules)

    problem = Problem(SHAPE)
    found = magnitudes(attend(wrapped(of), problem), problem)
    assert {x.tensors for x in found if x.finding} >= {("out",)}
    assert not [x for x in found if x.finding and "2^-30: dquery" in x.name]


@pytest.mark.parametrize(
    "name", ["jax.nn", "exp2", "keys repeated for every query head"]
)
@pytest.mark.parametrize("mask", ["full", "lengths"])
def test_honest_functions_keep_all_of_it(name, mask):
    problem = Problem(SHAPE, mask=mask)
    found = magnitudes(attend(HONEST[name], problem), problem)
    assert len(found) == 8 and all(x.finding is None for x in found)


@pytest.mark.parametrize("name", ["attn_jax", "eager_bf16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recipes_keep_all_of_it(name, dtype):
    problem = Problem(SHAPE, dtype=dtype)
    found = magnitudes(honest(name, problem.rules), problem)
    assert all(x.finding is None for x in found)


def test_inputs_in_fp16_would_leave_the_range_themselves():
    problem = Problem(SHAPE, dtype="float16")
    assert magnitudes(attend(HONEST["exp2"], problem), problem) == ()
