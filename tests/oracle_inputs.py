"""Inputs and a recipe under which attention needs no rounding, forward or backward."""

import dataclasses

import numpy as np

from attn_jax.audit.inputs import Inputs, Shape
from attn_jax.formats import BF16, number_format
from attn_jax.recipe import EXACT_FP32, Step

SHAPE = Shape(1, 16, 32, 2, 1, 4)
BLOCKS = {
    name: 10  # divides neither length
    for name in ("block_q", "block_kv", "backward_block_q", "backward_block_kv")
}


def powers_of_two(parts=1) -> Inputs:
    """Logits q.k that are small integers, with sum_j 2^x_ij = 1 in every row.

    Each of `parts` equal shares of the keys sums to 1 / parts. V and dO are small
    whole numbers, so with scale = ln 2 and exponential exp2 no step has to round. A
    row's maximum rises from block to block, wanders or falls.
    """
    rng = np.random.default_rng(0)
    B, T, S, N, K, H = dataclasses.astuple(SHAPE)

    def exponents(arrange):
        total = 1 - parts
        values = [total - 1, total - 2, total - 2]
        while len(values) < S // parts:
            # Splits a smaller one: 2^x = 2^(x-1) + 2^(x-1).
            splits = np.array(values) > total - 8
            splits[:2] = False
            index = int(rng.choice(np.flatnonzero(splits)))
            values[index] -= 1
            values.append(values[index])
        return arrange(np.array(values))

    k = np.zeros((B, S, K, H))
    arrangements = (np.sort, rng.permutation, lambda x: -np.sort(-x))
    for column, arrange in enumerate(arrangements):
        patterns = [exponents(arrange) for _ in range(parts)]
        k[..., column] = np.concatenate(patterns)[None, :, None]
    q = np.zeros((B, T, N, H))
    # Each row follows one of the three patterns.
    np.put_along_axis(q, rng.integers(0, 3, (B, T, N, 1)), 1.0, -1)
    v = rng.integers(-2, 3, (B, S, K, H)).astype(float)
    k[..., 3:] = rng.integers(-2, 3, (B, S, K, H - 3))
    dout = rng.integers(-1, 2, (B, T, N, H)).astype(float)
    return Inputs(q, k, v, dout)


LN2 = float(np.log(2))
# LSE is 0 up to a few ulp of log: in a format this coarse it is 0, so that the backward
# pass, too, starts from exact powers of two.
COARSE = Step(number_format(4, 3))
EXACT = dataclasses.replace(
    EXACT_FP32,
    name="exact",
    exponential="exp2",
    scale_at="exponent",
    lse=COARSE,
    **BLOCKS,
)


def exact_dlse():
    B, T, _, N, _, _ = dataclasses.astuple(SHAPE)
    return np.random.default_rng(1).integers(-1, 2, (B, N, T)).astype(float)


# Op by op, the shape and tiles of the exact cases save compiling programs of one op.
SMALL = dataclasses.replace(EXACT_FP32, inputs=BF16, **BLOCKS)


def random_dlse(shape: Shape) -> np.ndarray:
    B, T, _, N, _, _ = dataclasses.astuple(shape)
    return np.random.default_rng(1).standard_normal((B, N, T))
