"""Queries that meet keys, as kernels and context parallelism say it to one another."""

from typing import NamedTuple


class Span(NamedTuple):
    """Queries that meet keys from the first on, all of them."""

    first_query: int
    queries: int
    keys: int
