"""`python -m analysis context-parallel-error`: its verdicts, over CPU devices."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest

from analysis import sweep
from analysis.__main__ import main
from analysis.experiments import context_parallel_error as module
from attn_jax import context_parallel

COMMAND = ["context-parallel-error", "--preset", "toy", "--families", "normal"]


@pytest.fixture(autouse=True)
def certified(monkeypatch):
    """The canaries have tests of their own."""
    monkeypatch.setattr(sweep, "_certify", lambda: {"passed": ["all"]})


def _claims(folder, *arguments: str) -> dict[str, bool]:
    assert main([*COMMAND, *arguments, "--out", str(folder)]) == 0
    claims = json.loads((folder / "toy.json").read_text())["claims"]
    return {claim["recipe"]: claim["holds"] for claim in claims}


@pytest.mark.ci
def test_parts_in_fp32_are_within_the_gate_and_in_16_bits_are_not(
    tmp_path, monkeypatch
):
    only = "--strategies", "ring", "--devices", "2"
    name = "ring, zigzag, 2 devices"
    assert _claims(tmp_path / "wide", *only) == {name: True}
    narrow = functools.partial(context_parallel.attention, partials="16-bit")
    monkeypatch.setattr(context_parallel, "attention", narrow)
    assert _claims(tmp_path / "narrow", *only) == {name: False}


@pytest.mark.ci
def test_every_strategy_that_fits_is_compared_with_one_device(tmp_path, capsys):
    """Of two key heads `ulysses` has none for four devices, and `ring+ulysses` takes
    four."""
    claims = _claims(tmp_path, "--devices", "2", "4")
    everywhere = "ring", "all_gather", "all_gather+ring"
    assert claims.keys() == {
        *(f"{way}, zigzag, {n} devices" for way in everywhere for n in (2, 4)),
        "ulysses, zigzag, 2 devices",
        "ring+ulysses, zigzag, 4 devices",
    }
    said = capsys.readouterr().err
    assert "left out: strategy 'ulysses' deals heads to 4 devices" in said
    assert "left out: 'ring+ulysses' takes 4 devices or more, not 2" in said


def test_one_bit_of_a_second_run_fails_it(tmp_path, monkeypatch):
    get, calls = jax.device_get, itertools.count()

    def other(results):
        out, *others = get(results)
        out = np.array(out)
        out.view(np.uint16).flat[0] ^= next(calls) % 2
        return out, *others

    monkeypatch.setattr(module.jax, "device_get", other)
    claims = _claims(tmp_path, "--strategies", "ring", "--devices", "2")
    assert claims == {"ring, zigzag, 2 devices": False}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--devices", "9"], "numbers from 2 to 8"),
        (["--devices", "1"], "numbers from 2 to 8"),
        (["--devices", "4", "--strategies", "ulysses"], "4 devices"),
        (["--devices", "2", "--strategies", "ring+ulysses"], "4 devices or more"),
        (["--devices", "3", "--strategies", "ring"], "3"),
        (["--seeds", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    arguments, says, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(module, "_problem", None)
    assert main([*COMMAND, *arguments, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
