"""The table of experiments: what `python -m analysis NAME` runs."""

import argparse
from typing import Any, Protocol

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


class Experiment(Protocol):
    """What a module of the table has."""

    @property
    def SUMMARY(self) -> str:
        """One line for `list` and for the help text."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the experiment's options to its parser."""

    def run(self, options: argparse.Namespace, command: str) -> dict[str, Any]:
        """Does it, given the parsed options and the command as text; returns what
        the last line of stdout says, as JSON."""
        ...


EXPERIMENTS: dict[str, Experiment] = {
    "capture": capture,
    "accuracy": accuracy,
    "emulator-speed": emulator_speed,
    "speed": speed,
    "speed-and-error": speed_and_error,
    "kernels": kernels,
    "random-cases": random_cases,
    "memory": memory,
    "flash-attention-2": flash_attention_2,
    "precision": precision,
    "sequence-length": sequence_length,
    "tiling": tiling,
    "state-format": state_format,
    "backward": backward,
    "attribution": attribution,
    "saturation": saturation,
    "bias": bias,
    "ring": ring,
    "context-parallel-error": context_parallel_error,
    "context-parallel-speed": context_parallel_speed,
    "depth": depth,
    "census": census,
    "training": training,
    "step-speed": step_speed,
    "gallery": gallery,
    "weights": weights,
    "weights-speed": weights_speed,
}
