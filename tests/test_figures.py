"""Figures: who looks like what, and what is drawn."""

import dataclasses

import pytest

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


def test_many_names_do_not_look_alike():
    names = [f"name {n}" for n in range(40)]
    looks = {tuple(look.values()) for look in styles(["flash2", *names]).values()}
    assert len(looks) == 41


def test_implementations_of_the_speed_table_do_not_look_alike():
    names = [*IMPLEMENTATIONS]
    looks = [tuple(look.values()) for look in styles(names).values()]
    assert len(set(looks)) == len(looks) == len(names) > 10


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
