"""Block sizes: which tiling a kernel uses, by architecture and head dimension.

A tiling changes the order of the sums, hence the bits of the result, so it is a pure
function of the shape: the same shape gives the same tiling on every run.
"""

from dataclasses import dataclass

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


HEAD_DIMS = (64, 128)

# Ampere: 128 rows, so that a warp has 32 for each fragment of K and V that it reads
# from shared memory; blocks of keys as long as 255 registers a thread allow without
# spills.
FORWARD: dict[Architecture, dict[int, Tiling]] = {
    "ampere": {
        64: Tiling(rows=128, columns=64, warpgroups=1, stages=2),
        128: Tiling(rows=128, columns=32, warpgroups=1, stages=2),
    },
    "hopper": {
        64: Tiling(rows=64, columns=128, warpgroups=2, stages=2),
        128: Tiling(rows=64, columns=128, warpgroups=2, stages=2),
    },
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
