"""How programs with the ring in them are best compiled."""

from collections.abc import Iterable
from typing import Any


def compiler_options(devices: Iterable[Any]) -> dict[str, str]:
    """XLA's, for `jax.jit(..., compiler_options=...)`; {} where there are none to give.

    GPUs of one process copy from one another's memory, which their copy engines do,
    where NCCL's kernels would take multiprocessors from attention's. XLA has no such
    copies between processes. The bits of the results are the same.
    """
    devices = list(devices)
    processes = {device.process_index for device in devices}
    if len(processes) != 1 or any(device.platform != "gpu" for device in devices):
        return {}
    return {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
