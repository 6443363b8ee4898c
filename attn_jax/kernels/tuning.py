"""Block sizes: which tiling a kernel uses, by architecture, head dimension and length.

A tiling changes the order of the sums, hence the bits of the result, so it is a pure
function of the shape: the same shape gives the same tiling on every run.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from attn_jax.recipe import Architecture


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work.

    Attributes:
      rows: rows of the output tile that one consumer warpgroup owns (queries in the
        forward and dQ kernels, keys in the dK, dV kernel), a multiple of 64.
      columns: length of the blocks it loops over (keys; queries in the dK, dV kernel).
      warpgroups: consumer warpgroups in a CTA.
      stages: blocks in flight in shared memory.
      split: how many warpgroups share the same rows, each with its part of the columns
        of dK and dV; all of them make the whole of S and dP (Hopper's dK, dV kernel).
    """

    rows: int
    columns: int
    warpgroups: int
    stages: int
    split: int = 1

    @property
    def tile(self) -> int:
        """Rows of the output tile that one CTA owns."""
        return self.rows * self.warpgroups // self.split


@dataclass(frozen=True)
class ForwardTiling(Tiling):
    """How Hopper's forward kernel cuts its work.

    Attributes:
      q_registers: Q is an operand from registers, which leaves shared memory more time
        for K; for two consumer warpgroups at most, which have registers to spare.
      stored_columns: out goes to memory by way of one buffer, in parts of at most so
        many columns; None: whole, by way of one buffer for out and one for what
        rounding drops.
    """

    q_registers: bool = False
    stored_columns: int | None = None

    def stored(self, value_dim: int) -> int:
        """Columns of out in shared memory at a time, a divisor of `value_dim`."""
        most = self.stored_columns
        return value_dim if most is None else math.gcd(most, value_dim)


@dataclass(frozen=True)
class Plan:
    """How Hopper's fused backward kernel deals its work and adds to dQ. All but
    `storing_warps` change the order of additions.

    Attributes:
      storing_warps: threads that add dQ, each a warp, taking turns at the steps, so
        that one goes on while the other waits for its addition to be done; 0: the
        storing warpgroup as one.
      apart: under a causal mask dQ of the second half of keys has an array of its own,
        added at the end (`ring_order.Ring.apart`).
      passes: the fewest tiles of a pair that a CTA is to have, without a mask, where
        that costs nothing.
      rings: how many rings; None: as many as run at the same time.
    """

    storing_warps: int = 2
    apart: bool = False
    passes: int = 1
    rings: int | None = None

    def __post_init__(self):
        if self.storing_warps not in (0, 2):
            raise ValueError(f"{self.storing_warps} storing warps, not 0 or 2")

    @property
    def storers(self) -> int:
        return max(1, self.storing_warps)


# Head dims of Q and K, and of V: on Ampere the same, on Hopper any two of them.
HEAD_DIMS: dict[Architecture, tuple[int, ...]] = {
    "ampere": (64, 128),
    "hopper": (32, 64, 96, 128, 192, 256),
}

# Head dims, of Q and K and of V, at which Hopper's backward kernels have registers to
# keep the number of every column of a tile, and where their operands lie, through the
# loop over blocks. At the others they make both anew in each block.
PLENTY_OF_REGISTERS = ((64, 64), (128, 128))

# By head dim, or by those of Q and K and of V where it is worth an entry.
type Tilings = dict[Architecture, dict[int | tuple[int, int], Tiling]]

# How gradients of Q, K and V are made: dQ by a kernel of its own, which computes the
# logits once more, or all three in one pass, where that kernel takes the problem.
Backward = Literal["two_kernels", "fused"]
BACKWARD: dict[Architecture, Backward] = {
    "ampere": "two_kernels",
    "hopper": "fused",
}

# The fused kernel's plan, by head dim, without a mask and with a causal one.
FUSED: dict[int, tuple[Plan, Plan]] = {
    64: (Plan(passes=2), Plan(storing_warps=0)),
    128: (Plan(), Plan()),
}
# From so many keys on causal sums are kept apart: below, making and adding the second
# array costs more than the waits it saves.
FUSED_APART_FROM = 2048

# Ampere: 128 rows, so that a warp has 32 for each fragment of K and V that it reads
# from shared memory; blocks of keys as long as 255 registers a thread allow without
# spills. Hopper: blocks as long as registers (240 a thread of two consumer warpgroups)
# and shared memory (227 KB) allow; in the forward kernel a multiple of `rows`, so that
# a causal mask cuts a warpgroup's last block alone.
FORWARD: Tilings = {
    "ampere": {
        64: Tiling(rows=128, columns=64, warpgroups=1, stages=2),
        128: Tiling(rows=128, columns=32, warpgroups=1, stages=2),
    },
    "hopper": {
        32: ForwardTiling(rows=64, columns=128, warpgroups=3, stages=4),
        64: ForwardTiling(rows=64, columns=128, warpgroups=3, stages=4),
        96: ForwardTiling(
            rows=64, columns=128, warpgroups=2, stages=3, q_registers=True
        ),
        128: ForwardTiling(
            rows=64, columns=128, warpgroups=2, stages=2, q_registers=True
        ),
        192: ForwardTiling(
            rows=64, columns=64, warpgroups=2, stages=3, stored_columns=64
        ),
        (192, 128): ForwardTiling(
            rows=64, columns=128, warpgroups=2, stages=2, stored_columns=64
        ),
        256: ForwardTiling(
            rows=64, columns=64, warpgroups=2, stages=2, stored_columns=64
        ),
    },
}
# Where a query sees few keys, by head dims: how many at the most, in the mean, and the
# tiling. Starting and ending a tile weighs more there; four warpgroups hide it better.
SHORT_FORWARD: dict[Architecture, dict[tuple[int, int], tuple[int, Tiling]]] = {
    "ampere": {},
    "hopper": {
        (64, 64): (2048, ForwardTiling(rows=64, columns=64, warpgroups=4, stages=4))
    },
}
BACKWARD_DQ: Tilings = {
    "ampere": {
        64: Tiling(rows=128, columns=32, warpgroups=1, stages=2),
        128: Tiling(rows=64, columns=32, warpgroups=1, stages=2),
    },
    "hopper": {
        32: Tiling(rows=64, columns=128, warpgroups=2, stages=2),
        64: Tiling(rows=64, columns=128, warpgroups=2, stages=2),
        96: Tiling(rows=64, columns=128, warpgroups=2, stages=2),
        128: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
        192: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
        256: Tiling(rows=64, columns=32, warpgroups=2, stages=2),
    },
}
BACKWARD_DKV: Tilings = {
    "ampere": {
        64: Tiling(rows=64, columns=64, warpgroups=1, stages=2),
        128: Tiling(rows=64, columns=32, warpgroups=1, stages=2),
    },
    "hopper": {
        32: Tiling(rows=64, columns=128, warpgroups=2, stages=2),
        64: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
        96: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
        128: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
        # 64 rows of both accumulators are more than registers hold.
        192: Tiling(rows=64, columns=64, warpgroups=2, stages=2, split=2),
        (192, 128): Tiling(rows=64, columns=32, warpgroups=2, stages=4),
        256: Tiling(rows=64, columns=64, warpgroups=2, stages=2, split=2),
    },
}


def tiling(
    tilings: Tilings, architecture: Architecture, head_dim: int, value_dim: int
) -> Tiling:
    """The entry for a head dim of Q and K and one of V: theirs, or the larger one's."""
    of_architecture = tilings[architecture]
    larger = max(head_dim, value_dim)
    return of_architecture.get((head_dim, value_dim), of_architecture[larger])


def fused(head_dim: int, key_count: int, *, is_causal: bool) -> Plan:
    """The fused backward kernel's plan."""
    plan = FUSED[head_dim][is_causal]
    return replace(plan, apart=is_causal and key_count >= FUSED_APART_FROM)


def forward(
    target: Architecture,
    head_dim: int,
    value_dim: int,
    key_count: int,
    *,
    is_causal: bool,
    listed: bool,
) -> Tiling:
    """The forward kernel's tiling. Blocks that come in lists (`listed`) take registers
    that four warpgroups do not have."""
    most, short = SHORT_FORWARD[target].get((head_dim, value_dim), (0, None))
    seen = key_count // 2 if is_causal else key_count
    if short is not None and seen <= most and not listed:
        return short
    return tiling(FORWARD, target, head_dim, value_dim)
