"""Context parallelism on the kernels, on a Hopper GPU.

Parts of any number of shards, put together on one card, against FP64, and one shard
against the plain kernels."""

import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel, reference
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Shape, make_inputs
from attn_jax.audit.mask_cases import Bias, Case, bias_gradient_bound
from attn_jax.formats import BF16
from attn_jax.kernels import design
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask
from attn_jax.xla_options import RUN_ONCE
from tests.parallel_runs import ULYSSES, sharded

pytestmark = pytest.mark.gpu(capability="9.0")

T, N, K = 4096, 4, 2
DOCUMENTS = np.searchsorted([700, 1500, 1501, 3300], np.arange(T), "right")
DOCUMENTS = DOCUMENTS.astype(np.int32)[None]


def _inputs(family: str, head_dim: int):
    dlse = np.random.default_rng(1).standard_normal((1, N, T)).astype(np.float32)
    return *make_inputs(family, 0, Shape(1, T, T, N, K, head_dim)), dlse


def _results(attend, inputs, compiler_options=None):
    """(out, LSE, dQ, dK, dV), twice: to the same last bit; with a bias behind the
    inputs, too, and dbias."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def both(query, key, value, dout, dlse, *bias):
        results, pullback = jax.vjp(attend, query, key, value, *bias)
        return *results, *pullback((dout, dlse))

    first = jax.device_get(both(*inputs))
    chex.assert_trees_all_equal(first, jax.device_get(both(*inputs)))
    return first


@pytest.mark.parametrize(
    ("strategy", "layout", "masked"),
    [
        ("ring", "zigzag", "causal"),
        ("ring", "striped", "causal"),
        ("ring", "contiguous", "window"),
        ("ring", "zigzag", "documents"),
        ("all_gather", "zigzag", "causal"),
        ("all_gather+ring", "contiguous", "full"),
    ],
)
@pytest.mark.parametrize(
    ("family", "shards", "head_dim"),
    [("normal", 8, 128), ("uniform", 8, 64), ("sink", 4, 128)],
)
def test_shards_are_as_good_as_one_device(
    family, shards, head_dim, strategy, layout, masked
):
    inputs = _inputs(family, head_dim)
    ids = jnp.asarray(DOCUMENTS) if masked == "documents" else None
    window = (300, 40) if masked == "window" else None
    is_causal = masked in ("causal", "documents")
    out, lse, *gradients = _results(
        functools.partial(
            context_parallel.simulate,
            shards=shards,
            strategy=strategy,
            layout=layout,
            is_causal=is_causal,
            local_window_size=window,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            implementation="pallas",
        ),
        inputs,
    )
    mask = Mask(
        is_causal=is_causal,
        window=window,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
    )
    exact = reference.golden(*inputs, mask=mask)
    wanted = exact.out, exact.dquery, exact.dkey, exact.dvalue
    names = "out", "dquery", "dkey", "dvalue"
    for name, got, want in zip(names, (out, *gradients), wanted, strict=True):
        # The bar of the kernels themselves; dQ has its final rounding, and dS's and
        # K's, which have three bits more.
        bar = math.hypot(1, 2 * 2.0**-3) if name == "dquery" else 1.7
        assert unit_error(got, want, BF16) <= bar, name
    # Logits of size 2^7 at the most (`sink`), of H products, and sums of T terms.
    largest = float(np.abs(exact.lse).max())
    np.testing.assert_allclose(
        lse, exact.lse, rtol=0, atol=max(10, largest) * (head_dim + T) * 2.0**-24
    )


def _errors(attend, inputs, exact) -> list[float]:
    return _off(_results(attend, inputs), exact)


def _off(results, exact) -> list[float]:
    """RMS of what each result is off."""
    wanted = exact.out, exact.lse, exact.dquery, exact.dkey, exact.dvalue
    return [
        float(np.sqrt(np.mean((got.astype(np.float64) - want) ** 2)))
        for got, want in zip(results, wanted, strict=True)
    ]


def _check_gate(found: list[float], alone: list[float]) -> None:
    growth = [a / b for a, b in zip(found, alone, strict=True)]
    gate = 1.05, 1.05, 1.05, 1.20, 1.05  # of out, LSE, dQ, dK, dV
    assert all(x <= y for x, y in zip(growth, gate, strict=True)), growth


@pytest.fixture
def in_one_pass(monkeypatch) -> Iterator[None]:
    """Gradients of parts come from the kernel that parts of a useful size have."""
    monkeypatch.setattr(design, "LEAST_SHARE", 0.0)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("strategy", "layout", "is_causal", "shape"),
    [
        ("ring", "zigzag", True, (1, 1, T, T)),
        ("ring", "striped", True, (1, N, 1, T)),
        ("all_gather", "contiguous", False, (1, N, T, T)),
    ],
)
def test_a_bias_is_as_good_as_on_one_device(strategy, layout, is_causal, shape):
    inputs = _inputs("normal", 128)
    bias = 2 * np.random.default_rng(2).standard_normal(shape)
    bias[..., 40:1100] = -np.inf
    bias = bias.astype(ml_dtypes.bfloat16)
    options = dict(strategy=strategy, layout=layout, is_causal=is_causal)

    def attend(query, key, value, bias):
        return context_parallel.simulate(
            *(query, key, value),
            bias=bias,
            shards=4,
            implementation="pallas",
            **options,
        )

    out, lse, *gradients, dbias = _results(attend, (*inputs, bias))
    mask = Mask(is_causal=is_causal)
    exact = reference.golden(*inputs, bias=bias, mask=mask)
    wanted = exact.out, exact.dquery, exact.dkey, exact.dvalue
    # As above.
    bars = 1.7, math.hypot(1, 2 * 2.0**-3), 1.7, 1.7
    for got, want, bar in zip((out, *gradients), wanted, bars, strict=True):
        assert unit_error(got, want, BF16) <= bar
    atol = 20 * (128 + T) * 2.0**-24
    np.testing.assert_allclose(lse, exact.lse, rtol=0, atol=atol)
    case = Case(mask, 128, bias=Bias(shape, "bfloat16"))
    with patch.object(Bias, "array", lambda self: bias):
        bound = bias_gradient_bound(case, inputs[:4], inputs[4])
    assert (np.abs(dbias.astype(np.float64) - exact.dbias) <= bound).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("devices", [None, 2, 4])
def test_shards_that_fill_no_tiles(devices, is_causal):
    """As `train --preset=small-long --mesh.seq=4` has them: 272 tokens on a device; on
    one card in a loop, and over NCCL and by copy engines."""
    length, head_dim = 1088, 64
    inputs = make_inputs("normal", 0, Shape(3, length, length, N, N, head_dim))
    dlse = np.random.default_rng(1).standard_normal((3, N, length))
    inputs = *inputs, dlse.astype(np.float32)
    if devices is not None and len(jax.devices()) < devices:
        pytest.skip(f"takes {devices} GPUs, and {len(jax.devices())} are here")
    options: dict[str, Any] = dict(is_causal=is_causal, implementation="pallas")
    if devices is None:
        options |= dict(shards=4, layout="zigzag")
        attend = functools.partial(context_parallel.simulate, **options)
        compiled_with = [None]
    else:
        attend = sharded(devices, "ring", "zigzag", **options)
        used = jax.devices()[:devices]
        compiled_with = None, context_parallel.compiler_options(used)
    exact = reference.golden(*inputs, mask=Mask(is_causal=is_causal))
    wanted = exact.out, exact.dquery, exact.dkey, exact.dvalue
    # As above.
    bars = 1.7, math.hypot(1, 2 * 2.0**-3), 1.7, 1.7
    for chosen in compiled_with:
        out, lse, *gradients = _results(attend, inputs, chosen)
        for got, want, bar in zip((out, *gradients), wanted, bars, strict=True):
            assert unit_error(got, want, BF16) <= bar
        atol = 20 * (head_dim + length) * 2.0**-24
        np.testing.assert_allclose(lse, exact.lse, rtol=0, atol=atol)


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize(
    ("family", "lse_counts"), [("normal", True), ("sink", True), ("sink", False)]
)
def test_no_error_grows_with_the_shards(family, lse_counts):
    """Against one shard, which is the plain kernels. dQ has no dLSE to hide in where
    LSE has no gradient."""
    *inputs, dlse = _inputs(family, 128)
    inputs = *inputs, dlse if lse_counts else np.zeros_like(dlse)
    exact = reference.golden(*inputs, mask=Mask(is_causal=True))

    def errors(shards: int) -> list[float]:
        attend = functools.partial(
            context_parallel.simulate,
            shards=shards,
            layout="zigzag",
            is_causal=True,
            implementation="pallas",
        )
        return _errors(attend, inputs, exact)

    alone = errors(1)
    for shards in (2, 4, 8, 16):
        _check_gate(errors(shards), alone)


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("family", ["normal", "sink"])
@pytest.mark.parametrize("strategy", context_parallel.STRATEGIES)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_no_error_grows_with_the_gpus_of_a_host(devices, strategy, family):
    """The same over NCCL, and to the same last bit twice (`_results`) and by copy
    engines."""
    if len(jax.devices()) < devices:
        pytest.skip(f"takes {devices} GPUs, and {len(jax.devices())} are here")
    if strategy == "ulysses" and devices > K:
        pytest.skip(f"{K} key heads are for {K} devices")
    if strategy == "ring+ulysses" and devices < 4:
        pytest.skip("takes 4 GPUs: two rings of two")
    inputs = _inputs(family, 128)
    exact = reference.golden(*inputs, mask=Mask(is_causal=True))
    whole = sharded(
        devices // ULYSSES if strategy == "ring+ulysses" else devices,
        *(strategy, "contiguous" if strategy == "ulysses" else "zigzag"),
        is_causal=True,
        implementation="pallas",
    )

    def alone(query, key, value):
        return attention(query, key, value, scale=128**-0.5, mask=Mask(is_causal=True))

    found = _results(whole, inputs)
    _check_gate(_off(found, exact), _errors(alone, inputs, exact))
    options = context_parallel.compiler_options(jax.devices()[:devices])
    assert options
    chex.assert_trees_all_equal(_results(whole, inputs, options), found)
    if strategy != "ulysses":  # Plain kernels have P in FP16 only if differentiated.
        forward = jax.jit(whole, compiler_options=options)
        chex.assert_trees_all_equal(jax.device_get(forward(*inputs[:3])), found[:2])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_one_shard_is_the_plain_kernel(strategy, biased):
    inputs = _inputs("uniform", 128)
    if biased:
        bias = np.random.default_rng(2).standard_normal((1, 1, T, T))
        inputs += (bias.astype(ml_dtypes.bfloat16),)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("seq",))

    def sharded(*given: Any):
        attend = functools.partial(
            context_parallel.attention,
            axis_name="seq",
            strategy=strategy,
            is_causal=True,
            implementation="pallas",
        )
        specs = P(None, "seq"), P(None, None, "seq")

        def local(query, key, value, bias=None):
            return attend(query, key, value, bias=bias)

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(*(specs[0],) * 3, specs[1])[: len(given)],
            out_specs=specs,
            check_vma=False,
        )
        return run(*given)

    def whole(query, key, value, bias=None):
        mask = Mask(is_causal=True)
        return attention(query, key, value, scale=128**-0.5, bias=bias, mask=mask)

    found = _results(whole, inputs)
    chex.assert_trees_all_equal(_results(sharded, inputs), found)
    # Compiled when a card is busy, a program may get what it gets without any trials.
    for attend in (sharded, whole):
        chex.assert_trees_all_equal(_results(attend, inputs, RUN_ONCE), found)
