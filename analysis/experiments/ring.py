"""Does the error of attention grow with the devices that a sequence is cut between?

Context parallelism of W devices, simulated on one (`attn_jax.context_parallel`):
causal, zigzag, forward and backward, BF16, against FP64. The ratio is the RMS error
over that of the same kernel on one device. What libraries do comes to three classes
(`analysis.libraries`).

Beside the families of `audit.inputs`, two whose parts cancel (`analysis.parallel`).
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from analysis import parallel, sweep
from analysis.figures import Panel
from analysis.libraries import LIBRARIES, Variant, simulated
from analysis.record import Row
from analysis.summary import pivot, summarise
from attn_jax import context_parallel
from attn_jax.audit.inputs import Inputs
from attn_jax.context_parallel.simulation import Simulated
from attn_jax.mask import Mask
from attn_jax.recipe import RECIPES
from attn_jax.reference import golden
from train.config import UsageError

SUMMARY = "error of context parallelism by the number of devices, as libraries round"
FAMILIES = ("normal", "sink", parallel.ALTERNATING, parallel.CANCELLING)
TENSORS = ("out", "dq", "dk", "dv")
# What a ratio may be where nothing is in 16 bits.
GATE = {"out": 1.05, "dq": 1.05, "dk": 1.20, "dv": 1.05}
SHARDS = {"toy": (1, 2, 4), "default": (1, 2, 4, 8, 16, 32, 64)}
SHARDS["full"] = SHARDS["default"]
_EXTRAPOLATED = {"default": 512, "full": 512}
_SEEDS = {"toy": 2, "default": 3, "full": 3}
_LENGTH = {"toy": 64, "default": 2048, "full": 8192}
_HEAD_DIM = {"toy": 16, "default": 64, "full": 128}
_BY = ("variant", "family", "tensor", "shards")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way of rounding, one ring size, one input family."""

    variant: str
    shards: int
    family: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "ring", None, seeds=_SEEDS)
    add = parser.add_argument
    usual = " ".join(FAMILIES)
    add("--families", nargs="+", choices=parallel.CHOICES, help=f"default {usual}")
    parser.set_defaults(default_families=FAMILIES)
    add("--shards", nargs="+", type=int, help="numbers of devices, the first one 1")
    add("--layout", choices=context_parallel.LAYOUTS, default="zigzag")
    add("--recipes", nargs="+", choices=RECIPES, help="other recipes than the above")
    ways = [name for name in context_parallel.STRATEGIES if name != "ring+ulysses"]
    add("--strategies", nargs="+", choices=ways, help="of --recipes (default ring)")


def variants(options: argparse.Namespace) -> dict[str, Variant]:
    """What is measured, by the name of its rows.

    Raises:
      UsageError: strategies are given without recipes.
    """
    if options.recipes:
        strategies: list[Simulated] = options.strategies or ["ring"]
        return {
            f"{name}, {strategy}": Variant(RECIPES[name], strategy)
            for name in options.recipes
            for strategy in strategies
        }
    if options.strategies:
        raise UsageError("--strategies is for --recipes: give some")
    return dict(LIBRARIES)


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    measured, families = variants(options), sweep.families(options)
    preset = options.preset
    shards = tuple(options.shards or SHARDS[preset])
    if shards[0] != 1 or min(shards) < 1:
        raise UsageError("--shards begins with 1, which ratios are to")
    cells = [Cell(v, W, f) for v in measured for W in shards for f in families]
    if not options.shards and preset in _EXTRAPOLATED:
        cells += [Cell(v, _EXTRAPOLATED[preset], families[0]) for v in measured]
    seeds = sweep.seeds(options)
    problem = functools.cache(
        lambda family: _problem(family, seeds, _LENGTH[preset], _HEAD_DIM[preset])
    )

    def measure(cell: Cell) -> Iterator[Row]:
        inputs, exact = problem(cell.family)
        program = _program(measured[cell.variant], cell.shards, options.layout)
        try:
            found = jax.device_get(program(*inputs))
        except (ValueError, NotImplementedError) as error:
            raise UsageError(str(error)) from error
        for seed in range(seeds):
            one = [x[seed : seed + 1] for x in found]
            of = exact._replace(
                **{
                    name: x[seed : seed + 1]
                    for name, x in exact._asdict().items()
                    if x is not None
                }
            )
            for tensor, size in parallel.rms_errors(one, of).items():
                yield {"seed": seed, "tensor": tensor, "rms": size}

    return sweep.run("ring", cells, measure, report, options, command)


def _problem(family: str, seeds: int, length: int, head_dim: int):
    """All draws, stacked along the batch axis, and their exact results."""
    draws = [parallel.draw(family, seed, length, head_dim) for seed in range(seeds)]
    inputs = Inputs(*(np.concatenate(x) for x in zip(*draws, strict=True)))
    return inputs, golden(*inputs, mask=Mask(is_causal=True))


@functools.cache
def _program(variant: Variant, shards: int, layout: context_parallel.Layout):
    """(out, LSE, dQ, dK, dV) of (q, k, v, dO), compiled once for all families."""

    @jax.jit
    def both(query, key, value, dout):
        def attend(q, k, v):
            return simulated(variant, q, k, v, shards=shards, layout=layout)

        results, pullback = jax.vjp(attend, query, key, value)
        return *results, *pullback((dout, jax.numpy.zeros_like(results[1])))

    return both


def report(rows: Sequence[Row]) -> sweep.Report:
    """Ratios by ring size, the three classes, and what is said of them."""
    found = summarise(rows, _BY, ["rms"], baseline=("shards", 1))
    tables = {
        "RMS error over that of one device: mean (largest) of the families": (
            _classes(found)
        )
    }
    panels = []
    for family in dict.fromkeys(row["family"] for row in found):
        here = [row for row in found if row["family"] == family]
        for tensor in TENSORS:
            of = [row for row in here if row["tensor"] == tensor]
            title = f"{family}, {tensor}: RMS error over that of one device"
            tables[title] = pivot(of, ["variant"], "shards", "rms_ratio")
        panels += [_panel(family, tensor, here) for tensor in ("out", "dq", "dv")]
    return sweep.Report(tables, panels, _claims(found), columns=3)


def _classes(found: Sequence[Row]) -> list[Row]:
    sizes = sorted({row["shards"] for row in found if row["shards"] > 1})
    table = []
    for variant in dict.fromkeys(row["variant"] for row in found):
        for tensor in (*TENSORS, "lse"):
            line: Row = {"variant": variant, "tensor": tensor}
            for size in sizes:
                ratios = _ratios(found, variant, tensor, size)
                text = ""
                if ratios:
                    text = f"{np.mean(ratios):.2f} ({max(ratios):.2f})"
                line[f"W={size}"] = text
            table.append(line)
    return table


def _ratios(found: Sequence[Row], variant: str, tensor: str, size: int) -> list[float]:
    wanted = {"variant": variant, "tensor": tensor, "shards": size}
    return [
        row["rms_ratio"]
        for row in found
        if wanted.items() <= row.items() and row["rms_ratio"] is not None
    ]


def _panel(family: str, tensor: str, rows: Sequence[Row]) -> Panel:
    return Panel(
        f"{family}, {tensor}",
        [row for row in rows if row["tensor"] == tensor],
        "shards",
        "rms_ratio",
        "variant",
        "devices W",
        "RMS error over that of one device",
    )


def _claims(found: Sequence[Row]) -> list[sweep.Claim]:
    sizes = sorted({row["shards"] for row in found})
    few, many = (sizes[min(i, len(sizes) - 1)] for i in (1, len(sizes) - 1))
    whole = [row for row in found if row["shards"] > 1]
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in whole):
        most = {
            tensor: max(
                row["rms_ratio"] or 0.0
                for row in whole
                if (row["variant"], row["tensor"]) == (variant, tensor)
            )
            for tensor in TENSORS
        }
        listed = ", ".join(f"{name} {size:.3f}" for name, size in most.items())
        claims.append(
            sweep.Claim(
                "the gate of this project",
                "Cutting the sequence costs at most 5 % in out, dQ and dV, 20 % in dK.",
                variant,
                f"largest ratios, W to {many}: {listed}",
                all(most[name] <= GATE[name] for name in TENSORS),
            )
        )
        slopes = {
            tensor: _slope(found, variant, tensor, few, many) for tensor in TENSORS
        }
        known = [slope for slope in slopes.values() if slope is not None]
        listed = ", ".join(
            f"{name} {x:.2f}" for name, x in slopes.items() if x is not None
        )
        claims.append(
            sweep.Claim(
                "ring-flash-attention, issue #42",
                "The error grows with the number of devices.",
                variant,
                f"power of W from {few} to {many}: {listed} (holds above 0.2, does "
                "not below 0.1)",
                None if not known else _verdict(max(known)),
            )
        )
    return sorted(claims, key=lambda claim: claim.says)


def _slope(found, variant: str, tensor: str, few: int, many: int) -> float | None:
    """Exponent of W by which the error of the first family grows; None if unknown."""
    ends = [_ratios(found, variant, tensor, size)[:1] for size in (few, many)]
    if not all(ends) or few == many:
        return None
    return math.log(ends[1][0] / ends[0][0]) / math.log(many / few)


def _verdict(power: float) -> bool | None:
    return True if power > 0.2 else False if power < 0.1 else None
