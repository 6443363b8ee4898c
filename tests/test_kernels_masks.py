"""Masks, sinks and soft caps in the interpreted Hopper kernels, against FP64.

Each case is interpreted in another process under a time limit, as in
tests/test_kernels_interpret.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import reference
from attn_jax.audit.error import unit, unit_error
from attn_jax.audit.mask_cases import (
    DTYPES,
    FORMATS,
    Case,
    mask_cases,
    sink_gradient_bound,
)
from attn_jax.formats import BF16
from attn_jax.kernels import (
    hopper_backward_dbias,
    hopper_backward_dkv,
    hopper_backward_dq,
    hopper_forward,
    tuning,
    visibility,
)
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.kernels.internals import interpreted
from attn_jax.mask import Mask
from tests.child_process import in_child_process

TIME_LIMIT = 180  # seconds; a case takes five to twenty alone on a core
T, S, N, K = 150, 290, 2, 1
CASES = mask_cases(T, S, N)


class Results(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dsinks: np.ndarray | None


def _inputs(case: Case):
    """query, key, value, dout, dlse; keys far from zero, whose mean dQ must not see."""
    rng = np.random.default_rng(1)
    shapes = [(case.batch, n, heads, case.head_dim) for n, heads in ((T, N), (S, K))]
    query, key, value, dout = (
        (rng.standard_normal(shapes[i]) + shift).astype(DTYPES[case.dtype])
        for i, shift in ((0, 0), (1, 2), (1, 0), (0, 0))
    )
    dlse = rng.standard_normal((case.batch, N, T)).astype(np.float32)
    return query, key, value, dout, dlse


def _kernels(case: Case, detect_races: bool = False) -> Results:
    query, key, value, dout, dlse = _inputs(case)
    sinks = None if case.sinks is None else jnp.asarray(case.sinks, jnp.float32)

    @jax.jit
    def both(query, key, value, mask, sinks, dout, dlse):
        def forward(query, key, value, sinks):
            scale = case.head_dim**-0.5
            return attention(
                query,
                key,
                value,
                scale=scale,
                mask=mask,
                sinks=sinks,
                soft_cap=case.soft_cap,
            )

        results, backward = jax.vjp(forward, query, key, value, sinks)
        return Results(*results, *backward((dout, dlse)))

    mask = jax.tree.map(jnp.asarray, case.mask)
    with made_for("hopper"), interpreted(detect_races=detect_races):
        return jax.device_get(both(query, key, value, mask, sinks, dout, dlse))


def _check(case: Case, results: Results) -> None:
    """The project's bar, 1.7 units; see tests/test_kernels_interpret.py."""
    sinks = None if case.sinks is None else np.asarray(case.sinks)
    golden = reference.golden(
        *_inputs(case), mask=case.mask, sinks=sinks, soft_cap=case.soft_cap
    )
    for field in ("out", "dquery", "dkey", "dvalue"):
        got, want = getattr(results, field), getattr(golden, field)
        assert np.isfinite(got.astype(np.float32)).all(), field
        # Where nothing is seen there is nothing to round.
        assert not got[want == 0].any(), field
        # Under a soft cap the centre does not take up the error of delta.
        limit = 2.0 if field == "dquery" and case.soft_cap else 1.7
        assert unit_error(got, want, FORMATS[case.dtype]) <= limit, field
    empty = np.isneginf(golden.lse)
    np.testing.assert_array_equal(np.isneginf(results.lse), empty)
    # As in tests/test_kernels_interpret.py: logits of at most 40 here, H = 128.
    bound = 2.0**-24 * (133 * 40 + S + 8)
    assert np.abs(results.lse[~empty] - golden.lse[~empty]).max() <= bound
    if sinks is not None:
        bound = sink_gradient_bound(golden, sinks, _inputs(case)[3], case.dtype)
        assert (np.abs(results.dsinks - golden.dsinks) <= bound).all()


# What these have is in others, too.
FURTHER = "unsorted", "soft-cap-window", "window-far", "window-after-offset"
assert set(FURTHER) <= set(CASES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in FURTHER))
        for name in CASES
    ],
)
def test_masked_kernels_are_as_good_as_correctly_rounded(name):
    case = CASES[name]
    _check(case, in_child_process(_kernels, case, seconds=TIME_LIMIT))


@pytest.mark.parametrize(
    "name", ["dense", pytest.param("documents", marks=pytest.mark.thorough)]
)
def test_no_races_under_a_mask(name):
    in_child_process(_kernels, CASES[name], True, seconds=TIME_LIMIT)


def _on_one_multiprocessor(case: Case) -> Results:
    hopper_forward.MULTIPROCESSORS = 1
    return _kernels(case)


@pytest.mark.parametrize(
    "name", ["documents", pytest.param("window-far", marks=pytest.mark.thorough)]
)
def test_tiles_in_turn_are_as_good_as_one_to_a_cta(name):
    case = CASES[name]
    limit = {"seconds": TIME_LIMIT}
    alone = in_child_process(_kernels, case, **limit)
    in_turn = in_child_process(_on_one_multiprocessor, case, alone=True, **limit)
    _check(case, in_turn)
    np.testing.assert_array_equal(in_turn.out, alone.out)
    np.testing.assert_array_equal(in_turn.lse, alone.lse)


BIASES = {
    "own": (1, N, T, S),
    "for all heads": (1, 1, T, S),
    "for all queries": (1, N, 1, S),
    "for all keys": (1, 1, T, 1),
}


def _with_bias(shape: tuple[int, ...], soft_cap: float | None):
    """out, lse, dquery, dkey, dvalue, dbias by the kernels themselves."""
    case = Case(Mask(is_causal=True, query_offset=np.array([S - T])), 64)
    query, key, value, dout, dlse = _inputs(case)
    bias = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    scale = case.head_dim**-0.5
    mask = jax.tree.map(jnp.asarray, case.mask)
    options = {
        "query_count": T,
        "key_count": S,
        "scale": scale,
        "mask": visibility.rules(mask, 1, T, S),
        "band": visibility.Band(*mask.band),
        "soft_cap": soft_cap,
    }

    @jax.jit
    def run(query, key, value, dout, dlse, bias):
        whole = jnp.broadcast_to(bias, (*bias.shape[:2], T, S))
        more = options | {"bias": whole, "is_causal": False}
        out, low, lse = hopper_forward.forward(
            query,
            key,
            value,
            tiling=tuning.FORWARD["hopper"][64],
            out_dtype=jnp.dtype("bfloat16"),
            residual=True,
            **more,
        )
        wide = sum(x.astype(jnp.float32) for x in (out, low))
        delta = (dout[:, :T].astype(jnp.float32) * wide).sum(-1).swapaxes(1, 2) - dlse
        rows = (query, key, value, dout, lse, delta)
        centre = jnp.zeros((1, K, 1, 64), jnp.float32)
        dq = hopper_backward_dq.backward_dq(
            *rows, dlse, centre, tiling=tuning.BACKWARD_DQ["hopper"][64], **more
        )
        dk, dv = hopper_backward_dkv.backward_dkv(
            *rows, tiling=tuning.BACKWARD_DKV["hopper"][64], **more
        )
        dbias = hopper_backward_dbias.backward_dbias(*rows, bias, **options)
        return out, lse, dq, dk, dv, dbias

    padded = [np.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))
              for x in (query, key, value, dout)]  # fmt: skip
    with made_for("hopper"), interpreted():
        return jax.device_get(run(*padded, dlse, bias))


@pytest.mark.parametrize(
    ("name", "soft_cap"),
    [
        *((name, None) for name in BIASES),
        ("own", 5.0),
        *(
            pytest.param(name, 5.0, marks=pytest.mark.thorough)
            for name in BIASES
            if name != "own"
        ),
    ],
)
def test_a_bias_and_its_gradient(name, soft_cap):
    shape = BIASES[name]
    results = in_child_process(_with_bias, shape, soft_cap, seconds=TIME_LIMIT)
    case = Case(Mask(is_causal=True, query_offset=np.array([S - T])), 64)
    bias = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    golden = reference.golden(
        *_inputs(case), mask=case.mask, bias=bias, soft_cap=soft_cap
    )
    wanted = golden.out, golden.lse, golden.dquery, golden.dkey, golden.dvalue
    for index in (0, 2, 3, 4):
        # No centre here, and keys with a mean of 2: dQ is off by what that costs.
        limit = 12 if index == 2 else 1.7
        assert unit_error(results[index], wanted[index], BF16) <= limit, index
    dbias, want = results[5], golden.dbias
    assert dbias.shape == want.shape
    # As of dsinks: the error of out, which is random, through delta. P <= 1.
    error = (
        4
        * 1.7
        * unit(golden.out, BF16)[0]
        * np.linalg.norm(_inputs(case)[3].astype(float), axis=-1)
    )
    error = error.swapaxes(1, 2)[..., None] ** 2
    axes = tuple(i for i in (1, 2) if shape[i] == 1)
    limit = np.sqrt(error.sum(axis=axes, keepdims=True))
    assert (np.abs(dbias - want) <= limit).all()
