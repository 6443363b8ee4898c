"""Time of attention, forward and backward, ours and every peer that is installed.

Implementations of one framework are timed in turn, round after round, in one process:
JAX's here, PyTorch's in a process of its own. `ms` is the median over rounds of a run,
`ms_25` and `ms_75` its quartiles; `timer` says how: kernels' own times by CUPTI, CUDA
events around runs in a row, or the wall clock. Inputs stay where they are between
runs, so small ones are read from the card's L2. A pass is a program of its
own: `forward` leaves nothing for a backward pass, `backward` begins with what a forward
pass left, `both` is one program. A mask that an implementation takes as an array only
is made inside the program (in PyTorch before it).

Beside each time stands the error of that very program against FP64, in units of the
final rounding, on the inputs that were timed and on others: columns FAMILY_out to
FAMILY_dv, and `error`, the largest of them (`analysis.speed.errors`). `ratio` is the
time of the fastest peer over the row's own: above 1 it is faster than every peer.
`same_bits` compares two runs, `deterministic` is what the implementation promises
(nothing, if empty). `compile_seconds` is the tracing and compilation of the timed
program, in PyTorch the first call; the first of a process loads libraries besides.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from analysis import ExperimentError
from analysis.agreement import VANISHING
from analysis.experiments.accuracy import REPRODUCIBLE
from analysis.figures import Panel, write_figure
from analysis.record import (
    Row,
    check_writable,
    device_name,
    environment,
    show,
    write,
    written,
)
from analysis.speed import errors, in_jax, in_torch, timing
from analysis.speed.cases import FLOPS, PASSES, PRESETS, Case, Pass, chosen
from analysis.speed.torch_process import TorchProcess, is_installed
from analysis.store import Store
from attn_jax.audit.inputs import FAMILIES
from train.config import UsageError

SUMMARY = "time of attention beside its error, ours and every peer that is installed"
FRAMEWORKS = {"jax": in_jax.IMPLEMENTATIONS, "torch": in_torch.IMPLEMENTATIONS}
IMPLEMENTATIONS = [name for names in FRAMEWORKS.values() for name in names]
PEERS = (*in_jax.PEERS, *in_torch.IMPLEMENTATIONS)
# What a preset times unless told otherwise, and for how long.
_ON_REQUEST = "emulated", "reference", *in_jax.NAMED
_ON_A_GPU = [name for name in IMPLEMENTATIONS if name not in _ON_REQUEST]
_DEFAULTS = {
    "toy": ["xla", "emulated", "reference"],
    "default": _ON_A_GPU,
    "full": _ON_A_GPU,
}
_SECONDS = {"toy": 0.02, "default": 2.0, "full": 2.0}
# The columns that are read first.
_FIRST = ("case", "pass", "implementation", "ms", "tflops", "error")
# A framework that a machine can do without -> the package it comes in.
_PACKAGES = {"tokamax": "tokamax"} | dict.fromkeys(in_torch.IMPLEMENTATIONS, "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add(
        "--preset",
        choices=PRESETS,
        default="default",
        help="toy: anywhere, by the wall clock; default: 12 sizes on a GPU; full: also "
        "the models' shapes, grouped heads, a window and packed documents",
    )
    add("--cases", nargs="+", metavar="NAME", help="of the preset; * stands for any")
    add(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        help="default: all that are installed; toy: xla emulated reference",
    )
    families = [family for family in FAMILIES if family != VANISHING]
    add(
        "--families",
        nargs="+",
        choices=families,
        default=["normal", "uniform"],
        help="inputs that errors are measured on, the times on the first "
        "(default normal uniform)",
    )
    add(
        "--passes",
        nargs="+",
        choices=PASSES,
        default=["forward", "backward"],
        help="both: forward and backward in one program (default forward backward)",
    )
    add(
        "--seconds",
        type=float,
        help="of timing for each case, pass and framework (default 2, toy 0.02); at "
        f"least {timing.LEAST_ROUNDS} rounds",
    )
    out = Path("results", "speed")
    add("--out", type=Path, default=out, help=f"folder (default {out})")
    add("--fresh", action="store_true", help="measure anew what is there already")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures what is missing, writes table and figures, prints speed and error.

    Raises:
      UsageError: an option has no usable value, or names what is not installed.
      ExperimentError: an implementation ran nowhere, or one that promises the same
        bits on every run did not give them. The table is written all the same.
    """
    # Read when JAX first touches the GPU, which nothing has done yet in this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    families = list(dict.fromkeys(options.families))
    cases = chosen(options.preset, options.cases, tuple(families))
    usual = _SECONDS[options.preset]
    seconds = usual if options.seconds is None else options.seconds
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds must be above 0, got {seconds:g}")
    platform = jax.default_backend()
    if platform != "gpu" and options.preset != "toy":
        raise UsageError(
            f"--preset={options.preset} needs a GPU, and JAX finds a {platform}; "
            "--preset=toy runs anywhere"
        )
    names = _installed(options.preset, options.implementations)
    device = device_name()
    stem = options.out / f"{device}-{options.preset}"
    check_writable(stem)
    cells = [
        Cell(case, of, framework, tuple(name for name in names if name in known))
        for case in cases
        for of in PASSES
        if of in options.passes
        for framework, known in FRAMEWORKS.items()
        if not known.keys().isdisjoint(names)
    ]
    settings = {
        **{"experiment": "speed", "implementations": names, "seconds": seconds},
        **{"runs": timing.RUNS, "families": families, "seed": errors.SEED},
    }
    path = stem.with_suffix(".jsonl")
    with contextlib.closing(Store(path, settings, fresh=options.fresh)) as store:
        _measure(store, cells, seconds, platform, command)
        rows = compared(store.rows([cell.key for cell in cells]))
        described = {
            **{"command": command, "settings": settings, "flops": FLOPS},
            **{"measured": store.environments},
        }
    files = [path, *write(rows, described, stem), *draw(rows, stem)]
    title = f"TFLOP/s (largest error in units on {', '.join(families)} inputs)"
    show(side_by_side(rows), title)
    _say_refusals(rows)
    _check(rows, names)
    return {"rows": len(rows), "files": [str(path) for path in files]}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured together and kept when it is done: one pass of one case."""

    case: Case
    of: Pass
    framework: str
    names: tuple[str, ...]

    @property
    def key(self) -> Row:
        """Columns of its rows, which tell it from others."""
        case = dataclasses.asdict(self.case)
        # They are settings of the whole file.
        del case["families"]
        return {
            **{"case": case.pop("name"), "pass": self.of},
            **{"framework": self.framework, **case},
        }


def _installed(preset: str, named: Sequence[str] | None) -> list[str]:
    """The implementations to be timed, each once.

    Without names all of the preset's, and a line for each package that is missing.

    Raises:
      UsageError: one that is named is not installed.
    """
    names = list(dict.fromkeys(named or _DEFAULTS[preset]))
    packages = {_PACKAGES[name] for name in names if name in _PACKAGES}
    missing = sorted(package for package in packages if not is_installed(package))
    if named and missing:
        raise UsageError(f"--implementations: no {' and no '.join(missing)} installed")
    for package in missing:
        print(f"no {package} installed: timed without it", file=sys.stderr)
    return [name for name in names if _PACKAGES.get(name) not in missing]


def _measure(
    store: Store, cells: Sequence[Cell], seconds: float, platform: str, command: str
) -> None:
    """Measures the cells that are missing and keeps each as soon as it is done."""
    missing = [number for number, cell in enumerate(cells) if cell.key not in store]
    if not missing:
        return
    with TorchProcess(platform) as torch:
        described = environment(command)
        if any(cells[number].framework == "torch" for number in missing):
            described["versions"] |= torch.versions()
        if is_installed("tokamax"):
            described["versions"]["tokamax"] = importlib.metadata.version("tokamax")
        store.describe(described)
        for number in missing:
            cell = cells[number]
            began = time.monotonic()
            measure = torch.measure if cell.framework == "torch" else in_jax.measure
            # A list: what is timed leaves the card before exact results are made.
            timed = list(measure(cell.case, cell.of, cell.names, seconds))
            rows = []
            for name, row, results in timed:
                rate = cell.case.flops(cell.of) / 1e9
                tflops = None if row["ms"] is None else rate / row["ms"]
                row = {"implementation": name, "seed": errors.SEED, **row}
                row["commit"] = described["git_commit"]
                row |= {"tflops": tflops, **errors.columns(cell.case, results)}
                rows.append(row)
            store.add(cell.key, rows)
            took = time.monotonic() - began
            name = f"{cell.case.name} {cell.of} {cell.framework}"
            print(f"{number + 1}/{len(cells)} {name}: {took:.1f} s", file=sys.stderr)


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with `ratio`, the fastest peer's time over the row's own."""
    fastest: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["implementation"] in PEERS and row["ms"] is not None:
            key = row["case"], row["pass"]
            fastest[key] = min(fastest.get(key, float("inf")), row["ms"])
    found = []
    for row in rows:
        best = fastest.get((row["case"], row["pass"]))
        ratio = None if best is None or row["ms"] is None else best / row["ms"]
        found.append({**{column: row[column] for column in _FIRST}, "ratio": ratio})
        found[-1] |= row
    return found


def side_by_side(rows: Sequence[Row]) -> list[Row]:
    """A table to read: a line for each case and pass, implementations as columns."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["case"], row["pass"]
        start = {"case": key[0], "pass": key[1]} | dict.fromkeys(names, "")
        line = lines.setdefault(key, start)
        line[row["implementation"]] = "refused"
        if row["tflops"] is not None:
            text = f"{row['tflops']:.3g} ({row['error']:.3g})"
            line[row["implementation"]] = text
    return list(lines.values())


def draw(rows: Sequence[Row], stem: Path) -> list[Path]:
    """A figure for each group of cases: speed above, error below, a pass a column.

    The bars reach half the distance between the quartiles.
    """
    groups = list(dict.fromkeys(row["group"] for row in rows))
    files = []
    for group in groups:
        shown = [_with_bar(row) for row in rows if row["group"] == group]
        passes = [of for of in PASSES if any(row["pass"] == of for row in shown)]
        panels = [
            Panel(
                f"{of}: {title}",
                [row for row in shown if row["pass"] == of],
                *("case", column, "implementation", "", label),
                log_x=False,
                log_y=log_y,
                joined=False,
            )
            for title, column, label, log_y in (
                ("speed", "tflops", "TFLOP/s", False),
                ("error", "error", "largest error in units", True),
            )
            for of in passes
        ]
        end = "" if len(groups) == 1 else "-" + group.replace(" ", "-")
        path = stem.with_name(f"{stem.name}{end}.png")
        with written(path):
            write_figure(panels, path, len(passes))
        files.append(path)
    return files


def _with_bar(row: Row) -> Row:
    if row["tflops"] is None:
        return row
    half = (row["ms_75"] - row["ms_25"]) / 2
    return {**row, "tflops_ci": row["tflops"] * half / row["ms"]}


def _say_refusals(rows: Sequence[Row]) -> None:
    """Each reason once, with the cases it was given for."""
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for row in rows:
        if row["refused"]:
            where = reasons[row["implementation"], row["refused"]]
            where.append(f"{row['case']} {row['pass']}")
    for (name, reason), where in reasons.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        print(f"{name} refused {where[0]}{more}: {reason}", file=sys.stderr)


def _check(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Raises ExperimentError where an implementation does not keep what it promises."""
    for name in names:
        own = [row for row in rows if row["implementation"] == name]
        if all(row["refused"] for row in own):
            raise ExperimentError(f"{name} ran nowhere: {own[0]['refused']}")
        differs = [row for row in own if row["same_bits"] is False]
        if name in REPRODUCIBLE and differs:
            where = f"{differs[0]['case']} {differs[0]['pass']}"
            raise ExperimentError(f"{name}: two runs differ in their bits in {where}")
