"""Whole runs on the CPU: the same bits twice, resume, divergence, what is written."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from train.checkpoint import Checkpoints
from train.config import PRESETS, Config, UsageError
from train.loop import Diverged, run

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = PRESETS["tiny"]
CONFIG = dataclasses.replace(
    TINY,
    attn="xla",
    steps=8,
    batch_size=8,
    log_every=2,
    model=dataclasses.replace(TINY.model, width=64, heads=1, depth=1),
    optimizer=dataclasses.replace(TINY.optimizer, warmup=2),
    eval=dataclasses.replace(
        TINY.eval,
        every=4,
        examples=8,
        captions=8,
        novel=8,
        batch_size=8,
        grid=4,
        sampler_steps=2,
    ),
    checkpoint=dataclasses.replace(TINY.checkpoint, every=3, keep=9),
)
# The same run as a command.
COMMAND = (
    "--attn=xla --steps=8 --batch-size=8 --log-every=2 --model.width=64 "
    "--model.heads=1 --model.depth=1 --optimizer.warmup=2 --eval.every=4 "
    "--eval.examples=8 --eval.captions=8 --eval.novel=8 --eval.batch-size=8 "
    "--eval.grid=4 --eval.sampler-steps=2 --checkpoint.every=3 --checkpoint.keep=9"
).split()


def at(config: Config, folder: Path) -> Config:
    return dataclasses.replace(config, run_dir=str(folder))


def saved(folder: Path, step: int) -> dict:
    """Every array of a checkpoint, by name."""
    from orbax.checkpoint import v1 as ocp

    state = ocp.load_checkpointables(str(folder / "checkpoints" / str(step)))["state"]
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_bits(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


def figures(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{key: row[key] for key in row if key != "images_per_s"} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of 8 steps on eight virtual devices."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(at(CONFIG, folder))
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """The same run as a process of its own, on one device, without interruption."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    result = start(folder)
    assert result.wait(timeout=240) == 0
    return folder


def start(folder: Path, *more: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "train", *COMMAND, "--run-dir", str(folder), *more]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_run_folder_holds_what_a_reader_needs(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["model"]["width"] == 64 and config["attn"] == "xla"
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["attention"]["implementation"] == "xla"
    assert environment["attention"]["inputs"] == "bfloat16"
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1, "seq": 1}
    rows = figures(finished)
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8]
    for name in ("loss.png", "samples.png", "samples/4.png", "samples/8.png"):
        image = Image.open(finished / name).convert("RGB")
        colours = image.getcolors(maxcolors=2**24)
        assert colours is not None and len(colours) > 10, name
    done = json.loads((finished / "DONE").read_text())
    assert done["steps"] == 8 and done["val"]["captions"] == 8
    assert 0 <= done["val"]["all"] <= 1 and done["novel"]["captions"] == 8
    assert "loss" in (finished / "log.txt").read_text()


def test_same_run_twice_gives_the_same_bits(finished, tmp_path):
    run(at(CONFIG, tmp_path))
    assert figures(tmp_path) == figures(finished)
    assert_same_bits(saved(tmp_path, 8), saved(finished, 8))
    assert_same_bits(saved(tmp_path, 3), saved(finished, 3))
    grids = [(folder / "samples.png").read_bytes() for folder in (tmp_path, finished)]
    assert grids[0] == grids[1]


def test_seed_changes_the_weights(finished, tmp_path):
    run(at(dataclasses.replace(CONFIG, seed=1, steps=3), tmp_path))
    one, other = saved(tmp_path, 3), saved(finished, 3)
    assert any(one[name].tobytes() != other[name].tobytes() for name in one)


def test_finished_run_says_so_and_changes_nothing(finished, capfd):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.png")}
    result = run(at(CONFIG, finished))
    out, err = capfd.readouterr()
    assert json.loads(out) == result
    assert "already done: 8 steps" in err
    for line in ("run folder", "loss curve", "sample grid"):
        assert f"{line}  " in err
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*.png")}


def test_another_run_in_the_folder_is_refused_with_the_difference(finished):
    changed = dataclasses.replace(CONFIG, lr=1e-4, seed=3)
    with pytest.raises(UsageError, match=r"seed: 0 -> 3; lr: 0.002 -> 0.0001"):
        run(at(changed, finished))
    with pytest.raises(UsageError, match="has 8 steps, more than --steps 4"):
        run(at(dataclasses.replace(CONFIG, steps=4), finished))


def test_more_steps_and_other_intervals_go_on(finished, tmp_path, capfd):
    folder = tmp_path / "longer"
    run(at(dataclasses.replace(CONFIG, steps=4), folder))
    longer = dataclasses.replace(CONFIG, steps=6, log_every=1)
    result = run(at(longer, folder))
    assert "resuming from step 4" in capfd.readouterr().err
    assert result["steps"] == 6
    assert [row["step"] for row in figures(folder) if "loss" in row] == [2, 4, 5, 6]


def test_checkpoint_is_the_state_of_its_step_though_training_goes_on(
    finished, tmp_path
):
    """Saving runs in the background while later steps reuse the state's memory."""
    run(at(dataclasses.replace(CONFIG, log_every=1), tmp_path))
    assert_same_bits(saved(tmp_path, 6), saved(finished, 6))
    counts = saved(tmp_path, 6)
    steps = [value for name, value in counts.items() if "step" in name and value == 6]
    assert steps


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_killed_and_resumed_ends_with_the_same_bits(unbroken, tmp_path):
    folder = tmp_path / "killed"
    process = start(folder)
    wait_for(folder / "checkpoints" / "3", process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert not (folder / "DONE").exists()
    again = start(folder)
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert "resuming from step" in err
    assert_same_bits(saved(folder, 8), saved(unbroken, 8))
    # Nothing twice, nothing missing: windows before the kill are written again.
    losses = {row["step"]: row["loss"] for row in figures(folder) if "loss" in row}
    whole = {row["step"]: row["loss"] for row in figures(unbroken) if "loss" in row}
    assert losses.keys() == whole.keys() and losses[8] == whole[8]
    assert (folder / "samples.png").read_bytes() == (
        unbroken / "samples.png"
    ).read_bytes()
    assert len(out.splitlines()) == 1 and json.loads(out)["steps"] == 8


def test_sigterm_saves_exits_75_and_resumes_to_the_same_bits(unbroken, tmp_path):
    folder = tmp_path / "terminated"
    process = start(folder)
    wait_for(folder / "checkpoints" / "3", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("the run ended before the signal came")
    assert process.returncode == 75, err
    assert "stopped by SIGTERM" in err.splitlines()[-1]
    again = start(folder)
    _, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert_same_bits(saved(folder, 8), saved(unbroken, 8))


def test_divergence_names_the_last_good_checkpoint(tmp_path):
    # A learning rate at which the first update overflows fp32 in the next step.
    broken = dataclasses.replace(
        CONFIG,
        lr=1e38,
        optimizer=dataclasses.replace(CONFIG.optimizer, warmup=0),
        checkpoint=dataclasses.replace(CONFIG.checkpoint, every=1),
    )
    with pytest.raises(Diverged, match=r"non-finite \w+ at step 1; .*1 \(step 1\)"):
        run(at(broken, tmp_path))
    assert not (tmp_path / "DONE").exists()
    with Checkpoints(tmp_path / "checkpoints", 1) as checkpoints:
        assert checkpoints.latest == 1


def test_digits_are_scored_by_a_classifier(tmp_path):
    digits = dataclasses.replace(
        CONFIG,
        steps=2,
        data=dataclasses.replace(CONFIG.data, name="digits"),
    )
    result = run(at(digits, tmp_path))
    assert 0 <= result["val"]["all"] <= 1 and "novel" not in result


@pytest.mark.parametrize("attn", ["pallas", "emulated", "reference"])
def test_every_attention_starts_from_the_same_loss(finished, tmp_path, attn, capfd):
    """At step 0 the gates are closed: attention cannot change the first loss yet."""
    config = dataclasses.replace(CONFIG, attn=attn, steps=2, log_every=1)
    run(at(config, tmp_path))
    err = capfd.readouterr().err
    assert ("runs in the emulator" in err) == (attn == "pallas")
    environment = json.loads((tmp_path / "environment.json").read_text())
    resolved = environment["attention"]
    assert resolved["requested"] == attn
    assert resolved["implementation"] == (
        "reference" if attn == "reference" else "emulated"
    )
    first = figures(tmp_path)[0]["loss"]
    plain = at(dataclasses.replace(CONFIG, steps=2, log_every=1), tmp_path / "plain")
    run(plain)
    assert first == figures(tmp_path / "plain")[0]["loss"]
