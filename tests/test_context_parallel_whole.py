"""Context parallelism of whole arrays, with the arguments of jax.nn's attention."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import context_parallel, reference
from attn_jax.mask import Mask
from attn_jax.recipe import EXACT_FP64
from tests.parallel_runs import arrays, both_passes, exact

pytestmark = pytest.mark.ci

B, T, S, N, K, H = 2, 16, 32, 4, 2, 4
QUERY, KEY = (B, T, N, H), (B, S, K, H)
# As in `test_context_parallel`.
BOUND = 100 * B * T * N * 2.0**-53
LENGTHS = jnp.asarray([11, 16], jnp.int32), jnp.asarray([32, 5], jnp.int32)
IDS = tuple(
    jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) // 7 - 3, (B, length))
    for length in (T, S)
)


def attend(**options):
    def of(query, key, value, bias=None):
        out, lse = context_parallel.dot_product_attention(
            query, key, value, bias, return_residual=True, **options
        )
        return out, lse.swapaxes(1, 2)

    return of


LAST = "query_seq_lengths", "key_value_seq_lengths"
NAMES = "query_segment_ids", "key_value_segment_ids"


@pytest.mark.parametrize("rows", [T, 1])
@pytest.mark.parametrize(
    ("strategy", "simulated"), [("ring", True), ("ulysses", False)]
)
def test_it_takes_a_bias(strategy, simulated, rows, x64):
    given = arrays(QUERY, KEY, jnp.float64)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((1, N, rows, S)))
    options = dict(strategy=strategy, layout="zigzag", shards=2, simulated=simulated)
    run = both_passes(attend(recipe=EXACT_FP64, **options))
    chex.assert_trees_all_close(
        run(*given, bias), exact(given, bias), rtol=BOUND, atol=BOUND
    )


@pytest.mark.parametrize(
    ("strategy", "layout", "shards", "rules"),
    [
        ("ring", "zigzag", 2, dict(zip(LAST + NAMES, LENGTHS + IDS))),
        ("ring+ulysses", "zigzag", 4, dict(zip(LAST[1:], LENGTHS[1:]))),
        ("ulysses", "contiguous", 2, dict(zip(NAMES, IDS))),
        ("all_gather", "striped", 4, dict(zip(LAST[:1], LENGTHS[:1]))),
    ],
)
def test_it_is_attention(strategy, layout, shards, rules, x64):
    given = arrays(QUERY, KEY, jnp.float64)
    names = {
        "query_seq_lengths": "query_lengths",
        "key_value_seq_lengths": "key_value_lengths",
    }
    of_mask: dict[str, Any] = {
        names.get(str(name), str(name)): x for name, x in rules.items()
    }
    mask = Mask(is_causal=True, **of_mask)
    q, k, v, dout, dlse = given
    wanted = reference.golden(q, k, v, dout, dlse, mask=mask)[:5]
    more = dict(strategy=strategy, layout=layout, shards=shards, is_causal=True)
    run = both_passes(attend(recipe=EXACT_FP64, **more, **rules))
    chex.assert_trees_all_close(run(*given), wanted, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(("strategy", "shards"), [("ring", 2), ("ring+ulysses", 4)])
def test_devices_in_turn_give_the_same_bits(strategy, shards):
    given = arrays(QUERY, KEY, jnp.bfloat16)
    options = dict(strategy=strategy, layout="zigzag", shards=shards, is_causal=True)
    on_devices = both_passes(attend(**options))(*given)
    in_turn = both_passes(attend(simulated=True, **options))(*given)
    chex.assert_trees_all_equal(on_devices, in_turn)


def test_all_devices_are_taken_and_out_may_come_alone():
    given = arrays(QUERY, KEY, jnp.bfloat16)[:3]
    out = jax.jit(context_parallel.dot_product_attention)(*given)
    assert out.shape == QUERY and len(out.sharding.device_set) == jax.device_count()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(mask=np.ones((1, N, T, S), bool)), NotImplementedError, "takes no mask"),
        (dict(shards=9), ValueError, "from 1 to the 8 devices .* got 9; simulated"),
        (dict(simulated=True), ValueError, "takes the number of shards"),
        (dict(shards=3), NotImplementedError, "needs a multiple of 3 positions"),
        (dict(strategy="ulysses"), NotImplementedError, "deals heads to 8 devices"),
        (
            dict(strategy="ring+ulysses", ulysses=3),
            ValueError,
            "ulysses must divide the 8 devices",
        ),
        (dict(query_segment_ids=IDS[0]), ValueError, "must be given together"),
        (
            dict(query_segment_ids=IDS[0], query_seq_lengths=LENGTHS[0]),
            ValueError,
            "must be given together",
        ),
    ],
)
def test_bad_arguments_are_said_in_one_line(options, error, says):
    given = arrays(QUERY, KEY, jnp.bfloat16)[:3]
    with pytest.raises(error, match=says) as raised:
        context_parallel.dot_product_attention(*given, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(layout="snake"), "layout must be one of"),
        (dict(strategy="star"), "strategy must be one of"),
    ],
)
def test_names_that_do_not_exist_are_refused(options, says, as_users_call_it):
    given = arrays(QUERY, KEY, jnp.bfloat16)[:3]
    with pytest.raises(ValueError, match=says):
        context_parallel.dot_product_attention(*given, **options)
