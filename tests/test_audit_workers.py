"""The processes that a target runs in."""

import concurrent.futures
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from threadpoolctl import threadpool_info

from attn_jax.audit import audit_attention, workers
from attn_jax.audit.inputs import Shape
from attn_jax.audit.plan import plan
from attn_jax.audit.target import resolve
from attn_jax.audit.workers import DiedError, NotStartedError, Workers

pytestmark = pytest.mark.ci

SHAPE = Shape(1, 32, 32, 2, 1, 16)


@functools.partial(jax.jit, static_argnames=("scale", "is_causal"))
def plain(query, key, value, *, scale, is_causal=False):
    """Not found by its own name: that is the decorator's."""
    return jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=is_causal
    )


def crashes(query, key, value, *, scale, is_causal=False):
    if is_causal:
        os.kill(os.getpid(), signal.SIGSEGV)
    return plain(query, key, value, scale=scale)


def _pid():
    return [os.getpid()]


def _hears_ctrl_c():
    """Whether this process was started so that it does."""
    return [signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])]


def _x64():
    return [bool(jax.config.read("jax_enable_x64"))]


def _spoilt():
    workers._is_healthy = lambda: False
    return _pid()


def _niceness():
    return [os.nice(0)]


def _threads_of_products():
    return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]


def _raises():
    raise ValueError("not this")


class _Odd(Exception):
    """Cannot be made again of what `pickle` keeps of it."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def _raises_odd():
    raise _Odd(1, 2)


class _Absent:
    """Cannot be found in another process."""

    def __reduce__(self):
        return _raises, ()

    def __call__(self):
        return []


def _lasts(path):
    path.touch()
    time.sleep(60)
    return []


def _ends(connection, modes):
    os._exit(1)


def _audit(name, processes):
    return audit_attention(
        f"{__name__}:{name}",
        shapes=[SHAPE],
        families=["normal"],
        masks=["full", "causal"],
        gradients=False,
        against=[],
        processes=processes,
    )


def test_figures_are_those_of_one_process():
    alone, apart = (_audit("plain", n) for n in (0, 2))
    assert [c.errors for c in apart.cells] == [c.errors for c in alone.cells]
    assert apart.findings == alone.findings
    assert len(apart.cells) == 2


def test_a_crash_costs_its_part_alone():
    report = _audit("crashes", 1)
    full, causal = report.cells
    assert full.errors and full.status == "measured"
    assert causal.status == "failed" and "SIGSEGV" in causal.reason
    assert report.verdict == "fails" and report.exit_code == 4
    assert any("SIGSEGV" in finding.says for finding in report.findings)


def test_processes_give_way_to_this_one():
    """Which others wait for."""
    with Workers(1) as processes:
        (there,) = processes.call(_niceness)
    assert there == min(os.nice(0) + 10, 19)


def test_products_take_few_threads():
    """Those of several processes would wait for one another on all cores."""
    with Workers(1) as processes:
        threads = processes.call(_threads_of_products)
    assert threads and max(threads) <= 2


def test_processes_last_and_are_replaced():
    with jax.enable_x64(True):
        wide = Workers(1)
    with wide as processes:
        (first,) = processes.call(_pid)
        assert processes.call(_x64) == [True]
        assert first != os.getpid() and processes.call(_pid) == [first]
        with pytest.raises(ValueError, match="not this"):
            processes.call(_raises)
        with pytest.raises(RuntimeError, match="_Odd: 1 and 2"):
            processes.call(_raises_odd)
        with pytest.raises(NotStartedError, match="not this.*can import"):
            processes.call(_Absent())
        assert processes.call(_pid) == [first]
        with pytest.raises(DiedError, match="exit code 3"):
            processes.call(functools.partial(os._exit, 3))
        (second,) = processes.call(_spoilt)
        assert second != first
        # Its device is of no use to the next part.
        assert processes.call(_pid) not in ([first], [second])


def test_what_is_interrupted_has_not_crashed(tmp_path):
    """A row that says so would be kept, and found there by the next audit."""
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Workers(1) as processes:
        make = functools.partial(_lasts, tmp_path / "begun")
        part, queued = (
            processes.turns.submit("kind", functools.partial(processes.call, x))
            for x in (make, _pid)
        )
        processes.turns.start()
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < begun + 50
            time.sleep(0.1)
        raise KeyboardInterrupt
    for future in (part, queued):
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()
    assert time.monotonic() < begun + 50


def test_ctrl_c_does_not_reach_a_process_that_imports(tmp_path):
    """It begins without it. In a Python of its own, where nothing was started yet."""
    script = tmp_path / "script.py"
    script.write_text(
        f"from {__name__} import Workers, _hears_ctrl_c\n"
        "if __name__ == '__main__':\n"
        "    with Workers(1) as processes:\n"
        "        print('heard:', processes.call(_hears_ctrl_c))\n"
    )
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "heard: [False]" in done.stdout


def test_a_process_that_does_not_start_is_no_crash(monkeypatch):
    """Such as one that imports a main module that is not guarded."""
    monkeypatch.setattr(workers, "_serve", _ends)
    with Workers(1) as processes, pytest.raises(NotStartedError, match="__main__"):
        processes.call(_pid)


def test_what_cannot_be_sent_is_refused_at_once():
    with pytest.raises(ValueError, match="cannot be sent to other processes.*=0"):
        audit_attention(lambda query, key, value: query, processes=1)
    target = resolve(f"{__name__}:plain")
    assert target.__reduce__()[1] == (target.name, target.adapter)


def test_there_are_none_without_a_gpu():
    assert workers.worthwhile(64, [0] * 9) == 0


def test_there_are_as_many_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def found(gib, cores, parts):
        device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": gib * 2**30})
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        return workers.worthwhile(cores, parts)

    groups = plan()
    assert groups[-1].logits_bytes == 2**31  # Two heads of 16384 keys.
    parts = [*(x.logits_bytes for x in groups), *[groups[0].logits_bytes] * 6]
    # Three quarters of cards of 80, 40 and 24 GB.
    assert [found(x, 16, parts) for x in (59, 29, 18)] == [8, 3, 1]
    assert [found(59, x, parts) for x in (1, 2, 8)] == [1, 1, 4]
    # All problems are as long as those of which two have room.
    assert found(29, 16, [2**31] * 9) == 2
    assert found(59, 16, []) == 1 and found(59, 16, [2**40]) == 1
