"""Ctrl-C that is acted on at once.

Python runs a signal's handler between two steps of the main thread, which may be in
XLA for half a minute, and what the handler raises is lost where that is one of JAX's
callbacks. So the work has a thread of its own, and the main one does nothing but wait.
"""

import concurrent.futures
import queue
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from attn_jax import command

_leaving = threading.Event()


class Interrupted(BaseException):
    """Ctrl-C came before the end of the work, which goes on: see `leave`."""


def interruptible[T](work: Callable[[], T]) -> T:
    """`work()`, in a thread of its own if this is the main one and Ctrl-C has Python's
    own handler; else it has to be acted on by whoever set another.

    Raises:
      Interrupted: Ctrl-C. From then on it is ignored.
    """
    if not is_ours():
        return work()
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    # Unlike an event or a lock it may be touched from within a handler.
    news: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        news.put("done")

    before = signal.signal(signal.SIGINT, lambda *_: news.put("interrupted"))
    threading.Thread(target=run, name="interruptible", daemon=True).start()
    if news.get() == "interrupted":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise Interrupted
    signal.signal(signal.SIGINT, before)
    return result.result()


def is_ours() -> bool:
    """Whether Ctrl-C would be raised in this thread."""
    here = threading.current_thread() is threading.main_thread()
    return here and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def is_leaving() -> bool:
    """Whether processes that end do so because we do."""
    return _leaving.is_set()


def leave(status: int) -> NoReturn:
    """`command.leave`, known to who waits for the processes (`is_leaving`)."""
    _leaving.set()
    command.leave(status)
