"""The page of an audit: complete, readable, and nothing but what was meant."""

import dataclasses
import math
import re

import numpy as np
import pytest

from attn_jax.audit import svg
from attn_jax.audit.finding import Finding
from attn_jax.audit.html import page
from attn_jax.audit.problem import TENSORS
from attn_jax.audit.report import Report
from attn_jax.audit.summary import worst
from tests.page_parser import boxes, outside, overlapping, parsed
from tests.report_example import FAMILIES, cell, cells, crowded, empty, example


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


def test_the_page_says_where_and_on_how_many_problems():
    """What a picture of its top must say, and the same number as the terminal's."""
    report = example()
    beside = dataclasses.replace(
        report, settings=dict(report.settings) | {"beside": ["one more", "another"]}
    )
    said = " ".join(" ".join(parsed(page(beside)).words).split())
    top = said.partition("Findings")[0]
    for name in (report.environment["device"], f"JAX {report.environment['jax']}"):
        assert name in top
    assert f"2 more looked at, {len(report.cells) + 2} in all" in said
    assert "one more" in said and "another" in said
    assert "more looked at" not in " ".join(parsed(page(report)).words)


def test_what_failed_is_seen_and_what_passed_is_folded():
    report = example()
    failed = [x["name"] for x in report.probes if not x["passed"]]
    passed = [x["name"] for x in report.probes if x["passed"]]
    assert failed and passed
    section = page(report).partition("<h2>Probes</h2>")[2].partition("</section>")[0]
    shown, _, folded = section.partition("<details>")
    assert f"{len(failed)} failed" in shown
    assert all(name in shown for name in failed)
    assert all(name in folded and name not in shown for name in passed)


def test_what_rounding_does_not_allow_is_the_first_of_what_has_other_bits():
    row = {"tensor": "out", "largest_difference": 3.0, "bound": 1.0, "bit_equal": False}
    rows = [
        row | {"name": "the same", "measured": 0.0, "bit_equal": True},
        row | {"name": "a little", "measured": 0.5},
        row | {"name": "too much", "measured": 2.0},
    ]
    text = page(dataclasses.replace(example(), invariances=rows))
    section = text.partition("<h2>Invariances</h2>")[2].partition("</section>")[0]
    names = "too much", "a little", "<details>", "the same"
    places = [section.index(name) for name in names]
    assert places == sorted(places)


def test_a_map_has_dbias_where_there_is_a_bias():
    without = cells(masks=("full",), tensors=TENSORS[:-1])
    document = parsed(page(example(cells=without + cells(masks=("bias",)))))
    columns = {
        title: [tensor for tensor in TENSORS if tensor in texts]
        for drawing in document.drawings
        for texts in [[text for text, *_ in boxes(drawing)]]
        for title in [next((text for text in texts if "mask" in text), "")]
    }
    assert columns["bfloat16, mask full"] == list(TENSORS[:-1])
    assert columns["bfloat16, mask bias"] == list(TENSORS)


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
        cell(status="failed", length=n, reason="XlaRuntimeError <line>\n" * 5000)
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
    names = [*TENSORS, "dsinks", "dsoft_cap"]
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
