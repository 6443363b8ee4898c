"""The table of experiments: what `python -m analysis NAME` runs."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from analysis import capture
from analysis.experiments import (
    accuracy,
    attribution,
    backward,
    bias,
    census,
    context_parallel_error,
    context_parallel_speed,
    depth,
    emulator_speed,
    flash_attention_2,
    gallery,
    kernels,
    memory,
    precision,
    random_cases,
    ring,
    saturation,
    sequence_length,
    speed,
    speed_and_error,
    state_format,
    step_speed,
    tiling,
    training,
    weights,
    weights_speed,
)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An entry of the table.

    Attributes:
      summary: one line for `list` and for the help text.
      add_arguments: adds the experiment's options to its parser.
      run: does it, given the parsed options and the command as text; returns what
        the last line of stdout says, as JSON.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, str], dict[str, Any]]


EXPERIMENTS = {
    "capture": Experiment(capture.SUMMARY, capture.add_arguments, capture.run),
    "accuracy": Experiment(accuracy.SUMMARY, accuracy.add_arguments, accuracy.run),
    "emulator-speed": Experiment(
        emulator_speed.SUMMARY, emulator_speed.add_arguments, emulator_speed.run
    ),
    "speed": Experiment(speed.SUMMARY, speed.add_arguments, speed.run),
    "speed-and-error": Experiment(
        speed_and_error.SUMMARY, speed_and_error.add_arguments, speed_and_error.run
    ),
    "kernels": Experiment(kernels.SUMMARY, kernels.add_arguments, kernels.run),
    "random-cases": Experiment(
        random_cases.SUMMARY, random_cases.add_arguments, random_cases.run
    ),
    "memory": Experiment(memory.SUMMARY, memory.add_arguments, memory.run),
    "flash-attention-2": Experiment(
        flash_attention_2.SUMMARY,
        flash_attention_2.add_arguments,
        flash_attention_2.run,
    ),
    "precision": Experiment(precision.SUMMARY, precision.add_arguments, precision.run),
    "sequence-length": Experiment(
        sequence_length.SUMMARY, sequence_length.add_arguments, sequence_length.run
    ),
    "tiling": Experiment(tiling.SUMMARY, tiling.add_arguments, tiling.run),
    "state-format": Experiment(
        state_format.SUMMARY, state_format.add_arguments, state_format.run
    ),
    "backward": Experiment(backward.SUMMARY, backward.add_arguments, backward.run),
    "attribution": Experiment(
        attribution.SUMMARY, attribution.add_arguments, attribution.run
    ),
    "saturation": Experiment(
        saturation.SUMMARY, saturation.add_arguments, saturation.run
    ),
    "bias": Experiment(bias.SUMMARY, bias.add_arguments, bias.run),
    "ring": Experiment(ring.SUMMARY, ring.add_arguments, ring.run),
    "context-parallel-error": Experiment(
        context_parallel_error.SUMMARY,
        context_parallel_error.add_arguments,
        context_parallel_error.run,
    ),
    "context-parallel-speed": Experiment(
        context_parallel_speed.SUMMARY,
        context_parallel_speed.add_arguments,
        context_parallel_speed.run,
    ),
    "depth": Experiment(depth.SUMMARY, depth.add_arguments, depth.run),
    "census": Experiment(census.SUMMARY, census.add_arguments, census.run),
    "training": Experiment(training.SUMMARY, training.add_arguments, training.run),
    "step-speed": Experiment(
        step_speed.SUMMARY, step_speed.add_arguments, step_speed.run
    ),
    "gallery": Experiment(gallery.SUMMARY, gallery.add_arguments, gallery.run),
    "weights": Experiment(weights.SUMMARY, weights.add_arguments, weights.run),
    "weights-speed": Experiment(
        weights_speed.SUMMARY, weights_speed.add_arguments, weights_speed.run
    ),
}
