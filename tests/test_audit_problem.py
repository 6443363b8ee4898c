"""Exact results of a problem."""

import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.inputs import Shape
from attn_jax.audit.problem import MASKS, TOGETHER, Problem

SHAPE = Shape(2, 40, 48, 4, 2, 16)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("mask", [*MASKS, *TOGETHER])
def test_exact_results_are_those_of_the_mask(mask, absolute):
    """Which is made an array, and is the same for it."""
    problem = Problem(SHAPE, mask=mask)
    made = problem.exact(absolute=absolute)
    wanted = reference.golden(
        *problem.inputs,
        bias=problem.bias,
        mask=problem.rules,
        scale=problem.scale,
        absolute=absolute,
    )
    assert problem.is_drawn
    for name, x in wanted._asdict().items():
        got = getattr(made, name)
        assert (got is None) == (x is None)
        if x is not None:
            # Sums of 48 terms, in any order.
            np.testing.assert_allclose(got, x, rtol=1e-12, atol=1e-13, err_msg=name)


def test_all_masks_of_a_shape_have_one_program():
    """Each takes as long to compile as the target, and a process has two for each."""
    shape = Shape(1, 24, 32, 2, 2, 16)
    programs = getattr(reference._golden_head, "_cache_size")
    Problem(shape).exact()
    before = programs()
    for mask in ("causal", "window", "lengths", "packed", "causal+packed", "no keys"):
        Problem(shape, mask=mask).exact()
    assert programs() == before
    Problem(shape, mask="bias").exact()
    assert programs() == before + 1


def test_large_masks_are_no_arrays():
    assert not Problem(Shape(1, 2**13, 2**13, 1, 1, 16), mask="causal").is_drawn
