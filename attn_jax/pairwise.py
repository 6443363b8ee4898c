"""Sums in an order that the program fixes and XLA does not change.

XLA tries out, while it compiles for a GPU, which of two emitters is faster for a fusion
that holds a reduction (`xla_gpu_experimental_enable_fusion_autotuner`), and each adds
in an order of its own: a program that is compiled twice, on a busy machine, may differ
in the last bit. `jnp.cumsum` is a tree of windows there, or a kernel of CUB's, as XLA
likes. It leaves additions alone that are written out.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Along the last axis halves are as many numbers that lie together. A program of all the
# additions would have each thread read a row of its own: XLA makes two of them, and the
# first still reads whole sectors of memory.
_COALESCED = 16
# Along another one a thread of a program adds so many numbers, if that leaves a few or
# more: if it added all, a result of few numbers would leave most of a card idle.
_BY_A_THREAD, _FEW = 32, 8


def pairwise_sum(
    x: Float[Array, "..."], axis: int, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Sum along an axis, the upper half onto the lower until one is left.

    Rounds to the type of x after each addition, log2(n) times on the way of a term, so
    that the error is at most log2(n) units in the last place of the sum of the absolute
    values (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2).
    """
    axis %= x.ndim
    if not x.shape[axis]:
        x = jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
    start, is_last = x.shape[axis], axis == x.ndim - 1
    while (size := x.shape[axis]) > 1:
        enough = _FEW <= size <= start // _BY_A_THREAD
        if size == _COALESCED if is_last else enough:
            x, start = lax.optimization_barrier(x), size
        half = -(-size // 2)
        lower = lax.slice_in_dim(x, 0, half, axis=axis)
        upper = lax.slice_in_dim(x, half, size, axis=axis)
        missing = [(0, 0)] * x.ndim
        missing[axis] = (0, 2 * half - size)
        x = lower + jnp.pad(upper, missing)
    return x if keepdims else lax.squeeze(x, (axis,))


def pairwise_mean(
    x: Float[Array, "..."], axis: int, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """`pairwise_sum` over the number of terms."""
    return pairwise_sum(x, axis, keepdims=keepdims) / x.shape[axis]


def pairwise_cumsum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Sums of the first 1, 2, ... entries along an axis, of pairs, pairs of pairs, ...

    Rounds to the type of x after each addition, at most 2 log2(n) times on the way of a
    term (Brent & Kung 1982), so that the error is at most so many units in the last
    place of the sum of the absolute values.
    """
    return lax.associative_scan(jnp.add, x, axis=axis)
