"""The other end of `analysis.speed.in_torch`: starts the process and asks it."""

import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.record import Row
from analysis.speed import timing
from analysis.speed.cases import Case, Pass
from analysis.speed.errors import Results, inputs_of
from analysis.speed.in_torch import INPUTS, restored
from attn_jax.audit.inputs import Inputs

# No pass of a case takes as long; a process that does hangs.
_MOST_SECONDS = 600.0


class TorchProcess:
    """PyTorch in a process that is started when first asked, and after it has died.

    Use as a context; leaving it ends the process.
    """

    def __init__(self, platform: str, command: Sequence[str] | None = None):
        self._platform = platform
        module = [sys.executable, "-m", "analysis.speed.in_torch", platform]
        self._command = list(command or module)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._first: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="attn-jax-speed-")
        # The inputs that lie in the folder.
        self._written: dict[str, Inputs] = {}

    def __enter__(self) -> "TorchProcess":
        return self

    def __exit__(self, *_) -> None:
        self._end()
        self._folder.cleanup()

    def versions(self) -> dict[str, str]:
        """Of PyTorch and its libraries; empty if there is none."""
        try:
            self._start()
        except RuntimeError:
            return {}
        return self._first.get("versions", {})

    def measure(
        self, case: Case, of: Pass, names: Sequence[str], seconds: float
    ) -> Iterator[tuple[str, Row, Results]]:
        """As `in_jax.measure`; where the process fails, every row says how."""
        folder = Path(self._folder.name)
        try:
            self._start()
            self._write_inputs(case, folder)
            question = {
                **{"case": vars(case), "pass": of, "implementations": list(names)},
                **{"seconds": seconds, "inputs": str(folder)},
            }
            rows = self._ask(question, _MOST_SECONDS + seconds)["rows"]
        except RuntimeError as error:
            for name in names:
                refused = dict.fromkeys(timing.TIMED) | {"refused": str(error)}
                yield name, refused, {}
            return
        for name, row in rows:
            results = restored(case, name, row, folder)
            yield name, row, results

    def _write_inputs(self, case: Case, folder: Path) -> None:
        for family in case.families:
            arrays = inputs_of(case, family)
            if arrays is self._written.get(family):
                continue
            for name, x in zip(INPUTS, arrays, strict=True):
                np.save(folder / f"{family}-{name}.npy", x.view(np.int16))
            self._written[family] = arrays

    def _start(self) -> None:
        """Raises RuntimeError if there is no PyTorch to be asked."""
        if self._process is None:
            # JAX is there for its shapes only: the card belongs to PyTorch.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            self._answers = queue.Queue()
            reader = threading.Thread(
                target=_read, args=(self._process, self._answers), daemon=True
            )
            reader.start()
            self._first = self._hear(_MOST_SECONDS)
        if "absent" in self._first:
            raise RuntimeError(self._first["absent"])

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # It has died: there will be no answer.
        return self._hear(seconds)

    def _hear(self, seconds: float) -> dict[str, Any]:
        """The next answer; RuntimeError, and an end of the process, if none comes."""
        assert self._process is not None
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self._end()
            raise RuntimeError(f"PyTorch gave no answer in {seconds:g} s") from None
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._end()
        raise RuntimeError(f"PyTorch's process died, exit code {code}")

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass  # A question that was never read.


def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    """Puts every line into a queue, and an empty one after the last."""
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put("")


def is_installed(package: str) -> bool:
    """Whether a package could be imported; it is not."""
    return importlib.util.find_spec(package) is not None
