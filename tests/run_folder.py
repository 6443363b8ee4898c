"""A run folder as training leaves it, made without training."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from train.assemble import Assembly, assemble
from train.checkpoint import Checkpoints
from train.config import Config, to_json


def write_run(folder: Path, config: Config, steps: Sequence[int]) -> None:
    """Checkpoints at these steps, each of a model whose gates are open."""
    folder.mkdir()
    (folder / "config.json").write_text(to_json(config))
    state = on_one_device(config).fresh_state()
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        for step in steps:
            params = moved(state.params, step)
            checkpoints.save(step, state._replace(params=params, step=jnp.int32(step)))


def moved(params, seed: int):
    """Every weight but the scales of the norm away from where it starts."""
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf
            if "scale" in jax.tree_util.keystr(path)
            else leaf + np.float32(0.05 * rng.standard_normal(leaf.shape))
        ),
        params,
    )


def on_one_device(config: Config) -> Assembly:
    mesh = dataclasses.replace(config.mesh, data=1)
    model = dataclasses.replace(config.model, remat=False)
    config = dataclasses.replace(config, mesh=mesh, model=model)
    return assemble(config, jax.devices()[:1])
