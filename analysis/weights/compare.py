"""How far the weights of two models lie apart, by tensor, group and layer.

For one tensor with a of the reference and b of the other, d = b - a, over the n places
where all that is compared is finite:

    max_abs         max |d|, the paper's (arXiv 2405.02803)
    w1, w1_error    Wasserstein-1 distance of the n values of a and of b, the paper's
                    (`wasserstein`); it lies within w1_error of w1
    w1_over_sigma   w1 / standard deviation of a
    rel_l2          ||d|| / ||a||
    cosine          (a - a0).(b - b0) / (||a - a0|| ||b - b0||), of the travels
    drift           ||d|| / ||a - a0||, in shares of what training moved
    mean, mean_se   mean of d and its standard error
                    sqrt(sum (d - mean)^2 / (n - 1) / n)
    p50 ... p999    quantiles of |d|: 50, 90, 99 and 99.9 % do not exceed it; never too
                    small, and too large by 2^-10 of it at most
    nonfinite_...   weights of a, b and their starts that are not finite: a place that
                    has one is left out

Of several tensors: max_abs and `w1_max` are maxima; w1, w1_error and w1_over_sigma are
means weighted by n (the last over the tensors that have one); rel_l2, cosine and drift
pool the sums of squares of all tensors, so numerator and denominator are RMS over all
weights; mean, mean_se and quantiles are of all d together. A ratio is 0 where
numerator and denominator are, and None where the denominator alone is; cosine is None
where either has not moved. `cosine` and `drift` pool the tensors that have a start.
Where no place is left (n = 0) all measures are None: a tensor of NaN is not at
distance 0 from anything.

All units are the weights'. Squares do not overflow; what is beyond FP64's range itself,
as max |d| of 1e308 and -1e308, is infinite.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from analysis.record import Row
from analysis.weights import on_device
from analysis.weights.groups import Grouping, built_in
from analysis.weights.leaves import Leaf, boxes, leaves
from analysis.weights.moments import NO_TRAVELS, Moments
from analysis.weights.wasserstein import (
    Binning,
    Counting,
    Distance,
    Sorting,
    common_type,
    countable,
)
from train.config import UsageError

MOST_MEGABYTES = 1024.0
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_MEASURES = (
    *("max_abs", "w1", "w1_error", "w1_max", "w1_over_sigma", "rel_l2", "cosine"),
    *("drift", "mean", "mean_se", *_QUANTILES),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      rows: one a tensor, group, layer, group of a layer, and one of everything; the
        columns `kind`, `scope`, `group` and `layer` tell which.
      equal: of every tensor of integers or other numbers, whether both are the same.
      problems: a line for each tensor that only one side has, whose shapes differ, that
        is of floating-point numbers on one side alone, or that has weights that are
        not finite; one line that names the tensors which `equal` says differ.
    """

    rows: list[Row]
    equal: dict[str, bool]
    problems: list[str]


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Measures of one tensor."""

    moments: Moments
    w1: float
    w1_error: float
    nonfinite: tuple[int, int, int]


def compare(
    reference: Any,
    other: Any,
    initial: Any = None,
    other_initial: Any = None,
    *,
    group: Grouping = built_in,
    most_megabytes: float = MOST_MEGABYTES,
    names: tuple[str, str] = ("the reference", "the other"),
) -> Comparison:
    """Compares two pytrees of weights; the module's docstring defines the measures.

    A tensor that is an array of JAX on both sides is reduced on its devices, sharded as
    it is (`on_device`). Any other is read in slices of 8 MiB; W1 sorts it if both sides
    fit `most_megabytes`, and comes with an error above 0 if they do not.

    Args:
      reference, other: pytrees of arrays, numbers, or `leaves.Leaf`.
      initial: where the reference started, for cosine and drift. Tensors that it lacks
        have neither.
      other_initial: where the other started, by default there, too.
      group: gives group and layer of a name.
      most_megabytes: MiB for the numbers of one tensor of both sides.
      names: of the two sides, for `problems`.

    Raises:
      UsageError: the trees have no tensor of one name, shape and kind of number in
        common.
    """
    here, there = leaves(reference), leaves(other)
    start = leaves(initial) if initial is not None else {}
    other_start = leaves(other_initial) if other_initial is not None else start
    problems = [f"{name}: only in {names[0]}" for name in here if name not in there]
    problems += [f"{name}: only in {names[1]}" for name in there if name not in here]
    measured: dict[str, _Tensor] = {}
    equal: dict[str, bool] = {}
    for name, a in here.items():
        b = there.get(name)
        if b is None:
            continue
        if a.shape != b.shape:
            problems.append(
                f"{name}: {list(a.shape)} in {names[0]}, {list(b.shape)} in {names[1]}"
            )
            continue
        if a.floating != b.floating:
            problems.append(
                f"{name}: {a.dtype} in {names[0]}, {b.dtype} in {names[1]}, not "
                "compared: convert one"
            )
            continue
        if not a.floating:
            equal[name] = _equal(a, b)
            continue
        starts = start.get(name), other_start.get(name)
        origins = [
            one
            for one in starts
            if one is not None and one.shape == a.shape and one.floating
        ]
        if start and len(origins) < 2:
            problems.append(f"{name}: no start of its shape, so no cosine and no drift")
        tensor = _measure(a, b, origins if len(origins) == 2 else [], most_megabytes)
        measured[name] = tensor
        sides = zip((*names, "the starts"), tensor.nonfinite, strict=True)
        problems += [
            f"{name}: {count} of {a.size} weights of {side} are not finite, left out"
            for side, count in sides
            if count
        ]
    if not measured and not equal:
        raise UsageError(
            f"{names[0]} and {names[1]} have no tensor of one name, shape and kind of "
            f"number in common: one has {_some(here)}, the other {_some(there)}; name "
            "the subtree that holds the weights (--tree), or compare models of one kind"
        )
    differ = [name for name, same in equal.items() if not same]
    if differ:
        problems.append(
            f"{len(differ)} of {len(equal)} tensors that are not of floating-point "
            f"numbers differ: {some_of(differ)}"
        )
    return Comparison(_rows(measured, group), equal, problems)


def _some(tree: Mapping[str, Leaf]) -> str:
    described = [
        f"{name} ({leaf.dtype} {[*leaf.shape]})" for name, leaf in tree.items()
    ]
    return some_of(described, 2) or "none"


def some_of(values: Sequence[Any], most: int = 8) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def _equal(a: Leaf, b: Leaf) -> bool:
    if a.array is not None and b.array is not None:
        return on_device.equal(a.array, b.array)
    # Bit for bit where a number may be none: NaN, or no date.
    return all(
        np.array_equal(x, y) or x.dtype == y.dtype and x.tobytes() == y.tobytes()
        for x, y in (
            (a.read(box).ravel(), b.read(box).ravel()) for box in boxes(a.shape)
        )
    )


def _measure(a: Leaf, b: Leaf, starts: Sequence[Leaf], most_megabytes: float):
    if a.size and a.array is not None and b.array is not None:
        origins: Any = tuple(
            one.array
            if one.array is not None
            else np.concatenate(
                [one.read(box).ravel() for box in boxes(one.shape)]
            ).reshape(one.shape)
            for one in starts
        )
        moments, w1, bad = on_device.measure(a.array, b.array, origins or None)
        return _Tensor(moments, w1, 0.0, bad)
    dtype = common_type(a.dtype, b.dtype)
    distance: Distance | None = None
    if countable(dtype):
        distance = Counting(dtype)
    elif 2 * a.size * dtype.itemsize <= most_megabytes * 2**20:
        distance = Sorting(a.size, dtype)
    moments, bad = _stream(a, b, starts, distance)
    if distance is not None:
        return _Tensor(moments, *distance.result(), bad)
    if not moments.low < moments.high:
        return _Tensor(moments, 0.0, 0.0, bad)
    # The bins need the range, so all is read a second time.
    distance = Binning(moments.low, moments.high)
    for x, y, _ in _pairs(a, b, starts, [0, 0, 0]):
        distance.add(x, y)
    return _Tensor(moments, *distance.result(), bad)


def _stream(
    a: Leaf, b: Leaf, starts: Sequence[Leaf], distance: Distance | None
) -> tuple[Moments, tuple[int, int, int]]:
    bad = [0, 0, 0]
    moments = Moments(travels=NO_TRAVELS if starts else None)
    for x, y, origins in _pairs(a, b, starts, bad):
        if distance is not None:
            distance.add(x, y)
        wide = [part.astype(np.float64) for part in (x, y, *origins)]
        pair = (wide[2], wide[3]) if origins else None
        moments = moments.join(Moments.of(wide[0], wide[1], pair))
    return moments, (bad[0], bad[1], bad[2])


def _pairs(a: Leaf, b: Leaf, starts: Sequence[Leaf], bad: list[int]):
    """Flat slices of a, b and the starts without the places where one is not finite.

    How many there are of a, b and the starts is added to `bad`.
    """
    for box in boxes(a.shape):
        # Once what is the same: a compressed file is read from its beginning for it.
        alike = {id(leaf): leaf for leaf in (a, b, *starts)}
        read = {number: leaf.read(box).ravel() for number, leaf in alike.items()}
        parts = [read[id(leaf)] for leaf in (a, b, *starts)]
        finite = [np.isfinite(part) for part in parts]
        if not all(part.all() for part in finite):
            for number, part in enumerate(finite):
                bad[min(number, 2)] += int(part.size - part.sum())
            kept = np.logical_and.reduce(finite)
            parts = [part[kept] for part in parts]
        yield parts[0], parts[1], parts[2:]


def _rows(measured: Mapping[str, _Tensor], group: Grouping) -> list[Row]:
    places = {name: group(name) for name in measured}

    def pooled(kind: str, key: Callable[[str], tuple[str, Any, Any] | None]):
        found: dict[tuple[str, Any, Any], list[_Tensor]] = {}
        for name, tensor in measured.items():
            place = key(name)
            if place is not None:
                found.setdefault(place, []).append(tensor)
        return [
            {"kind": kind, "scope": scope, "group": own, "layer": layer, **_pool(parts)}
            for (scope, own, layer), parts in found.items()
        ]

    def layered(name: str) -> tuple[str, Any, Any] | None:
        own, layer = places[name]
        return None if layer is None else (f"{own}/{layer}", own, layer)

    def layer_of(name: str) -> tuple[str, Any, Any] | None:
        layer = places[name][1]
        return None if layer is None else (str(layer), None, layer)

    return [
        *pooled("all", lambda name: ("all", None, None)),
        *pooled("group", lambda name: (places[name][0], places[name][0], None)),
        *pooled("layer", layer_of),
        *pooled("group of layer", layered),
        *pooled("tensor", lambda name: (name, *places[name])),
    ]


def _pool(tensors: Sequence[_Tensor]) -> Row:
    """The measures of some tensors together."""
    all_of = tensors[0].moments
    for tensor in tensors[1:]:
        all_of = all_of.join(tensor.moments)
    n = all_of.count
    nonfinite = [sum(counts) for counts in zip(*(t.nonfinite for t in tensors))]
    return {
        "tensors": len(tensors),
        "count": n,
        **(_measures(all_of, tensors) if n else dict.fromkeys(_MEASURES)),
        "nonfinite_reference": nonfinite[0],
        "nonfinite_other": nonfinite[1],
        "nonfinite_initial": nonfinite[2],
    }


def _measures(all_of: Moments, tensors: Sequence[_Tensor]) -> Row:
    """Of what the tensors have in common, which is not nothing."""
    n, some = all_of.count, [tensor for tensor in tensors if tensor.moments.count]
    scaled = [
        (tensor.moments.count, ratio)
        for tensor in some
        if (ratio := _ratio(Decimal(tensor.w1), tensor.moments.sigma)) is not None
    ]
    dot, gone, other_gone = all_of.travels or NO_TRAVELS
    # Over those tensors alone whose travel is known.
    moved = sum(
        (t.moments.square for t in some if t.moments.travels is not None), Decimal(0)
    )
    cosine = None
    if gone and other_gone:
        cosine = float(dot / (gone.sqrt() * other_gone.sqrt()))
        # Rounding may pass 1.
        cosine = 1.0 if dot == gone == other_gone else max(-1.0, min(1.0, cosine))
    travelled = any(t.moments.travels is not None for t in some)
    return {
        "max_abs": all_of.max_abs,
        "w1": _weighted([(t.moments.count, t.w1) for t in some]),
        "w1_error": _weighted([(t.moments.count, t.w1_error) for t in some]),
        "w1_max": max(t.w1 for t in some),
        "w1_over_sigma": _weighted(scaled),
        "rel_l2": _ratio(all_of.square.sqrt(), all_of.reference_square.sqrt()),
        "cosine": cosine,
        "drift": _ratio(moved.sqrt(), gone.sqrt()) if travelled else None,
        "mean": float(all_of.mean),
        "mean_se": float((all_of.spread / (n - 1) / n).sqrt()) if n > 1 else None,
        **{
            name: min(all_of.sketch.quantile(share), all_of.max_abs)
            for name, share in _QUANTILES.items()
        },
    }


def _ratio(above: Decimal, below: Decimal) -> float | None:
    if not below:
        return None if above else 0.0
    return float(above / below)


def _weighted(pairs: Sequence[tuple[int, float]]) -> float | None:
    weight = sum(count for count, _ in pairs)
    if not weight:
        return None
    # Sums of numbers near the end of FP64's range lie beyond it.
    return float(sum(count * Decimal(value) for count, value in pairs) / weight)
