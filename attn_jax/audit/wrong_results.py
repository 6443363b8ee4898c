"""Single wrong results of the right attention: out or gradients (LSE: `wrong_lse`)."""

import functools
import math
from collections.abc import Callable

import numpy as np

from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.exact import Exact
from attn_jax.audit.problem import GRADIENTS
from attn_jax.audit.variant import Registry, Setting, Wrong
from attn_jax.audit.wrong_attention import TILES, padded_head_dims
from attn_jax.audit.wrong_lse import log
from attn_jax.formats import BF16, FP16

RESULTS = Registry()
_add = functools.partial(RESULTS.add, on_top=True)


def _per_row(x: np.ndarray) -> np.ndarray:
    """[B, N, T] as a factor of [B, T, N, H]."""
    return x.swapaxes(1, 2)[..., None]


# Output --------------------------------------------------------------------------


@_add(
    "not normalised",
    "the output is not divided by the row sum",
    "divide by the sum of exp(x - max)",
)
def _(s: Setting):
    x = s.attention
    yield Wrong("", {"out": lambda: x.out * _per_row(x.total)})
    with np.errstate(over="ignore"):
        unshifted = np.exp(x.lse)
    if np.isfinite(unshifted).all():
        detail = "nor is a maximum subtracted"
        yield Wrong(detail, {"out": lambda: x.out * _per_row(unshifted)})


@_add(
    "normalised by the number of keys",
    "the output is divided by the number of keys",
    "divide by the sum of exp(x - max)",
)
def _(s: Setting):
    x = s.attention
    S = s.problem.shape.key_length
    seen = np.maximum(np.isfinite(x.logits).sum(-1), 1)
    with np.errstate(over="ignore"):
        sums = x.total, np.exp(x.lse)
    for total in sums:
        if np.isfinite(total).all():
            for count in (seen, S):
                factor = _per_row(total / count)
                yield Wrong("", {"out": lambda f=factor: x.out * f})


@_add(
    "P not applied",
    "the output is a plain mean or sum of V",
    "weight V with P",
)
def _(s: Setting):
    x = s.attention
    seen = np.isfinite(x.logits).astype(float)
    everything = np.ones_like(seen)
    for kind, p in (("visible", seen), ("all", everything)):
        count = np.maximum(p.sum(-1, keepdims=True), 1)
        yield Wrong(f"mean of {kind}", {"out": lambda p=p, c=count: x.weighted(p / c)})
        yield Wrong(f"sum of {kind}", {"out": lambda p=p: x.weighted(p)})


_LAST_AXIS = "normalise over the keys, the last axis of the logits"


@_add("softmax over the queries", "P is normalised over the queries", _LAST_AXIS)
def _(s: Setting):
    yield Wrong("", _softmax_over(s.attention, -2))


@_add("softmax over the heads", "P is normalised over the query heads", _LAST_AXIS)
def _(s: Setting):
    if s.problem.shape.heads > 1:
        yield Wrong("", _softmax_over(s.attention, 1))


def _softmax_over(x: Exact, axis: int):
    """All but LSE of a P that sums to 1 along that axis of the logits."""

    @functools.cache
    def p():
        top = x.logits.max(axis, keepdims=True)
        weights = np.exp(x.logits - np.where(np.isneginf(top), 0.0, top))
        total = weights.sum(axis, keepdims=True)
        return weights / np.where(total == 0, 1.0, total)

    @functools.cache
    def dlogits():
        delta = (p() * x.dprobability).sum(axis, keepdims=True)
        return p() * (x.dprobability - delta)

    return {
        "out": lambda: x.weighted(p()),
        "dquery": lambda: x.query_gradient(dlogits()),
        "dkey": lambda: x.to_key_heads(x.key_gradient(dlogits())),
        "dvalue": lambda: x.to_value_heads(x.value_gradient(p())),
        "dbias": lambda: x.bias_gradient(dlogits()),
    }


@_add(
    "stale maximum",
    "sums are not rescaled where the running maximum of the logits grows",
    "multiply the accumulator and the row sum by exp(old - new maximum) for each tile",
)
def _(s: Setting):
    x, S = s.attention, s.problem.shape.key_length
    for tile in TILES:
        if tile >= S:
            continue
        for reverse in (False, True):
            stale = functools.cache(functools.partial(_stale, x, tile, reverse))
            detail = f"tiles of {tile}" + (", the last first" if reverse else "")
            # The output itself vanishes where a row sees nothing.
            out = functools.cache(lambda p=stale: x.weighted(p()))
            yield Wrong(
                f"the accumulator, {detail}",
                {"out": lambda o=out: o() / _per_row(np.maximum(x.total, 1e-300))},
            )
            yield Wrong(
                f"both, {detail}",
                {
                    "out": lambda o=out, p=stale: (
                        o() / _per_row(np.maximum(p().sum(-1), 1e-300))
                    ),
                    "lse": lambda p=stale: log(p().sum(-1)) + x.maximum,
                },
            )


def _stale(x: Exact, tile: int, reverse: bool) -> np.ndarray:
    """exp(x - m) with the maximum so far, of each tile's turn."""
    S = x.logits.shape[-1]
    weights = np.zeros_like(x.logits)
    highest = np.full(x.maximum.shape, -np.inf)
    starts = range(0, S, tile)
    for start in reversed(starts) if reverse else starts:
        keys = slice(start, start + tile)
        highest = np.maximum(highest, x.logits[..., keys].max(-1))
        shift = np.where(np.isneginf(highest), 0.0, highest)[..., None]
        weights[..., keys] = np.exp(x.logits[..., keys] - shift)
    return weights


# Layout of all of them -----------------------------------------------------------


@_add(
    "results in another layout",
    "results are laid out as [B, N, T, H]",
    "return [B, T, N, H], or transpose them in the adapter",
)
def _(s: Setting):
    x = s.attention
    names = "out", *GRADIENTS
    yield Wrong("", {n: lambda n=n: getattr(x, n).swapaxes(1, 2) for n in names})
    yield Wrong(
        "read as [B, T, N, H]",
        {
            n: lambda n=n: getattr(x, n).swapaxes(1, 2).reshape(getattr(x, n).shape)
            for n in names
        },
    )


# Gradients -----------------------------------------------------------------------


@_add("dQ without the scale", "dQ lacks the scale", "multiply dS K by the scale")
def _(s: Setting):
    x = s.attention
    yield Wrong("", {"dquery": lambda: x.dquery / x.scale})


@_add("dK without the scale", "dK lacks the scale", "multiply dS^T Q by the scale")
def _(s: Setting):
    x = s.attention
    yield Wrong("", {"dkey": lambda: x.dkey / x.scale})


def _both(x: Exact, factor: float):
    return {
        "dquery": lambda: x.dquery * factor,
        "dkey": lambda: x.dkey * factor,
    }


@_add(
    "dQ and dK without the scale",
    "dQ and dK lack the scale",
    "multiply dS by the scale",
)
def _(s: Setting):
    yield Wrong("", _both(s.attention, 1 / s.attention.scale))


@_add(
    "gradient scaled twice",
    "the scale enters twice",
    "multiply dS K and dS^T Q by the scale once, Q and K being unscaled",
)
def _(s: Setting):
    yield Wrong("", _both(s.attention, s.attention.scale))


@_add(
    "scale not taken by gradients",
    "the gradient has the usual scale and not the one asked for",
    "pass it on to the backward pass, too; here it is 1 / sqrt(H)",
)
def _(s: Setting):
    if s.problem.scale_factor != 1:
        yield Wrong("", _both(s.attention, 1 / s.problem.scale_factor))


@_add(
    "gradient with the scale of another head dim",
    "the gradient has the scale of another head dim",
    "use 1 / sqrt(H) with the H before padding, in the backward pass, too",
)
def _(s: Setting):
    x, H = s.attention, s.problem.shape.head_dim
    for padded in padded_head_dims(s):
        yield Wrong(f"that of H = {padded}", _both(x, (H / padded) ** 0.5))


@_add(
    "gradient in another base",
    "the gradient is off by a factor of ln(2)",
    "differentiate exp, not exp2",
)
def _(s: Setting):
    x = s.attention
    for detail, by in (("too small", math.log(2)), ("too large", 1 / math.log(2))):
        dbias = {"dbias": lambda by=by: x.dbias * by}
        yield Wrong(detail, _both(x, by) | dbias)


@_add(
    "gradient with the wrong sign",
    "the gradient has the wrong sign",
    "take dS = P (dP - delta)",
)
def _(s: Setting):
    x = s.attention
    yield Wrong("", {n: lambda n=n: -getattr(x, n) for n in (*GRADIENTS, "dbias")})


@_add(
    "gradient is zero",
    "the gradient vanishes",
    "look for stop_gradient, or results that are not written",
)
def _(s: Setting):
    x = s.attention
    names = *GRADIENTS, "dbias"
    yield Wrong("", {n: lambda n=n: np.zeros_like(getattr(x, n)) for n in names})


@_add(
    "GQA sum missing",
    "the sum over the query heads of a key head is not that",
    "add up the N / K query heads that read each key head",
)
def _(s: Setting):
    x, N, K = s.attention, s.problem.shape.heads, s.problem.shape.key_heads
    if N == K:
        return
    members = [[n for n in range(N) if x.key_head[n] == k] for k in range(K)]
    if not all(members):
        return

    @functools.cache
    def per_head(name):
        if name == "dkey":
            return x.key_gradient(x.dlogits)
        return x.value_gradient(x.probability)

    names = "dkey", "dvalue"

    def heads(pick):
        return {n: lambda n=n: per_head(n)[:, :, pick] for n in names}

    yield Wrong("the first alone", heads([m[0] for m in members]))
    yield Wrong("the last alone", heads([m[-1] for m in members]))
    sizes = np.array([len(m) for m in members])[:, None]
    yield Wrong("their mean", {n: lambda n=n: getattr(x, n) / sizes for n in names})
    other = x.replaced(key_head=tuple(n % K for n in range(N)))
    if other.key_head != x.key_head:
        yield Wrong(
            "over the heads n % K instead",
            {
                n: lambda n=n: other.to_key_heads(per_head(n))
                for n in ("dkey", "dvalue")
            },
        )


def _of_dlogits(x: Exact, dlogits: Callable[[], np.ndarray], detail: str = "") -> Wrong:
    dlogits = functools.cache(dlogits)
    return Wrong(
        detail,
        {
            "dquery": lambda: x.query_gradient(dlogits()),
            "dkey": lambda: x.to_key_heads(x.key_gradient(dlogits())),
            "dbias": lambda: x.bias_gradient(dlogits()),
        },
    )


@_add(
    "delta missing",
    "dS is P dP: delta is not subtracted",
    "take dS = P (dP - delta), delta = rowsum(dO O)",
)
def _(s: Setting):
    x = s.attention
    yield _of_dlogits(x, lambda: x.probability * x.dprobability)


@_add(
    "delta added",
    "delta is added, not subtracted",
    "take dS = P (dP - delta)",
)
def _(s: Setting):
    yield _of_dlogits(s.attention, lambda: s.attention.with_delta(-s.attention.delta))


@_add(
    "delta of another head",
    "delta is that of another head or batch entry",
    "take the O and dO of the same head and batch entry",
)
def _(s: Setting):
    x = s.attention
    B, N, _ = x.delta.shape
    K = s.problem.shape.key_heads
    for detail, order in {
        "the next head": lambda: np.roll(x.delta, -1, 1),
        "the head before": lambda: np.roll(x.delta, 1, 1),
        "heads in reverse order": lambda: x.delta[:, ::-1],
        "the first head for all": lambda: np.repeat(x.delta[:, :1], N, 1),
        "the first head of each group": lambda: np.repeat(
            x.delta[:, :: N // K], N // K, 1
        ),
        "heads of groups in another order": lambda: (
            x.delta.reshape(B, K, N // K, -1).swapaxes(1, 2).reshape(x.delta.shape)
        ),
        "batch entries in reverse order": lambda: x.delta[::-1],
        "the next batch entry": lambda: np.roll(x.delta, -1, 0),
        "the first batch entry for all": lambda: np.repeat(x.delta[:1], B, 0),
    }.items():
        delta = order()
        if not np.array_equal(delta, x.delta):
            yield _of_dlogits(x, lambda d=delta: x.with_delta(d), detail)


@_add(
    "delta of the wrong O",
    "delta is that of an O which is not normalised",
    "take delta = rowsum(dO O) after O is divided by the row sum",
)
def _(s: Setting):
    x = s.attention
    yield _of_dlogits(x, lambda: x.with_delta(x.delta * x.total))
    detail = "or which is divided twice"
    of = np.where(x.sees_none, 1.0, x.total)
    yield _of_dlogits(x, lambda: x.with_delta(x.delta / of), detail)


def _of_probability(x: Exact, p: Callable[[], np.ndarray], detail: str) -> Wrong:
    """P of the backward pass, with what it keeps of the forward pass."""
    p = functools.cache(p)
    of = _of_dlogits(x, lambda: p() * (x.dprobability - x.delta[..., None]), detail)
    dvalue = {"dvalue": lambda: x.to_value_heads(x.value_gradient(p()))}
    return of._replace(results={**of.results, **dvalue})


def _recomputed(x: Exact, lse: np.ndarray, power: float = 1.0) -> np.ndarray:
    """exp(x - LSE) to some power, 0 where nothing is seen."""
    kept = np.where(x.sees_none, np.inf, lse)[..., None]
    with np.errstate(over="ignore"):
        p = np.exp(power * (x.logits - kept))
    return np.where(np.isfinite(p), p, 0.0)


@_add(
    "P in another base in the backward pass",
    "P is made anew with another base than e",
    "use exp, or exp2 with log2(e) in the logits and in LSE",
)
def _(s: Setting):
    x = s.attention
    for detail, power in (("too small", math.log(2)), ("too large", 1 / math.log(2))):
        p = functools.partial(_recomputed, x, x.lse, power)
        yield _of_probability(x, p, f"by a factor {detail} in the exponent")


@_add(
    "LSE in 16 bits in the backward pass",
    "P is made anew from an LSE of 16 bits",
    "keep LSE in FP32 for the backward pass",
)
def _(s: Setting):
    x = s.attention
    for fmt in (BF16, FP16):
        lse = correctly_rounded(np.where(x.sees_none, 0.0, x.lse), fmt)
        p = functools.partial(_recomputed, x, lse)
        yield _of_probability(x, p, fmt.name.upper())


@_add("dS without P", "dS is dP - delta: P is missing", "take dS = P (dP - delta)")
def _(s: Setting):
    x = s.attention

    def dlogits():
        return np.where(np.isfinite(x.logits), x.dprobability - x.delta[..., None], 0.0)

    yield _of_dlogits(x, dlogits)


@_add(
    "dK and dV exchanged",
    "dK is returned for dV and dV for dK",
    "return the gradients in the order of the arguments",
)
def _(s: Setting):
    x = s.attention
    yield Wrong("", {"dkey": lambda: x.dvalue, "dvalue": lambda: x.dkey})


@_add(
    "gradient of another head",
    "a head or batch entry gets the gradient of another",
    "write each gradient where its input was read",
)
def _(s: Setting):
    x, N, K = s.attention, s.problem.shape.heads, s.problem.shape.key_heads

    def all_of(order):
        return {n: lambda n=n: order(getattr(x, n)) for n in GRADIENTS}

    if s.problem.shape.batch > 1:
        yield Wrong("batch entries in reverse order", all_of(lambda g: g[::-1]))
        yield Wrong("the next batch entry", all_of(lambda g: np.roll(g, -1, 0)))
    if K > 1:
        yield Wrong("heads in reverse order", all_of(lambda g: g[:, :, ::-1]))
        yield Wrong("the next head", all_of(lambda g: np.roll(g, -1, 2)))
    if 1 < K < N:

        def regrouped(g):
            split = g.reshape(*g.shape[:2], K, N // K, -1)
            return split.swapaxes(2, 3).reshape(g.shape)

        detail = "heads of groups in another order"
        yield Wrong(detail, {"dquery": lambda: regrouped(x.dquery)})
