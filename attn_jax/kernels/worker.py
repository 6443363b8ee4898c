"""Runs functions in another process, with a time limit.

For what can hang (a kernel that waits for an arrival which never comes) or take the
process with it (a compiler that aborts, an illegal address, after which a CUDA context
is of no use): the caller loses that call alone.
"""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class WorkerFailed(Exception):
    """The function raised, died or ran out of time; the first line says which.

    What a function raised is there with its traceback.
    """


class Worker:
    """A process that is started when first called, and anew after it has failed.

    Use as a context, or `end` it. `environment` is set in it beside what is there.
    """

    def __init__(self, environment: Mapping[str, str] = {}):
        self._environment = environment
        self._process: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def call(self, function: Callable, *arguments: Any, seconds: int | float) -> Any:
        """`function(*arguments)`; both it and its result must be picklable.

        Raises:
          WorkerFailed: it raised, took longer than `seconds`, starting the process
            included, or took its process down. The process is ended.
        """
        if self._process is None:
            self._process = self._started()
        process, connection = self._process
        returned, value = False, ""
        try:
            connection.send((function, arguments))
            if not connection.poll(seconds):
                raise WorkerFailed(
                    f"{function.__name__} did not end in {seconds:.0f} s"
                )
            returned, value = connection.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise WorkerFailed(
                f"{function.__name__} took its process down, "
                f"exit code {process.exitcode}"
            ) from None
        finally:
            if not returned:
                self.end()
        if not returned:
            raise WorkerFailed(f"{function.__name__} raised {value}")
        return value

    def end(self) -> None:
        """Ends the process, whatever it does; the next call starts another."""
        if self._process is not None:
            process, connection = self._process
            self._process = None
            connection.close()
            process.kill()
            process.join()

    def _started(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _environment(self._environment):
            process.start()
        theirs.close()
        return process, ours


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return  # whoever asked is gone
        try:
            connection.send((True, function(*arguments)))
        except Exception as error:  # Whatever it is, the caller is to know.
            lines = str(error).strip().splitlines()
            first = f"{type(error).__name__}: {lines[0] if lines else ''}"
            connection.send((False, f"{first}\n{traceback.format_exc()}"))
