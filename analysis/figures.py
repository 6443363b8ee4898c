"""Figures of sweeps: panels of lines with 95 % intervals, and the points in them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.record import Row


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    `rows` come from `summary.summarise`; `x`, `y` and `series` name columns of theirs.
    A row whose `y` is None is not shown, and its interval comes from the column Y_ci.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    x: str
    y: str
    series: str
    x_label: str
    y_label: str
    log_x: bool = True
    log_y: bool = True


def plotted(panels: Sequence[Panel]) -> list[Row]:
    """Every point that `write_figure` draws, in one long table."""
    return [
        {
            "panel": panel.title,
            "series": row[panel.series],
            "x_name": panel.x,
            "x": row[panel.x],
            "y_name": panel.y,
            "y": row[panel.y],
            "ci": row.get(f"{panel.y}_ci"),
            "seeds": row.get("seeds"),
        }
        for panel in panels
        for row in panel.rows
        if row[panel.y] is not None
    ]


def write_figure(panels: Sequence[Panel], path: Path) -> None:
    """Draws the panels side by side, three to a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        series: dict[str, list[Row]] = {}
        for point in plotted([panel]):
            series.setdefault(str(point["series"]), []).append(point)
        for name, points in series.items():
            # A point of one seed has no interval; it is drawn without a bar.
            bars = [
                p["ci"] if p["ci"] is not None and math.isfinite(p["ci"]) else 0.0
                for p in points
            ]
            axes.errorbar(
                [p["x"] for p in points],
                [p["y"] for p in points],
                yerr=bars,
                marker="o",
                markersize=3,
                linewidth=1,
                capsize=2,
                label=name,
            )
        if panel.log_x:
            axes.set_xscale("log", base=2)
        if panel.log_y:
            axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.grid(alpha=0.3)
        if series:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
