"""The exact reference: values and gradients against autodiff, NumPy and each other."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.mask import Mask

B, T, S, N, K, H = 2, 9, 13, 4, 2, 8


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arguments(seed=0):
    return (
        normal(seed, B, T, N, H),
        normal(seed + 1, B, S, K, H),
        normal(seed + 2, B, S, K, H),
    )


def masks():
    rng = np.random.default_rng(3)
    dense = rng.random((B, N, T, S)) < 0.6
    dense[:, :, 4] = False
    ids = np.sort(rng.integers(0, 3, (B, S)), axis=1).astype(np.int32)
    return {
        "none": Mask(),
        "causal": Mask(is_causal=True),
        "window": Mask(window=(2, 3)),
        "dense": Mask(dense=jnp.asarray(dense)),
        "lengths": Mask(
            query_lengths=jnp.array([5, 9], jnp.int32),
            key_value_lengths=jnp.array([13, 7], jnp.int32),
        ),
        "segments": Mask(
            query_segment_ids=jnp.asarray(ids[:, :T]),
            key_value_segment_ids=jnp.asarray(ids),
        ),
    }


def plain(q, k, v, bias, sinks, mask, soft_cap):
    """The textbook formula in NumPy-like JAX, differentiated by autodiff."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * H**-0.5 + bias
    x = soft_cap * jnp.tanh(x / soft_cap)
    visible = mask.materialise(T, S)
    if visible is not None:
        x = jnp.where(visible, x, -jnp.inf)
    extra = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    x = jnp.concatenate([x, extra], -1)
    lse = jax.nn.logsumexp(x, axis=-1)
    p = jnp.exp(x - lse[..., None])[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest"), lse


@pytest.mark.parametrize(
    "name", ["none", "causal", "window", "dense", "lengths", "segments"]
)
def test_values_and_gradients_are_those_of_autodiff(name):
    mask = masks()[name]
    cap = 2.5
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x, jnp.float64) for x in arguments())
        bias = jnp.asarray(normal(5, 1, N, T, 1), jnp.float64)
        sinks = jnp.asarray(normal(6, N), jnp.float64)
        cotangents = (
            jnp.asarray(normal(7, B, T, N, H), jnp.float64),
            jnp.asarray(normal(8, B, N, T), jnp.float64),
        )

        def ours(q, k, v, bias, sinks):
            return reference.attention(
                q, k, v, bias=bias, mask=mask, soft_cap=cap, sinks=sinks
            )

        def theirs(q, k, v, bias, sinks):
            return plain(q, k, v, bias, sinks, mask, cap)

        args = q, k, v, bias, sinks
        got, pull_ours = jax.vjp(jax.jit(ours), *args)
        want, pull_theirs = jax.vjp(theirs, *args)
        got = *got, *pull_ours(cotangents)
        want = *want, *pull_theirs(cotangents)
        for a, b in zip(got, want):
            # Both in FP64: sums of at most B*N*T*S terms of size about one, and at
            # most a few dozen roundings of 2**-53 each survive cancellation.
            np.testing.assert_allclose(a, b, rtol=0, atol=B * N * T * S * 2.0**-53)


def test_queries_that_see_nothing_are_clean():
    mask = Mask(key_value_lengths=jnp.array([0, 7], jnp.int32), is_causal=True)
    q, k, v = map(jnp.asarray, arguments())
    (out, lse), pull = jax.vjp(
        lambda q, k, v: reference.attention(q, k, v, mask=mask), q, k, v
    )
    # An infinite LSE cotangent is what differentiating through -inf gives.
    grads = pull((jnp.ones_like(out), jnp.where(jnp.isinf(lse), jnp.inf, 1.0)))
    assert (out[0] == 0).all() and (lse[0] == -jnp.inf).all()
    assert (out[1] != 0).any()
    for grad in grads:
        assert (grad[0] == 0).all() and jnp.isfinite(grad).all()


def numpy_gradients(q, k, v, do, dlse):
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    s = q @ k.T * H**-0.5
    e = np.exp(s)
    p = e / e.sum(1, keepdims=True)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(1, keepdims=True) + dlse[:, None]) * H**-0.5
    return p @ v, np.log(e.sum(1)), ds @ k, ds.T @ q, p.T @ do


@pytest.mark.parametrize("x64", [False, True])
def test_golden_is_fp64_in_either_mode_and_leaves_the_mode_alone(x64):
    q, k, v = arguments()
    do, dlse = normal(9, B, T, N, H), normal(10, B, N, T)
    with jax.enable_x64(x64):
        got = reference.golden(*(jnp.asarray(x) for x in (q, k, v, do)), dlse)
        assert jax.config.jax_enable_x64 is x64
    dk, dv = np.zeros((B, S, K, H)), np.zeros((B, S, K, H))
    for b, n in itertools.product(range(B), range(N)):
        head = n // (N // K)
        out, lse, dq, dk_n, dv_n = numpy_gradients(
            q[b, :, n], k[b, :, head], v[b, :, head], do[b, :, n], dlse[b, n]
        )
        dk[b, :, head] += dk_n
        dv[b, :, head] += dv_n
        # FP64 throughout: S*H roundings of values below about 10 in the worst case.
        tolerance = dict(rtol=0, atol=10 * S * H * 2.0**-53)
        np.testing.assert_allclose(got.out[b, :, n], out, **tolerance)
        np.testing.assert_allclose(got.lse[b, n], lse, **tolerance)
        np.testing.assert_allclose(got.dquery[b, :, n], dq, **tolerance)
    np.testing.assert_allclose(got.dkey, dk, **tolerance)
    np.testing.assert_allclose(got.dvalue, dv, **tolerance)
    assert got.dbias is None and got.dsinks is None


def test_golden_agrees_with_attention_on_every_optional_input():
    mask = masks()["dense"]
    bias, sinks = normal(5, B, 1, T, S), normal(6, N)
    do, dlse = normal(7, B, T, N, H), normal(8, B, N, T)
    keywords = dict(bias=bias, sinks=sinks, mask=mask, soft_cap=3.0, scale=0.3)
    got = reference.golden(*arguments(), do, dlse, **keywords)
    with jax.enable_x64(True):
        args = [jnp.asarray(x, jnp.float64) for x in (*arguments(), bias, sinks)]

        def run(q, k, v, bias, sinks):
            return reference.attention(
                q, k, v, mask=mask, soft_cap=3.0, scale=0.3, bias=bias, sinks=sinks
            )

        want, pull = jax.vjp(run, *args)
        want = (
            *want,
            *pull((jnp.asarray(do, jnp.float64), jnp.asarray(dlse, jnp.float64))),
        )
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=0, atol=B * N * T * S * 2.0**-53)


def test_golden_takes_entries_of_a_batch_together_as_alone(monkeypatch):
    """Small ones: each by itself takes as long as all."""
    entries = 6
    q, k, v, do, bias = (
        normal(i, entries, *x.shape[1:])
        for i, x in enumerate(
            (*arguments(), normal(7, B, T, N, H), normal(5, 1, N, T, S))
        )
    )
    mask = Mask(
        dense=np.asarray(normal(11, 1, 1, T, S)) < 1,
        key_value_lengths=np.array([S, 3, 1, S - 1, 0, 5], np.int32),
    )
    sinks = normal(6, N)

    def found(pairs, **of):
        monkeypatch.setattr(reference, "_PAIRS", pairs)
        return reference.golden(q, k, v, do, mask=mask, sinks=sinks, **of)

    for of in ({"bias": bias}, {"bias": bias[:1]}, {"absolute": True}):
        alone = found(1, **of)
        # Six, three and, as five do not divide six, three again.
        for count in (6, 3, 5):
            together = found(count * T * S, **of)
            for name, x in alone._asdict().items():
                if x is not None:
                    y = getattr(together, name)
                    atol = entries * N * T * S * 2.0**-53
                    np.testing.assert_allclose(y, x, rtol=0, atol=atol, err_msg=name)


def test_absolute_sums_bound_the_results_and_equal_them_without_signs():
    q, k, v = arguments()
    do = normal(9, B, T, N, H)
    bias = normal(10, 1, N, T, S)
    exact = reference.golden(q, k, v, do, bias=bias)
    size = reference.golden(q, k, v, do, bias=bias, absolute=True)
    for name in ("out", "dquery", "dkey", "dvalue", "dbias"):
        assert (np.abs(getattr(exact, name)) <= getattr(size, name)).all()
    positive = reference.golden(q, k, np.abs(v), np.abs(do), bias=bias)
    np.testing.assert_allclose(size.out, positive.out, rtol=1e-14)
    np.testing.assert_allclose(size.dvalue, positive.dvalue, rtol=1e-14)


def test_float32_mode_is_float32_accurate():
    q, k, v = map(jnp.asarray, arguments())
    out, lse = reference.attention(q, k, v)
    want = reference.golden(q, k, v, np.zeros(q.shape))
    assert out.dtype == lse.dtype == jnp.float32
    # Logits are sums of H products of size one, then exp of values below 8: at most
    # H + 8 roundings each relative 2**-24, on outputs of size about one.
    bound = (H + S + 8) * 8 * 2.0**-24
    np.testing.assert_allclose(out, want.out, rtol=0, atol=bound)
    np.testing.assert_allclose(lse, want.lse, rtol=0, atol=bound)


def test_output_types():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arguments())
    out, lse = reference.attention(q, k, v)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    out, _ = reference.attention(q, k, v, out_dtype=jnp.float32)
    assert out.dtype == jnp.float32
    grads = jax.grad(
        lambda *a: reference.attention(*a)[0].astype(jnp.float32).sum(), (0, 1, 2)
    )(q, k, v)
    assert all(g.dtype == jnp.bfloat16 for g in grads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key=np.zeros((B, S, 3, H), np.float32)), "must be"),
        (dict(bias=np.zeros((B, N, T, 2), np.float32)), "bias must broadcast"),
        (dict(sinks=np.zeros(3, np.float32)), "sinks must have shape"),
        (dict(mask=Mask(query_lengths=jnp.zeros(3, jnp.int32))), "mask.query_lengths"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    q, k, v = arguments()
    arguments_ = dict(query=q, key=k, value=v) | change
    with pytest.raises(ValueError, match=message):
        reference.check_arguments(**arguments_)


@pytest.mark.parametrize("by_sink", [False, True])
def test_golden_keeps_what_a_row_that_one_key_dominates_has_left(by_sink):
    """dS = P_0 P_1 (dP_0 - dP_1) of two keys, and P_0 P_z dP_0 of a key and a sink:
    of the size of P_1, P_z, about e^-40 or e^-80, where 1 - P_0 is 0 in FP64."""
    query, key = normal(0, 1, 2, 1, 4), normal(1, 1, 2, 1, 4)
    key[:, 0] = query[:, 0] * 40 / (query[0, 0, 0] ** 2).sum()
    query[:, 1] = query[:, 0] * 2
    key[:, 1] = 0
    value, dout = normal(2, 1, 2, 1, 4), normal(3, 1, 2, 1, 4)
    sinks = None
    if by_sink:
        key, value, sinks = key[:, :1], value[:, :1], np.zeros(1, np.float32)
    found = reference.golden(query, key, value, dout, scale=1.0, sinks=sinks)
    q, k, v, do = (x[0, :, 0].astype(np.float64) for x in (query, key, value, dout))
    dp = do @ v.T
    rest = dp[:, 0] - (0 if by_sink else dp[:, 1])
    ds = np.exp(-(q @ k[0])) * rest
    expected = ds[:, None] * k[0]
    # The logits are sums of 4 products, 40 and 80.
    np.testing.assert_allclose(found.dquery[0, :, 0], expected, rtol=1e-13)
    np.testing.assert_allclose(found.dkey[0, 0, 0], ds @ q, rtol=1e-13)
    if by_sink:
        dsink = -(np.exp(-(q @ k[0])) * dp[:, 0]).sum()
        np.testing.assert_allclose(found.dsinks, dsink, rtol=1e-13)


@pytest.mark.parametrize("hidden", [False, True])
def test_golden_loses_nothing_where_a_sink_dominates(hidden):
    """Of a row's keys, seen or not, one has a dP of 1e18; P is about e^-40 or 0."""
    query, key = np.zeros((1, 2, 1, 4), np.float32), normal(1, 1, 2, 1, 4)
    value, dout = normal(2, 1, 2, 1, 4), normal(3, 1, 2, 1, 4)
    value[:, 0] *= 1e18
    dlse, sinks = normal(4, 1, 1, 2), np.full(1, 40, np.float32)
    mask = Mask(key_value_lengths=np.array([0 if hidden else 2], np.int32))
    found = reference.golden(query, key, value, dout, dlse, mask=mask, sinks=sinks)
    k, v, do = (x[0, :, 0].astype(np.float64) for x in (key, value, dout))
    p = 0.0 if hidden else np.exp(-40) / (1 + 2 * np.exp(-40))
    dp = do @ v.T
    excess = p * dp.sum(-1, keepdims=True) - dlse[0, 0, :, None]
    dsink = -((1 - 2 * p) * excess).sum()
    np.testing.assert_allclose(found.dsinks, dsink, rtol=1e-14)
    dx = p * (dp - excess)
    # Some ten roundings of 2^-53.
    np.testing.assert_allclose(found.dquery[0, :, 0], dx @ k * 0.5, rtol=1e-14)


def test_keys_whose_difference_overflows_leave_finite_gradients():
    """In FP32, of which dP reaches nearly all: hidden, or seen alike."""
    query = key = jnp.ones((1, 2, 1, 1), jnp.bfloat16)
    value = jnp.array([3e38, -3e38], jnp.bfloat16).reshape(1, 2, 1, 1)
    dout, dlse = jnp.ones_like(value), jnp.zeros((1, 1, 2))
    # Of length 2 P is 1/2 and delta 0: dS = +-1.5e38 and dK so many times Q.
    for length, dkey in ((0, [0, 0]), (1, [0, 0]), (2, [3e38, -3e38])):
        mask = Mask(key_value_lengths=jnp.array([length], jnp.int32))
        _, pullback = jax.vjp(
            lambda *x: reference.attention(*x, mask=mask), query, key, value
        )
        found = pullback((dout, dlse))
        assert not np.isnan(np.asarray(found[0], np.float32)).any()
        got = np.asarray(found[1], np.float32).ravel()
        np.testing.assert_allclose(got, dkey, rtol=2**-7)


def test_golden_keeps_the_slope_of_a_soft_cap_that_is_reached():
    """Two logits of 17 and 18 times the cap: 1 - tanh^2 is 4 e^-34, and 0 in FP64 when
    it is subtracted."""
    query, key = np.ones((1, 1, 1, 1)), np.array([340.0, 360]).reshape(1, 2, 1, 1)
    value, dout = np.array([0.0, 1]).reshape(1, 2, 1, 1), np.ones((1, 1, 1, 1))
    found = reference.golden(query, key, value, dout, scale=1.0, soft_cap=20.0)
    # Both are at the cap, so P is 1/2 of each and dS -1/4 and 1/4.
    slope = 4 * np.exp(-2 * key.ravel() / 20)
    np.testing.assert_allclose(found.dkey.ravel(), [-0.25, 0.25] * slope, rtol=1e-13)
