"""What is said of measurements, and what is not."""

import dataclasses

import numpy as np
import pytest

from attn_jax.audit import measure, run, verdict
from attn_jax.audit.attribution import Cost, Fit
from attn_jax.audit.course import Result, _wiring
from attn_jax.audit.error import Errors
from attn_jax.audit.finding import (
    EXTREME,
    ON_WHAT_ALL_SHARE,
    P_CLIPPED,
    PAST_THE_LAST,
    ROWS_NOT_ONE,
    SEES_NO_KEY,
    Finding,
    in_order,
    is_trustworthy,
)
from attn_jax.audit.inputs import Shape
from attn_jax.audit.judge import WORSE
from attn_jax.audit.measure import Measured, Outcome
from attn_jax.audit.plan import plan
from attn_jax.audit.problem import Problem
from attn_jax.audit.verdict import POOR_UNITS, Judged, judge

SHAPE = Shape(1, 16, 16, 1, 1, 16)
TENSORS = ("out", "dquery", "dkey", "dvalue")
FITTING, FAR = Fit("flash2", 0.02), Fit("flash2", 0.9)


def measured(units: float, not_finite: int = 0) -> Measured:
    errors = Errors(units, False, 1e-3, 1e-2, 1e-2, 0.0, 0.0, 0.5)
    return Measured(errors, 0.0, 0.1, not_finite)


def cell(
    family="normal", mask="full", allowed=1.5, not_finite=0, dtype="bfloat16", **units
) -> Judged:
    found = {name: measured(units.get(name, 1.2)) for name in TENSORS}
    if not_finite:
        found["lse"] = measured(1.0, not_finite)
    problem = Problem(SHAPE, family=family, mask=mask, dtype=dtype)
    outcome = Outcome("measured", "", {}, "", 0.1)
    return Judged(problem, outcome, found, dict.fromkeys(TENSORS, allowed))


def refused(status, reason, family="normal") -> Judged:
    problem = Problem(SHAPE, family=family)
    return Judged(problem, Outcome(status, reason, {}, "", 0.1), {}, {})


def test_nothing_is_said_of_what_is_good():
    cells = [cell(), cell("wide", dquery=POOR_UNITS)]
    assert judge(cells, FITTING) == judge(cells, None) == []
    assert is_trustworthy([])


def test_a_poor_algorithm_is_no_bug_and_its_step_is_named():
    cells = [cell("uniform", allowed=52.0, dquery=50.0), cell()]
    costs = [
        (
            cells[0].problem,
            [Cost("delta", "dquery", 50, 4), Cost("dlogits", "dquery", 50, 49)],
        )
    ]
    (found,) = judge(cells, FITTING, costs)
    assert found.kind.startswith("as accurate as its algorithm allows")
    assert found.cause == "delta" and found.tensors == ("dquery",)
    assert "where flash2 predicts 52" in found.says
    assert "99 % of it is delta" in found.says
    assert "1 of 2 problems" in found.says
    # Without a fit nothing is said of its steps.
    (found,) = judge(cells, FAR)
    assert found.cause == "" and "where ordinary algorithms have 52" in found.says
    assert "cannot be said, since no recipe fits" in found.says


@pytest.mark.parametrize(
    ("wired", "units", "attributed"),
    [
        ((), 1.3, {"out", "dkey"}),
        (("dkey",), 1.3, {"out"}),
        (("out",), 1.3, set()),
        ((), 561.0, {"out"}),
    ],
)
def test_steps_of_a_recipe_explain_no_other_error(wired, units, attributed):
    """Neither one of wiring nor one that is far from what the recipe has there."""
    here = cell(dkey=units)
    costs = [Cost("dlogits", tensor, 1.19, 1.0) for tensor in ("out", "dkey")]
    finding = Finding("wrong wiring", "x", "x", wired, (str(here.problem),))
    result = Result([here], [FITTING], [(here.problem, costs)], {}, [finding])
    assert {row["tensor"] for row in run._attribution(result)} == attributed


@pytest.mark.parametrize("allowed", [2.0, 5.0, 100.0])
@pytest.mark.parametrize(("dtype", "most"), [("float16", 1.5), ("float32", 4.0)])
def test_more_than_an_algorithm_has_is_a_bug(allowed, dtype, most):
    """Of FP32 inputs the reference's own out has 1.8 times what recipes have."""
    for off, kind in ((1.01 * most, "worse"), (0.99 * most, "as accurate as")):
        here = cell(allowed=allowed, dtype=dtype, out=off * allowed)
        (found,) = judge([here], FITTING)
        assert found.kind.startswith(kind)


def test_what_is_wrong_under_one_mask_alone_is_said_so():
    """And not blamed on a step: all of them are right without that mask."""
    cells = [cell(), cell(mask="lengths", out=90.0), cell(mask="window", out=80.0)]
    (found,) = judge(cells, FITTING, suspect="a step")
    assert found.cause == "under lengths and window alone"
    assert "nearest" not in found.says
    (found,) = judge(cells, FAR, suspect="a step")
    assert found.cause == "a step" and "the nearest to it is that" in found.says
    (found,) = judge([cell(out=90.0), *cells[1:]], FITTING, suspect="a step")
    assert found.cause == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale_factor": 0.75}, "with another scale than 1 / sqrt(H) alone"),
        (
            {"scale_factor": 0.75, "key_length": 17},
            "with another scale than 1 / sqrt(H), or 17 keys, alone",
        ),
        ({"query_length": 1}, "with one query alone"),
        ({"key_heads": 1}, "with one key head alone"),
        ({"key_heads": 4}, "with as many key heads as query heads alone"),
    ],
)
def test_what_is_wrong_for_some_calls_alone_is_said_so(changes, words):
    """Under several masks, of which none is to blame."""
    shape = Shape(1, 16, 16, 4, 2, 16)
    scale = {k: v for k, v in changes.items() if k == "scale_factor"}
    other = dataclasses.replace(
        shape, **{k: v for k, v in changes.items() if k not in scale}
    )

    def of(where: Shape, mask: str, units: float, **more) -> Judged:
        one = cell(mask=mask, out=units)
        problem = dataclasses.replace(one.problem, shape=where, **more)
        return one._replace(problem=problem)

    masks = "lengths", "window"
    right = [of(shape, mask, 1.0) for mask in ("full", *masks)]
    wrong = [of(other, mask, 90.0, **scale) for mask in masks]
    (found,) = judge([*right, *wrong], FITTING)
    assert found.cause == words
    # One that is right there tells that it is something else.
    also = of(other, "packed", 1.0, **scale)
    (found,) = judge([*right, *wrong, also], FITTING)
    assert found.cause == "under lengths and window alone"


def test_what_hidden_keys_change_is_of_lengths_that_are_wired_wrongly():
    cells = [cell(), cell(mask="lengths", out=90.0)]
    place = str(cells[1].problem)
    known = Finding("wrong wiring", "key lengths off by one", "", ("out",), (place,))
    cause = "result depends on the padded keys"
    padded = Finding(WORSE, cause, "", ("out",), ("padded keys",))
    (found,) = verdict.together([known], [padded], cells)
    assert found == dataclasses.replace(known, where=(place, "padded keys"))
    moved = dataclasses.replace(padded, where=("batch position",))
    assert verdict.together([known], [moved], cells) == [known, moved]


def test_a_wrongly_wired_result_explains_what_is_found_in_it():
    cells = [cell(dquery=9.0)]
    place = str(cells[0].problem)
    known = Finding("wrong wiring", "dQ without the scale", "", ("dquery",), (place,))
    rows = Finding(WORSE, "rows of dS do not sum to 0", "", ("dquery",), ("ones",))
    (found,) = verdict.together([known], [rows], cells)
    assert found.where == (place, "ones")
    # Not what is in another, nor another mistake, nor what may hide more.
    other = dataclasses.replace(rows, tensors=("dquery", "dkey"))
    wired = dataclasses.replace(rows, kind="wrong wiring", cause="LSE gradient wrong")
    fails = Finding("fails", "x64 mode", "")
    broken = Finding("not finite", EXTREME, "")
    others = [other, wired, fails, broken]
    assert verdict.together([known], others, cells) == [known, *others]
    whole = dataclasses.replace(known, tensors=("out",))
    (found, *left) = verdict.together([whole], others, cells)
    assert found.where == (place, "ones") and left == [fails, broken]
    # Under another mask it has nothing to do with what is found under the first.
    cells.append(cell(mask="causal"))
    of_causal = dataclasses.replace(whole, where=(str(cells[1].problem),))
    assert verdict.together([of_causal], [wired], cells) == [of_causal, wired]


def test_what_is_known_under_another_mask_explains_nothing():
    cells = [cell(), cell(mask="lengths", out=90.0)]
    (known,) = judge(cells, FITTING)
    assert known.cause == "under lengths alone"
    worse = Finding(WORSE, "K + c", "", ("out",), ("K + c",))
    poor = dataclasses.replace(worse, kind=verdict.POOR, tensors=("dquery",))
    assert verdict.together([known], [worse, poor], cells) == [known, worse, poor]


def test_what_explains_a_part_explains_not_the_rest():
    (known,) = judge([cell(dkey=90.0)], FITTING)
    keys = Finding(WORSE, "keys", "", ("dquery", "dkey"), ("permuted keys",))
    assert verdict.together([known], [keys], [cell()]) == [known, keys]
    both = judge(cells := [cell(dkey=90.0, dquery=90.0)], FITTING)
    found = verdict.together(both, [keys], cells)
    assert [f.where[-1] for f in found] == ["permuted keys"] * 2
    bits = Finding("not reproducible", "re-run", "", ("dkey",), ("full",))
    x64 = dataclasses.replace(bits, cause="x64 mode", tensors=("dkey", "dvalue"))
    assert verdict.together([bits], [x64], cells) == [bits, x64]


def test_gradients_of_a_wrong_p_are_not_called_poor():
    """They may be so by it, whatever the algorithm."""
    poor = cell(dkey=2.2, allowed=2.5)
    (said,) = judge([poor], None)
    assert said.kind.startswith("as accurate") and said.tensors == ("dkey",)
    wrong = Finding("wrong wiring", ROWS_NOT_ONE, "", ("out",), (str(poor.problem),))
    assert judge([poor], None, wiring=[wrong]) == [wrong]
    worse = cell(dkey=90.0)
    assert {f.kind for f in judge([worse], None, wiring=[wrong])} == {wrong.kind, WORSE}


def test_what_was_not_run_is_said_whatever_is_known():
    cells = [cell(out=900.0)]
    place = str(cells[0].problem)
    wired = Finding("wrong wiring", "scale", "", ("out",), (place,))
    left_out = Finding("not taken", "probes not run", "")
    assert verdict.together([wired], [left_out], cells) == [wired, left_out]
    broken = Finding("not finite", "", "", ("lse",), (place,))
    extreme = Finding("not finite", EXTREME, "", (), ("finite at extremes",))
    others = [left_out, extreme]
    # An LSE that is not finite says nothing of gradients.
    assert verdict.together([broken], others, cells) == [broken, *others]


def test_what_is_worse_explains_what_is_poor():
    worse = Finding(WORSE, "P clipped", "", ("out",))
    poor = Finding(verdict.POOR, "logits in 16 bits", "", ("dquery",), ("K + c",))
    (found,) = verdict.together([worse], [poor], [cell()])
    assert found.where == ("K + c",)
    other = dataclasses.replace(worse, tensors=("dkey",))
    assert verdict.together([other], [poor], [cell()]) == [other, poor]


def test_what_is_so_at_any_key_is_not_said_of_the_last():
    """Of the same results, and of the same kind: NaN there is another thing."""
    shared = Finding(WORSE, ON_WHAT_ALL_SHARE, "", ("out",), ("out at +125",))
    past = Finding(WORSE, PAST_THE_LAST, "", ("out",), ("320 keys, out at +125",))
    (found,) = verdict.together([], [shared, past], [cell()])
    assert found.cause == ON_WHAT_ALL_SHARE and found.where == (
        *shared.where,
        *past.where,
    )
    for other in (
        dataclasses.replace(past, tensors=("lse",)),
        dataclasses.replace(past, kind="not finite"),
    ):
        assert other in verdict.together([], [shared, other], [cell()])


def test_what_is_not_finite_is_said_once():
    cells = [cell(not_finite=3), cell("lse-130")]
    kind, ordinary, large = "not finite", *(str(cell.problem) for cell in cells)
    probed = Finding(kind, EXTREME, "", (), ("finite at extremes",))
    past = Finding(kind, PAST_THE_LAST, "", (), ("half a tile at extremes",))
    depends = Finding(WORSE, "result depends on the layers", "", ("out",), ("layers",))
    known = Finding(kind, "", "", ("out",), (ordinary,))
    (found,) = verdict.together([known], [probed, past, depends], cells)
    assert {"finite at extremes", "layers"} <= set(found.where)
    # Large logits alone are where a probe says why.
    known = dataclasses.replace(known, where=(large,))
    assert verdict.together([known], [past], cells) == [known, past]
    pointed = dataclasses.replace(probed, where=(*probed.where, *past.where))
    assert verdict.together([known], [probed, past], cells) == [known, pointed]


def test_zero_keys_tell_no_heads_apart():
    def row(family, cause):
        finding = Finding("wrong wiring", cause, "", ("dvalue",), (family,))
        return {"family": family, "wiring": [dataclasses.asdict(finding)]}

    group = plan([SHAPE], ["normal", "zero_k_one_v"], ["full"])[0]
    alone = row("zero_k_one_v", "GQA heads grouped wrongly")
    assert [f.cause for f in _wiring({group: [alone]})] == ["GQA heads grouped wrongly"]
    rows = [row("normal", "GQA sum missing"), alone]
    assert [f.cause for f in _wiring({group: rows})] == ["GQA sum missing"]


def test_the_worst_of_a_kind_stands_for_all():
    cells = [cell(family, out=u) for family, u in (("normal", 9.0), ("wide", 30.0))]
    (found,) = judge(cells, None)
    assert "30 units" in found.says and "on wide" in found.says
    assert len(found.where) == 2 and found.evidence["units"] == 30


def test_wiring_explains_all_that_is_wrong_there():
    cells = [cell(out=900.0, dquery=800.0), cell("wide", out=30.0, not_finite=2)]
    here, there = (str(cell.problem) for cell in cells)
    known = Finding("wrong wiring", "scale", "said", ("dquery",), (here,))
    found = in_order(judge(cells, None, (), [known]))
    assert [f.kind for f in found] == [
        "not finite",
        "wrong wiring",
        "worse than its algorithm allows",
    ]
    assert found[2].tensors == ("out",)
    # All gradients, and LSE, follow from what makes out.
    same = dataclasses.replace(known, where=(there,), tensors=("lse", "out"))
    (found,) = judge(cells, None, (), [known, same])
    assert found.tensors == ("dquery", "lse", "out")
    assert found.where == (here, there)


def test_wiring_under_a_mask_explains_nothing_without_it():
    """As lengths that are ignored do not hide a poor dQ of all keys."""
    cells = [cell(dquery=800.0), cell(mask="lengths", out=900.0, dquery=900.0)]
    known = Finding("wrong wiring", "lengths", "", ("out",), (str(cells[1].problem),))
    wired, worse = in_order(judge(cells, None, (), [known]))
    assert wired == known and worse.where == (str(cells[0].problem),)
    probed = Finding("worse than its algorithm allows", "K + c", "", ("lse",))
    assert probed in verdict.together([wired, worse], [probed], cells)
    without = dataclasses.replace(known, where=(str(cells[0].problem),))
    assert judge(cells, None, (), [without]) == [without]
    assert verdict.together([without], [probed], cells) == [without]


def test_what_is_known_of_one_result_hides_nothing_of_another():
    kind = "not reproducible"
    race = Finding(kind, "re-run", "", ("dkey",), ("full",))
    tuned = [Finding(kind, "tuning", x, (x,), ("tuning",)) for x in ("dkey", "dquery")]
    both = verdict.together([race], tuned, [cell(dquery=1.0)])
    race = dataclasses.replace(race, where=("full", "tuning"))
    assert both == [race, tuned[1]]


def test_what_a_result_depends_on_is_said_where_nothing_else_is():
    (worse,) = judge([cell(out=900.0)], None)
    assert worse.cause == ""
    cause = "result depends on the batch position"
    depends = Finding(worse.kind, cause, "", ("out",), ("batch position",))
    assert verdict.together([worse], [depends], [cell(out=900.0)]) == [worse, depends]
    named = dataclasses.replace(worse, cause="P clipped")
    (found,) = verdict.together([named], [depends], [cell(out=900.0)])
    assert found.where == (*named.where, "batch position")
    assert found == dataclasses.replace(named, where=found.where)


def broken(family="normal", mask="lengths", **values: tuple[int, int]) -> Judged:
    """`values`: by result how many are not finite, and how many of them in rows that
    see no key."""
    found = {n: measured(1.0, bad)._replace(unseen=m) for n, (bad, m) in values.items()}
    here = cell(family, mask)
    return here._replace(found=here.found | found)


def test_infinities_where_none_should_be():
    (found,) = judge([broken(lse=(3, 3)), cell()], None)
    assert found.kind == "not finite" and found.cause == SEES_NO_KEY
    assert "3 values" in found.says and "1 of 2" in found.says
    found = judge(
        [broken(dkey=(4, 0), dvalue=(5, 0)), broken("wide", out=(3, 0))], None
    )
    assert [f.tensors for f in found] == [("out",), ("dkey", "dvalue")]
    assert found[1].says.startswith("dK, dV: not") and "4, 5 values" in found[1].says


@pytest.mark.parametrize(
    ("values", "with_cause"),
    [
        (dict(out=(3, 3), dquery=(3, 3), dvalue=(9, 9)), {"out", "dquery", "dvalue"}),
        (dict(lse=(4, 3), out=(3, 3)), {"out"}),
        (dict(lse=(3, 0)), set()),
        (dict(dkey=(9, 8), dvalue=(9, 9), dquery=(2, 2)), {"dquery", "dvalue"}),
        # Heads that have queries without keys have others, too.
        (dict(dkey=(9, 9), dvalue=(9, 9)), set()),
        (dict(dkey=(9, 9), out=(4, 3)), set()),
    ],
)
def test_rows_that_see_no_key_are_the_cause_of_what_lies_in_them(values, with_cause):
    found = judge([broken(**values)], None)
    assert sorted(t for f in found for t in f.tensors) == sorted(values)
    of_cause = {t for f in found if f.cause == SEES_NO_KEY for t in f.tensors}
    assert of_cause == with_cause and len(found) <= 2
    # One problem with others takes the cause away.
    elsewhere = {name: (1, 0) for name in values}
    found = judge([broken(**values), broken("uniform", "causal", **elsewhere)], None)
    assert {f.cause for f in found} == {""}


def test_where_values_are_not_finite_is_measured():
    problem = Problem(Shape(2, 16, 16, 4, 2, 16), mask="lengths")
    right = problem.exact()
    results = {n: np.array(getattr(right, n)) for n in (*TENSORS, "lse")}
    blind = np.isneginf(right.lse).swapaxes(1, 2)
    assert blind.any() and not blind.all()
    results["lse"][np.isneginf(right.lse)] = np.nan
    for name in ("out", "dquery"):
        results[name][blind] = np.nan
    # Of the entries' heads, each of which has a query that sees no key.
    results["dvalue"][:, 3] = np.nan
    for name, m in measure.measured(problem, results).items():
        assert m.not_finite == m.unseen and (m.unseen > 0) == (name != "dkey"), name
    for x in results.values():
        x[0, 0, 0] = np.nan
    for name, m in measure.measured(problem, results).items():
        by_row = name in ("out", "dquery", "lse")
        assert (m.not_finite > m.unseen) == by_row, name
    causal = dataclasses.replace(problem, mask="causal")
    lse = causal.exact().lse.copy()
    lse[..., 5] = np.nan
    m = measure.measured(causal, {"lse": lse})["lse"]
    assert (m.not_finite, m.unseen) == (8, 0)


def test_lse_has_no_cause_that_recipes_were_not_compared_by():
    here = cell()
    here.found["lse"] = measured(900.0)
    here.allowed["lse"] = 30.0
    (found,) = judge([here], FITTING, suspect="a step of gradients")
    assert found.tensors == ("lse",) and found.cause == ""
    assert "nearest" not in found.says
    (found,) = judge([here], FAR, suspect="a step of gradients")
    assert found.cause == "" and "nearest" not in found.says
    probe = Finding(WORSE, "LSE does not follow", "", ("lse",), ("K + c: lse",))
    (found,) = verdict.together([found], [probe], [here])
    assert found.cause == "" and "K + c: lse" in found.where


def test_what_is_wrong_with_p_alone_spoils_out_alone():
    """Nor does it explain what probes find elsewhere."""
    cells = [cell(out=90.0, dquery=80.0), cell("wide", "causal", out=90.0, dkey=80.0)]
    place = str(cells[0].problem)
    for kind, cause in (("wrong wiring", ROWS_NOT_ONE), (WORSE, P_CLIPPED)):
        of_p = Finding(kind, cause, "", ("out",), (place,))
        known, *others = judge(cells, None, (), [of_p])
        assert known == of_p
        assert [f.tensors for f in others] == [("dquery",), ("dkey",)]
        probed = Finding(WORSE, "K + c", "", ("lse",), ("K + c",))
        assert verdict.together([of_p], [probed], cells) == [of_p, probed]
        sums = dataclasses.replace(probed, tensors=("out",))
        (found,) = verdict.together([of_p], [sums], cells)
        assert found.where == (place, "K + c")
        counted = dataclasses.replace(sums, kind="wrong wiring", cause="keys dropped")
        said = verdict.together([of_p], [counted], cells)
        assert len(said) == (1 if cause == ROWS_NOT_ONE else 2)
        other = dataclasses.replace(of_p, kind="wrong wiring", cause="dropout left on")
        assert judge(cells, None, (), [other]) == [other]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((-3e38, -3e38), ": -3e+38 in all of them"),
        ((np.nan, float("nan")), ": nan in all of them"),
        ((-3e38, 0.0), ""),
        ((-3e38, None), ""),
    ],
)
def test_the_value_of_rows_that_see_no_key_is_named(values, says):
    cells = [
        broken(family, lse=(3, 3)) for family, _ in zip(("normal", "uniform"), values)
    ]
    for here, value in zip(cells, values):
        here.found["lse"] = here.found["lse"]._replace(instead=value)
    (found,) = judge(cells, None)
    assert found.says.endswith(f"on 2 of 2 problems{says}")


def test_a_value_that_is_wrong_in_all_places_is_kept():
    problem = Problem(Shape(2, 16, 16, 1, 1, 16), mask="lengths")
    lse = problem.exact().lse.astype(np.float32)
    unseen = np.isneginf(lse)
    assert measure.measured(problem, {"lse": lse})["lse"].instead is None
    lse[unseen] = -3e38
    assert measure.measured(problem, {"lse": lse})["lse"].instead == np.float32(-3e38)
    lse[np.nonzero(unseen)[0][0]] = 0
    assert measure.measured(problem, {"lse": lse})["lse"].instead is None


def test_refusals_are_faults_only_where_nothing_runs():
    reasons = [
        refused("not taken", "no argument"),
        refused("out of memory", "RESOURCE"),
    ]
    found = judge([*reasons, cell()], None)
    assert {f.kind for f in found} == {"not taken"} and is_trustworthy(found)
    assert {f.kind for f in judge(reasons, None)} == {"fails"}
    found = judge([refused("failed", "at 9"), refused("failed", "at 12", "wide")], None)
    assert [f.kind for f in found] == ["fails"] and "2 of 2" in found[0].says


def test_what_has_no_gradients_fails():
    one = cell()
    outcome = one.outcome._replace(no_gradients="TypeError: no JVP")
    (found,) = judge([one._replace(outcome=outcome)], None)
    assert found.kind == "fails" and found.cause == "not differentiable"
