"""Inputs of a sweep, drawn or captured, with their exact results.

Values are rounded once to the format under test and carried in float32, which the
emulator takes in every format (in float64 only where the recipe's carrier is FP64).
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from analysis import sweep
from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.formats import NumberFormat
from attn_jax.reference import Golden, golden
from train.config import UsageError

# The family whose exact results vanish or are machine numbers, by construction.
_VANISHING = "zero_k_one_v"


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Where inputs come from: families of random ones, or arrays from a run.

    `labels` name the families (or the captured layers and steps). `captured` is None
    for families; else it holds for each label its arrays [B, T, N, H], and a seed is an
    entry of B.
    """

    labels: tuple[str, ...]
    heads: int
    head_dim: int
    captured: dict[str, Inputs] | None = None

    def lengths(self, wanted: Sequence[int]) -> list[int]:
        """Those of the lengths that there are keys for; the longest, if none is."""
        if self.captured is None:
            return list(wanted)
        longest = min(x.key.shape[1] for x in self.captured.values())
        return [n for n in wanted if n <= longest] or [longest]

    def draw(self, label: str, seed: int, rows: int, keys: int) -> Inputs:
        """Arrays [1, rows, N, H] and [1, keys, K, H], float32; fewer rows if captured.

        Captured arrays give their first queries and keys.
        """
        if self.captured is None:
            shape = Shape(1, rows, keys, self.heads, self.heads, self.head_dim)
            return make_inputs(label, seed, shape, np.float32)
        one = slice(seed, seed + 1)
        query, key, value, dout = (
            x[one].astype(np.float32) for x in self.captured[label]
        )
        return Inputs(query[:, :rows], key[:, :keys], value[:, :keys], dout[:, :rows])


def open_inputs(
    options: argparse.Namespace, *, heads: int = 1, head_dim: int = 64
) -> Source:
    """What `--families` or `--inputs` ask for; sizes are those of drawn inputs.

    Raises:
      UsageError: both are given, `--inputs` is no run, or holds fewer draws than
        `--seeds`.
    """
    families = sweep.families(options)
    if families:
        return Source(tuple(families), heads, head_dim)
    kind, _, path = options.inputs.partition(":")
    if kind != "run" or not path:
        raise UsageError(f"--inputs takes run:PATH, got {options.inputs!r}")
    from analysis import capture

    captured = dict(capture.load(path))
    draws = min(x.query.shape[0] for x in captured.values())
    if draws < sweep.seeds(options):
        raise UsageError(f"{path} holds {draws} draws: give --seeds {draws} or fewer")
    first = next(iter(captured.values())).query
    return Source(tuple(captured), first.shape[2], first.shape[3], captured)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs stacked over seeds along the batch axis, and their exact results.

    `sums` holds the sums over absolute values, for a family whose exact results
    vanish, else None.
    """

    inputs: Inputs
    exact: Golden
    sums: Golden | None


@functools.lru_cache(maxsize=4)
def problem(
    source: Source, label: str, seeds: int, rows: int, keys: int, fmt: NumberFormat
) -> Problem:
    """The first `seeds` draws in a format; the last few problems are kept.

    The exact result is that of the inputs as rounded.
    """
    draws = [source.draw(label, seed, rows, keys) for seed in range(seeds)]
    stacked = Inputs(
        *(
            correctly_rounded(np.concatenate(arrays), fmt).astype(np.float32)
            for arrays in zip(*draws, strict=True)
        )
    )
    sums = golden(*stacked, absolute=True) if label == _VANISHING else None
    return Problem(stacked, golden(*stacked), sums)
