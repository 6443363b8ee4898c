"""Reports of an audit: what a file keeps, and what a terminal shows of it."""

import dataclasses
import io
import itertools
import json
import math
import re
import sys
import typing
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import attn_jax.audit.html
from attn_jax.audit import audit_attention
from attn_jax.audit import report as schema
from attn_jax.audit.error import Errors
from attn_jax.audit.finding import KINDS, Finding
from attn_jax.audit.html import page
from attn_jax.audit.judge import WORSE
from attn_jax.audit.problem import TENSORS
from attn_jax.audit.report import Cell, Report, ReportError
from attn_jax.audit.summary import figure, two_times, worst
from attn_jax.audit.table import print_report
from attn_jax.recipe import FLASH2
from tests.page_parser import outside, overlapping, parsed
from tests.report_example import AWKWARD, cell, cells, empty, example, tensor_errors

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
    "growth": st.dictionaries(words, finite_or_not, max_size=2),
    "merging": words,
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
    report = example(fits=False)
    said = printed(report)
    lines = said.splitlines()
    assert lines[0].startswith(f"{report.target}: {report.verdict}")
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
    assert "flash2_op_by_op is 0.05 octaves off" in printed(example())
    assert "failed: rows that see nothing, nan, at most 0" in flat
    assert "exp2 of a logit" not in flat
    assert (
        "the same call again, dquery by at most 4.00 ulp, by RMS 0.70 of what" in flat
    )
    assert "out 2: 1.65, 4: 2.34, 8: 3.31, 16: 4.68 (predicted 1.25," in flat


def test_steps_that_cost_nothing_are_not_named():
    shares = {"dear": 0.9, "cheap": 0.004, "free": -0.02, "unclear": math.nan}
    row = example().attribution[0]
    report = example(
        attribution=[row | {"step": step, "share": x} for step, x in shares.items()]
    )
    assert "; dear 90%, unclear nan%" in printed(report)
    for drawn in (printed(report), page(report)):
        assert [step for step in shares if step in drawn] == ["dear", "unclear"]


@pytest.mark.parametrize(
    ("platform", "dtype", "kind", "cautious"),
    [
        ("cpu", "bfloat16", WORSE, True),
        ("gpu", "bfloat16", WORSE, False),
        ("cpu", "float16", WORSE, False),
        ("cpu", "bfloat16", "wrong wiring", False),
    ],
)
def test_what_is_worse_may_be_a_cpu(platform, dtype, kind, cautious):
    """A plain einsum was called no rounding of a known algorithm, and nothing else."""
    report = example(
        environment={"platform": platform},
        cells=cells(dtypes=(dtype,)),
        findings=[Finding(kind, "", "dK is 9 units off", ("dkey",), (), {})],
    )
    for drawn in (printed(report), page(report)):
        assert ("On a CPU XLA adds up" in drawn) == cautious
        # What is far above that many is hardly XLA's. dK sums over a group, too.
        terms = max(
            cell.query_length * cell.heads // cell.key_heads for cell in report.cells
        )
        about = f"below about {figure(terms**0.5)} units"
        assert (about in " ".join(drawn.split())) == cautious


def test_the_terminal_says_how_masks_were_passed():
    passed = {"causal": "is_causal", "window": "an array (mask)"}
    said = printed(example(settings={"mask_arguments": passed}))
    assert "\nMasks: causal by is_causal, window by an array (mask)\n" in said


def test_lines_fit_whatever_the_names(monkeypatch):
    long = "x" * 150
    report = example(
        target=long,
        cells=cells((long, "b"), (long,), tensors=[*TENSORS, "dsinks", long]),
        findings=[Finding("fails", long, f"line one\nline two {long}\x1b[31m\a")],
    )
    for columns in (200, 70):
        monkeypatch.setenv("COLUMNS", str(columns))
        said = printed(report)
        assert max(map(len, said.splitlines())) <= min(columns, 100)
        assert "\x1b" not in said and "\a" not in said
        assert "line one line two" in said
        assert all(name in said for name in (*TENSORS, "dsinks"))


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


def test_where_a_plain_implementation_is_exact_there_is_no_two_times_rule():
    ratios = math.inf, 0.5
    given = [
        cell(errors={"out": tensor_errors(1.0) | {"two_times_rule": ratio}})
        for ratio in ratios
    ]
    found = two_times(given)
    assert found is not None and found[0] == 0.5
    assert two_times(given[:1]) is None
    # It is said that there is one, all the same.
    allows = "it allows nothing where a plain implementation is exact"
    for some, said in ((given, True), (given[:1], True), (given[1:], False)):
        text = " ".join(printed(empty(cells=some)).split())
        assert (allows in text) == said and "Two-times rule" in text


def test_where_nothing_is_finite_there_is_no_error():
    """It was 0 units, in green."""
    report = audit_attention(
        lambda query, key, value: query * math.nan,
        shapes=[(1, 16, 16, 1, 1, 16)],
        families=["normal"],
        masks=["full"],
        gradients=False,
        against=[FLASH2],
    )
    units = [cell.errors["out"]["units"] for cell in report.cells]
    assert units and all(map(math.isnan, units))
    assert report.findings[0].kind == "not finite"
    text = io.StringIO()
    print_report(report, text)
    assert re.search("^normal +nan", text.getvalue(), re.MULTILINE)


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


def test_a_line_says_nothing_twice():
    def line(*of):
        return Finding(*of).line

    assert line("fails", "crash", "it ended") == "fails: crash: it ended"
    assert line("not taken", "not taken", "not taken on 2") == "not taken on 2"
    assert line("fails", "failed", "failed on 4") == "fails: failed on 4"
    assert line("not finite", "", "dQ is NaN") == "not finite: dQ is NaN"
