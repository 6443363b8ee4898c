"""Rows on disk while a sweep runs: one line of JSON for each finished cell.

    {"settings": {...}}                 first line: what the rows depend on
    {"environment": {...}}              one for each process that measured
    {"cell": {...}, "rows": [...]}      one for each finished cell

A kill can tear only the last line. It is dropped, and its cell is measured again.
"""

import contextlib
import fcntl
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_FIRST = b'{"settings": '


class StoreError(Exception):
    """A file that cannot be used, in one line that says what would work."""


class Store:
    """The lines of one sweep; opening reads what an earlier process left.

    The file stays locked until `close`.

    Attributes:
      Error: what it raises.
      needed: columns that every row has.
      elsewhere, afresh: what its lines propose, another file and another start.
      dropped: how many cells were there that no longer hold, since a setting of `anew`
        was another and all others the same.

    Raises:
      StoreError: another process has the file, or it belongs to other settings, is
        damaged before its last line, or cannot be written.
    """

    Error: type[Exception] = StoreError
    needed: tuple[str, ...] = ()
    elsewhere: str = "another --out"
    afresh: str = "--fresh"

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        *,
        fresh: bool,
        anew: Collection[str] = (),
    ):
        self.path, self.dropped = path, 0
        self.environments: list[dict[str, Any]] = []
        self._rows: dict[str, list[Row]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._open(settings, fresh, anew)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process have the file."""
        # What could not be written was said when it was.
        with contextlib.suppress(OSError):
            self._file.close()

    def __contains__(self, cell: dict[str, Any]) -> bool:
        return _key(cell) in self._rows

    def describe(self, environment: dict[str, Any]) -> None:
        """Notes where the cells that follow are measured.

        Raises:
          StoreError: cells of another device or JAX are there already.
        """
        for earlier in self.environments:
            for name in ("device", "jax"):
                before, now = _of(earlier, name), _of(environment, name)
                if before != now:
                    raise self.Error(
                        f"{self.path} holds cells measured with {name} {before}, here "
                        f"it is {now}: finish it there, or start anew with "
                        f"{self.afresh}"
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

    def _open(
        self, settings: dict[str, Any], fresh: bool, anew: Collection[str]
    ) -> None:
        try:
            # Two that append to one file would both measure every cell.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fresh:
                self._file.truncate(0)
            self._file.seek(0)
            content = self._file.read()
        except BlockingIOError as error:
            raise self.Error(
                f"another run is writing {self.path}: wait for it, or give "
                f"{self.elsewhere}"
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error
        end = content.rfind(b"\n") + 1
        if end:
            before = self._read(content[:end].splitlines())
            if not self._holds(before, settings, anew):
                self.dropped, end = len(self._rows), 0
                self._rows.clear()
                self.environments.clear()
        elif not (content.startswith(_FIRST) or _FIRST.startswith(content)):
            raise self._damaged()
        if end < len(content):
            self._file.truncate(end)
        if not end:
            self._append({"settings": settings})

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _read(self, lines: Sequence[bytes]) -> dict[str, Any]:
        """The settings that the lines, which are taken in, depend on."""
        try:
            first, *others = (json.loads(line) for line in lines)
        except (ValueError, RecursionError) as error:
            raise self._damaged() from error
        if not (_has(first, "settings") and all(map(self._whole, others))):
            raise self._damaged()
        for line in others:
            if "environment" in line:
                self.environments.append(line["environment"])
            elif line["cell"] in self:
                raise self._damaged()
            else:
                self._rows[_key(line["cell"])] = line["rows"]
        return first["settings"]

    def _holds(
        self, before: dict[str, Any], settings: dict[str, Any], anew: Collection[str]
    ) -> bool:
        names = before.keys() | settings.keys()
        differing = {x for x in names if before.get(x) != settings.get(x)}
        if others := differing - set(anew):
            here, there = (
                {name: x[name] for name in others & x.keys()}
                for x in (settings, before)
            )
            differences = ", ".join(_differences(there, here))
            raise self.Error(
                f"{self.path} holds rows of other settings ({differences}): give "
                f"{self.elsewhere}, or start anew with {self.afresh}"
            )
        return not differing

    def _whole(self, line: Any) -> bool:
        """Whether a line after the first has the shape that `Store` gives it."""
        if _has(line, "environment"):
            environment = line["environment"]
            return "device" in environment and (
                _has(environment, "versions") and "jax" in environment["versions"]
            )
        if not _has(line, "cell"):
            return False
        rows = line.get("rows")
        return (
            isinstance(rows, list)
            and bool(rows)
            and all(
                isinstance(row, dict) and row.keys() >= set(self.needed) for row in rows
            )
        )

    def _damaged(self) -> Exception:
        return self.Error(f"{self.path} is damaged: start anew with {self.afresh}")

    def _unwritable(self, error: OSError) -> Exception:
        return self.Error(f"cannot write {self.path}: {error.strerror}")


def _key(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """What differs, in words: of objects only the entries that do."""
    if isinstance(there, dict) and isinstance(here, dict):
        for x in sorted(there.keys() | here.keys()):
            yield from _differences(there.get(x), here.get(x), f"{name}.{x}".strip("."))
    elif isinstance(there, list) and isinstance(here, list):
        # Of long lists only the entries that differ; all, if it is their order.
        gone = [x for x in there if x not in here]
        new = [x for x in here if x not in there]
        if gone or new:
            there, here = gone, new
        yield from _differences(str(there), str(here), name)
    elif there != here:
        yield f"{name} {_short(there)} there, {_short(here)} here"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _has(line: Any, name: str) -> bool:
    return isinstance(line, dict) and isinstance(line.get(name), dict)


def _of(environment: dict[str, Any], name: str) -> Any:
    return environment["versions"]["jax"] if name == "jax" else environment[name]
