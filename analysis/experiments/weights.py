"""How far the weights of training runs lie apart, by step, tensor, group and layer.

`--runs A B [C ...]`: A is the reference, every other is compared with it at each step
that both have; two single checkpoints are compared whatever their steps. What can be
read says `analysis.weights.readers`, what is measured `analysis.weights.compare`. Mind
that W1 ignores which weight is which: two random starts have a small one.

Travels (cosine, drift) need a start: `--initial`, or each run's own step 0.

OUT holds

    weights.csv, .parquet   one row for each step, run and scope
    weights.json            command, versions, device, date, problems, what is equal
    weights.png             four measures of all weights by step
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.figures import Panel, write_figure
from analysis.record import (
    Row,
    check_writable,
    environment,
    show,
    write,
    write_parquet,
    written,
)
from analysis.weights import groups, readers
from analysis.weights.compare import MOST_MEGABYTES, compare
from train.config import UsageError

SUMMARY = "how far weights of runs lie apart, by step, tensor, group and layer"
_SHOWN = (
    *("step", "run", "scope", "count", "max_abs", "w1", "w1_error", "w1_over_sigma"),
    *("rel_l2", "cosine", "drift", "mean", "mean_se", "p50", "p99"),
)
_PANELS = {
    "max_abs": "largest difference",
    "w1": "Wasserstein-1 distance",
    "rel_l2": "relative L2 distance",
    "drift": "drift over travel",
}
# More lines of problems than these are in weights.json only.
_MOST_LINES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add(
        "--runs",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="the reference, then what is compared with it: run folders, checkpoints "
        "of Orbax, .safetensors, .npz, or folders of such by step",
    )
    add(
        "--tree",
        help="part of the trees to read, such as average (default: params of our "
        "runs, everything of others)",
    )
    add(
        "--groups",
        metavar="REGEX",
        help="its first group, found in a tensor's name, names the tensor's group "
        "(default: q, k, v, o, up, down, mod, embed, in, out of our model; of others "
        "by path)",
    )
    add(
        "--initial",
        type=Path,
        metavar="PATH",
        help="one checkpoint that all runs started from (default: step 0 of each)",
    )
    add("--out", type=Path, help="folder (default results/weights-NAME)")
    add(
        "--most-megabytes",
        type=float,
        default=MOST_MEGABYTES,
        metavar="MIB",
        help="W1 is exact for tensors that take no more on both sides together, and "
        "for all of 16 or 8 bits (default %(default)g)",
    )


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Compares, writes and prints.

    Raises:
      UsageError: there are fewer than two runs, one cannot be read, two have no step or
        no tensor in common, an option makes no sense, or OUT cannot be written.
    """
    if len(options.runs) < 2:
        raise UsageError("--runs takes the reference and at least one other")
    if not options.most_megabytes >= 0:
        raise UsageError("--most-megabytes must be 0 or more")
    group = groups.by_expression(options.groups) if options.groups else groups.built_in
    runs = [readers.find(path, options.tree) for path in options.runs]
    names = _names(options.runs)
    pairs = [_steps(runs[0], other) for other in runs[1:]]
    initial = _initial(options.initial, options.tree)
    out = options.out or Path("results", f"weights-{names[0]}")
    stem = out / "weights"
    check_writable(stem)
    rows, problems, equal = [], [], []
    for name, other, steps in zip(names[1:], runs[1:], pairs, strict=True):
        starts = initial, initial
        if initial is None and 0 in runs[0].steps and 0 in other.steps:
            starts = runs[0].steps[0](), other.steps[0]()
        for step, here, there in steps:
            found = compare(
                runs[0].steps[here](),
                other.steps[there](),
                *starts,
                group=group,
                most_megabytes=options.most_megabytes,
                names=(names[0], name),
            )
            rows += [{"step": step, "run": name, **row} for row in found.rows]
            problems += [f"step {step}: {line}" for line in found.problems]
            equal.append({"step": step, "run": name, **found.equal})
    if not rows:
        raise UsageError(
            f"{options.runs[0]} and the others share no tensor of floating-point "
            "numbers: name checkpoints of weights"
        )
    _print(rows, problems, names[0])
    beside = {"reference": names[0], "problems": problems, "equal": equal}
    files = write(rows, environment(command) | beside, stem)
    files += _pictures(rows, stem)
    return {
        "rows": len(rows),
        "steps": sorted({row["step"] for row in rows}),
        "problems": len(problems),
        "files": [str(path) for path in files],
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """Short names, whole paths where two would be the same."""
    short = [path.resolve().name for path in paths]
    return [
        name if short.count(name) == 1 else str(path)
        for name, path in zip(short, paths, strict=True)
    ]


def _steps(
    a: readers.Weights, b: readers.Weights
) -> list[tuple[int, int | None, int | None]]:
    """Steps to compare, and what each side calls them.

    Raises:
      UsageError: there is none.
    """
    if len(a.steps) == len(b.steps) == 1:
        (here,), (there,) = a.steps, b.steps
        return [(here or there or 0, here, there)]
    common = [step for step in a.steps if step in b.steps and step is not None]
    if not common:
        said = [", ".join(map(str, list(one.steps)[:8])) for one in (a, b)]
        raise UsageError(
            f"{a.path} (steps {said[0]}) and {b.path} (steps {said[1]}) have no step "
            "in common: name one checkpoint of each, or runs saved at the same steps"
        )
    return [(step, step, step) for step in common]


def _initial(path: Path | None, tree: str | None) -> readers.Tree | None:
    if path is None:
        return None
    found = readers.find(path, tree)
    if len(found.steps) > 1 and 0 not in found.steps:
        raise UsageError(f"--initial {path} holds several steps but no 0: name one")
    return found.steps[0 if 0 in found.steps else next(iter(found.steps))]()


def _print(rows: Sequence[Row], problems: Sequence[str], reference: str) -> None:
    last = {row["run"]: row["step"] for row in rows}
    for kinds, title in (
        (("all",), "all weights"),
        (("group",), "groups at the last step"),
    ):
        shown = [
            {key: row[key] for key in _SHOWN if kinds == ("group",) or key != "scope"}
            for row in rows
            if row["kind"] in kinds
            and (row["kind"] == "all" or row["step"] == last[row["run"]])
        ]
        show(shown, f"Distance from {reference}: {title}")
    for line in problems[:_MOST_LINES]:
        print(line, file=sys.stderr)
    if len(problems) > _MOST_LINES:
        more = len(problems) - _MOST_LINES
        print(f"... and {more} more, in weights.json", file=sys.stderr)


def _pictures(rows: Sequence[Row], stem: Path) -> list[Path]:
    parquet = write_parquet(rows, stem.with_suffix(".parquet"))
    picture = stem.with_suffix(".png")
    # Neither 0 has a place on its logarithmic axis.
    panels = [
        Panel(
            title,
            [r for r in rows if r["kind"] == "all" and r["step"] and r[name]],
            *("step", name, "run", "step", name),
        )
        for name, title in _PANELS.items()
    ]
    panels = [panel for panel in panels if panel.rows]
    if not panels:
        print("no step or no distance above 0: no figure", file=sys.stderr)
        return parquet
    with written(picture):
        write_figure(panels, picture)
    return [*parquet, picture]
