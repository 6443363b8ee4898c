"""Does attention matter for the weights? Trainings that differ in one thing.

For each seed the reference, `--attn=baseline`, and all arms train side by side
(`analysis.paired`). Weights are compared after 1, 2, 4, ... steps and at eighths of the
run: the table `weights` has the columns of `analysis.weights.compare`, `runs` has

    loss, loss_difference   mean loss since the row before; that, less the reference's
    function                RMS difference of what the two networks give on a probe
                            batch over the RMS of the reference's, both with the
                            reference's attention
    direct                  ||L|| / ||w||: L is what one step of the arm makes of the
                            reference's state, less what the reference makes of it
    feedback                ||B|| / ||w||: B is by how much the difference D of the
                            weights grows beyond L in that step
    aligned                 cosine of L and D
    held_out_loss           after the last step, of the averaged weights

D(t + 1) - D(t) = L(t) + B(t): the split into a direct error and its feedback is that of
the slides "Beyond tolerance / Cancellation Preservation", found on GitHub.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from analysis import ExperimentError, paired, store
from analysis.arms import ARMS, MAIN, REFERENCE, Arm, configured, find
from analysis.figures import Panel, write_figure
from analysis.paired import Training
from analysis.record import (
    Row,
    check_writable,
    environment,
    show,
    write,
    write_parquet,
    written,
)
from analysis.summary import half_width, pivot, summarise
from analysis.weights.compare import compare
from train.assemble import Assembly, open_split
from train.config import Config, UsageError, flatten
from train.diffusion import flow_losses
from train.evaluate import Evaluator
from train.gpu import set_profile
from train.presets import PRESETS
from train.step import Examples, draw_examples

SUMMARY = "how far training with another attention, or another bit, moves the weights"
# Steps where a preset's own number is for a model that is to be good.
_STEPS = {"tiny": 256}
_DEFAULT_STEPS = 2000
_PROBE = 32
# Of everything, and of the paper's figures 7 and 8.
_MEASURES = ("max_abs", "w1", "w1_over_sigma", "rel_l2", "drift")
_BOUND = "fp32"


class Store(store.Store):
    """Of rows of steps."""

    needed = ("step",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="of python -m train")
    add(
        "--arms",
        nargs="+",
        default=list(MAIN),
        metavar="ARM",
        help=f"some of {', '.join(ARMS)}, emulated:RECIPE (default {' '.join(MAIN)})",
    )
    add("--seeds", type=int, default=3, help="of weights, noise and data (default 3)")
    add("--steps", type=int, help="of each training (256 for tiny, else 2000)")
    add(
        "--change",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="of the reference, and so of all arms: lr=0.01 model.qk_norm=false",
    )
    add("--together", type=int, default=4, help="arms that train at once (default 4)")
    add("--out", type=Path, help="folder (default results/training/weights-PRESET)")
    add("--fresh", action="store_true", help="train anew what is there already")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Trains what is missing, writes tables and figures, says what was found.

    Raises:
      UsageError: an arm or an option does not exist or fit.
      ExperimentError: the reference diverged, or a run of the same was not the same.
    """
    set_profile("exact")
    arms = [find(name) for name in dict.fromkeys(options.arms)]
    if options.seeds < 1 or options.together < 1:
        raise UsageError("--seeds and --together must be at least 1")
    steps = options.steps or _STEPS.get(options.preset, _DEFAULT_STEPS)
    config = _reference(options.preset, steps, options.change)
    for arm in arms:
        configured(config, arm)
    out = options.out or Path("results", "training", f"weights-{options.preset}")
    settings = {"experiment": "training", "reference": flatten(config)}
    settings = json.loads(json.dumps(settings))
    kept = Store(out / "training.jsonl", settings, fresh=options.fresh)
    with contextlib.closing(kept):
        for stem in (out / "weights", out / "runs"):
            check_writable(stem)
        described = environment(command)
        for seed in range(options.seeds):
            _train_missing(config, arms, seed, kept, described, options.together)
        cells = [_cell(a, s) for s in range(options.seeds) for a in arms]
        rows = kept.rows(cells)
        weights, runs = (
            [_without_table(row) for row in rows if row["table"] == table]
            for table in ("weights", "runs")
        )
        beside = {"settings": settings, "measured": kept.environments}
        files = [kept.path]
        for name, table in (("weights", weights), ("runs", runs)):
            files += write(table, described | beside, out / name)
            files += write_parquet(table, out / f"{name}.parquet")
        files += _figures(weights, runs, out)
    found = _found(weights, runs)
    for title, table in found.items():
        show(table, title)
    _check_null(weights)
    return {"rows": len(rows), "files": [str(path) for path in files]}


def _reference(preset: str, steps: int, changes: Sequence[str]) -> Config:
    config = dataclasses.replace(
        PRESETS[preset], attn="baseline", steps=steps, profile="exact"
    )
    given = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in flatten(config):
            raise UsageError(
                f"--change takes NAME=VALUE with a field of python -m train, such as "
                f"lr=0.01, not {change!r}"
            )
        try:
            given[name] = json.loads(text)
        except ValueError:
            given[name] = text
    return configured(config, Arm(REFERENCE, "", given))


def _cell(arm: Arm, seed: int) -> dict[str, Any]:
    return {"arm": arm.name, "seed": seed}


def _without_table(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "table"}


def _train_missing(
    config: Config,
    arms: Sequence[Arm],
    seed: int,
    kept: Store,
    described: Mapping[str, Any],
    together: int,
) -> None:
    missing = [arm for arm in arms if _cell(arm, seed) not in kept]
    if missing:
        kept.describe(dict(described))
    data = dataclasses.replace(config.data, seed=config.data.seed + seed)
    config = dataclasses.replace(config, seed=config.seed + seed, data=data)
    for start in range(0, len(missing), together):
        some, began = missing[start : start + together], time.monotonic()
        rows: dict[str, list[Row]] = {arm.name: [] for arm in some}
        for name, row in _rows(config, some):
            rows[name].append(row)
        for arm in some:
            kept.add(_cell(arm, seed), rows[arm.name])
        names = ", ".join(arm.name for arm in some)
        seconds = time.monotonic() - began
        print(f"seed {seed}: {names}: {seconds:.1f} s", file=sys.stderr)


def _rows(config: Config, arms: Sequence[Arm]) -> Iterator[tuple[str, Row]]:
    """Rows by arm, as training goes on."""
    initial: dict[str, Any] = {}
    probe, evaluators = None, {}
    for step, batch, every in paired.train(config, arms):
        reference = every[REFERENCE]
        if not step:
            initial = {name: _host(t.state.params) for name, t in every.items()}
            probe = _Probe(reference)
            continue
        assert probe is not None
        once = reference.from_state(reference.state, batch)
        of_reference = probe(reference.state.params)
        for name in (arm.name for arm in arms):
            training = every[name]
            found = compare(
                *_alike(reference.state.params, training.state.params),
                initial[REFERENCE],
                initial[name],
                names=(REFERENCE, name),
            )
            for row in found.rows:
                yield name, {"table": "weights", "step": step, **row}
            row: Row = {"table": "runs", "step": step, "diverged": training.diverged}
            row |= _losses(reference, training, step)
            row["function"] = _relative(
                probe(_like(training.state.params, reference.state.params)),
                of_reference,
            )
            row |= _split(reference, training, once, batch)
            row["held_out_loss"] = None
            if step == config.steps:
                row["held_out_loss"] = _held_out(training, evaluators)
            yield name, row


def _host(params: Any) -> Any:
    return jax.tree.map(np.asarray, params)


def _like(tree: Any, of: Any) -> Any:
    """The tree in the formats and places of another."""
    return jax.tree.map(
        lambda x, leaf: jax.device_put(np.asarray(x).astype(leaf.dtype), leaf.sharding),
        tree,
        of,
    )


def _alike(reference: Any, other: Any) -> tuple[Any, Any]:
    """Both on the host where they lie on other devices, or that is the device."""
    pairs = zip(jax.tree.leaves(reference), jax.tree.leaves(other), strict=True)
    together = all(a.sharding == b.sharding for a, b in pairs)
    if together and jax.default_backend() != "cpu":
        return reference, other
    return _host(reference), _host(other)


class _Probe:
    """What a network gives on the first held-out images, with the reference's
    attention: at one drawn time each, with noise of their own."""

    def __init__(self, reference: Training):
        assembly, config = reference.assembly, reference.config
        source = open_split(config, "val")
        items = [source[i] for i in range(min(_PROBE, len(source)))]
        batch = {
            "image": np.stack([item["image"] for item in items]),
            "tokens": np.stack(
                [assembly.tokenizer.encode(item["caption"]) for item in items]
            ),
        }
        examples = draw_examples(config, jax.tree.map(jnp.asarray, batch), 0)
        self._outputs = jax.jit(lambda params: _outputs(assembly, params, examples))
        self._matmul = assembly.policy.matmul

    def __call__(self, params: Any) -> np.ndarray:
        with jax.default_matmul_precision(self._matmul):
            return np.asarray(self._outputs(params), np.float64)


def _outputs(assembly: Assembly, params: Any, examples: Examples) -> Any:
    model, seen = assembly.parts.merge(params), []

    def predict(x, t, tokens):
        seen.append(model(x, t, tokens, assembly.attention_fn))
        return seen[-1]

    flow_losses(predict, *examples, assembly.config.model.prediction)
    return seen[0]


def _relative(x: np.ndarray, of: np.ndarray) -> float | None:
    """None while the reference gives 0 everywhere, as it does at first."""
    size = np.linalg.norm(of)
    return float(np.linalg.norm(x - of) / size) if size else None


def _losses(reference: Training, training: Training, step: int) -> Row:
    """Means since the last comparison."""
    done = paired.snapshots(reference.config.steps)
    before = max((other for other in done if other < step), default=0)
    ours, theirs = (math.fsum(t.losses[before:step]) for t in (training, reference))
    number = max(len(training.losses[before:step]), 1)
    loss = ours / number if len(training.losses) >= step else math.nan
    return {"loss": loss, "loss_difference": loss - theirs / (step - before)}


def _split(reference: Training, training: Training, once: Any, batch: Any) -> Row:
    """`direct`, `feedback` and `aligned`; None where the arm has other data or first
    weights, so that its steps are of another problem, where it has diverged, and at the
    end, where the learning rate is 0."""
    arm = training.arm
    over = len(reference.losses) == reference.config.steps
    if arm.data or arm.weights or over or training.diverged is not None:
        return {"direct": None, "feedback": None, "aligned": None}
    trees = (
        reference.state.params,
        training.state.params,
        once,
        training.from_state(_like(reference.state, training.state), batch),
        training.from_state(training.state, batch),
    )
    w, d, direct, feedback, dot = _products(
        *(jax.tree.leaves(_like(tree, reference.state.params)) for tree in trees)
    )
    size = math.sqrt(w)
    alike = math.sqrt(direct) * math.sqrt(d)
    return {
        "direct": math.sqrt(direct) / size,
        "feedback": math.sqrt(feedback) / size,
        "aligned": dot / alike if alike else 0.0,
    }


def _products(w, other, once, arm_once, arm_next) -> list[float]:
    """||w||^2, ||D||^2, ||L||^2, ||B||^2 and D.L."""
    sums = np.zeros(5)
    for a, b, c, e, f in zip(w, other, once, arm_once, arm_next, strict=True):
        a, b, c, e, f = (np.asarray(x, np.float64) for x in (a, b, c, e, f))
        d, direct = b - a, e - c
        feedback = (f - c) - d - direct
        pairs = (a, a), (d, d), (direct, direct), (feedback, feedback), (d, direct)
        sums += [np.vdot(x, y) for x, y in pairs]
    return sums.tolist()


def _held_out(training: Training, evaluators: dict[int, Evaluator]) -> float | None:
    """`evaluators`: by the assembly that several arms may share."""
    if training.diverged is not None:
        return None
    a = training.assembly
    if id(a) not in evaluators:
        evaluators[id(a)] = Evaluator(a.parts, a.attention_fn, a.mesh, a.tokenizer)
    source = open_split(training.config, "val")
    with jax.default_matmul_precision(a.policy.matmul):
        return evaluators[id(a)].loss(training.state.average, source)


def _of_all(weights: Sequence[Row]) -> list[Row]:
    return [row for row in weights if row["kind"] == "all"]


def _found(weights: Sequence[Row], runs: Sequence[Row]) -> dict[str, list[Row]]:
    """Tables of the end, by title."""
    last = max(row["step"] for row in runs)
    ends = [row for row in _of_all(weights) if row["step"] == last]
    tables = {}
    for title, rows, names in (
        (f"weights after {last} steps", ends, _MEASURES),
        (
            f"training after {last} steps (the split: at the comparison before)",
            runs,
            ("loss_difference", "function", "direct", "feedback", "aligned"),
        ),
    ):
        lines: dict[str, Row] = {}
        for name in names:
            for row in summarise(_last_known(rows, name), ["arm"], [name]):
                line = lines.setdefault(row["arm"], {"arm": row["arm"]})
                line |= pivot([{**row, "as": name}], ["arm"], "as", name)[0]
        tables[title] = list(lines.values())
    ratios = _ratios(ends)
    if ratios:
        tables[f"weight deviation of {_BOUND} over that of the arm"] = ratios
    return tables


def _last_known(rows: Sequence[Row], name: str) -> list[Row]:
    """Of every arm and seed the latest row that has a value."""
    latest = {(row["arm"], row["seed"]): row for row in rows if row[name] is not None}
    return list(latest.values())


def _ratios(ends: Sequence[Row]) -> list[Row]:
    """The paper's "2-5x": geometric means over seeds with 95 % intervals, of how much
    further low precision moves the weights than an arm does."""
    by_arm: dict[str, dict[int, Row]] = {}
    for row in ends:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row
    bound = by_arm.get(_BOUND, {})
    found = []
    for arm, seeds in by_arm.items():
        line: Row = {"arm": arm}
        for name in ("max_abs", "w1", "rel_l2"):
            logs = [
                math.log(bound[seed][name] / row[name])
                for seed, row in seeds.items()
                if seed in bound and row[name] and bound[seed][name]
            ]
            if logs:
                width = half_width(logs)
                middle = math.exp(float(np.mean(logs)))
                line[name] = f"{middle:.3g} (x/ {math.exp(min(width, 99)):.3g})"
        if len(line) > 1 and arm != _BOUND:
            names = ("arm", "max_abs", "w1", "rel_l2")
            found.append({name: line.get(name, "") for name in names})
    return found


def _check_null(weights: Sequence[Row]) -> None:
    """A run of the same has to be the same."""
    off = [row for row in weights if row["arm"] == "re-run" and row["max_abs"]]
    if off:
        raise ExperimentError(
            f"a run of the same differs by {off[0]['max_abs']:.3g} after "
            f"{off[0]['step']} steps ({off[0]['scope']}): what the arms show is in "
            "part chance; on a GPU look at XLA_FLAGS"
        )


def _figures(weights: Sequence[Row], runs: Sequence[Row], out: Path) -> list[Path]:
    labels = {
        "max_abs": "max |difference|",
        "w1": "Wasserstein-1",
        "rel_l2": "relative L2",
        "drift": "of what training moved",
    }
    panels = []
    for rows, names in (
        (_of_all(weights), labels),
        (
            runs,
            {
                "function": "distance of the outputs",
                "direct": "direct error of a step",
                "feedback": "feedback of a step",
                "loss": "loss",
            },
        ),
    ):
        for name, label in names.items():
            shown = summarise(rows, ["arm", "step"], [name])
            shown = [row for row in shown if row[name]]
            panels.append(Panel(label, shown, "step", name, "arm", "steps", label))
    picture = out / "training.png"
    with written(picture):
        write_figure([panel for panel in panels if panel.rows], picture)
    return [picture]
