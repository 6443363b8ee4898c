"""The command line: help without JAX, exit codes, one line for a mistake."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from train.__main__ import main, parse_config
from train.config import UsageError, difference, from_dict, to_json
from train.gpu import (
    allows_excess_precision,
    prefer_cpu_without_driver,
    set_profile,
)
from train.presets import PRESETS
from train.validate import validate

pytestmark = pytest.mark.usefixtures("shared_programs")
REPOSITORY = Path(__file__).resolve().parent.parent
# The programs of tests/test_train.py, compiled once for both.
SMALL_RUN = (
    "--attn=xla --steps=8 --batch-size=8 --model.width=64 --model.heads=1 "
    "--model.depth=1 --optimizer.warmup=2 --eval.examples=8 --eval.captions=8 "
    "--eval.novel=0 --eval.batch-size=8 --eval.grid=4 --eval.sampler-steps=2"
).split()


@pytest.mark.parametrize("arguments", [["--help"], ["--print-config"], ["--oops"]])
def test_answers_without_importing_jax(arguments):
    program = (
        "import sys\nfrom train.__main__ import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "heavy = {'jax', 'flax', 'attn_jax', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture
def nothing_compiles(monkeypatch):
    """Fails the test if a refused command gets as far as building a trainer."""

    def compiled(*_, **__):
        raise AssertionError("a program was compiled before the command was refused")

    monkeypatch.setattr("train.loop._Trainer", compiled)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--oops=3"], ["--oops", "(see python -m train --help)"]),
        (["--attn=fast"], ["fast", "pallas"]),
        (["--preset=huge"], ["huge", "small"]),
        (["--lr=much"], ["lr", "much"]),
        (["--time-std=0"], ["time-std", "positive"]),
        (["--time-std=inf"], ["--time-std", "finite"]),
        (["--time-mean=nan"], ["--time-mean", "finite"]),
        (["--steps=0"], ["--steps", "at least 1"]),
        (["--seed=-1"], ["--seed is -1", "at least 0"]),
        (["--seed=4294967296"], ["--seed", "below 4294967296"]),
        (["--data.seed=-1"], ["--data.seed is -1", "at least 0"]),
        (["--data.seed=9223372036854775808"], ["below 9223372036854775808"]),
        (["--optimizer.beta1=1"], ["--optimizer.beta1", "[0, 1)"]),
        (["--optimizer.beta2=-0.1"], ["--optimizer.beta2", "[0, 1)"]),
        (["--optimizer.beta2=nan"], ["--optimizer.beta2", "[0, 1)"]),
        (["--optimizer.eps=0"], ["--optimizer.eps", "positive"]),
        (["--optimizer.eps=nan"], ["--optimizer.eps", "positive"]),
        (["--optimizer.clip=0"], ["--optimizer.clip", "positive"]),
        (["--optimizer.weight-decay=-1"], ["--optimizer.weight-decay", "at least 0"]),
        (["--optimizer.weight-decay=nan"], ["--optimizer.weight-decay", "finite"]),
        (["--optimizer.decay-fraction=nan"], ["--optimizer.decay-fraction", "[0, 1]"]),
        (
            ["--precision=fp16", "--optimizer.static-loss-scale=0"],
            ["--optimizer.static-loss-scale", "positive"],
        ),
        (["--eval.guidance=inf"], ["--eval.guidance", "finite"]),
        (["--distributed.coordinator=here:1"], ["go together"]),
        (["--distributed.processes=2", "--distributed.process-id=0"], ["go together"]),
        (
            ["--distributed.coordinator=here:1", "--distributed.processes=2"]
            + ["--distributed.process-id=0"],
            ["--distributed.enabled"],
        ),
        (
            ["--distributed.coordinator=here:1", "--distributed.processes=2"]
            + ["--distributed.process-id=2", "--distributed.enabled"],
            ["--distributed.process-id is 2", "[0, 2)"],
        ),
        (
            ["--distributed.coordinator=here", "--distributed.processes=2"]
            + ["--distributed.process-id=0", "--distributed.enabled"],
            ["--distributed.coordinator=here", "host:port"],
        ),
        (["--model.heads=8"], ["96, 128, 192, 256)", "not 16", "--attn=xla"]),
        (["--attention-inputs=fp32"], ["--attention-inputs=bf16"]),
        (["--preset=small", "--precision=fp32"], ["--attention-inputs=bf16"]),
        (["--model.heads=3"], ["--model.heads 3"]),
        (["--data.resolution=30"], ["--model.patch 8"]),
        (["--mesh.seq=2", "--attn=xla"], ["--mesh.seq 2", "--attn=pallas"]),
        (
            ["--context-parallel=zigzag"],
            ["--context-parallel=zigzag", "--mesh.seq 2 or more"],
        ),
        (["--mesh.tensor=4"], ["--mesh.tensor 4", "heads"]),
        (
            ["--mesh.fsdp=8", "--model.width=100", "--model.heads=1", "--attn=xla"],
            ["--model.width 100", "--mesh.fsdp 8", "multiple"],
        ),
        (["--mesh.fsdp=3", "--batch-size=33"], ["8 devices"]),
        (["--mesh.data=5", "--batch-size=35"], ["8 devices"]),
        (["--batch-size=12"], ["--batch-size 12", "multiple"]),
        (["--attn=cudnn"], ["NVIDIA GPU", "--attn=xla"]),
        (["--attn=emulated", "--recipe=mine"], ["mine", "flash2"]),
        (["--recipe=flash2"], ["--attn=emulated"]),
        (["--data.name=folder"], ["--data.path"]),
        (
            ["--data.name=folder", "--data.path=/nowhere", "--model.tokenizer=byte"],
            ["/nowhere"],
        ),
        (["--data.name=folder", "--data.path=/nowhere"], ["--model.tokenizer=byte"]),
        (["--data.path=/tmp"], ["--data.path=/tmp", "--data.name=folder"]),
        (
            ["--data.path=/tmp", "--data.name=digits"],
            ["--data.path=/tmp", "--data.name=folder", "--data.name=digits"],
        ),
        (["--config=/nowhere/config.json"], ["/nowhere/config.json"]),
        (
            ["--config=/nowhere/config.json", "--preset", "small"],
            ["--preset=small", "--config=/nowhere/config.json", "leave out one"],
        ),
        (["--preset"], ["--preset", "Missing"]),
        (["--run-dir=/proc/run"], ["/proc/run"]),
        (["--init-from=/nowhere"], ["/nowhere", "run folder"]),
    ],
)
def test_a_mistake_is_exit_2_and_one_line(
    arguments, names, capfd, tmp_path, nothing_compiles
):
    if not any(argument.startswith("--run-dir") for argument in arguments):
        arguments = [*arguments, f"--run-dir={tmp_path}"]
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    for name in names:
        assert name in err
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--out=x.jpg"], ["--out x.jpg", ".png"]),
        (["--out=nowhere/x.png"], ["--out nowhere/x.png", "folder that exists"]),
        (["--out=here.png"], ["--out here.png", "must be a file"]),
        (["--sampler-steps=0"], ["--sampler-steps is 0", "at least 1"]),
        (["--sampler-steps=-3"], ["--sampler-steps is -3", "at least 1"]),
        (["--seed=-1"], ["--seed is -1"]),
        (["--guidance=nan"], ["--guidance is nan", "finite"]),
        (["--oops=3"], ["--oops", "(see python -m train sample --help)"]),
    ],
)
def test_a_picture_that_cannot_be_made_is_refused_at_once(
    arguments, names, capfd, tmp_path, monkeypatch
):
    def assembled(*_, **__):
        raise AssertionError("the model was built before the command was refused")

    monkeypatch.setattr("train.sample.assemble", assembled)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.png").mkdir()
    (tmp_path / "config.json").write_text(to_json(PRESETS["tiny"]))
    assert main(["sample", "--run-dir=.", *arguments, "--caption", "a blue cross"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1, err
    for name in names:
        assert name in err


def test_flags_override_the_preset_and_print_as_json(capfd):
    arguments = ["--preset=small", "--lr", "3e-4", "--model.patch=2", "--print-config"]
    assert main(arguments) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["preset"] == "small" and printed["lr"] == 3e-4
    assert printed["model"]["patch"] == 2 and printed["model"]["width"] == 384
    assert printed["print_config"] is False


def test_the_last_preset_or_file_counts_as_the_last_value_of_any_option(tmp_path):
    """For all values, not for the name alone."""
    given = ["--preset=small", "--lr=1", "--preset", "base", "--lr=2"]
    assert parse_config(given) == dataclasses.replace(PRESETS["base"], lr=2.0)
    for name in ("small", "base"):
        (tmp_path / name).write_text(to_json(PRESETS[name]))
    given = [f"--config={tmp_path}/small", "--config", f"{tmp_path}/base"]
    assert parse_config(given) == PRESETS["base"]


@pytest.mark.parametrize(
    ("slurm", "names"),
    [
        ({}, ["coordinator_address"]),
        # A batch script itself, not a step of it.
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "3"}, ["srun"]),
    ],
)
def test_where_no_cluster_is_detected_a_line_says_what_to_give(slurm, names, tmp_path):
    command = [sys.executable, "-m", "train", f"--run-dir={tmp_path}/run"]
    result = subprocess.run(
        command if slurm else [*command, "--distributed.enabled"],
        cwd=REPOSITORY,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"} | slurm,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    for name in ("coordinator", "processes", "process-id"):
        assert f"--distributed.{name}" in last
    for name in names:
        assert name in last
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_json(name, tmp_path):
    config = PRESETS[name]
    validate(config)
    assert config.preset == name
    assert from_dict(json.loads(to_json(config))) == config
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    assert parse_config([f"--config={path}"]) == config
    with pytest.raises(UsageError, match="no field 'colour'"):
        from_dict({"colour": 1})


def test_configuration_from_before_an_option_existed_is_the_same_run():
    old = json.loads(to_json(PRESETS["small"]))
    del old["model"]["qk_norm"]
    assert difference(from_dict(old), PRESETS["small"]) == []
    without = parse_config(["--preset=small", "--model.no-qk-norm"])
    assert difference(from_dict(old), without) == ["model.qk_norm: True -> False"]


def test_without_a_driver_jax_looks_for_no_gpu(monkeypatch):
    import os

    import train.gpu
    from attn_jax import machine

    monkeypatch.setattr("train.gpu.has_driver", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS")
    prefer_cpu_without_driver()
    assert "JAX_PLATFORMS" not in os.environ
    monkeypatch.setattr("train.gpu.has_driver", lambda: False)
    with monkeypatch.context() as with_tpu:
        with_tpu.setattr("importlib.util.find_spec", lambda name: name == "libtpu")
        prefer_cpu_without_driver()
    assert "JAX_PLATFORMS" not in os.environ
    prefer_cpu_without_driver()
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    # Written twice: one of them works before JAX is imported.
    assert train.gpu._OTHERS == machine._OTHERS
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    prefer_cpu_without_driver()
    assert os.environ["JAX_PLATFORMS"] == "cuda"


def test_exact_profile_sets_flags_only_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    monkeypatch.setattr("train.gpu._has_gpu", lambda: False)
    set_profile("exact")
    import os

    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=2"
    monkeypatch.setattr("train.gpu._has_gpu", lambda: True)
    for variable in ("NCCL_ALGO", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(variable, "")
    set_profile("fast")
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=2"
    set_profile("exact")
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[0] == "--xla_gpu_autotune_level=2"
    assert flags.count("--xla_gpu_deterministic_ops=true") == 1
    assert not any(flag == "--xla_gpu_autotune_level=0" for flag in flags)


def test_exact_profile_flags_are_known_to_this_xla():
    """XLA aborts the process on a flag that it does not know."""
    from train.gpu import _EXACT_XLA_FLAGS

    result = subprocess.run(
        [sys.executable, "-c", "import jax; jax.numpy.zeros(1) + 1"],
        env={
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(_EXACT_XLA_FLAGS),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.ci
def test_train_then_sample(tmp_path, capfd):
    folder = tmp_path / "run"
    assert main([*SMALL_RUN, f"--run-dir={folder}"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["run_dir"] == str(folder)
    assert len(out.splitlines()) == 1
    assert f"sample grid  {folder}/samples.png" in err

    picture = tmp_path / "one.png"
    drawn = ["sample", f"--run-dir={folder}", "--caption"]
    assert main([*drawn, "a red circle in the center"]) == 0
    beside = folder / "sample.png"
    assert capfd.readouterr().out.strip() == str(beside)
    assert Image.open(beside).size == (32, 32)
    first = beside.read_bytes()
    drawn.insert(1, f"--out={picture}")
    assert main([*drawn, "a red circle in the center"]) == 0
    assert picture.read_bytes() == first
    assert main([*drawn, "a red circle in the center", "a blue cross"]) == 0
    assert Image.open(picture).size[0] > 64
    capfd.readouterr()

    assert main([*drawn, "a purple elephant"]) == 2
    assert "purple" in capfd.readouterr().err
    assert main(["sample", f"--run-dir={tmp_path}", "--caption", "a"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_divergence_is_exit_3(tmp_path, capfd):
    # A learning rate at which the first update overflows fp32 in the next step.
    diverging = ["--lr=1e38", "--optimizer.warmup=0", "--steps=4"]
    arguments = [*SMALL_RUN, *diverging, "--checkpoint.every=1"]
    assert main([*arguments, f"--run-dir={tmp_path}"]) == 3
    last = capfd.readouterr().err.splitlines()[-1]
    assert "at step 1; the last good checkpoint is" in last
    assert f"{tmp_path}/checkpoints/1 (step 1)" in last
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["1"] and not (tmp_path / "DONE").exists()


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        ("", True),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_allow_excess_precision", True),
        ("--xla_allow_excess_precision=false", False),
        ("--xla_allow_excess_precision=0 --xla_gpu_autotune_level=0", False),
        ("--xla_allow_excess_precision=false --xla_allow_excess_precision=true", True),
    ],
)
def test_excess_precision_is_what_the_flags_say(flags, allowed, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert allows_excess_precision() == allowed
    # No profile sets it.
    monkeypatch.setattr("train.gpu._has_gpu", lambda: True)
    for variable in ("NCCL_ALGO", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(variable, "")
    set_profile("exact")
    assert allows_excess_precision() == allowed
