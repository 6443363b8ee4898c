"""The README's figure: speed of the backward pass beside the error of its dQ.

Nothing is measured here. Speed, and dQ's error on N(0, 1), are the twelve cases that
`python -m analysis speed` left; dQ's error on U[0, 1), where the result is a small
difference of large numbers, is what `python -m attn_jax.audit` found at 512 to 16 384
keys with and without a causal mask. Both in units of the unavoidable rounding.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from analysis import ExperimentError
from analysis.figures import styles
from analysis.record import Row, check_writable, write, written

SUMMARY = "figure of the README: speed of the backward pass beside the error of dQ"
SPEED = Path("results", "speed", "nvidia-h200-default.csv")
AUDITS = Path("results", "accuracy", "audit")
# Implementation of the speed table -> what it is called, its audit.
KERNELS = {
    "pallas": ("ours", "pallas"),
    "cudnn": ("cuDNN", "cudnn"),
    "cudnn-deterministic": ("cuDNN, deterministic", ""),
    "tokamax": ("tokamax, Mosaic GPU", "tokamax-mosaic"),
    "torch-cudnn": ("PyTorch, cuDNN", ""),
    "torch-flash": ("PyTorch, FlashAttention-2", ""),
    "xla": ("XLA", "xla"),
}
# Panel -> its axis, the ends of that, whether it is logarithmic, and what stands where
# there is nothing to show.
PANELS = {
    "backward pass, one H200": (
        "TFLOP/s, more is better",
        (0, 680),
        False,
        "not timed",
    ),
    "dQ on N(0, 1)": ("error of dQ in units", (0.9, 1.6), False, "not timed"),
    "dQ on U[0, 1)": ("error of dQ in units", (0.6, 900), True, "not audited"),
}
MARKERS = {64: "o", 128: "s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    out = SPEED.with_name("nvidia-h200-backward")
    parser.add_argument(
        "--out",
        type=Path,
        default=out,
        metavar="STEM",
        help=f"of .png, .csv and .json (default {out})",
    )


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Draws the figure and writes the points in it.

    Raises:
      UsageError: the files cannot be written.
      ExperimentError: a table that it is made of is not there.
    """
    check_writable(options.out)
    try:
        points = [*_timed(SPEED), *_audited(AUDITS)]
    except OSError as error:
        raise ExperimentError(
            f"{error.filename} is missing: {error.strerror}"
        ) from error
    made_of = [
        str(SPEED),
        *(str(AUDITS / audit) for _, audit in KERNELS.values() if audit),
    ]
    described = {"command": command, "made_of": made_of}
    files = write(points, described, options.out)
    picture = options.out.with_suffix(".png")
    with written(picture):
        draw(points, picture)
    return {"points": len(points), "files": [str(path) for path in [*files, picture]]}


def _timed(table: Path) -> Iterator[Row]:
    """Speed and, of the same program, dQ's error on N(0, 1)."""
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["pass"] != "backward" or row["implementation"] not in KERNELS:
                continue
            for panel, column in zip(PANELS, ("tflops", "normal_dq"), strict=False):
                yield {
                    **{"panel": panel, "kernel": row["implementation"]},
                    **{"keys": int(row["S"]), "head_dim": int(row["H"])},
                    **{"mask": row["mask"], "value": float(row[column])},
                }


def _audited(folder: Path) -> Iterator[Row]:
    for kernel, (_, audit) in KERNELS.items():
        if not audit:
            continue
        report = json.loads((folder / audit / "report.json").read_text())
        for cell in report["cells"]:
            if (
                cell["family"] == "uniform"
                and cell["mask"] in ("full", "causal")
                and cell["query_length"] == cell["key_length"]
                and cell["status"] == "measured"
            ):
                yield {
                    **{"panel": "dQ on U[0, 1)", "kernel": kernel},
                    **{"keys": cell["key_length"], "head_dim": cell["head_dim"]},
                    **{"mask": cell["mask"]},
                    "value": float(cell["errors"]["dquery"]["units"]),
                }


def draw(points: Sequence[Row], path: Path) -> None:
    """A line for each kernel, a panel for each measure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    looks = styles(KERNELS)
    lines = {kernel: -number for number, kernel in enumerate(KERNELS)}
    for number, (panel, (label, ends, log, nothing)) in enumerate(PANELS.items()):
        axes = figure.add_subplot(1, len(PANELS), number + 1)
        for kernel in KERNELS:
            colour = looks[kernel]["color"]
            shown = [p for p in points if (p["panel"], p["kernel"]) == (panel, kernel)]
            for dim, marker in MARKERS.items():
                values = [p["value"] for p in shown if p["head_dim"] == dim]
                # Above and below the line, or one would hide the other.
                height = lines[kernel] + (0.14 if dim == 64 else -0.14)
                axes.plot(
                    values,
                    [height] * len(values),
                    marker,
                    color=colour,
                    markersize=5.5,
                    alpha=0.75,
                    markerfacecolor="white" if dim == 64 else colour,
                )
            if not shown:
                middle = (ends[0] * ends[1]) ** 0.5 if log else sum(ends) / 2
                at = middle, lines[kernel]
                axes.text(*at, nothing, ha="center", va="center", color="#777777")
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if number > 0:
            axes.axvline(1, color="#333333", linewidth=1, linestyle=":", zorder=0)
        axes.set(xlim=ends, ylim=(min(lines.values()) - 0.6, 0.6), xlabel=label)
        names = [name if number == 0 else "" for name, _ in KERNELS.values()]
        axes.set_yticks(list(lines.values()), names)
        axes.set_title(panel, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params("y", length=0)
    dark = "#333333"
    legend = [
        Line2D(
            [],
            [],
            marker=marker,
            linewidth=0,
            color=dark,
            markerfacecolor="white" if dim == 64 else dark,
            label=f"head dim {dim}",
        )
        for dim, marker in MARKERS.items()
    ]
    rounded = "the exact result, rounded once"
    legend.append(Line2D([], [], color=dark, linewidth=1, linestyle=":", label=rounded))
    figure.legend(
        handles=legend, loc="outside lower center", ncols=len(legend), frameon=False
    )
    figure.savefig(path, dpi=130)
