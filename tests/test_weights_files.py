"""Checkpoints of every kind, read in slices, and the command that compares them."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint
import polars
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

from analysis import weights
from analysis.__main__ import main
from analysis.experiments import weights_speed
from analysis.weights import readers
from analysis.weights.compare import compare
from analysis.weights.leaves import boxes
from train.checkpoint import Checkpoints
from train.config import UsageError
from train.precision import make_policy, start_loss_scale
from train.presets import PRESETS
from train.state import TrainState


def tree_of(seed: int, *extra) -> dict[str, np.ndarray]:
    """A tensor of every type, an empty one and a scalar."""
    rng = np.random.default_rng(seed)
    kinds = [np.float32, np.float16, ml_dtypes.bfloat16, *extra]
    tree = {
        f"layers.{i}.w": rng.standard_normal((6, 2, 5)).astype(kind)
        for i, kind in enumerate(kinds)
    }
    tree["scalar"] = np.array(0.5, np.float32)
    tree["count"] = np.arange(4)
    return tree


def nested(flat: dict) -> dict:
    tree: dict = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def save_npz(path: Path, tree: dict) -> Path:
    np.savez(path, **tree)
    return path


def save_compressed(path: Path, tree: dict) -> Path:
    """Compressed, and in Fortran's order."""
    turned = {name: np.array(values, order="F") for name, values in tree.items()}
    np.savez_compressed(path, **turned)
    return path


def save_safetensors(path: Path, tree: dict) -> Path:
    save_file(tree, path)
    return path


def save_shards(path: Path, tree: dict, index: bool = True) -> Path:
    path.mkdir()
    names = sorted(tree)
    where = {name: f"model-0000{1 + i % 2}-of-00002" for i, name in enumerate(names)}
    for part in set(where.values()):
        content = {name: tree[name] for name in names if where[name] == part}
        save_file(content, path / f"{part}.safetensors")
    if index:
        files = {name: f"{part}.safetensors" for name, part in where.items()}
        text = json.dumps({"weight_map": files})
        (path / "model.safetensors.index.json").write_text(text)
        # Not named by the index, so not read.
        save_file({"other": np.zeros(2)}, path / "other.safetensors")
    return path


def save_orbax(path: Path, tree: dict) -> Path:
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, nested(tree) | {"text": "no numbers", "none": None})
    return path


def save_orbax_files(path: Path, tree: dict) -> Path:
    """Without the database of OCDBT: a folder an array."""
    handler = orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=False)
    with orbax.checkpoint.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, nested(tree))
    return path


def save_orbax_v1(path: Path, tree: dict) -> Path:
    ocp.save(str(path), jax.tree.map(jnp.asarray, nested(tree)))
    return path


EIGHT_BITS = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
EMPTY = {"empty": np.zeros((0, 3), np.float32)}
KINDS = {
    "a.npz": (save_npz, tree_of(0, np.float64) | EMPTY),
    "b.npz": (save_compressed, tree_of(0, np.float64) | EMPTY),
    "c.safetensors": (save_safetensors, tree_of(0, np.float64, *EIGHT_BITS) | EMPTY),
    "shards": (save_shards, tree_of(0)),
    "plain": (lambda *given: save_shards(*given, index=False), tree_of(0)),
    "orbax": (save_orbax, tree_of(0, np.float64, *EIGHT_BITS)),
    "files": (save_orbax_files, tree_of(0)),
    "v1": (save_orbax_v1, tree_of(0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_in_slices(kind, tmp_path):
    save, tree = KINDS[kind]
    found = readers.find(save(tmp_path / kind, tree))
    assert list(found.steps) == [None]
    (opened,) = (one() for one in found.steps.values())
    assert opened.keys() == tree.keys()
    for name, values in tree.items():
        leaf = opened[name]
        # JAX holds no 64-bit integers here.
        same = kind == "v1" or leaf.dtype == values.dtype
        assert leaf.shape == values.shape and same, name
        for _ in "twice":
            parts = [leaf.read(box).ravel() for box in boxes(leaf.shape, 7)]
            read = np.concatenate([*parts, np.zeros(0, leaf.dtype)])
            np.testing.assert_array_equal(read, values.ravel())
    # Skipped over, and back.
    box = list(boxes((6, 2, 5), 7))[3]
    first = tree["layers.0.w"].ravel()[box.start : box.stop]
    for _ in "twice":
        np.testing.assert_array_equal(opened["layers.0.w"].read(box).ravel(), first)
    one = compare(tree, opened)
    assert not one.problems and not any(row["max_abs"] for row in one.rows)
    assert one.equal == {"count": True}


def test_steps_are_found_in_any_order_of_names(tmp_path):
    for step in (100, 20, 3):
        save_npz(tmp_path / f"step_{step}.npz", {"w": np.full(2, float(step))})
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / "40.orbax-checkpoint-tmp-7").mkdir()
    found = readers.find(tmp_path)
    assert list(found.steps) == [3, 20, 100]
    for step, opened in found.steps.items():
        (box,) = boxes((2,))
        np.testing.assert_array_equal(opened()["w"].read(box), [step, step])
    save_npz(tmp_path / "checkpoint-20.npz", {"w": np.zeros(2)})
    with pytest.raises(UsageError, match="two checkpoints of step 20: name one"):
        readers.find(tmp_path)


def state(shift: float, step: int) -> TrainState:
    """Weights named as our model's."""
    rng = np.random.default_rng(0)
    params = {
        "blocks": {
            i: {
                "query": {"kernel": rng.standard_normal((8, 8), np.float32)},
                "up": {"kernel": rng.standard_normal((8, 16), np.float32)},
            }
            for i in range(2)
        },
        "embedding": rng.standard_normal((20, 8), np.float32),
    }
    params = jax.tree.map(
        lambda leaf: jnp.asarray(leaf + np.float32(0.01 * step)), params
    )
    block = params["blocks"][1]["up"]
    block["kernel"] = block["kernel"] + shift
    return TrainState(
        params=params,
        average=jax.tree.map(lambda leaf: leaf * 2, params),
        optimizer=(),
        loss_scale=start_loss_scale(make_policy(PRESETS["tiny"])),
        step=jnp.int32(step),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs: they start alike, and one kernel moves away in the second."""
    root = tmp_path_factory.mktemp("runs")
    for name, steps, shift in (("a", (0, 2, 4), 0.0), ("b", (0, 4, 2, 8), 0.125)):
        with Checkpoints(root / name / "checkpoints", keep=9) as checkpoints:
            for step in sorted(steps):
                checkpoints.save(step, state(shift * step, step))
    return root


def test_two_runs_of_ours(runs, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["weights", "--runs", *(str(runs / name) for name in "ab")]
    command += ["--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["steps"] == [0, 2, 4] and result["problems"] == 1
    assert "b: compared at steps 0, 2, 4, not at 8 (only in b)" in said.err
    assert "groups at the last step" in said.err
    rows = polars.read_parquet(out / "weights.parquet")
    with (out / "weights.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == result["rows"]
    described = json.loads((out / "weights.json").read_text())
    assert described["reference"] == "a" and described["command"].startswith(
        "python -m"
    )
    assert (out / "weights.png").stat().st_size > 10_000
    at_start = rows.filter(polars.col("step") == 0)
    assert at_start["max_abs"].max() == at_start["w1"].max() == 0
    moved = rows.filter((polars.col("step") > 0) & (polars.col("max_abs") > 0))
    assert set(moved["scope"]) == {"all", "up", "1", "up/1", "blocks.1.up.kernel"}
    (last,) = moved.filter(
        (polars.col("step") == 4) & (polars.col("kind") == "tensor")
    ).to_dicts()
    # Both sides round the sums w + 0.5 to FP32: half a unit of numbers below 8 each.
    near = 2 * 2.0**-22
    for name in ("max_abs", "mean", "w1", "p50"):
        # Quantiles say up to 2^-10 of themselves too much.
        more = 0.5 * 2.0**-10 if name == "p50" else 0.0
        assert last[name] == pytest.approx(0.5, abs=near + more), name
    # It travelled by 0.04, the other by 0.54.
    assert last["drift"] == pytest.approx(0.5 / 0.04, rel=1e-4)
    assert last["cosine"] == pytest.approx(1, rel=1e-6)

    pair = [readers.find(runs / name, "average").steps[4]() for name in "ab"]
    doubled = compare(*pair).rows[0]
    assert doubled["max_abs"] == pytest.approx(1.0, abs=2 * near)


def test_chunks_of_orbax_are_decoded_once(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    place = jax.NamedSharding(mesh, jax.P("x", "y"))
    values = np.arange(16 * 12, dtype=np.float32).reshape(16, 12)
    ocp.save(str(tmp_path / "w"), {"w": jax.device_put(values, place)})
    leaf = readers.find(tmp_path / "w").steps[None]()["w"]
    # A row at a time, of chunks that hold 4 and half of each.
    found = [leaf.read(box).ravel() for box in boxes(leaf.shape, 12)]
    np.testing.assert_array_equal(np.concatenate(found), values.ravel())

    regions = []

    class Stored:
        shape = values.shape
        chunk_layout = SimpleNamespace(read_chunk=SimpleNamespace(shape=(4, 6)))

        def __getitem__(self, region):
            regions.append(region)
            future = SimpleNamespace(result=lambda: values[region])
            return SimpleNamespace(read=lambda: future)

    chunks = readers._Chunks(Stored())
    found = [chunks.read(box).ravel() for box in boxes(values.shape, 12)]
    np.testing.assert_array_equal(np.concatenate(found), values.ravel())
    whole = slice(0, 12)
    assert regions == [(slice(low, low + 4), whole) for low in (0, 4, 8, 12)]


def test_one_checkpoint_against_a_file_with_a_start(runs, tmp_path, capsys):
    checkpoint = runs / "a" / "checkpoints" / "4"
    ((_, opened),) = readers.find(checkpoint).steps.items()
    flat = {
        name: np.concatenate([leaf.read(box).ravel() for box in boxes(leaf.shape)])
        .reshape(leaf.shape)
        .astype(np.float32)
        for name, leaf in opened().items()
    }
    flat["embedding"] = flat["embedding"] + np.float32(0.25)
    flat["embedding"][0, :3] = np.nan
    del flat["blocks.0.query.kernel"]
    save_file(flat, tmp_path / "m.safetensors")
    command = ["weights", "--runs", str(checkpoint), str(tmp_path / "m.safetensors")]
    command += ["--initial", str(runs / "a"), "--groups", "(embed|up)"]
    assert main([*command, "--out", str(tmp_path), "--most-megabytes", "0"]) == 0
    said = capsys.readouterr()
    assert "step 4: blocks.0.query.kernel: only in 4" in said.err
    assert "embedding: 3 of 160 weights of m.safetensors are not finite" in said.err
    rows = polars.read_parquet(tmp_path / "weights.parquet")
    assert set(rows["step"]) == {4}
    assert set(rows.filter(polars.col("kind") == "group")["scope"]) == {
        *("embed", "up", "other")
    }
    (embedding,) = rows.filter(polars.col("scope") == "embedding").to_dicts()
    assert (embedding["count"], embedding["nonfinite_other"]) == (157, 3)
    assert 0 < embedding["w1_error"] < 1e-3
    assert abs(embedding["w1"] - 0.25) <= embedding["w1_error"] + 2.0**-23
    # ||0.25|| over ||0.04||: FP32 rounds weights below 4 by 2^-23, twice.
    assert embedding["drift"] == pytest.approx(0.25 / 0.04, rel=2 * 2**-22 / 0.04)


def refused(capsys, *options) -> str:
    assert main(["weights", *map(str, options)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    return said.err


def test_unusable_request_is_one_line(runs, tmp_path, capsys):
    a, out = runs / "a", tmp_path / "out"

    def said(*others, more=()):
        return refused(capsys, "--runs", *others, "--out", out, *more)

    assert "at least one other" in said(a)
    assert "is not there: name a run folder of python -m train" in said(
        a, tmp_path / "x"
    )
    (tmp_path / "none").mkdir()
    assert "holds no checkpoint that can be read" in said(a, tmp_path / "none")
    file = save_npz(tmp_path / "w.npz", {"w": np.zeros(2)})
    assert "have no step in common" in said(a, file)
    checkpoint = a / "checkpoints" / "4"
    assert "have no tensor of one name" in said(checkpoint, file)
    assert "it has params, average, loss_scale, step" in said(
        a, a, more=["--tree", "x"]
    )
    assert "no regular expression" in said(a, a, more=["--groups", "("])
    assert "--most-megabytes must be" in said(a, a, more=["--most-megabytes", "nan"])
    two = tmp_path / "two"
    for step in (1, 2):
        shutil.copytree(checkpoint, two / str(step))
    assert "no 0: name one" in said(a, a, more=["--initial", two])
    integers = save_npz(tmp_path / "i.npz", {"w": np.arange(2)})
    assert "no tensor of floating-point" in said(integers, integers)
    damaged = tmp_path / "d.safetensors"
    damaged.write_bytes(b"\x10" + bytes(30))
    assert "is no whole safetensors file" in said(damaged, file)
    archive = tmp_path / "d.npz"
    archive.write_bytes(file.read_bytes()[:50])
    assert "is no .npz file of arrays" in said(archive, file)
    objects = save_npz(tmp_path / "o.npz", {"w": np.array([{}, None])})
    assert "holds objects of Python" in said(objects, file)
    np.savez(file, w=np.zeros(2, np.longdouble))
    assert "has the type" in said(file, file)
    np.savez(file, w=np.zeros(2, [("x", "i1"), ("y", "i1")]))
    assert "has the type" in said(file, file)
    lost = save_npz(tmp_path / "8.npz", {"w": np.zeros(2, ml_dtypes.float8_e4m3fn)})
    assert "which says no format" in said(lost, file)
    shards = save_shards(tmp_path / "shards", tree_of(0))
    (shards / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002" in said(shards, file)
    for path in (two / "1" / "state" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    assert "it is damaged or no checkpoint" in said(two / "1", two / "2")
    (two / "2" / "state" / "_METADATA").write_text("{")
    assert "it is damaged or no checkpoint" in said(two / "2", checkpoint)


def test_without_polars_the_csv_is_written(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = ["--runs", str(runs / "a"), str(runs / "b"), "--out", str(tmp_path)]
    assert main(["weights", *options]) == 0
    assert "no polars here: no weights.parquet" in capsys.readouterr().err
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".json", ".png"}


def test_speed_is_measured_against_scipy(tmp_path, capsys):
    options = ["--size", "2000", "--repeats", "1", "--out", str(tmp_path)]
    assert main(["weights-speed", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["implementation"] for row in rows] == ["scipy", "ours"] * 2
    # Sums of 2000 FP64 terms in two orders.
    assert all(abs(row["apart"]) < 1e-12 for row in rows)
    assert json.loads((tmp_path / "cpu.json").read_text())["rows"] == rows
    assert main(["weights-speed", "--size", "0"]) == 2
    assert main(["weights-speed", "--parameters", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_trees_are_compared_where_they_lie(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weights_speed, "_WIDTH", 16)
    options = ["--size", "10", "--repeats", "1", "--out", str(tmp_path)]
    assert main(["weights-speed", *options, "--parameters", "5000"]) == 0
    *_, tree = json.loads(capsys.readouterr().out)["rows"]
    assert tree["implementation"] == "tree" and tree["seconds"] > 0
    # Two layers of 12 x 16^2 + 16.
    assert tree["size"] == 2 * (12 * 16**2 + 16)
    # Noise of 1 % moves order statistics by less than it moves weights: 0.01 x 0.8.
    assert 0 < tree["w1"] < 0.008


def test_numpy_sorts_without_avx512_on_amd(monkeypatch):
    monkeypatch.delenv("NPY_DISABLE_CPU_FEATURES", raising=False)
    for amd, imported, disabled in [
        *((True, False, True), (True, True, False), (False, False, False))
    ]:
        text = "vendor_id : AuthenticAMD" if amd else "vendor_id : GenuineIntel"
        modules = {"numpy": np} if imported else {}
        environ: dict[str, str] = {}
        with monkeypatch.context() as patch:
            patch.setattr(weights.Path, "read_text", lambda _: text)
            patch.setattr(weights.sys, "modules", modules)
            patch.setattr(weights.os, "environ", environ)
            weights.fast_sort()
        assert ("NPY_DISABLE_CPU_FEATURES" in environ) == disabled
