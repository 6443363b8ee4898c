"""dq_centre 'keys': what it computes, what it gains, and how it is bounded."""

import dataclasses
import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax import emulator, on_tensor_cores, reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Inputs, Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.bounds import centre as bounds_centre
from attn_jax.centre import centre_of
from attn_jax.formats import BF16, E4M3FN, FP16, Rounding
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, Step
from tests.bounds_outcome import computed, errors, excess
from tests.oracle_inputs import SHAPE, SMALL, random_dlse
from tests.oracle_outcome import Outcome

pytestmark = pytest.mark.ci

KEYS = dataclasses.replace(ATTN_JAX, dq_centre="keys")
# Nothing is rounded but the inputs, and K'.
WIDE = dataclasses.replace(
    EXACT_FP32, inputs=BF16, block_kv=8, backward_block_kv=8, dq_centre="keys"
)
GROUPED = Shape(2, 16, 24, 4, 2, 8)
B, T, S, N, K, H = dataclasses.astuple(GROUPED)


@functools.partial(jax.jit, static_argnames=("recipe", "soft_cap"))
def gradients(inputs, dlse, extra, *, recipe, soft_cap=None):
    """dQ, dK, dV; `extra` may hold a mask, sinks and a bias."""

    def attend(*inputs):
        return emulator.attention(*inputs, recipe=recipe, soft_cap=soft_cap, **extra)

    (_, lse), pull = jax.vjp(attend, *inputs[:3])
    return pull((inputs.dout, jnp.zeros_like(lse) if dlse is None else dlse))


# ------------------------------------------------------------------- the definition


def c_by_definition(key: np.ndarray, bits: int) -> np.ndarray:
    """c of one column, in FP64: no mean here is near a tie."""
    mean, square = key.mean(), (key**2).mean()
    if 17 * mean**2 <= square:
        return 0.0
    place = 2.0 ** (1 + math.frexp(math.sqrt(square))[1] - bits)
    return place * round(mean / place)


def dquery_by_definition(inputs: Inputs, dlse, sinks, visible) -> np.ndarray:
    """Head by head in FP64; only K' is rounded."""
    q, k, v, do = (x.astype(np.float64) for x in inputs)
    result = np.zeros(q.shape)
    for b, n in np.ndindex(B, N):
        key, value = k[b, :, n * K // N], v[b, :, n * K // N]
        weights = np.where(visible, np.exp(q[b, :, n] @ key.T / H**0.5), 0.0)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks[n])
        p = weights / total
        dp = do[b, :, n] @ value.T
        delta = (p * dp).sum(-1, keepdims=True)
        of_lse = dlse[b, n][:, None]
        ds = p * (dp - delta + of_lse)
        exact = of_lse + np.exp(sinks[n]) / total * (delta - of_lse)
        # The same p and dp on both sides: what differs are FP64 roundings, two for each
        # of S keys and some eight more, of sums as large as `size`.
        size = (p * (abs(dp) + abs(delta) + abs(of_lse))).sum(-1, keepdims=True)
        size += abs(exact)
        error = abs(ds.sum(-1, keepdims=True) - exact)
        assert (error <= (2 * S + 8) * 2.0**-53 * size).all()
        c = np.array([c_by_definition(column, 7) for column in key.T])
        shifted = (key - c).astype(ml_dtypes.bfloat16).astype(np.float64)
        result[b, :, n] = (ds @ shifted + exact * c) / H**0.5
    return result


def offset_inputs(shape: Shape = GROUPED) -> Inputs:
    """Each column, and each quarter of the keys, has a mean of its own. In FP32."""
    inputs = make_inputs("normal", 0, shape)
    quarters = np.arange(shape.key_length)[:, None, None] * 4 // shape.key_length
    key = inputs.key.astype(np.float32) + quarters + np.arange(shape.head_dim) / 2
    return in_fp32(inputs._replace(key=key.astype(inputs.key.dtype)))


def in_fp32(inputs: Inputs) -> Inputs:
    """The same numbers, whose gradients are returned as wide as they are made."""
    return Inputs(*(x.astype(np.float32) for x in inputs))


@pytest.mark.parametrize("ring_size", [1, 4])
@pytest.mark.parametrize("at", ["logits", "epilogue"])
def test_dq_is_what_the_definition_says(ring_size, at):
    inputs = offset_inputs()
    rng = np.random.default_rng(1)
    dlse, sinks = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((B, N, T), N)
    )
    recipe = dataclasses.replace(
        WIDE, ring_size=ring_size, gradient_scale_at=at, dlogits_scale=4.0
    )
    extra = {"mask": Mask(is_causal=True), "sinks": sinks}
    visible = np.arange(S) <= np.arange(T)[:, None]
    want = dquery_by_definition(inputs, dlse, sinks, visible)
    got = gradients(inputs, dlse, extra, recipe=recipe)
    # FP32 sums of some dozen terms, of size 10 at most.
    tolerance = 2.0**-24 * 400
    np.testing.assert_allclose(got[0], want, rtol=0, atol=tolerance)
    exact = reference.golden(*inputs, dlse, **extra)
    # The rounding of K' is in there, and nothing else beside it.
    apart = abs(want - exact.dquery).max()
    assert 10 * tolerance < apart < 2.0**-8 * abs(exact.dquery).max()
    plain = dataclasses.replace(recipe, dq_centre="none")
    for a, b in zip(got[1:], gradients(inputs, dlse, extra, recipe=plain)[1:]):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_the_centre_is_a_mean_of_few_digits(dtype):
    bits = int(ml_dtypes.finfo(dtype).nmant)
    for family in ("normal", "uniform", "offset", "sink"):
        key = make_inputs(family, 3, Shape(2, 1, 300, 2, 2, 16), dtype).key
        c = np.asarray(centre_of(jnp.asarray(key), BF16 if bits == 7 else FP16))
        wide = key.astype(np.float64)
        want = np.apply_along_axis(c_by_definition, 1, wide, bits)
        np.testing.assert_array_equal(c, want)
        if family in ("uniform", "offset"):
            # Half a place, which is 2^(2 - bits) root mean squares at most.
            away = abs(c - wide.mean(1)) / np.sqrt((wide**2).mean(1))
            assert c.all() and away.max() <= 2.0 ** (1 - bits)
            moved = wide - c[:, None]
            assert (moved == moved.astype(dtype)).mean() > 0.5


def test_columns_without_a_sensible_mean_have_no_centre():
    columns = [
        (-40.0, -40.0, -40.0, -40.0),
        (0.0, 0.0, 0.0, 0.0),
        (3.0, -3.0, 3.0, -2.0),  # 1/4 on 2.77
        (2.0**-80, 2.0**-80, 2.0**-80, 2.0**-80),  # squares that vanish
        (2.0**80, 2.0**80, 2.0**80, 2.0**80),  # and overflow
        (2.0**127, 2.0**127, 2.0**127, 2.0**127),
    ]
    key = np.array(columns, np.float32).T[None, :, None]
    found = centre_of(jnp.asarray(key, jnp.bfloat16), BF16)
    np.testing.assert_array_equal(found.ravel(), [-40, 0, 0, 0, 0, 0])


def test_keys_less_their_centre_stay_in_range():
    """One key of -65504 among keys near 3000 once made all of dQ infinite."""
    rng = np.random.default_rng(0)
    inputs = offset_inputs()
    key = (3000 + 100 * rng.standard_normal(inputs.key.shape)).astype(np.float16)
    assert centre_of(jnp.asarray(key), FP16).all()
    key[:, 5] = -65504
    assert not centre_of(jnp.asarray(key), FP16).any()
    query, value, dout = (
        x.astype(np.float16) for x in (inputs.query / 100, inputs.value, inputs.dout)
    )
    recipe = dataclasses.replace(ATTN_JAX.with_inputs(FP16), dq_centre="keys")
    got = gradients(inputs._replace(query=query, key=key, value=value, dout=dout), None,
        {}, recipe=recipe)  # fmt: skip
    assert all(np.isfinite(x).all() for x in got)


def test_a_soft_cap_leaves_no_centre():
    inputs = offset_inputs()
    plain = dataclasses.replace(WIDE, dq_centre="none")
    capped = (
        gradients(inputs, None, {}, recipe=recipe, soft_cap=2.0)
        for recipe in (WIDE, plain)
    )
    for a, b in zip(*capped):
        np.testing.assert_array_equal(a, b)


def test_x64_mode_changes_no_bit_and_neither_does_the_carrier_of_c():
    inputs = offset_inputs()
    want = gradients(inputs, None, {}, recipe=KEYS)
    with jax.enable_x64(True):
        got = gradients(inputs, None, {}, recipe=KEYS)
        for a, b in zip(got, want):
            np.testing.assert_array_equal(a, b)
        cores = on_tensor_cores(SMALL, "hopper")
        cores = dataclasses.replace(
            cores, dq_centre="keys", dot_chunk=4, gradient=Step(BF16)
        )
        arrays = make_inputs("offset", 0, SHAPE)
        Outcome(cores, arrays, random_dlse(SHAPE)).check_bits(("dquery",))


def test_another_name_gets_one_line(as_users_call_it):
    with pytest.raises(ValueError, match="one of none, mean, row, keys, got") as caught:
        dataclasses.replace(ATTN_JAX, dq_centre="key")
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------- what it gains


def units(recipe, inputs: Inputs, mask=Mask()) -> float:
    golden = reference.golden(*inputs, mask=mask).dquery
    got = gradients(inputs, None, {"mask": mask}, recipe=recipe)[0]
    return unit_error(np.asarray(got), golden, BF16)


@pytest.mark.parametrize("family", ["normal", "uniform", "offset"])
def test_dq_meets_the_bar(family):
    inputs = make_inputs(family, 0, Shape(1, 1024, 1024, 2, 2, 64))
    assert units(KEYS, inputs) <= 1.7
    if family != "normal":
        plain = dataclasses.replace(KEYS, dq_centre="none")
        assert units(plain, inputs) > 2
    # Early rows of a causal mask weigh much and are few: pool over more heads.
    inputs = make_inputs(family, 0, Shape(1, 256, 256, 16, 4, 64))
    assert units(KEYS, inputs, Mask(is_causal=True)) <= 1.7


# ----------------------------------------------------------------------- the bounds

FEW = Shape(1, 8, 12, 4, 2, 16)
MASKS = {
    "none": Mask(),
    "causal": Mask(is_causal=True),
    "lengths": Mask(key_value_lengths=np.array([7], np.int32)),
}
CHANGES = {
    "alone": {},
    "ring": dict(ring_size=4, ring_gradient_accumulator=Step(BF16)),
    "FP16 dS": dict(dq_dlogits=Step(FP16), gradient_scale_at="logits"),
    "FP8 dS and K'": dict(dq_dlogits=Step(E4M3FN, Rounding.TOWARD_ZERO)),
    "integers": dict(dq_dlogits=Step(FP16), dq_sum="integers"),
    "few integers": dict(dq_dlogits=Step(E4M3FN), dq_sum="integers", ring_size=2),
    "FP16": dict(inputs=FP16, dot_accumulator=Step(FP16), dot_chunk=4),
    "FP8": dict(inputs=E4M3FN, dq_accumulator=Step(BF16, Rounding.TOWARD_ZERO)),
    "K' alone": dict.fromkeys(
        ("probability", "output", "backward_probability", "dlogits", "gradient"),
        EXACT_FP32.output,
    ),
}


@hypothesis.settings(
    max_examples=12, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)  # fmt: skip
@hypothesis.given(
    changes=st.sampled_from(sorted(CHANGES)),
    mask=st.sampled_from(sorted(MASKS)),
    family=st.sampled_from(["uniform", "offset", "wide", "lse-130"]),
    seed=st.integers(0, 1000),
)
def test_no_dq_exceeds_its_bound(changes, mask, family, seed):
    recipe = dataclasses.replace(KEYS, **CHANGES[changes])
    inputs = make_inputs(family, seed, FEW, np.float32)
    held = {FP16: np.float16, BF16: ml_dtypes.bfloat16}.get(
        recipe.inputs, ml_dtypes.float8_e4m3fn
    )
    inputs = Inputs(*(x.astype(held).astype(np.float32) for x in inputs))
    found = errors(
        computed(recipe, inputs, mask=MASKS[mask], jit=True),
        reference.golden(*inputs, mask=MASKS[mask]),
    )
    for kind in ("deterministic", "probabilistic"):
        limits = bound(recipe, *inputs, mask=MASKS[mask], kind=kind, confidence=0.9999)
        assert max(excess(found, limits).values()) <= 1, kind
        assert limits.overflows == ()


def test_the_rounding_of_the_keys_is_in_the_bound_and_not_far_above():
    inputs = in_fp32(make_inputs("offset", 0, Shape(1, 48, 256, 2, 1, 64)))
    recipe = dataclasses.replace(WIDE, block_kv=None, backward_block_kv=None)
    found = errors(computed(recipe, inputs, jit=True), reference.golden(*inputs))
    assert 0.02 < excess(found, bound(recipe, *inputs))["dquery"] <= 1
    plain = dataclasses.replace(recipe, dq_centre="none")
    assert excess(found, bound(plain, *inputs))["dquery"] > 1
    likely = bound(recipe, *inputs, kind="probabilistic", confidence=0.9)
    assert (found["dquery"] > likely.dquery).mean() < 0.1


def test_both_centres_next_to_a_tie_are_bounded(monkeypatch):
    """A mean halfway between two multiples of 1/32, and one at a quarter of the spread:
    the order of a sum decides."""
    key = np.zeros((1, 2, 1, 3), np.float32)
    key[0, :, 0, 0] = 1, 1 + 2.0**-5
    key[0, :, 0, 1] = 5, -3  # 17 = 17
    key[0, :, 0, 2] = 3, 3
    rng = np.random.default_rng(0)
    query, value, dout = (
        rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((1, 4, 1, 3), key.shape, (1, 4, 1, 3))
    )
    inputs = Inputs(query, key.astype(ml_dtypes.bfloat16), value, dout)
    middle, width = bounds_centre._of_all_keys(KEYS, key[0, :, 0].astype(np.float64))
    np.testing.assert_array_equal(middle - width, [1, 0, 3])
    np.testing.assert_array_equal(middle + width, [1 + 2.0**-5, 1, 3])
    golden, limits = reference.golden(*inputs), bound(KEYS, *inputs)
    for side in (-1, 1):
        c = jnp.asarray((middle + side * width)[None, None], jnp.float32)
        monkeypatch.setattr("attn_jax.emulator.centre.centre_of", lambda *_, c=c: c)
        found = errors(computed(KEYS, inputs), golden)
        assert excess(found, limits)["dquery"] <= 1
