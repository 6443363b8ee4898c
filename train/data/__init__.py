"""Captioned images: sources, tokenizers, and batches in a reproducible order."""

from typing import Literal, Protocol, runtime_checkable

from train.data.digits import Digits
from train.data.folder import open_folder
from train.data.parquet import open_parquet
from train.data.shapes import Family, Shapes
from train.data.source import DataError, Source
from train.data.tokenizer import ByteTokenizer, Tokenizer, WordTokenizer
from train.data.webdataset import open_webdataset

__all__ = ["DataConfig", "DataError", "make_tokenizer", "open_source"]

_READERS = {
    "folder": open_folder,
    "webdataset": open_webdataset,
    "parquet": open_parquet,
}


@runtime_checkable
class DataConfig(Protocol):
    """The settings that choose a data set."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str | None: ...

    @property
    def family(self) -> Family | Literal["all"]: ...

    @property
    def resolution(self) -> int: ...

    @property
    def seed(self) -> int: ...


def open_source(config: DataConfig, split: Literal["train", "val", "novel"]) -> Source:
    """Opens `shapes`, `digits`, `folder`, `webdataset` or `parquet`.

    `novel` exists for `shapes` only. The last three read `config.path`, whose format
    their modules describe.

    Raises:
        DataError: the data cannot be read, or there is no such data set or split.
    """
    if config.name == "shapes":
        return Shapes(config.resolution, config.family, split, config.seed)
    if split == "novel":
        raise DataError(f"data set {config.name!r} has no split 'novel'; shapes has")
    if config.name == "digits":
        return Digits(config.resolution, split)
    if config.name not in _READERS:
        names = ", ".join(("shapes", "digits", *_READERS))
        raise DataError(f"no data set {config.name!r}; choose one of {names}")
    if config.path is None:
        raise DataError(f"data set {config.name!r} needs a path")
    return _READERS[config.name](config.path, config.resolution, split)


def make_tokenizer(name: str, length: int) -> Tokenizer:
    """`byte` (any text) or `word` (the grammar of shapes and digits)."""
    if name == "byte":
        return ByteTokenizer(length)
    if name == "word":
        return WordTokenizer(length)
    raise ValueError(f"no tokenizer {name!r}; byte or word")
