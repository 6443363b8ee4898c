"""What paired trainings show: tables to read, from the rows of `paired_measures`.

All intervals are of 95 % over seeds, by Student's t (`analysis.summary`). Column `n`
counts the runs of a mean. A run that stopped counts in nothing that is told of the end:
means and slopes are then of the runs that went on, the survivors, and marked so.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from scipy.special import stdtr

from analysis.arms import REFERENCE
from analysis.record import Row, Table
from analysis.summary import half_width, plus_minus, summarise
from analysis.training_growth import POWERS, SLOPE, fits
from analysis.training_rows import Stops, before_stops, of_all, seeds, stops

# Of everything, and of the paper's figures 7 and 8.
MEASURES = ("max_abs", "w1", "w1_over_sigma", "rel_l2", "drift", "cosine")
_BOUND = "fp32"
# Arms that others are held against, step by step: the null, and what a change of it is
# a change of.
_BASES = "ulp", "pallas", "bf16"
# A tensor whose two travels have less in common than this, where those of half of all
# tensors have more than the other, is moved by rounding alone.
_UNRELATED, _RELATED = 0.5, 0.9
# A loss of a step that is so many times the mean loss before: batches alone, and times
# drawn for them, make up to 3 of it in `tiny`.
_SPIKE = 4.0
_SURVIVORS = (
    "Survivors: runs of an arm of which others stopped, since a loss or gradient was "
    "not finite. Their mean leaves out what made the others stop: it is not to be held "
    "against a mean of all runs."
)


def tables(
    weights: Sequence[Row], runs: Sequence[Row], margin: float
) -> dict[str, Table]:
    """Tables by title.

    Args:
      margin: losses that differ by less than this share of the reference's count as
        equal.
    """
    steps = sorted({row["step"] for row in runs})
    last, before = steps[-1], steps[-2:][0]
    stopped, began = stops(runs), seeds(runs)
    compared = {arm: some for arm, some in began.items() if arm != REFERENCE}
    kept = before_stops(weights, stopped)
    whole = of_all(kept)
    ends = [row for row in whole if row["step"] == last]
    # Of the end alone: what a run that stopped had come to is of another step.
    ended = [row for row in runs if (row["arm"], row["seed"]) not in stopped]
    finals = [row for row in ended if row["step"] == last]
    several = max(map(len, began.values())) > 1
    split = ("direct", "feedback", "aligned")
    at: dict[str, int] = {"loss": last, "function": last}
    at |= {name: before for name in split}
    trained = _of_steps(ended, at)
    found = {
        f"weights after {last} steps": side_by_side(ends, MEASURES, compared, stopped),
        "training (the split: at the comparison before the last)": side_by_side(
            trained, ("loss", "function", *split), began, stopped
        ),
        "averaged weights": side_by_side(
            finals, ("held_out_loss", "accuracy"), began, stopped
        ),
        f"weight deviation of {_BOUND} over that of the arm": Table(ratios(ends)),
        f"relative L2 of {_BOUND} over that of the arm, by step": Table(
            ratios_by_step(whole, "rel_l2")
        ),
    }
    for base in _BASES:
        title = f"relative L2 of the arm over that of {base}, by step"
        found[title] = Table(ratios_to(whole, "rel_l2", base))
    found |= {
        "growth with steps: exponents of a power law, and of W1 / sigma the slope of a "
        "straight line in 1000 steps": side_by_side(
            fits(whole, last), (*POWERS, SLOPE), compared, stopped
        ),
        f"losses equal within {100 * margin:g} %? (two one-sided t tests)": Table(
            equivalence(finals, margin, began),
            "" if several else "Not tested: it takes two seeds or more.",
        ),
        "tensors that rounding alone moves": apart(kept, last),
        f"trainings that diverged, or whose loss rose to {_SPIKE:g} times what it was, "
        "after the first eighth": Table(unstable(runs)),
    }
    return {title: of for title, of in found.items() if of.rows or of.note}


def side_by_side(
    rows: Iterable[Row],
    names: Sequence[str],
    began: Mapping[str, Sequence[int]],
    stopped: Stops,
) -> Table:
    """A line for each arm, a column for the mean of each measure.

    Args:
      rows: of arms and seeds; a measure that is None or missing does not count.
      began: the seeds of every arm.
    """
    rows = list(rows)
    known = {
        name: {
            row["arm"]: row
            for row in summarise(
                [row for row in rows if row.get(name) is not None], ["arm"], [name]
            )
        }
        for name in names
    }
    names = [name for name in names if known[name]]
    if not names:
        return Table([])
    lines = [
        _line(arm, some, {name: known[name].get(arm) for name in names}, stopped)
        for arm, some in began.items()
    ]
    if not any("stopped at step" in line for line in lines):
        return Table(lines)
    heads = ["arm", "n", "stopped at step", *names]
    lines = [{head: line.get(head, "") for head in heads} for line in lines]
    survived = any("survivors" in line["n"] for line in lines)
    return Table(lines, _SURVIVORS if survived else "")


def _line(
    arm: str,
    began: Sequence[int],
    means: Mapping[str, Row | None],
    stopped: Stops,
) -> Row:
    counts = {name: row["seeds"] for name, row in means.items() if row is not None}
    n = max(counts.values(), default=0)
    ends = sorted(stopped[arm, seed] for seed in began if (arm, seed) in stopped)
    line: Row = {"arm": arm, "n": str(n) if n == len(began) else f"{n} of {len(began)}"}
    if ends:
        line["stopped at step"] = ", ".join(map(str, ends))
        line["n"] += " (survivors)" if n else ""
    for name, row in means.items():
        line[name] = "" if row is None else plus_minus(row, name)
        if 0 < counts.get(name, n) < n:
            line[name] += f" (n = {counts[name]})"
    return line


def _of_steps(rows: Iterable[Row], at: Mapping[str, int]) -> list[Row]:
    """Of every arm and seed one row, each measure of the step given for it."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        line = found.setdefault((row["arm"], row["seed"]), {})
        line |= {"arm": row["arm"], "seed": row["seed"]}
        line |= {name: row[name] for name, step in at.items() if row["step"] == step}
    return list(found.values())


def _by_arm(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], {})[row["seed"]] = row
    return found


def ratios(ends: Sequence[Row]) -> list[Row]:
    """The paper's "2-5x": geometric means over seeds of how much further low precision
    moves the weights than an arm does, with the factor of the interval where there are
    two seeds or more."""
    lines = []
    for arm, found in _over(ends, POWERS).items():
        n = max(map(len, found.values()))
        line: Row = {"arm": arm, "n": str(n)} | dict.fromkeys(POWERS, "")
        for name, logs in found.items():
            line[name] = f"{math.exp(np.mean(logs)):.3g}"
            if len(logs) > 1:
                line[name] += f" (x/ {math.exp(half_width(logs)):.3g})"
            if len(logs) < n:
                line[name] += f" (n = {len(logs)})"
        lines.append(line)
    return lines


def ratios_by_step(rows: Sequence[Row], name: str) -> list[Row]:
    """The same of one measure, a line for each comparison, a column for each arm. Where
    fewer seeds have a ratio than do at other steps their number is told."""
    by_step = _by_step(rows, name, _BOUND)
    arms = dict.fromkeys(arm for found in by_step.values() for arm in found)
    most = {arm: max(len(of.get(arm, [])) for of in by_step.values()) for arm in arms}
    return _lines(by_step, most, lambda logs: f"{math.exp(np.mean(logs)):.3g}")


def ratios_to(rows: Sequence[Row], name: str, base: str) -> list[Row]:
    """Of one measure each arm over `base`, a line for each comparison: geometric means
    over seeds, with the factor of the interval and p of the paired t test that the mean
    ratio is 1, where there are two seeds or more."""
    by_step = _by_step(rows, name, base)
    most = max((len(x) for of in by_step.values() for x in of.values()), default=0)
    arms = dict.fromkeys(arm for found in by_step.values() for arm in found)
    return _lines(
        by_step, dict.fromkeys(arms, most), lambda logs: _told_ratio([-x for x in logs])
    )


def _lines(
    by_step: Mapping[int, Mapping[str, Sequence[float]]],
    most: Mapping[str, int],
    told: Callable[[Sequence[float]], str],
) -> list[Row]:
    """A line for each comparison, with how many seeds there are where an arm has fewer
    than its most."""
    lines = []
    for step, found in by_step.items():
        line: Row = {"step": step} | dict.fromkeys(most, "")
        for arm, logs in found.items():
            line[arm] = told(logs)
            if len(logs) < most[arm]:
                line[arm] += f" (n = {len(logs)})"
        lines += [line] if found else []
    return lines


def _told_ratio(logs: Sequence[float]) -> str:
    told = f"{math.exp(np.mean(logs)):.3g}"
    if len(logs) < 2:
        return told
    error = np.std(logs, ddof=1) / math.sqrt(len(logs))
    mean = abs(np.mean(logs))
    # The same ratio in all seeds, which is 1 where an arm is what it is compared with.
    t = -mean / error if error else -math.inf if mean else 0.0
    p = 2 * stdtr(len(logs) - 1, t)
    return f"{told} (x/ {math.exp(half_width(logs)):.3g}, p = {p:.2g})"


def _by_step(
    rows: Sequence[Row], name: str, upper: str
) -> dict[int, dict[str, list[float]]]:
    """What `_over` finds of one measure, by step and arm."""
    found = {}
    for step in dict.fromkeys(row["step"] for row in rows):
        of_step = [row for row in rows if row["step"] == step]
        by_arm = _over(of_step, [name], upper)
        found[step] = {arm: logs[name] for arm, logs in by_arm.items()}
    return found


def _over(
    rows: Sequence[Row], names: Sequence[str], upper: str = _BOUND
) -> dict[str, dict[str, list[float]]]:
    """Of one comparison, by arm and measure: logarithms of that of `upper` over the
    arm's, one for each seed in which neither is 0."""
    by_arm = _by_arm(rows)
    bound = by_arm.pop(upper, {})
    found: dict[str, dict[str, list[float]]] = {}
    for arm, some in by_arm.items():
        for name in names:
            logs = [
                math.log(bound[seed][name] / row[name])
                for seed, row in some.items()
                if seed in bound and row[name] and bound[seed][name]
            ]
            if logs:
                found.setdefault(arm, {})[name] = logs
    return found


def growth(rows: Sequence[Row]) -> list[Row]:
    """Exponents and slopes of `fits`, with their means, where no run stopped."""
    last = max(row["step"] for row in rows)
    table = side_by_side(fits(rows, last), (*POWERS, SLOPE), seeds(rows), {})
    return list(table.rows)


def equivalence(
    finals: Sequence[Row],
    margin: float,
    began: Mapping[str, Sequence[int]] | None = None,
) -> list[Row]:
    """Whether the arms' losses equal the reference's of the same seeds.

    p is the larger of those of two paired t tests, that the mean difference is not
    above -m, and that it is not below m, m a share of the reference's mean: "equal"
    says that p < 0.05 for both losses. `loss` is that of the last eighth of training.
    An arm of which a seed has no loss is not tested, and none of a single seed.

    Args:
      began: the seeds of every arm; those of `finals` unless given.
    """
    began = seeds(finals) if began is None else began
    if max(map(len, began.values())) < 2:
        return []
    by_arm = _by_arm(finals)
    reference = by_arm.get(REFERENCE, {})
    lines = []
    for arm, some in began.items():
        pairs = [
            (row, reference[seed])
            for seed, row in by_arm.get(arm, {}).items()
            if seed in reference and _has_losses(row) and _has_losses(reference[seed])
        ]
        line: Row = {"arm": arm}
        if len(pairs) < max(2, len(some)):
            line["equal"] = f"not tested: {len(pairs)} of {len(some)} pairs have losses"
        else:
            line |= _tested(pairs, margin)
        lines += [line] if arm != REFERENCE else []
    heads = dict.fromkeys(head for line in lines for head in line if head != "equal")
    heads = [*heads, "equal"]
    return [{head: line.get(head, "") for head in heads} for line in lines]


def _has_losses(row: Row) -> bool:
    losses = row["loss"], row["held_out_loss"]
    return all(x is not None and math.isfinite(x) for x in losses)


def _tested(pairs: Sequence[tuple[Row, Row]], margin: float) -> Row:
    # A difference that was stored has more digits than one of two stored losses.
    differences = {
        "loss": [row["loss_difference"] for row, _ in pairs],
        "held_out_loss": [a["held_out_loss"] - b["held_out_loss"] for a, b in pairs],
    }
    line: Row = {"n": str(len(pairs))}
    ps = []
    for name, apart_by in differences.items():
        bound = margin * float(np.mean([reference[name] for _, reference in pairs]))
        ps.append(_equivalence_p(np.array(apart_by), bound))
        told = f"{np.mean(apart_by):+.2e} ± {half_width(apart_by):.2g}"
        line |= {name: told, f"{name} p": f"{ps[-1]:.2g}"}
        line[f"{name} margin"] = f"{bound:.2g}"
    return line | {"equal": "yes" if max(ps) < 0.05 else "not shown"}


def _equivalence_p(differences: np.ndarray, bound: float) -> float:
    if np.ptp(differences) == 0:  # No spread to test against: it is what it is.
        return float(abs(differences[0]) >= bound)
    n, mean = differences.size, differences.mean()
    error = differences.std(ddof=1) / math.sqrt(n)
    # Of the two tests the one whose bound is nearer has the larger p.
    return float(stdtr(n - 1, (abs(mean) - bound) / error))


def apart(weights: Sequence[Row], last: int) -> Table:
    """Tensors whose true gradient is 0 (a bias of K, to which softmax is blind): Adam
    brings what rounding leaves of it to the size of any other, so that two trainings
    move them in unrelated directions. Beside each, the largest difference of the arm
    without such tensors.

    They can be told apart only in an arm of which most tensors are related; the note
    says which are, and which are not.
    """
    lines: list[Row] = []
    medians: dict[str, list[float]] = {}
    tensors = [r for r in weights if r["kind"] == "tensor" and r["step"] == last]
    for arm, seed in dict.fromkeys((row["arm"], row["seed"]) for row in tensors):
        some = [row for row in tensors if (row["arm"], row["seed"]) == (arm, seed)]
        # Weights that are not finite have no distance.
        some = [row for row in some if row["max_abs"] is not None]
        known = [row for row in some if row["cosine"] is not None]
        if not known:
            continue
        medians.setdefault(arm, []).append(np.median([r["cosine"] for r in known]))
        if medians[arm][-1] < _RELATED:
            continue
        moved = [row for row in known if row["cosine"] < _UNRELATED]
        rest = [row for row in some if row not in moved]
        lines += [
            {
                "arm": arm,
                "seed": seed,
                "tensor": row["scope"],
                "cosine": f"{row['cosine']:.3f}",
                "max_abs": f"{row['max_abs']:.3g}",
                "max_abs of the rest": f"{max(r['max_abs'] for r in rest):.3g}",
            }
            for row in moved
        ]
    return Table(lines, _of_medians(medians, found=bool(lines)))


def _of_medians(medians: Mapping[str, Sequence[float]], *, found: bool) -> str:
    """In which arms tensors could be told apart, and in which they could not."""
    applied, left_out = [], []
    for arm, some in medians.items():
        related = sum(median >= _RELATED for median in some)
        of = "" if related in (0, len(some)) else f" in {related} of {len(some)} seeds"
        applied += [arm + of] if related else []
        span = " to ".join(dict.fromkeys(f"{x:.2f}" for x in (min(some), max(some))))
        left_out += [f"{arm} ({span})"] if related < len(some) else []
    told = []
    if applied:
        nothing = "" if found else ", and none is below"
        told.append(
            f"Looked for, below a cosine of travels of {_UNRELATED:g}, in "
            f"{', '.join(applied)}{nothing}."
        )
    if left_out:
        told.append(
            f"Not looked for where half of all tensors lie below {_RELATED:g}, so that "
            f"none stands apart; medians: {', '.join(left_out)}."
        )
    return " ".join(told)


def unstable(runs: Sequence[Row]) -> list[Row]:
    """Of every arm that diverged or spiked in a seed: in how many, and when; and the
    most that a loss of a step was, over the mean loss before the comparison before."""
    last = max(row["step"] for row in runs)
    found = []
    for arm in dict.fromkeys(row["arm"] for row in runs):
        own = [row for row in runs if row["arm"] == arm]
        rises, ends = [], []
        for seed in dict.fromkeys(row["seed"] for row in own):
            some = [row for row in own if row["seed"] == seed]
            ends.append(some[-1]["diverged"])
            rises.append(
                max(
                    (
                        row["highest"] / before["loss"]
                        for before, row in itertools.pairwise(some)
                        if 8 * row["step"] > last and row.get("highest") is not None
                    ),
                    default=0.0,
                )
            )
        steps = sorted(step for step in ends if step is not None)
        spiked = sum(rise >= _SPIKE for rise in rises)
        if steps or spiked:
            found.append(
                {
                    "arm": arm,
                    "diverged": f"{len(steps)} of {len(ends)}",
                    "at steps": ", ".join(map(str, steps)),
                    "spiked": f"{spiked} of {len(ends)}",
                    "highest rise": f"{max(rises):.3g}",
                }
            )
    return found
