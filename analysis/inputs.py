"""Inputs of a sweep, drawn or captured, with their exact results.

Values are rounded once to the format under test and carried in float32, which the
emulator takes in every format (in float64 only where the recipe's carrier is FP64).
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from analysis import capture, sweep
from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.formats import NumberFormat
from attn_jax.reference import Golden, golden
from train.config import UsageError

# The family whose exact results vanish or are machine numbers, by construction.
_VANISHING = "zero_k_one_v"
_HEAD_DIM = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Where inputs come from: families of random ones, or arrays from a run.

    `labels` name the families (or the captured layers and steps); each is drawn `seeds`
    times, with `queries` query rows. `captured` is None for families; else it gives for
    each label its arrays [B, T, N, H], and a draw is one head of one example: the first
    head of each example, then the second, and so on.
    """

    labels: tuple[str, ...]
    seeds: int
    queries: int
    heads: int
    head_dim: int
    captured: capture.Captured | None = None

    def lengths(self, wanted: Sequence[int]) -> list[int]:
        """Those of the lengths that there are keys for; the longest, if none is."""
        if self.captured is None:
            return list(wanted)
        longest = self.captured.keys
        return [n for n in wanted if n <= longest] or [longest]

    def draw(self, label: str, seed: int, keys: int) -> Inputs:
        """Arrays [1, queries, N, H] and [1, keys, K, H], float32.

        Captured arrays give their first queries and keys, and all queries if they have
        fewer.
        """
        rows = self.queries
        if self.captured is None:
            shape = Shape(1, rows, keys, self.heads, self.heads, self.head_dim)
            return make_inputs(label, seed, shape, np.float32)
        arrays = self.captured.arrays()[label]
        examples, _, query_heads, _ = arrays.query.shape
        head, example = divmod(seed, examples)
        query, key, value, dout = (
            x[example : example + 1, :, head * x.shape[2] // query_heads, None].astype(
                np.float32
            )
            for x in arrays
        )
        return Inputs(query[:, :rows], key[:, :keys], value[:, :keys], dout[:, :rows])


def open_inputs(options: argparse.Namespace) -> Source:
    """What `--families` or `--inputs` ask for, in the sizes of the preset.

    Inputs of a run folder are captured when the first is drawn: by then a sweep has
    refused what it has to refuse.

    Raises:
      UsageError: both are given, `--inputs` is no run, or holds fewer draws than
        `--seeds`.
    """
    queries = sweep.QUERIES[options.preset]
    families = sweep.families(options)
    if families:
        seeds, heads = sweep.seeds(options), sweep.HEADS[options.preset]
        return Source(tuple(families), seeds, queries, heads, _HEAD_DIM)
    path = sweep.run_path(options)
    captured = capture.load(path)
    if options.seeds is None and options.every_draw:
        options.seeds = captured.draws
    seeds = sweep.seeds(options)
    if captured.draws < seeds:
        raise UsageError(
            f"{path} holds {captured.draws} draws (heads of examples): give --seeds "
            f"{captured.draws} or fewer"
        )
    return Source(captured.labels, seeds, queries, 1, captured.head_dim, captured)


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
def problem(source: Source, label: str, keys: int, fmt: NumberFormat) -> Problem:
    """All draws of a label in a format; the last few problems are kept.

    The exact result is that of the inputs as rounded.
    """
    draws = [source.draw(label, seed, keys) for seed in range(source.seeds)]
    stacked = Inputs(
        *(
            correctly_rounded(np.concatenate(arrays), fmt).astype(np.float32)
            for arrays in zip(*draws, strict=True)
        )
    )
    sums = golden(*stacked, absolute=True) if label == _VANISHING else None
    return Problem(stacked, golden(*stacked), sums)
