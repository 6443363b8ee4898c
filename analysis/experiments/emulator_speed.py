"""Time and memory of the emulator by length: one forward pass, all heads at once.

`seconds` is the best of five runs after compilation, `megabytes` what the compiled
program needs beside its arguments and results. Memory that grows in proportion to the
length shows that no T x S array is kept.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from analysis.record import Row, check_writable, device_name, environment, show, write
from attn_jax import RECIPES, emulator
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.formats import FP64
from train.config import UsageError

SUMMARY = "seconds and memory of the emulator's forward pass, by length"
HEADS, HEAD_DIM = 16, 128
_RUNS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    lengths = [1024, 2048, 4096, 8192]
    help = "queries, and as many keys (default 1024 2048 4096 8192)"
    add("--lengths", nargs="+", type=int, default=lengths, help=help)
    help = "algorithm that is emulated (default attn_jax)"
    add("--recipe", choices=RECIPES, default="attn_jax", help=help)
    add("--heads", type=int, default=HEADS, help=f"default {HEADS}")
    out = Path("results", "emulator_speed")
    add("--out", type=Path, default=out, help=f"folder (default {out})")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Times the forward pass at each length and writes the table.

    Raises:
      UsageError: a length or a head count is below 1 or the recipe takes none of that
        length, or the table cannot be written; raised before anything is timed.
    """
    if min(*options.lengths, options.heads) < 1:
        raise UsageError("--lengths and --heads must be at least 1")
    lengths = list(dict.fromkeys(options.lengths))
    # As in a sweep: 64-bit types only for a recipe that carries them.
    with jax.enable_x64(RECIPES[options.recipe].carrier == FP64):
        for length in lengths:
            _check(options.recipe, length, options.heads)
        described = environment(command)
        device = device_name()
        check_writable(options.out / device)
        rows = [_row(options.recipe, length, options.heads) for length in lengths]
    files = write(rows, described, options.out / device)
    show(rows, f"Forward pass of {options.recipe}, H = {HEAD_DIM}")
    return {"rows": len(rows), "files": [str(path) for path in files]}


def _forward(recipe: str):
    @jax.jit
    def forward(q, k, v):
        return emulator.attention(q, k, v, recipe=RECIPES[recipe])

    return forward


def _check(recipe: str, length: int, heads: int) -> None:
    x = jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), _dtype(recipe))
    try:
        jax.eval_shape(_forward(recipe), x, x, x)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"--lengths {length}: {error}") from error


def _dtype(recipe: str):
    return jnp.float64 if RECIPES[recipe].carrier == FP64 else jnp.float32


def _row(recipe: str, length: int, heads: int) -> Row:
    shape = Shape(1, length, length, heads, heads, HEAD_DIM)
    inputs = make_inputs("normal", 0, shape)
    arrays = [jnp.asarray(x, _dtype(recipe)) for x in inputs[:3]]
    began = time.perf_counter()
    compiled = _forward(recipe).lower(*arrays).compile()
    compiling = time.perf_counter() - began
    memory = compiled.memory_analysis()
    assert memory is not None  # Every backend that JAX ships with reports it.
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - began)
    return {
        "recipe": recipe,
        "N": length,
        "heads": heads,
        "H": HEAD_DIM,
        "seconds": min(times),
        "compile_seconds": compiling,
        "megabytes": memory.temp_size_in_bytes / 2**20,
    }
