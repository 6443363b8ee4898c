"""Reports of an audit: what a file keeps, and what terminal and page show of it."""

import dataclasses
import html.parser
import io
import itertools
import json
import math
import re
import sys
import typing
import unicodedata
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import attn_jax.audit.html
from attn_jax.audit import report as schema
from attn_jax.audit import svg
from attn_jax.audit.error import Errors
from attn_jax.audit.finding import KINDS, Finding
from attn_jax.audit.html import page
from attn_jax.audit.problem import TENSORS
from attn_jax.audit.report import Cell, Report, ReportError
from attn_jax.audit.summary import figure, worst
from attn_jax.audit.table import print_report

FAMILIES = "normal", "uniform", "offset", "wide", "zero_k_one_v"
LENGTHS = 256, 1024, 4096
AWKWARD = (
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    5e-324,
    sys.float_info.max,
    0.1 + 0.2,
)


def tensor_errors(units: float, *, degenerate=False, ratio: float | None = 0.6):
    error = Errors(
        units=units,
        degenerate=degenerate,
        relative=units * 1.1e-3,
        maximum=units * 6e-3,
        p999=units * 4e-3,
        signed_mean=-units * 1e-6,
        signed_mean_ci=units * 3e-6,
        directionality=1.3,
    )
    return {**dataclasses.asdict(error), "two_times_rule": ratio}


def cell(
    family="normal",
    mask="full",
    dtype="bfloat16",
    length=1024,
    status="measured",
    **more,
) -> Cell:
    return Cell(family, mask, dtype, 2, length, length, 8, 2, 128, status, **more)


def cells(
    families=FAMILIES, masks=("full", "causal"), dtypes=("bfloat16",), tensors=TENSORS
) -> list[Cell]:
    """dQ of the families with a mean grows with the length, nothing else does."""
    rng = np.random.default_rng(0)
    return [
        cell(
            family,
            mask,
            dtype,
            length,
            errors={
                tensor: tensor_errors(
                    rng.uniform(1, 1.6)
                    * (
                        (length / 64) ** 1.2
                        if tensor == "dquery" and family in ("uniform", "offset")
                        else 1
                    ),
                    degenerate=family == "zero_k_one_v" and tensor != "out",
                )
                for tensor in tensors
            },
            seconds=rng.uniform(0.1, 3),
        )
        for dtype, family, mask, length in itertools.product(
            dtypes, families, masks, LENGTHS
        )
    ]


def example(**changes) -> Report:
    """A kernel that rounds dS of a mean that cancels, and does not take one mask."""
    steps = {
        "dlogits": 0.83,
        "backward_probability": 0.1,
        "delta": 0.05,
        "gradient": 0.02,
    }
    fields = {
        "target": "attention_kernels.flash:attend",
        "environment": {
            "device": "NVIDIA H100 80GB HBM3",
            "jax": "0.11.2",
            "jaxlib": "0.11.2",
            "numpy": "2.4.1",
            "python": "3.12.11",
            "attn_jax": "0.1.0",
            "date": "2025-11-23T12:00:00+00:00",
            "x64": False,
            "command": "attn_jax audit attention_kernels.flash:attend",
        },
        "settings": {
            "dtype": "bfloat16",
            "shapes": [[2, n, n, 8, 2, 128] for n in LENGTHS],
            "families": list(FAMILIES),
            "masks": ["full", "causal", "packed"],
            "gradients": True,
        },
        "canaries": ["sum order", "exp", "fp32 products"],
        "cells": [
            *cells(),
            cell(mask="packed", status="not taken", reason="no argument segment_ids"),
            cell(
                "wide", length=16384, status="out of memory", reason="34 GiB asked for"
            ),
        ],
        "findings": [
            Finding(
                "not taken",
                "packed sequences",
                "The target has no argument for segment ids.",
                where=("packed",),
            ),
            Finding(
                "as accurate as its algorithm allows, which is poor here",
                "dlogits",
                "dQ is 231 units off where keys have a mean, as dS is rounded to BF16; "
                "subtract the mean of the keys first.",
                ("dquery",),
                tuple(f"offset, causal, {n} keys" for n in (*LENGTHS, *range(9))),
                {"units": 231.4, "predicted": 228.0, "recipe": "flash2"},
            ),
        ],
        "attribution": [
            {
                "tensor": tensor,
                "recipe": "flash2_op_by_op",
                "residual": residual,
                "measured": measured,
                "predicted": predicted,
                "step": step,
                "share": share,
            }
            for tensor, measured, predicted, residual in (
                ("out", 1.21, 1.2, 0.05),
                ("dquery", 231.4, 228.0, 4.1),
                ("dvalue", 1.6, 1.58, 0.1),
            )
            for step, share in steps.items()
        ],
        "fits": True,
        "probes": [
            {
                "name": "exp2 of a logit",
                "measured": 1.4,
                "bound": 2.0,
                "unit": "ulp",
                "passed": True,
            },
            {
                "name": "rows that see nothing",
                "measured": math.nan,
                "bound": 0.0,
                "unit": "",
                "passed": False,
            },
        ],
        "invariances": [
            {
                "name": "the same call again",
                "tensor": "dquery",
                "bit_equal": False,
                "largest_difference": 0.0039,
            },
            {
                "name": "the same call again",
                "tensor": "out",
                "bit_equal": True,
                "largest_difference": 0.0,
            },
        ],
        "merges": [
            {
                "parts": parts,
                "tensor": tensor,
                "units": slope * parts**0.5,
                "predicted": predicted,
            }
            for tensor, slope, predicted in (("out", 1.17, 1.25), ("lse", 1.0, None))
            for parts in (2, 4, 8, 16)
        ],
    }
    return Report(**(fields | changes))


def empty(**changes) -> Report:
    return Report(**({"target": "m:f", "environment": {}, "settings": {}} | changes))


# report.json


finite_or_not = st.one_of(st.sampled_from(AWKWARD), st.floats())
words = st.one_of(
    st.sampled_from(("nan", "inf", "-inf", "'nan", "''inf", "")), st.text()
)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), finite_or_not, words),
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(words, x, max_size=3)),
    max_leaves=8,
)


def rows_of(row) -> st.SearchStrategy:
    of = {
        str: words,
        float: finite_or_not,
        bool: st.booleans(),
        int: st.integers(1, 2**40),
        float | None: st.one_of(st.none(), finite_or_not),
    }
    hints = typing.get_type_hints(row)
    return st.fixed_dictionaries({name: of[hint] for name, hint in hints.items()})


findings = {
    "kind": st.sampled_from(KINDS),
    "cause": words,
    "says": words,
    "tensors": st.lists(words, max_size=2).map(tuple),
    "where": st.lists(words, max_size=2).map(tuple),
    "evidence": st.dictionaries(words, st.one_of(finite_or_not, words), max_size=3),
}
problems = {
    "family": words,
    "mask": words,
    "length": st.integers(1, 2**40),
    "status": st.sampled_from(typing.get_args(schema.Status)),
    "reason": words,
    "errors": st.dictionaries(words, rows_of(schema.TensorErrors), max_size=2),
    "seconds": finite_or_not,
}
reports = {
    "target": words,
    "environment": st.dictionaries(words, plain, max_size=3),
    "settings": st.dictionaries(words, plain, max_size=3),
    "canaries": st.lists(words, max_size=2),
    "cells": st.lists(st.fixed_dictionaries(problems), max_size=3),
    "findings": st.lists(st.fixed_dictionaries(findings), max_size=3),
    "attribution": st.lists(rows_of(schema.Attribution), max_size=3),
    "fits": st.booleans(),
    "probes": st.lists(rows_of(schema.Probe), max_size=2),
    "invariances": st.lists(rows_of(schema.Invariance), max_size=2),
    "merges": st.lists(rows_of(schema.Merge), max_size=3),
    "complete": st.booleans(),
}


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.fixed_dictionaries(reports))
def test_any_report_survives_its_file_and_can_be_shown(fields):
    objects = {
        "cells": [cell(**x) for x in fields["cells"]],
        "findings": [Finding(**x) for x in fields["findings"]],
    }
    report = Report(**(fields | objects))
    text = report.to_json()
    # repr tells -0.0 from 0, 1 from 1.0 and a list from a tuple, and finds NaN equal.
    assert repr(Report.from_json(text)) == repr(report)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    json.loads(text, parse_constant=refuse)
    for drawing in parsed(page(report)).drawings:
        assert outside(drawing) == []
        assert overlapping(drawing) == []
    assert printed(report).count("\n") >= 1


def test_equal_reports_have_equal_files():
    given = example()
    assert Report.from_json(given.to_json()) != example(target="another")
    assert Report.from_json(given.to_json()).to_json() == given.to_json()
    assert given.to_json() == example(findings=given.findings[::-1]).to_json()


def test_values_of_numpy_and_tuples_become_plain():
    error = tensor_errors(1.0) | {"units": np.float32(0.1), "degenerate": np.True_}
    report = empty(
        settings={"shapes": ((np.int64(1), 2),), "scale": ml_dtypes.bfloat16(0.5)},
        cells=[cell(errors={"out": error})],
    )
    again = Report.from_json(report.to_json())
    assert repr(again) == repr(report)
    assert again.settings == {"shapes": [[1, 2]], "scale": 0.5}
    assert again.cells[0].errors["out"]["units"] == float(np.float32(0.1))


def test_strings_that_look_like_numbers_stay_strings():
    evidence = {"nan": "nan", "a": math.nan, "b": "'-inf", "c": -math.inf}
    report = empty(target="inf", findings=[Finding("fails", "", "", evidence=evidence)])
    again = Report.from_json(report.to_json())
    assert repr(again) == repr(report) and again.target == "inf"
    found = json.loads(report.to_json())["findings"][0]["evidence"]
    assert found == {"nan": "'nan", "a": "nan", "b": "''-inf", "c": "-inf"}


def test_another_schema_is_refused_in_one_line():
    text = example().to_json()
    now = f'"schema_version": {schema.SCHEMA_VERSION}'
    assert text.count(now) == 1
    newer = text.replace(now, f'"schema_version": {schema.SCHEMA_VERSION + 1}')
    with pytest.raises(ReportError) as error:
        Report.from_json(newer)
    said = str(error.value)
    assert str(schema.SCHEMA_VERSION + 1) in said and "\n" not in said


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('"schema_version"', '"version"', "schema_version"),
        ('"target": "attention', '"aim": "attention', "has aim, lacks target"),
        ('"units": 1', '"unit": 1', r"cells\[\d+\].errors.\w+ is no TensorErrors"),
        ('"fits": true', '"fits": 1', "report.fits is int, not bool"),
        ('"parts": 2', '"parts": "two"', r"merges\[0\].parts is str, not int"),
        ('"kind": "not taken"', '"kind": "odd"', r"findings\[1\].kind"),
        ('"status": "not taken"', '"status": "lost"', r"cells\[\d+\].status"),
        ('"probes": [', '"probes": 3, "more": [', "more"),
        ("{", "", "no report"),
        ("{", "[" * 100_000, "no report"),
    ],
)
def test_damaged_files_are_refused_with_the_place(before, after, says):
    text = example().to_json()
    assert before in text
    with pytest.raises(ReportError, match=says) as error:
        Report.from_json(text.replace(before, after, 1))
    assert "\n" not in str(error.value)


def test_what_is_not_plain_is_refused_when_the_report_is_built():
    with pytest.raises(ReportError, match="settings.mask is object"):
        empty(settings={"mask": object()})
    with pytest.raises(ReportError, match="settings.heads is dict"):
        empty(settings={"heads": {1: 2}})
    with pytest.raises(
        ReportError, match="errors.out is no TensorErrors: it lacks two"
    ):
        cell(errors={"out": dataclasses.asdict(Errors(*[0.0, True, *[0.0] * 6]))})


def test_the_schema_is_documented():
    rows = [schema.Attribution, schema.Probe, schema.Invariance, schema.Merge]
    names = {name for row in rows for name in typing.get_type_hints(row)}
    for kind in (Errors, Cell, Report, Finding):
        names |= {field.name for field in dataclasses.fields(kind)}
    errors = typing.get_type_hints(schema.TensorErrors)
    own = {field.name for field in dataclasses.fields(Errors)}
    assert errors.keys() == own | {"two_times_rule"}
    said = set(re.findall(r"\w+", schema.__doc__ or ""))
    assert names | errors.keys() <= said


# Verdict


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_is_the_most_serious_finding(kind):
    findings = [Finding("trustworthy", "", ""), Finding(kind, "", "")]
    report = example(findings=findings)
    harmless = kind in ("not taken", "trustworthy")
    assert report.verdict == ("trustworthy" if harmless else kind)
    assert report.exit_code == (0 if harmless else 4)


def test_nothing_measured_is_no_success():
    for report in (
        empty(),
        empty(cells=[cell(status="failed", reason="no GPU")]),
        empty(findings=[Finding("trustworthy", "", "fine")]),
    ):
        assert (report.verdict, report.exit_code) == ("not taken", 4)
        assert "nothing was measured" in printed(report)
    assert empty(probes=example().probes).exit_code == 0


# Files


def test_write_makes_the_folder_and_both_files(tmp_path):
    report = example(target="émile \ud800 <&>")
    report.write(tmp_path / "a" / "b")
    folder = tmp_path / "a" / "b"
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "report.json"]
    again = Report.from_json((folder / "report.json").read_text("utf-8"))
    assert repr(again) == repr(report)
    assert (folder / "report.html").read_text("utf-8") == page(report)


@pytest.mark.parametrize("stage", ["page", "disk"])
def test_old_files_stay_where_writing_fails(tmp_path, monkeypatch, stage):
    example().write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if stage == "page":

        def broken(report):
            raise OSError("no page")

        monkeypatch.setattr(attn_jax.audit.html, "page", broken)
    else:
        write = Path.write_bytes

        def full(path, data):
            if ".html" in path.name:
                write(path, data[:100])
                raise OSError("no space")
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no "):
        example(target="new").write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# Terminal


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def printed(report: Report) -> str:
    file = io.StringIO()
    print_report(report, file)
    return file.getvalue()


def without_rich(monkeypatch):
    for name in ("rich", "rich.console", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("report", [example(), empty()], ids=["example", "empty"])
def test_plain_and_rich_say_the_same(report, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    colours = printed(report)
    without_rich(monkeypatch)
    monochrome = printed(report)
    assert "\x1b[" in colours and "\x1b[" not in monochrome
    assert re.sub(r"\x1b\[[\d;]*m", "", colours) == monochrome


def test_the_terminal_says_all_that_matters():
    report = example(fits=False, complete=False)
    said = printed(report)
    lines = said.splitlines()
    assert lines[0].startswith(f"{report.target}: {report.verdict} (unfinished")
    assert all(len(line) <= 100 for line in lines)
    assert "as accurate as" in lines[1] and "dlogits" in lines[1]
    first, second = (said.index(f"- {x.kind}") for x in report.findings)
    assert first < second
    flat = " ".join(said.split())
    for finding in report.findings:
        assert finding.says in flat
    for family, row in worst(report.cells, lambda cell: cell.family).items():
        line = next(line for line in lines if line.startswith(family)).split()
        assert line[1:] == [str(row[tensor]) for tensor in TENSORS]
    # What a family's largest error is does not depend on the code that finds it.
    largest = max(
        x.errors["dquery"]["units"] for x in report.cells if x.family == "offset"
    )
    assert f" {largest:.0f} " in said
    assert "30 measured, 1 not taken, 1 out of memory" in flat
    assert "dquery: 231 units measured, 228 predicted by flash2_op_by_op" in flat
    assert "dlogits 83%" in flat and "no recipe explains" in flat
    assert "failed: rows that see nothing, nan, at most 0" in flat
    assert "exp2 of a logit" not in flat
    assert "not equal: the same call again, dquery by at most 3.9e-3" in flat
    assert "out 2: 1.65, 4: 2.34, 8: 3.31, 16: 4.68 (predicted 1.25," in flat


def test_lines_fit_whatever_the_names(monkeypatch):
    long = "x" * 150
    report = example(
        target=long,
        cells=cells((long, "b"), (long,), tensors=[*TENSORS, "dbias", "dsinks", long]),
        findings=[Finding("fails", long, f"line one\nline two {long}\x1b[31m\a")],
    )
    for columns in (200, 70):
        monkeypatch.setenv("COLUMNS", str(columns))
        said = printed(report)
        assert max(map(len, said.splitlines())) <= min(columns, 100)
        assert "\x1b" not in said and "\a" not in said
        assert "line one line two" in said
        assert all(name in said for name in (*TENSORS, "dbias", "dsinks"))


def test_types_are_not_mixed():
    assert "normal, float16" in printed(
        example(cells=cells(dtypes=("bfloat16", "float16")))
    )


def test_a_narrow_encoding_is_no_error(monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_report(example(target="é:f"), file)
    without_rich(monkeypatch)
    print_report(example(target="é:f"), file)
    file.seek(0)
    assert file.read().count("\\xe9:f") == 2


def test_nan_is_worse_than_any_number():
    sizes = 3.0, math.nan, math.inf
    given = [cell(errors={"out": tensor_errors(x)}) for x in sizes]
    for order in itertools.permutations(given):
        assert math.isnan(worst(order, lambda _: 0)[0]["out"].units)
    assert worst(given[::2], lambda _: 0)[0]["out"].units == math.inf


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (1234.4, "1234"),
        (9999.6, "1.0e4"),
        (0.0099, "9.9e-3"),
        (-2.5, "-2.50"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (None, ""),
    ],
)
def test_figures(x, text):
    assert figure(x) == text


# Page


class Document(html.parser.HTMLParser):
    """Tags in order, text, and the texts of each drawing; raises where unbalanced."""

    def __init__(self):
        super().__init__()
        self.tags, self.words, self.drawings = [], [], []
        self._open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self._open.append(tag)
        if tag == "svg":
            self.drawings.append({"at": dict(attrs), "elements": []})
        elif "svg" in self._open:
            self.drawings[-1]["elements"].append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data):
        self.words.append(data)
        if self._open and self._open[-1] == "text":
            self.drawings[-1]["elements"][-1][2] += data

    def close(self):
        super().close()
        assert self._open == []


def parsed(text: str) -> Document:
    document = Document()
    document.feed(text)
    document.close()
    return document


def boxes(drawing) -> list[tuple[str, float, float, float, float]]:
    """Text, left, top, right, bottom, with the widths of DejaVu Sans Mono."""
    size = float(drawing["at"]["font-size"])
    found = []
    for tag, at, text in drawing["elements"]:
        if tag == "text" and text:
            columns = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
            width = 0.602 * size * columns
            shift = {"middle": 0.5, "end": 1}.get(at.get("text-anchor"), 0)
            left, base = float(at["x"]) - shift * width, float(at["y"])
            # Ascenders are 0.76 em tall, descenders 0.24 em deep.
            found.append(
                (text, left, base - 0.76 * size, left + width, base + 0.24 * size)
            )
    return found


def outside(drawing) -> list[str]:
    _, _, width, height = map(float, drawing["at"]["viewbox"].split())
    # Coordinates are written to a tenth.
    return [
        text
        for text, left, top, right, bottom in boxes(drawing)
        if not (left >= -0.1 and top >= -0.1)
        or not (right <= width + 0.1 and bottom <= height + 0.1)
    ]


def overlapping(drawing) -> list[tuple[str, str]]:
    return [
        (a[0], b[0])
        for a, b in itertools.combinations(boxes(drawing), 2)
        if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]
    ]


def crowded() -> Report:
    """More, longer and larger of everything than an audit has."""
    wide = "\N{CJK UNIFIED IDEOGRAPH-5BBD}" * 40
    families = *FAMILIES, "a_family_of_a_very_long_name", wide
    tensors = [*TENSORS, "dbias", "dsinks", "a_tensor_of_a_very_long_name"]
    some = cells(families, tensors=tensors)
    odd = [*AWKWARD, 0.0, 1e-12, 1e15]
    some += [
        cell("normal", length=n, errors={"out": tensor_errors(x)})
        for n, x in zip(range(300, 3000, 270), odd, strict=True)
    ]
    attribution = [
        row | {"tensor": tensor, "recipe": wide, "measured": x, "share": x}
        for row in example().attribution
        for tensor, x in zip(tensors, odd, strict=False)
    ]
    merges = [
        {"parts": parts, "tensor": "out", "units": x, "predicted": x}
        for parts, x in enumerate(odd, 1)
    ]
    return example(
        target=wide * 5, cells=some, attribution=attribution, merges=merges, fits=False
    )


@pytest.mark.parametrize("report", [example(), crowded()], ids=["example", "crowded"])
def test_no_text_of_a_plot_is_cut_off_or_overlaps(report):
    drawings = parsed(page(report)).drawings
    assert len(drawings) >= 11 and sum(len(boxes(x)) for x in drawings) > 150
    for drawing in drawings:
        assert outside(drawing) == []
        assert overlapping(drawing) == []


def test_the_page_shows_the_report():
    report = example()
    document = parsed(page(report))
    said = " ".join(" ".join(document.words).split())
    for finding in report.findings:
        assert finding.says in said
    for name in ("NVIDIA H100", "segment_ids", "34 GiB", "exp2 of a logit", "231"):
        assert name in said
    assert "and 6 more" in said  # Twelve places, of which six are named.
    assert report.verdict in said and "not taken" in said
    assert "recipe explains these" in said
    unfit = " ".join(parsed(page(example(fits=False))).words)
    assert "recipe does not explain these" in unfit
    texts = [text for drawing in document.drawings for text, *_ in boxes(drawing)]
    for mask in ("full", "causal"):
        some = [x for x in report.cells if x.mask == mask]
        for row in worst(some, lambda cell: cell.family).values():
            assert {str(error) for error in row.values()} <= set(texts)
    for step in ("dlogits", "backward_probability", "83.0%"):
        assert step in texts


def test_an_empty_report_has_a_page():
    document = parsed(page(empty()))
    assert document.drawings == []
    assert "nothing was measured" in " ".join(document.words)


def test_the_page_needs_nothing_else():
    text = page(example())
    tags = set(parsed(text).tags)
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "image"}
    for fetched in ("http", "//", "src=", "href", "url(", "@import"):
        assert fetched not in text
    assert "prefers-color-scheme:dark" in text


HOSTILE = '</title></style></svg><script>alert(\'&"\')</script><b x="y">'


def test_strings_cannot_become_markup():
    """A page has the same elements whatever the names are."""

    def with_name(name: str) -> Report:
        given = example()
        some = [
            dataclasses.replace(
                x,
                family=f"{name}{x.family}",
                mask=f"{name}{x.mask}",
                dtype=name,
                reason=name,
                errors={f"{name}{tensor}": e for tensor, e in x.errors.items()},
            )
            for x in given.cells
        ]
        rows = {
            kind: [
                {k: f"{name}{x}" if isinstance(x, str) else x for k, x in row.items()}
                for row in getattr(given, kind)
            ]
            for kind in ("attribution", "probes", "invariances", "merges")
        }
        finding = Finding("fails", name, name, (name,), (name,), {name: name})
        return Report(
            name, {name: [name]}, {name: {name: name}}, [name], some, [finding], **rows
        )

    hostile = parsed(page(with_name(HOSTILE)))
    assert hostile.tags == parsed(page(with_name("x" * len(HOSTILE)))).tags
    assert HOSTILE in hostile.words and "script" not in hostile.tags


def test_two_hundred_problems_stay_below_a_megabyte():
    many = cells((*FAMILIES, *"abcdefg"), ("full", "causal", "window"), ("b", "c"))[
        :180
    ]
    failed = [
        cell(status="failed", length=n, reason="XlaRuntimeError <line>\n" * 500)
        for n in range(20)
    ]
    assert len(many + failed) == 200
    assert len(page(example(cells=many + failed)).encode()) < 1_000_000


def contrast(a: str, b: str) -> float:
    low, high = sorted(svg.luminance(colour) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_and_read():
    # Published by WCAG's examples: the greys on either side of 4.5 : 1.
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    units = np.geomspace(0.1, 1e4, 300)
    fills = [svg.tile_colour(x) for x in units]
    for fill, ink in fills:
        assert contrast(fill, ink * 2 if len(ink) < 4 else f"#{ink[1:] * 2}") >= 4.5
    light = [svg.luminance(fill) for fill, _ in fills]
    assert light == sorted(light, reverse=True)
    # Tenfold the error is a colour that is plainly another.
    for x in (1, 10, 100):
        assert contrast(svg.tile_colour(x)[0], svg.tile_colour(10 * x)[0]) > 1.3
    assert svg.tile_colour(math.nan) == svg.tile_colour(math.inf) == fills[-1]
    assert svg.tile_colour(0.0) == fills[0]
    backgrounds = re.findall(r"--page:(#\w{6})", page(empty()))
    for background, colours in zip(backgrounds, (svg.LIGHT, svg.DARK), strict=True):
        assert min(contrast(background, colour) for colour in colours) >= 3


def elements(text: str, tag: str) -> list[dict[str, str]]:
    (drawing,) = parsed(text).drawings
    return [at for name, at, _ in drawing["elements"] if name == tag]


def test_a_power_law_is_a_straight_line():
    points = [(256, 2.0), (4096, 32.0), (1024, 8.0)]
    drawn = svg.lines("t", "keys", [svg.Series("out", 0, points)])
    (line,) = (p["d"] for p in elements(drawn, "path") if p.get("fill") == "none")
    places = [tuple(map(float, p.split(","))) for p in re.split("[ML]", line)[1:]]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x0 < x1 < x2 and y0 > y1 > y2
    # Each coordinate is rounded to 0.1.
    assert abs(x1 - x0 - (x2 - x1)) <= 0.2 and abs(y1 - y0 - (y2 - y1)) <= 0.2
    # Fourfold is two thirds of the way of eightfold: the axes are those of the labels.
    labels = {
        text: (left, top) for text, left, top, *_ in boxes(parsed(drawn).drawings[0])
    }
    decade = labels["1"][1] - labels["10"][1]
    assert y0 - y1 == pytest.approx(decade * math.log10(4), abs=0.3)
    dashes = [p["d"] for p in elements(drawn, "path") if "stroke-dasharray" in p]
    one = float(re.fullmatch(r"M[\d.]+,([\d.]+)H[\d.]+", dashes[0]).group(1))
    assert one - y0 == pytest.approx(decade * math.log10(2), abs=0.3)


def test_values_off_the_axis_are_hollow_on_its_edges():
    points = [(1, 1.0), (2, 0.0), (4, math.inf), (8, math.nan), (16, 100.0)]
    drawn = svg.lines("t", "keys", [svg.Series("out", 0, points)])
    markers = [p for p in elements(drawn, "path") if "transform" in p]
    ys = [float(p["transform"].split(",")[1][:-1]) for p in markers]
    assert len(ys) == 4 and ys[1] == max(ys) and ys[2] == min(ys)
    assert ["var(--page)" == p["fill"] for p in markers] == [False, True, True, False]


def test_every_tensor_has_a_look_of_its_own():
    names = [*TENSORS, "dbias", "dsinks", "dsoft_cap"]
    markers = elements(svg.legend((name, i) for i, name in enumerate(names)), "path")
    assert len({(marker["d"], marker["fill"]) for marker in markers}) == len(names)


def test_plots_of_families_have_one_axis():
    drawings = parsed(page(example())).drawings
    plots = [x for x in drawings if x["at"]["aria-label"].startswith(FAMILIES)]
    axes = [[b for b in boxes(x) if b[0].isdigit()] for x in plots]
    assert len(axes) == len(FAMILIES) and all(axis == axes[0] for axis in axes)


def test_bars_are_as_long_as_their_shares():
    shares = 1.0, 0.5, 0.25, -0.1, math.nan, 2.0
    some = [svg.Bar("s", x, "t") for x in shares]
    found = [float(x["width"]) for x in elements(svg.bars("t", {"g": some}), "rect")]
    assert [x / found[0] for x in found] == pytest.approx([1, 0.5, 0.25, 0, 0, 1])
    sizes = 1.0, 10.0, 100.0
    some = [svg.Bar("s", x, "t") for x in sizes]
    drawn = svg.bars("t", {"g": some}, logarithmic=True)
    one, ten, hundred = (float(x["width"]) for x in elements(drawn, "rect"))
    assert one > 0 and ten - one == pytest.approx(hundred - ten, abs=0.2)
