"""What paired trainings show: tables to read, from the rows of `paired_measures`.

All intervals are of 95 % over seeds, by Student's t (`analysis.summary`).
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import stdtr

from analysis.arms import REFERENCE
from analysis.record import Row
from analysis.summary import half_width, pivot, summarise

# Of everything, and of the paper's figures 7 and 8.
MEASURES = ("max_abs", "w1", "w1_over_sigma", "rel_l2", "drift", "cosine")
_BOUND = "fp32"
_RATIOS = ("max_abs", "w1", "rel_l2")
# Growth is fitted from here: the first steps of Adam are of one size whatever the
# gradient.
_FIRST_FITTED = 8
# A tensor whose two travels have less in common than this, where those of half of all
# tensors have more than the other, is moved by rounding alone.
_UNRELATED, _RELATED = 0.5, 0.9
# A loss of a step that is so many times the mean loss before: batches alone, and times
# drawn for them, make up to 3 of it in `tiny`.
_SPIKE = 4.0


def of_all(weights: Iterable[Row]) -> list[Row]:
    """The rows of all weights together."""
    return [row for row in weights if row["kind"] == "all"]


def tables(
    weights: Sequence[Row], runs: Sequence[Row], margin: float
) -> dict[str, list[Row]]:
    """Tables by title.

    Args:
      margin: losses that differ by less than this share of the reference's count as
        equal.
    """
    last = max(row["step"] for row in runs)
    ends = [row for row in of_all(weights) if row["step"] == last]
    finals = [row for row in runs if row["step"] == last]
    found = {
        f"weights after {last} steps": _side_by_side(ends, MEASURES),
        "training (the split: at the comparison before the last)": _side_by_side(
            runs, ("loss", "function", "direct", "feedback", "aligned")
        ),
        "averaged weights": _side_by_side(finals, ("held_out_loss", "accuracy")),
        f"weight deviation of {_BOUND} over that of the arm": ratios(ends),
        f"relative L2 of {_BOUND} over that of the arm, by step": ratios_by_step(
            of_all(weights), "rel_l2"
        ),
        "growth with steps: exponents of a power law, and of W1 / sigma the slope of a "
        "straight line in 1000 steps": growth(of_all(weights)),
        f"losses equal within {100 * margin:g} %? (two one-sided t tests)": equivalence(
            finals, margin
        ),
        "tensors that rounding alone moves": apart(weights, last),
        f"trainings that diverged, or whose loss rose to {_SPIKE:g} times what it was, "
        "after the first eighth": unstable(runs),
    }
    return {title: rows for title, rows in found.items() if rows}


def _side_by_side(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    lines: dict[str, Row] = {}
    for name in names:
        for row in summarise(_last_known(rows, name), ["arm"], [name]):
            line = lines.setdefault(row["arm"], {"arm": row["arm"]})
            line |= pivot([{**row, "as": name}], ["arm"], "as", name)[0]
    heads = ["arm", *(n for n in names if any(n in line for line in lines.values()))]
    return [{head: line.get(head, "") for head in heads} for line in lines.values()]


def _last_known(rows: Sequence[Row], name: str) -> list[Row]:
    """Of every arm and seed the latest row that has a value."""
    latest = {
        (row["arm"], row["seed"]): row for row in rows if row.get(name) is not None
    }
    return list(latest.values())


def _by_arm(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], {})[row["seed"]] = row
    return found


def ratios(ends: Sequence[Row]) -> list[Row]:
    """The paper's "2-5x": geometric means over seeds of how much further low precision
    moves the weights than an arm does, with the factor of the interval."""
    lines = []
    for arm, found in _over(ends, _RATIOS).items():
        line = {name: f"{x:.3g} (x/ {by:.3g})" for name, (x, by) in found.items()}
        lines.append({"arm": arm} | {name: line.get(name, "") for name in _RATIOS})
    return lines


def ratios_by_step(rows: Sequence[Row], name: str) -> list[Row]:
    """The same of one measure, a line for each comparison, a column for each arm."""
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        found = _over([row for row in rows if row["step"] == step], [name])
        line: Row = {arm: f"{ratio[name][0]:.3g}" for arm, ratio in found.items()}
        if line:
            lines.append({"step": step} | line)
    arms = dict.fromkeys(arm for line in lines for arm in line)
    return [{arm: line.get(arm, "") for arm in arms} for line in lines]


def _over(
    rows: Sequence[Row], names: Sequence[str]
) -> dict[str, dict[str, tuple[float, float]]]:
    """Of one comparison, by arm and measure: that of `_BOUND` over the arm's, and the
    factor of the interval. Where either is 0 in all seeds there is none."""
    by_arm = _by_arm(rows)
    bound = by_arm.pop(_BOUND, {})
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for arm, seeds in by_arm.items():
        for name in names:
            logs = [
                math.log(bound[seed][name] / row[name])
                for seed, row in seeds.items()
                if seed in bound and row[name] and bound[seed][name]
            ]
            if logs:
                ratio, width = np.exp([np.mean(logs), half_width(logs)]).tolist()
                found.setdefault(arm, {})[name] = ratio, width
    return found


def growth(rows: Sequence[Row]) -> list[Row]:
    """Figure 8's slopes, and the exponents p of measure ~ step^p, by least squares
    over the comparisons from step 8 on, seed by seed."""
    seeds: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        # A training that diverged has no finite weights, so no distance.
        if row["step"] >= _FIRST_FITTED and row["max_abs"] is not None:
            seeds.setdefault((row["arm"], row["seed"]), []).append(row)
    fits = []
    for (arm, seed), some in seeds.items():
        if len(some) < 3:
            continue
        steps = np.array([row["step"] for row in some], float)
        fit: Row = {"arm": arm, "seed": seed}
        for name in _RATIOS:
            sizes = np.array([row[name] for row in some])
            if np.all(sizes > 0):
                fit[name] = float(np.polyfit(np.log(steps), np.log(sizes), 1)[0])
        relative = [row["w1_over_sigma"] for row in some]
        fit["w1_over_sigma"] = float(np.polyfit(steps / 1000, relative, 1)[0])
        fits.append(fit)
    return _side_by_side(fits, (*_RATIOS, "w1_over_sigma"))


def equivalence(finals: Sequence[Row], margin: float) -> list[Row]:
    """Whether the arms' losses equal the reference's of the same seeds.

    p is the larger of those of two paired t tests, that the mean difference is not
    above -m, and that it is not below m, m a share of the reference's mean: "equal"
    says that p < 0.05 for both losses. `loss` is that of the last eighth of training.
    """
    by_arm = _by_arm(finals)
    reference = by_arm.pop(REFERENCE, {})
    found = []
    for arm, seeds in by_arm.items():
        line: Row = {"arm": arm}
        equal = []
        for name in ("loss", "held_out_loss"):
            pairs = [
                (row[name], reference[seed][name])
                for seed, row in seeds.items()
                if seed in reference
                and all(
                    x[name] is not None and math.isfinite(x[name])
                    for x in (row, reference[seed])
                )
            ]
            if len(pairs) < max(2, len(seeds)):
                break
            ours, theirs = np.array(pairs).T
            bound = margin * float(theirs.mean())
            p = _equivalence_p(ours - theirs, bound)
            width = half_width(list(ours - theirs))
            line[name] = f"{np.mean(ours - theirs):+.2e} ± {width:.2g}"
            line[f"{name} p"] = f"{p:.2g}"
            line[f"{name} margin"] = f"{bound:.2g}"
            equal.append(p < 0.05)
        else:
            found.append(line | {"equal": "yes" if all(equal) else "not shown"})
    return found


def _equivalence_p(differences: np.ndarray, bound: float) -> float:
    if np.ptp(differences) == 0:  # No spread to test against: it is what it is.
        return float(abs(differences[0]) >= bound)
    n, mean = differences.size, differences.mean()
    error = differences.std(ddof=1) / math.sqrt(n)
    # Of the two tests the one whose bound is nearer has the larger p.
    return float(stdtr(n - 1, (abs(mean) - bound) / error))


def apart(weights: Sequence[Row], last: int) -> list[Row]:
    """Tensors whose true gradient is 0 (a bias of K, to which softmax is blind): Adam
    brings what rounding leaves of it to the size of any other, so that two trainings
    move them in unrelated directions. Beside each, the largest difference and W1 of the
    arm without such tensors."""
    found = []
    tensors = [r for r in weights if r["kind"] == "tensor" and r["step"] == last]
    for arm, seed in dict.fromkeys((row["arm"], row["seed"]) for row in tensors):
        some = [row for row in tensors if (row["arm"], row["seed"]) == (arm, seed)]
        some = [row for row in some if row["max_abs"] is not None]
        known = [row for row in some if row["cosine"] is not None]
        if not known or np.median([row["cosine"] for row in known]) < _RELATED:
            continue
        moved = [row for row in known if row["cosine"] < _UNRELATED]
        rest = [row for row in some if row not in moved]
        for row in moved:
            found.append(
                {
                    "arm": arm,
                    "seed": seed,
                    "tensor": row["scope"],
                    "cosine": f"{row['cosine']:.3f}",
                    "max_abs": f"{row['max_abs']:.3g}",
                    "max_abs of the rest": f"{max(r['max_abs'] for r in rest):.3g}",
                }
            )
    return found


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
