"""run(config): check, assemble, resume, train, evaluate, say where the results lie."""

import collections
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.assemble import Assembly, assemble, open_split
from train.attention import check_lowered, lowered_kernels
from train.checkpoint import Checkpoints, find_weights, load_weights
from train.config import Config, UsageError, image_tokens
from train.data.loader import BatchIterator, batches
from train.data.source import Source
from train.evaluate import Evaluator, captions_of, rates, satisfied
from train.figures import write_grid, write_loss_curve, write_shadow_curves
from train.record import Record, RunFolder, environment
from train.shadow import ShadowedFn, is_due, make_shadowed, rows_of, summary
from train.sharding import put_batch, rows_of_process, start_processes
from train.state import TrainState
from train.step import Metrics, compile_step, make_train_step

# Steps given to the device before the figures of the first of them are fetched, so
# that the device never waits for the host.
_STEPS_AHEAD = 2


class Diverged(Exception):
    """The loss or a gradient is no longer finite; the message names the step."""


class Preempted(Exception):
    """Stopped by SIGTERM after a checkpoint; running again goes on from it."""


class Interrupted(Exception):
    """Stopped by Ctrl-C, which saves nothing; the message says what is kept."""


def run(config: Config) -> dict[str, Any]:
    """Trains, or goes on training, and returns the final figures.

    The same figures go to stdout as one line of JSON. A run that is complete is left
    as it is.

    Raises:
      UsageError: the command does not fit the machine, the data or the run folder;
        raised before anything is compiled.
      Diverged: a loss or gradient is not finite.
      Preempted: SIGTERM came.
      Interrupted: Ctrl-C came.
    """
    start_processes(config.distributed)
    speaks = jax.process_index() == 0
    folder = RunFolder(config)
    assembly = assemble(config)
    shadowed = make_shadowed(assembly)
    train, val = open_split(config, "train"), open_split(config, "val")
    folder.check(config)
    record = Record(folder, speaks=speaks)
    done = folder.done()
    if done is not None and done["steps"] >= config.steps:
        if done["steps"] > config.steps:
            raise UsageError(
                f"{folder.root} has {done['steps']} steps, more than --steps "
                f"{config.steps}: give --run-dir for a new run"
            )
        record.announce(done, "already done")
        return done
    with (
        jax.default_matmul_precision(assembly.policy.matmul),
        Checkpoints(folder.checkpoints, config.checkpoint.keep) as checkpoints,
        _sigterm_noted() as stopping,
    ):
        if done is not None and checkpoints.latest is None:
            raise UsageError(
                f"{folder.root} is done with {done['steps']} steps but has no "
                "checkpoint to go on from: give --run-dir for a new run, or delete "
                f"{folder.root} to start it over"
            )
        weights = None
        if config.init_from is not None and checkpoints.latest is None:
            weights = find_weights(Path(config.init_from), assembly.abstract_state())
        trainer = _Trainer(assembly, shadowed, record, checkpoints, weights, train, val)
        state = trainer.start()
        try:
            state = trainer.train(state, stopping)
        except KeyboardInterrupt:
            kept = checkpoints.latest
            what = f"step {kept} is saved" if kept else "nothing is saved yet"
            raise Interrupted(
                f"interrupted; {what} in {folder.checkpoints}, where the same command "
                "goes on (SIGTERM saves before it stops)"
            ) from None
        finally:
            record.stop_progress()
        result = trainer.finish(state)
    record.write(lambda: folder.finish(result))
    record.announce(result, "done")
    return result


@contextlib.contextmanager
def _sigterm_noted() -> Iterator[list[int]]:
    """Yields a list that is no longer empty once SIGTERM has come."""
    came: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, previous)


@dataclasses.dataclass
class _Window:
    """Figures of the steps since the last log line."""

    started: float
    losses: list[float] = dataclasses.field(default_factory=list)
    skipped: int = 0


class _Trainer:
    """One run from its start or its newest checkpoint to its final figures."""

    def __init__(
        self,
        assembly: Assembly,
        shadowed: ShadowedFn | None,
        record: Record,
        checkpoints: Checkpoints,
        weights: Path | None,
        train: Source,
        val: Source,
    ):
        self.config = assembly.config
        self.assembly = assembly
        self.shadowed = shadowed
        self.record = record
        self.checkpoints = checkpoints
        self.weights = weights
        self.train_source, self.val_source = train, val
        self.evaluator = Evaluator(
            assembly.parts, assembly.attention_fn, assembly.mesh, assembly.tokenizer
        )
        self.window = _Window(time.monotonic())
        self.pending: collections.deque[tuple[int, Metrics]] = collections.deque()

    def start(self) -> TrainState:
        """The newest checkpoint, or the weights of `--init-from`, or fresh ones."""
        step = self.checkpoints.latest
        folder = self.record.folder
        if step is not None and step > self.config.steps:
            raise UsageError(
                f"{folder.root} is at step {step}, past --steps {self.config.steps}"
            )
        # A folder that cannot be gone on with is left as it is.
        restored = None
        if step is not None:
            restored = self.checkpoints.restore(self.assembly.abstract_state())
        self.record.write(lambda: folder.begin(self.config))
        if self.assembly.attention.note:
            self.record.say(self.assembly.attention.note)
        self.record.write(lambda: folder.forget_after(step or 0))
        self._describe([])
        if restored is None:
            return self._first_state()
        self.record.say(f"resuming from step {step}")
        return restored

    def _first_state(self) -> TrainState:
        state = self.assembly.fresh_state()
        if self.weights is None:
            return state
        params, average = load_weights(self.weights, self.assembly.abstract_state())
        self.record.say(f"weights and their average from {self.weights}")
        return state._replace(params=params, average=average)

    def _describe(self, calls: Any) -> None:
        attention = dataclasses.asdict(self.assembly.attention)
        attention["custom_calls"] = calls
        attention["inputs"] = np.dtype(self.assembly.policy.attention).name
        everything = environment() | {
            "profile": self.config.profile,
            "attention": attention,
            "matmul_precision": self.assembly.policy.matmul,
            "mesh": dict(self.assembly.mesh.shape),
        }
        self.record.write(lambda: self.record.folder.describe(everything))

    def _batches(self, start: int) -> BatchIterator:
        config = self.config
        part, parts = rows_of_process(self.assembly.mesh, config.batch_size)
        return batches(
            self.train_source,
            self.assembly.tokenizer,
            batch_size=config.batch_size,
            seed=config.data.seed,
            start_step=start,
            process_index=part,
            process_count=parts,
            worker_count=config.data.workers,
        )

    def train(self, state: TrainState, stopping: list[int]) -> TrainState:
        """Steps up to the configured number, with logs, checkpoints, evaluations."""
        config, start = self.config, int(state.step)
        if start >= config.steps:
            return state
        with contextlib.closing(self._batches(start)) as feed:
            batch = put_batch(self.assembly.mesh, next(feed))
            plain, audited = self._compile(state, batch)
            self.record.start_progress(start, config.steps)
            self.window = _Window(time.monotonic())
            for step in range(start, config.steps):
                compiled = audited if is_due(config, step + 1) else plain
                with jax.transfer_guard("disallow"):
                    state, metrics = compiled(state, batch)
                self.pending.append((step, metrics))
                if step + 1 < config.steps:
                    batch = put_batch(self.assembly.mesh, next(feed))
                self._settle(_STEPS_AHEAD)
                self._after_step(state, step + 1, stopping)
            self._settle(0)
            self._report_data(feed)
        self.checkpoints.save(config.steps, state)
        return state

    def _compile(self, state: TrainState, batch: Any) -> tuple[Any, Any]:
        """The step, and the step with the audit of `--shadow`, the same without one."""
        began = time.monotonic()
        assembly = self.assembly

        def compiled(shadowed: ShadowedFn | None) -> tuple[Any, dict[str, int], str]:
            step = make_train_step(
                assembly.parts, assembly.optimizer, assembly.attention_fn, shadowed
            )
            program = compile_step(
                *(step, state, assembly.shardings, batch, assembly.mesh),
                options=assembly.compiler_options,
            )
            calls = lowered_kernels(program.as_text())
            return program, calls, check_lowered(assembly.attention, calls)

        plain, calls, line = compiled(None)
        audited = plain
        if self.shadowed is not None:
            audited = compiled(self.shadowed)[0]
        self._describe(calls)
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        mesh = " x ".join(
            f"{name} {size}" for name, size in assembly.mesh.shape.items()
        )
        length = self.config.model.text_length + image_tokens(self.config)
        device = assembly.mesh.devices.flat[0].device_kind
        self.record.say(
            f"{self.config.preset}: {count / 1e6:.2f} M weights, {length} tokens, "
            f"{self.config.precision}, attention inputs "
            f"{np.dtype(assembly.policy.attention).name}, mesh {mesh} on {device}"
        )
        self.record.say(f"{line}; compiled in {time.monotonic() - began:.0f} s")
        return plain, audited

    def _after_step(self, state: TrainState, done: int, stopping: list[int]) -> None:
        """Everything due once `done` steps have been given to the device."""
        config = self.config
        logged = done % config.log_every == 0
        if done % config.checkpoint.every == 0 and done < config.steps:
            self._settle(0)
            self.checkpoints.save(done, state)
        if config.eval.every and done % config.eval.every == 0 and done < config.steps:
            self._settle(0)
            self._evaluate(state, done)
        if self._must_stop(stopping, logged):
            self._settle(0)
            self.checkpoints.save(done, state)
            self._draw_curves()
            self.checkpoints.wait()
            raise Preempted(
                f"stopped by SIGTERM; step {done} is saved in "
                f"{self.record.folder.checkpoints}: run the same command again"
            )

    def _must_stop(self, stopping: list[int], together: bool) -> bool:
        """Whether SIGTERM came; several processes ask each other at log lines only."""
        if jax.process_count() == 1:
            return bool(stopping)
        if not together:
            return False
        return bool(multihost_utils.process_allgather(np.int32(len(stopping))).any())

    def _settle(self, ahead: int) -> None:
        """Fetches the figures of all but the last `ahead` steps."""
        while len(self.pending) > ahead:
            step, metrics = self.pending.popleft()
            fetched = jax.device_get(metrics)
            statistics = fetched.pop("shadow", None)
            row = {name: value.item() for name, value in fetched.items()}
            if statistics is not None:
                rows = rows_of(self.config, step + 1, statistics)
                self.record.add_shadow(rows)
                self.record.say(summary(self.config, rows))
            if not row["ok"]:
                raise Diverged(self._divergence(step, row))
            if row["applied"]:
                self.window.losses.append(row["loss"])
            else:
                self.window.skipped += 1
            self.record.advance(step + 1)
            if (step + 1) % self.config.log_every == 0 or step + 1 == self.config.steps:
                self._log(step + 1, row)

    def _divergence(self, step: int, row: dict[str, Any]) -> str:
        self.checkpoints.wait()
        latest = self.checkpoints.latest
        folder = self.record.folder.checkpoints
        last = (
            f"the last good checkpoint is {folder / str(latest)} (step {latest})"
            if latest is not None
            else "no checkpoint was written before"
        )
        what = "loss" if not math.isfinite(row["loss"]) else "gradient"
        return f"non-finite {what} at step {step}; {last}"

    def _log(self, step: int, row: dict[str, Any]) -> None:
        """One row and one line: the mean loss since the last, and the speed."""
        window, now = self.window, time.monotonic()
        count = len(window.losses) + window.skipped
        speed = count * self.config.batch_size / max(now - window.started, 1e-9)
        # fsum: the mean does not depend on how the window was cut by a resume.
        loss = math.fsum(window.losses) / max(len(window.losses), 1)
        entry: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "grad_norm": row["grad_norm"],
            "lr": row["lr"],
            "images_per_s": round(speed, 1),
        }
        if self.assembly.policy.loss_scale is not None:
            entry |= {"loss_scale": row["loss_scale"], "skipped": window.skipped}
        self.record.add(entry)
        self.record.say(
            f"step {step}/{self.config.steps}  loss {loss:.4f}  grad norm "
            f"{row['grad_norm']:.3f}  lr {row['lr']:.2e}  {speed:.0f} img/s"
        )
        self.window = _Window(now)

    def _evaluate(self, state: TrainState, step: int) -> None:
        """Held-out loss and a sample grid; the time does not count as training."""
        began = time.monotonic()
        loss = self.evaluator.loss(state.average, self.val_source)
        captions = captions_of(self.val_source, self.config.eval.grid)
        images = self.evaluator.samples(state.average, captions)
        path = self.record.folder.sample_grid_at(step)
        verdicts = satisfied(self.config, images, captions)
        self.record.write(lambda: write_grid(images, captions, verdicts, path))
        self.record.add({"step": step, "held_out_loss": loss})
        self._draw_curves()
        self.record.say(f"step {step}  held-out loss {loss:.4f}  samples {path}")
        self.window.started += time.monotonic() - began

    def _draw_curves(self) -> None:
        folder = self.record.folder
        self.record.write(lambda: write_loss_curve(folder.rows(), folder.loss_curve))
        rows = folder.shadow_rows()
        if rows:
            self.record.write(lambda: write_shadow_curves(rows, folder.shadow_figure))

    def _report_data(self, feed: BatchIterator) -> None:
        if feed.skipped:
            name, reason = next(iter(feed.skipped.items()))
            self.record.say(
                f"skipped {len(feed.skipped)} damaged samples, the first is "
                f"{name}: {reason}"
            )
        if feed.truncated:
            self.record.say(
                f"cut {feed.truncated} captions to {self.config.model.text_length} "
                "tokens"
            )

    def finish(self, state: TrainState) -> dict[str, Any]:
        """Final held-out loss, scored samples and both pictures."""
        config, folder = self.config, self.record.folder
        result: dict[str, Any] = {"run_dir": str(folder.root), "steps": config.steps}
        result["attention"] = self.assembly.attention.implementation
        loss = self.evaluator.loss(state.average, self.val_source)
        result["held_out_loss"] = loss
        self.record.add({"step": config.steps, "held_out_loss": loss})
        splits = {"val": (self.val_source, config.eval.captions)}
        if config.data.name == "shapes" and config.eval.novel:
            splits["novel"] = (open_split(config, "novel"), config.eval.novel)
        for split, (source, count) in splits.items():
            captions = captions_of(source, max(count, config.eval.grid))
            images = self.evaluator.samples(state.average, captions)
            scores = rates(config, images[:count], captions[:count])
            if scores:
                result[split] = scores | {"captions": len(captions[:count])}
            if split == "val":
                shown = images[: config.eval.grid], captions[: config.eval.grid]
                verdicts = satisfied(config, *shown)
                for path in (folder.sample_grid, folder.sample_grid_at(config.steps)):
                    self.record.write(
                        lambda path=path: write_grid(*shown, verdicts, path)
                    )
        rows = folder.rows()
        speeds = [row["images_per_s"] for row in rows if "images_per_s" in row]
        if speeds:
            result["images_per_s"] = float(np.median(speeds))
            result["loss"] = [row["loss"] for row in rows if "loss" in row][-1]
        self._draw_curves()
        self.checkpoints.wait()
        return result
