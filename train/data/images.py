"""From stored files to examples: what the readers of user data share.

A reader lists its samples (`Records`); `Images` decodes them, resizes the short side
to the resolution, crops the centre square and passes over what is damaged. Nothing is
flipped, since captions speak of left and right.
"""

import glob
import io
import json
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from train.data.source import DataError, Example

_VAL_EVERY = 50  # every 50th sample, the first included, is held out for `val`
_MOST_SKIPPED = 10_000  # in a row, before the data set is given up


class SampleError(Exception):
    """One sample is missing or damaged; the message is the reason."""


@runtime_checkable
class Records(Protocol):
    """The stored samples of a data set; must not keep open files (it is pickled)."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call the sample in a report."""
        ...

    def read(self, index: int) -> tuple[bytes, str]:
        """The encoded image and its caption, or SampleError."""
        ...


def decode(data: bytes, resolution: int) -> UInt8[np.ndarray, "R R 3"]:
    """Decodes, turns upright, resizes the short side and crops the centre square.

    Raises:
        SampleError: the bytes are no whole 8-bit image in a format Pillow knows.
    """
    try:
        image = Image.open(io.BytesIO(data))
        # Lets the JPEG decoder halve large photographs itself, several times faster.
        image.draft("RGB", (2 * resolution, 2 * resolution))
        # Pillow clips instead of scaling these, which would pass as a white image.
        if image.mode.startswith(("I", "F")):
            raise SampleError(f"pixels of mode {image.mode}, not 8 bits a channel")
        image = ImageOps.exif_transpose(image).convert("RGB")
    except SampleError:
        raise
    except MemoryError:
        raise
    # Decoders raise nearly anything on damaged bytes: SyntaxError, zlib.error, ...
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "not an image"
        raise SampleError(reason) from error
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    square = image.resize(
        (resolution, resolution),
        Image.Resampling.BICUBIC,
        box=(left, top, left + side, top + side),
    )
    return np.asarray(square)


def parse_caption(data: bytes, is_json: bool) -> str:
    """The text of a caption file; of JSON the member "caption" or else "text".

    Raises:
        SampleError: not UTF-8, no such member, or nothing but white space.
    """
    try:
        text = data.decode()
        if is_json:
            members = json.loads(text)
            text = members.get("caption", members.get("text"))
    except (ValueError, AttributeError) as error:
        kind = "a JSON object" if is_json else "UTF-8 text"
        raise SampleError(f"the caption is not {kind}") from error
    if not isinstance(text, str):
        raise SampleError('the JSON has no text under "caption" or "text"')
    if not text.strip():
        raise SampleError("the caption is empty")
    return text.strip()


def find_shards(path: str, suffix: str) -> list[Path]:
    """The files that `path` (a folder, a file or a glob pattern) means, sorted.

    Raises:
        DataError: there are none.
    """
    if Path(path).is_dir():
        found = [p for p in Path(path).rglob(f"*{suffix}") if p.is_file()]
    else:
        found = [Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file()]
    if not found:
        raise DataError(f"no {suffix} file at {path}: give a folder, a file or a glob")
    return sorted(found)


class Images:
    """One split of the stored samples as a source.

    A damaged sample is replaced by the next readable one of the split, whatever
    process or thread asks, and named under the example's `skipped`.

    Raises:
        DataError: the split is empty or nothing at its start can be read.
    """

    def __init__(
        self, records: Records, resolution: int, split: Literal["train", "val"]
    ):
        if len(records) < 2:
            raise DataError("a data set needs two samples or more, one for val")
        every = np.arange(len(records))
        held_out = every % _VAL_EVERY == 0
        self._records = records
        self._indices = every[held_out if split == "val" else ~held_out]
        self.resolution = resolution
        self[0]  # Fails now rather than at the first training step.

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> Example:
        skipped: dict[str, str] = {}
        for attempt in range(min(len(self), _MOST_SKIPPED)):
            record = int(self._indices[(index + attempt) % len(self)])
            try:
                data, caption = self._records.read(record)
                image = decode(data, self.resolution)
            except SampleError as error:
                skipped[self._records.name(record)] = str(error)
                continue
            return {"image": image, "caption": caption, "skipped": skipped}
        name, reason = next(iter(skipped.items()))
        raise DataError(
            f"{len(skipped)} samples in a row cannot be read; the first is {name}: "
            f"{reason}"
        )
