"""Random cases of attention against FP64: none above its bound, none NaN, equal bits.

What a case is, and that it depends on seed and number alone, says `analysis.cases`;
how it is judged, `analysis.case_check`. All cases run to the end; what fails is a row,
and the command ends with 1 and names the first of them. `--only NUMBER` runs one case
again and prints all that defines it. What an earlier call measured is kept in
OUT/*.jsonl, and the same command goes on from there.

Programs are dealt to processes, each of which traces, compiles, runs and judges by
itself: tracing a kernel and bounding its error are Python and NumPy, which threads
would do one after the other. On a GPU all processes share it, and memory is taken as
needed, not beforehand.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from analysis import ExperimentError, cases
from analysis.agreement import certified
from analysis.case_check import ROUNDED, TENSORS, check, recipe_of
from analysis.cases import BATCH, LONGEST, PROGRAMS, Program
from analysis.record import Row, check_writable, device_name, environment, show, write
from analysis.store import Store
from attn_jax.api import Implementation
from attn_jax.recipe import Architecture
from train.config import UsageError

SUMMARY = "thousands of random cases against FP64 and their bounds, run twice"
# A process takes so much of a program at once, in N T S of all its cases.
_PART = 16_000_000
_MOST_PROCESSES = 16
# What of a recipe is the kernels' tiling.
_BLOCKS = ("block_kv", "kv_order", "backward_block_q", "backward_block_kv")
# Each process has one thread for NumPy's products, and takes GPU memory as it needs it.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


@dataclasses.dataclass(frozen=True)
class _Task:
    """Some runs of one program, given by their cases' numbers."""

    program: Program
    numbers: tuple[int, ...]

    @property
    def cell(self) -> dict[str, Any]:
        return {"program": self.program.number, "first": self.numbers[0]}

    @property
    def cost(self) -> int:
        return self.program.pairs * len(self.numbers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--cases", type=int, default=10_000, help="how many (default 10000)")
    add("--seed", type=int, default=0, help="of the generator (default 0)")
    add(
        "--longest",
        type=int,
        default=LONGEST,
        help=f"largest number of queries or keys (default {LONGEST})",
    )
    add(
        "--implementation",
        choices=("pallas", "emulated"),
        default="pallas",
        help="what is tried: pallas on a GPU, emulated anywhere (default pallas)",
    )
    add(
        "--architecture",
        choices=get_args(Architecture),
        help="whose kernels; default: the GPU's. Ampere's run on a Hopper GPU, too",
    )
    programs = f"only the cases of these of the {PROGRAMS} programs, counted from 0"
    add("--programs", type=int, nargs="+", help=programs)
    add("--only", type=int, metavar="NUMBER", help="run one case again and print it")
    help = "that share the cases; 0: none but this (default: 0 on a CPU, else one for "
    help += f"each core, {_MOST_PROCESSES} at most)"
    add("--processes", type=int, help=help)
    add("--fresh", action="store_true", help="measure anew what is there already")
    out = Path("results", "random_cases")
    add("--out", type=Path, default=out, help=f"folder (default {out})")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures, writes table and environment, prints the largest figures by feature.

    Raises:
      UsageError: an option has no usable value, the implementation runs none of the
        programs here, or the files are another run's.
      ExperimentError: a canary or a case failed, or a program ended early. What was
        measured is written all the same.
    """
    if options.cases < 1 or options.longest < 1 or options.seed < 0:
        raise UsageError("--cases and --longest must be at least 1, --seed at least 0")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    platform = jax.default_backend()
    if options.implementation == "pallas" and platform != "gpu":
        raise UsageError(
            f"--implementation pallas needs a GPU, and JAX finds a {platform}; "
            "--implementation emulated runs anywhere"
        )
    if options.only is not None:
        return _again(options)
    tasks = list(_tasks(options))
    if not tasks:
        raise UsageError("--programs and --cases leave no case to run")
    described = environment(command) | {"canaries": certified()}
    device = device_name()
    stem = options.out / "-".join(
        filter(None, [device, options.implementation, options.architecture])
    )
    check_writable(stem)
    settings = {
        name: getattr(options, name)
        for name in ("cases", "seed", "longest", "implementation")
    }
    if options.architecture is not None:
        settings["architecture"] = options.architecture
    began = time.monotonic()
    path = stem.with_suffix(".jsonl")
    with contextlib.closing(Store(path, settings, fresh=options.fresh)) as store:
        missing = [task for task in tasks if task.cell not in store]
        if missing:
            store.describe(described)
        refused, broken = _measure(missing, store, options)
        done = [task.cell for task in tasks if task.cell in store]
        rows = sorted(store.rows(done), key=lambda row: row["case"])
        measured = list(store.environments)
    if not rows:
        reason = next(iter((refused | broken).values()))
        raise UsageError(f"{options.implementation} ran nothing: {reason}")
    failed = [row for row in rows if row["failed"]]
    programs = {task.program.number: task.program for task in tasks}
    described = {
        "command": command,
        "settings": settings,
        "seconds": round(time.monotonic() - began, 1),
        "measured": measured,
        "rows": len(rows),
        "failed": {row["case"]: row["failed"] for row in failed},
        "refused": refused,
        "broken": broken,
        "programs": [dataclasses.asdict(program) for program in programs.values()],
    }
    files = [*write(rows, described, stem), path]
    by_feature = summary(rows, programs)
    show(by_feature, "Largest error in units of its bound")
    show(units(rows, programs), "RMS error in units of the final rounding, median/max")
    if refused:
        print(f"refused: {refused}", file=sys.stderr)
    if failed:
        raise ExperimentError(_named(failed, len(rows)))
    if broken:
        number, reason = next(iter(broken.items()))
        raise ExperimentError(
            f"{len(broken)} programs ended early, the first {number}: {reason}; the "
            "same command tries them again"
        )
    return {
        "rows": len(rows),
        "failed": 0,
        "refused": len(refused),
        "seconds": described["seconds"],
        "largest": {name: by_feature[0][name] for name in TENSORS},
        "files": [str(file) for file in files],
    }


def _named(failed: Sequence[Row], count: int) -> str:
    first = "; ".join(f"{row['case']} ({row['failed']})" for row in failed[:3])
    numbers = ", ".join(str(row["case"]) for row in failed[3:10])
    more = f"; {numbers}" if numbers else ""
    more += ", ..." if len(failed) > 10 else ""
    return f"{len(failed)} of {count} cases failed: {first}{more}"


def _tasks(options: argparse.Namespace) -> Iterator[_Task]:
    """The cases by program, the costliest first; programs in parts where they are."""
    of_program: dict[int, list[int]] = {}
    wanted = range(PROGRAMS) if options.programs is None else options.programs
    for number in range(options.cases):
        program = cases.program_number(number)
        if program in wanted:
            of_program.setdefault(program, []).append(number)
    tasks = []
    for key, numbers in of_program.items():
        program = cases.program(options.seed, key, options.longest)
        # Whole runs: entries of one batch stay together.
        runs = max(1, math.floor(_PART / (program.pairs * BATCH)))
        for i in range(0, len(numbers), runs * BATCH):
            tasks.append(_Task(program, tuple(numbers[i : i + runs * BATCH])))
    yield from sorted(tasks, key=lambda task: -task.cost)


def _whole_runs(numbers: Sequence[int]) -> list[int]:
    """The numbers with those that their last batch lacks; all are consecutive in it."""
    last = numbers[-1] // BATCH * BATCH
    return [*numbers, *range(numbers[-1] + 1, last + BATCH)]


def _checked(
    seed: int,
    task: _Task,
    implementation: Implementation,
    architecture: Architecture | None,
) -> list[Row]:
    with _made_for(architecture):
        rows = check(seed, task.program, _whole_runs(task.numbers), implementation)
    return rows[: len(task.numbers)]


def _made_for(
    architecture: Architecture | None,
) -> contextlib.AbstractContextManager[None]:
    if architecture is None:
        return contextlib.nullcontext()
    # Imported on use: the kernels refuse a JAX that they do not know.
    from attn_jax.kernels.architecture import made_for

    return made_for(architecture)


def _measure(
    tasks: Sequence[_Task], store: Store, options: argparse.Namespace
) -> tuple[dict[int, str], dict[int, str]]:
    """Runs the tasks and keeps their rows; why programs were refused, or broke off."""
    refused: dict[int, str] = {}
    broken: dict[int, str] = {}
    processes = options.processes
    if processes is None:
        on_gpu = jax.default_backend() == "gpu"
        processes = min(_MOST_PROCESSES, os.cpu_count() or 1) if on_gpu else 0
    for done, (task, result) in enumerate(_results(tasks, options, processes)):
        number = task.program.number
        if isinstance(result, list):
            store.add(task.cell, result)
            failed = sum(bool(row["failed"]) for row in result)
            said = f"{len(result)} cases, {failed} failed"
        else:
            said = str(result).strip().partition("\n")[0][:200] or type(result).__name__
            # Said by the implementation itself; whatever else is raised is a failure.
            is_refused = isinstance(result, NotImplementedError)
            (refused if is_refused else broken)[number] = said
        print(f"{done + 1}/{len(tasks)} program {number}: {said}", file=sys.stderr)
    return refused, broken


# What a kernel or a compiler may raise; the others are ours and end the command.
_BREAKS = (ImportError, NotImplementedError, RuntimeError, ValueError)


def _results(
    tasks: Sequence[_Task], options: argparse.Namespace, processes: int
) -> Iterator[tuple[_Task, list[Row] | Exception]]:
    work = options.implementation, options.architecture
    if processes < 1 or len(tasks) < 2:
        for task in tasks:
            try:
                yield task, _checked(options.seed, task, *work)
            except _BREAKS as error:
                yield task, error
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        min(processes, len(tasks)), multiprocessing.get_context("spawn")
    )
    with pool:
        futures = {
            pool.submit(_checked, options.seed, task, *work): task for task in tasks
        }
        for future in concurrent.futures.as_completed(futures):
            try:
                yield futures[future], future.result()
            except _BREAKS as error:
                yield futures[future], error


def _again(options: argparse.Namespace) -> dict[str, Any]:
    """One case, within its batch; everything that defines it goes to stderr.

    Raises:
      UsageError: there is no such case, or the implementation does not run it.
      ExperimentError: it failed.
    """
    number = options.only
    if number < 0:
        raise UsageError(f"--only takes a case's number, got {number}")
    key = cases.program_number(number)
    program = cases.program(options.seed, key, options.longest)
    case = cases.case(options.seed, number, program)
    first = number // BATCH * BATCH
    try:
        numbers = range(first, first + BATCH)
        with _made_for(options.architecture):
            recipe = recipe_of(program)
            rows = check(options.seed, program, numbers, options.implementation)
    except (ImportError, NotImplementedError) as reason:
        raise UsageError(f"case {number}: {reason}") from None
    row = rows[number - first]
    for part in (program, case):
        print(part, file=sys.stderr)
    kept = {name: getattr(recipe, name) for name in _BLOCKS}
    print(f"recipe {recipe.name} with {kept}", file=sys.stderr)
    print(
        f"entry {number - first} of the cases {first} to {first + BATCH - 1}, "
        f"seed {options.seed}, lengths up to {options.longest}",
        file=sys.stderr,
    )
    for name, value in row.items():
        print(f"  {name}: {value}", file=sys.stderr)
    if row["failed"]:
        raise ExperimentError(_named([row], 1))
    return {"rows": 1, **row}


def _grouped(rows: Sequence[Row], programs: dict[int, Program]) -> dict[str, list[Row]]:
    """Rows by feature, family, and what was multiplied; all of them first."""
    groups: dict[str, list[Row]] = {"all": list(rows)}
    found: dict[str, list[Row]] = {}
    for row in rows:
        names = programs[row["program"]].features + [f"inputs {row['family']}"]
        if row["changed"]:
            names.append(row["changed"])
        for name in names:
            found.setdefault(name, []).append(row)
    return groups | dict(sorted(found.items()))


def _present(rows: Sequence[Row], column: str) -> list[float]:
    return [row[column] for row in rows if row[column] is not None]


def summary(rows: Sequence[Row], programs: dict[int, Program]) -> list[Row]:
    """By feature: cases, failures, and the largest error over its bound by tensor.

    `unbounded` is the largest share of a tensor's entries that have no bound.
    """
    return [
        {
            "feature": feature,
            "cases": len(group),
            "failed": sum(bool(row["failed"]) for row in group),
            **{
                name: max(_present(group, f"{name}_ratio"), default=None)
                for name in TENSORS
            },
            "unbounded": max(row["unbounded"] for row in group),
        }
        for feature, group in _grouped(rows, programs).items()
    ]


def units(rows: Sequence[Row], programs: dict[int, Program]) -> list[Row]:
    """By feature: median and largest RMS error in units of the final rounding."""
    table = []
    for feature, group in _grouped(rows, programs).items():
        line: Row = {"feature": feature, "cases": len(group)}
        for name in ROUNDED:
            found = _present(group, f"{name}_units")
            line[name] = (
                f"{statistics.median(found):.3g}/{max(found):.3g}" if found else ""
            )
        table.append(line)
    return table
