"""Dataclasses of block sizes and plans; `tuning` picks one."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


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

    def __post_init__(self):
        for name in ("rows", "columns", "warpgroups", "stages", "split"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} of a tiling is {number!r}, no number above 0")

    @property
    def tile(self) -> int:
        """Rows of the output tile that one CTA owns."""
        return self.rows * self.warpgroups // self.split

    def __str__(self) -> str:
        fields = set_fields(self)
        size = f"{fields.pop('rows')} x {fields.pop('columns')}"
        return ", ".join([size, *(f"{name} {x}" for name, x in fields.items())])


def set_fields(tiling: Any) -> dict[str, Any]:
    """Fields of a dataclass that have no default, and those that differ from it."""
    return {
        field.name: getattr(tiling, field.name)
        for field in dataclasses.fields(tiling)
        if getattr(tiling, field.name) != field.default
    }


@dataclass(frozen=True)
class ForwardTiling(Tiling):
    """How Hopper's forward kernel cuts its work.

    Attributes:
      q_registers: Q is an operand from registers, which leaves shared memory more time
        for K; for two consumer warpgroups at most, which have registers to spare.
      stored_columns: out goes to memory by way of a buffer, in parts of at most so many
        columns; None: whole.
      out_by_key: out has no buffer, but goes by way of the last block of K, which
        leaves room for longer blocks; the same warpgroups are to have read that block
        and to read it last. V's head dim is that of K, and a block of K has a row for
        each of the tile.
      ahead: the first logits of a tile are made while the one before it ends, where
        nothing is hidden, `columns` divides the keys and each warpgroup has rows.
    """

    q_registers: bool = False
    stored_columns: int | None = None
    out_by_key: bool = False
    ahead: bool = False

    def stored(self, value_dim: int) -> int:
        """Columns of out in shared memory at a time, a divisor of `value_dim`."""
        most = self.stored_columns
        return value_dim if most is None else math.gcd(most, value_dim)


@dataclass(frozen=True)
class Plan:
    """How Hopper's fused backward kernel deals its work and adds to dQ. All but
    `storing_warps` and `copiers` change the order of additions.

    Attributes:
      storing_warps: threads that add dQ, each a warp, taking turns at the steps, so
        that one goes on while the other waits for its addition to be done; 0: the
        storing warpgroup as one.
      copiers: warpgroups that load, or add dQ. 1: its third warp loads, beside two
        storing warps, which leaves more registers to those that multiply.
      apart: under a causal mask dQ of the second half of keys has an array of its own,
        added at the end (`ring_order.Ring.apart`).
      passes: the fewest tiles of a pair that a CTA is to have, without a mask, where
        that costs nothing.
      parts: as many as the query heads of a key head are dealt in; None:
        `hopper_fused_work.Shapes.in_parts` chooses. Not in the table.
    """

    storing_warps: int = 2
    copiers: int = 2
    apart: bool = False
    passes: int = 1
    parts: int | None = None

    def __post_init__(self):
        if self.storing_warps not in (0, 2):
            raise ValueError(f"{self.storing_warps} storing warps, not 0 or 2")
        if self.copiers not in (1, 2):
            raise ValueError(f"{self.copiers} warpgroups that copy, not 1 or 2")
        if self.copiers == 1 and not self.storing_warps:
            raise ValueError(
                "a warpgroup that stores as one has no warp that could load"
            )
        if type(self.passes) is not int or self.passes < 1:
            raise ValueError(f"passes of a plan is {self.passes!r}, no number above 0")

    @property
    def storers(self) -> int:
        return max(1, self.storing_warps)


@dataclass(frozen=True)
class AmperePlan:
    """How Ampere's fused backward kernel cuts its work, which is the order of additions
    to dK and dV; dQ's integers have none.

    Attributes:
      queries: in a block; at head dim 128 always 64.
    """

    queries: int = 32

    def __post_init__(self):
        if self.queries not in (32, 64):
            raise ValueError(f"{self.queries} queries in a block, not 32 or 64")


# What the table has for a kernel.
type Choice = Tiling | Plan | AmperePlan
