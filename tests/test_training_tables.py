"""What is told of paired trainings, on rows whose answers are known."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis import training_growth, training_tables
from analysis.arms import REFERENCE
from analysis.training_rows import before_stops, stops
from tests.training_rows import (
    SEEDS,
    STEPS,
    going_on,
    runs_row,
    stopping,
    weights_row,
)


def told(*parts):
    weights, runs = ([row for part in parts for row in part[n]] for n in (0, 1))
    found = training_tables.tables(weights, runs, 0.01)
    return {title.split()[0]: table for title, table in found.items()}, found


def by_arm(table):
    return of_arms(table.rows)


def of_arms(rows):
    return {row["arm"]: row for row in rows}


def test_growth_is_the_exponent_of_a_power_law():
    rows = [
        weights_row("a", seed, step, (1 + seed) * step**1.5, w1_over_sigma=3e-3 * step)
        for seed in SEEDS
        for step in STEPS
    ]
    # The first steps do not count: they would pull the exponent away.
    rows = [row | {"max_abs": 9.0} if row["step"] < 8 else row for row in rows]
    fits = training_growth.fits(rows, STEPS[-1])
    for seed, fit in enumerate(fits):
        for name in training_growth.POWERS:
            assert fit[name] == pytest.approx(1.5, rel=1e-12)
            assert fit[f"{name}_start"] == pytest.approx(math.log(1 + seed), abs=1e-12)
        assert fit["w1_over_sigma"] == pytest.approx(3.0)  # In 1000 steps.
    (found,) = training_tables.side_by_side(fits, ("w1",), {"a": SEEDS}, {}).rows
    assert found == {"arm": "a", "n": "3", "w1": "1.50 ± 0.00"}
    (whole,) = training_tables.growth(rows)
    assert whole["w1"] == found["w1"] and [*whole][2:] == [
        *training_growth.POWERS,
        training_growth.SLOPE,
    ]
    # The mean exponent, through the geometric mean of 1, 2, and 3 at step 1.
    drawn = training_growth.curve("w1", fits, [1.0, 4.0])
    assert drawn == pytest.approx([6 ** (1 / 3), 8 * 6 ** (1 / 3)])
    assert not training_growth.fits(rows, 2 * STEPS[-1])


def test_ratios_are_of_the_low_precision_bound():
    sizes = {"fp32": (8.0, 2.0, 4.0), "pallas": (2.0, 1.0, 1.0), "re-run": (0, 0, 0)}
    ends = [
        weights_row(arm, seed, 64, sizes[arm][seed]) for arm in sizes for seed in SEEDS
    ]
    (found,) = training_tables.ratios(ends)
    # The geometric mean of 4, 2, 4, and Student's t of 2 degrees on their logarithms.
    logs = np.log([4, 2, 4])
    factor = math.exp(stats.t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3))
    wanted = f"{math.exp(logs.mean()):.3g} (x/ {factor:.3g})"
    assert found == {"arm": "pallas", "n": "3"} | dict.fromkeys(
        ("max_abs", "w1", "rel_l2"), wanted
    )


def test_a_single_seed_has_no_interval():
    ends = [weights_row("fp32", 0, 64, 3.0), weights_row("pallas", 0, 64, 2.0)]
    (found,) = training_tables.ratios(ends)
    assert found["rel_l2"] == "1.5" and found["n"] == "1"
    parts = [going_on(arm, 0) for arm in (REFERENCE, "fp32", "pallas")]
    _, found = told((parts[1][0] + parts[2][0], [r for p in parts for r in p[1]]))
    text = str(found)
    assert "inf" not in text and "±" not in text and "x/" not in text
    assert "Not tested: it takes two seeds or more." in text


def test_ratios_by_step_name_every_comparison_that_has_one():
    sizes = {"fp32": 6.0, "pallas": 2.0, "re-run": 0.0}
    rows = [
        weights_row(arm, seed, step, sizes[arm] * step)
        for arm in sizes
        for seed in SEEDS
        for step in STEPS
    ]
    # At first nothing is apart; the arm `late` has a comparison of its own.
    rows = [row | {"rel_l2": 0.0} if row["step"] == 1 else row for row in rows]
    rows += [weights_row("late", seed, 64, 6.0 * 16) for seed in SEEDS]
    found = training_tables.ratios_by_step(rows, "rel_l2")
    assert [line["step"] for line in found] == [*STEPS[1:]]
    assert [line["pallas"] for line in found] == ["3"] * 6
    assert [line["late"] for line in found] == [""] * 5 + ["4"]
    assert all(list(line) == ["step", "pallas", "late"] for line in found)


def test_ratios_to_an_arm_come_with_their_interval_and_a_paired_test():
    rng = np.random.default_rng(0)
    logs = {"ulp": rng.normal(0, 1, 4), "pallas": rng.normal(1, 1, 4)}
    rows = [
        weights_row(arm, seed, 16, float(np.exp(x)))
        for arm, some in logs.items()
        for seed, x in enumerate(some)
    ]
    rows += [weights_row("once", 0, 16, 3 * float(np.exp(logs["ulp"][0])))]
    (found,) = training_tables.ratios_to(rows, "rel_l2", "ulp")
    difference = logs["pallas"] - logs["ulp"]
    test = stats.ttest_rel(logs["pallas"], logs["ulp"])
    low, high = test.confidence_interval()
    factor = np.exp((high - low) / 2)
    assert found == {
        "step": 16,
        "pallas": f"{np.exp(difference.mean()):.3g} (x/ {factor:.3g}, "
        f"p = {test.pvalue:.2g})",
        "once": "3 (n = 1)",
    }
    assert training_tables.ratios_to(rows, "rel_l2", "bf16") == []


def test_an_arm_that_is_what_it_is_compared_with_differs_by_no_test():
    rows = [
        weights_row(arm, seed, 16, float(seed + 1))
        for arm in ("ulp", "graph+ulp", "twice")
        for seed in range(3)
    ]
    for row in rows:
        row["rel_l2"] *= 1 + (row["arm"] == "twice")
    (found,) = training_tables.ratios_to(rows, "rel_l2", "ulp")
    assert found["graph+ulp"] == "1 (x/ 1, p = 1)"
    assert found["twice"] == "2 (x/ 1, p = 0)"


def test_equal_losses_are_those_that_two_t_tests_cannot_tell_apart():
    reference = (1.0, 1.2, 1.1)
    near, far = (1e-3, -1e-3, 5e-4), (0.02, 0.021, 0.019)
    rows = [runs_row(REFERENCE, seed, loss) for seed, loss in enumerate(reference)]
    for arm, more in (("re-run", (0.0, 0.0, 0.0)), ("near", near), ("far", far)):
        rows += [
            runs_row(arm, s, reference[s] + x, loss_difference=x)
            for s, x in enumerate(more)
        ]
    began = dict.fromkeys((REFERENCE, "re-run", "near", "far"), SEEDS)
    found = of_arms(training_tables.equivalence(rows, 0.01, began))
    assert [*found.values()] == training_tables.equivalence(rows, 0.01)
    equal = {arm: row["equal"] for arm, row in found.items()}
    assert equal == {"re-run": "yes", "near": "yes", "far": "not shown"}
    bound = 0.01 * np.mean(reference)
    for name, more in (("near", near), ("far", far)):
        tests = [
            stats.ttest_1samp(more, -bound, alternative="greater"),
            stats.ttest_1samp(more, bound, alternative="less"),
        ]
        wanted = max(test.pvalue for test in tests)
        # Two digits are told: half of the second is 5 % of 1.0.
        assert float(found[name]["loss p"]) == pytest.approx(wanted, rel=0.05)
    # One seed of three without a loss is no answer.
    rows[-1]["loss"] = math.nan
    untested = of_arms(training_tables.equivalence(rows, 0.01, began))["far"]
    assert untested["equal"] == "not tested: 2 of 3 pairs have losses"
    assert untested["loss p"] == ""


def test_tensors_that_rounding_moves_stand_apart():
    def tensor(name, cosine, size):
        return weights_row("ulp", 0, 64, size) | {
            "kind": "tensor",
            "scope": name,
            "cosine": cosine,
        }

    rows = [tensor(f"kernel{i}", 0.999, 1e-3) for i in range(4)]
    table = training_tables.apart([*rows, tensor("bias of K", 0.02, 0.5)], 64)
    (found,) = table.rows
    assert found["tensor"] == "bias of K" and found["max_abs"] == "0.5"
    assert found["max_abs of the rest"] == "0.001"
    nothing = tensor("NaN", None, None)
    more = [*rows, tensor("bias of K", 0.02, 0.5), nothing]
    assert training_tables.apart(more, 64) == table
    looked = "Looked for, below a cosine of travels of 0.5, in ulp"
    assert table.note == f"{looked}."
    table = training_tables.apart(rows, 64)
    assert not table.rows and table.note == f"{looked}, and none is below."
    # Where nothing is alike, as for other first weights, nothing stands apart.
    unlike = [row | {"cosine": 0.1, "seed": 1} for row in rows]
    table = training_tables.apart(unlike, 64)
    assert not table.rows and "Looked for" not in table.note
    assert "half of all tensors lie below 0.9" in table.note
    assert table.note.endswith("medians: ulp (0.10).")
    note = training_tables.apart([*rows, *unlike], 64).note
    assert "in ulp in 1 of 2 seeds" in note and "ulp (0.10 to 1.00)" in note


def test_what_a_run_left_when_it_stopped_is_in_no_mean():
    """Its frozen weights were compared on, and its last values taken for the end's."""
    parts = [going_on(REFERENCE, seed) for seed in SEEDS]
    parts = [([], runs) for _, runs in parts]
    parts += [going_on("ulp", seed, 1 + seed) for seed in SEEDS]
    parts += [stopping("cudnn", seed, stop) for seed, stop in enumerate((9, 20, 40))]
    parts += [stopping("pallas", 0, 10), going_on("pallas", 1, 2.0, loss=0.25)]
    parts += [going_on("pallas", 2, 2.0, loss=0.75)]
    found, _ = told(*parts)
    for title in ("weights", "training", "averaged", "growth"):
        lines = by_arm(found[title])
        assert lines["ulp"]["n"] == "3" and lines["ulp"]["stopped at step"] == ""
        assert lines["cudnn"]["n"] == "0 of 3"
        assert lines["cudnn"]["stopped at step"] == "9, 20, 40"
        assert not any([*lines["cudnn"].values()][3:])
        assert lines["pallas"]["n"] == "2 of 3 (survivors)"
        assert lines["pallas"]["stopped at step"] == "10"
        assert found[title].note.startswith("Survivors:")
    assert by_arm(found["weights"])["ulp"]["w1"].startswith("128 ± ")
    assert by_arm(found["weights"])["pallas"]["w1"] == "128 ± 0"
    assert by_arm(found["training"])["pallas"]["loss"].startswith("0.500 ± ")
    assert by_arm(found["training"])["pallas"]["function"] == "0.200 ± 0.000"
    assert by_arm(found["averaged"])["pallas"]["held_out_loss"].startswith("1.00 ± ")
    # Growth over fewer steps has another exponent.
    exponent, _, width = by_arm(found["growth"])["pallas"]["w1"].split()
    assert float(exponent) == 1 and float(width) == 0
    assert by_arm(found["losses"])["cudnn"]["equal"].startswith("not tested: 0 of 3")


def test_a_mean_of_fewer_runs_than_its_line_says_so():
    parts = [going_on(arm, seed) for arm in (REFERENCE, "ulp") for seed in SEEDS]
    weights, runs = ([row for part in parts for row in part[n]] for n in (0, 1))
    runs = [
        row | {"function": None} if (row["arm"], row["seed"]) == ("ulp", 2) else row
        for row in runs
    ]
    found, _ = told((weights, runs))
    line = by_arm(found["training"])["ulp"]
    assert line["n"] == "3" and line["loss"] == "1.00 ± 0.00"
    assert line["function"] == "0.100 ± 0.000 (n = 2)"


def test_ratios_by_step_tell_how_many_seeds_are_left():
    parts = [going_on("fp32", seed, 3.0) for seed in SEEDS]
    parts += [going_on("pallas", 0), going_on("pallas", 1), stopping("pallas", 2, 20)]
    weights, runs = ([row for part in parts for row in part[n]] for n in (0, 1))
    kept = before_stops(weights, stops(runs))
    found = training_tables.ratios_by_step(kept, "rel_l2")
    assert [line["pallas"] for line in found] == [*["3"] * 5, *["3 (n = 2)"] * 2]


def test_arms_that_diverge_or_spike_are_counted():
    def run(arm, seed, highest, diverged=None):
        """Losses of 1 throughout, but for the highest of a step before each row."""
        return [
            runs_row(arm, seed, 1.0, diverged=diverged, highest=rise) | {"step": step}
            for step, rise in zip((1, 16, 64, 128), highest, strict=True)
        ]

    rows = run("tame", 0, (1.0, 9.0, 3.9, 1.1))  # 9 is in the first eighth.
    rows += run("spiked", 0, (1.0, 1.0, 4.5, 1.0)) + run("spiked", 1, (1, 1, 1, 1))
    rows += run("wild", 0, (1, 1, 5.0, None), 70) + run("wild", 1, (1, 1, 1, None), 99)
    assert training_tables.unstable(rows) == [
        {
            **{"arm": "spiked", "diverged": "0 of 2", "at steps": ""},
            **{"spiked": "1 of 2", "highest rise": "4.5"},
        },
        {
            **{"arm": "wild", "diverged": "2 of 2", "at steps": "70, 99"},
            **{"spiked": "1 of 2", "highest rise": "5"},
        },
    ]


def test_all_tables_are_there_where_they_say_something():
    weights = [
        weights_row(arm, seed, step, size * step)
        for arm, size in (("pallas", 1e-6), ("fp32", 1e-5))
        for seed in SEEDS
        for step in STEPS
    ]
    runs = [runs_row(a, s, 1.0 + s) for a in (REFERENCE, "pallas") for s in SEEDS]
    titles = list(training_tables.tables(weights, runs, 0.01))
    assert [title.split()[0] for title in titles] == [
        *("weights", "training", "averaged", "weight", "relative", "relative"),
        *("growth", "losses"),
    ]
