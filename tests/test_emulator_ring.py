"""A ring of devices: exact where nothing is rounded, and each library's own merge."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from attn_jax import emulator, reference
from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.emulator.forward import State, joined
from attn_jax.formats import BF16, FP32
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, FLASH2, RING_FLASH_ATTN, TE_RING, Step

B, T, S, N, K, H = 2, 8, 12, 4, 2, 8
W = 4
E5M2ISH = Step(dataclasses.replace(BF16, name="coarse", mantissa_bits=2))


def normal(seed, *shape):
    draw = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(draw, jnp.float32)


def arguments(dtype=jnp.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(normal(i, *s).astype(dtype) for i, s in enumerate(shapes))


@functools.partial(jax.jit, static_argnames=("recipe", "soft_cap", "exact"))
def run(args, cotangents, extra, mask, *, recipe=None, soft_cap=None, exact=False):
    def forward(q, k, v, extra):
        given = dict(extra, mask=mask, soft_cap=soft_cap)
        if exact:
            return reference.attention(q, k, v, **given)
        return emulator.attention(q, k, v, recipe=recipe, **given)

    outputs, pull = jax.vjp(forward, *args, extra)
    return outputs, pull(cotangents)


def masks():
    dense = np.random.default_rng(3).random((B, N, T, S)) < 0.5
    dense[:, :, 4] = False
    ids = np.repeat(np.arange(4), 3)[None].repeat(B, 0)
    return {
        "none": Mask(),
        "causal": Mask(is_causal=True),
        "dense": Mask(dense=jnp.asarray(dense)),
        "segments": Mask(
            query_segment_ids=jnp.asarray(ids[:, ::-1][:, :T]),
            key_value_segment_ids=jnp.asarray(ids),
        ),
    }


CASES = [
    ("lse", "dense", False, dict(delta_source="p_dp", dq_centre="row")),
    ("lse", "causal", True, {}),
    ("sigmoid", "segments", True, dict(dq_centre="mean", kv_order="reverse")),
    ("sigmoid", "causal", False, dict(gradient_scale_at="logits", dlogits_scale=2.0)),
    ("two_pass", "dense", True, dict(exponential="exp2", scale_at="exponent")),
    ("two_pass", "none", False, dict(block_kv=None, normalise="before_product")),
    ("two_pass", "causal", False, dict(scaled_query=Step(FP32), dq_centre="mean")),
    ("two_pass", "segments", True, dict(dq_centre="keys", delta_source="o_f32")),
    ("carry", "causal", True, dict(normalise="each_step", dq_centre="row")),
    ("carry", "segments", False, dict(rescale_threshold=8.0, probability_scale=4.0)),
    ("carry_whole", "dense", True, dict(exponential="exp2", dq_centre="row")),
    (
        *("carry_whole", "segments", False),
        dict(exponential="exp2", scale_at="exponent", probability_scale=4.0),
    ),
]


@pytest.mark.parametrize(("merge", "mask", "further", "changes"), CASES)
def test_without_roundings_a_ring_is_the_reference(merge, mask, further, changes):
    extra, soft_cap = {}, None
    if further:
        extra = dict(bias=normal(5, B, 1, T, S), sinks=normal(6, N))
        soft_cap = None if "dq_centre" in changes else 2.5
    blocks = dict(block_kv=2, backward_block_kv=2, backward_block_q=1)
    recipe = dataclasses.replace(
        EXACT_FP32, ring_size=W, ring_merge=merge, **(blocks | changes)
    )
    given = arguments(), (normal(7, B, T, N, H), normal(8, B, N, T)), extra
    got = run(*given, masks()[mask], recipe=recipe, soft_cap=soft_cap)
    want = run(*given, masks()[mask], exact=True, soft_cap=soft_cap)
    # As without a ring: at most B T N terms of size one to ten, each off by a few
    # 2^-24; W - 1 merges add as many roundings of 2^-24 to numbers of that size.
    bound = 4 * (B * T * N + W) * 2.0**-24
    chex.assert_trees_all_close(got, want, rtol=bound, atol=bound)


def test_a_ring_of_one_uses_no_field_of_the_ring():
    given = arguments(jnp.bfloat16), (normal(7, B, T, N, H), normal(8, B, N, T))
    given = given[0], (given[1][0].astype(jnp.bfloat16), given[1][1])
    coarse = dict(
        ring_merge="two_pass",
        ring_partial=E5M2ISH,
        ring_accumulator=E5M2ISH,
        ring_gradient_partial=E5M2ISH,
        ring_gradient_accumulator=E5M2ISH,
    )
    plain = run(*given, {}, Mask(), recipe=FLASH2)
    alone = run(*given, {}, Mask(), recipe=dataclasses.replace(FLASH2, **coarse))
    chex.assert_trees_all_equal(plain, alone)


def test_a_carried_ring_is_one_device_on_keys_in_the_order_of_the_visits():
    q, k, v = arguments(jnp.bfloat16)
    recipe = dataclasses.replace(FLASH2, block_kv=3)
    ring = dataclasses.replace(recipe, ring_size=W, ring_merge="carry")
    out, lse = jax.jit(functools.partial(emulator.attention, recipe=ring))(q, k, v)
    shares = np.arange(S).reshape(W, -1)
    alone = jax.jit(functools.partial(emulator.attention, recipe=recipe))
    for rank in range(W):
        order = np.concatenate([shares[(rank - hop) % W] for hop in range(W)])
        rows = slice(rank * T // W, (rank + 1) * T // W)
        want = alone(q[:, rows], k[:, order], v[:, order])
        np.testing.assert_array_equal(out[:, rows], want[0])
        np.testing.assert_array_equal(lse[:, :, rows], want[1])


def test_states_with_whole_maxima_are_joined_by_powers_of_two():
    """A maximum of no key is -inf, and others lie further apart than FP32 reaches."""
    maxima = np.float32([-np.inf, -np.inf, -np.inf, 7, 7, -300, 3000])
    others = np.float32([-np.inf, 5, -3000, -np.inf, 5, 300, -3000])
    seen, met = np.isfinite(maxima), np.isfinite(others)
    states = (
        State(jnp.asarray(m), *(jnp.asarray(np.where(s, x, 0)) for x in sums))
        for m, s, *sums in ((maxima, seen, 1.5, -2.25e38), (others, met, 1.25, 3.5))
    )
    found = joined(*states)
    top = np.maximum(maxima, others)
    base = np.where(np.isfinite(top), top, 0)
    a, b = (2.0 ** (x - base) for x in (maxima, others))
    np.testing.assert_array_equal(found.row_max, top)
    # 2^-600 and less is 0 in FP32, whatever it is multiplied by.
    np.testing.assert_array_equal(found.row_sum, seen * a * 1.5 + met * b * 1.25)
    np.testing.assert_array_equal(
        found.total, met * b * 3.5 - seen * a * np.float32(2.25e38)
    )


def bf16(x):
    return correctly_rounded(np.asarray(x, np.float64), BF16)


def merged(recipe, parts):
    """The libraries' merges in NumPy, of [(O_h, LSE_h)] as handed over, in FP64."""
    step = bf16 if recipe.ring_accumulator.format == BF16 else lambda x: x
    total = np.logaddexp.reduce([lse for _, lse in parts], axis=0)
    out, lse = step(parts[0][0]), parts[0][1]
    if recipe.ring_merge == "two_pass":
        out = 0
        for part, part_lse in parts:
            out = step(out + np.exp(part_lse - total) * part)
        return out, total
    for part, part_lse in parts[1:]:
        weight = 1 / (1 + np.exp(lse - part_lse))
        out = step(out - weight * (out - part))
        lse = np.logaddexp(lse, part_lse)
    return out, lse


@pytest.mark.parametrize("recipe", [RING_FLASH_ATTN, TE_RING], ids=lambda r: r.name)
def test_named_rings_merge_as_their_libraries_do(recipe):
    q, k, v = arguments(jnp.bfloat16)
    attend = functools.partial(emulator.attention, out_dtype=jnp.float32)
    out, lse = jax.jit(functools.partial(attend, recipe=recipe))(q, k, v)
    alone = jax.jit(
        functools.partial(attend, recipe=dataclasses.replace(recipe, ring_size=1))
    )
    keys = np.arange(S).reshape(W, -1)
    close = 0
    for rank in range(W):
        rows = slice(rank * T // W, (rank + 1) * T // W)
        parts = []
        for hop in range(W):
            at = keys[(rank - hop) % W]
            part = alone(q[:, rows], k[:, at], v[:, at])
            part_lse = np.asarray(part[1], np.float64).swapaxes(1, 2)[..., None]
            parts.append((bf16(part[0]), part_lse))
        want, want_lse = merged(recipe, parts)
        # W - 1 merges of FP32 arithmetic beside FP64's: some 2^-24 each. Where the
        # output is rounded at each merge, one in 2^12 is that near to a tie.
        error = np.abs(out[:, rows] - want)
        close += (error <= 16 * W * 2.0**-24).mean() / W
        got_lse = lse[:, :, rows].swapaxes(1, 2)[..., None]
        np.testing.assert_allclose(got_lse, want_lse, atol=16 * W * 2.0**-24)
    assert close > 0.99


def test_each_format_of_the_ring_is_felt():
    given = arguments(jnp.bfloat16), (normal(7, B, T, N, H), normal(8, B, N, T))
    given = given[0], (given[1][0].astype(jnp.bfloat16), given[1][1])
    base = dataclasses.replace(FLASH2, ring_size=W)
    outputs, gradients = run(*given, {}, Mask(), recipe=base)
    for field, backward in (
        ("ring_partial", False),
        ("ring_accumulator", False),
        ("ring_gradient_partial", True),
        ("ring_gradient_accumulator", True),
    ):
        recipe = dataclasses.replace(base, **{field: E5M2ISH})
        new_outputs, new_gradients = run(*given, {}, Mask(), recipe=recipe)
        assert bool((new_outputs[0] == outputs[0]).all()) == backward, field
        # O enters dQ and dK through delta; dV knows the LSE alone.
        felt = [(a != b).any() for a, b in zip(new_gradients[:3], gradients[:3])]
        assert felt == [True, True, backward], field


@pytest.mark.parametrize(
    ("own_keys", "numbers_before"),
    # Share c meets device c, c + 1, ... mod 4, or c + 1, c + 2, ..., c.
    [("first", (0, 3, 2, 1)), ("last", (3, 2, 1, 0))],
)
def test_gradients_are_summed_in_the_order_of_the_visits(own_keys, numbers_before):
    """K = 0 and equal V: P = 1/S, dV_j = sum_i dO_i / S, one device's share at a time.

    Device 0 brings 2^-3 (of 8 keys), the others 2^-12 each: less than half of an ulp
    of BF16 at 2^-3, so they are lost where they come after it and kept before it.
    """
    q, k = jnp.ones((1, 4, 1, 1)), jnp.zeros((1, 8, 1, 1))
    dout = jnp.array([1.0, 2.0**-9, 2.0**-9, 2.0**-9]).reshape(1, 4, 1, 1)
    recipe = dataclasses.replace(
        FLASH2,
        ring_size=4,
        ring_gradient_accumulator=Step(BF16),
        ring_own_keys=own_keys,
    )
    given = (q, k, jnp.ones_like(k)), (dout, jnp.zeros((1, 1, 4)))
    dvalue = run(*given, {}, Mask(), recipe=recipe)[1][2].reshape(4, 2)
    small = 2.0**-12
    for share, before in enumerate(numbers_before):
        want = bf16(2.0**-3 + before * small)
        np.testing.assert_array_equal(dvalue[share], [want, want])
    assert dvalue[1, 0] != dvalue[0, 0]


def test_narrow_accumulators_grow_with_the_ring_and_wide_ones_do_not():
    i = make_inputs("normal", 0, Shape(1, 64, 512, 2, 2, 64))
    exact = reference.golden(*i).out
    error = {}
    for recipe in (RING_FLASH_ATTN, TE_RING):
        for size in (1, 32):
            sized = dataclasses.replace(recipe, ring_size=size, block_kv=32)
            attend = jax.jit(functools.partial(emulator.attention, recipe=sized))
            off = np.asarray(attend(*map(jnp.asarray, i[:3]))[0], np.float64) - exact
            error[recipe.name, size] = np.sqrt((off**2).mean())
    ratio = {name: error[name, 32] / error[name, 1] for name, _ in error}
    # Roundings of equal size add in squares: P and output at W = 1, then at most one
    # more of the partials; against one of the sum for each hop (2 + 1 + 32 W-weighted).
    assert ratio["ring_flash_attn"] < 1.5**0.5 * 1.1
    assert ratio["te_ring"] > 1.5


def test_lengths_that_do_not_divide_are_refused():
    q, k, v = arguments()
    recipe = dataclasses.replace(RING_FLASH_ATTN, ring_size=8)
    with pytest.raises(ValueError, match="multiple of it, got S=12") as caught:
        emulator.attention(q, k, v, recipe=recipe)
    assert "\n" not in str(caught.value)


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from all_equations(sub)


def test_a_long_ring_is_one_loop_and_linear_in_memory():
    def equations(length, size):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)
        recipe = dataclasses.replace(ATTN_JAX, ring_size=size, ring_merge="sigmoid")

        def loss(q, k, v):
            out, _ = emulator.attention(q, k, v, recipe=recipe)
            return out.astype(jnp.float32).sum()

        program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)
        return list(all_equations(program.jaxpr))

    long, short = equations(4096, 64), equations(256, 4)
    assert len(long) == len(short)
    largest = max(v.aval.size for eqn in long for v in eqn.outvars)
    assert largest == 2 * 4096 * 16
