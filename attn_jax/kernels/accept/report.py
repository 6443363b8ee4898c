"""The report on a card, as Markdown and as data."""

import dataclasses
from typing import Any, Literal

Status = Literal["passed", "failed", "left out", "measured"]


@dataclasses.dataclass(frozen=True)
class Result:
    """One thing that was to be done.

    Attributes:
      part: correctness, speed or tuning.
      detail: why it failed or was left out, in one line.
      data: figures.
    """

    part: Literal["correctness", "speed", "tuning"]
    name: str
    status: Status
    detail: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Report:
    """All of it. `card` are device, versions and driver; `minutes` what it took."""

    architecture: str
    native: bool
    card: dict[str, Any]
    minutes: float
    results: tuple[Result, ...]
    tuned: str = ""

    @property
    def accepted(self) -> bool:
        """Nothing failed, and everything that says whether results are right was run.

        Times are no condition.
        """
        if any(result.status == "failed" for result in self.results):
            return False
        checked = [r.status for r in self.results if r.part == "correctness"]
        return bool(checked) and set(checked) == {"passed"}

    @property
    def verdict(self) -> str:
        count = {
            status: sum(r.status == status for r in self.results)
            for status in ("failed", "left out")
        }
        said = ", ".join(f"{n} {status}" for status, n in count.items() if n)
        word = "accepted" if self.accepted else "not accepted"
        return f"{word}: {said}" if said else word

    def as_json(self) -> dict[str, Any]:
        return {
            "accepted": self.accepted,
            "verdict": self.verdict,
            **dataclasses.asdict(self),
        }

    def as_markdown(self) -> str:
        kernels = f"{self.architecture.capitalize()}'s kernels"
        if not self.native:
            kernels += ", as a trial on a GPU of another architecture"
        lines = [
            f"# {self.card['device']}: {self.verdict}",
            "",
            f"{kernels}; {self.minutes:.1f} minutes.",
            "",
            "| | |",
            "|---|---|",
        ]
        facts = {k: v for k, v in self.card.items() if k != "versions"}
        facts |= self.card["versions"]
        lines += [f"| {name} | {value} |" for name, value in facts.items()]
        lines += ["", "## Correctness", ""]
        lines += [
            "Errors in units: 1 is that of the exact result rounded once. The bar is "
            "1.7 (dQ under a soft cap 2.0), and equal bits in every run.",
            "",
            "| check | out | dQ | dK | dV | verdict |",
            "|---|---|---|---|---|---|",
        ]
        for r in self._of("correctness"):
            units = r.data.get("units", {})
            figures = (
                f"{units[x]:.2f}" if x in units else ""
                for x in ("out", "dq", "dk", "dv")
            )
            lines.append(_line(r.name, *figures, _said(r)))
        lines += [
            *("", "## Speed", ""),
            "TFLOP/s by the usual count; kernels' own times by CUPTI. Training: the "
            "forward and the backward pass.",
            *("", "| case | ours | cuDNN | ratio | |", "|---|---|---|---|---|"),
        ]
        for r in self._of("speed"):
            rate = r.data.get("tflops", {})
            both = "pallas" in rate and "cudnn" in rate
            ratio = f"{rate['pallas'] / rate['cudnn']:.2f}" if both else ""
            figures = (
                f"{rate[x]:.0f}" if x in rate else "" for x in ("pallas", "cudnn")
            )
            lines.append(_line(r.name, *figures, ratio, _said(r)))
        lines += ["", "## Tuning", ""]
        lines += [self.tuned] if self.tuned else []
        lines += [
            f"- {r.name}: {_said(r)}"
            for r in self._of("tuning")
            if r.status == "left out"
        ]
        return "\n".join(lines).rstrip() + "\n"

    def _of(self, part: str) -> list[Result]:
        return [result for result in self.results if result.part == part]


def _said(result: Result) -> str:
    return f"{result.status}: {result.detail}" if result.detail else result.status


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
