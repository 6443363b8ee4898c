"""What a page of HTML holds, and where the texts of its drawings are."""

import html.parser
import itertools
import unicodedata


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
