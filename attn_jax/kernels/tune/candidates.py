"""Which tilings a kernel could have: everything in a grid that its resources allow.

What is counted here are lower bounds: the accumulators and operands that a thread must
hold at the same time, and the tiles in shared memory. Whether the rest fits besides is
for the compiler to say, and what it is worth for the clock.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attn_jax.kernels import (
    ampere_backward_dkv,
    ampere_backward_fused,
    ampere_fixed_point,
    ampere_tiles,
    compiler,
    hopper_backward_dkv,
    hopper_backward_dq,
    hopper_backward_fused,
    hopper_forward,
    hopper_fused_work,
    tuning,
)
from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.tilings import AmperePlan, Choice, ForwardTiling, Plan, Tiling
from attn_jax.kernels.tuning import Group, KernelName
from attn_jax.recipe import Architecture

# Threads of a warpgroup, which share an accumulator's rows.
_THREADS = 128
# Registers of a multiprocessor, and the most a thread may have.
_REGISTERS, _MOST_REGISTERS = 65536, 255
GPUS: dict[Architecture, compiler.Gpu] = {"ampere": "a100", "hopper": "h200"}

type Grid = dict[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Need:
    """At the least: registers of a consumer's thread, of how many; bytes of shared
    memory of a CTA; bytes of a thread's part of a block of logits."""

    registers: int
    registers_given: int
    shared_memory: int
    logits: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What tuning knows of a kernel of one architecture.

    Attributes:
      name: its table.
      function: what it is called in compilers' and profilers' reports.
      results: of `checks.RESULTS`, those it makes.
      grid: values of each field of a tiling; every combination is a candidate.
      need: (tiling, head dim, value dim) -> what it takes.
      refuses: (tiling, head dim, value dim) -> why it cannot be at all, or None.
      options: what else `attention` is given so that it uses the kernel.
      causal_grid: the grid of groups under a causal mask, where it is another one.
      whole: its time is that of the backward pass. What it leaves to others, as to add
        sums that were kept apart, is part of the choice.
    """

    name: KernelName
    function: str
    results: tuple[str, ...]
    grid: Grid
    need: Callable[[Any, int, int], Need]
    refuses: Callable[[Any, int, int], str | None] = lambda *_: None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    causal_grid: Grid | None = None
    whole: bool = False

    def fields(self, is_causal: bool | None) -> Grid:
        """The grid of a group."""
        return self.causal_grid if is_causal and self.causal_grid else self.grid


def candidates(group: Group) -> list[Choice]:
    """All of the grid, but for what no tiling can be, those that differ least from the
    table's first."""
    fields = kernel_of(group).fields(group.is_causal)
    found = []
    for values in itertools.product(*fields.values()):
        with contextlib.suppress(ValueError):  # Fields that do not go together.
            given = dict(zip(fields, values))
            found.append(tuning.tiling_of(group.architecture, group.kernel, given))
    now = present(group)

    def distance(tiling: Choice) -> int:
        return min(
            sum(getattr(tiling, name) != getattr(entry, name) for name in fields)
            for entry in now
        )

    return sorted(dict.fromkeys(found), key=distance)


def present(group: Group) -> list[Choice]:
    """What the table has, each once."""
    _, few, many = tuning.few_and_many(group)
    return list(dict.fromkeys((many, few)))


def reason_against(group: Group, tiling: Choice) -> str | None:
    """Why a candidate need not be compiled, in one line; None if it is to be tried."""
    kernel, dims = kernel_of(group), (group.head_dim, group.value_dim)
    reason = kernel.refuses(tiling, *dims)
    if reason is not None:
        return reason
    need = kernel.need(tiling, *dims)
    if need.registers > need.registers_given:
        return (
            f"needs {need.registers} registers a thread at the least, "
            f"has {need.registers_given}"
        )
    limit = compiler.shared_memory(GPUS[group.architecture])
    if need.shared_memory > limit:
        return (
            f"needs {need.shared_memory} bytes of shared memory at the least, a CTA "
            f"has {limit}"
        )
    return None


def spills_too_much(need: Need, spilled_bytes: int) -> str | None:
    """A kernel that spills as much as its block of logits is keeps them in memory,
    which is what it is there to avoid."""
    if spilled_bytes < need.logits:
        return None
    return (
        f"spills {spilled_bytes} bytes a thread, its block of logits has {need.logits}"
    )


def _registers(*tiles: tuple[int, int, int]) -> int:
    """Of a thread, for tiles of (rows, columns, bytes an element)."""
    return sum(rows * columns * size for rows, columns, size in tiles) // (4 * _THREADS)


def _logits(tiling: Tiling) -> int:
    return 4 * tiling.rows * tiling.columns // _THREADS


def _too_many_threads(warpgroups: int, consumer: int, producer: int) -> str | None:
    taken = (warpgroups * consumer + producer) * _THREADS
    if taken <= _REGISTERS:
        return None
    return f"{warpgroups} consumer warpgroups take {taken} registers of {_REGISTERS}"


def _hopper_forward_need(tiling: Tiling, head_dim: int, value_dim: int) -> Need:
    assert isinstance(tiling, ForwardTiling)
    rows, columns, groups = tiling.rows, tiling.columns, tiling.warpgroups
    tiles = [(rows, value_dim, 4), (rows, columns, 4), (rows, columns, 2)]
    if tiling.q_registers:
        tiles.append((rows, head_dim, 2))
    stored = 0 if tiling.out_by_key else tiling.stored(value_dim)
    return Need(
        _registers(*tiles),
        hopper_forward.REGISTERS[groups][0],
        2 * groups * rows * (head_dim + stored)
        + 2 * tiling.stages * columns * (head_dim + value_dim),
        _logits(tiling),
    )


def _hopper_forward_refuses(
    tiling: Tiling, head_dim: int, value_dim: int
) -> str | None:
    assert isinstance(tiling, ForwardTiling)
    if tiling.columns % tiling.rows:
        return "a causal mask would cut two blocks of a warpgroup"
    if tiling.q_registers and tiling.warpgroups > 2:
        return "Q in registers is for two consumer warpgroups at most"
    if tiling.stored_columns is not None and tiling.stored(value_dim) == value_dim:
        return "the same as without stored_columns"
    if tiling.ahead and tiling.out_by_key:
        return "the last block of K is out's place when the next tile begins"
    if tiling.out_by_key:
        if head_dim != value_dim or tiling.columns < tiling.tile:
            return "a block of K has no room for out"
        if tiling.stored_columns is not None:
            return "out by way of K needs no buffer, of so many columns or others"
    return _too_many_threads(
        tiling.warpgroups, *hopper_forward.REGISTERS[tiling.warpgroups]
    )


def _hopper_dq_need(tiling: Tiling, head_dim: int, value_dim: int) -> Need:
    rows, columns, groups = tiling.rows, tiling.columns, tiling.warpgroups
    block = (rows, columns, 4)
    half_stages = hopper_backward_dq.half_stages(tiling, head_dim, value_dim)
    return Need(
        _registers((rows, head_dim, 4), block, block),
        hopper_backward_dq.CONSUMER_REGISTERS,
        2 * (groups * rows + tiling.stages * columns) * (head_dim + value_dim)
        + 2 * half_stages * columns * head_dim
        + 4 * groups * (3 * rows + head_dim),
        _logits(tiling),
    )


def _hopper_dq_refuses(tiling: Tiling, head_dim: int, value_dim: int) -> str | None:
    return _too_many_threads(
        tiling.warpgroups,
        hopper_backward_dq.CONSUMER_REGISTERS,
        hopper_backward_dq.PRODUCER_REGISTERS,
    )


def _hopper_dkv_need(tiling: Tiling, head_dim: int, value_dim: int) -> Need:
    rows, columns = tiling.rows, tiling.columns
    block = (rows, columns, 4)
    both = head_dim + value_dim
    teams = tiling.warpgroups // tiling.split
    return Need(
        _registers((rows, both // tiling.split, 4), block, block),
        hopper_backward_dkv.CONSUMER_REGISTERS,
        2 * teams * rows * both + tiling.stages * columns * (2 * both + 8),
        _logits(tiling),
    )


def _hopper_dkv_refuses(tiling: Tiling, head_dim: int, value_dim: int) -> str | None:
    if tiling.warpgroups % tiling.split:
        return f"{tiling.split} warpgroups to a team do not divide {tiling.warpgroups}"
    return _too_many_threads(
        tiling.warpgroups,
        hopper_backward_dkv.CONSUMER_REGISTERS,
        hopper_backward_dkv.PRODUCER_REGISTERS,
    )


def _hopper_fused_need(plan: Plan, head_dim: int, value_dim: int) -> Need:
    sizes = hopper_fused_work
    keys, groups, queries = sizes.KEYS, sizes.WARPGROUPS, sizes.QUERIES[head_dim]
    block = (keys, queries, 4)
    both = head_dim + value_dim
    return Need(
        # dK, dV and dQ, and a block of logits.
        _registers((keys, both, 4), (64, 64, 4), block),
        hopper_backward_fused.CONSUMER_REGISTERS[plan.copiers],
        # But for barriers, a few bytes.
        2 * groups * keys * (both + head_dim)
        + sizes.STAGES * queries * (2 * both + 8)
        + 2 * sizes.DS_BUFFERS * groups * queries * keys
        + 4 * groups * 64 * 64,
        4 * keys * queries // _THREADS,
    )


def _ampere_forward_need(tiling: Tiling, head_dim: int, value_dim: int) -> Need:
    rows, columns = tiling.rows, tiling.columns
    return Need(
        _registers((rows, value_dim, 4), (rows, columns, 4)),
        _MOST_REGISTERS,
        2 * rows * head_dim + 2 * tiling.stages * columns * (head_dim + value_dim),
        _logits(tiling),
    )


def _ampere_backward_need(
    tiling: Tiling, head_dim: int, value_dim: int, accumulated: int
) -> Need:
    """Where accumulators have `accumulated` columns."""
    rows, columns = tiling.rows, tiling.columns
    both = head_dim + value_dim
    block = (rows, columns, 4)
    tiles = [(rows, accumulated, 4), block, block]
    if ampere_tiles.fits_in_registers(
        rows, columns, accumulated=accumulated, operands=both
    ):
        tiles.append((rows, both, 2))
    return Need(
        _registers(*tiles),
        _MOST_REGISTERS,
        2 * (rows + tiling.stages * columns) * both,
        _logits(tiling),
    )


def _ampere_fused_refuses(
    plan: AmperePlan, head_dim: int, value_dim: int
) -> str | None:
    del value_dim  # The same.
    return ampere_backward_fused.reason_against_plan(plan, head_dim)


def _ampere_fused_need(plan: AmperePlan, head_dim: int, value_dim: int) -> Need:
    keys, queries = ampere_backward_fused.KEY_TILE, plan.queries
    groups = head_dim // ampere_fixed_point.COLUMNS
    block, both = (keys // groups, queries, 4), head_dim + value_dim
    kept = head_dim if groups == 1 else 0  # of V, else in registers
    return Need(
        # dK and dV, and a block of logits, of which dQ is made later.
        _registers((keys // groups, both, 4), block),
        _MOST_REGISTERS,
        2 * keys * (2 * head_dim + kept)
        + ampere_backward_fused.STAGES * queries * (2 * both + 8)
        + 2 * ampere_backward_fused.STAGES * keys * queries,
        4 * keys // groups * queries // _THREADS,
    )


def _ampere_dq_need(tiling: Tiling, head_dim: int, value_dim: int) -> Need:
    return _ampere_backward_need(tiling, head_dim, value_dim, head_dim)


def _ampere_dkv_need(tiling: Tiling, head_dim: int, value_dim: int) -> Need:
    """Of the kernel for both gradients, or else of that which makes dK."""
    together = ampere_backward_dkv.are_together(tiling.rows, head_dim, value_dim)
    accumulated = head_dim + value_dim if together else head_dim
    return _ampere_backward_need(tiling, head_dim, value_dim, accumulated)


_ROWS = (64, 128)  # multiples of what four warps share
_HOPPER_FORWARD: Grid = {
    "rows": _ROWS,
    "columns": (64, 128, 192, 256),
    "warpgroups": tuple(hopper_forward.REGISTERS),
    "stages": (2, 3, 4),
    "q_registers": (False, True),
    "stored_columns": (None, 64),
    "out_by_key": (False, True),
}
_HOPPER_FUSED: Grid = {"storing_warps": (0, 2), "copiers": (1, 2)}
_HOPPER_BACKWARD: Grid = {
    "rows": _ROWS,
    "columns": (32, 64, 96, 128, 192, 256),
    "warpgroups": (1, 2, 3),
    "stages": (2, 3, 4),
}
_TWO_KERNELS = {"backward": "two_kernels"}
# A CTA is one warpgroup there.
_AMPERE: Grid = {"rows": _ROWS, "columns": (16, 32, 64, 96, 128), "warpgroups": (1,)}

KERNELS: dict[Architecture, dict[KernelName, Kernel]] = {
    "hopper": {
        "forward": Kernel(
            *("forward", "attention_forward", ("out", "lse")),
            _HOPPER_FORWARD | {"ahead": (False, True)},
            *(_hopper_forward_need, _hopper_forward_refuses),
            causal_grid=_HOPPER_FORWARD,
        ),
        "backward_dq": Kernel(
            *("backward_dq", "attention_backward_dq", ("dq",)),
            *(_HOPPER_BACKWARD, _hopper_dq_need, _hopper_dq_refuses, _TWO_KERNELS),
        ),
        "backward_dkv": Kernel(
            *("backward_dkv", "attention_backward_dkv", ("dk", "dv")),
            _HOPPER_BACKWARD | {"split": (1, 2)},
            *(_hopper_dkv_need, _hopper_dkv_refuses, _TWO_KERNELS),
        ),
        "backward_fused": Kernel(
            *("backward_fused", "attention_backward_fused", ("dq", "dk", "dv")),
            _HOPPER_FUSED | {"passes": (1, 2, 4)},
            _hopper_fused_need,
            options={"backward": "fused"},
            causal_grid=_HOPPER_FUSED | {"apart": (False, True)},
            whole=True,
        ),
    },
    "ampere": {
        "forward": Kernel(
            *("forward", "attention_forward", ("out", "lse")),
            _AMPERE | {"stages": (1, 2, 3)},
            _ampere_forward_need,
        ),
        "backward_dq": Kernel(
            *("backward_dq", "attention_backward_dq", ("dq",)),
            _AMPERE | {"stages": (1, 2)},
            _ampere_dq_need,
            options=_TWO_KERNELS,
        ),
        "backward_dkv": Kernel(
            *("backward_dkv", "attention_backward_dkv", ("dk", "dv")),
            _AMPERE | {"stages": (1, 2)},
            _ampere_dkv_need,
            options=_TWO_KERNELS,
        ),
        "backward_fused": Kernel(
            *("backward_fused", "attention_backward_fused", ("dq", "dk", "dv")),
            {"queries": (32, 64)},
            *(_ampere_fused_need, _ampere_fused_refuses),
            options={"backward": "fused"},
            whole=True,
        ),
    },
}


def kernel_of(group: Group) -> Kernel:
    return KERNELS[group.architecture][group.kernel]


def head_dims(architecture: Architecture) -> Iterator[tuple[int, int]]:
    """Those of Q and K and of V that the table has entries of their own for."""
    for head_dim in tuning.HEAD_DIMS[architecture]:
        yield head_dim, head_dim
    pairs = {
        (e.head_dim, e.value_dim)
        for e in tuning.ENTRIES
        if e.architecture == architecture and e.head_dim != e.value_dim
    }
    yield from sorted(pairs)


def groups(
    architecture: Architecture,
    kernel: KernelName,
    dims: Iterable[tuple[int, int]],
    multiprocessors: int | None = None,
) -> Iterator[Group]:
    """What there is to tune of a kernel at these head dims, on a card with so many
    multiprocessors: one with fewer than Hopper's fused kernel needs runs another one
    (`design.backward_of`). None: a card with enough."""
    enough = multiprocessors is None or multiprocessors >= H100_MULTIPROCESSORS
    enough |= architecture == "ampere"
    if kernel == "backward_fused" and not enough:
        return
    for pair in dims:
        if tuning.takes(architecture, kernel, *pair):
            for is_causal in tuning.masks(kernel):
                yield Group(architecture, kernel, *pair, is_causal)
