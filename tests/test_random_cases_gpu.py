"""Random cases of the kernels on a GPU; `python -m analysis random-cases` runs more."""

import json

import pytest

from analysis.__main__ import main

pytestmark = pytest.mark.gpu(capability="9.0")

# Cases that once failed, by what was wrong: (seed, number, longest).
REGRESSIONS = {
    # FP64 lost dQ where 1 - P of the only key, beside a sink, was 0.
    "a key that outweighs a sink": (30, 3346, 1500),
    "a key that outweighs a sink, dQ of 1e-15": (30, 9351, 1500),
    # The sink's exponent had P's scale in it and was rounded near 15.
    "a sink that outweighs the keys, wide": (30, 6345, 1500),
    "a sink that outweighs the keys, offset": (30, 6348, 1500),
    # What FP64 leaves of terms that cancel was held for an error.
    "keys that agree in a column": (31, 669, 1500),
}


@pytest.mark.parametrize("architecture", ["hopper", "ampere"])
def test_no_case_is_above_its_bound(architecture, tmp_path, capsys):
    options = ["--seed", "1", "--cases", "160", "--longest", "400", "--processes", "0"]
    options += ["--architecture", architecture]
    assert main(["random-cases", *options, "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["rows"] == 160 and result["refused"] == 0


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_failed_passes(name, tmp_path):
    seed, number, longest = REGRESSIONS[name]
    options = ["--seed", str(seed), "--only", str(number), "--longest", str(longest)]
    assert main(["random-cases", *options, "--out", str(tmp_path)]) == 0
