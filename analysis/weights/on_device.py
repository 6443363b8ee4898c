"""The sums of one tensor, reduced where JAX keeps it.

One compiled program a shape: sums in FP64 over the sharded operands, so that only a few
numbers and the counts of a sketch leave the devices. Sharded and whole tensors differ
by the order of these sums: for each, relative n x 2^-53 of the sum of its terms' sizes.
On a CPU XLA takes subnormal FP32 and BF16 numbers (below 2^-126) for 0 as it widens
them; tensors that are read slice by slice keep theirs.
"""

import math
from decimal import Decimal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from analysis.weights.moments import LARGE, SHIFT, UNIT, Moments, Sketch
from analysis.weights.wasserstein import common_type

# 64 binades below the largest difference; what is smaller counts in the last bin.
_BINS = 64 * 1024


def measure(
    a: jax.Array, b: jax.Array, starts: tuple[Any, Any] | None
) -> tuple[Moments, float, tuple[int, int, int]]:
    """Moments, exact W1 and how many weights of a, b and the starts are not finite.

    W1 is mean |sort(a) - sort(b)| by jnp.sort, which gathers a sharded tensor on every
    device: twice its size in memory there. Differences below 2^-64 of the largest count
    as that in quantiles.

    Args:
      a, b: floating-point tensors of one shape. b and the starts are brought to the
        devices of a where they lie elsewhere.
      starts: a0 and b0, from which they have travelled, of JAX or NumPy.
    """
    a = _automatic(a)
    placed = [_beside(a, other) for other in (b, *(starts or ()))]
    # The sums need FP64, whatever the program around them computes in.
    with jax.enable_x64(True):
        found = jax.device_get(_sums(a, *placed))
    numbers: dict[str, Any] = {
        **{name: value.item() for name, value in found["numbers"].items()},
        **{name: _product(parts) for name, parts in found["sums"].items()},
    }
    numbers["travels"] = None
    if starts is not None:
        numbers["travels"] = tuple(map(_product, found["travels"]))
    start, zeros = int(found["start"]), int(found["zeros"])
    moments = Moments(
        **numbers,
        sketch=Sketch(zeros, start, np.asarray(found["counts"], np.int64)),
    )
    bad = [int(count) for count in found["bad"]]
    return moments, math.prod(map(float, found["w1"])), (bad[0], bad[1], sum(bad[2:]))


def _product(factors: tuple[Any, ...]) -> Decimal:
    """Of a sum and the scales of what was summed, which FP64 may not hold."""
    return math.prod((Decimal(float(one)) for one in factors), start=Decimal(1))


def equal(a: jax.Array, b: jax.Array) -> bool:
    """Whether two tensors of one shape hold the same numbers."""
    a = _automatic(a)
    return bool(jnp.all(a == _beside(a, b)))


def _automatic(a: jax.Array) -> jax.Array:
    """The same array on a mesh whose axes ask for no sharding of each result."""
    place = a.sharding
    if not isinstance(place, NamedSharding) or place.mesh.devices is None:
        return a
    mesh = Mesh(place.mesh.devices, place.mesh.axis_names)
    return jax.device_put(a, NamedSharding(mesh, place.spec))


def _beside(a: jax.Array, other: Any) -> jax.Array:
    if isinstance(other, jax.Array) and other.sharding == a.sharding:
        return other
    return jax.device_put(other, a.sharding)


def _scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers over a power of two that leaves none above 2, and that power."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x).max(), jnp.int64)
    power = jax.lax.bitcast_convert_type(bits & (0x7FF << 52), jnp.float64)
    # That of 0 and of subnormal numbers is 0.
    power = jnp.maximum(power, jnp.finfo(jnp.float64).tiny)
    return x / power, power


@jax.jit
def _sums(a: jax.Array, b: jax.Array, *starts: jax.Array) -> dict[str, Any]:
    parts = [part.astype(jnp.float64) for part in (a, b, *starts)]
    finite = [jnp.isfinite(part) for part in parts]
    kept = jnp.stack(finite).all(0)
    n = kept.sum()
    kept_parts = [jnp.where(kept, part, 0.0) for part in parts]
    x, y = kept_parts[:2]
    size = jnp.abs(y - x)
    low = jnp.where(kept, jnp.minimum(x, y), jnp.inf).min()
    high = jnp.where(kept, jnp.maximum(x, y), -jnp.inf).max()
    bits = jax.lax.bitcast_convert_type(size, jnp.int64) >> SHIFT
    start = jnp.maximum(bits.max() - (_BINS - 1), 0)
    place = jnp.maximum(bits - start, 0)
    some = size > 0
    # A place for each number that has none in the counts, then cut off.
    counts = jnp.zeros(_BINS + 1, jnp.int64)
    counts = counts.at[jnp.where(some, place, _BINS).ravel()].add(1)[:_BINS]
    # As on the host, `moments.unit`, and every sum is of numbers that are scaled.
    largest = jnp.stack([jnp.abs(part).max() for part in kept_parts]).max()
    unit = jnp.where(largest > LARGE, UNIT, 1.0)
    # A factor, since of two divisions XLA makes one by a product that may be too large.
    shrink = jnp.where(largest > LARGE, 1 / UNIT, 1.0)
    x, y, *origins = (part * shrink for part in kept_parts)
    (d, d_scale), (x_scaled, x_scale) = _scaled(y - x), _scaled(x)
    mean, reference_mean = (part.sum() / jnp.maximum(n, 1) for part in (d, x_scaled))
    spread, reference_spread = (
        jnp.where(kept, jnp.square(part - middle), 0.0).sum()
        for part, middle in ((d, mean), (x_scaled, reference_mean))
    )
    d_unit, x_unit = (d_scale, unit), (x_scale, unit)
    travels: list[tuple[jax.Array, ...]] = []
    if origins:
        gone, other_gone = _scaled(x - origins[0]), _scaled(y - origins[1])
        pairs = ((gone, other_gone), (gone, gone), (other_gone, other_gone))
        travels = [
            ((left * right).sum(), scale, other_scale, unit, unit)
            for (left, scale), (right, other_scale) in pairs
        ]
    # Numbers are sorted in a type that holds both; those left out go to the end.
    dtype = common_type(np.dtype(a.dtype), np.dtype(b.dtype))
    if dtype.itemsize == 1:  # Some of these have no infinity.
        dtype = np.dtype(np.float32)
    ends = [
        jnp.sort(jnp.where(kept, part.astype(dtype), jnp.inf).ravel())
        for part in (a, b)
    ]
    wide = [end.astype(jnp.float64) * shrink for end in ends]
    apart = jnp.abs(wide[0] - wide[1])
    w1 = jnp.where(jnp.arange(a.size) < n, apart, 0.0).sum() / jnp.maximum(n, 1)
    return {
        "numbers": {"count": n, "low": low, "high": high, "max_abs": size.max()},
        "sums": {
            "mean": (mean, *d_unit),
            "spread": (spread, *d_unit, *d_unit),
            "reference_mean": (reference_mean, *x_unit),
            "reference_spread": (reference_spread, *x_unit, *x_unit),
            "square": (jnp.square(d).sum(), *d_unit, *d_unit),
            "reference_square": (jnp.square(x_scaled).sum(), *x_unit, *x_unit),
        },
        "travels": travels,
        "bad": [(~part).sum() for part in finite],
        "start": start,
        "counts": counts,
        "zeros": n - counts.sum(),
        "w1": (w1, unit),
    }
