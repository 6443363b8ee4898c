"""Does attention matter for the weights? Trainings that differ in one thing.

For each seed the reference, `--attn=baseline`, and all arms train side by side
(`analysis.paired`). Weights are compared after 1, 2, 4, ... steps and at eighths of the
run; `analysis.paired_measures` defines the columns of the two tables, `weights` and
`runs`, and `analysis.training_tables` what is told of them.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import ExperimentError, store
from analysis.arms import ARMS, MAIN, REFERENCE, Arm, configured, find
from analysis.figures import Panel, write_figure
from analysis.paired_measures import Instruments, measure
from analysis.record import (
    Row,
    check_writable,
    environment,
    show,
    write,
    write_markdown,
    write_parquet,
    written,
)
from analysis.summary import summarise
from analysis.training_tables import of_all, tables
from train.config import Config, UsageError, flatten
from train.gpu import set_profile
from train.presets import PRESETS

SUMMARY = "how far training with another attention, or another bit, moves the weights"
# Where a preset's own number is for a model that is to be good: the steps of each
# training, and for how many captions images are drawn at its end.
_STEPS = {"tiny": 256}
_DEFAULT_STEPS = 2000
_CAPTIONS = {"tiny": 64}
_DEFAULT_CAPTIONS = 500


class Store(store.Store):
    """Of rows of steps."""

    needed = ("step",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="of python -m train")
    add(
        "--arms",
        nargs="+",
        default=list(MAIN),
        metavar="ARM",
        help=f"some of {', '.join(ARMS)}, emulated:RECIPE (default {' '.join(MAIN)})",
    )
    add("--seeds", type=int, default=3, help="of weights, noise and data (default 3)")
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
        default=[],
        metavar="NAME=VALUE",
        help="of the reference, and so of all arms: lr=0.01 model.qk_norm=false",
    )
    add("--margin", type=float, default=0.01, help=_MARGIN)
    add("--together", type=int, default=8, help="arms that train at once (default 8)")
    add("--out", type=Path, help="folder (default results/training/weights-PRESET)")
    add("--fresh", action="store_true", help="train anew what is there already")


_MARGIN = "share of the loss within which losses count as equal (default 0.01)"


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Trains what is missing, writes tables and figures, says what was found.

    Raises:
      UsageError: an arm or an option does not exist or fit.
      ExperimentError: a run of the same was not the same.
    """
    set_profile("exact")
    arms = [find(name) for name in dict.fromkeys(options.arms)]
    arms = [arm for arm in arms if arm.name != REFERENCE]
    if options.seeds < 1 or options.together < 1:
        raise UsageError("--seeds and --together must be at least 1")
    if options.first_seed < 0 or not options.margin > 0:
        raise UsageError("--first-seed must not be negative, --margin be above 0")
    steps = options.steps or _STEPS.get(options.preset, _DEFAULT_STEPS)
    captions = options.captions
    if captions is None:
        captions = _CAPTIONS.get(options.preset, _DEFAULT_CAPTIONS)
    config = reference(options.preset, steps, options.change)
    for arm in arms:
        configured(config, arm)
    out = options.out or Path("results", "training", f"weights-{options.preset}")
    settings: dict[str, Any] = {"experiment": "training", "captions": captions}
    settings |= {"reference": flatten(config)}
    settings = json.loads(json.dumps(settings))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    kept = Store(out / "training.jsonl", settings, fresh=options.fresh)
    with contextlib.closing(kept):
        for stem in (out / "weights", out / "runs"):
            check_writable(stem)
        described = environment(command)
        instruments = Instruments(captions)
        if any(_cell(arm.name, seed) not in kept for arm in arms for seed in seeds):
            kept.describe(described)
        for seed in seeds:
            _train_missing(config, arms, seed, kept, options.together, instruments)
        cells = [_cell(name, s) for s in seeds for name in _names(arms)]
        rows = kept.rows(cells)
        weights, runs = (
            [_without_table(row) for row in rows if row["table"] == table]
            for table in ("weights", "runs")
        )
        beside = {"settings": settings, "measured": kept.environments}
        files = [kept.path, *write(runs, described | beside, out / "runs")]
        files += write(of_all(weights), described | beside, out / "weights")
        files += write_parquet(weights, out / "weights.parquet")
        files += _figures(weights, runs, out)
        told = tables(weights, runs, options.margin)
        files += write_markdown(told, out / "tables.md")
    for title, table in told.items():
        show(table, title)
    _check_null(weights)
    return {"rows": len(rows), "files": [str(path) for path in files]}


def reference(preset: str, steps: int, changes: Sequence[str]) -> Config:
    """What the reference trains: a preset, with fields of `python -m train` changed,
    NAME=VALUE each.

    Raises:
      UsageError: there is no such field, or the changes do not go together.
    """
    config = dataclasses.replace(
        PRESETS[preset], attn="baseline", steps=steps, profile="exact"
    )
    given = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in flatten(config):
            raise UsageError(
                f"--change takes NAME=VALUE with a field of python -m train, such as "
                f"lr=0.01, not {change!r}"
            )
        try:
            given[name] = json.loads(text)
        except ValueError:
            given[name] = text
    return configured(config, Arm(REFERENCE, "", given))


def _names(arms: Sequence[Arm]) -> list[str]:
    return [REFERENCE, *(arm.name for arm in arms)]


def _cell(name: str, seed: int) -> dict[str, Any]:
    return {"arm": name, "seed": seed}


def _without_table(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "table"}


def _train_missing(
    config: Config,
    arms: Sequence[Arm],
    seed: int,
    kept: Store,
    together: int,
    instruments: Instruments,
) -> None:
    missing = [arm for arm in arms if _cell(arm.name, seed) not in kept]
    data = dataclasses.replace(config.data, seed=config.data.seed + seed)
    config = dataclasses.replace(config, seed=config.seed + seed, data=data)
    for start in range(0, len(missing), together):
        some, began = missing[start : start + together], time.monotonic()
        for name, rows in measure(config, some, instruments).items():
            if _cell(name, seed) not in kept:
                kept.add(_cell(name, seed), rows)
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


def _figures(weights: Sequence[Row], runs: Sequence[Row], out: Path) -> list[Path]:
    labels = {
        "max_abs": "max |difference|",
        "w1": "Wasserstein-1",
        "w1_over_sigma": "Wasserstein-1 / sigma",
        "rel_l2": "relative L2",
        "drift": "of what training moved",
    }
    panels = []
    for rows, names in (
        (of_all(weights), labels),
        (
            runs,
            {
                "function": "distance of the outputs",
                "direct": "direct error of a step",
                "feedback": "feedback of a step",
                "loss": "loss",
            },
        ),
    ):
        for name, label in names.items():
            shown = summarise(rows, ["arm", "step"], [name])
            shown = [row for row in shown if row[name]]
            panels.append(Panel(label, shown, "step", name, "arm", "steps", label))
    picture = out / "training.png"
    with written(picture):
        write_figure([panel for panel in panels if panel.rows], picture)
    return [picture]
