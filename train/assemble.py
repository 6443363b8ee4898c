"""Puts the parts of a run together: mesh, model, optimiser, attention, tokenizer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from attn_jax.xla_options import RUN_ONCE
from train.attention import (
    ResolvedAttention,
    check_attention,
    compiler_options,
    has_kernels,
    make_attention,
    resolve_attention,
    shard_attention,
)
from train.config import Config, UsageError
from train.data import DataError, make_tokenizer, open_source
from train.data.source import Source
from train.data.tokenizer import Tokenizer
from train.layers import Norms
from train.model import AttentionFn
from train.optimizer import make_optimizer
from train.precision import Policy, make_policy
from train.sharding import batch_shards, check_width, make_mesh
from train.state import (
    ModelParts,
    TrainState,
    abstract_state,
    init_state,
    make_parts,
    state_shardings,
)


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Everything that training and sampling share; holds no weights."""

    config: Config
    policy: Policy
    mesh: Mesh
    tokenizer: Tokenizer
    attention: ResolvedAttention
    attention_fn: AttentionFn
    parts: ModelParts
    optimizer: optax.GradientTransformation
    shardings: TrainState

    def fresh_state(self, seed: int | None = None) -> TrainState:
        """State of step 0, made in place on the mesh; of the configuration's seed."""
        return self._make_state(jnp.uint32(self.config.seed if seed is None else seed))

    @functools.cached_property
    def _make_state(self) -> Callable[[Array], TrainState]:
        """One program for all seeds."""
        return jax.jit(
            lambda seed: init_state(self.parts, self.optimizer, seed),
            out_shardings=self.shardings,
            compiler_options=RUN_ONCE,
        )

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """XLA's, for the training step."""
        devices, in_rings = list(self.mesh.devices.flat), self.mesh.shape["seq"] > 1
        return compiler_options(self.attention, devices, in_rings=in_rings)

    def abstract_state(self) -> Any:
        """What to load a checkpoint into."""
        return abstract_state(self.parts, self.optimizer, self.shardings)


def assemble(config: Config, devices: list[Any] | None = None) -> Assembly:
    """Builds the parts; compiles nothing and makes no array of weights.

    Args:
      config: checked by `train.validate.validate`.
      devices: those of the mesh; default all.

    Raises:
      UsageError: the configuration does not fit the devices or the attention.
    """
    policy = make_policy(config)
    mesh = make_mesh(config, devices)
    check_width(mesh, config.model.width)
    attention = resolve_attention(config, mesh.devices.flat[0])
    function = make_attention(attention, policy)
    parallel = attention.parallel
    attention_fn = shard_attention(
        *(function, mesh, policy.attention),
        ulysses=None if parallel is None else parallel.ulysses,
    )
    if parallel is None:
        check_attention(config, function, policy.attention)
    else:  # It communicates, which it can on a mesh alone.
        check_attention(config, attention_fn, policy.attention, batch_shards(mesh))
    tokenizer = make_tokenizer(config.model.tokenizer, config.model.text_length)
    parts = make_parts(config, policy, tokenizer.vocab_size, make_norms(mesh))
    optimizer = make_optimizer(config)
    return Assembly(
        config=config,
        policy=policy,
        mesh=mesh,
        tokenizer=tokenizer,
        attention=attention,
        attention_fn=attention_fn,
        parts=parts,
        optimizer=optimizer,
        shardings=state_shardings(parts, optimizer, mesh),
    )


def make_norms(mesh: Mesh) -> Norms:
    """Kernels where they run, whatever the attention."""
    if not has_kernels(mesh.devices.flat[0]):
        return Norms()
    # Imported on use: Pallas takes long.
    from train.head_norm_kernels import KernelHeadNorm
    from train.norm_kernels import KernelNorm

    return Norms(KernelNorm(mesh), KernelHeadNorm(mesh))


def open_split(config: Config, split: str) -> Source:
    """Opens a split of the data.

    Raises:
      UsageError: it cannot be read.
    """
    try:
        source = open_source(config.data, split)  # pyright: ignore[reportArgumentType]
        if len(source) == 0:
            raise DataError(f"the split {split!r} has no samples")
    except DataError as error:
        raise UsageError(f"--data.name={config.data.name}: {error}") from error
    return source
