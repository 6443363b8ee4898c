"""Which step of a flash loop in 16 bits costs what: where the paper's 10x comes from.

The loop of FlashAttention-2 with blocks of 64 keys. "only X" keeps the result of step X
in BF16 and everything else in FP32, "all but X" the reverse; "none" and "all" are the
ends. S: logits and logits less the maximum; P: probabilities; m, l: running maximum and
sum; c: the factor that rescales; O: a block's P V and the running output; out: the
output as returned. "all, few rescalings" keeps the old maximum until it has grown by
2**8, so that next to nothing is rescaled. Beside them stand the paper's recipe
(flash1_paper), what kernels do (flash2), and the baseline.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from analysis import deviation, inputs, sweep
from analysis.figures import Panel
from analysis.record import Row
from analysis.summary import plus_minus, summarise
from analysis.variants import BASELINE, VARIANTS, with_block
from attn_jax.formats import BF16, FP32
from attn_jax.recipe import Recipe, Step

SUMMARY = "what each 16-bit step of a flash loop costs; where the 10x comes from"
LENGTHS = {"toy": (256,), "default": (2048, 8192), "full": (2048, 8192, 32768)}
BLOCK = 64
STEPS: dict[str, tuple[str, ...]] = {
    "S": ("logits", "shifted"),
    "P": ("probability",),
    "m": ("row_max",),
    "l": ("row_sum",),
    "c": ("correction",),
    "O": ("product", "accumulator"),
    "out": ("output",),
}
FEW = "all, few rescalings"
_KERNELS = (BASELINE, "flash2", "flash1_paper")
_VALUES = (
    *("rel", "rel_over_baseline", "max_abs", "max_over_baseline", "units"),
    *("signed_mean", "rescales_mean", "rescales_max"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One input family at one length."""

    family: str
    N: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "state-format")


def recipes() -> dict[str, Recipe]:
    """Every combination of steps that is measured, by the name of its rows."""
    everything = with_block(VARIANTS["flash2_op_by_op"], BLOCK)
    nothing = dataclasses.replace(everything.replace_format(BF16, FP32), inputs=BF16)

    def kept(recipe: Recipe, step: str, fmt) -> Recipe:
        return dataclasses.replace(
            recipe, **dict.fromkeys(STEPS[step], Step(fmt)), name=f"{step} {fmt.name}"
        )

    found = {name: with_block(VARIANTS[name], BLOCK) for name in _KERNELS}
    found |= {"none": nothing, "all": everything}
    found[FEW] = dataclasses.replace(everything, rescale_threshold=8.0)
    found |= {f"only {step}": kept(nothing, step, BF16) for step in STEPS}
    found |= {f"all but {step}": kept(everything, step, FP32) for step in STEPS}
    return found


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    source = inputs.open_inputs(options)
    lengths = source.lengths(LENGTHS[options.preset])
    cells = [Cell(label, N) for N in lengths for label in source.labels]

    def measure(cell: Cell) -> Iterator[Row]:
        problem = inputs.problem(source, cell.family, cell.N, BF16)
        yield from deviation.compare(problem, recipes(), BASELINE)

    return sweep.run("state-format", cells, measure, report, options, command)


def report(rows: Sequence[Row]) -> sweep.Report:
    """A table and a panel for each family and length, and the paper's explanation."""
    by = ["family", "N", "recipe"]
    found = summarise(rows, by, _VALUES)
    ends = [row for row in rows if row["recipe"] in ("all", FEW)]
    gain = {
        (row["family"], row["N"]): row
        for row in summarise(ends, by, ["rel"], baseline=("recipe", FEW))
        if row["recipe"] == "all"
    }
    tables, panels, claims = {}, [], []
    for family, N in dict.fromkeys((row["family"], row["N"]) for row in rows):
        here = [row for row in found if (row["family"], row["N"]) == (family, N)]
        tables[f"{family}, {N} keys: relative error against FP64"] = _table(here)
        panels.append(_panel(f"{family}, {N} keys", here))
        by_name = {row["recipe"]: row for row in here}
        if N == min(row["N"] for row in rows):
            tried = ("flash1_paper", "all", "flash2")
            claims += [sweep.tenfold(by_name[name]) for name in tried]
        claims += _rescaling(by_name, gain[family, N])
    # What is said once is shown once, with everything found on it below.
    claims.sort(key=lambda claim: claim.says)
    return sweep.Report(tables, panels, claims)


def _table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "recipe": row["recipe"],
            "relative error": plus_minus(row, "rel"),
            "over baseline": plus_minus(row, "rel_over_baseline"),
            "largest, over baseline": plus_minus(row, "max_over_baseline"),
            "signed mean": plus_minus(row, "signed_mean"),
            "rescalings": row["rescales_mean"],
            "most": row["rescales_max"],
        }
        for row in rows
    ]


def by_step(rows: Iterable[Row]) -> list[Row]:
    """The rows in which one step's format is not the others', as columns `step` and
    `how`."""
    found = []
    for row in rows:
        for how in ("only", "all but"):
            step = row["recipe"].removeprefix(f"{how} ")
            if step in STEPS and step != row["recipe"]:
                found.append({**row, "step": step, "how": f"{how} this in BF16"})
    return found


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    return Panel(
        title,
        by_step(rows),
        "step",
        "rel",
        "how",
        "step",
        "relative error against FP64",
        log_x=False,
        joined=False,
    )


def _rescaling(rows: dict[str, Row], gain: Row) -> list[sweep.Claim]:
    """Whether it comes from rescaling: from the factor's format, or from how often.

    From how often only if with few rescalings the error is smaller by more than a
    fifth: `gain` is the row of "all", its ratio that to few rescalings, seed by seed.
    Both ends of the interval must lie on one side for a verdict.
    """
    alone = {step: rows[f"only {step}"]["rel"] for step in STEPS}
    largest = max(alone, key=lambda step: alone[step])
    often, seldom = rows["all"], rows[FEW]
    says = "It comes from rescaling what was summed before."
    where = f"{gain['family']}, {gain['N']} keys"
    return [
        sweep.Claim(
            "paper, Sec. IV-A",
            says,
            f"one step in BF16, {where}",
            ", ".join(f"{step} {size:.2g}" for step, size in alone.items())
            + f" (all {often['rel']:.2g})",
            largest == "c",
        ),
        sweep.Claim(
            "paper, Sec. IV-A",
            says,
            f"{FEW}, {where}",
            f"rescalings {often['rescales_mean']:.2g} -> "
            f"{seldom['rescales_mean']:.2g}, error {plus_minus(often, 'rel')} -> "
            f"{plus_minus(seldom, 'rel')}, one over the other "
            f"{plus_minus(gain, 'rel_ratio')} (holds above {sweep.FIFTH})",
            sweep.larger(gain, "rel_ratio", sweep.FIFTH),
        ),
    ]
