"""Recipes as data: hashable, consistent, and re-targeted to another input format."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, number_format
from attn_jax.recipe import (
    ATTN_JAX,
    FLASH1_PAPER,
    FLASH2,
    RECIPES,
    Recipe,
    Step,
    on_tensor_cores,
)


def steps(recipe: Recipe) -> dict[str, Step]:
    values = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    return {name: value for name, value in values.items() if isinstance(value, Step)}


def test_names_and_sources():
    # In this order: tables and figures list them so.
    assert list(RECIPES) == [
        "flash2",
        "flash1_paper",
        "eager_bf16",
        "jax_nn",
        "attn_jax",
        "attn_jax_hopper",
        "attn_jax_ampere",
        "exact_fp32",
        "exact_fp64",
        "eager_op_by_op",
        "flash2_op_by_op",
        "flash3",
        "flash3_fp8",
        "flash4",
        "flash4_fp8",
        "flash4_fp8_offset8",
        "qiu_yao",
        "ring_flash_attn",
        "te_ring",
    ]
    for name, recipe in RECIPES.items():
        assert recipe.name == name and recipe.source


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_recipe_is_a_static_argument(recipe):
    traces = []

    @functools.partial(jax.jit, static_argnames="recipe")
    def traced(x, recipe):
        traces.append(recipe)
        return x

    traced(jnp.ones(1), recipe=recipe)
    # Equal recipes hit the cache; a changed knob does not.
    traced(jnp.ones(1), recipe=dataclasses.replace(recipe))
    assert len(traces) == 1
    traced(jnp.ones(1), recipe=dataclasses.replace(recipe, rescale_threshold=7.0))
    assert len(traces) == 2


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_another_input_format_reaches_every_step_and_comes_back(recipe):
    fp16 = recipe.with_inputs(FP16)
    assert fp16.inputs == FP16
    assert BF16 not in {step.format for step in steps(fp16).values()}
    # A recipe kept wholly in its input format cannot tell that from the carrier, and
    # one that has FP16 besides cannot tell that from its inputs.
    if recipe.inputs == BF16 and FP16 not in {x.format for x in steps(recipe).values()}:
        assert fp16.with_inputs(BF16) == recipe
        for name, step in steps(recipe).items():
            moved = steps(fp16)[name].format
            assert moved == (FP16 if step.format == BF16 else step.format)


def test_a_format_for_dq_alone_follows_where_it_is_named():
    narrow = dataclasses.replace(ATTN_JAX, dq_dlogits=Step(BF16))
    wide = dataclasses.replace(ATTN_JAX, dq_dlogits=Step(FP16))
    assert narrow.with_inputs(FP16).dq_dlogits == Step(FP16)
    assert narrow.with_inputs(FP16).with_inputs(BF16) == narrow
    assert wide.with_inputs(FP16) == narrow.with_inputs(FP16)
    assert wide.replace_format(BF16, FP32).dq_dlogits == Step(FP16)
    assert wide.replace_format(FP16, FP32) == dataclasses.replace(
        ATTN_JAX, dq_dlogits=Step(FP32)
    )
    assert ATTN_JAX.replace_format(BF16, FP32).dq_dlogits is None
    assert wide.scales_heads and not narrow.scales_heads and not ATTN_JAX.scales_heads


def test_the_kernels_differ_from_flash2_where_it_is_inaccurate():
    assert (FLASH2.delta_source, FLASH2.dq_centre) == ("o", "none")
    assert (ATTN_JAX.delta_source, ATTN_JAX.dq_centre) == ("o_hi_lo8", "mean")
    assert {n for n, s in steps(ATTN_JAX).items() if s.format == BF16} == {
        "probability",
        "output",
        "backward_probability",
        "dlogits",
        "gradient",
    }


def test_the_paper_keeps_its_state_in_16_bits():
    for name in ("row_max", "row_sum", "accumulator", "logits", "correction"):
        assert steps(FLASH1_PAPER)[name] == Step(BF16)


def test_exact_fp64_holds_nothing_narrower():
    exact = RECIPES["exact_fp64"]
    assert {exact.inputs, exact.carrier} == {FP64}
    assert {step.format for step in steps(exact).values()} == {FP64}
    assert FP32 not in {step.format for step in steps(exact).values()}


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="block_kv=None"):
        dataclasses.replace(FLASH2, normalise="before_product")
    with pytest.raises(ValueError, match="backward_block_kv=None"):
        dataclasses.replace(FLASH2, probability_from="softmax")
    with pytest.raises(ValueError, match="exp2_degree"):
        dataclasses.replace(FLASH2, exponential="exp2_polynomial")
    for changes in (
        dict(dot_chunk=16, dot_alignment=25),
        dict(carrier=FP64, dot_alignment=25),
        dict(carrier=FP64, dot_alignment=40, dot_chunk=1025),
    ):
        with pytest.raises(ValueError, match="dot_alignment needs .* carrier=FP64"):
            dataclasses.replace(FLASH2, **changes)
    dataclasses.replace(FLASH2, carrier=FP64, dot_alignment=40, dot_chunk=1024)
    with pytest.raises(ValueError, match="ring_size above 1 needs"):
        dataclasses.replace(RECIPES["jax_nn"], ring_size=2)
    with pytest.raises(ValueError, match="ring_merge='carry' needs"):
        dataclasses.replace(
            FLASH2,
            normalise="before_product",
            block_kv=None,
            ring_size=2,
            ring_merge="carry",
        )
    for changes in (dict(exponential="exp"), dict(normalise="each_step")):
        with pytest.raises(ValueError, match="ring_merge='carry_whole' needs base 2"):
            dataclasses.replace(ATTN_JAX, ring_merge="carry_whole", **changes)


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        (dict(delta_source="zzz"), "o_hi_lo"),
        (dict(normalise="never"), "each_step"),
        (dict(block_kv=0), "at least 1"),
        (dict(backward_block_kv=-3), "at least 1"),
        (dict(dlogits_scale=0.0), "positive"),
        (dict(dlogits_scale=3.0), "power of two"),
        (dict(probability_scale=float("nan")), "positive"),
        (dict(rescale_threshold=-1.0), "at least 0"),
        (dict(dot_alignment=0), "1 to 40, or None"),
        (dict(dot_alignment=25.0), "1 to 40, or None"),
        (dict(ring_size=0), "at least 1"),
        (dict(ring_merge="sum"), "two_pass"),
        (dict(ring_own_keys="both"), "one of first, last"),
        (dict(repeated_max_factor=0.5), "at least 1"),
        (dict(exp2_degree=7, exponential="exp2_polynomial"), "2, 3, 4 or 5"),
        (dict(dlogits_scale="a"), "positive"),
        (dict(dlogits_scale=2.0**200), "for a fp32 carrier"),
        (dict(dlogits_scale=2.0**-140), "for a fp32 carrier"),
        (dict(probability_scale="x"), "positive"),
        (dict(probability_scale=None), "positive"),
        (dict(probability_scale=1e300), "for a fp32 carrier"),
        (dict(probability_scale=2.0**127), "for a fp32 carrier"),
        (dict(rescale_threshold=None), "at least 0"),
        (dict(rescale_threshold=1e39), "for a fp32 carrier"),
        (dict(repeated_max_factor="2"), "at least 1"),
        (dict(repeated_max_factor=1e39), "for a fp32 carrier"),
        (dict(exp2_degree=3.0, exponential="exp2_polynomial"), "2, 3, 4 or 5"),
        (dict(block_kv=True), "at least 1"),
        (dict(block_kv=64.0), "at least 1"),
        (dict(ring_size="2"), "at least 1"),
        (dict(ring_size=True), "at least 1"),
        (dict(correction=Step(E4M3FN)), "saturating"),
        (dict(shifted=Step(E4M3FN)), "saturating"),
        (dict(row_max=Step(E4M3FN)), "saturating"),
        (dict(logits=Step(E4M3FN)), "saturating"),
        (dict(lse=Step(E4M3FN)), "saturating"),
        (dict(shifted=Step(number_format(3, 1).saturating())), "hidden keys"),
        (dict(logits=BF16), "a Step"),
        (dict(dq_dlogits=FP16), "a Step or None"),
        (dict(group_gradient="bf16"), "a Step or None"),
        (dict(scaled_query=BF16), "a Step or None"),
        (dict(dlogits=None), "a Step"),
        (dict(inputs="bf16"), "a NumberFormat"),
    ],
)
def test_a_setting_without_meaning_is_refused_in_one_line(changes, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        dataclasses.replace(FLASH2, **changes)
    assert next(iter(changes)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_users_call_it")
def test_tensor_cores_change_the_sums_of_products_alone():
    cores = on_tensor_cores(ATTN_JAX, "hopper")
    changed = {
        field.name
        for field in dataclasses.fields(Recipe)
        if getattr(cores, field.name) != getattr(ATTN_JAX, field.name)
    }
    assert changed == {"carrier", "dot_accumulator", "dot_chunk", "dot_alignment"}
    with pytest.raises(ValueError, match="ampere, hopper, got 'volta'"):
        on_tensor_cores(
            ATTN_JAX,
            "volta",  # pyright: ignore[reportArgumentType]
        )


@pytest.mark.usefixtures("as_users_call_it")
def test_numbers_of_numpy_become_those_of_python():
    recipe = dataclasses.replace(
        FLASH2,
        block_kv=np.int64(64),
        ring_size=np.int32(2),
        exponential="exp2_polynomial",
        exp2_degree=np.int8(3),
        probability_scale=np.float64(3),
        dlogits_scale=np.float32(8),
        rescale_threshold=2,
    )
    for name in ("block_kv", "ring_size", "exp2_degree"):
        assert type(getattr(recipe, name)) is int
    for name in ("probability_scale", "dlogits_scale", "rescale_threshold"):
        assert type(getattr(recipe, name)) is float
    assert recipe.probability_scale == 3 and recipe.exp2_degree == 3


def test_what_holds_minus_infinity_or_clamps_it_is_taken():
    for name in ("correction", "shifted", "row_max", "logits", "lse"):
        for fmt in (E5M2, E4M3FN.saturating()):
            dataclasses.replace(FLASH2, **{name: Step(fmt)})


@pytest.mark.usefixtures("as_users_call_it")
def test_a_step_by_name_is_refused():
    # The emulator would take any rounding but NEAREST_EVEN for truncation.
    with pytest.raises(ValueError, match="Step takes"):
        Step(BF16, "nearest_even")  # pyright: ignore[reportArgumentType]
