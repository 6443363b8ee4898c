"""Rows on disk while a sweep runs: one line of JSON for each finished cell.

    {"settings": {...}}                 first line: what the rows depend on
    {"environment": {...}}              one for each process that measured
    {"cell": {...}, "rows": [...]}      one for each finished cell

A kill can tear only the last line. It is dropped, and its cell is measured again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.record import Row
from train.config import UsageError


class Store:
    """The lines of one sweep; opening reads what an earlier process left.

    Raises:
      UsageError: the file belongs to other settings, is damaged before its last line,
        or cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, fresh: bool):
        self.path = path
        self.environments: list[dict[str, Any]] = []
        self._rows: dict[str, list[Row]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [] if fresh or not path.exists() else self._whole_lines()
            if lines:
                self._read(lines, settings)
            else:
                path.write_text("")
                self._append({"settings": settings})
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error

    def __contains__(self, cell: dict[str, Any]) -> bool:
        return _key(cell) in self._rows

    def describe(self, environment: dict[str, Any]) -> None:
        """Notes where the cells that follow are measured.

        Raises:
          UsageError: cells of another device or JAX are there already.
        """
        for earlier in self.environments:
            for name in ("device", "jax"):
                before, now = _of(earlier, name), _of(environment, name)
                if before != now:
                    raise UsageError(
                        f"{self.path} holds cells measured with {name} {before}, here "
                        f"it is {now}: finish it there, or start anew with --fresh"
                    )
        self.environments.append(environment)
        self._append({"environment": environment})

    def add(self, cell: dict[str, Any], rows: Sequence[Row]) -> None:
        """Appends a finished cell."""
        self._append({"cell": cell, "rows": rows})
        self._rows[_key(cell)] = list(rows)

    def rows(self, cells: Sequence[dict[str, Any]]) -> list[Row]:
        """The rows of the given cells in their order, with the cells' own columns."""
        return [{**cell, **row} for cell in cells for row in self._rows[_key(cell)]]

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _whole_lines(self) -> list[str]:
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        return whole.splitlines()

    def _read(self, lines: Sequence[str], settings: dict[str, Any]) -> None:
        try:
            found = [json.loads(line) for line in lines]
            before = found[0]["settings"]
            for line in found[1:]:
                if "cell" in line:
                    self._rows[_key(line["cell"])] = line["rows"]
                else:
                    self.environments.append(line["environment"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path} is damaged: start anew with --fresh"
            ) from error
        if before != settings:
            differences = ", ".join(
                f"{name} {before.get(name)} there, {settings.get(name)} here"
                for name in sorted(before.keys() | settings.keys())
                if before.get(name) != settings.get(name)
            )
            raise UsageError(
                f"{self.path} holds rows of other settings ({differences}): give "
                "another --out, or start anew with --fresh"
            )


def _key(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def _of(environment: dict[str, Any], name: str) -> Any:
    return environment["versions"]["jax"] if name == "jax" else environment[name]
