"""The census of a run: planted preconditions are found, and dQ is what is predicted."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from analysis import capture, preconditions
from analysis.__main__ import main
from analysis.experiments import census
from analysis.figures import HeatMap, write_heat_maps
from analysis.findings import PRECONDITIONS, findings, worst
from attn_jax.audit.attribution import predict
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.audit.problem import Problem
from attn_jax.formats import BF16, FP16
from attn_jax.recipe import ATTN_JAX_HOPPER, FLASH2
from attn_jax.reference import golden
from tests.run_folder import write_run
from train.config import Config, to_json
from train.presets import PRESETS

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("shared_programs")]
KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
H = 16
# Few shapes, since each is compiled.
SHAPE = Shape(2, 48, 40, 4, 2, H)


@pytest.fixture(autouse=True)
def certified(monkeypatch):
    """The canaries have tests of their own."""
    monkeypatch.setattr(census, "certified", lambda: {"passed": ["all"]})


def row_of(query, key, value=None, kind=ml_dtypes.bfloat16) -> dict:
    """The row of one head without dQ; arrays [T or S, H], or [B, T or S, H]."""
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    value = np.ones_like(key) if value is None else np.asarray(value, np.float64)
    arrays = [x if x.ndim == 3 else x[None] for x in (query, key, value)]
    inputs = Inputs(
        *(x[:, :, None].astype(kind) for x in (*arrays, np.zeros_like(arrays[0])))
    )
    # What is planted is what is measured.
    for planted, x in zip(arrays, inputs):
        np.testing.assert_array_equal(x[:, :, 0].astype(np.float64), planted)
    (row,) = preconditions.heads(inputs)
    assert row["not_finite"] == 0 and row["dq_flash2"] is None
    return row


def pointing_at(keys, size: float) -> np.ndarray:
    """Queries whose logit is `size` for a key 4 e_j, and 0 for the others."""
    return size * np.eye(H)[list(keys)]


def test_equal_keys_are_repeated_maxima():
    key = 4 * np.eye(H)
    key[9] = key[5]
    row = row_of(pointing_at([5, 0, 5, 1, 5, 2, 3, 4, 6, 7], 6.0), key)
    assert row["tied_maxima"] == row["repeated_ones"] == 0.3
    row = row_of(pointing_at([0, 1, 2, 3], 6.0), key)
    assert row["tied_maxima"] == row["repeated_ones"] == 0


@pytest.mark.parametrize(
    ("kind", "apart", "is_one"),
    # Numbers next below 1 are 2^-8 and 2^-11 from it; half of that is a tie, which
    # exp(-x) > 1 - x passes.
    [
        *(("bfloat16", 2.0**-9, True), ("bfloat16", 2.0**-8, False)),
        *(("float16", 2.0**-9, False), ("float16", 2.0**-11, False)),
        ("float16", 2.0**-12, True),
    ],
)
def test_near_maxima_are_ones_as_far_as_the_format_rounds(kind, apart, is_one):
    key = 4 * np.eye(H)
    key[9] = (1 - 2.0**-7) * key[5]
    # The logits of keys 5 and 9 are this and (1 - 2^-7) of this; all others are 0, as
    # far below as 128 of these differences.
    row = row_of(pointing_at([5, 0], apart * 2.0**7), key, kind=KINDS[kind])
    assert row["tied_maxima"] == 0
    assert row["repeated_ones"] == (0.5 if is_one else 0)


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.25), ("float16", 0)])
def test_residual_mass_range_and_spread_of_logits(kind, share):
    # The others weigh 15 e^-x: 1.85e-3 for 9 and 3.1e-3 for 8.5, half a spacing is
    # 1.95e-3 in BF16 and 2.4e-4 in FP16.
    query = np.concatenate([pointing_at([3], 9.0), pointing_at([3, 4, 5], 8.5)])
    row = row_of(query, 4 * np.eye(H), kind=KINDS[kind])
    assert row["faint_rest"] == share
    assert row["logit_max"] == 9.0
    rms = math.sqrt((9.0**2 + 3 * 8.5**2) / 4)
    # FP64 throughout: some roundings of 2^-53.
    assert row["logit_spread"] == pytest.approx(15 / 16 * rms, rel=1e-13)
    assert row["lse_max"] == pytest.approx(math.log(math.exp(9.0) + 15), rel=1e-13)
    assert row["lse_min"] == pytest.approx(math.log(math.exp(8.5) + 15), rel=1e-13)
    assert row_of(-query, 4 * np.eye(H), kind=KINDS[kind])["logit_max"] == 9.0


def test_range_of_lse_is_that_of_the_reference():
    inputs = make_inputs("normal", 0, SHAPE)
    lse = golden(*inputs).lse
    for n, row in enumerate(preconditions.heads(inputs)):
        assert row["head"] == n
        # Sums of 16 and 40 FP64 terms of size 1.
        assert row["lse_min"] == pytest.approx(lse[:, n].min(), abs=1e-13)
        assert row["lse_max"] == pytest.approx(lse[:, n].max(), abs=1e-13)


def test_values_of_one_sign():
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], (2, 400, H))
    key = np.zeros((2, 400, H))
    plain = row_of(np.ones((2, 1, H)), key, signs)
    # The mean of 400 signs is 0.05 N(0, 1): six times that is beyond 32 of them.
    assert 0 < plain["v_coherence_rms"] < plain["v_coherence_max"] < 0.3
    signs[1, :, 3] = -2.0
    row = row_of(np.ones((2, 1, H)), key, signs)
    assert row["v_coherence_max"] == 1
    added = 1 / (2 * H)
    before, after = (r["v_coherence_rms"] ** 2 for r in (plain, row))
    # One of 2 x 16 columns has 1 where it had at most 0.3.
    assert added * (1 - 0.3**2) <= after - before <= added
    signs[1, :, 4] = 0
    assert math.isfinite(row_of(np.ones((2, 1, H)), key, signs)["v_coherence_rms"])


def test_a_sink_and_the_size_of_its_value():
    key = np.zeros((2, H, H))
    key[1, 7] = 4 * np.eye(H)[0]
    value = np.tile(np.eye(H), (2, 1, 1))
    value[1, 7] *= 3
    row = row_of(np.tile(pointing_at([0] * 5, 3.0), (2, 1, 1)), key, value)
    weight = math.exp(3.0) / (math.exp(3.0) + H - 1)
    assert row["sink_weight"] == pytest.approx(weight, rel=1e-13)
    assert row["sink_key"] == 7 and row["sink_v"] == 3


def test_means_of_k_and_v_over_their_spread():
    signs = np.tile([[1.0], [-1.0]], (10, H))
    # Means of two examples do not cancel: no row sees both.
    key = np.stack([3 + signs, -3 + signs])
    value = np.stack([signs, 0.5 + signs])
    row = row_of(np.ones((2, 3, H)), key, value)
    assert row["k_mean"] == 3
    # The mean squares of the means are 0 and 1/4.
    assert row["v_mean"] == pytest.approx(math.sqrt(1 / 8), rel=1e-15)
    assert row_of(np.ones((2, 3, H)), np.ones((2, 3, H)))["k_mean"] == math.inf


@pytest.mark.parametrize("dtype", KINDS)
def test_predicted_dq_is_that_of_the_audit(dtype):
    problem = Problem(
        dataclasses.replace(SHAPE, heads=1, key_heads=1), dtype, "uniform"
    )
    (row,) = preconditions.heads(problem.inputs)
    fmt = problem.format
    for recipe in (FLASH2, ATTN_JAX_HOPPER):
        (found,) = predict(recipe.with_inputs(fmt), (problem,), gradients=True)
        assert row[f"dq_{recipe.name}"] == found["dquery"].errors.units
    assert row["dq_ratio"] == row["dq_flash2"] / row["dq_attn_jax_hopper"] > 2


def test_heads_are_measured_one_by_one_and_do_not_mix():
    inputs = make_inputs("uniform", 0, SHAPE)
    together = list(preconditions.heads(inputs))
    for n, row in enumerate(together):
        kv = slice(n // 2, n // 2 + 1)
        query, key, value, dout = inputs
        alone = Inputs(
            query[:, :, n : n + 1],
            key[:, :, kv],
            value[:, :, kv],
            dout[:, :, n : n + 1],
        )
        (single,) = preconditions.heads(alone)
        for name in preconditions.COLUMNS:
            # FP32 sums in another order may round one dQ of 1536 the other way.
            rel = 0.02 if name.startswith("dq") else 1e-12
            assert row[name] == pytest.approx(single[name], rel=rel), name


def test_what_is_not_finite_is_counted_and_left_out():
    inputs = make_inputs("normal", 0, SHAPE)
    whole = list(preconditions.heads(inputs))
    inputs.query[0, 1, 0, 0] = np.nan
    # From dO, too, comes the power of two that heads with the same keys share.
    inputs.dout[0, 2, 0, 1] = np.inf
    inputs.value[0, 3, 1, 0] = np.inf
    rows = list(preconditions.heads(inputs))
    assert [row["not_finite"] for row in rows] == [2, 0, 1, 1]
    for n in (0, 2, 3):
        assert all(rows[n][name] is None for name in preconditions.COLUMNS)
    for name in preconditions.DQ:
        # As above.
        assert rows[1][name] == pytest.approx(whole[1][name], rel=0.02)
    assert rows[1]["lse_max"] == whole[1]["lse_max"]
    says = [finding["says"] for finding in findings(on_step(rows))]
    assert says[0].startswith("Q, K, V or dO holds NaN or infinity: 3 of 4 heads")
    assert worst(on_step(rows))[0]["head"] == 1


def on_step(rows, step: int = 5, layer: int = 0) -> list[dict]:
    return [{"step": step, "layer": layer, **row} for row in rows]


def plain_row(head: int = 0) -> dict:
    """A head in which nothing is met."""
    row = dict.fromkeys(preconditions.COLUMNS, 0.0)
    return {"head": head, "not_finite": 0, **row, "dq_flash2": 1.2}


def test_none_is_met_is_an_answer():
    found = findings(on_step([plain_row(), plain_row(1)]))
    assert [finding["met"] for finding in found] == [[], [], []]
    assert found[0]["says"] == (
        f"None of the {len(PRECONDITIONS)} preconditions is met in any of 2 heads."
    )
    assert "none of 2 heads" in found[1]["says"]
    without = findings(on_step([plain_row() | dict.fromkeys(preconditions.DQ)]))
    assert "no head has a dO" in without[1]["says"]


@pytest.mark.parametrize("one", PRECONDITIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_each_precondition_is_met_from_its_threshold_on(one, sign):
    below = plain_row() | dict.fromkeys(one.columns, 0.999 * one.least)
    column = one.columns[0]
    rows = [*on_step([below, plain_row(1)]), *on_step([below], 7, 3)]
    assert findings(rows)[0]["name"] == "none"
    rows[1][column] = sign * one.least
    rows[2][column] = 2 * one.least
    first, *others = findings(rows)
    assert first["name"] == one.name and first["met"] == [[7, 3, 0], [5, 0, 1]]
    assert "2 of 3 heads (every step; every layer)" in first["says"]
    assert "(step 7, layer 3, head 0)" in first["says"]
    assert len(others) == 2


def test_dq_is_named_where_it_exceeds_what_a_good_kernel_has():
    rows = [*on_step([plain_row(), plain_row(1)]), *on_step([plain_row()], 7, 3)]
    rows[1]["dq_flash2"] = 9.0
    found = {finding["name"]: finding for finding in findings(rows)}
    assert found["dQ under flash2"]["met"] == [[5, 0, 1]]
    assert "1.2 to 9 units" in found["dQ under flash2"]["says"]
    assert "1 of 3 heads (step 5; layer 0)" in found["dQ under flash2"]["says"]
    assert found["dQ under attn_jax_hopper"]["met"] == []


@pytest.fixture
def file(tmp_path) -> Path:
    """Two steps of two layers, small."""
    captures = [
        capture.Capture(
            step,
            layer,
            0.5,
            make_inputs("uniform", step + layer, Shape(2, 9, 9, 2, 2, H)),
        )
        for step in (10, 20)
        for layer in (0, 3)
    ]
    path = tmp_path / "mine.npz"
    capture.save(captures, Config(), path)
    return path


def table(path: Path) -> list[dict]:
    with (path / "census.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_the_census_goes_on_where_it_was_stopped(file, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    command = ["census", f"--capture={file}", f"--out={out}"]
    measured, calls = preconditions.heads, []

    def stopped(inputs):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(inputs)
        return measured(inputs)

    monkeypatch.setattr(preconditions, "heads", stopped)
    # Drawn in another test; it takes longer than all else.
    monkeypatch.setattr(census, "write_heat_maps", lambda maps, path: path.touch())
    assert main(command) == 130
    calls.clear()
    assert main(command) == 0 and len(calls) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = table(out)
    assert result["rows"] == len(rows) == 2 * 2 * 2
    assert [(r["step"], r["layer"], r["head"]) for r in rows] == [
        (step, layer, head) for step in ("10", "20") for layer in "03" for head in "01"
    ]
    # Steps and layers may be chosen from what is there, and nothing is measured again.
    assert main([*command, "--steps=last", "--layers=first"]) == 0 and len(calls) == 1
    assert table(out) == rows[4:6]
    monkeypatch.setattr(preconditions, "heads", measured)
    assert main([*command, "--fresh"]) == 0 and table(out) == rows


def test_another_file_is_not_taken_for_this_one(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(census, "write_heat_maps", lambda maps, path: path.touch())
    command = ["census", f"--capture={file}", f"--out={tmp_path / 'out'}"]
    assert main([*command, "--steps=10", "--layers=0"]) == 0
    capture.save(capture.read(file)[1:], Config(), file)
    capsys.readouterr()
    assert main(command) == 2
    refused(capsys, "other settings")


def refused(capsys, reason: str) -> None:
    error = capsys.readouterr().err
    assert reason in error and len(error.splitlines()) == 1


def test_unusable_request_is_one_line(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preconditions, "heads", lambda _: pytest.fail("measured"))
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros(3))
    (tmp_path / "empty").mkdir()
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "config.json").write_text(to_json(CONFIG))
    wide = tmp_path / "wide.npz"
    inputs = make_inputs("normal", 0, Shape(1, 3, 3, 1, 1, H), np.float32)
    capture.save([capture.Capture(1, 0, 0.5, inputs)], Config(), wide)
    for options, reason in (
        ([f"--run={tmp_path / 'nowhere'}"], "give one that python -m train wrote"),
        ([f"--run={file}"], "--capture FILE.npz"),
        ([f"--run={tmp_path / 'empty'}"], "neither capture.npz nor config.json"),
        ([f"--run={trained}"], "no checkpoint yet"),
        ([f"--run={trained}", "--steps=0,5"], "no checkpoint yet"),
        ([f"--capture={tmp_path}"], "give --run"),
        ([f"--capture={other}"], "nor a file of python -m analysis capture"),
        ([f"--capture={tmp_path / 'nowhere.npz'}"], "No such file"),
        ([f"--capture={wide}"], "float32, not bfloat16 or float16"),
        ([f"--capture={file}", "--steps=11"], "'11' is not among 10, 20"),
        ([f"--capture={file}", "--layers=1"], "'1' is not among 0, 3"),
        ([f"--capture={file}", f"--out={file}"], "cannot write"),
    ):
        assert main(["census", *options]) == 2, options
        refused(capsys, reason)
    for options in ([], [f"--run={trained}", f"--capture={file}"]):
        with pytest.raises(SystemExit) as stop:
            main(["census", *options])
        assert stop.value.code == 2
        refused(capsys, "--run")


CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    attn="baseline",
    batch_size=4,
    model=dataclasses.replace(PRESETS["tiny"].model, width=128, heads=2, depth=1),
)


def test_a_run_from_its_checkpoints_and_from_its_captures(tmp_path, capsys):
    root = tmp_path / "run"
    write_run(root, CONFIG, (2, 4))
    out = tmp_path / "out"
    assert main(["census", f"--run={root}", "--steps=0,last", f"--out={out}"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    rows = table(out)
    assert [(r["step"], r["layer"], r["head"]) for r in rows] == [
        (step, "0", head) for step in "04" for head in "01"
    ]
    # The gates of a new model are closed: no dO, so no dQ to predict.
    assert [bool(row["dq_flash2"]) for row in rows] == [False] * 2 + [True] * 2
    assert all(float(row["dq_attn_jax_hopper"]) > 0.5 for row in rows[2:])
    assert "the worst head of each step and layer" in printed.err
    assert "dQ under flash2 is predicted" in printed.err
    for suffix in ("csv", "json", "jsonl", "parquet", "png"):
        path = out / f"census.{suffix}"
        assert path.stat().st_size > 100 and str(path) in result["files"]
    described = json.loads((out / "census.json").read_text())
    assert described["command"].startswith("python -m analysis census --run=")
    assert described["versions"]["jax"] and described["device"] and described["date"]
    assert described["findings"][-2]["name"] == "dQ under flash2"
    assert described["measured"][0]["canaries"] == {"passed": ["all"]}
    # The same numbers from the file of its captures.
    assert main(["capture", f"--run={root}", "--steps=last"]) == 0
    again = tmp_path / "again"
    assert main(["census", f"--run={root}", f"--out={again}"]) == 0
    assert table(again) == rows[2:]


def test_heat_maps_leave_out_what_is_no_number(tmp_path):
    rows = [
        {"head": head, "where": where, "a": value, "none": None}
        for head, where, value in ((0, "x", 1.5), (1, "x", None), (1, "y", math.inf))
    ]
    maps = [
        HeatMap(name, rows, "head", "where", name, log=log)
        for name in ("a", "none")
        for log in (False, True)
    ]
    write_heat_maps(maps, tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 1000


def test_recipes_are_those_of_the_inputs_format():
    names = [recipe.name for recipe in preconditions.RECIPES]
    assert preconditions.DQ == tuple(f"dq_{name}" for name in names)
    for recipe in preconditions.RECIPES:
        assert recipe.inputs == BF16 and recipe.with_inputs(FP16).inputs == FP16
