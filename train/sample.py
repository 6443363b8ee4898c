"""Draws images for captions from a trained run."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import UInt8

from train.assemble import Assembly, assemble
from train.checkpoint import Checkpoints
from train.config import Config, SampleConfig, UsageError, load
from train.evaluate import Evaluator
from train.figures import write_grid
from train.state import TrainState
from train.validate import check_number


def sample_run(command: SampleConfig) -> str:
    """Writes the PNG and returns its path.

    One caption gives the bare image at the resolution it was trained at, several give
    a grid with the captions below. The weights are the averaged ones of the newest
    checkpoint.

    Raises:
      UsageError: the PNG cannot be written there, a number makes no sense, the run
        has no checkpoint, or a caption the tokenizer does not know; raised before
        anything is drawn.
    """
    root = Path(command.run_dir)
    config = load(root / "config.json")
    out = root / "sample.png" if command.out is None else Path(command.out)
    _check(command, out)
    captions = list(command.caption)
    evaluation = dataclasses.replace(
        config.eval,
        batch_size=len(captions),
        sampler_steps=(
            config.eval.sampler_steps
            if command.sampler_steps is None
            else command.sampler_steps
        ),
        guidance=(
            config.eval.guidance if command.guidance is None else command.guidance
        ),
    )
    assembly = on_one_device(dataclasses.replace(config, eval=evaluation))
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
    with Checkpoints(root / "checkpoints", config.checkpoint.keep) as checkpoints:
        if checkpoints.latest is None:
            raise UsageError(f"{root} has no checkpoint yet")
        state = checkpoints.restore(assembly.abstract_state())
    images = draw(assembly, state, captions, command.seed)
    try:
        _write(images, captions, out)
    except OSError as error:
        raise UsageError(f"cannot write --out {out}: {error.strerror}") from error
    return str(out)


def on_one_device(config: Config) -> Assembly:
    """The parts of a run on the first device, whatever those of the training were."""
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=1, tensor=1, seq=1)
    config = dataclasses.replace(config, mesh=mesh)
    return assemble(config, devices=jax.devices()[:1])


def draw(
    assembly: Assembly, state: TrainState, captions: Sequence[str], seed: int
) -> UInt8[np.ndarray, "n R R 3"]:
    """An image for each caption with the averaged weights, as `eval` of the run says.

    The noise of image i depends on the run's seed, on `seed` and on i.
    """
    with jax.default_matmul_precision(assembly.policy.matmul):
        evaluator = Evaluator(
            assembly.parts, assembly.attention_fn, assembly.mesh, assembly.tokenizer
        )
        return evaluator.samples(state.average, captions, seed=seed)


def _check(command: SampleConfig, out: Path) -> None:
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out {out} must end in .png")
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"--out {out} must be a file in a folder that exists")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UsageError(f"cannot write --out {out}")
    check_number("seed", command.seed, 0 <= command.seed < 2**32, "lie in [0, 2**32)")
    steps, guidance = command.sampler_steps, command.guidance
    if steps is not None:
        check_number("sampler_steps", steps, steps >= 1, "be at least 1")
    if guidance is not None:
        check_number("guidance", guidance, math.isfinite(guidance), "be finite")


def _write(images: np.ndarray, captions: list[str], out: Path) -> None:
    if len(captions) == 1:
        from PIL import Image

        Image.fromarray(images[0]).save(out)
    else:
        write_grid(images, captions, None, out)
