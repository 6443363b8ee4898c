"""python -m analysis ring: three classes of libraries, told apart at toy size."""

import argparse
import csv
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from analysis import parallel, ring_comparison, sweep
from analysis.__main__ import main
from analysis.experiments import ring
from analysis.libraries import RINGS, simulated
from attn_jax.formats import BF16, FP32
from attn_jax.recipe_schema import Step


@pytest.fixture(autouse=True)
def certified(monkeypatch):
    """The canaries have tests of their own."""
    monkeypatch.setattr(sweep, "_certify", lambda: {"passed": ["all"]})


@pytest.fixture
def measured(tmp_path, capsys):
    """Runs the command at toy size; returns its claims by recipe."""

    def run(*arguments: str):
        command = ["ring", *arguments, "--preset", "toy", "--out", str(tmp_path)]
        assert main(command) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["rows"] > 0
        for suffix in ("parquet", "csv", "png"):
            assert (tmp_path / f"toy.{suffix}").stat().st_size > 100
        return json.loads((tmp_path / "toy.json").read_text())["claims"]

    run.folder = tmp_path
    return run


def gates(claims):
    return {c["recipe"]: c for c in claims if "gate" in c["source"]}


@pytest.mark.ci
def test_wide_parts_hold_the_gate_and_narrow_ones_do_not(measured, monkeypatch):
    every = ring.variants(options())
    small = dataclasses.replace(every["attn_jax"].recipe, block_kv=1)
    kept = {name: every[name] for name in ("attn_jax", "ring_flash_attn")}
    kept["as many blocks"] = dataclasses.replace(every["attn_jax"], recipe=small)
    monkeypatch.setattr(ring, "variants", lambda options: kept)
    claims = measured("--families", "normal", "--shards", "1", "32")
    gate = gates(claims)
    holds = {name: claim["holds"] for name, claim in gate.items()}
    assert holds.pop("ring_flash_attn") is False
    # A shard's two keys lie in two runs, so l is the sum of many where one device has a
    # block of 128: that alone is what keeps ours from holding at so few tokens.
    assert holds == {"attn_jax": False, "as many blocks": True}
    found = gate["attn_jax"]["found"].partition("W to 32: ")[2].split(", ")
    sizes = {name: float(size) for name, size in map(str.split, found)}
    assert list(sizes) == list(ring.TENSORS) and sizes["lse"] > ring.GATE["lse"]
    over = {name for name, size in sizes.items() if size > ring.GATE[name]}
    assert over == {"lse"}
    with (measured.folder / "toy.csv").open() as file:
        panels = {line["panel"] for line in csv.DictReader(file)}
    assert panels == {f"normal, {tensor}" for tensor in ring.TENSORS}


def test_any_recipe_and_strategy_may_be_asked_for(measured):
    claims = measured(
        *("--recipes", "flash3", "--strategies", "all_gather", "ulysses"),
        *("--families", "normal", "--shards", "1", "2", "--layout", "contiguous"),
    )
    names = {"flash3, all_gather, lse", "flash3, ulysses"}
    assert {c["recipe"] for c in claims} == names
    assert all(c["holds"] for c in claims if "gate" in c["source"])


@pytest.mark.ci
def test_what_the_kernels_do_may_be_asked_for_and_heads_dealt(measured):
    """Of two devices that deal heads each has a head's whole attention."""
    claims = measured(
        *("--recipes", "attn_jax_hopper", "--strategies", "ring", "ring+ulysses"),
        *("--families", "normal", "--shards", "1", "2"),
    )
    gate = gates(claims)
    assert set(gate) == {
        "attn_jax_hopper, ring, carry_whole",
        "attn_jax_hopper, ring+ulysses 2, carry_whole",
    }
    dealt = gate["attn_jax_hopper, ring+ulysses 2, carry_whole"]["found"]
    assert dealt.endswith("out 1.000, lse 1.000, dq 1.000, dk 1.000, dv 1.000")


def options(*arguments: str):
    parser = argparse.ArgumentParser()
    ring.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_row_s_name_says_what_was_chosen_and_a_name_means_one_thing():
    default = ring.variants(options())["attn_jax"]
    chosen = ring.variants(
        options(
            *("--recipes", "attn_jax", "flash2", "--merges", "carry", "two_pass"),
            *("--partials", "fp32", "16-bit", "--wire", "16-bit"),
        )
    )
    assert len(chosen) == len({repr(variant) for variant in chosen.values()}) == 8
    narrow = chosen["attn_jax, ring, two_pass, 16-bit parts, 16-bit wire"]
    assert (narrow.partials, narrow.wire) == ("16-bit", "16-bit")
    assert narrow.recipe.ring_merge == "two_pass"
    assert chosen["flash2, ring, carry, 16-bit wire"].partials == "fp32"
    plain = ring.variants(options("--recipes", "attn_jax", "flash2"))
    assert plain["attn_jax, ring, carry_whole"] == default
    assert plain["flash2, ring, lse"] == ring.variants(options())["flash2"]


def test_lucidrains_rounds_what_is_carried_and_no_lse():
    q, k, v = map(jnp.asarray, parallel.draw("normal", 0, 64, 16)[:3])
    lucidrains = RINGS["lucidrains"]
    wide = dataclasses.replace(lucidrains.recipe, ring_accumulator=Step(FP32))
    plain = dataclasses.replace(lucidrains, recipe=wide, wire="fp32")
    (out, lse), (want, want_lse) = (
        simulated(way, q, k, v, shards=8, out_dtype=np.float32)
        for way in (lucidrains, plain)
    )
    np.testing.assert_array_equal(lse, want_lse)
    # O is a sum of weights of 1, each part of which was rounded at most 16 times.
    most = 16 * BF16.unit_roundoff * np.abs(v.astype(np.float32)).max()
    off = np.abs(out - want).max()
    assert BF16.unit_roundoff * np.abs(want).max() / 4 < off <= most


def rows(variant: str, grows: float):
    """An error of 2 on one device, and `grows` times as much on 64."""
    return [
        dict(variant=variant, family=family, seed=seed, tensor=tensor)
        | dict(shards=size, rms=2.0 * (grows if size == 64 else 1.0))
        for family in ring_comparison.FAMILIES
        for seed in range(2)
        for tensor in ring.TENSORS
        for size in (1, *ring_comparison.SHARDS)
    ]


def test_figures_stand_beside_those_of_an_emulation_before():
    flash2, sums = rows("flash2", 1.0), rows("te_ring", 4.4)
    table, claims = ring_comparison.compared([*flash2, *sums, *rows("other", 1.0)])
    assert {c.recipe: c.holds for c in claims} == {"flash2": True, "te_ring": False}
    found = {(line["variant"], line["tensor"]): line for line in table}
    line = found["te_ring", "out"]
    assert (line["largest"], line["largest there"]) == ("4.40", "4.37")
    assert (line["mean, W=64"], line["mean there"]) == ("4.4", "2.5")
    assert "out 4.40 (there 4.37; mean, W=64: 4.4, there 2.5)" in claims[1].found
    assert found["flash2", "dk"]["largest there"] == "1.146"
    # Of one draw, not of means: one that is further off decides.
    worse = [r | {"rms": 2.1} if r["seed"] and r["shards"] == 4 else r for r in flash2]
    assert not ring_comparison.compared(worse)[1][0].holds
    # What was not measured in full is not compared.
    less = [row for row in flash2 if row["shards"] != 16]
    assert ring_comparison.compared(less) == ([], [])
    assert (
        ring.report(flash2, "striped")
        .tables.keys()
        .isdisjoint(ring.report(flash2).tables.keys() - ring.report(less).tables.keys())
    )
    assert any("before" in title for title in ring.report(flash2).tables)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--strategies", "ring"), "give some"),
        (("--shards", "2", "4"), "begins with 1"),
        (("--shards", "1", "5"), "needs a multiple of 10 positions"),
        (("--recipes", "jax_nn", "--shards", "1", "2"), "its delta_source; use"),
        (("--partials", "16-bit"), "--partials is for --recipes: give some"),
        (("--ulysses", "2"), "--ulysses is for --recipes: give some"),
        (("--recipes", "flash2", "--ulysses", "2"), "--strategies ring+ulysses: give"),
        (
            ("--recipes", "flash2", "--strategies", "ring+ulysses", "--shards")
            + ("1", "3"),
            "ulysses must divide the 3 devices",
        ),
        (
            ("--recipes", "exact_fp32", "--wire", "16-bit", "--shards", "1", "2"),
            "is for recipes of BF16 or FP16 inputs",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, says, tmp_path, capsys):
    given = [*arguments, "--preset", "toy", "--families", "normal"]
    assert main(["ring", *given, "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert says in lines[-1] and lines[-1].startswith("python -m analysis ring: ")


def test_what_cancels_does_so_over_all_keys_alone():
    """The parts of a sum are many times the sum."""
    i = parallel.draw(parallel.CANCELLING, 0, 256, 16)
    value = i.value.astype(np.float64)
    parts = value.reshape(1, 16, 16, 2, 16).mean(2)
    assert np.abs(parts).mean() > 5 > 0.5 > np.abs(parts.mean(1)).mean()
    assert i.query.dtype == i.dout.dtype and np.abs(i.key[..., 0].mean() - 8) < 0.2
