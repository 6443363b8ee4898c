"""Input families and the unit of error."""

import ml_dtypes
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.error import (
    DIRECTIONALITY_NULL_95,
    correctly_rounded,
    measure,
    signed_bias,
    unit,
    unit_error,
    yardstick,
)
from attn_jax.audit.inputs import FAMILIES, Shape, make_inputs
from attn_jax.formats import BF16, E4M3FN, E5M2, FP16, FP32

SHAPE = Shape(2, 24, 40, 4, 2, 16)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_deterministic_finite_and_of_the_asked_type(family, dtype):
    first, again = (make_inputs(family, 5, SHAPE, dtype) for _ in range(2))
    other = make_inputs(family, 6, SHAPE, dtype)
    assert first.query.shape == first.dout.shape == (2, 24, 4, 16)
    assert first.key.shape == first.value.shape == (2, 40, 2, 16)
    for x, y in zip(first, again):
        assert x.dtype == dtype and np.isfinite(x.astype(np.float32)).all()
        np.testing.assert_array_equal(x, y)
    assert (first.query != other.query).any()


def test_a_draw_never_changes():
    # Published figures rest on these numbers; NumPy guarantees Philox's bit stream.
    query = make_inputs("normal", 0, SHAPE).query
    np.testing.assert_array_equal(
        query[0, 0, 0, :3].astype(np.float32), [-0.2060546875, -0.12890625, -0.2890625]
    )


def test_families_have_the_property_they_are_named_for():
    shape = Shape(1, 256, 256, 2, 2, 128)
    lse = {}
    for family in ("lse-130", "sink"):
        i = make_inputs(family, 0, shape)
        lse[family] = reference.golden(*i).lse
    # 40 * -40 / sqrt(128) = -141.4, plus log 256 = 5.5.
    assert abs(lse["lse-130"].mean() + 135.9) < 1
    i = make_inputs("sink", 0, shape)
    logit = np.einsum(
        "bthd,bhd->bht", *(x.astype(float) for x in (i.query, i.key[:, 0]))
    )
    share = np.exp(logit * 128**-0.5 - lse["sink"])
    assert np.median(share) > 0.5
    with pytest.raises(ValueError, match="no input family 'gaussian'"):
        make_inputs("gaussian", 0, shape)


def test_numpy_rounding_is_that_of_ml_dtypes():
    x = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    x = (x * 2.0 ** np.random.default_rng(1).integers(-30, 18, x.size)).astype(
        np.float32
    )
    for fmt, dtype in (
        (BF16, ml_dtypes.bfloat16),
        (FP16, np.float16),
        (E5M2, ml_dtypes.float8_e5m2),
        (E4M3FN, ml_dtypes.float8_e4m3fn),
    ):
        with np.errstate(over="ignore"):
            want = x.astype(dtype).astype(np.float64)
        np.testing.assert_array_equal(
            correctly_rounded(x.astype(np.float64), fmt), want
        )
    # From FP64 in one step: through FP32 this tie-breaker would be lost.
    assert correctly_rounded(np.array([1 + 2.0**-8 + 2.0**-30]), BF16) == 1 + 2.0**-7


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_the_correctly_rounded_result_measures_one(fmt):
    golden = np.random.default_rng(0).standard_normal((2, 64, 4, 16))
    best = correctly_rounded(golden, fmt)
    assert unit_error(best, golden, fmt) == 1.0
    # A second, independent rounding of the same size adds in squares: sqrt(2), known
    # to 1 / sqrt(2 * 8192) = 0.8 % per standard deviation.
    noise = (best - golden).ravel()
    np.random.default_rng(1).shuffle(noise)
    twice = best + noise.reshape(golden.shape)
    assert abs(unit_error(twice, golden, fmt) - 2**0.5) < 5 * 0.008
    # The unit is the format's: BF16 results judged as FP16 are 2^3 times worse.
    if fmt is BF16:
        assert abs(unit_error(best, golden, FP16) / 8 - 1) < 5 * 0.008


def test_vanishing_and_exact_results_use_the_sums_of_absolute_values():
    i = make_inputs("zero_k_one_v", 0, SHAPE)
    golden = reference.golden(*i)
    size = reference.golden(*i, absolute=True)
    # out is yardstick 1, dK vanishes but for FP64 noise, dV is an ordinary number.
    for name, degenerate in (("out", True), ("dkey", True), ("dvalue", False)):
        _, found = unit(getattr(golden, name), BF16, getattr(size, name))
        assert found is degenerate
    # FP64 noise in golden is below 2^-40 of a BF16 rounding.
    exact = np.ones(golden.out.shape)
    assert unit_error(exact, golden.out, BF16, size.out) < 2.0**-40
    off = np.full(golden.out.shape, 1 + BF16.rms_roundoff)
    assert abs(unit_error(off, golden.out, BF16, size.out) - 1) < 2.0**-30
    # dQ = sum of dS * 0 has no size at all: exact is 0, anything else is infinite.
    zero = np.zeros(golden.dquery.shape)
    assert unit_error(zero, zero, BF16, size.dquery) == 0
    assert unit_error(zero + 1, zero, BF16, size.dquery) == np.inf
    with pytest.raises(ValueError, match="absolute="):
        unit(np.ones(3), BF16)
    with pytest.raises(ValueError, match="golden"):
        unit_error(np.ones(3), np.ones(4), BF16)


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
def test_a_mean_of_ones_is_a_machine_number_in_every_format(fmt):
    """A sum of 160 times fl(1 / 160) in FP64 is off by 23 last places of 1, which made
    600 000 units of FP32's last place."""
    golden = np.full((2, 8), 1 - 23 * 2.0**-53)
    one = np.ones(golden.shape)
    assert unit(golden, fmt, one) == (fmt.rms_roundoff * 1.0, True)


def test_sign_and_direction_tell_a_bias_from_noise():
    rng = np.random.default_rng(0)
    shape = 4, 64, 4, 16
    golden = rng.standard_normal(shape)
    noise = 1e-3 * rng.standard_normal(shape)
    fair = measure(golden + noise, yardstick(golden, BF16))
    # Standard normal draws: the interval holds 0 and A is not far above its null
    # (|z| < 4 has probability 1 - 6e-5; the seed is fixed).
    assert abs(fair.signed_mean) < 2 * fair.signed_mean_ci
    assert fair.directionality < 2 * DIRECTIONALITY_NULL_95
    biased = measure(golden + noise + 2e-4, yardstick(golden, BF16))
    assert abs(biased.signed_mean) > 2 * biased.signed_mean_ci
    # A = sqrt(n) mean / rms = 128 * 0.2 / sqrt(1.04) = 25.1, give or take 1.
    assert abs(biased.directionality - 25.1) < 4
    np.testing.assert_allclose(fair.relative, 1e-3, rtol=5 / np.sqrt(2 * golden.size))
    assert fair.p999 < fair.maximum and not fair.degenerate
    one = measure(golden[:1, :, :1], yardstick(golden[:1, :, :1], BF16))
    assert one.units == one.directionality == 0 and one.signed_mean_ci == np.inf


def test_a_bias_that_rows_share_does_not_narrow_its_interval():
    """What all entries of a row have in common counts once."""
    rng = np.random.default_rng(0)
    by_row = np.broadcast_to(rng.standard_normal((4, 64, 4, 1)), (4, 64, 4, 16))
    mean, half = signed_bias(by_row + 0.5, 2.0)
    # 1024 rows of unit variance, in units of 2; a sample's deviation is off by a
    # 45th itself, and the mean by 4 deviations once in 16 000 times.
    np.testing.assert_allclose(half, 1.96 / 32 / 2, rtol=4 / 45)
    assert abs(mean - 0.25) < 4 / 32 / 2
    assert signed_bias(np.zeros((1, 3, 2, 4)), 0.0) == (0.0, 0.0)
    assert signed_bias(np.ones((1, 1, 1, 4)), 1.0) == (1.0, np.inf)
