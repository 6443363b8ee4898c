"""Which problems an audit measures."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from attn_jax.audit import attribution
from attn_jax.audit.inputs import Shape
from attn_jax.audit.problem import MASKS, Problem


class Group(NamedTuple):
    """Problems of one compiled program: families of inputs of a shape under a mask."""

    shape: Shape
    mask: str
    families: tuple[str, ...]

    def problems(self, dtype: str) -> list[Problem]:
        return [Problem(self.shape, dtype, name, self.mask) for name in self.families]

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
        )


# Where kernels differ most, and what breaks them.
FAMILIES = (*attribution.FAMILIES, "lse-130", "repeated_max", "zero_k_one_v")
_FEW = ("normal", "uniform")
# By mask, of the first shape. Below -100 what is hidden by a large number shows.
_MORE = {"full": FAMILIES, "causal": (*_FEW, "lse-130")}
# The first is measured under all masks, and compared with recipes.
_ON_A_CPU = (
    Shape(2, 256, 256, 4, 2, 64),
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


# Under masks that are tried at one length beside, by that.
_RAGGED = {
    "window": "wide window",
    "lengths": "lengths",
    "packed": "packed",
    "bias": "bias",
}
# What a length is to be shorter by, so that the last tile of any size is a partial one,
# and keys that are enough for several tiles.
_SHORTER, _ENOUGH = 27, 1024


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


def ragged(groups: Sequence[Group], shards: int = 1) -> list[Group]:
    """What masks of the first shape are looked at beside, as a length that tiles divide
    hides what the last one does, and a window in one tile what others do: as many keys
    as queries, which no tile divides, but the devices that they are cut between; a
    window that is wider. One family, and no cells of a report."""
    shape, parts = groups[0].shape, 2 * shards if shards > 1 else 1
    length = min(shape.key_length, _ENOUGH)
    length = (length - min(_SHORTER, length // 4)) // parts * parts
    if not length:
        return []
    square = dataclasses.replace(shape, query_length=length, key_length=length)
    masks = dict.fromkeys(x.mask for x in groups if x.shape == shape)
    found = [Group(square, _RAGGED[x], _FEW[:1]) for x in masks if x in _RAGGED]
    return [x for x in found if x not in groups]
