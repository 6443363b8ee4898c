"""Arithmetic of a kernel's scalars is Python's, whatever they are."""

import jax
import numpy as np
import pytest

from attn_jax.kernels import integers


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 6, 64, 97])
def test_remainders_are_those_of_python(divisor):
    """By bits where the divisor is a power of two, traced or not."""
    numbers = np.arange(2 * 97, dtype=np.int32)
    want = numbers % divisor
    traced = jax.jit(lambda x: integers.rem(x, divisor))(numbers)
    for got in (traced, integers.rem(numbers, divisor)):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == np.int32
    assert [integers.rem(int(x), divisor) for x in numbers] == want.tolist()
