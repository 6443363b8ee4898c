"""python -m analysis ring: three classes of libraries, told apart at toy size."""

import json

import numpy as np
import pytest

from analysis import parallel, sweep
from analysis.__main__ import main
from analysis.experiments import ring


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

    return run


@pytest.mark.ci
def test_wide_parts_hold_the_gate_and_narrow_ones_do_not(measured, monkeypatch):
    every = ring.variants
    kept = "attn_jax", "ring_flash_attn"
    monkeypatch.setattr(
        ring, "variants", lambda options: {name: every(options)[name] for name in kept}
    )
    claims = measured("--families", "normal", "--shards", "1", "8")
    gate = {c["recipe"]: c["holds"] for c in claims if "gate" in c["source"]}
    assert gate == {"attn_jax": True, "ring_flash_attn": False}


def test_any_recipe_and_strategy_may_be_asked_for(measured):
    claims = measured(
        *("--recipes", "flash3", "--strategies", "all_gather", "ulysses"),
        *("--families", "normal", "--shards", "1", "2", "--layout", "contiguous"),
    )
    assert {c["recipe"] for c in claims} == {"flash3, all_gather", "flash3, ulysses"}
    assert all(c["holds"] for c in claims if "gate" in c["source"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--strategies", "ring"), "give some"),
        (("--shards", "2", "4"), "begins with 1"),
        (("--shards", "1", "5"), "needs a multiple of 10 positions"),
        (("--recipes", "attn_jax_hopper", "--shards", "1", "2"), "its dq_centre"),
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
