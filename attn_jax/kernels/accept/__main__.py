"""Checks, tunes and times the kernels on the GPU at hand, and reports.

Every head dim and feature that the card's architecture offers, forward and backward,
against FP64, with the same bits in every run; speed beside cuDNN's; and, in the time
that is left, tilings near those of the table. What does not fit into --minutes is named
as left out. OUT/acceptance.md and .json are what an issue about a card should have.

Exit codes: 0 accepted: all checks of correctness ran and passed; 4 something failed, or
a check did not fit; 2 unusable command; 130 Ctrl-C: what was tuned is kept.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attn_jax.command import Parser, interrupted
from attn_jax.kernels import card, checks
from attn_jax.kernels.accept import parts
from attn_jax.kernels.accept.report import Report, Result
from attn_jax.kernels.card import Card
from attn_jax.kernels.tune.candidates import KERNELS
from attn_jax.kernels.tune.search import Search, settings_of
from attn_jax.kernels.tune.winners import as_markdown
from attn_jax.kernels.worker import Worker, WorkerFailed
from attn_jax.store import Store, StoreError

# A check or a case that takes longer hangs.
_SECONDS_FOR_ONE = 180.0
# Of timing, for a case of speed and for a problem of a candidate.
_SECONDS = 0.3
# Candidates of each kernel and head dim that a short tune tries.
_CANDIDATES = 4


class Budget:
    """The time there is, and what a task of a kind takes, going by those before it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.start = clock()
        self.deadline = self.start + seconds

    @property
    def left(self) -> float:
        return self.deadline - self.clock()

    @property
    def taken(self) -> float:
        return self.clock() - self.start


def each(
    part: Any,
    tasks: Iterable[Any],
    do: Callable[[Any, float], Result],
    budget: Budget,
) -> list[Result]:
    """Does the tasks while the longest so far would still fit; the others are left out.

    `do(task, limit)` has `limit` seconds, and raises TimeoutError if it had fewer than
    it may need and was not done with them.
    """
    found: list[Result] = []
    longest = 0.0
    for task in tasks:
        if budget.left < longest or budget.left <= 0:
            found.append(Result(part, task.name, "left out", "out of time"))
            continue
        before = budget.taken
        try:
            found.append(do(task, min(_SECONDS_FOR_ONE, budget.left)))
        except TimeoutError:
            found.append(Result(part, task.name, "left out", "out of time"))
        longest = max(longest, budget.taken - before)
        last = found[-1]
        line = f"{last.part}: {last.name}: {last.status} {last.detail}".rstrip()
        print(line, file=sys.stderr, flush=True)
    return found


def called(worker: Worker, limit: float, function: Callable, *arguments: Any) -> Any:
    """`Worker.call`; TimeoutError if the budget, not the task, was too small."""
    try:
        return worker.call(function, *arguments, seconds=limit)
    except WorkerFailed as error:
        if limit < _SECONDS_FOR_ONE and "did not end" in str(error):
            raise TimeoutError from None
        raise


def correctness(worker: Worker, found: Card, budget: Budget) -> list[Result]:
    """Every check of the architecture's kernels."""

    def do(check: checks.Check, limit: float) -> Result:
        try:
            outcome = called(worker, limit, checks.run, check, found.architecture)
        except WorkerFailed as error:
            detail = str(error).splitlines()[0]
            return Result("correctness", check.name, "failed", detail)
        status = "failed" if outcome.failed else "passed"
        data = {"units": outcome.units, "same_bits": outcome.same_bits}
        detail = "; ".join(outcome.failed)
        return Result("correctness", check.name, status, detail, data)

    multiprocessors = found.described["multiprocessors"]
    tasks = parts.all_checks(found.architecture, multiprocessors)
    return each("correctness", tasks, do, budget)


def speed(worker: Worker, found: Card, budget: Budget) -> list[Result]:
    """Ours and cuDNN's times. That a peer cannot, or nothing can be timed on the
    machine, is no failure of ours."""

    def do(case: parts.SpeedCase, limit: float) -> Result:
        arguments = case, found.architecture, _SECONDS
        try:
            row = called(worker, limit, parts.timed, *arguments)
        except WorkerFailed as error:
            return Result("speed", case.name, "failed", str(error).splitlines()[0])
        detail = "; ".join(f"{name}: {why}" for name, why in row["refused"].items())
        status = "measured" if row["ms"] else "left out"
        if row["ms"].keys() == {"cudnn"}:
            status = "failed"
        return Result("speed", case.name, status, detail, row)

    return each("speed", parts.speed_cases(), do, budget)


def tune(
    worker: Worker, found: Card, budget: Budget, out: Path, *, fresh: bool
) -> tuple[list[Result], str]:
    """Candidates near the table's, in the time that is left: results, and the table."""
    path = out / "trials.jsonl"
    settings = settings_of(_SECONDS) | {"most": _CANDIDATES}
    with contextlib.closing(Store(path, settings, fresh=fresh)) as store:
        store.describe(found.described)
        search = Search(
            *(store, worker),
            seconds=_SECONDS,
            clock=budget.clock,
            deadline=budget.deadline - _SECONDS_FOR_ONE / 2,
            limit=_SECONDS_FOR_ONE / 2,
            most=_CANDIDATES,
        )
        wanted = parts.tuned_groups(
            found.architecture, found.described["multiprocessors"]
        )
        decisions, _ = search.run(wanted)
    results = []
    for d in decisions:
        words = [d.group.kernel, f"head dim {d.group.head_dim}", d.group.mask]
        name = ", ".join(filter(None, [*words, f"{d.length_class} keys"]))
        status = "left out" if d.verdict == "unfinished" else "measured"
        detail = "out of time" if status == "left out" else d.verdict
        data = {
            **{"present": str(d.present), "fastest": str(d.fastest)},
            **{"ratio": d.ratio, "noise": d.noise},
        }
        results.append(Result("tuning", name, status, detail, data))
    decided = [d for d in decisions if d.verdict != "unfinished"]
    return results, as_markdown(decided) if decided else ""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    found = Parser(
        prog="python -m attn_jax.kernels.accept",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--out", type=Path, default=Path("runs", "acceptance"), help="folder")
    add("--minutes", type=float, default=15.0, help="budget (default 15)")
    add("--fresh", action="store_true", help="tune anew what is in the folder")
    add(
        "--architecture",
        choices=tuple(KERNELS),
        help="whose kernels; default: the card's. Ampere's run on a Hopper GPU, too",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    command = parser()
    options = command.parse_args(arguments)
    if not 0 < options.minutes < float("inf"):
        command.error(f"--minutes must be above 0, got {options.minutes:g}")
    budget = Budget(60 * options.minutes)
    try:
        with Worker(card.ON_GPU) as worker:
            report = _accept(options, worker, budget)
    except (StoreError, card.NoCard) as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{command.prog}: cannot write {options.out}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        said = interrupted(options, "what was tuned is kept")
        print(f"{command.prog}: {said}", file=sys.stderr)
        return 130
    files = [str(path) for path in _paths(options.out)]
    for result in report.results:
        if result.status == "left out":
            print(f"left out: {result.part}: {result.name}", file=sys.stderr)
    print(report.verdict, file=sys.stderr)
    print(json.dumps({"accepted": report.accepted, "files": files}))
    return 0 if report.accepted else 4


def _accept(options: argparse.Namespace, worker: Worker, budget: Budget) -> Report:
    found = card.find(worker, options.architecture)
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(found.architecture, found.native, found.described, 0.0, ())

    def add(results: Sequence[Result], tuned: str = "") -> None:
        """What there is so far is written: a later part may be cut off."""
        nonlocal report
        report = dataclasses.replace(
            report,
            minutes=budget.taken / 60,
            results=(*report.results, *results),
            tuned=tuned,
        )
        markdown, data = _paths(options.out)
        markdown.write_text(report.as_markdown())
        data.write_text(json.dumps(report.as_json(), indent=2) + "\n")

    add(correctness(worker, found, budget))
    add(speed(worker, found, budget))
    add(*tune(worker, found, budget, options.out, fresh=options.fresh))
    return report


def _paths(out: Path) -> tuple[Path, Path]:
    return out / "acceptance.md", out / "acceptance.json"


if __name__ == "__main__":
    sys.exit(main())
