"""The gradient through LSE alone, under masks that parts are not merged under."""

import dataclasses

import jax.numpy as jnp
import pytest

from attn_jax.audit import lse_gradient, more
from attn_jax.audit.finding import Finding
from attn_jax.audit.inputs import Shape
from attn_jax.audit.looks import look
from attn_jax.audit.plan import Group
from attn_jax.audit.problem import Problem
from attn_jax.audit.rows import findings_of
from attn_jax.audit.target import Adapter, Target
from tests import planted
from tests.audit_targets import attend, honest

SHAPE = Shape(2, 64, 96, 4, 2, 32)
CAUSAL = Problem(SHAPE, mask="causal")


@pytest.mark.parametrize(
    ("name", "mask", "dtype"),
    [
        ("plain", "causal", "float16"),
        ("plain", "packed", "float32"),
        ("flash2", "lengths", "bfloat16"),
        ("attn_jax", "window", "bfloat16"),
        ("eager_bf16", "causal", "bfloat16"),
    ],
)
def test_right_gradients_are_not_accused(name, mask, dtype):
    problem = Problem(SHAPE, dtype, mask=mask)
    assert lse_gradient.read(honest(name, problem.rules), problem) == []


@pytest.mark.parametrize(
    ("fault", "cause", "tensors"),
    [
        ("LSE without gradient", "LSE gets no gradient", ("dquery", "dkey")),
        ("LSE gradient in dQ alone", "LSE gradient wrong: dK", ("dkey",)),
        ("LSE gradient in dK alone", "LSE gradient wrong: dQ", ("dquery",)),
        ("dLSE in dV", "LSE gradient wrong: dV", ("dvalue",)),
    ],
)
def test_the_result_that_is_wrong_is_named(fault, cause, tensors):
    (found,) = lse_gradient.read(attend(CAUSAL.rules, fault), CAUSAL)
    assert (found.kind, found.cause) == ("wrong wiring", cause)
    assert found.tensors == tensors and found.says.startswith("under causal, ")


def test_what_is_wrong_without_dlse_is_not_said_here():
    wrong = planted.PLANTED["gradient is zero"].function
    problem = Problem(SHAPE)
    assert lse_gradient.read(planted.attend(wrong, problem), problem) == []


def test_a_result_that_is_known_to_be_wrong_is_not_said_to_be_so_with_dlse():
    """One that misses the diagonal in dK misses it there, too; none at all is another
    matter."""
    (found,) = lse_gradient.read(
        attend(CAUSAL.rules, "LSE gradient in dQ alone"), CAUSAL
    )
    (lost,) = lse_gradient.read(attend(CAUSAL.rules, "LSE without gradient"), CAUSAL)
    where = "another", str(CAUSAL)
    known = Finding("wrong wiring", "mask off by one", "", ("dkey",), where)
    elsewhere = dataclasses.replace(known, where=("another",))
    other = dataclasses.replace(known, tensors=("dquery",))
    of = lse_gradient.unexplained
    assert of([found, lost], [known]) == [lost]
    assert of([found, lost], [elsewhere, other]) == [found, lost]


def test_the_gradient_of_an_lse_in_base_2_is_its_own():
    """It is 1.44 times that of LSE, and was called a second mistake."""
    in_base_2 = planted.honest(dlse=lambda dlse: dlse / jnp.log(2))
    (found,) = lse_gradient.read(planted.attend(in_base_2, CAUSAL), CAUSAL)
    assert found.cause == "LSE gradient wrong" and "1.44 times" in found.says
    known = Finding("wrong wiring", "LSE in base 2", "", ("lse",), (str(CAUSAL),))
    assert lse_gradient.unexplained([found], [known]) == []
    rounded = dataclasses.replace(known, cause="LSE rounded to BF16")
    elsewhere = dataclasses.replace(known, where=("another",))
    assert lse_gradient.unexplained([found], [rounded, elsewhere]) == [found]
    of_value = dataclasses.replace(
        found, cause="LSE gradient wrong: dV", tensors=("dvalue",)
    )
    assert lse_gradient.unexplained([of_value], [known]) == [of_value]


def _forgets_under_causal(*arrays, is_causal=False, **rules):
    function = planted.honest(**({"dlse": jnp.zeros_like} if is_causal else {}))
    return function(*arrays, is_causal=is_causal, **rules)


def test_a_gradient_that_is_missing_under_a_bias_is_found():
    """It was read without one."""

    def forgets(*arrays, **rules):
        has_bias = len(arrays) > 3 or rules.get("bias") is not None
        function = planted.honest(**({"dlse": jnp.zeros_like} if has_bias else {}))
        return function(*arrays, **rules)

    problem = dataclasses.replace(CAUSAL, mask="bias")
    assert lse_gradient.read(planted.attend(planted.honest(), problem), problem) == []
    group = Group(SHAPE, "bias", ("normal",))
    options = dict(lse="return_residual")
    target = Target("", forgets, Adapter(**options))
    rows = look("through LSE", target, [group], problem.dtype, gradients=True)
    (found,) = findings_of(list(rows))
    assert found.cause == "LSE gets no gradient" and found.where == (str(problem),)


def test_a_gradient_that_is_missing_under_one_mask_is_found():
    target = Target("", _forgets_under_causal, Adapter(lse="return_residual"))
    full = dataclasses.replace(CAUSAL, mask="full")
    problems = [full, CAUSAL, dataclasses.replace(CAUSAL, mask="window")]
    rows = list(more.through_lse(target, problems))
    assert [len(row["findings"]) for row in rows] == [0, 1, 0]
    (found,) = rows[1]["findings"]
    assert found["cause"] == "LSE gets no gradient"
    assert found["where"] == (str(CAUSAL),)
    # Without LSE there is nothing to look at.
    assert not any(
        row["findings"]
        for row in more.through_lse(Target("", jnp.add, Adapter(lse=None)), problems)
    )
