"""Identifies the GPU, in a worker process, for `tune` and `accept`."""

import dataclasses
import platform
import shutil
from pathlib import Path
from typing import Any

from attn_jax import machine
from attn_jax.kernels import architecture
from attn_jax.kernels.worker import Worker, WorkerFailed
from attn_jax.recipe import Architecture

# The parent of a worker leaves the GPU alone, and the worker takes what it needs of
# its memory: another one may be on its way out.
ON_GPU = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Compiling without a GPU: the plug-in is not to ask for one.
WITHOUT_GPU = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
# To start a process, import JAX and open the GPU.
START_SECONDS = 120
_VERSIONS_OF = (
    *("attn_jax", "jax", "jaxlib", "numpy", "ml_dtypes"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"),
)


class NoCard(Exception):
    """No GPU of ours, in one line that says what would work."""


@dataclasses.dataclass(frozen=True)
class Card:
    """The GPU that kernels run on.

    Attributes:
      architecture: whose kernels run.
      native: they are those of the GPU's own architecture.
      described: device, versions and driver, for records.
    """

    architecture: Architecture
    native: bool
    described: dict[str, Any]

    @property
    def device(self) -> str:
        return self.described["device"]


def find(worker: Worker, wanted: Architecture | None = None) -> Card:
    """The GPU, and whose kernels: its own, or `wanted` ones on a Hopper GPU, which
    knows Ampere's instructions.

    Raises:
      NoCard: there is none, or none that runs these kernels.
    """
    needs = "needs an A100 or a Hopper GPU (compute capability 8.0 or 9.0)"
    # As `train.gpu` asks, which imports nothing of this package.
    driver = shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()
    if not driver:
        raise NoCard(f"{needs}, and there is no NVIDIA driver here")
    try:
        described = worker.call(describe, seconds=START_SECONDS)
    except WorkerFailed as error:
        raise NoCard(f"{needs}, and JAX finds none: {str(error).splitlines()[0]}")
    if described["platform"] != "gpu":
        raise NoCard(
            f"{needs}, and JAX finds none here: install attn_jax[cuda13], or [cuda12] "
            "for a driver before 580"
        )
    capability = described["capability"]
    own = architecture.KERNELS.get(capability)
    if own is None:
        raise NoCard(
            f"{needs}, and this is {described['device']} (compute capability "
            f"{capability}); there implementation='emulated' has the kernels' algorithm"
        )
    if wanted == "hopper" and own != "hopper":
        raise NoCard(f"Hopper's kernels need a Hopper GPU, this is an {own} one")
    return Card(wanted or own, wanted in (None, own), described)


def describe() -> dict[str, Any]:
    """Device, driver and versions, as JAX in this process has them."""
    device = architecture.default_device()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "capability": getattr(device, "compute_capability", None),
        "multiprocessors": getattr(device, "core_count", None),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "driver": machine.driver(),
        "platform_version": device.client.platform_version,
        "python": platform.python_version(),
        "versions": machine.versions(_VERSIONS_OF),
    }
