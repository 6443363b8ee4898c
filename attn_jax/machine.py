"""What a result depends on beside the program: installed versions, the GPU's driver."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import jax

# JAX's plugins for NVIDIA GPUs, and libraries of devices that are none.
_CUDA = "jax_cuda13_plugin", "jax_cuda12_plugin"
_OTHERS = "libtpu", "jax_rocm7_plugin", "jax_rocm60_plugin"


def prefer_cpu_without_driver() -> None:
    """For a command: keeps JAX from looking for an NVIDIA GPU where there is no driver.

    With its CUDA wheels installed, as for compiling kernels without a GPU, the search
    ends in a traceback on stderr. A choice the user has made stands, and other devices
    are looked for as ever. Processes that are started later do the same. (`train` has
    its own, which works before JAX is imported, as this package imports it.)
    """
    driver = shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()
    if driver or jax.config.jax_platforms or not any(map(_installed, _CUDA)):
        return
    if not any(map(_installed, _OTHERS)):
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed, by name."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver() -> str | None:
    """The NVIDIA driver's version; None where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(found.stdout.splitlines()), "").strip() or None
