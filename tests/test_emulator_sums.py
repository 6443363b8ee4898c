"""Sums that a narrow accumulator rounds on their way, alone and inside the emulator."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import emulator
from attn_jax.audit.error import correctly_rounded
from attn_jax.emulator import sums
from attn_jax.formats import BF16, NumberFormat, round_to
from attn_jax.recipe import EXACT_FP32, FLASH2, Step

KEEP = lambda total, start: round_to(total, BF16)  # noqa: E731
E8M2 = NumberFormat("e8m2", 8, 2, 2.0**127)


def bf16(x):
    return correctly_rounded(np.asarray(x, np.float64), BF16)


def chain(products, chunk):
    """The definition: products [n, ...] summed along n in runs, each sum rounded."""
    total = np.zeros(products.shape[1:])
    for start in range(0, len(products), chunk or len(products)):
        run = products[start : start + (chunk or len(products))]
        total = bf16(total + run.sum(0))
    return total


def whole_numbers(seed, *shape):
    # Products and their sums stay below 2^24: exact in float32, whatever the order.
    return np.random.default_rng(seed).integers(-40, 90, shape).astype(np.float32)


@pytest.mark.parametrize("chunk", [None, 1, 4, 5, 30])
def test_a_chained_product_is_bit_equal_to_its_definition(chunk):
    x, y = whole_numbers(0, 3, 7, 22), whole_numbers(1, 3, 5, 22)
    run = jax.jit(lambda x, y: sums.dot("bth,bsh->bts", x, y, chunk, KEEP))
    products = x[:, :, None, :] * y[:, None, :, :]
    want = chain(np.moveaxis(products, -1, 0), chunk)
    np.testing.assert_array_equal(run(jnp.asarray(x), jnp.asarray(y)), want)
    # A sum rounded nowhere is another: the test can fail.
    assert (want != products.sum(-1)).any()


@pytest.mark.parametrize("chunk", [1, 4])
def test_two_contracted_axes_are_one_with_the_first_slowest(chunk):
    x, y = whole_numbers(0, 2, 3, 6, 5), whole_numbers(1, 2, 3, 6, 4)
    got = sums.dot("kgts,kgth->ksh", jnp.asarray(x), jnp.asarray(y), chunk, KEEP)
    products = x[..., :, None] * y[..., None, :]  # [k, g, t, s, h]
    products = products.reshape(2, 18, 5, 4).swapaxes(0, 1)
    np.testing.assert_array_equal(got, chain(products, chunk))
    swapped = np.moveaxis(x[..., :, None] * y[..., None, :], (2, 1), (0, 1))
    swapped = swapped.reshape(18, 2, 5, 4)
    assert (chain(swapped, chunk) != got).any()


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_a_chained_row_sum_is_bit_equal_to_its_definition(chunk):
    x = whole_numbers(0, 6, 50)
    got = sums.row_sum(jnp.asarray(x), chunk, KEEP)
    np.testing.assert_array_equal(got[:, 0], chain(x.T, chunk))


@pytest.mark.parametrize(("chunk", "counted"), [(1, 256), (8, 300), (None, 300)])
def test_a_narrow_row_sum_stagnates(chunk, counted):
    """301 keys of equal weight: BF16 counts in steps of 1 up to 256, then of 2."""
    recipe = dataclasses.replace(
        EXACT_FP32,
        block_kv=None,
        dot_accumulator=Step(BF16),
        dot_chunk=chunk,
        rowsum_accumulator=Step(BF16),
    )
    q, k = jnp.ones((1, 1, 1, 4)), jnp.zeros((1, 301, 1, 4))
    out, lse = emulator.attention(q, k, jnp.ones_like(k), recipe=recipe)
    # 256 + 1 is a tie and falls back for ever. 301, or 296 + 5 after 37 chunks of 8, is
    # a tie of 300 and 302 and goes to 300, whose mantissa is even.
    np.testing.assert_allclose(lse, np.log(counted), rtol=2.0**-22)
    # The product stagnates with the sum, so that V = 1 gives 1 all the same.
    np.testing.assert_array_equal(out, jnp.ones_like(out))


@pytest.mark.parametrize("narrow", ["dot_accumulator", "rowsum_accumulator"])
def test_products_and_row_sums_have_accumulators_of_their_own(narrow):
    recipe = dataclasses.replace(
        EXACT_FP32, block_kv=None, dot_chunk=1, **{narrow: Step(BF16)}
    )
    q, k = jnp.ones((1, 1, 1, 4)), jnp.zeros((1, 301, 1, 4))
    out, lse = emulator.attention(q, k, jnp.ones_like(k), recipe=recipe)
    products, row_sum = (256, 301) if narrow == "dot_accumulator" else (301, 256)
    np.testing.assert_allclose(lse, np.log(row_sum), rtol=2.0**-22)
    np.testing.assert_allclose(out, products / row_sum, rtol=2.0**-22)


@pytest.mark.parametrize(("chunk", "delta_source"), [(None, "p_dp"), (3, "o")])
def test_the_accumulator_is_felt_in_every_result(chunk, delta_source):
    rng = np.random.default_rng(0)
    shapes = (1, 6, 4, 8), (1, 10, 2, 8), (1, 10, 2, 8), (1, 6, 4, 8)
    *args, dout = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)

    def results(recipe):
        run = functools.partial(emulator.attention, recipe=recipe)
        (out, lse), pull = jax.vjp(run, *args)
        return out, lse, *pull((dout, jnp.zeros_like(lse)))

    base = dataclasses.replace(FLASH2, delta_source=delta_source, block_kv=5)
    narrow = dataclasses.replace(base, dot_accumulator=Step(E8M2), dot_chunk=chunk)
    with jax.disable_jit():
        for a, b in zip(results(base), results(narrow), strict=True):
            assert (a != b).mean() > 0.5


def test_a_carrier_wide_accumulator_is_one_plain_product():
    """A chunk means nothing where nothing is rounded: the program is the same."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16)

    def program(recipe):
        run = functools.partial(emulator.attention, recipe=recipe)
        return str(jax.make_jaxpr(run)(x, x, x))

    recipe = dataclasses.replace(FLASH2, block_kv=None)
    plain = program(recipe)
    assert plain.count("dot_general") == 2 and "scan" not in plain
    chunked = dataclasses.replace(recipe, dot_chunk=8)
    assert program(chunked).count("dot_general") == 2
    narrow = dataclasses.replace(chunked, dot_accumulator=Step(BF16))
    assert "scan" in program(narrow)
