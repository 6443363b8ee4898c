"""Runs a kernel on each device's own batch rows and heads, without collectives.

XLA knows nothing about the inside of a kernel: under `jax.jit` it would gather sharded
operands and run the whole problem on every device. Attention is independent between
batch rows and between groups of heads that share a key/value head, so a kernel can run
on the local part of both. Sequences and head dims must be whole on a device.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attn_jax.pairwise import pairwise_sum
from attn_jax.varying import varying_alike

_WHOLE = {
    "T": "query sequence",
    "S": "key sequence",
    "H": "head dim",
    "D": "head dim",
}

type _MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axis letters of the operands and results of a function, batch axis first.

    Letters: `B` batch, `N` query heads, `K` key/value heads (may be sharded); `T`, `S`,
    `H`, `D` and others (must be whole on a device); `1` is an axis of size one, in
    place of any of them, whose entry is for all. A result without `B`, or without `N`
    and `K`, is a sum over them: what the devices have of it is added up. The operands
    are named for messages.
    Example:
    `Layout({"query": "BTNH", "key": "BSKH", "value": "BSKD"}, ("BTND", "BNT"))`.
    """

    operands: dict[str, str]
    results: tuple[str, ...]


def partitioned(
    function: Callable[..., tuple[Array, ...]], layout: Layout
) -> Callable[..., tuple[Array, ...]]:
    """Makes `function`, which sees the arrays of one device, right for sharded arrays.

    The result runs `function` once on every device, on that device's batch rows and
    heads: under `jax.jit` with sharded operands (Auto mesh axes), with shardings in the
    types (Explicit axes), inside `jax.shard_map` (Manual axes) and on one device.
    Under `jax.vmap` the mapped axis joins the batch axis of `function`, on the device.
    With Auto axes all operands take the placement of the one that is spread over most
    devices; those that are placed otherwise are moved. Nothing else is communicated
    but the sums of results that are one for all, which under Manual axes are left to
    the transpose of `varying_alike`.

    `function` is not differentiated: call the result in the rules of a
    `jax.custom_vjp`, and align the operands of that with `varying_alike` first. Call it
    under `jax.jit`, since only a compiled program can be partitioned.

    Raises:
      ValueError: an operand is sharded over a sequence or the head dim; heads are
        sharded over more devices than divide the key/value heads; operands differ in
        placement (Explicit axes); or automatic axes remain beside Explicit or Manual
        ones. With Auto axes the placement is known only to the compiler, which raises
        `jax.errors.JaxRuntimeError` with the same line in it.
    """
    return _mapped(function, layout, 0)


def _mapped(function: Callable, layout: Layout, depth: int) -> Callable:
    """`function` over arrays with `depth` more leading axes, all of them batch axes."""

    def local(*arrays: Array) -> tuple[Array, ...]:
        batch = arrays[0].shape[: depth + 1]

        def one_batch_axis(x: Array, axes: str) -> Array:
            own = x.shape[depth + 1 :]
            if axes[0] == "1" and depth:
                x = jnp.broadcast_to(x, (*batch, *own))
            return x.reshape(-1, *own)

        def own_batch_axes(x: Array, axes: str) -> Array:
            if axes[0] == "1" and not depth:
                return x
            x = x.reshape(*batch, *x.shape[1:])
            # The copies that `one_batch_axis` made, not those of a mapped axis.
            return x if axes[0] == "B" else pairwise_sum(x, depth, keepdims=True)

        operands = map(one_batch_axis, arrays, layout.operands.values())
        results = function(*operands)
        return tuple(map(own_batch_axes, results, layout.results))

    @custom_vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return _placed(local, layout, depth, arrays)

    @call.def_vmap
    def _(axis_size: int, batched: Sequence[bool], *arrays: Array):
        # The mapped axis stays an axis of its own up to the device: whichever of the
        # batch axes is sharded, no reshape has to move data between devices.
        mapped = next(x for x, is_batched in zip(arrays, batched) if is_batched)
        whole = [
            x if is_batched else _copies(x, axis_size, mapped)
            for x, is_batched in zip(arrays, batched, strict=True)
        ]
        results = _mapped(function, layout, depth + 1)(*whole)
        return results, (True,) * len(results)

    return call


def _copies(x: Array, count: int, like: Array) -> Array:
    """Copies along a new first axis, placed as that of `like` if types say where."""
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jnp.broadcast_to(x, (count, *x.shape))
    spec = PartitionSpec(sharding.spec[0], *jax.typeof(x).sharding.spec)
    placed = NamedSharding(sharding.mesh, spec)
    return jnp.broadcast_to(x, (count, *x.shape), out_sharding=placed)


def _placed(
    local: Callable, layout: Layout, depth: int, arrays: Sequence[Array]
) -> tuple[Array, ...]:
    types = [jax.typeof(x) for x in arrays]
    mesh = types[0].sharding.mesh
    kinds = {
        kind
        for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True)
        if size > 1 or kind != AxisType.Auto
    }
    if AxisType.Auto in kinds and len(kinds) > 1:
        # JAX hides the placement over automatic axes from a partitioner there.
        raise ValueError(
            f"attention: mesh axes {mesh.axis_names} are of types {mesh.axis_types}; "
            "make all of them Auto, or all Explicit, or name all in the axis_names of "
            "jax.shard_map"
        )
    if AxisType.Explicit in kinds:
        results = _per_device(local, layout, depth, types)(*arrays)
    elif AxisType.Manual in kinds:
        results = local(*arrays)
    else:
        results = _compiler_partitioned(local, layout, depth, types)(*arrays)
    # Kernels lose the record of the manual axes over which their operands vary.
    return varying_alike(*results, *arrays)[: len(results)]


def _per_device(
    local: Callable, layout: Layout, depth: int, types: Sequence
) -> Callable:
    """`local` in a shard_map: kernels cannot be traced on types with shardings."""
    placement = _placement(layout, depth, types)
    specs = tuple(map(placement.spec, layout.operands.values()))
    for name, operand, spec in zip(layout.operands, types, specs, strict=True):
        if NamedSharding(operand.sharding.mesh, spec) != operand.sharding:
            raise ValueError(
                f"attention: {name} has sharding {operand.sharding.spec} where the "
                f"other operands ask for {spec}; use jax.sharding.reshard"
            )
    return jax.shard_map(
        placement.with_sums(local, layout),
        in_specs=specs,
        out_specs=tuple(map(placement.spec, layout.results)),
        mesh=types[0].sharding.mesh,
        check_vma=False,
    )


def _compiler_partitioned(
    local: Callable, layout: Layout, depth: int, types: Sequence
) -> Callable:
    """`local` as an operation that XLA's partitioner splits by asking `partition`."""

    @custom_partitioning
    def run(*arrays):
        return local(*arrays)

    def partition(mesh, operands, results):
        placement = _placement(layout, depth, operands)
        result_shardings = tuple(
            NamedSharding(mesh, placement.spec(axes)) for axes in layout.results
        )
        operand_shardings = tuple(
            NamedSharding(mesh, placement.spec(axes))
            for axes in layout.operands.values()
        )
        summed = placement.with_sums(local, layout)
        return mesh, summed, result_shardings, operand_shardings

    rule = _sharding_rule(layout, depth, [x.shape for x in types])
    run.def_partition(partition, sharding_rule=lambda *_: rule)
    return run


def _sharding_rule(
    layout: Layout, depth: int, shapes: Sequence[tuple[int, ...]]
) -> tuple[str, dict[str, int]]:
    """How shardings spread between operands and results, in Shardy's notation.

    Query head n belongs to key/value head n // g, so the axis of the query heads is the
    compound factor `(k g)`.
    """
    size = {
        letter: size
        for axes, shape in zip(layout.operands.values(), shapes, strict=True)
        for letter, size in zip(axes, shape[depth:], strict=True)
    }
    group = size["N"] // size["K"]
    # Shardy wants no factor of size one in a compound factor.
    query_heads = "k" if group == 1 else "g" if size["K"] == 1 else "(k g)"
    shared = {"B": "b", "N": query_heads, "K": "k"}

    def factors(index: int, axes: str) -> str:
        # A factor of its own for each sequence and head dim keeps their shardings from
        # spreading: an output that is split over its sequence later on must not make
        # the query look as if it had been.
        own = (
            shared.get(
                axis, f"{axis.lower()}{index}" if axis != "1" else f"one{index}{place}"
            )
            for place, axis in enumerate(axes)
        )
        return " ".join((*(f"v{i}" for i in range(depth)), *own))

    count = len(layout.operands)
    arrays = (*layout.operands.values(), *layout.results)
    names = [factors(index, axes) for index, axes in enumerate(arrays)]
    rule = f"{', '.join(names[:count])} -> {', '.join(names[count:])}"
    return rule, {"g": group} if query_heads == "(k g)" else {}


def _names(axes: _MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Mesh axes over which the batch axes (outermost first) and heads are sharded."""

    batch: tuple[_MeshAxes, ...]
    heads: _MeshAxes

    def spec(self, axes: str) -> PartitionSpec:
        rest = (self.heads if axis in "NK" else None for axis in axes[1:])
        batch = (*self.batch[:-1], None) if axes[0] == "1" else self.batch
        return PartitionSpec(*batch, *rest)

    def with_sums(self, local: Callable, layout: Layout) -> Callable:
        """`local` with those results added up over the devices that are sums."""

        def summed(*arrays: Array) -> tuple[Array, ...]:
            results = zip(local(*arrays), layout.results, strict=True)
            return tuple(self._sum(x, axes) for x, axes in results)

        return summed

    def _sum(self, x: Array, axes: str) -> Array:
        split = (
            *((self.batch[-1],) if "B" not in axes else ()),
            *((self.heads,) if not {"N", "K"} & set(axes) else ()),
        )
        names = [name for group in split for name in _names(group)]
        return jax.lax.psum(x, tuple(names)) if names else x


def _placement(layout: Layout, depth: int, operands: Sequence) -> _Placement:
    """One placement for all arrays: that of the operand spread over most devices."""
    mesh = operands[0].sharding.mesh

    def device_count(*mesh_axes: _MeshAxes) -> int:
        names = (name for axes in mesh_axes for name in _names(axes))
        return math.prod(mesh.shape[name] for name in names)

    placements = []
    for (name, axes), operand in zip(layout.operands.items(), operands, strict=True):
        spec = (*operand.sharding.spec, *(None,) * len(operand.shape))
        local = dict(zip(axes, spec[depth:], strict=False))
        for axis in _WHOLE.keys() & local.keys():
            if device_count(local[axis]) > 1:
                raise ValueError(
                    f"attention: {name} is sharded over {local[axis]!r} along its "
                    f"{_WHOLE[axis]}, which must be whole on a device; shard batch or "
                    "heads, for example with jax.lax.with_sharding_constraint"
                )
        heads = local.get("N", local.get("K"))
        placements.append(_Placement(spec[: depth + 1], heads))
    placement = max(placements, key=lambda p: device_count(*p.batch, p.heads))

    shards = device_count(placement.heads)
    for axes, operand in zip(layout.operands.values(), operands, strict=True):
        kv_heads = operand.shape[depth + axes.index("K")] if "K" in axes else shards
        if kv_heads % shards:
            raise ValueError(
                f"attention: {kv_heads} key/value head(s) cannot be split between "
                f"{shards} devices; use a number of devices that divides them, or "
                "repeat key and value along their heads (jax.numpy.repeat)"
            )
    return placement
