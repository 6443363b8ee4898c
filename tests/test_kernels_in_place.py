"""Results that begin as operands still do where XLA joins kernels and slices.

Semaphores, and what parts carry on."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel
from attn_jax.audit.invariance import Layers
from attn_jax.audit.programs import results
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask
from tests.child_process import in_child_process
from tests.gpu_compiler import h200_mesh, partitioned

pytestmark = pytest.mark.ci

pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")

TIME_LIMIT = 240  # seconds; a case takes some ten alone on a core
BF16 = jnp.dtype("bfloat16")


def _both(attend, *inputs):
    results, pullback = jax.vjp(attend, *inputs)
    return results, pullback(jax.tree.map(jnp.ones_like, results))


def _slices_of_one_array() -> str:
    """Q, K and V that lie one behind the other, as many keep them."""
    mesh = h200_mesh((1,), ("one",), (AxisType.Auto,))

    def attend(inputs):
        return attention(
            *(inputs[0], inputs[1], inputs[2]),
            scale=0.1,
            mask=Mask(is_causal=True),
            backward="fused",
        )

    inputs = jax.ShapeDtypeStruct(
        (3, 2, 1024, 4, 64), BF16, sharding=NamedSharding(mesh, P())
    )
    return partitioned(lambda x: _both(attend, x), inputs).hlo


def _layers_in_a_loop() -> str:
    """What the forward pass of a layer keeps is stacked, and the backward pass takes it
    from there."""
    mesh = h200_mesh((1,), ("one",), (AxisType.Auto,))
    x, weights = (
        jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, P()))
        for shape in ((2, 1024, 4, 64), (3, 64, 64))
    )

    def model(x, weights):
        def layer(x, weight):
            y = x @ weight
            out, _ = attention(
                *(y, y, y), scale=0.1, mask=Mask(is_causal=True), backward="fused"
            )
            return x + out, None

        return jax.lax.scan(layer, x, weights)[0]

    return partitioned(lambda *given: _both(model, *given), x, weights).hlo


def _simulated() -> str:
    """Rows of what is carried on, in a loop over shards."""
    mesh = h200_mesh((1,), ("one",), (AxisType.Auto,))
    query = jax.ShapeDtypeStruct(
        (1, 1024, 2, 128), BF16, sharding=NamedSharding(mesh, P())
    )

    def attend(query, key, value):
        return context_parallel.simulate(
            *(query, key, value),
            shards=2,
            strategy="all_gather",
            layout="zigzag",
            is_causal=True,
            implementation="pallas",
        )

    with jax.default_device(mesh.devices.flat[0]):  # Whose kernels are meant.
        return partitioned(lambda *x: _both(attend, *x), query, query, query).hlo


def _ring() -> str:
    """Keys and values in a message."""
    mesh = h200_mesh((2,), ("seq",), (AxisType.Auto,))
    spec = P(None, "seq")
    query = jax.ShapeDtypeStruct(
        (1, 1024, 2, 128), BF16, sharding=NamedSharding(mesh, spec)
    )

    def local(query, key, value):
        return context_parallel.attention(
            *(query, key, value),
            axis_name="seq",
            layout="zigzag",
            is_causal=True,
            implementation="pallas",
        )

    attend = jax.shard_map(
        local, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, P(None, None, "seq"))
    )
    with jax.default_device(mesh.devices.flat[0]):  # Whose kernels are meant.
        return partitioned(attend, query, query, query).hlo


def _audited() -> str:
    """What an audit runs. Without barriers it holds the fusion, and on an H200 its
    results were right all the same."""
    mesh = h200_mesh((1,), ("one",), (AxisType.Auto,))
    query = jax.ShapeDtypeStruct(
        (2, 1, 1024, 2, 128), BF16, sharding=NamedSharding(mesh, P())
    )

    def attend(query, key, value):
        return attention(
            *(query, key, value),
            scale=0.1,
            mask=Mask(is_causal=True),
            backward="fused",
        )

    def program(*arrays):
        return results(Layers(attend), True, *arrays)

    return partitioned(program, query, query, query, query).hlo


# Slices of an operand, of what a loop carries, and of a message. `_simulated` and
# `_audited` have the first two again.
@pytest.mark.parametrize(
    "program",
    [
        _slices_of_one_array,
        _layers_in_a_loop,
        pytest.param(_simulated, marks=pytest.mark.thorough),
        _ring,
        pytest.param(_audited, marks=pytest.mark.thorough),
    ],
)
def test_results_that_begin_as_operands_are_in_no_fusion(program):
    """In one (JAX 0.11.2) they begin as whatever memory holds: rows of out were zero on
    an H200, and semaphores would be anything."""
    hlo = in_child_process(program, seconds=TIME_LIMIT)
    computations = re.split(r"\n(?=%|ENTRY)", hlo)
    calls = [
        (computation.startswith("%dynamic-slice-fusion"), line)
        for computation in computations
        for line in computation.splitlines()
        if "custom-call(" in line and "mosaic_gpu" in line
    ]
    # Others are, so that this test would see it; but in a ring, whose kernels take
    # messages whole.
    assert any(fused for fused, _ in calls) != (program is _ring)
    in_place = [fused for fused, line in calls if "output_to_operand_aliasing" in line]
    assert in_place and not any(in_place)
