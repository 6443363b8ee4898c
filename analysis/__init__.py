"""Experiments on the library and on training runs: `python -m analysis list`."""


class ExperimentError(Exception):
    """An experiment ran and something it promises did not hold (exit 1)."""
