"""Runs a function in another process, with a time limit (`attn_jax.kernels.worker`).

Since it takes seconds to start, a process is kept for the next function.
"""

import atexit
import itertools
import warnings
from collections.abc import Callable
from typing import Any

from attn_jax.kernels.worker import Worker
from attn_jax.kernels.worker import WorkerFailed as ChildFailed

__all__ = ["ChildFailed", "in_child_process"]

# Threads of XLA's: the interpreter blocks one for each warpgroup that waits, and with
# one a core a kernel of four warpgroups never ends on two cores.
_THREADS = {"NPROC": "16", "PJRT_NPROC": "16"}

_kept: dict[str, list[Worker]] = {}


def _strictly(function: Callable, *arguments: Any) -> Any:
    """With pytest's rule for warnings (`pyproject.toml`), which children don't have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="(attn_jax|train|analysis)")
        return function(*arguments)


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

    Raises:
      ChildFailed: it raised, died or ran out of time.
    """
    if alone:
        with Worker(_THREADS) as worker:
            return worker.call(_strictly, function, *arguments, seconds=seconds)
    kept = _kept.setdefault(among, [])
    worker = kept.pop() if kept else Worker(_THREADS)
    try:
        return worker.call(_strictly, function, *arguments, seconds=seconds)
    finally:
        kept.append(worker)


@atexit.register
def _end_kept() -> None:
    for worker in itertools.chain(*_kept.values()):
        worker.end()
