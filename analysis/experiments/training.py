"""Does attention matter for the weights? Trainings that differ in one thing.

For each seed the reference, `--attn=baseline`, and all arms train side by side
(`analysis.paired`). Weights are compared after 1, 2, 4, ... steps and at eighths of the
run; `analysis.paired_measures` defines the columns of the two tables, `weights` and
`runs`, `analysis.training_tables` and `analysis.training_figures` what is told of them.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import ExperimentError, changes, store, training_figures
from analysis.arms import ARMS, MAIN, REFERENCE, Arm, configured, find
from analysis.paired import check_here
from analysis.paired_measures import Instruments, measure
from analysis.record import (
    Row,
    Table,
    check_writable,
    environment,
    show,
    write,
    write_markdown,
    write_parquet,
)
from analysis.training_rows import by_table, of_all, stored
from analysis.training_tables import tables
from train.config import Config, UsageError, flatten
from train.gpu import set_profile
from train.presets import PRESETS
from train.validate import check_number, validate

SUMMARY = "how far training with another attention, or another bit, moves the weights"
# Where a preset's own number is for a model that is to be good: the steps of each
# training, and for how many captions images are drawn at its end.
_STEPS = {"tiny": 256}
_DEFAULT_STEPS = 2000
_CAPTIONS = {"tiny": 64}
_DEFAULT_CAPTIONS = 500


class Store(store.Store):
    """Of rows of steps."""

    needed = ("table", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="of python -m train")
    add(
        "--arms",
        nargs="+",
        action="extend",
        metavar="ARM",
        help=f"some of {', '.join(ARMS)}, emulated:RECIPE, or several as one, such as "
        f"bf16+pallas (default {' '.join(MAIN)})",
    )
    add("--seeds", type=int, default=3, help=_SEEDS)
    add("--first-seed", type=int, default=0, help="the first of them (default 0)")
    add("--steps", type=int, help="of each training (256 for tiny, else 2000)")
    add(
        "--captions",
        type=int,
        help="images drawn and scored at the end of each (64 for tiny, else 500)",
    )
    add(
        "--change",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="of the reference, and so of all arms: lr=0.01 model.qk_norm=false",
    )
    add("--margin", type=float, default=0.01, help=_MARGIN)
    add("--together", type=int, default=8, help="arms that train at once (default 8)")
    add("--out", type=Path, help="folder (default results/training/weights-PRESET)")
    add("--fresh", action="store_true", help="train anew what is there already")
    add(
        "--redraw",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FOLDER",
        help="make tables.md and training.png of such folders anew from the rows "
        "there; nothing is trained",
    )


_SEEDS = "of weights, data and the noise of steps (default 3)"
_MARGIN = "share of the loss within which losses count as equal (default 0.01)"


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Trains what is missing, writes tables and figures, says what was found.

    Raises:
      UsageError: an arm or an option does not exist or fit.
      ExperimentError: a run of the same was not the same.
    """
    _check(options)
    if options.redraw:
        if options.out:
            raise UsageError("--redraw writes into the folders that it names: no --out")
        return _redraw(options.redraw, options.margin)
    set_profile("exact")
    arms = [find(name) for name in dict.fromkeys(options.arms or MAIN)]
    arms = [arm for arm in arms if arm.name != REFERENCE]
    if not arms:
        raise UsageError(f"--arms: give one beside {REFERENCE}, such as re-run")
    steps = options.steps or _STEPS.get(options.preset, _DEFAULT_STEPS)
    captions = options.captions
    if captions is None:
        captions = _CAPTIONS.get(options.preset, _DEFAULT_CAPTIONS)
    config = reference(options.preset, steps, options.change)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    validate(_seeded(config, seeds[-1]))
    for arm in arms:
        last = configured(_seeded(config, seeds[-1]), arm)
        validate(dataclasses.replace(last, seed=last.seed + arm.weights))
    out = options.out or Path("results", "training", f"weights-{options.preset}")
    if not options.fresh:
        _check_rows(out)
    path = out / "training.jsonl"
    if options.fresh or not path.exists():
        # Before a file is emptied or begun.
        check_here(config, arms)
    settings: dict[str, Any] = {"experiment": "training", "captions": captions}
    settings |= {"reference": flatten(config)}
    settings = json.loads(json.dumps(settings))
    kept = Store(path, settings, fresh=options.fresh)
    with contextlib.closing(kept):
        # Rows of a GPU are made into tables where there is none.
        missing = [
            arm for arm in arms if any(_cell(arm.name, s) not in kept for s in seeds)
        ]
        check_here(config, missing)
        for stem in (out / "weights", out / "runs"):
            check_writable(stem)
        described = environment(command)
        instruments = Instruments(captions)
        if missing:
            kept.describe(described)
        for seed in seeds:
            _train_missing(config, arms, seed, kept, options.together, instruments)
        cells = [_cell(name, s) for s in seeds for name in _names(arms)]
        rows = kept.rows(cells)
        weights, runs = by_table(rows)
        if not weights:
            raise ExperimentError("nothing to compare: the first step is not finite")
        beside = {"settings": settings, "measured": kept.environments}
        files = [kept.path, *write(runs, described | beside, out / "runs")]
        files += write(of_all(weights), described | beside, out / "weights")
        files += write_parquet(weights, out / "weights.parquet")
        files += write_parquet(runs, out / "runs.parquet")
        files += _tell(weights, runs, out, options.margin)
    _check_null(weights)
    return {"rows": len(rows), "files": [str(path) for path in files]}


def _check_rows(out: Path) -> None:
    """Raises UsageError: tables are there, but not the rows that they were made of, to
    which others could be added."""
    made = [out / name for name in ("runs.csv", "weights.parquet", "tables.md")]
    if (out / "training.jsonl").exists() or not any(path.exists() for path in made):
        return
    first, packed = "", out / "training.jsonl.xz"
    if packed.exists():
        first = f"unpack them (unxz -k {packed}), "
    raise UsageError(
        f"{out} has tables of an earlier command and no training.jsonl with their "
        f"rows: {first}give another --out, or start anew with --fresh"
    )


def _check(options: argparse.Namespace) -> None:
    for name in ("seeds", "together", "steps", "captions", "first_seed"):
        number = getattr(options, name)
        least = int(name in ("seeds", "together", "steps"))
        # None: left to the preset.
        if number is not None:
            check_number(name, number, number >= least, f"be at least {least}")
    works = 0 < options.margin < math.inf
    check_number("margin", options.margin, works, "be positive and finite")


def _redraw(folders: Sequence[Path], margin: float) -> dict[str, Any]:
    """Tables and figures anew, of what is on disk."""
    total, files = 0, []
    for folder in folders:
        weights, runs, source = stored(folder)
        more = source.name if source.suffix == ".csv" else ""
        files += _tell(weights, runs, folder, margin, five_digits=more)
        total += len(weights) + len(runs)
    return {"rows": total, "files": [str(path) for path in files]}


def _tell(
    weights: Sequence[Row],
    runs: Sequence[Row],
    out: Path,
    margin: float,
    five_digits: str = "",
) -> list[Path]:
    """Tables to stderr and to a file, and the figure; `five_digits` names where the
    runs come from if they are rounded."""
    told = tables(weights, runs, margin)
    for title, table in told.items():
        if table.rows:
            show(table.rows, title)
    if five_digits:
        note = f"Losses, `function` and the split are from {five_digits}: five digits."
        told["rounding"] = Table([], note)
    files = training_figures.write(weights, runs, out / "training.png")
    return [*files, *write_markdown(told, out / "tables.md")]


def reference(preset: str, steps: int, given: Sequence[str]) -> Config:
    """What the reference trains: a preset, with fields of `python -m train` changed,
    NAME=VALUE each.

    Raises:
      UsageError: there is no such field, or the changes do not go together.
    """
    config = dataclasses.replace(
        PRESETS[preset], attn="baseline", steps=steps, profile="exact"
    )
    return configured(config, Arm(REFERENCE, "", changes.read(given)))


def _seeded(config: Config, seed: int) -> Config:
    data = dataclasses.replace(config.data, seed=config.data.seed + seed)
    return dataclasses.replace(config, seed=config.seed + seed, data=data)


def _names(arms: Sequence[Arm]) -> list[str]:
    return [REFERENCE, *(arm.name for arm in arms)]


def _cell(name: str, seed: int) -> dict[str, Any]:
    return {"arm": name, "seed": seed}


def _train_missing(
    config: Config,
    arms: Sequence[Arm],
    seed: int,
    kept: Store,
    together: int,
    instruments: Instruments,
) -> None:
    missing = [arm for arm in arms if _cell(arm.name, seed) not in kept]
    config = _seeded(config, seed)
    for start in range(0, len(missing), together):
        some, began = missing[start : start + together], time.monotonic()
        for name, rows in measure(config, some, instruments).items():
            cell = _cell(name, seed)
            if cell not in kept:
                kept.add(cell, rows)
            elif json.dumps([cell | row for row in rows]) != json.dumps(
                kept.rows([cell])
            ):
                raise ExperimentError(
                    f"seed {seed}: {name}, trained again beside {some[0].name}, is not "
                    f"what {kept.path} has of it, which other code, XLA_FLAGS or "
                    "another device trained: give another --out, or --fresh"
                )
        names = ", ".join(arm.name for arm in some)
        seconds = time.monotonic() - began
        print(f"seed {seed}: {names}: {seconds:.1f} s", file=sys.stderr)


def _check_null(weights: Sequence[Row]) -> None:
    """A run of the same has to be the same."""
    off = [row for row in weights if row["arm"] == "re-run" and row["max_abs"]]
    if off:
        raise ExperimentError(
            f"a run of the same differs by {off[0]['max_abs']:.3g} after "
            f"{off[0]['step']} steps ({off[0]['scope']}): what the arms show is in "
            "part chance; on a GPU look at XLA_FLAGS"
        )
