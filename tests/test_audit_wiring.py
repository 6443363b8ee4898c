"""Wrong wiring is recognised under its name, and rounding is never taken for it."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit import judge
from attn_jax.audit.error import correctly_rounded, unit, unit_error
from attn_jax.audit.exact import exact, visible
from attn_jax.audit.finding import ROUNDED_QUERY, Finding
from attn_jax.audit.inputs import FAMILIES, Shape
from attn_jax.audit.probability import of_probabilities, probabilities
from attn_jax.audit.problem import MASKS, TENSORS, Problem
from attn_jax.audit.wiring import (
    VARIANTS,
    recognise,
)
from attn_jax.formats import BF16, FP16
from attn_jax.reference import golden
from tests.knobs import bfloat16
from tests.planted import (
    GROUPED,
    HONEST,
    PLANTED,
    SQUARE,
    attend,
    honest,
    results,
)

# Not seen in results for dLSE = 0 / by P alone.
ELSEWHERE = {"LSE stop_gradient", "dropout left on", "window two too far to the left"}
WIRING = [
    name
    for name, planted in PLANTED.items()
    if planted.expects == "wrong wiring" and name not in ELSEWHERE
]
# Other tests, or other names here, have the same causes.
IN_CI = {"scale missing", "scale applied twice", "bias of another head"}
IN_CI |= {"causal ignored", "causal off by one (j < i)", "queries that see no key"}
IN_CI |= {"mask missing in the backward pass", "first KV tile dropped"}
IN_CI |= {"window sides swapped", "segment ids ignored", "V of other heads"}
IN_CI |= {"query lengths ignored", "key lengths ignored", "key lengths off by one"}
IN_CI |= {"a key too many", "lengths of another batch entry"}
IN_CI |= {"GQA heads grouped wrongly", "gradients of another batch entry"}
POOR = [
    name
    for name, planted in PLANTED.items()
    if planted.expects in ("worse than its algorithm allows", "not reproducible")
]
SUMS = ("out", "dquery", "dkey", "dvalue")
# More queries than keys: with a window, some of them see no key.
LONG = Shape(2, 90, 50, 4, 2, 16)


def causes(findings) -> list[str]:
    assert all(finding.kind == "wrong wiring" for finding in findings)
    return [finding.cause for finding in findings]


def figure(finding: Finding, name: str) -> float:
    x = finding.evidence[name]
    assert not isinstance(x, str)
    return x


@functools.cache
def exact_results(problem: Problem) -> dict[str, np.ndarray]:
    golden = problem.exact()
    tensors = TENSORS if problem.has_bias else TENSORS[:-1]
    return {name: getattr(golden, name) for name in tensors}


def of_scaled_query(problem: Problem) -> dict[str, np.ndarray]:
    """Exact results of the query that is left when it is scaled and rounded."""
    query = problem.inputs.query
    _, *others = (x.astype(np.float64) for x in problem.inputs)
    scale = query.shape[-1] ** -0.5
    scaled = (query.astype(np.float32) * np.float32(scale)).astype(query.dtype)
    query = scaled.astype(np.float64) / scale
    found = golden(query, *others, bias=problem.bias, mask=problem.rules)
    return {name: getattr(found, name) for name in exact_results(problem)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [GROUPED, SQUARE, LONG], ids=str)
def test_parts_make_up_the_golden_results(shape, mask):
    problem = Problem(shape, mask=mask)
    parts = exact(problem)
    for name, right in exact_results(problem).items():
        size = abs(right[np.isfinite(right)]).max()
        # FP64 sums in other orders: of at most 160 keys, 32 columns and, for dK, 180
        # queries, six one after the other: 1000 * 2^-53 = 1e-13 of their terms, which
        # are a few times the result.
        np.testing.assert_allclose(
            getattr(parts, name), right, rtol=0, atol=1e-12 * size, err_msg=name
        )


def test_what_was_computed_is_kept_only_where_it_stays_the_same():
    first = exact(Problem(GROUPED, mask="bias"))
    assert first.out.shape == GROUPED.query and first.dquery.any()
    changes = {"scale": 0.5, "visible": first.logits > 0, "key_head": (1, 0, 1, 0)}
    changes["bias"] = None
    for changed in (*({n: x} for n, x in changes.items()), {"value": first.key}):
        again = first.replaced(**changed)
        anew = dataclasses.replace(first, **changed)
        for name in TENSORS:
            np.testing.assert_array_equal(getattr(again, name), getattr(anew, name))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.ci] * (x in IN_CI)) for x in WIRING]
)
def test_a_mistake_is_recognised_by_its_name_and_no_other(name):
    planted = PLANTED[name]
    findings = recognise(results(planted.function, planted.problem), planted.problem)
    (cause,) = causes(findings)
    assert cause.lower() in planted.cause
    (finding,) = findings
    assert finding.tensors and finding.where == (str(planted.problem),)
    if "rounded" not in cause:
        assert figure(finding, "matches") < 0.01 < figure(finding, "right")


def test_every_mistake_that_can_be_planted_has_a_variant():
    known = {name.lower() for name in VARIANTS}
    known |= {f"{name} in the backward pass" for name in known}
    known |= {"lse rounded to bf16", "lse rounded to fp16"}
    for name in WIRING:
        assert PLANTED[name].cause <= known


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * bool(i % 3))
        for i, name in enumerate(HONEST)
    ],
)
def test_rounding_is_not_taken_for_wiring(name):
    cells = [("normal", mask) for mask in MASKS]
    cells += [("uniform", "full"), ("lse-130", "causal"), ("repeated_max", "full")]
    cells += [("zero_k_one_v", "full")]
    for family, mask in cells:
        problem = Problem(GROUPED, family=family, mask=mask)
        given = results(HONEST[name], problem)
        found = recognise(given, problem)
        if name == "scaled query":
            # Its LSE is poor, which is no wiring, and there is nothing else.
            poor = [
                f for f in found if (f.kind, f.cause) == (judge.POOR, ROUNDED_QUERY)
            ]
            assert len(poor) == (family != "zero_k_one_v") and found == poor
            assert all(f.tensors == ("lse",) for f in poor)
        else:
            assert causes(found) == []
        if family == "normal":
            # P or dS, O and the result are rounded: three independent units.
            units = dict.fromkeys(SUMS, 3)
            if problem.has_bias:
                units["dbias"] = 3
            right = exact_results(problem)
            if name in ("scaled query", "textbook"):
                # The gradient of what it makes of the query is rounded, then dQ.
                right, units["dquery"] = of_scaled_query(problem), 4
            if name in ("keys repeated for every query head", "textbook"):
                # Each head's gradient is rounded, then their sum.
                units |= {"dkey": 4, "dvalue": 4}
            for tensor, count in units.items():
                off = unit_error(given[tensor], right[tensor], BF16)
                assert off < count**0.5 * 1.1, tensor


@pytest.mark.parametrize("name", POOR)
def test_poor_arithmetic_is_not_taken_for_wiring(name):
    planted = PLANTED[name]
    for problem in {planted.problem, Problem(GROUPED, family="uniform")}:
        given = results(planted.function, problem)
        assert causes(recognise(given, problem)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_of_a_hundred_units_is_not_taken_for_wiring(family):
    problem = Problem(GROUPED, family=family)
    right, absolute = problem.exact(), problem.exact(absolute=True)
    rng = np.random.default_rng(0)
    noisy = {}
    for name in SUMS:
        golden = getattr(right, name)
        size, _ = unit(golden, BF16, getattr(absolute, name))
        noisy[name] = golden + 100 * size * rng.standard_normal(golden.shape)
    assert causes(recognise(noisy, problem)) == []


@pytest.mark.parametrize("family", ["uniform", "offset", "wide"])
def test_a_mistake_is_recognised_where_rounding_is_large(family):
    problem = Problem(GROUPED, family=family)
    for name in ("dQ without the scale", "delta missing", "causal ignored"):
        on = dataclasses.replace(problem, mask=PLANTED[name].problem.mask)
        found = recognise(results(PLANTED[name].function, on), on)
        assert causes(found) == [name]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types(dtype):
    problem = Problem(GROUPED, dtype=dtype)
    name = "scale missing"
    found = recognise(results(PLANTED[name].function, problem), problem)
    assert causes(found) == [name]
    assert causes(recognise(results(honest(), problem), problem)) == []


@pytest.mark.parametrize(
    ("mask", "changed", "cause"),
    [
        ("full", {"scale": 1.0}, "scale missing"),
        ("causal", {"is_causal": False}, "causal ignored"),
        ("full", {"is_causal": True}, "causal where it was not asked for"),
        ("window", {"local_window_size": (10, 20)}, "window sides swapped"),
        ("lengths", {"key_value_seq_lengths": None}, "key lengths ignored"),
        ("lengths", {"query_seq_lengths": None}, "query lengths ignored"),
    ],
)
def test_jax_nn_called_wrongly(mask, changed, cause):
    # Forward and backward pass, by JAX's derivative, share nothing with what is looked
    # for.
    def wrong(*arrays, **rules):
        return HONEST["jax.nn"].function(*arrays, **{**rules, **changed})

    wrong.residual = False
    problem = Problem(GROUPED, mask=mask)
    (finding,) = recognise(results(wrong, problem), problem)
    assert finding.cause == cause
    assert finding.tensors == ("out", "dquery", "dkey", "dvalue")


def test_two_mistakes_are_two_findings():
    problem = Problem(GROUPED)
    function = honest(
        scale=lambda scale, H: 1.0, lse=lambda lse, m, scale: lse / np.log(2)
    )
    found = recognise(results(function, problem), problem)
    assert [(f.cause, f.tensors) for f in found] == [
        ("scale missing", ("out", "dquery", "dkey", "dvalue")),
        ("LSE in base 2", ("lse",)),
    ]


@pytest.mark.parametrize(
    ("family", "by", "cause"),
    [
        # Where a key less hardly changes anything, rows that see no key and get the
        # mean of V are as near to both mistakes as to one.
        ("repeated_max", 0, "queries that see no key"),
        ("normal", 0, "queries that see no key"),
        ("normal", 1, "key lengths off by one"),
    ],
)
def test_one_mistake_is_not_taken_for_two(family, by, cause):
    problem = Problem(Shape(2, 96, 96, 2, 1, 32), family=family, mask="lengths")
    lengths = np.maximum(np.asarray(problem.rules.key_value_lengths) - by, 0)
    mask = dataclasses.replace(problem.rules, key_value_lengths=lengths)
    found = exact(problem).replaced(empty="mean", visible=visible(mask, 96, 96))
    names = [name for name in TENSORS if name not in ("lse", "dbias")]
    x = {name: correctly_rounded(getattr(found, name), BF16) for name in names}
    assert [finding.cause for finding in recognise(x, problem)] == [cause]


def test_a_natural_logarithm_that_is_said_to_be_another():
    problem = Problem(GROUPED)
    function = honest(lse=lambda lse, m, scale: lse * np.log(2))
    (found,) = recognise(results(function, problem), problem)
    assert (found.cause, found.tensors) == ("LSE taken for base 2", ("lse",))


def test_some_results_are_enough():
    planted = PLANTED["causal ignored"]
    given = results(planted.function, planted.problem)
    for names in (["out"], ["lse"], ["dquery", "dvalue"], ["dkey"]):
        some = {name: given[name] for name in names}
        (finding,) = recognise(some, planted.problem)
        assert finding.tensors == tuple(names)
        assert finding.cause == "causal ignored"
    assert recognise({}, planted.problem) == []


def test_a_sentence_says_what_is_computed_and_what_to_change():
    planted = PLANTED["GQA sum missing, the last head"]
    (finding,) = recognise(results(planted.function, planted.problem), planted.problem)
    assert finding.says.startswith("dK, dV: the sum over the query heads of a key")
    assert "(the last alone)" in finding.says
    assert finding.says.endswith("that read each key head")


def test_results_that_are_not_finite_match_nothing():
    planted = PLANTED["NaN where a query sees no key"]
    given = results(planted.function, planted.problem)
    assert np.isnan(given["out"]).any()
    assert causes(recognise(given, planted.problem)) == []


def test_lse_is_rounded_only_if_its_numbers_are_and_are_the_nearest():
    problem = Problem(GROUPED)
    right = problem.exact().lse.astype(np.float32)
    noise = np.random.default_rng(0).standard_normal(right.shape).astype(np.float32)
    assert recognise({"lse": right}, problem) == []
    assert recognise({"lse": right + noise / 64}, problem) == []
    assert recognise({"lse": np.asarray(bfloat16(right + noise / 8))}, problem) == []
    rounded = right.astype(jnp.bfloat16)
    for given in (rounded, rounded.astype(np.float32), rounded.astype(np.float64)):
        assert causes(recognise({"lse": given}, problem)) == ["LSE rounded to BF16"]


@pytest.mark.parametrize("unit", [1.0, np.log2(np.e)], ids=["base e", "base 2"])
@pytest.mark.parametrize("mask", ["full", "lengths"])
def test_lse_of_a_query_that_is_rounded_after_scaling_is_poor(unit, mask):
    """As of kernels that fold log2(e) into Q; it was called worse than any algorithm
    allows."""
    problem = Problem(Shape(2, 64, 64, 4, 2, 48), mask=mask)
    right = exact(problem)
    factor = right.scale * unit
    query = np.asarray(bfloat16(right.query * factor)) / factor
    lse = right.replaced(query=query).lse.astype(np.float32)
    (found,) = recognise({"lse": lse}, problem)
    assert (found.kind, found.cause) == (judge.POOR, ROUNDED_QUERY)
    assert found.tensors == ("lse",)
    assert 4 * figure(found, "matches") < figure(found, "right")
    # As far off another way, it is not, and neither is what is off by nothing.
    seen = np.isfinite(right.lse)
    miss = np.where(seen, lse - np.where(seen, right.lse, 0), 0)
    off = right.lse + miss[:, ::-1]
    given = right.lse.astype(np.float32)
    assert recognise({"lse": off}, problem) == recognise({"lse": given}, problem) == []
    wide = dataclasses.replace(problem, dtype="float32")
    assert recognise({"lse": lse}, wide) == []
    # A query that no scale leaves in range is not looked at.
    large = dataclasses.replace(problem, dtype="float16", scale_factor=1e6)
    off = large.exact().lse * 1.001
    assert not any("rounded after" in f.cause for f in recognise({"lse": off}, large))


# P, read from a callable ----------------------------------------------------------

SMALL = Shape(2, 48, 80, 4, 2, 32)


def read(function, problem: Problem) -> np.ndarray:
    query, key, *_ = (jnp.asarray(x) for x in problem.inputs)
    return probabilities(attend(function, problem), query, key)


def judged(p: np.ndarray, problem: Problem, fmt=BF16):
    s = problem.shape
    seen = visible(problem.rules, s.query_length, s.key_length)
    return of_probabilities(p, exact(problem).probability, seen, fmt, (str(problem),))


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "bias"])
def test_p_is_read_and_nothing_is_wrong_with_it(mask):
    problem = Problem(SMALL, mask=mask)
    p = read(honest(), problem)
    # P and the output, each rounded once to BF16.
    np.testing.assert_allclose(
        p, exact(problem).probability, rtol=2.5 * BF16.unit_roundoff, atol=1e-30
    )
    assert judged(p, problem) == []


@pytest.mark.parametrize("name", ["jax.nn", "blocks of 32"])
@pytest.mark.parametrize("family", ["lse-130", "wide", "repeated_max"])
def test_small_probabilities_may_vanish(family, name):
    problem = Problem(SMALL, family=family, mask="causal")
    assert judged(read(HONEST[name], problem), problem) == []
    half = dataclasses.replace(problem, dtype="float16")
    if name != "jax.nn":  # which has no FP16 products on a CPU
        p = read(HONEST[name], half)
        right = exact(half).probability
        assert family != "wide" or ((p == 0) & (right > 0)).any()
        assert judged(p, half, FP16) == []


def test_nothing_is_no_dropout():
    p = np.full((1, 1, 8, 8), 1 / 8)
    (finding,) = of_probabilities(np.zeros_like(p), p, None)
    assert finding.cause == "visible pairs carry none"


def test_dropout_is_found_with_its_share():
    problem = Problem(SMALL)
    (finding,) = judged(read(PLANTED["dropout left on"].function, problem), problem)
    assert finding.cause == "dropout left on" and finding.kind == "wrong wiring"
    pairs = 2 * 4 * 48 * 80
    spread = 5 * (0.1 * 0.9 / pairs) ** 0.5
    assert abs(figure(finding, "share") - 0.1) < spread
    assert abs(figure(finding, "gain") * 0.9 - 1) < 2 * BF16.unit_roundoff


def test_clipping_is_found_with_its_threshold():
    problem = Problem(SMALL)
    (finding,) = judged(read(PLANTED["P clipped"].function, problem), problem)
    assert finding.cause == "P clipped"
    assert finding.kind == "worse than its algorithm allows"
    p = exact(problem).probability
    # Weights of less than 2**-4 of the largest of their row, or of their tile's turn.
    assert figure(finding, "below") < 2.0**-4 * p.max() * 1.01


@pytest.mark.parametrize(
    ("mask", "name", "cause", "pattern"),
    [
        (
            "causal",
            "causal off by one (j <= i + 1)",
            "hidden pairs carry weight",
            "all with j - i = 1;",
        ),
        (
            "causal",
            "causal off by one (j < i)",
            "visible pairs carry none",
            "all with j - i = 0;",
        ),
        (
            "window",
            "window two too far to the left",
            "hidden pairs carry weight",
            "all with j - i = -12 to -11;",
        ),
        ("full", "first KV tile dropped", "visible pairs carry none", "keys 0 to 63;"),
        ("lengths", "key lengths ignored", "hidden pairs carry weight", "first query"),
        ("lengths", "queries that see no key", "queries that see no key", "zeros"),
    ],
)
def test_pairs_that_should_not_and_should_carry_weight(mask, name, cause, pattern):
    problem = Problem(SMALL, mask=mask)
    (finding,) = judged(read(PLANTED[name].function, problem), problem)
    assert finding.cause == cause and finding.kind == "wrong wiring"
    assert pattern in finding.says


_SHAPE = 2, 4, 64, 96
_B, _N, _I, _J = np.indices(_SHAPE)
_CHANCE = np.random.default_rng(0).random(_SHAPE)
_RIGHT = np.exp(np.random.default_rng(1).standard_normal(_SHAPE))
_RIGHT /= _RIGHT.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("lost", "cause", "says"),
    [
        (_CHANCE < 0.1, "dropout left on", "10"),
        # One throw for all heads, or for all batch entries.
        (np.broadcast_to(_CHANCE[:, :1] < 0.1, _SHAPE), "dropout left on", "%"),
        (np.broadcast_to(_CHANCE[:1] < 0.1, _SHAPE), "dropout left on", "%"),
        # For the query heads of each key head.
        (_CHANCE[:, _N[0, :, 0, 0] // 2] < 0.1, "dropout left on", "%"),
        (_RIGHT < 0.3 * _RIGHT.max(-1, keepdims=True) / 4, "P clipped", "threshold"),
        (_RIGHT == _RIGHT.max(-1, keepdims=True), None, "(the first query"),
        ((_N == 3) & (_J >= 80), None, "all of keys 80 to 95 of head 3;"),
        ((_B == 1) & (_J >= 80), None, "all of keys 80 to 95 of batch entry 1;"),
        (_J % 8 == 7, None, "every 8 keys from 7 on;"),
        (
            _J + 7 * _B > 92,
            None,
            "(all of keys 93 to 95 of batch entry 0, all of keys 86 to 95 of batch "
            "entry 1;",
        ),
        ((_J - _I == 9) | (_J - _I == -9), None, "all with j - i = -9 and 9;"),
        # As even as chance, but for neighbours.
        (_J // 24 == _N, None, "(the first query"),
        ((_I + _J) % 7 == 0, None, "(the first query"),
        ((37 * _I + 11 * _J) % 13 == 0, None, "(the first query"),
        (np.arange(_I.size).reshape(_SHAPE) % 101 == 3, None, "(the first query"),
        (np.repeat(_CHANCE[..., ::2] < 0.1, 2, -1), None, "(the first query"),
        # By chance, but not everywhere: in every other tile, in no early query.
        ((_CHANCE < 0.1) & (_J // 16 % 2 == 0), None, "(the first query"),
        ((_CHANCE < 0.1) & (_I > 12), None, "(the first query"),
    ],
    ids=map(str, range(18)),
)
def test_chance_is_told_from_patterns(lost, cause, says):
    """Whose large and small entries are lost alike, too."""
    p = np.where(lost, 0.0, _RIGHT)
    p /= p.sum(-1, keepdims=True)
    (finding,) = of_probabilities(p, _RIGHT, None)
    assert finding.cause == (cause or "visible pairs carry none")
    assert says in finding.says, finding.says


@pytest.mark.parametrize("name", ["not normalised", "last partial tile unmasked"])
def test_rows_that_do_not_sum_to_one(name):
    problem = Problem(SMALL)
    (finding,) = judged(read(PLANTED[name].function, problem), problem)
    assert finding.cause == "rows do not sum to one"
