"""The error of attention implementations, forward and backward, against FP64.

For each problem (shape, mask, input format) and input family the exact result is
computed once, on the inputs as rounded, and shared by all implementations. `out`, `dq`,
`dk` and `dv` are in units of the unavoidable rounding: relative RMS error divided by
that of the exact result rounded once to the input format, pooled over heads and seeds;
1 is the best that a kernel can do. `lse` is the largest absolute error of log-sum-exp.
`*_bias` is the mean difference from the exact result rounded once, in the same units,
and `*_bias_ci` half the width of its 95 % interval (`audit.error.signed_bias`);
`*_growth` and `*_growth_ci` are those of the difference times the sign of the exact
result: below zero, results are too small.

What was measured is kept, cell by cell, and a second call goes on; with `--inputs` the
inputs are those of a training run (`analysis.capture`), its examples for draws.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jaxtyping import Array

from analysis import ExperimentError, capture, store, sweep
from analysis.agreement import FORMATS, VANISHING, Problem, same_bits
from analysis.kernel_options import OPTIONS, recipe_of
from analysis.problems import PRESETS
from analysis.record import Row, check_writable, device_name, environment, show, write
from attn_jax import IMPLEMENTATIONS, RECIPES, dot_product_attention
from attn_jax.api import Implementation
from attn_jax.audit import error
from attn_jax.audit.inputs import FAMILIES, Inputs, Shape, make_inputs
from attn_jax.audit.measure import is_out_of_memory
from attn_jax.formats import BF16
from attn_jax.reference import Golden, golden
from train.config import UsageError

SUMMARY = "error of out, dQ, dK and dV against FP64, by implementation and inputs"
# Those that promise the same bits on every run.
REPRODUCIBLE = ("pallas", "emulated", "reference", "xla")
# Column -> field of the exact result.
_FIELDS = {"out": "out", "dq": "dquery", "dk": "dkey", "dv": "dvalue"}
_BIASES = [
    f"{tensor}_{name}{end}"
    for tensor in _FIELDS
    for name in ("bias", "growth")
    for end in ("", "_ci")
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="which shapes and masks (default quick)")
    add(
        "--implementations",
        nargs="+",
        choices=[*IMPLEMENTATIONS, *OPTIONS],
        default=["pallas", "cudnn", "xla"],
        help="of dot_product_attention; pallas-...: the kernels with an option "
        "(default pallas cudnn xla)",
    )
    add(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        help="what 'emulated' emulates (default attn_jax)",
    )
    add("--families", nargs="+", choices=FAMILIES, help="inputs (default all)")
    add(
        "--inputs",
        metavar="run:PATH",
        help="inputs captured from a training run, in place of --preset, --families "
        "and --seeds; without a mask, as the model attends",
    )
    add("--seeds", type=int, help="draws of each problem, pooled (default 4)")
    add(
        "--float16-cotangent",
        type=float,
        default=1.0,
        help="factor on dO, a power of two, where the inputs are float16 (default 1)",
    )
    out = Path("results", "accuracy")
    add("--out", type=Path, default=out, help=f"folder (default {out})")
    add("--fresh", action="store_true", help="measure anew what is there already")


class Store(store.Store):
    """Of rows of implementations."""

    needed = ("implementation",)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured together: a problem on inputs of a family, or those captured
    at a step and layer; `draws` are pooled."""

    problem: Problem
    family: str
    draws: int

    @property
    def key(self) -> Row:
        """Columns of its rows, which tell it from others."""
        described = dataclasses.asdict(self.problem)
        return described | {"family": self.family, "seeds": self.draws}


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures what is missing, writes the table, prints the largest errors.

    Raises:
      UsageError: an option has no usable value, or the folder holds rows of others.
      ExperimentError: an implementation ran nowhere, or one that promises the same
        bits on every run did not give them. The table is written all the same.
    """
    arms = _arms(options.implementations, options.recipes)
    cotangent = options.float16_cotangent
    if math.frexp(cotangent)[0] != 0.5:
        raise UsageError(
            f"--float16-cotangent must be a power of two, got {cotangent:g}"
        )
    if options.inputs is None:
        name = options.preset or "quick"
        seeds = 4 if options.seeds is None else options.seeds
        if seeds < 1:
            raise UsageError(f"--seeds must be at least 1, got {seeds}")
        platform = jax.default_backend()
        if name != "toy" and platform != "gpu":
            raise UsageError(
                f"--preset={name} needs a GPU, and JAX finds a {platform}; "
                "--preset=toy runs anywhere"
            )
        cells = cells_of(PRESETS[name], options.families or FAMILIES, seeds)
        draw = functools.partial(_draw, float16_cotangent=cotangent)
    else:
        name, inputs = _of_run(options)
        cells = [_captured(label, one) for label, one in inputs.items()]

        def draw(cell: Cell) -> Inputs:
            return inputs[cell.family]

    described = environment(command)
    device = device_name()
    stem = options.out / f"{device}-{name}"
    check_writable(stem)
    settings = {"experiment": "accuracy", "arms": list(arms), "cotangent": cotangent}
    path = stem.with_suffix(".jsonl")
    with contextlib.closing(Store(path, settings, fresh=options.fresh)) as kept:
        missing = [cell for cell in cells if cell.key not in kept]
        if missing:
            kept.describe(described)
        for cell, found in measure_cells(missing, arms, draw):
            kept.add(cell.key, found)
        rows = kept.rows([cell.key for cell in cells])
        beside = {"settings": settings, "measured": kept.environments}
        files = write(rows, described | beside, stem)
    show(largest(rows), "Largest error over all shapes, in units of the final rounding")
    for arm in arms:
        of_arm = [row for row in rows if row["implementation"] == arm]
        if all(row["refused"] for row in of_arm):
            raise ExperimentError(f"{arm} ran nowhere: {of_arm[0]['refused']}")
        if arms[arm] in REPRODUCIBLE and not all(
            row["same_bits"] for row in of_arm if not row["refused"]
        ):
            raise ExperimentError(f"{arm}: two runs differ in their bits")
    return {"rows": len(rows), "files": [str(path) for path in files]}


def _of_run(options: argparse.Namespace) -> tuple[str, Mapping[str, Inputs]]:
    """What `--inputs` names, and what was captured there, by step and layer.

    Raises:
      UsageError: options that inputs of a run leave nothing to say, or inputs that are
        not of 16 bits.
    """
    path = sweep.run_path(options)
    for name in ("preset", "families", "seeds"):
        if getattr(options, name) is not None:
            raise UsageError(f"--inputs brings its own inputs: give no --{name}")
    inputs = capture.load(path).arrays()
    for label, one in inputs.items():
        kind = one.query.dtype.name
        if kind not in FORMATS:
            raise UsageError(
                f"{path}, {label}: inputs are {kind}, not {' or '.join(FORMATS)}"
            )
    return sweep.run_name(path), inputs


def _captured(label: str, inputs: Inputs) -> Cell:
    """A cell for what one layer was given at one step."""
    examples, queries, heads, head_dim = inputs.query.shape
    keys, key_heads = inputs.key.shape[1:3]
    problem = Problem(
        *(queries, keys, heads, key_heads, head_dim),
        is_causal=False,
        dtype=inputs.query.dtype.name,
    )
    return Cell(problem, label, examples)


def _arms(
    implementations: Sequence[str], recipes: Sequence[str] | None
) -> dict[str, Implementation]:
    """Row name -> implementation; the emulator stands once for each recipe.

    Raises:
      UsageError: recipes are given, and nothing emulates them.
    """
    if recipes and "emulated" not in implementations:
        raise UsageError("--recipes is for --implementations emulated: give it")
    arms: dict[str, Implementation] = {}
    for name in implementations:
        if name == "emulated":
            arms |= {f"emulated/{recipe}": name for recipe in recipes or ["attn_jax"]}
        else:
            arms[name] = cast(Implementation, "pallas" if name in OPTIONS else name)
    return arms


# (query, key, value, dO) -> results; or the reason why there is no such program.
Program = Callable[..., dict[str, Array]] | str
# Cells whose inputs are drawn, or whose figures are computed, while others run.
_CELLS_AHEAD = 4


def measure(
    problems: Sequence[Problem],
    arms: Mapping[str, Implementation],
    families: Iterable[str],
    *,
    seeds: int,
    float16_cotangent: float = 1.0,
) -> Iterator[Row]:
    """One row for each problem, family and arm; `refused` holds what an arm cannot do.

    Arms are names of rows, and what each measures. dO of FP16 inputs is multiplied by
    `float16_cotangent`.
    """
    cells = cells_of(problems, families, seeds)
    draw = functools.partial(_draw, float16_cotangent=float16_cotangent)
    for cell, rows in measure_cells(cells, arms, draw):
        yield from ({**cell.key, **row} for row in rows)


def cells_of(
    problems: Sequence[Problem], families: Iterable[str], seeds: int
) -> list[Cell]:
    """Those of one problem follow each other."""
    names = dict.fromkeys(families)
    return [Cell(problem, name, seeds) for problem in problems for name in names]


def measure_cells(
    cells: Sequence[Cell],
    arms: Mapping[str, Implementation],
    draw: Callable[[Cell], Inputs],
) -> Iterator[tuple[Cell, list[Row]]]:
    """The rows of each cell, one for each arm.

    The device is used by this thread alone. Inputs and error figures, which are NumPy's
    and take as long, are made beside it for a few cells at a time.
    """
    drawn: deque[Future[Inputs]] = deque()
    measured: deque[tuple[Cell, Future[list[Row]]]] = deque()
    programs: dict[str, Program] = {}
    before = None
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for cell in cells[:_CELLS_AHEAD]:
            drawn.append(pool.submit(draw, cell))
        for number, cell in enumerate(cells):
            problem = cell.problem
            if (problem, cell.draws) != before:
                before = problem, cell.draws
                print(f"{number + 1}/{len(cells)} {problem}", file=sys.stderr)
                programs = {
                    name: _compile(problem, cell.draws, implementation, name)
                    for name, implementation in arms.items()
                }
            inputs = drawn.popleft().result()
            if number + _CELLS_AHEAD < len(cells):
                drawn.append(pool.submit(draw, cells[number + _CELLS_AHEAD]))
            found = {name: _run(program, inputs) for name, program in programs.items()}
            mask = problem.mask_of(cell.draws)
            exact = golden(*inputs, mask=mask)
            sums = None
            if cell.family == VANISHING:
                sums = golden(*inputs, mask=mask, absolute=True)
            measured.append((cell, pool.submit(_rows, problem, found, exact, sums)))
            if len(measured) > _CELLS_AHEAD:
                done, rows = measured.popleft()
                yield done, rows.result()
        for done, rows in measured:
            yield done, rows.result()


def _compile(
    problem: Problem, seeds: int, implementation: Implementation, name: str
) -> Program:
    """Compiled (q, k, v, dO) -> results; where it is refused, the reason."""
    mask = problem.mask_of(seeds)
    recipe = None
    if implementation == "emulated":
        recipe = RECIPES[name.removeprefix("emulated/")]
        if recipe.inputs == BF16:
            recipe = recipe.with_inputs(FORMATS[problem.dtype])
    elif name in OPTIONS:
        recipe = recipe_of(
            name,
            dtype=problem.dtype,
            head_dim=problem.H,
            lengths=(problem.T, problem.S),
            pairs=seeds * problem.K,
            group=problem.N // problem.K,
            mask=mask,
            differentiated=True,
        )
    has_lse = implementation not in ("xla", "cudnn")

    def attend(q, k, v, return_residual=False):
        return dot_product_attention(
            q,
            k,
            v,
            is_causal=mask.is_causal,
            local_window_size=mask.window,
            query_segment_ids=mask.query_segment_ids,
            key_value_segment_ids=mask.key_value_segment_ids,
            implementation=implementation,
            return_residual=return_residual,
            recipe=recipe,
        )

    def results(q, k, v, dout):
        # The gradients are taken as a model takes them, without LSE as an output.
        out, pullback = jax.vjp(attend, q, k, v)
        dq, dk, dv = pullback(dout)
        found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
        if has_lse:
            found["lse"] = attend(q, k, v, return_residual=True)[1].swapaxes(1, 2)
        return found

    shape = _shape(problem, seeds)
    query, key = (
        jax.ShapeDtypeStruct(axes, problem.dtype) for axes in (shape.query, shape.key)
    )
    # Libraries of others raise anything where they do not run; ours say so, or the
    # device's memory ends. Another error of ours is a bug and ends the command.
    refusals: tuple[type[Exception], ...] = NotImplementedError, JaxRuntimeError
    if implementation in ("xla", "cudnn"):
        refusals += ImportError, ValueError, RuntimeError
    try:
        return jax.jit(results).lower(query, key, key, query).compile()
    except refusals as reason:
        return str(reason).strip().splitlines()[0][:200]


def _shape(problem: Problem, seeds: int) -> Shape:
    return Shape(seeds, problem.T, problem.S, problem.N, problem.K, problem.H)


def _draw(cell: Cell, float16_cotangent: float) -> Inputs:
    """Independent draws stacked along the batch axis; dO of FP16 times a factor."""
    dtype = jnp.dtype(cell.problem.dtype).type
    draws = (
        make_inputs(cell.family, seed, _shape(cell.problem, 1), dtype)
        for seed in range(cell.draws)
    )
    query, key, value, dout = (
        np.concatenate(arrays) for arrays in zip(*draws, strict=True)
    )
    factor = float16_cotangent if cell.problem.dtype == "float16" else 1.0
    dout = (dout.astype(np.float32) * factor).astype(dout.dtype)
    return Inputs(query, key, value, dout)


def _run(program: Program, inputs: Inputs) -> dict[str, Any] | str:
    """The results of a program, run twice, and whether their bits were the same; or why
    there are none."""
    if isinstance(program, str):
        return program
    try:
        found, again = program(*inputs), program(*inputs)
        same = bool(same_bits(found, again))
        return {"same_bits": same, **jax.device_get(found)}
    except JaxRuntimeError as reason:
        # Memory may end only now; whatever else a kernel ends with is no refusal.
        if not is_out_of_memory(reason):
            raise
        return str(reason).strip().splitlines()[0][:200]


def _rows(
    problem: Problem,
    found: dict[str, dict[str, Any] | str],
    exact: Golden,
    sums: Golden | None,
) -> list[Row]:
    """The rows of one cell: one for each arm."""
    fmt = FORMATS[problem.dtype]
    targets, rounded, sizes, degenerate = {}, {}, {}, []
    for name, field in _FIELDS.items():
        targets[name] = getattr(exact, field)
        rounded[name] = error.correctly_rounded(targets[name], fmt)
        absolute = None if sums is None else getattr(sums, field)
        sizes[name], by_sums = error.unit(targets[name], fmt, absolute)
        if by_sums:
            degenerate.append(name)
    rows = []
    for name, result in found.items():
        row: Row = {"implementation": name}
        row |= dict.fromkeys((*_FIELDS, "lse", "same_bits", "degenerate", "refused"))
        row |= dict.fromkeys(_BIASES)
        rows.append(row)
        if isinstance(result, str):
            row["refused"] = result
            continue
        for tensor in _FIELDS:
            row |= _figures(
                tensor,
                result[tensor],
                targets[tensor],
                rounded[tensor],
                sizes[tensor],
            )
        if "lse" in result:
            # Rows that see nothing have -inf in both.
            off = np.zeros(exact.lse.shape)
            np.subtract(result["lse"], exact.lse, out=off, where=exact.lse > -np.inf)
            row["lse"] = float(np.abs(off).max())
        row["same_bits"] = result["same_bits"]
        row["degenerate"] = " ".join(degenerate)
    return rows


def _figures(
    tensor: str,
    found: np.ndarray,
    target: np.ndarray,
    rounded: np.ndarray,
    size: float,
) -> dict[str, float]:
    """A tensor's RMS error, bias and growth, in units of error."""
    wide = found.astype(np.float64)
    rms = float(np.sqrt(np.mean(np.square(wide - target))))
    figures = {tensor: error.in_units(rms, size)}
    e = wide - rounded
    for name, signed in (("bias", e), ("growth", np.copysign(1.0, target) * e)):
        mean, half = error.signed_bias(signed, size)
        figures |= {f"{tensor}_{name}": mean, f"{tensor}_{name}_ci": half}
    return figures


def largest(rows: Sequence[Row]) -> list[Row]:
    """The largest figures of each implementation, format and family."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if not row["refused"]:
            key = row["implementation"], row["dtype"], row["family"]
            groups.setdefault(key, []).append(row)
    return [
        dict(zip(("implementation", "dtype", "family"), key, strict=True))
        | {
            tensor: max((r[tensor] for r in group if r[tensor] is not None), default="")
            for tensor in (*_FIELDS, "lse")
        }
        | {
            # How far from no bias any result may be, at 97.5 %.
            "bias": max(
                abs(row[name]) + row[f"{name}_ci"]
                for row in group
                for name in _BIASES
                if not name.endswith("_ci") and row[name] is not None
            ),
            "same bits": all(row["same_bits"] for row in group),
        }
        for key, group in groups.items()
    ]
