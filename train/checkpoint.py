"""Checkpoints of a run: saved in the background, whole or not at all."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from train.config import UsageError
from train.state import TrainState

_WEIGHTS = ("params", "average")


class Checkpoints:
    """The folder of checkpoints, one subfolder a step.

    Each holds `state` (the whole train state) and `data` (the position in the data,
    which is the step: the order is a pure function of seed and step). A checkpoint
    carries its final name only once it is complete, so a killed run leaves either a
    whole checkpoint or none.
    """

    def __init__(self, directory: Path, keep: int):
        from orbax.checkpoint import v1 as ocp

        self._directory = directory
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
        with _interrupt_held():
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
            with _interrupt_held():
                self._checkpointer.save_checkpointables_async(
                    step, {"state": state, "data": {"next_step": step}}
                )

    def wait(self) -> None:
        """Returns once the last save is complete on disk."""
        with _interrupt_held():
            self._checkpointer.wait()

    def restore(self, abstract: Any) -> TrainState:
        """The newest state, each leaf with the format and placement of `abstract`.

        Raises:
          UsageError: it is damaged. Nothing is deleted: whether an older checkpoint
            will do is the user's choice.
        """
        found = saved_steps(self._directory)
        newest = found.pop(max(found))
        older = (
            f"to go on from {found[max(found)]}"
            if found
            else "to start from scratch, as there is no older one"
        )
        return _load(newest, abstract, f"delete that folder {older}")


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Holds Ctrl-C back until a call of Orbax returns: cut short, it may hang."""
    previous = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    if previous is not signal.default_int_handler or not main_thread:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        raise KeyboardInterrupt


def find_weights(path: Path, abstract: TrainState) -> Path:
    """The checkpoint that `--init-from` means, once its weights are known to fit.

    Args:
      path: a checkpoint, or a run folder, of which the newest is taken.
      abstract: the state to start.

    Raises:
      UsageError: there is no checkpoint, or its weights have other names or shapes;
        the first that differs is named.
    """
    from orbax.checkpoint import v1 as ocp

    if path.name.isdigit() and (path / "state").is_dir():
        steps = {int(path.name): path}
    else:
        steps = saved_steps(path / "checkpoints")
    if not steps:
        raise UsageError(
            f"--init-from {path}: no checkpoint there; name a run folder or one of "
            "the folders in its checkpoints/"
        )
    newest = steps[max(steps)]
    _check_files(newest, "name an undamaged one to --init-from")
    stored: Any = ocp.checkpointables_metadata(str(newest.absolute())).metadata["state"]
    for part in _WEIGHTS:
        there, here = _shapes(stored[part]), _shapes(getattr(abstract, part))
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise UsageError(
                    f"--init-from {newest}: {name} is {there.get(name, 'missing')} "
                    f"there and {here.get(name, 'missing')} here; give the "
                    "--model and --data options of that run"
                )
    return newest


def saved_steps(directory: Path) -> dict[int, Path]:
    """The complete checkpoints by step; one still being written has a longer name."""
    found = directory.glob("*")
    return {int(one.name): one for one in found if one.name.isdigit()}


def _check_files(checkpoint: Path, remedy: str) -> None:
    """Refuses a checkpoint with lost or emptied files by their names."""
    state = checkpoint / "state"
    needed = [state / "_METADATA", state / "manifest.ocdbt"]
    for file in [*needed, *sorted((state / "d").glob("*"))]:
        name = file.relative_to(checkpoint)
        if not file.exists():
            raise _damaged(checkpoint, f"it has no {name}", remedy)
        if not file.stat().st_size:
            raise _damaged(checkpoint, f"its {name} is empty", remedy)


def _damaged(checkpoint: Path, why: str, remedy: str) -> UsageError:
    return UsageError(f"the checkpoint {checkpoint} is damaged, {why}: {remedy}")


def _load(checkpoint: Path, wanted: Any, remedy: str) -> Any:
    from orbax.checkpoint import v1 as ocp

    _check_files(checkpoint, remedy)
    folder = str(checkpoint.absolute())
    try:
        return ocp.load_checkpointables(folder, {"state": wanted})["state"]
    except KeyError as error:
        # Orbax wraps whatever goes wrong, from damage to a lack of memory.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if not isinstance(cause, (ValueError, KeyError, OSError)):
            raise
        why = f"it cannot be read ({str(cause)[:300]})"
        raise _damaged(checkpoint, why, remedy) from error


def load_state(checkpoint: Path, abstract: TrainState) -> TrainState:
    """The state of one checkpoint, each leaf placed as in `abstract`.

    Raises:
      UsageError: it is damaged.
    """
    return _load(checkpoint, abstract, "leave its step out")


def _shapes(weights: Any) -> dict[str, tuple[int, ...]]:
    # A checkpoint turns the numbers of the blocks into text.
    return {
        ".".join(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
    }


def load_weights(checkpoint: Path, abstract: TrainState) -> tuple[Any, Any]:
    """Weights and their average from `find_weights`, placed as in `abstract`."""
    from orbax.checkpoint import v1 as ocp

    folder = str(checkpoint.absolute())
    stored: Any = ocp.checkpointables_metadata(folder).metadata["state"]
    wanted = {
        part: getattr(abstract, part)
        if part in _WEIGHTS
        else jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
        for part, tree in stored.items()
    }
    state = _load(checkpoint, wanted, "name an undamaged one to --init-from")
    return state["params"], state["average"]
