"""Means over seeds with 95 % confidence intervals, and ratios paired by seed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from analysis.record import Row

_CONFIDENCE = 0.95


def half_width(values: Sequence[float]) -> float:
    """Half width of the 95 % interval of the mean: t(0.975, n - 1) s / sqrt(n).

    Student's t, for independent and roughly normal values; inf for a single one.
    """
    n = len(values)
    if n < 2:
        return math.inf
    quantile = stdtrit(n - 1, 0.5 + _CONFIDENCE / 2)
    return float(quantile * np.std(values, ddof=1) / math.sqrt(n))


def summarise(
    rows: Iterable[Mapping[str, Any]],
    by: Sequence[str],
    values: Sequence[str],
    *,
    baseline: tuple[str, Any] | None = None,
) -> list[Row]:
    """One row for each combination of the columns `by`, in order of appearance.

    Of every column of `values` it holds the mean over seeds (V), the standard error
    (V_se) and the half width of the 95 % interval (V_ci); `seeds` counts the draws. A
    value that is None for a seed is None in all of them.

    With `baseline`, a column of `by` and one of its values, V_ratio and V_ratio_ci are
    the mean and interval of V / (V of the baseline row of the same seed): the group
    whose other columns are the same. Pairing takes out what the seeds share. They are
    None where there is no such group or a divisor is 0.

    Raises ValueError if two rows of one group have the same `seed`: `by` then does not
    tell them apart.
    """
    groups: dict[tuple, dict[Any, Mapping[str, Any]]] = {}
    for draw in rows:
        group = groups.setdefault(tuple(draw[column] for column in by), {})
        if draw["seed"] in group:
            raise ValueError(
                f"two rows of seed {draw['seed']} agree in {', '.join(by)}: add the "
                "column that tells them apart"
            )
        group[draw["seed"]] = draw
    found = []
    for key, group in groups.items():
        row: Row = {**dict(zip(by, key, strict=True)), "seeds": len(group)}
        other = None
        if baseline is not None:
            column, of = baseline
            other = groups.get(
                tuple(of if c == column else k for c, k in zip(by, key, strict=True))
            )
        for name in values:
            numbers = [draw[name] for draw in group.values()]
            row |= _mean(name, numbers)
            if baseline is not None:
                row |= _mean(f"{name}_ratio", _ratios(name, group, other))
        found.append(row)
    return found


def _mean(name: str, numbers: Sequence[float | int | None]) -> Row:
    known = [float(x) for x in numbers if x is not None]
    if len(known) < len(numbers) or not known:
        return {name: None, f"{name}_se": None, f"{name}_ci": None}
    n = len(known)
    error = float(np.std(known, ddof=1) / math.sqrt(n)) if n > 1 else math.inf
    return {
        name: float(np.mean(known)),
        f"{name}_se": error,
        f"{name}_ci": half_width(known),
    }


def _ratios(name: str, group, other) -> list[float | None]:
    if other is None or group.keys() - other.keys():
        return []
    return [
        draw[name] / below if draw[name] is not None and below else None
        for seed, draw in group.items()
        for below in [other[seed][name]]
    ]


def pivot(
    rows: Iterable[Mapping[str, Any]], by: Sequence[str], column: str, value: str
) -> list[Row]:
    """A table to read: a line for each `by`, the values of `column` side by side."""
    lines: dict[tuple, Row] = {}
    for row in rows:
        key = tuple(row[name] for name in by)
        line = lines.setdefault(key, dict(zip(by, key, strict=True)))
        at = row[column]
        head = at if isinstance(at, str) else f"{column}={at}"
        line[head] = plus_minus(row, value)
    # A line may lack columns; a table needs them all, in their order.
    heads = list(dict.fromkeys(head for line in lines.values() for head in line))
    return [{head: line.get(head, "") for head in heads} for line in lines.values()]


def plus_minus(row: Mapping[str, Any], value: str) -> str:
    """A mean with its interval, "4.33 ± 0.29"; the mean alone where there is a single
    value and so no interval, nothing where it is None.

    Three digits of the mean and as many places of the half width; outside 0.001 to
    10000 both before one power of ten.
    """
    mean, width = row[value], row[f"{value}_ci"]
    if mean is None:
        return ""
    if mean == 0 or not math.isfinite(mean):
        told, by, power = f"{mean:g}", f"{width:.2g}", ""
    # Of the mean as it is told: 9.999 is 10.0.
    elif -3 <= (exponent := int(f"{mean:.2e}".partition("e")[2])) <= 3:
        places = max(0, 2 - exponent)
        told, by, power = f"{mean:.{places}f}", f"{width:.{places}f}", ""
    else:
        told, by = (f"{x / 10.0**exponent:.2f}" for x in (mean, width))
        power = f"e{exponent:+03d}"
    if not math.isfinite(width):
        return told + power
    return f"({told} ± {by}){power}" if power else f"{told} ± {by}"
