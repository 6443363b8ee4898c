"""What the terminal's table and the page make of a report's numbers and names."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from attn_jax.audit.judge import WORSE
from attn_jax.audit.problem import TENSORS
from attn_jax.audit.raised import printable
from attn_jax.audit.report import Attribution, Cell, Probe, Report

# Of squared error; a step below it is not named.
_LEAST_SHARE = 0.005


class Worst(NamedTuple):
    """The largest error of some cells, in units; NaN is the worst of all."""

    units: float
    degenerate: bool

    def __str__(self) -> str:
        return figure(self.units) + "*" * self.degenerate


def figure(x: float | int | None) -> str:
    """A number in at most nine characters; "" for None."""
    if x is None:
        return ""
    size = abs(x)
    if not math.isfinite(x) or x == 0:
        return f"{x + 0.0:.0f}"  # Never "-0".
    if not 0.01 <= size < 9999.5:
        mantissa, exponent = f"{x:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{x:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(length - 2, 0)] + ".."


def tensors(names: Iterable[str]) -> list[str]:
    """Each name once: those of `TENSORS` in their order, then others as they come."""
    found = dict.fromkeys(names)
    return [x for x in TENSORS if x in found] + [x for x in found if x not in TENSORS]


def tensors_of(cells: Iterable[Cell]) -> list[str]:
    return tensors(tensor for cell in cells for tensor in cell.errors)


def worst[Key: Hashable](
    cells: Iterable[Cell], by: Callable[[Cell], Key]
) -> dict[Key, dict[str, Worst]]:
    """The worst of each tensor over the cells of a group, in the cells' order.

    A group without a measured cell is there, empty.
    """
    groups: dict[Key, dict[str, Worst]] = {}
    for cell in cells:
        group = groups.setdefault(by(cell), {})
        for tensor, errors in cell.errors.items():
            new = Worst(errors["units"], errors["degenerate"])
            if tensor not in group or _weight(new) > _weight(group[tensor]):
                group[tensor] = new
    return groups


def _weight(x: Worst) -> tuple[bool, float]:
    return math.isnan(x.units), x.units


def counts(cells: Iterable[Cell]) -> dict[str, int]:
    """Cells by status, in the order of the first of each."""
    found: dict[str, int] = {}
    for cell in cells:
        found[cell.status] = found.get(cell.status, 0) + 1
    return found


def problems(report: Report) -> str:
    """How many there are, by status, and how many were looked at that have no errors of
    their own in the report."""
    found = ", ".join(f"{n} {status}" for status, n in counts(report.cells).items())
    if beside := len(report.settings.get("beside", ())):
        found += f", {beside} more looked at, {len(report.cells) + beside} in all"
    return found


def two_times(cells: Iterable[Cell]) -> tuple[float, str, Cell] | None:
    """The largest ratio of the two-times rule, its tensor and its cell, or None; but
    those where a plain implementation happens to be exact (`beyond_two_times`)."""
    found = [
        (ratio, tensor, cell)
        for cell in cells
        for tensor, errors in cell.errors.items()
        if (ratio := errors["two_times_rule"]) is not None and not math.isinf(ratio)
    ]
    return max(found, key=lambda x: (math.isnan(x[0]), x[0]), default=None)


def beyond_two_times(cell: Cell) -> bool:
    """Whether it has an error where a plain implementation happens to be exact."""
    ratios = (errors["two_times_rule"] for errors in cell.errors.values())
    return any(ratio is not None and math.isinf(ratio) for ratio in ratios)


def shape(cell: Cell) -> str:
    """B, T, S, N, K, H in words; keys and key heads where they differ."""
    lengths, heads = f"{cell.query_length}", f"{cell.heads}"
    if cell.key_length != cell.query_length:
        lengths += f" queries, {cell.key_length}"
    if cell.key_heads != cell.heads:
        heads += f" query, {cell.key_heads} key"
    return f"{lengths} keys, {heads} heads of {cell.head_dim}, batch {cell.batch}"


def attributed(rows: Iterable[Attribution]) -> dict[str, list[Attribution]]:
    """Rows by tensor, the largest share first."""
    rows = list(rows)
    return {
        tensor: sorted(
            (row for row in rows if row["tensor"] == tensor),
            key=lambda row: (math.isnan(row["share"]), -row["share"]),
        )
        for tensor in tensors(row["tensor"] for row in rows)
    }


def shares(rows: Iterable[Attribution]) -> list[Attribution]:
    """Of the steps that cost something, or of which it is not known (NaN). Beside a
    larger error, chance alone makes the others a little dearer or cheaper."""
    return [row for row in rows if row["step"] and not row["share"] < _LEAST_SHARE]


def verdict(report: Report) -> str:
    """One line: the target and what is to be thought of it."""
    says: str = report.verdict
    if report.verdict == "not taken":
        says = "nothing was measured"
        if any(cell.status == "measured" for cell in report.cells):
            says += (
                f" of the first shape, {report.cells[0].sizes}, which probes, changes "
                "and most problems are of: give one that it takes first (--shapes)"
            )
    return f"{printable(report.target)}: {says}"


def measured_on(report: Report) -> str:
    """Device, JAX and day, as far as the report has them: "NVIDIA H200, JAX 0.11.2,
    2026-11-28"."""
    known = report.environment
    jax, date = known.get("jax"), str(known.get("date", "")).partition("T")[0]
    said = (known.get("device"), jax and f"JAX {jax}", date)
    return ", ".join(str(x) for x in said if x)


def caution(report: Report) -> str:
    """What else than the target may be to blame; "" if nothing is known.

    A sum of n numbers in 16 bits, one after the other, is rounded n times. Where they
    do not cancel hardly a sum on the way is larger than the last, which makes sqrt(n)
    units at most, about.
    """
    cells = [cell for cell in report.cells if cell.dtype == "bfloat16"]
    worse = any(finding.kind == WORSE for finding in report.findings)
    if report.environment.get("platform") != "cpu" or not worse or not cells:
        return ""
    most = max(_terms(cell) for cell in cells) ** 0.5
    return (
        "On a CPU XLA adds up some sums of BF16 numbers in BF16: what is worse than "
        f"its algorithm allows may be XLA's, where it is below about {figure(most)} "
        "units (sqrt(n) of n terms) or sums cancel; audit on the device that you train "
        "on."
    )


def _terms(cell: Cell) -> int:
    """Of the longest sum of a result: over keys, or over queries and query heads."""
    group = cell.heads // cell.key_heads
    return max(cell.key_length, group * cell.query_length)


def merging(report: Report) -> str:
    """What merging parts shows, and how errors grow with their number W."""
    grows = ", ".join(
        f"{printable(tensor)} W^{figure(exponent)}"
        for tensor, exponent in report.growth.items()
    )
    says = printable(report.merging)
    return f"{says} (error ~ {grows})." if grows else says


def probed(probe: Probe) -> str:
    """What a probe measured and may measure at most, with the unit."""
    unit = f" {probe['unit']}" if probe["unit"] else ""
    if probe["bound"] is None:
        return f"{figure(probe['measured'])}{unit}"
    return f"{figure(probe['measured'])}{unit}, at most {figure(probe['bound'])}"
