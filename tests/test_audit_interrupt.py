"""Ctrl-C, and functions that look like it."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attn_jax.audit import audit_attention
from attn_jax.audit.inputs import Shape
from attn_jax.audit.interrupt import Interrupted, interruptible
from attn_jax.audit.raised import in_one_line

SHAPE = Shape(1, 32, 32, 2, 1, 16)
SMALL = dict(shapes=[SHAPE], families=["normal"], masks=["full"], gradients=False)
BEGUN = "ATTN_JAX_TEST_BEGUN"


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler: tests are begun in the background, too, where Ctrl-C is
    ignored, and so in what they begin, and others set their own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def endless(query, key, value):
    """XLA computes without end, and no step of Python comes between."""
    Path(os.environ[BEGUN]).write_text(str(os.getpid()))
    return jax.lax.while_loop(lambda x: x[0, 0, 0, 0] < jnp.inf, jnp.sin, query)


def interrupts(query, key, value):
    raise KeyboardInterrupt


async def later(query, key, value):
    return query


def talks(query, key, value):
    raise RuntimeError("x" * 100_000)


def _exists(pid: int) -> bool:
    """What nobody waited for has ended all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("processes", [0, 1])
def test_ctrl_c_is_acted_on_at_once(processes, tmp_path):
    """A second one, too, changes nothing; no row is kept of what was under way, and
    nothing goes on."""
    begun, folder = tmp_path / "begun", tmp_path / "audit"
    command = [sys.executable, "-m", "attn_jax.audit", f"{__name__}:endless"]
    command += ["--processes", str(processes), "--out", str(folder)]
    command += ["--lse", "never", "--families", "normal", "--masks", "full"]
    command += ["--shapes", ",".join(map(str, vars(SHAPE).values()))]
    child = subprocess.Popen(
        command,
        env=os.environ | {BEGUN: str(begun), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while not (begun.exists() and begun.read_text()):
            assert child.poll() is None
            time.sleep(0.1)
        time.sleep(1)  # For XLA to be at it.
        asked = time.monotonic()
        os.killpg(child.pid, signal.SIGINT)
        time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=60)
        assert time.monotonic() - asked < 20
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 130
    lines = [x for x in said.strip().splitlines() if "interrupted" in x]
    assert len(lines) == 1 and str(folder) in lines[0]
    assert "Traceback" not in said
    kept = [json.loads(x) for x in (folder / "parts.jsonl").read_text().splitlines()]
    parts = [x["cell"]["part"] for x in kept if "cell" in x]
    assert not any(part.startswith("32 x 32") for part in parts)
    ended = time.monotonic() + 20
    while _exists(int(begun.read_text())):
        assert time.monotonic() < ended
        time.sleep(0.1)


def test_work_is_done_as_without():
    before = signal.getsignal(signal.SIGINT)
    assert interruptible(lambda: 3) == 3
    with pytest.raises(ValueError, match="this"):
        interruptible(lambda: int("this"))
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_ctrl_c_ends_the_wait():
    def work():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    begun = time.monotonic()
    with pytest.raises(Interrupted):
        interruptible(work)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert time.monotonic() < begun + 4


@pytest.mark.parametrize("processes", [0, 1])
def test_an_interrupt_of_the_targets_own_is_its_error(processes):
    run = interruptible if not processes else lambda work: work()
    report = run(
        lambda: audit_attention(f"{__name__}:interrupts", **SMALL, processes=processes)
    )
    (cell,) = report.cells
    assert cell.status == "failed"
    assert cell.reason == "RuntimeError: it raises KeyboardInterrupt"


def test_an_asynchronous_function_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (cell,) = audit_attention(later, **SMALL).cells
    assert cell.status == "failed" and "asynchronous" in cell.reason


def test_a_line_that_ends_in_a_colon_goes_on():
    error = TypeError("inputs must be alike, but differ:\n\n  * x is f32\n  * y is f64")
    said = "TypeError: inputs must be alike, but differ: * x is f32 * y is f64"
    assert in_one_line(error) == said


def test_of_a_long_exception_the_beginning_is_said():
    (cell,) = audit_attention(talks, **SMALL).cells
    assert len(cell.reason) < 600 and cell.reason.endswith("xxx...")
