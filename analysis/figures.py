"""Figures: panels of lines with 95 % intervals, the points in them, and heat maps.

A kernel, a recipe, an arm of a training looks the same in all of them (`styles`).
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.record import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that colour-blind people tell apart: Okabe and Ito's, then some of Paul Tol's.
_BLACK, _GREY, _ORANGE, _SKY = "#000000", "#999999", "#E69F00", "#56B4E9"
_GREEN, _BLUE, _RED, _PINK = "#009E73", "#0072B2", "#D55E00", "#CC79A7"
_WINE, _INDIGO, _OLIVE, _BROWN = "#882255", "#332288", "#999933", "#A07800"
# A recipe has the colour of the kernel that follows it, and another marker.
_STYLES: dict[str, tuple[str, str]] = {
    # Eager attention, the paper's baseline, and the training with it.
    **{name: (_BLACK, "s") for name in ("eager_bf16", "baseline", "reference")},
    # Ours.
    "pallas": (_BLUE, "o"),
    "attn_jax": (_BLUE, "D"),
    "attn_jax_hopper": (_BLUE, "P"),
    # As others are shipped.
    "cudnn": (_RED, "o"),
    "cudnn-deterministic": (_RED, "v"),
    "flash2": (_RED, "D"),
    "tokamax": (_GREEN, "o"),
    "torch-cudnn": (_PINK, "o"),
    "torch-flash": ("#555555", "o"),
    "xla": (_BROWN, "o"),
    "jax_nn": (_BROWN, "D"),
    # One cure, both, and the stronger one (notebooks/02_backward.ipynb).
    "flash2, finer O": (_GREEN, "o"),
    "flash2, mean of K": (_ORANGE, "^"),
    "flash2, both": (_SKY, "s"),
    "flash2, finer O, row's centre": (_PINK, "v"),
    # With a state of 16 bits.
    "flash1_paper": (_PINK, "o"),
    "flash2_op_by_op": (_WINE, "v"),
    "narrow_output": (_OLIVE, "^"),
    "narrow_sum": (_SKY, "P"),
    "eager_op_by_op": (_GREY, "D"),
    "eager_chained": (_GREEN, "^"),
    "flash1_stored": (_INDIGO, "D"),
    "flash2_chained": (_ORANGE, "^"),
    # Over several devices.
    "rounded": (_GREY, "s"),
    "ring_flash_attn": (_ORANGE, "^"),
    "issue_42": (_PINK, "v"),
    "llama3": (_SKY, "P"),
    "te_ring": (_GREEN, "s"),
    "lucidrains": (_WINE, "P"),
    # Arms of a training.
    "re-run": (_OLIVE, "x"),
    "ulp": (_GREY, "s"),
    "graph": (_WINE, "x"),
    "pallas-no-cures": (_SKY, "v"),
    "pallas-repeated-max": (_INDIGO, "P"),
    "emulated:flash2": (_GREEN, "^"),
    "fp32": (_ORANGE, "^"),
    "tf32": (_BROWN, "^"),
    "bf16": (_SKY, "^"),
    "bf16_pure": (_PINK, "P"),
    "fp16": (_GREEN, "v"),
    "fp16-static": (_WINE, "D"),
    "order": (_GREEN, "D"),
    "init": (_INDIGO, "v"),
    "mesh-2": (_GREEN, "P"),
    "mesh-4": (_ORANGE, "P"),
    **{
        f"ring-{size}-{bits}": (colour, marker)
        for size, colour in ((2, _GREEN), (4, _ORANGE), (8, _PINK))
        for bits, marker in ((16, "<"), (32, ">"))
    },
}
# Of all other names, in the order of their appearance in a figure.
# Ten that readers without red or green tell apart, then ten tints and shades of them,
# which come with another marker since those readers may not.
_OTHERS = (
    *(_GREEN, _ORANGE, _SKY, _PINK, _INDIGO, _OLIVE, _WINE, _RED, _BLUE, _BLACK),
    *("#66C9AB", "#8F6200", "#2A7FAE", "#E3B5CF", "#8A80C4"),
    *("#5C5C1F", "#BD7F9F", "#EA9F66", "#69ABD2", "#777777"),
)
_OTHER_MARKERS, _SAME_MARKER = "osd^v", 10
# Where an interval that reaches zero ends on a logarithmic axis, as a share of y.
_SHORTEST = 0.1
_ENDS = ("low", "high")
# Bands, and many that lie over each other.
_SHADE, _FAINT, _MANY = 0.25, 0.15, 4
# How much of the room between two names points beside each other take.
_BESIDE = 0.7
# Widths of lines and of markers, in points: of the last series of a figure, and what
# the first has more. It is below the others, and seen beside those that lie on it.
_WIDTH, _WIDER = {"linewidth": 1.0, "markersize": 3.5}, 2.0


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    `rows` come from `summary.summarise`; `x`, `y` and `series` name columns of theirs.
    A row whose `y` is None is not shown, and its interval comes from the column Y_ci.
    `joined` draws a line through the points of a series. One of `bands` is an area
    between the columns Y_low and Y_high around its line. `level` draws a line across.

    Where a column `fewer` is true a point is of fewer runs than those before: its line
    is dotted and its marker empty. Where `ends` is, a run ends there: a cross is drawn.
    `fits` has the points (x, y) of a dashed line for a series. `legend` says of each
    series what is to be read beside the panel, of one without points, too; None leaves
    it to the figure's.
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
    bands: Sequence[str] = ()
    level: float | None = None
    fits: Mapping[str, Sequence[tuple[float, float]]] = dataclasses.field(
        default_factory=dict
    )
    legend: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """A column of a table by two others, each value written in its field.

    `rows` hold the numbers `x` and the names `y`; a `value` that is None or not finite
    leaves its field empty. Colours run from `least` to `most` (None: of the values),
    on a logarithmic scale with `log`, where both are above zero. `digits`: of a value.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    x: str
    y: str
    value: str
    log: bool = False
    least: float | None = None
    most: float | None = None
    digits: int = 3


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


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Colour and marker of every series of a figure.

    Names that have none of their own get colours that nobody else has there, in their
    order, with another marker from ten to ten; past the last colour comes the first.
    """
    names = list(dict.fromkeys(names))
    taken = {_STYLES[name][0] for name in names if name in _STYLES}
    free = [colour for colour in _OTHERS if colour not in taken] or list(_OTHERS)
    looks = {name: _STYLES[name] for name in names if name in _STYLES}
    for place, name in enumerate(name for name in names if name not in _STYLES):
        marker = place // _SAME_MARKER % len(_OTHER_MARKERS)
        looks[name] = free[place % len(free)], _OTHER_MARKERS[marker]
    return {name: {"color": c, "marker": m} for name, (c, m) in looks.items()}


def write_figure(
    panels: Sequence[Panel], path: Path, columns: int = 2, caption: str = ""
) -> None:
    """Writes the picture that `draw` makes."""
    draw(panels, columns, caption).savefig(path, dpi=120)


def draw(panels: Sequence[Panel], columns: int = 2, caption: str = "") -> "Figure":
    """Draws the panels, `columns` to a line; a series looks the same in all of them.
    `caption` stands above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    beside = 2 * (columns if any(one.legend for one in panels) else 1)
    size = (4.2 * columns + beside, 3.6 * lines)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    if caption:
        figure.suptitle(caption, fontsize=9, x=0.01, horizontalalignment="left")
    shown: dict[str, Any] = {}
    looks = styles(
        str(name)
        for one in panels
        for name in (*(one.legend or ()), *(row[one.series] for row in one.rows))
    )
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        series: dict[str, list[Row]] = {}
        for row in panel.rows:
            if row[panel.y] is not None:
                series.setdefault(str(row[panel.series]), []).append(dict(row))
        names = list(dict.fromkeys(row[panel.x] for row in panel.rows))
        places = {name: place for place, name in enumerate(names)}
        is_named = any(isinstance(value, str) for value in names)
        for turn, (name, points) in enumerate(series.items()):
            if not is_named:  # A line does not go back to a point that came late.
                points.sort(key=operator.itemgetter(panel.x))
            x = [point[panel.x] for point in points]
            if is_named:
                # Points that are not joined stand beside each other.
                aside = 0.0 if panel.joined else (turn + 0.5) / len(series) - 0.5
                x = [places[value] + _BESIDE * aside for value in x]
            wider = _WIDER * (1 - list(looks).index(name) / len(looks))
            handle = _draw_series(axes, panel, name, x, points, looks[name], wider)
            if panel.legend is None:
                shown[name] = handle
        if panel.level is not None:
            axes.axhline(panel.level, color="black", linewidth=0.8, linestyle=":")
        if panel.log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: _power_of_two(value))
        axes.tick_params("x", labelsize=7)
        if panel.log_y:
            axes.set_yscale("log")
            _mark_short_range(axes)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.x_label)
        if is_named:
            axes.set_xticks(range(len(names)), [_literal(str(x)) for x in names])
            # Names side by side would run into each other.
            axes.tick_params("x", labelrotation=90, labelsize=7)
        axes.set_ylabel(panel.y_label, fontsize=9)
        axes.grid(alpha=0.3)
        if panel.legend is not None:
            _write_legend(axes, panel.legend, looks)
    if shown:
        labels = [_literal(name) for name in shown]
        figure.legend(shown.values(), labels, loc="outside right upper", fontsize=8)
    return figure


def _literal(name: str) -> str:
    """A name as text: Matplotlib takes what stands between two $ for a formula."""
    return name.replace("$", r"\$")


def _write_legend(axes, legend: Mapping[str, str], looks: Mapping[str, Any]) -> None:
    """To the right of the axes, where it covers nothing."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **_WIDTH, **looks[x]) for x in legend]
    axes.legend(
        *(lines, legend.values()),
        **{"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0},
        fontsize=7,
        frameon=False,
    )


def _draw_series(
    axes,
    panel: Panel,
    name: str,
    x: Sequence[Any],
    points: Sequence[Row],
    styled: Mapping[str, str],
    wider: float,
) -> Any:
    y, bars = [point[panel.y] for point in points], None
    if name in panel.bands:
        ends = ([point[f"{panel.y}_{end}"] for point in points] for end in _ENDS)
        shade = _SHADE if len(panel.bands) < _MANY else _FAINT
        axes.fill_between(x, *ends, color=styled["color"], alpha=shade, linewidth=0)
    else:
        bars = _bars(points, panel)
    if name in panel.fits:
        style: dict[str, Any] = {"linestyle": "--", "linewidth": 0.7}
        axes.plot(*zip(*panel.fits[name], strict=True), color=styled["color"], **style)
    full = sum(not point.get("fewer") for point in points)
    size = {name: x + wider * panel.joined for name, x in _WIDTH.items()}
    size["zorder"] = 3 - wider / _WIDER
    if not panel.joined:
        size["linewidth"] = 0.0
    if full < len(points):
        # From the last point of all runs on, so that the line is not broken.
        rest = slice(max(full - 1, 0), None)
        style = {"linestyle": ":", "markerfacecolor": "white", **size}
        axes.plot(x[rest], y[rest], **style, **styled)
    ends = [place for place, point in enumerate(points) if point.get("ends")]
    style = {
        "linestyle": "",
        "marker": "X",
        "markersize": 7,
        "markeredgecolor": "white",
    }
    at = [x[place] for place in ends], [y[place] for place in ends]
    axes.plot(*at, color=styled["color"], zorder=4, **style)
    return axes.errorbar(
        x[:full],
        y[:full],
        yerr=None if bars is None else [some[:full] for some in bars],
        elinewidth=1,
        capsize=2,
        **size,
        **styled,
    )


def _power_of_two(value: float) -> str:
    exponent = round(math.log2(value))
    return f"{value:.0f}" if exponent < 17 else f"$2^{{{exponent}}}$"


def _mark_short_range(axes) -> None:
    """Numbers at 1, 2 and 5 where a logarithmic axis shows few powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    least, most = axes.get_ylim()
    if most < 100 * least:
        few = (1, 2, 5) if most > 8 * least else (1, 1.5, 2, 3, 4, 5, 7)
        axes.yaxis.set_major_locator(LogLocator(subs=few))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bars(points: Sequence[Row], panel: Panel) -> list[list[float]]:
    """Lengths of the bars below and above each point."""
    # A point of one seed has no interval; it is drawn without a bar.
    widths = [point.get(f"{panel.y}_ci") for point in points]
    above = [x if x is not None and math.isfinite(x) else 0.0 for x in widths]
    if not panel.log_y:
        return [above, above]
    # Zero has no place on the axis, and a bar that reaches it would not be drawn.
    most = [(1 - _SHORTEST) * max(point[panel.y], 0.0) for point in points]
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
                    text = f"{value:.{one.digits}g}"
                    _write_on(axes, picture, column, line, value, text)
    figure.savefig(path, dpi=120)


def _write_on(axes, picture, column: int, line: int, value: float, text: str) -> None:
    # Yellow fields take black letters, blue ones white.
    dark = picture.norm(value) < 0.6
    axes.text(
        *(column, line, text),
        ha="center",
        va="center",
        fontsize=6,
        color="white" if dark else "black",
    )
