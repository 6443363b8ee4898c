"""The figure of a comparison: by step, or by group where there is one step alone."""

import math
from collections.abc import Sequence
from pathlib import Path

from analysis.figures import Panel, write_figure
from analysis.record import Row, shortened, written

_PANELS = {
    "max_abs": "largest difference",
    "w1": "Wasserstein-1 distance",
    "rel_l2": "relative L2 distance",
    "drift": "drift over travel",
}
# More names than these run into each other, longer ones leave no room for points.
_MOST_GROUPS, _MOST_CHARACTERS = 40, 30
# An axis reaches beyond its points, and Matplotlib's ticks go on to where FP64 ends.
_LEAST, _MOST = 1e-200, 1e200


def write(rows: Sequence[Row], picture: Path) -> bool:
    """Draws four measures; returns whether one of them has a point to be drawn."""
    # A run without steps has no place on an axis of them.
    steps = {row["step"] for row in rows}
    several = None not in steps and len(steps - {0}) > 1
    panels = [
        _by_step(rows, name) if several else _by_group(rows, name) for name in _PANELS
    ]
    panels = [panel for panel in panels if panel.rows]
    if panels:
        with written(picture):
            write_figure(panels, picture)
    return bool(panels)


def _by_step(rows: Sequence[Row], name: str) -> Panel:
    # Step 0 has no place on a logarithmic axis.
    shown = [r for r in rows if r["kind"] == "all" and r["step"] and _drawn(r[name])]
    return Panel(_PANELS[name], _named(shown), "step", name, "run", "step", name)


def _by_group(rows: Sequence[Row], name: str) -> Panel:
    last: dict[str, int] = {}
    for row in rows:
        last[row["run"]] = max(row["step"] or 0, last.get(row["run"], 0))
    shown = [
        row
        for row in rows
        if row["kind"] == "group"
        and (row["step"] or 0) == last[row["run"]]
        and _drawn(row[name])
    ]
    title, groups = _PANELS[name], list(dict.fromkeys(row["scope"] for row in shown))
    if len(groups) > _MOST_GROUPS:
        largest = {g: max(r[name] for r in shown if r["scope"] == g) for g in groups}
        kept = set(sorted(groups, key=lambda g: -largest[g])[:_MOST_GROUPS])
        groups = [group for group in groups if group in kept]
        shown = [row for row in shown if row["scope"] in kept]
        title += f", the {_MOST_GROUPS} largest"
    labels = dict(zip(groups, shortened(groups, _MOST_CHARACTERS), strict=True))
    shown = [row | {"scope": labels[row["scope"]]} for row in _named(shown)]
    return Panel(
        *(title, shown, "scope", name, "run", "group", name),
        log_x=False,
        joined=False,
    )


def _drawn(value: float | None) -> bool:
    """Whether it has a place on a logarithmic axis."""
    return value is not None and math.isfinite(value) and _LEAST < value < _MOST


def _named(rows: Sequence[Row]) -> list[Row]:
    names = shortened([row["run"] for row in rows], _MOST_CHARACTERS) if rows else []
    return [row | {"run": name} for row, name in zip(rows, names, strict=True)]
