"""Which thread of several does what next, where each has a process of its own.

XLA tries out how a matrix product is computed fastest, and remembers it for all
programs of the process: a product of attention is the same under every mask of a
shape. To try it out takes most of the time of an audit, so that work of one kind stays
with the thread that began it, unless there is much of it.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

# Pieces of a kind that each thread that has begun it keeps to itself: others, who would
# try all out anew, take what is beyond.
_KEPT = 2


class _Turn(NamedTuple):
    kind: Hashable
    work: Callable[[], Any]
    future: concurrent.futures.Future


class Turns:
    """`count` threads, and work that waits for them. Each takes first what is of a kind
    that it has had, then what is of a kind that none has had."""

    def __init__(self, count: int):
        self._pool = concurrent.futures.ThreadPoolExecutor(count, "workers")
        self._lock = threading.Lock()
        self._waiting: list[_Turn] = []
        self._new = 0
        # By thread; those at work.
        self._kinds: dict[int, set[Hashable]] = {}
        self._busy: set[int] = set()

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
        """None where there is nothing, or somebody at work is to have the rest."""
        with self._lock:
            turn = self._chosen(self._kinds.setdefault(me, set()))
            if turn is None:
                self._busy.discard(me)
            else:
                self._busy.add(me)
                self._kinds[me].add(turn.kind)
                self._waiting.remove(turn)
            return turn

    def _chosen(self, mine: set[Hashable]) -> _Turn | None:
        had = set().union(*self._kinds.values())
        for choice in (
            lambda kind: kind in mine,
            lambda kind: kind not in had,
            self._is_too_much,
        ):
            for turn in self._waiting:
                if choice(turn.kind):
                    return turn
        return None

    def _is_too_much(self, kind: Hashable) -> bool:
        """Of what waits, for those at work who have had such."""
        at_work = sum(kind in self._kinds[thread] for thread in self._busy)
        return sum(turn.kind == kind for turn in self._waiting) > _KEPT * at_work
