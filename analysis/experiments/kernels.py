"""The Pallas kernels against the emulator under their recipe, and under wrong ones.

What the recipe leaves open, the order of additions and the last bits of exp2, moves
FP32 values a little and turns a rounding now and then. `bounds.order_bound` derives how
far two correct implementations of one recipe then lie apart; the kernels must not lie
further from the emulator. That this can fail is shown with recipes that differ in one
decision: the kernels must lie at least twice as far from those as from their own. For
that comparison the emulator adds as Hopper's tensor cores do, who cut off, toward zero,
the addends of every 16 products and the FP32 sum after them (`recipe.on_tensor_cores`).
Where LSE is large this turns roundings of P, and an emulator that adds to nearest would
lie almost as far off as a wrong recipe.
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
from analysis.record import Row, device_name, environment, show, write
from attn_jax import dot_product_attention
from attn_jax.audit.inputs import FAMILIES, Inputs
from attn_jax.formats import FP32, FP64
from attn_jax.recipe import Recipe, Step, on_tensor_cores
from train.config import UsageError

SUMMARY = "the Pallas kernels against the emulator under their recipe and wrong ones"
OWN, ON_TENSOR_CORES = "own", "own on tensor cores"
# A wrong recipe must lie at least so many times as far from the kernels as their own,
# all of them on tensor cores.
TOLD_APART = 2.0

# (T, S, N, K): no length a multiple of all blocks; grouped heads in the second.
_SQUARE, _RAGGED = (384, 384, 2, 2), (200, 333, 4, 2)
_LONG, _LONG_RAGGED = (1024, 1024, 4, 4), (777, 1000, 4, 1)
_TOY = (70, 130, 2, 1)


def _problems(
    shapes: Sequence[tuple[int, int, int, int]],
    head_dims: Sequence[int] = (64, 128),
    dtype: str = "bfloat16",
) -> tuple[Problem, ...]:
    return tuple(
        Problem(*shape, head_dim, is_causal, dtype)
        for shape in shapes
        for head_dim in head_dims
        for is_causal in (False, True)
    )


PRESETS = {
    "toy": _problems((_TOY,), (64,)),
    "default": _problems((_SQUARE, _RAGGED)) + _problems((_RAGGED,), (64,), "float16"),
    "full": _problems((_SQUARE, _RAGGED, _LONG, _LONG_RAGGED))
    + _problems((_SQUARE, _RAGGED), dtype="float16"),
}
# What large problems have by themselves, where the kernel takes these.
_BACKWARD = "fused"
# Where the difference of a wrong recipe must show. An unrounded P is seen wherever P
# takes other values than 1, or 1 / (a power of two), at weights that matter: where two
# keys of P = 1 carry a row (repeated_max) dV alone shows it, where all keys are equal
# (zero_k_one_v) nothing does. A delta from the rounded O shifts all of a row's dS by
# the same, which shows where K and V have a mean, in dQ most if nothing is subtracted.
_WITH_MEAN = ("uniform", "offset")
_ORDINARY = (
    *("normal", "uniform", "offset", "outlier", "wide"),
    *("lse-130", "lse+150", "sink"),
)
MUST_SHOW: dict[str, dict[str, tuple[str, ...]]] = {
    "P unrounded": {"out": _ORDINARY, "dv": (*_ORDINARY, "repeated_max")},
    "delta from O": {"dk": _WITH_MEAN},
    "delta from O and no centre": {"dq": _WITH_MEAN, "dk": _WITH_MEAN},
}


def recipes(own: Recipe) -> dict[str, Recipe]:
    """The kernels' recipe, and others that differ from it in one decision or two.

    All but the first add as tensor cores do, which takes an FP64 carrier.
    """
    wide = Step(FP32)
    on_cores = on_tensor_cores(own, "hopper")
    delta = dataclasses.replace(on_cores, delta_source="o")
    return {
        OWN: own,
        ON_TENSOR_CORES: on_cores,
        "P unrounded": dataclasses.replace(
            on_cores, probability=wide, backward_probability=wide
        ),
        "delta from O": delta,
        "delta from O and no centre": dataclasses.replace(delta, dq_centre="none"),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="default", help="which shapes")
    every = list(FAMILIES)
    add("--families", nargs="+", choices=every, default=every, help="default: all")
    add(
        "--seeds", type=int, default=1, help="draws of each problem, pooled (default 1)"
    )
    out = Path("results", "kernels")
    add("--out", type=Path, default=out, help=f"folder (default {out})")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures, writes table and environment, prints what lies furthest apart.

    Raises:
      UsageError: the kernels do not run here, or an option has no usable value.
      ExperimentError: a canary failed, so that nothing was measured; or the kernels
        lie further from their recipe than the order of additions explains, or no
        further from a wrong one. The table is written all the same.
    """
    if options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {options.seeds}")
    problems = PRESETS[options.preset]
    try:
        _lower_kernels(problems[0], options.seeds)
    except (ImportError, NotImplementedError) as reason:
        raise UsageError(f"compares the kernels with the emulator: {reason}") from None
    described = environment(command) | {"canaries": certified()}
    with jax.enable_x64(True):
        described["canaries, x64"] = certified()
    began = time.monotonic()
    rows = list(measure(problems, options.families, options.seeds))
    described["seconds"] = round(time.monotonic() - began, 1)
    device = device_name()
    files = write(rows, described, options.out / f"{device}-{options.preset}")
    show(largest(rows), "Kernels against recipes, in units of the final rounding")
    failed = failures(rows, ("recipe", "tensor", "family", "H", "is_causal"))
    if failed:
        raise ExperimentError(f"kernels and recipes disagree with what holds: {failed}")
    return {"rows": len(rows), "files": [str(path) for path in files]}


def measure(
    problems: Sequence[Problem], families: Sequence[str], seeds: int
) -> Iterator[Row]:
    """One row for each problem, family, recipe and tensor.

    The device is used by this thread alone; programs are compiled, and figures made in
    NumPy, beside it.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled: dict[Problem, tuple[Future, dict[str, Future]]] = {}
        for problem in problems:
            kernels = pool.submit(_lower_kernels(problem, seeds).compile)
            compiled[problem] = (
                kernels,
                {
                    name: pool.submit(_lower_emulator(r, problem, seeds).compile)
                    for name, r in recipes(_own_recipe(problem)).items()
                },
            )
        measured: list[Future[list[Row]]] = []
        for number, problem in enumerate(problems):
            print(f"{number + 1}/{len(problems)} {problem}", file=sys.stderr)
            kernels, programs = compiled.pop(problem)
            for family in families:
                inputs = draw(problem, family, seeds)
                found = jax.device_get(kernels.result()(*inputs))
                predicted = {
                    name: jax.device_get(program.result()(*inputs))
                    for name, program in programs.items()
                }
                _, units = exact(problem, family, inputs)
                work = problem, family, inputs, found, predicted, units
                measured.append(pool.submit(_rows, *work))
        for rows in measured:
            yield from rows.result()


def _lower_kernels(problem: Problem, seeds: int) -> jax.stages.Lowered:
    # Imported on use: the kernels refuse a JAX that they do not know.
    from attn_jax.kernels.attention import attention

    # Says where they do not run.
    small = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    ask = functools.partial(dot_product_attention, implementation="pallas")
    jax.eval_shape(ask, small, small, small)

    def attend(query, key, value):
        options = {"mask": problem.mask, "backward": _BACKWARD}
        return attention(query, key, value, scale=problem.H**-0.5, **options)

    return lower(attend, problem, seeds)


def _lower_emulator(recipe: Recipe, problem: Problem, seeds: int) -> jax.stages.Lowered:
    if recipe.carrier != FP64:
        return lower(emulated(recipe, problem), problem, seeds)
    # The kernels' constant scale log2(e) is an FP32 number, the FP64 carrier's is not.
    constant = np.float32(problem.H**-0.5 * math.log2(math.e))
    scale = float(constant) / math.log2(math.e)
    with jax.enable_x64(True):
        return lower(emulated(recipe, problem, scale), problem, seeds)


def _own_recipe(problem: Problem) -> Recipe:
    # Imported on use: the kernels refuse a JAX that they do not know.
    from attn_jax.kernels.attention import declared_recipe

    return declared_recipe(
        *(jnp.dtype(problem.dtype), problem.H, problem.S, problem.mask),
        query_length=problem.T,
        backward=_BACKWARD,
    )


def _rows(
    problem: Problem,
    family: str,
    inputs: Inputs,
    found: Results,
    predicted: dict[str, Results],
    units: Results,
) -> list[Row]:
    """The rows of one cell; `bound` is the order bound of the kernels' own recipe."""
    own = _own_recipe(problem)
    bounds = order_sizes(own, problem, inputs)
    rows: list[Row] = []
    distance: dict[str, float] = {}
    for name, results in predicted.items():
        for tensor in Results._fields:
            # Where both results vanish by construction there is no unit.
            unit = getattr(units, tensor) or 1.0
            row: Row = dataclasses.asdict(problem)
            row |= {"family": family, "recipe": name, "tensor": tensor}
            row |= apart(getattr(found, tensor), getattr(results, tensor), unit)
            row["bound"] = getattr(bounds, tensor) / unit
            row["verdict"] = ""
            if name == OWN:
                row["verdict"] = _verdict(row["rms"] <= row["bound"])
            elif name == ON_TENSOR_CORES:
                distance[tensor] = row["rms"]
            elif family in MUST_SHOW[name].get(tensor, ()):
                further = row["rms"] > TOLD_APART * distance[tensor]
                row["verdict"] = _verdict(further)
            rows.append(row)
    return rows


def _verdict(holds: bool) -> str:
    return "PASS" if holds else "FAIL"


def largest(rows: Sequence[Row]) -> list[Row]:
    """For each recipe, tensor and family the row nearest to failing, over problems.

    For the own recipe that is the largest share of the bound, for a wrong one the
    smallest distance, among the rows with a verdict.
    """
    worst: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if not row["verdict"]:
            continue
        key = row["recipe"], row["tensor"], row["family"]
        margin = row["rms"] - row["bound"] if row["recipe"] == OWN else -row["rms"]
        margin = (row["verdict"] == "FAIL", margin)
        if key not in worst or margin > worst[key]["margin"]:
            worst[key] = row | {"margin": margin}
    columns = (
        *("recipe", "tensor", "family", "dtype", "H", "is_causal"),
        *("rms", "max", "differ", "bound", "verdict"),
    )
    return [{column: row[column] for column in columns} for row in worst.values()]
