"""Rounding against ml_dtypes, gfloat and exact fractions, always under jit."""

import fractions
import functools

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from attn_jax import formats
from attn_jax.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FP16,
    FP32,
    FP64,
    TF32,
    Rounding,
    number_format,
    round_to,
)

DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
NARROW = {name: formats.FORMATS[name] for name in DTYPES}
GFLOAT = {
    "bf16": gfloat.formats.format_info_bfloat16,
    "fp16": gfloat.formats.format_info_binary16,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def jitted(x, fmt, rounding=Rounding.NEAREST_EVEN, key=None):
    return round_to(x, fmt, rounding, key=key)


def bits(x):
    x = np.asarray(x)
    return x.view({4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same(got, want):
    """Bit-equal, signed zeros included; one NaN is as good as another."""
    got, want = np.asarray(got), np.asarray(want)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


def every_decision(name, dtype):
    """Each value of a format, each midpoint of neighbours, and both sides of those.

    Rounding is monotone and constant between these points, so they cover it whole;
    plus what lies beyond the range. Exact in the wider `dtype`.
    """
    size = 8 * np.dtype(DTYPES[name]).itemsize
    codes = np.arange(2**size, dtype=f"uint{size}")
    with np.errstate(invalid="ignore"):  # signalling NaN codes
        values = codes.view(DTYPES[name]).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    above = values[-1] + (values[-1] - values[-2])
    values = np.concatenate([[-above], values, [above]])
    middle = (values[1:] + values[:-1]) / 2
    with np.errstate(over="ignore"):
        points = np.concatenate([values, middle]).astype(dtype)
        up, down = np.nextafter(points, np.inf), np.nextafter(points, -np.inf)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30], dtype)
    return np.concatenate([points, up, down, special.astype(dtype)])


@pytest.mark.parametrize("name", NARROW)
def test_every_rounding_from_float32_is_that_of_ml_dtypes(name):
    x = every_decision(name, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(DTYPES[name]).astype(np.float32)
    assert_same(jitted(x, NARROW[name]), want)


@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO])
@pytest.mark.parametrize("name", NARROW)
def test_every_rounding_from_float64_is_that_of_gfloat(name, rounding, x64):
    x = every_decision(name, np.float64)
    x = x[np.isfinite(x)]
    mode = {
        Rounding.NEAREST_EVEN: gfloat.RoundMode.TiesToEven,
        Rounding.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
    }[rounding]
    inside = np.abs(x) <= NARROW[name].max_finite  # beyond it policies differ
    want = gfloat.round_ndarray(GFLOAT[name], x[inside], mode)
    assert_same(jitted(x, NARROW[name], rounding)[inside], want)


def by_fractions(value: float, fmt, rounding) -> float:
    """Rounding by exact rational arithmetic; a finite value that does not overflow."""
    exact = fractions.Fraction(value)
    exponent = max(np.frexp(value)[1] - 1, fmt.min_exponent)
    spacing = fractions.Fraction(2) ** (int(exponent) - fmt.mantissa_bits)
    steps = exact / spacing
    whole = round(steps) if rounding is Rounding.NEAREST_EVEN else int(steps)
    return float(np.copysign(float(whole * spacing), value))


@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO])
@pytest.mark.parametrize(
    "fmt",
    [
        BF16,
        FP16,
        FP32,
        TF32,
        *(number_format(e, m) for e, m in ((2, 1), (5, 7), (6, 40))),
    ],
    ids=lambda fmt: fmt.name,
)
def test_float64_values_round_as_fractions_do(fmt, rounding, x64):
    rng = np.random.default_rng(0)
    low, high = fmt.min_exponent - fmt.mantissa_bits - 3, -fmt.min_exponent
    x = rng.uniform(1, 2, 400) * 2.0 ** rng.integers(low, high, 400)
    # Ties, broken by one last bit: the inputs on which rounding twice goes wrong.
    steps = rng.integers(2**fmt.mantissa_bits, 2 ** (fmt.mantissa_bits + 1), 50) + 0.5
    tie = steps * 2.0**-fmt.mantissa_bits
    x = np.concatenate([x, tie, np.nextafter(tie, 2), np.nextafter(tie, 1), [-1.25]])
    want = np.array([by_fractions(value, fmt, rounding) for value in x])
    assert_same(jitted(x, fmt, rounding), want)


def test_no_double_rounding_from_float64(x64):
    # 1 + 2^-8 is a tie of BF16; the last term puts it above, but not in float32.
    x = np.array([1 + 2.0**-8 + 2.0**-30])
    assert jitted(x, BF16)[0] == 1 + 2.0**-7
    assert x.astype(np.float32).astype(ml_dtypes.bfloat16)[0] == 1.0


def test_formats_as_wide_as_the_carrier_change_nothing(x64):
    x = np.random.default_rng(0).standard_normal(100)
    assert_same(jitted(x.astype(np.float32), FP32), x.astype(np.float32))
    assert_same(jitted(x, FP64), x)
    assert_same(jitted(x, FP32), x.astype(np.float32).astype(np.float64))


def test_tf32_and_bf16_agree_with_reduce_precision():
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 1e3
    assert_same(jitted(x, BF16), lax.reduce_precision(x, 8, 7))
    assert_same(jitted(x, TF32), lax.reduce_precision(x, 8, 10))


def test_overflow_policies():
    x = np.array([448, 464, 465, -1e9, np.inf, np.nan], np.float32)
    plain = np.array([448, 448, np.nan, np.nan, np.nan, np.nan], np.float32)
    clamped = np.array([448, 448, 448, -448, 448, np.nan], np.float32)
    assert_same(jitted(x, E4M3FN), plain)
    assert_same(jitted(x, E4M3FN.saturating()), clamped)
    x = np.array([61439, 61440, -1e9, np.inf], np.float32)
    assert_same(jitted(x, E5M2), np.array([57344, np.inf, -np.inf, np.inf], np.float32))
    toward_zero = np.array([57344, 57344, -57344, np.inf], np.float32)
    assert_same(jitted(x, E5M2, Rounding.TOWARD_ZERO), toward_zero)


def test_without_subnormals_small_results_are_signed_zeros():
    fmt = formats.NumberFormat("e5m2_flushed", 5, 2, 57344.0, has_subnormals=False)
    x = np.array([2.0**-14, 2.0**-15, -(2.0**-16), 0.99 * 2.0**-14], np.float32)
    # The last one rounds up to the smallest normal number before anything is flushed.
    want = np.array([2.0**-14, 0.0, -0.0, 2.0**-14], np.float32)
    assert_same(jitted(x, fmt), want)


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3FN], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(fmt):
    n = 20_000
    values = [1.003, -0.7211, 3.3 * fmt.min_normal, 1.0]
    if fmt is not BF16:  # subnormal in the format, normal in the carrier
        values += [k * fmt.min_positive for k in (1.3, 0.6, 0.2, -0.01)]
    for index, value in enumerate(np.float32(values)):
        x = np.full(n, value, np.float32)
        got = jitted(x, fmt, Rounding.STOCHASTIC, jax.random.key(index))
        got = np.asarray(got, np.float64)
        low = by_fractions(float(value), fmt, Rounding.TOWARD_ZERO)
        seen = np.unique(got)
        assert len(seen) == (1 if low == value else 2) and low in seen
        # A neighbour is one spacing away; five standard deviations of a binomial mean.
        spacing = np.ptp(seen)
        share = abs(value - low) / spacing if spacing else 0.0
        sigma = spacing * (share * (1 - share) / n) ** 0.5
        assert abs(got.mean() - value) <= 5 * sigma


def test_the_compiler_drops_no_rounding():
    """Canary: exact small-integer products, so only a lost rounding can change them."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-64, 65, (64, 64)).astype(np.float32) for _ in range(2))

    @jax.jit
    def fused(a, b):
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        s = jnp.dot(a, b, preferred_element_type=jnp.float32)
        r = round_to(s, BF16)
        return s - r, jnp.maximum(r, 0) + round_to(r * 3, BF16)

    s = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.float32)
    r = s.astype(ml_dtypes.bfloat16).astype(np.float32)
    tripled = (r * 3).astype(ml_dtypes.bfloat16).astype(np.float32)
    lost, used = fused(a, b)
    assert (s != r).any()
    np.testing.assert_array_equal(lost, s - r)
    np.testing.assert_array_equal(used, np.maximum(r, 0) + tripled)


def test_derived_properties():
    assert (FP16.min_normal, FP16.min_positive) == (2.0**-14, 2.0**-24)
    assert (FP16.max_finite, E5M2.max_finite, E4M3FN.max_finite) == (65504, 57344, 448)
    assert (BF16.unit_roundoff, FP64.unit_roundoff) == (2.0**-8, 2.0**-53)
    # The RMS roundoff is that of log-uniform numbers: 10^5 draws know it to 1 %.
    x = np.float32(2.0 ** np.random.default_rng(0).uniform(0, 8, 100_000))
    error = np.asarray(jitted(x, BF16)) / x - 1
    np.testing.assert_allclose(np.sqrt(np.mean(error**2)), BF16.rms_roundoff, rtol=0.01)
    assert number_format(8, 7).max_finite == float(ml_dtypes.finfo("bfloat16").max)
    assert formats.carrier_dtype(TF32) == np.float32
    assert formats.carrier_dtype(number_format(9, 3)) == np.float64


def test_misuse_is_refused():
    x = jnp.ones(3)
    with pytest.raises(TypeError, match="float32 or float64"):
        round_to(x.astype(jnp.bfloat16), BF16)
    with pytest.raises(TypeError, match="does not hold e5m30"):
        round_to(x, number_format(5, 30))
    with pytest.raises(TypeError, match="no derivative"):
        jax.grad(lambda x: round_to(x, BF16).sum())(x)
    with pytest.raises(ValueError, match="takes a key"):
        round_to(x, BF16, Rounding.STOCHASTIC)
    with pytest.raises(ValueError, match="takes a key"):
        round_to(x, BF16, key=jax.random.key(0))
    with pytest.raises(ValueError, match="2 to 11 exponent bits"):
        number_format(1, 3)


@pytest.mark.usefixtures("as_users_call_it")
def test_round_to_refuses_what_it_would_get_wrong():
    x = jnp.ones(3, jnp.float32)
    with pytest.raises(TypeError, match="Rounding"):
        # By name it would count as truncation.
        formats.round_to(x, BF16, "nearest_even")  # pyright: ignore
    with pytest.raises(TypeError, match="fp32 carrier"):
        formats.round_to(x, formats.number_format(11, 2))
