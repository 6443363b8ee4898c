"""What P's scale in the exponent costs LSE in Hopper's kernels, and its bound."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import reference
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.bounds import bound
from attn_jax.formats import FP32
from attn_jax.kernels.hopper_softmax import LOG2_P_SCALE, Softmax, State
from attn_jax.kernels.tiles import LOG2_E
from attn_jax.recipe import ATTN_JAX_HOPPER
from attn_jax.recipe_schema import Step

U = FP32.unit_roundoff
# exp2 and log are allowed that much (`bounds.arithmetic`).
OWN = 4 * U
SOFTMAX = Softmax(LOG2_E, jnp.dtype(jnp.float16), False, log2_scale=LOG2_P_SCALE)


def test_a_sink_that_outweighs_all_keys_gives_lse_without_a_rounded_exponent():
    """A sink z of at most 0.05 goes through three products and exp2, and m and LSE
    through a rounding each; an exponent near 15 would alone be 2^-21 off."""
    sinks = np.linspace(-0.05, 0.05, 801, dtype=np.float32)
    top = np.full(1, -200.0, np.float32)
    state = State(
        jnp.asarray(top), SOFTMAX.origin(jnp.asarray(top)), jnp.full((1, 4), 2.0**13)
    )
    _, lse = jax.vmap(lambda sink: SOFTMAX.finished(state, sink))(sinks)
    error = np.abs(np.asarray(lse, np.float64)[:, 0] - sinks)
    allowed = OWN + U * 6 * np.abs(sinks) + (OWN + 2 * U) * 2.0**-19
    assert (error <= allowed).all()
    assert allowed.max() < 2.0**-21 * math.log(2)


def test_lse_is_bounded_with_the_scale_in_the_exponent():
    """One key, one channel: x is exact, and x log2(e) - m + 60, where m is computed,
    rounded where FP32 numbers are 2^-18 apart."""
    scale = 60
    softmax = SOFTMAX._replace(log2_scale=scale)
    recipe = dataclasses.replace(
        ATTN_JAX_HOPPER, probability=Step(FP32), probability_scale=2.0**scale
    )
    x = np.linspace(-0.02, 0.02, 201, dtype=np.float32).astype(jnp.bfloat16)
    top = x.astype(np.float32)
    origin = softmax.origin(jnp.asarray(top))
    exponent = top.astype(np.float64) * np.float32(LOG2_E) - np.asarray(origin, float)
    in_log2, undo = softmax.in_log2(jnp.asarray(top), origin)
    p = np.exp2(exponent.astype(np.float32).astype(np.float64))
    log = np.log(p * np.asarray(undo, np.float64))
    error = np.abs(np.asarray(in_log2, np.float64) * math.log(2) + log - top)
    query, key = x.reshape(1, -1, 1, 1), np.ones((1, 1, 1, 1), jnp.bfloat16)
    limit = bound(recipe, query, key, key, scale=1.0).lse.ravel()
    assert (error <= limit).all()
    assert (error > limit - scale * math.log(2) * U).any()


def test_a_head_whose_ds_is_tiny_has_larger_exponents_and_bounds():
    """Kernels have r, here 2^88 times as large, in the exponent of P: it is rounded
    once in LSE's and once in the difference, and may have been before."""
    inputs = make_inputs("normal", 0, Shape(1, 16, 24, 1, 1, 8))
    tiny = inputs._replace(dout=inputs.dout * jnp.bfloat16(2.0**-88))
    plain, found = (bound(ATTN_JAX_HOPPER, *x).dvalue for x in (inputs, tiny))
    rounding = 88 * math.log(2) * U * reference.golden(*inputs, absolute=True).dvalue
    more = found * 2.0**88 - plain
    assert (more >= 2 * rounding).all() and (more <= 4 * rounding).all()
