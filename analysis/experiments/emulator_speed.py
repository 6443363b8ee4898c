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

from analysis.record import Row, environment, show, write
from attn_jax import RECIPES, emulator
from attn_jax.audit.inputs import Shape, make_inputs
from train.config import UsageError

SUMMARY = "seconds and memory of the emulator's forward pass, by length"
HEADS, HEAD_DIM = 16, 128
_RUNS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    add("--recipe", choices=RECIPES, default="attn_jax")
    add("--heads", type=int, default=HEADS, help=f"default {HEADS}")
    add("--out", type=Path, default=Path("results", "emulator_speed"), help="folder")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Times the forward pass at each length and writes the table.

    Raises:
      UsageError: a length or a head count is below 1.
    """
    if min(*options.lengths, options.heads) < 1:
        raise UsageError("--lengths and --heads must be at least 1")
    described = environment(command)
    rows = [_row(options.recipe, length, options.heads) for length in options.lengths]
    device = str(described["device"]).lower().replace(" ", "-")
    files = write(rows, described, options.out / device)
    show(rows, f"Forward pass of {options.recipe}, H = {HEAD_DIM}")
    return {"rows": len(rows), "files": [str(path) for path in files]}


def _row(recipe: str, length: int, heads: int) -> Row:
    inputs = make_inputs("normal", 0, Shape(1, length, length, heads, heads, HEAD_DIM))
    arrays = [jnp.asarray(x) for x in inputs[:3]]

    @jax.jit
    def forward(q, k, v):
        return emulator.attention(q, k, v, recipe=RECIPES[recipe])

    began = time.perf_counter()
    compiled = forward.lower(*arrays).compile()
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
