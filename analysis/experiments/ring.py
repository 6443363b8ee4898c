"""Does the error of attention grow with the devices that a sequence is cut between?

Context parallelism of W devices, simulated on one (`attn_jax.context_parallel`):
causal, zigzag, forward and backward, BF16, against FP64. The ratio is the RMS error
over that of the same kernel on one device. What libraries do comes to three classes
(`analysis.libraries`).

Beside the families of `audit.inputs`, two whose parts cancel (`analysis.parallel`);
beside ours, the figures of an emulation before (`analysis.ring_comparison`).
"""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

import jax
import numpy as np

from analysis import parallel, ring_comparison, sweep
from analysis.figures import Panel
from analysis.libraries import RINGS, Variant, of_parts, simulated
from analysis.record import Row
from analysis.summary import pivot, summarise
from attn_jax import context_parallel
from attn_jax.context_parallel.arguments import Strategy, Width
from attn_jax.recipe import RECIPES, Recipe
from train.config import UsageError

SUMMARY = "error of context parallelism by the number of devices, as libraries round"
FAMILIES = ring_comparison.FAMILIES
TENSORS = ("out", "lse", "dq", "dk", "dv")
# What a ratio may be where nothing is in 16 bits.
GATE = {"out": 1.05, "lse": 1.05, "dq": 1.05, "dk": 1.20, "dv": 1.05}
_GATED_TO = 64
SHARDS = {"toy": (1, 2, 4), "default": (1, 2, 4, 8, 16, 32, 64)}
SHARDS["full"] = SHARDS["default"]
_MERGES = get_args(get_type_hints(Recipe)["ring_merge"])
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
    help = "numbers of devices, the first one 1 (default 1 2 4 ... 64; toy 1 2 4)"
    add("--shards", nargs="+", type=int, help=help)
    help = "how positions are dealt to devices (default zigzag)"
    add("--layout", choices=context_parallel.LAYOUTS, default="zigzag", help=help)
    help = "that the devices follow, in place of the rings of libraries"
    add("--recipes", nargs="+", choices=RECIPES, help=help)
    ways = context_parallel.STRATEGIES
    add("--strategies", nargs="+", choices=ways, help="with --recipes (default ring)")
    help = "devices that deal out heads under ring+ulysses (default 2)"
    add("--ulysses", type=int, help=help)
    help = "how parts are merged (default: carry_whole for ours, else the recipe's way)"
    add("--merges", nargs="+", choices=_MERGES, help=f"with --recipes: {help}")
    widths, help = get_args(Width), "with --recipes (default fp32)"
    add(
        "--partials",
        nargs="+",
        choices=widths,
        help=f"format of partial results, {help}",
    )
    add(
        "--wire",
        nargs="+",
        choices=widths,
        help=f"format of dK and dV on their way, {help}",
    )


def variants(options: argparse.Namespace) -> dict[str, Variant]:
    """What is measured, by the name of its rows, which says all that was chosen.

    Raises:
      UsageError: what only recipes have is given without them.
    """
    if not options.recipes:
        for name in ("strategies", "ulysses", "merges", "partials", "wire"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for --recipes: give some")
        return dict(RINGS)
    strategies: list[Strategy] = options.strategies or ["ring"]
    if options.ulysses is not None and "ring+ulysses" not in strategies:
        raise UsageError("--ulysses is for --strategies ring+ulysses: give it")
    partials: list[Width] = options.partials or ["fp32"]
    wires: list[Width] = options.wire or ["fp32"]
    ulysses = 2 if options.ulysses is None else options.ulysses
    found = {}
    for name, strategy, merge, parts, wire in itertools.product(
        options.recipes, strategies, options.merges or [None], partials, wires
    ):
        recipe = of_parts(name)
        if merge is not None:
            recipe = dataclasses.replace(recipe, ring_merge=merge)
        if strategy == "ulysses":  # It has no parts, and sends no sums.
            parts = wire = "fp32"
        variant = Variant(recipe, strategy, parts, wire, ulysses)
        found[_name(name, variant)] = variant
    return found


def _name(recipe: str, variant: Variant) -> str:
    way = variant.strategy
    if way == "ring+ulysses":
        way += f" {variant.ulysses}"
    if way == "ulysses":
        return f"{recipe}, {way}"
    narrow = [
        f", 16-bit {what}"
        for what, width in (("parts", variant.partials), ("wire", variant.wire))
        if width == "16-bit"
    ]
    return f"{recipe}, {way}, {variant.recipe.ring_merge}{''.join(narrow)}"


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
        yield from parallel.errors_by_seed(found, exact)

    to_report = functools.partial(report, layout=options.layout)
    return sweep.run("ring", cells, measure, to_report, options, command)


def _problem(family: str, seeds: int, length: int, head_dim: int):
    """All draws, stacked along the batch axis, and their exact results."""
    draws = [parallel.draw(family, seed, length, head_dim) for seed in range(seeds)]
    return parallel.stacked(draws)


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


def report(
    rows: Sequence[Row], layout: context_parallel.Layout = "zigzag"
) -> sweep.Report:
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
        panels += [_panel(family, tensor, here) for tensor in TENSORS]
    claims = _claims(found)
    if layout == "zigzag":  # The only one there.
        beside, more = ring_comparison.compared(rows)
        if beside:
            tables["Ratios of single draws beside those of an emulation before"] = (
                beside
            )
        claims += more
    return sweep.Report(tables, panels, claims, columns=len(TENSORS))


def _classes(found: Sequence[Row]) -> list[Row]:
    sizes = sorted({row["shards"] for row in found if row["shards"] > 1})
    table = []
    for variant in dict.fromkeys(row["variant"] for row in found):
        for tensor in TENSORS:
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
    gated = [size for size in sizes if 1 < size <= _GATED_TO]
    ends = sorted({*gated[-1:], many})
    whole = [row for row in found if row["shards"] > 1]
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in whole):
        for end in ends:
            most = _largest(whole, variant, end)
            listed = ", ".join(f"{name} {size:.3f}" for name, size in most.items())
            claims.append(
                sweep.Claim(
                    "the gate of this project",
                    f"Cutting the sequence for W = {end} devices or fewer costs at "
                    "most 5 % in out, LSE, dQ and dV, 20 % in dK.",
                    variant,
                    f"largest ratios, W to {end}: {listed}",
                    all(most[name] <= GATE[name] for name in TENSORS),
                )
            )
        slopes = {
            tensor: _slope(found, variant, tensor, few, many)
            for tensor in TENSORS
            if tensor != "lse"  # The issue is about out and gradients.
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


def _largest(found: Sequence[Row], variant: str, most_shards: int) -> dict[str, float]:
    """By tensor, of all families and W up to the most."""
    return {
        tensor: max(
            row["rms_ratio"] or 0.0
            for row in found
            if (row["variant"], row["tensor"]) == (variant, tensor)
            and row["shards"] <= most_shards
        )
        for tensor in TENSORS
    }


def _slope(found, variant: str, tensor: str, few: int, many: int) -> float | None:
    """Exponent of W by which the error of the first family grows; None if unknown."""
    ends = [_ratios(found, variant, tensor, size)[:1] for size in (few, many)]
    if not all(ends) or few == many:
        return None
    return math.log(ends[1][0] / ends[0][0]) / math.log(many / few)


def _verdict(power: float) -> bool | None:
    return True if power > 0.2 else False if power < 0.1 else None
