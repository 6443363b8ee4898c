"""Sweeps: cells of settings, measured one by one, kept, summed up, drawn and judged.

How an experiment is written (`analysis/experiments/NAME.py`):

    SUMMARY = "one line"
    PRESETS = {"toy": ..., "default": ..., "full": ...}      what each measures

    @dataclasses.dataclass(frozen=True)
    class Cell:                    # JSON values only; they become columns of each row
        family: str
        N: int

    def add_arguments(parser):
        sweep.add_options(parser, "NAME")

    def run(options, command):
        source = inputs.open_inputs(options)
        cells = [Cell(label, N) for label in source.labels for N in ...]
        def measure(cell):         # yields one row for each seed, recipe and tensor
            problem = inputs.problem(source, cell.family, cell.N, BF16)
            yield from deviation.compare(problem, recipes, "eager_bf16")
        return sweep.run("NAME", cells, measure, report, options, command)

`report(rows)` gets every row, cell columns included, as `store.Store` kept them, and
returns a `Report`: tables (`summary.summarise`), panels and claims. A row needs the
column `seed`. `run` skips the cells that an earlier run of the same command finished,
so a killed sweep goes on where it was; it certifies the backend before its first
number. Then it writes, beside OUT/PRESET.jsonl,

    PRESET.parquet   every raw row
    PRESET.csv       exactly the points of the figure
    PRESET.png       the figure
    PRESET.json      command, settings, versions, device, canaries, claims
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import ExperimentError
from analysis.capture_file import CAPTURE
from analysis.figures import (
    HeatMap,
    Panel,
    plotted,
    write_figure,
    write_heat_maps,
)
from analysis.record import Row, environment, show, write, written
from analysis.store import Store
from analysis.summary import plus_minus
from attn_jax import canaries
from attn_jax.audit.inputs import FAMILIES
from train.config import UsageError

SEEDS = {"toy": 2, "default": 4, "full": 8}
HEADS = {"toy": 1, "default": 1, "full": 16}
QUERIES = {"toy": 32, "default": 256, "full": 256}
# The smallest ratio that counts as a difference.
FIFTH = 1.2
# Options that change where rows lie, not what they are, or that are resolved.
_NO_SETTINGS = (
    *("name", "out", "fresh"),
    *("default_families", "default_seeds", "every_draw"),
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What somebody says, and what we find.

    Attributes:
      source: where it is said ("paper, Fig. 5a").
      says: the claim, in our words.
      recipe: under which recipe (and inputs) it was looked at.
      found: our figures.
      holds: whether it holds there; None if the figures cannot tell.
    """

    source: str
    says: str
    recipe: str
    found: str
    holds: bool | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What a sweep shows: tables by title, panels (COLUMNS to a line), claims.

    `maps`: drawn instead of the panels, whose points are written all the same.
    """

    tables: dict[str, list[Row]]
    panels: list[Panel]
    claims: list[Claim]
    columns: int = 2
    maps: Sequence[HeatMap] = ()


def add_options(
    parser: argparse.ArgumentParser,
    name: str,
    families: Sequence[str] | None = ("normal", "uniform"),
    *,
    seeds: Mapping[str, int] = SEEDS,
    every_draw: bool = False,
) -> None:
    """The options that all sweeps share; none for inputs if `families` is None.

    `seeds` is the number of draws by preset; with `every_draw` all that there are of
    captured inputs.
    """
    add = parser.add_argument
    add("--preset", choices=SEEDS, default="default", help="how much is measured")
    usual = f"default {seeds['default']}"
    others = [f"{p} {n}" for p, n in seeds.items() if n != seeds["default"]]
    usual += f"; {', '.join(others)}" if others else ""
    usual += "; with --inputs all there are" if every_draw else ""
    add("--seeds", type=int, help=f"draws of each problem ({usual})")
    parser.set_defaults(default_seeds=seeds, every_draw=every_draw)
    folder = f"folder (default results/{name}"
    if families is not None:
        folder += f"; with --inputs results/{name}-RUN"
    add("--out", type=Path, help=f"{folder})")
    add("--fresh", action="store_true", help="measure anew what is there already")
    if families is None:
        parser.set_defaults(families=None, inputs=None, default_families=())
        return
    add(
        "--families",
        nargs="+",
        choices=FAMILIES,
        help=f"inputs (default {' '.join(families)})",
    )
    add("--inputs", metavar="run:PATH", help="inputs captured from a training run")
    parser.set_defaults(default_families=tuple(families))


def run(
    name: str,
    cells: Sequence[Any],
    measure: Callable[[Any], Iterable[Row]],
    report: Callable[[list[Row]], Report],
    options: argparse.Namespace,
    command: str,
) -> dict[str, Any]:
    """Measures the cells that are missing, then writes and prints the report.

    `cells` are frozen dataclasses. Without polars the run ends with the rows it
    measured, and the same command where polars is makes the files from them.

    Raises:
      UsageError: the folder holds rows of other settings, is another run's, or cannot
        be written.
      ExperimentError: a canary failed, so nothing was measured.
    """
    settings = _settings(name, options)
    path = _folder(name, options) / f"{options.preset}.jsonl"
    with contextlib.closing(Store(path, settings, fresh=options.fresh)) as store:
        return _run(store, cells, measure, report, settings, command)


def _run(
    store: Store,
    cells: Sequence[Any],
    measure: Callable[[Any], Iterable[Row]],
    report: Callable[[list[Row]], Report],
    settings: dict[str, Any],
    command: str,
) -> dict[str, Any]:
    keys = [dataclasses.asdict(cell) for cell in cells]
    missing = [number for number, key in enumerate(keys) if key not in store]
    if missing:
        store.describe(environment(command) | {"canaries": _certify()})
    for number in missing:
        began = time.monotonic()
        store.add(keys[number], list(measure(cells[number])))
        seconds = time.monotonic() - began
        cell = " ".join(f"{k}={v}" for k, v in keys[number].items())
        print(f"{number + 1}/{len(cells)} {cell}: {seconds:.1f} s", file=sys.stderr)
    rows = store.rows(keys)
    found = report(rows)
    for title, table in found.tables.items():
        show(table, title)
    _show_claims(found.claims)
    files = [str(store.path)]
    if importlib.util.find_spec("polars") is None:
        print(
            f"no polars here: the rows are in {store.path}, and the same command where "
            "polars is installed writes table and figure from them",
            file=sys.stderr,
        )
    else:
        described = {
            "command": command,
            "settings": settings,
            "measured": store.environments,
            "claims": [dataclasses.asdict(claim) for claim in found.claims],
        }
        try:
            files += map(str, _write(rows, found, described, store.path))
        except UsageError as error:
            raise UsageError(
                f"{error}; the rows are in {store.path}, and the same command makes "
                "table and figure from them"
            ) from error
    return {"rows": len(rows), "files": files}


def _folder(name: str, options: argparse.Namespace) -> Path:
    """`--out`, or a folder for the experiment; inputs of a run have one of their own.

    Their rows would otherwise take the place of those of random inputs.
    """
    if options.out is not None:
        return options.out
    if options.inputs is None:
        return Path("results", name)
    return Path("results", f"{name}-{run_name(run_path(options))}")


def run_name(path: Path) -> str:
    """What results on inputs of a run, or of a file of captures, are called by."""
    path = path.resolve()
    if path.name == CAPTURE:
        path = path.parent
    return path.name.removesuffix(".npz")


def run_path(options: argparse.Namespace) -> Path:
    """The PATH of `--inputs=run:PATH`.

    Raises:
      UsageError: it is something else.
    """
    kind, _, path = options.inputs.partition(":")
    if kind != "run" or not path:
        raise UsageError(f"--inputs takes run:PATH, got {options.inputs!r}")
    return Path(path)


def _settings(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the rows depend on, as JSON gives it back."""
    chosen = {k: v for k, v in vars(options).items() if k not in _NO_SETTINGS}
    chosen |= {"seeds": seeds(options), "families": families(options)}
    return json.loads(json.dumps({"experiment": name, **chosen}, default=str))


def seeds(options: argparse.Namespace) -> int:
    """The number of draws: `--seeds`, or what the preset says.

    Raises:
      UsageError: it is below 1.
    """
    if options.seeds is None:
        return options.default_seeds[options.preset]
    if options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {options.seeds}")
    return options.seeds


def families(options: argparse.Namespace) -> list[str]:
    """The input families chosen, each once; none where inputs come from a run.

    Raises:
      UsageError: both were given.
    """
    if options.inputs is None:
        return list(dict.fromkeys(options.families or options.default_families))
    if options.families:
        raise UsageError("give --families or --inputs, not both")
    return []


def larger(row: Row, ratio: str, least: float = 1.0) -> bool | None:
    """Whether a mean ratio is above `least`, by its 95 % interval.

    False if the interval ends below 1.2: a fifth more is no growth where the paper
    speaks of factors. None if the seeds are too few to tell.
    """
    mean, width = row[ratio], row[f"{ratio}_ci"]
    if mean is None:
        return None
    if mean + width < FIFTH:
        return False
    return True if mean - width > least else None


def tenfold(row: Row) -> Claim:
    """The paper's best known figure, tried on a summary of one recipe in BF16."""
    ratio = row["max_over_baseline"]
    return Claim(
        "paper, Fig. 4",
        "In BF16 its largest error is roughly 10 times the baseline's.",
        f"{row['recipe']}, {row['family']}, {row['N']} keys",
        f"x {plus_minus(row, 'max_over_baseline')} (relative error x "
        f"{plus_minus(row, 'rel_over_baseline')})",
        5 <= ratio <= 20 if ratio is not None else None,
    )


def _certify() -> dict[str, Any]:
    """Runs the canaries under jit on this backend and returns their verdict."""
    try:
        return dataclasses.asdict(canaries.certify(jit=True))
    except canaries.CanaryError as error:
        raise ExperimentError(f"canary {error}") from error


def _write(
    rows: Sequence[Row], found: Report, described: dict[str, Any], beside: Path
) -> list[Path]:
    import polars

    parquet, picture = beside.with_suffix(".parquet"), beside.with_suffix(".png")
    # The first rows may hold None where a later one has a number.
    table = polars.DataFrame(list(rows), infer_schema_length=None)
    with written(parquet):
        table.write_parquet(parquet)
    with written(picture):
        if found.maps:
            write_heat_maps(found.maps, picture)
        else:
            write_figure(found.panels, picture, found.columns)
    return [parquet, *write(plotted(found.panels), described, beside), picture]


def _show_claims(claims: Sequence[Claim]) -> None:
    """Each claim once, and below it what was found under every recipe."""
    said = None
    for claim in claims:
        if claim.says != said:
            print(f"\n{claim.source}: {claim.says}", file=sys.stderr)
            said = claim.says
        verdict = {True: "holds", False: "does not hold", None: "open"}[claim.holds]
        print(f"  {claim.recipe}: {verdict}; {claim.found}", file=sys.stderr)
