"""The tuner's logic with fakes for what needs a GPU; what does is in its own text."""

import dataclasses
import json
import os
import re
import time
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.kernels import card, checks, tuning
from attn_jax.kernels.checks import Check
from attn_jax.kernels.hopper_fused_work import Barriers, Memory
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.tilings import ForwardTiling, Tiling
from attn_jax.kernels.tune import __main__ as command
from attn_jax.kernels.tune import trial, winners
from attn_jax.kernels.tune.candidates import (
    KERNELS,
    candidates,
    groups,
    head_dims,
    present,
    reason_against,
)
from attn_jax.kernels.tune.search import Search, cell_of, settings_of
from attn_jax.kernels.tune.trial import Candidate
from attn_jax.kernels.tune.winners import Measured, new_table
from attn_jax.kernels.tuning import Group
from attn_jax.kernels.worker import Worker, WorkerFailed
from attn_jax.store import Store, StoreError
from tests.altered_kernels import fresh_programs
from tests.child_process import in_child_process
from tests.tune_fakes import H200, FakeWorker, measured

GROUP = Group("hopper", "backward_dq", 128, 128)
FUSED = Group("hopper", "backward_fused", 64, 64, is_causal=True)


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path / "trials.jsonl", {"a": 1}, fresh=False)
    yield found
    found.close()


# ---- candidates


@pytest.mark.parametrize("architecture", KERNELS)
def test_the_entries_are_among_the_candidates_and_tried_first(architecture):
    for name in KERNELS[architecture]:
        for group in groups(architecture, name, head_dims(architecture)):
            found = candidates(group)
            entries = present(group)
            assert set(found[: len(entries)]) == set(entries)
            assert len(set(found)) == len(found) > len(entries)
            for tiling in entries:
                assert not reason_against(group, tiling)


def test_every_entry_belongs_to_a_group_that_is_tuned():
    tuned = {
        group
        for architecture, kernels in KERNELS.items()
        for name in kernels
        for group in groups(architecture, name, head_dims(architecture))
    }
    assert {entry.group for entry in tuning.ENTRIES} <= tuned
    # A card with fewer multiprocessors runs the two kernels under that name.
    fewer = groups("hopper", "backward_fused", head_dims("hopper"), 114)
    assert list(fewer) == []


@pytest.mark.parametrize(
    ("kernel", "tiling", "reason"),
    [
        ("forward", ForwardTiling(64, 256, 2, 2), "256 registers .* has 240"),
        ("forward", ForwardTiling(64, 128, 2, 4), "shared memory"),
        ("forward", ForwardTiling(128, 64, 1, 2), "causal mask would cut"),
        ("backward_dq", Tiling(64, 64, 3, 2), "registers of 65536"),
        ("backward_dkv", Tiling(64, 64, 1, 2, split=2), "do not divide 1"),
    ],
)
def test_what_does_not_fit_is_not_even_compiled(kernel, tiling, reason):
    found = reason_against(Group("hopper", kernel, 128, 128), tiling)
    assert found is not None and re.search(reason, found), found


# Six buffers and five barriers; the fused kernel says its own.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("group", "buffers"),
    [
        pytest.param(GROUP, 11, marks=pytest.mark.thorough),
        (FUSED, len(Memory._fields + Barriers._fields)),
    ],
    ids=["dq", "fused"],
)
def test_the_estimate_is_what_the_compiler_takes_at_the_least(group, buffers):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    candidate = Candidate(group, present(group)[0])
    with Worker(card.WITHOUT_GPU) as worker:
        found = worker.call(trial.compile_only, candidate, seconds=120)
    need = candidate.of.need(candidate.tiling, group.head_dim, group.value_dim)
    assert found["refused"] is None and found["spilled_bytes"] < need.logits
    # Each is aligned to 1 KiB at the most.
    assert 0 <= found["shared_memory"] - need.shared_memory <= buffers * 1024
    assert need.registers <= need.registers_given <= 255


def test_what_takes_too_much_is_refused():
    candidate = Candidate(
        Group("ampere", "forward", 64, 64, False), Tiling(64, 64, 1, 2)
    )

    def against(spilled, memory):
        return candidate.too_large({"spilled_bytes": spilled, "shared_memory": memory})

    logits = 4 * 64 * 64 // 128
    # An A100 gives a CTA 163 KiB; on other machines the compiler allows for more.
    assert against(logits - 4, 163 * 1024) is None
    assert "spills 128 bytes" in (against(logits, 0) or "")
    assert "takes 166913 bytes of shared" in (against(0, 163 * 1024 + 1) or "")
    assert against(None, None) is None  # ptxas said nothing.


# ---- the search


def test_a_search_goes_on_where_it_was_ended(store):
    clock = map(float, range(10**6))  # A second for every look at it.
    attempt = lambda candidate, *_: measured(1.0)  # noqa: E731
    worker = FakeWorker()
    first = Search(
        *(store, worker), seconds=0.1, deadline=7.0, attempt=attempt,
        clock=lambda: next(clock),
    )  # fmt: skip
    decisions, complete = first.run([GROUP, Group("hopper", "forward", 64, 64, False)])
    assert not complete and len(worker.calls) == 7
    # What was not finished is named, of the group it was in and of the later ones.
    assert [d.verdict for d in decisions] == ["unfinished"] * 4
    again = FakeWorker()
    decisions, complete = Search(store, again, seconds=0.1, attempt=attempt).run(
        [GROUP]
    )
    assert complete and {d.verdict for d in decisions} == {"keeps"}
    tried = [arguments[0].tiling for arguments, _ in (*worker.calls, *again.calls)]
    allowed = [t for t in candidates(GROUP) if not reason_against(GROUP, t)]
    assert tried == allowed
    # Every candidate has its line, refused ones their reason.
    for tiling in set(candidates(GROUP)) - set(allowed):
        (row,) = store.rows([cell_of(Candidate(GROUP, tiling))])
        assert len(row["refused"].splitlines()) == 1


def test_a_candidate_that_fails_loses_only_itself(store):
    def attempt(candidate, *_):
        if candidate.tiling.columns == 32:
            raise WorkerFailed("attempt did not end in 300 s\ntraceback")
        return measured(1.0)

    search = Search(store, FakeWorker(), seconds=0.1, attempt=attempt, most=9)
    decisions, complete = search.run([GROUP])
    assert complete and all(d.verdict == "keeps" for d in decisions)
    hung = [tiling for tiling in candidates(GROUP) if tiling.columns == 32]
    (row,) = store.rows([cell_of(Candidate(GROUP, hung[0]))])
    assert row["refused"] == "attempt did not end in 300 s"


def _with_winner(store, attempt):
    worker = FakeWorker()
    run = Search(store, worker, seconds=0.1, attempt=attempt, most=6)
    decisions, _ = run.run([GROUP])
    return {d.length_class: d for d in decisions}, worker


def test_a_faster_tiling_is_confirmed_in_processes_of_its_own(store):
    now, fast = candidates(GROUP)[:2]

    def attempt(candidate, classes, seconds, check):
        fast_here = candidate.tiling == fast
        row = measured(1.0, 1.01)
        for problem in trial.problems(GROUP):
            if fast_here and problem.length_class(GROUP) == "many":
                row["times"][problem.name] = measured(1.05, 0.99)["times"][problem.name]
        return row

    found, worker = _with_winner(store, attempt)
    many = found["many"]
    assert (many.verdict, many.present, many.tiling) == ("wins", now, fast)
    assert many.ratio == pytest.approx(1.05) and many.noise == pytest.approx(1 / 0.99)
    assert found["few"].verdict == "keeps" and found["few"].tiling == now
    checked = [arguments[3] for arguments, _ in worker.calls]
    assert checked.count(False) == worker.ended == winners.CONFIRMATIONS
    # Again: nothing is left to be measured.
    _, worker = _with_winner(store, attempt)
    assert worker.calls == []
    # The class that kept its tiling has an entry of its own now.
    table = new_table(tuning.ENTRIES, [*found.values()])
    assert tuning.read(tuning.write(table)) == table
    new = {e.keys_seen: e.tiling for e in table if e.group == GROUP}
    assert new == {2048: now, None: fast}
    others = [e for e in table if e.group != GROUP]
    assert others == [e for e in tuning.ENTRIES if e.group != GROUP]


def test_luck_in_screening_is_no_win(store):
    tries: list = []

    def attempt(candidate, classes, seconds, check):
        tries.append(check)
        lucky = candidate.tiling.stages == 3 and check
        return measured(1.04 if lucky else 1.0, 1.005)

    found, _ = _with_winner(store, attempt)
    assert False in tries  # It was timed again.
    assert {d.verdict for d in found.values()} == {"keeps"}
    assert new_table(tuning.ENTRIES, [*found.values()]) == tuning.ENTRIES


def test_who_wins_by_less_than_noise_keeps_nothing():
    a, b = Tiling(64, 64, 2, 2), Tiling(64, 64, 2, 3)
    screened = [Measured(a, 1.0, 0.97), Measured(b, 1.02, 1.0)]
    assert winners.promising(screened, a) is None
    assert winners.promising([Measured(b, 1.04, 0.97)], a) == (b, 1.04, 0.97)
    assert winners.promising([Measured(a, 1.5, 1.0)], a) is None
    steady = [Measured(b, 1.03, 0.99)] * winners.CONFIRMATIONS
    assert winners.confirmed(steady)
    assert not winners.confirmed(steady[1:])  # One of them failed.
    assert not winners.confirmed([*steady[1:], Measured(b, 1.03, 1.035)])
    assert not winners.confirmed([*steady[1:], Measured(b, 1.005, 0.99)])


def test_a_trial_of_another_table_or_length_is_refused(tmp_path):
    path = tmp_path / "trials.jsonl"
    Store(path, settings_of(0.5), fresh=False).close()
    with pytest.raises(StoreError, match="other settings .seconds 0.5 .*--fresh") as no:
        Store(path, settings_of(1.0), fresh=False)
    assert len(str(no.value).splitlines()) == 1
    Store(path, settings_of(1.0), fresh=True).close()


# ---- the command


@pytest.fixture
def on_a_card(monkeypatch):
    """Runs the command as on a card that says so of itself."""

    def run(described: dict, *arguments: str) -> int:
        worker = FakeWorker(described)
        monkeypatch.setattr(command, "Worker", lambda *_: worker)
        monkeypatch.setattr(card.shutil, "which", lambda name: name)
        return command.main(arguments)

    return run


@pytest.mark.parametrize(
    ("change", "arguments", "complaint"),
    [
        ({"capability": "8.9", "device": "NVIDIA L4"}, [], "this is NVIDIA L4"),
        ({"platform": "cpu"}, [], "JAX finds none"),
        ({"capability": "8.0"}, ["--architecture", "hopper"], "need a Hopper GPU"),
        ({}, ["--head-dims", "80"], "no head dim 80; they have 32, 64"),
        ({"capability": "8.0"}, ["--head-dims", "64x128"], "no head dim 64x128"),
        ({}, ["--kernels", "backward_fused", "--head-dims", "96"], "head dims 64, 128"),
        (
            {"capability": "8.0", "multiprocessors": 108},
            ["--kernels", "backward_fused", "--head-dims", "96"],
            "Ampere's backward_fused is for head dims 64, 128\n",
        ),
        (
            {"multiprocessors": 114},
            ["--kernels", "backward_fused"],
            "with 132 multiprocessors",
        ),
        ({}, ["--seconds", "0"], "--seconds"),
        ({}, ["--minutes", "-1"], "--minutes"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    change, arguments, complaint, on_a_card, tmp_path, capsys
):
    out = ["--out", str(tmp_path / "out")]
    assert on_a_card(H200 | change, *out, *arguments) == 2
    said = capsys.readouterr()
    assert complaint in said.err and len(said.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_line_says_what_works(monkeypatch, capsys):
    monkeypatch.setattr(card.shutil, "which", lambda name: None)
    monkeypatch.setattr(card, "Path", lambda name: card.shutil)
    monkeypatch.setattr(card.shutil, "exists", lambda: False, raising=False)
    assert command.main([]) == 2
    said = capsys.readouterr().err
    assert "A100 or a Hopper GPU" in said and "--dry-run" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("architecture", [None, "ampere"])
def test_the_command_writes_the_table(
    architecture, on_a_card, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(
        command, "Search",
        lambda *a, **k: Search(*a, **k, attempt=lambda *_: measured(1.0), most=2),
    )  # fmt: skip
    arguments = ["--out", str(tmp_path), "--kernels", "backward_dq"]
    arguments += ["--head-dims", "64"]
    arguments += ["--architecture", architecture] if architecture else []
    assert on_a_card(H200, *arguments) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["decided"] == 2
    assert (tmp_path / "winners.md").read_text().count("backward_dq") == 2
    table = tmp_path / "tilings.json"
    # Times of one architecture's kernels on another's GPU are not for its table.
    assert table.exists() == (architecture is None)
    if table.exists():
        assert tuning.read(table.read_text()) == tuning.ENTRIES
    assert on_a_card(H200 | {"device": "NVIDIA H100"}, *arguments) == 2
    assert "NVIDIA H200, here it is NVIDIA H100" in capsys.readouterr().err


def _interrupted(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_ctrl_c_is_one_line_that_says_where_to_go_on(
    fresh, on_a_card, monkeypatch, tmp_path, capsys
):
    """Without --fresh, which would throw away what is done."""
    monkeypatch.setattr(
        command, "Search", lambda *a, **k: Search(*a, **k, attempt=_interrupted)
    )
    arguments = ["--kernels", "backward_dq", "--head-dims", "64", *fresh]
    assert on_a_card(H200, "--out", str(tmp_path), *arguments) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert f"what is done is kept in {tmp_path}, for the same command" in line
    assert line.endswith("without --fresh") == bool(fresh)


def test_an_interrupted_dry_run_has_nothing_to_keep(monkeypatch, capsys):
    monkeypatch.setattr(command, "reason_against", _interrupted)
    assert command.main(["--dry-run", "--kernels", "backward_dq"]) == 130
    assert capsys.readouterr().err.endswith("tune: interrupted\n")


def test_a_dry_run_without_a_compiler_lists(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    arguments = ["--dry-run", "--kernels", "forward", "--head-dims", "256"]
    assert command.main(arguments) == 0
    said = capsys.readouterr()
    assert "extra `compile`" in said.err
    entry = tuning.FORWARD["hopper"][256]
    assert f"forward at head dims 256, 256, full: {entry}: to be compiled" in said.out
    assert "refused: needs" in said.out


# ---- workers


def test_a_worker_that_hangs_dies_or_fails_is_replaced():
    before = dict(os.environ)
    with Worker({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}) as worker:
        with pytest.raises(WorkerFailed, match="did not end in 0 s"):
            worker.call(time.sleep, 60, seconds=0.1)
        name = "XLA_PYTHON_CLIENT_PREALLOCATE"
        assert worker.call(os.getenv, name, seconds=60) == "false"
        first = worker.call(os.getpid, seconds=60)
        assert worker.call(os.getpid, seconds=60) == first != os.getpid()
        with pytest.raises(WorkerFailed, match="raised TypeError: .*\n") as raised:
            worker.call(len, 5, seconds=60)
        assert "Traceback" in str(raised.value)
        # A GPU context may be of no more use after what was raised.
        assert worker.call(os.getpid, seconds=60) != first
        with pytest.raises(WorkerFailed, match="exit code 7"):
            worker.call(os._exit, 7, seconds=60)
    assert os.environ == before


# ---- checks


SMALL = Check(32, 32, "window", queries=100, keys=110)


@pytest.fixture(scope="module")
def correct() -> dict[str, np.ndarray]:
    """The exact results, rounded once."""
    exact = checks._exact(SMALL)
    found = {
        name: np.asarray(jnp.asarray(getattr(exact, checks.RESULTS[name]), "bfloat16"))
        for name in ("out", "dq", "dk", "dv")
    }
    return found | {"lse": exact.lse.astype(np.float32)}


def test_a_correct_kernel_passes(correct):
    outcome = checks.judged(SMALL, correct, True)
    assert outcome.failed == ()
    assert outcome.units == pytest.approx(dict.fromkeys(outcome.units, 1.0), abs=0.02)


def _one_row_off(x):
    x[0, 50] = x[0, 51]


def _in_fewer_bits(x):
    x[...] = x.astype("float8_e4m3fn").astype(x.dtype)


def _not_finite(x):
    x[0, 3, 0, 0] = np.inf


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        *[(name, _one_row_off, f"{name} is off") for name in ("out", "dq", "dk", "dv")],
        ("dq", _in_fewer_bits, "dq is off by .* units, 1.7 allowed"),
        ("dv", _not_finite, "dv is not finite"),
        ("lse", lambda x: np.add(x, 1e-3, out=x), "lse is off"),
    ],
)
def test_a_wrong_kernel_does_not(name, change, complaint, correct):
    wrong = {key: x.copy() for key, x in correct.items()}
    change(wrong[name])
    (failed,) = checks.judged(SMALL, wrong, True).failed
    assert re.search(complaint, failed), failed


def test_other_bits_in_another_run_fail(correct):
    assert checks.judged(SMALL, correct, False).failed == (
        "two runs differ in their bits",
    )


def test_a_value_where_nothing_is_seen_fails(correct):
    check = dataclasses.replace(SMALL, feature="lengths")
    exact = checks._exact(check)
    found = {"dq": exact.dquery.astype(np.float16)}
    assert checks.judged(check, found, True).failed == ()
    found["dq"][0, -1] = 1e-7
    assert (
        "dq is not 0 where nothing is seen" in checks.judged(check, found, True).failed
    )


def _interpreted(tiling: ForwardTiling) -> tuple[str, ...]:
    """What a causal check of the forward kernel holds against a tiling."""
    check = Check(64, 64, "causal", queries=100, keys=128)
    table = tuning.configuration("hopper", 64, 64, 128, is_causal=True, listed=False)
    with patch.multiple(checks, N=1, K=1, RUNS=2), fresh_programs(), interpreted():
        outcome = checks.run(
            *(check, "hopper", ("out", "lse")),
            tilings=table._replace(forward=tiling),
        )
    for made in (checks._inputs, checks._exact):
        made.cache_clear()  # of as many heads
    assert outcome.same_bits
    return outcome.failed


@pytest.mark.ci
def test_a_kernel_that_a_tiling_makes_wrong_is_found():
    limit = {"seconds": 120}
    right = ForwardTiling(rows=64, columns=64, warpgroups=1, stages=2)
    assert in_child_process(_interpreted, right, **limit) == ()
    # A causal mask cuts two blocks of a warpgroup here, and the kernel hides one.
    wrong = dataclasses.replace(right, rows=128)
    found = in_child_process(_interpreted, wrong, **limit)
    assert any(line.startswith("out is") for line in found), found
