"""An added bias and its gradient under context parallelism, against FP64."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel, emulator, reference
from attn_jax.formats import BF16
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, EXACT_FP64
from tests.parallel_runs import (
    arrays,
    both_passes,
    exact,
    mesh_of,
    sharded,
    simulated,
)

pytestmark = pytest.mark.ci

B, T, S, N, K, H = 2, 8, 16, 4, 2, 4
QUERY, KEY = (B, T, N, H), (B, S, K, H)
FP64 = dataclasses.replace(
    EXACT_FP64, dq_centre="mean", block_kv=4, backward_block_kv=4
)
# As in `test_context_parallel`: an entry of dbias is a sum of so many terms, too.
BOUND = 100 * B * S * N * 2.0**-53
SHAPES = {
    "whole": (B, N, T, S),
    "for all heads": (1, 1, T, S),
    "for all queries": (1, N, 1, S),
    "for all keys": (B, 1, T, 1),
    "for all heads and queries": (B, 1, 1, S),
}
STRATEGIES, LAYOUTS = context_parallel.STRATEGIES, context_parallel.LAYOUTS


def a_bias(shape, dtype, seed=1):
    """Of the size of logits. Some of it hides keys; query 3 sees none, keys 4 to 7, all
    of a shard, are seen by none, unless it is one for all."""
    bias = np.random.default_rng(seed).standard_normal(shape)
    if shape[3] > 1:
        bias[..., ::5] = -np.inf
        bias[..., 4:8] = -np.inf
    if shape[2] > 1:
        bias[:, :, 3] = -np.inf
    return jnp.asarray(bias, dtype)


# Each strategy and layout has two shapes of its own, each strategy has all.
CASES = [
    (strategy, layout, list(SHAPES)[(2 * at + by + more) % len(SHAPES)])
    for by, strategy in enumerate(STRATEGIES)
    for at, layout in enumerate(LAYOUTS)
    for more in (0, 1)
]
# By default each strategy and layout has one of them, but for those strategies whose
# parts are in others, which have one or two in all.
FURTHER = {("all_gather+ring", "contiguous"), ("all_gather+ring", "striped")}
FURTHER |= {("ring+ulysses", "contiguous")}
CASES = [
    pytest.param(*case, marks=pytest.mark.thorough)
    if number % 2 or case[:2] in FURTHER
    else case
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize(("strategy", "layout", "shape"), CASES)
def test_the_bias_may_be_cut(strategy, layout, shape, x64):
    given = arrays(QUERY, KEY, jnp.float64)
    bias = a_bias(SHAPES[shape], jnp.float64)
    options = dict(is_causal=shape != "for all queries")
    shards = 4 if strategy == "ring" else 2
    run = both_passes(sharded(shards, strategy, layout, recipe=FP64, **options))
    with jax.debug_nans(True):
        got = run(*given, bias)
    chex.assert_trees_all_close(
        got, exact(given, bias, **options), rtol=BOUND, atol=BOUND
    )


@pytest.mark.parametrize("shape", ["whole", "for all heads"])
def test_heads_may_be_gathered_a_few_at_a_time(shape, x64):
    given = arrays(QUERY, KEY, jnp.float64)
    bias = a_bias(SHAPES[shape], jnp.float64)
    attend = sharded(2, "all_gather", "zigzag", recipe=FP64, head_stride=1)
    chex.assert_trees_all_close(
        both_passes(attend)(*given, bias), exact(given, bias), rtol=BOUND, atol=BOUND
    )


@pytest.mark.parametrize("merge", ["lse", "sigmoid", "two_pass"])
def test_parts_that_a_bias_hides_may_be_merged(merge, x64):
    given = arrays(QUERY, KEY, jnp.float64)
    bias = a_bias(SHAPES["whole"], jnp.float64)
    recipe = dataclasses.replace(FP64, ring_merge=merge)
    attend = simulated(4, "ring", "contiguous", recipe=recipe)
    with jax.debug_nans(True):
        got = both_passes(attend)(*given, bias)
    chex.assert_trees_all_close(got, exact(given, bias), rtol=BOUND, atol=BOUND)


# Without a bias that is so by default, and by default a bias is right in each.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("ring", "zigzag"), ("all_gather", "zigzag"), ("all_gather+ring", "striped")],
)
def test_a_simulation_has_the_devices_bits(strategy, layout):
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    bias = a_bias((1, 1, S, S), jnp.bfloat16)
    recipe = dataclasses.replace(ATTN_JAX, block_kv=4, backward_block_kv=4)
    options = dict(is_causal=True, recipe=recipe)
    runs = (
        both_passes(how(2, strategy, layout, **options)) for how in (sharded, simulated)
    )
    chex.assert_trees_all_equal(*(run(*given, bias) for run in runs))


def test_a_ring_has_the_bits_of_the_emulators():
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    bias = a_bias((B, N, S, S), jnp.bfloat16)
    recipe = dataclasses.replace(
        ATTN_JAX, block_kv=4, backward_block_kv=4, ring_size=4, ring_merge="carry"
    )
    got = both_passes(simulated(4, "ring", "contiguous", recipe=recipe))(*given, bias)
    attend = functools.partial(emulator.attention, recipe=recipe)
    want = both_passes(lambda q, k, v, bias: attend(q, k, v, bias=bias))(*given, bias)
    chex.assert_trees_all_equal(got[0], want[0])
    chex.assert_trees_all_equal(got[2:], want[2:])


@functools.cache
def plain(rows: int):
    """Inputs with a bias of so many rows, and the results of the emulator alone."""
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    bias = a_bias((1, N, rows, S), jnp.bfloat16)

    def attend(query, key, value, bias):
        mask = Mask(is_causal=True)
        return emulator.attention(
            query, key, value, recipe=ATTN_JAX, bias=bias, mask=mask
        )

    return *given, bias, both_passes(attend)(*given, bias)


# Gradients of a bias of one row have a test of their own, too.
@pytest.mark.parametrize(
    ("rows", "strategy"),
    [
        (S, "ring"),
        (S, "all_gather"),
        (1, "all_gather+ring"),
        (1, "ulysses"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (1, "ring"),
                (1, "all_gather"),
                (S, "all_gather+ring"),
                (S, "ulysses"),
            )
        ),
    ],
)
def test_one_shard_is_the_plain_implementation(rows, strategy):
    *given, bias, want = plain(rows)
    options = dict(recipe=ATTN_JAX, is_causal=True)
    got = both_passes(sharded(1, strategy, "zigzag", **options))(*given, bias)
    assert got[5].dtype == bias.dtype and got[5].shape == bias.shape
    chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "ring+ulysses"])
def test_its_gradient_is_rounded_once(strategy):
    """Though devices, heads and queries have shares of it."""
    given = arrays(QUERY, KEY, jnp.bfloat16)
    bias = jnp.zeros((1, 1, 1, S), jnp.bfloat16)
    attend = sharded(2, strategy, "contiguous", recipe=EXACT_FP32)
    got = np.asarray(both_passes(attend)(*given, bias)[5], np.float64)
    wanted, sizes = (
        reference.golden(*given, bias=bias, absolute=absolute).dbias
        for absolute in (False, True)
    )
    # FP32 sums of all terms, each of a few sums of H and S terms.
    small = (B * N * T + 4 * (H + S)) * 2.0**-24 * sizes
    bound = BF16.unit_roundoff * (np.abs(wanted) + small) + small
    assert (np.abs(got - wanted) <= bound).all()


def test_a_gradient_that_nobody_asks_for_takes_no_memory(fully_optimised):
    """XLA drops it, from the branches of causal masks, too."""
    length, heads = 256, 2
    query, key = ((1, length, n, H) for n in (heads, 1))
    query, key, bias = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in (query, key, (1, heads, length, length))
    )
    attend = sharded(4, "ring", "contiguous", is_causal=True)

    def temporaries(wanted):
        def loss(*inputs):
            return attend(*inputs)[0].sum()

        run = jax.jit(jax.grad(loss, wanted)).lower(query, key, key, bias)
        return run.compile().memory_analysis().temp_size_in_bytes

    of_device = 4 * bias.size // 4
    assert temporaries((0, 1, 2)) + of_device <= temporaries((0, 1, 2, 3))


# --------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "ring+ulysses"])
@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((B, N, T, S + 2), "bfloat16", r"must broadcast to \(2, 4, \d, 16\) axis by"),
        ((B, K, T, S), "bfloat16", "must broadcast to"),
        ((T, S), "bfloat16", "must broadcast to"),
        ((B, N, T, S), "int32", "must be floating, got int32; cast it"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    strategy, shape, dtype, says, as_users_call_it
):
    x = arrays(QUERY, KEY, jnp.bfloat16)[:3]
    bias = jnp.zeros(shape, dtype)
    shards = 4 if strategy == "ring+ulysses" else 2
    for in_turn in (False, strategy != "ring+ulysses"):
        with pytest.raises(ValueError, match=says) as caught:
            context_parallel.dot_product_attention(
                *(*x, bias), strategy=strategy, shards=shards, simulated=in_turn
            )
        assert "\n" not in str(caught.value)


def test_columns_are_keys_of_the_whole_sequence(as_users_call_it):
    x = arrays(QUERY, KEY, jnp.bfloat16)[:3]
    mesh = mesh_of(2, "ring")
    tokens = P(None, "ring")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False
    )
    def local(query, key, value):
        bias = jnp.zeros((1, 1, T // 2, S // 2))
        return context_parallel.attention(
            query, key, value, bias=bias, axis_name="ring"
        )[0]

    says = r"to \(2, 4, 4, 16\) axis by .* keys of the whole sequence\], got .*, 8\)"
    with pytest.raises(ValueError, match=says):
        local(*x)
