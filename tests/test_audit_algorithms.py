"""What a target is judged by."""

import pytest

from attn_jax.audit import attribution
from attn_jax.audit.algorithms import BY_HEAD_IN_16_BITS, PLAIN, Algorithms, judged_by
from attn_jax.audit.attribution import FITS, Fit
from attn_jax.audit.error import Errors
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Measured
from attn_jax.formats import BF16, FP32
from attn_jax.recipe import TE_RING

COMPARED = Shape(1, 16, 24, 4, 2, 16)
LARGER = Shape(1, 16, 24, 3, 1, 16)
RING = "ring of 5"
RECIPES = attribution.candidates(BF16) | {RING: attribution.of_size(TE_RING, 5)}


@pytest.mark.parametrize(
    ("name", "shape", "others"),
    [
        ("flash2", LARGER, ()),
        # Five devices do not divide the lengths.
        (RING, COMPARED, PLAIN),
        # Sums over query heads are of 16-bit numbers, or like them.
        ("flash2 (gradients by query head)", COMPARED, ()),
        ("flash2 (gradients by query head)", LARGER, (BY_HEAD_IN_16_BITS,)),
        ("flash2 (dk_accumulator)", COMPARED, ()),
        ("flash2 (dk_accumulator)", LARGER, (BY_HEAD_IN_16_BITS,)),
    ],
)
def test_the_recipe_that_fits_counts_alone_where_it_says_all(name, shape, others):
    found = judged_by(RECIPES, Fit(name, FITS), BF16, shape, COMPARED)
    assert found == Algorithms(None if others == PLAIN else name, others)
    far = judged_by(RECIPES, Fit(name, 2 * FITS), BF16, shape, COMPARED)
    assert far == judged_by(RECIPES, None, BF16, shape, COMPARED)
    assert far == Algorithms(None, PLAIN)


def test_of_fp32_inputs_ordinary_algorithms_count_too():
    found = judged_by(RECIPES, Fit("flash2", 0.0), FP32, COMPARED, COMPARED)
    assert found.fitting == "flash2" and set(PLAIN) < set(found.others)
    # Whose P dP, of weights that do not sum to 1, meets the mean of keys.
    assert "flash2 (delta of P dP)" in found.others


def measured(units: float, honest: float = 0.0) -> Measured:
    errors = Errors(units, False, *6 * [0.0])
    return Measured(errors, 0.0, 0.0, 0, honest=honest)


@pytest.mark.parametrize(("of_fitting", "lse"), [(30.0, 40.0), (90.0, 90.0)])
def test_lse_may_be_as_fp32_leaves_it_or_as_the_recipe_that_fits(of_fitting, lse):
    """Others, one of which has it in 16 bits, say nothing of it."""
    found = {"out": measured(2.0), "lse": measured(1e5, honest=40.0)}
    predicted = {
        "a": {"out": measured(1.5), "lse": measured(of_fitting)},
        "b": {"out": measured(3.0), "lse": measured(6e4)},
    }
    allowed = Algorithms("a", ("b",)).allowed(found, predicted)
    assert allowed == {"out": 3.0, "lse": lse}
    assert Algorithms(None, ("b",)).allowed(found, predicted)["lse"] == 40.0
    assert Algorithms("a").allowed(found, {}) == {"out": 0.0, "lse": 40.0}
