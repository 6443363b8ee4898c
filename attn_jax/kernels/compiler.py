"""Compiles for H200 and A100 GPUs on a machine that has none.

Needs the `compile` extra. Best in another process: environment variables are set that
the compiler reads, and code that the compiler cannot select for the architecture aborts
the process.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import jax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu.constraints import ConstraintSystem
from jax.sharding import SingleDeviceSharding

# Figures of openxla/xla, xla/backends/gpu/target_config/specs/h200.txtpb and
# a100_sxm_80.txtpb, with the software of this project.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""

_A100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 167936
  shared_memory_per_block_optin: 166912
  threads_per_core_limit: 2048
  core_count: 108
  fpus_per_core: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 2039040000000
  l2_cache_size: 41943040
  clock_rate_ghz: 1.41
  device_memory_size: 85100068864
  cuda_compute_capability { major: 8 feature_extension: NONE }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA A100-SXM4-80GB"
"""

Gpu = Literal["a100", "h200"]
_GPUS: dict[Gpu, str] = {"a100": _A100, "h200": _H200}


def shared_memory(gpu: Gpu) -> int:
    """Bytes that a CTA may ask for."""
    (limit,) = re.findall(r"shared_memory_per_block_optin: (\d+)", _GPUS[gpu])
    return int(limit)


# Instructions of interest in machine code, and the letter each is written with.
_INSTRUCTIONS = {
    "M": r"\bHGMMA\.",  # asynchronous matrix product
    "m": r"\bHMMA\.",  # matrix product of a warp
    "e": r"\bMUFU\.EX2",  # exp2
    "1": r"\bWARPGROUP\.DEPBAR\.LE gsb0, 0x1",  # wait until one product is in flight
    "0": r"\bWARPGROUP\.DEPBAR\.LE gsb0, 0x0",  # wait for all products
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of one Mosaic GPU kernel.

    Attributes:
      serialised: C7512 or C7513 was reported, wgmma does not overlap with anything.
      order: the instructions of `_INSTRUCTIONS` as they stand in the machine code,
        repetitions written once.
      instructions: of the machine code, all of them, without operands.
      registers: of a thread.
      shared_memory: bytes of a CTA.
    """

    name: str
    spilled_bytes: int
    serialised: bool
    order: str
    instructions: tuple[str, ...]
    registers: int
    shared_memory: int

    @property
    def opcodes(self) -> frozenset[str]:
        """Of all instructions, without what follows a dot."""
        return frozenset(name.partition(".")[0] for name in self.instructions)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its optimised HLO and its Mosaic GPU kernels."""

    hlo: str
    kernels: list[Kernel]

    def count(self, operation: str) -> int:
        """How often an HLO operation, for example a collective, is in the program."""
        return len(re.findall(rf"\b{operation}(?:-start)?\(", self.hlo))


def devices(gpu: Gpu, count: int) -> list:
    return topologies.get_topology_desc(
        platform="cuda", target_config=_GPUS[gpu], topology=f"1x1x{count}"
    ).devices


def compiled(
    function: Callable,
    *arguments: jax.ShapeDtypeStruct,
    gpu: Gpu = "h200",
    machine_code: bool = True,
) -> Program:
    """Compiles `function` for the devices that the arguments' shardings name.

    Arguments without a sharding stand for arrays on one GPU of the kind `gpu`, which
    then is the default device, too: kernels are picked and made for it. `machine_code`:
    as of `reported`.
    """
    default = contextlib.nullcontext()
    if any(x.sharding is None for x in arguments):
        (device,) = devices(gpu, 1)
        whole = SingleDeviceSharding(device)
        arguments = tuple(x.update(sharding=whole) for x in arguments)
        default = jax.default_device(device)
    with default, reported(machine_code=machine_code) as kernels:
        hlo = jax.jit(function).lower(*arguments).compile().as_text() or ""
    return Program(hlo, kernels)


class UnreadableReport(Exception):
    """The compiler wrote something that is not known here."""


@contextlib.contextmanager
def reported(*, machine_code: bool) -> Iterator[list[Kernel]]:
    """What ptxas says of the kernels that are compiled inside, known after it.

    On any machine, also for the GPU that is there. Without `machine_code` kernels have
    no `order` and no `instructions`, and no disassembler is needed.

    Raises:
      UnreadableReport: at the end, where it cannot be read.
    """
    kernels: list[Kernel] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        if machine_code:
            os.environ["MOSAIC_GPU_DUMP_SASS"] = "1"
        # Dumped as well, this text would take half of the time to lower a kernel.
        constraints_as_text = ConstraintSystem.__str__
        ConstraintSystem.__str__ = lambda self: "left out"
        try:
            yield kernels
            kernels += _read(Path(folder))
        finally:
            ConstraintSystem.__str__ = constraints_as_text
            for name in ("TO", "PTXAS", "SASS"):
                os.environ.pop(f"MOSAIC_GPU_DUMP_{name}", None)


def _read(folder: Path) -> list[Kernel]:
    # Kernels whose results nobody asks for are lowered, but not compiled.
    resources = _by_name(folder.glob("*.resources.txt"))
    reports = sorted(folder.glob("*.ptxas"), key=_name_and_number)
    try:
        return [
            _read_kernel(path, resources[_name_and_number(path)[0]].pop(0))
            for path in reports
        ]
    except (LookupError, ValueError) as error:
        raise UnreadableReport(f"{folder}: {error!r}") from error


def _by_name(paths: Iterable[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(paths, key=_name_and_number):
        found.setdefault(_name_and_number(path)[0], []).append(path)
    return found


def _name_and_number(path: Path) -> tuple[str, int]:
    """Of a dumped file. Kernels that compile side by side do not have the same numbers
    in all of their files, from JAX 0.12 on."""
    name, _, number = path.name.partition(".")[0].rpartition("_")
    return name, int(number)


def _read_kernel(ptxas: Path, resources: Path) -> Kernel:
    report = ptxas.read_text()
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    paths = ptxas.parent.glob(f"{ptxas.stem}.sass*")
    code = "".join(path.read_text() for path in paths)
    letters = (
        letter
        for line in code.splitlines()
        for letter, pattern in _INSTRUCTIONS.items()
        if re.search(pattern, line)
    )
    return Kernel(
        name=_name_and_number(ptxas)[0],
        spilled_bytes=max(map(int, spills)),
        serialised=bool(re.search(r"C751[23]", report)),
        order="".join(letter for letter, _ in itertools.groupby(letters)),
        instructions=tuple(re.findall(r"\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)", code)),
        registers=int(re.findall(r"Used (\d+) registers", report)[-1]),
        shared_memory=int(
            re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text())[0]
        ),
    )
