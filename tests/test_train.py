"""Whole runs on the CPU: the same bits twice, resume, divergence, what is written."""

import dataclasses
import json
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image

from attn_jax.kernels import tuning
from tests.train_process import start, wait_for, wait_until
from train.assemble import assemble
from train.attention import (
    ResolvedAttention,
    check_lowered,
    compiler_options,
    lowered_kernels,
    make_attention,
    resolve_attention,
    shard_attention,
)
from train.config import Config, UsageError
from train.data import score
from train.data.shapes import Shapes
from train.evaluate import rates, satisfied
from train.figures import write_loss_curve
from train.loop import run
from train.precision import make_policy
from train.presets import PRESETS
from train.sharding import make_mesh

pytestmark = pytest.mark.usefixtures("shared_programs")
TINY = PRESETS["tiny"]
CONFIG = dataclasses.replace(
    TINY,
    attn="xla",
    steps=8,
    batch_size=8,
    log_every=1,
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


def test_run_folder_holds_what_a_reader_needs(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["model"]["width"] == 64 and config["attn"] == "xla"
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["attention"]["implementation"] == "xla"
    assert environment["attention"]["inputs"] == "bfloat16"
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1, "seq": 1}
    assert environment["profile"] == "fast"
    rows = figures(finished)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8]
    for name in ("loss.png", "samples.png", "samples/4.png", "samples/8.png"):
        image = Image.open(finished / name).convert("RGB")
        colours = image.getcolors(maxcolors=2**24)
        assert colours is not None and len(colours) > 10, name
    done = json.loads((finished / "DONE").read_text())
    assert done["steps"] == 8 and done["val"]["captions"] == 8
    assert 0 <= done["val"]["all"] <= 1 and done["novel"]["captions"] == 8
    assert "loss" in (finished / "log.txt").read_text()


def test_same_run_twice_gives_the_same_bits(finished, tmp_path, monkeypatch):
    drawn = []

    def drawing(rows, path):
        drawn.append((path.name, rows[-1]["step"]))
        write_loss_curve(rows, path)

    monkeypatch.setattr("train.loop.write_loss_curve", drawing)
    run(at(CONFIG, tmp_path))
    # A long run shows its curve before it ends.
    assert drawn == [("loss.png", 4), ("loss.png", 8)]
    assert figures(tmp_path) == figures(finished)
    assert_same_bits(saved(tmp_path, 8), saved(finished, 8))
    assert_same_bits(saved(tmp_path, 3), saved(finished, 3))
    grids = [(folder / "samples.png").read_bytes() for folder in (tmp_path, finished)]
    assert grids[0] == grids[1]


def test_seed_changes_the_weights():
    states = [
        assemble(dataclasses.replace(CONFIG, seed=seed)).fresh_state()
        for seed in (0, 1)
    ]
    one, other = (np.asarray(state.params["embedding"]) for state in states)
    assert not np.isclose(one, other).any(axis=1).all()


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


@pytest.mark.ci
def test_more_steps_and_other_intervals_go_on(finished, tmp_path, capfd):
    folder = shutil.copytree(finished, tmp_path / "run")
    longer = dataclasses.replace(CONFIG, steps=11, log_every=2)
    result = run(at(longer, folder))
    assert "resuming from step 8" in capfd.readouterr().err
    assert result["steps"] == 11
    steps = [row["step"] for row in figures(folder) if "loss" in row]
    assert steps == [*range(1, 9), 10, 11]


@pytest.mark.ci
def test_new_run_starts_from_the_weights_of_another(finished, tmp_path, capfd):
    source, folder = tmp_path / "source", tmp_path / "run"
    shutil.copytree(finished / "checkpoints", source / "checkpoints")
    # So small a rate that the first step leaves the weights where they are.
    start = dataclasses.replace(
        CONFIG,
        init_from=str(source),
        steps=2,
        seed=5,
        lr=1e-30,
        checkpoint=dataclasses.replace(CONFIG.checkpoint, every=1),
    )
    run(at(start, folder))
    err = capfd.readouterr().err
    assert err.count(f"weights and their average from {source}/checkpoints/8\n") == 1
    before, after = saved(finished, 8), saved(folder, 1)
    names = [name for name in before if name.startswith("['params']")]
    assert len(names) > 10
    for name in names:
        # Adam moves a weight by a few times 1e-30, which only a weight of 0 shows.
        np.testing.assert_allclose(after[name], before[name], rtol=0, atol=1e-25)
        # A run's first step has decay 1 / 10; fp32 rounds three times on the way.
        average = name.replace("params", "average")
        kept = 0.1 * before[average] + 0.9 * before[name]
        np.testing.assert_allclose(after[average], kept, rtol=1e-5, atol=1e-7)
    assert after["['step']"] == 1
    config = json.loads((folder / "config.json").read_text())
    assert config["init_from"] == str(source)
    with pytest.raises(UsageError, match="init_from: .* -> None"):
        run(at(dataclasses.replace(start, init_from=None), folder))

    # Its own checkpoint comes first, wherever the weights once came from.
    shutil.rmtree(source)
    shutil.rmtree(folder / "checkpoints" / "2")
    (folder / "DONE").unlink()
    run(at(start, folder))
    assert "resuming from step 1" in capfd.readouterr().err


def test_weights_that_do_not_fit_are_refused_by_name(finished, tmp_path):
    def refused(match, init_from, **model):
        config = dataclasses.replace(
            CONFIG,
            init_from=str(init_from),
            model=dataclasses.replace(CONFIG.model, **model),
        )
        with pytest.raises(UsageError, match=match):
            run(at(config, tmp_path / "run"))
        assert not (tmp_path / "run" / "config.json").exists()

    refused("nowhere: no checkpoint there", tmp_path / "nowhere")
    refused(r"blocks.1.down.bias is missing there and \(64,\) here", finished, depth=2)
    newest = finished / "checkpoints" / "8"
    refused(
        r"/8: embedding is \(\d+, 64\) there and \(257, 64\)", newest, tokenizer="byte"
    )


@pytest.mark.ci
def test_terminated_killed_and_resumed_ends_with_the_same_bits(finished, tmp_path):
    """A process that gets SIGTERM, one that goes on and is killed, and one that goes on
    to the end, of which a run without interruption knows nothing."""
    folder = tmp_path / "broken"
    devices = {"JAX_NUM_CPU_DEVICES": str(jax.device_count())}
    process = start(folder, **devices)
    wait_for(folder / "checkpoints" / "3", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "stopped by SIGTERM" in err.splitlines()[-1]
    assert (folder / "loss.png").stat().st_size > 1000
    assert not (folder / "DONE").exists()

    rows = folder / "metrics.jsonl"
    before = rows.stat().st_size
    process = start(folder, **devices)
    # Something is written of what no checkpoint has.
    wait_until(lambda: rows.stat().st_size > before, process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert not (folder / "DONE").exists()

    again = start(folder, **devices)
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert "resuming from step" in err
    assert_same_bits(saved(folder, 8), saved(finished, 8))
    # Nothing twice, nothing missing: windows before the kill are written again.
    losses = {row["step"]: row["loss"] for row in figures(folder) if "loss" in row}
    whole = {row["step"]: row["loss"] for row in figures(finished) if "loss" in row}
    assert losses.keys() == whole.keys() and losses[8] == whole[8]
    assert (folder / "samples.png").read_bytes() == (
        finished / "samples.png"
    ).read_bytes()
    assert len(out.splitlines()) == 1 and json.loads(out)["steps"] == 8


def test_ctrl_c_exits_130_in_one_line_and_the_run_can_go_on(tmp_path):
    folder = tmp_path / "interrupted"
    # Never at its end by itself within the time given.
    process = start(folder, "--steps=1000000", "--eval.every=0")
    try:
        wait_for(folder / "checkpoints" / "3", process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    said = re.fullmatch(
        r"python -m train: interrupted; step (\d+) is saved in (.*), where the same "
        r"command goes on \(SIGTERM saves before it stops\)",
        err.splitlines()[-1],
    )
    assert said is not None and said[2] == str(folder / "checkpoints"), err
    assert "Traceback" not in err
    # Every checkpoint there is whole, the one that is named among them.
    steps = [int(path.name) for path in (folder / "checkpoints").iterdir()]
    assert int(said[1]) in steps
    assert max(steps) >= 3 and saved(folder, max(steps))["['step']"] == max(steps)


@pytest.mark.ci
def test_ctrl_c_ends_a_step_that_takes_long(tmp_path):
    """It is not waited for, and nothing aborts where it is taken what it works with."""
    wide = "--model.width=1024", "--model.heads=8", "--model.depth=4"
    process = start(tmp_path / "run", *wide, "--batch-size=256", "--eval.every=0")
    try:
        for line in process.stderr or ():
            if "; compiled in " in line:
                break
        time.sleep(2)  # A step of 2 TFLOP takes far longer.
        process.send_signal(signal.SIGINT)
        before = time.monotonic()
        _, err = process.communicate(timeout=120)
        seconds = time.monotonic() - before
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.startswith("python -m train: interrupted; nothing is saved yet in ")
    assert len(err.splitlines()) == 1 and seconds < 10


def test_verdicts_of_many_images_are_those_of_each_in_one_call(monkeypatch):
    source = Shapes(32, "all", "val", 0)
    examples = source.__getitems__(list(range(40)))
    images = np.stack([example["image"] for example in examples])
    # Half of the captions are another image's.
    texts = [examples[i if i % 2 else (i + 2) % 40]["caption"] for i in range(40)]
    one_by_one = [score.score(*pair).all for pair in zip(images, texts, strict=True)]
    assert 15 <= sum(one_by_one) <= 25
    calls = []

    def counted(images, captions, score_all=score.score_all):
        calls.append(len(images))
        return score_all(images, captions)

    monkeypatch.setattr(score, "score_all", counted)
    assert satisfied(CONFIG, images, texts) == one_by_one
    assert rates(CONFIG, images, texts)["all"] == np.mean(one_by_one)
    assert calls == [40, 40]


@pytest.mark.ci
def test_digits_are_scored_by_a_classifier(tmp_path):
    digits = dataclasses.replace(
        CONFIG, steps=1, data=dataclasses.replace(CONFIG.data, name="digits")
    )
    result = run(at(digits, tmp_path))
    assert 0 <= result["val"]["all"] <= 1 and "novel" not in result


def test_pallas_without_its_gpu_is_emulated_and_says_so(finished, tmp_path, capfd):
    run(at(dataclasses.replace(CONFIG, attn="pallas", steps=2), tmp_path))
    notes = [line for line in capfd.readouterr().err.splitlines() if "--attn" in line]
    assert len(notes) == 1 and "runs in the emulator" in notes[0]
    environment = json.loads((tmp_path / "environment.json").read_text())
    resolved = environment["attention"]
    assert resolved["requested"] == "pallas"
    assert resolved["implementation"] == "emulated"
    assert resolved["recipe"] == "kernels"
    # At step 0 the gates are closed: attention cannot change the first loss yet.
    assert figures(tmp_path)[0] == figures(finished)[0]


def attention_of(attn: str, **changes):
    config = dataclasses.replace(CONFIG, attn=attn, **changes)
    policy, mesh = make_policy(config), make_mesh(config, jax.devices()[:1])
    attention = make_attention(resolve_attention(config, jax.devices()[0]), policy)
    return shard_attention(attention, mesh, policy.attention)


def test_cudnn_is_not_asked_for_determinism_and_says_so():
    gpu = SimpleNamespace(platform="gpu", device_kind="some device", process_index=0)
    config = dataclasses.replace(CONFIG, attn="cudnn", profile="exact")
    resolved = resolve_attention(config, gpu)
    assert resolved.note is not None and "from run to run" in resolved.note

    options = compiler_options(resolved, [gpu] * 4, in_rings=True)
    # XLA knows every one of them: an unknown name is an error.
    program = jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)
    assert program(1.0) == 2
    assert [name for name in options if "determin" in name]
    assert not any(x for name, x in options.items() if "determin" in name)
    fast = resolve_attention(dataclasses.replace(config, profile="fast"), gpu)
    assert fast.note is None
    baseline = dataclasses.replace(config, attn="baseline")
    plain = compiler_options(resolve_attention(baseline, gpu), [gpu], in_rings=False)
    assert not [name for name in plain if "determin" in name]
    # Copy engines, where the ring's messages are.
    assert "xla_gpu_collective_permute_mode" in options
    assert "xla_gpu_collective_permute_mode" not in plain
    assert not compiler_options(resolved, jax.devices("cpu"), in_rings=True)


@pytest.mark.parametrize(
    ("platform", "capability", "known"),
    [
        ("cpu", "", tuning.HEAD_DIMS["hopper"]),
        ("gpu", "9.0", tuning.HEAD_DIMS["hopper"]),
        ("gpu", "8.0", tuning.HEAD_DIMS["ampere"]),
    ],
)
def test_pallas_takes_the_head_dims_of_the_kernels(platform, capability, known):
    device = SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind="some device"
    )
    for head_dim in (16, *tuning.HEAD_DIMS["hopper"]):
        model = dataclasses.replace(CONFIG.model, width=2 * head_dim, heads=2)
        config = dataclasses.replace(CONFIG, attn="pallas", model=model)
        if head_dim in known:
            assert resolve_attention(config, device).requested == "pallas"
            continue
        with pytest.raises(UsageError) as error:
            resolve_attention(config, device)
        message = str(error.value)
        assert str(known) in message and f"not {head_dim} " in message
        assert "\n" not in message


# XLA has no products of float16 on a CPU under jit.
@pytest.mark.parametrize(
    ("attn", "inputs"),
    [
        ("baseline", "bf16"),
        *(
            (a, i)
            for a in ("pallas", "emulated", "reference")
            for i in ("bf16", "fp16")
        ),
    ],
)
def test_every_attention_agrees_to_its_format(attn, inputs):
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(one, (2, 28, 1, 64)) for one in keys)
    attend = attention_of(attn, attention_inputs=inputs)
    out = jax.jit(attend)(query, key, value)
    exact = attention_of("reference", attention_inputs="fp32")(query, key, value)
    assert out.dtype.name == {"bf16": "bfloat16", "fp16": "float16"}[inputs]
    unit = {"bf16": 2.0**-9, "fp16": 2.0**-12}[inputs]
    # Half-ulp roundings of q, k, v, P and the output, each relative `unit` of values
    # up to 4 here (|q|, |k| enter through logits of size 8 / sqrt(8)).
    np.testing.assert_allclose(np.float32(out), exact, atol=5 * 4 * unit)


def test_lowered_program_is_held_against_the_request():
    pallas = ResolvedAttention("pallas", "pallas", None, None)
    cudnn = ResolvedAttention("cudnn", "cudnn", None, None)
    baseline = ResolvedAttention("baseline", "xla", None, None)
    mosaic = 'custom_call_target="mosaic_gpu_v2", metadata={op_name'
    program = (
        f'x = bf16[2] custom-call(y), {mosaic}="jit(f)/jvp()/attention_one/mpmd_map"\n'
        f'z = bf16[2] custom-call(x), {mosaic}="jit(f)/attention_one/mpmd_map"\n'
        f'n = bf16[2] custom-call(z), {mosaic}="jit(f)/some_norm/mpmd_map"\n'
        'w = f32[2] custom-call(x), custom_call_target="__cublas$gemm", '
        'metadata={op_name="jit(f)/layer/dot_general"}\n'
    )
    calls = lowered_kernels(program)
    norm = {"mosaic_gpu_v2:some_norm": 1, "__cublas$gemm": 1}
    assert calls == {"mosaic_gpu_v2:attention_one": 2} | norm
    said = check_lowered(pallas, calls)
    assert said == "attention lowered to mosaic_gpu_v2:attention_one (2 calls)"
    # Kernels of other layers are no attention.
    assert "XLA operations" in check_lowered(baseline, norm)
    with pytest.raises(RuntimeError, match="no pallas kernel"):
        check_lowered(pallas, norm)
    for wrong in (cudnn, baseline):
        with pytest.raises(RuntimeError, match="compiled step has"):
            check_lowered(wrong, calls)
    with pytest.raises(RuntimeError, match="no pallas kernel"):
        check_lowered(pallas, {"__cublas$gemm": 1})
    assert "cudnn$fmha" in check_lowered(cudnn, {"__cudnn$fmhaSoftmax": 1})
    assert "XLA operations" in check_lowered(baseline, {"__cublas$gemm": 1})
