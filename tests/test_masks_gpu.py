"""Masks, sinks, soft caps and biases in the kernels on a Hopper GPU."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.audit.mask_cases import (
    FORMATS,
    bias_gradient_bound,
    mask_cases,
    sink_gradient_bound,
)
from attn_jax.kernels.attention import attention, backward_of
from attn_jax.mask import Mask

pytestmark = pytest.mark.gpu(capability="9.0")

# No block divides the lengths; more tiles than the card has multiprocessors, so that a
# CTA of a persistent kernel meets tiles that visit different blocks.
T, S, N, K = 1000, 1337, 32, 8
CASES = mask_cases(T, S, N)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "window", [(255, 0), (0, 0), (1, 130), (200, 90), (2000, 3)], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_that_kernels_count(dtype, window, head_dim, has_sinks):
    """Where the sequences are equally long: forward without lists, backward in one
    pass. More tiles than the card has multiprocessors; means of K, V and dLSE, that dQ
    must not see; the same bits in every run."""
    shape = Shape(3, 1130, 1130, 16, 8, head_dim)
    inputs = make_inputs("offset", 0, shape, jnp.dtype(dtype))
    mask = Mask(window=window)
    sizes = (shape.query, shape.key)
    assert backward_of(*sizes, "hopper", mask) == "fused"
    lse_shape = (3, 16, 1130)
    dlse = np.random.default_rng(1).standard_normal(lse_shape).astype(np.float32)
    sinks = np.linspace(-3, 3, 16, dtype=np.float32) if has_sinks else None

    @jax.jit
    def run(query, key, value, sinks, dout, dlse):
        def kernels(query, key, value, sinks):
            scale = head_dim**-0.5
            return attention(query, key, value, scale=scale, mask=mask, sinks=sinks)

        results, backward = jax.vjp(kernels, query, key, value, sinks)
        return *results, *backward((dout, dlse.astype(results[1].dtype)))

    query, key, value, dout = map(jnp.asarray, inputs)
    arguments = query, key, value, sinks, dout, dlse
    first = jax.device_get(run(*arguments))
    for _ in range(10):
        chex.assert_trees_all_equal(first, jax.device_get(run(*arguments)))
    golden = reference.golden(*inputs, dlse, mask=mask, sinks=sinks)
    out, lse, *gradients, dsinks = first
    exact = golden.out, golden.dquery, golden.dkey, golden.dvalue
    names = "out", "dq", "dk", "dv"
    found = dict(zip(names, zip((out, *gradients), exact, strict=True), strict=True))
    if window == (0, 0) and not has_sinks:  # Nothing is rounded: out is V.
        got, want = found.pop("out")
        np.testing.assert_array_equal(got.astype(np.float64), want)
    for name, (got, want) in found.items():
        assert unit_error(got, want, FORMATS[dtype]) <= 1.7, name
    # As in tests/test_kernels_interpret.py, of logits of at most `size`.
    size = np.abs(golden.lse).max() + np.abs(np.asarray(inputs.query, float)).max() ** 2
    bound = (head_dim + shape.key_length) * 2.0**-24 * size
    assert np.abs(lse - golden.lse).max() <= bound
    if has_sinks:
        bound = sink_gradient_bound(golden, sinks, inputs.dout, dtype)
        assert (np.abs(dsinks - golden.dsinks) <= bound).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_masked_kernels_are_as_good_as_correctly_rounded(name, head_dim):
    case = CASES[name]
    shape = Shape(case.batch, T, S, N, K, head_dim)
    inputs = make_inputs("normal", 0, shape, jnp.dtype(case.dtype))
    # Keys far from zero, whose mean dQ must not see.
    key = (np.asarray(inputs.key, np.float32) + 2).astype(inputs.key.dtype)
    arrays = (inputs.query, key, inputs.value, inputs.dout)
    lse_shape = (case.batch, N, T)
    dlse = np.random.default_rng(1).standard_normal(lse_shape).astype(np.float32)
    sinks = None if case.sinks is None else np.asarray(case.sinks, np.float32)
    bias = None if case.bias is None else case.bias.array()
    mask = jax.tree.map(jnp.asarray, case.mask)

    @jax.jit
    def results(query, key, value, dout, dlse, mask, bias, sinks):
        def attend(query, key, value, bias, sinks):
            return attention(
                query, key, value, scale=head_dim**-0.5, bias=bias, mask=mask,
                sinks=sinks, soft_cap=case.soft_cap,
            )  # fmt: skip

        (out, lse), backward = jax.vjp(attend, query, key, value, bias, sinks)
        return out, lse, *backward((dout, dlse))

    arguments = (*map(jnp.asarray, arrays), dlse, mask, bias, sinks)
    first = jax.device_get(results(*arguments))
    for _ in range(10):
        again = jax.device_get(results(*arguments))
        chex.assert_trees_all_equal(first, again)
    out, lse, dquery, dkey, dvalue, dbias, dsinks = first
    golden = reference.golden(
        *(*arrays, dlse),
        mask=case.mask,
        bias=bias,
        sinks=sinks,
        soft_cap=case.soft_cap,
    )
    for field, got in zip(
        ("out", "dquery", "dkey", "dvalue"), (out, dquery, dkey, dvalue)
    ):
        want = getattr(golden, field)
        assert np.isfinite(got.astype(np.float32)).all(), field
        # Where nothing is seen there is nothing to round.
        hidden = ~want.any(axis=-1)
        if field == "dquery" and case.soft_cap is not None:
            # A row that sees a single key has a dQ of 0 as well, but not by the mask.
            hidden = ~golden.out.any(axis=-1)
        assert not got[hidden].any(), field
        # Under a soft cap the centre does not take up the error of delta.
        limit = 2.0 if field == "dquery" and case.soft_cap else 1.7
        assert unit_error(got, want, FORMATS[case.dtype]) <= limit, field
    empty = np.isneginf(golden.lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    # FP32 sums of head_dim products, at most the largest row of |q| and |k| together
    # (Cauchy and Schwarz), and of as many weights as there are keys.
    largest = (
        np.linalg.norm(np.asarray(x, np.float64), axis=-1).max() for x in arrays[:2]
    )
    size = np.abs(golden.lse[~empty]).max() + math.prod(largest) * head_dim**-0.5
    bound = (head_dim + S) * 2.0**-24 * size
    assert np.abs(lse[~empty] - golden.lse[~empty]).max() <= bound
    if sinks is not None:
        bound = sink_gradient_bound(golden, sinks, inputs.dout, case.dtype)
        assert (np.abs(dsinks - golden.dsinks) <= bound).all()
    if bias is not None:
        assert dbias.dtype == bias.dtype
        bound = bias_gradient_bound(case, arrays, dlse)
        assert (np.abs(dbias.astype(np.float64) - golden.dbias) <= bound).all()
