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


def _mean(name: str, numbers: Sequence[float | None]) -> Row:
    known = [x for x in numbers if x is not None]
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
