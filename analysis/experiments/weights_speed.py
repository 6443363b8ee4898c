"""Time of the exact Wasserstein-1 distance of two tensors, SciPy's and ours.

b is a plus normal noise of 1 % of its deviation. Each time is the least of `--repeats`
calls; `apart` is ours minus SciPy's, over SciPy's; `speedup` SciPy's time over ours,
both for the numbers of that format. On a GPU the sums of `analysis.weights.on_device`,
all of them, are timed beside, with both tensors there.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from analysis.record import Row, check_writable, environment, show, write
from analysis.weights import on_device
from analysis.weights.wasserstein import distance
from train.config import UsageError

SUMMARY = "time of the exact Wasserstein-1 distance, SciPy's and ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--size", type=int, default=10**7, help="values of a tensor (default 1e7)")
    add("--repeats", type=int, default=3, help="calls that are timed (default 3)")
    add("--out", type=Path, default=Path("results", "weights"), help="folder")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Times each and writes the table.

    Raises:
      UsageError: a number is below 1, or the table cannot be written.
    """
    if min(options.size, options.repeats) < 1:
        raise UsageError("--size and --repeats must be at least 1")
    from scipy.stats import wasserstein_distance

    described = environment(command)
    stem = options.out / str(described["device"]).lower().replace(" ", "-")
    check_writable(stem)
    rng = np.random.default_rng(0)
    first = rng.standard_normal(options.size, dtype=np.float32)
    noise = rng.standard_normal(options.size, dtype=np.float32)
    second = first + np.float32(0.01) * noise
    rows: list[Row] = []
    for dtype in (np.float32, ml_dtypes.bfloat16):
        pair = first.astype(dtype), second.astype(dtype)
        # SciPy computes in FP64, and is slower still at making it.
        wide = [side.astype(np.float64) for side in pair]

        def add(name: str, what: Callable[[], float]) -> None:
            seconds, value = _least(what, options.repeats)
            own = [row for row in rows if row["dtype"] == np.dtype(dtype).name]
            scipy = own[0] if own else {"seconds": seconds, "w1": value}
            # Numbers that do not differ, as a tensor of one, have W1 = 0.
            apart = (value - scipy["w1"]) / (scipy["w1"] or 1.0)
            rows.append(
                {
                    **{"implementation": name, "dtype": np.dtype(dtype).name},
                    **{"size": options.size, "seconds": seconds, "w1": value},
                    **{"apart": apart, "speedup": scipy["seconds"] / seconds},
                }
            )

        add("scipy", lambda: float(wasserstein_distance(*wide)))
        add("ours", lambda: distance(*pair))
        if jax.default_backend() != "cpu":
            there = [jax.device_put(side) for side in pair]
            on_device.measure(there[0], there[1], None)
            add(
                "ours on device", lambda: on_device.measure(there[0], there[1], None)[1]
            )
    files = write(rows, described | {"rows": rows}, stem)
    show(rows, f"W1 of two tensors of {options.size} values")
    return {"rows": rows, "files": [str(path) for path in files]}


def _least(what: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Seconds of the fastest call, and what it returned."""
    seconds, value = [], 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        value = what()
        seconds.append(time.perf_counter() - began)
    return min(seconds), value
