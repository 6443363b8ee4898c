"""Goes through the candidates, keeps what it finds, and decides."""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attn_jax.kernels import checks, tuning
from attn_jax.kernels.tilings import Choice, set_fields
from attn_jax.kernels.tune import trial
from attn_jax.kernels.tune.candidates import candidates, reason_against
from attn_jax.kernels.tune.trial import (
    CLASSES,
    PROBLEMS,
    Candidate,
    LengthClass,
    class_ratio,
)
from attn_jax.kernels.tune.winners import (
    CONFIRMATIONS,
    Decision,
    Measured,
    confirmed,
    noise,
    promising,
)
from attn_jax.kernels.tuning import Group
from attn_jax.kernels.worker import Worker, WorkerFailed
from attn_jax.store import Store
from attn_jax.timing import RUNS

# A candidate compiles some seven programs and runs them for seconds: one that takes
# longer hangs.
SECONDS_FOR_A_CANDIDATE = 300.0


class OutOfTime(Exception):
    """The budget is spent; what is finished is kept."""


class Search:
    """Measures what a store does not have yet.

    Args:
      seconds: of timing for each problem of a candidate.
      deadline: by `clock`; no candidate is begun after it.
      limit: seconds for a candidate.
      most: try so many candidates of a group, those that differ least from the table's;
        None: all.
      attempt: as of `trial`, for tests.
    """

    def __init__(
        self,
        store: Store,
        worker: Worker,
        *,
        seconds: float,
        deadline: float = float("inf"),
        limit: float = SECONDS_FOR_A_CANDIDATE,
        most: int | None = None,
        attempt: Callable[..., dict[str, Any]] = trial.attempt,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store, self._worker = store, worker
        self._seconds, self._deadline, self._limit = seconds, deadline, limit
        self._most, self._attempt, self._clock = most, attempt, clock

    def run(self, groups: Iterable[Group]) -> tuple[list[Decision], bool]:
        """What is decided of every group, and whether all of it is."""
        decisions: list[Decision] = []
        complete = True
        for group in groups:
            try:
                if not complete:
                    raise OutOfTime
                self._screen(group)
                decisions += [self._decide(group, c) for c in CLASSES]
            except OutOfTime:
                complete = False
                decisions = [d for d in decisions if d.group != group]
                decisions += [_unfinished(group, c) for c in CLASSES]
        return decisions, complete

    def _screen(self, group: Group) -> None:
        found = self._candidates(group)
        for number, (tiling, against) in enumerate(found, 1):
            candidate = Candidate(group, tiling)
            cell = cell_of(candidate)
            if cell in self._store:
                continue
            row = {"refused": against}
            if against is None:
                row = self._tried(candidate, CLASSES, check=True)
                _say(f"{number}/{len(found)} {named(candidate)}: {outcome(row)}")
            self._store.add(cell, [row])

    def _candidates(self, group: Group) -> list[tuple[Choice, str | None]]:
        """Tilings, and why one need not be tried, if there is a reason."""
        found, tried = [], 0
        for tiling in candidates(group):
            against = reason_against(group, tiling)
            tried += against is None
            if self._most is not None and tried > self._most:
                break
            found.append((tiling, against))
        return found

    def _tried(
        self, candidate: Candidate, classes: Sequence[LengthClass], *, check: bool
    ) -> dict[str, Any]:
        left = self._deadline - self._clock()
        if left <= 0:
            raise OutOfTime
        arguments = candidate, tuple(classes), self._seconds, check
        try:
            return self._worker.call(self._attempt, *arguments, seconds=self._limit)
        except WorkerFailed as error:
            return {"refused": str(error).splitlines()[0][:200]}

    def _decide(self, group: Group, length_class: LengthClass) -> Decision:
        present = present_of(group, length_class)
        screened = list(self._measured(group, length_class))
        best = promising(screened, present) if screened else None
        fastest = max(
            (m for m in screened if m.tiling != present),
            key=lambda m: m.ratio,
            default=None,
        )
        if best is None:
            return Decision(
                *(group, length_class, present),
                None if fastest is None else fastest.tiling,
                None if fastest is None else fastest.ratio,
                noise(screened) if screened else None,
                "keeps",
            )
        again = self._confirm(Candidate(group, best.tiling), length_class)
        return Decision(
            *(group, length_class, present, best.tiling),
            min(m.ratio for m in again) if again else None,
            noise(again) if again else None,
            "wins" if confirmed(again) else "keeps",
        )

    def _measured(self, group: Group, length_class: LengthClass) -> Iterator[Measured]:
        for tiling, _ in self._candidates(group):
            (row,) = self._store.rows([cell_of(Candidate(group, tiling))])
            if row["refused"] is None:
                yield _measured(group, tiling, row, length_class)

    def _confirm(
        self, candidate: Candidate, length_class: LengthClass
    ) -> list[Measured]:
        found = []
        for number in range(CONFIRMATIONS):
            cell = cell_of(candidate) | {"confirms": length_class, "number": number}
            if cell not in self._store:
                # Another process: other addresses, and nothing learnt in screening.
                self._worker.end()
                row = self._tried(candidate, [length_class], check=False)
                _say(f"again {named(candidate)}: {outcome(row)}")
                self._store.add(cell, [row])
            (row,) = self._store.rows([cell])
            if row["refused"] is None:
                of = candidate.group, candidate.tiling
                found.append(_measured(*of, row, length_class))
        return found


def _measured(
    group: Group, tiling: Choice, row: dict[str, Any], length_class: LengthClass
) -> Measured:
    ratio, again = (
        class_ratio(group, row, name, length_class) for name in ("ratio", "again")
    )
    return Measured(tiling, ratio, again)


def settings_of(seconds: float) -> dict[str, Any]:
    """What a row depends on besides its cell and the machine."""
    present = hashlib.sha256(tuning.write(tuning.ENTRIES).encode()).hexdigest()
    return {
        **{"seconds": seconds, "runs": RUNS, "confirmations": CONFIRMATIONS},
        "problems": sorted({p.name for of in PROBLEMS.values() for p in of}),
        "units": checks.UNITS,
        "table": present[:12],
    }


def cell_of(candidate: Candidate) -> dict[str, Any]:
    """What tells a candidate from others in a store."""
    tiling = set_fields(candidate.tiling)
    return candidate.group._asdict() | {"tiling": tiling}


def present_of(group: Group, length_class: LengthClass) -> Choice:
    """The table's tiling in a class."""
    _, few, many = tuning.few_and_many(group)
    return few if length_class == "few" else many


def named(candidate: Candidate) -> str:
    group = candidate.group
    return f"{group.kernel} at head dims {group.of}: {candidate.tiling}"


def outcome(row: dict[str, Any]) -> str:
    """A row in a line."""
    if row["refused"] is not None:
        return f"refused: {row['refused']}"
    times = (
        f"{name} {x['ms']:.4f} ms (x {x['ratio']:.3f}, noise {x['again']:.3f})"
        for name, x in row.get("times", {}).items()
    )
    spilled = row.get("spilled_bytes")
    return ", ".join([*times, *([f"spills {spilled}"] if spilled else [])])


def _unfinished(group: Group, length_class: LengthClass) -> Decision:
    present = present_of(group, length_class)
    return Decision(group, length_class, present, None, None, None, "unfinished")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
