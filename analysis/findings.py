"""What the rows of a census say in words: which preconditions are met, and where.

A precondition is met in a head where a column of `analysis.preconditions`, or the
larger of several, is at or beyond a threshold of `PRECONDITIONS`, whose `why` says
where the threshold comes from. One that is met says that a known failure is possible
there, not that it happens: what it costs dQ is in the columns of dQ.

`tied_maxima`, `v_coherence_rms`, `sink_v`, `logit_spread` have no threshold of their
own: they tell more of what another column says.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.experiments.backward import GOOD
from analysis.preconditions import DQ
from analysis.record import Row

# e^88.7 is the largest number of FP32, e^-87.3 the least that is not subnormal.
_EXPONENT = 87.0
_ONE_SIGN = 0.9


@dataclasses.dataclass(frozen=True)
class Precondition:
    """What makes a known failure possible.

    Attributes:
      name: in a word or three.
      columns: of `analysis.preconditions`.
      least: it is met where one of them is this or more in absolute value.
      says: what is so in a head that meets it.
      why: where the threshold comes from.
      percent: the columns are shares, which are shown in percent.
    """

    name: str
    columns: tuple[str, ...]
    least: float
    says: str
    why: str
    percent: bool = False

    def size(self, row: Mapping[str, Any]) -> float | None:
        """What is held against the threshold; None where nothing was measured."""
        values = [row[column] for column in self.columns]
        return max((abs(float(x)) for x in values if x is not None), default=None)


PRECONDITIONS = (
    Precondition(
        "not finite",
        ("not_finite",),
        1.0,
        "Q, K, V or dO holds NaN or infinity",
        "one is too many",
    ),
    Precondition(
        "repeated maxima",
        ("repeated_ones",),
        0.01,
        "More than one weight of a row rounds to 1 (Qiu & Yao) in 1 % of the rows or "
        "more",
        "more than chance: the largest two of S normal logits of spread 1 are within "
        "2^-9 of each other with a probability of about 2^-9 sqrt(2 ln S), 0.7 % for "
        "320 keys",
        percent=True,
    ),
    Precondition(
        "faint rest",
        ("faint_rest",),
        0.01,
        "All weight but the largest is below half a spacing in 1 % of the rows or more",
        "a choice: the same share",
        percent=True,
    ),
    Precondition(
        "V of one sign",
        ("v_coherence_max",),
        _ONE_SIGN,
        "A column of V has one sign",
        "its mean is 0.9 of its RMS, 2.06 standard deviations: 98 % of normal values "
        "have its sign",
    ),
    Precondition(
        "sink",
        ("sink_weight",),
        0.3,
        "One key takes 30 % of all weight or more",
        "the threshold of arXiv 2410.10781",
        percent=True,
    ),
    Precondition(
        "large logits",
        ("logit_max",),
        _EXPONENT,
        "Logits leave the range of FP32's exp",
        "exp of it is no FP32 number unless the maximum is taken off first",
    ),
    Precondition(
        "large LSE",
        ("lse_min", "lse_max"),
        _EXPONENT,
        "LSE leaves the range of FP32's exp",
        "exp(LSE) is no FP32 number",
    ),
    Precondition(
        "mean of K",
        ("k_mean",),
        1.0,
        "K has a mean as large as its spread: dQ suffers where rows of dS do not sum "
        "to zero",
        "half of the mean square of K is its mean's",
    ),
    Precondition(
        "mean of V",
        ("v_mean",),
        1.0,
        "V has a mean as large as its spread: dP and delta share what cancels in dS",
        "half of the mean square of V is its mean's",
    ),
)
_SHOWN = {
    "P = 1 again": "repeated_ones",
    "faint rest": "faint_rest",
    "V one sign": "v_coherence_max",
    "sink": "sink_weight",
    "max |x|": "logit_max",
    "max LSE": "lse_max",
    "K mean": "k_mean",
    "V mean": "v_mean",
    "dQ flash2": DQ[0],
    "dQ attn_jax_hopper": DQ[1],
    "ratio": "dq_ratio",
}


def worst(rows: Sequence[Row]) -> list[Row]:
    """One line for each step and layer: the largest of each column over its heads.

    `head` is that with the largest error of dQ under flash2.
    """
    cells: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["step"], row["layer"]), []).append(row)
    lines = []
    for (step, layer), of_cell in cells.items():
        line: Row = {"step": step, "layer": layer}
        for title, column in _SHOWN.items():
            values = [row[column] for row in of_cell if row[column] is not None]
            line[title] = max(values, default=None)
        line["head"] = next((row["head"] for row in _sorted(of_cell, DQ[0])), None)
        lines.append(line)
    return lines


def findings(rows: Sequence[Row]) -> list[Row]:
    """A sentence for each precondition that is met, or for none, and for each recipe.

    Each finding has `name`, `threshold`, `why`, `met` (step, layer and head of each,
    the worst first) and `says`, the sentence. A recipe's heads are those where it gives
    dQ more error than a good kernel has (`backward.GOOD`).
    """
    met = [one for one in (_finding(p, rows) for p in PRECONDITIONS) if one["met"]]
    if not met:
        says = f"None of the {len(PRECONDITIONS)} preconditions is met in any of "
        met = [_entry("none", None, "", [], f"{says}{len(rows)} heads.")]
    return met + [_of_recipe(name, rows) for name in DQ]


def _entry(name: str, threshold, why: str, passing: Sequence[Row], says: str) -> Row:
    where = [[row["step"], row["layer"], row["head"]] for row in passing]
    entry = {"name": name, "threshold": threshold, "why": why, "met": where}
    return entry | {"says": says}


def _finding(one: Precondition, rows: Sequence[Row]) -> Row:
    sized = [(one.size(row), row) for row in rows]
    there = [(size, row) for size, row in sized if size is not None]
    there = [pair for pair in there if pair[0] >= one.least]
    there.sort(key=lambda pair: -pair[0])
    passing = [row for _, row in there]
    says = ""
    if passing:
        largest = _percent(there[0][0]) if one.percent else f"{there[0][0]:.3g}"
        says = f"{one.says}: {_spread(passing, rows)}, at most {largest} "
        says += f"({_where(passing[0])}){_more(one.name, passing)}."
    return _entry(one.name, one.least, one.why, passing, says)


def _more(name: str, passing: Sequence[Row]) -> str:
    """What other columns add to a sentence, after its worst head."""
    if name == "repeated maxima":
        ties = _percent(max(row["tied_maxima"] for row in passing))
        both = sum(row["v_coherence_max"] >= _ONE_SIGN for row in passing)
        return (
            f"; maxima tie exactly in {ties} of a head's rows at most, and V has a "
            f"column of one sign in {both} of these heads"
        )
    if name == "sink":
        return f"; its |V| is {passing[0]['sink_v']:.3g} of the median"
    return ""


def _of_recipe(column: str, rows: Sequence[Row]) -> Row:
    recipe, there = column.removeprefix("dq_"), _sorted(rows, column)
    passing = [row for row in there if row[column] > GOOD]
    if there:
        least, most = there[-1][column], there[0][column]
        says = (
            f"dQ under {recipe} is predicted {least:.3g} to {most:.3g} units off (the "
            f"most: {_where(there[0])}), more than {GOOD} in {_spread(passing, rows)}."
        )
    else:
        says = f"dQ under {recipe}: no head has a dO to predict it from."
    return _entry(f"dQ under {recipe}", GOOD, "what a good kernel has", passing, says)


def _sorted(rows: Sequence[Row], column: str) -> list[Row]:
    """The rows that have the column, the largest first."""
    there = [row for row in rows if row[column] is not None]
    return sorted(there, key=lambda row: -row[column])


def _where(row: Row) -> str:
    return f"step {row['step']}, layer {row['layer']}, head {row['head']}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _spread(some: Sequence[Row], rows: Sequence[Row]) -> str:
    """How many heads, and in which steps and layers they are."""
    if not some:
        return f"none of {len(rows)} heads"
    places = []
    for name in ("step", "layer"):
        numbers, of_all = ({row[name] for row in x} for x in (some, rows))
        if len(numbers) == len(of_all) > 1:
            places.append(f"every {name}")
        elif len(of_all) > 1:
            plural = "s" if len(numbers) > 1 else ""
            places.append(f"{name}{plural} {_listed(sorted(numbers))}")
    where = f" ({'; '.join(places)})" if places else ""
    return f"{len(some)} of {len(rows)} heads{where}"


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last
