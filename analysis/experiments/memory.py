"""Memory of attention, forward and backward in one program, by length.

`megabytes` is what the device holds while the compiled program runs: arguments, results
and, `beside` them, the one piece that XLA allocates for all that is between, the
scratch of kernels and libraries included. `growth` is megabytes over those of the
length before, over the ratio of the lengths: 1 where memory is linear in the length, 2
from each length to its double where an array of T x S is most of it. `over_cudnn` is
megabytes over cuDNN's. `measured` is the allocator's own peak once the program has run,
where the device keeps count and the program reached further than those before it (they
run in the order of their size).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from analysis import ExperimentError
from analysis.record import Row, check_writable, device_name, environment, show, write
from analysis.speed import in_jax
from analysis.speed.cases import Case, Pass
from analysis.speed.timing import reason
from train.config import UsageError

SUMMARY = "memory of attention, forward and backward, by length"
_MEGABYTE = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--lengths", nargs="+", type=int, help="default 8192 to 65536; CPU: 512, 1024")
    add("--heads", type=int, default=16, help="query heads (default 16)")
    add("--kv-heads", type=int, help="key/value heads (default: as many)")
    add("--head-dim", type=int, default=128, help="default 128")
    add(
        "--mask",
        choices=["full", "causal"],
        default="causal",
        help="full: without a mask (default causal)",
    )
    add(
        "--pass",
        dest="of",
        choices=["forward", "both"],
        default="both",
        help="both: forward and backward in one program (default both)",
    )
    add(
        "--implementations",
        nargs="+",
        choices=list(in_jax.IMPLEMENTATIONS),
        help="default: pallas cudnn; on a CPU xla emulated",
    )
    out = Path("results", "memory")
    add("--out", type=Path, default=out, help=f"folder (default {out})")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Compiles every program, runs them by size and writes the table.

    Raises:
      UsageError: a number is below 1, heads do not fit together, or the table cannot
        be written; raised before anything is compiled.
      ExperimentError: an implementation ran at none of the lengths. The table is
        written all the same.
    """
    gpu = jax.default_backend() == "gpu"
    usual = [8192, 16384, 32768, 65536] if gpu else [512, 1024]
    lengths = sorted(set(options.lengths or usual))
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    if min(*lengths, options.heads, kv_heads, options.head_dim) < 1:
        raise UsageError("lengths, heads and --head-dim must be at least 1")
    if options.heads % kv_heads:
        raise UsageError(
            f"--heads {options.heads} must be a multiple of --kv-heads {kv_heads}"
        )
    names = options.implementations or ["pallas", "cudnn"]
    if options.implementations is None and not gpu:
        names = ["xla", "emulated"]
    names = list(dict.fromkeys(names))
    described = environment(command)
    device = device_name()
    check_writable(options.out / device)
    rows, programs = [], {}
    for name in names:
        for length in lengths:
            case = Case(
                *(f"{length}", "memory", 1, length, length, options.heads, kv_heads),
                *(options.head_dim, options.mask),
            )
            row, program = _planned(name, case, options.of)
            rows.append(row)
            if program is not None:
                programs[name, length] = program, _shapes(case, options.of)
    _run(programs, rows)
    rows = compared(rows)
    files = write(rows, described, options.out / device)
    shown = [{k: x for k, x in row.items() if k != "refused"} for row in rows]
    show(shown, f"Memory of attention in MiB, {options.of}, {options.mask}, bfloat16")
    for row in rows:
        if row["refused"]:
            told = f"{row['implementation']} refused N = {row['N']}: {row['refused']}"
            print(told, file=sys.stderr)
    for name in names:
        own = [row for row in rows if row["implementation"] == name]
        if all(row["refused"] for row in own):
            raise ExperimentError(f"{name} ran nowhere: {own[0]['refused']}")
    return {"rows": len(rows), "files": [str(path) for path in files]}


def _planned(name: str, case: Case, of: Pass) -> tuple[Row, Any]:
    """A row, and the compiled program if there is one."""
    row: Row = {
        **{"implementation": name, "pass": of, "N": case.T, "heads": case.N},
        **{"kv_heads": case.K, "H": case.H, "mask": case.mask},
        **dict.fromkeys(("megabytes", "beside", "measured", "refused")),
    }
    attend = in_jax.attention(name, case, of)

    def both(query, key, value, dout):
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(dout)

    function = jax.jit(attend if of == "forward" else both)
    # Libraries of others raise anything where they do not run; ours say so, or the
    # device's memory ends. Another error of ours is a bug and ends the command.
    refusals: tuple[type[Exception], ...] = NotImplementedError, JaxRuntimeError
    if name in in_jax.PEERS:
        refusals += ImportError, ValueError, RuntimeError
    try:
        with in_jax.target(name):
            lowered = function.lower(*_shapes(case, of))
            program = lowered.compile(compiler_options=in_jax.compiler_options(name))
    except refusals as error:
        return row | {"refused": reason(error)}, None
    return row | in_jax.memory_of(program), program


def _shapes(case: Case, of: str) -> list[jax.ShapeDtypeStruct]:
    """query, key, value and, for `both`, dout."""
    heads = (case.N, case.K, case.K, case.N)[: 3 if of == "forward" else 4]
    return [
        jax.ShapeDtypeStruct((case.B, case.S, count, case.H), case.dtype)
        for count in heads
    ]


def _run(programs: Mapping[tuple[str, int], Any], rows: Sequence[Row]) -> None:
    """Runs the programs by their size and fills in `measured` of their rows."""
    device = jax.local_devices()[0]
    peak = 0
    for row in sorted(rows, key=lambda row: row["megabytes"] or 0):
        if row["refused"]:
            continue
        program, shapes = programs[row["implementation"], row["N"]]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        # In the narrow type from the start: nothing wider than they counts.
        inputs = [
            jax.random.bits(key, x.shape, "uint8").astype(x.dtype)
            for key, x in zip(keys, shapes, strict=True)
        ]
        try:
            jax.block_until_ready(program(*inputs))
        except JaxRuntimeError as error:
            row["refused"] = reason(error)
            continue
        finally:
            del inputs
        reached = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        if reached > peak:
            row["measured"], peak = reached / _MEGABYTE, reached


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with `growth` and `over_cudnn`; each implementation's by rising N."""
    held = {(row["implementation"], row["N"]): row["megabytes"] for row in rows}
    found: list[Row] = []
    for number, row in enumerate(rows):
        size, length = row["megabytes"], row["N"]
        before = rows[number - 1] if number else row
        growth = over = None
        cudnn = held.get(("cudnn", length))
        if size is not None and cudnn is not None:
            over = size / cudnn
        same = before["implementation"] == row["implementation"] and before is not row
        if same and size is not None and before["megabytes"] is not None:
            growth = (size / before["megabytes"]) / (length / before["N"])
        found.append({**row, "growth": growth, "over_cudnn": over})
    return found
