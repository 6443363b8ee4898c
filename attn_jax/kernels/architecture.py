"""Which architecture's kernels run: that of the GPU, or one that `made_for` names."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from attn_jax.recipe import Architecture

# By compute capability. Others have other instructions or less shared memory.
KERNELS: dict[str, Architecture] = {"8.0": "ampere", "9.0": "hopper"}

A100_MULTIPROCESSORS = 108
# SXM's; an H200 has as many. `design.backward_of` keeps Hopper's fused backward kernel
# off cards with fewer.
H100_MULTIPROCESSORS = 132

_made_for: list[Architecture] = []


def of_device(device: Any) -> Architecture | None:
    """The architecture whose kernels a device runs; None if there are none for it."""
    return KERNELS.get(getattr(device, "compute_capability", ""))


def default_device() -> Any:
    """The device that a computation placed nowhere else runs on."""
    default = jax.config.jax_default_device
    if default is None:
        return jax.local_devices()[0]
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def chosen() -> Architecture:
    """Whose kernels to trace. Where there is no GPU, Hopper's, as Mosaic GPU does."""
    return _made_for[-1] if _made_for else of_device(default_device()) or "hopper"


def multiprocessors() -> int | None:
    """How many the default device has; None if it is no GPU of ours or does not say."""
    device = default_device()
    return None if of_device(device) is None else getattr(device, "core_count", None)


def multiprocessors_or_a100s() -> int:
    """How many Ampere's kernels are made for."""
    return multiprocessors() or A100_MULTIPROCESSORS


@contextlib.contextmanager
def made_for(architecture: Architecture) -> Iterator[None]:
    """Kernels traced and compiled inside are those of `architecture`, on any device.

    For measurements and tests: the Ampere kernels on a Hopper GPU, which knows their
    instructions, or either where there is no GPU. Mosaic GPU asks for the architecture
    when a program is lowered, and `jax.jit` keeps what it has traced, so trace and
    compile inside what was not traced outside; run it where you like. One thread.
    """
    # Imported on use: it takes long, and asking for a device needs none of it.
    from jax.experimental.mosaic.gpu import utils as mosaic

    capabilities = {name: capability for capability, name in KERNELS.items()}
    major, minor = map(int, capabilities[architecture].split("."))
    stock = mosaic._infer_arch
    mosaic._infer_arch = lambda: (major, minor)
    _made_for.append(architecture)
    try:
        yield
    finally:
        _made_for.pop()
        mosaic._infer_arch = stock
