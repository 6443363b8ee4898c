"""`python -m analysis training`: tables of what arms do to the weights."""

import csv
import json
import math

import jax
import numpy as np
import polars
import pytest

from analysis import paired, paired_measures
from analysis.__main__ import main
from analysis.experiments import training
from analysis.paired import snapshots

pytestmark = pytest.mark.ci

STEPS = 4
CHANGES = ("batch_size=4", "model.width=64", "model.depth=1", "data.resolution=16")
COMMAND = ["training", "--steps", str(STEPS), "--seeds", "2", "--captions", "4"]
COMMAND += ["--change", *CHANGES]


def _table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def done(tmp_path_factory, shared_programs):
    """Programs are kept for the call that goes on."""
    out = tmp_path_factory.mktemp("training")
    assert main([*COMMAND, "--arms", "re-run", "pallas", "--out", str(out)]) == 0
    return out


def test_every_comparison_of_every_arm_and_seed_is_there(done):
    runs, weights = (_table(done / f"{name}.csv") for name in ("runs", "weights"))
    wanted = {
        (arm, str(seed), str(step))
        for arm in ("reference", "re-run", "pallas")
        for seed in range(2)
        for step in snapshots(STEPS)
    }
    found = [(row["arm"], row["seed"], row["step"]) for row in runs]
    assert set(found) == wanted and len(found) == len(wanted)
    wanted = {cell for cell in wanted if cell[0] != "reference"}
    whole = {
        (row["arm"], row["seed"], row["step"]): row
        for row in weights
        if row["kind"] == "all"
    }
    assert whole.keys() == wanted
    for (arm, _, _), row in whole.items():
        if arm == "re-run":
            assert all(float(row[name]) == 0 for name in ("max_abs", "w1", "rel_l2"))
    last = [row for row in runs if row["step"] == str(STEPS)]
    assert all(float(row["held_out_loss"]) > 0 for row in last)
    assert all(0 <= float(row["accuracy"]) <= 1 for row in last)
    assert all(row["captions"] == "4" for row in last)
    assert (done / "training.png").read_bytes().startswith(b"\x89PNG")
    every = polars.read_parquet(done / "weights.parquet")
    assert every.filter(polars.col("kind") == "all").height == len(weights)
    told = (done / "tables.md").read_text()
    assert f"## Weights after {STEPS} steps\n\n| arm | max_abs |" in told
    assert "\n| re-run | 0 ± 0 | 0 ± 0 |" in told
    # By tensor of the end alone.
    tensors = every.filter(polars.col("kind") == "tensor")
    assert set(tensors["step"]) == {STEPS} and tensors["scope"].n_unique() > 10


def test_a_second_call_trains_what_is_missing_alone(done, monkeypatch, capsys):
    trained = []
    train = paired.train

    def noted(config, arms, programs):
        trained.append([arm.name for arm in arms])
        return train(config, arms, programs)

    monkeypatch.setattr(paired, "train", noted)
    arms = ["--arms", "re-run", "pallas", "ulp", "--out", str(done)]
    command = [*COMMAND[:3], "--seeds", "1", *COMMAND[5:], *arms]
    assert main(command) == 0
    assert trained == [["ulp"]]
    assert "weights after 4 steps" in capsys.readouterr().err


def test_the_split_of_growth_adds_up(done):
    """From one state, D(t + 1) = D(t) + L + B."""
    rows = [json.loads(line) for line in (done / "training.jsonl").open()]
    runs = [
        row
        for line in rows
        for row in line.get("rows", ())
        if row["table"] == "runs" and line["cell"]["arm"] == "re-run"
    ]
    split = [row for row in runs if row["direct"] is not None]
    assert split and all(row["direct"] == row["feedback"] == 0 for row in split)
    w, other = [3.0, 4.0], [3.5, 4.0]
    once, arm_once, arm_next = [3.0, 5.0], [3.0, 5.25], [3.6, 5.5]
    with jax.enable_x64(True):
        trees = (w, other, once, arm_once, arm_next)
        found = paired_measures._products(*([np.array(x)] for x in trees))
    # D = (.5, 0), L = (0, .25), D(t+1) = (.6, .5), B = D(t+1) - D - L = (.1, .25).
    wanted = (25, 0.25, 0.0625, 0.0725, 0)
    assert all(math.isclose(x, y, abs_tol=1e-12) for x, y in zip(found, wanted))


@pytest.mark.parametrize(
    "options, line",
    [
        (["--arms", "flash9"], "no arm 'flash9'"),
        (["--change", "speed=3"], "--change takes NAME=VALUE"),
        (["--seeds", "0"], "at least 1"),
        (["--change", "model.heads=3"], "heads"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(options, line, tmp_path, capsys):
    assert main(["training", *options, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.splitlines()) == 1


def test_a_run_of_the_same_that_is_not_fails():
    row = {"arm": "re-run", "max_abs": 1e-7, "step": 8, "scope": "all"}
    with pytest.raises(training.ExperimentError, match="differs by 1e-07 after 8"):
        training._check_null([row | {"max_abs": 0.0}, row])
    training._check_null([row | {"arm": "ulp"}])
