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
"""

import argparse
import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jaxtyping import Array

from analysis import ExperimentError
from analysis.agreement import FORMATS, VANISHING, Problem, same_bits
from analysis.record import Row, check_writable, environment, show, write
from attn_jax import IMPLEMENTATIONS, RECIPES, dot_product_attention
from attn_jax.api import Implementation
from attn_jax.audit import error
from attn_jax.audit.inputs import FAMILIES, Inputs, Shape, make_inputs
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


def _problems(
    shapes: Sequence[tuple[int, int, int, int]],
    head_dims: Sequence[int],
    dtype: str = "bfloat16",
) -> tuple[Problem, ...]:
    """Without a mask and causal."""
    return tuple(
        Problem(*shape, head_dim, is_causal, dtype)
        for shape in shapes
        for head_dim in head_dims
        for is_causal in (False, True)
    )


def _masked(
    shapes: Sequence[tuple[int, int, int, int]], head_dims: Sequence[int]
) -> tuple[Problem, ...]:
    """Causal with a window of an eighth of the keys, and in packed documents."""
    return tuple(
        Problem(*shape, head_dim, is_causal=True, window=window, packed=window is None)
        for shape in shapes
        for head_dim in head_dims
        for window in (shape[1] // 8, None)
    )


# (T, S, N, K): square, long, ragged (no multiple of any block), unequal lengths with
# grouped heads, one key/value head for all.
_SQUARE = (2048, 2048, 16, 16)
_LONG = (4096, 4096, 16, 16)
_RAGGED = (1000, 1337, 16, 16)
_GROUPED = (512, 1024, 16, 4)
_SHARED = (777, 777, 16, 1)
_SHORT = (512, 512, 16, 16)
# As many entries as _LONG; XLA, which keeps T x S arrays, still runs.
_LONGEST = (16_384, 16_384, 4, 4)
_TOY = (48, 40, 4, 2)
PRESETS = {
    "toy": _problems((_TOY,), (64,))
    + _problems((_TOY,), (64,), "float16")
    + _masked((_TOY,), (64,)),
    "quick": _problems((_SQUARE, _RAGGED), (128,)),
    "full": _problems((_SQUARE, _LONG, _RAGGED, _GROUPED), (64, 128))
    + _problems((_SHARED,), (128,))
    + _problems((_SQUARE,), (64, 128), "float16")
    + _problems((_RAGGED,), (64,), "float16"),
    "lengths": _problems((_SHORT, _LONGEST), (64, 128)),
    "masks": _masked((_SHORT, _SQUARE, _LONG, _LONGEST), (64, 128)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="quick", help="which shapes")
    add(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=["pallas", "cudnn", "xla"],
        help="of dot_product_attention",
    )
    add(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        default=["attn_jax"],
        help="what 'emulated' emulates",
    )
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    add("--seeds", type=int, default=4, help="number of draws pooled (default 4)")
    add(
        "--float16-cotangent",
        type=float,
        default=1.0,
        help="factor on dO, a power of two, where the inputs are float16",
    )
    add("--out", type=Path, default=Path("results", "accuracy"), help="folder")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures, writes table and environment, prints the largest errors.

    Raises:
      UsageError: an option has no usable value.
      ExperimentError: an implementation ran nowhere, or one that promises the same
        bits on every run did not give them. The table is written all the same.
    """
    if options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {options.seeds}")
    arms = _arms(options.implementations, options.recipes)
    families = list(dict.fromkeys(options.families))
    began = time.monotonic()
    described = environment(command)
    device = str(described["device"]).lower().replace(" ", "-")
    check_writable(options.out / f"{device}-{options.preset}")
    rows: list[Row] = []
    files: list[Path] = []
    for row in measure(
        PRESETS[options.preset],
        arms,
        families,
        seeds=options.seeds,
        float16_cotangent=options.float16_cotangent,
    ):
        rows.append(row)
        if len(rows) % len(arms) == 0:  # A run that is stopped keeps what it has.
            described["seconds"] = round(time.monotonic() - began, 1)
            files = write(rows, described, options.out / f"{device}-{options.preset}")
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


def _arms(
    implementations: Sequence[Implementation], recipes: Sequence[str]
) -> dict[str, Implementation]:
    """Row name -> implementation; the emulator stands once for each recipe."""
    arms: dict[str, Implementation] = {}
    for name in implementations:
        if name == "emulated":
            arms |= {f"emulated/{recipe}": name for recipe in recipes}
        else:
            arms[name] = name
    return arms


# (query, key, value, dO) -> results; or the reason why there is no such program.
Program = Callable[..., dict[str, Array]] | str
# Cells whose inputs are drawn, or whose figures are computed, while others run.
_CELLS_AHEAD = 4


def measure(
    problems: Sequence[Problem],
    arms: dict[str, Implementation],
    families: Sequence[str],
    *,
    seeds: int,
    float16_cotangent: float = 1.0,
) -> Iterator[Row]:
    """One row for each problem, family and arm; `refused` holds what an arm cannot do.

    The device is used by this thread alone. Inputs and error figures, which are
    NumPy's and take as long, are made beside it for a few cells at a time.
    """
    drawn: deque[Future[Inputs]] = deque()
    measured: deque[Future[list[Row]]] = deque()
    cells = [(problem, family) for problem in problems for family in families]
    programs: dict[str, Program] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

        def draw(cell: tuple[Problem, str]) -> None:
            scale = float16_cotangent if cell[0].dtype == "float16" else 1.0
            drawn.append(pool.submit(_draw, *cell, seeds, scale))

        for cell in cells[:_CELLS_AHEAD]:
            draw(cell)
        for number, (problem, family) in enumerate(cells):
            if number % len(families) == 0:
                done = f"{number // len(families) + 1}/{len(problems)}"
                print(f"{done} {problem}", file=sys.stderr)
                programs = {
                    name: _compile(problem, seeds, implementation, name)
                    for name, implementation in arms.items()
                }
            inputs = drawn.popleft().result()
            if number + _CELLS_AHEAD < len(cells):
                draw(cells[number + _CELLS_AHEAD])
            common: Row = {"family": family, "seeds": seeds}
            common["cotangent"] = (
                float16_cotangent if problem.dtype == "float16" else 1.0
            )
            found = {name: _run(program, inputs) for name, program in programs.items()}
            mask = problem.mask_of(seeds)
            exact = golden(*inputs, mask=mask)
            sums = None
            if family == VANISHING:
                sums = golden(*inputs, mask=mask, absolute=True)
            measured.append(pool.submit(_rows, problem, common, found, exact, sums))
            if len(measured) > _CELLS_AHEAD:
                yield from measured.popleft().result()
        for future in measured:
            yield from future.result()


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


def _draw(problem: Problem, family: str, seeds: int, cotangent: float) -> Inputs:
    """Independent draws stacked along the batch axis; dO times `cotangent`."""
    draws = (
        make_inputs(family, seed, _shape(problem, 1), jnp.dtype(problem.dtype).type)
        for seed in range(seeds)
    )
    query, key, value, dout = (
        np.concatenate(arrays) for arrays in zip(*draws, strict=True)
    )
    dout = (dout.astype(np.float32) * cotangent).astype(dout.dtype)
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
        if "RESOURCE_EXHAUSTED" not in str(reason):
            raise
        return str(reason).strip().splitlines()[0][:200]


def _rows(
    problem: Problem,
    common: Row,
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
        row: Row = {"implementation": name, **dataclasses.asdict(problem), **common}
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
