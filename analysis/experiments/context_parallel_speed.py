"""Speed and memory of context-parallel attention on the GPUs of a host.

`ms` is the median over rounds of the mean of several runs in a row, by the wall clock,
as many as take `_ROW` seconds, so that to start them is hidden behind those before;
programs take turns. Each has `tokens` on every device, causal. `share` is how much of
what the plain kernel does on one device they keep, each of them,

    share = (milliseconds of one device with all tokens) / (devices * milliseconds)

and `tflops` is the rate of one of them, of the products that the mask leaves. The rows
`one device` are the plain kernel's, for the same whole sequence, on the first device.
In `each by itself` all devices do that at the same time: no card is like another, under
the load of all of them, and strategies go at the pace of the slowest. `of_each` is
their share of that row's rate.

`megabytes` (2^20 bytes) is what the compiled program holds on a device while it runs:
arguments, results and, `beside` them, what XLA allocates for all that is between; not
NCCL's own buffers. `over_one` is that over what one device holds for the whole
sequence. `--compile-for` says so of any number of GPUs, without any, and nothing else.

On GPUs JAX's profiler says, in milliseconds of a run on the first device, how long our
kernels run (`attention`) and what else computes or copies (`rest`), how long messages
travel (`communication`) and how much of that time nothing else runs (`exposed`), and
for how long nothing does (`idle`); `--kernels` writes each kernel of each device to a
table of its own.
"""

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from analysis import ExperimentError, device_trace, parallel, store
from analysis.figures import Panel, write_figure
from analysis.record import (
    Row,
    check_writable,
    device_name,
    environment,
    show,
    write,
    written,
)
from analysis.speed import in_jax
from attn_jax import context_parallel, dot_product_attention
from attn_jax.context_parallel import Layout, Strategy
from attn_jax.context_parallel.arguments import check_heads
from attn_jax.context_parallel.layouts import check_length
from attn_jax.timing import (
    Event,
    card,
    device_events,
    interleaved,
    quartiles,
    reason,
)
from train.config import UsageError

SUMMARY = "speed, memory and hidden messages of context parallelism, by strategy"
PASSES = "forward", "both"
ONE, EACH = ALONE = "one device", "each by itself"
_TRACED = 2
_ROW, _LEAST_RUNS = 0.1, 3
_COLUMNS = (
    *("ms", "ms_25", "ms_75", "rounds", "tflops", "share", "of_each", "megabytes"),
    *("beside", "over_one", *device_trace.COLUMNS, "compile_seconds"),
    *("sm_mhz", "watts"),
    "refused",
)
_SHOWN = (
    *("tokens", "devices", "strategy", "layout", "pass", "ms", "tflops", "share"),
    *("of_each", *device_trace.COLUMNS, "megabytes", "over_one"),
)


class Store(store.Store):
    """Of rows of strategies."""

    needed = ("strategy",)


class Heads(NamedTuple):
    """Query heads, key heads and the dimension of each."""

    query: int
    key: int
    dim: int


class Cell(NamedTuple):
    """One program: tokens on each of so many devices."""

    tokens: int
    devices: int
    strategy: str
    layout: str
    of: str

    @property
    def row(self) -> Row:
        names = {"strategy": self.strategy, "layout": self.layout}
        return names | dict.fromkeys(_COLUMNS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, help="on a device (default 8192 32768)")
    add("--devices", nargs="+", type=int, help="default: 2, 4, ...; --compile-for: 8")
    add("--strategies", nargs="+", choices=get_args(Strategy), help="default: all")
    add("--layouts", nargs="+", choices=get_args(Layout), help="default: all")
    help = "both: forward and backward together (default: forward both)"
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help=help)
    add("--heads", type=int, default=32, help="query heads (default 32)")
    add("--kv-heads", type=int, default=8, help="key heads (default 8)")
    add("--head-dim", type=int, default=128, help="default 128")
    add("--seconds", type=float, default=3.0, help="of timing a size (default 3)")
    out = Path("results", "context-parallel-speed")
    add("--kernels", action="store_true", help="time each kernel, too (GPU)")
    help = "memory of the compiled programs alone, without a GPU"
    add("--compile-for", choices=["h100", "h200"], help=help)
    add("--out", type=Path, default=out, help=f"folder (default {out})")
    add("--fresh", action="store_true", help="measure anew what is there already")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Compiles every program, times them in turn and writes table and figure.

    Raises:
      UsageError: a number is below 1, heads or devices do not fit, or the table cannot
        be written; raised before anything is compiled.
      ExperimentError: nothing ran on several devices. The table is written all the
        same.
    """
    target = options.compile_for
    gpu = target is not None or jax.default_backend() == "gpu"
    there = len(jax.devices()) if target is None else max(options.devices or [8])
    heads = Heads(options.heads, options.kv_heads, options.head_dim)
    sizes = sorted(set(options.tokens or ([8192, 32768] if gpu else [256])))
    doubled = [2**n for n in range(1, 10) if 2**n <= there]
    counts = sorted(set(options.devices or (doubled if target is None else [there])))
    if min(*heads, *sizes) < 1:
        raise UsageError("--tokens, heads and --head-dim must be above 0")
    if not 0 < options.seconds < float("inf"):
        raise UsageError(f"--seconds must be above 0, got {options.seconds:g}")
    if heads.query % heads.key:
        raise UsageError(
            f"--heads {heads.query} must be a multiple of --kv-heads {heads.key}"
        )
    if not counts or counts[0] < 2 or counts[-1] > there:
        raise UsageError(
            f"--devices takes numbers from 2 to {there}, which are here"
            if there > 1
            else "context parallelism is timed on two devices or more, and here is "
            "one; --compile-for h200 says without them what programs hold"
        )
    described = environment(command)
    device = device_name()
    stem = options.out / (f"compiled-for-{target}" if target else f"{device}-x{there}")
    check_writable(stem)
    strategies = options.strategies or list(get_args(Strategy))
    layouts = options.layouts or list(get_args(Layout))
    settings = {
        **{"experiment": "context-parallel-speed", "strategies": strategies},
        **{"layouts": layouts, "heads": list(heads), "seconds": options.seconds},
        **{"compile_for": target, "kernels": options.kernels},
    }
    tables = {
        (tokens, count, of): list(
            _cells(tokens, count, of, strategies, layouts, timed=target is None)
        )
        for tokens in sizes
        for count in counts
        for of in options.passes
    }
    path = stem.with_suffix(".jsonl")
    with contextlib.closing(Store(path, settings, fresh=options.fresh)) as kept:
        missing = [key for key in tables if _named(key) not in kept]
        if missing:
            kept.describe(described)
        # A program is lowered in seconds, by Python: all of them before any is timed,
        # so that they are timed in a quiet process.
        devices = _devices(target, there)
        with _default_device(target, devices):
            built = {
                key: _compiled_together(tables[key], heads, devices) for key in missing
            }
        print(f"{sum(map(len, built.values()))} programs compiled", file=sys.stderr)
        seconds = None if target else options.seconds
        for key in missing:
            measured = _measured(tables[key], built.pop(key), seconds, options.kernels)
            kept.add(_named(key), compared(measured, tables[key][0], heads))
            print(f"{_named(key)} measured", file=sys.stderr)
        rows = kept.rows([_named(key) for key in tables])
        kernels = [
            {**_names(row), **kernel} for row in rows for kernel in row.pop("kernels")
        ]
        beside = {"settings": settings, "measured": kept.environments}
    files = [path, *write(rows, described | beside, stem)]
    if options.kernels:
        own = stem.with_name(f"{stem.name}-kernels")
        files += write(kernels, described | beside, own)
    files += _figure(rows, stem.with_suffix(".png"))
    show([{k: row[k] for k in _SHOWN} for row in rows], "Context parallelism, causal")
    said = "ms" if target is None else "megabytes"
    ran = [r for r in rows if r[said] is not None and r["strategy"] not in ALONE]
    if not ran:
        raise ExperimentError(f"nothing ran: {rows[-1]['refused']}")
    return {"rows": len(rows), "files": [str(path) for path in files]}


def _named(table: tuple[int, int, str]) -> dict[str, Any]:
    return dict(zip(("tokens", "devices", "pass"), table, strict=True))


def _names(row: Row) -> Row:
    """What tells a row from the others."""
    names = "tokens", "devices", "pass", "strategy", "layout"
    return {name: row[name] for name in names}


def _cells(
    tokens: int,
    devices: int,
    of: str,
    strategies: Sequence[str],
    layouts: Sequence[str],
    *,
    timed: bool,
) -> Iterator[Cell]:
    yield Cell(tokens, devices, ONE, "", of)
    if timed:
        yield Cell(tokens, devices, EACH, "", of)
    for strategy in strategies:
        if strategy == "ring+ulysses" and devices < 4:
            continue
        for layout in layouts:
            # Whole sequences meet there, in any order of their positions.
            if strategy != "ulysses" or layout == layouts[0]:
                yield Cell(tokens, devices, strategy, layout, of)


class Built(NamedTuple):
    """A compiled program, the shapes of its arguments, and columns of its row."""

    program: Any
    shapes: list[jax.ShapeDtypeStruct]
    columns: Row


def _devices(target: str | None, count: int) -> Sequence[Any]:
    """Those that are here, or so many that are not."""
    if target is None:
        return jax.devices()
    # Imported on use: it wants the extra `compile`.
    from attn_jax.kernels import compiler

    return compiler.devices(cast(Any, target), count)


def _default_device(
    target: str | None, devices: Sequence[Any]
) -> contextlib.AbstractContextManager:
    """Kernels are made for it."""
    return jax.default_device(devices[0]) if target else contextlib.nullcontext()


def _compiled_together(
    cells: Sequence[Cell], heads: Heads, devices: Sequence[Any]
) -> list[Built | str]:
    """Programs, or why there is none."""
    default = jax.config.jax_default_device

    def one(cell: Cell) -> Built | str:
        try:
            _check(cell, heads)
        except ValueError as error:
            return reason(error)
        try:
            with jax.default_device(default):  # A thread has its own.
                return _compiled(cell, heads, devices)
        # What the kernels do not take, or the device not hold; another is a bug.
        except (NotImplementedError, JaxRuntimeError) as error:
            return reason(error)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return list(pool.map(one, cells))


def _check(cell: Cell, heads: Heads) -> None:
    """Raises ValueError, one line, for what cannot be dealt to the devices."""
    if cell.strategy in ALONE:
        return
    dealt = {"ulysses": cell.devices, "ring+ulysses": parallel.ULYSSES}.get(
        cell.strategy, 1
    )
    for name, count in (("query", heads.query), ("key", heads.key)):
        check_heads(name, count, dealt, cell.strategy)
    shards = cell.devices if dealt in (1, cell.devices) else cell.devices // dealt
    check_length("query", cell.tokens * cell.devices, shards, cast(Layout, cell.layout))


def _measured(
    cells: Sequence[Cell],
    built: Sequence[Built | str],
    seconds: float | None,
    kernels: bool,
) -> list[Row]:
    """Rows of programs that take turns; None seconds: which do not run."""
    rows = [cell.row | {"kernels": []} for cell in cells]
    arguments: dict[Any, tuple] = {}
    turns: dict[int, Callable[[], object]] = {}
    in_a_row: dict[int, int] = {}
    for number, (found, row) in enumerate(zip(built, rows, strict=True)):
        if isinstance(found, str):
            row["refused"] = found
            continue
        row |= found.columns
        if seconds is None:
            continue
        given = tuple((x.shape, x.sharding) for x in found.shapes)
        try:
            if given not in arguments:
                arguments[given] = tuple(map(_normal, found.shapes, range(len(given))))
            run = functools.partial(found.program, *arguments[given])
            jax.block_until_ready(run())
            one = _milliseconds(run, 1)
        except JaxRuntimeError as error:
            row["refused"] = reason(error)
            continue
        turns[number] = run
        # A CPU's threads all wait for one another where many have begun.
        many = int(_ROW * 1e3 / one) if jax.default_backend() == "gpu" else 0
        in_a_row[number] = max(_LEAST_RUNS, many)
    if seconds is None:
        return rows
    with card() as reading:
        times = interleaved(
            {
                str(number): lambda _, number=number: _milliseconds(
                    turns[number], in_a_row[number]
                )
                for number in turns
            },
            seconds,
        )
    for number, run in turns.items():
        found = times[str(number)]
        if isinstance(found, str):
            rows[number]["refused"] = found
            continue
        rows[number] |= {**quartiles(found), "rounds": len(found), **reading}
        if jax.default_backend() == "gpu":
            devices = device_events(lambda run=run: _milliseconds(run, _TRACED - 1))
            rows[number] |= _seen(devices, kernels=kernels)
    return rows


def _seen(devices: Sequence[Sequence[Event]], *, kernels: bool) -> Row:
    """What a trace says of `_TRACED` runs, for a row."""
    busy = [events for events in devices if events]
    if not busy:
        return {}
    found = device_trace.summary(busy[0], _TRACED)
    if kernels:
        found["kernels"] = [
            {"device": number, **kernel}
            for number, events in enumerate(busy)
            for kernel in device_trace.kernels(events, _TRACED)
        ]
    return found


def _compiled(cell: Cell, heads: Heads, devices: Sequence[Any]) -> Built:
    mesh, attend = _attention(cell, devices)
    each = cell.strategy == EACH
    shape = cell.devices if each else 1, cell.tokens * cell.devices
    counts = heads.query, heads.key, heads.key, heads.query
    spec = P(mesh.axis_names) if each else P(None, mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    shapes = [
        jax.ShapeDtypeStruct((*shape, n, heads.dim), jnp.bfloat16, sharding=sharding)
        for n in counts[: 3 if cell.of == "forward" else 4]
    ]

    def both(query, key, value, dout):
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(dout)

    function = attend if cell.of == "forward" else both
    began = time.monotonic()
    options = context_parallel.compiler_options(mesh.devices.flat)
    program = jax.jit(function).lower(*shapes).compile(options)
    seconds = time.monotonic() - began
    what = f"{cell.strategy} {cell.layout}".strip(), f"{cell.of}, {cell.tokens} tokens"
    print(f"{', '.join(what)}: compiled in {seconds:.0f} s", file=sys.stderr)
    said = {**in_jax.memory_of(program), "compile_seconds": seconds}
    return Built(program, shapes, said)


def _normal(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    made = functools.partial(jax.random.normal, shape=shape.shape, dtype=shape.dtype)
    return jax.jit(made, out_shardings=shape.sharding)(jax.random.key(seed))


def _attention(cell: Cell, there: Sequence[Any]) -> tuple[Mesh, Callable]:
    """The devices, and attention of arrays that lie on them in the layout's order."""

    def plain(query, key, value):
        return dot_product_attention(query, key, value, is_causal=True)

    if cell.strategy == ONE:
        return Mesh(np.asarray(there[:1]), ("seq",)), plain
    if cell.strategy == EACH:
        mesh, own = Mesh(np.asarray(there[: cell.devices]), ("seq",)), P("seq")
        return mesh, jax.shard_map(
            plain, mesh=mesh, in_specs=own, out_specs=own, check_vma=False
        )
    mesh, attend = parallel.over_devices(
        there[: cell.devices], cast(Strategy, cell.strategy), cast(Layout, cell.layout)
    )
    return mesh, lambda *x: attend(*x)[0]


def _milliseconds(run: Callable[[], object], runs: int) -> float:
    jax.block_until_ready(run())
    began = time.perf_counter()
    for _ in range(runs):
        found = run()
    jax.block_until_ready(found)
    return (time.perf_counter() - began) / runs * 1e3


def compared(rows: Sequence[Row], cell: Cell, heads: Heads) -> list[Row]:
    """The rows with `tflops`, `share`, `of_each` and `over_one`; the first is one
    device's."""
    one, found = rows[0], []
    each = next((row["ms"] for row in rows if row["strategy"] == EACH), None)
    for row in rows:
        count = 1 if row["strategy"] in ALONE else cell.devices
        if row["ms"] is not None:
            length = cell.tokens * cell.devices
            # Two products of T (T + 1) / 2 pairs; five more in the backward pass.
            products = 2 if cell.of == "forward" else 7
            flops = products * heads.query * heads.dim * length * (length + 1)
            row = row | {"tflops": flops / count / row["ms"] / 1e9}
            if one["ms"] is not None:
                row |= {"share": one["ms"] / (count * row["ms"])}
            if each is not None and row["strategy"] != ONE:
                row |= {"of_each": each / (count * row["ms"])}
        if row["megabytes"] is not None and one["megabytes"] is not None:
            row = row | {"over_one": row["megabytes"] / one["megabytes"]}
        found.append(row)
    return found


def _figure(rows: Sequence[Row], path: Path) -> list[Path]:
    panels = []
    for of in PASSES:
        for tokens in sorted({row["tokens"] for row in rows}):
            shown = [
                row
                for row in rows
                if row["pass"] == of
                and row["tokens"] == tokens
                and row["share"] is not None
                and row["strategy"] not in ALONE
            ]
            if shown:
                panels.append(
                    Panel(
                        f"{of}, {tokens} tokens a device",
                        shown,
                        *("strategy", "share", "layout"),
                        *("", "share of one device's rate"),
                        log_x=False,
                        log_y=False,
                        joined=False,
                    )
                )
    if not panels:
        return []
    with written(path):
        write_figure(panels, path, 2)
    return [path]
