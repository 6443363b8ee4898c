"""backward, attribution, saturation and bias: what they find, at toy size."""

import argparse
import csv
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from analysis import capture_file, gradients, inputs, sweep
from analysis.__main__ import main
from analysis.experiments import attribution, backward, bias, saturation
from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.inputs import Inputs
from attn_jax.formats import BF16, E4M3FN, FP16, FP32
from attn_jax.recipe import RECIPES, Step
from attn_jax.reference import golden
from train.config import UsageError

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def certified(monkeypatch):
    """The canaries have tests of their own."""
    monkeypatch.setattr(sweep, "_certify", lambda: {"passed": ["all"]})


@pytest.fixture
def measured(tmp_path, capsys):
    """Runs a command at toy size; returns its raw rows and its claims."""

    def run(*arguments: str):
        command = [*arguments, "--preset", "toy", "--out", str(tmp_path)]
        assert main(command) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        lines = [json.loads(line) for line in (tmp_path / "toy.jsonl").open()]
        cells = [line for line in lines if "cell" in line]
        rows = [{**cell["cell"], **row} for cell in cells for row in cell["rows"]]
        assert len(rows) == result["rows"] > 0
        for suffix in ("parquet", "csv", "png"):
            assert (tmp_path / f"toy.{suffix}").stat().st_size > 100
        return rows, json.loads((tmp_path / "toy.json").read_text())["claims"]

    return run


def mean(rows, column: str, **where) -> float:
    chosen = [
        row[column]
        for row in rows
        if all(row[name] == value for name, value in where.items())
    ]
    assert chosen
    return float(np.mean(chosen))


def test_what_is_said_of_cudnn_was_measured():
    row = {"family": "uniform", "N": 96, "variant": backward.variant("o", "none")}
    row |= {"tensor": "dq", "units": 50.0, "units_ci": 1.0}
    (claim,) = backward._claims([row])
    assert claim.source == "cuDNN on an H200, results/accuracy" and claim.holds
    table = Path(__file__).parent.parent / "results/accuracy/nvidia-h200-full.csv"
    with table.open() as file:
        measured = {
            line["family"]: float(line["dq"])
            for line in csv.DictReader(file)
            if (line["implementation"], line["dtype"]) == ("cudnn", "bfloat16")
            and (line["T"], line["S"], line["H"]) == ("2048", "2048", "128")
            and line["is_causal"] == "False"
        }
    said = re.findall(r"([\d.]+) on ([\w-]+)", claim.says)
    assert [family for _, family in said] == ["uniform", "offset", "lse-130"]
    for size, family in said:
        # Three digits are given.
        assert float(size) == pytest.approx(measured[family], rel=0.005)


def test_all_heads_of_a_run_are_taken(monkeypatch):
    arrays = Inputs(*np.ones((4, 1, 24, 3, 8), np.float32))
    captured = capture_file.captured({"step 5": arrays})
    monkeypatch.setattr("analysis.capture.load", lambda path: captured)
    parser = argparse.ArgumentParser()
    backward.add_arguments(parser)
    # Three, where the default of random inputs is four.
    chosen = parser.parse_args(["--inputs", "run:somewhere"])
    assert inputs.open_inputs(chosen).seeds == sweep.seeds(chosen) == 3


def test_names_side_by_side_are_not_joined():
    row = {"family": "normal", "N": 96, "tensor": "dq", "units": 1.0, "rel": 1.0}
    row |= {"variant": backward.variant("o", "none"), "cast": "output"}
    panels = [
        backward._panel([row], "dq", "by nothing", [row["variant"]]),
        attribution._panel("", [row]),
    ]
    assert not any(panel.joined for panel in panels)


def test_each_panel_says_what_it_compares():
    row = {"family": "normal", "N": 96, "units": 1.0, "rel": 1.0, "seed": 0}
    rows = [
        {**row, "variant": name, "tensor": tensor}
        for name in backward.recipes()
        for tensor in ("out", "dq", "dk", "dv")
    ]
    panels = backward.report(rows).panels
    titles = {panel.title for panel in panels}
    assert len(titles) == len(panels) == 7 and "dq by centre, 96 keys" in titles


def test_every_source_and_centre_of_the_recipes_is_measured():
    found = backward.recipes()
    assert found["flash2: o, none"] == RECIPES["flash2"]
    assert len(set(found.values())) == len(found) == 5 * 4 + 4 + 3
    finer = [recipe for recipe in found.values() if recipe.dq_dlogits is not None]
    assert {recipe.dq_centre for recipe in finer} == set(backward.CENTRES)
    assert {recipe.dq_dlogits for recipe in finer} == {Step(FP16)}


def test_gradients_of_a_zero_cotangent_have_no_unit():
    rng = np.random.default_rng(0)
    x, zero = (
        rng.standard_normal((2, 8, 1, 16)).astype(np.float32),
        np.zeros((2, 8, 1, 16), np.float32),
    )
    arrays = Inputs(x, x[::-1].copy(), x, zero)
    problem = inputs.Problem(arrays, golden(*arrays), None)
    rows = list(gradients.errors(RECIPES["exact_fp32"], problem))
    assert [(row["tensor"], row["seed"]) for row in rows] == [
        (tensor, seed) for tensor in gradients.TENSORS for seed in range(2)
    ]
    for row in rows:
        if row["tensor"] == "out":
            # Sums of 8 and 16 terms in FP32: a few roundings of 2**-24 each.
            assert 0 < row["rel"] < 64 * 2.0**-24
        else:
            assert row["rel"] is None and row["units"] is None


def test_attribution_adds_up(measured, monkeypatch):
    monkeypatch.setattr(attribution, "_LONGEST_BACKWARD", 64)
    rows, _ = measured("attribution", "--recipe", "flash2")
    assert {row["cast"] for row in rows} == {"all", "probability", "output"}
    sizes = {
        (cast, how): mean(rows, "rel", cast=cast, how=how)
        for cast, how in {(row["cast"], row["how"]) for row in rows}
    }
    # Two casts: all but one is the other alone.
    assert sizes["output", "alone"] == sizes["probability", "all but"]
    assert sizes["probability", "alone"] == sizes["output", "all but"]
    assert sizes["all", "none"] < 2.0**-18 < BF16.rms_roundoff / 4
    # The output's cast is one rounding of a log-uniform number; 10 %: two seeds.
    assert sizes["output", "alone"] == pytest.approx(BF16.rms_roundoff, rel=0.1)
    total = np.hypot(sizes["output", "alone"], sizes["probability", "alone"])
    # Independent to within what the scatter of 2 x 32 x 64 outputs can hide.
    assert sizes["all", "all"] == pytest.approx(total, rel=0.1)


def test_casts_of_a_recipe_and_the_steps_of_one_tensor():
    recipe = RECIPES["flash2_op_by_op"]
    casts = attribution.casts(recipe)
    assert casts["logits+shifted"] == ("logits", "shifted")
    assert "exponentiated" not in casts and "dot_accumulator" not in casts
    pair = attribution.variants(recipe, "logits+shifted")
    for name in casts:
        if "+" in name:
            continue
        narrow = name in ("logits", "shifted")
        assert (getattr(pair["alone"], name).format == BF16) == narrow
        assert (getattr(pair["all but"], name).format == FP32) == narrow
    assert attribution.variants(recipe, "all")["all"] == recipe
    with pytest.raises(UsageError, match="exact_fp32 keeps every step in its carrier"):
        attribution.casts(RECIPES["exact_fp32"])


def test_a_cast_of_ds_for_dq_alone_is_one_of_the_backward_pass():
    recipe = dataclasses.replace(RECIPES["flash2"], dq_dlogits=Step(FP16))
    assert "dq_dlogits" in attribution.casts(recipe)
    assert "dq_dlogits" not in attribution.casts(RECIPES["flash2"])
    pair = attribution.variants(recipe, "dq_dlogits")
    assert pair["alone"].dq_dlogits == Step(FP16)
    assert pair["alone"].dlogits == pair["all but"].dq_dlogits == Step(FP32)
    for tensor, largest in (("dq", "dq_dlogits"), ("dk", "dlogits")):
        here = [
            {
                "how": "alone",
                "tensor": tensor,
                "cast": cast,
                "rel": 1.0 + (cast == largest),
            }
            for cast in ("dlogits", "dq_dlogits", "output")
        ]
        (claim,) = attribution._claims("", here)
        assert claim.holds
    assert {"dlogits", "dq_dlogits"} < set(attribution.BACKWARD)


def test_saturation_shows_before_the_fix_and_not_after(measured):
    rows, claims = measured("saturation")

    def rel(std: float, when: str) -> float:
        return mean(rows, "rel", std=std, when=when)

    assert rel(2.0, "before") > 4 * rel(2.0, "after")
    assert rel(0.25, "before") == pytest.approx(rel(0.25, "after"), rel=0.05)
    # Weights go missing where P is clamped and the row sum is not.
    assert mean(rows, "defect", std=2.0, when="before") < -0.01
    assert abs(mean(rows, "defect", std=2.0, when="after")) < 0.005
    assert len(claims) == 10
    x = saturation.draw(1.5, 1, 4, 8)
    assert correctly_rounded(x.query, E4M3FN).tolist() == (x.query.tolist())


def test_bias_is_in_the_rounded_output_and_not_in_p_dp(measured, monkeypatch):
    chosen = {name: bias.recipes()[name] for name in ("qiu_yao", "flash2, p_dp")}
    monkeypatch.setattr(bias, "recipes", lambda: chosen)
    rows, claims = measured("bias", "--seeds", "4")
    at_sinks = {"scenario": "sinks", "recipe": "qiu_yao"}
    # 15e-4 over 16 draws of 256 queries; 4 of 64 scatter by a sixth or so.
    assert mean(rows, "delta_error", **at_sinks) == pytest.approx(15e-4, rel=0.3)
    # Rows of dS that should sum to zero sum to the other side.
    assert mean(rows, "row_sum_of_ds", **at_sinks) < -30e-4
    drawn = [row for row in rows if row.items() >= at_sinks.items()]
    assert bias.directionality(drawn, "delta_error") > 5
    # What is lost in reading delta, and no more.
    cured = mean(rows, "delta_error", scenario="sinks", recipe="flash2, p_dp")
    assert abs(cured) < 2e-6
    assert abs(mean(rows, "delta_error", scenario="iid", recipe="qiu_yao")) < 1e-4
    at = {c["recipe"]: c for c in claims}
    assert at["qiu_yao, sinks"]["holds"] and at["flash2, p_dp, sinks"]["holds"]
    # An error of no size has no direction, and A is no multiple of 1e-4.
    assert ", A = " in at["qiu_yao, sinks"]["found"]
    assert "A" not in at["flash2, p_dp, sinks"]["found"]
    assert set(bias.report(rows).tables) == {
        f"{scenario}: means x 1e-4, and A" for scenario in bias.SCENARIOS
    }


def test_delta_and_ds_are_read_from_gradients():
    drawn = bias.draw("iid", 3, 16)
    logits, value, dout = (x.astype(np.float64) for x in drawn)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    terms = p * (dout @ value.T)
    delta = terms.sum(-1, keepdims=True)
    found = bias.emulate(RECIPES["exact_fp32"], drawn)
    # 512 FP32 terms, and the exponent -39 of the sink's weight in base 2.
    scale = abs(terms).sum(-1)
    assert (abs(found.delta - delta[:, 0]) < 4e-6 * scale).all()
    ds = terms - p * delta
    np.testing.assert_allclose(found.dlogits, ds, rtol=0, atol=1e-6 * abs(ds).max())
    np.testing.assert_allclose(found.out, p @ value, rtol=0, atol=1e-6)


# Two programs are to have the same bits in what they compute alike.
@pytest.mark.usefixtures("fully_optimised")
def test_backward_tells_delta_sources_and_centres_apart(measured, monkeypatch):
    # The others differ in these two settings alone; each costs seconds to compile.
    monkeypatch.setattr(backward, "SOURCES", ("o", "o_hi_lo"))
    monkeypatch.setattr(backward, "CENTRES", ("mean", "row"))
    monkeypatch.setattr(backward, "BASELINES", ("jax_nn",))
    rows, claims = measured("backward", "--families", "uniform", "repeated_max")

    def units(family: str, variant: str, tensor: str = "dq") -> float:
        return mean(rows, "units", family=family, variant=variant, tensor=tensor)

    few, mean_of, row_of = (
        "repeated_max",
        "flash2: o_hi_lo, mean",
        "flash2: o_hi_lo, row",
    )
    assert units("uniform", mean_of) < backward.GOOD < units("uniform", "jax_nn")
    # A mean over all keys does not help where two keys have all the weight.
    assert units(few, row_of) < backward.GOOD
    assert units(few, mean_of) > 10 * units(few, row_of)
    # A finer dS leaves dQ its own rounding alone, and dK as it was.
    fine = backward.variant("o_hi_lo", "row", fp16=True)
    assert units("uniform", fine) < backward.NEARLY_BEST < units("uniform", row_of)
    assert units(few, fine) < backward.NEARLY_BEST
    assert units(few, fine, "dk") == units(few, row_of, "dk")
    # delta from the rounded O is seen in dK, which no centre mends.
    assert units(few, "flash2: o, row", "dk") > 1.2 * units(few, row_of, "dk")
    verdicts = {c["recipe"]: c["holds"] for c in claims if "kernels" in c["source"]}
    assert verdicts == {
        "flash2: o_hi_lo, mean, uniform, 96 keys": True,
        "flash2: o_hi_lo, mean, repeated_max, 96 keys": False,
    }
