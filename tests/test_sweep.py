"""Sweeps: rows survive a kill, belong to their settings, and are summed up rightly."""

import argparse
import csv
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import polars
import pytest
from matplotlib.figure import Figure
from scipy import stats

from analysis import capture_file, deviation, inputs, store, summary, sweep
from analysis.figures import Panel, write_figure
from attn_jax import RECIPES
from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.inputs import Inputs
from attn_jax.formats import BF16, E4M3FN, FP16, FP32, FP64
from train.config import UsageError


@dataclasses.dataclass(frozen=True)
class Cell:
    family: str
    N: int


CELLS = [Cell(family, N) for family in ("normal", "uniform") for N in (1, 2, 4)]


@pytest.fixture(autouse=True)
def certified(monkeypatch):
    """The canaries have tests of their own."""
    monkeypatch.setattr(sweep, "_certify", lambda: {"passed": ["all"]})


@pytest.fixture
def undrawn(monkeypatch):
    """Figures take most of the time of a sweep of this file."""
    monkeypatch.setattr(sweep, "write_figure", lambda _, path, __: path.write_text(""))


def options(out, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweep.add_options(parser, "example")
    return parser.parse_args(["--out", str(out), *arguments])


def rows_of(cell: Cell):
    for seed in range(3):
        for recipe in ("a", "b"):
            size = cell.N * (1 + seed) * (2.0 if recipe == "b" else 1.0)
            yield {"recipe": recipe, "seed": seed, "error": size + len(cell.family)}


def report(rows) -> sweep.Report:
    table = summary.summarise(rows, ["family", "recipe", "N"], ["error"])
    panel = Panel("errors", table, "N", "error", "recipe", "keys", "error")
    claim = sweep.Claim("paper, Fig. 0", "it grows", "a", "it does", True)
    return sweep.Report({"Errors": table}, [panel], [claim])


def run(chosen, measure=rows_of, cells=CELLS):
    return sweep.run("example", cells, measure, report, chosen, "python -m analysis x")


def same_files(first, second) -> bool:
    names = [f"default.{end}" for end in ("csv", "parquet", "png")]
    return all((first / n).read_bytes() == (second / n).read_bytes() for n in names)


def test_a_sweep_writes_its_rows_figure_and_origin(tmp_path, capsys):
    result = run(options(tmp_path))
    assert result["rows"] == 6 * 3 * 2
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [
        ".csv",
        ".json",
        ".jsonl",
        ".parquet",
        ".png",
    ]
    raw = polars.read_parquet(tmp_path / "default.parquet")
    assert raw.columns == ["family", "N", "recipe", "seed", "error"]
    assert raw["N"].to_list() == [c.N for c in CELLS for _ in range(6)]
    with open(tmp_path / "default.csv") as file:
        points = list(csv.DictReader(file))
    assert len(points) == 12
    assert points[0]["y"] == "8.0" and points[0]["panel"] == "errors"
    described = json.loads((tmp_path / "default.json").read_text())
    assert described["command"] == "python -m analysis x"
    assert described["settings"]["seeds"] == 4
    [measured] = described["measured"]
    assert measured["canaries"] == {"passed": ["all"]}
    assert measured["device"] and measured["versions"]["jax"] and measured["date"]
    said = capsys.readouterr().err
    assert "paper, Fig. 0: it grows" in said and "a: holds; it does" in said


def test_a_killed_sweep_goes_on_and_ends_with_the_same_files(tmp_path):
    run(options(tmp_path / "whole"))
    measured = []

    def killed(cell):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(cell)
        return rows_of(cell)

    with pytest.raises(KeyboardInterrupt):
        run(options(tmp_path / "killed"), killed)

    def counted(cell):
        measured.append(cell)
        return rows_of(cell)

    run(options(tmp_path / "killed"), counted)
    assert measured == CELLS
    assert same_files(tmp_path / "whole", tmp_path / "killed")
    # Nothing is missing now, so nothing is measured.
    run(options(tmp_path / "killed"), killed)
    described = json.loads((tmp_path / "killed" / "default.json").read_text())
    assert len(described["measured"]) == 2


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.999])
def test_a_torn_last_line_is_measured_again(tmp_path, share):
    run(options(tmp_path / "whole"))
    text = (tmp_path / "whole" / "default.jsonl").read_text()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "default.jsonl").write_text(text[: int(share * len(text))])
    run(options(tmp_path / "torn"))
    assert same_files(tmp_path / "whole", tmp_path / "torn")


def test_rows_of_other_settings_are_refused_in_one_line(tmp_path):
    run(options(tmp_path))
    for other in (["--seeds", "5"], ["--families", "wide"]):
        with pytest.raises(UsageError, match="--fresh") as refusal:
            run(options(tmp_path, *other))
        assert "\n" not in str(refusal.value)
        assert other[0].removeprefix("--") in str(refusal.value)
    # The number of draws is the same whether it is the default or given.
    run(options(tmp_path, "--seeds", "4"))
    run(options(tmp_path, "--seeds", "5", "--fresh"))
    run(options(tmp_path, "--seeds", "5"))


def test_rows_of_another_device_are_not_mixed_in(tmp_path):
    run(options(tmp_path), cells=CELLS[:2])
    path = tmp_path / "default.jsonl"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "H200"'))
    with pytest.raises(UsageError, match="H200"):
        run(options(tmp_path))
    # Files can be made from finished rows anywhere.
    run(options(tmp_path), cells=CELLS[:2])


def test_damage_before_the_last_line_is_refused(tmp_path):
    run(options(tmp_path))
    path = tmp_path / "default.jsonl"
    path.write_text(path.read_text().replace('"rows"', '"rowz"', 1))
    with pytest.raises(UsageError, match="damaged.*--fresh"):
        run(options(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\n",
        b"something else",
        b'{"settings": 5}\n',
        b'{"cell": {}, "rows": [{"seed": 0}]}\n',
        b'SETTINGS{"environment": {}}\n',
        b'SETTINGS{"environment": {"device": "cpu", "versions": 5}}\n',
        b'SETTINGS{"settings": {}}\n',
        b"SETTINGS5\n",
        *(
            b'SETTINGS{"cell": {"N": 1}, "rows": %s}\n' % rows
            for rows in (b"5", b"[]", b"[5]", b"[{}]", b'{"seed": 0}')
        ),
        b'SETTINGS{"cell": 5, "rows": [{"seed": 0}]}\n',
        b"SETTINGS" + 2 * b'{"cell": {"N": 1}, "rows": [{"seed": 0}]}\n',
        b"SETTINGS" + 100_000 * b"[" + b"\n",
    ],
    ids=lambda content: content[:60].decode(errors="replace"),
)
def test_lines_of_another_shape_are_damage(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content.replace(b"SETTINGS", b'{"settings": {"a": 1}}\n'))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="x.jsonl is damaged: .* --fresh"):
        store.Store(path, {"a": 1}, fresh=False)
    # It may be somebody's, and is kept until --fresh.
    assert path.read_bytes() == before
    fresh = store.Store(path, {"a": 1}, fresh=True)
    assert {"N": 1} not in fresh
    fresh.close()
    assert path.read_text() == '{"settings": {"a": 1}}\n'


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_two_runs_do_not_write_into_one_folder(tmp_path, fresh, undrawn):
    def measure(cell):
        with pytest.raises(UsageError, match="another run is writing .*--out") as other:
            run(options(tmp_path, *fresh))
        assert "\n" not in str(other.value)
        return rows_of(cell)

    run(options(tmp_path), measure, CELLS[:1])
    lines = (tmp_path / "default.jsonl").read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == [
        *("settings", "environment", "cell")
    ]
    # Nor does a run that failed keep the file.
    with pytest.raises(ZeroDivisionError):
        run(options(tmp_path), lambda cell: 1 // 0)
    run(options(tmp_path))


@pytest.mark.parametrize("suffix", ["parquet", "png", "csv", "json"])
def test_a_file_that_cannot_be_written_loses_no_rows(tmp_path, suffix, undrawn):
    (tmp_path / f"default.{suffix}").mkdir()
    with pytest.raises(UsageError, match=f"default.{suffix}.*rows are in") as refusal:
        run(options(tmp_path))
    assert "\n" not in str(refusal.value)
    (tmp_path / f"default.{suffix}").rmdir()
    run(options(tmp_path), lambda cell: pytest.fail("measured again"))
    assert (tmp_path / f"default.{suffix}").is_file()


def test_each_family_is_measured_once(tmp_path):
    twice = options(tmp_path, "--families", "wide", "normal", "wide")
    assert sweep.families(twice) == ["wide", "normal"]


def test_help_tells_how_many_draws_there_are():
    def text(**changes) -> str:
        parser = argparse.ArgumentParser(prog="x")
        sweep.add_options(parser, "example", **changes)
        return " ".join(parser.format_help().split())

    assert "(default 4; toy 2, full 8)" in text()
    assert "(default 4; toy 2, full 8; with --inputs all there are)" in text(
        every_draw=True
    )
    sixteen = dict.fromkeys(sweep.SEEDS, 16)
    assert "(default 16)" in text(families=None, seeds=sixteen)


def test_inputs_of_a_run_have_a_folder_of_their_own(tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)

    def folder(*arguments: str) -> list[str]:
        parser = argparse.ArgumentParser()
        sweep.add_options(parser, "example")
        chosen = parser.parse_args(["--preset", "toy", *arguments])
        before = set(tmp_path.rglob("*.jsonl"))
        run(chosen)
        return [
            str(path.relative_to(tmp_path).parent)
            for path in set(tmp_path.rglob("*.jsonl")) - before
        ]

    assert folder() == ["results/example"]
    assert folder("--inputs=run:runs/small.v1.npz") == ["results/example-small.v1"]
    assert folder("--inputs=run:runs/tiny/") == ["results/example-tiny"]
    # The default file of a capture is called after nothing; its run is.
    assert folder("--inputs=run:runs/base/capture.npz") == ["results/example-base"]
    assert folder("--inputs=run:runs/tiny", "--out=here") == ["here"]


def test_without_polars_the_rows_are_kept_for_later(tmp_path, monkeypatch, capsys):
    find_spec = sweep.importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(
            sweep.importlib.util,
            "find_spec",
            lambda name: None if name == "polars" else find_spec(name),
        )
        result = run(options(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["default.jsonl"]
    assert result["files"] == [str(tmp_path / "default.jsonl")]
    assert "no polars here" in capsys.readouterr().err.splitlines()[-1]
    run(options(tmp_path))
    assert (tmp_path / "default.parquet").exists()


def test_unusable_options_are_refused_in_one_line(tmp_path):
    for arguments, reason in (
        (["--seeds", "0"], "--seeds"),
        (["--families", "wide", "--inputs", "run:x"], "not both"),
    ):
        with pytest.raises(UsageError, match=reason):
            run(options(tmp_path, *arguments))
    with pytest.raises(UsageError, match="run:PATH"):
        inputs.open_inputs(options(tmp_path, "--inputs", "runs/x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        store.Store(tmp_path / "file" / "x.jsonl", {}, fresh=False)


@pytest.fixture
def drawn(monkeypatch):
    """Draws panels; returns the errorbars of each, as matplotlib has them."""

    def draw(*panels: Panel):
        kept = []
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda self, *_, **__: kept.append(self))
            write_figure(panels, Path("nowhere.png"))
        return [axes.containers for axes in kept[0].axes]

    return draw


def test_an_interval_that_reaches_zero_is_drawn(drawn):
    rows = [{"N": n, "e": 2.0, "e_ci": ci, "r": "a"} for n, ci in ((1, 0.5), (2, 9.0))]
    panel = Panel("", rows, "N", "e", "r", "", "")
    [on_log], [linear] = drawn(panel, dataclasses.replace(panel, log_y=False))

    def ends(bars):
        return [tuple(segment[:, 1]) for segment in bars[2][0].get_segments()]

    assert ends(linear) == [(1.5, 2.5), (-7, 11)]
    assert ends(on_log) == [(1.5, 2.5), (pytest.approx(0.2), 11)]


def test_series_of_a_figure_differ_by_colour_as_far_as_it_goes(drawn):
    rows = [{"N": 1, "e": 1.0, "r": f"{n:02}"} for n in range(25)]
    [series] = drawn(Panel("", rows, "N", "e", "r", "", ""))
    looks = [(bars[0].get_color(), bars[0].get_marker()) for bars in series]
    assert len({colour for colour, _ in looks[:20]}) == 20
    # Not all readers tell more than ten colours apart; markers do the rest.
    assert not {m for _, m in looks[:10]} & {m for _, m in looks[10:20]}
    assert len(set(looks)) == 25


def test_intervals_are_student_s():
    rng = np.random.default_rng(0)
    for n in (2, 4, 9):
        values = rng.standard_normal(n)
        low, high = stats.t.interval(
            0.95, n - 1, loc=values.mean(), scale=stats.sem(values)
        )
        assert summary.half_width(list(values)) == pytest.approx((high - low) / 2)
    assert summary.half_width([1.0]) == math.inf


@pytest.mark.parametrize(
    ("mean", "width", "told"),
    [
        (4.331, 0.29, "4.33 ± 0.29"),
        (2.07e-5, 1.4e-6, "(2.07 ± 0.14)e-05"),
        (0.0009999, 1e-5, "0.00100 ± 0.00001"),
        (-9.999e-6, 1e-7, "(-1.00 ± 0.01)e-05"),
        (9999.7, math.inf, "1.00e+04"),
        (0.0, 0.0, "0 ± 0"),
        (None, None, ""),
        # A single value has no interval.
        (4.331, math.inf, "4.33"),
        (2.07e-5, math.inf, "2.07e-05"),
        (0.0, math.inf, "0"),
        (math.nan, math.nan, "nan"),
    ],
)
def test_a_mean_is_told_with_the_interval_it_has(mean, width, told):
    assert summary.plus_minus({"e": mean, "e_ci": width}, "e") == told


def test_ratios_are_paired_by_seed():
    rows = [
        {"N": 1, "recipe": recipe, "seed": seed, "error": factor * (seed + 1)}
        for seed in range(4)
        for recipe, factor in (("base", 1.0), ("other", 3.0))
    ]
    # A missing baseline gives no ratio.
    rows.append({"N": 2, "recipe": "other", "seed": 0, "error": 1.0})
    base, other, alone = summary.summarise(
        rows, ["N", "recipe"], ["error"], baseline=("recipe", "base")
    )
    assert base["error"] == 2.5 and base["seeds"] == 4
    assert base["error_se"] == pytest.approx(stats.sem([1, 2, 3, 4]))
    # The scatter of the seeds is common to both, so none of it is left.
    assert other["error_ratio"] == 3 and other["error_ratio_ci"] == 0
    assert alone["error_ratio"] is None and alone["error_ci"] == math.inf
    with pytest.raises(ValueError, match="tells them apart"):
        summary.summarise(rows, ["recipe"], ["error"])


def test_columns_of_a_difference():
    y = np.full((2, 2), 2.0)
    e = np.array([[1.0, -1.0], [3.0, 1.0]])
    assert deviation.difference(y + e, y) == pytest.approx(
        {
            "rel": math.sqrt(12 / 16),
            "max_abs": 3.0,
            "mean_abs": 1.5,
            "std": math.sqrt(2),
            "signed_mean": 1.0,
            "directionality": 4 / math.sqrt(12),
        }
    )
    assert deviation.difference(y, y)["directionality"] == 0
    assert deviation.difference(y, 0 * y)["rel"] is None


def test_one_unit_is_the_exact_result_rounded():
    exact = np.random.default_rng(0).standard_normal((4, 8))
    found = correctly_rounded(exact, BF16)
    assert deviation.measure(found, exact, BF16)["units"] == pytest.approx(1)
    assert deviation.measure(found, exact, FP64)["units"] is None


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32, E4M3FN])
def test_inputs_lie_in_the_format_and_results_are_theirs(fmt):
    source = inputs.Source(("normal",), 3, 8, 1, 16)
    problem = inputs.problem(source, "normal", 32, fmt)
    for x in problem.inputs:
        assert x.dtype == np.float32 and x.shape[0] == 3
        assert np.array_equal(x, correctly_rounded(x, fmt))
    q, k, v = (x[:, :, 0].astype(np.float64) for x in problem.inputs[:3])
    p = np.exp(q @ k.swapaxes(1, 2) / 4)
    out = p / p.sum(-1, keepdims=True) @ v
    # Two FP64 sums of 16 and 32 terms in other orders, without a shift: 48 * 2^-53 of
    # logits up to 20 is 1e-13; rtol and atol leave ten times that.
    np.testing.assert_allclose(problem.exact.out[:, :, 0], out, rtol=1e-12, atol=1e-14)
    # Draws are independent of how many there are.
    fewer = inputs.problem(dataclasses.replace(source, seeds=2), "normal", 32, fmt)
    assert np.array_equal(fewer.inputs.key, problem.inputs.key[:2])


def test_a_draw_of_captured_inputs_is_one_head_of_one_example():
    rng = np.random.default_rng(0)
    query, dout = rng.standard_normal((2, 2, 24, 4, 8))
    key, value = rng.standard_normal((2, 2, 24, 2, 8))
    captured = Inputs(query, key, value, dout)
    arrays = capture_file.captured({"step 1": captured})
    source = inputs.Source(arrays.labels, 2, 4, 1, 8, arrays)
    assert source.lengths([8, 16, 512]) == [8, 16]
    assert source.lengths([512]) == [24]
    # Draw 5 is head 2 of example 1; query heads 2 and 3 share key head 1.
    drawn = source.draw("step 1", 5, 16)
    assert drawn.query.shape == drawn.dout.shape == (1, 4, 1, 8)
    assert drawn.key.shape == drawn.value.shape == (1, 16, 1, 8)
    assert np.array_equal(drawn.query[0, :, 0], query[1, :4, 2].astype(np.float32))
    assert np.array_equal(drawn.value[0, :, 0], value[1, :16, 1].astype(np.float32))


def test_recipes_run_together_give_what_each_gives_alone():
    source = inputs.Source(("normal",), 2, 8, 1, 16)
    problem = inputs.problem(source, "normal", 200, BF16)
    chosen = {name: RECIPES[name] for name in ("flash2", "eager_bf16")}
    together = deviation.forward(chosen, problem.inputs)
    for name, recipe in chosen.items():
        alone = deviation.forward({name: recipe}, problem.inputs)[name]
        assert np.array_equal(together[name], alone)
    # Two blocks of keys: the second holds the maximum in some rows; one block never.
    counts = deviation.rescales(chosen, problem.inputs)
    assert counts["flash2"].shape == (2, 1, 8) and set(counts["flash2"].flat) == {0, 1}
    assert not counts["eager_bf16"].any()
    exact = {"exact_fp64": RECIPES["exact_fp64"]}
    wide = deviation.forward(exact, problem.inputs)["exact_fp64"]
    assert deviation.difference(wide, problem.exact.out)["rel"] < 1e-14
    with pytest.raises(ValueError, match="one carrier"):
        deviation.forward(chosen | exact, problem.inputs)
