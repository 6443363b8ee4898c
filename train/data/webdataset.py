"""WebDataset tar shards with random access.

A sample is the members of a shard that share a key, the path up to the first dot of
the file name: an image and a caption, `.txt` or else `.json` (member "caption" or
"text"). Every shard is scanned once when opened, headers only; afterwards a sample is
two reads at known offsets, so any order costs the same and a run resumes exactly.
"""

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64

from train.data.images import Images, SampleError, find_shards, parse_caption
from train.data.source import DataError

_IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp")
# Columns of the index: the shard, then offset and size of each part; -1 is missing.
_SHARD, _IMAGE, _TEXT, _JSON = 0, 1, 3, 5
_COLUMNS = 7


@dataclass(frozen=True)
class _Shards:
    paths: tuple[Path, ...]
    keys: tuple[str, ...]
    index: Int64[np.ndarray, "n 7"]

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        return f"{self.paths[self.index[index, _SHARD]].name}:{self.keys[index]}"

    def read(self, index: int) -> tuple[bytes, str]:
        row = self.index[index]
        if row[_IMAGE] < 0 and row[_TEXT] < 0 and row[_JSON] < 0:
            raise SampleError("the shard is cut off or damaged from here on")
        if row[_IMAGE] < 0:
            raise SampleError("no image")
        column = _TEXT if row[_TEXT] >= 0 else _JSON
        if row[column] < 0:
            raise SampleError("no caption (.txt or .json)")
        path = self.paths[row[_SHARD]]
        try:
            with open(path, "rb", buffering=0) as file:
                image, text = (
                    os.pread(file.fileno(), row[k + 1], row[k])
                    for k in (_IMAGE, column)
                )
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        if len(image) < row[_IMAGE + 1] or len(text) < row[column + 1]:
            raise SampleError("the shard is cut off inside this sample")
        return image, parse_caption(text, column == _JSON)


def _scan(path: Path, shard: int) -> tuple[list[str], list[list[int]]]:
    """Keys and index rows of one shard, in the order of their first member."""
    rows: dict[str, list[int]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            try:
                for member in tar:
                    if member.isfile():
                        _enter(rows, member, shard)
            except tarfile.TarError:
                pass  # Cut off inside a member; seen again below.
            end = tar.offset
    except tarfile.TarError as error:
        raise DataError(
            f"cannot read {path}: not an uncompressed tar file ({error})"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not rows:
        raise DataError(f"no samples in {path}: no images and no captions")
    # tarfile takes a damaged header for the end of the archive and says nothing. A
    # whole archive ends in a block of zeros.
    with open(path, "rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            rows[f"byte {end}"] = [shard] + [-1] * (_COLUMNS - 1)
    return list(rows), list(rows.values())


def _enter(rows: dict[str, list[int]], member: tarfile.TarInfo, shard: int) -> None:
    folder, _, file = member.name.rpartition("/")
    stem, _, extension = file.partition(".")
    extension = extension.lower()
    if extension in _IMAGE_EXTENSIONS:
        column = _IMAGE
    elif extension == "txt":
        column = _TEXT
    elif extension == "json":
        column = _JSON
    else:
        return
    key = f"{folder}/{stem}" if folder else stem
    row = rows.setdefault(key, [shard] + [-1] * (_COLUMNS - 1))
    row[column : column + 2] = [member.offset_data, member.size]


def open_webdataset(
    path: str, resolution: int, split: Literal["train", "val"]
) -> Images:
    """Opens tar shards: a folder of them, one file, or a glob pattern.

    Raises:
        DataError: no shards, one that is no uncompressed tar file or holds no
            samples, or no sample is whole.
    """
    paths = find_shards(path, ".tar")
    keys: list[str] = []
    rows: list[list[int]] = []
    for shard, file in enumerate(paths):
        new_keys, new_rows = _scan(file, shard)
        keys += new_keys
        rows += new_rows
    records = _Shards(tuple(paths), tuple(keys), np.array(rows, np.int64))
    return Images(records, resolution, split)
