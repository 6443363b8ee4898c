"""Times of programs, taken in turn, and how long their kernels run on a GPU."""

import contextlib
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

Row = dict[str, Any]
# Runs in a row that give one time of a round.
RUNS = 3
# A median of fewer rounds says little; more than the most gain nothing.
LEAST_ROUNDS, MOST_ROUNDS = 6, 50


def interleaved(
    times: Mapping[str, Callable[[int], float]],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float] | str]:
    """A time of each in every round, until `seconds` are over; or why there is none.

    Rounds follow `orders`, so that neither a clock that falls steadily, as while a
    card warms up, nor what one leaves to the next, as of a budget of power, favours
    any. One that raises is left out from there on.
    """
    found: dict[str, list[float]] = {name: [] for name in times}
    refused: dict[str, str] = {}
    end = clock() + seconds
    rounds = itertools.islice(itertools.cycle(orders(list(times))), MOST_ROUNDS)
    for number, order in enumerate(rounds):
        if number >= LEAST_ROUNDS and clock() >= end:
            break
        for name in order:
            if name in refused:
                continue
            try:
                found[name].append(times[name](RUNS))
            except Exception as error:
                refused[name] = reason(error)
    return {**found, **refused}


def orders(names: Sequence[str]) -> list[list[str]]:
    """Orders in which each name stands right before each other one equally often.

    A Williams design (E. J. Williams, Australian Journal of Scientific Research A 2,
    149, 1949): n orders for an even n, 2 n for an odd one, each before its reverse.
    """
    n = len(names)
    # 0, n - 1, 1, n - 2, ...: neighbours differ by every number once, modulo n.
    row = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    shifted = (
        [names[(x + shift) % n] for x in row] for shift in range(n if n % 2 else n // 2)
    )
    return [order for there in shifted for order in (there, there[::-1])]


def quartiles(times: list[float]) -> Row:
    """Median and quartiles, the columns `ms`, `ms_25` and `ms_75`."""
    low, middle, high = (float(x) for x in np.percentile(times, (25, 50, 75)))
    return {"ms": middle, "ms_25": low, "ms_75": high}


def reason(error: BaseException) -> str:
    """What an exception says, in one line of at most 200 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


@contextlib.contextmanager
def card() -> Iterator[Row]:
    """Clock and power of the first GPU while the block runs, known after it.

    The columns `sm_mhz` and `watts`, medians of what nvidia-smi says ten times a
    second; none without it, or where the block is over before it says anything.
    """
    reading: Row = {}
    query = "--query-gpu=clocks.sm,power.draw.instant"
    form = "--format=csv,noheader,nounits"
    command = ["nvidia-smi", "--id=0", query, form, "--loop-ms=100"]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        yield reading
        return
    try:
        yield reading
    finally:
        process.kill()
        said, _ = process.communicate()
        # The last line may be cut off; a card that does not say leaves a column empty.
        lines = [line.split(",") for line in said.split("\n")[:-1]]
        for name, column in zip(
            ("sm_mhz", "watts"), zip(*lines, strict=False), strict=False
        ):
            with contextlib.suppress(ValueError):
                reading[name] = statistics.median(map(float, column))


def device_time(
    program: Any,
    arguments: tuple,
    runs: int,
    only: str = "",
    without: str | None = None,
) -> tuple[float, list[tuple[str, float]]]:
    """Milliseconds on the GPU, the median of `runs` (two or more), and the kernels.

    CUPTI's: kernels' own times added up, without the gaps between them; of those whose
    name has `only` in it, and not `without`.

    Raises:
      ImportError, RuntimeError: CUPTI cannot be had, saw no such kernel, or not the
        same ones in every run.
    """
    from jax.experimental.mosaic.gpu import profiler

    timed = profiler.measure(program, aggregate=False, iterations=runs)(*arguments)[1]

    def counts(name: str) -> bool:
        return only in name and not (without is not None and without in name)

    found = [[kernel for kernel in run if counts(kernel[0])] for run in timed or [[]]]
    if not found[0]:
        raise RuntimeError("it saw no kernel")
    return statistics.median(sum(ms for _, ms in run) for run in found), found[0]


def kernel_times(run: Callable[[], object]) -> list[tuple[str, float]]:
    """The GPU's kernels while `run()` runs, in order, and milliseconds that each took.

    By JAX's profiler, of any program and however it is called; `device_time` is of one
    that can be called with the same arguments again and again.
    """
    events = sorted(
        (event for device in device_events(run) for event in device),
        key=lambda event: event.start,
    )
    return [(event.name, event.end - event.start) for event in events]


class Event(NamedTuple):
    """A kernel or copy of a GPU, and its first and last millisecond."""

    name: str
    start: float
    end: float


def device_events(run: Callable[[], object]) -> list[list[Event]]:
    """What each GPU does while `run()` runs, by JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        traces = Path(folder).glob("**/*.xplane.pb")
        planes = (
            plane
            for trace in traces
            for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
            if "GPU" in plane.name
        )
        return [
            [
                Event(
                    event.name,
                    event.start_ns / 1e6,
                    (event.start_ns + event.duration_ns) / 1e6,
                )
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
            for plane in sorted(planes, key=lambda plane: plane.name)
        ]
