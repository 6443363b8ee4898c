"""Kernels run on the batch rows and heads of each device, and nothing is communicated.

`partition` itself is checked for numbers on virtual CPU devices with plain attention in
place of a kernel. That the kernels use it rightly is checked in programs compiled for
four H200s: which collectives they hold, and which shapes the kernels see.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attn_jax.kernels.attention import attention
from attn_jax.kernels.partition import Layout, partitioned, varying_alike
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX
from tests import gpu_compiler
from tests.child_process import ChildFailed, in_child_process
from tests.gpu_compiler import Program, h200_mesh

pytestmark = pytest.mark.ci

P = PartitionSpec
BATCH_AND_HEADS = P("data", None, "model")
AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
TIME_LIMIT = 240  # seconds; compiling three kernels takes six alone on a core

B, T, S, N, K, H = 4, 16, 24, 4, 2, 8
SHAPES = (B, T, N, H), (B, S, K, H), (B, S, K, H)


def _attention(query, key, value):
    key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest")
    weights = jax.nn.softmax(logits)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")
    return out, jax.nn.logsumexp(logits, axis=-1)


def _kernel_like():
    """`_attention` as the kernels are built, and the query shapes it was last run on.

    It is traced on global shapes first, and on those of a device when compiled."""
    seen = {}

    def forward(*operands):
        seen["forward"] = operands[0].shape
        return _attention(*operands)

    def backward(query, key, value, *cotangents):
        seen["backward"] = query.shape
        return jax.vjp(_attention, query, key, value)[1](cotangents)

    operands = {"query": "BTNH", "key": "BSKH", "value": "BSKH"}
    cotangents = {"dout": "BTNH", "dlse": "BNT"}
    run_forward = partitioned(forward, Layout(operands, ("BTNH", "BNT")))
    run_backward = partitioned(
        backward, Layout(operands | cotangents, ("BTNH", "BSKH", "BSKH"))
    )

    @jax.custom_vjp
    def attend(*operands):
        return run_forward(*operands)

    attend.defvjp(
        lambda *operands: (run_forward(*operands), operands),
        lambda operands, cotangents: run_backward(*operands, *cotangents),
    )
    return lambda *operands: attend(*varying_alike(*operands)), seen


def _results_and_gradients(attend, *operands):
    results, backward = jax.vjp(attend, *operands)
    return results, backward(jax.tree.map(jnp.cos, results))


def _cpu_mesh(axis_types) -> Mesh:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("data", "model"), axis_types=axis_types)


def _compile_on_cpu(transform, axis_types, specs):
    """(compiled program, operands, query shapes of a device) on a 2 x 2 mesh."""
    attend, seen = _kernel_like()
    mesh = _cpu_mesh(axis_types)
    rng = np.random.default_rng(0)
    operands = [
        jax.device_put(
            rng.standard_normal(shape, np.float32), NamedSharding(mesh, spec)
        )
        for shape, spec in zip(SHAPES, specs, strict=True)
    ]
    program = functools.partial(_results_and_gradients, transform(attend, mesh))
    with jax.set_mesh(mesh):
        compiled_program = jax.jit(program).lower(*operands).compile()
    return compiled_program, operands, set(seen.values())


def _collectives(program) -> list[str]:
    hlo = program.as_text()
    return [name for name in COLLECTIVES if name in hlo]


def _check_numbers(program, operands) -> None:
    expected = _results_and_gradients(_attention, *map(np.asarray, operands))
    for got, want in zip(
        jax.tree.leaves(program(*operands)), jax.tree.leaves(expected), strict=True
    ):
        # FP32 sums of some 100 terms of order 1 in another order.
        np.testing.assert_allclose(got, want, atol=100 * 2**-23)


def _plain(attend, mesh):
    return attend


def _rows(attend):
    """`attend` on operands without a batch axis."""
    return lambda *operands: [x[0] for x in attend(*(x[None] for x in operands))]


def _vmapped(attend, mesh):
    return jax.vmap(_rows(attend))


def _vmapped_twice(attend, mesh):
    def run(*operands):
        split = (x.reshape(2, 2, *x.shape[1:]) for x in operands)
        results = jax.vmap(jax.vmap(_rows(attend)))(*split)
        return [x.reshape(4, *x.shape[2:]) for x in results]

    return run


def _in_shard_map(attend, mesh, check_vma):
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(BATCH_AND_HEADS,) * 3,
        out_specs=(BATCH_AND_HEADS, P("data", "model")),
        check_vma=check_vma,
    )


def _rematerialised(attend, mesh):
    return jax.checkpoint(attend)


@pytest.mark.parametrize("axis_types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "transform",
    [
        _plain,
        _vmapped,
        _rematerialised,
        functools.partial(_in_shard_map, check_vma=False),
        functools.partial(_in_shard_map, check_vma=True),
    ],
    ids=["plain", "vmap", "remat", "shard_map", "shard_map-vma"],
)
def test_each_device_does_its_part(transform, axis_types):
    program, operands, seen = _compile_on_cpu(
        transform, axis_types, [BATCH_AND_HEADS] * 3
    )
    assert seen == {(B // 2, T, N // 2, H)}
    assert _collectives(program) == []
    _check_numbers(program, operands)


@pytest.mark.parametrize(
    ("specs", "local"),
    [
        ([P(("data", "model"))] * 3, (1, T, N, H)),
        ([BATCH_AND_HEADS, P(), P()], (2, T, 2, H)),
        ([P(), BATCH_AND_HEADS, BATCH_AND_HEADS], (2, T, 2, H)),
        ([P()] * 3, (B, T, N, H)),
    ],
    ids=["batch-twice", "key-whole", "query-whole", "all-whole"],
)
def test_operands_follow_the_most_spread(specs, local):
    program, _, seen = _compile_on_cpu(_plain, AUTO, specs)
    assert seen == {local}
    assert _collectives(program) == []


def test_nested_vmap_is_one_batch():
    program, operands, seen = _compile_on_cpu(_vmapped_twice, AUTO, [P("data")] * 3)
    assert seen == {(B // 2, T, N, H)}
    _check_numbers(program, operands)


@pytest.mark.parametrize(
    ("axis_types", "specs", "error", "message"),
    [
        (EXPLICIT, [P("data", "model")] * 3, ValueError, "query .* query sequence"),
        (
            AUTO,
            [P(), P("data", "model"), P()],
            jax.errors.JaxRuntimeError,
            "key is sharded over 'model' along its key sequence",
        ),
        (
            AUTO,
            [P(None, None, None, "model")] * 3,
            jax.errors.JaxRuntimeError,
            "query .* head dim",
        ),
        (
            AUTO,
            [P(None, None, ("data", "model")), P(), P()],
            jax.errors.JaxRuntimeError,
            r"2 key/value head\(s\) cannot be split between 4 devices",
        ),
        (
            EXPLICIT,
            [BATCH_AND_HEADS, P(), P()],
            ValueError,
            "key has sharding .*use jax.sharding.reshard",
        ),
        (
            (AxisType.Explicit, AxisType.Auto),
            [BATCH_AND_HEADS] * 3,
            ValueError,
            "make all of them Auto",
        ),
    ],
)
def test_impossible_placements_raise(axis_types, specs, error, message):
    with pytest.raises(error, match=message):
        _compile_on_cpu(_plain, axis_types, specs)


def test_partial_shard_map_raises():
    def transform(attend, mesh):
        spec = P("data")
        return jax.shard_map(
            attend, mesh=mesh, axis_names={"data"}, in_specs=spec, out_specs=spec
        )

    with pytest.raises(ValueError, match="name all in the axis_names"):
        _compile_on_cpu(transform, AUTO, [BATCH_AND_HEADS] * 3)


# An operand that is one for all of a sharded axis, whose gradient is a sum over it.


def _attention_with_bias(query, key, value, bias):
    key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") + bias
    weights = jax.nn.softmax(logits)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")
    return out, jax.nn.logsumexp(logits, axis=-1)


def _biased(axes: str):
    operands = {"query": "BTNH", "key": "BSKH", "value": "BSKH", "bias": axes}
    cotangents = {"dout": "BTNH", "dlse": "BNT"}

    def backward(*arrays):
        return jax.vjp(_attention_with_bias, *arrays[:4])[1](arrays[4:])

    forward = partitioned(_attention_with_bias, Layout(operands, ("BTNH", "BNT")))
    backward = partitioned(
        backward, Layout(operands | cotangents, ("BTNH", "BSKH", "BSKH", axes))
    )
    attend = jax.custom_vjp(forward)
    attend.defvjp(
        lambda *arrays: (forward(*arrays), arrays),
        lambda arrays, cotangents: backward(*arrays, *cotangents),
    )
    return lambda *arrays: attend(*varying_alike(*arrays))


def _vmapped_over_batch(attend, mesh, spec):
    def row(query, key, value, bias):
        results = attend(query[None], key[None], value[None], bias[None])
        return [x[0] for x in results]

    def run(query, key, value, bias):
        batched = 0 if bias.shape[0] > 1 else None
        bias = bias if bias.shape[0] > 1 else bias[0]
        return jax.vmap(row, in_axes=(0, 0, 0, batched))(query, key, value, bias)

    return run


def _biased_in_shard_map(attend, mesh, spec):
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(BATCH_AND_HEADS,) * 3 + (spec,),
        out_specs=(BATCH_AND_HEADS, P("data", "model")),
        check_vma=True,
    )


@pytest.mark.parametrize(
    ("axes", "axis_types", "transform"),
    [
        ("11TS", AUTO, None),
        ("1N1S", EXPLICIT, None),
        ("BNTS", AUTO, None),
        ("B1T1", AUTO, None),
        ("1NTS", AUTO, _vmapped_over_batch),
        ("B1TS", EXPLICIT, _vmapped_over_batch),
        ("11TS", EXPLICIT, _vmapped_over_batch),
        ("11TS", AUTO, _biased_in_shard_map),
        ("1NTS", EXPLICIT, _biased_in_shard_map),
    ],
)
def test_what_is_one_for_all_has_the_gradient_of_all(axes, axis_types, transform):
    sizes = dict(zip("1BNTS", (1, B, N, T, S)))
    shape = tuple(sizes[axis] for axis in axes)
    mesh = _cpu_mesh(axis_types)
    split = {"B": "data", "N": "model"}
    spec = P(*(split.get(axis) for axis in axes))
    rng = np.random.default_rng(0)
    operands = [
        jax.device_put(rng.standard_normal(s, np.float32), NamedSharding(mesh, x))
        for s, x in [*((s, BATCH_AND_HEADS) for s in SHAPES), (shape, spec)]
    ]
    attend = _biased(axes if transform is not _vmapped_over_batch else "1" + axes[1:])
    if transform is not None:
        attend = transform(attend, mesh, spec)
    with jax.set_mesh(mesh):
        lowered = jax.jit(functools.partial(_results_and_gradients, attend)).lower(
            *operands
        )
        program = lowered.compile()
    summed = any(axis == "1" for axis in axes[:2])
    assert _collectives(program) == ["all-reduce"] * summed
    arrays = map(np.asarray, operands)
    expected = _results_and_gradients(_attention_with_bias, *arrays)
    for got, want in zip(
        jax.tree.leaves(program(*operands)), jax.tree.leaves(expected), strict=True
    ):
        # As in `_check_numbers`, and as many more terms as a gradient is summed over.
        np.testing.assert_allclose(got, want, atol=100 * B * N * 2**-23)


# The kernels themselves, compiled for 2 x 2 H200s.


def _gpu_program(situation: str, spec: PartitionSpec) -> Program:
    """Value and gradient on operands that are all placed by `spec`."""
    mesh = h200_mesh((2, 2), ("data", "model"), AUTO)
    attend = functools.partial(attention, scale=0.1, mask=Mask(is_causal=True))
    if situation == "bias for all rows":

        def attend(query, key, value, bias):
            return attention(query, key, value, scale=0.1, bias=bias)

    if situation == "options":
        recipe = dataclasses.replace(ATTN_JAX, dq_centre="row", delta_source="p_dp")
        attend = functools.partial(attend, recipe=recipe)
    if situation == "shard_map":
        attend = _in_shard_map(attend, mesh, check_vma=True)

    def program(*operands):
        results, backward = jax.vjp(attend, *operands)
        return results, backward(jax.tree.map(jnp.ones_like, results))

    sharding = NamedSharding(mesh, spec)
    query = jax.ShapeDtypeStruct((4, 200, 4, 64), "bfloat16", sharding=sharding)
    key = jax.ShapeDtypeStruct((4, 300, 2, 64), "bfloat16", sharding=sharding)
    if situation != "bias for all rows":
        return gpu_compiler.partitioned(program, query, key, key)
    by_heads = NamedSharding(mesh, P(None, "model"))
    bias = jax.ShapeDtypeStruct((1, 4, 1, 300), "bfloat16", sharding=by_heads)
    return gpu_compiler.partitioned(program, query, key, key, bias)


@pytest.fixture(scope="module")
def compile_extra() -> None:
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")


@pytest.mark.usefixtures("compile_extra")
@pytest.mark.parametrize(
    ("situation", "kernels"),
    [
        ("jit", 5),
        pytest.param("shard_map", 5, marks=pytest.mark.thorough),
        pytest.param("options", 5, marks=pytest.mark.thorough),
    ],
)
def test_gpu_program_has_no_collective(situation, kernels):
    """One for the numbers of keys, one forward kernel, one for sums, one for dQ, one
    for dK and dV; with options none of the first and third, but one for delta and the
    forward kernel once more."""
    program = in_child_process(
        _gpu_program, situation, BATCH_AND_HEADS, seconds=TIME_LIMIT
    )
    assert {name: program.count(name) for name in COLLECTIVES} == dict.fromkeys(
        COLLECTIVES, 0
    )
    calls = re.findall(r"= (.*) custom-call\((.*)\), .*mosaic", program.hlo)
    assert len(calls) == kernels
    for shapes in calls:
        # Half of the batch, half of the query or key/value heads; for sums all heads
        # are one axis.
        for shape in re.findall(r"f16\[([\d,]+)\]", "".join(shapes)):
            assert re.fullmatch(r"2,\d+,([12],64|64|128)", shape), calls


@pytest.mark.thorough
@pytest.mark.usefixtures("compile_extra")
def test_gpu_program_adds_up_dbias_alone():
    arguments = "bias for all rows", BATCH_AND_HEADS
    program = in_child_process(_gpu_program, *arguments, seconds=TIME_LIMIT)
    # One of FP32, of a device's heads, and no other.
    counts = {name: program.count(name) for name in COLLECTIVES}
    assert counts == dict.fromkeys(COLLECTIVES, 0) | {"all-reduce": 1}
    assert re.search(r"f32\[1,2,1,300\]\S* all-reduce", program.hlo)


@pytest.mark.usefixtures("compile_extra")
def test_gpu_program_refuses_a_sharded_sequence():
    with pytest.raises(ChildFailed, match="query is sharded over 'model' along"):
        in_child_process(_gpu_program, "jit", P("data", "model"), seconds=TIME_LIMIT)
