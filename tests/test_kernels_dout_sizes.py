"""dO far from 1, and dO with infinity or NaN, in kernels that scale dS by its norms."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.bounds.arithmetic import Arithmetic, exact
from attn_jax.bounds.forward import Forward, Head
from attn_jax.bounds.head_scale import head_scale
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.kernels.hopper_range import range_of
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.lanes import row_norms
from attn_jax.recipe import ATTN_JAX_AMPERE, Architecture
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT
from tests.child_process import in_child_process
from tests.test_kernels_interpret import Case

TIME_LIMIT = 120  # seconds
LARGEST = float(np.finfo(np.float32).max)
# Who has FP16 dS.
KERNELS: list[Any] = [
    ("hopper", "fused"),
    ("ampere", "fused"),
    pytest.param("hopper", "two_kernels", marks=pytest.mark.thorough),
]
# Of numbers that differ in the power of two that scales dS: each is rounded to BF16
# once, and is a sum of FP16 numbers, of which 2^-11 is a coarse bound.
SAME = 2 * (2.0**-9 + 2.0**-11)


def _gradients(
    target: Architecture, backward, case: Case, douts: list, dlses: list
) -> list[np.ndarray]:
    """dQ for each dO and dLSE."""
    query, key, value, *_ = case.inputs()

    @jax.jit
    def gradient(query, dout, dlse):
        def forward(query):
            return attention(query, key, value, scale=0.125, backward=backward)

        return jax.vjp(forward, query)[1]((dout, dlse))[0]

    with made_for(target), interpreted():
        found = [gradient(query, *both) for both in zip(douts, dlses, strict=True)]
    return [np.asarray(x, np.float64) for x in found]


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative, by norms."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _of_power(target: Architecture, backward, power: int) -> list[np.ndarray]:
    """dQ of a dO, and of one that is a power of two of it, brought back."""
    case = Case("normal", 40, 130, 2, 1, 64, False)
    dout = case.inputs()[3]
    scaled = np.ldexp(dout.astype(np.float32), power).astype(dout.dtype)
    nothing = np.zeros((1, 2, 40), np.float32)
    plain, far = _gradients(target, backward, case, [dout, scaled], [nothing] * 2)
    return [plain, np.ldexp(far, -power)]


@pytest.mark.parametrize(
    "power",
    [-100, *(pytest.param(x, marks=pytest.mark.thorough) for x in (-60, 60, 90))],
)
@pytest.mark.parametrize(("target", "backward"), KERNELS)
def test_digits_of_dq_do_not_depend_on_the_size_of_dout(target, backward, power):
    """Squares of 1e-30 vanish: dQ of Hopper's kernels did."""
    arguments = target, backward, power
    plain, far = in_child_process(_of_power, *arguments, seconds=TIME_LIMIT)
    assert _error(far, plain) < SAME


def _next_to_the_bound(target: Architecture, backward) -> tuple[np.ndarray, ...]:
    """dQ, and what it is, of dO whose squares are all just below FP32's range.

    A query has two keys, with weights of 1/2, and values that are opposite and along
    dO: |dS| is a fourth of its bound."""
    width = 128
    dtype = ml_dtypes.bfloat16
    dout = np.full((1, 8, 1, width), 0.98 * 2.0**-63).astype(dtype)
    # 2 |V| is next to a power of two.
    value = np.full((1, 2, 1, width), 1.40625).astype(dtype)
    value[:, 1] *= -1
    query = np.zeros_like(dout)
    key = np.ones_like(value)
    key[:, 1] = -1

    @jax.jit
    def gradient(query, dout):
        def out(query):
            return attention(query, key, value, scale=1.0, backward=backward)[0]

        return jax.vjp(out, query)[1](dout)[0]

    with made_for(target), interpreted():
        found = np.asarray(gradient(query, dout), np.float64)
    # dS is half of dP, and of either sign; so is K.
    products = dout.astype(np.float64) @ value[0, 0, 0].astype(np.float64)
    return found, np.broadcast_to(products[..., None], found.shape)


@pytest.mark.parametrize(("target", "backward"), KERNELS)
def test_squares_that_vanish_do_not_make_ds_overflow(target, backward):
    """FP16's largest number was exceeded where subnormal numbers are zero, as here."""
    arguments = target, backward
    found, exact = in_child_process(_next_to_the_bound, *arguments, seconds=TIME_LIMIT)
    # All but the sum of products and the result, rounded to BF16, is a power of two.
    np.testing.assert_allclose(found, exact, rtol=2.0**-8, atol=0)


def _spoilt(target: Architecture, backward, which: str, value: float):
    """dQ without and with a number that is none, in row 5 of head 0 of two."""
    case = Case("normal", 40, 130, 2, 1, 64, False)
    dout = case.inputs()[3]
    dlse = np.ones((1, 2, 40), np.float32)
    other, other_dlse = dout.copy(), dlse.copy()
    if which == "dout":
        other[0, 5, 0, 3] = value
    else:
        other_dlse[0, 0, 5] = value
    return _gradients(target, backward, case, [dout, other], [dlse, other_dlse])


SPOILT = ("dout", np.inf), ("dlse", np.nan)
FURTHER = ("dout", np.nan), ("dlse", -np.inf)


@pytest.mark.parametrize(
    ("which", "value", "target", "backward"),
    [
        ("dout", np.inf, "hopper", "fused"),
        ("dlse", np.nan, "ampere", "fused"),
        pytest.param("dout", np.inf, "ampere", "fused", marks=pytest.mark.ci),
        pytest.param("dlse", np.nan, "hopper", "fused", marks=pytest.mark.ci),
        *(
            pytest.param(*spoilt, *kernels, marks=pytest.mark.thorough)
            for kernels, of in (
                (("hopper", "fused"), FURTHER),
                (("ampere", "fused"), FURTHER),
                (("hopper", "two_kernels"), (*SPOILT, *FURTHER)),
            )
            for spoilt in of
        ),
    ],
)
def test_a_row_that_is_no_number_leaves_the_others_alone(
    which, value, target, backward
):
    arguments = target, backward, which, value
    plain, found = in_child_process(_spoilt, *arguments, seconds=TIME_LIMIT)
    assert not np.isfinite(found[0, 5, 0]).any()
    for x in (plain, found):
        x[0, 5, 0] = 0
    assert _error(found, plain) < SAME


def _exponent(norms, value_norm: float, dlse=None) -> int:
    """log2 r for rows of such norms."""
    numbers = KeyNumbers(
        centre=jnp.zeros((1, 1, 64)),
        key_factor=jnp.ones((1, 1, 64)),
        value_norm=jnp.full((1, 1, 64), value_norm),
        unscale=jnp.ones((1, 1, 64)),
    )
    rows = [None if x is None else jnp.float32([[x]]) for x in (norms, dlse)]
    key = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
    return int(range_of(numbers, *rows, key).row_exponent[0, 0])


@pytest.mark.parametrize("nothing", [np.nan, np.inf])
def test_rows_that_are_no_numbers_have_no_say(nothing):
    assert _exponent([3.0, 1.0], 1.0) == 12
    assert _exponent([3.0, nothing], 1.0) == 12
    assert _exponent([3.0, 1.0], 1.0, [0, nothing]) == 12
    assert _exponent([0.0, 1.0], 0.0, [7.0, -nothing]) == 12
    assert _exponent([nothing, nothing], 1.0) == 0


@pytest.mark.parametrize("without", [np.nan, np.inf])
def test_without_a_bound_r_is_the_smallest(without):
    """Such as Ampere's one-pass kernel has no integers for."""
    least = -MOST_HEAD_EXPONENT
    assert _exponent([1.0], without) == _exponent([0.0], without, [1.0]) == least
    # Squares overflow, and the bound of the norm does, too.
    assert _exponent([LARGEST, 1.0], 2.0**-20) == least
    assert _exponent([LARGEST / 2], 2.0**-20) > least
    assert _exponent([1.0], 1.0, [LARGEST]) == least


@pytest.mark.parametrize("power", [0, -49, -52, -60, -100])
@pytest.mark.parametrize("columns", [1, 64])
def test_what_dq_is_scaled_by_lies_within_the_bounds(columns, power):
    """With a single number in a row sqrt(D) max |dO| is 8 times the norm."""
    dout, value = np.zeros((4, 64), np.float32), np.ones((8, 64), np.float32)
    dout[:, :columns] = 2.0**power
    exponent = _exponent(row_norms(jnp.asarray(dout)), 8.0)
    head = Head(value[:4], value, value, None, np.ones((4, 8), bool), 1.0)
    # Not looked at where LSE has no gradient.
    unread = exact(np.zeros((4, 1)))
    unit = head_scale(
        Arithmetic(ATTN_JAX_AMPERE, "deterministic"),
        [head],
        [Forward(unread, unread, unread, unread)],
        [dout.astype(np.float64)],
        [None],
    )
    assert unit.low <= 2.0**-exponent <= unit.high
    # Beyond, squares vanish in the carrier, and r may be 1 for all that is known.
    if power >= -52:
        assert unit.high <= 16 * unit.low


def test_a_bound_that_vanishes_is_a_small_one():
    most = MOST_HEAD_EXPONENT
    assert _exponent([2.0**-120], 2.0**-60) == _exponent([2.0**-90], 1.0) == most
    # There is nothing to scale.
    assert _exponent([0.0], 1.0) == _exponent([1.0], 0.0) == 0
    assert _exponent([LARGEST], 0.0) == 0
