"""A report as one page of HTML that holds all it shows and needs no script."""

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attn_jax.audit import summary, svg
from attn_jax.audit.finding import HARMLESS, Finding
from attn_jax.audit.problem import TENSORS
from attn_jax.audit.raised import printable
from attn_jax.audit.report import Cell, Report
from attn_jax.audit.summary import figure, shortened
from attn_jax.audit.svg import Bar, Series, Tile

# Longer ones, such as a compiler's messages, are in `report.json`.
_LONGEST = 300
_MOST_PLACES = 6
_STYLE = (
    ":root{color-scheme:light dark;--page:#ffffff;--ink:#1b1b1b;--faint:#767676;"
    f"--good:#00664a;--bad:#a31515;{svg.series_variables(svg.LIGHT)}}}"
    "@media(prefers-color-scheme:dark){:root{--page:#16181c;--ink:#e8e8e8;"
    f"--faint:#8d8d8d;--good:#4fd6a8;--bad:#ff8a80;{svg.series_variables(svg.DARK)}}}}}"
    "body{background:var(--page);color:var(--ink);max-width:64rem;margin:2rem auto;"
    "padding:0 1rem;font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}"
    "h1{font-size:1.4rem}h2{font-size:1.15rem;margin-top:2.5rem;"
    "border-bottom:1px solid var(--faint)}"
    ".good{color:var(--good)}.bad{color:var(--bad)}.plots{display:flex;"
    "flex-wrap:wrap;align-items:flex-start;gap:1.5rem;margin:1rem 0}"
    "svg{max-width:100%;height:auto}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;"
    "overflow-wrap:normal}th,td{padding:.15rem .6rem;text-align:left;"
    "vertical-align:top;border-bottom:1px solid var(--faint)}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}"
    "li{margin:.4rem 0}small{display:block}summary{cursor:pointer}"
)


def page(report: Report) -> str:
    """The whole document. Every string of the report is escaped."""
    sections = {
        "Findings": _findings(report),
        "Errors by family": _heat_maps(report),
        "Error against length": _lengths(report),
        "Attribution": _attribution(report),
        "Probes": _probes(report),
        "Invariances": _invariances(report),
        "Merges": _merges(report),
        "Problems": _problems(report),
        "Environment and settings": _circumstances(report),
    }
    fine = report.exit_code == 0
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>Audit of {_text(report.target)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f'<h1 class="{"good" if fine else "bad"}">'
            f"{_text(summary.verdict(report))}</h1>",
            f"<p>{_text(summary.measured_on(report))}</p>",
            "<p>Errors are in units: 1 is the RMS error of the exact result rounded "
            "once, the best there is.</p>",
            *(
                f"<section><h2>{title}</h2>\n{body or '<p>None in this audit.</p>'}"
                "</section>"
                for title, body in sections.items()
            ),
            "</body></html>\n",
        )
    )


def _text(value: Any) -> str:
    return html.escape(printable(value))


def _short(value: Any) -> str:
    return _text(shortened(str(value), _LONGEST))


def _plots(plots: Iterable[str]) -> str:
    joined = "\n".join(plots)
    return f'<div class="plots">\n{joined}\n</div>' if joined else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Numbers to the right; strings are escaped."""
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _folded(says: str, body: str) -> str:
    """Seen when one asks for it; nothing where there is nothing."""
    return f"<details><summary>{says}</summary>{body}</details>" if body else ""


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, float):
        return f'<td class="n">{figure(value)}</td>'
    if isinstance(value, int):
        return f'<td class="n">{value}</td>'
    return f"<td>{'' if value is None else _short(value)}</td>"


def _findings(report: Report) -> str:
    items = "\n".join(map(_finding, report.findings))
    says = summary.caution(report)
    more = f"\n<p>{_text(says)}</p>" if says else ""
    return f"<ul>\n{items}\n</ul>{more}" if items else ""


def _finding(finding: Finding) -> str:
    colour = "good" if finding.kind in HARMLESS else "bad"
    cause = f": {_text(finding.cause)}" if finding.cause else ""
    small = []
    if finding.tensors:
        small.append(_text(", ".join(finding.tensors)))
    if finding.where:
        small.append(_places(finding.where))
    if finding.evidence:
        evidence = (
            f"{name} {x if isinstance(x, str) else figure(x)}"
            for name, x in finding.evidence.items()
        )
        small.append(_text(", ".join(evidence)))
    return (
        f'<li><strong class="{colour}">{_text(finding.kind)}{cause}</strong><br>'
        f"{_text(finding.says)}{''.join(f'<small>{line}</small>' for line in small)}"
        "</li>"
    )


def _places(where: Sequence[str]) -> str:
    """The first of them, folded where there are several."""
    more = len(where) - _MOST_PLACES
    listed = _text("; ".join(where[:_MOST_PLACES]))
    listed += f"; and {more} more" if more > 0 else ""
    return listed if len(where) == 1 else _folded(f"{len(where)} places", listed)


def _heat_maps(report: Report) -> str:
    """One map of family by tensor for each type and mask."""
    columns = summary.tensors_of(report.cells)
    if not columns:
        return ""
    groups = _groups(report.cells, lambda cell: (cell.dtype, cell.mask))
    maps = [
        svg.heat_map(
            f"{dtype}, mask {mask}",
            here,
            {
                family: list(_tiles(here, some, f"{family}, {mask}, {dtype}"))
                for (family,), some in _groups(cells, lambda x: (x.family,)).items()
            },
        )
        for (dtype, mask), cells in groups.items()
        # Most masks have no bias.
        for here in [[x for x in columns if x != "dbias" or _has(cells, x)]]
    ]
    note = "<p>Units, the worst over shapes. *: the exact result vanishes, and the unit"
    note += " is that of the absolute values of its terms.</p>"
    return note + svg.heat_legend() + _plots(maps)


def _has(cells: Iterable[Cell], tensor: str) -> bool:
    return any(tensor in cell.errors for cell in cells)


def _groups(cells: Iterable[Cell], by) -> dict[tuple[str, ...], list[Cell]]:
    found: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(by(cell), []).append(cell)
    return found


def _tiles(columns: Sequence[str], cells: Sequence[Cell], where: str) -> Iterator[Tile]:
    found = next(iter(summary.worst(cells, lambda _: None).values()))
    statuses = ", ".join(f"{n} {x}" for x, n in summary.counts(cells).items())
    missing = next((cell.status for cell in cells if cell.status != "measured"), "")
    short = {"out of memory": "memory"}.get(missing, missing) or "-"
    for column in columns:
        error = found.get(column)
        said = short if error is None else str(error)
        title = f"{column}, {where}: {said}; problems: {statuses}"
        yield Tile(None if error is None else error.units, said, title)


def _number(tensor: str, tensors: Sequence[str]) -> int:
    """Its place among all results that have a name, so its colour in every plot."""
    known = [*TENSORS, *(x for x in tensors if x not in TENSORS)]
    return known.index(tensor)


def _lengths(report: Report) -> str:
    """For each type and family with several numbers of keys, the worst over masks."""
    tensors = summary.tensors_of(report.cells)
    cells = [cell for cell in report.cells if cell.status == "measured"]
    groups = _groups(cells, lambda cell: (cell.family, cell.dtype))
    found = {
        name: summary.worst(some, lambda cell: max(cell.key_length, 1))
        for name, some in groups.items()
    }
    found = {name: by_length for name, by_length in found.items() if len(by_length) > 1}
    if not found:
        return ""
    every = [
        error.units
        for by_length in found.values()
        for row in by_length.values()
        for error in row.values()
    ]
    plots = [
        svg.lines(
            f"{family}, {dtype}",
            "keys",
            [
                Series(
                    tensor,
                    _number(tensor, tensors),
                    [(n, row[tensor].units) for n, row in by.items() if tensor in row],
                )
                for tensor in tensors
            ],
            every,
        )
        for (family, dtype), by in found.items()
    ]
    return (
        "<p>Worst over masks; the broken line is 1 unit. Hollow: zero at the lower "
        "edge, infinite at the upper.</p>" + _legend(tensors) + _plots(plots)
    )


def _legend(tensors: Sequence[str]) -> str:
    return svg.legend((tensor, _number(tensor, tensors)) for tensor in tensors)


def _attribution(report: Report) -> str:
    groups = summary.attributed(report.attribution)
    if not groups:
        return ""
    levels = {
        tensor: [
            Bar("measured", rows[0]["measured"], figure(rows[0]["measured"])),
            Bar(
                rows[0]["recipe"], rows[0]["predicted"], figure(rows[0]["predicted"]), 1
            ),
        ]
        for tensor, rows in groups.items()
    }
    shares = {
        tensor: [
            Bar(row["step"], row["share"], f"{row['share']:.1%}", 2)
            for row in summary.shares(rows)
        ]
        for tensor, rows in groups.items()
    }
    plots = [svg.bars("Measured and predicted, units", levels, logarithmic=True)]
    if any(shares.values()):
        shown = {tensor: some for tensor, some in shares.items() if some}
        plots.append(svg.bars("Squared error by step", shown))
    fits = "explains" if report.fits else "does not explain"
    rows = [
        [tensor, *(some[0][name] for name in ("recipe", "measured", "predicted"))]
        + [some[0]["residual"]]
        for tensor, some in groups.items()
    ]
    heads = ["tensor", "recipe", "measured", "predicted", "octaves off, in all"]
    return (
        f"<p>The nearest recipe {fits} these errors. All in units.</p>"
        + _plots(plots)
        + _table(heads, rows)
    )


def _probes(report: Report) -> str:
    """Those that failed; the others are folded."""
    heads = "probe", "measured", "at most", "unit"
    failed, passed = (
        [
            [probe[name] for name in ("name", "measured", "bound", "unit")]
            for probe in report.probes
            if probe["passed"] is wanted
        ]
        for wanted in (False, True)
    )
    shown = f"<p>{len(failed)} failed:</p>{_table(heads, failed)}" if failed else ""
    return shown + _folded(f"{len(passed)} passed", _table(heads, passed))


def _invariances(report: Report) -> str:
    """Results that differ; those that are equal to the bit are folded."""
    # What is off by more than rounding allows comes first.
    differ = sorted(
        (row for row in report.invariances if not row["bit_equal"]),
        key=lambda row: row["measured"] <= row["bound"],
    )
    equal = [row for row in report.invariances if row["bit_equal"]]
    table = _table(
        (
            *("change of the call", "tensor", "largest difference, ulp"),
            *("RMS over rounding's", "at most"),
        ),
        (
            [row["name"], row["tensor"], row["largest_difference"]]
            + [row["measured"], row["bound"]]
            for row in differ
        ),
    )
    same = _table(
        ("change of the call", "tensor"),
        ([row["name"], row["tensor"]] for row in equal),
    )
    shown = f"<p>{len(differ)} with other bits:</p>{table}" if differ else ""
    return shown + _folded(f"{len(equal)} equal to the bit", same)


def _merges(report: Report) -> str:
    if not report.merges:
        return ""
    tensors = summary.tensors(row["tensor"] for row in report.merges)
    series = []
    for tensor in tensors:
        rows = [row for row in report.merges if row["tensor"] == tensor]
        number = _number(tensor, tensors)
        measured = [(max(row["parts"], 1), row["units"]) for row in rows]
        predicted = [
            (max(row["parts"], 1), row["predicted"])
            for row in rows
            if row["predicted"] is not None
        ]
        series.append(Series(tensor, number, measured))
        if predicted:
            series.append(Series(tensor, number, predicted, dashed=True))
    return (
        "<p>Keys in parts, put together by their LSE. Dotted: predicted. "
        f"{_text(summary.merging(report))}</p>"
        + _legend(tensors)
        + _plots([svg.lines("Units by number of parts", "parts", series)])
    )


def _problems(report: Report) -> str:
    if not report.cells:
        return ""
    missing = _table(
        ("family", "mask", "dtype", "shape", "status", "reason"),
        (
            [x.family, x.mask, x.dtype, summary.shape(x), x.status, x.reason]
            for x in report.cells
            if x.status != "measured"
        ),
    )
    names = "units", "relative", "maximum", "p999", "signed_mean", "signed_mean_ci"
    names += "directionality", "two_times_rule"
    heads = "family", "mask", "dtype", "shape", "x64", "seconds", "tensor", *names
    rows = (
        [x.family, x.mask, x.dtype, summary.shape(x), x.x64, x.seconds, tensor]
        + [errors[name] for name in names]
        for x in report.cells
        for tensor, errors in x.errors.items()
    )
    beside = _table(
        ("more looked at",), ([x] for x in report.settings.get("beside", ()))
    )
    return (
        f"<p>{_text(summary.problems(report))}.</p>{missing}"
        + _folded("All errors", _table(heads, rows))
        + _folded("Problems looked at besides", beside)
    )


def _circumstances(report: Report) -> str:
    rows = [["canaries passed", ", ".join(report.canaries)]]
    rows += [
        [name, x if isinstance(x, str) else json.dumps(x)]
        for of in (report.environment, report.settings)
        for name, x in of.items()
    ]
    table = _table(("name", "value"), rows)
    return _folded(f"{len(rows)} entries", table)
