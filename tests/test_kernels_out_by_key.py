"""Hopper's forward kernel where out leaves by way of the last block of K."""

import dataclasses
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.formats import BF16
from attn_jax.kernels import design, schedule, tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention, declared_recipe
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.tilings import ForwardTiling
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX
from attn_jax.reference import golden
from tests.child_process import in_child_process

TIME_LIMIT = 180
SCALE = 128**-0.5
CAUSAL = Mask(is_causal=True)


def _table(mask: Mask, keys: int, **options) -> tuning.Configuration:
    return design.configuration_of("hopper", 128, 128, keys, mask, **options)


def _inputs(queries: int, keys: int):
    return make_inputs("offset", 0, Shape(1, queries, keys, 2, 1, 128))


def _results(tiling: ForwardTiling, queries: int, keys: int, mask: Mask, races=False):
    """out, LSE and the gradients, all tiles in one CTA after each other."""
    *qkv, dout = _inputs(queries, keys)
    own = _table(mask, keys)._replace(forward=tiling)

    def both(*qkv):
        found, pull = jax.vjp(
            lambda *qkv: attention(*qkv, scale=SCALE, mask=mask, tilings=own), *qkv
        )
        return *found, *pull((dout, np.zeros(found[1].shape, np.float32)))

    with (
        patch.object(schedule, "H100_MULTIPROCESSORS", 1),
        made_for("hopper"),
        interpreted(detect_races=races),
    ):
        return jax.device_get(jax.jit(both)(*qkv))


def _both_ways(tiling: ForwardTiling, *problem):
    by_buffer = dataclasses.replace(tiling, out_by_key=False)
    ways = tiling, by_buffer
    return [_results(way, *problem, races=way.out_by_key) for way in ways]


@pytest.mark.parametrize(
    ("tiling", "mask"),
    [
        pytest.param(
            ForwardTiling(64, 128, 2, 3, q_registers=True, out_by_key=True),
            Mask(),
            marks=pytest.mark.ci,
        ),
        (ForwardTiling(64, 128, 2, 2, out_by_key=True), CAUSAL),
    ],
    ids=["full", "causal"],
)
def test_the_way_that_out_takes_is_not_in_its_bits(tiling, mask):
    """And no warpgroup writes where another one, or TMA, still reads. Of 400 queries
    the last tile has one warpgroup that has no rows."""
    problem = 400, 400, mask
    found = in_child_process(_both_ways, tiling, *problem, seconds=TIME_LIMIT)
    for by_key, by_buffer in zip(*found, strict=True):
        assert by_key.tobytes() == by_buffer.tobytes()


@pytest.mark.ci
def test_long_blocks_of_the_table_are_as_exact_as_short_ones():
    """1.7 units, as in tests/test_kernels_interpret.py; the sequence ends in the midst
    of a block, and the queries in the midst of a tile."""
    mask, queries, keys = Mask(), 300, 1600
    tiling = _table(mask, keys, query_count=queries).forward
    assert isinstance(tiling, ForwardTiling) and tiling.out_by_key
    *found, lse = _in_order(
        in_child_process(_results, tiling, queries, keys, mask, seconds=TIME_LIMIT)
    )
    exact = golden(*_inputs(queries, keys), scale=SCALE, mask=mask)
    wanted = exact.out, exact.dquery, exact.dkey, exact.dvalue
    for got, want in zip(found, wanted, strict=True):
        assert unit_error(got, want, BF16) <= 1.7
    np.testing.assert_allclose(lse, exact.lse, rtol=2**-20, atol=2**-20)


def _in_order(results):
    out, lse, *gradients = results
    return out, *gradients, lse


@pytest.mark.parametrize(
    "options",
    [
        {"mask": Mask(window=(500, 0))},
        {"mask": Mask(key_value_lengths=np.array([1700]))},
        {"has_bias": True},
    ],
    ids=str,
)
def test_only_what_has_all_keys_in_blocks_it_counts_has_long_ones(options):
    """Lists take registers that long blocks do not leave; under a window warpgroups of
    a tile do not see the same last block."""
    plain = _table(Mask(), 4096).forward
    assert plain.columns == 192
    found = _table(**{"mask": Mask(), "keys": 4096} | options).forward
    assert found.columns == 128 and not getattr(found, "out_by_key", False)


def test_lazy_rescaling_has_short_blocks():
    """And what the emulator is told of it is the same."""
    lazy = dataclasses.replace(ATTN_JAX, rescale_threshold=8.0)
    for recipe, columns in ((None, 192), (lazy, 128)):
        problem = {"key_length": 4096, "head_dim": 128, "target": "hopper"}
        assert declared_recipe("bfloat16", **problem, recipe=recipe).block_kv == columns
    x = jnp.zeros((1, 4096, 1, 128), "bfloat16")
    with (
        made_for("hopper"),
        patch.object(
            design, "configuration_of", wraps=design.configuration_of
        ) as asked,
    ):
        jax.eval_shape(lambda: attention(x, x, x, scale=1.0, recipe=lazy))
    assert asked.call_args.kwargs["short_blocks"]


@pytest.mark.parametrize("head_dims", [(64, 128), (128, 32)])
def test_v_of_its_own_head_dim_has_a_place_for_out(head_dims):
    """The table had the tiling of head dim 128 for it, with out of K's width."""
    query, value = (jnp.zeros((1, 2048, 1, dim), "bfloat16") for dim in head_dims)
    with made_for("hopper"):
        out, _ = jax.eval_shape(lambda: attention(query, query, value, scale=1.0))
    assert out.shape == value.shape
    found = design.configuration_of("hopper", *head_dims, 2048, Mask()).forward
    assert not getattr(found, "out_by_key", False)


def test_parts_of_a_sequence_have_blocks_that_divide_them():
    part = tuning.configuration(
        *("hopper", 128, 128, 4096), is_causal=False, listed=False, short_blocks=True
    )
    assert 4096 % part.forward.columns == 0
