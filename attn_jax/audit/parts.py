"""Parts of an audit: rows that are measured once, kept, and counted as they come.

Parts of the target run where they are asked for, one after the other, in the modes that
the caller set (they are a thread's own). Parts of recipes run beside them, in threads,
and what the target needs compiled is compiled in others.
"""

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from attn_jax.store import Row, Store

# Programs that are compiled and measured at one time; memory holds as many results.
_MOST_THREADS = 12


class Progress(NamedTuple):
    """`part` begins; `done` of the `known` parts are there. More become known when it
    is clear which recipes are near."""

    part: str
    done: int
    known: int


class Parts(contextlib.AbstractContextManager):
    """Rows by name of a part. With a `store` they are kept there, and those that it has
    are not made again. `tell` is called when a part begins, by one thread at a time.
    `compiling` has the threads that compile.
    """

    def __init__(
        self,
        store: Store | None = None,
        tell: Callable[[Progress], None] = lambda progress: None,
    ):
        self._store, self._tell = store, tell
        # What this process may use; not every system says.
        known = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
        threads = min(_MOST_THREADS, max(1, cores - 1))
        pool = concurrent.futures.ThreadPoolExecutor
        self._recipes, self.compiling = (
            pool(threads, "recipes"),
            pool(threads, "target"),
        )
        self._lock = threading.Lock()
        self._done = self._known = 0

    def __exit__(self, *raised) -> None:
        for pool in (self._recipes, self.compiling):
            pool.shutdown(cancel_futures=True)

    def expect(self, number: int) -> None:
        """So many parts will be asked for."""
        self._known += number

    def has(self, name: str) -> bool:
        """Whether a part is there already."""
        return self._kept({"part": name}) is not None

    def here(self, name: str, make: Iterable[Row]) -> list[Row]:
        """The rows of a part, made in this thread."""
        cell = {"part": name}
        with self._lock:
            rows = self._kept(cell)
            if rows is None:
                self._tell(Progress(name, self._done, max(self._known, self._done + 1)))
        if rows is None:
            rows = list(make)
            with self._lock:
                if self._store is not None:
                    self._store.add(cell, rows)
                    rows = self._kept(cell) or []
        with self._lock:
            self._done += 1
        return rows

    def beside(
        self, name: str, make: Iterable[Row]
    ) -> concurrent.futures.Future[list[Row]]:
        """The same, in a thread of its own, when there is one."""
        return self._recipes.submit(self.here, name, make)

    def _kept(self, cell: Row) -> list[Row] | None:
        if self._store is None or cell not in self._store:
            return None
        return self._store.rows([cell])
