"""The audit inside a model: two attentions on the same inputs, every call compared.

The model uses the one, bit for bit as without the audit; the other is computed beside
it in the backward pass, and what is left of the comparison is a few sums and a
histogram. These leave the model as the gradient with respect to an input that it does
not read, the probe: no callback, so jit, remat, scans over layers and meshes work.

    attention = shadow(fn, against)
    def loss(weights, probes): ...  attention(query, key, value, probes[layer])
    gradients, statistics = jax.grad(loss, argnums=(0, 1))(weights, make_probe(layers))
    read(statistics[layer])["dquery"].units

What adds up over calls and devices is all that is carried, so a probe that several
devices or calls share gives the statistics of everything they computed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attn_jax.audit.error import in_units
from attn_jax.audit.problem import FORMATS, GRADIENTS
from attn_jax.formats import NumberFormat, round_to
from attn_jax.varying import varying_alike

TENSORS = ("out", *GRADIENTS)
# Scalars before the histogram: what the sums of `_compare` are called here.
_SUMS = (
    "entries",
    "sum",
    "entry_squares",
    "squares",
    "golden_squares",
    "rounding_squares",
    "expected_squares",
)
# Bins of |e| by its exponent and the leading bits of its mantissa in float32: no scale
# has to be known beforehand, and an upper edge is at most 2**-_MANTISSA_BITS above |e|.
_MANTISSA_BITS = 2
_SHIFT = 23 - _MANTISSA_BITS
_BINS = 2 ** (8 + _MANTISSA_BITS)
_FINITE_BINS = _BINS - 2**_MANTISSA_BITS
STATISTICS = len(_SUMS) + _BINS
# As in `error.unit`: far below any rounding, the against-result is one of the format's.
_EXACT = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Deviation:
    """e = x - g of one tensor, g being the against-result in float32.

    units           RMS of e over the unit, the RMS error of g rounded once to the
                    format of x; where g is in that format (or vanishes), over the
                    format's `rms_roundoff` times the RMS of g
    relative        RMS of e over RMS of g
    signed_mean     mean of e, over the RMS of g
    signed_mean_ci  half width of its 95 % interval from the scatter of the means of
                    the entries (batch and head); inf for a single one
    directionality  A = |sum e| / sqrt(sum e^2); see `error.DIRECTIONALITY_NULL_95`
    p999, maximum   99.9th percentile and largest of |e|, over the RMS of g, rounded up
                    by less than a quarter
    non_finite      number of e that are infinite or NaN, which all of the above leave
                    out
    count           number of e
    """

    units: float
    relative: float
    signed_mean: float
    signed_mean_ci: float
    directionality: float
    p999: float
    maximum: float
    non_finite: int
    count: int


def make_probe(*axes: int) -> Float[Array, "*axes 4 statistics"]:
    """Zeros to differentiate with respect to; `axes` are those of the layers, if any.

    The four are `TENSORS`.
    """
    return jnp.zeros((*axes, len(TENSORS), STATISTICS), jnp.float32)


def shadow(
    fn: Callable[..., Array], against: Callable[..., Array]
) -> Callable[..., Array]:
    """`fn` as a function of (query, key, value, probe, **options), and its audit.

    Both take (query, key, value, **options), [B, T, N, H] and [B, S, K, H], and return
    the output, [B, T, N, H]. Results and gradients (of array options, too) are those of
    `fn`; the gradient of the probe, `make_probe()`, is what `read` reads (both are in
    `attn_jax.audit.shadow`): the output of `fn` and its dQ, dK and dV compared with
    those of `against` for the same cotangent. `against` is given the query, key and
    value in float32 and should return that.

    Reverse mode only, once. A forward pass alone compares nothing. Inside `shard_map`
    the probe is replicated (`P()`): the transpose sums it over devices. Squares of
    errors are float32: errors below about 1e-19 count as zero in the sums.

    Raises ValueError, when called, for a probe of another shape, results that differ
    in shape and formats other than those of `problem.FORMATS`.
    """

    def audited(
        query: Array, key: Array, value: Array, probe: Array, **options: Any
    ) -> Array:
        if probe.shape != (len(TENSORS), STATISTICS) or probe.dtype != jnp.float32:
            raise ValueError(
                f"probe must be make_probe(), float32 {(len(TENSORS), STATISTICS)}, "
                f"got {probe.dtype} {probe.shape}; index the one of all layers"
            )
        leaves, structure = jax.tree.flatten(options)
        arrays = {
            number: jnp.asarray(leaf)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, (jax.Array, np.ndarray))
        }

        def call(function, query, key, value, arrays):
            filled = [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]
            return function(query, key, value, **structure.unflatten(filled))

        operands = varying_alike(query, key, value, arrays, probe)
        return _audited(
            lambda *inputs: call(fn, *inputs), lambda *inputs: call(against, *inputs)
        )(*operands)

    return audited


def _audited(fn, against):
    @jax.custom_vjp
    def attention(query, key, value, arrays, probe):
        return fn(query, key, value, arrays)

    def forward(query, key, value, arrays, probe):
        out, pullback = jax.vjp(fn, query, key, value, arrays)
        return out, (pullback, (query, key, value), arrays, out)

    def backward(residuals, dout):
        pullback, inputs, arrays, out = residuals
        *gradients, of_arrays = pullback(dout)
        # The comparison reads copies: nothing of it is fused with what the model uses.
        inputs, arrays, results, dout = jax.lax.optimization_barrier(
            (inputs, arrays, (out, *gradients), dout)
        )
        golden, pullback = jax.vjp(
            lambda *wide: against(*wide, arrays),
            *(x.astype(jnp.float32) for x in inputs),
        )
        if golden.shape != out.shape:
            raise ValueError(
                f"the two attentions differ in shape: {out.shape} and {golden.shape}"
            )
        goldens = golden, *pullback(dout.astype(golden.dtype))
        compared = [_compare(x, y) for x, y in zip(results, goldens, strict=True)]
        return *gradients, of_arrays, jnp.stack(compared)

    attention.defvjp(forward, backward)
    return attention


def _compare(
    x: Float[Array, "B L N H"], golden: Float[Array, "B L N H"]
) -> Float[Array, " statistics"]:
    """The sums of `_SUMS` over e = x - golden, and the histogram of |e|."""
    fmt = _format(x)
    x, golden = x.astype(jnp.float32), golden.astype(jnp.float32)
    error = x - golden
    bits = jax.lax.bitcast_convert_type(jnp.abs(error), jnp.uint32) >> _SHIFT
    # Integers: a float32 count would stop at 2**24.
    histogram = jnp.zeros(_BINS, jnp.int32).at[bits.ravel()].add(1)
    rounding = round_to(golden, fmt) - golden
    finite = jnp.isfinite(error) & jnp.isfinite(rounding)
    error, golden, rounding = (
        jnp.where(finite, y, 0.0) for y in (error, golden, rounding)
    )
    # Entry by entry and then the entries: short sums lose less.
    entries = jax.lax.optimization_barrier(
        [y.sum((1, 3)) for y in (error, error**2, golden**2, rounding**2)]
    )
    of_error, *squares = entries
    squares = [y.sum() for y in squares]
    sums = [
        jnp.float32(of_error.size),
        of_error.sum(),
        jnp.square(of_error).sum(),
        *squares,
        fmt.rms_roundoff**2 * squares[1],
    ]
    return jnp.concatenate([jnp.stack(sums), histogram.astype(jnp.float32)])


def _format(x) -> NumberFormat:
    name = np.dtype(x.dtype).name
    if name not in FORMATS:
        raise ValueError(f"shadow compares {', '.join(FORMATS)}, not {name}")
    return FORMATS[name]


def read(statistics: Float[Array | np.ndarray, "4 statistics"]) -> dict[str, Deviation]:
    """What the gradient of one probe says, by the name of the tensor (`TENSORS`).

    Raises ValueError for another shape.
    """
    wide = np.asarray(statistics, np.float64)
    if wide.shape != (len(TENSORS), STATISTICS):
        raise ValueError(
            f"statistics must be {(len(TENSORS), STATISTICS)}, one probe's gradient, "
            f"got {wide.shape}"
        )
    return {name: _read(one) for name, one in zip(TENSORS, wide, strict=True)}


def _read(statistics: np.ndarray) -> Deviation:
    sums: dict[str, float] = dict(zip(_SUMS, statistics, strict=False))
    histogram = statistics[len(_SUMS) :]
    finite = histogram[:_FINITE_BINS]
    count = finite.sum()
    rms = {
        name: np.sqrt(sums[f"{name}squares"] / max(count, 1))
        for name in ("", "golden_", "rounding_", "expected_")
    }
    unit = rms["rounding_"]
    if unit <= _EXACT * rms["expected_"]:
        unit = rms["expected_"]
    of_size, root = rms["golden_"], np.sqrt(sums["squares"])
    below = np.cumsum(finite)
    edges = _upper_edges()
    filled = np.flatnonzero(finite)
    return Deviation(
        units=in_units(rms[""], unit),
        relative=in_units(rms[""], of_size),
        signed_mean=in_units(sums["sum"] / max(count, 1), of_size),
        signed_mean_ci=in_units(_interval(sums, count), of_size),
        directionality=float(abs(sums["sum"]) / root) if root > 0 else 0.0,
        p999=in_units(edges[np.searchsorted(below, 0.999 * count)], of_size),
        maximum=in_units(edges[filled[-1]] if filled.size else 0.0, of_size),
        non_finite=round(histogram[_FINITE_BINS:].sum()),
        count=round(histogram.sum()),
    )


def _interval(sums: dict[str, float], count: float) -> float:
    """1.96 standard errors of the mean of the entries' means."""
    entries = sums["entries"]
    if entries < 2 or count == 0:
        return np.inf
    scatter = max(sums["entry_squares"] - sums["sum"] ** 2 / entries, 0.0)
    deviation = np.sqrt(scatter / (entries - 1)) * entries / count
    return 1.96 * deviation / np.sqrt(entries)


def _upper_edges() -> np.ndarray:
    """Of the finite bins; those of zero and of subnormals have 0."""
    edges = np.arange(1, _FINITE_BINS + 1, dtype=np.uint32) << np.uint32(_SHIFT)
    wide = edges.view(np.float32).astype(np.float64)
    wide[: 2**_MANTISSA_BITS] = 0.0
    return wide
