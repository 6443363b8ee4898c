"""The interface that every data set implements."""

from typing import NotRequired, Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import UInt8


class DataError(Exception):
    """The data set cannot be used; the message is one line for the user."""


class Example(TypedDict):
    """One captioned image.

    `skipped` maps the names of damaged samples, passed over to reach this one, to
    the reason; sources that cannot be damaged leave it out.
    """

    image: UInt8[np.ndarray, "R R 3"]
    caption: str
    skipped: NotRequired[dict[str, str]]


@runtime_checkable
class Source(Protocol):
    """Random access to captioned images; `source[i]` depends on `i` alone."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that makes many examples faster together than one by one.

    The method's name is the one Grain and PyTorch use. `source.__getitems__([i, j])`
    equals `[source[i], source[j]]` bit for bit.
    """

    def __getitems__(self, indices: list[int], /) -> list[Example]: ...
