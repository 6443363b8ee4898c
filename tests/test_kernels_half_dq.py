"""dQ of FP16 dS from Hopper's two kernels, in the interpreter.

As an option it is in tests/test_kernel_options.py, as the kernels' own in
tests/test_kernels_interpret.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.kernels import tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention, declared_recipe
from attn_jax.kernels.compiler import shared_memory
from attn_jax.kernels.hopper_backward_dq import half_stages
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.interpreter import interpreted
from attn_jax.mask import Mask
from tests.child_process import in_child_process
from tests.test_kernel_options import (
    HALF,
    MEAN,
    NONE,
    ROW,
    TIME_LIMIT,
    Case,
    check,
    ids,
    kernels,
)

pytestmark = pytest.mark.ci

SHAPE = Shape(1, 70, 100, 2, 1, 64)
DOCUMENTS = Mask(query_segment_ids=ids(150), key_value_segment_ids=ids(200))
# With dS in BF16 dQ has 1.4 units or more.
CASES = [
    Case("mean", MEAN, "drift", Shape(1, 140, 200, 2, 1, 64), Mask(), dquery=1.2),
    Case("none", NONE, "normal", backward="two_kernels", dquery=1.1),
    # K as FP16 numbers has one block in shared memory.
    Case("192", MEAN, "normal", Shape(1, 70, 200, 1, 1, 192), dquery=1.1, same=0.99),
]
FURTHER = [
    Case("row", ROW | dict(dq_dlogits=HALF), "offset", dquery=1.1),
    Case(
        *("documents, sinks", MEAN, "normal", Shape(1, 150, 200, 2, 1, 64), DOCUMENTS),
        sinks=(0.5, 2.0),
        same=0.93,
        dquery=1.1,
    ),
    Case(
        *("rows that see nothing", MEAN, "uniform", Shape(1, 190, 70, 2, 1, 64)),
        Mask(window=(20, 0)),
        dquery=1.1,
    ),
    Case("256", MEAN, "offset", Shape(1, 70, 140, 1, 1, 256), dquery=1.2, same=0.99),
]


@pytest.mark.parametrize(
    "case",
    [
        CASES[0],
        *(
            pytest.param(case, marks=pytest.mark.thorough)
            for case in (*CASES[1:], *FURTHER)
        ),
    ],
    ids=str,
)
def test_dq_has_the_bits_of_its_recipe_and_little_error(case):
    check(case)


@pytest.mark.parametrize(
    "case", [CASES[0], pytest.param(CASES[2], marks=pytest.mark.thorough)], ids=str
)
def test_no_races(case):
    in_child_process(kernels, case, True, seconds=TIME_LIMIT)


def _scaled(powers: dict[str, int]) -> list[np.ndarray]:
    """Gradients of inputs times powers of two, less what they bring; logits stay."""
    power = dict.fromkeys(("query", "key", "value", "dout"), 0) | powers
    assert power["query"] == -power["key"]
    drawn = make_inputs("normal", 0, SHAPE, ml_dtypes.bfloat16)
    arrays = [
        np.ldexp(getattr(drawn, name).astype(np.float32), power[name]).astype(
            ml_dtypes.bfloat16
        )
        for name in power
    ]
    rows = SHAPE.batch, SHAPE.heads, SHAPE.query_length
    dlse = np.random.default_rng(1).standard_normal(rows).astype(np.float32)
    dlse = np.ldexp(dlse, power["value"] + power["dout"])

    def attend(*qkv):
        return attention(*qkv, scale=0.125, backward="two_kernels")

    @jax.jit
    def gradients(*arrays):
        *qkv, dout, dlse = arrays
        (out, _), backward = jax.vjp(attend, *qkv)
        return backward((dout.astype(out.dtype), dlse))

    with made_for("hopper"), interpreted():
        found = gradients(*arrays, dlse)
    of_ds = power["value"] + power["dout"]
    brought = of_ds + power["key"], of_ds + power["query"], power["dout"]
    return [
        np.ldexp(np.asarray(x).astype(np.float64), -p)
        for x, p in zip(found, brought, strict=True)
    ]


@functools.cache
def _unscaled() -> list[np.ndarray]:
    return in_child_process(_scaled, {}, seconds=TIME_LIMIT)


@pytest.mark.parametrize(
    "powers",
    [
        dict(dout=45, value=-45, query=90, key=-90),
        pytest.param(
            dict(dout=45, value=40, query=30, key=-30), marks=pytest.mark.thorough
        ),
        dict(dout=-78, value=0),  # Squares vanish.
        pytest.param(
            dict(dout=-30, value=-30, query=-20, key=20), marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_powers_of_two_in_the_inputs_are_powers_of_two_in_the_gradients(powers):
    """To the bit, however far outside FP16's range dS and K are; but where dS is scaled
    by another power, r, log2 r - LSE is rounded elsewhere, to 2^-18 if |log2 r| < 128.
    Then numbers of dQ round the other way that lie as close, of an ulp that is 2^-7 to
    2^-8 of them, to the middle: a share of 2^-10. FP16 numbers of dS do, too, in a
    share of 2^-7, by 2^-11 of them. 100 of these move a sum by some 2^-11, an eighth
    of its ulp, so a few in a hundred: 2^-7 10 / 8."""
    plain = _unscaled()
    scaled = in_child_process(_scaled, powers, seconds=TIME_LIMIT)
    if powers["value"] != -powers["dout"]:
        (dquery, want), *_ = zip(scaled, plain, strict=True)
        assert np.mean(dquery == want) >= 0.98
        np.testing.assert_allclose(dquery, want, rtol=0, atol=2.0**-7 * abs(want).max())
        scaled, plain = scaled[1:], plain[1:]
    for got, want in zip(scaled, plain, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.thorough
@pytest.mark.parametrize("dlse", [False, True])
def test_no_gradient_of_out_gives_what_that_of_lse_gives(dlse):
    """The bound of dS is 0, or dLSE alone."""
    found = in_child_process(_without_dout, dlse, seconds=TIME_LIMIT)
    assert all(np.isfinite(x).all() for x in found)
    assert found[0].any() == found[1].any() == dlse and not found[2].any()


def _without_dout(dlse: bool) -> list[np.ndarray]:
    drawn = make_inputs("normal", 0, SHAPE, ml_dtypes.bfloat16)

    def attend(*qkv):
        return attention(*qkv, scale=0.125, backward="two_kernels")

    @jax.jit
    def gradients(*qkv):
        (out, lse), backward = jax.vjp(attend, *qkv)
        return backward((jnp.zeros_like(out), jnp.full_like(lse, float(dlse))))

    with made_for("hopper"), interpreted():
        found = gradients(drawn.query, drawn.key, drawn.value)
    return [np.asarray(x).astype(np.float32) for x in found]


@pytest.mark.parametrize("exponents", [(100, -100), (-100, 100), (70, 70), (7, -3)])
def test_what_scales_operands_is_undone_within_range(exponents):
    """A sum of products of FP16 numbers may reach 2^30."""
    key = jnp.full((1, 1, 64), 2.0 ** exponents[0])
    row = jnp.full((1, 1), exponents[1], jnp.int32)
    first, second = Range(jnp.zeros((1, 1, 64)), key, row).undone()
    undone = jnp.float32(2.0**30) * first * second
    assert undone == np.ldexp(1.0, 30 - sum(exponents))


@pytest.mark.parametrize("target", ["hopper", "ampere"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("centre", [None, "none", "mean"])
def test_who_has_fp16_ds(target, dtype, centre):
    """Hopper's kernels for BF16 inputs, unless a recipe asks for none of it."""
    half = HALF if (target, dtype) == ("hopper", "bfloat16") else None
    with made_for(target):
        own = declared_recipe(dtype, 64, 300, backward="two_kernels")
        assert own.dq_dlogits == half
        if centre is None:
            return
        for step in {half, None}:
            asked = dataclasses.replace(own, dq_centre=centre, dq_dlogits=step)
            given = {"backward": "two_kernels", "recipe": asked}
            assert declared_recipe(dtype, 64, 300, **given) == asked


def test_blocks_fit_shared_memory():
    """With 8 KB for rows, centres and barriers (see tests/test_kernels_compile.py)."""
    dims = tuning.HEAD_DIMS["hopper"]
    found = {}
    for head_dim in dims:
        for value_dim in dims:
            tiling = tuning.tiling(tuning.BACKWARD_DQ, "hopper", head_dim, value_dim)
            slots = half_stages(tiling, head_dim, value_dim)
            found[head_dim, value_dim] = slots
            both = head_dim + value_dim
            tile = tiling.tile * both + tiling.stages * tiling.columns * both
            tile += slots * tiling.columns * head_dim
            assert 2 * tile + 8192 <= shared_memory("h200")
    assert {k for k, v in found.items() if v == 1} == {(192, 192), (256, 256)}
