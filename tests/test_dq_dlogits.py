"""dS rounded for dQ alone: what it changes, what it gains, and how it is bounded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import emulator, reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import FAMILIES, Inputs, Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import BF16, E4M3FN, FP16, TF32, Rounding
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, Recipe, Step
from tests.bounds_outcome import RESULTS, computed, errors, excess

SMALL = Shape(1, 24, 36, 4, 2, 16)


def in_format(recipe: Recipe, step: Step | None, **changes) -> Recipe:
    return dataclasses.replace(recipe, dq_dlogits=step, **changes)


@functools.partial(jax.jit, static_argnums=0)
def everything(recipe: Recipe, inputs: Inputs) -> dict[str, jax.Array]:
    """All results and gradients, with a cotangent of LSE, a bias and sinks."""
    _, T, S, N, _, _ = dataclasses.astuple(SMALL)
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((1, 1, T, S)).astype(np.float32)
    sinks, dlse = (
        rng.standard_normal(shape).astype(np.float32) for shape in (N, (1, N, T))
    )

    def attend(query, key, value, bias, sinks):
        return emulator.attention(
            query, key, value, recipe=recipe, bias=bias, sinks=sinks
        )

    primals = *inputs[:3], bias, sinks
    (out, lse), pull = jax.vjp(attend, *map(jnp.asarray, primals))
    gradients = pull((jnp.asarray(inputs.dout), jnp.asarray(dlse)))
    names = "out", "lse", "dquery", "dkey", "dvalue", "dbias", "dsinks"
    return dict(zip(names, (out, lse, *gradients), strict=True))


def unequal(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> set[str]:
    return {name for name in a if not np.array_equal(a[name], b[name])}


def test_nothing_but_dq_is_changed_and_not_by_the_same_format():
    inputs = make_inputs("normal", 0, SMALL)
    base = dataclasses.replace(ATTN_JAX, dq_centre="row", gradient_scale_at="logits")
    before = everything(base, inputs)
    found = {
        fmt.name: everything(in_format(base, Step(fmt)), inputs)
        for fmt in (BF16, FP16, TF32)
    }
    assert unequal(found["bf16"], before) == set()
    assert unequal(found["fp16"], before) == {"dquery"}
    # No dS is 2^-28 of its row's bound or less: rows in FP16 lose nothing.
    assert unequal(found["fp16"], found["tf32"]) == set()


@functools.partial(jax.jit, static_argnames="recipe")
def dquery(inputs: Inputs, recipe: Recipe):
    def attend(*inputs):
        return emulator.attention(*inputs, recipe=recipe)[0]

    return jax.vjp(attend, *inputs[:3])[1](inputs.dout)[0]


def test_x64_mode_changes_no_bit():
    inputs = make_inputs("normal", 0, SMALL)
    recipe = in_format(ATTN_JAX, Step(FP16))
    want = dquery(inputs, recipe)
    with jax.enable_x64(True):
        got = dquery(inputs, recipe)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_units_of_every_family():
    """dQ is rounded itself, which is 1 unit; dS adds to its square.

    FP16 has three more bits than BF16, so what is above 1 in the square is a 64th of
    what it is there, as long as dS alone makes it: with the row's own centre. What is
    left of it otherwise (FP32, delta from two numbers) is below 0.01. The mean leaves
    the errors of delta, and is no help where two keys have all the weight.
    """
    shape = Shape(1, 256, 512, 2, 2, 64)
    step = Step(FP16)
    chosen = {
        "before": dataclasses.replace(ATTN_JAX, dq_centre="row"),
        "row": in_format(ATTN_JAX, step, dq_centre="row"),
        "mean": in_format(ATTN_JAX, step, dq_centre="mean"),
    }
    for family in FAMILIES:
        inputs = make_inputs(family, 0, shape)
        golden = reference.golden(*inputs).dquery
        if family == "zero_k_one_v":
            assert not any(dquery(inputs, recipe).any() for recipe in chosen.values())
            continue
        units = {
            name: unit_error(np.asarray(dquery(inputs, recipe)), golden, BF16)
            for name, recipe in chosen.items()
        }
        above = {name: u**2 - 1 for name, u in units.items()}
        assert above["row"] < above["before"] / 64 + 0.01, (family, units)
        assert units["row"] <= 1.05, (family, units)
        assert (units["mean"] <= 1.2) == (family != "repeated_max"), (family, units)


def with_a_large_hidden_value(exponent: int) -> tuple[Inputs, Mask]:
    """Nobody sees the last key, and its value sets the bound of all rows."""
    inputs = make_inputs("normal", 0, SMALL)
    value = inputs.value.copy()
    value[:, -1] *= 2.0**exponent
    seen = jnp.arange(SMALL.key_length) < SMALL.key_length - 1
    return inputs._replace(value=value), Mask(dense=seen[None, None, None])


def test_far_below_a_row_s_bound_bits_are_lost_and_bounded():
    """dS near 2^-34 of its bound lies far in FP16's subnormal range."""
    inputs, mask = with_a_large_hidden_value(24)
    base = dataclasses.replace(EXACT_FP32, block_q=None, backward_block_kv=None)
    wide, narrow = (in_format(base, Step(fmt)) for fmt in (TF32, FP16))
    golden = reference.golden(*inputs, mask=mask)
    limits = {r: bound(r, *inputs, mask=mask) for r in (wide, narrow)}
    for recipe in (wide, narrow):
        found = errors(computed(recipe, inputs, mask=mask, jit=True), golden)
        worst = excess(found, limits[recipe])
        assert max(worst.values()) <= 1 and worst["dquery"] > 0.03, worst
    assert excess(found, limits[wide])["dquery"] > 4
    for result in RESULTS:
        same = getattr(limits[wide], result) == getattr(limits[narrow], result)
        assert same.all() == (result != "dquery")


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (Step(FP16), dict(dq_centre="row", dot_accumulator=Step(FP16))),
        (
            Step(E4M3FN.saturating(), Rounding.TOWARD_ZERO),
            dict(ring_size=2, dq_centre="none", dlogits_scale=2.0**-9),
        ),
    ],
    ids=["row", "ring"],
)
def test_no_dq_exceeds_its_bound(step, changes):
    recipe = in_format(ATTN_JAX, step, **changes)
    for exponent in (0, 16):
        inputs, mask = with_a_large_hidden_value(exponent)
        found = errors(
            computed(recipe, inputs, mask=mask, jit=True),
            reference.golden(*inputs, mask=mask),
        )
        for kind in ("deterministic", "probabilistic"):
            limits = bound(recipe, *inputs, mask=mask, kind=kind, confidence=0.9999)
            assert max(excess(found, limits).values()) <= 1, kind


@pytest.mark.parametrize("exponent", [-40, -66, 70])
def test_norms_out_of_range_are_no_surprise_to_the_bound(exponent):
    """Squares of dO underflow, in part or all, or overflow."""
    inputs = make_inputs("normal", 0, SMALL)
    dout = (inputs.dout.astype(np.float32) * 2.0**exponent).astype(inputs.dout.dtype)
    inputs = inputs._replace(dout=dout)
    recipe = in_format(ATTN_JAX, Step(FP16))
    found = errors(computed(recipe, inputs, jit=True), reference.golden(*inputs))
    limits = bound(recipe, *inputs)
    assert excess(found, limits)["dquery"] <= 1
    # Of a norm that may be lost nothing is known, and the rows may overflow.
    assert np.isinf(limits.dquery).any() == (exponent != -40)
