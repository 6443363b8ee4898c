"""Deviation by number format: Fig. 3 and 4 of arXiv 2405.02803, with TF32 and FP8.

Each recipe has its 16-bit steps, its inputs and its output in the format: flash1_paper
and flash2_op_by_op all steps, flash2 (what kernels do) only P, eager_bf16 S and P. What
a recipe keeps in FP32 stays there, but for FP64, where it is FP64. FP32 values are the
inputs of FP64 too; its errors are against long double, on the first rows.

FP8 saturates, nothing is scaled, and Q, K and V are FP8 values as well. In E4M3 the
baseline's P of about 1 / N is below the smallest number, so its output is 0, and a row
sum kept in FP8 stops growing (in E4M3 at 448, in E5M2 where a block adds less than an
eighth of it). No kernel does either: these rows show why.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from analysis import deviation, inputs, sweep
from analysis.figures import Panel
from analysis.record import Row
from analysis.summary import pivot, summarise
from analysis.variants import BASELINE, VARIANTS, in_format, with_block
from attn_jax.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FP16,
    FP32,
    FP64,
    TF32,
    NumberFormat,
)

SUMMARY = "forward deviation by number format (Fig. 3 and 4 of 2405.02803)"
LENGTH = {"toy": 256, "default": 2048, "full": 32768}
BLOCK = 64
FORMATS: dict[str, NumberFormat] = {
    "e5m2": E5M2.saturating(),
    "e4m3": E4M3FN.saturating(),
    **{fmt.name: fmt for fmt in (BF16, FP16, TF32, FP32, FP64)},
}
MEASURED = {"toy": ("e4m3", "bf16", "fp64")}
# Those of the paper, the narrowest first.
_OF_PAPER = ("bf16", "fp16", "fp32", "fp64")
RECIPES = ("flash1_paper", "flash2_op_by_op", "flash2")
_VALUES = (
    *("rel", "rel_over_baseline", "max_abs", "max_over_baseline", "units"),
    *("from_baseline_max_abs", "from_baseline_rel", "rescales_mean", "rescales_max"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One input family in one format."""

    family: str
    format: str
    N: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "precision")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    source = inputs.open_inputs(options)
    [keys] = source.lengths([LENGTH[options.preset]])
    names = MEASURED.get(options.preset, tuple(FORMATS))
    cells = [Cell(label, name, keys) for label in source.labels for name in names]

    def measure(cell: Cell) -> Iterator[Row]:
        fmt = FORMATS[cell.format]
        problem = inputs.problem(source, cell.family, cell.N, fmt)
        recipes = {
            name: in_format(with_block(VARIANTS[name], BLOCK), fmt)
            for name in (BASELINE, *RECIPES)
        }
        yield from deviation.compare(problem, recipes, BASELINE)

    return sweep.run("precision", cells, measure, report, options, command)


def report(rows: Sequence[Row]) -> sweep.Report:
    """Tables by format, the panels of Fig. 3 and 4, and what the paper says of them."""
    found = summarise(rows, ["family", "N", "recipe", "format"], _VALUES)
    tables, panels = {}, []
    for family in dict.fromkeys(row["family"] for row in rows):
        here = [row for row in found if row["family"] == family]
        for title, value in (
            (f"largest difference from {BASELINE}", "from_baseline_max_abs"),
            ("largest error against FP64", "max_abs"),
            (f"the same over that of {BASELINE}", "max_over_baseline"),
            (f"relative error over that of {BASELINE}", "rel_over_baseline"),
            ("rescalings of a row, mean", "rescales_mean"),
            ("rescalings of a row, most", "rescales_max"),
        ):
            tables[f"{family}: {title}"] = pivot(here, ["format"], "recipe", value)
        flash = [row for row in here if row["recipe"] != BASELINE]
        panels += [
            _panel(f"{family}: from {BASELINE}", flash, "from_baseline_max_abs"),
            _panel(f"{family}: from FP64", here, "max_abs"),
        ]
    return sweep.Report(tables, panels, _claims(found))


def _panel(title: str, rows: Sequence[Row], value: str) -> Panel:
    # A difference of 0 has no place on a logarithmic axis.
    shown = [row for row in rows if row[value]]
    label = "largest |difference|"
    return Panel(title, shown, "format", value, "recipe", "format", label, log_x=False)


def _claims(found: Sequence[Row]) -> list[sweep.Claim]:
    claims = []
    flash = [row for row in found if row["recipe"] != BASELINE]
    for family, name in dict.fromkeys((r["family"], r["recipe"]) for r in flash):
        mine = {
            row["format"]: row
            for row in flash
            if (row["family"], row["recipe"]) == (family, name)
        }
        tried = [fmt for fmt in _OF_PAPER if fmt in mine]
        sizes = [mine[fmt]["from_baseline_max_abs"] for fmt in tried]
        claims.append(
            sweep.Claim(
                "paper, Fig. 3",
                f"Among {', '.join(tried)} (those of the paper), the more mantissa "
                "bits, the smaller the difference from the baseline.",
                f"{name}, {family}",
                ", ".join(
                    f"{fmt} {size:.2g}" for fmt, size in zip(tried, sizes, strict=True)
                ),
                all(a > b for a, b in zip(sizes, sizes[1:])),
            )
        )
    for row in flash:
        if row["format"] == "bf16":
            claims.append(sweep.tenfold(row))
    return claims
