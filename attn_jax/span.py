"""Types by which context parallelism tells kernels which queries meet which keys.

Two more say in which form rows that have met all keys are returned.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Float32, Int32


class Span(NamedTuple):
    """Queries that meet keys from the first on, all of them."""

    first_query: int
    queries: int
    keys: int


class Chosen(NamedTuple):
    """One of some spans, that of the number `which[at]` (both int32); where this is may
    be known on a device alone."""

    spans: tuple[Span, ...]
    which: Int32[Array, " W"]
    at: Int32[Array, ""]

    def fit(self, queries: int, keys: int) -> bool:
        """Whether they are of whole tiles of so many queries, and of keys."""
        return not any(
            span.first_query % queries or span.queries % queries or span.keys % keys
            for span in self.spans
        )


class Ending(NamedTuple):
    """How rows that have met all keys are to be left: O rounded to `dtype`, unless that
    is None, and O in FP32 if `exact`."""

    dtype: Any
    exact: bool


class Ended(NamedTuple):
    """What is left then; None: what was not asked for."""

    out: Float[Array, "B T N D"] | None
    exact: Float32[Array, "B T N D"] | None
    lse: Float32[Array, "B N T"]
