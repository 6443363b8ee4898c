"""The emulator against an independent NumPy oracle of the same recipes.

The oracle gives an interval for every result (`enclosure`): a single number where the
arithmetic is exact or a rounding after it leaves no choice, and elsewhere all that
another order of additions can give. The emulator must lie within it everywhere.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import on_tensor_cores
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FP16,
    FP32,
    FP64,
    NumberFormat,
    Rounding,
    number_format,
)
from attn_jax.mask import Mask
from attn_jax.recipe import EXACT_FP64, RECIPES, Recipe, Step
from tests import numpy_oracle
from tests.enclosure import Interval
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
from tests.oracle_outcome import FIELDS, Outcome

pytestmark = pytest.mark.usefixtures("fully_optimised")

_BF16 = Step(BF16)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_exact_arithmetic_is_the_same_in_every_bit(jit):
    outcome = Outcome(EXACT, powers_of_two(), exact_dlse(), scale=LN2, jit=jit)
    outcome.check_bits(FIELDS)
    assert all(np.ptp(outcome.got[field]) > 0 for field in FIELDS if field != "lse")


_COARSE = number_format(8, 2)  # few bits, for sums of small integers
_SHORT = number_format(3, 1)  # few exponents, for powers of two
_BIT = number_format(8, 1)  # 5 and 7 are not in it

EXACT_KNOBS = {
    "kv_outer": dict(loop_order="kv_outer"),
    "reverse": dict(kv_order="reverse", accumulator=Step(_COARSE)),
    "one_block": dict(block_kv=None, backward_block_kv=None, backward_block_q=None),
    "row_sum_of rounded": dict(row_sum_of="rounded", probability=Step(E5M2)),
    "rescale_threshold": dict(rescale_threshold=2.0, probability=Step(_SHORT)),
    "saturating": dict(
        probability=Step(E4M3FN.saturating()),
        probability_scale=2.0**7,
        rescale_threshold=4.0,
    ),
    "not saturating": dict(probability=Step(E4M3FN), probability_scale=2.0**10),
    "materialised": dict(
        block_kv=None,
        backward_block_kv=None,
        normalise="before_product",
        probability_from="softmax",
        delta_source="p_dp",
    ),
    "delta from o": dict(output=Step(_COARSE)),
    "delta from o_hi_lo": dict(delta_source="o_hi_lo", output=Step(_COARSE)),
    "delta from o_f32": dict(delta_source="o_f32", output=Step(_COARSE)),
    "delta from p_dp": dict(delta_source="p_dp", output=Step(_COARSE)),
    "centre mean": dict(dq_centre="mean", dlogits=Step(_COARSE), gradient=_BF16),
    "centre row": dict(dq_centre="row", dlogits=Step(_COARSE), gradient=_BF16),
    # Whole numbers up to 8 are in it, and c = -8 off all columns but one.
    "centre keys": dict(dq_centre="keys", inputs=_COARSE, gradient=_BF16),
    "centre keys, scaled": dict(
        dq_centre="keys", dq_dlogits=Step(number_format(4, 1)), gradient=_BF16
    ),
    "dlogits_scale": dict(dlogits=Step(E4M3FN), dlogits_scale=2.0**6),
    "dq_dlogits": dict(dq_dlogits=Step(number_format(4, 2)), dlogits=Step(_COARSE)),
    "dq_dlogits, subnormal": dict(
        dq_dlogits=Step(_SHORT),
        dlogits_scale=0.5,
        gradient_scale_at="logits",
        dq_centre="mean",
        gradient=_BF16,
    ),
    "carry": dict(ring_size=2, ring_merge="carry", gradient=_BF16),
}


@pytest.mark.parametrize("name", EXACT_KNOBS)
def test_exact_arithmetic_under_every_knob(name):
    recipe = dataclasses.replace(EXACT, **EXACT_KNOBS[name])
    outcome = Outcome(recipe, powers_of_two(), exact_dlse(), scale=LN2, jit=False)
    outcome.check_bits(FIELDS)


class Single(NamedTuple):
    """A step alone in a narrow format, and what makes its rounding visible.

    What must be pinned to one value: `exact`, entirely, and all of the fields to the
    share `pinned`. It is below 1 where the step leaves a row sum that is no power of
    two, so that a division is not exact; the output in BF16 then pins most entries.
    """

    fmt: NumberFormat
    context: dict = {}
    exact: tuple[str, ...] = FIELDS
    pinned: float = 1.0
    mask: Mask = Mask()
    parts: int = 1
    scale: float = LN2


_INEXACT = dict(output=_BF16, gradient=_BF16)
_HALVES = np.kron(np.eye(2, dtype=bool), np.ones((8, 16), bool))[None, None]
# Every row sees the keys of one hop, so that merging is exact.
_ONE_HOP = Mask(dense=jnp.asarray(_HALVES))

SINGLE_STEPS = {
    "dot_accumulator": Single(_COARSE, dict(dot_chunk=8, **_INEXACT), ("lse",), 0.5),
    "rowsum_accumulator": Single(_COARSE, dict(dot_chunk=8, **_INEXACT), ("lse",), 0.5),
    "logits": Single(_BIT, _INEXACT, ("lse",), 0.5),
    "shifted": Single(_BIT, _INEXACT, ("lse",), 0.5),
    # A row's maximum cancels out, except where P leaves the range of its format.
    "row_max": Single(
        _BIT,
        dict(probability=Step(number_format(2, 1)), probability_scale=0.5, block_kv=4),
    ),
    "row_sum": Single(_COARSE, _INEXACT, ("lse",), 0.5),
    "correction": Single(_SHORT, _INEXACT, ("lse",), 0.5),
    "exponentiated": Single(_SHORT, _INEXACT, ("lse",), 0.5),
    "probability": Single(_SHORT),
    "product": Single(_COARSE),
    "accumulator": Single(_COARSE),
    "output": Single(_COARSE),
    "lse": Single(
        _COARSE,
        dict(lse=Step(FP32), exponential="exp", **_INEXACT),
        ("lse",),
        0.5,
        scale=1.0,
    ),
    "softmax_probability": Single(_SHORT),
    "backward_probability": Single(_SHORT),
    "delta": Single(_COARSE),
    "dprobability": Single(_BIT),
    "dlogits": Single(_COARSE),
    "dq_dlogits": Single(_SHORT),
    "dq_accumulator": Single(_COARSE),
    "dk_accumulator": Single(_COARSE),
    "dv_accumulator": Single(_COARSE),
    "gradient": Single(_COARSE),
    "ring_partial": Single(
        _COARSE, dict(ring_size=2), ("out", "lse"), 0.0, _ONE_HOP, 2
    ),
    "ring_accumulator": Single(
        _COARSE, dict(ring_size=2), ("out", "lse"), 0.0, _ONE_HOP, 2
    ),
    "ring_gradient_partial": Single(_COARSE, dict(ring_size=2, ring_merge="carry")),
    "ring_gradient_accumulator": Single(_COARSE, dict(ring_size=2, ring_merge="carry")),
}


def test_every_step_has_its_single_case():
    steps = {
        f.name for f in dataclasses.fields(Recipe) if f.type in (Step, Step | None)
    }
    assert steps == set(SINGLE_STEPS)


_TRUNCATED = "row_max", "probability", "accumulator", "output", "dlogits", "gradient"


@pytest.mark.parametrize(
    "name, rounding",
    [(name, Rounding.NEAREST_EVEN) for name in SINGLE_STEPS]
    + [(name, Rounding.TOWARD_ZERO) for name in _TRUNCATED],
)
def test_each_step_rounds_where_the_recipe_says(name, rounding):
    # Op by op, a chain of chunks compiles a program for every shape in it.
    check_single_step(name, rounding, jit="dot" in name or "rowsum" in name)


def check_single_step(name: str, rounding: Rounding, jit: bool) -> None:
    single = SINGLE_STEPS[name]
    base = dataclasses.replace(EXACT, **single.context)
    recipe = dataclasses.replace(base, **{name: Step(single.fmt, rounding)})
    inputs, dlse = powers_of_two(single.parts), exact_dlse()
    options = dict(mask=single.mask, scale=single.scale)
    outcome = Outcome(recipe, inputs, dlse, **options, jit=jit)
    outcome.check_bits(single.exact)
    outcome.check()
    assert min(outcome.pinned(field) for field in FIELDS) >= single.pinned
    wide = numpy_oracle.attention(*inputs, dlse, recipe=base, **options)
    unchanged = [_all_in(outcome.got[field], getattr(wide, field)) for field in FIELDS]
    assert not all(unchanged)


def _all_in(x, interval: Interval) -> bool:
    return bool(((interval.lo <= x) & (x <= interval.hi)).all())


# Random numbers: no tile divides a length, two query heads share one of keys.
RANDOM = Shape(1, 40, 56, 2, 1, 16)
BLOCKS_16 = dict.fromkeys(BLOCKS, 16)


def small_tiles(recipe: Recipe) -> Recipe:
    """The recipe with tiles of 16 where it has tiles."""
    sizes = {name: 16 for name in BLOCKS if getattr(recipe, name) is not None}
    return dataclasses.replace(recipe, **sizes)


_FAMILIES = "normal", "uniform", "offset", "wide", "sink", "repeated_max"
_FP32_RECIPES = [name for name in RECIPES if RECIPES[name].carrier == FP32]


def check_on_every_family(name: str) -> None:
    recipe = small_tiles(RECIPES[name])
    for family in _FAMILIES:
        outcome = Outcome(recipe, make_inputs(family, 0, RANDOM), random_dlse(RANDOM))
        outcome.check()
        # The bound has teeth: where O is rounded, nearly all of it is one number.
        if recipe.output.format != FP32:
            assert outcome.pinned("out") > 0.85


# What is theirs alone is a ring, or formats that other recipes have, too.
_FURTHER = {"te_ring", "flash1_paper"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in _FURTHER))
        for name in _FP32_RECIPES
    ],
)
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["dot_accumulator", "row_max", "accumulator", "dlogits", "gradient"]
)
def test_single_steps_on_a_gpu(name):
    check_single_step(name, Rounding.NEAREST_EVEN, jit=True)


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
    assert not all(_all_in(outcome.got[f], getattr(other, f)) for f in FIELDS)


def test_stochastic_steps_take_a_neighbour():
    narrow = Step(BF16, Rounding.STOCHASTIC)
    recipe = dataclasses.replace(
        SMALL, probability=narrow, output=narrow, dlogits=narrow, gradient=narrow
    )
    inputs = make_inputs("normal", 0, SHAPE)
    key = jax.random.key(0)
    outcome = Outcome(recipe, inputs, random_dlse(SHAPE), key=key, jit=False)
    outcome.check()
    nearest = dataclasses.replace(recipe, probability=_BF16, output=_BF16)
    arrays = (np.asarray(x, np.float32) for x in inputs)
    other = numpy_oracle.attention(*arrays, random_dlse(SHAPE), recipe=nearest)
    assert not _all_in(outcome.got["out"], other.out)


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
        dict(
            inputs=FP16,
            probability=Step(number_format(3, 8)),
            backward_probability=Step(number_format(2, 8)),
            dlogits=Step(number_format(4, 8)),
        ),
        dict(
            dot_accumulator=Step(FP64),
            probability=_BF16,
            dlogits=_BF16,
            dq_dlogits=Step(number_format(3, 8)),  # mostly subnormal, too
        ),
        # Most K' are subnormal in their format.
        dict(
            probability=_BF16,
            dlogits=_BF16,
            dq_dlogits=Step(number_format(2, 8)),
            dq_centre="keys",
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
        assert not any(_all_in(outcome.got[f], getattr(others, f)) for f in FIELDS)
