"""Canaries pass on this machine, and each of them can fail, by name.

What a compiler or a GPU would do is done by hand: the arithmetic that the emulator
calls is replaced, and `certify` has to stop with the canary that guards against it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attn_jax import canaries, emulator, formats
from attn_jax.emulator import exponential, sums, tiles
from attn_jax.formats import BF16, E4M3FN, E5M2, FP16, FP32, Rounding
from attn_jax.recipe import Step

# Most of what a replaced function leaves alone is the same for every fault.
pytestmark = pytest.mark.usefixtures("fully_optimised", "shared_programs")


@pytest.fixture(autouse=True)
def fresh_programs():
    """Neither verdicts nor compiled programs outlive a replaced function."""
    canaries._certify.cache_clear()
    jax.clear_caches()
    yield
    canaries._certify.cache_clear()
    jax.clear_caches()


@pytest.mark.ci
def test_a_verdict_says_what_was_certified():
    verdict = canaries.certify()
    assert verdict.passed == tuple(canaries.CANARIES)
    assert (verdict.backend, verdict.jit, verdict.x64) == ("cpu", True, False)
    assert verdict.jax_version == jax.__version__ and verdict.device
    # Once in a process: experiments in one process pay for it once.
    assert canaries.certify() is verdict


@pytest.mark.thorough
def test_certified_op_by_op():
    assert not canaries.certify(jit=False).jit


# So they are in `test_audit_command`, in an audit under x64.
@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_certified_with_x64_on():
    assert canaries.certify().x64


def test_no_fp32_error_decides_a_rounding(monkeypatch):
    # What the bit-by-bit comparison rests on: see the comment at the seed.
    nearest = []

    def recorded(x, fmt):
        mantissa, _ = np.frexp(np.abs(np.asarray(x, float)))
        spacings = mantissa * 2.0 ** (fmt.mantissa_bits + 1)
        distance = np.abs(spacings % 1 - 0.5) / spacings
        nearest.append(distance[distance > 0].min())
        return exact(x, fmt)

    exact = canaries.correctly_rounded
    monkeypatch.setattr(canaries, "correctly_rounded", recorded)
    inputs = canaries._fused_inputs()
    canaries._eager(*inputs)
    canaries._flash(*inputs)
    assert len(nearest) == 7 and min(nearest) >= 2.0**-15


exact_round = formats.round_to
exact_step = tiles.Operands.round
exact_dot = sums.dot


def elided(x, fmt, rounding=Rounding.NEAREST_EVEN, *, key=None):
    """A cast to BF16 and back, as XLA on a GPU leaves it."""
    return x if fmt == BF16 else exact_round(x, fmt, rounding, key=key)


def through_float32(x, fmt, rounding=Rounding.NEAREST_EVEN, *, key=None):
    """JAX's own cast of float64, which rounds twice."""
    return exact_round(x.astype(jnp.float32), fmt, rounding, key=key).astype(x.dtype)


def reduced(fmt):
    """`lax.reduce_precision` for one format: IEEE range, subnormals flushed."""

    def round_to(x, to, rounding=Rounding.NEAREST_EVEN, *, key=None):
        if to == fmt:
            return lax.reduce_precision(x, to.exponent_bits, to.mantissa_bits)
        return exact_round(x, to, rounding, key=key)

    return round_to


def saturated(x, fmt, rounding=Rounding.NEAREST_EVEN, *, key=None):
    """As hardware converts to E4M3."""
    fmt = fmt.saturating() if fmt == E4M3FN else fmt
    return exact_round(x, fmt, rounding, key=key)


def wide_scalars(x, fmt, rounding=Rounding.NEAREST_EVEN, *, key=None):
    """A running sum kept in a register."""
    return x if x.ndim == 0 else exact_round(x, fmt, rounding, key=key)


def straight_through(x, fmt, rounding=Rounding.NEAREST_EVEN, *, key=None):
    """A rounding with a derivative of one."""
    run = jax.custom_jvp(lambda x: exact_round(x, fmt, rounding, key=key))
    run.defjvp(lambda primals, tangents: (run(*primals), *tangents))
    return run(x)


def wide_matrices(x, fmt, rounding=Rounding.NEAREST_EVEN, *, key=None):
    """A matrix product whose rounding was merged away."""
    return x if x.ndim == 2 else exact_round(x, fmt, rounding, key=key)


def steps(field, change):
    """`Operands.round`, one step of the recipe done otherwise."""

    def round_step(operands, x, name, *at, site=""):
        rounded = exact_step(operands, x, name, *at, site=site)
        return change(x, rounded) if name == field else rounded

    return round_step


def tf32_dot(subscripts, x, y, *args):
    """An FP32 product as a GPU runs it by default."""
    x, y = (exact_round(a, formats.TF32) for a in (x, y))
    return exact_dot(subscripts, x, y, *args)


def bf16_dot(subscripts, x, y, *args):
    """A product of BF16 matrices with a BF16 result."""
    return exact_round(exact_dot(subscripts, x, y, *args), BF16)


wide_probability = steps("probability", lambda x, rounded: x)
# The transpose of a rounded product, as autodiff would make it.
narrow_dprobability = steps("dprobability", lambda x, rounded: exact_round(x, BF16))
# O - round(O) simplified to zero.
no_low_part = steps("output", lambda x, y: jnp.where(jnp.abs(x) < 2.0**-8, 0.0, y))
Operands = tiles.Operands

FAULTS = {
    "elided casts": ("rounding_survives", formats, "round_to", elided),
    "product unrounded": ("rounded_product", formats, "round_to", wide_matrices),
    "narrow product": ("rounded_product", sums, "dot", bf16_dot),
    "fused rounding": ("fused_attention", Operands, "round", wide_probability),
    "FP16 flushed": ("subnormals", formats, "round_to", reduced(FP16)),
    "E5M2 flushed": ("subnormals", formats, "round_to", reduced(E5M2)),
    "E4M3 saturated": ("fp8_overflow", formats, "round_to", saturated),
    "wide sum": ("narrow_sum", formats, "round_to", wide_scalars),
    "poor exp2": ("accurate_functions", exponential, "exp2", jnp.exp2),
    "dP rounded": ("backward_rounding", Operands, "round", narrow_dprobability),
    "differentiable": ("backward_rounding", formats, "round_to", straight_through),
    "no low part": ("low_part", Operands, "round", no_low_part),
    "TF32": ("full_precision_dot", sums, "dot", tf32_dot),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_at_its_canary(fault, monkeypatch):
    name, module, attribute, replacement = FAULTS[fault]
    monkeypatch.setattr(module, attribute, replacement)
    # Alone, since those before it take their seconds.
    monkeypatch.setattr(canaries, "CANARIES", {name: canaries.CANARIES[name]})
    with pytest.raises(canaries.CanaryError) as stop:
        canaries.certify()
    message = str(stop.value)
    assert message.startswith(f"{name} (cpu, ") and "\n" not in message
    assert "got" in message and "is right" in message


def test_the_first_canary_that_fails_stops_all(monkeypatch):
    ran = []

    def recorded(name):
        def canary(run):
            ran.append(name)
            yield "sick" if name == "subnormals" else None

        return canary

    suite = {name: recorded(name) for name in canaries.CANARIES}
    monkeypatch.setattr(canaries, "CANARIES", suite)
    with pytest.raises(canaries.CanaryError, match="^subnormals .*: sick$"):
        canaries.certify()
    assert ran == list(suite)[: ran.index("subnormals") + 1]


def faults(name):
    def run(function, *arrays):
        return jax.device_get(jax.jit(function)(*arrays))

    return [fault for fault in canaries.CANARIES[name](run) if fault is not None]


@pytest.mark.usefixtures("x64")
def test_double_rounding_is_seen(monkeypatch):
    monkeypatch.setattr(formats, "round_to", through_float32)
    assert "float64 to BF16" in faults("rounding_survives")[0]


def test_e4m3_with_an_ieee_range_is_seen(monkeypatch):
    monkeypatch.setattr(formats, "round_to", reduced(E4M3FN))
    assert any("e4m3fn:" in fault for fault in faults("fp8_overflow"))


def test_observation_that_changes_the_result_is_seen(monkeypatch):
    # The first program of a recipe, and not the second, keeps P in FP32.
    calls = []

    def attention(q, k, v, *, recipe, **options):
        calls.append(recipe)
        if len(calls) == 2:
            recipe = dataclasses.replace(recipe, probability=recipe.lse)
        return exact_attention(q, k, v, recipe=recipe, **options)

    exact_attention = emulator.attention
    monkeypatch.setattr(emulator, "attention", attention)
    (fault,) = faults("fused_attention")
    assert "beside logits" in fault and "returning the logits" in fault


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"row_sum": Step(FP32)}, "blocks of one key: row sum: got 512"),
        ({"accumulator": Step(FP32)}, "blocks of one key: out: got 1.5"),
        ({"dot_chunk": None}, "chained products: row sum: got 512"),
        ({"rowsum_accumulator": Step(FP32)}, "chained products: row sum: got 512"),
        ({"dot_accumulator": Step(FP32)}, "chained products: out: got 1.5"),
    ],
)
def test_a_sum_wider_than_its_recipe_is_seen(change, fault, monkeypatch):
    def attention(q, k, v, *, recipe, **options):
        recipe = dataclasses.replace(recipe, **change)
        return exact_attention(q, k, v, recipe=recipe, **options)

    exact_attention = emulator.attention
    monkeypatch.setattr(emulator, "attention", attention)
    assert fault in faults("narrow_sum")[0]


def test_a_product_that_skips_its_rounding_is_seen(monkeypatch):
    # Seen from the rounding, an exact product lies a little beside the FP32 one.
    def beside(x, fmt):
        up = exact_round(x * np.float32(1 + 2.0**-23), fmt)
        return jnp.where(jnp.arange(x.size) % 2, up, exact_round(x, fmt))

    assert faults("contraction") == []
    monkeypatch.setattr(formats, "round_to", beside)
    assert "FP32 product" in faults("contraction")[0]


@pytest.mark.parametrize("name", ["exp", "log"])
def test_an_inaccurate_function_is_seen(name, monkeypatch):
    exact = getattr(jnp, name)
    monkeypatch.setattr(jnp, name, lambda x: exact(x) * np.float32(1 + 2.0**-20))
    assert faults("accurate_functions")[0].startswith(f"{name}(")


def test_a_low_part_simplified_away_is_seen(monkeypatch):
    def no_low_round(x, fmt):
        return jnp.where(jnp.abs(x) < 2.0**-8, 0.0, exact_round(x, fmt))

    monkeypatch.setattr(formats, "round_to", no_low_round)
    assert "low of a split" in faults("low_part")[0]
