"""Measurements and findings as rows of a file, and back."""

import dataclasses
from typing import Any

from attn_jax.audit.error import Errors
from attn_jax.audit.finding import Finding
from attn_jax.audit.measure import Measured
from attn_jax.store import Row

# By result.
Found = dict[str, Measured]


def rows_of(found: Found) -> dict[str, Row]:
    return {
        tensor: m._asdict() | {"errors": dataclasses.asdict(m.errors)}
        for tensor, m in found.items()
    }


def measured_of(rows: dict[str, Row]) -> Found:
    return {
        tensor: Measured(**row)._replace(errors=Errors(**row["errors"]))
        for tensor, row in rows.items()
    }


def found_of(rows: list[Row]) -> dict[str, Found]:
    """By family."""
    return {row["family"]: measured_of(row["found"]) for row in rows}


def findings_of(rows: list[Row]) -> list[Finding]:
    return [finding_of(x) for row in rows for x in row["findings"]]


def finding_of(row: Row) -> Finding:
    """A file has no tuples."""
    plain: dict[str, Any] = dict(row)
    plain |= {name: tuple(row[name]) for name in ("tensors", "where")}
    return Finding(**plain)
