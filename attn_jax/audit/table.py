"""A report on a terminal: in colour with `rich` if that is installed, else plain."""

import io
import itertools
import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple, TextIO, cast

from attn_jax.audit import summary
from attn_jax.audit.finding import HARMLESS
from attn_jax.audit.raised import printable
from attn_jax.audit.report import Merge, Report
from attn_jax.audit.summary import Worst, figure, shortened

WIDTH = 100
_NAME = 24
# A colour up to this many units. Text alone says all that a colour does.
_STYLES = (2, "green"), (10, "yellow"), (math.inf, "red")


class _Piece(NamedTuple):
    text: str
    style: str = ""


def print_report(report: Report, file: TextIO | io.TextIOBase) -> None:
    """Writes verdict, findings, errors and all that failed, in lines of 100 columns.

    Fewer columns on a narrower terminal. Characters that `file` cannot hold are
    written as escapes. Raises OSError if `file` cannot be written.
    """
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    encoding = getattr(file, "encoding", None) or "utf-8"
    lines = [
        [piece._replace(text=_held(piece.text, encoding)) for piece in line]
        for line in _lines(report, min(max(columns, 60), WIDTH))
    ]
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        file.writelines("".join(piece.text for piece in line) + "\n" for line in lines)
        return
    console = Console(file=cast(IO[str], file), width=WIDTH)
    for line in lines:
        text = Text.assemble(*line, overflow="ignore", no_wrap=True)
        console.print(text, crop=False)


def _held(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _lines(report: Report, width: int) -> Iterator[list[_Piece]]:
    for text, style in _head(report):
        yield from _wrapped(text, width, style)
    yield from _grid(report, width)
    for text in itertools.chain(
        _cells(report),
        _attribution(report),
        _probes(report),
        _invariances(report),
        _merges(report),
    ):
        yield from _wrapped(text, width)


def _wrapped(text: str, width: int, style: str = "") -> Iterator[list[_Piece]]:
    lines = textwrap.wrap(
        printable(text), width, subsequent_indent="    ", break_on_hyphens=False
    )
    for line in lines:
        yield [_Piece(line, style)]


def _head(report: Report) -> Iterator[_Piece]:
    fine = report.exit_code == 0
    yield _Piece(summary.verdict(report), "bold green" if fine else "bold red")
    for finding in report.findings:
        harmless = finding.kind in HARMLESS
        yield _Piece(f"- {finding.line}", "" if harmless else "red")
    if says := summary.caution(report):
        yield _Piece(says)


def _grid(report: Report, width: int) -> Iterator[list[_Piece]]:
    """Family by tensor, beside each other as many tensors as there is room for."""
    cells = [cell for cell in report.cells if cell.status == "measured"]
    several = len({cell.dtype for cell in cells}) > 1
    groups = summary.worst(
        cells, lambda cell: cell.family + f", {cell.dtype}" * several
    )
    rows = [(shortened(printable(x), _NAME), row) for x, row in groups.items()]
    columns = summary.tensors_of(cells)
    if not columns:
        return
    yield [_Piece("")]
    yield from _wrapped("Units of error, worst over masks and shapes:", width, "bold")
    first = max(len(name) for name, _ in rows)
    for some in itertools.batched(columns, (width - _NAME) // 12):
        heads = (shortened(printable(x), 10) for x in some)
        yield [_Piece(" " * first), *(_Piece(f"{head:>11} ") for head in heads)]
        for name, row in rows:
            yield [_Piece(f"{name:{first}}"), *(_tile(row.get(x)) for x in some)]
    if any(error.degenerate for _, row in rows for error in row.values()):
        star = "* the exact result vanishes: units of its terms' absolute values"
        yield from _wrapped(star, width)
    yield [_Piece("")]


def _tile(error: Worst | None) -> _Piece:
    if error is None:
        return _Piece(f"{'-':>11} ")
    # No number is below a bound that it is not.
    style = next((s for most, s in _STYLES if error.units <= most), "bold red")
    star = "*" if error.degenerate else " "
    return _Piece(f"{figure(error.units):>11}{star}", style)


def _cells(report: Report) -> Iterator[str]:
    if report.canaries:
        yield f"Canaries: {len(report.canaries)} passed"
    if report.cells:
        # Some ran beside each other, and the audit takes its own time besides.
        seconds = sum(cell.seconds for cell in report.cells)
        problems = summary.problems(report)
        yield f"Problems: {problems}; {figure(seconds)} s in the target"
    if passed := report.settings.get("mask_arguments"):
        yield "Masks: " + ", ".join(f"{mask} by {by}" for mask, by in passed.items())
    rule = []
    if (found := summary.two_times(report.cells)) is not None:
        ratio, tensor, cell = found
        where = f"({tensor}, {cell.family}, {cell.mask}, {cell.dtype})"
        rule.append(f"at most {figure(ratio)} of what it allows {where}")
    if any(map(summary.beyond_two_times, report.cells)):
        rule.append("it allows nothing where a plain implementation is exact")
    if rule:
        yield f"Two-times rule: {'; '.join(rule)}"


def _attribution(report: Report) -> Iterator[str]:
    for tensor, rows in summary.attributed(report.attribution).items():
        first = rows[0]
        shares = [f"{x['step']} {x['share']:.0%}" for x in summary.shares(rows)]
        yield (
            f"Attribution of {tensor}: {figure(first['measured'])} units measured, "
            f"{figure(first['predicted'])} predicted by {first['recipe']}"
            + ("; " + ", ".join(shares) if shares else "")
        )
    if report.attribution and not report.fits:
        yield "Attribution: no recipe explains these errors"
    elif report.attribution:
        first = report.attribution[0]
        yield (
            f"Attribution: {first['recipe']} is {figure(first['residual'])} octaves "
            "off on the problems that recipes are compared on"
        )


def _probes(report: Report) -> Iterator[str]:
    if report.probes:
        passed = sum(probe["passed"] for probe in report.probes)
        yield f"Probes: {passed} of {len(report.probes)} passed"
    for probe in report.probes:
        if not probe["passed"]:
            said = f"{probe['name']}, {summary.probed(probe)}"
            yield f"- failed: {said}{_see(report, probe['name'])}"


def _see(report: Report, place: str, tensor: str = "") -> str:
    """Which finding stands for what was found there, of a result or of any."""
    for finding in report.findings:
        of_it = not tensor or not finding.tensors or tensor in finding.tensors
        if of_it and place in finding.where:
            return f": see {finding.cause or finding.kind}"
    return ""


def _invariances(report: Report) -> Iterator[str]:
    if report.invariances:
        equal = sum(row["bit_equal"] for row in report.invariances)
        yield f"Invariances: {equal} of {len(report.invariances)} equal to the bit"
    for row in report.invariances:
        if not row["bit_equal"]:
            see = _see(report, row["name"], row["tensor"])
            yield (
                f"- not equal: {row['name']}, {row['tensor']} by at most "
                f"{figure(row['largest_difference'])} ulp, by RMS "
                f"{figure(row['measured'])} of what rounding allows (at most "
                f"{figure(row['bound'])})"
                + (see if row["measured"] > row["bound"] else "")
            )


def _merges(report: Report) -> Iterator[str]:
    if not report.merges:
        return
    said = [
        _merge_of(tensor, [row for row in report.merges if row["tensor"] == tensor])
        for tensor in summary.tensors(row["tensor"] for row in report.merges)
    ]
    yield f"Merge, units by number of parts: {'; '.join(said)}"
    if says := summary.merging(report):
        yield f"Merge: {says}"


def _merge_of(tensor: str, rows: Iterable[Merge]) -> str:
    ordered = sorted(rows, key=lambda row: row["parts"])
    said = ", ".join(f"{row['parts']}: {figure(row['units'])}" for row in ordered)
    if all(row["predicted"] is None for row in ordered):
        return f"{tensor} {said}"
    predicted = ", ".join(figure(row["predicted"]) or "-" for row in ordered)
    return f"{tensor} {said} (predicted {predicted})"
