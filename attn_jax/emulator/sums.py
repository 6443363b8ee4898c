"""Loops over blocks, and sums that a narrow accumulator rounds on their way."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

# (running sum, number of the first product in the chunk just added) -> rounded sum.
RoundSum = Callable[[Any, Any], Any]


def dot(subscripts: str, x, y, chunk: int | None = None, keep: RoundSum | None = None):
    """einsum(subscripts, x, y) in the carrier; without HIGHEST a GPU takes TF32.

    With `keep`, the running sum is rounded after every `chunk` products, or once at
    the end for None. Two contracted axes count as one, the first of them slowest.
    """
    if keep is None:
        return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)
    if chunk is None:
        return keep(dot(subscripts, x, y), 0)
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    summed = [axis for axis in left if axis in right and axis not in result]
    x, left = _contracted_first(x, left, summed)
    y, right = _contracted_first(y, right, summed)
    inner = f"z{left},z{right}->{result}"

    def add(total, start, size):
        part = dot(inner, read(x, 0, start, size), read(y, 0, start, size))
        return keep(total + part, start)

    sizes = dict(zip(left + right, x.shape[1:] + y.shape[1:]))
    total = jnp.zeros([sizes[axis] for axis in result], x.dtype)
    return walk(add, total, x.shape[0], chunk)


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
