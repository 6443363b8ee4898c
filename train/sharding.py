"""Several processes, the device mesh, and where each array lies on it.

Mesh axes: `data` copies the model, `fsdp` spreads weights and optimiser state (and
the batch with them), `tensor` spreads heads and hidden units, `seq` spreads tokens in
attention. The partitioner of XLA derives the communication from these placements.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.config import Config, DistributedConfig, UsageError
from train.validate import check_batch

AXES = ("data", "fsdp", "tensor", "seq")
BATCH = P(("data", "fsdp"))

# Seconds until a process gives up those that have not joined: JAX's own.
_WAITED = 300

# Weights split by columns (heads, hidden units) and those that take these as rows.
_COLUMNS = ("query", "key", "value", "up")
_ROWS = ("out", "down")


def start_processes(config: DistributedConfig) -> None:
    """Joins the processes of a run, and says where they are waited for; nothing on a
    single one.

    Must run before any other use of JAX. Slurm, Open MPI and Kubernetes describe
    themselves; elsewhere coordinator, processes and process id have to be given.

    Raises:
      UsageError: JAX finds no cluster, or not what it needs of one. If the others do
        not come in time, JAX ends the process itself.
    """
    slurm = int(os.environ.get("SLURM_NTASKS", "1")) > 1
    if config.enabled or slurm:
        where = config.coordinator or "the coordinator that the scheduler names"
        said = f"waiting for the other processes at {where}, {_WAITED} s at the most"
        print(said, file=sys.stderr, flush=True)
        try:
            jax.distributed.initialize(
                coordinator_address=config.coordinator,
                num_processes=config.processes,
                process_id=config.process_id,
                initialization_timeout=_WAITED,
            )
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                f"cannot join the processes of the run ({' '.join(str(error).split())})"
                f": {'start them with srun, or ' if slurm else ''}give "
                "--distributed.enabled, --distributed.coordinator, "
                "--distributed.processes and --distributed.process-id"
            ) from error


def make_mesh(config: Config, devices: list[Any] | None = None) -> Mesh:
    """The mesh of a run over all devices of all processes.

    Raises:
      UsageError: the axes do not multiply to the number of devices, or the batch
        cannot be spread over them.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.mesh
    rest = sizes.fsdp * sizes.tensor * sizes.seq
    data = sizes.data or len(devices) // rest
    if data * rest != len(devices):
        raise UsageError(
            f"mesh data x fsdp x tensor x seq = {data or 1} x {sizes.fsdp} x "
            f"{sizes.tensor} x {sizes.seq} does not fit {len(devices)} devices: the "
            "product must be the device count (--mesh.data 0 fills up)"
        )
    check_batch(config.batch_size, data, sizes.fsdp)
    grid = np.asarray(devices).reshape(data, sizes.fsdp, sizes.tensor, sizes.seq)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def seq_in_two(mesh: Mesh, ulysses: int) -> Mesh:
    """The same devices in the same order, `seq` cut into `seq` and `ulysses`: whoever
    spreads an array over both has it where `seq` had it."""
    *others, seq = mesh.devices.shape
    grid = mesh.devices.reshape(*others, seq // ulysses, ulysses)
    kinds = (AxisType.Auto,) * grid.ndim
    return Mesh(grid, (*mesh.axis_names, "ulysses"), axis_types=kinds)


def batch_shards(mesh: Mesh) -> int:
    """Parts the batch is cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def rows_of_process(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Which part of the global batch this process feeds: (part, number of parts).

    Processes whose devices hold the same rows (tensor axis across processes) get the
    same part.
    """
    sharding = NamedSharding(mesh, BATCH)
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    bounds = [index[0].indices(batch_size) for index in indices if index is not None]
    start = min(bound[0] for bound in bounds)
    count = max(bound[1] for bound in bounds) - start
    return start // count, batch_size // count


def put_batch(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Moves this process's rows to its devices; the result is the global batch."""
    sharding = NamedSharding(mesh, BATCH)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows)
        for name, rows in batch.items()
    }


def put_whole(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """Spreads an array that every process has in full over the batch axes."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The placement of an array that every device holds in full."""
    return NamedSharding(mesh, P())


def parameter_shardings(mesh: Mesh, params: Any) -> Any:
    """Placement of every weight, after its name and shape.

    Projections to heads and hidden units are split by columns over `tensor` and by
    rows over `fsdp`, projections back the other way round; any other matrix is split
    over `fsdp` along its longest axis that divides; vectors are replicated.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = [str(getattr(key, "key", key)) for key in path]
        layer = names[-2] if len(names) > 1 else ""
        if leaf.ndim < 2:
            return replicated(mesh)
        if layer in _COLUMNS:
            return NamedSharding(mesh, P("fsdp", "tensor"))
        if layer in _ROWS:
            return NamedSharding(mesh, P("tensor", "fsdp"))
        axes = sorted(range(leaf.ndim), key=lambda axis: -leaf.shape[axis])
        fitting = [axis for axis in axes if leaf.shape[axis] % mesh.shape["fsdp"] == 0]
        if not fitting:
            return replicated(mesh)
        spec = [None] * leaf.ndim
        spec[fitting[0]] = "fsdp"
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(place, params)


def check_width(mesh: Mesh, width: int) -> None:
    """Checks that the axes that split weights divide the model's width, and so the
    hidden width, a multiple of it.

    Raises:
      UsageError: naming the axis that does not.
    """
    for axis in ("fsdp", "tensor"):
        if width % mesh.shape[axis]:
            raise UsageError(
                f"--model.width {width} cannot be spread over --mesh.{axis} "
                f"{mesh.shape[axis]}: it must be a multiple"
            )
