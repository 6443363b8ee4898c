"""Sums outside the kernels add in an order that XLA does not choose."""

import functools
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import context_parallel
from attn_jax.context_parallel import arguments
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask
from attn_jax.pairwise import pairwise_cumsum, pairwise_mean, pairwise_sum
from attn_jax.recipe import ATTN_JAX
from tests.test_residuals import equations

# Of operations that XLA gives an order of their own.
UNORDERED = {"reduce_sum", "dot_general", "reduce", "reduce_window", "cumsum"}
N, K, H = 4, 2, 128


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_is_the_sum(length, axis):
    shape = [3, 5, 2]
    shape[axis] = length
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    exact = x.astype(np.float64).sum(axis)
    # An addition errs by half a unit in the last place of what it gives.
    bound = np.abs(x.astype(np.float64)).sum(axis) * np.ceil(np.log2(length or 1))
    bound *= 2.0**-24 * (1 + 2.0**-10)
    x = jnp.asarray(x)
    for keepdims in (False, True):
        got = pairwise_sum(x, axis, keepdims=keepdims)
        wanted = np.expand_dims(exact, axis) if keepdims else exact
        assert got.shape == wanted.shape
        assert (np.abs(got - wanted) <= (bound.reshape(wanted.shape))).all()
    if length:
        np.testing.assert_array_equal(
            pairwise_mean(x, axis), pairwise_sum(x, axis) / np.float32(length)
        )


@pytest.mark.parametrize(
    "length",
    [1, pytest.param(2, marks=pytest.mark.thorough), 7]
    + [pytest.param(64, marks=pytest.mark.thorough), 1000],
)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_is_the_running_sum(length, axis):
    shape = [3, 5, 2]
    shape[axis] = length
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    exact = x.astype(np.float64).cumsum(axis)
    bound = np.abs(x.astype(np.float64)).cumsum(axis) * 2 * np.ceil(np.log2(length))
    bound *= 2.0**-24 * (1 + 2.0**-10)
    assert (np.abs(pairwise_cumsum(jnp.asarray(x), axis) - exact) <= bound).all()


def test_every_step_is_written_out():
    """Which is what makes the order ours, and few of them, that XLA fuses."""
    jaxpr = jax.make_jaxpr(functools.partial(pairwise_sum, axis=1))(jnp.ones((2, 64)))
    names = [eqn.primitive.name for eqn in equations(jaxpr.jaxpr)]
    assert names.count("add") == 6 and not UNORDERED & {*names}


@pytest.mark.parametrize(
    ("length", "axis", "sizes"),
    [
        (64, 0, []),
        (512, 0, [16]),
        (1024, 0, [32]),
        (16384, 0, [512, 16]),
        (1000, 0, [16]),
        (1024, 1, [16]),
    ],
)
def test_no_thread_adds_up_a_long_axis(length, axis, sizes):
    """XLA makes a program of what lies between barriers, and a thread for each of its
    results."""
    shape = (length, 2) if axis == 0 else (2, length)
    jaxpr = jax.make_jaxpr(functools.partial(pairwise_sum, axis=axis))(jnp.ones(shape))
    barriers = [
        eqn.invars[0].aval.shape[axis]
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert barriers == sizes


def _sums(function, *operands) -> list[str]:
    """Those outside our kernels that XLA gives an order, of numbers that it matters
    for."""
    jaxpr = jax.make_jaxpr(function)(*operands)
    found = list(equations(jaxpr.jaxpr, lambda eqn: not _is_kernel(eqn)))
    assert any(map(_is_kernel, found))
    return [
        str(eqn)
        for eqn in found
        if eqn.primitive.name in UNORDERED
        and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        # Of one term, as the transpose of a broadcast may have.
        and (
            eqn.primitive.name == "cumsum"
            or eqn.outvars[0].aval.size < eqn.invars[0].aval.size
        )
    ]


def _is_kernel(eqn) -> bool:
    return str(eqn.params.get("name", "")).startswith("attention_")


def _arrays(length: int):
    query = jax.ShapeDtypeStruct((2, length, N, H), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, length, K, H), jnp.bfloat16)
    return query, key, key


def _both(attend):
    def program(*inputs):
        results, pullback = jax.vjp(attend, *inputs)
        return results, pullback(jax.tree.map(jnp.ones_like, results))

    return program


def _documents():
    ids = jnp.tile(jnp.repeat(jnp.arange(4), 128), (2, 1))
    return dict(query_segment_ids=ids, key_value_segment_ids=ids)


@pytest.mark.parametrize(
    ("architecture", "backward", "recipe", "mask"),
    [
        ("hopper", "fused", None, dict()),
        ("hopper", "two_kernels", None, dict()),
        ("hopper", "two_kernels", None, dict(is_causal=True)),
        ("hopper", "two_kernels", None, dict(window=(100, 0))),
        ("hopper", "two_kernels", None, _documents()),
        # P and dS in BF16.
        ("hopper", "two_kernels", ATTN_JAX, dict(is_causal=True)),
        ("ampere", "two_kernels", None, dict()),
        ("ampere", "two_kernels", None, _documents()),
    ],
)
def test_kernels_leave_xla_no_sums(architecture, backward, recipe, mask):
    """Two compilations of one program have given results that differed in the last bit,
    on a GPU that other programs used."""
    more: dict = dict(bias=jax.ShapeDtypeStruct((1, N, 1, 512), jnp.bfloat16))
    more |= dict(sinks=jax.ShapeDtypeStruct((N,), jnp.float32))
    if backward == "fused":  # Which has neither.
        more = {}

    def attend(query, key, value, *given):
        return attention(
            *(query, key, value),
            scale=0.1,
            mask=Mask(**mask),
            backward=backward,
            recipe=recipe,
            **dict(zip(more, given, strict=True)),
        )

    with made_for(architecture):
        sums = _sums(_both(attend), *_arrays(512), *more.values())
    assert not sums, sums


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_context_parallelism_leaves_xla_no_sums(strategy):
    attend = functools.partial(
        context_parallel.simulate,
        shards=4,
        strategy=strategy,
        layout="zigzag",
        is_causal=True,
        implementation="pallas",
    )
    with (
        made_for("hopper"),
        patch.object(arguments, "_kernels_refusal", lambda *x: None),
    ):
        sums = _sums(_both(attend), *_arrays(512))
    assert not sums, sums
