"""Figures: panels of lines with 95 % intervals, the points in them, and heat maps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.record import Row

# Where an interval that reaches zero ends on a logarithmic axis, as a share of y.
_SHORTEST = 0.1


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    `rows` come from `summary.summarise`; `x`, `y` and `series` name columns of theirs.
    A row whose `y` is None is not shown, and its interval comes from the column Y_ci.
    `joined` draws a line through the points of a series.
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
    joined: bool = True


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """A column of a table by two others, each value written in its field.

    `rows` hold the numbers `x` and the names `y`; a `value` that is None or not finite
    leaves its field empty. Colours run from `least` to `most` (None: of the values),
    on a logarithmic scale with `log`, where both are above zero.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    x: str
    y: str
    value: str
    log: bool = False
    least: float | None = None
    most: float | None = None


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


def write_figure(panels: Sequence[Panel], path: Path, columns: int = 2) -> None:
    """Draws the panels, `columns` to a line; a series looks the same in all of them."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.2 * columns + 2, 3.6 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    pairs = colormaps["tab20"]
    # The dark ones first; a series past the last light one has another marker.
    palette = [pairs(i) for first in (0, 1) for i in range(first, pairs.N, 2)]
    shown: dict[str, Any] = {}
    styles: dict[str, Any] = {}
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        series: dict[str, list[Row]] = {}
        for point in plotted([panel]):
            series.setdefault(str(point["series"]), []).append(point)
        for name, points in series.items():
            turn, colour = divmod(len(styles), len(palette))
            style = styles.setdefault(
                name, {"color": palette[colour], "marker": "osd^v"[turn % 5]}
            )
            shown[name] = axes.errorbar(
                [p["x"] for p in points],
                [p["y"] for p in points],
                yerr=_bars(points, panel.log_y),
                markersize=3.5,
                linewidth=1 if panel.joined else 0,
                elinewidth=1,
                capsize=2,
                **style,
            )
        if panel.log_x:
            axes.set_xscale("log", base=2)
        if panel.log_y:
            axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.x_label)
        if any(isinstance(row[panel.x], str) for row in panel.rows):
            # Names side by side would run into each other.
            axes.tick_params("x", labelrotation=90, labelsize=7)
        axes.set_ylabel(panel.y_label, fontsize=9)
        axes.grid(alpha=0.3)
    figure.legend(shown.values(), shown, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


def _bars(points: Sequence[Row], log_y: bool) -> list[list[float]]:
    """Lengths of the bars below and above each point."""
    # A point of one seed has no interval; it is drawn without a bar.
    above = [
        p["ci"] if p["ci"] is not None and math.isfinite(p["ci"]) else 0.0
        for p in points
    ]
    if not log_y:
        return [above, above]
    # Zero has no place on the axis, and a bar that reaches it would not be drawn.
    most = [(1 - _SHORTEST) * max(p["y"], 0.0) for p in points]
    return [[min(pair) for pair in zip(above, most, strict=True)], above]


# A taller figure is no picture any more; its fields then hold no numbers.
_MOST_LINES = 60


def write_heat_maps(maps: Sequence[HeatMap], path: Path) -> None:
    """Draws the maps side by side; they share the names of their lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    lines = max(len({row[one.y] for row in one.rows}) for one in maps)
    height = 1.6 + 0.3 * min(lines, _MOST_LINES)
    figure = Figure(figsize=(3.4 * len(maps) + 1.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    for number, one in enumerate(maps):
        axes = figure.add_subplot(1, len(maps), number + 1)
        columns = sorted({row[one.x] for row in one.rows})
        names = list(dict.fromkeys(row[one.y] for row in one.rows))
        field = np.full((len(names), len(columns)), np.nan)
        for row in one.rows:
            value = row[one.value]
            if value is not None and math.isfinite(value):
                field[names.index(row[one.y]), columns.index(row[one.x])] = value
        scale = LogNorm if one.log else Normalize
        there = field[np.isfinite(field)]
        ends = [
            given if given is not None else float(found(there)) if there.size else 1.0
            for given, found in ((one.least, np.min), (one.most, np.max))
        ]
        picture = axes.imshow(
            np.ma.masked_invalid(field),
            aspect="auto",
            norm=scale(min(ends), max(ends)),
            cmap="viridis",
        )
        axes.set_xticks(range(len(columns)), [str(x) for x in columns], fontsize=7)
        axes.set_yticks(range(len(names)), names if number == 0 else [""] * len(names))
        axes.tick_params("y", labelsize=7)
        axes.set_xlabel(one.x)
        axes.set_title(one.title, fontsize=9)
        figure.colorbar(picture, ax=axes)
        if lines <= _MOST_LINES and len(columns) <= 16:
            for (line, column), value in np.ndenumerate(field):
                if math.isfinite(value):
                    _write_on(axes, picture, column, line, value)
    figure.savefig(path, dpi=120)


def _write_on(axes, picture, column: int, line: int, value: float) -> None:
    # Yellow fields take black letters, blue ones white.
    dark = picture.norm(value) < 0.6
    axes.text(
        *(column, line, f"{value:.3g}"),
        ha="center",
        va="center",
        fontsize=6,
        color="white" if dark else "black",
    )
