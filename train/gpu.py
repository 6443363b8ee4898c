"""XLA flags and platform, set before JAX is imported."""

import importlib.util
import os
import shutil
from pathlib import Path

_DRIVER = Path("/dev/nvidiactl")
# Libraries of devices that are no NVIDIA GPUs.
_OTHERS = "libtpu", "jax_rocm7_plugin", "jax_rocm60_plugin"
# Effect of each: deterministic scatter, convolution and cuDNN attention, first
# autotuning candidate; no Triton GEMM whose fusion depends on its neighbours.
_EXACT_XLA_FLAGS = (
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_autotune_level=0",
)


def has_driver() -> bool:
    """True if an NVIDIA driver's tool or device is there."""
    return shutil.which("nvidia-smi") is not None or _DRIVER.exists()


def prefer_cpu_without_driver() -> None:
    """Keeps JAX from looking for an NVIDIA GPU where there is no driver; before its
    import.

    With CUDA wheels installed, as for compiling kernels without a GPU, the search ends
    in a traceback on stderr. A choice the user has made stands, and where JAX knows
    devices that are no NVIDIA GPUs it looks for them. (`attn_jax.machine` has the same
    for when JAX is there.)
    """
    if not has_driver() and not any(map(importlib.util.find_spec, _OTHERS)):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def set_profile(profile: str) -> None:
    """Sets the XLA flags of a profile; must run before JAX is imported.

    Only where an NVIDIA GPU is used: a process without one needs none of them, and
    XLA aborts on flags it does not know. Flags the user has set are left alone.
    """
    if profile != "exact" or not _has_gpu():
        return
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in _EXACT_XLA_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    # A fixed reduction order between GPUs.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def allows_excess_precision() -> bool:
    """Whether XLA may leave out a rounding to 16 bits and back: its default, which no
    profile changes and only `XLA_FLAGS` does."""
    name = "--xla_allow_excess_precision"
    given = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    values = [value.lower() for flag, _, value in given if flag == name]
    return not values or values[-1] not in ("false", "0")


def _has_gpu() -> bool:
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return False
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    return has_driver() and any(
        importlib.util.find_spec(plugin) is not None for plugin in plugins
    )
