"""Figures: who looks like what, and what is drawn."""

import dataclasses

import pytest

from analysis.arms import ARMS
from analysis.experiments.speed import IMPLEMENTATIONS
from analysis.figures import Panel, draw, styles


def panel(names, **fields) -> Panel:
    rows = [
        {"name": name, "x": x, "y": y, "y_low": y / 2, "y_high": 2 * y}
        for name in names
        for x, y in ((128, 1.0), (256, 3.0))
    ]
    return Panel("title", rows, "x", "y", "name", "keys", "error", **fields)


def colours(figure, axes: int = 0) -> list[str]:
    return [bars[0].get_color() for bars in figure.axes[axes].containers]


def test_a_kernel_looks_the_same_whatever_is_beside_it():
    alone, beside = draw([panel(["cudnn"])]), draw([panel(["other", "cudnn"])])
    assert (
        colours(alone) == colours(beside)[1:] == [styles(["cudnn"])["cudnn"]["color"]]
    )


def test_names_without_a_look_of_their_own_keep_theirs_in_all_panels():
    figure = draw([panel(["a", "b"]), panel(["b", "a"])])
    assert colours(figure) == colours(figure, 1)[::-1]
    assert len(set(colours(figure))) == 2


def test_a_series_is_seen_below_one_that_lies_on_it():
    """The narrower lies above, in panels that have them in another order, too."""
    figure = draw([panel(["a", "b"]), panel(["b", "a"])])
    first, second = (axes.containers for axes in figure.axes)
    for below, above in ((first[0][0], first[1][0]), (second[1][0], second[0][0])):
        assert below.get_linewidth() > above.get_linewidth() >= 1
        assert below.get_markersize() > above.get_markersize()
        assert below.get_zorder() < above.get_zorder()


def test_a_line_does_not_go_back():
    """Of several runs, whose first has no number at the first step: it comes last."""
    rows = [{"name": "ulp", "x": x, "y": 1.0 + x} for x in (4, 8, 2)]
    figure = draw([Panel("title", rows, "x", "y", "name", "steps", "error")])
    line = figure.axes[0].containers[0][0]
    assert [*line.get_xdata()] == [2, 4, 8]
    assert [*line.get_ydata()] == [3, 5, 9]


def test_many_names_do_not_look_alike():
    names = [f"name {n}" for n in range(40)]
    looks = {tuple(look.values()) for look in styles(["flash2", *names]).values()}
    assert len(looks) == 41


def test_implementations_of_the_speed_table_do_not_look_alike():
    names = [*IMPLEMENTATIONS]
    looks = [tuple(look.values()) for look in styles(names).values()]
    assert len(set(looks)) == len(looks) == len(names) > 10


def test_arms_of_a_training_look_the_same_whoever_is_beside_them():
    """Nobody else's colour is in the way of one that is an arm's own."""
    names = [*ARMS, "emulated:flash2"]
    looks = styles(names)
    for name in names:
        assert styles([name, "another"])[name] == looks[name]
    assert len({tuple(look.values()) for look in looks.values()}) == len(names)
    assert looks["re-run"]["color"] != looks["ulp"]["color"]


def test_fewer_runs_are_dotted_and_an_end_is_crossed():
    rows = [
        {"name": "cudnn", "x": x, "y": 1.0 * x, "fewer": x > 2, "ends": x == 2}
        for x in (1, 2, 4, 8)
    ]
    one = Panel("title", rows, "x", "y", "name", "steps", "error")
    axes = draw([one]).axes[0]
    drawn = {line.get_linestyle(): [*line.get_xdata()] for line in axes.lines}
    assert drawn["-"] == [1, 2] and drawn[":"] == [2, 4, 8]
    (cross,) = [line for line in axes.lines if line.get_marker() == "X"]
    assert [*cross.get_xdata()] == [2]
    everybody = [{**row, "fewer": True} for row in rows]
    axes = draw([dataclasses.replace(one, rows=everybody)]).axes[0]
    assert [*axes.lines[0].get_xdata()] == [1, 2, 4, 8]


def test_a_fit_is_dashed_and_a_legend_stands_beside_its_panel():
    fits = {"pallas": [(128.0, 1.0), (256.0, 2.0)]}
    legend = {"pallas": "pallas: step^(1.00)", "re-run": "re-run: 0 at all steps"}
    figure = draw([panel(["pallas"], fits=fits, legend=legend)], caption="Means.")
    axes = figure.axes[0]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [[*line.get_ydata()] for line in dashed] == [[1.0, 2.0]]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == [*legend.values()] and not figure.legends
    figure.canvas.draw()
    beside = axes.get_legend().get_window_extent()
    assert beside.x0 >= axes.get_window_extent().x1
    assert beside.x1 <= figure.bbox.x1


def test_a_band_reaches_from_the_least_to_the_most():
    axes = draw([panel(["ulp", "pallas"], bands=["ulp"], level=1.0)]).axes[0]
    [band] = axes.collections[:1]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.5, 6.0)


def test_points_that_are_not_joined_stand_beside_each_other():
    rows = [{**row, "x": "normal"} for row in panel(["a", "b"]).rows[::2]]
    names = dataclasses.replace(panel([]), rows=rows, log_x=False, joined=False)
    places = [bars[0].get_xdata()[0] for bars in draw([names]).axes[0].containers]
    assert places[0] < 0 < places[1] and places == pytest.approx([-0.175, 0.175])
