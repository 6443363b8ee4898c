"""`python -m analysis training`: tables of what arms do to the weights."""

import csv
import json
import lzma
import math
import shutil

import jax
import numpy as np
import polars
import pytest

from analysis import arms, changes, paired, paired_measures
from analysis.__main__ import main
from analysis.experiments import training
from analysis.paired import snapshots
from train.__main__ import parse_config
from train.config import UsageError, flatten
from train.presets import PRESETS

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
    assert f"## Weights after {STEPS} steps\n\n| arm | n | max_abs |" in told
    assert "\n| re-run | 2 | 0 ± 0 | 0 ± 0 |" in told
    described = json.loads((done / "runs.json").read_text())
    flags = described["xla_flags"]
    assert described["xla_allow_excess_precision"] == ("excess" not in flags)
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


def test_rows_of_a_reference_that_other_code_trained_are_not_mixed_with(
    done, tmp_path, capsys
):
    """A missing arm trains beside the reference, which is to be the one of the rows."""
    for path in done.iterdir():
        shutil.copy(path, tmp_path)
    rows = (tmp_path / "training.jsonl").read_text().splitlines()
    place, row = next(
        (place, row)
        for place, row in enumerate(map(json.loads, rows))
        if row.get("cell", {}).get("arm") == "reference"
    )
    row["rows"][-1]["loss"] *= 1 + 2**-20
    rows[place] = json.dumps(row)
    (tmp_path / "training.jsonl").write_text("\n".join(rows) + "\n")
    before = (tmp_path / "runs.csv").read_bytes()
    options = [*COMMAND, "--arms", "re-run", "order", "--out", str(tmp_path)]
    assert main(options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "reference, trained again beside order, is not what" in error
    assert "give another --out, or --fresh" in error
    assert (tmp_path / "runs.csv").read_bytes() == before


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
        (["--arms", "bf16+flash9"], "no arm 'flash9'"),
        (["--arms", "bf16+fp16"], "bf16 and fp16 both set precision"),
        (["--arms", "pallas+cudnn"], "pallas and cudnn both set attn"),
        (["--arms", "graph+pallas"], "graph and pallas both set attn"),
        (["--arms", "ring-2-16+emulated:flash2"], "both set recipe"),
        (["--arms", "init+init"], "init and init both set weights"),
        (["--arms", "reference"], "--arms: give one beside reference"),
        (["--arms", "cudnn"], "--attn=cudnn needs an NVIDIA GPU"),
        (["--arms", "mesh-4096"], "no arm"),
        (["--change", "lr=1", "--change", "lr=2"], "lr is given twice, keep one"),
        (["--change", "speed=3"], "--change takes NAME=VALUE"),
        (["--change", "lr=abc"], "lr takes a number such as 0.002, not 'abc'"),
        (["--change", "lr=null"], "lr takes a number"),
        (["--change", "lr=[1]"], "lr takes a number"),
        (["--change", "lr=nan"], "--lr is nan; it must be positive and finite"),
        (["--change", "data.seed=1.5"], "data.seed takes a whole number"),
        (["--change", "model.qk_norm=0"], "model.qk_norm takes True or False"),
        (["--change", "precision=fp8"], "precision takes one of fp32, tf32, bf16"),
        (["--change", "attn=pallas"], "other attentions are --arms"),
        (["--change", "steps=8"], "give --steps"),
        (["--change", "checkpoint.every=8"], "do not read checkpoint.every"),
        (["--change", "model.heads=3"], "heads"),
        (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--together", "0"], "--together is 0; it must be at least 1"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--captions", "-1"], "--captions is -1; it must be at least 0"),
        (["--first-seed", "-1"], "--first-seed is -1; it must be at least 0"),
        (["--first-seed", "4294967296"], "must be below 4294967296"),
        # An arm's first weights are of another seed than its noise.
        (
            ["--arms", "init", "--seeds", "1", "--first-seed", "4294967295"],
            "must be below 4294967296",
        ),
        (["--margin", "nan"], "--margin is nan; it must be positive and finite"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(options, line, tmp_path, capsys):
    assert main(["training", *options, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["nowhere"], "nowhere has no tables to be made anew"),
        (["a", "--out", "b"], "writes into the folders that it names: no --out"),
    ],
)
def test_what_cannot_be_made_anew_is_said_in_a_line(
    options, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["training", "--redraw", *options]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_an_arm_that_cannot_run_here_costs_no_rows(fresh, done, tmp_path, capsys):
    for path in done.iterdir():
        shutil.copy(path, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    options = [*COMMAND, *fresh, "--arms", "re-run", "cudnn", "--out", str(tmp_path)]
    assert main(options) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_rows_of_a_gpu_become_tables_where_there_is_none(done, tmp_path, capsys):
    rows = (done / "training.jsonl").read_text()
    (tmp_path / "training.jsonl").write_text(rows.replace('"pallas"', '"cudnn"'))
    options = [*COMMAND, "--arms", "re-run", "cudnn", "--out", str(tmp_path)]
    assert main(options) == 0
    assert {row["arm"] for row in _table(tmp_path / "weights.csv")} == {
        "re-run",
        "cudnn",
    }
    (tmp_path / "training.jsonl").write_text(rows)
    assert main(options) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert (tmp_path / "training.jsonl").read_text() == rows


@pytest.mark.parametrize("packed", [False, True])
def test_tables_whose_rows_are_not_there_stay(packed, tmp_path, capsys):
    (tmp_path / "runs.csv").write_text("arm,seed,step")
    if packed:
        (tmp_path / "training.jsonl.xz").write_bytes(lzma.compress(b"{}"))
    names = {path.name for path in tmp_path.iterdir()}
    assert main([*COMMAND, "--arms", "ulp", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no training.jsonl with their rows" in error and "--fresh" in error
    assert (f"unxz -k {tmp_path}" in error) == packed
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("weights.parquet", b"PAR1 and no more"),
        ("runs.csv", b"arm,seed,step\nre-run,0,0,1,2\n"),
        ("training.jsonl", b"3\n"),
    ],
)
def test_damaged_tables_are_a_line(name, content, done, tmp_path, capsys):
    for path in done.iterdir():
        if name == "training.jsonl" or path.name != "training.jsonl":
            shutil.copy(path, tmp_path)
    (tmp_path / name).write_bytes(content)
    assert main(["training", "--redraw", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "has no tables to be made anew" in error and len(error.splitlines()) == 1


def test_tables_of_another_experiment_are_a_line(done, tmp_path, capsys):
    shutil.copy(done / "runs.csv", tmp_path)
    polars.DataFrame({"run": ["a"], "w1": [0.0]}).write_parquet(
        tmp_path / "weights.parquet"
    )
    assert main(["training", "--redraw", str(tmp_path)]) == 2
    assert "weights.parquet has no column arm" in capsys.readouterr().err


def test_arms_together_do_what_each_does():
    arm = arms.find("bf16+pallas-no-cures+init+ulp")
    assert arm.name == "bf16+pallas-no-cures+init+ulp"
    assert arm.changes == {
        **{"precision": "bf16", "attention_inputs": "compute", "attn": "pallas"}
    }
    assert (arm.kernels, arm.weights, arm.nudged) == ("pallas-no-cures", 1, True)
    config = arms.configured(training.reference("tiny", 8, []), arm)
    assert (config.precision, config.attn) == ("bf16", "pallas")
    # The same said twice.
    assert arms.find("pallas+pallas-no-cures").kernels == "pallas-no-cures"


def test_a_change_is_read_as_a_training_reads_it():
    """By the type of its field: "False" is no text, which would be true."""
    given = {
        "model.qk_norm": ("False", False),
        "model.remat": ("true", True),
        "lr": ("1", 1.0),
        "batch_size": ("4", 4),
        "precision": ("bf16", "bf16"),
        "optimizer.static_loss_scale": ("None", None),
        "data.path": ("None", None),
    }
    found = changes.read([f"{name}={text}" for name, (text, _) in given.items()])
    assert found == {name: value for name, (_, value) in given.items()}
    assert all(type(found[name]) is type(value) for name, (_, value) in given.items())
    assert changes.read(["optimizer.static_loss_scale=8"]) == {
        "optimizer.static_loss_scale": 8.0
    }
    config = training.reference("tiny", 8, ["model.qk_norm=False", "lr=3"])
    of_train = parse_config(["--preset=tiny", "--model.no-qk-norm", "--lr=3"])
    assert (config.model, config.lr) == (of_train.model, of_train.lr)
    assert config.model.qk_norm is False


def test_every_field_can_be_changed_or_says_why_not():
    for name, value in flatten(PRESETS["small"]).items():
        try:
            assert changes.read([f"{name}={value}"]) == {name: value}
        except UsageError as error:
            assert name in str(error) and "takes" not in str(error)


def _columns(path):
    """Of all tables, the cells, without their notes."""
    return [line for line in path.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("source", ["training.jsonl", "training.jsonl.xz", "csv", ""])
def test_tables_are_made_anew_from_what_a_folder_holds(done, source, tmp_path):
    names = ["runs.csv", "weights.parquet", "runs.parquet"]
    for name in names if source != "csv" else names[:2]:
        shutil.copy(done / name, tmp_path / name)
    lines = (done / "training.jsonl").read_bytes()
    if source.startswith("training"):
        (tmp_path / "weights.parquet").unlink()
        (tmp_path / "runs.parquet").unlink()
        whole = lzma.compress(lines) if source.endswith("xz") else lines
        (tmp_path / source).write_bytes(whole)
    assert main(["training", "--redraw", str(tmp_path)]) == 0
    found, wanted = (_columns(folder / "tables.md") for folder in (tmp_path, done))
    assert len(found) == len(wanted)
    # Five digits of a loss leave other ones to a difference of two.
    rounded = source == "csv"
    same = [a == b for a, b in zip(found, wanted, strict=True)]
    assert all(same) or rounded
    note = "are from runs.csv: five digits"
    assert (note in (tmp_path / "tables.md").read_text()) == rounded
    assert (tmp_path / "training.png").exists()


def test_an_arm_that_stops_is_not_compared_with_what_goes_on(tmp_path, monkeypatch):
    wild = arms.Arm("wild", "a learning rate that ends in NaN", {"lr": 1e30})
    monkeypatch.setitem(arms.ARMS, "wild", wild)
    command = [*COMMAND, "--arms", "wild", "re-run", "--out", str(tmp_path)]
    assert main(command) == 0
    runs, weights = (_table(tmp_path / f"{name}.csv") for name in ("runs", "weights"))
    stop = max(int(row["diverged"] or 0) for row in runs)
    assert 0 < stop < STEPS
    compared = [int(row["step"]) for row in weights if row["arm"] == "wild"]
    assert compared and max(compared) <= stop
    late = [r for r in runs if r["arm"] == "wild" and int(r["step"]) > stop]
    assert late and not any(row["function"] or row["held_out_loss"] for row in late)
    told = (tmp_path / "tables.md").read_text()
    assert f"| wild | 0 of 2 | {stop}, {stop} |  |" in told and "nan" not in told


def test_a_run_of_the_same_that_is_not_fails():
    row = {"arm": "re-run", "max_abs": 1e-7, "step": 8, "scope": "all"}
    with pytest.raises(training.ExperimentError, match="differs by 1e-07 after 8"):
        training._check_null([row | {"max_abs": 0.0}, row])
    training._check_null([row | {"arm": "ulp"}])
