"""`python -m analysis context-parallel-speed`: what its columns say, on CPU devices."""

import csv
import json

import pytest

from analysis import device_trace
from analysis.__main__ import main
from analysis.experiments import context_parallel_speed as module
from analysis.experiments.context_parallel_speed import EACH, ONE, Cell, Heads, compared
from attn_jax.timing import Event

COMMAND = [
    *("context-parallel-speed", "--tokens", "32", "--heads", "4", "--kv-heads", "2"),
    *("--head-dim", "8", "--seconds", "0.01"),
]


def _rows(folder):
    (path,) = (path for path in folder.glob("*.csv") if "kernels" not in path.name)
    return list(csv.DictReader(path.open()))


@pytest.mark.ci
def test_it_times_each_strategy_once(tmp_path, capsys, monkeypatch):
    command = [*COMMAND, "--devices", "2", "--layouts", "zigzag", "--passes", "both"]
    command += ["--strategies", "ring", "ulysses", "--out", str(tmp_path)]
    assert main(command) == 0
    rows = _rows(tmp_path)
    assert [row["strategy"] for row in rows] == [ONE, EACH, "ring", "ulysses"]
    for row in rows:
        assert float(row["ms"]) > 0 and not row["refused"]
        # Of query, key, value, dO, out and three gradients of 32 tokens on a device.
        least = 32 * 8 * (4 * 4 + 2 * 4) * 2 / 2**20
        whole = row["strategy"] in (ONE, EACH)
        assert float(row["megabytes"]) >= least * (1 + whole)
    one, each, ring, _ = rows
    for name, alone in (("share", one), ("of_each", each)):
        share = float(alone["ms"]) / (2 * float(ring["ms"]))
        assert float(ring[name]) == pytest.approx(share, rel=1e-3)
        assert float(alone[name]) == 1
    capsys.readouterr()
    # What is there is not measured again.
    monkeypatch.setattr(module, "_compiled", None)
    assert main(command) == 0
    assert _rows(tmp_path) == rows
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 4


def test_a_strategy_that_cannot_be_says_why(tmp_path):
    command = [*COMMAND, "--devices", "4", "--passes", "forward", "--layouts", "zigzag"]
    command += ["--strategies", "ring", "ulysses", "--out", str(tmp_path)]
    assert main(command) == 0
    refused = {row["strategy"]: row["refused"] for row in _rows(tmp_path)}
    assert "'ulysses'" in refused.pop("ulysses") and not any(refused.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--devices", "9"], "numbers from 2 to 8"),
        (["--devices", "1"], "numbers from 2 to 8"),
        (["--heads", "3"], "--heads 3 must be a multiple of --kv-heads 2"),
        (["--tokens", "0"], "must be above 0"),
        (["--seconds", "0"], "--seconds must be above 0, got 0"),
        (["--seconds", "nan"], "--seconds must be above 0, got nan"),
        (["--seconds", "inf"], "--seconds must be above 0, got inf"),
    ],
)
def test_bad_numbers_are_one_line(arguments, says, tmp_path, capsys):
    assert main([*COMMAND, *arguments, "--out", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_shares_and_rates():
    names = "ms", "megabytes", "tflops", "share", "of_each", "over_one"
    row = dict.fromkeys(names)
    rows = [
        {**row, "strategy": ONE, "ms": 8.0, "megabytes": 100.0},
        {**row, "strategy": EACH, "ms": 9.0, "megabytes": 100.0},
        {**row, "strategy": "ring", "ms": 2.5, "megabytes": 50.0},
        {**row, "strategy": "ulysses"},
    ]
    cell = Cell(100, 4, ONE, "", "both")
    one, each, ring, none = compared(rows, cell, Heads(8, 2, 64))
    assert ring["share"] == 8 / (4 * 2.5) and ring["over_one"] == 0.5
    # Of what the cards do by themselves when all are at work.
    assert ring["of_each"] == 9 / (4 * 2.5) and one["of_each"] is None
    assert each["share"] == 8 / 9 and each["of_each"] == 1
    # Nothing is timed where all is compiled for other devices.
    (_, apart, _) = compared([rows[0], *rows[2:]], cell, Heads(8, 2, 64))
    assert apart["share"] == ring["share"] and apart["of_each"] is None
    # Seven products of 400 * 401 / 2 pairs, two operations each.
    flops = 7 * 2 * (400 * 401 / 2) * 8 * 64
    assert one["tflops"] == pytest.approx(flops / 8e-3 / 1e12)
    assert ring["tflops"] == pytest.approx(flops / 4 / 2.5e-3 / 1e12)
    assert each["tflops"] == pytest.approx(flops / 9e-3 / 1e12)
    assert none["share"] is None and none["tflops"] is None


EVENTS = [
    Event("ncclDevKernel_SendRecv", 0.0, 4.0),
    Event("attention_forward_12", 1.0, 3.0),
    Event("loop_add_fusion.3", 2.0, 3.5),
    Event("ncclDevKernel_AllReduce", 8.0, 9.0),
    Event("attention_forward_7", 9.0, 10.0),
]


def test_messages_are_exposed_where_nothing_else_runs():
    assert device_trace.summary(EVENTS, 2) == {
        **{"attention": 3.0 / 2, "rest": 1.5 / 2, "communication": 5.0 / 2},
        **{"exposed": (5.0 - 2.5) / 2, "idle": 4.0 / 2},
    }
    assert device_trace.under_way(EVENTS) == [(0.0, 4.0), (8.0, 10.0)]
    assert not any(device_trace.summary([], 2).values())


def test_kernels_are_named_once(tmp_path, monkeypatch):
    found = device_trace.kernels(EVENTS, 2)
    assert [row["kernel"] for row in found][:2] == [
        *("ncclDevKernel_SendRecv", "attention_forward")
    ]
    assert found[1] == {"kernel": "attention_forward", "count": 1.0, "ms": 1.5}
    # The table of a measurement has each device's.
    seen = module._seen([EVENTS, [], EVENTS[:1]], kernels=True)
    monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(module, "device_events", lambda run: [EVENTS, EVENTS[:1]])
    command = [*COMMAND, "--devices", "2", "--layouts", "zigzag", "--kernels"]
    command += ["--passes", "forward", "--strategies", "ring", "--out", str(tmp_path)]
    assert main(command) == 0
    (path,) = tmp_path.glob("*-kernels.csv")
    rows = list(csv.DictReader(path.open()))
    # One device, each by itself, and a ring.
    assert len(rows) == 3 * len(seen["kernels"])
    assert {row["device"] for row in rows} == {"0", "1"}
    assert rows[-1]["strategy"] == "ring" and float(rows[-1]["ms"]) == 2.0
