"""Damaged run folders: one line that names what to delete, and nothing deleted."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.checkpoint import Checkpoints, find_weights
from train.config import UsageError, to_json
from train.loop import run
from train.precision import make_policy, start_loss_scale
from train.presets import PRESETS
from train.record import RunFolder
from train.state import TrainState

CONFIG = dataclasses.replace(PRESETS["tiny"], attn="xla", steps=4, batch_size=8)
# One leaf small enough to lie in the index, one that has a file of its own.
WEIGHTS = {"small": jnp.arange(8.0), "large": jnp.arange(100_000.0)}
STATE = TrainState(
    params=WEIGHTS,
    average=WEIGHTS,
    optimizer=(),
    loss_scale=start_loss_scale(make_policy(CONFIG)),
    step=jnp.int32(4),
)
ABSTRACT = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
    STATE,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, STATE)
            checkpoints.wait()
    return folder


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    """A finished run of 4 steps with these checkpoints."""
    root = tmp_path / "run"
    shutil.copytree(sound, root / "checkpoints")
    (root / "samples").mkdir()
    (root / "config.json").write_text(to_json(CONFIG))
    (root / "metrics.jsonl").write_text('{"step": 3, "loss": 1}\n{"step": 4}\n')
    (root / "DONE").write_text('{"steps": 4, "held_out_loss": 1.5}\n')
    return root


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def empty(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


def cut(path: Path) -> None:
    for file in path.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "no state": lambda step: shutil.rmtree(step / "state"),
    "nothing": lambda step: [shutil.rmtree(part) for part in step.glob("[sd]*")],
    "emptied": empty,
    "emptied state": lambda step: empty(step / "state"),
    "emptied index": lambda step: empty(step / "state" / "manifest.ocdbt"),
    "emptied names": lambda step: empty(step / "state" / "_METADATA"),
    "emptied arrays": lambda step: empty(step / "state" / "d"),
    "no arrays": lambda step: shutil.rmtree(step / "state" / "d"),
    "cut arrays": lambda step: cut(step / "state" / "d"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_named_and_kept(folder, damage, monkeypatch):
    monkeypatch.setattr("train.loop.Assembly.abstract_state", lambda _: ABSTRACT)
    checkpoints = folder / "checkpoints"
    DAMAGE[damage](checkpoints / "4")
    before = contents(folder)
    with pytest.raises(UsageError) as refused:
        run(dataclasses.replace(CONFIG, steps=8, run_dir=str(folder)))
    message = str(refused.value)
    assert f"{checkpoints / '4'} is damaged" in message
    assert f"delete that folder to go on from {checkpoints / '2'}" in message
    # Neither the metrics nor the end of the run are taken back.
    assert contents(folder) == before

    shutil.rmtree(checkpoints / "4")
    with Checkpoints(checkpoints, keep=2) as sound:
        state = sound.restore(ABSTRACT)
    for name, weights in WEIGHTS.items():
        np.testing.assert_array_equal(state.params[name], weights)


def test_last_checkpoint_damaged_means_a_start_from_scratch(folder):
    shutil.rmtree(folder / "checkpoints" / "2")
    empty(folder / "checkpoints" / "4")
    with (
        Checkpoints(folder / "checkpoints", keep=2) as checkpoints,
        pytest.raises(UsageError, match="to start from scratch, as there is no older"),
    ):
        checkpoints.restore(ABSTRACT)


def test_weights_of_a_damaged_checkpoint_are_refused(folder):
    empty(folder / "checkpoints" / "4")
    with pytest.raises(UsageError, match="/4 is damaged.*undamaged one to --init-from"):
        find_weights(folder, ABSTRACT)


def test_lack_of_memory_is_not_called_damage(folder, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    def wrapped(*_):
        raise KeyError("Failed to load") from RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(ocp, "load_checkpointables", wrapped)
    with (
        Checkpoints(folder / "checkpoints", keep=2) as checkpoints,
        pytest.raises(KeyError, match="Failed to load"),
    ):
        checkpoints.restore(ABSTRACT)


def test_ctrl_c_waits_for_the_save_it_falls_into(folder, monkeypatch):
    after = []
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Checkpoints(folder / "checkpoints", keep=3) as checkpoints:

            def saving(*_):
                os.kill(os.getpid(), signal.SIGINT)
                after.append("saved")

            orbax = checkpoints._checkpointer
            monkeypatch.setattr(orbax, "save_checkpointables_async", saving)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(6, STATE)
            assert after == ["saved"]
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"steps": 4', "null", "4", "{}", '{"steps": 4}', '{"steps": "4"}'],
)
def test_damaged_end_of_a_run_is_named(folder, text):
    (folder / "DONE").write_text(text)
    before = contents(folder)
    with pytest.raises(UsageError, match=f"{folder}/DONE is damaged: delete it"):
        run(dataclasses.replace(CONFIG, run_dir=str(folder)))
    assert contents(folder) == before
    (folder / "DONE").unlink()
    assert RunFolder(dataclasses.replace(CONFIG, run_dir=str(folder))).done() is None


def test_finished_run_without_checkpoints_does_not_start_over_unasked(folder):
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    before = contents(folder)
    with pytest.raises(UsageError, match=r"4 steps but has no checkpoint.*--run-dir"):
        run(dataclasses.replace(CONFIG, steps=8, run_dir=str(folder)))
    assert contents(folder) == before
    # Asked for what it has, the run is still done.
    done = run(dataclasses.replace(CONFIG, run_dir=str(folder)))
    assert done == json.loads((folder / "DONE").read_text())
