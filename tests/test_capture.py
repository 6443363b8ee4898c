"""Q, K, V and dO from a run folder are those of the model and step they claim to be."""

import contextlib
import csv
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from analysis import capture
from analysis.__main__ import main
from attn_jax.audit.inputs import Inputs
from tests.run_folder import on_one_device, write_run
from train.assemble import open_split
from train.config import UsageError, from_dict, load
from train.data.loader import batches
from train.presets import PRESETS
from train.step import draw_examples, example_losses

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("shared_programs")]
TINY = PRESETS["tiny"]
# Blocks are recomputed in training, which the capture has to do without.
CONFIG = dataclasses.replace(
    TINY,
    attn="baseline",
    batch_size=8,
    model=dataclasses.replace(TINY.model, width=128, heads=2, depth=3, remat=True),
)


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.thorough)],
    ids=["qk-norm", "no-qk-norm"],
)
def root(request, tmp_path_factory) -> Path:
    """What a run leaves, with checkpoints of steps 2 and 4 whose gates are open."""
    folder = tmp_path_factory.mktemp("capture") / "run"
    model = dataclasses.replace(CONFIG.model, qk_norm=request.param)
    config = dataclasses.replace(CONFIG, model=model)
    write_run(folder, config, (2, 4))
    return folder


@pytest.fixture(scope="module")
def file(root) -> Path:
    """What the command wrote."""
    out = root.parent / "some.npz"
    options = ["capture", "--run", str(root), "--steps", "0,2,last"]
    assert main([*options, "--layers", "first,2", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def captured(file) -> list[capture.Capture]:
    return capture.read(file)


def rebuilt(root: Path, step: int):
    """The step, without the code under test: assembly, weights and whole batch."""
    from orbax.checkpoint import v1 as ocp

    config = load(root / "config.json")
    assembly = on_one_device(config)
    path = str(root / "checkpoints" / str(step))
    wanted = {"state": assembly.abstract_state()}
    params = ocp.load_checkpointables(path, wanted)["state"].params
    reader = batches(
        open_split(config, "train"),
        assembly.tokenizer,
        batch_size=config.batch_size,
        seed=config.data.seed,
        start_step=step,
    )
    with contextlib.closing(reader):
        batch = {name: jnp.asarray(rows) for name, rows in next(reader).items()}
    return assembly, params, draw_examples(config, batch, step)


def test_captured_inputs_reproduce_the_attention_of_the_model(root, captured):
    found = [one for one in captured if one.step == 4]
    assembly, params, examples = rebuilt(root, 4)

    @jax.jit
    def outputs(examples):
        outs = []

        def attention(*qkv):
            outs.append(assembly.attention_fn(*qkv))
            return outs[-1]

        losses = example_losses(assembly.parts, attention, params, examples)
        return outs, losses

    outs, losses = outputs(examples)
    for one in found:
        inputs = one.inputs
        assert inputs.query.dtype == ml_dtypes.bfloat16
        assert inputs.query.shape == inputs.dout.shape == (2, 28, 2, 64)
        again = assembly.attention_fn(*map(jnp.asarray, inputs[:3]))
        expected = np.float32(outs[one.layer][:2])
        # Fused otherwise, an FP32 rounding may carry an entry of Q, K, V or of the
        # output over to the next BF16 number, 2**-7 of it at most; that of V counts
        # by its largest entry.
        atol = 4 * 2.0**-7 * np.abs(np.float32(inputs.value)).max()
        np.testing.assert_allclose(np.float32(again), expected, rtol=0, atol=atol)
        # Another layer's inputs are not as close.
        other = np.float32(outs[2 - one.layer][:2])
        assert np.abs(np.float32(again) - other).max() > 10 * atol
        # 1e-5: sums of 3072 FP32 terms in another order.
        assert one.loss == pytest.approx(float(losses[:2].mean()), rel=1e-5)


def test_captured_queries_show_the_norm(root, captured):
    # A capture of the wrong arrays would show the norm nowhere, or everywhere.
    rms = [
        np.sqrt(np.square(np.float32(one.inputs.query)).mean(-1)) for one in captured
    ]
    qk_norm = load(root / "config.json").model.qk_norm
    # Unit rows, rounded to BF16: 2**-8 at most.
    assert (np.abs(np.stack(rms) - 1).max() < 2.0**-8) == qk_norm


def test_captured_cotangent_is_the_derivative_of_the_whole_batch_loss(root, captured):
    (one,) = (c for c in captured if (c.step, c.layer) == (4, 2))
    assembly, params, examples = rebuilt(root, 4)
    direction = np.float32(one.inputs.dout)
    direction = direction / np.sqrt(np.square(direction).sum())
    padded = np.zeros((CONFIG.batch_size, *direction.shape[1:]), np.float32)
    padded[:2] = direction

    @jax.jit
    def loss(size):
        calls = []

        def attention(*qkv):
            calls.append(None)
            out = assembly.attention_fn(*qkv).astype(jnp.float32)
            return out + size * padded if len(calls) == 3 else out

        return example_losses(assembly.parts, attention, params, examples)

    # Central difference in float64 sums of FP32 losses. The largest entry moved is
    # about 1; curvature falls out to second order.
    size = 1.0
    ends = [np.asarray(loss(s), np.float64).mean() for s in (-size, size)]
    slope = (ends[1] - ends[0]) / (2 * size)
    expected = np.sum(np.float32(one.inputs.dout) * direction)
    # dO rounded to BF16: 2**-8 of it; losses of about 1 carry 2**-24 each, a tenth of
    # a percent of the difference; the rest is third order in the step.
    assert slope == pytest.approx(expected, rel=0.02)


def test_step_zero_is_the_fresh_model_with_closed_gates(captured):
    for one in captured:
        # Values are drawn, not zero, from the start; the way back opens later.
        assert 0.5 < np.float32(one.inputs.value).std() < 2
        assert np.float32(one.inputs.dout).any() == (one.step > 0)


def test_command_describes_what_it_wrote(root, file):
    labels = capture.load(file).labels
    assert list(labels) == [
        f"step {s}, layer {layer}" for s in (0, 2, 4) for layer in (0, 2)
    ]
    described = json.loads(str(np.load(file)["description"]))
    assert from_dict(described["config"]) == load(root / "config.json")
    with file.with_suffix(".csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [(row["step"], row["layer"]) for row in rows] == [
        (str(s), str(layer)) for s in (0, 2, 4) for layer in (0, 2)
    ]
    command = json.loads(file.with_suffix(".json").read_text())["command"]
    assert command.startswith("python -m analysis capture --run")


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_files_keep_every_bit(kind, tmp_path):
    rng = np.random.default_rng(0)
    arrays = (rng.standard_normal((2, 5, 3, 4)).astype(kind) for _ in range(4))
    one = capture.Capture(7, 1, 0.25, Inputs(*arrays))
    capture.save([one], CONFIG, tmp_path / "x.npz")
    ((label, inputs),) = capture.load(tmp_path / "x.npz").arrays().items()
    assert label == "step 7, layer 1"
    for array, original in zip(inputs, one.inputs, strict=True):
        assert array.dtype == kind and array.tobytes() == original.tobytes()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--steps", "3"], "'3' is not among 0, 2, 4"),
        (["--layers", "0,7"], "'7' is not among 0, 1, 2"),
        (["--examples", "9"], "batches of 1 to 8"),
        (["--max-megabytes", "0.1"], "choose 3 of these"),
        (["--out", "some.txt"], "must end in .npz"),
        (["--out", "pyproject.toml/some.npz"], "cannot write"),
    ],
)
def test_unusable_request_is_one_line(root, options, reason, capsys):
    assert main(["capture", "--run", str(root), *options]) == 2
    error = capsys.readouterr().err
    assert reason in error and len(error.splitlines()) == 1


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros(3))
    single = tmp_path / "single.npy"
    np.save(single, np.zeros(3))
    empty = tmp_path / "empty.npz"
    empty.touch()
    for path in (other, single, empty, tmp_path / "nowhere"):
        refused_in_one_line(path)


def refused_in_one_line(path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run folder") as refusal:
        capture.load(path)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def small(tmp_path) -> Path:
    """A file with one capture of a few numbers."""
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 4)).astype(np.float32)
    path = tmp_path / "small.npz"
    capture.save([capture.Capture(7, 1, 0.25, Inputs(x, x, x, x))], CONFIG, path)
    assert capture.load(path).draws == 2
    return path


def test_a_damaged_file_is_refused(small):
    content = small.read_bytes()
    for end in range(1, len(content), 97):
        small.write_bytes(content[:end])
        refused_in_one_line(small)
    refused = 0
    for at in range(0, len(content), 23):
        small.write_bytes(content[:at] + b"\x5a" + content[at + 1 :])
        # Some bytes, such as dates, say nothing.
        try:
            capture.load(small)
        except UsageError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    "changes",
    [
        5,
        {"captures": []},
        {"captures": 5},
        {"captures": [5]},
        {"captures": [{"step": 7}]},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_a_description_of_another_shape_is_refused(small, changes):
    stored = dict(np.load(small))
    described = json.loads(str(stored["description"]))
    described = described | changes if isinstance(changes, dict) else changes
    stored["description"] = np.array(json.dumps(described))
    np.savez(small, **stored)
    refused_in_one_line(small)


@pytest.mark.parametrize("shape", [(), (3, 2, 4), (1, 0, 2, 4), (1, 3, 2, 5)])
def test_arrays_of_another_shape_are_refused(small, shape):
    stored = dict(np.load(small))
    for name in ("query", "dout"):
        stored[f"0_{name}"] = np.zeros(shape, np.float32)
    np.savez(small, **stored)
    refused_in_one_line(small)


def test_a_sweep_is_refused_before_anything_is_captured(
    root, tmp_path, monkeypatch, capsys
):
    def captured(*_):
        raise AssertionError("captured before the command was refused")

    monkeypatch.setattr(capture, "capture", captured)
    command = ["tiling", "--preset=toy", f"--inputs=run:{root}"]
    (tmp_path / "file").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "toy.jsonl").write_text('{"settings": {"seeds": 3}}\n')
    for options, reason in (
        ([f"--out={tmp_path / 'file'}"], "cannot write"),
        ([f"--out={other}"], "other settings"),
        (["--seeds=5"], "4 draws"),
    ):
        assert main([*command, *options]) == 2
        error = capsys.readouterr().err
        assert reason in error and len(error.splitlines()) == 1


def test_what_a_run_folder_will_give_is_known_beforehand(root, monkeypatch):
    # The shape of what is captured from this run, as asserted above.
    inputs = Inputs(*np.ones((4, 2, 28, 2, 64), np.float32))
    calls = []

    def captured(root, steps, layers, examples):
        calls.append(examples)
        return [capture.Capture(s, n, 0.0, inputs) for s in steps for n in layers]

    monkeypatch.setattr(capture, "capture", captured)
    found = capture.load(root)
    assert not calls
    arrays = found.arrays()
    assert found.arrays() is arrays and calls == [capture.DEFAULT_EXAMPLES]
    assert found.labels == tuple(arrays)
    assert found[1:4] == capture.captured(arrays)[1:4] == (4, 28, 64)
