"""What attention over a cut sequence refuses, and in what words."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attn_jax import context_parallel
from attn_jax.formats import BF16
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, Step
from tests.parallel_runs import sharded


def _call(query=(1, 4, 4, 8), key=(1, 4, 2, 8), shards=2, strategy="ring", **options):
    given = dict(layout="contiguous", recipe=ATTN_JAX) | options
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (query, key))
    run = sharded(shards, strategy, given.pop("layout"), **given)
    grown = (
        jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * shards, *x.shape[2:]), x.dtype)
        for x in (q, k, k)
    )
    jax.eval_shape(run, *grown)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(layout="snake"), "layout must be one of contiguous, zigzag, striped"),
        (dict(strategy="star"), "strategy must be one of ring, all_gather"),
        (dict(query=(1, 3, 4, 8), layout="zigzag"), "needs a multiple of 4 positions"),
        (dict(shards=4, strategy="ulysses"), "deals heads to 4 devices"),
        (dict(head_stride=1), "head_stride must divide the 2 key heads"),
        (dict(strategy="all_gather", head_stride=3), "got 3 under 'all_gather'"),
        (dict(partials="bf16"), "partials must be 'fp32' or '16-bit'"),
        (dict(wire="16-bit", recipe=EXACT_FP32), "wire='16-bit' is for recipes of"),
        (dict(strategy="ulysses", wire="16-bit"), "wire are for strategies with parts"),
        (dict(strategy="ulysses", partials="16-bit"), "for strategies with parts"),
        (dict(recipe="flash2"), "recipe must be a Recipe"),
        (dict(scale=float("nan")), "scale must be a finite"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, says, as_users_call_it):
    with pytest.raises(ValueError, match=says) as caught:
        _call(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        dict(dq_centre="row"),
        dict(delta_source="p_dp"),
        dict(scaled_query=Step(BF16)),
    ],
)
def test_a_recipe_without_parts_is_refused_in_one_line(changes):
    with pytest.raises(NotImplementedError, match=list(changes)[0]) as caught:
        _call(recipe=dataclasses.replace(ATTN_JAX, **changes))
    assert "\n" not in str(caught.value)


def test_lengths_that_do_not_divide_are_refused_in_one_line(as_users_call_it):
    x = jnp.zeros((1, 12, 2, 8), jnp.bfloat16)
    for function in (
        lambda: context_parallel.to_layout(x, 8, "contiguous"),
        lambda: context_parallel.from_layout(x, 3, "zigzag", axis=3),
        lambda: context_parallel.simulate(x, x, x, shards=4, layout="zigzag"),
    ):
        with pytest.raises(ValueError, match="needs a multiple of") as caught:
            function()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no axis 'ring' here"):
        context_parallel.attention(x, x, x, axis_name="ring")
    with pytest.raises(ValueError, match=r"takes \(ring axis, Ulysses axis\)"):
        context_parallel.attention(x, x, x, axis_name="a", strategy="ring+ulysses")
