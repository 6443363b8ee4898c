"""The pictures of a run: its curves and a grid of captioned samples."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

_TILE = 144
_MARGIN = 10
_CAPTION_HEIGHT = 48
_COLUMN_CHARACTERS = 21
_PASS, _FAIL = (0, 140, 60), (200, 30, 30)


def write_loss_curve(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Training loss and held-out loss against the step, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label, style in (
        ("loss", "training", "-"),
        ("held_out_loss", "held out: averaged weights, evenly spaced times", "o-"),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
            axes.legend()
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("flow loss (mean squared error of the velocity)")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)


def write_shadow_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Units of error against the step, one panel a tensor and one line a layer.

    Of the attention that the last row is compared with. Zero (no
    gradient yet) and infinity have no place on an axis and are left out.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    against = rows[-1]["against"]
    rows = [row for row in rows if row["against"] == against]
    layers = sorted({row["layer"] for row in rows})
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(layers)))
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True)
    tensors = dict.fromkeys(row["tensor"] for row in rows)
    for axes, tensor in zip(panels.ravel(), tensors, strict=True):
        shown = [
            row for row in rows if row["tensor"] == tensor and 0 < row["units"] < np.inf
        ]
        for layer, colour in zip(layers, colours, strict=True):
            one = [row for row in shown if row["layer"] == layer]
            steps, units = ([row[name] for row in one] for name in ("step", "units"))
            axes.plot(steps, units, ".-", color=colour, label=f"layer {layer}")
        sizes = [row["units"] for row in shown]
        if sizes and max(sizes) > 10 * min(sizes):
            axes.set_yscale("log")
        axes.set_title(tensor)
        axes.grid(alpha=0.3, which="both")
    for axes in panels[1]:
        axes.set_xlabel("step")
    for axes in panels[:, 0]:
        axes.set_ylabel("RMS deviation, units of rounding")
    figure.legend(handles=panels[0, 0].get_lines(), loc="outside right center")
    figure.suptitle(f"Attention in training against {against}")
    figure.savefig(path, dpi=150)


def write_grid(
    images: UInt8[np.ndarray, "n R R 3"],
    captions: Sequence[str],
    verdicts: Sequence[bool] | None,
    path: Path,
) -> None:
    """Images with their captions below; a mark says whether the caption is met."""
    from PIL import Image, ImageDraw, ImageFont

    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    cell_width, cell_height = _TILE + _MARGIN, _TILE + _CAPTION_HEIGHT + _MARGIN
    page = Image.new(
        "RGB", (columns * cell_width + _MARGIN, rows * cell_height + _MARGIN), "white"
    )
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=11)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = _MARGIN + index % columns * cell_width
        top = _MARGIN + index // columns * cell_height
        tile = Image.fromarray(image).resize((_TILE, _TILE), Image.Resampling.NEAREST)
        page.paste(tile, (left, top))
        colour = (0, 0, 0)
        if verdicts is not None:
            colour = _PASS if verdicts[index] else _FAIL
            draw_mark(draw, left, top + _TILE + 4, verdicts[index])
        shown = caption if caption else "(no caption)"
        text = "\n".join(textwrap.wrap(shown, _COLUMN_CHARACTERS)[:3])
        draw.text((left + 16, top + _TILE + 2), text, fill=colour, font=font)
    page.save(path)


def draw_mark(draw: Any, left: int, top: int, passed: bool) -> None:
    """A tick or a cross, 10 pixels wide."""
    if passed:
        points = [(left, top + 5), (left + 4, top + 9), (left + 10, top)]
        draw.line(points, fill=_PASS, width=2)
    else:
        draw.line([(left, top), (left + 9, top + 9)], fill=_FAIL, width=2)
        draw.line([(left, top + 9), (left + 9, top)], fill=_FAIL, width=2)
