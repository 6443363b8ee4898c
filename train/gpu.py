"""Whether this machine has an NVIDIA driver, asked without importing JAX."""

import os
import shutil
from pathlib import Path

_DRIVER = Path("/dev/nvidiactl")


def has_driver() -> bool:
    """True if an NVIDIA driver's tool or device is there."""
    return shutil.which("nvidia-smi") is not None or _DRIVER.exists()


def prefer_cpu_without_driver() -> None:
    """Keeps JAX from looking for a GPU where there is no driver; before its import.

    With CUDA wheels installed, as for compiling kernels without a GPU, the search ends
    in a traceback on stderr. A choice the user has made stands.
    """
    if not has_driver():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
