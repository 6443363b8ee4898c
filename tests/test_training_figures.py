"""Panels of paired trainings: what is drawn, and what is said where nothing can be."""

import math

import pytest

from analysis import training_figures
from analysis.arms import REFERENCE
from tests.training_rows import SEEDS, STEPS, going_on, stopping


def drawn(*parts):
    weights, runs = ([row for part in parts for row in part[n]] for n in (0, 1))
    weights = [row for row in weights if row["arm"] != REFERENCE]
    # What the tables' rows need not have.
    runs = [row | {"feedback": None} for row in runs]
    found = training_figures.panels(weights, runs)
    return {panel.title: panel for panel in found}


@pytest.fixture(scope="module")
def panels():
    parts = [going_on(REFERENCE, seed) for seed in SEEDS]
    parts += [going_on("re-run", seed, 0.0) for seed in SEEDS]
    parts += [going_on("ulp", seed, 1.0 + seed) for seed in SEEDS]
    parts += [stopping("pallas", 0, 10), *(going_on("pallas", s) for s in (1, 2))]
    parts += [stopping("cudnn", seed, stop) for seed, stop in enumerate((9, 20, 40))]
    return drawn(*parts)


def test_nothing_is_drawn_past_the_stop_of_a_run(panels):
    rows = panels["relative L2"].rows
    of_cudnn = {row["step"]: row for row in rows if row["arm"] == "cudnn"}
    assert [*of_cudnn] == [1, 2, 4, 8, 16, 32]
    assert [step for step, row in of_cudnn.items() if row["fewer"]] == [16, 32]
    assert [step for step, row in of_cudnn.items() if row["ends"]] == [8, 16, 32]
    assert [row["seeds"] for row in of_cudnn.values()] == [3, 3, 3, 3, 2, 1]
    of_pallas = {row["step"]: row for row in rows if row["arm"] == "pallas"}
    assert [*of_pallas] == [*STEPS]
    # The mean of those that went on, not of a weight that stands still.
    assert of_pallas[64]["rel_l2"] == 64 and of_pallas[64]["seeds"] == 2
    losses = [row["loss"] for row in panels["loss"].rows]
    assert all(map(math.isfinite, losses))


def test_a_legend_says_how_many_stopped_and_what_is_0(panels):
    legend = panels["relative L2"].legend
    assert legend["re-run"] == "re-run: 0 at all steps"
    assert legend["cudnn"] == "cudnn\n  3 of 3 stopped"
    assert legend["pallas"].endswith("\n  1 of 3 stopped")
    assert legend["ulp"].startswith("ulp: step^(1.0")
    straight = panels["Wasserstein-1 / sigma, linear axes"]
    assert straight.legend["ulp"].endswith(" / 1000 steps")
    # There 0 has its place.
    assert "re-run" in {row["arm"] for row in straight.rows}
    assert "re-run" not in {row["arm"] for row in panels["relative L2"].rows}


def test_what_is_not_finite_is_said_and_not_drawn():
    weights, runs = going_on("pallas", 0)
    _, wild = going_on("wild", 0)
    wild = [row | {"function": math.nan} for row in wild]
    found = drawn((weights, runs), ([], wild))["distance of the outputs, relative"]
    assert {row["arm"] for row in found.rows} == {"pallas"}
    assert found.legend["wild"] == "wild: not finite"


def test_fits_are_those_of_the_table(panels):
    fits = panels["relative L2"].fits
    assert set(fits) == {"ulp", "pallas"}
    steps, values = zip(*fits["ulp"], strict=True)
    assert steps == (8, 16, 32, 64)
    # Sizes of 1, 2 and 3 times the step, in the geometric mean.
    assert values == pytest.approx([6 ** (1 / 3) * step for step in steps])


def test_bands_are_of_two_seeds_or_more(panels):
    for panel in panels.values():
        for row in panel.rows:
            low, mean, high = (row[f"{panel.y}{x}"] for x in ("_low", "", "_high"))
            assert 0 <= low <= mean <= high < math.inf
            assert (low > 0) or not panel.log_y
    (row,) = [
        row
        for row in panels["relative L2"].rows
        if row["arm"] == "ulp" and row["step"] == 8
    ]
    assert row["rel_l2_high"] == row["rel_l2"] + row["rel_l2_ci"]
    alone = drawn(going_on(REFERENCE, 0), going_on("ulp", 0))["relative L2"]
    assert all(row["rel_l2_low"] == row["rel_l2_high"] for row in alone.rows)


def test_the_picture_is_written(tmp_path):
    parts = [*(going_on(REFERENCE, s) for s in SEEDS), stopping("cudnn", 0, 9)]
    weights, runs = ([row for part in parts for row in part[n]] for n in (0, 1))
    runs = [row | {"feedback": None} for row in runs]
    weights = [row for row in weights if row["arm"] != REFERENCE]
    (path,) = training_figures.write(weights, runs, tmp_path / "training.png")
    assert path.read_bytes().startswith(b"\x89PNG")
