"""Processes that a target runs in.

Each has a Python, a stream of the device and a memory of its own: parts of an audit are
traced and compiled at the same time, nothing of ours runs beside what is measured, and
a target that crashes, or leaves a GPU unusable, takes only its part with it.
"""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import threadpoolctl

from attn_jax.audit.interrupt import is_leaving
from attn_jax.audit.raised import callbacks_unlogged, contained, in_one_line
from attn_jax.audit.turns import Turns

# What a process needs of the device's memory, to be one of several: its context, and a
# few matrices of logits, of which textbook attention and its gradients have as many at
# a time. With two heads of 16384 keys that is 12 GiB; there the audit of our kernels
# held 6.2, exact results among it.
_BYTES = 2 * 2**30
_MATRICES = 5
_MOST = 8
# What a process takes over that its environment does not say.
_MODES = "jax_enable_x64", "jax_num_cpu_devices"
# They give way to the caller's process, where recipes are compiled in a few threads and
# others wait for these; what tries out programs takes as many threads as there are
# cores, in each of them.
_NICER = 10
# Threads of NumPy's products in each. By itself it takes one for each core, which wait
# for one another by turning round: in several processes that took a quarter of the time
# of all cores.
_PRODUCTS = 2
# Seconds that one may take to end when it is told to.
_PATIENCE = 10.0


class DiedError(Exception):
    """The process ended in the middle of a part; says of what."""


class NotStartedError(RuntimeError):
    """A process ended before there was anything of the target in it, or has not found
    it."""


def worthwhile(cores: int, logits: Iterable[int]) -> int:
    """How many processes are worth their start here: none without a GPU. `logits`: of
    each part, bytes of its logits in FP32. What a process takes it keeps, so no more
    of them than the largest parts have room beside each other."""
    if jax.default_backend() != "gpu":
        return 0
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    needed = sorted((_BYTES + _MATRICES * size for size in logits), reverse=True)
    fit = sum(total <= memory for total in itertools.accumulate(needed))
    return max(1, min(_MOST, cores // 2, fit))


class Workers(contextlib.AbstractContextManager):
    """So many processes, each started when there is something for it to do.

    They are spawned: the caller's main module has to guard what it does by
    `if __name__ == "__main__"`.
    """

    def __init__(self, count: int):
        self.turns = Turns(count)
        # Modes of the caller's thread, not of those that start the processes.
        self._modes = {name: getattr(jax.config, name) for name in _MODES}
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: list[_Worker] = []
        self._stopped = False

    def __exit__(self, *raised) -> None:
        if raised[0] is not None:
            # Threads wait for what is not wanted any more.
            self.turns.shutdown(wait=False)
            with self._lock:
                self._stopped = True
                for worker in self._all:
                    worker.process.terminate()
        self.turns.shutdown()
        for worker in self._all:
            worker.end()

    def call[T](self, make: Callable[[], Iterable[T]]) -> list[T]:
        """What `make`, which can be pickled, gives in this thread's process.

        Raises:
          DiedError: the process did not survive it. The next call has a new one.
          NotStartedError: it ended before it began, or did not find `make`.
          concurrent.futures.CancelledError: all were told to end.
        """
        worker = getattr(self._mine, "worker", None)
        if worker is None or not worker.process.is_alive():
            with self._lock:
                self._check()
                worker = self._mine.worker = _Worker(self._modes)
                self._all.append(worker)
        try:
            return worker.call(make)
        except (DiedError, NotStartedError):
            self._check()
            raise

    def _check(self) -> None:
        # What we end ourselves is no crash of the target's, and no row is kept of it.
        if self._stopped or is_leaving():
            raise concurrent.futures.CancelledError


class _Worker:
    def __init__(self, modes: dict[str, Any]):
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, modes), daemon=True)
        # To start the tracker lets Ctrl-C through again, so not within `_deaf`.
        resource_tracker.ensure_running()
        with _deaf():
            self.process.start()
        there.close()
        self._began = False

    def call(self, make: Callable[[], Iterable]) -> list:
        if not self._began:
            self._wait()
        try:
            self._here.send(make)
            answer, healthy = self._here.recv()
        except (EOFError, OSError):
            self.process.join()
            raise DiedError(_ended(self.process.exitcode)) from None
        if not healthy:
            self.end()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _wait(self) -> None:
        try:
            self._here.recv()
        except (EOFError, OSError):
            self.process.join()
            raise NotStartedError(
                f"{_ended(self.process.exitcode)} before it began: the main module has "
                'to be a file that guards what it does by `if __name__ == "__main__"`; '
                "or give processes=0"
            ) from None
        self._began = True

    def end(self) -> None:
        self._here.close()
        self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"its process was ended by {signal.Signals(-exitcode).name}"
    return f"its process ended with exit code {exitcode}"


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes begin with their parent's mask of signals: Ctrl-C is for the caller,
    and this keeps it from them while they import, before they can ignore it."""
    if not hasattr(signal, "pthread_sigmask"):  # Not every system has masks.
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, modes: dict[str, Any]) -> None:
    """Until nobody is at the other end. Ctrl-C is for the caller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):  # Not every system has it.
        os.nice(_NICER)
    threadpoolctl.threadpool_limits(_PRODUCTS, "blas")
    for name, value in modes.items():
        if value != getattr(jax.config, name):
            jax.config.update(name, value)
    with contextlib.suppress(EOFError, OSError):
        connection.send(None)
        while True:
            make = connection.recv_bytes()
            try:
                with contained(), callbacks_unlogged():
                    answer: Any = list(_loaded(make)())
            except Exception as error:
                answer = _sendable(error)
            connection.send((answer, _is_healthy()))


def _loaded(make: bytes) -> Callable[[], Iterable]:
    try:
        return pickle.loads(make)
    except Exception as error:  # Such as of a function that a notebook defines.
        raise NotStartedError(
            f"{in_one_line(error)}: what is audited has to be in a module that another "
            "process can import; or give processes=0"
        ) from error


def _sendable(error: Exception) -> Exception:
    """The exception, or what it says: not all can be sent, and made again there."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # A class of somebody's may do anything when it is pickled.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _is_healthy() -> bool:
    """A kernel that reads beyond its arrays leaves a GPU that fails whatever it is
    asked, until the process ends."""
    try:
        jax.block_until_ready(jnp.zeros(1) + 1)
    except Exception:  # Whatever it is: nothing can be measured here any more.
        return False
    return True
