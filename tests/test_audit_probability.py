"""What P tells by itself: its rows' rounding, its zeros, and no other fault hidden."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit import algorithms, attribution
from attn_jax.audit.audit import Audit
from attn_jax.audit.course import carry_out
from attn_jax.audit.exact import exact
from attn_jax.audit.finding import P_CLIPPED, ROWS_NOT_ONE
from attn_jax.audit.inputs import Shape
from attn_jax.audit.judge import WORSE
from attn_jax.audit.parts import Parts
from attn_jax.audit.plan import Group
from attn_jax.audit.probability import in_fp32, of_probabilities, probabilities
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import Adapter, Target
from attn_jax.formats import BF16, FP32
from tests.planted import GROUPED, attend, honest

SMALL = Shape(2, 48, 80, 4, 2, 32)
RECIPES = {name: attribution.candidates(BF16)[name] for name in algorithms.PLAIN}


def p_of_lse(query, key, value, *, scale=None, is_causal=False, return_residual=False):
    """FP32, P = exp(x - LSE), as backward passes have it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (
        jnp.repeat(x, query.shape[2] // key.shape[2], 2) for x in (key, value)
    )
    x = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    seen = jnp.tril(jnp.ones(x.shape[2:], bool)) if is_causal else True
    x = jnp.where(seen, x, -jnp.inf)
    lse = jax.nn.logsumexp(x, -1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(x - lse[..., None]), value)
    return (out, lse.swapaxes(1, 2)) if return_residual else out


def in_e4m3(x, _):
    return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def in_e5m2(x, _):
    return x.astype(jnp.float8_e5m2).astype(jnp.float32)


def of(function, problem: Problem):
    """P and what is found in it."""
    query, key, *_ = (jnp.asarray(x) for x in problem.inputs)
    p, right = probabilities(attend(function, problem), query, key), exact(problem)
    given = p, right.probability, right.visible, problem.format, (str(problem),)
    return p, of_probabilities(*given, of_logits=in_fp32(right))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("family", ["normal", "wide", "lse-130", "lse+150"])
def test_p_of_a_rounded_lse_is_not_accused(family, mask):
    """Its rows are off by about 2^-24 (|LSE| + |x|)."""
    problem = Problem(SMALL, "float32", family, mask)
    p, found = of(p_of_lse, problem)
    off = abs(p.sum(-1) - 1)
    assert off.max() > 4 * FP32.unit_roundoff or family == "wide"
    assert found == []
    # Twice what is allowed is too much.
    allowed = 4 * FP32.unit_roundoff + in_fp32(exact(problem))
    far = np.where((off == off.max())[..., None], (1 + 2 * allowed[..., None]) * p, p)
    right = exact(problem)
    (finding,) = of_probabilities(
        *(far, right.probability, right.visible, FP32), of_logits=in_fp32(right)
    )
    assert finding.cause == ROWS_NOT_ONE


def test_what_fp32_allows_is_a_few_units_of_the_logits():
    right = exact(Problem(SMALL, "float32"))
    size = abs(right.lse) + abs(right.logits).max(-1)
    assert (in_fp32(right) <= FP32.unit_roundoff * (4 * size + 8 + 5 + 10)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("narrow", [in_e4m3, in_e5m2])
def test_p_in_8_bits_is_neither_clipped_nor_normalised_wrongly(narrow, dtype):
    """What of it vanishes is little of what is rounded, and no row has a factor."""
    p, found = of(honest(block=None, narrow=narrow), Problem(SMALL, dtype))
    assert found == []
    assert abs(p.sum(-1) - 1).max() > 4 * FP32.unit_roundoff


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wrong_rows_are_no_rounding(dtype):
    problem = Problem(SMALL, dtype)
    p, _ = of(honest(), problem)
    right = exact(problem).probability
    u = problem.format.unit_roundoff

    def judged(changed):
        return [f.cause for f in of_probabilities(changed, right, None, problem.format)]

    # A factor of some rows, and of 8-bit P, too; half of the keys, and one, twice.
    rows = np.arange(48)[:, None] % 16 == 3
    assert judged(np.where(rows, p * (1 + 8 * u), p)) == [ROWS_NOT_ONE]
    coarse, _ = of(honest(block=None, narrow=in_e5m2), problem)
    assert judged(coarse * 1.2) == [ROWS_NOT_ONE]
    assert judged(np.where(np.arange(80) < 40, 2 * p, p)) == [ROWS_NOT_ONE]
    assert judged(np.where(np.arange(80) == 7, 2 * p, p)) == [ROWS_NOT_ONE]


def test_zeros_are_what_is_wrong_where_they_explain_the_error():
    problem = Problem(SMALL)
    right = exact(problem).probability
    noise = np.random.default_rng(0).uniform(-1, 1, right.shape)
    sizes = {}
    for threshold in (1e-4, 1e-3, 1e-2):
        clipped = np.where(right < threshold, 0.0, right * (1 + noise / 256))
        sizes[threshold] = of_probabilities(clipped, right, None)
    assert not sizes[1e-4]
    assert [f.cause for f in sizes[1e-2]] == [P_CLIPPED]
    assert 0.5 < float(sizes[1e-2][0].evidence["explained"]) <= 1
    # A share that is small is not said to be none.
    few = np.where(right == right.min(), 0.0, right)
    (finding,) = of_probabilities(few, right, None, FP32)
    assert finding.says.startswith("0.003% of P is zero"), finding.says


def wrong_dquery(gradients, scale):
    dq, dk, dv = gradients
    return 0.5 * (dq + jnp.roll(dq, 1, 1)), dk, dv


def third_rows(acc, total, value):
    """Every third row a tenth too large."""
    rows = jnp.arange(acc.shape[2])[:, None] % 3 == 0
    return acc / total * jnp.where(rows, 1.1, 1.0)


def audited(**knobs):
    group = Group(GROUPED, "full", ("normal", "uniform"))
    function = honest(gradients=wrong_dquery, **knobs)
    target = Target("planted", function, Adapter(lse="return_residual"))
    with Parts() as parts:
        wanted = Audit(target, (group,), "bfloat16", RECIPES, True, ("P",))
        return carry_out(wanted, parts).findings


@pytest.mark.parametrize(
    ("knobs", "cause"),
    [
        (dict(weights=lambda p: jnp.where(p < 2.0**-4, 0.0, p)), P_CLIPPED),
        (dict(finish=third_rows), ROWS_NOT_ONE),
        (dict(block=None, narrow=in_e4m3), ""),
    ],
    ids=["clipped", "rows", "E4M3"],
)
def test_what_is_wrong_with_p_hides_no_wrong_gradient(knobs, cause):
    found = audited(**knobs)
    of_out = [f for f in found if f.tensors == ("out",)]
    assert [f.cause for f in of_out] == [cause], found
    assert cause == ROWS_NOT_ONE or of_out[0].kind == WORSE
    assert [f for f in found if f.kind == WORSE and "dquery" in f.tensors], found


def test_queries_that_see_no_key_are_counted_once_for_all_heads():
    """They were as many as rows of all heads, and it was not said which."""
    visible = np.ones((2, 1, 8, 8), bool)
    visible[1, :, 6:] = False
    p = np.full((2, 3, 8, 8), 1 / 8)
    (found,) = of_probabilities(p, np.where(visible, p, 0), visible)
    assert found.says.startswith(
        "2 queries that see no key, the first of them 6 of batch entry 1, put weight"
    )
    assert found.evidence == {"rows": 2.0}


def test_what_p_explains_in_out_is_said_once():
    cells_of = Problem(SMALL)
    finding = of(honest(pad=True), cells_of)[1][0]
    assert not finding.is_other_attention
    assert dataclasses.replace(finding, cause="dropout left on").is_other_attention
