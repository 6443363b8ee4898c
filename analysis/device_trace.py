"""Kernels, messages and gaps of GPUs while a program runs, from a trace's events."""

import math
import re
from collections.abc import Iterable, Sequence

from analysis.record import Row
from attn_jax.timing import Event

# Kernels of NCCL, and copies from card to card.
_MESSAGES = re.compile(r"nccl|p2p|sendrecv", re.IGNORECASE)
_ATTENTION = "attention_"
COLUMNS = "attention", "rest", "communication", "exposed", "idle"


def summary(events: Sequence[Event], runs: int) -> Row:
    """Milliseconds of a run on one device, `COLUMNS`: how long kernels of ours run and
    what else computes or copies there, added up; how long messages travel, and how much
    of that time nothing else runs; and for how long nothing runs at all, between the
    first event and the last."""
    messages = [event for event in events if _MESSAGES.search(event.name)]
    others = [event for event in events if not _MESSAGES.search(event.name)]
    attention = [event for event in others if _ATTENTION in event.name]
    sent, rest = under_way(messages), under_way(others)
    hidden = sum(
        max(0.0, min(end, stop) - max(start, begin))
        for start, end in sent
        for begin, stop in rest
    )
    busy = under_way(events)
    total = {
        "attention": _added(attention),
        "rest": _added(others) - _added(attention),
        "communication": _length(sent),
        "exposed": _length(sent) - hidden,
        "idle": busy[-1][1] - busy[0][0] - _length(busy) if busy else 0.0,
    }
    return {name: ms / runs for name, ms in total.items()}


def kernels(events: Sequence[Event], runs: int) -> list[Row]:
    """How often each kernel starts in a run, and for how many milliseconds it runs, the
    longest first. Numbers that XLA puts behind a name are left out."""
    found: dict[str, list[float]] = {}
    for event in events:
        name = re.sub(r"[._]\d+(?=$|[._])", "", event.name)
        found.setdefault(name, []).append(event.end - event.start)
    rows = [
        {"kernel": name, "count": len(times) / runs, "ms": sum(times) / runs}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def under_way(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times at which any of the events is."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if found and event.start <= found[-1][1]:
            found[-1] = found[-1][0], max(event.end, found[-1][1])
        else:
            found.append((event.start, event.end))
    return found


def _added(events: Iterable[Event]) -> float:
    return math.fsum(event.end - event.start for event in events)


def _length(times: Iterable[tuple[float, float]]) -> float:
    return math.fsum(end - start for start, end in times)
