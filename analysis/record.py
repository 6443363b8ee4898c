"""Writes tables as csv, json, parquet or Markdown, with command and machine."""

import contextlib
import csv
import dataclasses
import datetime
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from attn_jax import machine
from train.config import UsageError
from train.record import environment as general_environment

Row = dict[str, Any]
# Of a printed table, the room between its columns, and what a name in it keeps.
_WIDTH, _PADDING, _LEAST_NAME = 180, 2, 24


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows to read, and what has to be said of them, or of why there are none."""

    rows: Sequence[Row]
    note: str = ""


def environment(command: str) -> dict[str, Any]:
    """Command, date, versions, device and git commit."""
    described = general_environment()
    if described["platform"] == "gpu":
        described["driver"] = machine.driver()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"command": command, "date": now, **described}


def device_name() -> str:
    """The device, as files are called after it: nvidia-h200."""
    return jax.devices()[0].device_kind.lower().replace(" ", "-")


def write(rows: Sequence[Row], described: dict[str, Any], stem: Path) -> list[Path]:
    """Writes STEM.csv, numbers to five digits, and STEM.json; returns their paths.

    Raises:
      UsageError: they cannot be written.
    """
    table, beside = _paths(stem)
    with written(table), table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _short(value) for key, value in row.items()})
    with written(beside):
        beside.write_text(json.dumps(described, indent=2) + "\n")
    return [table, beside]


def write_parquet(rows: Sequence[Row], path: Path) -> list[Path]:
    """Writes the rows as they are; returns the path, or nothing without polars.

    Raises:
      UsageError: it cannot be written.
    """
    if importlib.util.find_spec("polars") is None:
        print(f"no polars here: no {path.name}", file=sys.stderr)
        return []
    import polars

    with written(path):
        # The first rows may hold None where a later one has a number.
        polars.DataFrame(list(rows), infer_schema_length=None).write_parquet(path)
    return [path]


def check_writable(stem: Path) -> None:
    """Makes sure of STEM.csv and STEM.json before a measurement that takes long.

    Raises:
      UsageError: `write` could not write them.
    """
    for path in _paths(stem):
        there = path.exists()
        with written(path), path.open("a"):
            pass
        if not there:
            path.unlink()


def _paths(stem: Path) -> list[Path]:
    with written(stem.parent):
        stem.parent.mkdir(parents=True, exist_ok=True)
    return [stem.with_suffix(suffix) for suffix in (".csv", ".json")]


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Says in one line that a file cannot be written.

    Raises:
      UsageError: an OSError was raised inside.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def show(rows: Sequence[Row], title: str) -> None:
    """Prints a table to stderr, numbers to three digits.

    Long names give way to its width; where that is not enough it is wider.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = {name: [_text(row[name]) for row in rows] for name in rows[0]}
    widths = {
        name: max(map(cell_len, (name, *column))) + _PADDING
        for name, column in cells.items()
    }
    names = [name for name, first in rows[0].items() if isinstance(first, str)]
    # The widest first; none below what it takes to tell names apart.
    for name in sorted(names, key=lambda name: -widths[name]):
        excess = sum(widths.values()) - _WIDTH
        if excess > 0:
            most = max(widths[name] - _PADDING - excess, len(name), _LEAST_NAME)
            cells[name] = shortened(cells[name], most)
            widths[name] = max(map(cell_len, (name, *cells[name]))) + _PADDING
    table = Table(title=title, box=None, header_style="bold")
    for name in cells:
        table.add_column(
            name, justify="left" if name in names else "right", no_wrap=True
        )
    for line in zip(*cells.values(), strict=True):
        # A name may hold what would be markup.
        table.add_row(*map(Text, line))
    # In a notebook, too, to stderr.
    width = max(_WIDTH, sum(widths.values()))
    Console(stderr=True, width=width, force_jupyter=False).print(table)


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many characters: what all have in front gives way first."""
    distinct = list(dict.fromkeys(names))
    alike = len(os.path.commonprefix(distinct)) if len(distinct) > 1 else 0
    return [_cut(name, alike, most) for name in names]


def _cut(name: str, alike: int, most: int) -> str:
    if len(name) <= most:
        return name
    dropped = min(alike, len(name) - most + 1)
    if dropped > 1:
        name = f"…{name[dropped:]}"
    if len(name) <= most:
        return name
    end = most // 2
    return f"{name[: most - end - 1]}…{name[-end:]}"


def write_markdown(tables: Mapping[str, Table], path: Path) -> list[Path]:
    """Writes tables by title, as `show` prints them, in Markdown, each with its note
    below; returns the path.

    Raises:
      UsageError: it cannot be written.
    """
    lines = []
    for title, table in tables.items():
        lines += [f"## {title[:1].upper()}{title[1:]}", ""]
        if table.rows:
            lines += [_line(table.rows[0]), "|" + "---|" * len(table.rows[0])]
            lines += [*(_line(map(_text, row.values())) for row in table.rows), ""]
        if table.note:
            lines += [table.note, ""]
    with written(path):
        path.write_text("\n".join(lines))
    return [path]


def _line(cells: Iterable[str]) -> str:
    # A bar inside a cell would end it.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
