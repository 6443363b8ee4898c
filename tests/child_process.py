"""Runs a function in another process, with a time limit.

For what can hang (a kernel that waits for an arrival which never comes) or take the
process with it (a compiler that aborts): either is a failed test, not a stuck run.
Since it takes seconds to start, a process is kept for the next function unless this one
failed.
"""

import atexit
import itertools
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest


class ChildFailed(Exception):
    """The function raised, died or ran out of time; the message says which."""


_kept: dict[str, list[tuple[BaseProcess, Connection]]] = {}


def in_child_process(
    function: Callable,
    *arguments: Any,
    seconds: float,
    alone: bool = False,
    among: str = "",
) -> Any:
    """`function(*arguments)`; both it and its result must be picklable.

    `alone` is for a function that leaves its process changed; functions that may share
    one with some others only say `among` which.
    """
    kept = _kept.setdefault(among, [])
    process, connection = kept.pop() if kept and not alone else _started()
    keep = False
    try:
        connection.send((function, arguments))
        if not connection.poll(seconds):
            raise ChildFailed(f"{function.__name__} did not end in {seconds} s")
        returned, value = connection.recv()
        keep = returned and not alone
    except (EOFError, ConnectionError):
        process.join()
        raise ChildFailed(
            f"{function.__name__} took its process down, exit code {process.exitcode}"
        ) from None
    finally:
        if keep:
            kept.append((process, connection))
        else:
            _end(process)
    if not returned:
        raise ChildFailed(f"{function.__name__} raised:\n{value}")
    return value


def _started() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        # Threads of XLA's: the interpreter blocks one for each warpgroup that waits,
        # and with one a core a kernel of four warpgroups never ends on two cores.
        for name in ("NPROC", "PJRT_NPROC"):
            patch.setenv(name, "16")
        process.start()
    theirs.close()
    return process, ours


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


@atexit.register
def _end_kept() -> None:
    for process, _ in itertools.chain(*_kept.values()):
        _end(process)


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return  # whoever asked is gone
        try:
            connection.send((True, function(*arguments)))
        except Exception:  # Whatever it is, the parent raises it with its traceback.
            connection.send((False, traceback.format_exc()))
