"""The forward experiments at toy size, and the figures that they stand for."""

import argparse
import csv
import json
import math

import jax.numpy as jnp
import numpy as np
import polars
import pytest

from analysis import capture_file, deviation, inputs, sweep
from analysis.__main__ import main
from analysis.experiments import precision, state_format, tiling
from analysis.summary import summarise
from analysis.variants import BASELINE, CHAINED, VARIANTS, in_format, with_block
from attn_jax import emulator
from attn_jax.audit.inputs import Inputs
from attn_jax.formats import BF16, FP64
from train.config import UsageError

pytestmark = pytest.mark.ci

# Columns that tell the rows of an experiment apart, besides the seed.
KEYS = {
    "precision": ["family", "format", "N", "recipe"],
    "sequence-length": ["family", "N", "recipe"],
    "tiling": ["family", "format", "recipe", "layout", "M", "B_r", "B_c"],
    "state-format": ["family", "N", "recipe"],
}
MEASURED = [
    *("rel", "max_abs", "mean_abs", "std", "signed_mean", "directionality"),
    *("rel_over_baseline", "max_over_baseline", "from_baseline_max_abs"),
    *("from_baseline_mean_abs", "from_baseline_std", "rescales_mean", "rescales_max"),
]


@pytest.fixture(autouse=True)
def certified(monkeypatch):
    """The canaries have tests of their own."""
    monkeypatch.setattr(sweep, "_certify", lambda: {"passed": ["all"]})


@pytest.fixture
def toy(tmp_path):
    """Runs an experiment at toy size, checks its files and returns its raw rows."""

    def run(name: str) -> polars.DataFrame:
        options = [name, "--preset", "toy", "--families", "normal"]
        assert main([*options, "--out", str(tmp_path)]) == 0
        rows = polars.read_parquet(tmp_path / "toy.parquet")
        assert set(rows["seed"]) == {0, 1}
        assert rows.select(KEYS[name] + ["seed"]).is_unique().all()
        for column in MEASURED:
            assert rows[column].is_not_null().all(), column
        with open(tmp_path / "toy.csv") as file:
            points = list(csv.DictReader(file))
        assert points and all(float(p["y"]) >= 0 for p in points)
        described = json.loads((tmp_path / "toy.json").read_text())
        assert described["command"].startswith(f"python -m analysis {name} --preset")
        assert described["settings"]["families"] == ["normal"]
        assert described["claims"]
        for claim in described["claims"]:
            assert claim["source"].startswith("paper") and claim["found"]
            assert claim["holds"] in (True, False, None)
        assert (tmp_path / "toy.png").stat().st_size > 10_000
        return rows

    return run


def test_formats_have_errors_of_their_own_size(toy):
    rows = toy("precision").filter(polars.col("recipe") == "flash2")
    assert set(rows["format"]) == set(precision.MEASURED["toy"])
    for name in precision.MEASURED["toy"]:
        fmt = precision.FORMATS[name]
        mine = rows.filter(polars.col("format") == name)
        # One rounding of P and one of the output, each at most u; sums in FP32 and
        # FP64 add one for each of 4 tiles, and as many in the eager baseline's sums.
        assert mine["rel"].max() < 8 * fmt.unit_roundoff
        # The output's own rounding has an RMS of a third of u or more.
        assert mine["rel"].min() > 0.3 * fmt.unit_roundoff
        assert mine["units"].is_null().all() == (name == "fp64")


def test_every_variant_is_measured_by_length(toy):
    rows = toy("sequence-length")
    assert set(rows["recipe"]) == set(VARIANTS)
    longest = rows.filter(N=256)["recipe"]
    assert set(VARIANTS) - set(longest) == set(CHAINED)
    # One block of all keys is never rescaled.
    whole = [name for name, recipe in VARIANTS.items() if recipe.block_kv is None]
    never = rows.filter(rescales_max=0)["recipe"]
    assert set(never) >= set(whole) and "flash2" not in set(never)


def test_a_step_that_rounds_nothing_new_costs_nothing(toy):
    found = {
        row["recipe"]: row
        for row in toy("state-format").filter(seed=0, N=256).to_dicts()
    }
    # The maximum of BF16 logits is a BF16 number already.
    assert found["all but m"]["rel"] == found["all"]["rel"]
    # FP32 to the end: nothing but the order of additions.
    assert found["none"]["rel"] < 256 * 2.0**-24
    steps = [found[f"only {step}"]["rel"] for step in state_format.STEPS if step != "m"]
    assert min(steps) > 100 * found["none"]["rel"]
    assert max(steps) < found["all"]["rel"]
    assert found[state_format.FEW]["rescales_max"] == 0 < found["all"]["rescales_max"]


@pytest.mark.parametrize(
    ("ratios", "holds"),
    [
        ((1.03, 1.04, 1.05), False),  # beyond doubt, and nothing
        ((1.9, 2.0, 2.1), True),
        ((1.1, 1.2, 1.3), None),
        ((0.4, 0.5, 0.6), False),
    ],
)
def test_rescaling_is_to_blame_only_for_a_fifth_or_more(ratios, holds):
    rows = [
        {
            **{"family": "normal", "N": 64, "recipe": name, "seed": seed},
            **dict.fromkeys(state_format._VALUES, 1.0),
            # Seeds differ by far more than what they have in common.
            "rel": 0.01 * 3**seed * (ratio if name == "all" else 1.0),
        }
        for name in state_format.recipes()
        for seed, ratio in enumerate(ratios)
    ]
    claims = state_format.report(rows).claims
    (claim,) = (c for c in claims if c.recipe.startswith(state_format.FEW))
    assert claim.holds is holds
    assert f"one over the other {ratios[1]:.1f}" in claim.found
    assert "above 1.2" in claim.found


def test_the_claim_of_mantissa_bits_names_its_formats():
    rows = [
        {
            **{"family": "normal", "N": 64, "recipe": name, "seed": 0, "format": fmt},
            **dict.fromkeys(precision._VALUES, 10.0**-place),
        }
        for name in (BASELINE, "flash2")
        for place, fmt in enumerate(precision.FORMATS)
    ]
    claim, *_ = precision.report(rows).claims
    assert claim.says.startswith("Among bf16, fp16, fp32, fp64 (those of the paper)")
    assert claim.found.startswith("bf16") and claim.holds


def test_only_the_number_of_keys_in_a_block_counts(toy):
    rows = toy("tiling").filter(polars.col("format") == "bf16", seed=0)
    last = rows.filter(M=2**15, recipe="flash1_paper")
    error = dict(zip(last["layout"], last["rel"], strict=True))
    assert error["square"] == error["rule"] != error["swapped"]


def test_tiles_follow_the_rule():
    # B_c = M / 4d = 512 and B_r = min(512, 64); 300 * 64 is no multiple of 4d.
    rule, swapped, square = tiling.tiles([2**17], 64, 4096)
    assert (rule.B_r, rule.B_c) == (64, 512)
    assert (swapped.B_r, swapped.B_c) == (512, 64)
    assert (square.B_r, square.B_c) == (512, 512)
    assert tiling.tiles([300 * 64], 64, 4096)[0].B_c == 75
    assert tiling.tiles([301 * 64], 64, 4096)[0].B_c == 76
    assert tiling.tiles([2**17], 64, 256)[0].B_c == 256


@pytest.fixture(scope="module")
def at_512():
    """Summary of four recipes at 512 keys by family, as sequence-length makes it."""
    names = (BASELINE, "flash2", "flash2_op_by_op", "flash1_paper")
    recipes = {name: with_block(VARIANTS[name], 64) for name in names}
    source = inputs.Source(("normal", "uniform"), 4, 256, 1, 64)
    rows = [
        {"family": family, **row}
        for family in source.labels
        for problem in [inputs.problem(source, family, 512, BF16)]
        for row in deviation.compare(problem, recipes, BASELINE)
    ]
    values = ("rel", "rel_over_baseline", "max_over_baseline", "rescales_mean")
    found = summarise(rows, ["family", "recipe"], values)
    return {(row["family"], row["recipe"]): row for row in found}


def test_flash2_has_half_the_error_of_the_eager_baseline(at_512):
    # On N(0, 1) inputs flash2 rounds P and the output, an error of sqrt(2) eps. Eager
    # also rounds S: eps |s| is a relative error of p, and weighted by p^2, a normal
    # logit lies at 2 with variance 1, so that is 5 eps^2 more. sqrt(2 / 7) = 0.53.
    ratio = at_512["normal", "flash2"]["rel_over_baseline"]
    assert 0.4 < ratio < 0.6
    assert at_512["normal", BASELINE]["rel"] == pytest.approx(
        math.sqrt(7) * BF16.rms_roundoff, rel=0.1
    )


def test_narrow_state_follows_the_two_term_law(at_512):
    # eps^2 (T / 2 + T / 3) on top of the baseline, T = 512 / 64 tiles. Measured by an
    # independent program for 4 <= T <= 64: never above it, and at most 20 % below.
    base = at_512["normal", BASELINE]["rel"]
    law = math.sqrt(base**2 + BF16.rms_roundoff**2 * 8 * 5 / 6)
    assert law <= at_512["normal", "flash2_op_by_op"]["rel"] <= law / 0.8


def test_the_tenfold_error_is_one_of_the_state(at_512):
    # On U[0, 1) the rounding of the output outweighs that of S and P by far.
    flash2 = at_512["uniform", "flash2"]
    assert flash2["rel_over_baseline"] == pytest.approx(1, abs=0.05)
    # T = 8 roundings each of an output and a sum that grow by equal steps: a random
    # error of eps sqrt(2 T / 3) = 2.3 eps, against eps. The largest ratio is more.
    paper = at_512["uniform", "flash1_paper"]
    assert paper["rel_over_baseline"] > 2
    assert paper["max_over_baseline"] > paper["rel_over_baseline"]
    # Both rescale about as often, so that is not what sets them apart.
    assert flash2["rescales_mean"] == pytest.approx(paper["rescales_mean"], rel=0.3)


def test_rescalings_are_counted_once_for_recipes_of_one_maximum():
    source = inputs.Source(("normal",), 2, 8, 1, 16)
    problem = inputs.problem(source, "normal", 96, BF16)
    names = (BASELINE, "flash2", "narrow_output", "flash2_op_by_op")
    recipes = {name: with_block(VARIANTS[name], 16) for name in names}
    counts = deviation.rescales(recipes, problem.inputs)
    assert counts["flash2"] is counts["narrow_output"]
    for name, recipe in recipes.items():
        query, key = map(jnp.asarray, problem.inputs[:2])
        alone = emulator.rescales(query, key, recipe=recipe)
        assert np.array_equal(counts[name], alone)
    assert counts["flash2"].max() > 0


def test_fp64_is_judged_by_long_double(monkeypatch):
    source = inputs.Source(("normal",), 2, 20, 1, 16)
    problem = inputs.problem(source, "normal", 96, FP64)
    grouped = problem.inputs._replace(query=np.repeat(problem.inputs.query, 2, axis=2))
    longer = deviation.long_double(grouped)
    assert longer is not None and longer.shape == (2, 16, 2, 16)
    both = problem.exact.out[:, :16].repeat(2, axis=2)
    # FP64's own error: logits are sums of 16 products, weights sums of 96, of terms
    # below 4: 112 * 4 * 2^-53 = 5e-14 at the worst.
    np.testing.assert_allclose(longer.astype(np.float64), both, rtol=1e-13, atol=1e-15)
    recipe = {BASELINE: in_format(VARIANTS[BASELINE], FP64)}
    first = next(deviation.compare(problem, recipe, BASELINE))
    assert 0 < first["rel"] < 1e-15 and first["units"] is None
    # Where long double is FP64, as on some machines, there is nothing to say.
    monkeypatch.setattr(np, "longdouble", np.float64)
    first = next(deviation.compare(problem, recipe, BASELINE))
    assert first["rel"] is first["rel_over_baseline"] is None
    assert first["from_baseline_max_abs"] == 0


def test_inputs_of_a_run_take_the_place_of_families(monkeypatch):
    rng = np.random.default_rng(0)
    arrays = Inputs(*rng.standard_normal((4, 2, 24, 2, 8)).astype(np.float32))
    captured = capture_file.captured({"step 5": arrays})
    monkeypatch.setattr("analysis.capture.load", lambda path: captured)
    parser = argparse.ArgumentParser()
    sweep.add_options(parser, "tiling")
    command = ["--preset", "toy", "--inputs", "run:somewhere", "--seeds"]
    source = inputs.open_inputs(parser.parse_args([*command, "3"]))
    assert source.labels == ("step 5",)
    # The longest sequence that there is, where none of the preset's is.
    assert source.lengths([4096]) == [24]
    problem = inputs.problem(source, "step 5", 24, BF16)
    assert problem.inputs.query.shape == (3, 24, 1, 8)
    with pytest.raises(UsageError, match="4 draws"):
        inputs.open_inputs(parser.parse_args([*command, "5"]))
