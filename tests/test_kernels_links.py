"""Hopper's forward kernel where its sum over the keys has several links."""

from unittest.mock import patch

import jax
import numpy as np
import pytest

from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.kernels import attention as kernels
from attn_jax.kernels import hopper_links, tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.interpreter import interpreted
from attn_jax.mask import Mask
from attn_jax.reference import golden
from tests.altered_kernels import fresh_programs
from tests.child_process import in_child_process

TIME_LIMIT = 120
MASKS = {
    "full": Mask(),
    "causal": Mask(is_causal=True),
    # The last rows see all links, the first nothing in the one that comes first.
    "window": Mask(window=(400, 0), query_offset=np.array([260])),
}


def _inputs(head_dim: int):
    return make_inputs("offset", 0, Shape(1, 330, 600, 1, 1, head_dim))


def _forward(head_dim: int, name: str):
    """(out in FP32, LSE) without links and with two blocks in a link."""
    query, key, value, _ = _inputs(head_dim)
    columns = tuning.configuration(
        *("hopper", head_dim, head_dim, key.shape[1]),
        is_causal=MASKS[name].is_causal,
        listed=name == "window",
    ).forward.columns
    results = []
    for chain in (key.shape[1], 2 * columns):
        with (
            patch.object(hopper_links, "KEYS", chain),
            fresh_programs(),
            made_for("hopper"),
            interpreted(),
        ):
            run = jax.jit(
                lambda *qkv: kernels.attention(
                    *qkv,
                    scale=head_dim**-0.5,
                    mask=MASKS[name],
                    out_dtype=np.dtype("float32"),
                )
            )
            results.append([np.asarray(x) for x in run(query, key, value)])
    return results


@pytest.mark.parametrize(
    ("head_dim", "name"),
    [
        (64, "causal"),
        pytest.param(128, "full", marks=pytest.mark.thorough),
        pytest.param(64, "window", marks=pytest.mark.thorough),
        pytest.param(64, "full", marks=pytest.mark.thorough),
    ],
)
def test_links_are_another_order_of_additions(head_dim, name):
    """Between the two lie the FP32 roundings of the links' sums, their rescalings and,
    without links, those of as many blocks: 16 times 2**-24 of the terms' absolute sum.

    The compiler may fuse the two programs differently, which moves an exponential by a
    bit; then P is rounded the other way once in 2**13 times, or for one row in fourteen
    of 600 keys, which moves it by at most 2**-9 of that sum.
    """
    found = in_child_process(_forward, head_dim, name, seconds=TIME_LIMIT)
    (whole, lse), (linked, lse_too) = found
    np.testing.assert_array_max_ulp(lse, lse_too, 2)
    assert whole.tobytes() != linked.tobytes()
    sums = golden(*_inputs(head_dim), mask=MASKS[name], absolute=True).out
    apart = np.abs(whole - linked)
    assert (apart <= 2.0**-9 * sums).all()
    assert np.mean(apart > 16 * 2.0**-24 * sums) <= 600 * 2.0**-13
