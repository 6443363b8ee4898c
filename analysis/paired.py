"""Several trainings side by side in one process: the reference and its arms.

All of them do step t before any does step t + 1, on batches that are read once for all
arms of the same data. So nothing has to be kept of a run but its state, and weights are
compared where they live.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from analysis import ExperimentError
from analysis.arms import REFERENCE, Arm, configured
from train.assemble import Assembly, assemble, open_split
from train.attention import make_attention, shard_attention
from train.config import Config, UsageError
from train.data.loader import batches
from train.model import AttentionFn
from train.sharding import put_batch
from train.state import TrainState
from train.step import Metrics, compile_step, make_train_step


@dataclasses.dataclass
class Training:
    """One arm at work.

    Attributes:
      config, assembly: as `train` has them.
      state: before the next step. Each step uses up the one before.
      losses: of all steps so far.
      diverged: the first step whose loss or gradient was not finite, which ends the
        arm; None while there is none.
    """

    arm: Arm
    config: Config
    assembly: Assembly
    state: TrainState
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    losses: list[float] = dataclasses.field(default_factory=list)
    diverged: int | None = None

    def advance(self, batch: Any) -> None:
        """One step."""
        if self.diverged is not None:
            return
        number = len(self.losses)
        self.state, metrics = self.step(self.state, self.placed(batch))
        found = jax.device_get(metrics)
        self.losses.append(float(found["loss"]))
        if not found["ok"]:
            self.diverged = number

    def from_state(self, state: TrainState, batch: Any) -> Any:
        """The weights that one step of this arm makes of a state, which is kept."""
        copied = jax.tree.map(
            lambda leaf, sharding: jax.device_put(jnp.copy(leaf), sharding),
            state,
            self.assembly.shardings,
        )
        return self.step(copied, self.placed(batch))[0].params

    def placed(self, batch: Any) -> Any:
        return put_batch(self.assembly.mesh, batch)


def snapshots(steps: int) -> list[int]:
    """Steps after which weights are compared: powers of two and eighths."""
    powers = {2**k for k in range(steps.bit_length()) if 2**k <= steps}
    return sorted(powers | {round(steps * k / 8) for k in range(1, 9)} - {0})


def train(
    reference: Config, arms: Sequence[Arm]
) -> Iterator[tuple[int, Any, Mapping[str, Training]]]:
    """Trains the reference and the arms; yields after each of `snapshots`, and at first
    after 0 steps: the step, the batch that comes next, and the trainings by name.

    Raises:
      UsageError: an arm does not fit the machine or the data.
      ExperimentError: the reference diverged.
    """
    programs: dict[Any, tuple[Assembly, _Compiled]] = {}
    every = {
        arm.name: _begin(configured(reference, arm), arm, programs)
        for arm in (Arm(REFERENCE, ""), *arms)
    }
    wanted = set(snapshots(reference.steps))
    with contextlib.ExitStack() as stack:
        feeds = _Feeds(stack, every.values())
        yield 0, feeds.peek(every[REFERENCE]), every
        for step in range(reference.steps):
            for training in every.values():
                training.advance(feeds.peek(training))
            if every[REFERENCE].diverged is not None:
                raise ExperimentError(f"the reference diverged at step {step}")
            feeds.move_on(last=step + 1 == reference.steps)
            if step + 1 in wanted:
                yield step + 1, feeds.peek(every[REFERENCE]), every


class _Feeds:
    """Batches, read once for all arms of the same data."""

    def __init__(self, stack: contextlib.ExitStack, trainings):
        self._iterators, self._now = {}, {}
        for training in trainings:
            config, key = training.config, self._key(training)
            if key not in self._iterators:
                feed = batches(
                    open_split(config, "train"),
                    training.assembly.tokenizer,
                    batch_size=config.batch_size,
                    seed=config.data.seed,
                    worker_count=config.data.workers,
                )
                self._iterators[key] = stack.enter_context(contextlib.closing(feed))
                self._now[key] = next(feed)

    def peek(self, training: Training) -> Any:
        return self._now[self._key(training)]

    def move_on(self, *, last: bool) -> None:
        if not last:
            self._now = {key: next(feed) for key, feed in self._iterators.items()}

    @staticmethod
    def _key(training: Training):
        return training.config.data, training.config.batch_size


def _begin(config: Config, arm: Arm, programs: dict) -> Training:
    """`programs`: of the arms so far. Those that differ in what they are given have
    one."""
    if arm.devices > len(jax.devices()):
        raise UsageError(
            f"arm {arm.name}: {arm.devices} devices are wanted, and there are "
            f"{len(jax.devices())}: leave it out with --arms"
        )
    alike = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=0))
    key = alike, arm.rewritten
    if key not in programs:
        assembly = _assembled(config, arm)
        parts, optimizer = assembly.parts, assembly.optimizer
        step = make_train_step(parts, optimizer, assembly.attention_fn)
        programs[key] = assembly, _Compiled(step, assembly)
    assembly, step = programs[key]
    state = assembly.fresh_state()
    if arm.weights:
        other = dataclasses.replace(config, seed=config.seed + arm.weights)
        fresh = _assembled(other, arm).fresh_state()
        state = state._replace(params=fresh.params, average=fresh.average)
    if arm.nudged:
        state = _nudged(state)
    return Training(arm, config, assembly, state, step)


def _assembled(config: Config, arm: Arm) -> Assembly:
    assembly = assemble(config, jax.devices()[: arm.devices])
    if not arm.rewritten:
        return assembly
    attention = make_attention(assembly.attention, assembly.policy)
    rewritten = _differentiating_itself(attention)
    attention_fn = shard_attention(rewritten, assembly.mesh)
    return dataclasses.replace(assembly, attention_fn=attention_fn)


class _Compiled:
    """The step, compiled for the first batch it is given."""

    def __init__(self, step, assembly: Assembly):
        self._step, self._assembly, self._program = step, assembly, None

    def __call__(self, state: TrainState, batch: Any):
        if self._program is None:
            assembly = self._assembly
            with jax.default_matmul_precision(assembly.policy.matmul):
                self._program = compile_step(
                    *(self._step, state, assembly.shardings, batch, assembly.mesh)
                )
        return self._program(state, batch)


def _differentiating_itself(attention: AttentionFn) -> AttentionFn:
    """The same operations, but the gradient is asked for by hand."""

    @jax.custom_vjp
    def attend(query, key, value):
        return attention(query, key, value)

    attend.defvjp(
        lambda *qkv: jax.vjp(attention, *qkv), lambda pullback, out: pullback(out)
    )
    return attend


def _nudged(state: TrainState) -> TrainState:
    """The first weight that is not 0 is the next number away from 0."""
    leaves, tree = jax.tree.flatten(state.params)
    for number, leaf in enumerate(leaves):
        x = np.asarray(leaf)
        places = np.flatnonzero(x)
        if places.size:
            place = np.unravel_index(places[0], x.shape)
            x = x.copy()
            x[place] = np.nextafter(x[place], np.sign(x[place]) * x.dtype.type(np.inf))
            leaves[number] = jax.device_put(x, leaf.sharding)
            return state._replace(params=jax.tree.unflatten(tree, leaves))
    raise ValueError("all weights are 0")
