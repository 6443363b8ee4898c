"""Context parallelism computes attention: every strategy, layout and mask, in FP64."""

import collections
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from attn_jax import context_parallel, emulator
from attn_jax.context_parallel import all_keys, merge, schedule
from attn_jax.context_parallel.blocks import Emulated
from attn_jax.context_parallel.layouts import shard_runs
from attn_jax.formats import BF16
from attn_jax.mask import Mask
from attn_jax.recipe import ATTN_JAX, EXACT_FP32, EXACT_FP64, RECIPES, Step
from tests.parallel_runs import (
    arrays,
    both_passes,
    exact,
    mesh_of,
    sharded,
    simulated,
    stale_keys,
)

B, T, S, N, K, H = 2, 16, 32, 4, 2, 4
W = 4
QUERY, KEY = (B, T, N, H), (B, S, K, H)
FP64 = dataclasses.replace(
    EXACT_FP64, dq_centre="mean", block_kv=4, backward_block_kv=4
)
# Sums of at most B T N terms of size one to ten, each rounded a few times.
BOUND = 100 * B * T * N * 2.0**-53


def documents(length: int, size: int):
    """Documents of a length that no shard's border is a multiple of."""
    return jnp.asarray((np.arange(length) // size)[None].repeat(B, 0), jnp.int32)


MASKS = {
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(5, 9)),
    "packed": dict(
        is_causal=True,
        local_window_size=(11, None),
        ids=(documents(T, 5), documents(S, 5)),
    ),
}
# Strategies that have the other's arithmetic in a pass are run under one mask each.
# Which pairs meet under a layout and a band has a test without arithmetic, below.
CASES = [
    ("ring", "zigzag", "causal"),
    ("ring", "striped", "window"),
    ("all_gather", "contiguous", "packed"),
    ("all_gather+ring", "zigzag", "causal"),
    ("ulysses", "zigzag", "packed"),
    ("ring+ulysses", "zigzag", "packed"),
    *(
        pytest.param(*case, marks=pytest.mark.ci)
        for case in (
            ("ring", "zigzag", "packed"),
            ("ring", "contiguous", "packed"),
            ("all_gather", "zigzag", "window"),
            ("all_gather", "striped", "packed"),
            ("ulysses", "striped", "causal"),
        )
    ),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in (
            ("ring", "zigzag", "window"),
            ("ring", "striped", "causal"),
            ("ring", "striped", "packed"),
            ("ring", "contiguous", "window"),
            ("all_gather", "zigzag", "packed"),
            ("all_gather+ring", "striped", "packed"),
            ("ring+ulysses", "contiguous", "causal"),
        )
    ),
]


@pytest.mark.parametrize(("strategy", "layout", "mask"), CASES)
def test_the_sequence_may_be_cut(strategy, layout, mask, x64):
    options = MASKS[mask]
    shards = 2 if "ulysses" in strategy else W
    # A causal mask on equal lengths: whole shards are hidden, seen, or neither.
    query = (B, S, N, H) if mask == "causal" else QUERY
    given = arrays(query, KEY, jnp.float64)
    run = both_passes(sharded(shards, strategy, layout, recipe=FP64, **options))
    chex.assert_trees_all_close(
        run(*given), exact(given, **options), rtol=BOUND, atol=BOUND
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "layout", "shards"),
    [
        ("ring", "zigzag", W),
        ("all_gather+ring", "zigzag", 2),
        pytest.param("ring", "striped", W, marks=pytest.mark.thorough),
        pytest.param("all_gather+ring", "zigzag", W, marks=pytest.mark.thorough),
        pytest.param("all_gather", "striped", W, marks=pytest.mark.thorough),
        pytest.param("all_gather", "zigzag", W, marks=pytest.mark.thorough),
    ],
)
def test_a_simulation_has_the_devices_bits(strategy, layout, shards):
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    recipe = dataclasses.replace(ATTN_JAX, block_kv=4, backward_block_kv=4)
    options = dict(is_causal=True, recipe=recipe)
    runs = (
        both_passes(how(shards, strategy, layout, **options))
        for how in (sharded, simulated)
    )
    chex.assert_trees_all_equal(*(run(*given) for run in runs))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("ring_flash_attn", {}, marks=pytest.mark.thorough),
        ("te_ring", {}),
        ("flash2", dict(ring_merge="carry", ring_accumulator=Step(BF16))),
        ("attn_jax", dict(ring_merge="carry_whole")),
    ],
)
def test_a_simulation_has_the_bits_of_the_emulators_ring(name, changes):
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    recipe = dataclasses.replace(RECIPES[name], block_kv=4, ring_size=W, **changes)
    options = dict(is_causal=True, recipe=recipe)
    got = both_passes(simulated(W, "ring", "contiguous", **options))(*given)
    attend = functools.partial(
        emulator.attention, recipe=recipe, mask=Mask(is_causal=True)
    )
    want = both_passes(attend)(*given)
    # LSE is merged in arrays of another shape: the last ulps of exp and log are free.
    ulps = 2 * (W - 1) * 2.0**-23 * np.abs(want[1]).max()
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=ulps)
    chex.assert_trees_all_equal(got[0], want[0])
    chex.assert_trees_all_equal(got[3:], want[3:])


@pytest.fixture(scope="module")
def plain():
    """Inputs, and the results of the emulator alone."""
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    attend = functools.partial(
        emulator.attention, recipe=ATTN_JAX, mask=Mask(is_causal=True)
    )
    return given, both_passes(attend)(*given)


@pytest.mark.parametrize(
    "strategy",
    [
        "ring",
        "ulysses",
        # These with a bias, too.
        pytest.param("all_gather", marks=pytest.mark.thorough),
        pytest.param("all_gather+ring", marks=pytest.mark.thorough),
    ],
)
def test_one_shard_is_the_plain_implementation(strategy, plain):
    given, want = plain
    options = dict(recipe=ATTN_JAX, is_causal=True)
    got = both_passes(sharded(1, strategy, "zigzag", **options))(*given)
    chex.assert_trees_all_equal(got, want)


# With a bias that is so in FP64 (test_context_parallel_bias).
@pytest.mark.thorough
def test_heads_may_be_gathered_a_few_at_a_time():
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    runs = (
        both_passes(sharded(2, "all_gather", "zigzag", is_causal=True, head_stride=n))
        for n in (None, 1)
    )
    chex.assert_trees_all_equal(*(run(*given) for run in runs))


def test_x64_mode_and_checkpoints_change_no_bit():
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    attend = sharded(2, "ring", "contiguous", is_causal=True)
    want = both_passes(attend)(*given)
    chex.assert_trees_all_equal(both_passes(jax.checkpoint(attend))(*given), want)
    with jax.enable_x64(True):
        got = both_passes(attend)(*given)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    chex.assert_trees_all_equal(got, want)


def test_two_runs_give_the_same_bits():
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    run = both_passes(sharded(W, "ring", "contiguous", is_causal=True))
    chex.assert_trees_all_equal(run(*given), run(*given))


# ------------------------------------------------------------------- who meets whom

BANDS = [(None, None), (None, 0), (3, 0), (2, 5), (0, 0), (None, 2), (40, None)]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("layout", context_parallel.LAYOUTS)
def test_every_visible_pair_is_in_one_call(layout, band):
    for shards, lengths in ((1, (4, 8)), (2, (8, 16)), (3, (12, 12)), (4, (16, 8))):
        found = schedule.schedule(layout, shards, *lengths, band)
        seen = np.zeros(lengths, int)
        where = [
            [_positions(length, shards, layout, r) for r in range(shards)]
            for length in lengths
        ]
        for rank, source in np.ndindex(shards, shards):
            calls = found.plans[found.plan[rank, source]]
            for call, offset in zip(calls, found.offset[rank, source]):
                visible = _visible(call, offset)
                assert visible.any()
                q = where[0][rank][call.query[0] :][: call.query[1]]
                k = where[1][source][call.key[0] :][: call.key[1]]
                seen[np.ix_(q, k)] += visible
        left, right = band
        mask = Mask(
            is_causal=right == 0,
            window=(left, None if right == 0 else right),
        )
        want = mask.materialise(*lengths)
        np.testing.assert_array_equal(
            seen, np.ones(lengths, int) if want is None else want[0, 0]
        )


def _positions(length, shards, layout, shard):
    runs = shard_runs(length, shards, layout, shard)
    return np.concatenate([r.start + r.stride * np.arange(r.size) for r in runs])


def _visible(call, offset):
    shape = call.query[1], call.key[1]
    given = jnp.asarray([offset], jnp.int32) if call.shifted else None
    mask = Mask(call.is_causal, call.window, query_offset=given)
    found = mask.materialise(*shape)
    return np.ones(shape, bool) if found is None else np.asarray(found[0, 0])


def test_causal_work_is_skipped_and_balanced():
    """Work is what calls compute: pairs of queries and keys that they are about."""

    def work(layout):
        found = schedule.schedule(layout, 8, 64, 64, (None, 0))
        return np.array(
            [
                [
                    sum(c.query[1] * c.key[1] for c in found.plans[plan])
                    for plan in found.at_hop(hop)
                ]
                for hop in range(8)
            ]
        )

    # At every hop after the first each device has half of what all pairs would be.
    assert (work("zigzag")[1:] == 8 * 8 // 2).all()
    # The first device meets nobody's keys but its own, the last everybody's.
    assert (np.count_nonzero(work("contiguous"), axis=0) == np.arange(1, 9)).all()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize(
    ("options", "hops"),
    [({}, 4), (dict(is_causal=True, local_window_size=(2, None)), 2)],
)
def test_keys_and_gradients_travel_no_further_than_they_are_seen(options, hops):
    x = jax.ShapeDtypeStruct((B, S, K, H), jnp.bfloat16)
    attend = sharded(W, "ring", "contiguous", **options)

    def loss(q, k, v):
        return attend(q, k, v)[0].astype(jnp.float32).sum()

    def messages(function):
        found = list(equations(jax.make_jaxpr(function)(x, x, x).jaxpr))
        sent = [e.invars[0].aval for e in found if e.primitive.name == "ppermute"]
        return [str(aval.dtype) for aval in sent], found

    forward, _ = messages(attend)
    assert forward == ["bfloat16"] * (hops - 1)  # K and V in one
    both, found = messages(jax.grad(loss, (0, 1, 2)))
    # Ahead of a first and a second shard's keys nothing has been summed, and behind the
    # last and a shard's own no keys are left to send; else they travel in one.
    back = collections.Counter(both) - collections.Counter(forward)
    ends = min(2, hops - 1)
    assert back == +collections.Counter(
        {"bfloat16": ends, "uint32": hops - 1 - ends, "float32": ends}
    )
    if options:
        # Where nothing is seen a branch computes nothing.
        (cond, *_) = [e for e in found if e.primitive.name == "cond"]
        branches = [list(equations(b.jaxpr)) for b in cond.params["branches"]]
        products = [
            sum(e.primitive.name == "dot_general" for e in branch)
            for branch in branches
        ]
        assert min(products) == 0 < max(products)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
def test_what_all_devices_know_is_in_their_order(devices):
    mesh = mesh_of(devices, "ring")
    x = jnp.arange(2.0 * devices).reshape(devices, 2)
    gather = all_keys.gather_over("ring")
    of_each = jax.shard_map(
        lambda x: gather(x[0])[None], mesh=mesh, in_specs=P("ring"), out_specs=P("ring")
    )
    chex.assert_trees_all_equal(jax.jit(of_each)(x), jnp.stack([x] * devices))


# ------------------------------------------- bugs that others had, each one a test


def test_gradients_see_each_shards_own_keys(x64, monkeypatch):
    """diffusers issue 14265: the forward pass was right, so only gradients tell."""
    given = arrays((B, S, N, H), KEY, jnp.float64)

    def run():
        jax.clear_caches()  # They know nothing of what is patched.
        found = both_passes(sharded(W, "ring", "contiguous", recipe=FP64))(*given)
        jax.clear_caches()
        return found

    want, right = exact(given), run()
    chex.assert_trees_all_close(right, want, rtol=BOUND, atol=BOUND)
    stale_keys(monkeypatch)
    *forward, dq, dk, dv = run()
    chex.assert_trees_all_equal(forward, list(right[:2]))
    # Three of four keys are others: no rounding, but gradients of some other size.
    for got, exactly in zip((dq, dk, dv), want[2:], strict=True):
        assert np.linalg.norm(got - exactly) > 0.1 * np.linalg.norm(exactly)


def test_lse_is_fp32_and_natural():
    """jax.nn's is in the inputs' format, Pallas's examples' in base 2."""
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    for strategy in ("ring", "all_gather"):
        lse = jax.jit(sharded(W, strategy, "zigzag"))(*given[:3])[1]
        assert lse.dtype == jnp.float32
        # Logits and sums of S terms in FP32, W - 1 merges.
        bound = (S + 4 * W) * 2.0**-23 * 8
        np.testing.assert_allclose(lse, exact(given)[1], rtol=0, atol=bound)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_rows_that_no_shard_shows_anything(strategy):
    given = arrays((B, S, N, H), KEY, jnp.float32)
    lonely = documents(S, 5).at[:, 3].set(99)
    run = sharded(2, strategy, "zigzag", ids=(lonely, documents(S, 5)))
    with jax.debug_nans(True):
        out, lse, dq, dk, dv = both_passes(run)(*given)
    assert not out[:, 3].any() and not dq[:, 3].any()
    assert np.isneginf(lse[:, :, 3]).all()
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


def test_arrays_may_be_views_of_others():
    """PyTorch's context parallelism had wrong losses from K and V in other strides."""
    given = arrays((B, S, N, H), KEY, jnp.bfloat16)
    attend = sharded(2, "ring", "contiguous", is_causal=True)
    transposed = [x.swapaxes(1, 2) for x in given[:3]]
    got = jax.jit(lambda *x: attend(*(y.swapaxes(1, 2) for y in x)))(*transposed)
    chex.assert_trees_all_equal(got, jax.jit(attend)(*given[:3]))


@pytest.mark.parametrize("way", ["lse", "sigmoid", "two_pass"])
def test_lse_far_apart_are_merged(way):
    """exp(LSE - LSE') overflows FP32 at 88; with both -inf their difference is NaN."""
    recipe = dataclasses.replace(EXACT_FP32, ring_merge=way)
    lse = np.float32([-50, 60, -200, 300, -np.inf, -np.inf, 7, 5])
    other = np.float32([60, -50, 300, -200, -np.inf, 2, -np.inf, 5])
    query = jnp.zeros((1, len(lse), 1, 1))
    parts = [
        (
            jnp.where(np.isneginf(x), 0.0, value)[None, :, None, None],
            jnp.asarray(x)[None, None],
        )
        for value, x in ((1.0, lse), (3.0, other))
    ]

    class Given(Emulated):
        """Whose forward pass gives what it is handed for keys."""

        def forward(self, query, key, value, mask, bias=None):
            return parts[int(key[0, 0, 0, 0])]

    def visit(add, so_far):
        for number in range(2):
            key = jnp.full((1, 1, 1, 1), float(number))
            keys = merge.Keys(query, key, key, Mask())
            so_far = add(so_far, keys, number == 0, 0)
        return so_far

    with jax.debug_nans(True):
        block = Given(recipe, 1.0)
        _, out, merged = merge.over_parts(visit, block, query, query, query)
    want = [3, 1, 3, 1, 0, 3, 1, 2]
    # A few roundings of numbers of that size.
    np.testing.assert_allclose(out[0, :, 0, 0], want, rtol=4 * 2.0**-23)
    want = [60, 60, 300, 300, -np.inf, 2, 7, 5 + np.log(2)]
    np.testing.assert_allclose(merged[0, 0], want, rtol=4 * 2.0**-23)


def test_hops_and_layers_share_what_is_compiled(monkeypatch):
    """Eight shards in zigzag have the meeting of a shard with itself, that with an
    earlier one and that with a later one: three programs a pass, not one a hop, and
    the same three in every layer: with kernels lowered in each, a training of eight
    layers over four H200s compiled in 157 s (`results/training/README.md`)."""
    made = []

    def counted(name):
        original = getattr(Emulated, name)

        def run(self, *given, **more):
            made.append(name)
            return original(self, *given, **more)

        return run

    for name in ("carry_on", "backward"):
        monkeypatch.setattr(Emulated, name, counted(name))
    attend = sharded(8, "ring", "zigzag", is_causal=True, implementation="emulated")

    def layers(query, key, value):
        out, _ = attend(query, key, value)
        return attend(out, key, value)

    def both(*inputs):
        results, pullback = jax.vjp(layers, *inputs)
        return pullback(results)

    x = jax.ShapeDtypeStruct((1, 128, 1, 16), jnp.bfloat16)
    jax.clear_caches()
    jax.eval_shape(both, x, x, x)
    jax.clear_caches()
    assert (made.count("carry_on"), made.count("backward")) == (3, 3)


@pytest.mark.parametrize("layout", context_parallel.LAYOUTS)
def test_a_layout_is_undone(layout):
    x = jnp.arange(2 * 24 * 3).reshape(2, 24, 3)
    moved = context_parallel.to_layout(x, 4, layout)
    np.testing.assert_array_equal(moved, x[:, context_parallel.order(24, 4, layout)])
    back = context_parallel.from_layout(moved, 4, layout)
    np.testing.assert_array_equal(back, x)
