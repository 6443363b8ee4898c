"""Scikit-learn's handwritten digits with captions: a small real data set.

1797 images of 8x8 pixels from the UCI "Optical Recognition of Handwritten Digits"
set, carried inside scikit-learn, so nothing is downloaded.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int64, UInt8
from PIL import Image

from train.data.source import Example

DIGIT_NAMES = (
    *("zero", "one", "two", "three", "four"),
    *("five", "six", "seven", "eight", "nine"),
)
_PREFIX = "a handwritten "
_VAL_EVERY = 5  # every fifth image is held out: 360 for val, 1437 for train


@cache
def _load() -> tuple[UInt8[np.ndarray, "n 8 8"], Int64[np.ndarray, " n"]]:
    # Importing scikit-learn takes seconds; only this data set pays for it.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    # Levels are 0..16; times 255/16 they round to distinct bytes.
    images = np.round(np.reshape(pixels, (-1, 8, 8)) * (255 / 16))
    return images.astype(np.uint8), np.asarray(labels, np.int64)


class Digits:
    """Digits upscaled to `resolution`, white on black: "a handwritten seven".

    Bicubic upscaling, rounded to bytes once. Every fifth image belongs to `val`.
    """

    def __init__(self, resolution: int, split: Literal["train", "val"]):
        images, labels = _load()
        held_out = np.arange(len(labels)) % _VAL_EVERY == 0
        chosen = held_out if split == "val" else ~held_out
        self.resolution = resolution
        self._images = images[chosen]
        self._labels = labels[chosen]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int, /) -> Example:
        size = (self.resolution, self.resolution)
        grey = Image.fromarray(self._images[index]).resize(
            size, Image.Resampling.BICUBIC
        )
        image = np.repeat(np.asarray(grey)[..., None], 3, axis=2)
        caption = _PREFIX + DIGIT_NAMES[self._labels[index]]
        return {"image": image, "caption": caption}


def _features(
    images: UInt8[np.ndarray, "n R R 3"],
) -> Float32[np.ndarray, "n 64"]:
    """Grey 8x8 box averages in [0, 1]."""
    grey = images.mean(axis=3).astype(np.uint8)
    small = [
        np.asarray(Image.fromarray(image).resize((8, 8), Image.Resampling.BOX))
        for image in grey
    ]
    return np.stack(small).reshape(len(small), 64).astype(np.float32) / 255


@cache
def _classifier(resolution: int):
    from sklearn.linear_model import LogisticRegression

    train = Digits(resolution, "train")
    images = np.stack([train[i]["image"] for i in range(len(train))])
    return LogisticRegression(max_iter=1000).fit(_features(images), train._labels)


def digit_agreement(
    images: UInt8[np.ndarray, "n R R 3"], captions: Sequence[str]
) -> list[bool]:
    """Whether a logistic regression reads the captioned digit in each image.

    The classifier is fitted to the `train` split at the same resolution. Its own
    accuracy on `val` (about 0.95) is the ceiling of what this measures.

    Raises:
        ValueError: a caption is not of this data set.
    """
    known = {_PREFIX + name: digit for digit, name in enumerate(DIGIT_NAMES)}
    for caption in captions:
        if caption not in known:
            raise ValueError(f"caption {caption!r} is not 'a handwritten <digit>'")
    wanted = np.array([known[caption] for caption in captions])
    read = _classifier(images.shape[1]).predict(_features(images))
    return (read == wanted).tolist()
