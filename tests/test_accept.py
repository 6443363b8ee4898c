"""The acceptance of a card: what is done, what is left out, what the report says."""

import json
import re

import pytest

from attn_jax.audit.mask_cases import mask_cases
from attn_jax.kernels import card, checks, tuning
from attn_jax.kernels.accept import __main__ as command
from attn_jax.kernels.accept import parts
from attn_jax.kernels.accept.__main__ import Budget, called, each
from attn_jax.kernels.accept.report import Report, Result
from attn_jax.kernels.checks import Check, Outcome
from attn_jax.kernels.tune import trial
from attn_jax.kernels.worker import Worker, WorkerFailed

A100 = {
    **{"device": "NVIDIA A100-SXM4-80GB", "platform": "gpu", "capability": "8.0"},
    **{"multiprocessors": 108, "versions": {"jax": "0.11.2"}, "driver": "580"},
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Card(Worker):
    """A card on which every task takes `seconds`; `wrong` checks fail, `dead` ones take
    the process down."""

    def __init__(
        self, clock, seconds=1.0, wrong="", dead="", untimed=(), described=A100
    ):
        super().__init__()
        self._untimed = untimed
        self._clock, self._taken = clock, seconds
        self._wrong, self._dead, self._described = wrong, dead, described

    def call(self, function, *arguments, seconds):
        if function is card.describe:
            return self._described
        self._clock.now += min(self._taken, seconds)
        if self._taken > seconds:
            raise WorkerFailed(f"{function.__name__} did not end in {seconds:.0f} s")
        if function is trial.attempt:
            times = {"ms": 1.0, "present_ms": 1.0, "ratio": 1.0, "again": 1.0}
            problems = trial.problems(arguments[0].group)
            return {"refused": None, "times": {p.name: times for p in problems}}
        if function is parts.timed:
            ms = {"pallas": 1.0, "cudnn": 1.5}
            ms = {name: x for name, x in ms.items() if name not in self._untimed}
            tflops = {name: 300 / x for name, x in ms.items()}
            refused = dict.fromkeys(self._untimed, "no such library")
            return {"refused": refused, "ms": ms, "tflops": tflops}
        name = arguments[0].name
        if self._dead and self._dead in name:
            raise WorkerFailed("run took its process down, exit code -6\ntrace")
        wrong = self._wrong and self._wrong in name
        failed = ("dq is off by 9 units, 1.7 allowed",) if wrong else ()
        return Outcome(dict.fromkeys(("out", "dq", "dk", "dv"), 1.25), True, failed)


@pytest.fixture
def accept(monkeypatch, tmp_path):
    """Runs the command on a card; its exit code, the data and the Markdown."""

    def run(*arguments: str, **of_card):
        clock = Clock()
        worker = Card(clock, **of_card)
        monkeypatch.setattr(command, "Worker", lambda *_: worker)
        monkeypatch.setattr(command, "Budget", lambda s: Budget(s, clock))
        monkeypatch.setattr(card.shutil, "which", lambda name: name)
        code = command.main(["--out", str(tmp_path), "--fresh", *arguments])
        files = [tmp_path / f"acceptance.{suffix}" for suffix in ("json", "md")]
        if not files[0].exists():
            return code, {}, ""
        return code, json.loads(files[0].read_text()), files[1].read_text()

    return run


def _results(data: dict, part: str, status: str) -> list[str]:
    return [
        result["name"]
        for result in data["results"]
        if (result["part"], result["status"]) == (part, status)
    ]


def test_a_good_card_is_accepted_and_all_is_reported(accept, capsys):
    code, data, text = accept()
    assert code == 0 and data["accepted"] and data["architecture"] == "ampere"
    wanted = [check.name for check in parts.all_checks("ampere", 108)]
    assert _results(data, "correctness", "passed") == wanted
    assert len(_results(data, "speed", "measured")) == len(parts.speed_cases())
    assert "# NVIDIA A100-SXM4-80GB: accepted\n" in text
    for name in wanted:
        assert f"| {name} | 1.25 | 1.25 | 1.25 | 1.25 | passed |" in text
    assert "| 300 | 200 | 1.50 |" in text
    assert "| ampere | backward_dkv | 64, 64 |" in text
    entry = tuning.BACKWARD_DKV["ampere"][64]
    (row,) = (
        result["data"]
        for result in data["results"]
        if result["name"] == "backward_dkv, head dim 64, many keys"
    )
    assert row["present"] == str(entry) and row["ratio"] == row["noise"] == 1.0
    said = capsys.readouterr()
    assert json.loads(said.out)["accepted"] is True


@pytest.mark.parametrize(
    ("of_card", "reason"),
    [
        ({"wrong": "head dim 128, causal, float16"}, "dq is off by 9 units"),
        ({"dead": "head dim 128, causal, float16"}, "exit code -6"),
    ],
)
def test_one_failure_is_none_of_the_others(accept, of_card, reason):
    code, data, text = accept(**of_card)
    assert code == 4 and not data["accepted"]
    (failed,) = _results(data, "correctness", "failed")
    assert failed == "head dim 128, causal, float16"
    assert re.search(f"failed: .*{reason}", text) and "not accepted: 1 failed" in text
    assert len(_results(data, "speed", "measured")) == len(parts.speed_cases())


def test_what_does_not_fit_is_named(accept, capsys):
    # Some checks fit into the time, the others and what comes after do not.
    code, data, text = accept("--minutes", "0.1", seconds=2.0)
    passed = _results(data, "correctness", "passed")
    left_out = _results(data, "correctness", "left out")
    wanted = [check.name for check in parts.all_checks("ampere", 108)]
    assert passed and left_out and [*passed, *left_out] == wanted
    # Nobody knows whether those are right.
    assert code == 4 and "not accepted" in data["verdict"]
    speed = [case.name for case in parts.speed_cases()]
    assert _results(data, "speed", "left out") == speed
    assert len(_results(data, "tuning", "left out")) == 2 * len(
        parts.tuned_groups("ampere", 108)
    )
    said = capsys.readouterr().err
    for name in (*left_out, *speed):
        assert "left out: " in said and name in said and name in text


def test_times_are_no_condition(accept):
    checks_alone = len(list(parts.all_checks("ampere", 108)))
    code, data, _ = accept("--minutes", str((checks_alone + 2.5) / 60))
    assert code == 0 and data["accepted"]
    assert _results(data, "speed", "left out") and "left out" in data["verdict"]


@pytest.mark.parametrize(
    ("untimed", "code", "status"),
    [
        (("cudnn",), 0, "measured"),
        (("pallas",), 4, "failed"),
        # As without CUPTI.
        (("pallas", "cudnn"), 0, "left out"),
    ],
)
def test_what_a_peer_cannot_is_no_failure_of_ours(accept, untimed, code, status):
    found, data, text = accept(untimed=untimed)
    assert found == code
    assert len(_results(data, "speed", status)) == len(parts.speed_cases())
    assert f"{status}: {untimed[0]}: no such library" in text


def test_the_budget_is_kept(accept):
    minutes = 2.0
    for seconds in (1.0, 7.0, 50.0, 100.0, 1000.0):
        _, data, _ = accept("--minutes", str(minutes), seconds=seconds)
        assert data["minutes"] <= minutes


def test_a_task_that_the_budget_cuts_off_is_left_out_and_one_that_hangs_fails():
    clock = Clock()
    worker = Card(clock, seconds=1000.0)
    with pytest.raises(TimeoutError):
        called(worker, 5.0, parts.timed)
    with pytest.raises(WorkerFailed, match="did not end"):
        called(worker, command._SECONDS_FOR_ONE, parts.timed)

    def never(task, limit):
        raise TimeoutError

    (result,) = each("speed", parts.speed_cases()[:1], never, Budget(9.0, clock))
    assert (result.status, result.detail) == ("left out", "out of time")


def test_every_head_dim_and_feature_is_checked():
    found = list(parts.all_checks("hopper", 132))
    assert len(set(found)) == len(found)
    for head_dim in tuning.HEAD_DIMS["hopper"]:
        own = {c.feature for c in found if c.head_dim == c.value_dim == head_dim}
        assert own >= {"full", "causal", "window", "bias-for-all-heads"}
    features = mask_cases(checks.T, checks.S, checks.N)
    for head_dim in (64, 128):
        own = [c for c in found if c.head_dim == head_dim]
        assert {c.feature for c in own} == {"full", "causal", *features}
        assert {c.backward for c in own} == {None, "two_kernels", "fused"}
        assert {c.out_dtype for c in own} == {None, "float32"}
    assert {c.case.dtype for c in found} == {"bfloat16", "float16"}
    assert any(c.head_dim > c.value_dim for c in found)
    assert any(c.head_dim < c.value_dim for c in found)
    # On a card with fewer multiprocessors another kernel would run under that name.
    fewer = set(parts.all_checks("hopper", 114))
    assert {c.backward for c in set(found) - fewer} == {"fused"}
    # Ampere has no window in one pass and no double rings, and no entry for a pair of
    # head dims.
    ampere = set(parts.all_checks("ampere", 108))
    assert {c.backward for c in ampere} == {None, "two_kernels", "fused"}
    of_both = {c for c in found if c.backward is None or c.feature != "window"}
    of_both -= {c for c in found if c.keys != checks.S}
    assert ampere < of_both and any(c.head_dim != c.value_dim for c in ampere)
    left_out = {(c.head_dim, c.value_dim) for c in of_both - ampere}
    assert left_out == {(192, 128)}


def test_a_short_tune_goes_through_all_kernels_of_the_card(accept):
    found = parts.tuned_groups("hopper", 132)
    assert {group.kernel for group in found} == set(tuning.KERNEL_NAMES)
    fewer = set(parts.tuned_groups("hopper", 114))
    assert {group.kernel for group in set(found) - fewer} == {"backward_fused"}
    described = A100 | {"capability": "9.0", "multiprocessors": 132}
    code, data, _ = accept("--minutes", "60", described=described)
    names = _results(data, "tuning", "measured")
    assert code == 0 and len(set(names)) == len(names) == 2 * len(found)
    assert "backward_fused, head dim 64, causal, many keys" in names


def test_what_is_called_the_fused_kernel_is_it():
    from attn_jax.kernels.attention import backward_of

    for check in parts.all_checks("hopper", 132):
        if check.backward == "fused":
            query = 1, check.queries, checks.N, check.head_dim
            value = 1, check.keys, checks.K, check.value_dim
            mask = check.case.mask
            found = backward_of(query, value, "hopper", mask, wanted="fused")
            assert found == "fused"


def test_another_card_is_refused_in_one_line(accept, capsys):
    described = A100 | {"capability": "12.0", "device": "NVIDIA B200"}
    code, data, _ = accept(described=described)
    said = capsys.readouterr().err
    assert code == 2 and not data
    assert "NVIDIA B200" in said and len(said.splitlines()) == 1


def test_ctrl_c_is_said_and_what_was_tuned_is_kept(
    accept, capsys, monkeypatch, tmp_path
):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Search, "run", interrupted)
    code, data, _ = accept()
    assert code == 130 and data["results"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"interrupted; what was tuned is kept in {tmp_path}, for the same" in last


def test_a_report_with_nothing_in_it_accepts_nothing():
    report = Report("ampere", True, A100, 0.0, ())
    assert not report.accepted
    passed = Result("correctness", "x", "passed")
    assert Report("ampere", True, A100, 0.0, (passed,)).accepted
    assert not Report(
        "ampere", True, A100, 0.0, (Result("speed", "x", "measured"),)
    ).accepted


def test_a_case_of_speed_counts_as_the_field_does():
    case = parts.SpeedCase(128, 4096, True, "training")
    assert case.shape == (4, 4096, 16, 128)
    assert case.flops == 14 * 4 * 16 * 128 * 4096**2 / 2
    # The name is what tells results apart.
    names = [case.name for case in parts.speed_cases()]
    assert len(set(names)) == len(names)
    assert isinstance(next(parts.all_checks("ampere", None)), Check)
