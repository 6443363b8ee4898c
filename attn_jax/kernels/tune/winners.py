"""Which candidate takes the place of an entry: one that wins by more than noise.

Noise is the table's own tiling timed against itself, in the same rounds. Candidates are
screened; the fastest of a class is a selection from many, so its time is good luck in
part. It is then timed `CONFIRMATIONS` times more, each in a process of its own (other
addresses, other clocks), and wins if the least of those ratios is above the largest
that the table's tiling has against itself in them, in either direction.

If it were no faster, the three times t of a process (the table's twice, t1 and t2, and
the candidate's, t3) would be drawn alike, and t1 / t3 above t1 / t2 and t2 / t1 with a
chance of one in four: t3 < t2, and, in logarithms, t1 above the mean of t2 and t3. In
four processes that is one in 256, and the rule asks for more.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from attn_jax.kernels.tilings import Choice
from attn_jax.kernels.tune.trial import CLASSES, LengthClass, few_keys
from attn_jax.kernels.tuning import Entry, Group

CONFIRMATIONS = 4


class Measured(NamedTuple):
    """A tiling in a class: the present one's time over its own, and over itself."""

    tiling: Choice
    ratio: float
    again: float


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is known of one place in the table.

    Attributes:
      present: the table's tiling.
      fastest: of the candidates, None if none could be timed.
      ratio: the present one's time over the fastest one's, the least of confirmations
        where there were any.
      noise: the largest ratio of the present one against itself.
      verdict: wins, keeps (the present entry), or unfinished.
    """

    group: Group
    length_class: LengthClass
    present: Choice
    fastest: Choice | None
    ratio: float | None
    noise: float | None
    verdict: Literal["wins", "keeps", "unfinished"]

    @property
    def tiling(self) -> Choice:
        """What the table is to have."""
        if self.verdict == "wins" and self.fastest is not None:
            return self.fastest
        return self.present


def noise(measured: Sequence[Measured]) -> float:
    """How far the present tiling is from itself, at the most, as a ratio above 1."""
    return max(max(m.again, 1 / m.again) for m in measured)


def promising(measured: Sequence[Measured], present: Choice) -> Measured | None:
    """The fastest of the screened candidates, if it is worth confirming."""
    others = [m for m in measured if m.tiling != present]
    best = max(others, key=lambda m: m.ratio, default=None)
    return best if best is not None and best.ratio > noise(measured) else None


def confirmed(measured: Sequence[Measured]) -> bool:
    """Whether a candidate that was timed again and again wins. See above."""
    if len(measured) < CONFIRMATIONS:
        return False
    return min(m.ratio for m in measured) > noise(measured)


def new_table(entries: Sequence[Entry], decisions: Sequence[Decision]) -> list[Entry]:
    """The table with the winners in it, all else as it is, in its order.

    A place that has one entry for all lengths gets two where the classes differ then.
    """
    groups: dict[Group, dict[LengthClass, Decision]] = {}
    for d in decisions:
        groups.setdefault(d.group, {})[d.length_class] = d
    table = list(entries)
    for group, of_class in groups.items():
        if all(d.verdict != "wins" for d in of_class.values()):
            continue
        few, many = (of_class[c].tiling for c in CLASSES)
        new = [Entry(*group, None, many)]
        if few != many:
            new.insert(0, Entry(*group, few_keys(group), few))
        where = [i for i, e in enumerate(table) if e.group == group]
        at = where[0] if where else len(table)
        table = [e for e in table if e.group != group]
        table[at:at] = new
    return table


def as_markdown(decisions: Sequence[Decision]) -> str:
    """The winners beside the present entries."""
    lines = [
        "| architecture | kernel | head dims | keys seen | present | fastest | ratio "
        "| noise | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    words: Mapping[LengthClass, str] = {"few": "to", "many": "above"}
    for d in decisions:
        keys = f"{words[d.length_class]} {few_keys(d.group)}"
        figures = ("" if x is None else f"{x:.3f}" for x in (d.ratio, d.noise))
        cells = (
            *(d.group.architecture, d.group.kernel, d.group.of, keys, d.present),
            *(d.fastest or "", *figures, d.verdict),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"
