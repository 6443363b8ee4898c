"""The parts of a training step, compiled for this machine, to be run and timed."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from attn_jax.xla_options import RUN_ONCE
from train.assemble import Assembly
from train.sharding import BATCH, put_batch
from train.state import TrainState
from train.step import compile_step, draw_examples, example_losses, make_train_step

# The loss; the loss and its gradients; both, and the optimiser's work.
Part = Literal["forward", "both", "step"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled part.

    Attributes:
      donates: whether a run uses up the state that it is given.
      bytes: what the device holds while it runs: arguments, results and all that is
        between them.
      seconds: that it took to compile.
    """

    of: Part
    assembly: Assembly
    compiled: Any
    donates: bool
    bytes: int
    seconds: float


def compile_part(
    assembly: Assembly, of: Part, *, donate: bool = True, tuned: bool = True
) -> Program:
    """Compiles a part for the batch size of the assembly's configuration; makes no
    array. Unless told not to `donate`, a step uses its state up. What is not `tuned` is
    there to see what it needs: XLA tries nothing out."""
    began = time.monotonic()
    options, state = assembly.compiler_options, assembly.abstract_state()
    if not tuned:
        options = options | RUN_ONCE
    batch = _shapes(assembly)
    with jax.default_matmul_precision(assembly.policy.matmul):
        if of == "step":
            step = make_train_step(
                assembly.parts, assembly.optimizer, assembly.attention_fn
            )
            arguments = step, state, assembly.shardings, batch, assembly.mesh
            compiled = compile_step(*arguments, options=options, donate=donate)
        else:
            loss = _loss(assembly)
            function = loss if of == "forward" else jax.value_and_grad(loss)
            lowered = jax.jit(function).lower(state.params, batch, state.step)
            compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    assert memory is not None  # Every backend that JAX ships with reports it.
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    seconds, donates = time.monotonic() - began, donate and of == "step"
    return Program(of, assembly, compiled, donates, held, seconds)


def _loss(assembly: Assembly) -> Callable[..., Any]:
    def loss(params, batch, step):
        examples = draw_examples(assembly.config, batch, step)
        losses = example_losses(assembly.parts, assembly.attention_fn, params, examples)
        return losses.mean()

    return loss


def _shapes(assembly: Assembly) -> dict[str, jax.ShapeDtypeStruct]:
    config, placed = assembly.config, NamedSharding(assembly.mesh, BATCH)
    images = (config.batch_size, config.data.resolution, config.data.resolution, 3)
    tokens = config.batch_size, config.model.text_length
    return {
        "image": jax.ShapeDtypeStruct(images, jnp.uint8, sharding=placed),
        "tokens": jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=placed),
    }


class Runner:
    """A program with arrays to run on: a state, which is kept, and images and captions
    of chance, whose values the time does not depend on."""

    def __init__(self, program: Program, state: TrainState):
        assembly, rng = program.assembly, np.random.default_rng(0)
        batch = {
            name: rng.integers(0, 20, shape.shape).astype(shape.dtype)
            for name, shape in _shapes(assembly).items()
        }
        self._program = program
        self._batch = put_batch(assembly.mesh, batch)
        self._state = jax.tree.map(jnp.copy, state) if program.donates else state

    @property
    def arguments(self) -> tuple:
        """What the program is called with next."""
        state = self._state
        if self._program.of == "step":
            return state, self._batch
        return state.params, self._batch, state.step

    def milliseconds(self, runs: int) -> float:
        """Of one run, the mean of so many in a row, by the wall clock."""
        began, found = time.perf_counter(), None
        for _ in range(runs):
            found = self._program.compiled(*self.arguments)
            if self._program.donates:
                self._state = found[0]
        jax.block_until_ready(found)
        return 1e3 * (time.perf_counter() - began) / runs
