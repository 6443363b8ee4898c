"""Deviation by tile: swapped, square and larger blocks, Fig. 6 of arXiv 2405.02803.

FlashAttention's rule for on-chip memory of M elements and head dim d is a block of
B_c = ceil(M / 4d) keys and B_r = min(B_c, d) queries. "rule" is that, "swapped"
exchanges the two numbers, "square" makes B_r as large as B_c. Rows of queries are
independent, so in a forward pass B_r and the loop order can change no bit, in the
emulator as in a kernel; what counts is the number of keys in a block. Each recipe is
therefore run once for each number of keys.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from analysis import deviation, inputs, sweep
from analysis.figures import Panel
from analysis.record import Row
from analysis.summary import pivot, plus_minus, summarise
from analysis.variants import BASELINE, VARIANTS, in_format, with_block
from attn_jax.formats import FORMATS

SUMMARY = "forward deviation by block sizes (Fig. 6 of 2405.02803)"
# Elements of on-chip memory; from 2**14 on, B_c exceeds a head dim of 64.
MEMORY = {
    "toy": (2**13, 2**15),
    "default": tuple(2**n for n in range(12, 18)),
    "full": tuple(2**n for n in range(12, 21)),
}
LENGTH = {"toy": 256, "default": 4096, "full": 8192}
FORMAT_NAMES = {
    "toy": ("bf16", "fp64"),
    "default": ("bf16", "fp16", "fp32", "fp64"),
    "full": ("bf16", "fp16", "fp32", "fp64"),
}
RECIPES = ("flash1_paper", "flash2_op_by_op", "flash2")
_BY = (
    *("family", "format", "recipe"),
    *("layout", "M", "B_r", "B_c", "area", "blocks"),
)
_VALUES = (
    *("rel", "rel_over_baseline", "max_abs", "max_over_baseline"),
    *("from_baseline_max_abs", "rescales_mean", "rescales_max"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One input family in one format, at all tiles."""

    family: str
    format: str


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes under on-chip memory of M elements."""

    M: int
    layout: str
    B_r: int
    B_c: int

    @property
    def area(self) -> int:
        return self.B_r * self.B_c


def tiles(memory: Sequence[int], head_dim: int, keys: int) -> list[Tile]:
    """The three layouts for each M, blocks no longer than the sequence."""
    found = []
    for M in memory:
        block_kv = min(-(-M // (4 * head_dim)), keys)
        block_q = min(block_kv, head_dim)
        found += [
            Tile(M, "rule", block_q, block_kv),
            Tile(M, "swapped", block_kv, block_q),
            Tile(M, "square", block_kv, block_kv),
        ]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "tiling")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    source = inputs.open_inputs(options)
    [keys] = source.lengths([LENGTH[options.preset]])
    shapes = tiles(MEMORY[options.preset], source.head_dim, keys)
    cells = [
        Cell(label, fmt)
        for fmt in FORMAT_NAMES[options.preset]
        for label in source.labels
    ]

    def measure(cell: Cell) -> Iterator[Row]:
        fmt = FORMATS[cell.format]
        problem = inputs.problem(source, cell.family, keys, fmt)
        recipes = {BASELINE: in_format(VARIANTS[BASELINE], fmt)}
        for block in sorted({tile.B_c for tile in shapes}):
            for name in RECIPES:
                recipe = with_block(VARIANTS[name], block)
                recipes[f"{name} {block}"] = in_format(recipe, fmt)
        measured: dict[str, list[Row]] = {}
        for row in deviation.compare(problem, recipes, BASELINE):
            measured.setdefault(row.pop("recipe"), []).append(row)
        for tile in shapes:
            blocks = -(-keys // tile.B_c)
            columns = {**dataclasses.asdict(tile), "area": tile.area, "blocks": blocks}
            for name in RECIPES:
                for row in measured[f"{name} {tile.B_c}"]:
                    yield {"recipe": name, **columns, **row}

    return sweep.run("tiling", cells, measure, report, options, command)


def report(rows: Sequence[Row]) -> sweep.Report:
    """Tables by tile, the panels of Fig. 6, and what the paper says of it."""
    found = summarise(rows, _BY, _VALUES)
    tables, panels = {}, []
    for family in dict.fromkeys(row["family"] for row in rows):
        here = [row for row in found if row["family"] == family]
        for fmt in dict.fromkeys(row["format"] for row in here):
            in_one = [row for row in here if row["format"] == fmt]
            tables[f"{family}, {fmt}: error against FP64 over that of {BASELINE}"] = (
                pivot(in_one, ["recipe", "layout"], "M", "rel_over_baseline")
            )
        narrow = [
            {**row, "line": f"{row['recipe']}, {row['layout']}"}
            for row in here
            if row["format"] == "bf16"
        ]
        for words, value in (("mean", "rescales_mean"), ("most", "rescales_max")):
            tables[f"{family}, bf16: rescalings of a row, {words}"] = pivot(
                narrow, ["recipe", "layout"], "M", value
            )
        for title, layouts in (
            ("swapped blocks", ("rule", "swapped")),
            ("square blocks", ("rule", "square")),
        ):
            shown = [row for row in narrow if row["layout"] in layouts]
            panels.append(_panel(f"{family}, bf16: {title}", shown, "line"))
        shown = [
            row
            for row in here
            if row["layout"] == "rule" and row["recipe"] == "flash1_paper"
        ]
        panels.append(_panel(f"{family}, flash1_paper: block size", shown, "format"))
    return sweep.Report(tables, panels, _claims(rows), columns=3)


def _panel(title: str, rows: Sequence[Row], series: str) -> Panel:
    value = "from_baseline_max_abs"
    x_label, y_label = "block area B_r B_c", f"largest |difference| from {BASELINE}"
    return Panel(title, rows, "area", value, series, x_label, y_label)


def _claims(rows: Sequence[Row]) -> list[sweep.Claim]:
    """Judged in BF16 between the tiles that differ most."""
    narrow = [row for row in rows if row["format"] == "bf16"]
    smallest, largest = (f(row["M"] for row in rows) for f in (min, max))
    # Where the rule gives a square block, the other layouts are the same block.
    differ = {row["M"] for row in narrow if row["B_r"] != row["B_c"]}
    by_layout = summarise(
        [row for row in narrow if row["M"] in differ],
        ["family", "recipe", "M", "layout"],
        _VALUES,
        baseline=("layout", "rule"),
    )
    by_size = summarise(
        [row for row in narrow if row["layout"] == "rule"],
        ["family", "recipe", "M"],
        _VALUES,
        baseline=("M", largest),
    )
    claims = []
    for says, unlike_rule, at in (
        (
            "Swapping the two block sizes makes the deviation larger.",
            "swapped",
            largest,
        ),
        ("Square blocks make no difference.", "square", largest),
        ("The smaller the block, the larger the deviation.", None, smallest),
    ):
        rows_here = by_size
        if unlike_rule is not None:
            rows_here = [row for row in by_layout if row["layout"] == unlike_rule]
        for family, name in dict.fromkeys(
            (r["family"], r["recipe"]) for r in rows_here
        ):
            mine = {
                row["M"]: row
                for row in rows_here
                if (row["family"], row["recipe"]) == (family, name)
            }
            found = ", ".join(
                f"M={M} x {plus_minus(row, 'rel_ratio')}" for M, row in mine.items()
            )
            holds = sweep.larger(mine[at], "rel_ratio")
            if unlike_rule == "square":
                holds = None if holds is None else not holds
            claims.append(
                sweep.Claim("paper, Fig. 6", says, f"{name}, {family}", found, holds)
            )
    return claims
