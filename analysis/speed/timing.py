"""Times of several programs, taken in turn, and what a row says of them.

Knows neither JAX nor PyTorch: each framework makes `Arm`s of its programs.
"""

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from analysis.record import Row
from analysis.speed.errors import Results

# Runs in a row that give one time of a round.
RUNS = 3
# A median of fewer rounds says little; more than the most gain nothing.
LEAST_ROUNDS, MOST_ROUNDS = 5, 50
# What every row says; `Arm.columns` and `measure` fill them in.
TIMED = (
    *("ms", "ms_25", "ms_75", "rounds", "timer", "compile_seconds"),
    *("same_bits", "deterministic", "kernel", "kernels", "config"),
    *("sm_mhz", "watts", "refused"),
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """A program that is compiled, has run, and is ready to be timed.

    Attributes:
      time: runs it so many times in a row; returns milliseconds of one run.
      columns: of its row, a part of `TIMED`.
      results: the results that are held against exact ones.
    """

    time: Callable[[int], float]
    columns: Row
    results: Results


def measure(
    builds: Mapping[str, Callable[[], Arm]],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, Row, Results]]:
    """Builds every arm, then times them in turn: name, columns and results of each.

    Whatever a library raises is its refusal; the columns hold it in one line.
    """
    arms: dict[str, Arm] = {}
    refused: dict[str, str] = {}
    for name, build in builds.items():
        try:
            arms[name] = build()
        except Exception as error:
            refused[name] = reason(error)
    with card() as reading:
        timed = interleaved(
            {name: arm.time for name, arm in arms.items()}, seconds, clock=clock
        )
    for name in builds:
        row: Row = dict.fromkeys(TIMED)
        results: Results = {}
        if name in arms:
            row |= arms[name].columns
            results = arms[name].results
            found = timed[name]
            if isinstance(found, str):
                refused[name] = found
            else:
                row |= {**quartiles(found), "rounds": len(found), **reading}
        row["refused"] = refused.get(name)
        yield name, row, results


def interleaved(
    times: Mapping[str, Callable[[int], float]],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float] | str]:
    """A time of each in every round, until `seconds` are over; or why there is none.

    Every second round goes backwards: a clock that falls steadily, as while a card
    warms up, then favours none. One that raises is left out from there on.
    """
    found: dict[str, list[float]] = {name: [] for name in times}
    refused: dict[str, str] = {}
    end = clock() + seconds
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and clock() >= end:
            break
        for name in list(times)[:: -1 if number % 2 else 1]:
            if name in refused:
                continue
            try:
                found[name].append(times[name](RUNS))
            except Exception as error:
                refused[name] = reason(error)
    return {**found, **refused}


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

    The columns `sm_mhz` and `watts`; none without nvidia-smi. It takes about as long to
    start as the first rounds do, so that it reads a card at work.
    """
    reading: Row = {}
    query = "--query-gpu=clocks.sm,power.draw"
    command = ["nvidia-smi", "--id=0", query, "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        yield reading
        return
    try:
        yield reading
        # A card that does not say leaves the columns empty.
        with contextlib.suppress(ValueError, subprocess.TimeoutExpired):
            said, _ = process.communicate(timeout=30)
            clock, power = (float(part) for part in said.strip().split(","))
            reading |= {"sm_mhz": clock, "watts": power}
    finally:
        process.kill()
        process.wait()
