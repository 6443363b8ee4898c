"""Tables with what is needed to make them again, and how they are shown."""

import csv
import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.record import environment as general_environment

Row = dict[str, Any]


def environment(command: str) -> dict[str, Any]:
    """Command, date, versions, device and git commit."""
    described = general_environment()
    if described["platform"] == "gpu":
        described["driver"] = _driver()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"command": command, "date": now, **described}


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.splitlines()[0].strip()


def write(rows: Sequence[Row], described: dict[str, Any], stem: Path) -> list[Path]:
    """Writes STEM.csv, numbers to five digits, and STEM.json; returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    table, beside = stem.with_suffix(".csv"), stem.with_suffix(".json")
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _short(value) for key, value in row.items()})
    beside.write_text(json.dumps(described, indent=2) + "\n")
    return [table, beside]


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def show(rows: Sequence[Row], title: str) -> None:
    """Prints a table to stderr, numbers to three digits."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=None, header_style="bold")
    for column, first in rows[0].items():
        table.add_column(
            column, justify="left" if isinstance(first, str) else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console(stderr=True, width=180).print(table)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
