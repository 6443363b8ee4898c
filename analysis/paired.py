"""Several trainings side by side in one process: the reference and its arms.

All of them do step t before any does step t + 1, on batches that are read once for all
arms of the same data. So nothing has to be kept of a run but its state, and weights are
compared where they live.
"""

import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from analysis.arms import REFERENCE, Arm, configured
from analysis.kernel_options import recipe_of
from attn_jax import dot_product_attention
from attn_jax.mask import Mask
from train.assemble import Assembly, assemble, open_split
from train.attention import make_attention, resolve_attention, shard_attention
from train.config import Config, UsageError
from train.data.loader import batches
from train.model import AttentionFn
from train.sharding import put_batch, replicated
from train.state import TrainState
from train.step import Metrics, compile_step, make_train_step

_STEPS_AHEAD = 2


@dataclasses.dataclass
class Training:
    """One arm at work.

    Attributes:
      config, assembly: as `train` has them.
      state: before the next step. Each step uses up the one before.
      losses: of all steps that were waited for.
      diverged: the first step whose loss or gradient was not finite, which ends the
        arm as soon as it is waited for; None while there is none.
    """

    arm: Arm
    config: Config
    assembly: Assembly
    state: TrainState
    step: "Step"
    losses: list[float] = dataclasses.field(default_factory=list)
    diverged: int | None = None
    _begun: collections.deque[Metrics] = dataclasses.field(
        default_factory=collections.deque
    )

    def begin(self, batch: Any) -> None:
        """One step on a batch of its mesh, given to the device."""
        if self.diverged is None:
            self.state, metrics = self.step(self.state, batch, self.config.seed)
            self._begun.append(metrics)

    def settle(self, ahead: int) -> None:
        """Waits for all steps that were begun but the last so many."""
        while len(self._begun) > ahead:
            found = jax.device_get(self._begun.popleft())
            if not found["ok"]:
                self.diverged = len(self.losses)
                self._begun.clear()
            self.losses.append(float(found["loss"]))

    def from_state(self, state: TrainState, batch: Any) -> Any:
        """The weights that one step of this arm makes of a state, which is kept."""
        copied = jax.tree.map(
            lambda leaf, sharding: jax.device_put(jnp.copy(leaf), sharding),
            state,
            self.assembly.shardings,
        )
        return self.step(copied, self.placed(batch), self.config.seed)[0].params

    def placed(self, batch: Any) -> Any:
        return put_batch(self.assembly.mesh, batch)


def snapshots(steps: int) -> list[int]:
    """Steps after which weights are compared: powers of two and eighths."""
    powers = {2**k for k in range(steps.bit_length()) if 2**k <= steps}
    return sorted(powers | {round(steps * k / 8) for k in range(1, 9)} - {0})


def train(
    reference: Config, arms: Sequence[Arm], programs: "Programs | None" = None
) -> Iterator[tuple[int, Any, Mapping[str, Training]]]:
    """Trains the reference and the arms; yields after each step, and at first after 0:
    the steps done, the batch that comes next, and the trainings by name. They are
    waited for after the steps of `snapshots` and after the ones that follow.

    Args:
      programs: of trainings before, which may differ in seeds.

    Raises:
      UsageError: an arm does not fit the machine or the data.
    """
    programs = Programs() if programs is None else programs
    every = {
        arm.name: _begin(configured(reference, arm), arm, programs)
        for arm in (Arm(REFERENCE, ""), *arms)
    }
    with contextlib.ExitStack() as stack:
        feeds = _Feeds(stack, every.values())
        _compile(every.values(), feeds)
        yield 0, feeds.peek(every[REFERENCE]), every
        looked_at = {
            step + after for step in snapshots(reference.steps) for after in (0, 1)
        }
        for step in range(reference.steps):
            for training in every.values():
                training.begin(feeds.placed(training))
            feeds.move_on(last=step + 1 == reference.steps)
            # The devices have work while a step before is waited for.
            ahead = 0 if step + 1 in looked_at else _STEPS_AHEAD
            for training in every.values():
                training.settle(ahead)
            yield step + 1, feeds.peek(every[REFERENCE]), every


def _compile(trainings: Iterable[Training], feeds: "_Feeds") -> None:
    """What is not compiled yet, beside each other: XLA leaves Python's lock."""
    missing = {
        id(training.step): training
        for training in trainings
        if not training.step.compiled
    }
    with ThreadPoolExecutor(max(1, len(missing))) as pool:
        waits = [
            pool.submit(
                *(training.step.compile, training.arm.name, training.state),
                feeds.placed(training),
            )
            for training in missing.values()
        ]
        for wait in waits:
            wait.result()


class _Feeds:
    """Batches, read once for all arms of the same data."""

    def __init__(self, stack: contextlib.ExitStack, trainings):
        self._iterators, self._now = {}, {}
        self._placed: dict[Any, Any] = {}
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

    def placed(self, training: Training) -> Any:
        """The same on the training's mesh, put there once for all arms."""
        key = self._key(training), training.assembly.mesh
        if key not in self._placed:
            self._placed[key] = training.placed(self.peek(training))
        return self._placed[key]

    def move_on(self, *, last: bool) -> None:
        if not last:
            self._placed.clear()
            self._now = {key: next(feed) for key, feed in self._iterators.items()}

    @staticmethod
    def _key(training: Training):
        return training.config.data, training.config.batch_size


class Programs:
    """Compiled steps. Trainings that differ in seeds, or in the weights and the data
    they begin with, share one."""

    def __init__(self):
        self._known: dict[Any, tuple[Assembly, Step]] = {}
        self._starts: dict[Any, Assembly] = {}

    def of(self, config: Config, arm: Arm) -> "tuple[Assembly, Step]":
        """The parts of an arm, and its step."""
        data = dataclasses.replace(config.data, seed=0)
        alike = dataclasses.replace(config, data=data, seed=0)
        key = alike, arm.rewritten, arm.kernels, arm.recipe
        if key not in self._known:
            assembly = _assembled(alike, arm)
            parts, optimizer = assembly.parts, assembly.optimizer
            step = make_train_step(parts, optimizer, assembly.attention_fn)
            self._known[key] = assembly, Step(step, assembly)
        return self._known[key]

    def fresh_state(self, assembly: Assembly, seed: int) -> TrainState:
        """First weights of a seed, by one program for all attentions."""
        alike = dataclasses.replace(assembly.config, attn="baseline", recipe=None)
        return self._starts.setdefault(alike, assembly).fresh_state(seed)


def check_here(reference: Config, arms: Iterable[Arm]) -> None:
    """Raises UsageError: there are too few devices for an arm, or none of its kind."""
    for arm in arms:
        if arm.devices > len(jax.devices()):
            raise UsageError(
                f"arm {arm.name}: {arm.devices} devices are wanted, and there are "
                f"{len(jax.devices())}: leave it out with --arms"
            )
        resolve_attention(configured(reference, arm), jax.devices()[0])


def _begin(config: Config, arm: Arm, programs: Programs) -> Training:
    assembly, step = programs.of(config, arm)
    state = programs.fresh_state(assembly, config.seed + arm.weights)
    if arm.nudged:
        state = _nudged(state, assembly.policy.compute)
    return Training(arm, config, assembly, state, step)


def _assembled(config: Config, arm: Arm) -> Assembly:
    assembly = assemble(config, jax.devices()[: arm.devices])
    attention = make_attention(assembly.attention, assembly.policy, arm.recipe)
    if arm.kernels is not None:
        attention = _with_option(assembly, arm.kernels)
    elif arm.rewritten:
        attention = _differentiating_itself(attention)
    elif arm.recipe is None:
        return assembly
    kind = assembly.policy.attention
    attention_fn = shard_attention(attention, assembly.mesh, kind)
    return dataclasses.replace(assembly, attention_fn=attention_fn)


class Step:
    """A training step, compiled once for all seeds."""

    def __init__(self, step: Callable[..., Any], assembly: Assembly):
        self._step, self._assembly = step, assembly
        self._program: Any = None

    @property
    def compiled(self) -> bool:
        """Whether it can be called."""
        return self._program is not None

    def compile(self, name: str, state: TrainState, batch: Any) -> None:
        """For states and batches like these; says how long it took."""
        began, assembly = time.monotonic(), self._assembly
        with jax.default_matmul_precision(assembly.policy.matmul):
            self._program = compile_step(
                *(self._step, state, assembly.shardings, batch, assembly.mesh),
                self._seed(0),
                options=assembly.compiler_options,
            )
        seconds = time.monotonic() - began
        print(f"step of {name}: compiled in {seconds:.0f} s", file=sys.stderr)

    def __call__(self, state: TrainState, batch: Any, seed: int):
        """One step with the noise of a seed; the state is used up."""
        return self._program(state, batch, self._seed(seed))

    def _seed(self, seed: int) -> jax.Array:
        return jax.device_put(np.uint32(seed), replicated(self._assembly.mesh))


def _with_option(assembly: Assembly, option: str) -> AttentionFn:
    """Our kernels, or off their GPUs the emulator, with one of `OPTIONS`."""

    def attention(query, key, value):
        batch, length, heads, head_dim = query.shape
        recipe = recipe_of(
            option,
            dtype=query.dtype,
            head_dim=head_dim,
            lengths=(length, length),
            pairs=batch * heads,
            mask=Mask(),
            differentiated=True,
        )
        out = dot_product_attention(
            query,
            key,
            value,
            implementation=assembly.attention.implementation,
            recipe=recipe,
        )
        return cast(jax.Array, out)

    return attention


def _differentiating_itself(attention: AttentionFn) -> AttentionFn:
    """The same operations, but the gradient is asked for by hand."""

    @jax.custom_vjp
    def attend(query, key, value):
        return attention(query, key, value)

    attend.defvjp(
        lambda *qkv: jax.vjp(attention, *qkv), lambda pullback, out: pullback(out)
    )
    return attend


def _nudged(state: TrainState, seen: Any) -> TrainState:
    """The first weight that is not 0 is the next number away from 0, among those that
    the network sees: weights are rounded to the format `seen` before they are used, and
    a smaller change would end there."""
    leaves, tree = jax.tree.flatten(state.params)
    for number, leaf in enumerate(leaves):
        x = np.asarray(leaf)
        places = np.flatnonzero(x)
        if places.size:
            place = np.unravel_index(places[0], x.shape)
            x = x.copy()
            rounded = x[place].astype(seen)
            away = np.sign(x[place]) * np.inf
            x[place] = np.nextafter(rounded, np.asarray(away, rounded.dtype))
            leaves[number] = jax.device_put(x, leaf.sharding)
            return state._replace(params=jax.tree.unflatten(tree, leaves))
    raise ValueError("all weights are 0")
