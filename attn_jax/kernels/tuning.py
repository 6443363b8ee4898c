"""Block sizes: which tiling a kernel uses, by architecture, head dimension and length.

A tiling changes the order of the sums, hence the bits of the result, so it is a pure
function of the shape: the same shape gives the same tiling on every run. The table is
data, `tilings.json`: what `python -m attn_jax.kernels.tune` writes has its form.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from attn_jax.kernels.tilings import (
    AmperePlan,
    Choice,
    ForwardTiling,
    Plan,
    Tiling,
    set_fields,
)
from attn_jax.recipe import Architecture

_LOG = logging.getLogger("attn_jax.kernels")


# Head dims of Q and K, and of V: any two of them.
HEAD_DIMS: dict[Architecture, tuple[int, ...]] = {
    "ampere": (32, 64, 96, 128, 192, 256),
    "hopper": (32, 64, 96, 128, 192, 256),
}

# Head dims, of Q and K and of V, at which Hopper's backward kernels have registers to
# keep the number of every column of a tile, and where their operands lie, through the
# loop over blocks. At the others they make both anew in each block.
PLENTY_OF_REGISTERS = ((64, 64), (128, 128))

# At which there are the fused backward kernels: the same for Q, K and V.
FUSED_HEAD_DIMS = (64, 128)

KernelName = Literal["forward", "backward_dq", "backward_dkv", "backward_fused"]
KERNEL_NAMES: tuple[KernelName, ...] = get_args(KernelName)

# Kernels that choose something else, or more, than `Tiling` says.
_CLASSES: dict[tuple[Architecture, KernelName], type[Choice]] = {
    ("hopper", "forward"): ForwardTiling,
    ("hopper", "backward_fused"): Plan,
    ("ampere", "backward_fused"): AmperePlan,
}

# A kernel, and the mask by which its entries differ.
type Table = tuple[KernelName, bool | None]
# By head dim, or by those of Q and K and of V where it is worth an entry.
type Tilings[T] = dict[Architecture, dict[int | tuple[int, int], T]]
# Where a query sees few keys, by head dims: how many at the most, in the mean, and the
# tiling. Starting and ending a tile weighs more there.
type ShortTilings[T] = dict[Architecture, dict[tuple[int, int], tuple[int, T]]]

# How gradients of Q, K and V are made: dQ by a kernel of its own, which computes the
# logits once more, or all three in one pass (`design.backward_of` chooses).
Backward = Literal["two_kernels", "fused"]


class Group(NamedTuple):
    """Whose entries differ in the number of keys alone.

    Attributes:
      head_dim, value_dim: of Q and K, and of V.
      is_causal: with a causal mask, or without a mask; None: with any (`masks`).
    """

    architecture: Architecture
    kernel: KernelName
    head_dim: int
    value_dim: int
    is_causal: bool | None = None

    @property
    def mask(self) -> str:
        return {None: "", False: "full", True: "causal"}[self.is_causal]

    @property
    def of(self) -> str:
        """Head dims and mask."""
        dims = f"{self.head_dim}, {self.value_dim}"
        return f"{dims}, {self.mask}" if self.mask else dims


class Entry(NamedTuple):
    """One line of the table: the fields of a `Group`, and

    Attributes:
      keys_seen: for queries that see so many keys at the most, in the mean; None: any.
    """

    architecture: Architecture
    kernel: KernelName
    head_dim: int
    value_dim: int
    is_causal: bool | None
    keys_seen: int | None
    tiling: Choice

    @property
    def place(self) -> tuple:
        return self[:-1]

    @property
    def group(self) -> Group:
        return Group(*self[:5])


def masks(kernel: KernelName) -> tuple[bool | None, ...]:
    """What `Group.is_causal` can be: of the kernels for which another tiling, or plan,
    is best under a causal mask, which leaves some warpgroups less to do than others."""
    by_mask = ("forward", "backward_fused")
    return (False, True) if kernel in by_mask else (None,)


def takes(
    architecture: Architecture, kernel: KernelName, head_dim: int, value_dim: int
) -> bool:
    """Whether there is such a kernel for these head dims of Q and K, and of V."""
    if kernel == "backward_fused":
        return head_dim == value_dim and head_dim in FUSED_HEAD_DIMS
    known = HEAD_DIMS.get(architecture, ())
    return kernel in KERNEL_NAMES and {head_dim, value_dim} <= set(known)


def tiling_of(
    architecture: Architecture, kernel: KernelName, fields: Mapping[str, Any]
) -> Choice:
    """What the table has for a kernel, from its fields by name.

    Raises TypeError or ValueError if they do not fit.
    """
    return _CLASSES.get((architecture, kernel), Tiling)(**fields)


def read(text: str) -> list[Entry]:
    """The entries of a table, JSON, in the form of `tilings.json`.

    Raises:
      ValueError: it is no such table, in one line; an entry is there twice, or one is
        missing: a kernel needs one for any number of keys at every head dim, and may
        have one for few.
    """
    entries = []
    try:
        for line in json.loads(text):
            tiling = tiling_of(line["architecture"], line["kernel"], line["tiling"])
            if isinstance(tiling, Plan) and tiling.parts:
                raise ValueError("the number of parts is not the table's")
            entries.append(Entry(**{"is_causal": None, **line, "tiling": tiling}))
    except json.JSONDecodeError as error:
        raise ValueError(f"the table of tilings is no JSON: {error}") from None
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"entry {len(entries) + 1} of the table of tilings does not fit: {error}"
        ) from None
    places = {entry.place for entry in entries}
    if len(places) < len(entries):
        raise ValueError("the table of tilings has two entries for the same place")
    few = [entry.group for entry in entries if entry.keys_seen is not None]
    for group in few:
        if few.count(group) > 1:
            raise ValueError(
                f"the table of tilings has two entries for few keys of {tuple(group)}"
            )
    needed = {
        Group(architecture, kernel, head_dim, head_dim, is_causal)
        for architecture, head_dims in HEAD_DIMS.items()
        for kernel in KERNEL_NAMES
        for head_dim in head_dims
        if takes(architecture, kernel, head_dim, head_dim)
        for is_causal in masks(kernel)
    }
    for group in sorted(needed, key=str):
        if (*group, None) not in places:
            raise ValueError(f"the table of tilings has no entry for {tuple(group)}")
    for entry in entries:
        known = takes(*entry[:4]) and entry.is_causal in masks(entry.kernel)
        if not known:
            raise ValueError(f"the table of tilings has {entry.place}, no such kernel")
    return entries


def write(entries: list[Entry]) -> str:
    """A table as text, an entry a line; `read` gives it back."""
    lines = []
    for entry in entries:
        fields = entry._asdict() | {"tiling": set_fields(entry.tiling)}
        if entry.is_causal is None:
            del fields["is_causal"]
        lines.append(json.dumps(fields))
    return "[\n  " + ",\n  ".join(lines) + "\n]\n"


# Ampere: 128 rows, so that a warp has 32 for each fragment of K and V that it reads
# from shared memory, where registers allow; blocks as long as 255 registers a thread
# allow, but for some integers; stages so that two CTAs fit a multiprocessor, which dQ
# at head dim 256 does not. Head dims but 64 and 128 are not measured there. Hopper:
# blocks as long as registers (240 a thread of two consumer warpgroups) and shared
# memory (227 KB) allow; in the forward kernel a multiple of `rows`, so that a causal
# mask cuts a warpgroup's last block alone; at few keys, which are more under a causal
# mask, four warpgroups, which hide the start and end of a tile better, or at head dim
# 128 blocks of 128 keys, which leave less of the last one empty, than 192. The dK, dV
# kernel splits where 64 rows of both accumulators are more than registers hold. The
# fused kernel keeps causal sums apart from 2048 keys on, where a query sees 1024:
# below, making and adding the second array costs more than the waits it saves. Under a
# causal mask one warpgroup copies, where it won: with 240 registers the loop spills
# nothing; without a mask it did not, and two are faster (`prototypes/README.md`).
ENTRIES = read(Path(__file__).with_name("tilings.json").read_text())


def _long(table: Table) -> Tilings:
    found: Tilings = {architecture: {} for architecture in HEAD_DIMS}
    for entry in ENTRIES:
        if (entry.kernel, entry.is_causal) == table and entry.keys_seen is None:
            dims = entry.head_dim, entry.value_dim
            key = dims if dims[0] != dims[1] else dims[0]
            found[entry.architecture][key] = entry.tiling
    return found


def _short(table: Table) -> ShortTilings:
    found: ShortTilings = {architecture: {} for architecture in HEAD_DIMS}
    for entry in ENTRIES:
        if (entry.kernel, entry.is_causal) == table and entry.keys_seen is not None:
            dims = entry.head_dim, entry.value_dim
            found[entry.architecture][dims] = entry.keys_seen, entry.tiling
    return found


_TABLES: list[Table] = [
    (name, is_causal) for name in KERNEL_NAMES for is_causal in masks(name)
]
LONG = {table: _long(table) for table in _TABLES}
SHORT = {table: _short(table) for table in _TABLES}
FORWARD = LONG["forward", False]
BACKWARD_DQ, BACKWARD_DKV = LONG["backward_dq", None], LONG["backward_dkv", None]


# Of 512 and 1024 queries, at head dim 64, three warpgroups leave a ninth idle, and four
# took 0.95 and 0.98 of the time; of 2048 a 33rd, 1.01 (H200; `blocks-64-ahead.csv`).
MOST_IDLE = 0.1


class Configuration(NamedTuple):
    """What the kernels of one call are given, by `KernelName` and in their order.

    `backward_fused` is None where there is no such kernel.
    """

    forward: Tiling
    backward_dq: Tiling
    backward_dkv: Tiling
    backward_fused: Plan | AmperePlan | None


def tiling[T](
    tilings: Tilings[T], architecture: Architecture, head_dim: int, value_dim: int
) -> T:
    """The entry for a head dim of Q and K and one of V: theirs, or the larger one's."""
    of_architecture = tilings[architecture]
    larger = max(head_dim, value_dim)
    return of_architecture.get((head_dim, value_dim), of_architecture[larger])


def few_and_many(group: Group) -> tuple[int, Any, Any]:
    """(how many keys are few, what the table has for those, and for more)."""
    _, kernel, *dims, is_causal = group
    many = tiling(LONG[kernel, is_causal], group.architecture, *dims)
    short = SHORT[kernel, is_causal][group.architecture]
    if getattr(many, "out_by_key", False) and group.head_dim != group.value_dim:
        # The larger head dim's, for which a block of K is no place for out.
        many = _without_ahead(short[max(dims), max(dims)][1])
    return *short.get((group.head_dim, group.value_dim), (0, many)), many


def _without_ahead(few: Any) -> Any:
    """The tiling for few keys as it is taken for more, whose tiles end seldom."""
    return dataclasses.replace(few, ahead=False)


def fused(head_dim: int, key_count: int, *, is_causal: bool) -> Plan:
    """The plan of Hopper's fused backward kernel."""
    return _plan("hopper", head_dim, key_count, is_causal)


def _plan(target: Architecture, head_dim: int, key_count: int, is_causal: bool) -> Any:
    group = Group(target, "backward_fused", head_dim, head_dim, is_causal)
    most, few, many = few_and_many(group)
    return few if keys_seen(key_count, is_causal=is_causal) <= most else many


def fills_better(group: Group, query_count: int) -> bool:
    """Whether the forward tiling for few keys is best for many, too, because the other
    one leaves warpgroups without queries."""
    if group[:2] != ("hopper", "forward") or group.is_causal:
        return False
    _, few, many = few_and_many(group)
    strips = [-(-query_count // x.rows) for x in (few, many)]
    in_few, in_many = (-n % x.warpgroups for n, x in zip(strips, (few, many)))
    return in_few == 0 and in_many > MOST_IDLE * (strips[1] + in_many)


def keys_seen(key_count: int, *, is_causal: bool) -> int:
    """How many keys a query sees, in the mean: what tells few keys from many."""
    return key_count // 2 if is_causal else key_count


def configuration(
    target: Architecture,
    head_dim: int,
    value_dim: int,
    key_count: int,
    *,
    is_causal: bool,
    listed: bool,
    query_count: int | None = None,
    window: int | None = None,
    short_blocks: bool = False,
) -> Configuration:
    """What the table has for a problem, of as many queries as keys, or of so many.

    Blocks that come in lists (`listed`) have the tilings for many keys: lists take
    registers that four warpgroups do not have. `window`: of how many keys, where
    Hopper's forward and one-pass kernels do without lists, and have what they have
    under a causal mask that lets a query see as many. `short_blocks`: no tiling in
    which out leaves by way of K, which lists and windows do not have either: it is for
    tiles whose warpgroups see the same last block. So with parts of a sequence, which
    its blocks do not divide, and with lazy rescaling, in which ptxas moves the wait for
    P V above the exponentials of so long a block. Else, also what `fills_better`.
    """
    seen = keys_seen(key_count, is_causal=is_causal)
    queries = key_count if query_count is None else query_count
    counts = window is not None and target == "hopper"
    plain = not listed and window is None and not short_blocks

    def chosen(name: KernelName) -> Tiling:
        by_itself = counts and name == "forward"
        by_mask = (is_causal or by_itself) if len(masks(name)) > 1 else None
        group = Group(target, name, head_dim, value_dim, by_mask)
        most, few, many = few_and_many(group)
        if getattr(many, "out_by_key", False) and not plain:
            return _without_ahead(few)
        keys = min(seen, window) if window is not None else seen
        if plain and fills_better(group, queries):
            return few
        return few if keys <= most and (by_itself or not listed) else many

    plan = None
    if takes(target, "backward_fused", head_dim, value_dim) and (counts or not listed):
        plan = _plan(target, head_dim, key_count, is_causal or counts)
    return Configuration(*map(chosen, KERNEL_NAMES[:3]), backward_fused=plan)


def log(
    target: Architecture,
    shapes: tuple[tuple[int, ...], ...],
    mask: str,
    tilings: Configuration,
    backward: Backward,
) -> None:
    """Says at level INFO what a call is computed with, once for its shapes."""
    if _LOG.isEnabledFor(logging.INFO):
        _log(target, shapes, mask, tilings, backward)


@functools.cache
def _log(target, shapes, mask, tilings, backward) -> None:
    names = zip(("query", "key", "value"), shapes, strict=True)
    sizes = ", ".join(f"{name} {list(shape)}" for name, shape in names)
    said = f"dq {tilings.backward_dq}; dkv {tilings.backward_dkv}"
    if backward == "fused":
        said = f"backward in one pass, {tilings.backward_fused}"
    _LOG.info("%s, %s, %s: forward %s; %s", target, sizes, mask, tilings.forward, said)
