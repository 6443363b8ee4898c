"""Random cases of attention, each a pure function of (seed, case number).

Case c is entry c mod 8 of run c // 8, and run r is of program r mod 125: what is
compiled (shape, dtype, which rules a mask has, features) belongs to a program, what is
only an array (inputs, lengths, ids, offset, dense) to a case, and the sinks, which are
the same for a whole batch, to a run. Each has a NumPy Philox stream of its own, keyed
by (seed, what it is, its number).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.kernels import tuning
from attn_jax.mask import Mask

# Cases that one call of a program computes: its batch.
BATCH = 8
PROGRAMS = 125
LONGEST = 1500
# N T S of one case at most: what bounding its error costs is in proportion.
_MOST_PAIRS = 1_500_000
# Where blocks of the kernels end; the first ends more often than others.
_EDGES = (32, 64, 64, 64, 128, 128, 128, 192, 256, 256, 320, 384, 512, 640, 768, 1024)
_HEADS = ((1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 4), (4, 2), (4, 1), (6, 2))
_HEADS += ((8, 1), (8, 2))
# Of inputs. A list of its own: a family that is added changes no case.
_FAMILIES = ("normal", "uniform", "offset", "outlier", "wide", "lse-130", "lse+150")
_FAMILIES += ("repeated_max", "sink", "zero_k_one_v")
_RULES = ("window", "dense", "query lengths", "key lengths", "ids", "offset")
# Axes of a bias, besides the batch: N, T and S, where it is not one for all.
_BIASES = ("NTS", "NTS", "TS", "NS", "T")
_SCALES = (1.0, 1.0, 0.05, 0.05, 0.3, 0.3, -0.125, -0.125, 0.0)
_PROGRAM, _RUN, _CASE, _ARRAYS = range(4)
# By how much a tensor of a case is multiplied: exact, and within the format's range.
_FACTORS = {
    "bfloat16": {
        "query": (0.0, 2.0**-20, 4.0, 16.0),
        "key": (0.0, 2.0**-20, 4.0),
        "value": (0.0, 2.0**-60, 2.0**60),
        "dout": (0.0, 2.0**-100, 2.0**-30, 2.0**30, 2.0**60),
    },
    "float16": {
        "query": (0.0, 2.0**-10, 4.0, 16.0),
        "key": (0.0, 2.0**-10, 4.0),
        "value": (0.0, 2.0**-10, 8.0),
        "dout": (0.0, 2.0**-14, 2.0**-7, 8.0),
    },
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled; JSON values only.

    Attributes:
      dense: None, "all heads" or "each head": axis N of the dense mask is 1 or N.
      query_lengths, key_lengths, ids, offset, sinks: whether there are such arrays.
      bias: None, or its axes among N, T and S; along the others it is one for all.
      residual: LSE is "no" result, one with cotangent "zero", or one with a "random".
      wide: out in float32.
      scale: None for 1 / sqrt(H).
    """

    number: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str
    is_causal: bool
    window: tuple[int | None, int | None] | None
    dense: str | None
    query_lengths: bool
    key_lengths: bool
    ids: bool
    offset: bool
    sinks: bool
    soft_cap: float | None
    scale: float | None
    wide: bool
    residual: str
    bias: str | None

    @property
    def pairs(self) -> int:
        """N T S, to which the cost of a case is in proportion."""
        return self.N * self.T * self.S

    @property
    def one_pass(self) -> bool:
        """Whether a kernel is asked to make all gradients in one pass, if it takes the
        program; the cases are too small for it to be chosen."""
        return self.number % 2 == 1

    @property
    def features(self) -> list[str]:
        """Names under which results are summed up."""
        given = {
            self.dtype: True,
            f"H {self.H}": True,
            f"{self.N // self.K} heads a key head": True,
            "no mask": self.rules == 0,
            "causal": self.is_causal,
            "window": self.window is not None,
            "dense": self.dense is not None,
            "query lengths": self.query_lengths,
            "key lengths": self.key_lengths,
            "segment ids": self.ids,
            "offset": self.offset,
            "sinks": self.sinks,
            "soft cap": self.soft_cap is not None,
            "bias": self.bias is not None,
            "scale given": self.scale is not None,
            "float32 out": self.wide,
            f"LSE cotangent {self.residual}": True,
        }
        return [name for name, holds in given.items() if holds]

    @property
    def rules(self) -> int:
        """How many rules the mask has."""
        return sum(
            (
                self.is_causal,
                self.window is not None,
                self.dense is not None,
                self.query_lengths,
                self.key_lengths,
                self.ids,
                self.offset,
            )
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """What defines a case besides its program; JSON values only.

    `changed` is (tensor, factor) or None. A rule that the program lacks is None.
    """

    number: int
    family: str
    draw: int
    changed: tuple[str, float] | None
    query_length: int | None
    key_length: int | None
    offset: int | None
    ids: str | None
    dense: str | None


class Batch(NamedTuple):
    """The arrays of one run; `mask` holds NumPy arrays.

    query, dout [B, T, N, H]; key, value [B, S, K, H]; dlse [B, N, T]; sinks [N]; bias
    [B, N or 1, T or 1, S or 1].
    """

    inputs: Inputs
    dlse: np.ndarray
    mask: Mask
    sinks: np.ndarray | None
    bias: np.ndarray | None


def _stream(seed: int, kind: int, number: int) -> np.random.Generator:
    sequence = np.random.SeedSequence((seed, kind, number))
    return np.random.Generator(np.random.Philox(sequence))


def _pick(rng: np.random.Generator, choices):
    return choices[int(rng.integers(len(choices)))]


def _chance(rng: np.random.Generator, probability: float) -> bool:
    return bool(rng.random() < probability)


def _length(rng: np.random.Generator, longest: int) -> int:
    """1, ..., longest: near a block's edge, tiny, or anything, small more often."""
    kind = rng.random()
    edges = [edge for edge in _EDGES if edge < longest]
    if kind < 0.45 and edges:
        return int(_pick(rng, edges) + rng.integers(-1, 2))
    if kind < 0.6:
        return int(rng.integers(1, min(16, longest) + 1))
    return max(1, int(math.exp(rng.random() * math.log(longest))))


def _part_length(rng: np.random.Generator, whole: int) -> int:
    """0, ..., whole: how much of a sequence an entry uses."""
    kind = rng.random()
    if kind < 0.1:
        return 0
    if kind < 0.25:
        return whole
    return min(whole, _length(rng, whole))


def program(seed: int, number: int, longest: int = LONGEST) -> Program:
    """Program `number` of a seed; no length exceeds `longest`."""
    rng = _stream(seed, _PROGRAM, number)
    T, S = _length(rng, longest), _length(rng, longest)
    if _chance(rng, 0.15):
        S = T
    S = min(S, _MOST_PAIRS // T)
    fitting = [heads for heads in _HEADS if heads[0] * T * S <= _MOST_PAIRS]
    N, K = _pick(rng, fitting)
    head_dim = _pick(rng, tuning.HEAD_DIMS["hopper"])
    dtype = "float16" if _chance(rng, 0.35) else "bfloat16"
    is_causal = _chance(rng, 0.45)
    # Some have no rules but is_causal, which kernels count by themselves. Of many
    # together little is left to be seen.
    rules = rng.choice(_RULES, _pick(rng, (0, 0, 1, 1, 1, 2, 2, 2, 3, 4)), False)
    window = None
    if "window" in rules:
        sides = [
            None if _chance(rng, 0.2) else _part_length(rng, min(S, 200))
            for _ in range(2)
        ]
        window = sides[0], sides[1]
    return Program(
        number=number,
        T=T,
        S=S,
        N=N,
        K=K,
        H=head_dim,
        dtype=dtype,
        is_causal=is_causal,
        window=window,
        dense=_pick(rng, ("all heads", "each head")) if "dense" in rules else None,
        query_lengths="query lengths" in rules,
        key_lengths="key lengths" in rules,
        ids="ids" in rules,
        offset="offset" in rules,
        sinks=_chance(rng, 0.3),
        soft_cap=_pick(rng, (2.0, 10.0, 50.0)) if _chance(rng, 0.25) else None,
        scale=_pick(rng, _SCALES) if _chance(rng, 0.25) else None,
        wide=_chance(rng, 0.25),
        residual=_pick(rng, ("no", "zero", "random", "random")),
        bias=_pick(rng, _BIASES) if _chance(rng, 0.25) else None,
    )


def program_number(case_number: int) -> int:
    """Which program a case is of."""
    return case_number // BATCH % PROGRAMS


def case(seed: int, number: int, of: Program) -> Case:
    """Case `number` of a seed; `of` is its program."""
    rng = _stream(seed, _CASE, number)
    changed = None
    if _chance(rng, 0.35):
        tensor = _pick(rng, ("query", "key", "value", "dout"))
        changed = tensor, _pick(rng, _FACTORS[of.dtype][tensor])
    offsets = (0, of.S - of.T, -1, 1, 63, 64, -64)
    anywhere = int(rng.integers(-of.T - 5, of.S + 6))
    kinds = ("documents", "documents", "in turn", "none match", "all match")
    shapes = ("sparse", "half", "nearly all", "blocks", "late rows", "nothing")
    return Case(
        number=number,
        family=_pick(rng, _FAMILIES),
        draw=int(rng.integers(2**31)),
        changed=changed,
        query_length=_part_length(rng, of.T) if of.query_lengths else None,
        key_length=_part_length(rng, of.S) if of.key_lengths else None,
        offset=None
        if not of.offset
        else anywhere
        if _chance(rng, 0.5)
        else int(_pick(rng, offsets)),
        ids=_pick(rng, kinds) if of.ids else None,
        dense=_pick(rng, shapes) if of.dense else None,
    )


def batch(seed: int, of: Program, cases: list[Case]) -> Batch:
    """The arrays of the cases of one run."""
    entries = [_entry(seed, of, x) for x in cases]
    inputs = Inputs(*(np.stack(x) for x in zip(*(e["inputs"] for e in entries))))

    def stacked(name: str) -> Any:
        arrays = [entry[name] for entry in entries]
        return None if arrays[0] is None else np.stack(arrays)

    mask = Mask(
        is_causal=of.is_causal,
        window=of.window,
        dense=stacked("dense"),
        query_lengths=stacked("query_length"),
        key_value_lengths=stacked("key_length"),
        query_segment_ids=stacked("query_ids"),
        key_value_segment_ids=stacked("key_ids"),
        query_offset=stacked("offset"),
    )
    sinks = None
    if of.sinks:
        rng = _stream(seed, _RUN, cases[0].number // BATCH)
        sinks = (2 * rng.standard_normal(of.N)).astype(np.float32)
        far = rng.random(of.N)
        sinks[far < 0.15] = 20.0
        sinks[far > 0.85] = -20.0
        sinks[far > 0.95] = -np.inf
    return Batch(inputs, stacked("dlse"), mask, sinks, stacked("bias"))


def _entry(seed: int, of: Program, x: Case) -> dict[str, Any]:
    rng = _stream(seed, _ARRAYS, x.number)
    shape = Shape(1, of.T, of.S, of.N, of.K, of.H)
    dtype = np.float16 if of.dtype == "float16" else None
    inputs = make_inputs(x.family, x.draw, shape, *(() if dtype is None else (dtype,)))
    if x.changed is not None:
        name, factor = x.changed
        before = getattr(inputs, name)
        after = (before.astype(np.float32) * np.float32(factor)).astype(before.dtype)
        inputs = inputs._replace(**{name: after})
    dlse = np.zeros((of.N, of.T), np.float32)
    if of.residual == "random":
        dlse = rng.standard_normal(dlse.shape).astype(np.float32)

    def number(value: int | None):
        return None if value is None else np.int32(value)

    query_ids, key_ids = (None, None) if x.ids is None else _ids(rng, of, x.ids)
    return {
        "inputs": [array[0] for array in inputs],
        "dlse": dlse,
        "query_length": number(x.query_length),
        "key_length": number(x.key_length),
        "offset": number(x.offset),
        "query_ids": query_ids,
        "key_ids": key_ids,
        "dense": None if x.dense is None else _dense(rng, of, x.dense),
        "bias": None if of.bias is None else _bias(rng, of, of.bias),
    }


def _ids(rng: np.random.Generator, of: Program, kind: str):
    """Ids of the queries [T] and of the keys [S], int32."""
    lengths = of.T, of.S
    if kind == "documents":
        count = int(rng.integers(1, 9))
        cuts = np.sort(rng.random(count))
        # Keys end elsewhere than queries do: some queries see nothing.
        shift = 0.0 if _chance(rng, 0.5) else 0.2 * rng.random()
        ends = [np.rint(cuts * lengths[0]), np.rint((cuts + shift) * lengths[1])]
        ids = [
            np.searchsorted(end, np.arange(length), side="right")
            for end, length in zip(ends, lengths)
        ]
    elif kind == "in turn":
        ids = [np.arange(lengths[0]) % 3, np.arange(lengths[1]) % 5]
    else:
        other = 2 if kind == "none match" else 1
        ids = [np.full(lengths[0], 1), np.full(lengths[1], other)]
    return tuple(x.astype(np.int32) for x in ids)


def _bias(rng: np.random.Generator, of: Program, axes: str) -> np.ndarray:
    """[N or 1, T or 1, S or 1], FP32; now and then larger than the logits."""
    shape = [getattr(of, axis) if axis in axes else 1 for axis in "NTS"]
    size = _pick(rng, (1.0, 1.0, 10.0))
    return (size * rng.standard_normal(shape)).astype(np.float32)


def _dense(rng: np.random.Generator, of: Program, kind: str) -> np.ndarray:
    """[1 or N, T, S] bool."""
    heads = of.N if of.dense == "each head" else 1
    shape = heads, of.T, of.S
    if kind == "nothing":
        return np.zeros(shape, bool)
    if kind == "blocks":
        coarse = rng.random((heads, -(-of.T // 64), -(-of.S // 64))) < 0.4
        return coarse.repeat(64, 1).repeat(64, 2)[:, : of.T, : of.S]
    share = {"sparse": 0.02, "half": 0.5, "nearly all": 0.98, "late rows": 0.5}[kind]
    seen = rng.random(shape) < share
    if kind == "late rows":
        seen[:, : of.T * 2 // 3] = False
    return seen
