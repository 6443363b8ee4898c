"""Which problems an audit measures."""

import dataclasses
from collections.abc import Sequence
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
    Shape(1, 200, 333, 4, 1, 48),
    Shape(1, 1024, 1024, 2, 2, 64),
)
_ON_A_GPU = (
    Shape(2, 512, 512, 8, 2, 128),
    Shape(1, 1000, 1337, 8, 1, 64),
    Shape(1, 4096, 4096, 4, 4, 128),
    Shape(1, 16384, 16384, 2, 1, 128),
)


# What masks are tried beside as, with fewer queries than keys where they may be.
_RAGGED = (
    ("causal", "causal", True),
    ("window", "wide window", False),
    ("lengths", "lengths", False),
    ("lengths", NO_KEYS, False),
    ("packed", "packed", False),
    ("bias", HIDING_BIAS, True),
)
# What a length is to be shorter by, so that the last tile of any size is a partial one,
# and keys that are enough for several tiles.
_SHORTER, _ENOUGH = 27, 1024
# A scale that nobody has by default, and no power of two.
_OTHER_SCALE = 0.75


def plan(
    shapes: Sequence[Shape] | None = None,
    families: Sequence[str] | None = None,
    masks: Sequence[str] | None = None,
    *,
    packed: bool = False,
) -> list[Group]:
    """Every combination of what is given. What is not is chosen: of shapes by the
    device, and of families and masks fewer for all shapes but the first; `packed`: with
    as many keys as queries, and as many heads of each."""
    if shapes is None:
        shapes = _ON_A_CPU if jax.default_backend() == "cpu" else _ON_A_GPU
        if packed:
            shapes = [
                dataclasses.replace(s, key_length=s.query_length, key_heads=s.heads)
                for s in shapes
            ]
    return [
        Group(
            shape,
            mask,
            tuple(families or (() if i else _MORE.get(mask, ())) or _FEW),
        )
        for i, shape in enumerate(dict.fromkeys(shapes))
        for mask in (masks or (("full", "causal") if i else MASKS))
    ]


def ragged(
    groups: Sequence[Group], shards: int = 1, *, takes_scale: bool = False
) -> list[Group]:
    """What masks of the first shape are looked at beside, since a length that tiles
    divide hides what the last one does, a window in one tile what others do, the usual
    scale that another is not taken, and as many queries as keys which is which.

    Lengths that no tile divides, but the devices that they are cut between; a window
    that is wider; a batch entry without keys; another scale, if it `takes_scale`; under
    a causal mask and a bias fewer queries than keys, if any of the groups has so. One
    family, and no cells of a report.
    """
    shape, parts = groups[0].shape, 2 * shards if shards > 1 else 1
    length = min(shape.key_length, _ENOUGH)
    length = (length - min(_SHORTER, length // 4)) // parts * parts
    fewer = 2 * length // 3 // parts * parts
    if not length:
        return []
    unequal = any(x.shape.query_length != x.shape.key_length for x in groups)
    masks = {x.mask for x in groups if x.shape == shape}
    found = []
    for made_of, mask, may_differ in _RAGGED:
        # One batch entry without keys is nothing to measure.
        if made_of not in masks or (mask == NO_KEYS and shape.batch == 1):
            continue
        queries = fewer if may_differ and unequal and fewer else length
        lengths = {"query_length": queries, "key_length": length}
        of = dataclasses.replace(shape, **lengths), mask, _FEW[:1]
        found.append(Group(*of, scale_factor=_OTHER_SCALE if takes_scale else 1.0))
    return [x for x in found if x not in groups]
