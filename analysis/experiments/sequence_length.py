"""Deviation by sequence length with a fixed tile: Fig. 5 of arXiv 2405.02803.

Every dataflow of `analysis.variants` in BF16 with blocks of 64 keys, against eager
attention in BF16 (the paper's baseline) and against FP64. Beside flash2_op_by_op stands
the two-term law of `attn_jax.bounds`. Recipes whose sums are rounded after every term
are chains as long as the sequence, so on a CPU only short ones are run.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from analysis import deviation, inputs, sweep
from analysis.figures import Panel
from analysis.record import Row
from analysis.summary import pivot, plus_minus, summarise
from analysis.variants import BASELINE, CHAINED, VARIANTS, with_block
from attn_jax.bounds import two_term_law
from attn_jax.formats import BF16

SUMMARY = "forward deviation by sequence length (Fig. 5 of 2405.02803)"
BLOCK = 64
_SHORT = (512, 1024, 2048, 4096, 8192)
LENGTHS = {"toy": (128, 256), "default": _SHORT, "full": (*_SHORT, 16384, 32768)}
# The longest sequence for the chained recipes.
CHAIN = {"toy": 128, "default": 1024, "full": 8192}
LAW = "two-term law"
_VALUES = (
    *("rel", "rel_over_baseline", "max_abs", "max_over_baseline"),
    *("units", "rescales_mean", "rescales_max"),
    *(f"from_baseline_{x}" for x in ("max_abs", "mean_abs", "std", "rel")),
)
# Recipes on which the paper's claims are tried.
_TRIED = ("flash1_paper", "flash2_op_by_op", "flash2")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One input family at one length."""

    family: str
    N: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "sequence-length")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    source = inputs.open_inputs(options)
    lengths = source.lengths(LENGTHS[options.preset])
    cells = [Cell(label, N) for N in lengths for label in source.labels]

    def measure(cell: Cell) -> Iterator[Row]:
        problem = inputs.problem(source, cell.family, cell.N, BF16)
        recipes = {
            name: with_block(recipe, BLOCK)
            for name, recipe in VARIANTS.items()
            if name not in CHAINED or cell.N <= CHAIN[options.preset]
        }
        yield from deviation.compare(problem, recipes, BASELINE)

    return sweep.run("sequence-length", cells, measure, report, options, command)


def report(rows: Sequence[Row]) -> sweep.Report:
    """Tables by length, the panels of Fig. 5, and what the paper says of it."""
    found = summarise(rows, ["family", "recipe", "N"], _VALUES)
    tables, panels = {}, []
    for family in dict.fromkeys(row["family"] for row in rows):
        here = [row for row in found if row["family"] == family]
        for title, value in (
            ("error against FP64, relative", "rel"),
            (f"the same over that of {BASELINE}", "rel_over_baseline"),
            (f"largest error over that of {BASELINE}", "max_over_baseline"),
            ("rescalings of a row, mean", "rescales_mean"),
            ("rescalings of a row, most", "rescales_max"),
        ):
            tables[f"{family}: {title}"] = pivot(here, ["recipe"], "N", value)
        apart = [row for row in here if row["recipe"] != BASELINE]
        for value, words in (
            ("from_baseline_max_abs", "largest |difference|"),
            ("from_baseline_mean_abs", "mean |difference|"),
            ("from_baseline_std", "deviation of the difference"),
        ):
            panels.append(_panel(f"{family}: {words} from {BASELINE}", apart, value))
        with_law = [*here, *_law(here)]
        panels.append(_panel(f"{family}: error against FP64", with_law, "rel"))
    tables[f"{LAW} against flash2_op_by_op"] = _law_table(found)
    return sweep.Report(tables, panels, _claims(rows), columns=4)


def _panel(title: str, rows: Sequence[Row], value: str) -> Panel:
    label = "relative error" if value == "rel" else "difference"
    return Panel(title, rows, "N", value, "recipe", "keys", label)


def _law(rows: Sequence[Row]) -> list[Row]:
    """What the law gives for the baseline's measured error at each length."""
    return [
        {**row, "recipe": LAW, "rel": predicted, "rel_ci": None}
        for row in rows
        if row["recipe"] == BASELINE
        for predicted in [float(two_term_law(BF16, row["N"] / BLOCK, row["rel"]))]
    ]


def _law_table(found: Sequence[Row]) -> list[Row]:
    measured = {
        (row["family"], row["N"]): row["rel"]
        for row in found
        if row["recipe"] == "flash2_op_by_op"
    }
    return [
        {
            "family": row["family"],
            "N": row["N"],
            "tiles": row["N"] / BLOCK,
            "measured": measured[row["family"], row["N"]],
            "law": row["rel"],
            "law / measured": row["rel"] / measured[row["family"], row["N"]],
        }
        for row in _law(found)
    ]


def _claims(rows: Sequence[Row]) -> list[sweep.Claim]:
    shortest, longest = (f(row["N"] for row in rows) for f in (min, max))
    if shortest == longest:
        return []
    growth = [
        row
        for row in summarise(
            rows, ["family", "recipe", "N"], _VALUES, baseline=("N", shortest)
        )
        if row["N"] == longest and row["recipe"] in _TRIED
    ]
    claims = []
    span = f"from {shortest} to {longest} keys"
    for says, value in (
        ("The largest deviation grows with the length.", "max_abs"),
        ("The mean deviation grows with the length.", "mean_abs"),
        ("Its standard deviation grows with the length.", "std"),
    ):
        name = f"from_baseline_{value}_ratio"
        for row in growth:
            claims.append(
                sweep.Claim(
                    "paper, Fig. 5",
                    says,
                    f"{row['recipe']}, {row['family']}",
                    f"x {plus_minus(row, name)} {span}; relative to the output x "
                    f"{plus_minus(row, 'from_baseline_rel_ratio')}",
                    sweep.larger(row, name),
                )
            )
    for row in growth:
        more = sweep.larger(row, "units_ratio")
        claims.append(
            sweep.Claim(
                "paper, Sec. IV-A",
                "It grows because rows are rescaled more often.",
                f"{row['recipe']}, {row['family']}",
                f"rescalings x {plus_minus(row, 'rescales_mean_ratio')} {span}, "
                f"error in units x {plus_minus(row, 'units_ratio')}",
                False if more is False else None,
            )
        )
    return claims
