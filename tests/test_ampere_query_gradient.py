"""dQ's sums of integers on Ampere: how they lie, and the kernel that ends them.

The interpreter has no threads in a warpgroup: which thread adds what, and where, is
looked up in the layouts.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.kernels import ampere_fixed_point as fixed_point
from attn_jax.kernels.ampere_query_gradient import query_gradient
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.hopper_query_gradient import by_xla
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.interpreter import interpreted
from tests.child_process import in_child_process

TIME_LIMIT = 120  # seconds


def _in_order(sums: jax.Array) -> jax.Array:
    """As [B, T, N, H]."""
    return jax.vmap(jax.vmap(fixed_point.in_order))(sums).swapaxes(1, 2)


def _elements_of_threads(layout, shape: tuple[int, int]) -> np.ndarray:
    """[threads, registers, vector]: which elements of an array they hold."""
    x = np.arange(math.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, sizes = x.shape[: -len(tile)], x.shape[-len(tile) :]
        split = [(size // part, part) for size, part in zip(sizes, tile, strict=True)]
        x = x.reshape(*lead, *itertools.chain(*split))
        outer = range(len(lead), x.ndim, 2)
        x = x.transpose(*range(len(lead)), *outer, *(i + 1 for i in outer))
    threads = [x.ndim + axis for axis in (*layout.warp_dims, *layout.lane_dims)]
    vector = x.ndim + layout.vector_dim
    others = [i for i in range(x.ndim) if i not in (*threads, vector)]
    x = x.transpose(*threads, *others, vector)
    return x.reshape(fixed_point.THREADS, -1, x.shape[-1])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries", [32, 64])
def test_threads_add_where_sums_are_to_lie(head_dim, queries):
    """Of which the interpreter knows nothing."""
    shape = queries, fixed_point.COLUMNS
    elements = _elements_of_threads(fixed_point.ACCUMULATOR.to_mgpu(), shape)
    groups, odd, width = fixed_point.shape_of_sums(1, 1, queries, head_dim)[2:]
    strides, offsets = fixed_point.places(shape, odd * width, width)
    sums = np.full((groups, odd, width), -1)
    for thread in range(fixed_point.THREADS):
        warp, lane = divmod(thread, 32)
        start = np.dot(strides, (*divmod(warp, 2), lane))
        np.put(sums, start + np.array(offsets), elements[thread])
    # The first 64 columns; those of the other warpgroup lie behind.
    sums, rest = np.split(sums, [4 * fixed_point.COLUMNS], axis=2)
    assert (rest == -1).all()
    found = np.asarray(fixed_point.in_order(jnp.asarray(sums)))
    np.testing.assert_array_equal(found.ravel(), np.arange(math.prod(shape)))
    again = np.asarray(fixed_point.as_stored(jnp.asarray(found)))
    np.testing.assert_array_equal(again, sums)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_threads_read_what_they_end(head_dim):
    """Even and odd columns of the same 8 numbers."""
    shape = fixed_point.strip_of(head_dim), head_dim
    stored = np.arange(math.prod(shape)).reshape(shape)
    stored = np.asarray(fixed_point.as_stored(jnp.asarray(stored)))
    layout = fixed_point.halves(head_dim).to_mgpu()
    places = _elements_of_threads(layout, (stored.shape[0], stored.shape[2]))
    halves = [stored[:, i].ravel()[places] for i in range(2)]
    found = np.stack(halves, axis=-1).reshape(fixed_point.THREADS, 1, -1)
    expected = _elements_of_threads(
        fixed_point.fragments(head_dim).tile.to_mgpu(), shape
    )
    np.testing.assert_array_equal(found, expected)


@dataclasses.dataclass(frozen=True)
class End:
    """dQ's end: its sums are of a multiple of 32 rows."""

    shape: tuple[int, int, int, int]  # B, T, N, H
    key_heads: int

    def arguments(self):
        """(sums, numbers, row_sum): products of the latter with the centre are exact,
        so that it makes no difference whether their sum is fused."""
        batch, count, heads, head_dim = self.shape
        rng = np.random.default_rng(0)
        rows = -(-count // 32) * 32
        shape = fixed_point.shape_of_sums(batch, heads, rows, head_dim)
        sums = rng.integers(-(2**30), 2**30, shape) >> rng.integers(0, 30, shape)
        powers = rng.integers(-9, 9, (2, batch, self.key_heads))
        wide = batch, self.key_heads, head_dim
        centre, row_sum = (
            rng.integers(-99, 99, x) / 64 for x in (wide, (batch, heads, count))
        )
        numbers = Range(
            jnp.float32(centre),
            jnp.float32(np.broadcast_to(2.0 ** powers[0][..., None], wide)),
            jnp.int32(powers[1]),
        )
        return jnp.int32(sums), numbers, jnp.float32(row_sum)


def _ended(end: End):
    """By the kernel."""
    sums, numbers, row_sum = end.arguments()

    def program(sums, row_sum):
        return query_gradient(
            *(sums, numbers, row_sum, 0.3, jnp.bfloat16),
            query_count=end.shape[1],
        )

    return jax.device_get(jax.jit(program)(sums, row_sum))


def _interpreted_end(end: End):
    with made_for("ampere"), interpreted(detect_races=True):
        return _ended(end)


def _expected_end(end: End):
    """As the kernel's docstring has it, which is `hopper_query_gradient`'s, too."""
    sums, numbers, row_sum = end.arguments()

    @jax.jit
    def expected(sums, row_sum):
        total = _in_order(sums)[:, : end.shape[1]].astype(jnp.float32)
        return by_xla([total], numbers, row_sum, 0.3, jnp.bfloat16)

    return jax.device_get(expected(sums, row_sum))


ENDS = [
    End((2, 72, 4, 128), 2),
    End((1, 128, 2, 64), 2),
    End((2, 45, 3, 64), 1),
]


def _check_end(found, end: End) -> None:
    expected = _expected_end(end)
    assert found.dtype == expected.dtype == jnp.bfloat16
    assert np.isfinite(found.astype(np.float32)).all()
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("end", ENDS, ids=str)
def test_the_end_has_the_bits_of_xla(end):
    _check_end(in_child_process(_interpreted_end, end, seconds=TIME_LIMIT), end)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "end", [*ENDS, End((2, 1000, 6, 64), 3), End((1, 2048, 8, 128), 2)], ids=str
)
def test_the_end_on_a_gpu(end):
    with made_for("ampere"):
        _check_end(_ended(end), end)
