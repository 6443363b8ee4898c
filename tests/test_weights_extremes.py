"""Distances of weights where FP64's range ends, and where nothing can be compared."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis.weights import compare as compare_module
from analysis.weights.compare import compare
from analysis.weights.leaves import boxes
from train.config import UsageError

# Sums of 600 terms, each rounded once or twice: far below n x 2^-53.
CLOSE = 1e-12
MEASURES = [
    *("max_abs", "w1", "w1_error", "w1_max", "w1_over_sigma", "rel_l2", "cosine"),
    *("drift", "mean", "mean_se", "p50", "p90", "p99", "p999"),
]
CONVERT = {"numpy": np.asarray, "jax": jnp.asarray}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def tensor(found, scope: str = "w") -> dict:
    (one,) = (r for r in found.rows if (r["kind"], r["scope"]) == ("tensor", scope))
    return one


def root(fraction: Fraction) -> float:
    """Square root of a number that FP64 need not hold."""
    lengths = [x.bit_length() for x in (fraction.numerator, fraction.denominator)]
    half = (lengths[0] - lengths[1]) // 2
    return math.ldexp(math.sqrt(fraction / Fraction(4) ** half), half)


def exact(a: np.ndarray, b: np.ndarray, begin: np.ndarray) -> dict[str, float]:
    """The measures in rational numbers."""
    x, y, z = ([Fraction(v) for v in side.ravel().tolist()] for side in (a, b, begin))
    n = len(x)
    d = [q - p for p, q in zip(x, y)]
    gone = [p - o for p, o in zip(x, z)]
    other_gone = [q - o for q, o in zip(y, z)]

    def dot(left, right):
        return sum((p * q for p, q in zip(left, right)), Fraction(0))

    def variance(v):
        return dot(v, v) / n - (sum(v) / n) ** 2

    w1 = sum(abs(q - p) for p, q in zip(sorted(x), sorted(y))) / n
    both = dot(gone, other_gone)
    cosine = root(both**2 / (dot(gone, gone) * dot(other_gone, other_gone)))
    return {
        "max_abs": float(max(map(abs, d))),
        "w1": float(w1),
        "w1_over_sigma": root(w1**2 / variance(x)),
        "rel_l2": root(dot(d, d) / dot(x, x)),
        "drift": root(dot(d, d) / dot(gone, gone)),
        "cosine": cosine if both > 0 else -cosine,
        "mean": float(sum(d) / n),
        "mean_se": root(variance(d) / (n - 1)),
    }


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("most_megabytes", [1024.0, 0.0])
@pytest.mark.parametrize("size", [1e-250, 1e-160, 1.0, 1e152, 1e200, 2e307])
def test_squares_beyond_the_range_of_fp64(size, most_megabytes, convert, monkeypatch):
    # Slices of 40 numbers: sums are joined many times over.
    monkeypatch.setattr(compare_module, "boxes", lambda shape: boxes(shape, 40))
    a, step, begin = (size * normal(i, 30, 20) for i in range(3))
    b = a + 0.1 * step
    expected = exact(a, b, begin)
    with jax.enable_x64(True):
        sides = [{"w": CONVERT[convert](side)} for side in (a, b, begin)]
        found = tensor(compare(*sides, most_megabytes=most_megabytes))
    # Bins enclose W1.
    share = found["w1_error"] / found["w1"]
    assert share == 0 or most_megabytes == 0
    for name, value in expected.items():
        error = share if name.startswith("w1") else 0.0
        assert abs(found[name] - value) <= (CLOSE + 2 * error) * abs(value), name


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("most_megabytes", [1024.0, 0.0])
def test_differences_beyond_the_range_of_fp64_are_infinite(most_megabytes, convert):
    a = np.full(4, 1.5e308)
    with jax.enable_x64(True):
        sides = [{"w": CONVERT[convert](side)} for side in (a, -a)]
        found = tensor(compare(*sides, most_megabytes=most_megabytes))
    assert found["rel_l2"] == pytest.approx(2.0, rel=CLOSE)
    assert {found[name] for name in ("max_abs", "w1", "p50", "p999")} == {math.inf}
    assert found["mean"] == -math.inf and found["mean_se"] == 0.0


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("most_megabytes", [1024.0, 0.0])
def test_where_nothing_is_finite_there_is_no_distance(convert, most_megabytes):
    a, b = normal(0, 40).astype(np.float32), normal(1, 40).astype(np.float32)
    half = b.copy()
    half[::2] = np.nan
    nothing = np.full(3, np.nan, np.float32)
    left = {"x.all": nothing, "x.half": a, "y.all": nothing, "z": a[:0]}
    right = {"x.all": nothing, "x.half": half, "y.all": nothing, "z": a[:0]}
    left, right = (
        {name: CONVERT[convert](side) for name, side in tree.items()}
        for tree in (left, right)
    )
    found = compare(left, right, left, most_megabytes=most_megabytes, names=("A", "B"))
    for name in ("x.all", "y.all", "z"):
        one = tensor(found, name)
        assert one["count"] == 0 and {one[measure] for measure in MEASURES} == {None}
    assert tensor(found, "y.all")["nonfinite_other"] == 3
    # What is finite counts alone, in its group and in all, too.
    d = b[1::2].astype(np.float64) - a[1::2]
    kinds = [r for r in found.rows if r["scope"] in ("all", "x", "x.half")]
    assert len(kinds) == 3
    for one in kinds:
        assert one["count"] == 20
        assert one["max_abs"] == one["p999"] == np.abs(d).max()
        relative = np.linalg.norm(d) / np.linalg.norm(a[1::2].astype(np.float64))
        assert one["rel_l2"] == pytest.approx(relative, rel=CLOSE)
        assert one["w1_max"] == one["w1"] > 0
    assert "x.half: 20 of 40 weights of B are not finite, left out" in found.problems


@pytest.mark.parametrize("most_megabytes", [1024.0, 0.0])
def test_equal_weights_have_no_spread(most_megabytes):
    """Not what a rounded mean leaves of each: 768 times 0.1 sum to a bit more."""
    a = {"c": np.full(768, 0.1), "v": np.arange(64.0)}
    b = {"c": a["c"] + 0.01 * normal(0, 768), "v": a["v"] + 0.01}
    found = compare(a, b, most_megabytes=most_megabytes)
    assert tensor(found, "c")["w1_over_sigma"] is None
    (all_of,) = (row for row in found.rows if row["kind"] == "all")
    assert all_of["w1_over_sigma"] < 1


def test_types_that_do_not_go_together_are_named():
    half = np.arange(3, dtype=np.float16)
    a = {"w": half, "k": half, "n": np.arange(3), "o": half > 1, "same": half > 1}
    b = {"w": half, "k": np.arange(3), "n": np.ones(3, int), "o": half > 0}
    found = compare(a, b | {"same": half > 1}, names=("A", "B"))
    assert found.equal == {"n": False, "o": False, "same": True}
    assert found.problems == [
        "k: float16 in A, int64 in B, not compared: convert one",
        "2 of 3 tensors that are not of floating-point numbers differ: n, o",
    ]
    with pytest.raises(UsageError, match=r"k \(float16 \[3\]\), the other k \(int64"):
        compare({"k": a["k"]}, {"k": b["k"]})
