"""What is measured of paired trainings, as they go on.

Rows of two tables, told apart by their column `table`. `weights` has the columns of
`analysis.weights.compare`: the reference's weights against the arm's. `runs` has, for
the reference, too, as far as it makes sense there:

    diverged       the first step whose loss or gradient was not finite
    loss           mean loss of the steps since the row before
    highest        the largest of them
    loss_difference
                   the mean less the reference's
    function       RMS difference of what the two networks give on a probe batch over
                   the RMS of the reference's
    direct         ||L|| / ||w||: L is what one step of the arm makes of the reference's
                   state, less what the reference makes of it
    feedback       ||B|| / ||w||: B is by how much the difference D of the weights grows
                   beyond L in that step
    aligned        cosine of L and D
    held_out_loss  after the last step, of the averaged weights, with noise that is the
                   same for all arms and seeds
    accuracy, captions
                   share of so many images, drawn by them for held-out captions from
                   the same noise, that show their caption

D(t + 1) - D(t) = L(t) + B(t): the split into a direct error and its feedback is that of
the slides "Beyond tolerance / Cancellation Preservation", found on GitHub. What is
measured of trained weights is measured with the reference's attention and arithmetic,
so that two arms differ through their weights alone. Nothing is compared once either has
diverged: its weights stay where they are, and the other's go on.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from analysis import paired
from analysis.arms import REFERENCE, Arm
from analysis.paired import Programs, Training
from analysis.record import Row
from analysis.weights.compare import Comparison, compare
from train.assemble import Assembly, open_split
from train.config import Config
from train.diffusion import flow_losses
from train.evaluate import Evaluator, captions_of, satisfied
from train.step import Examples, draw_examples

_PROBE = 32
# Comparisons that wait hold a copy of the weights of two arms.
_WORKERS = max(1, (os.cpu_count() or 1) // 2)
_MOST_WAITING = 4 * _WORKERS
# By tensor, weights are told of the end alone.
_THROUGHOUT = ("all", "group", "layer")
# Columns of `runs` that are None where they cannot be had.
_MEASURED_BESIDE = (
    *("function", "direct", "feedback", "aligned"),
    *("held_out_loss", "accuracy", "captions"),
)


class Instruments:
    """Programs that train and measure, compiled once for all seeds."""

    def __init__(self, captions: int):
        self.programs = Programs()
        self._captions = captions
        self._made: dict[int, tuple[Any, Evaluator]] = {}

    def outputs(self, reference: Training, params: Any, examples: Examples):
        """What the network gives for the examples, with the reference's attention."""
        assembly = reference.assembly
        with jax.default_matmul_precision(assembly.policy.matmul):
            return np.asarray(self._of(assembly)[0](params, examples), np.float64)

    def judge(self, reference: Training, average: Any) -> Row:
        """Held-out loss and accuracy of averaged weights."""
        assembly, config = reference.assembly, reference.config
        source = open_split(config, "val")
        evaluator = self._of(assembly)[1]
        captions = captions_of(source, self._captions)
        verdicts = None
        with jax.default_matmul_precision(assembly.policy.matmul):
            loss = evaluator.loss(average, source)
            if captions:
                images = evaluator.samples(average, captions)
                verdicts = satisfied(config, images, captions)
        if verdicts is None:
            return {"held_out_loss": loss}
        accuracy = float(np.mean(verdicts))
        return {"held_out_loss": loss, "accuracy": accuracy, "captions": len(verdicts)}

    def _of(self, assembly: Assembly) -> tuple[Any, Evaluator]:
        if id(assembly) not in self._made:
            outputs = jax.jit(lambda params, drawn: _outputs(assembly, params, drawn))
            rows = min(assembly.config.eval.batch_size, self._captions or 1)
            fewer = dataclasses.replace(assembly.config.eval, batch_size=rows)
            config = dataclasses.replace(assembly.config, eval=fewer)
            parts = dataclasses.replace(assembly.parts, config=config)
            evaluator = Evaluator(
                parts, assembly.attention_fn, assembly.mesh, assembly.tokenizer
            )
            self._made[id(assembly)] = outputs, evaluator
        return self._made[id(assembly)]


def _outputs(assembly: Assembly, params: Any, examples: Examples) -> Any:
    model, seen = assembly.parts.merge(params), []

    def predict(x, t, tokens):
        seen.append(model(x, t, tokens, assembly.attention_fn))
        return seen[-1]

    flow_losses(predict, *examples, assembly.config.model.prediction)
    return seen[0]


def measure(
    config: Config, arms: Sequence[Arm], instruments: Instruments
) -> dict[str, list[Row]]:
    """Trains the reference and the arms; the rows of each, by name.

    Raises:
      UsageError: as `paired.train`.
    """
    wanted, names = set(paired.snapshots(config.steps)), [arm.name for arm in arms]
    rows: dict[str, list[Row]] = {name: [] for name in (REFERENCE, *names)}
    splits: dict[str, _Split] = {}
    compared: list[tuple[str, int, Future[Comparison]]] = []
    initial: dict[str, Any] = {}
    examples: Any = None
    began = time.monotonic()
    with ThreadPoolExecutor(_WORKERS) as pool:
        for step, batch, every in paired.train(config, arms, instruments.programs):
            reference = every[REFERENCE]
            for name, split in splits.items():
                split.end(reference, every[name])
            splits = {}
            if not step:
                initial = {name: _host(t.state.params) for name, t in every.items()}
                examples = _probe_examples(reference)
            if step not in wanted:
                continue
            seconds = time.monotonic() - began
            print(f"step {step} of {config.steps}: {seconds:.0f} s", file=sys.stderr)
            host = _host(reference.state.params)
            of_reference = instruments.outputs(
                reference, reference.state.params, examples
            )
            for name, training in every.items():
                row = {"table": "runs", "step": step, "diverged": training.diverged}
                row |= _losses(reference, training, step)
                rows[name].append(row)
                row |= dict.fromkeys(_MEASURED_BESIDE)
                if step == config.steps and training.diverged is None:
                    average = _like(training.state.average, reference.state.average)
                    row |= instruments.judge(reference, average)
                if name == REFERENCE or _stopped(reference, training):
                    continue
                ours = _like(training.state.params, reference.state.params)
                outputs = instruments.outputs(reference, ours, examples)
                row["function"] = _relative(outputs, of_reference)
                splits[name] = _Split(row, reference, training, batch)
                starts = initial[REFERENCE], initial[name]
                pair = host, _host(training.state.params)
                future = pool.submit(compare, *pair, *starts, names=(REFERENCE, name))
                compared.append((name, step, future))
                _wait_for_room(compared)
    for name, step, future in compared:
        rows[name] += [
            {"table": "weights", "step": step, **row}
            for row in future.result().rows
            if row["kind"] in _THROUGHOUT or step == config.steps
        ]
    return rows


def _stopped(*trainings: Training) -> bool:
    return any(training.diverged is not None for training in trainings)


def _wait_for_room(compared: Sequence[tuple[str, int, Future]]) -> None:
    waiting = [future for *_, future in compared if not future.done()]
    if len(waiting) > _MOST_WAITING:
        waiting[0].result()


def _probe_examples(reference: Training) -> Examples:
    """The first held-out images, at one drawn time each, with noise of their own."""
    assembly, config = reference.assembly, reference.config
    source = open_split(config, "val")
    items = [source[i] for i in range(min(_PROBE, len(source)))]
    captions = [assembly.tokenizer.encode(item["caption"]) for item in items]
    batch = {
        "image": jnp.asarray(np.stack([item["image"] for item in items])),
        "tokens": jnp.asarray(np.stack(captions)),
    }
    return draw_examples(config, batch, 0)


def _host(params: Any) -> Any:
    """Copies: a step uses up what it is given."""
    return jax.tree.map(np.array, params)


def _like(tree: Any, of: Any) -> Any:
    """The tree in the formats and places of another."""

    def placed(x, leaf):
        if x.dtype == leaf.dtype and x.sharding == leaf.sharding:
            return x
        return jax.device_put(np.asarray(x).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(placed, tree, of)


def _relative(x: np.ndarray, of: np.ndarray) -> float | None:
    """None while the reference gives 0 everywhere, as it does at first."""
    size = np.linalg.norm(of)
    return float(np.linalg.norm(x - of) / size) if size else None


def _losses(reference: Training, training: Training, step: int) -> Row:
    """Of the steps since the last comparison; NaN where the arm has not done them."""
    done = paired.snapshots(reference.config.steps)
    before = max((other for other in done if other < step), default=0)
    ours, theirs = (t.losses[before:step] for t in (training, reference))
    row: Row = {"loss": math.nan, "highest": None, "loss_difference": None}
    if training.diverged is None:
        row |= {"loss": math.fsum(ours) / len(ours), "highest": max(ours)}
    if reference.diverged is None:
        row["loss_difference"] = row["loss"] - math.fsum(theirs) / len(theirs)
    return row


class _Split:
    """`direct`, `feedback` and `aligned` of the step after a comparison, which are
    entered in its row at the end of that step.

    None where the arm has other data or first weights, so that its steps are of another
    problem, where it diverges, and at the end of training.
    """

    def __init__(self, row: Row, reference: Training, training: Training, batch: Any):
        self._row, arm = row, training.arm
        over = len(reference.losses) == reference.config.steps
        self._kept = None
        if not (arm.data or arm.weights or over):
            state = _like(reference.state, training.state)
            self._kept = (
                jax.tree.map(jnp.copy, reference.state.params),
                jax.tree.map(jnp.copy, training.state.params),
                training.from_state(state, batch),
            )

    def end(self, reference: Training, training: Training) -> None:
        """Enters them, once both have done the step."""
        if self._kept is None or _stopped(reference, training):
            return
        start, other, once = self._kept
        trees = start, other, reference.state.params, once, training.state.params
        leaves = [jax.tree.leaves(_like(tree, start)) for tree in trees]
        with jax.enable_x64(True):
            w, d, direct, feedback, dot = (float(x) for x in _products(*leaves))
        size = math.sqrt(w)
        alike = math.sqrt(direct) * math.sqrt(d)
        self._row |= {
            "direct": math.sqrt(direct) / size,
            "feedback": math.sqrt(feedback) / size,
            "aligned": dot / alike if alike else 0.0,
        }


@jax.jit
def _products(w, other, once, arm_once, arm_next) -> list[Any]:
    """||w||^2, ||D||^2, ||L||^2, ||B||^2 and D.L, in FP64."""
    sums: list[Any] = [0.0] * 5
    for leaves in zip(w, other, once, arm_once, arm_next, strict=True):
        a, b, c, e, f = (jnp.asarray(x, jnp.float64) for x in leaves)
        d, direct = b - a, e - c
        feedback = (f - c) - d - direct
        pairs = (a, a), (d, d), (direct, direct), (feedback, feedback), (d, direct)
        sums = [s + jnp.vdot(x, y) for s, (x, y) in zip(sums, pairs, strict=True)]
    return sums
