"""Repeated maxima, counted rescalings, stochastic steps, and the named recipes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import dot_product_attention, emulator, reference
from attn_jax.audit.error import correctly_rounded
from attn_jax.emulator import tiles
from attn_jax.formats import BF16, FP16, FP32, Rounding, number_format
from attn_jax.mask import Mask
from attn_jax.recipe import EXACT_FP32, FLASH2, QIU_YAO, RECIPES, Step

STOCHASTIC = Step(BF16, Rounding.STOCHASTIC)


def row_of_logits(*logits):
    """q [1, 1, 1, 1] and keys whose logits under scale 1 are these."""
    keys = jnp.asarray(logits, jnp.float32).reshape(1, -1, 1, 1)
    return jnp.ones_like(keys[:, :1]), keys


def attend(q, k, v, recipe, mask=Mask(), **more):
    run = functools.partial(emulator.attention, recipe=recipe, scale=1.0, **more)
    return jax.jit(run)(q, k, v, mask=mask)


# ---------------------------------------------------------------- repeated maxima

SMOOTHED = dataclasses.replace(EXACT_FP32, block_kv=None, probability=Step(BF16))


@pytest.mark.parametrize(
    ("logits", "factor", "maximum"),
    [
        ((4, 4, 1), 2.0, 8),  # repeated and positive: factor times it
        ((4, 4, 1), 3.0, 12),
        ((-1, -1, -3), 2.0, 0),  # repeated and negative: 0
        ((0, 0, -3), 2.0, 0),
        ((4, 3, 1), 2.0, 4),  # once only
        ((4, 4, 1), None, 4),
    ],
)
def test_a_repeated_maximum_is_moved(logits, factor, maximum):
    q, k = row_of_logits(*logits)
    v = jnp.asarray([1.0, 2.0, 5.0]).reshape(k.shape)
    recipe = dataclasses.replace(SMOOTHED, repeated_max_factor=factor)
    out, lse = attend(q, k, v, recipe)
    p = np.exp(np.asarray(logits, np.float64) - maximum)
    want = (correctly_rounded(p, BF16) * [1, 2, 5]).sum() / p.sum()
    # FP32 throughout but for P, whose rounding is what tells one maximum from another.
    np.testing.assert_allclose(out.item(), want, rtol=8 * 2.0**-24)
    np.testing.assert_allclose(lse.item(), maximum + np.log(p.sum()), rtol=2.0**-22)


def test_the_factor_changes_bits_and_only_where_a_visible_maximum_repeats():
    v = jnp.asarray([1.0, 2.0, 5.0]).reshape(1, 3, 1, 1)
    moved = dataclasses.replace(SMOOTHED, repeated_max_factor=2.0)
    q, k = row_of_logits(4, 4, 1)
    assert attend(q, k, v, SMOOTHED)[0] != attend(q, k, v, moved)[0]
    hidden = Mask(dense=jnp.asarray([True, False, True]).reshape(1, 1, 1, 3))
    plain, same = (attend(q, k, v, r, hidden) for r in (SMOOTHED, moved))
    for a, b in zip(plain, same, strict=True):
        np.testing.assert_array_equal(a, b)
    nothing = Mask(dense=jnp.zeros((1, 1, 1, 3), bool))
    out, lse = attend(q, k, v, moved, nothing)
    assert out.item() == 0 and lse.item() == -np.inf


def test_the_factor_is_felt_in_a_forward_softmax_made_again():
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((1, 6, 1, 4)), jnp.bfloat16) for _ in range(4)
    )
    k = k.at[:, 3].set(k[:, 1]).at[:, 4].set(k[:, 1])
    plain = RECIPES["eager_op_by_op"]

    @functools.partial(jax.jit, static_argnames="recipe")
    def dvalue(recipe):
        run = functools.partial(emulator.attention, recipe=recipe)
        return jax.vjp(lambda *x: run(*x)[0], q, k, v)[1](dout)[2]

    moved = dataclasses.replace(plain, repeated_max_factor=2.0)
    assert (dvalue(plain) != dvalue(moved)).any()


# ---------------------------------------------------------------- rescalings


@pytest.mark.parametrize(
    ("logits", "changes", "mask", "count"),
    [
        ((1, 0, 2, 1, 3, 9), {}, Mask(), 2),
        ((1, 0, 2, 1, 3, 9), dict(block_kv=6), Mask(), 0),
        ((1, 0, 2, 1, 3, 9), dict(kv_order="reverse"), Mask(), 0),
        ((9, 0, 2, 1, 3, 9), {}, Mask(), 0),
        # 1 log2 unit is 0.69: 2 - 1 stays below two of them, 9 - 1 does not.
        ((1, 0, 2, 1, 3, 9), dict(rescale_threshold=2.0), Mask(), 1),
        # The first block sees nothing: what comes next is a start, no rescaling.
        ((1, 0, 2, 1, 3, 9), {}, Mask(window=(None, None)), 2),
        ((9, 9, 2, 1, 3, 9), {}, "hide the first two", 1),
    ],
)
def test_rescales_are_counted(logits, changes, mask, count):
    if isinstance(mask, str):
        mask = Mask(dense=jnp.arange(6).reshape(1, 1, 1, 6) >= 2)
    q, k = row_of_logits(*logits)
    recipe = dataclasses.replace(EXACT_FP32, **(dict(block_kv=2) | changes))
    got = emulator.rescales(q, k, recipe=recipe, mask=mask, scale=1.0)
    assert got.shape == (1, 1, 1) and got.dtype == jnp.int32
    assert got.item() == count


def test_rescales_refuse_what_has_no_single_count():
    q, k = row_of_logits(1, 2)
    ring = dataclasses.replace(EXACT_FP32, ring_size=2)
    with pytest.raises(ValueError, match="set ring_size=1"):
        emulator.rescales(q, k, recipe=ring)


# ---------------------------------------------------------------- sinks


@pytest.mark.parametrize("threshold", [0.0, 1e-30])
def test_the_maximum_never_falls_below_a_sink(threshold):
    """row_max knows 1 and 1.5, the sink lies between: m stays at the sink."""
    sink, value = np.float32(1.2), jnp.ones((1, 1, 1, 1))
    coarse = dataclasses.replace(
        SMOOTHED,
        row_max=Step(number_format(4, 1)),
        exponentiated=Step(BF16),
        rescale_threshold=threshold,
    )
    q, k = row_of_logits(0)
    out, lse = attend(q, k, value, coarse, sinks=jnp.asarray([sink]))
    p = correctly_rounded(np.exp(-np.full(1, sink, np.float64)), BF16).item()
    # One division and one logarithm in FP32; exp(-1) in place of P is 4e-4 away.
    np.testing.assert_allclose(out.item(), p / (1 + p), rtol=4 * 2.0**-24)
    np.testing.assert_allclose(lse.item(), sink + np.log1p(p), rtol=4 * 2.0**-24)


def test_a_sink_of_no_weight_gives_no_nan():
    """LSE is -inf where a query sees nothing and its sink is -inf, too."""
    q, k, v = (drawn(i, 1, 4, 1, 4) for i in range(3))
    recipe = RECIPES["attn_jax"]
    mask = Mask(query_lengths=jnp.asarray([2]))

    def with_sinks(q, k, v, sinks):
        return attend(q, k, v, recipe, mask, sinks=sinks)

    def without(q, k, v, _):
        return attend(q, k, v, recipe, mask)

    args = q, k, v, jnp.full(1, -jnp.inf)
    results = []
    for run in (with_sinks, without):
        outputs, pull = jax.vjp(run, *args)
        results.append((*outputs, *pull(jax.tree.map(jnp.ones_like, outputs))))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    assert results[0][1][0, 0, -1] == -np.inf and not results[0][-1].any()


# ---------------------------------------------------------------- Python numbers


def test_a_threshold_is_a_number_of_the_carrier_under_x64_too(x64):
    q, k = row_of_logits(0, np.float32(0.1))
    recipe = dataclasses.replace(
        EXACT_FP32, block_kv=1, exponential="exp2", rescale_threshold=0.1
    )
    # FP32's 0.1 is above FP64's: a rise by it stays below the former alone.
    count = emulator.rescales(q, k, recipe=recipe, scale=float(np.log(2)))
    assert count.item() == 0


@pytest.mark.parametrize("name", ["probability_scale", "repeated_max_factor"])
def test_a_number_of_numpy_is_one_of_python_in_a_recipe(name, x64):
    recipes = (
        dataclasses.replace(FLASH2, **{name: number(2.5)})
        for number in (float, np.float64)
    )
    q, k, v = small()
    a, b = (attend(q, k, v, r, out_dtype=jnp.float32) for r in recipes)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype == jnp.float32
        np.testing.assert_array_equal(x, y)


def test_a_number_of_numpy_is_one_of_python_as_a_soft_cap(x64):
    q, k, v = small()
    a, b = (attend(q, k, v, QIU_YAO, soft_cap=f(0.3)) for f in (float, np.float64))
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- stochastic steps


def drawn(seed, *shape, dtype=jnp.bfloat16):
    draw = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(draw, dtype)


def small():
    return tuple(drawn(i, 2, 12, 2, 8) for i in range(3))


def test_a_stochastic_output_is_a_neighbour_and_has_no_bias():
    q, k, v = (drawn(i, 2, 128, 4, 32) for i in range(3))
    recipe = dataclasses.replace(FLASH2, output=STOCHASTIC)
    more = dict(rounding_key=jax.random.key(3))
    out, _ = attend(q, k, v, recipe, **more)
    exact, _ = attend(q, k, v, recipe, out_dtype=jnp.float32, **more)
    out, exact = np.asarray(out, np.float64), np.asarray(exact, np.float64)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    low = np.floor(exact / spacing) * spacing
    assert np.isin(np.round((out - low) / spacing, 6), [0, 1]).all()
    # Each error lies in one spacing and has variance p (1 - p) <= 1/4 of its square.
    error = (out - exact) / spacing
    assert abs(error.mean()) < 5 * 0.5 / error.size**0.5
    nearest = correctly_rounded(exact, BF16)
    assert (out != nearest).mean() > 0.1


def test_a_stochastic_row_sum_counts_on_where_the_nearest_one_stops():
    """S keys of equal weight, one a block: the sum is a martingale about S."""
    S, rows = 600, 512
    q, k = jnp.ones((1, rows, 1, 1)), jnp.zeros((1, S, 1, 1))
    recipe = dataclasses.replace(EXACT_FP32, block_kv=1, row_sum=STOCHASTIC)
    _, lse = attend(q, k, k, recipe, rounding_key=jax.random.key(1))
    total = np.exp(np.asarray(lse, np.float64))
    # Up to 256 nothing is rounded; then spacings of 2 and 4, each step's variance at
    # most a quarter of their squares.
    sigma = ((256 * 2.0**2 + (S - 512) * 4.0**2) / 4 / rows) ** 0.5
    assert abs(total.mean() - S) < 5 * sigma
    assert total.std() > 0
    stopped = dataclasses.replace(recipe, row_sum=Step(BF16))
    np.testing.assert_allclose(attend(q, k, k, stopped)[1], np.log(256), rtol=2.0**-22)


@functools.partial(jax.jit, static_argnames="recipe")
def results(args, dout, key, recipe):
    run = functools.partial(emulator.attention, recipe=recipe, rounding_key=key)
    (out, lse), pull = jax.vjp(run, *args)
    return out, lse, *pull((dout, jnp.zeros_like(lse)))


@pytest.mark.ci
def test_one_key_gives_one_result_compiled_or_not_and_another_key_another():
    recipe = dataclasses.replace(
        FLASH2,
        probability=STOCHASTIC,
        lse=STOCHASTIC,
        dlogits=STOCHASTIC,
        dq_dlogits=Step(FP16, Rounding.STOCHASTIC),
        backward_probability=STOCHASTIC,
        group_gradient=STOCHASTIC,
        group_accumulator=STOCHASTIC,
        scaled_query=STOCHASTIC,
        block_kv=6,
        exponential="exp",
    )
    args = small(), jnp.ones((2, 12, 2, 8), jnp.bfloat16)
    first = results(*args, jax.random.key(0), recipe)
    # Op by op, and from a key of the old style.
    again = results.__wrapped__(*args, jax.random.PRNGKey(0), recipe)
    other = results(*args, jax.random.key(1), recipe)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


def test_a_stochastic_ring_is_reproducible():
    recipe = dataclasses.replace(
        RECIPES["te_ring"],
        ring_merge="sigmoid",
        ring_accumulator=STOCHASTIC,
        ring_gradient_accumulator=STOCHASTIC,
    )
    args = small(), jnp.ones((2, 12, 2, 8), jnp.bfloat16)
    first, again, other = (
        results(*args, jax.random.key(seed), recipe) for seed in (0, 0, 1)
    )
    for name, a, b, c in zip(("out", "lse", *"qkv"), first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        # The LSE is a sum of P unrounded and merged in FP32.
        assert (a != c).any() == (name != "lse")


def test_no_two_places_share_their_random_bits():
    steps = dict(probability=STOCHASTIC, logits=STOCHASTIC)
    recipe = dataclasses.replace(FLASH2, **steps, ring_size=2)
    static = tiles.Static(recipe, 1.0, None, None)
    x = tiles.Operands(static, *small(), None, None, Mask())
    x = x.drawing(jax.random.key(0), 0)
    third = jnp.full((64,), 1 / 3)
    made = [
        x.round(third, "probability", 0, 0),
        x.round(third, "probability", 0, 64),
        x.round(third, "probability", 64, 0),
        x.round(third, "logits", 0, 0),
        x.round(third, "logits", 0, 0, site="scale"),
        x.drawing(jax.random.key(0), 2).round(third, "probability", 0, 0),
        x.share(0, 1).round(third, "probability", 0, 0),
        x.share(1, 0).round(third, "probability", 0, 0),
    ]
    bits = np.stack([np.asarray(y) > 1 / 3 for y in made])
    # 64 fair bits agree by chance in 2^-64; by intention in the same place alone.
    assert len(np.unique(bits, axis=0)) == len(made)
    same = x.round(third, "probability", 0, 0)
    np.testing.assert_array_equal(made[0], same)


@pytest.mark.parametrize(
    ("recipe", "key", "hint"),
    [
        (FLASH2, jax.random.PRNGKey(0), "leave rounding_key out"),
        (dataclasses.replace(FLASH2, lse=STOCHASTIC), None, "pass rounding_key="),
        (
            dataclasses.replace(FLASH2, lse=STOCHASTIC),
            jnp.zeros((3, 2), jnp.uint32),
            "one key of jax.random",
        ),
    ],
)
def test_a_key_is_asked_for_where_it_is_drawn_from_and_nowhere_else(recipe, key, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        emulator.attention(*small(), recipe=recipe, rounding_key=key)
    assert "\n" not in str(caught.value)


def test_the_public_function_passes_the_key_to_the_emulator_alone():
    args, key = small(), jax.random.key(5)
    recipe = dataclasses.replace(FLASH2, output=STOCHASTIC)
    got = dot_product_attention(
        *args, implementation="emulated", recipe=recipe, rounding_key=key
    )
    want, _ = emulator.attention(*args, recipe=recipe, rounding_key=key)
    np.testing.assert_array_equal(got, want)
    for name in (None, "reference", "xla"):
        with pytest.raises(ValueError, match="rounding_key= is for") as caught:
            dot_product_attention(*args, implementation=name, rounding_key=key)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- named recipes


# The others are held against the oracle by default, too (test_oracle), within less.
BY_DEFAULT = {"te_ring", "flash1_paper", "flash3", "flash4_fp8"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in BY_DEFAULT))
        for name in RECIPES
        if name != "exact_fp64"
    ],
)
def test_each_named_recipe_runs_forward_and_backward(name):
    recipe = RECIPES[name]
    q, k, v = (drawn(i, 1, 64, 4, 16) for i in range(3))
    dout = drawn(3, 1, 64, 4, 16)
    golden = reference.golden(q, k, v, dout)

    found = results((q, k, v), dout, None, recipe)
    coarsest = max(
        step.format.unit_roundoff
        for f in dataclasses.fields(recipe)
        if isinstance(step := getattr(recipe, f.name), Step) and f.name != "lse"
    )
    for got, want in zip(found, golden[:5], strict=True):
        off = np.asarray(got, np.float64) - want
        # No recipe has more than 16 roundings on the way to a result, nor do the two
        # products behind a gradient double an error more than once. Results come back
        # in the type of the inputs, BF16.
        bound = 32 * max(coarsest, BF16.unit_roundoff)
        assert np.sqrt((off**2).mean()) <= bound * np.sqrt(
            (np.asarray(want) ** 2).mean()
        )
    for got in found:
        assert got.dtype == (jnp.float32 if got.ndim == 3 else jnp.bfloat16)


def test_qiu_and_yao_round_before_they_divide():
    """Two maxima of 1 and two V of one sign: the sum is a tie that a third decides."""
    q, k = row_of_logits(4, 4, -4)
    v = jnp.asarray([-2.40625, -2.296875, -2.0]).reshape(1, 3, 1, 1)
    out, _ = attend(q, k, v, QIU_YAO)
    p = correctly_rounded(np.exp([0.0, 0.0, -8.0]), BF16)
    total = correctly_rounded((p * np.asarray(v).ravel()).sum(keepdims=True), BF16)
    # -4.70312 lies between -4.6875 and -4.71875: away from zero, then over l = 2.
    assert total == -4.71875
    assert out.item() == correctly_rounded(total / 2, BF16).item()
    kernel, _ = attend(q, k, v, dataclasses.replace(FLASH2, output=Step(FP32)))
    assert abs(out.item()) > abs(kernel.item())
