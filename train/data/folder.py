"""A folder of images, each with its caption in a file of the same stem.

`cat.jpg` goes with `cat.txt` (UTF-8 text) or else `cat.json` (member "caption" or
"text"). Sub-folders are read too; samples are ordered by path.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from train.data.images import Images, SampleError, parse_caption
from train.data.source import DataError

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True)
class _Files:
    root: Path
    samples: tuple[str, ...]  # images, and captions that have none; relative paths

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples[index]

    def read(self, index: int) -> tuple[bytes, str]:
        path = self.root / self.samples[index]
        if path.suffix.lower() not in _IMAGE_SUFFIXES:
            raise SampleError("no image of the same name")
        image = _read(path)
        for suffix in (".txt", ".json"):
            beside = path.with_suffix(suffix)
            if beside.is_file():
                return image, parse_caption(_read(beside), suffix == ".json")
        raise SampleError("no .txt or .json of the same name")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, PermissionError) as error:
        raise SampleError(f"cannot open {path.name}: {error.strerror}") from error
    except OSError as error:
        # A failing disk is no property of the sample: skipping would not repeat.
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def open_folder(path: str, resolution: int, split: Literal["train", "val"]) -> Images:
    """Opens a folder of captioned images.

    Raises:
        DataError: there is no such folder, it cannot be listed, it holds no images,
            or no sample is whole.
    """
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"no folder at {path}")

    def fail(error: OSError):
        raise DataError(f"cannot list {error.filename}: {error.strerror}")

    images: list[str] = []
    texts: list[str] = []
    for folder, _, files in os.walk(root, onerror=fail):
        for file in files:
            name = (Path(folder) / file).relative_to(root).as_posix()
            if name.lower().endswith(_IMAGE_SUFFIXES):
                images.append(name)
            elif name.endswith(".txt"):
                texts.append(name)
    if not images:
        raise DataError(f"no images ({' '.join(_IMAGE_SUFFIXES)}) in {path}")
    stems = {os.path.splitext(name)[0] for name in images}
    orphans = [name for name in texts if os.path.splitext(name)[0] not in stems]
    return Images(_Files(root, tuple(sorted(images + orphans))), resolution, split)
