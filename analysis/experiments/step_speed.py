"""Time and memory of a training step, and of its parts, by attention.

`ms` is the median over rounds of the mean of several runs in a row, by the wall clock,
on one device; implementations take turns. `forward` is the loss, `both` the loss and
its gradients, `step` all of a step of `python -m train` but for reading data. `speedup`
is the baseline's time over the row's, `over_cudnn` cuDNN's. `tflops` counts the
products of the model alone (`analysis.model_flops`), three times those of the forward
pass where there are gradients; `mfu` is their share of the card's dense BF16 peak.
`gigabytes` (2^30 bytes) is what the device holds: arguments, results and what XLA
allocates between.

A case begins with the batch of its preset. Where that does not fit for an attention,
the others are timed, and then all at the half, quarter, ... at which all fit.
`largest_batch` (`--largest`) was run for a step; the device holds about so much. To
look for it alone takes `--seconds 0 --parts step`; BFC, XLA's allocator, is to have
taken all its memory at once then (XLA_PYTHON_CLIENT_PREALLOCATE, on by default): what
it takes bit by bit has no room for one large array.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from analysis import ExperimentError, store
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
from analysis.step_case import StepCase, by_kind
from analysis.step_programs import PARTS, Part
from train.config import Config, UsageError
from train.gpu import set_profile
from train.presets import PRESETS

SUMMARY = "time and memory of a training step, and of its parts, by attention"


def _with_model(preset: str, **changes: Any) -> Config:
    config = PRESETS[preset]
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, **changes)
    )


# `large` as it is makes every block again in the backward pass, to fit; beside it, what
# a card reaches that need not.
CASES: dict[str, Config] = {
    "tiny": PRESETS["tiny"],
    "small": PRESETS["small"],
    "base-patch-8": _with_model("base", patch=8),
    "small-long": PRESETS["small-long"],
    "base": PRESETS["base"],
    "base-long": PRESETS["base-long"],
    "large": PRESETS["large"],
    "large-no-remat": dataclasses.replace(
        _with_model("large", remat=False), batch_size=32
    ),
}
_PROFILE = "of python -m train (default fast)"
_BATCH = "examples of a step (default the preset's), halved until all attentions fit"
_NAMES = "baseline", "pallas", "cudnn"
_SHOWN = (
    *("case", "N", "batch", "part", "implementation", "ms", "speedup", "over_cudnn"),
    *("tflops", "mfu", "gigabytes", "largest_batch"),
)


class Store(store.Store):
    """Of rows of implementations."""

    needed = ("implementation",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add, gpu = parser.add_argument, [name for name in CASES if name != "tiny"]
    add("--cases", nargs="+", choices=CASES, help=f"default {' '.join(gpu)}; CPU: tiny")
    add("--implementations", nargs="+", choices=_NAMES, help="default all; CPU: two")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default all")
    add("--batch-size", type=int, help=_BATCH)
    add(
        "--seconds",
        type=float,
        default=3.0,
        help="of timing a part (default 3; 0: none)",
    )
    add("--profile", choices=["fast", "exact"], default="fast", help=_PROFILE)
    add("--largest", action="store_true", help="look for the largest batch that fits")
    add("--kernels", action="store_true", help="time each kernel, too (GPU)")
    out = Path("results", "step-speed")
    add("--out", type=Path, default=out, help=f"folder (default {out})")
    add("--fresh", action="store_true", help="measure anew what is there already")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures what is missing and writes tables and a figure.

    Raises:
      UsageError: a number does not fit, or nothing can be written.
      ExperimentError: an attention ran nowhere; the tables are written all the same.
    """
    if options.batch_size is not None and options.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, got {options.batch_size}")
    if not 0 <= options.seconds < math.inf:
        raise UsageError(f"--seconds must be at least 0, got {options.seconds:g}")
    if options.kernels and options.seconds == 0:
        raise UsageError("--kernels needs a step that is timed: --seconds above 0")
    set_profile(options.profile)
    gpu = jax.default_backend() == "gpu"
    cases = options.cases or [name for name in CASES if (name == "tiny") != gpu]
    names = options.implementations or _NAMES[: 3 if gpu else 2]
    if options.kernels and not gpu:
        raise UsageError("--kernels needs an NVIDIA GPU")
    if options.largest and gpu and not _taken_at_once():
        raise UsageError(
            "--largest wants memory in one piece: unset XLA_PYTHON_CLIENT_PREALLOCATE"
        )
    parts: list[Part] = [part for part in PARTS if part in options.parts]
    described = environment(command)
    stem = options.out / device_name()
    check_writable(stem)
    settings = {
        **{"experiment": "step-speed", "implementations": list(names), "parts": parts},
        **{"profile": options.profile, "batch_size": options.batch_size},
        **{"seconds": options.seconds, "largest": options.largest},
        "kernels": options.kernels,
    }
    path = stem.with_suffix(".jsonl")
    with contextlib.closing(Store(path, settings, fresh=options.fresh)) as kept:
        missing = [case for case in cases if {"case": case} not in kept]
        if missing:
            kept.describe(described)
        for case in missing:
            began = time.monotonic()
            config = dataclasses.replace(CASES[case], profile=options.profile)
            if options.batch_size is not None:
                config = dataclasses.replace(config, batch_size=options.batch_size)
            measured = StepCase(
                *(config, names, parts, options.seconds),
                largest=options.largest,
                kernels=options.kernels,
            )
            kept.add({"case": case}, list(measured.rows()))
            print(f"{case}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        rows = kept.rows([{"case": case} for case in cases])
        beside = {"settings": settings, "measured": kept.environments}
    times, kernels = (
        [
            {name: x for name, x in row.items() if name != "table"}
            for row in rows
            if row["table"] == table
        ]
        for table in ("times", "kernels")
    )
    times = compared(times)
    files = [path, *write(times, described | beside, stem)]
    if kernels:
        own = stem.with_name(f"{stem.name}-kernels")
        files += write(kernels, described | beside, own)
        show(by_kind(kernels), "Where the time of a step goes, milliseconds")
    files += _figure(times, stem.with_suffix(".png"))
    show([{k: row[k] for k in _SHOWN} for row in times], "A training step, and parts")
    for name in names:
        own = [row for row in times if row["implementation"] == name]
        if all(row["refused"] is not None for row in own):
            raise ExperimentError(f"{name} ran nowhere: {own[0]['refused']}")
    return {"rows": len(times), "files": [str(path) for path in files]}


def _taken_at_once() -> bool:
    """Whether XLA's allocator takes its memory when it begins, as XLA reads it."""
    said = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    return said.lower() not in ("false", "0")


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with `speedup` and `over_cudnn`, at the same batch."""
    key = ("case", "batch", "part")
    times = {(*(row[k] for k in key), row["implementation"]): row["ms"] for row in rows}

    def over(row: Row, name: str) -> float | None:
        other = times.get((*(row[k] for k in key), name))
        return other / row["ms"] if other and row["ms"] else None

    return [
        {**row, "speedup": over(row, "baseline"), "over_cudnn": over(row, "cudnn")}
        for row in rows
    ]


def _figure(rows: Sequence[Row], path: Path) -> list[Path]:
    panels = []
    for part in PARTS:
        shown = [r for r in rows if r["part"] == part and r["ms"] is not None]
        shown = [r | {"at": f"{r['case']}, {r['batch']}"} for r in shown]
        if shown:
            labels = "", "model TFLOP/s"
            panels.append(
                Panel(
                    *(part, shown, "at", "tflops", "implementation", *labels),
                    log_x=False,
                    log_y=False,
                    joined=False,
                )
            )
    if not panels:
        return []
    with written(path):
        write_figure(panels, path, len(panels))
    return [path]
