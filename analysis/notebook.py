"""What the notebooks show with: sweeps, committed results, pictures and tables.

A notebook runs at its default size, or, where the environment variable NOTEBOOK_SIZE
says `toy`, at one that takes seconds.
"""

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.agreement import VANISHING
from analysis.arms import ARMS
from analysis.experiments import EXPERIMENTS, training
from analysis.figures import Panel, draw
from analysis.paired_measures import Instruments, measure
from analysis.record import Row
from analysis.summary import pivot, summarise
from analysis.sweep import Claim
from attn_jax.audit import Report
from attn_jax.audit.problem import SYMBOLS
from train.gpu import set_profile

TOY = os.environ.get("NOTEBOOK_SIZE") == "toy"
_RESULTS = Path(__file__).resolve().parent.parent / "results"


def sized(default: Any, toy: Any) -> Any:
    """The one that the size of the notebook asks for."""
    return toy if TOY else default


def sweep(name: str, *options: str) -> list[Row]:
    """Every row that `python -m analysis NAME` measures, at the notebook's size.

    What it writes is written to a folder that does not stay; its tables are not shown.

    Raises:
      UsageError, ExperimentError: as the experiment.
    """
    parser = argparse.ArgumentParser()
    EXPERIMENTS[name].add_arguments(parser)
    preset = sized("default", "toy")
    with tempfile.TemporaryDirectory() as folder, _quietly():
        given = [f"--preset={preset}", f"--out={folder}", *options]
        EXPERIMENTS[name].run(parser.parse_args(given), "")
        return _read(Path(folder, f"{preset}.parquet"))


def train(arms: Iterable[str], steps: int, *changes: str) -> list[Row]:
    """Trains `tiny` with plain attention, and arms of `analysis.arms` beside it; the
    distances of all weights from the reference's, as in results/training."""
    set_profile("exact")
    config = training.reference("tiny", steps, changes)
    with _quietly():
        found = measure(config, [ARMS[name] for name in arms], Instruments(0))
    return [
        {"arm": name, "seed": 0, **row}
        for name, rows in found.items()
        for row in rows
        if row["table"] == "weights" and row["kind"] == "all"
    ]


def committed(path: str) -> list[Row]:
    """The rows of a table under results/, a .parquet or a .csv file."""
    return _read(_RESULTS / path)


def _read(path: Path) -> list[Row]:
    import polars

    if path.suffix == ".parquet":
        return polars.read_parquet(path).to_dicts()
    return polars.read_csv(path, infer_schema_length=None).to_dicts()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What is told of progress goes nowhere, unless an error ends it."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            yield
    except BaseException:
        print(told.getvalue(), file=sys.stderr)
        raise


class Picture:
    """A figure that a notebook shows, at a resolution that keeps its file small."""

    def __init__(self, panels: Sequence[Panel], columns: int = 2):
        self._panels, self._columns = panels, columns

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        draw(self._panels, self._columns).savefig(file, format="png", dpi=100)
        return file.getvalue()


def where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows whose columns have these values; a list, tuple or set: one of them."""

    def fits(row: Row) -> bool:
        return all(
            row[name] in value
            if isinstance(value, list | tuple | set)
            else row[name] == value
            for name, value in values.items()
        )

    return [row for row in rows if fits(row)]


def named(rows: Iterable[Row], column: str, names: Mapping[str, str]) -> list[Row]:
    """The rows whose `column` is a key of `names`, in that order, called by its value
    in a column `name`."""
    rows = list(rows)
    return [
        {**row, "name": name}
        for key, name in names.items()
        for row in rows
        if row[column] == key
    ]


def spread(rows: Iterable[Row], by: Sequence[str], value: str) -> list[Row]:
    """Of each combination of `by` the median, least and most of a column over seeds, as
    columns VALUE, VALUE_low and VALUE_high; rows without a value are left out."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        if row[value] is not None:
            groups.setdefault(tuple(row[name] for name in by), []).append(row[value])
    return [
        {
            **dict(zip(by, key, strict=True)),
            value: statistics.median(values),
            f"{value}_low": min(values),
            f"{value}_high": max(values),
        }
        for key, values in groups.items()
    ]


def split(
    rows: Iterable[Row], column: str, titles: Mapping[Any, str] | Iterable[Any]
) -> dict[str, list[Row]]:
    """The rows of each value of a column, by its title, or by the value itself."""
    rows = list(rows)
    if not isinstance(titles, Mapping):
        titles = {value: str(value) for value in titles}
    return {title: where(rows, **{column: v}) for v, title in titles.items()}


def panels(
    groups: Mapping[str, Iterable[Row]],
    x: str,
    y: str,
    series: str,
    labels: tuple[str, str],
    *,
    medians: bool = False,
    **how: Any,
) -> list[Panel]:
    """A panel for each group of rows, with a line for each value of `series`.

    Args:
      labels: of x and of y.
      medians: draw the medians over seeds of what is not 0, the `bands` among the
        series as areas from the least to the most; else means with 95 % intervals.
      how: further fields of `figures.Panel`.
    """
    found = []
    for title, rows in groups.items():
        if medians:
            rows = spread([row for row in rows if row[y]], [series, x], y)
        else:
            rows = summarise(rows, [series, x], [y])
        found.append(Panel(title, rows, x, y, series, *labels, **how))
    return found


def measures(
    rows: Sequence[Row],
    x: str,
    series: str,
    x_label: str,
    columns: Mapping[str, tuple[str, str]],
    **how: Any,
) -> list[Panel]:
    """A panel of the same rows for each column, by its title and label."""
    return [
        panel
        for column, (title, label) in columns.items()
        for panel in panels({title: rows}, x, column, series, (x_label, label), **how)
    ]


def side_by_side(rows: Iterable[Row], line: str, column: str, value: str) -> list[Row]:
    """A table to read: means over seeds with 95 % intervals."""
    found = summarise(rows, [line, column], [value])
    return pivot(found, [line], column, value)


def print_claims(claims: Iterable[Claim], recipes: Iterable[str]) -> None:
    """Each claim once, and what was found on it under some of the recipes."""
    said, wanted = None, set(recipes)
    for claim in claims:
        if claim.recipe.split(",")[0] not in wanted:
            continue
        if claim.says != said:
            print(f"{claim.source}: {claim.says}")
            said = claim.says
        verdict = {True: "holds", False: "does not hold", None: "open"}[claim.holds]
        print(f"    {claim.recipe}: {verdict}; {claim.found}")


def print_report(report: Report) -> None:
    """The verdict of an audit and its findings."""
    print(report.verdict.upper())
    for finding in report.findings:
        print(textwrap.fill(f"- {finding.line}", 96, subsequent_indent="  "))


def units_of(reports: Mapping[str, Report]) -> list[Row]:
    """The errors of audits by name, a row for each problem and tensor, in units; None
    where results are exact, or no numbers."""
    return [
        {
            "attention": name,
            "inputs": f"{cell.family}, {cell.mask}",
            "tensor": symbol,
            "units": cell.errors[tensor]["units"] or None,
            "seed": 0,
        }
        for name, report in reports.items()
        for cell in report.cells
        if cell.family != VANISHING
        for tensor, symbol in SYMBOLS.items()
        if tensor in cell.errors
    ]


def table(rows: Iterable[Row], columns: Sequence[str] | None = None) -> None:
    """Prints rows as a table, all columns of it or some."""
    rows = list(rows)
    heads = list(rows[0]) if columns is None else list(columns)
    lines = [heads, *([_text(row[head]) for head in heads] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def largest(rows: Iterable[Row], column: str) -> float:
    """The largest value of a column that has one."""
    return max(row[column] for row in rows if row[column] is not None)
