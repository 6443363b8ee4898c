"""Context parallelism on the Hopper kernels, without a GPU.

Parts that the interpreter computes, and programs compiled for four H200s."""

import functools
import math
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel, reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.audit.mask_cases import Bias, Case, bias_gradient_bound
from attn_jax.context_parallel import arguments
from attn_jax.formats import BF16
from attn_jax.kernels import design, partial
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.interpreter import interpreted
from attn_jax.mask import Mask
from attn_jax.span import Chosen, Span
from tests import gpu_compiler
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, h200_mesh
from tests.parallel_runs import sharded

pytestmark = pytest.mark.ci

TIME_LIMIT = 240  # seconds; a case takes six to ten alone on a core
T, N, K, H = 256, 2, 1, 64
COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-permute"),
    "reduce-scatter",
)


@pytest.fixture(scope="module")
def compile_extra() -> None:
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")


def _on_any_device():
    """The check for a GPU is not what is tested."""
    return patch.object(arguments, "_kernels_refusal", lambda *given: None)


def _inputs(family: str, length: int = T):
    dlse = np.random.default_rng(1).standard_normal((1, N, length)).astype(np.float32)
    return *make_inputs(family, 0, Shape(1, length, length, N, K, H)), dlse


def _bias() -> np.ndarray:
    """One for both heads, of the size of logits; keys 40 to 99 are hidden from most
    queries, and query 130 sees nothing."""
    bias = 2 * np.random.default_rng(2).standard_normal((1, 1, T, T))
    bias[..., 128:, 40:100] = bias[..., 130, :] = -np.inf
    return bias.astype(ml_dtypes.bfloat16)


def _interpreted(
    family: str, layout: str, documents, bias=None, one_pass=False, length=T
):
    """(out, LSE, dQ, dK, dV) of two shards; with a bias, too, and dbias. With
    `one_pass` dQ, dK and dV of a part are made by one kernel where it takes the mask,
    though the parts do not fill a card. And how often it adds to dQ where that lies."""
    in_place, calls = partial.backward_in_place, []

    def counted(*given, **more):
        calls.append(given)
        return in_place(*given, **more)

    ids = {}
    if documents is not None:
        names = "query_segment_ids", "key_value_segment_ids"
        ids = dict.fromkeys(names, jnp.asarray(documents))

    @jax.jit
    def both(query, key, value, dout, dlse, bias):
        def attend(query, key, value, bias):
            return context_parallel.simulate(
                *(query, key, value),
                bias=bias,
                shards=2,
                layout=layout,
                is_causal=True,
                implementation="pallas",
                **ids,
            )

        results, pullback = jax.vjp(attend, query, key, value, bias)
        return *results, *pullback((dout, dlse))

    share = 0.0 if one_pass else design.LEAST_SHARE
    with (
        patch.object(design, "LEAST_SHARE", share),
        patch.object(partial, "backward_in_place", counted),
        _on_any_device(),
        made_for("hopper"),
        interpreted(),
    ):
        found = jax.device_get(both(*_inputs(family, length), bias))
    return *found, len(calls)


@pytest.mark.parametrize(
    ("family", "layout", "more"),
    [
        ("uniform", "zigzag", "one pass"),
        ("uniform", "zigzag", "in place"),
        ("normal", "contiguous", "bias"),
        pytest.param("uniform", "zigzag", "", marks=pytest.mark.thorough),
        pytest.param("normal", "striped", "documents", marks=pytest.mark.thorough),
        pytest.param("normal", "contiguous", "one pass", marks=pytest.mark.thorough),
        pytest.param("normal", "zigzag", "bias", marks=pytest.mark.thorough),
    ],
)
def test_parts_of_the_kernels_are_put_together(family, layout, more):
    documents = None
    if more == "documents":
        documents = np.arange(T, dtype=np.int32)[None] // 100
    bias = _bias() if more == "bias" else None
    # Halves of shards are whole blocks of 128 queries, or are not.
    length = 2 * T if more == "in place" else T
    one_pass = more in ("one pass", "in place")
    out, lse, *gradients, dbias, calls = in_child_process(
        *(_interpreted, family, layout, documents, bias, one_pass, length),
        seconds=TIME_LIMIT,
    )
    # A shard's own keys, earlier ones and later ones; not of half a block.
    in_place = {("zigzag", "in place"): 3, ("contiguous", "one pass"): 2}
    assert calls == in_place.get((layout, more), 0)
    mask = Mask(
        is_causal=True, query_segment_ids=documents, key_value_segment_ids=documents
    )
    inputs = _inputs(family, length)
    exact = reference.golden(*inputs, bias=bias, mask=mask)
    if bias is not None:
        case = Case(mask, H, bias=Bias(bias.shape, "bfloat16"))
        with patch.object(Bias, "array", lambda self: bias):
            bound = bias_gradient_bound(case, inputs[:4], inputs[4])
        assert dbias.dtype == bias.dtype and exact.dbias is not None
        assert (np.abs(dbias.astype(np.float64) - exact.dbias) <= bound).all()
    # The bar of the kernels themselves; dQ has its final rounding, and dS's and K's,
    # which have three bits more.
    wanted = exact.out, exact.dquery, exact.dkey, exact.dvalue
    bars = 1.7, math.hypot(1, 2 * 2.0**-3), 1.7, 1.7
    for got, want, bar in zip((out, *gradients), wanted, bars, strict=True):
        assert unit_error(got, want, BF16) <= bar
    # Logits of size ten at the most, of H products, and sums of T terms.
    np.testing.assert_allclose(lse, exact.lse, rtol=0, atol=10 * (H + T) * 2.0**-24)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_out_has_the_dtype_asked_for_whoever_ends_rows(layout, dtype):
    """It had the query's where the last kernel does."""
    attend = sharded(
        2, "ring", layout, is_causal=True, implementation="pallas", out_dtype=dtype
    )
    query, key = (
        jax.ShapeDtypeStruct((1, 2048, heads, 128), "bfloat16") for heads in (4, 2)
    )
    with _on_any_device(), made_for("hopper"):
        out, _ = jax.eval_shape(attend, query, key, key)
        (of_both, _), _ = jax.eval_shape(
            lambda *given: jax.vjp(attend, *given), query, key, key
        )
    assert out.dtype == of_both.dtype == dtype


def _compiled(strategy: str, layout: str) -> Program:
    mesh = h200_mesh((4,), ("seq",), (AxisType.Auto,))
    spec = P(None, "seq")

    def local(query, key, value):
        def loss(*inputs):
            out, _ = context_parallel.attention(
                *inputs,
                axis_name="seq",
                strategy=strategy,
                layout=layout,
                is_causal=True,
                implementation="pallas",
            )
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    sharding = NamedSharding(mesh, spec)
    query, key = (
        jax.ShapeDtypeStruct((1, 4096, heads, 64), "bfloat16", sharding=sharding)
        for heads in (4, 2)
    )
    with _on_any_device():
        return gpu_compiler.partitioned(run, query, key, key)


@pytest.mark.thorough
@pytest.mark.usefixtures("compile_extra")
@pytest.mark.parametrize(
    ("strategy", "layout", "messages"),
    [
        # Forward three of K and V; backward as many, and dK and dV four times, of which
        # XLA may send some as one. Seven, if what the forward pass got were kept.
        ("ring", "zigzag", {"collective-permute": (8, 3 + 3 + 4)}),
        # K and V in each pass.
        ("all_gather", "contiguous", {"all-gather": (2, 2), "reduce-scatter": (1, 1)}),
    ],
)
def test_a_program_for_gpus_sends_what_it_must(strategy, layout, messages):
    program = in_child_process(_compiled, strategy, layout, seconds=TIME_LIMIT)
    counts = {name: program.count(name) for name in COLLECTIVES}
    wanted = dict.fromkeys(COLLECTIVES, (0, 0)) | messages
    # Numbers of all keys, for dQ's cure and what it is scaled by: of one device, then
    # of two.
    least, most = wanted["collective-permute"]
    wanted["collective-permute"] = least + 2, most + 2
    assert {
        name: count
        for name, count in counts.items()
        if not wanted[name][0] <= count <= wanted[name][1]
    } == {}
    assert "mosaic" in program.hlo


def _wide_gradients(head_dim: int, bias_dtype: str | None) -> Program:
    query = jax.ShapeDtypeStruct((1, 1000, 4, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((1, 1100, 2, head_dim), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, 4, 1000), "float32")
    centre = jax.ShapeDtypeStruct((1, 2, head_dim), "float32")
    operands = query, key, key, query, rows, rows, rows, centre
    if bias_dtype is not None:
        operands += (jax.ShapeDtypeStruct((1, 1, 1000, 1100), bias_dtype),)

    def run(*operands):
        query, key, value, dout, lse, excess, squares, centre, *bias = operands
        ranges = partial.ranges(centre, centre, centre, excess, squares)
        return partial.backward(
            *(query, key, value, dout, lse, excess, ranges),
            scale=0.1,
            bias=bias[0] if bias else None,
            mask=Mask(is_causal=True),
        )

    return gpu_compiler.compiled(run, *operands)


@pytest.mark.usefixtures("compile_extra")
@pytest.mark.parametrize(
    ("head_dim", "bias_dtype"),
    [
        (128, None),
        (128, "bfloat16"),
        pytest.param(64, None, marks=pytest.mark.thorough),
        pytest.param(64, "float32", marks=pytest.mark.thorough),
    ],
)
def test_gradients_in_fp32_spill_nothing(head_dim, bias_dtype):
    program = in_child_process(
        _wide_gradients, head_dim, bias_dtype, seconds=TIME_LIMIT
    )
    names = {"attention_backward_dq", "attention_backward_dkv"}
    names |= set() if bias_dtype is None else {"attention_backward_dbias"}
    assert {k.name: k.spilled_bytes for k in program.kernels} == dict.fromkeys(names, 0)
    assert not any(k.serialised for k in program.kernels)


def _in_one_pass() -> Program:
    query = jax.ShapeDtypeStruct((1, 4096, 32, 128), "bfloat16")
    key = jax.ShapeDtypeStruct((1, 4096, 8, 128), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, 32, 4096), "float32")
    centre = jax.ShapeDtypeStruct((1, 8, 128), "float32")

    def run(query, key, value, dout, lse, excess, squares, centre):
        ranges = partial.ranges(centre, centre, centre, excess, squares)
        of_rows = lse, excess, ranges
        mask = Mask(is_causal=True)
        return partial.backward(query, key, value, dout, *of_rows, scale=0.1, mask=mask)

    return gpu_compiler.compiled(run, query, key, key, query, *[rows] * 3, centre)


def _onto_sums(chosen: bool = False) -> Program:
    query = jax.ShapeDtypeStruct((1, 4096, 32, 128), "bfloat16")
    planes = jax.ShapeDtypeStruct((6, 1, 4096, 8, 128), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, 32, 4096), "float32")
    sums = jax.ShapeDtypeStruct((1, 4096, 32, 128), "float32")
    centre = jax.ShapeDtypeStruct((1, 8, 128), "float32")

    spans = Span(0, 4096, 2048), Span(2048, 2048, 4096)

    def run(sums, query, planes, dout, lse, excess, squares, centre):
        ranges = partial.ranges(centre, centre, centre, excess, squares)
        keys = partial.Keys(planes[0], planes[1], 0, planes)
        at = jnp.arange(2, dtype=jnp.int32), jnp.int32(0)
        return partial.backward_in_place(
            *(sums, query, keys, dout, lse, excess, ranges, (2048, 2048)),
            scale=0.1,
            is_causal=False,
            chosen=Chosen(spans, *at) if chosen else None,
        )

    return gpu_compiler.compiled(run, sums, query, planes, query, *[rows] * 3, centre)


def _carrying() -> Program:
    query = jax.ShapeDtypeStruct((1, 4096, 32, 128), "bfloat16")
    key = jax.ShapeDtypeStruct((1, 4096, 8, 128), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, 32, 4096), "float32")
    total = jax.ShapeDtypeStruct((1, 4096, 32, 128), "float32")

    def run(m, l, total, query, key, value):  # noqa: E741
        return partial.carry_on((m, l, total), query, key, value, scale=0.1)

    return gpu_compiler.compiled(run, rows, rows, total, query, key, key)


@pytest.mark.thorough
@pytest.mark.usefixtures("compile_extra")
@pytest.mark.parametrize(
    ("program", "kernel", "spilled"),
    # As of 16-bit gradients, for which the kernel spills 120 under a causal mask: 16
    # are what lets it go from tile to tile of keys without waiting for global memory.
    [
        (_in_one_pass, "attention_backward_fused", 120),
        (_onto_sums, "attention_backward_fused", 120),
        (functools.partial(_onto_sums, True), "attention_backward_fused", 120),
        (_carrying, "attention_forward", 0),
    ],
)
def test_kernels_of_parts_of_a_useful_size(program, kernel, spilled):
    found = in_child_process(program, seconds=TIME_LIMIT)
    (made,) = (k for k in found.kernels if k.name == kernel)
    assert made.spilled_bytes <= spilled and not made.serialised
