"""Masks, sinks and soft caps in the interpreted kernels, against FP64.

Each case is interpreted in another process under a time limit, as in
tests/test_kernels_interpret.py.
"""

from typing import NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.mask_cases import (
    DTYPES,
    FORMATS,
    Case,
    mask_cases,
    sink_gradient_bound,
)
from attn_jax.kernels import schedule
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.interpreter import interpreted
from attn_jax.recipe import Architecture
from tests.altered_kernels import fresh_programs
from tests.child_process import in_child_process

TIME_LIMIT = 180  # seconds; a case takes five to twenty alone on a core
T, S, N, K = 150, 290, 2, 1
# Those with a bias are in tests/test_kernels_bias.py.
CASES = {name: case for name, case in mask_cases(T, S, N).items() if case.bias is None}


class Results(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dsinks: np.ndarray | None


def _inputs(case: Case):
    """query, key, value, dout, dlse; keys far from zero, whose mean dQ must not see."""
    rng = np.random.default_rng(1)
    shapes = [(case.batch, n, heads, case.head_dim) for n, heads in ((T, N), (S, K))]
    query, key, value, dout = (
        (rng.standard_normal(shapes[i]) + shift).astype(DTYPES[case.dtype])
        for i, shift in ((0, 0), (1, 2), (1, 0), (0, 0))
    )
    dlse = rng.standard_normal((case.batch, N, T)).astype(np.float32)
    return query, key, value, dout, dlse


def _kernels(
    architecture: Architecture, case: Case, detect_races: bool = False
) -> Results:
    query, key, value, dout, dlse = _inputs(case)
    sinks = None if case.sinks is None else jnp.asarray(case.sinks, jnp.float32)

    @jax.jit
    def both(query, key, value, mask, sinks, dout, dlse):
        def forward(query, key, value, sinks):
            scale = case.head_dim**-0.5
            return attention(
                query,
                key,
                value,
                scale=scale,
                mask=mask,
                sinks=sinks,
                soft_cap=case.soft_cap,
            )

        results, backward = jax.vjp(forward, query, key, value, sinks)
        return Results(*results, *backward((dout, dlse)))

    mask = jax.tree.map(jnp.asarray, case.mask)
    with made_for(architecture), interpreted(detect_races=detect_races):
        return jax.device_get(both(query, key, value, mask, sinks, dout, dlse))


def _check(case: Case, results: Results) -> None:
    """The project's bar, 1.7 units; see tests/test_kernels_interpret.py."""
    sinks = None if case.sinks is None else np.asarray(case.sinks)
    golden = reference.golden(
        *_inputs(case), mask=case.mask, sinks=sinks, soft_cap=case.soft_cap
    )
    for field in ("out", "dquery", "dkey", "dvalue"):
        got, want = getattr(results, field), getattr(golden, field)
        assert np.isfinite(got.astype(np.float32)).all(), field
        # Where nothing is seen there is nothing to round.
        assert not got[want == 0].any(), field
        # Under a soft cap the centre does not take up the error of delta.
        limit = 2.0 if field == "dquery" and case.soft_cap else 1.7
        assert unit_error(got, want, FORMATS[case.dtype]) <= limit, field
    empty = np.isneginf(golden.lse)
    np.testing.assert_array_equal(np.isneginf(results.lse), empty)
    # As in tests/test_kernels_interpret.py: logits of at most 40 here, H = 128.
    bound = 2.0**-24 * (133 * 40 + S + 8)
    assert np.abs(results.lse[~empty] - golden.lse[~empty]).max() <= bound
    if sinks is not None:
        bound = sink_gradient_bound(golden, sinks, _inputs(case)[3], case.dtype)
        assert (np.abs(results.dsinks - golden.dsinks) <= bound).all()


# What these have is in others, too.
FURTHER = {"unsorted", "soft-cap-window", "window-far", "window-after-offset"}
FURTHER |= {"lengths", "documents"}
# Ids are in the test of races, a soft cap in that of a bias.
OF_AMPERE = {"lengths", "dense"}
assert FURTHER | OF_AMPERE <= set(CASES)
# A dense mask is in the test of races, which looks at the results as well.
DEFAULT = {"hopper": set(CASES) - FURTHER - {"dense"}, "ampere": OF_AMPERE}
# Windows and sinks are in `test_kernel_options`.
IN_CI = {"sink-alone", "window"}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(
            *(architecture, name),
            marks=[pytest.mark.thorough] * (name not in names)
            + [pytest.mark.ci] * (name in IN_CI),
        )
        for architecture, names in DEFAULT.items()
        for name in CASES
    ],
)
def test_masked_kernels_are_as_good_as_correctly_rounded(architecture, name):
    case = CASES[name]
    results = in_child_process(_kernels, architecture, case, seconds=TIME_LIMIT)
    _check(case, results)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("hopper", "dense"),
        pytest.param("hopper", "documents", marks=pytest.mark.thorough),
        ("ampere", "documents"),
        pytest.param("ampere", "dense", marks=pytest.mark.thorough),
    ],
)
def test_no_races_under_a_mask(architecture, name):
    case = CASES[name]
    results = in_child_process(_kernels, architecture, case, True, seconds=TIME_LIMIT)
    _check(case, results)


def _on_one_multiprocessor(case: Case) -> Results:
    with patch.object(schedule, "H100_MULTIPROCESSORS", 1), fresh_programs():
        return _kernels("hopper", case)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["documents", "window-far"])
def test_tiles_in_turn_are_as_good_as_one_to_a_cta(name):
    case = CASES[name]
    limit = {"seconds": TIME_LIMIT}
    alone = in_child_process(_kernels, "hopper", case, **limit)
    in_turn = in_child_process(_on_one_multiprocessor, case, **limit)
    _check(case, in_turn)
    np.testing.assert_array_equal(in_turn.out, alone.out)
    np.testing.assert_array_equal(in_turn.lse, alone.lse)
