"""Whether an image of `shapes` satisfies its caption, by rule: no network, no chance.

Foreground is where the brightest channel exceeds 1/2. Its 4-connected components of at
least 0.008 R^2 pixels are the objects. An object's colour is the palette colour nearest
to 70 % or more of its pixels. Its shape is the one whose outline, fitted to the
object's bounding box, overlaps best, with an intersection over union above 0.7. Places
and relations compare centres of bounding boxes.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8
from scipy import ndimage

from train.data.shapes import (
    COLOURS,
    NUMBERS,
    PALETTE,
    PLACES,
    RELATIONS,
    SHAPES,
    Family,
    plural,
    signed_distance,
)

type ImageBatch = UInt8[np.ndarray, "n R R 3"] | Float32[np.ndarray, "n R R 3"]

_LEAST_AREA = 0.008
_LEAST_AGREEMENT = 0.7
_LEAST_OVERLAP = 0.7
# Trial outlines: shifts of the centre and changes of the radius in pixels, within the
# half pixel by which a bounding box is off. Objects of few pixels need the finer set.
_FITS = tuple(product((0.0,), (0.0,), (-0.5, 0.0, 0.5)))
_FINE_FITS = tuple(
    product((-0.25, 0.0, 0.25), (-0.25, 0.0, 0.25), (-0.5, -0.25, 0.0, 0.25, 0.5))
)
_FEW_PIXELS = 12  # across
_MARGIN = 1  # pixels around the bounding box, so that overshooting outlines count
_CHUNK = 256  # images at a time, to bound memory
_UNKNOWN = -1

_OBJECT = f"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_POS = re.compile(f"a {_OBJECT} ({'|'.join(PLACES)})")
_REL = re.compile(f"a {_OBJECT} ({'|'.join(RELATIONS)}) a {_OBJECT}")
_CNT = re.compile(
    f"({'|'.join(NUMBERS.values())}) ({'|'.join(COLOURS)}) "
    f"({'|'.join(map(plural, SHAPES))})"
)
_COLOUR_INDEX = {name: index for index, name in enumerate(COLOURS)}
_SHAPE_INDEX = {name: index for index, name in enumerate(SHAPES)}
_SHAPE_INDEX |= {plural(name): index for name, index in _SHAPE_INDEX.items()}


@dataclass(frozen=True)
class Score:
    """What of a caption an image satisfies; `all` is the conjunction."""

    count: bool
    colour: bool
    shape: bool
    place: bool

    @property
    def all(self) -> bool:
        return self.count and self.colour and self.shape and self.place


@dataclass(frozen=True)
class Rate:
    """Successes out of a total, with Wilson's 95 % interval (Wilson 1927)."""

    successes: int
    total: int

    @property
    def rate(self) -> float:
        return self.successes / self.total

    @property
    def interval(self) -> tuple[float, float]:
        n, p, z = self.total, self.rate, 1.959964
        middle = p + z * z / (2 * n)
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        scale = 1 + z * z / n
        return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


@dataclass(frozen=True)
class _Wanted:
    family: Family
    objects: tuple[tuple[int, int], ...]  # colour and shape
    detail: str  # place or relation


@dataclass(frozen=True)
class _Found:
    colour: int
    shape: int
    x: float  # centre over R
    y: float
    area: int


def _pair(colour: str, shape: str) -> tuple[int, int]:
    return _COLOUR_INDEX[colour], _SHAPE_INDEX[shape]


def _parse(caption: str) -> _Wanted:
    if match := _POS.fullmatch(caption):
        return _Wanted("pos", (_pair(match[1], match[2]),), match[3])
    if match := _REL.fullmatch(caption):
        objects = _pair(match[1], match[2]), _pair(match[4], match[5])
        return _Wanted("rel", objects, match[3])
    if match := _CNT.fullmatch(caption):
        number = next(n for n, word in NUMBERS.items() if word == match[1])
        return _Wanted("cnt", (_pair(match[2], match[3]),) * number, "")
    raise ValueError(f"caption {caption!r} is not in the grammar of shapes")


def _third(z: float) -> int:
    # Halfway between the nearest centres that two places allow.
    return 0 if z < 0.39 else 1 if z <= 0.61 else 2


def _place_holds(wanted: _Wanted, objects: Sequence[_Found]) -> bool:
    if wanted.family == "pos":
        where = _third(objects[0].x), _third(objects[0].y)
        corners = {(0, 0): 0, (2, 0): 1, (0, 2): 2, (2, 2): 3, (1, 1): 4}
        return where in corners and PLACES[corners[where]] == wanted.detail
    if wanted.family == "cnt":
        cells = {(found.x < 0.5, found.y < 0.5) for found in objects}
        return len(cells) == len(objects)
    dx, dy = objects[0].x - objects[1].x, objects[0].y - objects[1].y
    if abs(dx) > abs(dy):
        return wanted.detail == ("left of" if dx < 0 else "right of")
    return wanted.detail == ("above" if dy < 0 else "below")


def _judge(wanted: _Wanted, found: Sequence[_Found]) -> Score:
    """The most that holds under any assignment of the largest objects found."""
    number = len(wanted.objects)
    count = len(found) == number
    if len(found) < number:
        return Score(count=False, colour=False, shape=False, place=False)
    largest = sorted(found, key=lambda each: -each.area)[:number]
    orders = permutations(largest) if wanted.family == "rel" else [tuple(largest)]
    scores = []
    for order in orders:
        pairs = list(zip(wanted.objects, order, strict=True))
        scores.append(
            Score(
                count=count,
                colour=all(colour == each.colour for (colour, _), each in pairs),
                shape=all(shape == each.shape for (_, shape), each in pairs),
                place=_place_holds(wanted, order),
            )
        )
    return max(scores, key=lambda s: s.colour + s.shape + s.place)


def _colours(
    pixels: Float32[np.ndarray, "p 3"], owner: Int64[np.ndarray, " p"], number: int
) -> Int64[np.ndarray, " objects"]:
    """The palette colour of each object, or -1 where no colour is clear enough."""
    # |pixel - colour|^2 without the term that all colours share.
    distance = (PALETTE * PALETTE).sum(1) - 2 * pixels @ PALETTE.T
    nearest = distance.argmin(1)
    votes = np.bincount(owner * len(PALETTE) + nearest, minlength=number * len(PALETTE))
    votes = votes.reshape(number, len(PALETTE))
    clear = votes.max(1) >= _LEAST_AGREEMENT * votes.sum(1)
    return np.where(clear, votes.argmax(1), _UNKNOWN)


def _shapes(
    masks: Bool[np.ndarray, "objects W W"],
    width: Float32[np.ndarray, " objects"],
    height: Float32[np.ndarray, " objects"],
    fits: Sequence[tuple[float, float, float]],
) -> Int64[np.ndarray, " objects"]:
    """The shape of each object, or -1; `masks` have a margin before the object."""
    pixel = np.arange(masks.shape[1], dtype=np.float32) + np.float32(0.5 - _MARGIN)
    x = pixel[None, None, :] - width[:, None, None] / 2
    y = pixel[None, :, None] - height[:, None, None] / 2
    area = masks.sum((1, 2))
    best = np.full(len(masks), _LEAST_OVERLAP)
    shape = np.full(len(masks), _UNKNOWN)
    for index, (name, (half_width, half_height)) in enumerate(SHAPES.items()):
        fitted = (width / half_width + height / half_height) / 4
        for dx, dy, dr in np.array(fits, np.float32):
            radius = (fitted + dr)[:, None, None]
            # Foreground is above half coverage, hence inside the outline.
            inside = signed_distance(name, x + dx, y + dy, radius) < 0
            both = (inside & masks).sum((1, 2))
            overlap = both / np.maximum(area + inside.sum((1, 2)) - both, 1)
            better = overlap > best
            best = np.where(better, overlap, best)
            shape = np.where(better, index, shape)
    return shape


def _find(images: Float32[np.ndarray, "n R R 3"]) -> list[list[_Found]]:
    """The objects in each image."""
    resolution = images.shape[1]
    found: list[list[_Found]] = [[] for _ in images]
    # Connected within an image, never from one image to the next.
    structure = np.zeros((3, 3, 3), bool)
    structure[1] = ndimage.generate_binary_structure(2, 1)
    foreground = images.max(3) > 0.5
    labels = np.zeros(foreground.shape, np.int32)
    ndimage.label(foreground, structure, output=labels)
    areas = np.bincount(labels.ravel())
    kept = np.flatnonzero(areas >= _LEAST_AREA * resolution**2)
    kept = kept[kept > 0]
    if not kept.size:
        return found
    boxes = ndimage.find_objects(labels)
    boxes = [boxes[label - 1] for label in kept]
    compact = np.full(len(areas), _UNKNOWN)
    compact[kept] = np.arange(len(kept))
    owner = compact[labels]
    colour = _colours(images[owner >= 0], owner[owner >= 0], len(kept))

    height = np.array([box[1].stop - box[1].start for box in boxes], np.float32)
    width = np.array([box[2].stop - box[2].start for box in boxes], np.float32)
    window = int(max(width.max(), height.max())) + 2 * _MARGIN
    masks = np.zeros((len(kept), window, window), bool)
    for index, box in enumerate(boxes):
        mask = owner[box][0] == index
        rows, columns = mask.shape
        masks[index, _MARGIN : _MARGIN + rows, _MARGIN : _MARGIN + columns] = mask
    shape = _shapes(masks, width, height, _FITS)
    few = np.maximum(width, height) <= _FEW_PIXELS
    if few.any():
        near = _FEW_PIXELS + 2 * _MARGIN
        shape[few] = _shapes(
            masks[few, :near, :near], width[few], height[few], _FINE_FITS
        )

    for index, (image, rows, columns) in enumerate(boxes):
        found[image.start].append(
            _Found(
                colour=int(colour[index]),
                shape=int(shape[index]),
                x=(columns.start + columns.stop) / 2 / resolution,
                y=(rows.start + rows.stop) / 2 / resolution,
                area=int(areas[kept[index]]),
            )
        )
    return found


def score_all(images: ImageBatch, captions: Sequence[str]) -> list[Score]:
    """Scores bytes, or floats in [0, 1] as a sampler returns them, against captions.

    Raises:
        ValueError: a caption outside the grammar, floats outside [0, 1] or not finite
            (clip them: a silent rescaling would hide a broken sampler), or counts that
            differ.
    """
    if len(images) != len(captions):
        raise ValueError(f"{len(images)} images for {len(captions)} captions")
    wanted = [_parse(caption) for caption in captions]
    is_bytes = images.dtype == np.uint8
    if not is_bytes and not np.all((images >= 0) & (images <= 1)):
        raise ValueError("float images must be finite and in [0, 1]; clip them first")
    scores: list[Score] = []
    for start in range(0, len(images), _CHUNK):
        part = images[start : start + _CHUNK].astype(np.float32)
        found = _find(part / 255 if is_bytes else part)
        scores += map(_judge, wanted[start : start + _CHUNK], found)
    return scores


def score(
    image: UInt8[np.ndarray, "R R 3"] | Float32[np.ndarray, "R R 3"], caption: str
) -> Score:
    """Scores one image; see `score_all`."""
    return score_all(image[None], [caption])[0]


def score_batch(images: ImageBatch, captions: Sequence[str]) -> dict[str, Rate]:
    """Rates of `count`, `colour`, `shape`, `place` and `all`.

    Beside them `pos`, `rel` and `cnt`: the rate of `all` within a family, for the
    families among the captions.
    """
    scores = score_all(images, captions)
    parts = {
        "count": [s.count for s in scores],
        "colour": [s.colour for s in scores],
        "shape": [s.shape for s in scores],
        "place": [s.place for s in scores],
        "all": [s.all for s in scores],
    }
    for caption, held in zip(captions, parts["all"], strict=True):
        parts.setdefault(_parse(caption).family, []).append(held)
    return {name: Rate(sum(held), len(held)) for name, held in parts.items()}
