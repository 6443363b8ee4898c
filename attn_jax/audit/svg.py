"""Plots as inline SVG, made by hand: no script, no font file, nothing to fetch.

Lengths are in pixels of the drawing, which is shown in its own size where there is
room. Text is monospaced, so that its width is known: nothing is cut off or overlaps.
"""

import html
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from attn_jax.audit.raised import printable
from attn_jax.audit.summary import figure

FONT_SIZE = 12
# Monospaced fonts are 0.60 em wide (DejaVu, Menlo, Liberation), some 0.55.
CHARACTER = 0.61 * FONT_SIZE
_FONTS = "ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace"
# Of series, on white and on near black: the hues of Okabe and Ito, each in a lightness
# that the background asks for. A series has a marker of its own as well.
LIGHT = "#0072b2", "#b84a00", "#007a59", "#a0457f", "#8a6100", "#555555"
DARK = "#56b4e9", "#ff9248", "#2fcb9b", "#e79bc6", "#f0c24b", "#bbbbbb"
_MARKERS = (
    "M-4,0a4,4 0 1 0 8,0a4,4 0 1 0 -8,0z",  # circle
    "M-3.5,-3.5h7v7h-7z",
    "M0,-5L4.5,3.5H-4.5z",
    "M0,-5L5,0L0,5L-5,0z",
    "M-4.5,-3.5H4.5L0,5z",
    "M-1.5,-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",  # plus
    # One more than there are colours: both come round together after 42 series.
    "M-5.5,-2h11v4h-11z",
)
# YlOrBr of ColorBrewer: lightness falls all the way, whatever hues an eye can tell.
_SCALE = (
    *((255, 255, 229), (255, 247, 188), (254, 227, 145), (254, 196, 79)),
    *((254, 153, 41), (236, 112, 20), (204, 76, 2), (153, 52, 4), (102, 37, 6)),
)
# Units of error at the ends of the scale: what is best possible, and hopeless.
_BEST, _WORST = 1.0, 1000.0
Anchor = Literal["start", "middle", "end"]
Number = int | float


def text_width(text: str) -> float:
    """An upper estimate of a line's width; East Asian characters take two columns."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return (len(text) + wide) * CHARACTER


class Drawing:
    """An `<svg>` of the given size that grows by one element at a time."""

    def __init__(self, width: Number, height: Number, label: str):
        self.width, self.height = width, height
        self._parts = [
            f'<svg role="img" aria-label="{_escaped(label)}" width="{_n(width)}" '
            f'height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}" '
            f'fill="currentColor" font-family="{_FONTS}" font-size="{FONT_SIZE}">'
        ]

    def __str__(self) -> str:
        return "".join(self._parts) + "</svg>"

    def text(
        self,
        x: Number,
        y: Number,
        text: str,
        *,
        anchor: Anchor = "start",
        room: Number = math.inf,
        fill: str = "",
        bold: bool = False,
    ) -> None:
        """One line with its baseline at y; shortened to `room`, and to the drawing."""
        inside = {
            "start": self.width - x,
            "end": x,
            "middle": 2 * min(x, self.width - x),
        }
        text = fitted(printable(text), min(room, inside[anchor]))
        attributes = "" if anchor == "start" else f' text-anchor="{anchor}"'
        attributes += f' fill="{fill}"' if fill else ""
        attributes += ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}"{attributes}>{_escaped(text)}</text>'
        )

    def rect(
        self,
        x: Number,
        y: Number,
        width: Number,
        height: Number,
        attributes: str,
        title: str = "",
    ) -> None:
        self._add(
            f'rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f"{attributes}",
            title,
        )

    def path(self, d: str, attributes: str, title: str = "") -> None:
        self._add(f'path d="{d}" {attributes}', title)

    def _add(self, element: str, title: str) -> None:
        name = element.split(" ", 1)[0]
        inside = f"<title>{_escaped(title)}</title>" if title else ""
        self._parts.append(f"<{element}>{inside}</{name}>")


def fitted(text: str, room: Number) -> str:
    """The text, its end replaced by two dots where it is wider than `room`."""
    if text_width(text) <= room:
        return text
    while text and text_width(text) + 2 * CHARACTER > room:
        text = text[:-1]
    return f"{text}.."


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _n(x: Number) -> str:
    return f"{x:.1f}".removesuffix(".0")


def tile_colour(units: Number) -> tuple[str, str]:
    """Fill for an error and the colour of text on it, black or white, by contrast.

    Logarithmic from 1 unit to 1000; NaN and what lies beyond is the darkest.
    """
    place = 1.0
    if units < _WORST:
        low, high = math.log(_BEST), math.log(_WORST)
        place = (math.log(max(units, _BEST)) - low) / (high - low)
    at = place * (len(_SCALE) - 1)
    i = min(int(at), len(_SCALE) - 2)
    colour = [
        round(a + (b - a) * (at - i))
        for a, b in zip(_SCALE[i], _SCALE[i + 1], strict=True)
    ]
    fill = "#" + "".join(f"{c:02x}" for c in colour)
    # Where black and white have the same contrast: (L + 0.05)^2 = 1.05 * 0.05.
    return fill, "#000" if luminance(fill) > 0.179 else "#fff"


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb", of WCAG 2: 0 is black, 1 white."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
    )
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


class Tile(NamedTuple):
    """`units` None: no measurement; the tile is empty but for its text."""

    units: Number | None
    text: str
    title: str


def heat_map(
    title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Tile]]
) -> str:
    """Tiles [rows, columns], each with its number."""
    left, wide, high, top = 110, 72, 24, 44
    drawing = Drawing(
        max(left + wide * len(columns), text_width(title)) + 2,
        top + high * len(rows) + 2,
        title,
    )
    drawing.text(0, 14, title, bold=True)
    for j, column in enumerate(columns):
        middle = left + wide * (j + 0.5)
        drawing.text(middle, 36, column, anchor="middle", room=wide - 4)
    for i, (name, tiles) in enumerate(rows.items()):
        y = top + high * i
        drawing.text(left - 8, y + 16, name, anchor="end")
        for j, tile in enumerate(tiles):
            x = left + wide * j
            fill, ink = "none", ""
            if tile.units is not None:
                fill, ink = tile_colour(tile.units)
            attributes = f'fill="{fill}" stroke="currentColor" stroke-opacity=".25"'
            drawing.rect(x + 1, y + 1, wide - 2, high - 2, attributes, tile.title)
            drawing.text(
                x + wide / 2,
                y + 16,
                tile.text,
                anchor="middle",
                room=wide - 4,
                fill=ink,
            )
    return str(drawing)


def heat_legend() -> str:
    """The scale of `heat_map`."""
    steps, wide, high = 48, 6, 14
    left = text_width("0001")
    drawing = Drawing(steps * wide + 2 * left, 34, "colours from 1 to 1000 units")
    for i in range(steps):
        units = _BEST * (_WORST / _BEST) ** (i / (steps - 1))
        fill, _ = tile_colour(units)
        drawing.rect(left + i * wide, 0, wide + 0.5, high, f'fill="{fill}"')
    for i, label in enumerate(("1", "10", "100", "1000")):
        x = left + (i / 3 * (steps - 1) + 0.5) * wide
        drawing.text(x, 30, label, anchor="middle")
    return str(drawing)


class Series(NamedTuple):
    """A line of a plot. `number` picks its colour and marker; dashed: no markers."""

    name: str
    number: int
    points: Sequence[tuple[Number, Number]]
    dashed: bool = False


def _colour(number: int) -> str:
    return f"var(--s{number % len(LIGHT)})"


def series_variables(colours: Sequence[str]) -> str:
    """The CSS variables that plots refer to, for one background."""
    return "".join(f"--s{i}:{colour};" for i, colour in enumerate(colours))


def _marker(
    drawing: Drawing, x: Number, y: Number, number: int, hollow=False, title=""
):
    fill = "var(--page)" if hollow else _colour(number)
    drawing.path(
        _MARKERS[number % len(_MARKERS)],
        f'transform="translate({_n(x)},{_n(y)})" fill="{fill}" '
        f'stroke="{_colour(number)}"',
        title,
    )


def legend(names: Iterable[tuple[str, int]]) -> str:
    """Names of series beside their markers, in lines."""
    most, used, places, x, y = 680, 0.0, [], 0.0, 0
    for name, number in names:
        name = fitted(printable(name), most - 40)
        wide = 22 + text_width(name) + 18
        if x + wide > most:
            x, y = 0.0, y + 20
        places.append((x, y, name, number))
        x += wide
        used = max(used, x)
    drawing = Drawing(used, y + 20, "legend")
    for x, y, name, number in places:
        _marker(drawing, x + 8, y + 10, number)
        drawing.text(x + 22, y + 14, name)
    return str(drawing)


def lines(
    title: str, axis: str, series: Sequence[Series], also: Iterable[Number] = ()
) -> str:
    """Units of error, both axes logarithmic, with the line of 1 unit.

    The axis of units holds 1 and the values `also`, so that plots can be compared.
    Zero sits on the lower edge and infinity on the upper one, with hollow markers;
    NaN is left out.
    """
    width, height = 340, 240
    left, right, top, bottom = 62, 14, 46, 42
    drawing = Drawing(width, height, title)
    drawing.text(0, 14, title, bold=True)
    drawing.text(0, 34, "units")
    drawing.text(left, height - 4, axis)
    xs = sorted({x for one in series for x, _ in one.points})
    values = [y for one in series for _, y in one.points]
    low, high = _decades([1.0, *values, *also])
    x_of = _Scale(xs[0], xs[-1], left + 20, width - right - 20)
    y_of = _Scale(10.0**low, 10.0**high, height - bottom, top)
    every = -(-(high - low) // 6)
    for exponent in (x for x in range(low, high + 1) if x % every == 0):
        y = y_of(10.0**exponent)
        drawing.path(
            f"M{left},{_n(y)}H{width - right}",
            'stroke="currentColor" '
            + ('stroke-opacity=".2"' if exponent else 'stroke-dasharray="6 3"'),
        )
        drawing.text(left - 6, y + 4, _power(exponent), anchor="end")
    free = left - CHARACTER
    for x in xs:
        half = text_width(f"{x:g}") / 2
        if x_of(x) - half >= free:
            drawing.text(x_of(x), height - bottom + 18, f"{x:g}", anchor="middle")
            free = x_of(x) + half + CHARACTER
    for one in series:
        placed = [
            (x, y, x_of(x), y_of(y)) for x, y in sorted(one.points) if not math.isnan(y)
        ]
        dash = ' stroke-dasharray="2 3"' if one.dashed else ""
        drawing.path(
            "".join(
                f"{'ML'[i > 0]}{_n(px)},{_n(py)}"
                for i, (*_, px, py) in enumerate(placed)
            ),
            f'fill="none" stroke="{_colour(one.number)}" stroke-width="1.5"{dash}',
        )
        for x, y, px, py in placed if not one.dashed else ():
            hollow = y == 0 or math.isinf(y)
            name = f"{one.name}, {x:g}: {figure(y)} units"
            _marker(drawing, px, py, one.number, hollow, name)
    return str(drawing)


def _decades(values: Iterable[Number]) -> tuple[int, int]:
    """Exponents of the decades around all values that are positive and finite."""
    # Powers beyond these are no normal floats.
    positive = [min(max(x, 1e-300), 1e300) for x in values if 0 < x < math.inf]
    low = math.floor(math.log10(min(positive)))
    return low, max(math.ceil(math.log10(max(positive))), low + 1)


def _power(exponent: int) -> str:
    return f"1e{exponent}" if abs(exponent) > 3 else f"{10.0**exponent:g}"


class _Scale(NamedTuple):
    """Logarithmic: value `first` at place `start`, `last` at `end`, and no further."""

    first: Number
    last: Number
    start: Number
    end: Number

    def __call__(self, value: Number) -> Number:
        if self.first == self.last:
            return (self.start + self.end) / 2
        if not 0 < value < math.inf:
            return self.start if value <= 0 else self.end
        whole = math.log(self.last) - math.log(self.first)
        part = (math.log(value) - math.log(self.first)) / whole
        return self.start + (self.end - self.start) * min(max(part, 0), 1)


class Bar(NamedTuple):
    """A bar of a group. `value` is what the axis shows, `text` what stands beside."""

    name: str
    value: Number
    text: str
    number: int = 0


def bars(
    title: str, groups: Mapping[str, Sequence[Bar]], *, logarithmic: bool = False
) -> str:
    """Horizontal bars under the name of their group.

    From 0 to 1, or logarithmic over whole decades, which begin one below the least
    value and 1; a value that is not on the axis has no bar or a full one.
    """
    width, left, right, high, top = 480, 190, 74, 18, 26
    count = sum(len(group) for group in groups.values())
    height = top + high * count + 26 * len(groups) + 24
    drawing = Drawing(width, height, title)
    drawing.text(0, 14, title, bold=True)
    end = width - right
    values = [bar.value for group in groups.values() for bar in group]
    low, last = _decades([1.0, *values])
    low -= 1
    scale = _Scale(10.0**low, 10.0**last, left, end)
    ticks: list[tuple[Number, str]] = [(left, "0"), (end, "100 %")]
    if logarithmic:
        every = -(-(last - low) // 4)
        ticks = [
            (scale(10.0**x), _power(x)) for x in range(low, last + 1) if x % every == 0
        ]
    for x, label in ticks:
        line = f"M{_n(x)},{top}V{height - 22}"
        drawing.path(line, 'stroke="currentColor" stroke-opacity=".25"')
        drawing.text(x, height - 6, label, anchor="middle")
    y = float(top)
    for name, group in groups.items():
        drawing.text(0, y + 16, name, bold=True, room=left - 6)
        y += 22
        for bar in group:
            x = scale(bar.value) if logarithmic else left + (end - left) * _part(bar)
            x = left if math.isnan(bar.value) else x
            attributes = f'fill="{_colour(bar.number)}"'
            what = f"{name}, {bar.name}: {bar.text}"
            drawing.rect(left, y + 2, x - left, high - 4, attributes, what)
            drawing.text(left - 6, y + 13, bar.name, anchor="end", room=left - 20)
            drawing.text(x + 4, y + 13, bar.text, room=right - 8)
            y += high
        y += 4
    return str(drawing)


def _part(bar: Bar) -> Number:
    return 0.0 if math.isnan(bar.value) else min(max(bar.value, 0.0), 1.0)
