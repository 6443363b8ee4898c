"""The kernels lower for a GPU with nothing but the plain jax wheel.

Lowering infers layouts and checks shapes, types and the size of shared memory.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from attn_jax.kernels import check_jax_version
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask
from tests.quick_lowering import lower_quickly
from tests.test_residuals import equations

lower_quickly()
GQA = dict(T=1000, S=1100, N=4, K=2)


def _arrays(T: int, S: int, N: int, K: int, H: int, dtype, B: int = 2):
    query = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    return query, key, key


def _lowered(query, key, value, **options) -> jax.stages.Lowered:
    """Forward and backward, with cotangents of the output and of LSE."""

    traced = _traced(query, key, value, **options)
    return traced.lower(lowering_platforms=("cuda",))


def _traced(query, key, value, **options) -> jax.stages.Traced:
    def program(query, key, value):
        results, backward = jax.vjp(
            lambda *qkv: attention(*qkv, scale=0.1, **options), query, key, value
        )
        return results, backward(jax.tree.map(jnp.ones_like, results))

    return jax.jit(program).trace(query, key, value)


def _kernels_and_results(*operands, **options):
    """Names, and shapes and types: what there is to be lowered."""
    traced = _traced(*operands, **options)
    found = equations(traced.jaxpr.jaxpr)
    names = [str(eqn.params.get("name", "")) for eqn in found]
    results = [(x.shape, x.dtype) for x in jax.tree.leaves(traced.out_info)]
    return [name for name in names if name.startswith("attention_")], results


def _check(
    lowered: jax.stages.Lowered, query, key, out_dtype, value=None, kernels: int = 4
) -> None:
    """One kernel forward, one that sums over rows of dO, and two backward, for dQ and
    for dK and dV, or one for all gradients. On Hopper there is one for the numbers of
    keys before the forward kernel, but for FP16 inputs and two kernels."""
    B, T, N, _ = query.shape
    value = key if value is None else value
    (out, lse), gradients = lowered.out_info
    assert (out.shape, out.dtype) == ((B, T, N, value.shape[-1]), out_dtype)
    assert (lse.shape, lse.dtype) == ((B, N, T), jnp.float32)
    for gradient, operand in zip(gradients, (query, key, value), strict=True):
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)
    calls = re.findall(r"custom_call @mosaic_gpu\w*", lowered.as_text())
    assert len(calls) == kernels


# Each value of one with each of every other.
PROBLEMS = [
    ("bfloat16", 64, False, False),
    ("bfloat16", 128, True, True),
    ("float16", 64, True, True),
    ("float16", 128, False, True),
    ("float16", 128, True, False),
]
# By default each backward pass has one: what else there is is compiled besides
# (test_kernels_compile).
DEFAULT = {("two_kernels", "float16", 64), ("fused", "bfloat16", 128)}


@pytest.mark.parametrize(
    ("backward", "dtype", "head_dim", "is_causal", "x64"),
    [
        pytest.param(
            *(backward, *problem),
            marks=[pytest.mark.thorough] * ((backward, *problem[:2]) not in DEFAULT),
        )
        for backward in ("two_kernels", "fused")
        for problem in PROBLEMS
    ],
)
def test_lowers(backward, dtype, head_dim, is_causal, x64):
    # The fused kernel takes causal masks where T = S.
    sizes = GQA | ({"S": GQA["T"]} if is_causal else {})
    query, key, value = _arrays(**sizes, H=head_dim, dtype=dtype)
    options = {"mask": Mask(is_causal=is_causal), "backward": backward}
    with jax.enable_x64(x64):
        lowered = _lowered(query, key, value, **options)
    kernels = 4 if backward == "fused" or dtype == "float16" else 5
    _check(lowered, query, key, query.dtype, kernels=kernels)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(T=512, S=512, N=2, K=2), marks=pytest.mark.thorough),
        pytest.param(dict(T=1, S=1, N=1, K=1), marks=pytest.mark.thorough),
        dict(T=3, S=2000, N=8, K=1),
        pytest.param(dict(T=2000, S=5, N=4, K=4), marks=pytest.mark.thorough),
    ],
    ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()),
)
@pytest.mark.parametrize(
    ("is_causal", "backward"),
    [
        (False, None),
        pytest.param(True, None, marks=pytest.mark.thorough),
        (True, "fused"),
    ],
)
def test_lowers_any_length(sizes, is_causal, backward):
    query, key, value = _arrays(**sizes, H=64, dtype=jnp.bfloat16)
    options = {"mask": Mask(is_causal=is_causal), "backward": backward}
    one_pass = backward == "fused" and sizes["T"] == sizes["S"]
    if backward == "fused" and not one_pass:
        # As lowered without being asked for.
        found = _kernels_and_results(query, key, value, **options)
        without = _kernels_and_results(query, key, value, mask=options["mask"])
        assert found == without and len(found[0]) == 5
        return
    # Query heads of a key head that are dealt in parts fill the card.
    in_parts = backward is None and not is_causal and sizes["N"] > sizes["K"]
    lowered = _lowered(query, key, value, **options)
    kernels = 4 if one_pass or in_parts else 5
    _check(lowered, query, key, query.dtype, kernels=kernels)


@pytest.mark.parametrize(
    ("architecture", "head_dim", "value_dim", "kernels"),
    # On Ampere dK and dV have a kernel each where registers do not hold both.
    [
        pytest.param("hopper", 192, 96, 5, marks=pytest.mark.thorough),
        ("hopper", 64, 256, 5),
        pytest.param("ampere", 128, 96, 4, marks=pytest.mark.thorough),
        ("ampere", 256, 96, 5),
    ],
)
def test_lowers_with_a_head_dim_of_values_own(
    architecture, head_dim, value_dim, kernels
):
    query, key, _ = _arrays(**GQA, H=head_dim, dtype=jnp.bfloat16)
    *_, value = _arrays(**GQA, H=value_dim, dtype=jnp.bfloat16)
    with made_for(architecture):
        lowered = _lowered(query, key, value, mask=Mask(is_causal=True))
    _check(lowered, query, key, query.dtype, value, kernels)


# It is compiled besides (test_kernels_compile).
@pytest.mark.thorough
def test_lowers_to_float32_output():
    query, key, value = _arrays(**GQA, H=128, dtype=jnp.bfloat16)
    lowered = _lowered(query, key, value, out_dtype=jnp.dtype("float32"))
    # In one pass: query heads of a key head are dealt in parts.
    _check(lowered, query, key, jnp.float32, kernels=4)


CAUSAL_BIAS = ((2, 4, 1000, 1100), "float16", {"mask": Mask(is_causal=True)}, True)
WITH_A_BIAS = [
    # Such a one is compiled besides (test_kernels_compile).
    pytest.param(*CAUSAL_BIAS, marks=pytest.mark.thorough),
    ((2, 1, 1, 1100), "float32", {"soft_cap": 30.0}, False),
    pytest.param(
        *((1, 1, 1, 1), "float64", {"mask": Mask(window=(5, None))}, True),
        marks=pytest.mark.thorough,
    ),
    pytest.param(*((1, 4, 1000, 1), "bfloat16", {}, False), marks=pytest.mark.thorough),
    pytest.param(
        *((1, 1, 1000, 1100), "float8_e4m3fn", {"scale": -0.1}, False),
        marks=pytest.mark.thorough,
    ),
]


@pytest.mark.parametrize(("shape", "dtype", "options", "x64"), WITH_A_BIAS)
def test_lowers_with_a_bias(shape, dtype, options, x64):
    _lowers_with_a_bias("hopper", shape, dtype, options, x64, kernels=6)


@pytest.mark.parametrize(("shape", "dtype", "options", "x64"), [CAUSAL_BIAS])
def test_ampere_lowers_with_a_bias(shape, dtype, options, x64):
    _lowers_with_a_bias("ampere", shape, dtype, options, x64, kernels=5)


def _lowers_with_a_bias(architecture, shape, dtype, options, x64, kernels):
    options = {"scale": 0.1} | options

    def program(query, key, value, bias):
        def attend(query, key, value, bias):
            return attention(query, key, value, bias=bias, **options)

        results, backward = jax.vjp(attend, query, key, value, bias)
        return results, backward(jax.tree.map(jnp.ones_like, results))

    with made_for(architecture), jax.enable_x64(x64):
        operands = (
            *_arrays(**GQA, H=64, dtype="bfloat16"),
            jax.ShapeDtypeStruct(shape, dtype),
        )
        traced = jax.jit(program).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))
    gradients = lowered.out_info[1]
    for gradient, operand in zip(gradients, operands, strict=True):
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)
    calls = re.findall(r"custom_call @mosaic_gpu\w*", lowered.as_text())
    assert len(calls) == kernels


@pytest.mark.parametrize(
    ("sizes", "dtype", "head_dim", "is_causal", "x64"),
    [
        pytest.param(GQA, "bfloat16", 64, False, True, marks=pytest.mark.thorough),
        (dict(T=1, S=1, N=1, K=1), "float16", 64, True, False),
        (dict(T=3, S=2000, N=8, K=1), "bfloat16", 128, True, True),
        (GQA, "float16", 128, False, False),
    ],
    ids=str,
)
def test_ampere_lowers(sizes, dtype, head_dim, is_causal, x64):
    query, key, value = _arrays(**sizes, H=head_dim, dtype=dtype)
    with made_for("ampere"), jax.enable_x64(x64):
        lowered = _lowered(query, key, value, mask=Mask(is_causal=is_causal))
    _check(lowered, query, key, query.dtype)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options", "message"),
    [
        (80, "bfloat16", {}, r"96, 128, 192, 256\), not 80 for .*; pad with zeros"),
        (512, "float16", {}, r"Hopper .*, not 512 for .* for value; use impl"),
        (64, "float32", {}, "bfloat16 or all float16, not float32"),
        (64, "bfloat16", {"out_dtype": jnp.dtype("float16")}, "not float16"),
    ],
)
def test_unsupported_raises_one_line(head_dim, dtype, options, message):
    arrays = _arrays(**GQA, H=head_dim, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message) as error:
        _lowered(*arrays, **options)
    assert "\n" not in str(error.value)


def test_unknown_jax_raises_one_line(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.0")
    with pytest.raises(ImportError, match=r"not 0\.10\.0: install one") as error:
        check_jax_version()
    assert "\n" not in str(error.value)
