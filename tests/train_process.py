"""`python -m train` in a process of its own, of a few steps."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND = (
    "--attn=xla --steps=8 --batch-size=8 --log-every=1 --model.width=64 "
    "--model.heads=1 --model.depth=1 --optimizer.warmup=2 --eval.every=4 "
    "--eval.examples=8 --eval.captions=8 --eval.novel=8 --eval.batch-size=8 "
    "--eval.grid=4 --eval.sampler-steps=2 --checkpoint.every=3 --checkpoint.keep=9"
).split()


# As `python -m train` in a terminal, where Ctrl-C is never ignored; a job that a shell
# put in the background inherits the opposite.
PROGRAM = (
    "import runpy, signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "runpy.run_module('train', run_name='__main__', alter_sys=True)\n"
)


def start(folder: Path, *more: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, *COMMAND, "--run-dir", str(folder), *more]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(there: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    wait_until(path.exists, process)
