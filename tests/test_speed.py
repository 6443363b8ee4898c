"""The speed experiment: work counted, turns taken, errors beside times, at toy size."""

import csv
import dataclasses
import json
import sys

import numpy as np
import pytest

from analysis import ExperimentError
from analysis.__main__ import main
from analysis.experiments import speed
from analysis.figures import plotted
from analysis.speed import errors, in_jax, timing, torch_process
from analysis.speed.cases import PASSES, PRESETS, Case, chosen
from analysis.speed.torch_process import TorchProcess
from attn_jax.kernels import tuning
from attn_jax.kernels.tilings import Plan
from attn_jax.mask import Mask
from attn_jax.reference import golden

TOY = {case.mask: case for case in PRESETS["toy"]}
SMALL = Case("small", "test", 2, 24, 24, 4, 2, 8, "causal")


def measured(tmp_path, capsys, *options: str):
    """Runs the command; returns its exit code, rows and what it said."""
    code = main(["speed", "--preset", "toy", "--out", str(tmp_path), *options])
    table = tmp_path / "cpu-toy.csv"
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    return code, rows, capsys.readouterr()


def test_every_case_is_a_problem_of_its_own():
    names = [case.name for case in PRESETS["full"]]
    assert len(set(names)) == len(names)
    assert PRESETS["full"][:12] == PRESETS["default"]
    for case in PRESETS["default"]:
        assert case.B * case.T == 16384 and case.N * case.H == 2048
    models = {
        case.name: (case.T, case.N, case.H)
        for case in PRESETS["full"]
        if case.group == "models"
    }
    assert models["model-small"] == (320, 6, 64)
    assert models["model-base"] == (1088, 12, 64)
    assert models["model-base-long"] == (4160, 12, 64)
    assert models["model-large"] == (1152, 18, 64)


@pytest.mark.parametrize("mask", TOY)
def test_flops_are_those_of_the_pairs_that_queries_see(mask):
    case = TOY[mask]
    seen = case.rules.materialise(case.T, case.S)
    pairs = case.T * case.S if seen is None else int(np.sum(seen))
    if mask == "causal":
        # The field leaves out half of the diagonal.
        pairs -= case.T / 2
    assert case.pairs == pairs
    assert case.flops("forward") == 4 * case.B * case.N * case.H * pairs
    assert case.flops("backward") == 2.5 * case.flops("forward")
    assert case.flops("both") == case.flops("forward") + case.flops("backward")


def test_a_window_and_documents_see_less_in_long_sequences():
    for case in PRESETS["full"]:
        if case.mask == "window":
            assert case.pairs == 1024 * case.T - 1024 * 1023 / 2
        if case.mask == "packed":
            assert case.documents is not None
            assert len(np.unique(case.documents)) == 8
            assert case.pairs < case.T**2 / 4


def test_ratio_is_to_the_fastest_peer_of_any_framework():
    common = {"case": "c", "tflops": 1.0, "error": 1.0}
    rows = [
        {"implementation": name, "pass": of, "ms": ms, **common}
        for name, of, ms in (
            *(("pallas", "forward", 2.0), ("cudnn", "forward", 3.0)),
            *(("torch-flash", "forward", 1.0), ("xla", "forward", None)),
            ("pallas", "backward", 2.0),
        )
    ]
    found = [row["ratio"] for row in speed.compared(rows)]
    assert found == [0.5, 1 / 3, 1.0, None, None]


@pytest.mark.parametrize("mask", ["full", "packed"])
def test_exact_results_of_chosen_heads_in_blocks(mask, monkeypatch):
    # T cut into four blocks, and two of eight heads' groups looked at.
    case = dataclasses.replace(TOY[mask], B=2, N=4, K=2, H=8)
    monkeypatch.setattr(errors, "_ALL_UP_TO", 0)
    monkeypatch.setattr(errors, "_HELD", case.T * case.S // 4)
    query, key, value, dout = errors.inputs_of(case, "normal")
    assert errors.heads_of(case) == [(0, 0), (1, 1)]
    rules = case.rules
    ids = rules.query_segment_ids
    if ids is not None:
        ids = np.broadcast_to(ids, (2, case.T))
        rules = Mask(rules.is_causal, None, None, None, None, ids, ids)
    whole = golden(query, key, value, dout, mask=rules)
    found = errors._exact(case, "normal")
    for tensor, field in errors._FIELDS.items():
        expected = np.stack(errors.pieces(case, tensor, getattr(whole, field)))
        # FP64 sums of 64 terms in another order.
        np.testing.assert_allclose(found[tensor], expected, rtol=0, atol=64 * 2.0**-50)
    exact = {tensor: found[tensor] for tensor in ("dq", "dk", "dv")}
    row = errors.columns(case, {"normal": exact})
    assert row["error"] == row["normal_dq"] == 0 and row["normal_out"] is None
    assert row["error_of"] == "4 of 8 heads"
    wrong = exact | {"dk": exact["dk"] * np.nan}
    row = errors.columns(case, {"normal": wrong})
    assert np.isnan(row["error"]) and row["error_in"] == "normal_dk"


def test_toy_runs_on_a_cpu_and_leaves_what_it_says(tmp_path, capsys):
    code, rows, said = measured(
        *(tmp_path, capsys, "--cases", "toy-full", "--passes", *PASSES),
        *("--implementations", "xla", "pallas"),
    )
    # What runs nowhere is an error, said after everything is written.
    assert code == 1 and "pallas ran nowhere: 'pallas' needs an A100" in said.err
    by_name = {(row["implementation"], row["pass"]): row for row in rows}
    assert by_name.keys() == {(name, of) for name in ("xla", "pallas") for of in PASSES}
    for (name, of), row in by_name.items():
        if name == "pallas":
            assert "Hopper" in row["refused"] and row["ms"] == row["error"] == ""
            continue
        assert row["refused"] == "" and row["timer"] == "wall clock"
        low, middle, high = (float(row[c]) for c in ("ms_25", "ms", "ms_75"))
        assert 0 < low <= middle <= high and float(row["compile_seconds"]) > 0
        rate = TOY["full"].flops(of) / 1e9 / middle
        # Both are kept to five digits.
        assert float(row["tflops"]) == pytest.approx(rate, rel=1e-4)
        assert row["same_bits"] == row["deterministic"] == "True"
        assert row["error_of"] == "all" and float(row["ratio"]) == 1
        given = {t: row[f"normal_{t}"] for t in errors._FIELDS if row[f"normal_{t}"]}
        assert tuple(given) == errors.TENSORS[of]
        # The final rounding is one unit; XLA rounds P, and dS before dQ and dK, to the
        # same format besides: as much again, in sums that average it.
        assert all(0.99 < float(units) < 2 for units in given.values())
        # Averages far from zero leave dQ a small difference, which rounding spoils.
        if of != "forward":
            assert row["error_in"] == "uniform_dq"
            assert row["error"] == row["uniform_dq"] and float(row["error"]) > 2
    for tensor in ("dq", "dk", "dv"):
        # One program or two, the same algorithm.
        alone, both = (
            float(by_name["xla", of][f"normal_{tensor}"]) for of in PASSES[1:]
        )
        assert alone == pytest.approx(both, rel=0.2)
    described = json.loads((tmp_path / "cpu-toy.json").read_text())
    [environment] = described["measured"]
    assert environment["device"] and environment["versions"]["jax"]
    assert "git_commit" in environment and "B N H pairs" in described["flops"]
    assert (tmp_path / "cpu-toy.png").stat().st_size > 1000


def test_a_killed_run_goes_on(tmp_path, capsys, monkeypatch):
    options = ("--cases", "toy-*l", "--implementations", "xla", "--passes", "forward")
    asked: list[str] = []

    def fake(case, of, names, seconds):
        asked.append(case.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        for name in names:
            row = dict.fromkeys(timing.TIMED) | timing.quartiles([1.0, 2.0, 3.0])
            yield name, row, {}

    monkeypatch.setattr(in_jax, "measure", fake)
    monkeypatch.setattr(errors, "columns", lambda *_: {"error": 1.0})
    monkeypatch.setattr(speed, "write_figure", lambda _, path, __: path.write_text(""))
    code, _, said = measured(tmp_path, capsys, *options)
    assert code == 130 and "for the same command" in said.err
    code, rows, _ = measured(tmp_path, capsys, *options)
    assert code == 0 and asked == ["toy-full", "toy-causal", "toy-causal"]
    assert [row["case"] for row in rows] == ["toy-full", "toy-causal"]
    # Other cases join those that are there; other settings may not.
    code, rows, _ = measured(tmp_path, capsys, *options[2:])
    assert code == 0 and len(rows) == 4 and len(asked) == 5
    code, _, said = measured(tmp_path, capsys, *options, "--seconds", "3")
    assert code == 2 and "other settings (seconds 0.02 there, 3.0 here)" in said.err
    measured(tmp_path, capsys, *options, "--fresh")
    assert len(asked) == 7


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--preset", "default"], "needs a GPU"),
        (["--cases", "toy-*", "h64-1k-full"], "--cases h64-1k-full is none of"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--seconds", "nan"], "--seconds must be above 0"),
        (["--implementations", "tokamax"], "no tokamax installed"),
        (["--implementations", "torch-flash", "xla"], "no torch installed"),
        (["--out", "pyproject.toml"], "cannot write"),
    ],
)
def test_unusable_options_are_refused_before_anything_is_compiled(
    options, reason, capsys, monkeypatch
):
    monkeypatch.setattr(speed, "is_installed", lambda _: False)
    monkeypatch.setattr(in_jax, "measure", lambda *_: pytest.fail("measured"))
    arguments = options if "--preset" in options else ["--preset", "toy", *options]
    assert main(["speed", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and reason in error


def test_a_missing_framework_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(speed, "is_installed", lambda package: package != "torch")
    names = speed._installed("default", None)
    assert names == ["pallas", "cudnn", "cudnn-deterministic", "xla", "tokamax"]
    error = capsys.readouterr().err
    assert error == "no torch installed: timed without it\n"


def test_figures_are_drawn_by_group(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(speed, "write_figure", lambda *figure: drawn.append(figure))
    common = {"ms": 2.0, "ms_25": 1.0, "ms_75": 3.0, "tflops": 5.0, "error": 1.5}
    rows = [
        {"implementation": name, "case": case, "group": group, "pass": of, **common}
        for name in ("pallas", "cudnn")
        for case, group in (("a", "lengths"), ("b", "grouped heads"))
        for of in ("forward", "backward")
    ]
    rows[0] |= dict.fromkeys(common)
    files = speed.draw(rows, tmp_path / "h200")
    assert [path.name for path in files] == [
        "h200-lengths.png",
        "h200-grouped-heads.png",
    ]
    panels, path, columns = drawn[0]
    assert path == files[0] and columns == 2
    assert [panel.title for panel in panels] == [
        *("forward: speed", "backward: speed", "forward: error", "backward: error")
    ]
    assert len(plotted(panels)) == 6
    assert speed._with_bar(rows[1])["tflops_ci"] == 2.5
    [first, *_] = speed.side_by_side(rows)
    assert list(first.values()) == ["a", "forward", "refused", "5 (1.5)"]


def test_bits_that_differ_are_an_error_where_they_are_promised():
    row = {"case": "a", "pass": "backward", "refused": None, "same_bits": False}
    rows = [{**row, "implementation": name} for name in ("pallas", "cudnn")]
    speed._check(rows, ["cudnn"])
    with pytest.raises(ExperimentError, match="pallas: .* differ .* in a backward"):
        speed._check(rows, ["cudnn", "pallas"])


def test_tilings_of_ours_are_named():
    case = dataclasses.replace(TOY["full"], H=96)
    said = in_jax._config("pallas", case, "both")
    tilings = tuning.configuration(
        "hopper", 96, 96, case.S, is_causal=False, listed=False
    )
    for kernel, tiling in zip(("forward", "dq", "dkv"), tilings[:3], strict=True):
        assert f"{kernel} {tiling.rows} x {tiling.columns}" in said
    said = in_jax._config("pallas", TOY["full"], "both")
    short = tuning.SHORT["forward", False]["hopper"][64, 64][1]
    assert f"forward {short.rows} x {short.columns}" in said
    assert "dkv" in said  # too small to fill a card in one pass
    many = dataclasses.replace(TOY["full"], B=132)
    assert f"one pass, {Plan(passes=2)}" in in_jax._config("pallas", many, "backward")
    assert in_jax._config("xla", TOY["full"], "both") == ""
    assert "T x S" in in_jax._config("cudnn", TOY["packed"], "both")
    assert "T x S" not in in_jax._config("pallas", TOY["packed"], "both")


def test_what_would_not_fit_is_refused():
    large = dataclasses.replace(TOY["full"], B=1, N=32, T=16384, S=16384)
    with pytest.raises(NotImplementedError, match="keeps T x S logits, here 32 GiB"):
        in_jax._build("xla", large, "forward", ())


# In place of PyTorch's process: answers as the second argument says.
ANSWERS = """
import json, sys
import numpy as np
say = lambda **x: print(json.dumps(x), flush=True)
if sys.argv[1] == "absent":
    say(absent="torch 1.0 sees no GPU")
    sys.exit()
say(versions={"torch": "1.0"})
for line in sys.stdin:
    asked = json.loads(line)
    if sys.argv[1] == "dies":
        sys.exit(3)
    if sys.argv[1] == "hangs":
        import time
        time.sleep(60)
    x = np.load(asked["inputs"] + "/normal-query.npy")
    np.save(asked["inputs"] + "/torch-flash-normal-out.npy", x)
    results = [[family, "out"] for family in asked["case"]["families"]]
    say(rows=[["torch-flash", {"ms": 1.0, "results": results}]])
"""


def ask(how: str, times: int = 1):
    with TorchProcess("cpu", [sys.executable, "-c", ANSWERS, how]) as process:
        versions = process.versions()
        for _ in range(times):
            rows = list(process.measure(SMALL, "forward", ["torch-flash"], 1.0))
    return versions, rows


def test_torch_is_asked_in_a_process_of_its_own():
    versions, [(name, row, results)] = ask("answers", times=2)
    assert versions == {"torch": "1.0"}
    assert (name, row) == ("torch-flash", {"ms": 1.0})
    # The same bits as here: they went there as integers and came back.
    query = errors.inputs_of(SMALL, "normal").query
    np.testing.assert_array_equal(results["normal"]["out"], query)
    assert results["normal"]["out"].dtype == query.dtype


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("absent", "torch 1.0 sees no GPU"),
        ("dies", "PyTorch's process died, exit code 3"),
    ],
)
def test_a_torch_that_fails_is_refused_in_every_row(how, reason):
    # Asked again, it is started again.
    _, [(name, row, results)] = ask(how, times=2)
    assert (name, row["refused"], results) == ("torch-flash", reason, {})
    assert row.keys() == set(timing.TIMED)


def test_a_torch_that_hangs_is_ended(monkeypatch):
    with TorchProcess("cpu", [sys.executable, "-c", ANSWERS, "hangs"]) as process:
        process.versions()
        monkeypatch.setattr(torch_process, "_MOST_SECONDS", 0.0)
        rows = process.measure(SMALL, "forward", ["torch-cudnn", "torch-flash"], 0.5)
        assert [row["refused"] for _, row, _ in rows] == [
            "PyTorch gave no answer in 0.5 s"
        ] * 2


def test_cases_are_chosen_by_pattern_and_take_families():
    cases = chosen("default", ["h64-*", "*-1k-full"], ("uniform",))
    assert len(cases) == 7 and cases[0].name == "h128-1k-full"
    assert {case.families for case in cases} == {("uniform",)}
    # Two families are kept at once.
    kept = [errors.inputs_of(SMALL, family) for family in ("normal", "uniform")]
    assert kept[0] is errors.inputs_of(SMALL, "normal") and kept[0] is not kept[1]
