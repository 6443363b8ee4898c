"""The kernel that makes dQ of its sums after the backward pass in one pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.kernels.hopper_query_gradient import Plan, by_xla, query_gradient
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.interpreter import interpreted
from tests.child_process import in_child_process
from tests.gpu_compiler import Program, compiled

TIME_LIMIT = 120  # seconds


def _arguments(shape, key_heads: int, first: int | None):
    """(sums, numbers): of sums that lie apart those from row `first`."""
    batch, count, _, head_dim = shape
    rng = np.random.default_rng(0)
    sums = [jnp.asarray(rng.standard_normal(shape), jnp.float32)]
    if first is not None:
        later = (batch, count - first, *shape[2:])
        sums.append(jnp.asarray(rng.standard_normal(later), jnp.float32))
    powers = rng.integers(-9, 9, (2, batch, key_heads))
    factor = np.broadcast_to(2.0 ** powers[0][..., None], (*powers[0].shape, head_dim))
    zero = jnp.zeros((batch, key_heads, head_dim))
    return sums, Range(zero, jnp.float32(factor), jnp.int32(powers[1]))


def _both(shape, key_heads: int, first: int | None, dtype, plan: Plan):
    """dQ by the kernel, and by XLA."""
    sums, numbers = _arguments(shape, key_heads, first)

    @jax.jit
    def by_kernel(*sums):
        return query_gradient(sums, numbers, None, 0.3, dtype, plan=plan)

    @jax.jit
    def expected(*sums):
        return by_xla(sums, numbers, None, 0.3, dtype)

    with interpreted(detect_races=True):
        found = jax.device_get(by_kernel(*sums))
    return found, jax.device_get(expected(*sums))


@pytest.mark.parametrize(
    ("shape", "key_heads", "first", "dtype", "plan"),
    [
        # Tiles that are not full, more of them than slots, heads of a group.
        ((2, 72, 4, 128), 2, None, jnp.bfloat16, Plan(ctas=3)),
        # Sums of short tiles, from a tile's first row; from the first tile on.
        ((1, 320, 2, 64), 2, 128, jnp.float16, Plan(ctas=2)),
        ((2, 200, 2, 128), 1, 128, jnp.bfloat16, Plan(ctas=2)),
    ],
)
def test_the_kernel_has_the_bits_of_xla(shape, key_heads, first, dtype, plan):
    found, expected = in_child_process(
        *(_both, shape, key_heads, first, dtype, plan), seconds=TIME_LIMIT
    )
    assert found.dtype == expected.dtype == dtype
    assert np.isfinite(found.astype(np.float32)).all()
    assert found.tobytes() == expected.tobytes()


def test_what_rows_sum_to_meets_sums_that_lie_apart():
    """In this process, where shapes are checked against what is declared."""
    sums, numbers = _arguments((2, 72, 4, 64), 2, 40)
    rng = np.random.default_rng(1)
    centre = jnp.asarray(rng.standard_normal((2, 2, 64)), jnp.float32)
    row_sum = jnp.asarray(rng.standard_normal((2, 4, 72)), jnp.float32)
    numbers = numbers._replace(centre=centre)
    found = query_gradient(sums, numbers, row_sum, 0.3, jnp.float32)
    wide = [np.asarray(x, np.float64) for x in (*sums, *numbers.undone(), centre)]
    total, later, *powers, centre = wide
    total[:, 40:] += later
    factor = np.repeat(powers[0] * powers[1], 2, axis=1)[:, None, :, None]
    shift = np.asarray(row_sum, np.float64).swapaxes(1, 2)[..., None]
    shift = shift * np.repeat(centre, 2, axis=1)[:, None]
    wanted = 0.3 * (total * factor + shift)
    # Two sums, a product and the scale, which itself is rounded: factors are powers.
    size = 0.3 * (np.abs(total * factor) + np.abs(shift))
    size[:, 40:] += 0.3 * np.abs(later * factor)
    assert (np.abs(found - wanted) <= 5 * 2.0**-24 * size).all()


def _compiled(head_dim: int, first: int | None) -> Program:
    shape = 2, 1088, 4, head_dim
    sums = [jax.ShapeDtypeStruct(shape, "float32")]
    if first is not None:
        sums.append(jax.ShapeDtypeStruct((2, 1088 - first, 4, head_dim), "float32"))
    of_heads = jax.ShapeDtypeStruct((2, 2, head_dim), "float32")
    exponents = jax.ShapeDtypeStruct((2, 2), "int32")

    def program(centre, factor, exponent, *sums):
        numbers = Range(centre, factor, exponent)
        return query_gradient(sums, numbers, None, 0.3, jnp.bfloat16)

    return compiled(program, of_heads, of_heads, exponents, *sums)


@pytest.mark.ci
@pytest.mark.parametrize(("head_dim", "first"), [(64, None), (128, 640)])
def test_nothing_spills_and_two_ctas_fit(head_dim, first):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `compile`")
    program = in_child_process(_compiled, head_dim, first, seconds=TIME_LIMIT)
    (kernel,) = program.kernels
    assert kernel.spilled_bytes == 0
    # Of an H200's multiprocessor; each CTA takes 1024 bytes more than it asks for.
    assert first or 2 * (kernel.shared_memory + 1024) <= 233472
