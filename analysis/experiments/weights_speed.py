"""Time of the exact Wasserstein-1 distance of two tensors, SciPy's and ours.

b is a plus normal noise of 1 % of its deviation. Each time is the least of `--repeats`
calls; `apart` is ours minus SciPy's, over SciPy's; `speedup` SciPy's time over ours,
both for the numbers of that format. On a GPU the sums of `analysis.weights.on_device`,
all of them, are timed beside, with both tensors there.

`--parameters N` times, beside these, all that `analysis.weights.compare` finds of two
trees of about N weights in FP32, those of a transformer of width 2048, as JAX's arrays
on the device: `tree`, once, with the compilation of its programs.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from analysis.record import Row, check_writable, device_name, environment, show, write
from analysis.weights import on_device
from analysis.weights.compare import compare
from analysis.weights.wasserstein import distance
from train.config import UsageError

_WIDTH = 2048
SUMMARY = "time of the exact Wasserstein-1 distance, SciPy's and ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--size", type=int, default=10**7, help="values of a tensor (default 1e7)")
    add("--repeats", type=int, default=3, help="calls that are timed (default 3)")
    add("--parameters", type=int, help="of two trees that are compared (default none)")
    add("--out", type=Path, default=Path("results", "weights"), help="folder")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Times each and writes the table.

    Raises:
      UsageError: a number is below 1, or the table cannot be written.
    """
    parameters = 1 if options.parameters is None else options.parameters
    if min(options.size, options.repeats, parameters) < 1:
        raise UsageError("--size, --repeats and --parameters must be at least 1")
    from scipy.stats import wasserstein_distance

    described = environment(command)
    stem = options.out / device_name()
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
    if options.parameters is not None:
        rows.append(_trees(options.parameters))
    files = write(rows, described | {"rows": rows}, stem)
    show(rows, f"W1 of two tensors of {options.size} values")
    return {"rows": rows, "files": [str(path) for path in files]}


def _trees(parameters: int) -> Row:
    """A row of two trees that are compared where they lie."""
    width = _WIDTH
    shapes = {
        **{name: (width, width) for name in ("query", "key", "value", "out")},
        **{"up": (width, 4 * width), "down": (4 * width, width), "scale": (width,)},
    }
    depth = -(-parameters // sum(math.prod(shape) for shape in shapes.values()))
    keys = iter(jax.random.split(jax.random.key(0), 2 * depth * len(shapes)))

    def moved(first: jax.Array) -> jax.Array:
        return first + 0.01 * jax.random.normal(next(keys), first.shape)

    first = {
        f"blocks.{layer}.{name}": jax.random.normal(next(keys), shape)
        for layer in range(depth)
        for name, shape in shapes.items()
    }
    second = jax.block_until_ready({name: moved(x) for name, x in first.items()})
    began = time.perf_counter()
    (row,) = (r for r in compare(first, second).rows if r["kind"] == "all")
    seconds = time.perf_counter() - began
    return {
        **{"implementation": "tree", "dtype": "float32", "size": row["count"]},
        **{"seconds": seconds, "w1": row["w1"], "apart": None, "speedup": None},
    }


def _least(what: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Seconds of the fastest call, and what it returned."""
    seconds, value = [], 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        value = what()
        seconds.append(time.perf_counter() - began)
    return min(seconds), value
