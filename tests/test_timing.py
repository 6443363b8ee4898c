"""Programs timed in turn: orders and rounds, what fails, kernels, clock and power."""

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler

from analysis.speed import in_jax, timing
from attn_jax.timing import device_time, orders


class Clock:
    """Time that passes only where something is timed."""

    def __init__(self):
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def program(self, name: str, seconds: float, fails_at: int | None = None):
        def time(runs: int) -> float:
            self.order.append(name)
            if self.order.count(name) == fails_at:
                raise RuntimeError("out of memory\nsecond line")
            self.now += runs * seconds
            return 1e3 * seconds

        return time


def test_programs_are_timed_in_turn_and_there_and_back():
    clock = Clock()
    programs = {name: clock.program(name, 1.0) for name in "abc"}
    found = timing.interleaved(programs, 1.0, clock=clock)
    assert "".join(clock.order) == "acbbcabaccabcbaabc"
    assert found == {name: [1000.0] * timing.LEAST_ROUNDS for name in "abc"}


@pytest.mark.parametrize("names", ["", "a", "ab", "abc", "abcd", "abcde", "abcdefgh"])
def test_each_program_is_timed_right_after_each_other_one_equally_often(names):
    rounds = orders(names)
    assert all(sorted(order) == list(names) for order in rounds)
    assert all(a == b[::-1] for a, b in zip(rounds[::2], rounds[1::2], strict=True))
    pairs = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert set(pairs) == set(itertools.permutations(names, 2))
    assert len(set(pairs.values())) <= 1


def test_rounds_end_with_the_budget_and_at_the_most():
    clock = Clock()
    # Binary fractions, so that the times add up exactly.
    programs = {"a": clock.program("a", 2.0**-4), "b": clock.program("b", 2.0**-4)}
    timing.interleaved(programs, 7 * 2 * timing.RUNS * 2.0**-4, clock=clock)
    assert clock.order.count("a") == clock.order.count("b") == 7
    clock = Clock()
    timing.interleaved({"a": clock.program("a", 2.0**-20)}, 1.0, clock=clock)
    assert clock.order.count("a") == timing.MOST_ROUNDS


def test_what_fails_is_refused_and_the_others_go_on():
    clock = Clock()

    def no_build():
        raise NotImplementedError("no such mask; use another")

    def arm(time):
        return lambda: timing.Arm(time, {"timer": "fake"}, {})

    builds = {
        "none": no_build,
        "late": arm(clock.program("late", 1.0, fails_at=2)),
        "good": arm(clock.program("good", 2.0)),
    }
    rows = {name: row for name, row, _ in timing.measure(builds, 1.0, clock=clock)}
    assert rows["none"]["refused"] == "no such mask; use another"
    assert rows["late"]["refused"] == "out of memory" and rows["late"]["ms"] is None
    assert rows["good"]["refused"] is None
    assert (
        rows["good"]["ms"] == 2000.0 and rows["good"]["rounds"] == timing.LEAST_ROUNDS
    )
    assert all(row.keys() == set(timing.TIMED) for row in rows.values())
    assert clock.order.count("late") == 2


def test_quartiles_and_reasons():
    assert timing.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {
        "ms": 3.0,
        "ms_25": 2.0,
        "ms_75": 4.0,
    }
    assert timing.reason(ValueError()) == "ValueError"
    assert timing.reason(ValueError("x" * 300 + "\ny")) == "x" * 200


@pytest.fixture
def cupti(monkeypatch):
    """Gives what the profiler says in place of a GPU; an exception is raised."""
    answers: list = []

    def fake(program, *, aggregate, iterations):
        def run(*arguments):
            assert not aggregate and iterations == timing.RUNS
            if isinstance(answers[0], Exception):
                raise answers[0]
            return program(*arguments), answers[0]

        return run

    monkeypatch.setattr(profiler, "measure", fake)
    monkeypatch.setattr(in_jax.jax, "default_backend", lambda: "gpu")
    return answers


def test_times_on_a_gpu_are_those_of_the_kernels(cupti):
    runs = [[("convert", 1.0), ("attention", ms)] for ms in (9.0, 4.0, 6.0)]
    cupti.append(runs)
    time, columns = in_jax._timer(np.negative, (1.0,))
    assert time(3) == 7.0
    assert columns == {"kernel": "attention", "kernels": 2, "timer": "CUPTI"}


def test_one_kernel_is_timed_among_others(cupti):
    cupti.append([[("convert", 1.0), ("attention", ms)] for ms in (9.0, 4.0, 6.0)])
    ms, kernels = device_time(np.negative, (1.0,), 3, "attention")
    assert (ms, kernels) == (6.0, [("attention", 9.0)])
    with pytest.raises(RuntimeError, match="saw no kernel"):
        device_time(np.negative, (1.0,), 3, "backward")
    ms, kernels = device_time(np.negative, (1.0,), 3, without="attention")
    assert (ms, kernels) == (1.0, [("convert", 1.0)])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(None, "it saw no kernel"), (RuntimeError("not consistent"), "not consistent")],
)
def test_without_cupti_the_row_says_how_it_was_timed(cupti, answer, reason):
    cupti.append(answer)
    time, columns = in_jax._timer(np.negative, (1.0,))
    assert columns == {"timer": f"wall clock (CUPTI: {reason})"}
    assert time(3) > 0


@pytest.mark.parametrize(
    ("says", "reading"),
    [
        ("1980, 650.5", {"sm_mhz": 1980.0, "watts": 650.5}),
        ("[N/A], 650.5", {"watts": 650.5}),
    ],
)
def test_clock_and_power_are_read_while_it_runs(says, reading, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nwhile echo '{says}'; do sleep 0.02; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with timing.card() as found:
        time.sleep(0.5)
        assert found == {}
    assert found == reading
