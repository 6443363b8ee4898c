"""Parquet files in the layout of Hugging Face data sets, read through polars.

Column `image` is the encoded image: a struct with a member `bytes`, or binary. The
caption is column `text` or else `caption`. One row is read by decoding the row group
it lies in, so files should have row groups of about 100 rows, as that library writes
for images: random reads take milliseconds there and tens of them at 2000 rows.
"""

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from train.data.images import Images, SampleError, find_shards
from train.data.source import DataError


@dataclass(frozen=True)
class _File:
    path: Path
    image_is_struct: bool
    caption: str
    first: int  # number of the file's first row in the data set
    rows: int


@dataclass(frozen=True)
class _Rows:
    files: tuple[_File, ...]

    def __len__(self) -> int:
        return self.files[-1].first + self.files[-1].rows

    def _locate(self, index: int) -> tuple[_File, int]:
        place = bisect_right(self.files, index, key=lambda file: file.first) - 1
        file = self.files[place]
        return file, index - file.first

    def name(self, index: int) -> str:
        file, row = self._locate(index)
        return f"{file.path.name}[{row}]"

    def read(self, index: int) -> tuple[bytes, str]:
        import polars as pl

        file, row = self._locate(index)
        image = pl.col("image")
        if file.image_is_struct:
            image = image.struct.field("bytes")
        columns = [image.alias("image"), pl.col(file.caption).alias("caption")]
        try:
            table = pl.scan_parquet(file.path).select(columns).slice(row, 1).collect()
        except FileNotFoundError as error:
            raise DataError(f"cannot read {file.path}: it is gone") from error
        # Damaged pages make polars raise one or the other.
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise SampleError("the row group is damaged") from error
        data, caption = table.row(0)
        if data is None:
            raise SampleError("no image")
        if caption is None or not caption.strip():
            raise SampleError("the caption is empty")
        return data, caption.strip()


def _open_file(path: Path, first: int) -> _File:
    import polars as pl

    try:
        table = pl.scan_parquet(path)
        schema = table.collect_schema()
        rows = table.select(pl.len()).collect().item()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"cannot read {path}: {reason}") from error
    image = schema.get("image")
    is_struct = isinstance(image, pl.Struct) and any(
        field.name == "bytes" and field.dtype == pl.Binary for field in image.fields
    )
    if not is_struct and image != pl.Binary:
        raise DataError(
            f"{path} has no column 'image' of bytes; its columns are "
            f"{', '.join(schema)}"
        )
    captions = [name for name in ("text", "caption") if schema.get(name) == pl.String]
    if not captions:
        raise DataError(
            f"{path} has no text column 'text' or 'caption'; its columns are "
            f"{', '.join(schema)}"
        )
    return _File(path, is_struct, captions[0], first, rows)


def open_parquet(path: str, resolution: int, split: Literal["train", "val"]) -> Images:
    """Opens Parquet files: a folder of them, one file, or a glob pattern.

    Raises:
        DataError: no files, one that cannot be read or lacks the columns, or no row
            is whole.
    """
    files: list[_File] = []
    first = 0
    for file in find_shards(path, ".parquet"):
        files.append(_open_file(file, first))
        first += files[-1].rows
    return Images(_Rows(tuple(files)), resolution, split)
