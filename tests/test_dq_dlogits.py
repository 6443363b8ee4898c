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
from attn_jax.formats import BF16, E4M3FN, FP16, TF32, Rounding, number_format
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, Recipe, Step
from tests.bounds_outcome import RESULTS, computed, errors, excess
from tests.oracle_inputs import SHAPE, random_dlse
from tests.oracle_outcome import Outcome
from tests.test_oracle import SMALL as SMALL_BLOCKS

pytestmark = pytest.mark.ci

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
    # No dS is 2^-28 of its head's bound or less: in FP16 it loses nothing.
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
        is_cured = family not in ("repeated_max", "drift")
        assert (units["mean"] <= 1.2) == is_cured, (family, units)


def test_heads_are_scaled_by_the_norm_of_the_columns_maxima():
    """Each value has one entry of 8: its norm is half that of the columns' maxima."""
    inputs = make_inputs("normal", 0, SHAPE)
    turns = np.arange(SHAPE.key_length)[:, None] % SHAPE.head_dim
    value = 8.0 * (turns == np.arange(SHAPE.head_dim))
    inputs = inputs._replace(value=value[None, :, None])
    # So few exponents that what is below 1/8 of the bound loses bits.
    recipe = in_format(SMALL_BLOCKS, Step(number_format(3, 2)), gradient=Step(BF16))
    outcome = Outcome(recipe, inputs, jit=False)
    outcome.check(("dquery",))
    assert outcome.pinned("dquery") > 0.5


# Two batch entries of two key heads of two query heads each.
BATCH = Shape(2, 24, 36, 4, 2, 16)


def with_a_large_row(exponent: int) -> Inputs:
    """The last query of the second head is alone in having a dO that is not small."""
    inputs = make_inputs("normal", 0, BATCH)
    small = np.full(inputs.dout.shape[:3], 2.0**-exponent, np.float32)
    small[0, -1, 1] = 1
    dout = inputs.dout.astype(np.float32) * small[..., None]
    return inputs._replace(dout=dout.astype(inputs.dout.dtype))


@functools.partial(jax.jit, static_argnames="recipe")
def _with_dlse(dlse, mask, inputs: Inputs, recipe: Recipe):
    def attend(*inputs):
        return emulator.attention(*inputs, recipe=recipe, mask=mask)

    return jax.vjp(attend, *inputs[:3])[1]((inputs.dout, dlse))[0]


def dquery_with(dlse, mask: Mask, inputs: Inputs, recipe: Recipe) -> np.ndarray:
    return np.asarray(_with_dlse(dlse, mask, inputs, recipe), np.float64)


@pytest.mark.parametrize("ring_size", [1, 4])
def test_the_largest_row_counts_for_all_rows_of_its_key_head(ring_size):
    """What is 2^-50 of b is nothing in FP16, on this device or another; heads that do
    not share the key head, or are of another example, have a b of their own."""
    recipe = in_format(ATTN_JAX, Step(FP16), dq_centre="none", ring_size=ring_size)
    nonzero = np.asarray(dquery(with_a_large_row(50), recipe)).any(-1)
    want = np.ones(nonzero.shape, bool)
    want[0, :, :2] = False
    want[0, -1, 1] = True
    np.testing.assert_array_equal(nonzero, want)


def test_a_large_cotangent_of_lse_counts_where_a_query_sees_a_key():
    inputs = make_inputs("normal", 0, SMALL)
    mask = Mask(query_lengths=np.array([SMALL.query_length - 1], np.int32))
    recipe = in_format(ATTN_JAX, Step(FP16), dq_centre="none")
    for query, survives in ((-1, True), (-2, False)):
        dlse = np.zeros((1, SMALL.heads, SMALL.query_length), np.float32)
        dlse[0, 1, query] = 2.0**50
        got = dquery_with(dlse, mask, inputs, recipe)[0, :-2]
        assert got[:, 2:].any(-1).all()
        np.testing.assert_array_equal(got[:, :2].any(-1), survives)


@pytest.mark.parametrize("apart", [dict(), dict(ring_size=4, dq_centre="mean")])
def test_rows_and_heads_of_any_size_are_as_the_oracle_has_them(apart):
    """A format of few exponents; rows and devices differ by up to 2^6, heads by 8."""
    inputs = make_inputs("normal", 0, SHAPE)
    T, N = SHAPE.query_length, SHAPE.heads
    sizes = 2.0 ** -(np.arange(T * N) % 7).reshape(1, T, N, 1)
    sizes[:, :, 0] /= 8
    inputs = inputs._replace(dout=inputs.dout.astype(np.float32) * sizes)
    step = Step(number_format(3, 2))
    recipe = in_format(SMALL_BLOCKS, step, gradient=Step(BF16), **apart)
    outcome = Outcome(recipe, inputs, random_dlse(SHAPE), jit=False)
    outcome.check(("dquery",))
    assert outcome.pinned("dquery") > 0.5


def with_a_large_hidden_value(exponent: int) -> tuple[Inputs, Mask]:
    """Nobody sees the last key, and its value sets the bound of its key head."""
    inputs = make_inputs("normal", 0, SMALL)
    value = inputs.value.copy()
    value[:, -1] *= 2.0**exponent
    seen = jnp.arange(SMALL.key_length) < SMALL.key_length - 1
    return inputs._replace(value=value), Mask(dense=seen[None, None, None])


def test_far_below_a_head_s_bound_bits_are_lost_and_bounded():
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
    # P has r, here 2^-15 in both heads, in its exponent, which is rounded once with LSE
    # in it, perhaps before, and once as a difference; and products of errors.
    most = 3.01 * 15 * np.log(2) * 2.0**-24
    absolute = reference.golden(*inputs, mask=mask, absolute=True)
    for result in RESULTS:
        less, more = (getattr(limits[r], result) for r in (wide, narrow))
        if result in ("out", "lse"):
            np.testing.assert_array_equal(less, more)
        elif result == "dquery":
            assert (more > less).all()
        else:
            assert (more >= less).all()
            assert (more - less <= most * getattr(absolute, result)).all()


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


@pytest.mark.parametrize(
    ("exponent", "ring_size"),
    [
        (0, 1),
        (16, 4),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((0, 4), (16, 1), (24, 1), (24, 4))
        ),
    ],
)
def test_rows_far_below_the_largest_are_bounded(exponent, ring_size):
    """Of dO, and of dLSE. Row by row, or golden's own error of the largest would hide
    the others'."""
    base = dataclasses.replace(EXACT_FP32, block_q=None, backward_block_kv=None)
    recipe = in_format(base, Step(FP16), dq_centre="keys", ring_size=ring_size)
    inputs = with_a_large_row(exponent)
    # What is wide is returned wide.
    inputs = Inputs(*(x.astype(np.float32) for x in inputs))
    nothing = np.zeros((BATCH.batch, BATCH.heads, BATCH.query_length), np.float32)
    dlse = nothing.copy()
    dlse[1, 3, 0] = 2.0 ** (26 - exponent)
    for given in (nothing, dlse):
        limit = bound(recipe, *inputs, given).dquery
        exact = reference.golden(*inputs, given).dquery
        error = np.abs(dquery_with(given, Mask(), inputs, recipe) - exact)
        error = error - 2.0**-40 * np.abs(exact).max(-1, keepdims=True)
        shares = error / limit
        assert shares.max() <= 1
        assert min(shares[0, :-1, :2].max(), shares[1, 1:, 2:].max()) > 0.2


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


def test_norms_whose_squares_leave_the_range_scale_all_the_same():
    """V times a power of two and dO by its inverse: the same dQ, to the bit."""
    inputs = make_inputs("normal", 0, SMALL)
    recipe = in_format(ATTN_JAX, Step(FP16))
    expected = np.asarray(dquery(inputs, recipe))
    for exponent in (-80, 80):
        value, dout = (
            np.ldexp(x.astype(np.float32), e).astype(x.dtype)
            for x, e in ((inputs.value, exponent), (inputs.dout, -exponent))
        )
        found = np.asarray(dquery(inputs._replace(value=value, dout=dout), recipe))
        np.testing.assert_array_equal(found, expected)
