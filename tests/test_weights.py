"""Distances of weights: against SciPy, brute force and what they must be."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy.stats import wasserstein_distance

from analysis.weights import compare as compare_module
from analysis.weights.compare import compare
from analysis.weights.groups import built_in, by_expression
from analysis.weights.leaves import SLICE, Box, Leaf, boxes
from analysis.weights.moments import QUANTILE_ERROR, Sketch
from analysis.weights.wasserstein import Binning, Counting, Sorting, distance
from train.config import UsageError
from train.presets import PRESETS

TYPES = [
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
# What rounding leaves of a sum of n terms that are themselves rounded: far less than
# n x 2^-53 relative to the sum of their sizes, for the few thousand terms here.
CLOSE = 1e-12
# Distances are 0 of identical weights; ratios of travels are not among them.
DISTANCES = [
    *("max_abs", "w1", "w1_error", "w1_max", "w1_over_sigma", "rel_l2", "drift"),
    *("mean", "mean_se", "p50", "p90", "p99", "p999"),
]
TEXT = ["kind", "scope", "group", "layer"]


def normal(seed: int, *shape: int, dtype=np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def row(found, scope: str = "all") -> dict:
    """The row of a scope; a tensor's, where its group has the same name."""
    return [one for one in found.rows if one["scope"] == scope][-1]


@pytest.mark.parametrize("dtype", TYPES)
def test_w1_is_scipys(dtype):
    a, b = normal(0, 5000).astype(dtype), (1.1 * normal(1, 5000)).astype(dtype)
    wide = [side.astype(np.float64) for side in (a, b)]
    expected = wasserstein_distance(*wide)
    assert distance(a, b) == pytest.approx(expected, rel=CLOSE)
    sorted_mean = np.abs(np.sort(wide[0]) - np.sort(wide[1])).mean()
    assert distance(a, b) == pytest.approx(sorted_mean, rel=CLOSE)


def test_w1_of_two_types_and_of_two_sizes():
    a, b = normal(0, 300), normal(1, 300)
    for kinds in [(np.float16, ml_dtypes.bfloat16), (np.float32, np.float64)]:
        pair = [side.astype(kind) for side, kind in zip((a, b), kinds)]
        expected = wasserstein_distance(*(side.astype(np.float64) for side in pair))
        assert distance(*pair) == pytest.approx(expected, rel=CLOSE)
    with pytest.raises(ValueError, match="300 numbers against 299"):
        distance(a, b[1:])


def test_sorting_in_threads_is_sorting():
    a, b = normal(0, 70_000, dtype=np.float32), normal(1, 70_000, dtype=np.float32)
    kept = Sorting(70_000, np.dtype(np.float32))
    for part in (slice(0, 3), slice(3, None)):
        kept.add(a[part], b[part])
    expected = wasserstein_distance(a, b)
    assert kept.result() == (pytest.approx(expected, rel=CLOSE), 0.0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("start", [False, True])
def test_measures_are_brute_force(dtype, start, monkeypatch):
    # Slices of 40 numbers: sums are joined many times over.
    monkeypatch.setattr(compare_module, "boxes", lambda shape: boxes(shape, 40))
    a, b = normal(0, 30, 20).astype(dtype), normal(1, 30, 20).astype(dtype)
    begin = normal(2, 30, 20).astype(dtype) if start else None
    found = row(compare({"w": a}, {"w": b}, {"w": begin} if start else None), "w")
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    d = b - a
    expected = {
        "count": 600,
        "tensors": 1,
        "max_abs": np.abs(d).max(),
        "w1": wasserstein_distance(a, b),
        "w1_max": wasserstein_distance(a, b),
        "w1_over_sigma": wasserstein_distance(a, b) / a.std(),
        "w1_error": 0.0,
        "rel_l2": np.linalg.norm(d) / np.linalg.norm(a),
        "mean_se": d.std(ddof=1) / math.sqrt(600),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=CLOSE), name
    # Relative to the sizes that are summed, not to what they cancel to.
    assert found["mean"] == pytest.approx(d.mean(), abs=CLOSE * np.abs(d).mean())
    for name, share in {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}.items():
        true = np.quantile(np.abs(d), share, method="inverted_cdf")
        assert true <= found[name] <= true * (1 + QUANTILE_ERROR)
    if begin is None:
        assert found["cosine"] is found["drift"] is None
        return
    gone, other_gone = (x - begin.astype(np.float64).ravel() for x in (a, b))
    lengths = np.linalg.norm(gone), np.linalg.norm(other_gone)
    assert found["drift"] == pytest.approx(np.linalg.norm(d) / lengths[0], rel=CLOSE)
    cosine = gone @ other_gone / lengths[0] / lengths[1]
    assert found["cosine"] == pytest.approx(cosine, abs=CLOSE)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("most_megabytes", [1024.0, 0.0])
def test_identical_weights_are_exactly_0_apart(convert, most_megabytes):
    kinds = [ml_dtypes.bfloat16, np.float32]
    tree = {f"w{i}": convert(normal(i, 7, 5).astype(k)) for i, k in enumerate(kinds)}
    tree |= {"scalar": convert(np.float32(0.3)), "empty": convert(np.zeros((0, 3)))}
    begin = jax.tree.map(lambda leaf: leaf * 0, tree)
    found = compare(tree, dict(tree), begin, most_megabytes=most_megabytes)
    assert not found.problems
    assert {one["kind"] for one in found.rows} == {"all", "group", "tensor"}
    for one in found.rows:
        found_here = [one[n] for n in DISTANCES if n != "mean_se" or one[n]]
        # Of no weights there is no distance.
        assert set(found_here) == {None if one["scope"] == "empty" else 0.0}, one
        assert one["cosine"] == (None if one["scope"] == "empty" else 1.0)


def test_permuted_weights_have_no_w1_but_are_apart():
    a = normal(0, 40, 50, dtype=np.float32)
    b = np.random.default_rng(1).permutation(a.ravel()).reshape(a.shape)
    for convert in (np.asarray, jnp.asarray):
        found = row(compare({"w": convert(a)}, {"w": convert(b)}), "w")
        assert found["w1"] == found["w1_error"] == 0.0
        assert found["rel_l2"] > 1


def test_scalars_and_ratios_without_a_denominator():
    found = compare({"w": np.float32(0), "s": 1.0}, {"w": np.float32(2), "s": 1.0})
    one = row(found, "w")
    assert (one["w1"], one["max_abs"], one["mean"]) == (2.0, 2.0, 2.0)
    assert one["w1_over_sigma"] is one["rel_l2"] is one["mean_se"] is None
    assert row(found, "all")["rel_l2"] == 2.0


OURS = {
    "blocks": {
        i: {
            "query": {"kernel": normal(i, 4, 4)},
            "up": {"bias": normal(i + 4, 8), "kernel": normal(i + 2, 4, 8)},
        }
        for i in (0, 1)
    },
    "embedding": normal(9, 5, 4),
}


def test_a_difference_shows_in_its_group_and_layer_only():
    other = jax.tree.map(np.copy, OURS)
    other["blocks"][1]["up"]["bias"][3] += 0.5
    found = compare(OURS, other)
    apart = {(one["kind"], one["scope"]) for one in found.rows if one["max_abs"]}
    assert apart == {
        ("all", "all"),
        ("group", "up"),
        ("layer", "1"),
        ("group of layer", "up/1"),
        ("tensor", "blocks.1.up.bias"),
    }
    assert {one["scope"] for one in found.rows if one["kind"] == "group"} == {
        *("q", "up", "embed")
    }


def test_groups_pool_as_they_say():
    other = jax.tree.map(lambda leaf: leaf + 0.1 * normal(20, *leaf.shape), OURS)
    other["blocks"][0]["up"]["bias"] = OURS["blocks"][0]["up"]["bias"] * 1.5
    begin = jax.tree.map(np.zeros_like, OURS)
    found = compare(OURS, other, begin)
    parts = [r for r in found.rows if r["kind"] == "tensor" and r["group"] == "up"]
    group = row(found, "up")
    assert group["tensors"] == len(parts) == 4
    counts = [part["count"] for part in parts]
    for name in ("w1", "w1_over_sigma"):
        mean = np.average([part[name] for part in parts], weights=counts)
        assert group[name] == pytest.approx(mean, rel=CLOSE)
    assert group["w1_max"] == max(part["w1"] for part in parts)
    assert group["max_abs"] == max(part["max_abs"] for part in parts)
    flat = [
        np.concatenate(
            [x.ravel() for i in (0, 1) for x in tree["blocks"][i]["up"].values()]
        )
        for tree in (OURS, other)
    ]
    d = flat[1] - flat[0]
    ratio = np.linalg.norm(d) / np.linalg.norm(flat[0])
    # The start is 0, so travel is the weights.
    for name in ("rel_l2", "drift"):
        assert group[name] == pytest.approx(ratio, rel=CLOSE)
    assert group["mean"] == pytest.approx(d.mean(), rel=CLOSE)
    assert group["mean_se"] == pytest.approx(d.std(ddof=1) / len(d) ** 0.5, rel=CLOSE)
    true = np.quantile(np.abs(d), 0.9, method="inverted_cdf")
    assert true <= group["p90"] <= true * (1 + QUANTILE_ERROR)


def test_every_parameter_of_our_model_has_a_group():
    from flax import nnx

    from analysis.weights.leaves import leaves
    from train.precision import make_policy
    from train.state import make_parts

    config = PRESETS["tiny"]
    parts = make_parts(config, make_policy(config), 300)
    model = nnx.eval_shape(lambda: parts.build(jax.random.key(0)))
    shapes = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tree = jax.tree.map(
        lambda leaf: Leaf(leaf.shape, leaf.dtype, lambda box: None), shapes
    )
    groups = {built_in(name) for name in leaves(tree)}
    blocks = {
        (g, n) for g in "q k v o up down mod".split() for n in range(config.model.depth)
    }
    assert groups == blocks | {(g, None) for g in ("mod", "embed", "in", "out")}


def test_groups_of_other_names():
    assert built_in("model.layers.3.self_attn.q_proj.weight") == ("self_attn.q_proj", 3)
    assert built_in("lm_head.weight") == ("lm_head", None)
    assert built_in("h.0") == ("h.0", 0)
    group = by_expression(r"stage(?P<layer>\d+)/(attn|mlp)")
    assert group("a/stage2/mlp/w") == ("mlp", 2)
    assert group("head.w") == ("other", None)
    assert by_expression("q|k")("layers.7.k.w") == ("k", 7)
    with pytest.raises(UsageError, match="no regular expression"):
        by_expression("(")
    with pytest.raises(UsageError, match="its layer matched 'a'"):
        by_expression("(?P<layer>a)")("a")


def test_what_differs_is_reported_and_the_rest_compared():
    a = {
        "w": normal(0, 3),
        "gone": normal(1, 2),
        "shape": normal(2, 4),
        "n": np.arange(3),
    }
    b = {
        "w": normal(3, 3),
        "new": normal(4, 2),
        "shape": normal(5, 2, 2),
        "n": np.arange(3),
    }
    a["key"], b["key"] = jax.random.key(0), jax.random.key(1)
    found = compare(a, b, names=("A", "B"))
    assert sorted(found.problems) == [
        "1 of 2 tensors that are not of floating-point numbers differ: key",
        "gone: only in A",
        "new: only in B",
        "shape: [4] in A, [2, 2] in B",
    ]
    assert found.equal == {"n": True, "key": False}
    assert [one["scope"] for one in found.rows if one["kind"] == "tensor"] == ["w"]
    with pytest.raises(
        UsageError, match=r"A and B have no tensor.*one has gone.*--tree"
    ):
        compare({"gone": a["gone"]}, {"new": b["new"]}, names=("A", "B"))


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float8_e4m3b11fnuz])
def test_what_is_not_finite_is_counted_and_left_out(convert, dtype):
    a, b, begin = (normal(i, 6, 5).astype(dtype) for i in range(3))
    kept = np.ones(a.shape, bool)
    for side, places in (
        (a, [(0, 0), (1, 1)]),
        (b, [(0, 0), (2, 2), (3, 3)]),
        (begin, [(5, 4)]),
    ):
        for place in places:
            # An 8-bit type without infinities makes NaN of them.
            side[place] = np.nan if place != (2, 2) else np.inf
            kept[place] = False
    trees = [{"w": convert(side)} for side in (a, b, begin)]
    found = compare(*trees, names=("A", "B"))
    assert found.problems == [
        "w: 2 of 30 weights of A are not finite, left out",
        "w: 3 of 30 weights of B are not finite, left out",
        # Both sides have that start.
        "w: 2 of 30 weights of the starts are not finite, left out",
    ]
    expected = compare(*({"w": side[kept]} for side in (a, b, begin)))
    for name, value in row(expected, "w").items():
        if name not in TEXT and not name.startswith("nonfinite"):
            assert row(found, "w")[name] == pytest.approx(value, rel=CLOSE), name


@pytest.mark.parametrize(
    ("dtype", "axes"),
    [(np.float32, AxisType.Auto), (ml_dtypes.bfloat16, AxisType.Explicit)],
)
def test_sharded_is_unsharded_is_numpy(dtype, axes):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axes, axes))
    place = NamedSharding(mesh, PartitionSpec("x", "y"))
    sides = [normal(i, 16, 24).astype(dtype) for i in range(3)]
    sides[1][3, 3] = np.nan
    host = row(compare(*({"w": side} for side in sides)), "w")
    whole = row(compare(*({"w": jnp.asarray(side)} for side in sides)), "w")
    # The last stays where it was: it is brought to the mesh.
    spread = [*(jax.device_put(side, place) for side in sides[:2]), sides[2]]
    sharded = row(compare(*({"w": side} for side in spread)), "w")
    assert sharded["nonfinite_other"] == 1
    for name, value in host.items():
        # Sums of 384 terms in another order: relative 384 x 2^-53 of their sizes at
        # most, and means are not below a thousandth of these here.
        for other in (whole, sharded) if name not in TEXT else ():
            assert other[name] == pytest.approx(value, rel=1e-10), name


def binned(a: np.ndarray, b: np.ndarray, slices: int = 1) -> tuple[float, float]:
    both = np.concatenate([a, b])
    bins = Binning(float(both.min()), float(both.max()))
    for parts in zip(np.array_split(a, slices), np.array_split(b, slices)):
        bins.add(*parts)
    return bins.result()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.floats(-1e4, 1e4),
    st.sampled_from([1e-300, 1e-12, 1e-6, 1e-3, 1.0, 1e30, 1e150, 1e303]),
    st.data(),
)
def test_bins_enclose_w1(size, middle, width, data):
    # Values crowd into few bins, some at their edges, pairs close or far.
    numbers = st.one_of(
        st.floats(-1, 1),
        st.integers(-(2**19), 2**19).map(lambda i: i / 2**19),
        st.sampled_from([0.0, 1e-7, -1e-7, 2.0**-20, 3 * 2.0**-21]),
    )
    columns = st.lists(numbers, min_size=size, max_size=size)
    a, b = (middle * width + width * np.array(data.draw(columns)) for _ in "ab")
    if min(a.min(), b.min()) == max(a.max(), b.max()):
        return
    w1, error = binned(a, b, slices=data.draw(st.integers(1, 3)))
    true = math.fsum(np.abs(np.sort(a) - np.sort(b)) / size)
    # The true value, too, is rounded.
    assert abs(w1 - true) <= error + 1e-15 * true
    assert w1 >= 0 and math.isfinite(error)


def test_bins_are_narrow_where_they_can_be():
    a = normal(0, 20_000)
    for b, most in [
        # Far apart: the sign of F_a - F_b is certain nearly everywhere.
        (normal(1, 20_000) + 0.5, 1e-6),
        # Two samples of one distribution: a bin is 1e-5 of the range wide at most.
        (normal(2, 20_000), 1e-5),
        # Closer than a bin: W1 is no larger than the mean difference.
        (a + 1e-9, 1e-9),
    ]:
        w1, error = binned(a, b, slices=3)
        assert error <= most
        assert abs(w1 - wasserstein_distance(a, b)) <= error


def test_memory_does_not_grow_with_the_tensor():
    """Slices are read, and W1 of what exceeds the limit comes from bins."""
    asked = []

    def read(box: Box) -> np.ndarray:
        asked.append(box.stop - box.start)
        # Between -1 and 1, another one at every place.
        return np.sin(np.arange(box.start, box.stop, dtype=np.float32))

    shape = (5, 2**19)
    a = Leaf(shape, np.dtype(np.float32), read)
    b = Leaf(shape, np.dtype(np.float32), lambda box: 2 * read(box))
    size = 5 * 2**19
    within = row(compare({"w": a}, {"w": b}), "w")
    assert sum(asked) == 2 * size and max(asked) <= SLICE
    beyond = row(compare({"w": a}, {"w": b}, most_megabytes=1.0), "w")
    # A second time for the bins.
    assert sum(asked) == 6 * size and max(asked) <= SLICE
    assert within["w1_error"] == 0 < beyond["w1_error"] < 1e-4 * within["w1"]
    assert abs(beyond["w1"] - within["w1"]) <= beyond["w1_error"]
    assert beyond["rel_l2"] == within["rel_l2"] == pytest.approx(1, rel=CLOSE)


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), max_size=4), st.integers(1, 50))
def test_boxes_cover_a_tensor_in_order(shape, most):
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = list(boxes(tuple(shape), most))
    for part in parts:
        values = whole[part.index].ravel()
        np.testing.assert_array_equal(values, np.arange(part.start, part.stop))
        assert 0 < values.size <= most
    assert [part.start for part in parts] == [0, *(part.stop for part in parts)][:-1]
    assert parts[-1].stop == whole.size


@given(
    st.lists(st.floats(0, 1e300), max_size=30),
    st.lists(st.floats(0, 1e-300), max_size=30),
    st.floats(0.01, 1),
)
def test_quantiles_of_joined_sketches(left, right, share):
    both = np.array(left + right)
    sketch = Sketch.of(np.array(left, float)).join(Sketch.of(np.array(right, float)))
    if not both.size:
        assert sketch.quantile(share) == 0
        return
    true = np.sort(both)[math.ceil(share * both.size) - 1]
    # Subnormal numbers have fewer bits than a bin has.
    least = np.finfo(np.float64).tiny
    assert true <= sketch.quantile(share) <= true * (1 + QUANTILE_ERROR) + least


def test_counting_takes_every_pattern():
    for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
        bits = np.arange(256 ** np.dtype(dtype).itemsize).astype(
            f"u{np.dtype(dtype).itemsize}"
        )
        with np.errstate(invalid="ignore"):
            values = bits.view(dtype).astype(np.float64)
        values = values[np.isfinite(values)]
        kept = Counting(np.dtype(dtype))
        kept.add(values.astype(dtype), -np.abs(values).astype(dtype))
        expected = (
            math.fsum(np.abs(np.sort(values) - np.sort(-np.abs(values)))) / values.size
        )
        assert kept.result()[0] == pytest.approx(expected, rel=CLOSE)
