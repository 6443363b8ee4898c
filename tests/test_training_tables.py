"""What is told of paired trainings, on rows whose answers are known."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis import training_tables
from analysis.arms import REFERENCE

STEPS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = range(3)


def weights_row(arm, seed, step, size, **more):
    row = {"arm": arm, "seed": seed, "step": step, "kind": "all", "scope": "all"}
    sizes = dict.fromkeys(("max_abs", "w1", "rel_l2", "w1_over_sigma", "drift"), size)
    return row | sizes | {"cosine": 1.0} | more


def runs_row(arm, seed, loss, **more):
    row = {"arm": arm, "seed": seed, "step": STEPS[-1], "diverged": None}
    none = dict.fromkeys(("function", "direct", "feedback", "aligned", "accuracy"))
    return row | none | {"loss": loss, "held_out_loss": 2 * loss} | more


def test_growth_is_the_exponent_of_a_power_law():
    rows = [
        weights_row("a", seed, step, (1 + seed) * step**1.5, w1_over_sigma=3e-3 * step)
        for seed in SEEDS
        for step in STEPS
    ]
    # The first steps do not count: they would pull the exponent away.
    rows = [row | {"max_abs": 9.0} if row["step"] < 8 else row for row in rows]
    (found,) = training_tables.growth(rows)
    for name in ("max_abs", "w1", "rel_l2"):
        assert found[name].startswith("1.50 ± 0.00")
    assert found["w1_over_sigma"].startswith("3.00 ± 0.00")  # In 1000 steps.
    # Weights that are not finite have no distance.
    nothing = dict.fromkeys(("max_abs", "w1", "rel_l2", "w1_over_sigma"))
    gone = [row | nothing | {"step": 10 * row["step"]} for row in rows[-2:]]
    assert training_tables.growth([*rows, *gone]) == [found]


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
    assert found == {"arm": "pallas"} | dict.fromkeys(
        ("max_abs", "w1", "rel_l2"), wanted
    )


def test_a_single_seed_has_no_interval():
    ends = [weights_row("fp32", 0, 64, 3.0), weights_row("pallas", 0, 64, 2.0)]
    (found,) = training_tables.ratios(ends)
    assert found["rel_l2"] == "1.5 (x/ inf)"


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


def test_equal_losses_are_those_that_two_t_tests_cannot_tell_apart():
    reference = (1.0, 1.2, 1.1)
    near, far = (1e-3, -1e-3, 5e-4), (0.02, 0.021, 0.019)
    rows = [runs_row(REFERENCE, seed, loss) for seed, loss in enumerate(reference)]
    for arm, more in (("re-run", (0, 0, 0)), ("near", near), ("far", far)):
        rows += [runs_row(arm, s, reference[s] + x) for s, x in enumerate(more)]
    found = {row["arm"]: row for row in training_tables.equivalence(rows, 0.01)}
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
    arms = [row["arm"] for row in training_tables.equivalence(rows, 0.01)]
    assert arms == ["re-run", "near"]


def test_tensors_that_rounding_moves_stand_apart():
    def tensor(name, cosine, size):
        return weights_row("ulp", 0, 64, size) | {
            "kind": "tensor",
            "scope": name,
            "cosine": cosine,
        }

    rows = [tensor(f"kernel{i}", 0.999, 1e-3) for i in range(4)]
    (found,) = training_tables.apart([*rows, tensor("bias of K", 0.02, 0.5)], 64)
    assert found["tensor"] == "bias of K" and found["max_abs"] == "0.5"
    assert found["max_abs of the rest"] == "0.001"
    assert not training_tables.apart(rows, 64)
    nothing = tensor("NaN", None, None)
    more = [*rows, tensor("bias of K", 0.02, 0.5), nothing]
    assert training_tables.apart(more, 64) == [found]
    # Where nothing is alike, as for other first weights, nothing stands apart.
    assert not training_tables.apart([row | {"cosine": 0.1} for row in rows], 64)


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
        *("weights", "training", "averaged", "weight", "relative", "growth", "losses"),
    ]
