"""Runs a function in a process of its own, with a time limit.

For what can hang (a kernel that waits for an arrival which never comes) or take the
process with it (a compiler that aborts): either is a failed test, not a stuck run.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class ChildFailed(Exception):
    """The function raised, died or ran out of time; the message says which."""


def in_child_process(function: Callable, *arguments: Any, seconds: float) -> Any:
    """`function(*arguments)`; both it and its result must be picklable."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise ChildFailed(f"{function.__name__} did not end in {seconds} s")
        returned, value = receiver.recv()
    except EOFError:
        process.join()
        raise ChildFailed(
            f"{function.__name__} took its process down, exit code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join()
    if not returned:
        raise ChildFailed(f"{function.__name__} raised:\n{value}")
    return value


def _call(sender: Connection, function: Callable, arguments: tuple) -> None:
    try:
        sender.send((True, function(*arguments)))
    except Exception:  # Whatever it is, the parent raises it with its traceback.
        sender.send((False, traceback.format_exc()))
