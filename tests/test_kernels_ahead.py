"""Hopper's forward kernel where the first logits of a tile are made ahead."""

import dataclasses
from unittest.mock import patch

import jax
import numpy as np
import pytest

from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.kernels import design, schedule
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.interpreter import interpreted
from attn_jax.kernels.tilings import ForwardTiling
from attn_jax.mask import Mask
from tests.child_process import in_child_process

TIME_LIMIT = 180


def _results(
    tiling: ForwardTiling, shape: Shape, mask: Mask, multiprocessors: int, races: bool
):
    """out and LSE of a call that nobody differentiates: else there is no `ahead`."""
    *qkv, _ = make_inputs("offset", 0, shape)
    dims = shape.head_dim, shape.head_dim
    table = design.configuration_of("hopper", *dims, shape.key_length, mask)
    own = table._replace(forward=tiling)

    def attend(*qkv):
        options = {"scale": shape.head_dim**-0.5, "mask": mask, "tilings": own}
        return attention(*qkv, **options)

    with (
        patch.object(schedule, "H100_MULTIPROCESSORS", multiprocessors),
        made_for("hopper"),
        interpreted(detect_races=races),
    ):
        return jax.device_get(jax.jit(attend)(*qkv))


def _both(tiling: ForwardTiling, *problem):
    ways = tiling, dataclasses.replace(tiling, ahead=False)
    return [_results(way, *problem, races=way.ahead) for way in ways]


# Two heads of three tiles, in one CTA after each other, or one in each of as many CTAs
# as there are tiles; and lengths and masks of which it is not for.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("tiling", "shape", "mask", "multiprocessors"),
    [
        (
            ForwardTiling(64, 128, 2, 2, q_registers=True, ahead=True),
            *(Shape(1, 384, 384, 2, 1, 128), Mask(), 1),
        ),
        (
            ForwardTiling(64, 128, 3, 4, ahead=True),
            *(Shape(1, 384, 128, 2, 1, 64), Mask(), 1),
        ),
        (
            ForwardTiling(64, 64, 4, 4, ahead=True),
            *(Shape(1, 512, 192, 2, 1, 64), Mask(), 1),
        ),
        (
            ForwardTiling(64, 128, 2, 2, q_registers=True, ahead=True),
            *(Shape(1, 256, 256, 2, 1, 128), Mask(), 4),
        ),
        (
            ForwardTiling(64, 128, 2, 2, q_registers=True, ahead=True),
            *(Shape(1, 192, 256, 2, 1, 128), Mask(), 1),
        ),
        (
            ForwardTiling(64, 128, 2, 2, q_registers=True, ahead=True),
            *(Shape(1, 256, 300, 2, 1, 128), Mask(), 1),
        ),
        (
            ForwardTiling(64, 128, 2, 2, q_registers=True, ahead=True),
            *(Shape(1, 256, 256, 2, 1, 128), Mask(is_causal=True), 1),
        ),
    ],
    ids=[
        *("tiles", "one block", "four warpgroups", "a tile each"),
        *("a warpgroup without rows", "a partial block", "causal"),
    ],
)
def test_what_is_made_ahead_is_not_in_the_bits(tiling, shape, mask, multiprocessors):
    """And nothing is read where TMA still writes, or the other way round."""
    problem = tiling, shape, mask, multiprocessors
    ahead, plain = in_child_process(_both, *problem, seconds=TIME_LIMIT)
    for got, want in zip(ahead, plain, strict=True):
        assert np.isfinite(got.astype(np.float32)).all()
        assert got.tobytes() == want.tobytes()
