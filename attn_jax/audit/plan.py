"""Which problems an audit measures."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from attn_jax.audit import attribution
from attn_jax.audit.inputs import Shape
from attn_jax.audit.problem import HIDING_BIAS, MASKS, NO_KEYS, Problem


class Group(NamedTuple):
    """Problems of one compiled program: families of inputs of a shape under a mask,
    whose logits are scaled by `scale_factor` / sqrt(H)."""

    shape: Shape
    mask: str
    families: tuple[str, ...]
    scale_factor: float = 1.0

    def problems(self, dtype: str) -> list[Problem]:
        rest = {"mask": self.mask, "scale_factor": self.scale_factor}
        return [Problem(self.shape, dtype, name, **rest) for name in self.families]

    def has(self, problem: Problem) -> bool:
        return problem in self.problems(problem.dtype)

    @property
    def logits_bytes(self) -> int:
        """Of the matrices [B, N, T, S] in FP32."""
        s = self.shape
        return 4 * s.batch * s.heads * s.query_length * s.key_length

    def __str__(self) -> str:
        s = self.shape
        return (
            f"{s.query_length} x {s.key_length} keys, {s.heads} x {s.key_heads} heads "
            f"of {s.head_dim}, batch {s.batch}, {self.mask}"
            + (f", scale {self.scale_factor:g}" if self.scale_factor != 1 else "")
        )


# Where kernels differ most, and what breaks them.
FAMILIES = (*attribution.FAMILIES, "lse-130", "repeated_max", "zero_k_one_v")
_FEW = ("normal", "uniform")
# By mask, of the first shape. Below -100 what is hidden by a large number shows.
_MORE = {"full": FAMILIES, "causal": (*_FEW, "lse-130")}
# The first is measured under all masks, and compared with recipes.
_ON_A_CPU = (
    # Three query heads for each of two: n // 3, n // 2 and n % 2 are not the same.
    Shape(2, 256, 256, 6, 2, 64),
    # Lengths that no tile divides, one key head, and a scale that is no power of two:
    # 1 / sqrt(48) is 1.3e-3 of itself off in BF16, that of 80, 96 and 128 a tenth.
    Shape(2, 200, 333, 4, 1, 48),
    Shape(2, 1024, 1024, 2, 2, 64),
)
_ON_A_GPU = (
    Shape(2, 512, 512, 8, 2, 128),
    Shape(2, 1000, 1337, 8, 1, 64),
    Shape(2, 4096, 4096, 2, 2, 128),
    Shape(1, 16384, 16384, 2, 1, 128),
)


class _Beside(NamedTuple):
    """What a mask of the first shape is looked at beside: `mask`, where there is the
    one that it is made of, on so many queries and keys, which `lengths` makes of how
    many there may be, with as many heads of each (`equal_heads`) or not."""

    mask: str
    made_of: str
    lengths: Callable[[int], tuple[int, int]]
    equal_heads: bool = True


def _odd(most: int) -> int:
    """As many as whole tiles have, of any size, and one more."""
    whole = next((n for n in (128, 64, 32, 16) if n < most), 1)
    return (most - 1) // whole * whole + 1


def _fewer(most: int) -> tuple[int, int]:
    return 2 * _odd(most) // 3 + 1, _odd(most)


def _as_many(most: int) -> tuple[int, int]:
    return _odd(most), _odd(most)


# Rules that a function has for some calls alone are those of other code: with as many
# heads of K as of Q, with one query, with lengths that tiles divide or do not. Of few
# shapes, since a GPU's compiler tries out what is fastest for each.
_BESIDE = (
    _Beside("causal", "causal", _fewer),
    _Beside("causal", "causal", lambda n: (n // 2, n), equal_heads=False),
    _Beside("wide window", "window", _as_many),
    _Beside("lengths", "lengths", _as_many),
    _Beside(NO_KEYS, "lengths", _as_many),
    _Beside("packed", "packed", _as_many),
    _Beside(HIDING_BIAS, "bias", _fewer),
    _Beside("full", "full", lambda n: (1, _odd(n)), equal_heads=False),
)
# Keys that are enough for several tiles, and for positions beyond what BF16 holds.
_SEVERAL, _ENOUGH = 512, 1024
# A scale that nobody has by default, and no power of two.
_OTHER_SCALE = 0.75


def plan(
    shapes: Sequence[Shape] | None = None,
    families: Sequence[str] | None = None,
    masks: Sequence[str] | None = None,
    *,
    packed: bool = False,
    equal_heads: bool = False,
) -> list[Group]:
    """Every combination of what is given. What is not is chosen: of shapes by the
    device, and of families and masks fewer for all shapes but the first.

    `packed`: with as many keys as queries, and as many heads of each. `equal_heads`: as
    many heads, but for one problem at the end, which says that others are not taken.
    """
    refused = []
    if shapes is None:
        shapes = _ON_A_CPU if jax.default_backend() == "cpu" else _ON_A_GPU
        if equal_heads:
            mask = masks[0] if masks else "full"
            refused = [Group(shapes[0], mask, _FEW[:1])]
        if packed or equal_heads:
            shapes = [dataclasses.replace(s, key_heads=s.heads) for s in shapes]
        if packed:
            shapes = [dataclasses.replace(s, key_length=s.query_length) for s in shapes]
    chosen = [
        Group(
            shape,
            mask,
            tuple(families or (() if i else _MORE.get(mask, ())) or _FEW),
        )
        for i, shape in enumerate(dict.fromkeys(shapes))
        for mask in (masks or (("full", "causal") if i else MASKS))
    ]
    return chosen + refused


def ragged(
    groups: Sequence[Group], shards: int = 1, *, takes_scale: bool = False
) -> list[Group]:
    """What masks of the first shape are looked at beside (`_BESIDE`), since a length
    that tiles divide hides what the last one does, a window in one tile what others do,
    the usual scale that another is not taken, and as many queries as keys which is
    which.

    No longer than the longest sequence of the groups; of lengths that the devices which
    they are cut between divide; with as many heads of each, and with other numbers of
    queries than of keys, if any of the groups has so; with another scale, if it
    `takes_scale`. One family, and no cells of a report.
    """
    shape, parts = groups[0].shape, 2 * shards if shards > 1 else 1
    longest = max(group.shape.key_length for group in groups)
    most = min(max(shape.key_length, min(longest, _SEVERAL)), _ENOUGH)
    unequal = any(x.shape.query_length != x.shape.key_length for x in groups)
    masks = {x.mask for x in groups if x.shape == shape}
    alike = shape
    if any(x.shape.heads == x.shape.key_heads for x in groups):
        # Of one key head there would be one of each.
        heads = shape.key_heads if shape.key_heads > 1 else shape.heads
        alike = dataclasses.replace(shape, heads=heads, key_heads=heads)
    found = []
    for mask, made_of, lengths, equal_heads in _BESIDE:
        T, S = (length // parts * parts for length in lengths(most))
        if not unequal and T != S:
            # What is not there for the number of queries has as many as keys.
            T = S if equal_heads else 0
        # One batch entry without keys is nothing to measure, nor are lengths that the
        # devices are too many for.
        nothing = not T * S or (mask == NO_KEYS and shape.batch == 1)
        if nothing or made_of not in masks:
            continue
        of = dataclasses.replace(
            alike if equal_heads else shape, query_length=T, key_length=S
        )
        scale = _OTHER_SCALE if takes_scale else 1.0
        found.append(Group(of, mask, _FEW[:1], scale_factor=scale))
    return [x for x in found if x not in groups]
