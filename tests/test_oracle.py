"""The emulator against an independent NumPy oracle of the same recipes.

The oracle gives an interval for every result (`enclosure`): a single number where the
arithmetic is exact or a rounding after it leaves no choice, and elsewhere all that
another order of additions can give. The emulator must lie within it everywhere.
"""

import dataclasses

import numpy as np
import pytest

from attn_jax import on_tensor_cores
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.formats import (
    BF16,
    FP16,
    FP32,
    FP64,
    number_format,
)
from attn_jax.recipe import EXACT_FP64, RECIPES, Recipe, Step
from tests import numpy_oracle
from tests.oracle_inputs import (
    BLOCKS,
    EXACT,
    LN2,
    SHAPE,
    SMALL,
    exact_dlse,
    powers_of_two,
    random_dlse,
)
from tests.oracle_outcome import FIELDS, Outcome, all_in, check_exact_arithmetic

pytestmark = pytest.mark.usefixtures("fully_optimised")

_BF16 = Step(BF16)


def test_exact_arithmetic_is_the_same_in_every_bit():
    check_exact_arithmetic(jit=True)


# Random numbers: no tile divides a length, two query heads share one of keys.
RANDOM = Shape(1, 40, 56, 2, 1, 16)
BLOCKS_16 = dict.fromkeys(BLOCKS, 16)


def small_tiles(recipe: Recipe) -> Recipe:
    """The recipe with tiles of 16 where it has tiles."""
    sizes = {name: 16 for name in BLOCKS if getattr(recipe, name) is not None}
    return dataclasses.replace(recipe, **sizes)


_FAMILIES = "normal", "uniform", "offset", "wide", "sink", "repeated_max"
_FP32_RECIPES = [name for name in RECIPES if RECIPES[name].carrier == FP32]


def check_on_every_family(name: str, families=_FAMILIES) -> None:
    recipe = small_tiles(RECIPES[name])
    for family in families:
        outcome = Outcome(recipe, make_inputs(family, 0, RANDOM), random_dlse(RANDOM))
        outcome.check()
        # The bound has teeth: where O is rounded, nearly all of it is one number.
        if recipe.output.format != FP32:
            assert outcome.pinned("out") > 0.85


# What is theirs alone is a ring, or formats that other recipes have, too; in tiles of
# one size flash3 is flash2 in the order of flash4.
_FURTHER = {"te_ring", "flash1_paper", "flash3", "flash4_fp8"}
_ALWAYS = {"attn_jax_hopper", "attn_jax_ampere", "ring_flash_attn", "qiu_yao", "jax_nn"}
_ALWAYS |= {"flash3_fp8", "eager_bf16"}


# Every other recipe has one half of the families by default; Qiu and Yao's, which is
# about repeated maxima, that with these. What we call ours, and what it is held
# against, has all.
_WHOLE = {"attn_jax", "attn_jax_hopper", "attn_jax_ampere", "flash2"}


def _by_default(number: int, name: str) -> tuple[str, ...]:
    if name in _WHOLE:
        return _FAMILIES
    return _FAMILIES[1::2] if number % 2 or name == "qiu_yao" else _FAMILIES[::2]


@pytest.mark.parametrize(
    ("name", "families"),
    [
        pytest.param(
            *(name, _by_default(number, name)),
            marks=[pytest.mark.thorough] * (name in _FURTHER)
            + [pytest.mark.ci] * (name not in _ALWAYS),
            id=name,
        )
        for number, name in enumerate(_FP32_RECIPES)
    ],
)
def test_named_recipes_on_families(name, families):
    check_on_every_family(name, families)


@pytest.mark.thorough
@pytest.mark.parametrize("name", _FP32_RECIPES)
def test_named_recipes_on_every_family(name):
    check_on_every_family(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", _FP32_RECIPES)
def test_named_recipes_on_every_family_on_a_gpu(name):
    check_on_every_family(name)


@pytest.mark.gpu
def test_exact_arithmetic_is_the_same_in_every_bit_on_a_gpu():
    outcome = Outcome(EXACT, powers_of_two(), exact_dlse(), scale=LN2)
    outcome.check_bits(FIELDS)


@pytest.mark.parametrize(
    "changes",
    [
        dict(probability=Step(FP32)),
        dict(delta_source="o_f32"),
        dict(block_kv=32, accumulator=_BF16),
        dict(backward_probability=Step(FP32)),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_recipe_lies_outside(changes):
    """The bound tells recipes apart that differ in one step."""
    recipe = small_tiles(RECIPES["flash2"])
    outcome = Outcome(recipe, make_inputs("uniform", 0, RANDOM))
    outcome.check()
    arrays = (np.asarray(x, np.float32) for x in make_inputs("uniform", 0, RANDOM))
    other = numpy_oracle.attention(
        *arrays, recipe=dataclasses.replace(recipe, **changes)
    )
    assert not all(all_in(outcome.got[f], getattr(other, f)) for f in FIELDS)


def test_fp64_carrier(x64):
    recipe = dataclasses.replace(
        EXACT_FP64,
        **BLOCKS_16,
        inputs=BF16,
        accumulator=Step(FP32),
        probability=_BF16,
        dlogits=_BF16,
        exponential="exp2",
        output=_BF16,
        gradient=_BF16,
    )
    outcome = Outcome(recipe, make_inputs("normal", 0, RANDOM), random_dlse(RANDOM))
    outcome.check()
    exact = dataclasses.replace(EXACT.replace_format(FP32, FP64), carrier=FP64)
    outcome = Outcome(exact, powers_of_two(), exact_dlse(), scale=LN2)
    outcome.check_bits(FIELDS)


_ON_CORES = dict.fromkeys(BLOCKS, 8) | dict(
    dot_chunk=4,  # two runs in a tile
    dot_alignment=10,
    output=_BF16,
    gradient=_BF16,
)


@pytest.mark.parametrize(
    "changes",
    [
        # P and dS are mostly subnormal, and each in a format of its own.
        pytest.param(
            dict(
                inputs=FP16,
                probability=Step(number_format(3, 8)),
                backward_probability=Step(number_format(2, 8)),
                dlogits=Step(number_format(4, 8)),
            ),
            marks=pytest.mark.ci,
        ),
        dict(
            dot_accumulator=Step(FP64),
            probability=_BF16,
            dlogits=_BF16,
            dq_dlogits=Step(number_format(3, 8)),  # mostly subnormal, too
        ),
        # Most K' are subnormal in their format.
        pytest.param(
            dict(
                probability=_BF16,
                dlogits=_BF16,
                dq_dlogits=Step(number_format(2, 8)),
                dq_centre="keys",
            ),
            marks=pytest.mark.ci,
        ),
    ],
    ids=["subnormal", "unrounded sums", "scaled keys"],
)
def test_tensor_cores(changes, x64):
    """Sums of cut addends leave no freedom: all results are one number."""
    recipe = on_tensor_cores(SMALL, "hopper")
    recipe = dataclasses.replace(recipe, **(_ON_CORES | changes))
    inputs = make_inputs("normal", 0, SHAPE)
    outcome = Outcome(recipe, inputs, random_dlse(SHAPE))
    outcome.check_bits(FIELDS)
    arrays = [np.asarray(x, np.float64) for x in inputs]
    for wrong in (dict(dot_alignment=None), dict(dot_alignment=11)):
        other = dataclasses.replace(recipe, **wrong)
        others = numpy_oracle.attention(*arrays, random_dlse(SHAPE), recipe=other)
        assert not any(all_in(outcome.got[f], getattr(others, f)) for f in FIELDS)
