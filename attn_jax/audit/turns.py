"""Deals work to worker processes, so that XLA's autotuning is seldom done twice.

XLA tries out how a matrix product is computed fastest, and remembers it for all
programs of the process: a product of attention is the same under every mask of a
shape. To try it out takes much of the time of an audit, so that work of one kind goes
to a thread that has had such, as long as there is other work for the others.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class _Turn(NamedTuple):
    kind: Hashable
    work: Callable[[], Any]
    future: concurrent.futures.Future


class Turns:
    """`count` threads, and work that waits for them. Each takes first what is of a kind
    that it has had, then what is of a kind that none has had, then anything."""

    def __init__(self, count: int):
        self._pool = concurrent.futures.ThreadPoolExecutor(count, "workers")
        self._lock = threading.Lock()
        self._waiting: list[_Turn] = []
        self._new = 0
        # By thread.
        self._kinds: dict[int, set[Hashable]] = {}

    def submit[T](
        self, kind: Hashable, work: Callable[[], T]
    ) -> concurrent.futures.Future[T]:
        """What `work` gives, when it was its turn: after the next `start`, so that none
        is taken before all is known that waits beside it."""
        turn = _Turn(kind, work, concurrent.futures.Future())
        with self._lock:
            self._waiting.append(turn)
            self._new += 1
        return turn.future

    def start(self) -> None:
        with self._lock:
            new, self._new = self._new, 0
        for _ in range(new):
            self._pool.submit(self._work)

    def shutdown(self, *, wait: bool = True) -> None:
        """What waits is cancelled."""
        with self._lock:
            for turn in self._waiting:
                turn.future.cancel()
            self._waiting.clear()
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def _work(self) -> None:
        while (turn := self._next(threading.get_ident())) is not None:
            if not turn.future.set_running_or_notify_cancel():
                continue
            try:
                result = turn.work()
            except BaseException as error:  # For whoever asks for the result.
                turn.future.set_exception(error)
            else:
                turn.future.set_result(result)

    def _next(self, me: int) -> _Turn | None:
        """None where there is nothing."""
        with self._lock:
            mine = self._kinds.setdefault(me, set())
            had = set().union(*self._kinds.values())
            # The first of those that it prefers.
            turn = min(
                self._waiting,
                key=lambda turn: 0 if turn.kind in mine else 1 + (turn.kind in had),
                default=None,
            )
            if turn is not None:
                mine.add(turn.kind)
                self._waiting.remove(turn)
            return turn
