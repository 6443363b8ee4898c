"""Checkpoints and folders on which `python -m analysis weights` once failed, or lost
something, each a test."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.weights import figure, readers
from analysis.weights.compare import compare
from analysis.weights.leaves import SLICE, Leaf


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figure, "write", lambda rows, picture: False)


def refused(capsys, *options: str) -> str:
    assert main(["weights", *options, "--out", "never"]) == 2
    assert not Path("never").exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("place", ["begins", "goes on"])
def test_a_damaged_archive_is_named(place, capsys):
    """Where zlib finds it: as the header is read, or further on."""
    np.savez_compressed("good.npz", w=random(2**16))
    content = bytearray(Path("good.npz").read_bytes())
    at = 60 if place == "begins" else len(content) // 2
    content[at : at + 28] = b"\xff" * 28
    Path("bad.npz").write_bytes(content)
    assert "bad.npz is" in refused(capsys, "--runs", "good.npz", "bad.npz")


@pytest.mark.parametrize("error", [zlib.error, NotImplementedError, RuntimeError])
def test_what_zipfile_does_not_know_is_named(error, capsys, monkeypatch):
    """A method of compression, a version, a password."""

    def open_it(self, name):
        raise error("not known")

    np.savez("a.npz", w=random(4))
    monkeypatch.setattr(readers.zipfile.ZipFile, "open", open_it)
    assert "a.npz is no .npz" in refused(capsys, "--runs", "a.npz", "a.npz")


def test_fortrans_order_is_read_once(monkeypatch):
    values = random(3, SLICE)
    np.savez("c.npz", w=values, v=values[0])
    np.savez("f.npz", w=np.asfortranarray(values), v=values[0])
    read, times = readers._Member._read, []

    def counted(self, box, dtype):
        times.append(box)
        return read(self, box, dtype)

    monkeypatch.setattr(readers._Member, "_read", counted)
    c, f = (readers.find(Path(name)).steps[None]() for name in ("c.npz", "f.npz"))
    found = compare({"w": c["w"]}, {"w": f["w"]}).rows[0]
    assert found["max_abs"] == 0 and found["count"] == values.size
    assert len(times) == 3 + 1


def test_a_start_of_both_is_read_once():
    """A compressed file would be read from its beginning for the second one."""
    places = []

    def read(box):
        places.append(box.start)
        return np.ones(box.stop - box.start, np.float32)

    start = {"w": Leaf((3 * SLICE,), np.dtype(np.float32), read)}
    a, b = ({"w": np.full(3 * SLICE, x, np.float32)} for x in (2, 3))
    found = compare(a, b, start, start, most_megabytes=0.0).rows[0]
    assert found["cosine"] == 1
    assert places == 2 * [0, SLICE, 2 * SLICE]  # W1 beyond memory reads all again.


def test_integers_have_any_name(capsys):
    np.savez("a.npz", step=np.int64(3), run=np.arange(3), w=random(4))
    np.savez("b.npz", step=np.int64(4), run=np.arange(3), w=random(4))
    assert main(["weights", "--runs", "a.npz", "b.npz", "--out", "out"]) == 0
    assert json.loads(capsys.readouterr().out)["differ"] == 1
    (found,) = json.loads(Path("out/weights.json").read_text())["equal"]
    tensors = {"step": False, "run": True}
    assert found == {"step": None, "run": "b.npz", "tensors": tensors}


def test_numbers_that_are_none_equal_themselves():
    values = {
        "w": random(4),
        "z": np.array([1j, np.nan]),
        "t": np.array(["NaT"], "M8[s]"),
    }
    found = compare(values, {name: x.copy() for name, x in values.items()})
    assert found.equal == {"z": True, "t": True} and not found.problems


def test_a_start_of_another_kind_is_none():
    w = random(4)
    start = {"w": np.array(list("abcd"))}
    found = compare({"w": w}, {"w": 2 * w}, start)
    assert found.rows[0]["cosine"] is None
    assert found.problems == ["w: no start of its shape, so no cosine and no drift"]


def test_a_folder_of_a_training_is_not_written_over(capsys):
    for name in "ab":
        np.savez(f"{name}.npz", w=random(4))
    for kept, content in (
        ("weights.json", '{"settings": {"experiment": "training"}}'),
        ("runs.csv", "arm,seed,step\n"),
        # One that has not come to its tables.
        ("training.jsonl", "{}\n"),
        ("training.jsonl.xz", ""),
    ):
        folder = Path(kept.replace(".", "-"))
        folder.mkdir()
        (folder / kept).write_text(content)
        (folder / "weights.parquet").write_text("rows")
        options = ["--runs", "a.npz", "b.npz", "--out", str(folder)]
        assert main(["weights", *options]) == 2
        assert "is of a training: give another --out" in capsys.readouterr().err
        assert sorted(x.name for x in folder.iterdir()) == [kept, "weights.parquet"]
        assert (folder / kept).read_text() == content
    for _ in range(2):  # Its own tables are.
        assert main(["weights", "--runs", "a.npz", "b.npz", "--out", "own"]) == 0


def test_other_requests_that_are_one_line(capsys):
    np.savez("a.npz", w=random(4))
    assert "a.npz is given twice" in refused(
        capsys, "--runs", "a.npz", "a.npz", "--runs", "a.npz"
    )
    assert "is not there" in refused(capsys, "--runs", "x" * 300, "a.npz")
    for number, (places, line) in enumerate(
        ((3, "is no index of safetensors"), ("a.npz", "is no whole safetensors file"))
    ):
        folder = Path(f"shards-{number}")
        folder.mkdir()
        (folder / "a.npz").write_bytes(b"")
        index = json.dumps({"weight_map": {"a": places}})
        (folder / "model.safetensors.index.json").write_text(index)
        assert line in refused(capsys, "--runs", str(folder), "a.npz")


def test_a_tensor_that_no_shard_has_is_named(capsys):
    from safetensors.numpy import save_file

    Path("model").mkdir()
    save_file({"a": random(4)}, "model/one.safetensors")
    index = {"weight_map": dict.fromkeys("ab", "one.safetensors")}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    line = refused(capsys, "--runs", "model", "model")
    assert "no shard has b, which model.safetensors.index.json names" in line


def test_a_start_without_tensors_is_named(capsys):
    np.savez("a.npz", w=random(4))
    np.savez("b.npz", w=2 * random(4))
    np.savez("none.npz")
    options = ["--runs", "a.npz", "b.npz", "--initial", "none.npz", "--out", "out"]
    assert main(["weights", *options]) == 0
    assert "--initial none.npz holds no tensor" in capsys.readouterr().err
