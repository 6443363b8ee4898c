"""The sums of one tensor, reduced where JAX keeps it.

One compiled program a shape: sums in FP64 over the sharded operands, so that only a few
numbers and the counts of a sketch leave the devices. Sharded and whole tensors differ
by the order of these sums: for each, relative n x 2^-53 of the sum of its terms' sizes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from analysis.weights.moments import SHIFT, Moments, Sketch
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
    numbers = {name: value.item() for name, value in found["numbers"].items()}
    start, zeros = int(found["start"]), int(found["zeros"])
    travels = None
    if starts is not None:
        travels = tuple(float(x) for x in found["travels"])
    moments = Moments(
        **numbers,
        travels=travels,  # pyright: ignore[reportArgumentType]
        sketch=Sketch(zeros, start, np.asarray(found["counts"], np.int64)),
    )
    bad = [int(count) for count in found["bad"]]
    return moments, float(found["w1"]), (bad[0], bad[1], sum(bad[2:]))


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


@jax.jit
def _sums(a: jax.Array, b: jax.Array, *starts: jax.Array) -> dict[str, Any]:
    parts = [part.astype(jnp.float64) for part in (a, b, *starts)]
    finite = [jnp.isfinite(part) for part in parts]
    kept = jnp.stack(finite).all(0)
    n = kept.sum()
    x, y, *origins = (jnp.where(kept, part, 0.0) for part in parts)
    d = y - x
    size = jnp.abs(d)
    mean, reference_mean = d.sum() / jnp.maximum(n, 1), x.sum() / jnp.maximum(n, 1)
    bits = jax.lax.bitcast_convert_type(size, jnp.int64) >> SHIFT
    start = jnp.maximum(bits.max() - (_BINS - 1), 0)
    place = jnp.maximum(bits - start, 0)
    some = size > 0
    # A place for each number that has none in the counts, then cut off.
    counts = jnp.zeros(_BINS + 1, jnp.int64)
    counts = counts.at[jnp.where(some, place, _BINS).ravel()].add(1)[:_BINS]
    travels: list[jax.Array] = []
    if origins:
        gone, other_gone = x - origins[0], y - origins[1]
        pairs = ((gone, other_gone), (gone, gone), (other_gone, other_gone))
        travels = [(left * right).sum() for left, right in pairs]
    # Numbers are sorted in a type that holds both; those left out go to the end.
    dtype = common_type(np.dtype(a.dtype), np.dtype(b.dtype))
    if dtype.itemsize == 1:  # Some of these have no infinity.
        dtype = np.dtype(np.float32)
    ends = [
        jnp.sort(jnp.where(kept, part.astype(dtype), jnp.inf).ravel())
        for part in (x, y)
    ]
    apart = jnp.abs(ends[0].astype(jnp.float64) - ends[1].astype(jnp.float64))
    w1 = jnp.where(jnp.arange(a.size) < n, apart, 0.0).sum() / jnp.maximum(n, 1)
    return {
        "numbers": {
            "count": n,
            "low": jnp.where(kept, jnp.minimum(x, y), jnp.inf).min(),
            "high": jnp.where(kept, jnp.maximum(x, y), -jnp.inf).max(),
            "max_abs": size.max(),
            "mean": mean,
            "spread": jnp.where(kept, jnp.square(d - mean), 0.0).sum(),
            "reference_mean": reference_mean,
            "reference_spread": jnp.where(
                kept, jnp.square(x - reference_mean), 0.0
            ).sum(),
            "square": jnp.square(d).sum(),
            "reference_square": jnp.square(x).sum(),
        },
        "travels": travels,
        "bad": [(~part).sum() for part in finite],
        "start": start,
        "counts": counts,
        "zeros": n - counts.sum(),
        "w1": w1,
    }
