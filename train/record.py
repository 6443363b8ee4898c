"""The run folder and what a run says: metrics, environment, log lines, progress.

    runs/NAME/
      config.json        the resolved configuration
      environment.json   versions, device, XLA flags, the attention really run
      metrics.jsonl      one JSON object a line
      shadow.jsonl       with --shadow: one object for each step, layer and tensor
      shadow.png         with --shadow: units of error, drawn with the loss curve
      checkpoints/STEP/  state and position in the data
      samples/STEP.png   sample grids
      loss.png           loss curve, drawn again at every evaluation
      samples.png        sample grid of the finished run
      sample.png         what `python -m train sample` drew last, unless told where
      log.txt            what went to stderr
      DONE               written last: steps and final figures as JSON

Only process 0 writes and speaks; all of it goes to stderr but the final line of JSON.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_jax import machine
from train.config import Config, UsageError, difference, load, run_dir, to_json
from train.gpu import allows_excess_precision

_VERSIONS_OF = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)
_STATUS = ("status", "--porcelain", "--untracked-files=no")


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, config: Config):
        self.root = run_dir(config)
        self.checkpoints = self.root / "checkpoints"
        self.metrics = self.root / "metrics.jsonl"
        self.shadow = self.root / "shadow.jsonl"
        self.shadow_figure = self.root / "shadow.png"
        self.log = self.root / "log.txt"
        self.loss_curve = self.root / "loss.png"
        self.sample_grid = self.root / "samples.png"
        self._done = self.root / "DONE"

    def sample_grid_at(self, step: int) -> Path:
        """Where the sample grid of a step goes."""
        return self.root / "samples" / f"{step}.png"

    def check(self, config: Config) -> None:
        """Checks that the folder is new or holds the same run.

        Raises:
          UsageError: the folder holds another run (with the difference), or cannot
            be written.
        """
        saved = self.root / "config.json"
        if saved.exists():
            changes = difference(load(saved), config)
            if changes:
                raise UsageError(
                    f"{self.root} holds another run ({'; '.join(changes)}): give "
                    "--run-dir for a new one, or the old options"
                )
        try:
            (self.root / "samples").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot write the run folder {self.root}: {error.strerror}"
            ) from error
        if not os.access(self.root, os.W_OK):
            raise UsageError(f"cannot write the run folder {self.root}")

    def begin(self, config: Config) -> None:
        """Writes the configuration and takes back an earlier end."""
        self._done.unlink(missing_ok=True)
        (self.root / "config.json").write_text(to_json(config) + "\n")

    def describe(self, environment: dict[str, Any]) -> None:
        """Writes what the result depends on beside the configuration."""
        text = json.dumps(environment, indent=2) + "\n"
        (self.root / "environment.json").write_text(text)

    def done(self) -> dict[str, Any] | None:
        """What the finished run wrote, None if it has not finished.

        Raises:
          UsageError: the file is damaged.
        """
        if not self._done.exists():
            return None
        try:
            result = json.loads(self._done.read_text())
            if result["steps"] >= 0 and math.isfinite(result["held_out_loss"]):
                return result
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise UsageError(
            f"{self._done} is damaged: delete it, and the same command goes on from "
            "the newest checkpoint"
        )

    def finish(self, result: dict[str, Any]) -> None:
        """Marks the run as finished; nothing is written after this."""
        unfinished = self._done.with_suffix(".tmp")
        unfinished.write_text(json.dumps(result) + "\n")
        unfinished.rename(self._done)

    def forget_after(self, step: int) -> None:
        """Drops metrics past a step: a run taken up there writes them again.

        A last line that a killed run left unfinished goes too.
        """
        for path in (self.metrics, self.shadow):
            if not path.exists():
                continue
            kept = []
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except ValueError:
                    continue
            path.write_text("".join(kept))

    def rows(self) -> list[dict[str, Any]]:
        """All metrics written so far."""
        return _rows(self.metrics)

    def shadow_rows(self) -> list[dict[str, Any]]:
        """What `--shadow` has written so far."""
        return _rows(self.shadow)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


class Record:
    """What a running run writes and says. Does nothing on processes other than 0."""

    def __init__(self, folder: RunFolder, *, speaks: bool):
        self.folder = folder
        self._speaks = speaks
        self._progress = None
        self._task = None

    def say(self, line: str) -> None:
        """One line to stderr and to log.txt."""
        if not self._speaks:
            return
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
        with self.folder.log.open("a") as log:
            log.write(line + "\n")

    def announce(self, result: dict[str, Any], how: str) -> None:
        """The end of a run: where its files lie, and its figures on stdout as JSON."""
        self.say(f"{how}: {result['steps']} steps, {_summary(result)}")
        self.say(f"run folder   {self.folder.root}")
        self.say(f"loss curve   {self.folder.loss_curve}")
        self.say(f"sample grid  {self.folder.sample_grid}")
        if self._speaks:
            print(json.dumps(result), flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """One row of metrics."""
        self._append(self.folder.metrics, [row])

    def add_shadow(self, rows: list[dict[str, Any]]) -> None:
        """The rows of one audited step."""
        self._append(self.folder.shadow, rows)

    def _append(self, path: Path, rows: list[dict[str, Any]]) -> None:
        if self._speaks:
            with path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))

    def write(self, action: Callable[[], None]) -> None:
        """Runs an action that writes files, on process 0 only."""
        if self._speaks:
            action()

    def start_progress(self, step: int, steps: int) -> None:
        """Shows a bar, on a terminal only."""
        if not (self._speaks and sys.stderr.isatty()):
            return
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeRemainingColumn

        columns = (
            *Progress.get_default_columns()[:3],
            TimeRemainingColumn(),
            TextColumn("step {task.completed}/{task.total}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("training", total=steps, completed=step)
        self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    def stop_progress(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _summary(result: dict[str, Any]) -> str:
    parts = [f"held-out loss {result['held_out_loss']:.4f}"]
    for split in ("val", "novel"):
        scores = result.get(split)
        if scores:
            share = f"{scores['all']:.1%} of {scores['captions']}"
            parts.append(f"{share} {split} captions met")
    return ", ".join(parts)


def environment() -> dict[str, Any]:
    """Git commit, versions, device and flags: what any result here depends on."""
    import jax

    device = jax.devices()[0]
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        # What a program wrote there before says nothing of the program.
        "git_dirty": bool(_git(*_STATUS, "--", ".", ":(exclude)results")),
        "python": platform.python_version(),
        "versions": machine.versions(_VERSIONS_OF),
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "cpu_count": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "xla_allow_excess_precision": allows_excess_precision(),
        "x64": bool(jax.config.read("jax_enable_x64")),
    }


def _git(*arguments: str) -> str | None:
    """Output of git in this program's checkout, None where there is none."""
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
