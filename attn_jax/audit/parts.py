"""Parts of an audit: rows that are measured once, kept, and counted as they come.

Parts of the target run in processes of their own (`workers`), or where they are asked
for, one after the other, in the modes that the caller set (they are a thread's own);
what they need compiled is compiled in threads. Parts of recipes run in other threads.
"""

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from attn_jax.audit.workers import DiedError, Workers
from attn_jax.store import Row, Store

Make = Callable[[], Iterable[Row]]

# Programs that are compiled and measured at one time; memory holds as many results.
_MOST_THREADS = 12


def cores() -> int:
    """What this process may use; not every system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Progress(NamedTuple):
    """`part` begins; `done` of the `known` parts are there. More become known when it
    is clear which recipes are near."""

    part: str
    done: int
    known: int


class Asked(NamedTuple):
    """A part of the target that was asked for: `rows()` waits for its rows, or makes
    them; `future` is where there are workers."""

    rows: Callable[[], list[Row]]
    future: concurrent.futures.Future[list[Row]] | None = None


class Parts(contextlib.AbstractContextManager):
    """Rows by name of a part. With a `store` they are kept there, and those that it has
    are not made again. `tell` is called when a part begins, by one thread at a time.
    `workers` are the target's; None: it runs in this process. `done` parts are there,
    `taken` of them from the store as it was.
    """

    def __init__(
        self,
        store: Store | None = None,
        tell: Callable[[Progress], None] = lambda progress: None,
        workers: Workers | None = None,
    ):
        self._store, self._tell, self._workers = store, tell, workers
        threads = min(_MOST_THREADS, max(1, cores() - 1))
        self._recipes = concurrent.futures.ThreadPoolExecutor(threads, "recipes")
        self._lock = threading.Lock()
        self.done = self.taken = self._known = 0

    def __exit__(self, *raised) -> None:
        self._recipes.shutdown(cancel_futures=True)

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
                self._tell(Progress(name, self.done, max(self._known, self.done + 1)))
            else:
                self.taken += 1
        if rows is None:
            rows = list(make)
            with self._lock:
                if self._store is not None:
                    self._store.add(cell, rows)
                    rows = self._kept(cell) or []
        with self._lock:
            self.done += 1
        return rows

    @property
    def apart(self) -> bool:
        """Whether the target has processes of its own."""
        return self._workers is not None

    def of_target(
        self,
        name: str,
        make: Make,
        died: Callable[[str], list[Row]],
        kind: Hashable = None,
    ) -> Asked:
        """A part of the target. `make` can be pickled if there are workers; `died(why)`
        are the rows if it takes its process along. Parts of a `kind` have programs in
        common, or parts of them (`turns`); None: it has none."""
        workers = self._workers
        if workers is None:
            return Asked(lambda: self.here(name, make()))

        def rows() -> Iterator[Row]:
            try:
                yield from workers.call(make)
            except DiedError as why:
                yield from died(str(why))

        future = workers.turns.submit(kind or name, lambda: self.here(name, rows()))

        def result() -> list[Row]:
            self.start()
            return future.result()

        return Asked(result, future)

    def start(self) -> None:
        """Begins parts of the target that were asked for, where there are workers. To
        ask for rows does, too."""
        if self._workers is not None:
            self._workers.turns.start()

    def as_they_end[Key](self, asked: Mapping[Key, Asked]) -> Iterator[Key]:
        """Keys of parts of the target whose rows are there; in the order given where
        they are made when they are asked for."""
        if not self.apart:
            yield from asked
            return
        self.start()
        keys = {x.future: key for key, x in asked.items() if x.future is not None}
        for future in concurrent.futures.as_completed(keys):
            yield keys[future]

    def beside(
        self, name: str, make: Iterable[Row]
    ) -> concurrent.futures.Future[list[Row]]:
        """The same, in a thread of its own, when there is one."""
        return self._recipes.submit(self.here, name, make)

    def _kept(self, cell: Row) -> list[Row] | None:
        if self._store is None or cell not in self._store:
            return None
        return self._store.rows([cell])
