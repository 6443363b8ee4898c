"""How the distance of two trainings grows: the paper's figure 8, and power laws."""

from collections.abc import Iterable, Sequence

import numpy as np

from analysis.record import Row

# Measures whose exponents are fitted, and the one that has a slope.
POWERS = ("max_abs", "w1", "rel_l2")
SLOPE = "w1_over_sigma"
# Fits begin here: the first steps of Adam are of one size whatever the gradient.
FIRST_FITTED = 8
_FEWEST = 3


def fits(rows: Iterable[Row], last: int) -> list[Row]:
    """Least squares over the comparisons from step 8 on, for each arm and seed whose
    comparisons go on to the last step.

    Of `POWERS` the p of measure = c step^p, and log c as NAME_start; of `SLOPE` the b
    of measure = a + b step / 1000, and a as NAME_start. A power law has no measure
    that is 0.
    """
    seeds: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["step"] >= FIRST_FITTED:
            seeds.setdefault((row["arm"], row["seed"]), []).append(row)
    found = []
    for (arm, seed), some in seeds.items():
        # Over fewer steps the exponent is another: growth slows down.
        if len(some) < _FEWEST or some[-1]["step"] < last:
            continue
        fit: Row = {"arm": arm, "seed": seed}
        for name in POWERS:
            if all(row[name] for row in some):
                fit |= _fit(name, np.log([[r["step"], r[name]] for r in some]))
        if all(row[SLOPE] is not None for row in some):
            fit |= _fit(SLOPE, np.array([[r["step"] / 1000, r[SLOPE]] for r in some]))
        found.append(fit)
    return found


def _fit(name: str, points: np.ndarray) -> Row:
    slope, start = np.polyfit(points[:, 0], points[:, 1], 1).tolist()
    return {name: slope, f"{name}_start": start}


def curve(name: str, fitted: Sequence[Row], steps: Sequence[float]) -> list[float]:
    """The mean fit of some seeds, which `fits` gave, at some steps."""
    slope, start = (
        float(np.mean([fit[key] for fit in fitted])) for key in (name, f"{name}_start")
    )
    x = np.array(steps, float)
    line = start + slope * x / 1000 if name == SLOPE else np.exp(start) * x**slope
    return line.tolist()
