"""Compares `ring` with figures of an earlier emulation, kept as constants.

That one had 8192 tokens, head dim 128, causal, zigzag, blocks of 64 keys, eight input
families and three draws of each, W from 2 to 64: RMS error against FP64 after the last
rounding, over that of the same kernel on one device. It is where the gate of this
project comes from. Four of its families are `FAMILIES` here, of shorter sequences at
the default preset, so figures need not agree; the mean of its eight is not that of our
four. Its ring of lucidrains was held against a device that rounds A once, ours against
FlashAttention-2's, so that is not compared.
"""

from collections.abc import Sequence

import numpy as np

from analysis import parallel
from analysis.record import Row
from analysis.sweep import Claim

SHARDS = (2, 4, 8, 16, 32, 64)
FAMILIES = ("normal", "sink", parallel.ALTERNATING, parallel.CANCELLING)
# The largest ratio of all its inputs, draws and W, as it gave them, of what both have.
# It merged two calls of an all-gather by LSE, so `issue_42` has none of LSE here, and
# had no row of FP32 gradients of what is carried.
LARGEST = {
    "attn_jax": {"out": "1.001", "lse": "1.015"},
    "flash2": {
        **{"out": "1.000", "dq": "1.009", "dk": "1.146", "dv": "1.004"},
        "lse": "3.00",
    },
    "ring_flash_attn": {
        **{"out": "1.65", "dq": "5.17", "dk": "2.21", "dv": "1.47"},
        "lse": "3.00",
    },
    "issue_42": {"out": "1.00", "dq": "5.12", "dk": "1.36", "dv": "1.47"},
    "te_ring": {
        **{"out": "4.37", "dq": "7.66", "dk": "5.97", "dv": "8.50"},
        "lse": "3.00",
    },
}
# The mean of its inputs and draws at W = 64, of sums in 16 bits.
MEAN = {"te_ring": {"out": "2.5", "dq": "3.1", "dk": "3.8", "dv": "5.3"}}
_SOURCE = (
    "an emulation before this one: 8192 tokens, head dim 128, eight families, three "
    "draws, W to 64"
)


def compared(rows: Sequence[Row]) -> tuple[list[Row], list[Claim]]:
    """A table with a line for each tensor of a variant that both have, and a claim for
    each variant; none unless all of `SHARDS` and `FAMILIES` were measured.

    Ratios are those of single draws.
    """
    here = [row for row in rows if row["family"] in FAMILIES]
    measured = {(row["family"], row["shards"]) for row in here}
    if not {(family, size) for family in FAMILIES for size in SHARDS} <= measured:
        return [], []
    table, claims = [], []
    for variant in dict.fromkeys(row["variant"] for row in here):
        lines = [
            _line(here, variant, tensor, there)
            for tensor, there in LARGEST.get(variant, {}).items()
        ]
        if not lines:
            continue
        table += lines
        claims.append(
            Claim(
                _SOURCE,
                "The largest ratio of a draw is no larger than there.",
                variant,
                ", ".join(map(_said, lines)),
                all(float(x["largest"]) <= float(x["largest there"]) for x in lines),
            )
        )
    return table, claims


def _line(rows: Sequence[Row], variant: str, tensor: str, there: str) -> Row:
    """To as many places as there."""
    ratios = _ratios(rows, variant, tensor)
    mean = MEAN.get(variant, {}).get(tensor, "")
    at_end = [ratio for size, ratio in ratios if size == SHARDS[-1]]
    return {
        "variant": variant,
        "tensor": tensor,
        "largest": _as_there(max(ratio for _, ratio in ratios), there),
        "largest there": there,
        f"mean, W={SHARDS[-1]}": _as_there(np.mean(at_end), mean or there),
        "mean there": mean,
    }


def _ratios(rows: Sequence[Row], variant: str, tensor: str) -> list[tuple[int, float]]:
    """(W, ratio) of every draw."""
    of = [row for row in rows if (row["variant"], row["tensor"]) == (variant, tensor)]
    alone = {
        (row["family"], row["seed"]): row["rms"] for row in of if row["shards"] == 1
    }
    return [
        (row["shards"], row["rms"] / alone[row["family"], row["seed"]])
        for row in of
        if row["shards"] in SHARDS
    ]


def _as_there(ratio: float, there: str) -> str:
    return f"{ratio:.{len(there.partition('.')[2])}f}"


def _said(line: Row) -> str:
    text = f"{line['tensor']} {line['largest']} (there {line['largest there']}"
    if line["mean there"]:
        at = f"mean, W={SHARDS[-1]}"
        text += f"; {at}: {line[at]}, there {line['mean there']}"
    return f"{text})"
