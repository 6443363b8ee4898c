"""Times of several programs, taken in turn, and what a row says of them.

Knows neither JAX nor PyTorch: each framework makes `Arm`s of its programs.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping

from analysis.record import Row
from analysis.speed.errors import Results
from attn_jax.timing import LEAST_ROUNDS as LEAST_ROUNDS
from attn_jax.timing import MOST_ROUNDS as MOST_ROUNDS
from attn_jax.timing import RUNS as RUNS
from attn_jax.timing import card, interleaved, quartiles, reason

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
