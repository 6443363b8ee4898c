"""Sums that a narrow accumulator rounds on their way, alone and inside the emulator."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import emulator
from attn_jax.audit.error import correctly_rounded
from attn_jax.emulator import sums
from attn_jax.formats import BF16, FP16, FP32, FP64, NumberFormat, Rounding, round_to
from attn_jax.recipe import EXACT_FP32, FLASH2, Step, on_tensor_cores

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


# ------------------------------------------------------------------ tensor cores


def cut(y: Fraction, exponent: int) -> Fraction:
    """y cut off toward zero to a multiple of 2**exponent."""
    unit = Fraction(2) ** exponent
    whole = abs(y) // unit * unit
    return whole if y > 0 else -whole


def on_cores(x, y, chunk: int, bits: int, fmt: NumberFormat) -> float:
    """x . y by the definition, with numbers of Python: FP32 sums, operands in `fmt`."""

    def exponent(z: float, fmt: NumberFormat) -> int:
        return max(math.frexp(z)[1] - 1, fmt.min_exponent)

    total = 0.0
    for i in range(0, len(x), chunk):
        run = list(zip(x[i : i + chunk], y[i : i + chunk]))
        exponents = [exponent(a, fmt) + exponent(b, fmt) for a, b in run if a * b]
        if total:
            exponents.append(exponent(total, FP32))
        if exponents:
            lowest = max(exponents) - bits
            addends = [Fraction(total), *(Fraction(a) * Fraction(b) for a, b in run)]
            exact = sum(cut(z, lowest) for z in addends)
            total = float(cut(exact, exponent(float(exact), FP32) - 23))
    return total


def aligned(x, y, chunk, bits, fmt=BF16, kept=FP32):
    """[m, n] and [k, n] to [m, k], by the emulator."""
    keep = lambda total, start: round_to(total, kept, Rounding.TOWARD_ZERO)  # noqa: E731
    exponents = fmt.min_exponent, fmt.min_exponent, kept.min_exponent
    alignment = sums.Alignment(bits, *exponents)

    def run(x, y):
        return sums.dot("th,sh->ts", x, y, chunk, keep, alignment)

    return np.asarray(jax.jit(run)(*(jnp.asarray(z, jnp.float64) for z in (x, y))))


E = 2.0**-26
KNOWN = {
    # (x, y, bits, sum): in runs of 4.
    "below the last bit": ([1, E], [1, 1.125], 25, 1.0),
    "many below the last bit": ([1, E, E, E], [1, 1.5, 1.5, 1.5], 25, 1.0),
    "above the last bit": ([1, E, -1, 0], [1, 1.125, 1, 0], 26, E),
    "toward zero": ([-1, -E, 1, 0], [1, 1.75, 1, 0], 26, -E),
    # 2.25 counts as 2^0, not as 2^1: two bits more than FP32 has are kept.
    "not normalised": ([1.5, -1.5, 2.0**-24, 0], [1.5, 1.5, 1, 0], 24, 2.0**-24),
    "normalised": ([2, -2, 2.0**-24, 0], [1.125, 1.125, 1, 0], 24, 0.0),
    "cancellation": ([2.0**20, 2.0**-6, -(2.0**20), 0], [1, 1, 1, 0], 25, 0.0),
    "cancellation, a bit more": (
        *([2.0**20, 2.0**-6, -(2.0**20), 0], [1, 1, 1, 0]),
        *(26, 2.0**-6),
    ),
    # The running sum of the first run counts in the second.
    "a large sum": ([2.0**20, 0, 0, 0, -(2.0**20), 2.0**-6], [1] * 6, 25, 0.0),
    "the sum itself is cut": ([E, 0, 0, 0, 1, -1], [1.5] + [1] * 5, 26, E),
    # 0 times a large number does not count; nor does a sum of 0.
    "zeros": (
        [2.0**20, -(2.0**20), 0, 0, 2.0**-20, 0],
        [1] * 5 + [2.0**20],
        25,
        2**-20,
    ),
    "nothing": ([0, 0], [2.0**20, 0], 25, 0.0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_sums_of_tensor_cores_known_by_hand(name, x64):
    x, y, bits, want = KNOWN[name]
    assert aligned([x], [y], 4, bits)[0, 0] == want
    assert on_cores(x, y, 4, bits, BF16) == want


def test_subnormal_operands_have_the_least_exponent(x64):
    # 2^-24 counts as 2^-14, so that with ten bits nothing below 2^-24 is left.
    x, y = [2.0**-24, 2.0**-26], [1, 1]
    assert aligned([x], [y], 2, 10, FP16)[0, 0] == 2.0**-24
    assert aligned([x], [y], 2, 10, BF16)[0, 0] == 2.0**-24 + 2.0**-26


@pytest.mark.parametrize("fmt", [BF16, FP16])
@pytest.mark.parametrize(("chunk", "bits"), [(8, 24), (16, 25), (5, 13)])
def test_sums_of_tensor_cores_are_bit_equal_to_fractions(chunk, bits, fmt, x64):
    rng = np.random.default_rng(0)

    def numbers(rows):
        x = rng.standard_normal((rows, 52)) * 2.0 ** rng.integers(-16, 3, (rows, 52))
        x[rng.random(x.shape) < 0.1] = 0
        return correctly_rounded(x, fmt)

    x, y = numbers(7), numbers(6)
    want = [[on_cores(a, b, chunk, bits, fmt) for b in y.tolist()] for a in x.tolist()]
    got = aligned(x, y, chunk, bits, fmt)
    np.testing.assert_array_equal(got, want)
    for other in (aligned(x, y, chunk, 40, fmt), aligned(x, y, chunk, bits - 1, fmt)):
        assert (got != other).mean() > 0.2


def test_cut_addends_need_no_rounded_sum(x64):
    """Two runs, each of which cuts, in an accumulator as wide as the carrier."""
    ones, small = jnp.ones((1, 2, 1, 2)), jnp.asarray([1, 2.0**-11])
    recipe = on_tensor_cores(EXACT_FP32.replace_format(FP32, FP64), "ampere")
    recipe = dataclasses.replace(
        recipe, dot_accumulator=Step(FP64), dot_alignment=10, inputs=BF16
    )
    _, lse = emulator.attention(ones * small, ones, ones, scale=1.0, recipe=recipe)
    np.testing.assert_allclose(lse, 1 + np.log(2), rtol=2.0**-50)
