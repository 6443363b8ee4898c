"""What honest rounding may do to attention, estimated row by row at any length.

Sizes only: no result is compared with these rows. Rounding errors are taken as random
and independent, each uniform over one spacing of its format: an RMS of at most
u / sqrt(3) of the value (u the unit roundoff), and of min_positive / sqrt(12) below the
normal numbers.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from attn_jax.audit.exact import Exact
from attn_jax.audit.inputs import Inputs
from attn_jax.formats import FP32, NumberFormat
from attn_jax.mask import Mask

# Rows that stand for all: at most so many, and numbers of a row by a head's keys.
ROWS, _NUMBERS = 64, 2**21


def sampled_rows(length: int, keys: int = 1) -> Int[np.ndarray, " R"]:
    """`ROWS` positions spread over the length, the first and the last among them; fewer
    where there are very many keys."""
    count = min(ROWS, max(16, _NUMBERS // keys))
    return np.unique(np.linspace(0, length - 1, min(length, count)).round().astype(int))


def seen_by(
    mask: Mask, rows: Int[np.ndarray, " R"], keys: int
) -> Bool[np.ndarray, "#B #N R S"]:
    """Which keys the given queries see; only these rows of the mask are built."""
    if mask.is_empty:
        return np.ones((1, 1, len(rows), keys), bool)
    tiles: list[Any] = [mask.block(int(row), 0, 1, keys, np) for row in rows]
    return np.concatenate(tiles, axis=2)


class Extent(NamedTuple):
    """How large the logits of the sampled rows may be, and what FP32 makes of them.

    seen    whether the row sees a key
    extent  largest |scale q.k| that Cauchy's inequality allows
    shift   bound of the relative error that FP32 logits leave in P and exp(LSE)
    """

    rows: Int[np.ndarray, " R"]
    seen: Bool[np.ndarray, "B R N"]
    extent: Float[np.ndarray, "B R N"]
    shift: Float[np.ndarray, "B R N"]


def logit_extent(inputs: Inputs, mask: Mask, scale: float, bias: float = 0.0) -> Extent:
    """`Extent` alone, without the logits. `bias`: the largest that is added to one."""
    (T, N, H), (S, K) = inputs.query.shape[1:], inputs.key.shape[1:3]
    rows = sampled_rows(T, S)
    seen = seen_by(mask, rows, S).any(-1).swapaxes(1, 2)
    lengths = np.sqrt(np.square(inputs.key, dtype=np.float32).sum(-1)).max(1)
    queries = np.linalg.norm(inputs.query[:, rows].astype(np.float64), axis=-1)
    extent = abs(scale) * queries * np.repeat(lengths, N // K, 1)[:, None] + bias
    seen = np.broadcast_to(seen, extent.shape)
    return Extent(rows, seen, extent, _shift(extent, S, H))


def _shift(extent, S: int, H: int):
    return FP32.unit_roundoff * ((8 + H**0.5) * extent + 8 + S / 8)


class Noise(NamedTuple):
    """Variances that honest rounding may give results in the sampled rows.

    out, dquery   of results with P and dS in the inner format, delta from rounded O
    dkey, dvalue  the same, summed over keys, from all rows; not yet rounded themselves
    row_sum       of sum_j dS_ij where delta is from an unrounded O
    row_sum_of_o  what rounding O adds to that
    by_logits     what logits in the inner format add to out and dquery
    rows, seen, shift, extent   as in `Extent`
    """

    rows: Int[np.ndarray, " R"]
    seen: Bool[np.ndarray, "B R N"]
    out: Float[np.ndarray, "B R N H"]
    dquery: Float[np.ndarray, "B R N H"]
    dkey: Float[np.ndarray, "B K H"]
    dvalue: Float[np.ndarray, "B K H"]
    row_sum: Float[np.ndarray, "B R N"]
    row_sum_of_o: Float[np.ndarray, "B R N"]
    by_logits: dict[str, np.ndarray]
    shift: Float[np.ndarray, "B R N"]
    extent: Float[np.ndarray, "B R N"]


def rounding_noise(
    inputs: Inputs,
    mask: Mask,
    scale: float,
    outer: NumberFormat,
    inner: NumberFormat | None = None,
) -> Noise:
    """The variances of `Noise` under results in `outer` and steps in `inner`.

    With r = u / sqrt(3) of `inner`, dP = dO V^T, delta = rowsum(P dP) and
    dS = P (dP - delta), in FP64 for `ROWS` queries of each head:
        out      r^2 sum P^2 V^2, and its rounding
        row sum  r^2 (sum dS^2 + sum P^2 dP^2 + delta^2 sum P^2), from rounding dS, and
                 P in O or in the softmax; rounding O adds r^2 sum_h dO^2 O^2
        dQ       scale^2 r^2 (2 dS^2 + P^2 dP^2) K^2 summed over keys, the error of
                 delta times scale P K, and its rounding
        logits   dx = r sqrt(x^2 + scale^2 sum_h q^2 k^2), times the slope of the result
    FP32 steps add coherent errors of 2^-24 (8 + sqrt(H)) of the largest logit and of
    2^-24 (8 + S / 8), sums of S products in steps of 8. Rounding P on average one way
    is allowed u^2.
    """
    inner = outer if inner is None else inner
    query, key = inputs.query, inputs.key
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    rows = sampled_rows(T, S)
    seen = seen_by(mask, rows, S)
    shape = B, len(rows), N
    noise = Noise(
        rows,
        np.zeros(shape, bool),
        np.zeros((*shape, H)),
        np.zeros((*shape, H)),
        np.zeros((B, K, H)),
        np.zeros((B, K, H)),
        np.zeros(shape),
        np.zeros(shape),
        {"out": np.zeros((*shape, H)), "dquery": np.zeros((*shape, H))},
        np.zeros(shape),
        np.zeros(shape),
    )
    for b, n in np.ndindex(B, N):
        kv = n // (N // K)
        visible = seen[min(b, seen.shape[0] - 1), min(n, seen.shape[1] - 1)]
        arrays = (
            query[b, rows, n],
            key[b, :, kv],
            inputs.value[b, :, kv],
            inputs.dout[b, rows, n],
        )
        head = _head(arrays, visible, scale)
        noise.seen[b, :, n] = visible.any(-1)
        noise.shift[b, :, n], noise.extent[b, :, n] = head.shift[:, 0], head.extent
        noise.out[b, :, n], noise.by_logits["out"][b, :, n] = head.of_out(outer, inner)
        noise.row_sum[b, :, n], noise.row_sum_of_o[b, :, n] = head.of_row_sum(
            outer, inner
        )
        dquery, by_logits = head.of_dquery(outer, inner)
        noise.dquery[b, :, n], noise.by_logits["dquery"][b, :, n] = dquery, by_logits
        dkey, dvalue = head.of_keys(outer, inner)
        noise.dkey[b, kv] += dkey * T / len(rows)
        noise.dvalue[b, kv] += dvalue * T / len(rows)
    return noise


def rms_of_rounding(x, fmt: NumberFormat):
    """Largest RMS error of rounding a number of about the size of x to `fmt`."""
    return np.hypot(fmt.unit_roundoff * np.abs(x) / 3**0.5, fmt.min_positive / 12**0.5)


class _Head(NamedTuple):
    """Rows of one head, all FP64: q, do, o [R, H], k, v [S, H], the others [R, S]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    scale: float
    p: np.ndarray
    dp: np.ndarray
    ds: np.ndarray
    o: np.ndarray
    delta: np.ndarray
    dx2: np.ndarray
    extent: np.ndarray
    shift: np.ndarray

    def of_out(self, outer, inner):
        r2, tiny2 = _squares(inner)
        p2 = self.p**2
        # A 16-bit P that is below the normal numbers is off by an absolute amount.
        lost = tiny2 * np.sum(self.v**2, 0)
        coherent = (self.shift * (self.p @ np.abs(self.v))) ** 2
        out = r2 * p2 @ self.v**2 + lost + coherent
        weight = p2 * self.dx2
        spread = weight @ self.v**2 - 2 * self.o * (weight @ self.v)
        spread += self.o**2 * weight.sum(-1, keepdims=True)
        return out + rms_of_rounding(self.o, outer) ** 2, r2 * np.maximum(spread, 0)

    def of_row_sum(self, outer, inner):
        r2, tiny2 = _squares(inner)
        p2 = self.p**2
        random = r2 * (self.ds**2 + p2 * (self.dp**2 + self.delta**2)).sum(-1)
        lost = tiny2 * (1 + self.dp**2).sum(-1)
        size = self.p * (np.abs(self.dp) + np.abs(self.delta))
        one_way = inner.unit_roundoff**2 + self.shift[:, 0]
        rounded_o = np.square(self.do * rms_of_rounding(self.o, outer)).sum(-1)
        return random + lost + (one_way * size.sum(-1)) ** 2, rounded_o

    def of_dquery(self, outer, inner):
        r2, tiny2 = _squares(inner)
        k2, centre2 = self.k**2, (self.p @ self.k) ** 2
        exact, rounded_o = (x[:, None] for x in self.of_row_sum(outer, inner))
        random = r2 * (2 * self.ds**2 + self.p**2 * self.dp**2) + tiny2
        size = self.p * (np.abs(self.dp) + np.abs(self.delta))
        coherent = (self.shift * (size @ np.abs(self.k))) ** 2
        inside = random @ k2 + (exact + rounded_o) * centre2 + coherent
        dq = self.scale * self.ds @ self.k
        weight = self.ds**2 * self.dx2
        by_logits = weight @ k2 + weight.sum(-1, keepdims=True) * centre2
        by_logits += (self.p**2 * self.dx2).sum(-1, keepdims=True) * (
            self.ds @ self.k
        ) ** 2
        rounded = rms_of_rounding(dq, outer) ** 2
        return rounded + self.scale**2 * inside, self.scale**2 * r2 * by_logits

    def of_keys(self, outer, inner):
        r2, tiny2 = _squares(inner)
        p2 = (self.p**2).sum(-1)
        exact, rounded_o = self.of_row_sum(outer, inner)
        random = r2 * (2 * self.ds**2 + self.p**2 * self.dp**2) + tiny2
        size2 = self.p**2 * (np.abs(self.dp) + np.abs(self.delta)) ** 2
        ds = (random + self.shift**2 * size2).sum(-1) + (exact + rounded_o) * p2
        pv = (r2 + self.shift[:, 0] ** 2) * p2 + tiny2 * len(self.k)
        return self.scale**2 * ds @ self.q**2, pv @ self.do**2


def gradient_noise(x: Exact, unit_roundoff: float) -> dict[str, float]:
    """RMS errors that gradients of an attention have of independent roundings: of P,
    dP, dS, O, the logits and the gradients themselves, as in `rounding_noise`, but for
    FP32 steps and what is too small for a format."""
    r2 = unit_roundoff**2 / 3
    p, dp, ds = x.probability, x.dprobability, x.dlogits
    query, key, out, dout = (y.swapaxes(1, 2) for y in (x.query, x.key, x.out, x.dout))
    key = key[:, list(x.key_head)]
    logits = np.where(np.isfinite(x.logits), x.logits, 0.0)
    dx2 = r2 * (logits**2 + x.scale**2 * (query**2 @ (key**2).swapaxes(2, 3)))
    by_logits = (p**2 * dx2).sum(-1, keepdims=True)
    of_delta = r2 * (p**2 * dp**2).sum(-1, keepdims=True) + (ds**2 * dx2).sum(
        -1, keepdims=True
    )
    of_delta += r2 * (dout**2 * out**2).sum(-1, keepdims=True)
    each = r2 * (2 * ds**2 + p**2 * dp**2) + ds**2 * dx2
    one = each + p**2 * of_delta + ds**2 * by_logits
    of_rows = each @ key**2 + of_delta * (p @ key) ** 2 + by_logits * (ds @ key) ** 2
    of_keys = one.swapaxes(2, 3) @ query**2
    of_p = p**2 * (r2 + dx2 + by_logits)
    of_values = of_p.swapaxes(2, 3) @ dout**2
    variances = {
        "dquery": x.scale**2 * of_rows.swapaxes(1, 2),
        "dkey": x.scale**2 * x.to_key_heads(of_keys.swapaxes(1, 2)),
        "dvalue": x.to_value_heads(of_values.swapaxes(1, 2)),
        "dbias": x.bias_gradient(one),
    }
    return {
        name: float(np.sqrt(np.mean(v + r2 * getattr(x, name) ** 2)))
        for name, v in variances.items()
    }


def _squares(inner: NumberFormat) -> tuple[float, float]:
    return inner.unit_roundoff**2 / 3, inner.min_positive**2 / 12


def _head(arrays, visible, scale) -> _Head:
    q, k, v, do = (x.astype(np.float64) for x in arrays)
    S, H = k.shape
    x = scale * q @ k.T
    hidden = np.where(visible, x, -np.inf)
    top = hidden.max(-1, keepdims=True)
    p = np.exp(hidden - np.where(np.isneginf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    p /= np.where(total == 0, 1, total)
    dp = np.where(visible, do @ v.T, 0)
    delta = (p * dp).sum(-1, keepdims=True)
    dx2 = x**2 + scale**2 * (q**2 @ (k**2).T)
    length = np.linalg.norm(k, axis=-1).max()
    extent = abs(scale) * np.linalg.norm(q, axis=-1) * length
    shift = _shift(extent, S, H)
    o, ds = p @ v, p * (dp - delta)
    return _Head(q, k, v, do, scale, p, dp, ds, o, delta, dx2, extent, shift[:, None])
