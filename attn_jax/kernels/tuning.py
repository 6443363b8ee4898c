"""Block sizes: which tiling a kernel uses, by architecture, head dimension and length.

A tiling changes the order of the sums, hence the bits of the result, so it is a pure
function of the shape: the same shape gives the same tiling on every run.
"""

from dataclasses import dataclass
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
    """

    rows: int
    columns: int
    warpgroups: int
    stages: int

    @property
    def tile(self) -> int:
        """Rows of the output tile that one CTA owns."""
        return self.rows * self.warpgroups


@dataclass(frozen=True)
class ForwardTiling(Tiling):
    """How Hopper's forward kernel cuts its work.

    Attributes:
      q_registers: Q is an operand from registers, which leaves shared memory more time
        for K; for two consumer warpgroups at most, which have registers to spare.
    """

    q_registers: bool = False


HEAD_DIMS = (64, 128)

# How gradients of Q, K and V are made: dQ by a kernel of its own, which computes the
# logits once more, or all three in one pass, where that kernel takes the problem.
Backward = Literal["two_kernels", "fused"]
BACKWARD: dict[Architecture, Backward] = {
    "ampere": "two_kernels",
    "hopper": "two_kernels",
}

# Ampere: 128 rows, so that a warp has 32 for each fragment of K and V that it reads
# from shared memory; blocks of keys as long as 255 registers a thread allow without
# spills.
FORWARD: dict[Architecture, dict[int, Tiling]] = {
    "ampere": {
        64: Tiling(rows=128, columns=64, warpgroups=1, stages=2),
        128: Tiling(rows=128, columns=32, warpgroups=1, stages=2),
    },
    "hopper": {
        64: ForwardTiling(rows=64, columns=128, warpgroups=3, stages=4),
        128: ForwardTiling(
            rows=64, columns=128, warpgroups=2, stages=2, q_registers=True
        ),
    },
}
# Where a query sees few keys, by head dim: how many at the most, in the mean, and the
# tiling. Starting and ending a tile weighs more there; four warpgroups hide it better.
SHORT_FORWARD: dict[Architecture, dict[int, tuple[int, Tiling]]] = {
    "ampere": {},
    "hopper": {64: (2048, ForwardTiling(rows=64, columns=64, warpgroups=4, stages=4))},
}
BACKWARD_DQ: dict[Architecture, dict[int, Tiling]] = {
    "ampere": {
        64: Tiling(rows=128, columns=32, warpgroups=1, stages=2),
        128: Tiling(rows=64, columns=32, warpgroups=1, stages=2),
    },
    "hopper": {
        64: Tiling(rows=64, columns=128, warpgroups=2, stages=2),
        128: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
    },
}
BACKWARD_DKV: dict[Architecture, dict[int, Tiling]] = {
    "ampere": {
        64: Tiling(rows=64, columns=64, warpgroups=1, stages=2),
        128: Tiling(rows=64, columns=32, warpgroups=1, stages=2),
    },
    "hopper": {
        64: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
        128: Tiling(rows=64, columns=64, warpgroups=2, stages=2),
    },
}


def forward(
    target: Architecture,
    head_dim: int,
    key_count: int,
    *,
    is_causal: bool,
    listed: bool,
) -> Tiling:
    """The forward kernel's tiling. Blocks that come in lists (`listed`) take registers
    that four warpgroups do not have."""
    most, short = SHORT_FORWARD[target].get(head_dim, (0, None))
    seen = key_count // 2 if is_causal else key_count
    if short is not None and seen <= most and not listed:
        return short
    return FORWARD[target][head_dim]
