"""The state of a training run as a plain pytree, created where it is to lie."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt32

from train.config import Config
from train.layers import Norms
from train.model import Transformer
from train.precision import LossScale, Policy, start_loss_scale
from train.sharding import parameter_shardings, replicated

# Streams of random numbers of one run: fold_in(key(seed), stream).
INIT_STREAM, STEP_STREAM, EVAL_STREAM, SAMPLE_STREAM = range(4)


class TrainState(NamedTuple):
    """All that a step changes; saved as it is.

    Attributes:
      params: weights in the policy's format.
      average: moving average of the weights, fp32.
      optimizer: state of the Optax chain.
      loss_scale: fp16's loss scale; constant otherwise.
      step: steps done, which is also the position in the data.
    """

    params: Any
    average: Any
    optimizer: Any
    loss_scale: LossScale
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """A model without its weights: the graph, and how to make the first weights."""

    graph: Any
    config: Config
    policy: Policy
    vocab_size: int
    norms: Norms = Norms()

    def build(self, key: Array) -> Transformer:
        """A model with fresh weights."""
        return Transformer(
            self.config.model,
            self.policy,
            vocab_size=self.vocab_size,
            resolution=self.config.data.resolution,
            rngs=nnx.Rngs(params=key),
            norms=self.norms,
        )

    def merge(self, params: Any) -> Transformer:
        """The model with given weights."""
        return nnx.merge(self.graph, nnx.State(params))


def make_parts(
    config: Config,
    policy: Policy,
    vocab_size: int,
    norms: Norms = Norms(),
) -> ModelParts:
    """Traces the model's structure; no array is made."""
    parts = ModelParts(None, config, policy, vocab_size, norms)
    abstract = nnx.eval_shape(lambda: parts.build(jax.random.key(0)))
    return dataclasses.replace(parts, graph=nnx.split(abstract)[0])


def stream(seed: int | UInt32[Array, ""], number: int) -> Array:
    """Key of one stream of random numbers (threefry: the same on every device)."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)


def init_state(
    parts: ModelParts,
    optimizer: optax.GradientTransformation,
    seed: int | UInt32[Array, ""],
) -> TrainState:
    """State of step 0. Weights are drawn in FP32 and then rounded to the policy's
    format: drawn in 16 bits they would be other ones of the same seed."""
    wide = dataclasses.replace(parts.policy, params=jnp.float32)
    model = dataclasses.replace(parts, policy=wide).build(stream(seed, INIT_STREAM))
    drawn = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params = jax.tree.map(lambda leaf: leaf.astype(parts.policy.params), drawn)
    return TrainState(
        params=params,
        average=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params),
        optimizer=optimizer.init(params),
        loss_scale=start_loss_scale(parts.policy),
        step=jnp.int32(0),
    )


def state_shardings(
    parts: ModelParts, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Placement of every leaf: Adam's moments and the average lie as their weights."""
    abstract = jax.eval_shape(lambda: init_state(parts, optimizer, 0))
    params = parameter_shardings(mesh, abstract.params)
    everywhere = replicated(mesh)
    return TrainState(
        params=params,
        average=params,
        optimizer=optax.tree.map_params(
            optimizer,
            lambda _, sharding: sharding,
            abstract.optimizer,
            params,
            transform_non_params=lambda _: everywhere,
        ),
        loss_scale=jax.tree.map(lambda _: everywhere, abstract.loss_scale),
        step=everywhere,  # pyright: ignore[reportArgumentType]
    )


def abstract_state(
    parts: ModelParts, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """Shapes, formats and placements of the state, for loading a checkpoint."""
    abstract = jax.eval_shape(lambda: init_state(parts, optimizer, 0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        abstract,
        shardings,
    )
