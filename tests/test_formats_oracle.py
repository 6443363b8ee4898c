"""Every named format and rounding, every 16-bit decision, against three oracles.

gfloat and ml_dtypes are other people's; `round_by_definition` is the definition itself
(scale to a whole number, round that, scale back), checked here on exact fractions.
"""

import dataclasses
import fractions
import functools

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.formats import FORMATS, FP32, FP64, NumberFormat, Rounding, round_to
from tests.enclosure import round_by_definition

DETERMINISTIC = Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO
DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
INFO = {
    "fp32": gfloat.formats.format_info_binary32,
    "bf16": gfloat.formats.format_info_bfloat16,
    "fp16": gfloat.formats.format_info_binary16,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
}
MODES = {
    Rounding.NEAREST_EVEN: gfloat.RoundMode.TiesToEven,
    Rounding.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def jitted(x, fmt, rounding):
    return round_to(x, fmt, rounding)


def assert_same(got, want):
    """Equal in every bit, the sign of zero included; NaN is NaN."""
    np.testing.assert_array_equal(np.asarray(got), want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


def values_of(name: str) -> np.ndarray:
    """Every finite value of a format of at most 16 bits, both zeros once."""
    size = 8 * np.dtype(DTYPES[name]).itemsize
    codes = np.arange(2**size, dtype=f"uint{size}")
    with np.errstate(invalid="ignore"):  # signalling NaN codes
        values = codes.view(DTYPES[name]).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def decisions(name: str, dtype) -> np.ndarray:
    """Values, midpoints of neighbours and the next numbers on both sides of each.

    Rounding is constant in between. Past the largest value: half a spacing, a whole
    one, and much more.
    """
    values = values_of(name)
    spacing = values[-1] - values[-2]
    values = np.concatenate([[-values[-1] - spacing], values, [values[-1] + spacing]])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    with np.errstate(over="ignore"):
        points = points.astype(dtype)
        up, down = (
            np.nextafter(points, dtype(np.inf)),
            np.nextafter(points, dtype(-np.inf)),
        )
    far = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, 0.0, -0.0], dtype)
    return np.concatenate([points, up, down, far])


def in_binade_edges(fmt: NumberFormat, carrier: NumberFormat) -> np.ndarray:
    """Values, ties and neighbours at 40 exponents of a format too wide to list."""
    rng = np.random.default_rng(0)
    low, high = fmt.min_exponent - fmt.mantissa_bits - 2, -fmt.min_exponent + 1
    exponents = np.unique(np.linspace(low, high, 40).astype(int))
    whole = 2**fmt.mantissa_bits + rng.integers(0, 2**fmt.mantissa_bits, (40, 8))
    whole[:, 0], whole[:, 1] = 2**fmt.mantissa_bits, 2 ** (fmt.mantissa_bits + 1) - 1
    halves = np.concatenate([whole, whole + 0.5], 1).T / 2**fmt.mantissa_bits
    with np.errstate(over="ignore"):
        x = np.ldexp(halves[:, : len(exponents)], exponents).ravel()
        x = x[(np.abs(x) <= fmt.max_finite) & (np.abs(x) >= carrier.min_normal)]
        x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, 0)])
    return np.concatenate([x, -x, [0.0, -0.0, np.inf, -np.inf, np.nan]])


def test_the_definition_is_that_of_exact_fractions():
    rng = np.random.default_rng(0)
    for name in ("bf16", "fp16", "e4m3fn", "tf32", "fp32"):
        fmt = FORMATS[name]
        x = rng.uniform(1, 2, 200) * 2.0 ** rng.integers(-20, 8, 200)
        x = x * rng.choice([-1, 1], 200)
        x = x[np.abs(x) < fmt.max_finite / 2]
        for rounding in DETERMINISTIC:
            for value, got in zip(x, round_by_definition(x, fmt, rounding)):
                exponent = max(int(np.frexp(value)[1]) - 1, fmt.min_exponent)
                spacing = fractions.Fraction(2) ** (exponent - fmt.mantissa_bits)
                steps = fractions.Fraction(value) / spacing
                nearest = rounding is Rounding.NEAREST_EVEN
                whole = round(steps) if nearest else int(steps)
                assert fractions.Fraction(float(got)) == whole * spacing


@pytest.mark.parametrize("saturates", [False, True], ids=["plain", "saturating"])
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", DTYPES)
def test_every_decision_from_float32(name, rounding, saturates):
    fmt = FORMATS[name].saturating() if saturates else FORMATS[name]
    x = decisions(name, np.float32)
    want = round_by_definition(x.astype(np.float64), fmt, rounding)
    assert_same(jitted(x, fmt, rounding), want.astype(np.float32))
    if rounding is Rounding.NEAREST_EVEN and not saturates:
        with np.errstate(over="ignore", invalid="ignore"):
            cast = x.astype(DTYPES[name]).astype(np.float32)
        assert_same(jitted(x, fmt, rounding), cast)


@pytest.mark.parametrize("saturates", [False, True], ids=["plain", "saturating"])
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", DTYPES)
def test_every_decision_from_float64(name, rounding, saturates, x64):
    fmt = FORMATS[name].saturating() if saturates else FORMATS[name]
    x = decisions(name, np.float64)
    got = np.asarray(jitted(x, fmt, rounding))
    assert_same(got, round_by_definition(x, fmt, rounding))
    finite = np.isfinite(x)
    want = gfloat.round_ndarray(INFO[name], x[finite], MODES[rounding], sat=saturates)
    # gfloat's overflow without saturation differs by version; the rest is compared.
    inside = np.abs(want) <= fmt.max_finite
    assert_same(got[finite][inside], want[inside])


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ["tf32", "fp32"])
def test_wider_formats_from_float64(name, rounding, x64):
    fmt = FORMATS[name]
    x = in_binade_edges(fmt, FP64)
    got = np.asarray(jitted(x, fmt, rounding))
    assert_same(got, round_by_definition(x, fmt, rounding))
    if name == "tf32":  # gfloat has no such format
        return
    finite = np.isfinite(x)
    want = gfloat.round_ndarray(INFO[name], x[finite], MODES[rounding])
    inside = np.abs(want) <= fmt.max_finite
    assert_same(got[finite][inside], want[inside])
    if rounding is Rounding.NEAREST_EVEN:
        with np.errstate(over="ignore"):
            assert_same(got, x.astype(np.float32).astype(np.float64))


@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_tf32_from_float32(rounding):
    x = in_binade_edges(FORMATS["tf32"], FP32).astype(np.float32)
    want = round_by_definition(x.astype(np.float64), FORMATS["tf32"], rounding)
    assert_same(jitted(x, FORMATS["tf32"], rounding), want.astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_keeps_its_own_values(name, x64):
    """Rounding twice is rounding once, by every mode; fp64 changes nothing."""
    fmt = FORMATS[name]
    x = values_of(name) if name in DTYPES else in_binade_edges(fmt, FP64)
    once = np.asarray(jitted(x, fmt, Rounding.NEAREST_EVEN))
    if name in DTYPES or name == "fp64":
        assert_same(once, x)
    for rounding in DETERMINISTIC:
        assert_same(jitted(once, fmt, rounding), once)
    key = jax.random.key(0)
    number = jnp.asarray(once[np.isfinite(once)])
    if fmt != FP64:
        kept = jax.jit(lambda x: round_to(x, fmt, Rounding.STOCHASTIC, key=key))(number)
        assert_same(kept, np.asarray(number))


@pytest.mark.parametrize("name", DTYPES)
def test_no_format_is_rounded_to_twice(name, x64):
    """Just above a tie by what float32 cannot see: up, where a detour gives even."""
    values = values_of(name)
    normal = values[values >= FORMATS[name].min_normal]
    low, high = normal[:-1:2], normal[1::2]  # even, odd
    above = np.nextafter((low + high) / 2, np.inf)
    assert_same(jitted(above, FORMATS[name], Rounding.NEAREST_EVEN), high)
    assert (above.astype(np.float32).astype(DTYPES[name]).astype(float) == low).all()


@pytest.mark.parametrize("name", DTYPES)
def test_formats_without_subnormals_flush_after_rounding(name, x64):
    fmt = dataclasses.replace(FORMATS[name], name="flushed", has_subnormals=False)
    x = decisions(name, np.float64)
    for rounding in DETERMINISTIC:
        want = round_by_definition(x, fmt, rounding)
        assert_same(jitted(x, fmt, rounding), want)
