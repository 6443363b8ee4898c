"""A simulation has the devices' bits: own keys first or last, heads dealt, centres."""

import dataclasses
import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import context_parallel, emulator
from attn_jax.formats import BF16
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP64, RECIPES, Step
from tests.parallel_runs import ULYSSES, arrays, both_passes, exact, sharded, simulated

B, S, N, K, H = 2, 32, 4, 2, 4
QUERY, KEY = (B, S, N, H), (B, S, K, H)
W = 4
# As in `test_context_parallel`.
BOUND = 100 * B * S * N * 2.0**-53
SMALL = dict(block_kv=4, backward_block_kv=4)


def of(name: str, **changes):
    return dataclasses.replace(RECIPES[name], **SMALL, **changes)


@pytest.fixture(scope="module")
def given():
    """Keys have a mean, which dQ's centre is about."""
    q, k, v, dout, dlse = arrays(QUERY, KEY, jnp.bfloat16)
    return q, k + jnp.bfloat16(8), v, dout, dlse


@pytest.mark.ci
@pytest.mark.parametrize("name", ["flash2", "attn_jax"])
def test_sums_travel_in_16_bits_but_those_that_stay(name, given):
    """Own keys come first, and what they bring travels, or last, and it stays."""
    options = dict(is_causal=True, recipe=of(name), wire="16-bit")
    runs = (
        both_passes(how(W, "ring", "zigzag", **options)) for how in (sharded, simulated)
    )
    chex.assert_trees_all_equal(*(run(*given) for run in runs))


@pytest.mark.ci
def test_where_heads_are_dealt_a_head_has_a_shorter_ring(given):
    options = dict(is_causal=True, recipe=of("attn_jax"))
    devices = sharded(2, "ring+ulysses", "zigzag", **options)
    in_turn = simulated(2 * ULYSSES, "ring+ulysses", "zigzag", **options)
    want = both_passes(devices)(*given)
    chex.assert_trees_all_equal(both_passes(in_turn)(*given), want)
    longer = both_passes(simulated(2 * ULYSSES, "ring", "zigzag", **options))(*given)
    assert (longer[0] != want[0]).any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(shards=4, ulysses=3), "ulysses must divide the 4 devices"),
        (dict(shards=4, ulysses=0), "ulysses must divide the 4 devices"),
        (dict(shards=4, ulysses=4), "deals heads to 4 devices"),
        (dict(shards=12), "needs a multiple of 12 positions"),
    ],
)
def test_heads_that_cannot_be_dealt_are_refused_in_one_line(options, says):
    x = jnp.zeros((1, 30 if options["shards"] == 12 else 32, 2, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=says) as caught:
        context_parallel.simulate(x, x, x, strategy="ring+ulysses", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "layout"), [("ring", "zigzag"), ("all_gather", "contiguous")]
)
def test_one_centre_for_the_keys_of_all_devices(strategy, layout, x64):
    """Nothing rounds, so any c is right, if all parts and the end have the same."""
    q, k, v, dout, dlse = arrays(QUERY, KEY, jnp.float64)
    given = q, k + 8, v, dout, dlse
    recipe = dataclasses.replace(EXACT_FP64, dq_centre="keys", **SMALL)
    run = both_passes(sharded(W, strategy, layout, recipe=recipe, is_causal=True))
    want = exact(given, is_causal=True)
    # Terms of dQ and dK are ten times as large as of keys without a mean.
    chex.assert_trees_all_close(run(*given), want, rtol=10 * BOUND, atol=10 * BOUND)


def test_queries_of_two_devices_have_no_centre_together(x64):
    """A share has 8, fewer than a block: what rounding dS leaves is about its mean."""
    q, k, v, dout, dlse = arrays(QUERY, KEY, jnp.float64)
    given = q, k + 8, v, dout, dlse
    recipe = dataclasses.replace(
        EXACT_FP64, dq_centre="mean", dlogits=Step(BF16), backward_block_q=64, **SMALL
    )
    options = dict(is_causal=True, recipe=recipe)
    got = both_passes(simulated(W, "ring", "contiguous", **options))(*given)
    attend = functools.partial(
        emulator.attention,
        recipe=dataclasses.replace(recipe, ring_size=W),
        mask=Mask(is_causal=True),
    )
    want = both_passes(attend)(*given)
    chex.assert_trees_all_close(got[2], want[2], rtol=BOUND, atol=10 * BOUND)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["attn_jax_hopper", "attn_jax_ampere"])
def test_keys_that_are_centred_give_dq_as_the_emulators_ring_does(name, given):
    """dS and K' of a part are scaled by powers of two of its own, as kernels have them,
    which changes no bit of numbers in range, and none of sums of whole numbers."""
    recipe = of(name, ring_merge="carry_whole")
    options = dict(is_causal=True, recipe=recipe)
    got = both_passes(simulated(W, "ring", "contiguous", **options))(*given)
    devices = both_passes(sharded(W, "ring", "contiguous", **options))(*given)
    chex.assert_trees_all_equal(got, devices)
    attend = functools.partial(
        emulator.attention,
        recipe=dataclasses.replace(recipe, ring_size=W),
        mask=Mask(is_causal=True),
    )
    want = both_passes(attend)(*given)
    # LSE is made in arrays of another shape: the last ulps of a log are free. They lie
    # 16 bits below dQ's, so one number in thousands is near enough to a tie.
    assert np.mean(np.asarray(got[2] == want[2])) > 0.99
    without = both_passes(
        simulated(
            W,
            "ring",
            "contiguous",
            is_causal=True,
            recipe=dataclasses.replace(ATTN_JAX, dq_centre="none", **SMALL),
        )
    )(*given)
    assert np.mean(np.asarray(without[2] == want[2])) < 0.9
