"""Context parallelism on the Hopper kernels, without a GPU.

Parts that the interpreter computes, and programs compiled for four H200s."""

import functools
import math
from unittest.mock import patch

import chex
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
from attn_jax.kernels import design, partial, tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.schedule import Chosen
from attn_jax.mask import Mask
from attn_jax.span import Span
from tests import gpu_compiler
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, h200_mesh

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


def _inputs(family: str):
    dlse = np.random.default_rng(1).standard_normal((1, N, T)).astype(np.float32)
    return *make_inputs(family, 0, Shape(1, T, T, N, K, H)), dlse


def _bias() -> np.ndarray:
    """One for both heads, of the size of logits; keys 40 to 99 are hidden from most
    queries, and query 130 sees nothing."""
    bias = 2 * np.random.default_rng(2).standard_normal((1, 1, T, T))
    bias[..., 128:, 40:100] = bias[..., 130, :] = -np.inf
    return bias.astype(ml_dtypes.bfloat16)


def _interpreted(family: str, layout: str, documents, bias=None, one_pass=False):
    """(out, LSE, dQ, dK, dV) of two shards; with a bias, too, and dbias. With
    `one_pass` dQ, dK and dV of a part are made by one kernel where it takes the mask,
    though the parts do not fill a card."""
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
        _on_any_device(),
        made_for("hopper"),
        interpreted(),
    ):
        return jax.device_get(both(*_inputs(family), bias))


@pytest.mark.parametrize(
    ("family", "layout", "more"),
    [
        ("uniform", "zigzag", "one pass"),
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
    out, lse, *gradients, dbias = in_child_process(
        *(_interpreted, family, layout, documents, bias, more == "one pass"),
        seconds=TIME_LIMIT,
    )
    mask = Mask(
        is_causal=True, query_segment_ids=documents, key_value_segment_ids=documents
    )
    inputs = _inputs(family)
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


# Logits of a part's only key, by row: hundreds apart, above the 88 where FP32's exp
# ends, and below what may be seen (-inf).
_HIDDEN = -np.inf
LOGITS = np.float32(
    [[0, 200, _HIDDEN], [1, -300, _HIDDEN], [_HIDDEN] * 3, [2, 199, _HIDDEN]]
)


def _carried(order: tuple[int, ...]):
    """(O, LSE) of three rows over parts of one key each, and V of the keys."""
    rows, heads = LOGITS.shape[1], 1
    values = np.random.default_rng(0).integers(-8, 9, (4, 1, 1, heads, H))
    # One column of the query for each row.
    query = 64 * jnp.eye(rows, H, dtype="bfloat16")[None, :, None]
    state = None
    with made_for("hopper"), interpreted():
        for part in order:
            seen = np.isfinite(LOGITS[part])
            columns = np.where(seen, LOGITS[part], 0.0) / 64
            key = np.pad(columns, (0, H - rows))[None, None, None]
            mask = Mask(
                query_segment_ids=np.where(seen, 0, 1).astype(np.int32)[None],
                key_value_segment_ids=np.zeros((1, 1), np.int32),
            )
            state = partial.carry_on(
                *(state, query, jnp.asarray(key, "bfloat16")),
                jnp.asarray(values[part], "bfloat16"),
                scale=1.0,
                mask=mask,
            )
        return *jax.device_get(partial.finished(state)), values[:, 0, 0]


@pytest.mark.parametrize(
    "order",
    [
        (2, 0, 3, 1),
        pytest.param((0, 1, 2, 3), marks=pytest.mark.thorough),
        pytest.param((3, 2, 1, 0), marks=pytest.mark.thorough),
    ],
)
def test_parts_of_any_size_are_carried(order):
    """By the forward kernel, also such as see nothing, first, last or all of them."""
    out, lse, values = in_child_process(_carried, order, seconds=TIME_LIMIT)
    logits = LOGITS[:, :2].astype(np.float64)
    exact = np.logaddexp.reduce(logits, axis=0)
    wanted = np.einsum("pt,phd->thd", np.exp(logits - exact), values)
    # P, rounded to FP16, times integers up to 8, over its unrounded sum.
    atol = 2.0**-11 * 8
    np.testing.assert_allclose(out[0, :2], wanted, rtol=0, atol=atol)
    np.testing.assert_allclose(lse[0, 0, :2], exact, rtol=4 * 2.0**-24)
    assert not out[0, 2].any() and lse[0, 0, 2] == -np.inf


def _alone():
    """What a row gets that sees one key, for logits that are not whole, and the value
    of that key."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((1, 128, 1, H)), "bfloat16")
    key, value = (
        jnp.asarray(rng.standard_normal((1, 1, 1, H)), "bfloat16") for _ in range(2)
    )
    with made_for("hopper"), interpreted():
        state = partial.carry_on(None, query, key, value, scale=0.3)
        maxima = jax.device_get(state.row_max)
        assert np.array_equal(maxima, np.round(maxima))
        return jax.device_get(partial.finished(state)[0]), np.float32(value)


def test_a_key_alone_gives_its_value():
    """Its weight is 1 as an FP16 number, whatever m is rounded to behind P V."""
    out, value = in_child_process(_alone, seconds=TIME_LIMIT)
    # As an FP32 number, in l, the weight is off by what its exponent is: m - 15, of
    # size below 32, is rounded, and its difference to a logit, and m is a place above
    # (`Softmax.origin`): ln 2 (2^-20 + 2^-21 + 2^-20). A, l and their ratio, too.
    rtol = math.log(2) * 2.5 * 2.0**-20 + 3 * 2.0**-24
    np.testing.assert_allclose(out, np.broadcast_to(value, out.shape), rtol=rtol)


def _in_place(count: int):
    """The state with some keys added to rows in its middle, those rows by themselves,
    and what there was."""
    rng = np.random.default_rng(0)
    heads, rows, first = 2, 3 * 128, 128

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), "bfloat16")

    m = jnp.asarray(rng.integers(-3, 4, (1, heads, rows)), jnp.float32)
    l = jnp.asarray(rng.uniform(1, 2, (1, heads, rows)), jnp.float32)  # noqa: E741
    total = jnp.asarray(rng.standard_normal((1, rows, heads, H)), jnp.float32)
    query, key = normal(1, count, heads, H), normal(1, 64, heads, H)
    value = normal(1, 64, heads, H)
    with made_for("hopper"), interpreted():
        before = partial.Carried(m, l, total)
        add = functools.partial(partial.carry_on, scale=0.1)
        found = add(before, query, key, value, first=first)
        alone = add(before.rows(first, count), query, key, value)
        return jax.device_get((found, alone, before))


@pytest.mark.parametrize("count", [128, 120])
def test_other_rows_of_a_state_stay(count):
    """Of whole tiles, which the kernel adds to in place, and of others."""
    found, alone, before = in_child_process(_in_place, count, seconds=TIME_LIMIT)
    chex.assert_trees_all_equal(found.rows(128, count), alone)
    for first, more in ((0, 128), (128 + count, 3 * 128 - 128 - count)):
        chex.assert_trees_all_equal(found.rows(first, more), before.rows(first, more))
    assert not np.array_equal(alone.total, before.rows(128, count).total)


def _chosen():
    """Spans, a state, and for each span the state with what it adds when it is chosen
    on the device, and with what its rows get by themselves."""
    rng = np.random.default_rng(0)
    tiling = tuning.configuration("hopper", H, H, 256, is_causal=False, listed=False)
    tile, columns = tiling.forward.tile, tiling.forward.columns
    rows, keys = 3 * tile, 2 * columns
    spans = Span(0, 2 * tile, columns), Span(tile, 2 * tile, keys), Span(0, 0, 0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), "bfloat16")

    m = jnp.asarray(rng.integers(-3, 4, (1, N, rows)), jnp.float32)
    l = jnp.asarray(rng.uniform(1, 2, (1, N, rows)), jnp.float32)  # noqa: E741
    total = jnp.asarray(rng.standard_normal((1, rows, N, H)), jnp.float32)
    query, key, value = (
        normal(1, rows, N, H),
        normal(1, keys, K, H),
        normal(1, keys, K, H),
    )
    found = []
    with made_for("hopper"), interpreted():
        before = partial.Carried(m, l, total)
        add = functools.partial(partial.carry_on, scale=0.1)
        for number, span in enumerate(spans):
            chosen = Chosen(spans, jnp.int32(number))
            assert partial.takes(query, key, value, chosen)
            some = add(before, query, key, value, chosen=chosen)
            alone = None
            if span.queries:
                cut = slice(span.first_query, span.first_query + span.queries)
                alone = add(
                    before.rows(span.first_query, span.queries),
                    *(query[:, cut], key[:, : span.keys], value[:, : span.keys]),
                )
            found.append(jax.device_get((some, alone)))
        uneven = Chosen((Span(0, tile, columns // 2),), jnp.int32(0))
        assert not partial.takes(query, key, value, uneven)
        return spans, jax.device_get(before), found


def test_what_is_added_may_be_known_on_the_device_alone():
    """In one program for all shards, which meet other keys at a hop."""
    spans, before, found = in_child_process(_chosen, seconds=TIME_LIMIT)
    rows = before.total.shape[1]
    for span, (some, alone) in zip(spans, found, strict=True):
        first, count = span.first_query, span.queries
        if count:
            chex.assert_trees_all_equal(some.rows(first, count), alone)
            assert not np.array_equal(alone.total, before.rows(first, count).total)
        for start, more in ((0, first), (first + count, rows - first - count)):
            chex.assert_trees_all_equal(
                some.rows(start, more), before.rows(start, more)
            )


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
    # The mean of K, for the centre of dQ's cure.
    wanted = dict.fromkeys(COLLECTIVES, (0, 0)) | {"all-reduce": (1, 1)} | messages
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
        ranges = partial.ranges(key, value, excess, squares, centre)
        return partial.backward(
            *(query, key, value, dout, lse, excess, centre, ranges),
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
    names = {"attention_backward_dq", "attention_backward_dkv", "attention_key_numbers"}
    names |= set() if bias_dtype is None else {"attention_backward_dbias"}
    assert {k.name: k.spilled_bytes for k in program.kernels} == dict.fromkeys(names, 0)
    assert not any(k.serialised for k in program.kernels)


def _in_one_pass() -> Program:
    query = jax.ShapeDtypeStruct((1, 4096, 32, 128), "bfloat16")
    key = jax.ShapeDtypeStruct((1, 4096, 8, 128), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, 32, 4096), "float32")
    centre = jax.ShapeDtypeStruct((1, 8, 128), "float32")

    def run(query, key, value, dout, lse, excess, squares, centre):
        ranges = partial.ranges(key, value, excess, squares, centre)
        of_rows = lse, excess, centre, ranges
        mask = Mask(is_causal=True)
        return partial.backward(query, key, value, dout, *of_rows, scale=0.1, mask=mask)

    return gpu_compiler.compiled(run, query, key, key, query, *[rows] * 3, centre)


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
        (_carrying, "attention_forward", 0),
    ],
)
def test_kernels_of_parts_of_a_useful_size(program, kernel, spilled):
    found = in_child_process(program, seconds=TIME_LIMIT)
    (made,) = (k for k in found.kernels if k.name == kernel)
    assert made.spilled_bytes <= spilled and not made.serialised
