"""One training configuration, its step and the parts of it measured by attention."""

import dataclasses
import functools
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from analysis.model_flops import PEAKS, PER_STEP, forward_flops
from analysis.record import Row
from analysis.step_programs import Part, Program, Runner, compile_part
from attn_jax.timing import card, interleaved, kernel_times, quartiles, reason
from train.assemble import Assembly, assemble
from train.config import Attention, Config, UsageError, image_tokens
from train.precision import start_loss_scale
from train.state import TrainState

# Runs in a row for each of `interleaved`: a wait for the device is short beside them.
_IN_A_ROW = 4
# Steps before kernels are listed, so that the card is as warm as in a training, and
# steps of which they are.
_WARM, _TRACED = 20, 3
# Allocators leave gaps: what would take more of the memory than this is not tried.
_USABLE = 0.97
# How XLA says so, too.
_EXHAUSTED = "RESOURCE_EXHAUSTED"
# What a kernel does, by its name; the first that fits.
KINDS = {
    "attention": re.compile(r"attention_|cudnn|fmha|flash"),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.IGNORECASE),
}
BETWEEN = "between kernels"
_MEASURED = (
    *("ms", "ms_25", "ms_75", "rounds", "tflops", "mfu", "gigabytes"),
    *("compile_seconds", "largest_batch", "sm_mhz", "watts", "refused"),
)


def kind_of(kernel: str) -> str:
    """attention, products, or other: of a kernel's name."""
    for kind, pattern in KINDS.items():
        if pattern.search(kernel):
            return kind
    return "other"


@dataclasses.dataclass(frozen=True)
class StepCase:
    """What is measured together.

    Attributes:
      config: at the batch size to begin with; its attention is not looked at.
      names: of attentions, as `--attn` takes them.
      seconds: of timing a part; 0: none is, and XLA tries nothing out.
      largest: whether the largest batch of which a step runs is looked for.
      kernels: whether the kernels of a step are listed.
    """

    config: Config
    names: Sequence[str]
    parts: Sequence[Part]
    seconds: float
    largest: bool = False
    kernels: bool = False

    def rows(self) -> Iterator[Row]:
        """Of the tables `times` and `kernels`, the column `table`."""
        batch = self.config.batch_size
        while True:
            needed = 0.0
            for row in self._at(batch):
                if _EXHAUSTED in (row.get("refused") or ""):
                    # More than all, if it was only found when it compiled or ran.
                    known = (row["gigabytes"] or 0.0) * 2**30
                    needed = max(needed, known, 1.01 * self._limit)
                yield row
            if needed <= self._limit or batch == 1:
                return
            batch = max(1, batch >> math.ceil(math.log2(needed / self._limit)))

    @property
    def _limit(self) -> float:
        """Bytes that the device gives."""
        return _memory("bytes_limit", math.inf)

    @property
    def _held(self) -> float:
        """Bytes that arrays take now, the state among them."""
        jax.block_until_ready(self._state)
        return _memory("bytes_in_use", 0.0)

    @functools.cached_property
    def _state(self) -> TrainState:
        """Weights none of which is 0, for all attentions.

        Gates and the last layer begin at 0, and with them nearly all gradients.
        Products with zeros draw less power: a card at its limit runs them at a higher
        clock than those of a training under way.
        """
        assembly, rng = self._assembled("baseline", 1), np.random.default_rng(0)

        def weights(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if "scale" in jax.tree_util.keystr(path):
                filled = np.ones(leaf.shape, leaf.dtype)
            else:
                filled = rng.standard_normal(leaf.shape, np.float32)
                filled = (filled / math.sqrt(self.config.model.width)).astype(
                    leaf.dtype
                )
            return jax.device_put(filled, leaf.sharding)

        abstract = assembly.abstract_state()
        state = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            abstract,
        )
        start = jax.device_put(
            start_loss_scale(assembly.policy),
            jax.tree.map(lambda leaf: leaf.sharding, abstract.loss_scale),
        )
        params = jax.tree_util.tree_map_with_path(weights, abstract.params)
        return state._replace(params=params, loss_scale=start)

    def _at(self, batch: int) -> Iterator[Row]:
        """Rows at a batch size."""
        built = self._compiled(batch)
        for part in self.parts:
            rows = {
                name: self._row(name, part, batch, programs[part])
                for name, programs in built.items()
            }
            kernels: dict[str, list[Row]] = {}
            if self.seconds > 0:
                kernels = self._timed(part, rows, built)
            if part == "step" and self.largest:
                fit = sorted(n for n, row in rows.items() if row["refused"] is None)
                for name, size in self._largest(fit, batch):
                    rows[name]["largest_batch"] = size
            for name, row in rows.items():
                yield row
                yield from kernels.get(name, ())

    def _timed(
        self,
        part: Part,
        rows: dict[str, Row],
        built: dict[str, dict[str, Program | str]],
    ) -> dict[str, list[Row]]:
        """The kernels of each attention, if asked for; times are entered in `rows`."""
        runners = {}
        for name, programs in built.items():
            program = programs[part]
            if isinstance(program, str) or rows[name]["refused"]:
                continue
            try:
                runners[name] = Runner(program, self._state)
                runners[name].milliseconds(1)
            except JaxRuntimeError as error:
                runners.pop(name, None)
                rows[name]["refused"] = reason(error)
        self._time(runners, rows)
        if part != "step" or not self.kernels:
            return {}
        ran = [name for name in runners if rows[name]["ms"] is not None]
        return {name: list(_kernels(rows[name], runners[name])) for name in ran}

    def _compiled(self, batch: int) -> dict[str, dict[str, Program | str]]:
        """Programs of each attention, compiled beside each other; or why not."""

        def one(name: str, part: Part, *, tuned: bool = True) -> Program | str:
            try:
                return compile_part(self._assembled(name, batch), part, tuned=tuned)
            except (UsageError, JaxRuntimeError, NotImplementedError) as error:
                return reason(error)

        timed = self.seconds > 0
        with _pool() as pool:
            # XLA tries out products, for minutes where they hardly fit: first it is
            # asked what the parts need.
            if timed and self._limit < math.inf:
                last = self.parts[-1]
                tries = {n: pool.submit(one, n, last, tuned=False) for n in self.names}
                tried = {name: wait.result() for name, wait in tries.items()}
            else:
                tried = {}
            waits = {
                name: {
                    part: pool.submit(one, name, part, tuned=timed)
                    for part in self.parts
                }
                for name in self.names
                if self._fits(tried.get(name, ""))
            }
            return {
                name: (
                    {part: wait.result() for part, wait in waits[name].items()}
                    if name in waits
                    else dict.fromkeys(self.parts, tried[name])
                )
                for name in self.names
            }

    def _fits(self, program: Program | str) -> bool:
        return isinstance(program, str) or program.bytes <= _USABLE * self._limit

    def _assembled(self, name: str, batch: int) -> Assembly:
        mesh = dataclasses.replace(self.config.mesh, data=1)
        config = dataclasses.replace(
            self.config, attn=cast(Attention, name), batch_size=batch, mesh=mesh
        )
        return assemble(config, jax.devices()[:1])

    def _row(self, name: str, part: Part, batch: int, program: Program | str) -> Row:
        tokens = self.config.model.text_length + image_tokens(self.config)
        row: Row = {
            **{"table": "times", "N": tokens, "batch": batch, "part": part},
            **{"implementation": name, **dict.fromkeys(_MEASURED)},
        }
        if isinstance(program, str):
            return row | {"refused": program}
        row |= {"gigabytes": program.bytes / 2**30, "compile_seconds": program.seconds}
        if not self._fits(program):
            told = f"{_EXHAUSTED}: needs {row['gigabytes']:.1f} GiB"
            row["refused"] = f"{told} of {self._limit / 2**30:.1f}"
        return row

    def _time(self, runners: dict[str, Runner], rows: dict[str, Row]):
        """Enters the times, taken in turn."""
        turns = {
            name: lambda runs, runner=runner: runner.milliseconds(_IN_A_ROW * runs)
            for name, runner in runners.items()
        }
        with card() as reading:
            times = interleaved(turns, self.seconds)
        for name in runners:
            row, seen = rows[name], times[name]
            if isinstance(seen, str):
                row["refused"] = seen
                continue
            row |= {**quartiles(seen), "rounds": len(seen), **reading}
            rate = self._flops(row) / (row["ms"] / 1e3)
            peak = PEAKS.get(jax.devices()[0].device_kind)
            row |= {"tflops": rate / 1e12, "mfu": peak and rate / peak}

    def _flops(self, row: Row) -> int:
        vocabulary = self._assembled("baseline", 1).tokenizer.vocab_size
        passes = 1 if row["part"] == "forward" else PER_STEP
        return passes * row["batch"] * forward_flops(self.config, vocabulary)

    def _largest(self, names: Sequence[str], batch: int) -> Iterator[tuple[str, int]]:
        """Of each attention the largest batch of which a step runs, found by what
        batches need; `batch` is one of which it does."""
        # A step runs on a copy of the state.
        usable = _USABLE * self._limit - self._held
        if usable == math.inf or batch < 2:
            return

        def step(name: str, size: int) -> Program:
            return compile_part(self._assembled(name, size), "step", tuned=False)

        half, device = batch // 2, threading.Lock()

        def search(name: str, less: int, held: int) -> int:
            """From what the device holds at half the batch, and at all of it."""
            each = (held - less) / (batch - half)
            runs, size = batch, batch + math.floor((usable - held) / each)
            over = size + 1
            while size > runs:
                program = step(name, size)
                with device:
                    ran = self._runs(program, usable)
                runs, over = (size, over) if ran else (runs, size)
                # Below what bytes say; else, where a gap was lacking, halfway.
                less = math.ceil((program.bytes - usable) / each)
                size = max(over - less if less > 0 else (runs + over) // 2, runs)
            return runs

        with _pool() as pool:
            pairs = [(name, size) for name in names for size in (half, batch)]
            held = [x.bytes for x in pool.map(step, *zip(*pairs, strict=True))]
            yield from zip(names, pool.map(search, names, held[::2], held[1::2]))

    def _runs(self, program: Program, usable: float) -> bool:
        if program.bytes > usable:
            return False
        try:
            Runner(program, self._state).milliseconds(1)
        except JaxRuntimeError:  # What fits by its bytes may lack a gap of that size.
            return False
        return True


def _memory(name: str, otherwise: float) -> float:
    """One of the device's own numbers; `otherwise` if it has none."""
    return (jax.local_devices()[0].memory_stats() or {}).get(name, otherwise)


def _pool() -> ThreadPoolExecutor:
    """For programs compiled beside each other."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2))


def _kernels(row: Row, runner: Runner) -> Iterator[Row]:
    """The kernels of a step by their names, the longest first."""
    runner.milliseconds(_WARM)
    seen = kernel_times(lambda: runner.milliseconds(_TRACED))
    launches, total = Counter(kernel for kernel, _ in seen), dict[str, float]()
    for kernel, milliseconds in seen:
        total[kernel] = total.get(kernel, 0.0) + milliseconds / _TRACED
    same = {k: row[k] for k in ("N", "batch", "part", "implementation")}
    same = {"table": "kernels", **same}
    for kernel, milliseconds in sorted(total.items(), key=lambda x: -x[1]):
        found = {"kind": kind_of(kernel), "kernel": kernel[:120]}
        yield {
            **{**same, **found},
            **{"launches": launches[kernel] / _TRACED, "ms": milliseconds},
        }
    rest = {"kind": BETWEEN, "kernel": "", "launches": len(seen) / _TRACED}
    yield {**same, **rest, "ms": row["ms"] - sum(total.values())}


def by_kind(kernels: Iterable[Row]) -> list[Row]:
    """Milliseconds of a step by kind of kernel, a line for each case and attention."""
    lines: dict[tuple, Row] = {}
    for row in kernels:
        key = {k: row[k] for k in ("case", "batch", "implementation")}
        kinds = dict.fromkeys((*KINDS, "other", BETWEEN), 0.0)
        line = lines.setdefault(tuple(key.values()), {**key, **kinds})
        line[row["kind"]] += row["ms"]
    return list(lines.values())
