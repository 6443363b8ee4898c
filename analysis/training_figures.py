"""Figures of paired trainings: the paper's figures 7 and 8, and what they lack."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.arms import REFERENCE
from analysis.figures import Panel, write_figure
from analysis.record import Row, written
from analysis.summary import plus_minus, summarise
from analysis.training_growth import FIRST_FITTED, POWERS, SLOPE, curve, fits
from analysis.training_rows import Stops, before_stops, of_all, seeds, stops

_OF_WEIGHTS = {
    "max_abs": "max |difference|",
    "w1": "Wasserstein-1",
    "w1_over_sigma": "Wasserstein-1 / sigma",
    "rel_l2": "relative L2",
    "drift": "share of what training moved",
}
_OF_RUNS = {
    "function": "distance of the outputs, relative",
    "direct": "direct error of a step, relative",
    "feedback": "feedback of a step, relative",
    "loss": "loss",
}
# A lower end that reaches zero has no place on a logarithmic axis; as `figures` has it.
_SHORTEST = 0.1
_CAPTION = (
    "Means over seeds. Bands: 95 % intervals (Student's t) of two seeds or more, cut "
    "off at a tenth of the mean on logarithmic axes.\n"
    f"Dashed: least squares from step {FIRST_FITTED} on, seed by seed; exponent or "
    "slope beside the name. What is 0 has no place on a logarithmic axis."
)
_STOPPED = (
    "\nCross: last comparison before a run stopped, its loss or gradient not finite. "
    "Dotted, empty markers, without intervals: the runs that went on; fits are theirs."
)


def write(weights: Sequence[Row], runs: Sequence[Row], path: Path) -> list[Path]:
    """Draws all panels that have something to show; returns the path.

    Raises:
      UsageError: it cannot be written.
    """
    stopped = stops(runs)
    caption = _CAPTION + (_STOPPED if stopped else "")
    with written(path):
        write_figure(panels(weights, runs), path, caption=caption)
    return [path]


def panels(weights: Sequence[Row], runs: Sequence[Row]) -> list[Panel]:
    """One for each measure, and one of W1 / sigma on linear axes, where its slope is
    that of a straight line."""
    stopped, began = stops(runs), seeds(runs)
    whole = before_stops(of_all(weights), stopped)
    fitted = fits(whole, max(row["step"] for row in runs))
    found = []
    for rows, labels in (
        (whole, _OF_WEIGHTS),
        (before_stops(runs, stopped), _OF_RUNS),
    ):
        for name, label in labels.items():
            means = _means(rows, name, began, stopped)
            powers = fitted if name in POWERS else []
            found.append(_panel(label, name, means, powers, began, stopped))
            if name == SLOPE:
                straight = _panel(label, name, means, fitted, began, stopped, log=False)
                found.append(straight)
    return [panel for panel in found if panel.rows]


def _means(
    rows: Sequence[Row],
    name: str,
    began: Mapping[str, Sequence[int]],
    stopped: Stops,
) -> list[Row]:
    """Of every arm and step, and whether a run of it stopped before or stops next."""
    known = [row for row in rows if row[name] is not None]
    steps: dict[str, list[int]] = {arm: [] for arm in began}
    for row in known:
        steps[row["arm"]].append(row["step"])
    found = []
    for row in summarise(known, ["arm", "step"], [name]):
        arm, step = row["arm"], row["step"]
        # A reference that stops leaves an arm with nothing to be held against.
        own, gone = (
            [stopped[one, s] for s in began[arm] if (one, s) in stopped]
            for one in (arm, REFERENCE)
        )
        row["fewer"] = row["seeds"] < len(began[arm]) and any(
            step > end for end in own + gone
        )
        ends = [max((x for x in steps[arm] if x <= end), default=None) for end in own]
        row["ends"] = step in ends
        found.append(row)
    return found


def _panel(
    label: str,
    name: str,
    means: Sequence[Row],
    fitted: Sequence[Row],
    began: Mapping[str, Sequence[int]],
    stopped: Stops,
    *,
    log: bool = True,
) -> Panel:
    shown = [
        _with_ends(row, name, log=log)
        for row in means
        if math.isfinite(row[name]) and (row[name] or not log)
    ]
    arms = dict.fromkeys(row["arm"] for row in means)
    own = {
        arm: [fit for fit in fitted if fit["arm"] == arm and name in fit]
        for arm in dict.fromkeys(row["arm"] for row in shown)
    }
    steps = sorted({float(r["step"]) for r in shown if r["step"] >= FIRST_FITTED})
    legend = {}
    for arm in arms:
        numbers = [row[name] for row in means if row["arm"] == arm]
        told = _told(arm, name, numbers, own.get(arm, ()), log=log)
        legend[arm] = told + _stopped_of(began[arm], arm, stopped)
    return Panel(
        label if log else f"{label}, linear axes",
        *(shown, "step", name, "arm", "steps", label),
        log_x=log,
        log_y=log,
        bands=list(arms),
        fits={
            arm: list(zip(steps, curve(name, some, steps), strict=True))
            for arm, some in own.items()
            if some
        },
        legend=legend,
    )


def _with_ends(row: Row, name: str, *, log: bool) -> Row:
    """With the ends of its interval, which one seed has not, and survivors have of
    themselves alone."""
    mean, width = row[name], row[f"{name}_ci"]
    if row["fewer"] or not math.isfinite(width):
        width = 0.0
    low = max(mean - width, _SHORTEST * mean if log else 0.0)
    return row | {f"{name}_low": low, f"{name}_high": mean + width}


def _told(
    arm: str,
    name: str,
    means: Sequence[float],
    own: Sequence[Row],
    *,
    log: bool,
) -> str:
    if not any(map(math.isfinite, means)):
        return f"{arm}: not finite"
    if log and not any(means):
        return f"{arm}: 0 at all steps"
    if not own:
        return arm
    (mean,) = summarise(own, ["arm"], [name])
    slope = plus_minus(mean, name)
    return f"{arm}: {slope} / 1000 steps" if name == SLOPE else f"{arm}: step^({slope})"


def _stopped_of(began: Sequence[int], arm: str, stopped: Stops) -> str:
    ends = [seed for seed in began if (arm, seed) in stopped]
    return f"\n  {len(ends)} of {len(began)} stopped" if ends else ""
