"""How far the weights of training runs lie apart, by step, tensor, group and layer.

`--runs A B [C ...]`: A is the reference, every other is compared with it at each step
that both have; two single checkpoints are compared whatever their steps. What can be
read says `analysis.weights.readers`, what is measured `analysis.weights.compare`. Mind
that W1 ignores which weight is which: two random starts have a small one.

Travels (cosine, drift) need a start: `--initial`, or each run's own step 0. Training
keeps no checkpoint of step 0, but `--initial seed` draws those weights once more.

OUT holds

    weights.csv, .parquet   one row for each step, run and scope
    weights.json            command, versions, device, date, problems, what is equal
    weights.png             four measures: of all weights by step, or of one step (and
                            of checkpoints that tell none) by group; none where no
                            distance lies between 1e-200 and 1e200
"""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.record import (
    Row,
    check_writable,
    environment,
    show,
    write,
    write_parquet,
    written,
)
from analysis.weights import figure, groups, pairing, readers, starts
from analysis.weights.compare import MOST_MEGABYTES, compare, some_of
from train.config import UsageError

SUMMARY = "how far weights of runs lie apart, by step, tensor, group and layer"
_SHOWN = (
    *("step", "run", "scope", "count", "max_abs", "w1", "w1_error", "w1_over_sigma"),
    *("rel_l2", "cosine", "drift", "mean", "mean_se", "p50", "p99"),
)
# More lines of problems than these are in weights.json only.
_MOST_LINES = 20
# Of a run's name in that of a folder, and how many runs it names.
_MOST_CHARACTERS, _MOST_NAMES = 40, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add(
        "--runs",
        nargs="+",
        action="extend",
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
        metavar="PATH",
        help="one checkpoint that all runs started from, or `seed`: the first weights "
        "of each run of python -m train, drawn once more (default: step 0 of each)",
    )
    add(
        "--out",
        type=Path,
        help="folder (default results/weights-A-vs-B, which another comparison does "
        "not overwrite)",
    )
    add(
        "--most-megabytes",
        type=float,
        default=MOST_MEGABYTES,
        metavar="MIB",
        help="W1 is exact for tensors that take no more on both sides together, and "
        "for all of 16 or 8 bits (default %(default)g); a chunk of an Orbax "
        "checkpoint is decoded whole, in twice its size, whatever this says",
    )


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Compares, writes and prints.

    Raises:
      UsageError: there are fewer than two runs, one cannot be read, two have no step or
        no tensor in common, an option makes no sense, or OUT cannot be written.
    """
    if len(options.runs) < 2:
        raise UsageError("--runs takes the reference and at least one other")
    for path in (*options.runs, options.out or "", options.initial or ""):
        _check_name(path)
    twice = [path for path in options.runs[1:] if options.runs[1:].count(path) > 1]
    if twice:
        raise UsageError(f"--runs: {twice[0]} is given twice, keep one")
    if not options.most_megabytes >= 0:
        raise UsageError("--most-megabytes must be 0 or more")
    group = groups.by_expression(options.groups) if options.groups else groups.built_in
    runs = [readers.find(path, options.tree) for path in options.runs]
    names = _names(options.runs)
    pairs = [
        pairing.pair(runs[0], other, (names[0], name))
        for name, other in zip(names[1:], runs[1:], strict=True)
    ]
    begun, problems = _starts(options, runs)
    out = options.out or _default_out(names, command)
    _check_ours(out)
    stem = out / "weights"
    _check_writable(stem)
    rows, equal = [], []
    for name, other, paired, start in zip(
        names[1:], runs[1:], pairs, begun[1:], strict=True
    ):
        problems += paired.problems
        for step, here, there in paired.steps:
            found = compare(
                runs[0].steps[here](),
                other.steps[there](),
                *((begun[0], start) if begun[0] and start else (None, None)),
                group=group,
                most_megabytes=options.most_megabytes,
                names=(names[0], name),
            )
            rows += [{"step": step, "run": name, **row} for row in found.rows]
            at = "" if step is None else f"step {step}: "
            problems += [at + line for line in found.problems]
            equal.append({"step": step, "run": name, "tensors": found.equal})
    if not rows:
        told = f" ({problems[0]})" if problems else ""
        raise UsageError(
            f"{options.runs[0]} and the others share no tensor of floating-point "
            f"numbers{told}: name checkpoints of weights"
        )
    lacking = [n for n, one in zip(names, begun, strict=True) if not one]
    notes = _notes(lacking, options.runs, options.initial)
    _print(rows, [*notes, *problems], names[0])
    beside = {"reference": names[0], "notes": notes, "problems": problems}
    files = _write(rows, environment(command) | beside | {"equal": equal}, stem)
    return {
        "rows": len(rows),
        "steps": sorted({row["step"] for row in rows} - {None}),
        "problems": len(problems),
        "differ": sum(not same for one in equal for same in one["tensors"].values()),
        "files": [str(path) for path in files],
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """Short names, whole paths where two would be the same."""
    short = [path.resolve().name for path in paths]
    return [
        name if short.count(name) == 1 else str(path)
        for name, path in zip(short, paths, strict=True)
    ]


def _starts(
    options: argparse.Namespace, runs: Sequence[readers.Weights]
) -> tuple[list[readers.Tree | None], list[str]]:
    """The start of each run, None where there is none, and what to mind.

    Raises:
      UsageError: `--initial` names no checkpoint, or there is no seed.
    """
    if options.initial == "seed":
        drawn = [starts.drawn(path, options.tree) for path in options.runs]
        return [tree for tree, _ in drawn], [x for _, lines in drawn for x in lines]
    if options.initial is None:
        return [one.steps[0]() if 0 in one.steps else None for one in runs], []
    found = readers.find(Path(options.initial), options.tree)
    if len(found.steps) > 1 and 0 not in found.steps:
        raise UsageError(
            f"--initial {options.initial} holds several steps but no 0: name one"
        )
    step = 0 if 0 in found.steps else next(iter(found.steps))
    return [found.steps[step]()] * len(runs), []


def _notes(
    lacking: Sequence[str], paths: Sequence[Path], initial: str | None
) -> list[str]:
    """Why columns are empty."""
    if not lacking:
        return []
    if initial is not None:
        return [f"no cosine and no drift: --initial {initial} holds no tensor"]
    ours = all(starts.run_folder(path) for path in paths)
    drawn = ", --initial seed draws the first weights once more" if ours else ""
    return [
        f"no cosine and no drift: there is no step 0 of {some_of(lacking)}; --initial "
        f"PATH names the checkpoint that all started from{drawn}"
    ]


def _default_out(names: Sequence[str], command: str) -> Path:
    """A folder of its own for each comparison.

    Raises:
      UsageError: it holds another one.
    """
    plain = [
        re.sub(r"[^\w.+-]+", "-", name).strip("-.")[-_MOST_CHARACTERS:]
        for name in names
    ]
    more = len(plain) - _MOST_NAMES
    tail = f"-and-{more}-more" if more > 0 else ""
    out = Path("results", f"weights-{'-vs-'.join(plain[:_MOST_NAMES])}{tail}")
    try:
        before = json.loads((out / "weights.json").read_text())["command"]
    except FileNotFoundError:
        return out
    except (OSError, ValueError, KeyError, TypeError):
        before = "another command"
    if before != command:
        raise UsageError(f"{out} holds what was compared by {before}: give --out")
    return out


def _check_name(path: Path | str) -> None:
    """Raises UsageError: tables and figures cannot hold its name."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        told = str(path).encode(errors="backslashreplace").decode()
        raise UsageError(f"{told} is no UTF-8: give the file such a name") from error


def _check_ours(out: Path) -> None:
    """Raises UsageError: the folder has rows or tables of another experiment."""
    try:
        others = "settings" in json.loads((out / "weights.json").read_text())
    except (OSError, ValueError, TypeError):
        others = False
    theirs = ("runs.csv", "training.jsonl", "training.jsonl.xz")
    if others or any((out / name).exists() for name in theirs):
        raise UsageError(f"{out} is of a training: give another --out")


def _check_writable(stem: Path) -> None:
    """Leaves no empty folder behind if nothing comes to be written.

    Raises:
      UsageError: the tables could not be written.
    """
    made = [folder for folder in stem.parents if not folder.exists()]
    check_writable(stem)
    # Another program may have put something there.
    with contextlib.suppress(OSError):
        for folder in made:
            folder.rmdir()


def _print(rows: Sequence[Row], problems: Sequence[str], reference: str) -> None:
    last = {row["run"]: row["step"] for row in rows}
    stepped = any(row["step"] is not None for row in rows)
    for kind, title in (
        ("all", "all weights"),
        ("group", "groups at the last step" if stepped else "groups"),
    ):
        hidden = {"scope" if kind == "all" else "", "" if stepped else "step"}
        shown = [
            {key: row[key] for key in _SHOWN if key not in hidden}
            for row in rows
            if row["kind"] == kind
            and (kind == "all" or row["step"] == last[row["run"]])
        ]
        show(shown, f"Distance from {reference}: {title}")
    for line in problems[:_MOST_LINES]:
        print(line, file=sys.stderr)
    if len(problems) > _MOST_LINES:
        more = len(problems) - _MOST_LINES
        print(f"... and {more} more, in weights.json", file=sys.stderr)


def _write(rows: Sequence[Row], described: dict[str, Any], stem: Path) -> list[Path]:
    """All files, none of an earlier comparison beside them."""
    parquet, picture = stem.with_suffix(".parquet"), stem.with_suffix(".png")
    for old in (parquet, picture):
        with written(old):
            old.unlink(missing_ok=True)
    files = [*write(rows, described, stem), *write_parquet(rows, parquet)]
    if figure.write(rows, picture):
        return [*files, picture]
    print("no figure: no distance lies between 1e-200 and 1e200", file=sys.stderr)
    return files
