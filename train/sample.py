"""Draws images for captions from a trained run."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from train.assemble import assemble
from train.checkpoint import Checkpoints
from train.config import SampleConfig, UsageError, load
from train.evaluate import Evaluator
from train.figures import write_grid


def sample_run(command: SampleConfig) -> str:
    """Writes the PNG and returns its path.

    One caption gives the bare image at the resolution it was trained at, several give
    a grid with the captions below. The weights are the averaged ones of the newest
    checkpoint.

    Raises:
      UsageError: the run has no checkpoint, or a caption the tokenizer does not know.
    """
    root, out = Path(command.run_dir), Path(command.out)
    config = load(root / "config.json")
    captions = list(command.caption)
    evaluation = dataclasses.replace(
        config.eval,
        batch_size=len(captions),
        sampler_steps=command.sampler_steps or config.eval.sampler_steps,
        guidance=(
            config.eval.guidance if command.guidance is None else command.guidance
        ),
    )
    # Sampling spreads over whatever devices there are, not those of the training.
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=1, tensor=1)
    config = dataclasses.replace(config, eval=evaluation, mesh=mesh)
    assembly = assemble(config, devices=jax.devices()[:1])
    try:
        for caption in captions:
            if assembly.tokenizer.overflow(caption):
                raise ValueError(
                    f"caption {caption!r} is longer than {config.model.text_length} "
                    "tokens"
                )
            assembly.tokenizer.encode(caption)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not (root / "checkpoints").is_dir():
        raise UsageError(f"{root} has no checkpoint yet")
    with (
        jax.default_matmul_precision(assembly.policy.matmul),
        Checkpoints(root / "checkpoints", config.checkpoint.keep) as checkpoints,
    ):
        if checkpoints.latest is None:
            raise UsageError(f"{root} has no checkpoint yet")
        state = checkpoints.restore(assembly.abstract_state())
        evaluator = Evaluator(
            assembly.parts, assembly.attention_fn, assembly.mesh, assembly.tokenizer
        )
        images = evaluator.samples(state.average, captions, seed=command.seed)
    _write(images, captions, out)
    return str(out)


def _write(images: np.ndarray, captions: list[str], out: Path) -> None:
    if len(captions) == 1:
        from PIL import Image

        Image.fromarray(images[0]).save(out)
    else:
        write_grid(images, captions, None, out)
