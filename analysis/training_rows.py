"""Rows of paired trainings: those a folder has, and those that say something of an arm.

An arm whose loss or gradient is not finite stops: its weights stay what they were while
the reference's go on. So nothing after that step is of the arm, and `before_stops`
leaves it out. (Once the reference has stopped nothing is compared with it.)
"""

import csv
import importlib.util
import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from analysis.record import Row
from train.config import UsageError

_WHOLE = ("seed", "step", "diverged", "captions")
# By arm and seed, of those that stopped: the steps they did before.
Stops = Mapping[tuple[str, int], int]


def of_all(weights: Iterable[Row]) -> list[Row]:
    """The rows of all weights together."""
    return [row for row in weights if row["kind"] == "all"]


def stops(runs: Iterable[Row]) -> Stops:
    """Which runs stopped, and after how many steps."""
    return {
        (row["arm"], row["seed"]): row["diverged"]
        for row in runs
        if row["diverged"] is not None
    }


def before_stops(rows: Iterable[Row], stopped: Stops) -> list[Row]:
    """The rows up to the step at which their run stopped."""
    return [
        row
        for row in rows
        if row["step"] <= stopped.get((row["arm"], row["seed"]), row["step"])
    ]


def seeds(runs: Iterable[Row]) -> dict[str, list[int]]:
    """Of every arm."""
    found: dict[str, dict[int, None]] = {}
    for row in runs:
        found.setdefault(row["arm"], {})[row["seed"]] = None
    return {arm: list(some) for arm, some in found.items()}


def by_table(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """`weights` and `runs` apart, without the column that tells them."""
    found: dict[str, list[Row]] = {"weights": [], "runs": []}
    for row in rows:
        rest = {name: value for name, value in row.items() if name != "table"}
        found[row["table"]].append(rest)
    return found["weights"], found["runs"]


def stored(folder: Path) -> tuple[list[Row], list[Row], Path]:
    """`weights` and `runs` of an earlier command, and the file the runs come from: with
    all their digits where the folder has them, else `runs.csv`, which has five.

    Raises:
      UsageError: the folder lacks them.
    """
    try:
        listed = _from_csv(folder / "runs.csv")
        for name in ("training.jsonl", "training.jsonl.xz"):
            path = folder / name
            if path.exists():
                return (*by_table(_from_lines(path, listed)), path)
        weights = _from_parquet(folder / "weights.parquet")
        path = folder / "runs.parquet"
        if path.exists():
            return weights, _from_parquet(path), path
        return weights, listed, folder / "runs.csv"
    except (OSError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        raise UsageError(
            f"{folder} has no tables to be made anew ({error}): it needs runs.csv and "
            "beside it training.jsonl or weights.parquet, as python -m analysis "
            "training leaves them"
        ) from error


def _from_csv(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} of {path.name} has not the columns' number")
    return [{name: _number(name, text) for name, text in row.items()} for row in rows]


def _number(name: str, text: str) -> Any:
    if name == "arm":
        return text
    if not text:
        return None
    return int(text) if name in _WHOLE else float(text)


def _from_lines(path: Path, listed: Iterable[Row]) -> list[Row]:
    """The rows of the arms and seeds listed, in that order."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    cells = {
        (line["cell"]["arm"], line["cell"]["seed"]): line["rows"]
        for line in lines
        if "cell" in line
    }
    wanted = dict.fromkeys((row["arm"], row["seed"]) for row in listed)
    return [
        {"arm": arm, "seed": seed, **row}
        for arm, seed in wanted
        for row in cells[arm, seed]
    ]


def _from_parquet(path: Path) -> list[Row]:
    if importlib.util.find_spec("polars") is None:
        raise ValueError(f"{path.name} needs polars")
    import polars

    try:
        rows = polars.read_parquet(path).to_dicts()
    except polars.exceptions.PolarsError as error:
        raise ValueError(f"{path.name}: {error}") from error
    for name in ("arm", "seed", "step"):
        if rows and name not in rows[0]:
            raise ValueError(f"{path.name} has no column {name}")
    return rows
