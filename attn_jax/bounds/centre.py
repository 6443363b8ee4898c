"""What dQ is centred at, and how far from it the computed centre may be."""

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from attn_jax.audit.error import correctly_rounded
from attn_jax.bounds.arithmetic import (
    SUM_ROUNDOFFS,
    Arithmetic,
    Ball,
    Unit,
    exact,
    where,
)
from attn_jax.bounds.forward import Forward, Head, blocks
from attn_jax.bounds.ring import shares
from attn_jax.formats import FP32, NumberFormat
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT, Recipe


def centre_of(
    arithmetic: Arithmetic, head: Head, fwd: Forward, interval: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The centre [T, H] of dQ's correction and a bound of the error of computing it.

    For dq_centre 'keys' the c that all rows have, and how far from it another order of
    sums may put c: 0 but near a tie.
    `interval`: the mask leaves each row one run of keys; then the mean is over what any
    row of the same block of queries sees, else over what the row itself sees.
    """
    recipe, shape = arithmetic.recipe, head.query.shape
    if recipe.dq_centre == "none" or head.soft_cap is not None:
        return np.zeros(shape), np.zeros(shape)
    if recipe.dq_centre == "keys":
        middle, width = _of_all_keys(recipe, head.key)
        return np.broadcast_to(middle, shape), np.broadcast_to(width, shape)
    if recipe.dq_centre == "row":
        return fwd.columns.value, fwd.columns.worst
    T, S = head.visible.shape
    seen = head.visible.astype(np.float64)
    if interval:
        size = T // recipe.ring_size
        within = [
            blocks(size, recipe.backward_block_q, first=share.start)
            for share in shares(T, recipe.ring_size)
        ]
        for rows in itertools.chain(*within):
            columns = np.flatnonzero(head.visible[rows].any(0))
            seen[rows] = 0.0
            if len(columns):
                seen[rows, columns[0] : columns[-1] + 1] = 1.0
    count = np.maximum(seen.sum(-1, keepdims=True), 1.0)
    # As a difference of two running sums it may cost the size of all keys together.
    total = np.abs(head.key).sum(0)
    u = 2 * (S + 2) * arithmetic.roundoff
    return seen @ head.key / count, 2 * u * total / count


def _of_all_keys(recipe: Recipe, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Middle and half width [H] of where FP32 sums in any order may put c."""
    n = len(key)
    u = np.expm1((n + 8) * math.log1p(SUM_ROUNDOFFS * FP32.unit_roundoff))
    mean, square = key.mean(0), np.square(key).mean(0)
    tiny = np.where(square > 0, 32 * FP32.min_normal, 0.0)
    off, off_square = u * np.abs(key).mean(0) + tiny, u * square + tiny
    least, most = np.maximum(np.abs(mean) - off, 0.0), np.abs(mean) + off

    low, high = (
        np.frexp(np.sqrt(np.maximum(x, 0.0)))[1] + 1 - recipe.inputs.mantissa_bits
        for x in (square - off_square, square + off_square)
    )
    means = mean - off, mean + off
    units = [np.ldexp(1.0, np.clip(place, -100, 100)) for place in (low, high)]
    found = [np.rint(x / unit) * unit for unit in units for x in means]
    # Whatever the place, c is no more than twice what it rounds.
    any_place = (square <= off_square) | (high > low + 1)
    found += [np.where(any_place, 2 * x, found[0]) for x in means]
    # Where a sum overflows, there is no centre.
    may_be_zero = 17 * least**2 <= square + off_square + tiny
    may_be_zero |= any_place | (n * (square + off_square) >= FP32.max_finite)
    found.append(np.where(may_be_zero, 0.0, found[0]))
    ends = np.min(found, 0), np.max(found, 0)
    is_zero = 17 * most**2 + tiny <= square - off_square
    if recipe.inputs.max_finite**2 < FP32.max_finite:
        is_zero |= 4 * np.abs(key).max(0) > recipe.inputs.max_finite
    low_end, high_end = (np.where(is_zero, 0.0, end) for end in ends)
    return (low_end + high_end) / 2, (high_end - low_end) / 2


class DqKeys(NamedTuple):
    """What dS is multiplied by in dQ [S, H], its format's least normal number and, for
    dq_sum 'integers', what one of them is worth, times r."""

    numbers: Ball
    least: float
    integer: float | None = None


def keys_as_given(recipe: Recipe, key: np.ndarray) -> DqKeys:
    return DqKeys(exact(key), recipe.inputs.min_normal)


def centred_keys(
    arithmetic: Arithmetic, key: np.ndarray, centre: np.ndarray, sure: np.ndarray
) -> DqKeys:
    """K' of dq_centre 'keys' [S, H]: K - c with the error of rounding it.

    That is none where the format of K' holds K - c, in columns where c is `sure`.
    """
    fmt, power = _format_and_scale(arithmetic.recipe, key)
    difference = key - centre
    as_inputs = dataclasses.replace(arithmetic.recipe, inputs=fmt)
    result = dataclasses.replace(arithmetic, recipe=as_inputs).step(
        "inputs", arithmetic.carried(exact(difference), 2), Unit(1 / power, 1 / power)
    )
    if arithmetic.kind == "order":
        # One difference of two numbers has no order.
        result = result._replace(spread=np.zeros(key.shape))
    held = correctly_rounded(difference * power, fmt) == difference * power
    held &= difference + centre == key  # FP64 rounded nothing away
    numbers = where(held & sure, exact(difference), result)
    integer = 1 / power if arithmetic.recipe.dq_sum == "integers" else None
    return DqKeys(numbers, fmt.min_normal / power, integer)


def _format_and_scale(recipe: Recipe, key: np.ndarray) -> tuple[NumberFormat, float]:
    """The format of K' and the power of two w that K' is scaled by in it."""
    step = recipe.dq_dlogits
    if step is None or not recipe.scales_heads:
        return recipe.inputs, 1.0
    largest = np.abs(key).max()
    exponent = step.format.max_exponent - (np.frexp(largest)[1] + 1)
    exponent = np.clip(exponent, -MOST_HEAD_EXPONENT, MOST_HEAD_EXPONENT)
    return step.format, float(np.ldexp(1.0, exponent)) if largest > 0 else 1.0
