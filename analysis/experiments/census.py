"""Where a training run meets the preconditions of failures of low-precision attention.

For every captured step, layer and head: what `analysis.preconditions` says, column by
column, and the error of dQ that the emulator predicts there for `flash2`, which shipped
kernels follow, and for `attn_jax_hopper`, our kernels' recipe. The captured attention
has no mask. All heads that were captured are measured, whatever their number; examples
of a batch are pooled, as `analysis.preconditions` says.

Which preconditions are met, and by what threshold, says `analysis.findings`.

What was measured is kept, by step and layer, and a second call goes on. OUT holds

    census.csv, .parquet   one row for each step, layer and head
    census.json            command, versions, device, date, canaries, what is met
    census.png             heat maps of what matters most
    census.jsonl           the same rows, as they were measured
"""

import argparse
import contextlib
import dataclasses
import hashlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis import capture, preconditions, store, sweep
from analysis.agreement import FORMATS, certified
from analysis.capture_file import CAPTURE, Capture
from analysis.figures import HeatMap, write_heat_maps
from analysis.findings import findings, worst
from analysis.preconditions import DQ
from analysis.record import (
    Row,
    check_writable,
    environment,
    show,
    write,
    write_parquet,
    written,
)
from attn_jax.audit.inputs import Inputs
from train.checkpoint import saved_steps
from train.config import UsageError, attention_format
from train.config import load as load_config

SUMMARY = "preconditions of low-precision failures, by step, layer and head of a run"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Store(store.Store):
    """Of rows of heads."""

    needed = ("head",)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured and kept together."""

    step: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Source:
    """Captures that are there, or will be.

    Attributes:
      name: the results are called by it.
      identity: what the rows depend on.
      cells: steps and layers that were asked for.
      inputs: the arrays of some of them.
    """

    name: str
    identity: dict[str, Any]
    cells: list[Cell]
    inputs: Callable[[Sequence[Cell]], dict[Cell, Inputs]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--run",
        type=Path,
        metavar="RUN",
        help=f"run folder of python -m train: its {CAPTURE} (python -m analysis "
        "capture writes it anew), or without one its checkpoints",
    )
    source.add_argument(
        "--capture",
        type=Path,
        metavar="FILE.npz",
        help="what python -m analysis capture wrote",
    )
    add(
        "--steps",
        default="all",
        help="all (the default: what the file holds, or every checkpoint that is "
        "kept), or some such as 2500,last",
    )
    add(
        "--layers",
        help=f"some such as 0,2,last (default all that a file holds, "
        f"{capture.DEFAULT_LAYERS} of checkpoints)",
    )
    add("--out", type=Path, help="folder (default results/census-NAME)")
    add("--fresh", action="store_true", help="measure anew what is there already")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures what is missing, writes and prints the census.

    Raises:
      UsageError: the run, the file, a step or a layer is not there or cannot be used,
        or the folder holds rows of others or cannot be written.
      ExperimentError: a canary failed, so nothing was measured.
    """
    source = _of_run(options) if options.run is not None else _of_file(options)
    out = options.out or Path("results", f"census-{source.name}")
    stem = out / "census"
    settings = {"experiment": "census", **source.identity}
    kept = Store(stem.with_suffix(".jsonl"), settings, fresh=options.fresh)
    with contextlib.closing(kept):
        check_writable(stem)
        described = environment(command)
        _measure(source, kept, described)
        rows = kept.rows([dataclasses.asdict(cell) for cell in source.cells])
        show(worst(rows), f"{source.name}: the worst head of each step and layer")
        found = findings(rows)
        print(file=sys.stderr)
        for finding in found:
            print(finding["says"], file=sys.stderr)
        beside = {"settings": settings, "measured": kept.environments}
        files = write(rows, described | beside | {"findings": found}, stem)
        files = [kept.path, *files, *_pictures(rows, stem)]
    met = [finding["name"] for finding in found if finding["met"]]
    return {"rows": len(rows), "met": met, "files": [str(path) for path in files]}


def _measure(source: Source, kept: Store, described: dict[str, Any]) -> None:
    keys = {cell: dataclasses.asdict(cell) for cell in source.cells}
    missing = [cell for cell, key in keys.items() if key not in kept]
    if not missing:
        return
    inputs = source.inputs(missing)
    kept.describe(described | {"canaries": certified()})
    for number, cell in enumerate(missing, 1):
        began = time.monotonic()
        arrays = inputs[cell]
        examples, tokens, _, head_dim = arrays.query.shape
        sizes = {"examples": examples, "T": tokens, "S": arrays.key.shape[1]}
        sizes["H"] = head_dim
        kept.add(
            keys[cell],
            [
                {"head": row.pop("head"), **sizes, **row}
                for row in preconditions.heads(arrays)
            ],
        )
        print(
            f"{number}/{len(missing)} step={cell.step} layer={cell.layer}: "
            f"{time.monotonic() - began:.1f} s",
            file=sys.stderr,
        )


def _of_run(options: argparse.Namespace) -> Source:
    """A run folder: its file of captures if it has one, else its checkpoints.

    Raises:
      UsageError: it has neither, or is no such folder.
    """
    root = options.run
    if not root.is_dir():
        raise UsageError(
            f"--run {root} is no folder: give one that python -m train wrote, or a "
            "file of python -m analysis capture as --capture FILE.npz"
        )
    if (root / CAPTURE).is_file():
        return _of_captures(root / CAPTURE, options)
    if not (root / "config.json").is_file():
        raise UsageError(
            f"--run {root} holds neither {CAPTURE} nor config.json: give a folder "
            "that python -m train wrote"
        )
    config = load_config(root / "config.json")
    if not saved_steps(root / "checkpoints") and options.steps != "0":
        raise UsageError(
            f"--run {root} has no checkpoint yet: train it up to one (python -m "
            "train --checkpoint.every says when), or give --capture FILE.npz"
        )
    _check_format(str(root), _DTYPES[attention_format(config)])
    layers = options.layers or capture.DEFAULT_LAYERS
    steps, numbers = capture.wanted(root, config, options.steps, layers)
    examples = min(capture.DEFAULT_EXAMPLES, config.batch_size)

    def inputs(cells: Sequence[Cell]) -> dict[Cell, Inputs]:
        wanted = sorted({cell.step for cell in cells})
        found = capture.capture(root, wanted, numbers, examples)
        return _by_cell(found)

    digest = _digest((root / "config.json").read_bytes())
    return Source(
        sweep.run_name(root),
        {"run": str(root), "config": digest, "examples": examples},
        [Cell(step, layer) for step in steps for layer in numbers],
        inputs,
    )


def _of_file(options: argparse.Namespace) -> Source:
    path = options.capture
    if path.is_dir():
        raise UsageError(f"--capture {path} is a folder: give --run {path}")
    return _of_captures(path, options)


def _of_captures(path: Path, options: argparse.Namespace) -> Source:
    """A file of captures.

    Raises:
      UsageError: it is none, has no such step or layer, or is of 32 bits.
    """
    found = _by_cell(capture.read(path))
    for inputs in found.values():
        _check_format(str(path), inputs.query.dtype.name)
    steps = _chosen(path, "steps", options.steps, {cell.step for cell in found})
    layers = _chosen(
        path, "layers", options.layers or "all", {cell.layer for cell in found}
    )
    cells = [Cell(s, n) for s in steps for n in layers if Cell(s, n) in found]
    if not cells:
        raise UsageError(f"{path} has no capture of these steps in these layers")
    return Source(
        sweep.run_name(path),
        {"captures": _digest(path.read_bytes())},
        cells,
        lambda wanted: {cell: found[cell] for cell in wanted},
    )


def _chosen(path: Path, name: str, text: str, there: set[int]) -> list[int]:
    return capture.choose(f"{path}: --{name}", text, sorted(there), there)


def _by_cell(captures: Sequence[Capture]) -> dict[Cell, Inputs]:
    return {Cell(one.step, one.layer): one.inputs for one in captures}


def _check_format(what: str, kind: str) -> None:
    if kind not in FORMATS:
        raise UsageError(
            f"{what}: inputs of attention are {kind}, not {' or '.join(FORMATS)}: a "
            "run with --attention-inputs bf16 has such"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _pictures(rows: Sequence[Row], stem: Path) -> list[Path]:
    parquet = write_parquet(rows, stem.with_suffix(".parquet"))
    picture = stem.with_suffix(".png")
    with written(picture):
        write_heat_maps(_maps(rows), picture)
    return [*parquet, picture]


def _maps(rows: Sequence[Row]) -> list[HeatMap]:
    shown = [
        {**row, "where": f"step {row['step']}, layer {row['layer']}"} for row in rows
    ]
    # One scale for both recipes, from the best that there is.
    sizes = [row[name] for row in rows for name in DQ if row[name] is not None]
    most = max([2.0, *filter(math.isfinite, sizes)])
    maps = [
        HeatMap(
            "share of rows with several P = 1", shown, "head", "where", "repeated_ones"
        ),
        HeatMap("mean of K over its spread", shown, "head", "where", "k_mean"),
    ]
    return maps + [
        HeatMap(
            *(f"dQ error, units: {name.removeprefix('dq_')}", shown, "head", "where"),
            name,
            log=True,
            least=1.0,
            most=most,
        )
        for name in DQ
    ]
