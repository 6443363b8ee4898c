"""Rendered shapes with exact captions: the data set that needs no download.

Every example is a pure function of (seed, split, index), so any process can make
any example, and whether a generated image satisfies its caption can be checked by
machine (`score.py`).
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt8

from train.data.source import DataError, Example

Family = Literal["pos", "rel", "cnt"]
Split = Literal["train", "val", "novel"]

# Corners of the RGB cube: the largest margin for nearest-colour reading.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "magenta": (1, 0, 1),
    "cyan": (0, 1, 1),
}
# Half width and half height over the nominal radius; chosen so that areas are alike
# and a shape cannot be told by its size.
SHAPES: dict[str, tuple[float, float]] = {
    "circle": (1.0, 1.0),
    "square": (0.86, 0.86),
    "diamond": (1.1, 1.1),
    "cross": (1.0, 1.0),
    "triangle": (1.1, 0.92),
}
NUMBERS = {2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
PLACES = (
    "at the top left",
    "at the top right",
    "at the bottom left",
    "at the bottom right",
    "in the center",
)
PALETTE = np.array(list(COLOURS.values()), np.float32)

_FAMILIES: tuple[Family, ...] = get_args(Family)
_SPLITS: tuple[Split, ...] = get_args(Split)
_COLOUR_NAMES = tuple(COLOURS)
_SHAPE_NAMES = tuple(SHAPES)
_CROSS_ARM = 0.33  # half width of a cross's arms over its radius
_OBJECTS = 4  # the most objects in a scene
_DRAWS = 20  # uniform numbers a scene: 6 choices, 3 for each object, 2 spare

# Colour x shape pairs; a fixed sixth never occurs in `train` and `val`.
_PAIRS = np.array([(c, s) for c in range(6) for s in range(5)], np.int64)
_IS_NOVEL = (_PAIRS[:, 0] + 2 * _PAIRS[:, 1]) % 6 == 0
_CELLS = np.array([(0.26, 0.26), (0.74, 0.26), (0.26, 0.74), (0.74, 0.74)])
_CELL_ORDERS = np.array(
    [(a, b, c, 6 - a - b - c) for a in range(4) for b in range(4) for c in range(4)
     if len({a, b, c}) == 3]
)  # fmt: skip
_PLACE_CENTRES = np.array(
    [(0.28, 0.28), (0.72, 0.28), (0.28, 0.72), (0.72, 0.72), (0.5, 0.5)]
)


def plural(shape: str) -> str:
    return shape + ("es" if shape == "cross" else "s")


def pair_is_novel(colour: str, shape: str) -> bool:
    """Whether the pair is kept out of `train` and `val`."""
    return (_COLOUR_NAMES.index(colour) + 2 * _SHAPE_NAMES.index(shape)) % 6 == 0


def signed_distance(
    shape: str,
    x: Float32[np.ndarray, "..."],
    y: Float32[np.ndarray, "..."],
    radius: Float32[np.ndarray, "..."],
) -> Float32[np.ndarray, "..."]:
    """Distance to the outline, negative inside, in the units of the arguments.

    `x` points right and `y` down from the centre of the shape's bounding box. Near
    outer corners the distance is a lower bound (the largest over the bounding
    lines), which is all that anti-aliasing needs. Only + - * / abs min max and
    square root: the same bits on every machine.
    """
    x = np.abs(x)
    if shape == "circle":
        return np.sqrt(x * x + y * y) - radius
    if shape == "square":
        return np.maximum(x, np.abs(y)) - np.float32(0.86) * radius
    if shape == "diamond":
        return (x + np.abs(y) - np.float32(1.1) * radius) / np.sqrt(np.float32(2))
    if shape == "cross":
        y = np.abs(y)
        bar = np.float32(_CROSS_ARM) * radius
        return np.maximum(np.maximum(x, y) - radius, np.minimum(x, y) - bar)
    # Triangle, apex up: its base, and its right side by the symmetry in x. The side
    # runs from (0, -0.92 r) to (1.1 r, 0.92 r), so its normal is (1.84, -1.1).
    width, height = np.float32(1.1), np.float32(0.92)
    length = np.sqrt(4 * height * height + width * width)
    side = (2 * height * x - width * (y + height * radius)) / length
    return np.maximum(y - height * radius, side)


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes; slots of `colour` and so on beyond `count` are unused.

    Positions and radii are in units of the canvas, `y` pointing down. `detail` is
    the place (`pos`) or relation (`rel`).
    """

    family: Int64[np.ndarray, " B"]
    detail: Int64[np.ndarray, " B"]
    count: Int64[np.ndarray, " B"]
    colour: Int64[np.ndarray, "B 4"]
    shape: Int64[np.ndarray, "B 4"]
    x: Float64[np.ndarray, "B 4"]
    y: Float64[np.ndarray, "B 4"]
    radius: Float64[np.ndarray, "B 4"]


def render(scenes: Scenes, resolution: int) -> UInt8[np.ndarray, "B R R 3"]:
    """Anti-aliased objects on black, later objects over earlier ones.

    Coverage of a pixel is clip(1/2 - d, 0, 1), d the signed distance of its centre in
    pixels. FP32 throughout, rounded to bytes once.
    """
    batch = len(scenes.family)
    canvas = np.zeros((batch, resolution, resolution, 3), np.float32)
    for slot in range(_OBJECTS):
        for index, name in enumerate(SHAPES):
            rows = np.flatnonzero(
                (scenes.count > slot) & (scenes.shape[:, slot] == index)
            )
            if rows.size:
                _paint(canvas, rows, name, slot, scenes)
    return np.floor(canvas * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def _paint(
    canvas: Float32[np.ndarray, "B R R 3"],
    rows: Int64[np.ndarray, " b"],
    name: str,
    slot: int,
    scenes: Scenes,
) -> None:
    """Paints object `slot` of the scenes in `rows`, all of one shape, in place."""
    resolution = canvas.shape[1]
    radius = scenes.radius[rows, slot] * resolution
    centre_x = scenes.x[rows, slot] * resolution
    centre_y = scenes.y[rows, slot] * resolution
    # Only a window around each object is touched. Its size is fixed (no radius is
    # above 0.2), so that an image does not depend on its neighbours in the batch.
    window = min(resolution, int(2 * 1.1 * 0.2 * resolution) + 4)
    px = _window(centre_x, window, resolution)
    py = _window(centre_y, window, resolution)
    distance = signed_distance(
        name,
        (px + 0.5 - centre_x[:, None]).astype(np.float32)[:, None, :],
        (py + 0.5 - centre_y[:, None]).astype(np.float32)[:, :, None],
        radius.astype(np.float32)[:, None, None],
    )
    cover = np.clip(np.float32(0.5) - distance, 0, 1)[..., None]
    colour = PALETTE[scenes.colour[rows, slot]][:, None, None, :]
    where = (rows[:, None, None], py[:, :, None], px[:, None, :])
    canvas[where] = canvas[where] * (1 - cover) + colour * cover


def _window(
    centre: Float64[np.ndarray, " b"], window: int, resolution: int
) -> Int64[np.ndarray, "b W"]:
    """Indices of the `window` pixels around each centre, kept inside the canvas."""
    first = np.clip(np.floor(centre) - window // 2, 0, resolution - window)
    return first.astype(np.int64)[:, None] + np.arange(window)


def _choose(u: Float64[np.ndarray, " B"], n) -> Int64[np.ndarray, " B"]:
    return (u * n).astype(np.int64)


def _pair_tables(
    allowed: Bool[np.ndarray, " 30"],
) -> tuple[
    Int64[np.ndarray, "n 2"], Int64[np.ndarray, "6 n 2"], Int64[np.ndarray, " 6"]
]:
    """Allowed pairs; and for each colour, those of another colour and their number."""
    pairs = _PAIRS[allowed]
    others = np.zeros((6, *pairs.shape), np.int64)
    counts = np.zeros(6, np.int64)
    for colour in range(6):
        rest = pairs[pairs[:, 0] != colour]
        others[colour, : len(rest)] = rest
        counts[colour] = len(rest)
    return pairs, others, counts


class Shapes:
    """Scenes of three families, as many as one could ever train on.

    `pos`: "a red circle at the top left", "a red circle in the center";
    `rel`: "a red circle left of a blue square", two colours that differ;
    `cnt`: "three red circles"; `all`: the three in equal parts.

    Splits: `val` follows the distribution of `train` with random numbers of its own;
    `novel` uses only the 5 of 30 colour-shape pairs that the other two never show.

    Raises:
        DataError: fewer than 16 pixels a side, a negative seed, or no such family or
            split.
    """

    def __init__(
        self,
        resolution: int,
        family: Family | Literal["all"],
        split: Split,
        seed: int,
    ):
        if resolution < 16:
            raise DataError(f"shapes need a resolution of 16 or more, not {resolution}")
        if family not in (*_FAMILIES, "all"):
            raise DataError(f"no shapes family {family!r}; pos, rel, cnt or all")
        if split not in _SPLITS:
            raise DataError(f"shapes have no split {split!r}; train, val or novel")
        if seed < 0:
            raise DataError(f"the seed of shapes must not be negative, not {seed}")
        self.resolution = resolution
        self.family = family
        self.split = split
        self.seed = seed
        self._tables = _pair_tables(_IS_NOVEL if split == "novel" else ~_IS_NOVEL)

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int, /) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int], /) -> list[Example]:
        scenes = self.scenes(indices)
        images = render(scenes, self.resolution)
        return [
            {"image": image, "caption": caption}
            for image, caption in zip(images, captions(scenes), strict=True)
        ]

    def _uniform(self, indices: list[int]) -> Float64[np.ndarray, "B 20"]:
        # Philox is stable across numpy versions; the methods of Generator are not.
        # The index sits in the second counter word: a draw advances the first one,
        # so with the index there neighbours would share their random numbers.
        split = _SPLITS.index(self.split)
        raw = [
            np.random.Philox(key=self.seed, counter=[0, i, split, 0]).random_raw(_DRAWS)
            for i in indices
        ]
        return (np.stack(raw) >> np.uint64(11)) * 2.0**-53

    def scenes(self, indices: list[int]) -> Scenes:
        for i in indices:
            if not 0 <= i < len(self):
                raise IndexError(f"shapes have no example {i}")
        u = self._uniform(indices)
        pairs, others, counts = self._tables
        if self.family == "all":
            family = _choose(u[:, 0], 3)
        else:
            family = np.full(len(u), _FAMILIES.index(self.family))
        pos, rel, cnt = (family == k for k in range(3))

        first = pairs[_choose(u[:, 1], len(pairs))]
        other = others[first[:, 0], _choose(u[:, 2], counts[first[:, 0]])]
        objects = np.repeat(first[:, None], _OBJECTS, axis=1)
        objects[rel, 1] = other[rel]

        detail = np.where(pos, _choose(u[:, 3], len(PLACES)), _choose(u[:, 3], 4))
        count = np.where(cnt, 2 + _choose(u[:, 4], 3), np.where(rel, 2, 1))
        cells = _CELLS[_CELL_ORDERS[_choose(u[:, 5], len(_CELL_ORDERS))]]

        ux, uy, ur = np.moveaxis(u[:, 6:18].reshape(-1, _OBJECTS, 3), 2, 0)
        jitter = 2 * np.stack([ux, uy], axis=-1) - 1
        centre = cells + 0.03 * jitter
        centre[pos, 0] = _PLACE_CENTRES[detail[pos]] + 0.05 * jitter[pos, 0]
        # A relation: 0.22..0.30 against 0.70..0.78 along its axis, 0.35..0.65 across.
        near, far = 0.22 + 0.08 * ux[:, :2], 0.70 + 0.08 * ux[:, :2]
        first_is_near = np.isin(detail, (0, 2))[:, None] == np.array([True, False])
        along = np.where(first_is_near, near, far)
        across = 0.35 + 0.30 * uy[:, :2]
        horizontal = (detail < 2)[:, None]
        pair_centre = np.stack(
            [np.where(horizontal, along, across), np.where(horizontal, across, along)],
            axis=-1,
        )
        centre[rel, :2] = pair_centre[rel]

        low = np.where(pos, 0.15, np.where(rel, 0.14, 0.13))[:, None]
        high = np.where(pos, 0.20, np.where(rel, 0.19, 0.17))[:, None]
        return Scenes(
            family=family,
            detail=detail,
            count=count,
            colour=objects[:, :, 0],
            shape=objects[:, :, 1],
            x=centre[:, :, 0],
            y=centre[:, :, 1],
            radius=low + (high - low) * ur,
        )


def captions(scenes: Scenes) -> list[str]:
    """The sentence that each scene satisfies."""
    result = []
    for i in range(len(scenes.family)):
        colours = [_COLOUR_NAMES[k] for k in scenes.colour[i]]
        shapes = [_SHAPE_NAMES[k] for k in scenes.shape[i]]
        family = _FAMILIES[scenes.family[i]]
        if family == "pos":
            text = f"a {colours[0]} {shapes[0]} {PLACES[scenes.detail[i]]}"
        elif family == "rel":
            relation = RELATIONS[scenes.detail[i]]
            text = f"a {colours[0]} {shapes[0]} {relation} a {colours[1]} {shapes[1]}"
        else:
            text = f"{NUMBERS[int(scenes.count[i])]} {colours[0]} {plural(shapes[0])}"
        result.append(text)
    return result
