"""Loops over blocks, and sums that a narrow accumulator rounds on their way."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_jax.formats import FP64
from attn_jax.varying import varying_alike

# (running sum, number of the first product in the chunk just added) -> rounded sum.
RoundSum = Callable[[Any, Any], Any]
# Stands for the exponent of zero, which no sum of two others reaches.
_NO_EXPONENT = -5000


class Alignment(NamedTuple):
    """`dot_alignment` and the least exponents of both operands and the running sum.

    The second operand's may be an array that fits the result.
    """

    bits: int
    left: int
    right: int | jax.Array
    total: int


def dot(
    subscripts: str,
    x,
    y,
    chunk: int | None = None,
    keep: RoundSum | None = None,
    alignment: Alignment | None = None,
):
    """einsum(subscripts, x, y) in the carrier; without HIGHEST a GPU takes TF32.

    With `keep`, the running sum is rounded after every `chunk` products, or once at
    the end for None. Two contracted axes count as one, the first of them slowest.
    With `alignment`, which needs a chunk, addends are cut off before they are added.
    """
    if keep is None and alignment is None:
        return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)
    if chunk is None:
        assert keep is not None and alignment is None
        return keep(dot(subscripts, x, y), 0)
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    summed = [axis for axis in left if axis in right and axis not in result]
    x, left = _contracted_first(x, left, summed)
    y, right = _contracted_first(y, right, summed)
    inner = f"z{left},z{right}->{result}"

    def add(total, start, size):
        run = read(x, 0, start, size), read(y, 0, start, size)
        if alignment is None:
            total = total + dot(inner, *run)
        else:
            run = _spread(run[0], left, result), _spread(run[1], right, result)
            total = _add_aligned(total, *run, alignment)
        return total if keep is None else keep(total, start)

    sizes = dict(zip(left + right, x.shape[1:] + y.shape[1:]))
    total = jnp.zeros([sizes[axis] for axis in result], x.dtype)
    return walk(add, varying_alike(total, x, y)[0], x.shape[0], chunk)


def row_sum(x, chunk: int | None = None, keep: RoundSum | None = None):
    """Sum over the last axis, which stays as one of size 1; rounded as in `dot`."""
    if keep is None:
        return x.sum(-1, keepdims=True)
    if chunk is None:
        return keep(row_sum(x), 0)

    def add(total, start, size):
        return keep(total + row_sum(read(x, x.ndim - 1, start, size)), start)

    return walk(add, jnp.zeros_like(x[..., :1]), x.shape[-1], chunk)


def _contracted_first(x, axes: str, summed: list[str]):
    kept = "".join(axis for axis in axes if axis not in summed)
    order = [axes.index(axis) for axis in (*summed, *kept)]
    x = x.transpose(order)
    return x.reshape(-1, *x.shape[len(summed) :]), kept


def _spread(x, axes: str, result: str):
    """[run, axes] to [run, result], of size 1 where x lacks an axis."""
    order = sorted(range(len(axes)), key=lambda i: result.index(axes[i]))
    x = x.transpose(0, *(1 + i for i in order))
    return jnp.expand_dims(
        x, [1 + i for i, axis in enumerate(result) if axis not in axes]
    )


def _add_aligned(total, x, y, alignment: Alignment):
    """total + sum of x y over the first axis, each addend cut off as aligned.

    In FP64 a sum of addends that were cut off is exact, in any order. The products are
    held for one run alone.
    """
    exponents = _exponent(x, alignment.left) + _exponent(y, alignment.right)
    largest = jnp.maximum(exponents.max(0), _exponent(total, alignment.total))
    # Where all are zero any unit does, if it and its reciprocal are in range.
    shift = alignment.bits - jnp.clip(largest, -900, 900)
    up = _power_of_two(shift)
    whole = jnp.trunc(total * up) + jnp.trunc(x * y * up).sum(0)
    return whole * _power_of_two(-shift)


def _exponent(x, least: int | jax.Array):
    """That of FP64 numbers, read from their bits: compiles faster than frexp."""
    bits = lax.bitcast_convert_type(x, jnp.int64)
    field = (bits >> FP64.mantissa_bits).astype(jnp.int32) & 2047
    return jnp.where(x == 0, _NO_EXPONENT, jnp.maximum(field - 1023, least))


def _power_of_two(exponent):
    field = (exponent + 1023).astype(jnp.int64)
    return lax.bitcast_convert_type(field << FP64.mantissa_bits, jnp.float64)


def walk(
    step, carry: Any, length: int, block: int | None, reverse: bool = False
) -> Any:
    """carry = step(carry, start, size) over blocks of `length`, the last one shorter.

    No padding: the short block is its own call, and full blocks share one scan. A
    single full block is called directly, so a short sequence costs one plain tile.
    """
    block = min(block or length, length)
    full, rest = divmod(length, block)
    ends = [(full * block, rest)] if rest else []
    if reverse:
        for start, size in ends:
            carry = step(carry, start, size)
    if full == 1:
        carry = step(carry, 0, block)
    else:
        carry = lax.scan(
            lambda state, start: (step(state, start, block), None),
            carry,
            jnp.arange(full, dtype=jnp.int32) * block,
            reverse=reverse,
        )[0]
    if not reverse:
        for start, size in ends:
            carry = step(carry, start, size)
    return carry


def read(x, axis: int, start, size: int):
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def write(x, part, axis: int, start):
    if x.shape[axis] == part.shape[axis]:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, start, axis)
