"""Checkpoints of a run: saved in the background, whole or not at all."""

from pathlib import Path
from types import TracebackType
from typing import Any

from train.state import TrainState


class Checkpoints:
    """The folder of checkpoints, one subfolder a step.

    Each holds `state` (the whole train state) and `data` (the position in the data,
    which is the step: the order is a pure function of seed and step). A checkpoint
    carries its final name only once it is complete, so a killed run leaves either a
    whole checkpoint or none.
    """

    def __init__(self, directory: Path, keep: int):
        from orbax.checkpoint import v1 as ocp

        training = ocp.training
        always: Any = training.save_decision_policies.FixedIntervalPolicy(1)
        newest: Any = training.preservation_policies.LatestN(keep)
        self._checkpointer = training.Checkpointer(
            str(directory.absolute()),
            save_decision_policy=always,
            preservation_policy=newest,
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._checkpointer.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving; returns once the state may change.

        Waits for the save before it, if that still runs. A step saved already is left
        alone.
        """
        if step != self.latest:
            self._checkpointer.save_checkpointables_async(
                step, {"state": state, "data": {"next_step": step}}
            )

    def wait(self) -> None:
        """Returns once the last save is complete on disk."""
        self._checkpointer.wait()

    def restore(self, abstract: Any) -> TrainState:
        """The newest state, each leaf with the format and placement of `abstract`."""
        loaded = self._checkpointer.load_checkpointables(
            self.latest, {"state": abstract}
        )
        return loaded["state"]
