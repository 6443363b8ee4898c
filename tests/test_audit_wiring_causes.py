"""One cause for one mistake of the attention, and a second one where there are two."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit.exact import exact
from attn_jax.audit.finding import Finding
from attn_jax.audit.judge import WORSE
from attn_jax.audit.noise import gradient_noise
from attn_jax.audit.problem import GRADIENTS, Problem
from attn_jax.audit.verdict import judge, together
from attn_jax.audit.wiring import one_cause, recognise
from attn_jax.formats import BF16
from tests.planted import GROUPED, HONEST, PLANTED, honest, results
from tests.planted_masks import without
from tests.test_audit_verdict import cell

NORMAL, FLAT = (Problem(GROUPED, family=x) for x in ("normal", "repeated_max"))


def found(function, *problems: Problem) -> list[Finding]:
    return [
        finding
        for problem in problems
        for finding in recognise(results(function, problem), problem)
    ]


def of_next_entry(delta, total):
    return jnp.roll(delta, -1, 0)


def in_base_two(x, lse):
    return jnp.exp2(x - lse)


def twice_folded(x, lse):
    return jnp.exp((x - lse) / np.log(2))


def from_16_bits(x, lse):
    return jnp.exp(x - lse.astype(jnp.bfloat16).astype(x.dtype))


def by_usual_scale(gradients, scale):
    dq, dk, dv = gradients
    return dq / 0.75, dk, dv


@pytest.mark.parametrize(
    ("knobs", "cause", "tensors", "problem"),
    [
        ({"delta": of_next_entry}, "delta of another head", {"dquery", "dkey"}, NORMAL),
        (
            {"recomputed": in_base_two},
            "P in another base in the backward pass",
            set(GRADIENTS),
            NORMAL,
        ),
        (
            {"recomputed": twice_folded},
            "P in another base in the backward pass",
            set(GRADIENTS),
            NORMAL,
        ),
        (
            {"recomputed": from_16_bits},
            "LSE in 16 bits in the backward pass",
            # Of the others more than half is what else is rounded there.
            {"dvalue"},
            Problem(GROUPED, family="lse-130"),
        ),
        (
            {"gradients": by_usual_scale},
            "scale not taken by gradients",
            {"dquery"},
            Problem(GROUPED, scale_factor=0.75),
        ),
    ],
    ids=["delta", "base two", "base e of two", "LSE", "scale"],
)
def test_what_a_backward_pass_makes_anew_is_named(knobs, cause, tensors, problem):
    (finding,) = found(honest(**knobs), problem)
    assert (finding.cause, {*finding.tensors}) == (cause, tensors)


@pytest.fixture(scope="module")
def unscaled():
    return found(PLANTED["scale missing"].function, NORMAL, FLAT)


def test_what_a_wrong_attention_does_itself_is_no_other_cause(unscaled):
    """Where two keys share all of P it hardly depends on the scale, as LSE does."""
    alone = {f.cause for f in unscaled if f.where == (str(FLAT),)}
    assert alone >= {"LSE of unscaled logits", "dK without the scale"}
    merged = one_cause(unscaled, [NORMAL, FLAT])
    assert {f.cause for f in merged} == {"scale missing"}
    tensors = {t for f in merged for t in f.tensors if f.where == (str(FLAT),)}
    assert tensors >= {"lse", "dkey"}


def test_a_cause_stands_for_nothing_else(unscaled):
    problems = [NORMAL, FLAT]
    flat = [f for f in unscaled if f.where == (str(FLAT),)]
    # What it does not give, what nothing is known of, and what is beside it.
    twice = [
        dataclasses.replace(unscaled[0], cause="scale applied twice"),
        *flat,
    ]
    assert one_cause(twice, problems) == twice
    assert one_cause(flat, problems) == flat
    other = dataclasses.replace(unscaled[0], tensors=("dvalue",), where=(str(FLAT),))
    other = dataclasses.replace(other, cause="dK and dV exchanged")
    assert one_cause([unscaled[0], other], problems)[1] == other
    causal = dataclasses.replace(NORMAL, mask="causal")
    of_mask = dataclasses.replace(unscaled[0], where=(str(causal),))
    assert one_cause([of_mask, *flat], [causal, FLAT]) == [of_mask, *flat]
    on_top = dataclasses.replace(flat[0], where=(str(NORMAL),))
    assert one_cause([unscaled[0], on_top], problems)[1] == on_top


@pytest.mark.parametrize(
    ("axis", "cause"), [(2, "softmax over the queries"), (1, "softmax over the heads")]
)
@pytest.mark.parametrize("family", ["normal", "uniform"])
def test_a_softmax_over_another_axis_is_one_mistake(family, axis, cause):
    """Its dQ was said to lack delta."""
    problem = Problem(GROUPED, family=family)
    query, key, value, dout, *_ = (jnp.asarray(x) for x in problem.arrays)

    def attend(query, key, value):
        group = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, group, 2) for x in (key, value))
        logits = jnp.einsum(
            "btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32
        )
        p = jax.nn.softmax(exact(problem).scale * logits, axis)
        return jnp.einsum("bnts,bsnh->btnh", p.astype(value.dtype), value)

    out, pull = jax.vjp(attend, query, key, value)
    given = dict(zip(GRADIENTS, pull(dout), strict=True)) | {"out": out}
    (finding,) = recognise({n: np.asarray(x) for n, x in given.items()}, problem)
    assert finding.cause == cause
    assert set(finding.tensors) == {"out", *GRADIENTS}


def _overwritten(gradients, scale):
    """As if each tile of keys wrote its dQ over the one before."""
    dq, dk, dv = gradients
    return dq * (1 + jnp.sin(7.0 * jnp.arange(dq.shape[1]))[:, None, None]), dk, dv


GROUPING = dict(
    key_heads=lambda N, K: [n % K for n in range(N)],
    group=lambda x, K: x.reshape(*x.shape[:2], -1, K, x.shape[-1]).sum(2),
)


def test_a_gradient_that_a_wrong_attention_does_not_explain_is_said():
    both = found(honest(gradients=_overwritten, **GROUPING), NORMAL)
    wired, worse = both
    assert wired.cause == "GQA heads grouped wrongly" and "dquery" not in wired.tensors
    assert (worse.kind, worse.tensors) == (WORSE, ("dquery",))
    assert wired.cause in worse.says
    cells = [cell()._replace(problem=NORMAL)]
    assert judge(cells, None, (), both) == both
    causal = Problem(GROUPED, mask="causal")
    mask = without(is_causal=False)
    (_, worse) = found(honest(seen_backward=mask, **GROUPING), causal)
    assert worse.kind == WORSE and set(worse.tensors) == {*GRADIENTS}


@pytest.mark.parametrize("family", ["normal", "uniform", "wide", "repeated_max"])
@pytest.mark.parametrize("name", ["GQA heads grouped wrongly", "scale missing"])
def test_a_wrong_attention_explains_its_own_gradients(name, family):
    problem = Problem(GROUPED, family=family)
    kinds = {f.kind for f in found(PLANTED[name].function, problem)}
    assert kinds <= {"wrong wiring"}


@pytest.mark.parametrize("family", ["normal", "uniform", "wide", "repeated_max"])
def test_roundings_of_gradients_are_below_what_is_said_of_them(family):
    problem = Problem(GROUPED, family=family)
    given, right = results(HONEST["blocks of 32"], problem), exact(problem)
    noise = gradient_noise(right, BF16.unit_roundoff)
    for name in GRADIENTS:
        off = given[name].astype(np.float64) - getattr(right, name)
        assert np.sqrt(np.mean(off**2)) < noise[name], name


def _times(factor: float):
    return lambda gradients, scale: (
        *(gradient * factor for gradient in gradients[:2]),
        gradients[2],
    )


def _unscaled(dq: bool, dk: bool):
    return lambda gradients, scale: (
        gradients[0] / (scale if dq else 1),
        gradients[1] / (scale if dk else 1),
        gradients[2],
    )


@pytest.mark.parametrize(
    ("dq", "dk", "cause"),
    [
        (True, False, "dQ without the scale"),
        (False, True, "dK without the scale"),
        (True, True, "dQ and dK without the scale"),
    ],
)
def test_no_more_is_said_to_lack_the_scale_than_does(dq, dk, cause):
    """dQ was said to lack it, too, where dK alone does: on some problems, by chance."""
    unscaled = honest(gradients=_unscaled(dq, dk))
    problems = [
        Problem(GROUPED, family=family, scale_factor=factor)
        for family in ("normal", "uniform", "wide")
        for factor in (0.75, 1.0, 1.3, 0.6)
    ]
    given = found(unscaled, *problems)
    assert {finding.cause for finding in given} == {cause}
    assert len(given) == len(problems)


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2**-0.5, "gradient with the scale of another head dim"),
        (np.log(2), "gradient in another base"),
        # Within a quarter of what is wrong from both, and neither.
        (0.73, None),
        (0.65, None),
    ],
)
def test_a_factor_is_named_by_the_one_that_it_is(factor, cause):
    """A head dim that is padded to twice itself was called another base."""
    causes = {f.cause for f in found(honest(gradients=_times(factor)), NORMAL)}
    assert causes == ({cause} if cause else set())


@pytest.mark.parametrize("base", ["maximum", "sum"])
def test_either_part_of_lse_may_be_in_another_base(base):
    """That of the sum had no name."""

    def mixed(lse, m, scale):
        parts = {"maximum": m, "sum": lse - m}
        return sum(x / np.log(2) if name == base else x for name, x in parts.items())

    (mistake,) = found(honest(lse=mixed), NORMAL)
    assert (mistake.cause, mistake.tensors) == ("LSE mixes bases", ("lse",))
    in_base_2 = {"maximum": "the maximum in base 2", "sum": "of the sum to base 2"}
    assert in_base_2[base] in mistake.says


def test_a_wrong_lse_is_what_is_wrong_with_merges():
    """Its gradient was accused beside it, and first."""
    cells = [cell()]
    place = str(cells[0].problem)
    known = Finding("wrong wiring", "LSE mixes bases", "", ("lse",), (place,))
    of_lse = dict(tensors=("dquery", "dkey"), where=("merge",))
    merged = Finding("wrong wiring", "LSE gradient wrong", "", **of_lse)
    apart = Finding(WORSE, "parts do not merge", "", ("out", "lse"), ("merge",))
    (left,) = together([known], [merged, apart], cells)
    assert left == dataclasses.replace(known, where=(*known.where, "merge"))
    worse = Finding(WORSE, "", "", ("lse",), known.where)
    assert len(together([worse], [merged, apart], cells)) == 1
    # It has a gradient or none without merges, too, and in 16 bits its weights.
    read = dataclasses.replace(merged, where=(str(NORMAL),))
    assert together([known], [merged, read], cells)[1] == read
    rounded = dataclasses.replace(known, cause="LSE rounded to BF16")
    assert together([rounded], [merged], cells) == [rounded, merged]
    out = dataclasses.replace(known, tensors=("dvalue",))
    assert together([out], [merged, apart], cells) == [out, merged, apart]


def test_v_of_other_heads_is_no_other_grouping():
    """Nor a mistake of the backward pass, though with K = 0 nothing else is seen."""
    zero = Problem(GROUPED, family="zero_k_one_v")
    mistakes = found(PLANTED["V of other heads"].function, NORMAL, zero)
    first, alone = one_cause(mistakes, [NORMAL, zero])
    assert first.cause == alone.cause == "V of other heads"
    assert first.tensors == ("out", "dquery", "dkey", "dvalue")
    assert alone.where == (str(zero),) and "GQA" in mistakes[1].cause
