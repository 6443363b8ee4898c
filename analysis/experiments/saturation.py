"""FlashAttention-4's FP8 saturation, before and after its fix, from recipes alone.

Its FP8 kernel scaled P by 2^8 and kept an old row maximum until the new one was more
than 2^4 above it: P then reached 2^12, where E4M3 ends at 448. The product with V was
clamped and the row sum, kept in FP32, was not, so the weights of a row no longer added
up to 1. flash-attention pull request 2694 measured the result on a B300, as the norm of
the difference from the BF16 kernel over that of its output, at 8192 keys and inputs
that FP8 represents; the fix scales by 2^4.

`rel` is that figure under the recipes `flash4_fp8_offset8`, `flash4_fp8` and `flash4`.
`defect` is the mean of O - 1 where V is 1: the weights missing in a row.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from analysis import deviation, sweep
from analysis.figures import Panel
from analysis.record import Row
from analysis.summary import plus_minus, summarise
from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.formats import E4M3FN, FP32
from attn_jax.recipe import RECIPES, Step

SUMMARY = "FlashAttention-4's FP8 saturation, before and after its fix, by logit size"
LENGTH = {"toy": 512, "default": 8192, "full": 8192}
HEAD_DIM = 128
KERNEL = "flash4"
# Standard deviation of the logits -> measured before, and after.
MEASURED = {
    0.25: (0.027, 0.027),
    0.5: (0.031, 0.028),
    1.0: (0.136, 0.027),
    1.5: (0.305, 0.024),
    2.0: (0.361, 0.022),
}
RECIPES_OF = {"before": "flash4_fp8_offset8", "after": "flash4_fp8"}
_WITHIN = 0.25


@dataclasses.dataclass(frozen=True)
class Cell:
    """One size of the logits."""

    std: float
    N: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "saturation", None)


def draw(std: float, seeds: int, queries: int, keys: int) -> Inputs:
    """N(0, 1) in E4M3, Q times `std` before: logits of that standard deviation."""
    shape = Shape(1, queries, keys, 1, 1, HEAD_DIM)
    drawn = [make_inputs("normal", seed, shape, np.float32) for seed in range(seeds)]
    query, key, value, dout = (np.concatenate(x) for x in zip(*drawn, strict=True))
    fp8 = E4M3FN.saturating()
    return Inputs(
        *(
            correctly_rounded(x, fp8).astype(np.float32)
            for x in (std * query, key, value, dout)
        )
    )


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    preset = options.preset
    cells = [Cell(std, LENGTH[preset]) for std in MEASURED]
    kernels = {"bf16": RECIPES[KERNEL]}
    kernels |= {when: RECIPES[name] for when, name in RECIPES_OF.items()}
    # The output as accumulated: rounded to BF16 a small defect would be 0 or 1 ulp.
    probes = {
        when: dataclasses.replace(RECIPES[name], output=Step(FP32))
        for when, name in RECIPES_OF.items()
    }

    def measure(cell: Cell) -> Iterator[Row]:
        seeds = sweep.seeds(options)
        x = draw(cell.std, seeds, sweep.QUERIES[preset], cell.N)
        outs = deviation.forward(kernels, x)
        ones = deviation.forward(probes, x._replace(value=np.ones_like(x.value)))
        for when, name in RECIPES_OF.items():
            for seed in range(seeds):
                out, kernel = outs[when][seed], outs["bf16"][seed]
                yield {
                    "when": when,
                    "recipe": name,
                    "seed": seed,
                    "rel": deviation.difference(out, kernel)["rel"],
                    "defect": float(ones[when][seed].mean(dtype=np.float64) - 1),
                }

    return sweep.run("saturation", cells, measure, report, options, command)


def report(rows: Sequence[Row]) -> sweep.Report:
    """The table of the pull request beside ours."""
    found = summarise(rows, ["std", "when", "recipe", "N"], ["rel", "defect"])
    table, claims, shown = [], [], []
    for row in found:
        theirs = MEASURED[row["std"]][list(RECIPES_OF).index(row["when"])]
        ratio = row["rel"] / theirs
        table.append(
            {
                "logit std": row["std"],
                "recipe": row["recipe"],
                "ours": plus_minus(row, "rel"),
                "measured on a B300": theirs,
                "ours / measured": ratio,
                "weights missing": plus_minus(row, "defect"),
            }
        )
        claims.append(
            sweep.Claim(
                "flash-attention pull request 2694, on a B300",
                f"Difference from the BF16 kernel {row['when']} the fix (holds: within "
                f"{_WITHIN:.0%}).",
                f"{row['recipe']}, logit std {row['std']}",
                f"{plus_minus(row, 'rel')}, measured {theirs}",
                abs(ratio - 1) <= _WITHIN,
            )
        )
        shown += [
            {**row, "line": f"{row['when']}, {row['recipe']}"},
            {"std": row["std"], "line": f"{row['when']}, B300", "rel": theirs},
        ]
    claims.sort(key=lambda claim: claim.says, reverse=True)
    title = f"FP8 against BF16, {found[0]['N']} keys"
    label = "relative difference"
    panel = Panel(title, shown, "std", "rel", "line", "logit std", label, log_x=False)
    return sweep.Report({title: table}, [panel], claims)
