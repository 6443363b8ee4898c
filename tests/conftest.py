"""What every test shares: devices, the gpu marker, the x64 fixture.

Without --gpu everything runs on the CPU, whatever the machine has, split into eight
virtual devices (meshes of 2 x 2 x 2 fit). With --gpu only tests marked `gpu` run.
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.quick_compiler import compile_quickly

REPOSITORY = Path(__file__).resolve().parent.parent
CPU_DEVICES = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu", action="store_true", help="run the tests marked gpu, and only those"
    )
    parser.addoption(
        "--ci", action="store_true", help="run the tests marked ci, too, as CI does"
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run the tests marked ci and the cases marked thorough, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    _keep_bytecode(config)
    if not config.getoption("--gpu"):
        # The variable is for the processes that tests start, which see one device.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
        # Nearly two thirds of all time would go into compiling. See `fully_optimised`.
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
        compile_quickly()


def _keep_bytecode(config: pytest.Config) -> None:
    """Where none may be written beside the sources, this run has a folder for it.

    Every process would compile thousands of modules anew otherwise, which takes longer
    than what most of those that tests start are started for. Workers and processes
    find the folder in the environment.
    """
    if sys.dont_write_bytecode and "PYTHONDONTWRITEBYTECODE" in os.environ:
        del os.environ["PYTHONDONTWRITEBYTECODE"]
        folder = tempfile.mkdtemp(prefix="attn-jax-bytecode-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What is imported by now stays: nobody need look through it for garbage again."""
    gc.collect()
    gc.freeze()


def _gpu_capability() -> str | None:
    try:
        return jax.devices("gpu")[0].compute_capability
    except RuntimeError:
        return None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    # For the suite's time: what they show others show, too, or show in part.
    left = [] if config.getoption("--thorough") else ["thorough"]
    if not any(map(config.getoption, ("--ci", "--thorough", "--gpu"))):
        left.append("ci")
    for marker in left:
        skip = pytest.mark.skip(reason=f"runs under --{marker}")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)
    if not config.getoption("--gpu"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="runs on a GPU, under --gpu"))
        return
    found = _gpu_capability()
    if found is None:
        raise pytest.UsageError("--gpu: JAX finds no GPU on this machine")
    config.hook.pytest_deselected(
        items=[item for item in items if not item.get_closest_marker("gpu")]
    )
    items[:] = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.kwargs.get("capability") if marker else None
        if needed not in (None, found):
            reason = f"needs compute capability {needed}, this GPU has {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A command run in a test sets variables that processes of later tests inherit."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for one test; the mode is put back whatever happens."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def fully_optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs are compiled as for a user, in which LLVM may fuse and reorder.

    For tests of what is rounded where. Other tests check what a program computes, in
    code that LLVM has hardly touched.
    """
    if request.config.getoption("--gpu"):
        yield
        return
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture
def as_users_call_it() -> Iterator[None]:
    """Without the type checks that only tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session, the same in all its workers."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"


@pytest.fixture(scope="module")
def shared_programs(programs: Path) -> Iterator[None]:
    """Compiled programs are kept on disk, for tests that compile the same ones.

    Found there is what this session compiled on this machine from the very same HLO, so
    a changed function is compiled anew. Not for programs with a `custom_partitioning`:
    it is in the HLO as an address, which another function may have later.
    """
    settings = {
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            # For the processes that tests start.
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def run_module() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -m ...` in the repository's root, in a process of its own."""

    def run(*arguments: str, timeout: float = 300):
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
