"""Calls with less than the audit gives otherwise: no LSE asked for, no scale told."""

import jax
import pytest

from attn_jax.audit import algorithms, attribution, calls, verdict
from attn_jax.audit.audit import Audit
from attn_jax.audit.course import carry_out
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Runner, measured
from attn_jax.audit.parts import Parts
from attn_jax.audit.plan import Group
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import Adapter, Target
from attn_jax.audit.verdict import Judged
from attn_jax.audit.wiring import recognise
from attn_jax.formats import BF16
from tests import planted
from tests.knobs import same
from tests.planted_masks import without

SHAPE = Shape(1, 48, 64, 2, 1, 32)
PROBLEMS = [Problem(SHAPE, mask=mask) for mask in ("full", "causal")]
# Units that ordinary algorithms have on all these problems, or more.
ALLOWED = 1.6


def by_call(with_lse, without_lse):
    """A function that is one or the other."""

    def attend(
        query, key, value, *, scale=None, is_causal=False, return_residual=False
    ):
        chosen = with_lse if return_residual else without_lse
        rules = dict(scale=scale, is_causal=is_causal, return_residual=return_residual)
        return chosen(query, key, value, **rules)

    return attend


HONEST = planted.honest(block=32)
HALF_BLIND = planted.honest(block=32, seen_backward=without(is_causal=False))


def with_default_scale(default):
    def attend(query, key, value, *, scale=None, is_causal=False):
        scale = default(query) if scale is None else scale
        return HONEST(query, key, value, scale=scale, is_causal=is_causal)

    return attend


def found(function, adapter: Adapter = Adapter()):
    """Findings of other calls, with the usual ones judged, too."""
    target, cells, wiring = Target("planted", function, adapter), {}, []
    for problem in PROBLEMS:
        outcome = Runner(target.on(problem))(problem)
        of = measured(problem, outcome.results)
        wiring += recognise(outcome.results, problem) if outcome.results else []
        cells[str(problem)] = Judged(problem, outcome, of, dict.fromkeys(of, ALLOWED))
    rows = [*calls.measure(target, PROBLEMS, gradients=True)]
    return calls.findings(
        rows, cells, wiring, lambda problem, of: dict.fromkeys(of, ALLOWED)
    )


def test_a_backward_pass_of_the_call_without_lse_alone_is_looked_at():
    """It is what models train on, and was never run."""
    (finding,) = found(by_call(HONEST, HALF_BLIND))
    assert finding.kind == "wrong wiring"
    assert finding.cause == "causal ignored in the backward pass"
    assert finding.says.startswith("without return_residual, ")
    assert {"dquery", "dkey"} <= set(finding.tensors)
    assert finding.where == (f"{PROBLEMS[1]}, without return_residual",)


def test_results_of_no_known_mistake_are_named_by_their_call():
    off = planted.honest(gradients=lambda grads, scale: (grads[0] * 1.03, *grads[1:]))
    (finding,) = found(by_call(HONEST, off))
    assert (finding.kind, finding.cause) == (verdict.WORSE, "without return_residual")
    assert finding.tensors == ("dquery",)


def test_what_both_calls_have_is_said_once():
    assert found(HALF_BLIND) == []
    assert found(by_call(HALF_BLIND, HALF_BLIND)) == []


@pytest.mark.ci
def test_what_is_poor_in_one_call_and_worse_in_the_usual_one_is_said_once():
    """The other way round it is said: a call that is worse has something of its own."""

    def of_dquery(by):
        def gradients(grads, scale):
            return (grads[0] * (1 + by), *grads[1:])

        return planted.honest(block=32, gradients=gradients)

    # Some 2.0 and 2.8 units: 1.5 times `ALLOWED`, which is still poor, is 2.4.
    poor, worse = of_dquery(0.0025), of_dquery(0.004)
    assert found(by_call(worse, poor)) == []
    (finding,) = found(by_call(poor, worse))
    assert (finding.kind, finding.tensors) == (verdict.WORSE, ("dquery",))
    (finding,) = found(by_call(HONEST, poor))
    assert (finding.kind, finding.tensors) == (verdict.POOR, ("dquery",))


@pytest.mark.ci
def test_another_honest_algorithm_is_not_accused():
    exact = planted.honest(narrow=same, delta_from="unrounded out")
    for function in (
        HONEST,
        by_call(exact, HONEST),
        by_call(HONEST, exact),
        jax.nn.dot_product_attention,
    ):
        assert found(function) == [], function


@pytest.mark.parametrize(
    "default",
    [lambda query: query.shape[1] ** -0.5, lambda query: 1.07 * 32**-0.5],
    ids=["of the length", "near"],
)
def test_a_wrong_default_of_the_scale_is_found(default):
    """The scale was always given."""
    (finding,) = found(with_default_scale(default))
    assert finding.cause == calls.DEFAULT_SCALE
    assert finding.kind in ("wrong wiring", verdict.WORSE)
    assert finding.says.startswith("without scale, ")
    assert finding.tensors == ("out",)


def test_a_default_that_says_what_it_is_is_not_called():
    def number(query, key, value, *, scale=1.0):
        raise AssertionError

    def required(query, key, value, *, scale):
        raise AssertionError

    def given(query, key, value, *, scale=None):
        raise AssertionError

    of = [calls.without_scale(Target("f", f)) for f in (number, required, given)]
    assert of[:2] == [None, None] and of[2] is not None
    assert calls.without_scale(Target("f", given, Adapter(scale="outside"))) is None


def test_lse_that_comes_unless_it_is_refused_is_refused():
    def by_default(query, key, value, *, scale=None, return_residual=True):
        return HONEST(query, key, value, scale=scale, return_residual=return_residual)

    other = calls.without_lse(Target("f", by_default))
    assert other is not None and other.adapter.more == {"return_residual": False}
    other = calls.without_lse(Target("f", HONEST))
    assert other is not None and other.adapter.more == {}
    for lse in ("always", None):
        assert calls.without_lse(Target("f", HONEST, Adapter(lse=lse))) is None


def test_a_call_that_fails_is_said_unless_it_may_want_the_argument():
    def attend(query, key, value, *, scale=None, is_causal=False):
        if scale is None:
            raise TypeError("no scale")
        return HONEST(query, key, value, scale=scale, is_causal=is_causal)

    (finding,) = found(attend)
    assert (finding.kind, finding.cause) == ("fails", "without scale")
    assert "no scale" in finding.says
    unknown = found(
        lambda *arrays, **rules: attend(*arrays, **rules), Adapter(lse=None)
    )
    assert [(f.kind, f.cause) for f in unknown] == [
        ("not taken", "without scale not run")
    ]


def test_the_audit_has_them():
    known = attribution.candidates(BF16)
    recipes = {name: known[name] for name in algorithms.PLAIN}
    groups = tuple(Group(SHAPE, p.mask, ("normal",)) for p in PROBLEMS)

    def attend(query, key, value, *, scale=None, is_causal=False):
        scale = 0.7 if scale is None else scale
        return HONEST(query, key, value, scale=scale, is_causal=is_causal)

    with Parts() as parts:
        target = Target("planted", attend)
        wanted = Audit(target, groups, "bfloat16", recipes, True, ("calls",))
        result = carry_out(wanted, parts)
    assert [f.cause for f in result.findings] == [calls.DEFAULT_SCALE]
