"""FlashAttention-2 as PyTorch ships it, against the emulator under its recipe.

A kernel that is not ours: does the recipe alone predict its error? Both compute the
same problems, forward and backward, and both are held against FP64. `torch` and
`predicted` are their RMS errors in units of the final rounding, `ratio` their quotient,
`apart` the RMS of their difference, `bound` how far two implementations of this very
recipe may lie apart (`bounds.order_bound`): below it, they round alike. A row passes if

- ratio is within a tenth of 1, give or take four standard errors of the difference of
  the two mean squares, taken from its scatter over heads and draws: few families have
  errors that are independent within a head;
- apart^2 <= 1.1 (torch^2 + predicted^2): independent roundings of the same law lie
  apart by the root of the sum of squares, and those that share some lie closer; what
  lies further apart errs another way.

LSE holds FP32 noise, which no recipe predicts: it passes if apart <= bound. So does a
result that both have exact to a hundredth of a unit.
"""

import argparse
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from analysis import ExperimentError
from analysis.agreement import (
    Problem,
    Results,
    apart,
    certified,
    draw,
    emulated,
    exact,
    failures,
    lower,
    order_sizes,
)
from analysis.record import Row, check_writable, device_name, environment, show, write
from attn_jax.audit.inputs import FAMILIES, Inputs
from attn_jax.recipe import RECIPES, Recipe
from train.config import UsageError

SUMMARY = "PyTorch's FlashAttention-2 against the emulator's prediction of its error"
RATIO, STANDARD_ERRORS = 1.1, 4.0
# Errors below this many units are noise of FP32.
_NOISE = 0.01

# Keys in a block of the forward kernel on GPUs with the shared memory of an A100 or
# more, by head dim; it visits them from the last to the first. Block sizes of the
# backward kernel change the order of its sums only.
_BLOCK_KV = {64: 128, 128: 64}


def recipe(problem: Problem) -> Recipe:
    """`RECIPES["flash2"]` with the tiles of FlashAttention-2's CUDA kernels."""
    return dataclasses.replace(
        RECIPES["flash2"].with_inputs(problem.format),
        block_q=128,
        block_kv=_BLOCK_KV[problem.H],
        kv_order="reverse",
    )


def _problems(length: int, heads: int, *dtypes: str) -> tuple[Problem, ...]:
    """Equal lengths and head counts: with others PyTorch takes another kernel."""
    return tuple(
        Problem(length, length, heads, heads, head_dim, is_causal, dtype)
        for dtype in dtypes
        for head_dim in _BLOCK_KV
        for is_causal in (False, True)
    )


PRESETS = {
    "toy": _problems(96, 2, "bfloat16")[:2],
    "default": _problems(320, 8, "bfloat16"),
    "full": _problems(320, 8, "bfloat16", "float16") + _problems(512, 8, "bfloat16"),
}

# (problem, inputs) -> the results of the kernel under test, as NumPy arrays.
Kernel = Callable[[Problem, Inputs], Results]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    parser.description = (
        f"{SUMMARY}. Needs PyTorch with CUDA beside JAX, in one process on one GPU: "
        "JAX is then told to take memory as it goes along "
        "(XLA_PYTHON_CLIENT_PREALLOCATE=false, unless it is set already)."
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="default", help="which shapes")
    every = list(FAMILIES)
    add("--families", nargs="+", choices=every, default=every, help="default: all")
    add(
        "--seeds", type=int, default=2, help="draws of each problem, pooled (default 2)"
    )
    out = Path("results", "flash_attention_2")
    add("--out", type=Path, default=out, help=f"folder (default {out})")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures, writes table and environment, prints both errors side by side.

    Raises:
      UsageError: there is no PyTorch with CUDA, or an option has no usable value.
      ExperimentError: a canary failed, so that nothing was measured; or the recipe
        does not predict the kernel's error. The table is written all the same.
    """
    if options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {options.seeds}")
    # Read when JAX first touches the GPU, which nothing has done yet in this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    torch = _import_torch()
    described = environment(command) | {"canaries": certified()}
    described["torch"] = torch.__version__
    device = device_name()
    stem = options.out / f"{device}-{options.preset}"
    check_writable(stem)
    began = time.monotonic()
    families = list(dict.fromkeys(options.families))
    rows = list(measure(PRESETS[options.preset], families, options.seeds, _flash))
    described["seconds"] = round(time.monotonic() - began, 1)
    files = write(rows, described, stem)
    show(largest(rows), "FlashAttention-2: errors in units, furthest from predicted")
    failed = failures(rows, ("tensor", "family", "dtype", "H", "is_causal"))
    if failed:
        raise ExperimentError(f"flash2 does not predict PyTorch's error: {failed}")
    return {"rows": len(rows), "files": [str(path) for path in files]}


def measure(
    problems: Sequence[Problem], families: Sequence[str], seeds: int, kernel: Kernel
) -> Iterator[Row]:
    """One row for each problem, family and tensor; the bounds, which are NumPy's and
    take longest, are made beside the device's work."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs: dict[Problem, Future] = {
            problem: pool.submit(
                lower(emulated(recipe(problem), problem), problem, seeds).compile
            )
            for problem in problems
        }
        measured: list[Future[list[Row]]] = []
        for number, problem in enumerate(problems):
            print(f"{number + 1}/{len(problems)} {problem}", file=sys.stderr)
            program = programs.pop(problem).result()
            for family in families:
                inputs = draw(problem, family, seeds)
                predicted = jax.device_get(program(*inputs))
                found = kernel(problem, inputs)
                true, units = exact(problem, family, inputs)
                work = problem, family, inputs, found, predicted, true, units
                measured.append(pool.submit(_rows, *work))
        for rows in measured:
            yield from rows.result()


def _rows(
    problem: Problem,
    family: str,
    inputs: Inputs,
    found: Results,
    predicted: Results,
    true: Results,
    units: Results,
) -> list[Row]:
    bounds = order_sizes(recipe(problem), problem, inputs)
    rows: list[Row] = []
    for tensor in Results._fields:
        x, y, z = (getattr(results, tensor) for results in (found, predicted, true))
        # Where all results vanish by construction there is no unit.
        unit = getattr(units, tensor) or 1.0
        row: Row = dataclasses.asdict(problem) | {"family": family, "tensor": tensor}
        row["torch"] = apart(x, z, unit)["rms"]
        row["predicted"] = apart(y, z, unit)["rms"]
        row["ratio"] = row["torch"] / row["predicted"] if row["predicted"] else ""
        difference = apart(x, y, unit)
        row["apart"], row["max"] = difference["rms"], difference["max"]
        row["differ"] = difference["differ"]
        row["bound"] = getattr(bounds, tensor) / unit
        if tensor == "lse" or max(row["torch"], row["predicted"]) < _NOISE:
            passes = row["apart"] <= row["bound"]
        else:
            independent = row["torch"] ** 2 + row["predicted"] ** 2
            passes = row["apart"] ** 2 <= RATIO * independent and _alike(x, y, z)
        row["verdict"] = "PASS" if passes else "FAIL"
        rows.append(row)
    return rows


def _alike(found, predicted, true) -> bool:
    """Whether two results [B, L, N, H] have the same mean squared error."""
    ours, theirs = (
        np.square(np.asarray(x).astype(np.float64) - true).mean((1, 3))
        for x in (predicted, found)
    )
    difference = theirs - ours
    standard_error = difference.std(ddof=1) / difference.size**0.5
    slack = (RATIO**2 - 1) * ours.mean() + STANDARD_ERRORS * standard_error
    return bool(abs(difference.mean()) <= slack)


def largest(rows: Sequence[Row]) -> list[Row]:
    """For each tensor and family the row whose ratio is furthest from 1, or fails."""
    worst: dict[tuple[str, str], tuple[tuple[bool, float], Row]] = {}
    for row in rows:
        key = row["tensor"], row["family"]
        off = abs(np.log(row["ratio"])) if row["ratio"] else 0.0
        margin = row["verdict"] == "FAIL", float(off)
        if key not in worst or margin > worst[key][0]:
            worst[key] = margin, row
    columns = (
        *("tensor", "family", "dtype", "H", "is_causal", "torch", "predicted"),
        *("ratio", "apart", "bound", "differ", "verdict"),
    )
    return [{column: row[column] for column in columns} for _, row in worst.values()]


def _import_torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(
            f"compares with PyTorch, and there is none ({error}): install torch with "
            "CUDA beside JAX, on a GPU of compute capability 8.0 or more"
        ) from None
    if not torch.cuda.is_available():
        raise UsageError(
            f"needs a GPU that PyTorch sees, and torch {torch.__version__} sees none"
        )
    return torch


def _flash(problem: Problem, inputs: Inputs) -> Results:
    """FlashAttention-2 by PyTorch's own operators; arrays go through the host."""
    torch = _import_torch()
    dtype = getattr(torch, problem.dtype)

    def put(x: np.ndarray):
        """[B, L, N, H] to PyTorch's [B, N, L, H], bit by bit."""
        bits = torch.from_numpy(np.ascontiguousarray(x).view(np.int16))
        return bits.cuda().view(dtype).transpose(1, 2)

    def fetch(x) -> np.ndarray:
        bits = x.detach().transpose(1, 2).contiguous().view(torch.int16).cpu().numpy()
        narrow = ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else np.float16
        return bits.view(narrow)

    query, key, value, dout = (put(x) for x in inputs)
    for x in (query, key, value):
        x.requires_grad_()
    # The operator behind scaled_dot_product_attention's FLASH_ATTENTION backend, called
    # by name: it returns LSE too, and nothing else can be chosen in its place.
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = operator(
        query, key, value, 0.0, problem.is_causal, False, scale=problem.H**-0.5
    )
    grads = torch.autograd.grad(out, (query, key, value), dout)
    rows = lse.detach().float().cpu().numpy()[..., : problem.T]
    return Results(fetch(out), rows, *(fetch(x) for x in grads))
