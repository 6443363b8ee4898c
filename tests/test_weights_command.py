"""What `python -m analysis weights` says, and where it writes."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import polars
import pytest

from analysis.__main__ import main
from analysis.experiments import weights as experiment
from analysis.record import shortened, show
from analysis.weights import figure, readers, starts
from analysis.weights.leaves import leaves
from tests.run_folder import on_one_device, write_run
from train.config import UsageError, to_json
from train.presets import PRESETS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Drawing takes a second."""
    monkeypatch.setattr(figure, "write", lambda rows, picture: False)


def save(name: str, seed: int, size: float = 1.0, **more) -> str:
    """A model of two groups and two layers."""
    rng = np.random.default_rng(seed)
    names = [f"layers.{i}.{part}.w" for i in range(2) for part in ("attn", "mlp")]
    tree = {one: size * rng.standard_normal((4, 5)) for one in names}
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    np.savez(name, **(tree | more))
    return name


def said(capsys, *options: str, code: int = 0):
    assert main(["weights", *options]) == code
    return capsys.readouterr()


def table(folder: str) -> list[dict]:
    with Path(folder, "weights.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("100", 100), ("0007.npz", 7), ("step_20.npz", 20), ("Step20", 20)),
        *(("global_step100", 100), ("checkpoint-500.safetensors", 500)),
        *(("epoch=1-step=30.npz", 30), ("model.ckpt-9", 9), ("zarr3", None)),
        *(("model-00001-of-00002.safetensors", None), ("adam_lr0p001.npz", None)),
        *(("again-20.npz", None), ("step_1_best", None), ("v1", None)),
    ],
)
def test_a_step_is_what_a_name_calls_one(name, step):
    assert readers._step(Path(name)) == step


def test_names_without_steps_are_told(capsys):
    for name in ("run/w10.npz", "run/w20.npz"):
        save(name, 0)
    with pytest.raises(UsageError, match=r"tell no step \(w10.npz, w20.npz\): name"):
        readers.find(Path("run"))


@pytest.mark.parametrize("names", [("zarr3.npz", "x_lr0p001.npz"), ("a.npz", "b.npz")])
def test_two_checkpoints_have_a_figure_and_no_step(names, capsys, monkeypatch):
    drawn = []
    write_figure = figure.write_figure
    monkeypatch.setattr(
        *(figure, "write_figure"),
        lambda panels, path: drawn.extend(panels) or write_figure(panels, path),
    )
    pair = [save(name, seed) for seed, name in enumerate(names)]
    heard = said(capsys, "--runs", *pair, "--out", "o")
    assert json.loads(heard.out)["steps"] == [] and "no figure" not in heard.err
    assert {row["step"] for row in table("o")} == {""}
    assert set(polars.read_parquet("o/weights.parquet")["step"]) == {None}
    assert Path("o/weights.png").stat().st_size > 10_000
    assert [panel.y for panel in drawn] == ["max_abs", "w1", "rel_l2"]
    for panel in drawn:
        assert [row["scope"] for row in panel.rows] == ["attn", "mlp"]
    # The figure and the table of before do not stay beside what is new.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    heard = said(capsys, "--runs", pair[0], pair[0], "--out", "o")
    assert "no figure: no distance lies between" in heard.err
    assert sorted(p.name for p in Path("o").iterdir()) == [
        "weights.csv",
        "weights.json",
    ]


def test_checkpoints_of_two_steps_say_so(capsys, undrawn):
    pair = [save(f"{name}/step_{n}.npz", n) for name, n in (("a", 4), ("b", 8))]
    heard = said(capsys, "--runs", *pair)
    assert "step 4 of step_4.npz against step 8 of step_8.npz" in heard.err
    assert json.loads(heard.out)["steps"] == []
    pair[1] = save("c.npz", 1)
    assert json.loads(said(capsys, "--runs", *pair).out)["steps"] == [4]


def test_steps_without_a_partner_are_named(capsys, undrawn):
    for name, steps in {
        "s1": (0, 1, 2, 4, 8),
        "s2": (0, 1, 2),
        "s3": (0, 8, 16),
    }.items():
        for step in steps:
            save(f"{name}/{step}.npz", 10 * step + int(name[1]) * bool(step))
    heard = said(capsys, "--runs", "s1", "s2", "s3", "--out", "o")
    lines = [
        "s2: compared at steps 0, 1, 2, not at 4, 8 (only in s1)",
        "s3: compared at steps 0, 8, not at 1, 2, 4 (only in s1) and 16 (only in s3)",
    ]
    assert json.loads(Path("o/weights.json").read_text())["problems"] == lines
    assert json.loads(heard.out)["problems"] == 2
    assert all(line in heard.err for line in lines)
    # All have a step 0.
    assert "no cosine" not in heard.err


def test_what_is_of_other_types_is_counted_and_named(capsys, undrawn):
    k = np.arange(3)
    more = {"k": k.astype(np.float32), "n": k, "mask": k > 1, "same": k}
    save("a.npz", 0, **more)
    save("b.npz", 1, **(more | {"k": k, "n": k + 1, "mask": k > 0}))
    heard = said(capsys, "--runs", "a.npz", "b.npz")
    assert "k: float32 in a.npz, int64 in b.npz, not compared" in heard.err
    assert "2 of 3 tensors that are not of floating-point numbers differ" in heard.err
    assert "differ: mask, n" in heard.err
    result = json.loads(heard.out)
    assert (result["problems"], result["differ"]) == (2, 2)
    np.savez("c.npz", k=k, n=k)
    np.savez("d.npz", k=1.0 * k, n=k)
    heard = said(capsys, "--runs", "c.npz", "d.npz", code=2)
    assert "no tensor of floating-point numbers (k: int64 in c.npz" in heard.err


def test_where_nothing_is_finite_cells_are_empty(capsys, undrawn):
    nothing = np.full((2, 2), np.nan)
    pair = [save(f"{name}.npz", 0, **{"x.gone.w": nothing}) for name in "ab"]
    said(capsys, "--runs", *pair, "--out", "o")
    (row,) = (r for r in table("o") if r["scope"] == "x.gone.w")
    empty = {name for name, value in row.items() if value == ""}
    assert {"max_abs", "w1", "rel_l2", "mean", "p50", "p999"} <= empty
    assert (row["count"], row["nonfinite_other"]) == ("0", "4")
    frame = polars.read_parquet("o/weights.parquet")
    (row,) = frame.filter(polars.col("scope") == "x.gone.w").to_dicts()
    assert row["max_abs"] is row["w1"] is row["rel_l2"] is None


def test_no_default_folder_is_written_twice(capsys, undrawn):
    for seed, name in enumerate("abc"):
        save(f"{name}.npz", seed)
    said(capsys, "--runs", "a.npz", "b.npz")
    said(capsys, "--runs", "a.npz", "c.npz")
    said(capsys, "--runs", "a.npz", "b.npz", "c.npz")
    folders = ["a.npz-vs-b.npz", "a.npz-vs-b.npz-vs-c.npz", "a.npz-vs-c.npz"]
    assert sorted(path.name for path in Path("results").iterdir()) == [
        f"weights-{name}" for name in folders
    ]
    before = Path("results/weights-a.npz-vs-b.npz/weights.csv").read_bytes()
    # Again what it was, but nothing else: other files may have the same names.
    said(capsys, "--runs", "a.npz", "b.npz")
    save("other/a.npz", 3)
    heard = said(capsys, "--runs", "other/a.npz", "b.npz", code=2)
    assert len(heard.err.splitlines()) == 1
    assert "holds what was compared by python -m analysis weights --runs a.npz" in (
        heard.err
    )
    assert heard.err.endswith("give --out\n")
    after = Path("results/weights-a.npz-vs-b.npz/weights.csv").read_bytes()
    assert before == after
    runs = [save(f"{i}/{'x' * 200}.npz", i) for i in range(6)]
    said(capsys, "--runs", *runs)
    (long,) = (path for path in Path("results").iterdir() if "more" in path.name)
    assert len(long.name) < 255 and long.name.endswith("-and-2-more")


def test_what_is_refused_leaves_no_folder(capsys):
    save("a.npz", 0)
    np.savez("b.npz", other=np.zeros(2))
    for out in ((), ("--out", "new/deeper")):
        said(capsys, "--runs", "a.npz", "b.npz", *out, code=2)
        assert sorted(path.name for path in Path().iterdir()) == ["a.npz", "b.npz"]


def test_names_that_are_no_text_are_refused_in_a_line(capsys):
    save("a.npz", 0)
    heard = said(capsys, "--runs", "a.npz", "b\udcff.npz", code=2)
    assert "b\\udcff.npz is no UTF-8" in heard.err
    heard = said(capsys, "--runs", "a.npz", "a.npz", "--out", "\udcff", code=2)
    assert "\\udcff is no UTF-8" in heard.err


def test_a_figure_has_every_run_whatever_its_step_and_name(capsys, monkeypatch):
    panels = []
    draw = figure.write_figure

    def noted(made, picture):
        panels.extend(made)
        draw(made, picture)

    monkeypatch.setattr(figure, "write_figure", noted)
    names = ["plain.npz", "step_100.npz", "step_200.npz", "lr$x^{$.npz"]
    for seed, name in enumerate(names):
        save(name, seed, **{"layers.0.$\\frac$b.w": np.ones(3) + seed})
    save("layers.npz", 9, **{"layers.\u00b2.w": np.ones(3)})
    said(capsys, "--runs", *names, "layers.npz", "--out", "o")
    for panel in panels:
        assert {row["run"] for row in panel.rows} == {*names[1:], "layers.npz"}
        assert panel.x_label == "group"
    assert len(panels) == 3 and Path("o/weights.png").exists()


def test_long_names_give_way_and_numbers_do_not(capsys, monkeypatch, undrawn):
    monkeypatch.setenv("COLUMNS", "80")
    runs = [save(f"{'n' * 60}{i}{'z' * 20}.npz", i, 1.2345e-10) for i in range(3)]
    heard = said(capsys, "--runs", *runs)
    rows = [row for row in table(next(Path("results").iterdir()).as_posix())]
    for row in rows:
        if row["kind"] not in ("all", "group"):
            continue
        for name in ("max_abs", "w1", "rel_l2", "mean_se", "p99"):
            assert f" {float(row[name]):.3g} " in heard.err, name
    body = [line for line in heard.err.splitlines() if "zz.npz " in line]
    assert len(body) == 6 and all("…" in line.split()[0] for line in body)
    assert len({line.split()[0] for line in body[:2]}) == 2


def test_tables_hold_what_looks_like_markup(capsys):
    show([{"run": "[bold]x", "a": 1.0}], "t")
    assert "[bold]x" in capsys.readouterr().err
    assert shortened(["abc", "y" * 30], 10) == ["abc", "yyyy…yyyyy"]
    alike = shortened(["p" * 30 + x + "s" * 4 for x in "ab"], 10)
    assert alike == ["…ppppassss", "…ppppbssss"]


@pytest.mark.parametrize("size", [1e-310, 1e160, 1e305])
def test_a_figure_fails_for_no_values(size, capsys):
    pair = [save(f"{name}.npz", seed, size) for seed, name in enumerate("ab")]
    heard = said(capsys, "--runs", *pair, "--out", "o")
    for row in table("o"):
        # Two samples of one distribution: sqrt(2), of few.
        assert 0.7 < float(row["rel_l2"]) < 3
    # An axis holds what lies between 1e-200 and 1e200: this ratio does.
    assert Path("o/weights.png").exists() and "no figure" not in heard.err


def test_a_figure_reaches_from_end_to_end(capsys):
    """By step, by many groups of long names, and with what no axis can hold."""
    for step, size in ((1, 1e-199), (2, 1.0), (3, 1e199), (4, 1e308)):
        side = {"w.x": np.full(3, size)}
        for run, sign in (("a", 1), ("b", -1)):
            save(f"{run}/{step}.npz", step, 0.0, **{"w.x": sign * side["w.x"]})
    said(capsys, "--runs", "a", "b", "--out", "o")
    assert Path("o/weights.png").exists()
    many = {f"{i}.{'long' * 20}{i}.w": np.ones(2) for i in range(60)}
    for seed, name in enumerate("cd"):
        save(f"{name}.npz", seed, **{k: (1 + seed) * v for k, v in many.items()})
    said(capsys, "--runs", "c.npz", "d.npz", "--out", "p")
    assert Path("p/weights.png").exists()


TINY = dataclasses.replace(
    PRESETS["tiny"],
    seed=3,
    attn="baseline",
    model=dataclasses.replace(PRESETS["tiny"].model, depth=1, width=32, heads=2),
)


@pytest.mark.slow
def test_runs_without_a_step_0_say_how_to_find_the_start(tmp_path, capsys, undrawn):
    write_run(tmp_path / "a", TINY, [5, 9])
    shutil.copytree("a", "b")
    shutil.copytree("a/checkpoints/5", "b/checkpoints/9", dirs_exist_ok=True)
    heard = said(capsys, "--runs", "a", "b")
    line = "no cosine and no drift: there is no step 0 of a, b; --initial PATH names"
    assert line in heard.err and "--initial seed draws" in heard.err

    heard = said(capsys, "--runs", "a", "b", "--initial", "seed", "--out", "o")
    assert "no cosine" not in heard.err
    assert "it trained with what environment.json does not tell" in heard.err
    (row,) = (r for r in table("o") if (r["kind"], r["step"]) == ("all", "5"))
    assert float(row["cosine"]) == 1.0 and float(row["drift"]) == 0.0
    found, _ = starts.drawn(Path("a/checkpoints/5"), None)
    state = on_one_device(TINY).fresh_state()
    expected = leaves(state.params)
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf.array, expected[name].array)
    average, _ = starts.drawn(Path("a"), "average")
    assert average.keys() == leaves(state.average).keys()

    described = experiment.environment("x")
    Path("a/environment.json").write_text(json.dumps(described))
    assert starts.drawn(Path("a"), None)[1] == []
    described["versions"]["jax"] = "0.1"
    Path("a/environment.json").write_text(json.dumps(described))
    (minded,) = starts.drawn(Path("a"), None)[1]
    assert minded.startswith("a: it trained with jax 0.1, its start is drawn with")


def test_a_start_that_no_seed_gives_is_refused(capsys):
    save("a.npz", 0)
    heard = said(capsys, "--runs", "a.npz", "a.npz", "--initial", "seed", code=2)
    assert "a.npz is no run of python -m train: give the path of" in heard.err
    Path("run/checkpoints/5").mkdir(parents=True)
    config = dataclasses.replace(TINY, init_from="runs/before")
    Path("run/config.json").write_text(to_json(config))
    with pytest.raises(UsageError, match="started from runs/before"):
        starts.drawn(Path("run"), None)
