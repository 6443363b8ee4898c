"""The experiments: figures, files and exit codes, at toy size."""

import contextlib
import csv
import functools
import io
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from analysis import capture_file
from analysis.__main__ import main
from analysis.agreement import same_bits
from analysis.experiments import EXPERIMENTS, accuracy, emulator_speed, memory
from analysis.experiments.accuracy import Cell, Problem, measure, measure_cells
from analysis.problems import PRESETS
from attn_jax.api import Implementation
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from train import record
from train.config import Config

TOY = Problem(T=64, S=48, N=4, K=2, H=64, is_causal=False, dtype="bfloat16")
# Experiment -> options that run it in seconds on a CPU.
TOY_OPTIONS = {
    "accuracy": [
        *("--preset", "toy", "--seeds", "1", "--families", "normal"),
        *("--implementations", "emulated", "reference"),
    ],
    "emulator-speed": ["--lengths", "512", "2048", "--heads", "1"],
    "memory": ["--lengths", "512", "1024", "2048", "--heads", "1", "--head-dim", "16"],
}


def one_line(text: str) -> bool:
    return len(text.strip().splitlines()) == 1


def test_list_names_every_experiment(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(EXPERIMENTS)


def test_list_ends_quietly_where_nobody_reads_on():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "analysis", "list"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 0 and "BrokenPipe" not in done.stderr


def test_every_experiment_has_a_test():
    # Capturing needs a run folder: tests/test_capture.py. Two need a GPU:
    # tests/test_experiments_gpu.py. The sweeps:
    # tests/test_experiments_forward.py and _backward.py. Times: tests/test_speed.py.
    # Random cases: tests/test_random_cases.py. The census: tests/test_census.py.
    # Weights: tests/test_weights_files.py. Steps: tests/test_step_speed.py.
    # The README's figure: tests/test_documentation.py.
    # Rings: tests/test_experiments_ring.py and _depth.py; over devices:
    # tests/test_context_parallel_over_devices.py; their speed:
    # tests/test_context_parallel_speed.py.
    # Images of runs: tests/test_gallery.py.
    elsewhere = {
        "capture",
        "random-cases",
        "speed",
        "speed-and-error",
        "kernels",
        "flash-attention-2",
        "precision",
        "sequence-length",
        "tiling",
        "state-format",
        "backward",
        "attribution",
        "saturation",
        "bias",
        "ring",
        "context-parallel-error",
        "context-parallel-speed",
        "depth",
        "census",
        "training",
        "gallery",
        "weights",
        "weights-speed",
        "step-speed",
    }
    assert TOY_OPTIONS.keys() | elsewhere == EXPERIMENTS.keys()


@pytest.fixture(scope="module")
def at_toy_size(tmp_path_factory):
    """What an experiment says last when it is run with its `TOY_OPTIONS`, once."""

    @functools.cache
    def run(name: str) -> dict:
        out, said = tmp_path_factory.mktemp(name), io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main([name, *TOY_OPTIONS[name], "--out", str(out)]) == 0
        return json.loads(said.getvalue().splitlines()[-1])

    return run


@pytest.mark.ci
@pytest.mark.parametrize("name", TOY_OPTIONS)
def test_every_experiment_runs_and_records_itself(name, at_toy_size):
    result = at_toy_size(name)
    table, described = (path for path in result["files"])
    with open(table) as file:
        assert len(list(csv.DictReader(file))) == result["rows"] > 0
    with open(described) as file:
        environment = json.load(file)
    assert environment["command"].startswith(f"python -m analysis {name} --")
    assert environment["versions"]["jax"] and environment["device"]
    # What only a training run has would be made up here.
    assert not {"profile", "attention", "mesh"} & environment.keys()


def test_emulator_memory_grows_no_faster_than_the_length(at_toy_size):
    with open(at_toy_size("emulator-speed")["files"][0]) as file:
        short, long = (float(row["megabytes"]) for row in csv.DictReader(file))
    # A T x S array would grow by (2048 / 512)**2 = 16.
    assert long <= 4.1 * short


def test_memory_tells_a_whole_matrix_of_logits_from_blocks(at_toy_size):
    with open(at_toy_size("memory")["files"][0]) as file:
        rows = list(csv.DictReader(file))
    grown = {}
    for row in rows:
        assert float(row["megabytes"]) >= float(row["beside"]) > 0
        if row["growth"]:
            grown.setdefault(row["implementation"], []).append(float(row["growth"]))
    assert len(grown["xla"]) == len(grown["emulated"]) == 2
    assert min(grown["xla"]) > 1.5 and max(grown["emulated"]) < 1.1


def test_memory_is_held_against_cudnn_and_the_length_before():
    def row(name, length, megabytes):
        return {"implementation": name, "N": length, "megabytes": megabytes}

    rows = [row("pallas", 8, 22.0), row("pallas", 16, 44.0)]
    rows += [row("cudnn", 8, 20.0), row("cudnn", 16, None)]
    found = memory.compared(rows)
    assert [x["growth"] for x in found] == [None, 1.0, None, None]
    assert [x["over_cudnn"] for x in found] == [1.1, None, 1.0, None]


@pytest.mark.parametrize(("name", "is_row"), [("cudnn", True), ("emulated", False)])
def test_memory_takes_no_bug_of_ours_for_a_refusal(
    name, is_row, tmp_path, capsys, monkeypatch
):
    """What a library raises is its refusal, a row; our own ValueError is a bug."""

    def attend(*_):
        raise ValueError("out of order")

    monkeypatch.setattr(memory.in_jax, "attention", lambda *_: attend)
    options = ["--implementations", name, "--lengths", "8", "--heads", "1"]
    command = ["memory", *options, "--out", str(tmp_path)]
    if is_row:
        assert main(command) == 1
        assert "cudnn ran nowhere: out of order" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match="out of order"):
            main(command)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--lengths", "0"], "at least 1"),
        (["--heads", "6", "--kv-heads", "4"], "multiple"),
        (["--out", "pyproject.toml"], "cannot write"),
    ],
)
def test_memory_is_refused_in_one_line_before_anything_compiles(
    options, reason, capsys, monkeypatch
):
    monkeypatch.setattr(memory, "_planned", lambda *_: pytest.fail("compiled"))
    assert main(["memory", *options]) == 2
    error = capsys.readouterr().err
    assert one_line(error) and reason in error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "EXPERIMENT"),
        (["no-such-experiment"], "no-such-experiment"),
        (["accuracy", "--families", "no-such-family"], "no-such-family"),
        (["accuracy", "--no-such-option"], "--no-such-option"),
    ],
)
def test_unusable_command_is_exit_2_and_one_line(options, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert one_line(error) and reason in error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--seeds", "0"], "--seeds"),
        # The emulator is not among the implementations that are the default.
        (["--recipes", "flash3"], "--recipes is for --implementations emulated"),
        (["--float16-cotangent", "3"], "must be a power of two, got 3"),
        (["--float16-cotangent", "0"], "must be a power of two, got 0"),
        (["--float16-cotangent", "nan"], "must be a power of two, got nan"),
        (["--float16-cotangent", "inf"], "must be a power of two, got inf"),
    ],
)
def test_unusable_value_is_exit_2_and_one_line(options, reason, tmp_path, capsys):
    command = ["accuracy", "--preset", "toy", "--out", str(tmp_path / "out")]
    assert main([*command, *options]) == 2
    error = capsys.readouterr().err
    assert one_line(error) and reason in error
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_recipes_are_what_the_emulator_emulates(tmp_path):
    options = ["accuracy", "--preset", "toy", "--seeds", "1", "--families", "normal"]
    options += ["--implementations", "emulated", "--recipes", "flash2", "flash3"]
    options += ["--float16-cotangent", "0.25"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    with open(tmp_path / "cpu-toy.csv") as file:
        rows = list(csv.DictReader(file))
    names = {row["implementation"] for row in rows}
    assert names == {"emulated/flash2", "emulated/flash3"}


def test_shapes_for_a_gpu_are_refused_off_one(tmp_path, capsys):
    assert main(["accuracy", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert one_line(error) and "--preset=quick needs a GPU" in error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--recipe", "te_ring", "--lengths", "8", "6"], "--lengths 6"),
        (["--lengths", "8", "--out", "pyproject.toml"], "cannot write"),
    ],
)
def test_speed_is_refused_before_anything_is_timed(
    options, reason, capsys, monkeypatch
):
    monkeypatch.setattr(emulator_speed, "_row", lambda *_: pytest.fail("timed"))
    assert main(["emulator-speed", "--heads", "1", *options]) == 2
    error = capsys.readouterr().err
    assert one_line(error) and reason in error


def test_speed_of_fp64_and_of_each_length_once(tmp_path, capsys):
    options = ["--recipe", "exact_fp64", "--heads", "1", "--lengths", "8", "8"]
    assert main(["emulator-speed", *options, "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 1


def test_an_accuracy_table_that_cannot_be_written_is_refused_at_once(capsys):
    assert main(["accuracy", "--preset", "toy", "--out", "pyproject.toml"]) == 2
    error = capsys.readouterr().err
    assert one_line(error) and "cannot write" in error


def test_results_do_not_make_the_program_a_changed_one(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    program, table = tmp_path / "train" / "record.py", tmp_path / "results" / "x.csv"
    for file in (program, table):
        file.parent.mkdir()
        file.write_text("1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    monkeypatch.setattr(record, "__file__", str(program))
    assert not record.environment()["git_dirty"]
    table.write_text("2\n")
    assert not record.environment()["git_dirty"]
    program.write_text("2\n")
    assert record.environment()["git_dirty"]


def test_implementation_that_runs_nowhere_is_an_error(tmp_path, capsys):
    options = [
        *("accuracy", "--preset", "toy", "--seeds", "1", "--families", "normal"),
        *("--implementations", "cudnn", "reference", "--out", str(tmp_path)),
    ]
    assert main(options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "cudnn ran nowhere" in error and "NVIDIA GPU" in error
    # The others' figures are kept, and the reason stands beside them.
    with open(tmp_path / "cpu-toy.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows if row["out"]} == {"reference"}
    assert all(row["refused"] for row in rows if row["implementation"] == "cudnn")


def test_accuracy_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    options = ["accuracy", "--preset", "toy", "--seeds", "1", "--out", str(tmp_path)]
    options += ["--implementations", "reference", "--families", "normal"]

    def stopped(cells, *arguments):
        yield from measure_cells(cells[:2], *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "measure_cells", stopped)
    for more, again in ([], "the same command"), (["--fresh"], "without --fresh"):
        assert main([*options, *more]) == 130
        said = capsys.readouterr().err
        assert f"what is done is kept in {tmp_path}, for" in said
        assert said.endswith(f"{again}\n")
    left = []

    def noted(cells, *arguments):
        left.extend(cells)
        return measure_cells(cells, *arguments)

    monkeypatch.setattr(accuracy, "measure_cells", noted)
    assert main(options) == 0
    assert [cell.problem for cell in left] == list(PRESETS["toy"][2:])
    with open(tmp_path / "cpu-toy.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(PRESETS["toy"]) and all(row["out"] for row in rows)
    # Rows of other implementations are no part of this table.
    assert main([*options, "--implementations", "xla"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_an_interrupted_experiment_that_keeps_nothing_promises_nothing(
    tmp_path, capsys, monkeypatch
):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(emulator_speed, "_row", interrupted)
    assert (
        main(
            ["emulator-speed", *TOY_OPTIONS["emulator-speed"]]
            + ["--out", str(tmp_path)]
        )
        == 130
    )
    error = capsys.readouterr().err
    assert error == "python -m analysis emulator-speed: interrupted\n"


def test_accuracy_on_the_inputs_of_a_run(tmp_path, capsys):
    inputs = make_inputs("normal", 0, Shape(2, 8, 6, 4, 2, 3))
    one = capture_file.Capture(step=3, layer=1, loss=1.0, inputs=inputs)
    path = tmp_path / "mine.npz"
    capture_file.save([one], Config(), path)
    options = ["accuracy", "--implementations", "reference", "--out", str(tmp_path)]
    assert main([*options, "--inputs", f"run:{path}"]) == 0
    with open(tmp_path / "cpu-mine.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["family"] == "step 3, layer 1" and row["seeds"] == "2"
    assert (row["T"], row["S"], row["N"], row["K"], row["H"]) == tuple("86423")
    # The reference rounds what it has in FP32 once: another way at a tie alone, for 192
    # results one or none, which then errs by as much.
    assert all(float(row[x]) == pytest.approx(1, abs=1e-3) for x in ("out", "dq"))
    for name in ("preset", "families", "seeds"):
        value = {"preset": "toy", "families": "normal", "seeds": "1"}[name]
        assert main([*options, "--inputs", f"run:{path}", f"--{name}", value]) == 2
        assert f"give no --{name}" in capsys.readouterr().err
    wide = one._replace(inputs=Inputs(*(x.astype("float32") for x in inputs)))
    capture_file.save([wide], Config(), path)
    assert main([*options, "--inputs", f"run:{path}"]) == 2
    error = capsys.readouterr().err
    assert one_line(error) and "float32, not bfloat16 or float16" in error


def test_exact_attention_measures_one_unit(x64):
    # Under x64 the reference computes in FP64 and rounds once, which is the unit.
    # float64 -> bfloat16 goes through float32 and may round twice, but only within
    # 2**-24 of a tie, where either neighbour is equally far.
    arms: dict[str, Implementation] = {"reference": "reference"}
    masked = [problem for problem in PRESETS["toy"] if problem.window or problem.packed]
    assert len(masked) == 2
    for row in measure([TOY, *masked], arms, ["normal", "uniform"], seeds=2):
        for tensor in ("out", "dq", "dk", "dv"):
            assert row[tensor] == pytest.approx(1, abs=1e-4), (row["family"], tensor)
            # Two roundings may turn one of some thousand results the other way.
            for name in ("bias", "growth"):
                assert abs(row[f"{tensor}_{name}"]) < 1e-3
        assert row["lse"] < 1e-12
        assert row["same_bits"] and row["degenerate"] == ""


def test_the_table_tells_the_backward_passes_apart():
    arms: dict[str, Implementation] = {
        f"emulated/{name}": "emulated" for name in ("flash2", "attn_jax")
    }
    flash2, ours, *vanishing = measure(
        [TOY], arms, ["uniform", "zero_k_one_v"], seeds=4
    )
    # delta from the rounded O costs flash2 an order of magnitude on these inputs.
    assert flash2["dq"] > 5 * ours["dq"]
    assert ours["dq"] < 1.7
    # Where the exact result vanishes the unit is that of the absolute sums.
    for row in vanishing:
        assert row["dq"] == 0 and "dq" in row["degenerate"]


def test_bits_are_compared_as_bits():
    def same(a, b):
        return bool(same_bits({"x": jnp.float32(a)}, {"x": jnp.float32(b)}))

    assert same(float("nan"), float("nan")) and same(1.0, 1.0)
    assert not same(0.0, -0.0)
    assert not same(1.0, 1.0 + 2.0**-23)


def test_full_preset_covers_what_the_kernels_take():
    full = PRESETS["full"]
    assert len(set(full)) == len(full)
    for dtype in ("bfloat16", "float16"):
        of_dtype = [problem for problem in full if problem.dtype == dtype]
        assert {(p.H, p.is_causal) for p in of_dtype} == {
            (head_dim, causal) for head_dim in (64, 128) for causal in (False, True)
        }
    assert max(problem.S for problem in full) == 4096
    assert any(p.T % 64 and p.S % 64 and p.T != p.S for p in full)
    assert {p.N // p.K for p in full} == {1, 4, 16}
    assert all(problem.N >= 16 for problem in full)


@pytest.mark.parametrize("implementation", ["pallas", "cudnn"])
def test_accuracy_takes_no_bug_of_ours_for_a_refusal(monkeypatch, implementation):
    def broken(*_, **__):
        raise ValueError("broken")

    monkeypatch.setattr(accuracy, "dot_product_attention", broken)
    arguments = PRESETS["toy"][0], 1, implementation, implementation
    if implementation == "cudnn":
        assert accuracy._compile(*arguments) == "broken"
    else:
        with pytest.raises(ValueError, match="broken"):
            accuracy._compile(*arguments)


def test_a_kernel_that_breaks_is_no_row_without_memory():
    def ending(with_what):
        def program(*_):
            raise jax.errors.JaxRuntimeError(with_what)

        return program

    inputs = accuracy._draw(Cell(TOY, "normal", 1), 1.0)
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
    assert accuracy._run(ending(full), inputs) == full
    with pytest.raises(jax.errors.JaxRuntimeError, match="illegal address"):
        accuracy._run(ending("INTERNAL: illegal address"), inputs)
