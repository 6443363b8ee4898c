"""Exact results of a problem."""

import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.exact import visible
from attn_jax.audit.inputs import Shape
from attn_jax.audit.problem import MASKS, TOGETHER, Problem
from attn_jax.mask import Mask

SHAPE = Shape(2, 40, 48, 4, 2, 16)


def every_pair_that_is_seen(problem: Problem) -> np.ndarray:
    T, S = problem.shape.query_length, problem.shape.key_length
    seen = visible(problem.rules, T, S)
    return np.ones((1, 1, T, S), bool) if seen is None else seen


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("mask", [*MASKS, *TOGETHER])
def test_exact_results_are_those_of_the_mask(mask, absolute):
    """To the bit those of an array that NumPy makes of its rules."""
    problem = Problem(SHAPE, mask=mask)
    made = problem.exact(absolute=absolute)
    wanted = reference.golden(
        *problem.inputs,
        bias=problem.bias,
        mask=Mask(dense=every_pair_that_is_seen(problem)),
        scale=problem.scale,
        absolute=absolute,
    )
    assert problem.is_drawn
    for name, x in wanted._asdict().items():
        np.testing.assert_array_equal(getattr(made, name), x, err_msg=name)


def test_all_masks_of_a_shape_have_one_program():
    """Each takes as long to compile as the target, and a process has two for each."""
    shape = Shape(2, 24, 32, 2, 2, 16)
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
