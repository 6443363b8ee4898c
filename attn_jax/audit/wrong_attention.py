"""Attention that is wired wrongly: its scale, heads, layouts, tiles."""

import functools
import math
from collections.abc import Iterator

import numpy as np

from attn_jax.audit.exact import Exact, visible
from attn_jax.audit.problem import TENSORS
from attn_jax.audit.variant import Registry, Setting, Thunk, Wrong, whole
from attn_jax.audit.wrong_masks import seen
from attn_jax.mask import Mask

# Sizes of the tiles of keys that kernels walk over.
TILES = (16, 32, 64, 128)

ATTENTION = Registry()

# Scale ---------------------------------------------------------------------------


def _scaled(s: Setting, scale: float, detail: str = "") -> Iterator[Wrong]:
    if not math.isclose(scale, s.attention.scale):
        yield whole(s.attention.replaced(scale=scale), detail)


@ATTENTION.add(
    "scale missing",
    "the logits are not scaled",
    "multiply them by 1 / sqrt(H)",
)
def _(s: Setting):
    yield from _scaled(s, 1.0)


@ATTENTION.add(
    "scale applied twice",
    "the logits are scaled by 1 / H",
    "scale once, by 1 / sqrt(H)",
)
def _(s: Setting):
    yield from _scaled(s, s.attention.scale**2)


@ATTENTION.add(
    "scale not taken",
    "the scale asked for is not taken",
    "pass it on; here it is 1 / sqrt(H)",
)
def _(s: Setting):
    if s.problem.scale_factor != 1:
        yield from _scaled(s, s.problem.shape.head_dim**-0.5)


def padded_head_dims(s: Setting) -> list[int]:
    """What kernels may pad the head dim to, which it is not."""
    H = s.problem.shape.head_dim
    return sorted({-(-H // m) * m for m in (16, 32, 64, 128, 256)} - {H})


@ATTENTION.add(
    "scale of another head dim",
    "the scale is that of another head dim",
    "use 1 / sqrt(H) with the H before padding",
)
def _(s: Setting):
    for padded in padded_head_dims(s):
        yield from _scaled(s, padded**-0.5, f"that of H = {padded}")


@ATTENTION.add(
    "scale off by a factor of 2",
    "the logits are scaled by twice or half of what they should be",
    "scale once, by 1 / sqrt(H)",
)
def _(s: Setting):
    for factor, detail in ((2.0, "twice"), (0.5, "half")):
        yield from _scaled(s, factor * s.attention.scale, detail)


@ATTENTION.add(
    "base of the exponential",
    "the exponential has another base than e",
    "fold log2(e) into the scale with exp2, and only with it",
)
def _(s: Setting):
    for factor, detail in (
        (math.log(2), "exp2 of x"),
        (1 / math.log(2), "exp of x log2(e)"),
    ):
        yield from _scaled(s, s.attention.scale * factor, detail)
        x = s.attention
        if x.bias is not None:
            all_of = x.replaced(scale=x.scale * factor, bias=x.bias * factor)
            yield whole(all_of, f"{detail}, the bias in it")


# Heads, layouts, tiles -----------------------------------------------------------


@ATTENTION.add(
    "GQA heads grouped wrongly",
    "query heads read the wrong key heads",
    "let query head n read key head n // (N / K)",
)
def _(s: Setting):
    for heads, detail in _other_heads(s):
        yield whole(s.attention.replaced(key_head=heads), detail)


def _other_heads(s: Setting) -> Iterator[tuple[tuple[int, ...], str]]:
    N, K = s.problem.shape.heads, s.problem.shape.key_heads
    for heads, detail in (
        (tuple(n % K for n in range(N)), "n % K"),
        (tuple(min(n, K - 1) for n in range(N)), "min(n, K - 1)"),
        ((0,) * N, "the first for all"),
    ):
        if heads != s.attention.key_head:
            yield heads, detail


@ATTENTION.add(
    "V of other heads",
    "query heads read the right heads of K and others of V",
    "let query head n read head n // (N / K) of V, too",
)
def _(s: Setting):
    for heads, detail in _other_heads(s):
        yield whole(s.attention.replaced(value_head=heads), detail)


@ATTENTION.add(
    "key and value exchanged",
    "K is read for V and V for K",
    "pass query, key, value in this order",
)
def _(s: Setting):
    x = s.attention
    wrong = x.replaced(key=x.value, value=x.key)
    of = {"dkey": "dvalue", "dvalue": "dkey"}
    results = {n: functools.partial(getattr, wrong, of.get(n, n)) for n in TENSORS}
    yield Wrong("", results)


@ATTENTION.add(
    "layout swapped",
    "[B, T, N, H] is read as [B, N, T, H]",
    "transpose the arrays; a function that is to have that layout is audited with "
    "--layout BNTH",
)
def _(s: Setting):
    x, shape = s.attention, s.problem.shape
    T, S, N, K = shape.query_length, shape.key_length, shape.heads, shape.key_heads
    names = "query", "key", "value", "dout"
    # No bias fits logits [B, T, N, K].
    if T % S == 0 and x.bias is None:
        # T heads of N queries, S key heads of K keys.
        swapped = x.replaced(
            **{name: getattr(x, name).swapaxes(1, 2) for name in names},
            visible=visible(
                Mask(s.problem.rules.is_causal, s.problem.rules.window), N, K
            ),
            key_head=tuple(t // (T // S) for t in range(T)),
        )
        yield Wrong("", _back(swapped, lambda y: y.swapaxes(1, 2)))
    if 1 in (N, T):
        return
    reshaped = x.replaced(**{name: _as_heads_first(getattr(x, name)) for name in names})
    yield Wrong("reshaped, not transposed", _back(reshaped, _as_rows_first))


def _as_heads_first(y: np.ndarray) -> np.ndarray:
    """[B, T, N, H] whose memory is read as [B, N, T, H]."""
    B, T, N, H = y.shape
    return y.reshape(B, N, T, H).swapaxes(1, 2)


def _as_rows_first(y: np.ndarray) -> np.ndarray:
    """What `_as_heads_first` undoes; LSE stays as it is."""
    return y.swapaxes(1, 2).reshape(y.shape) if y.ndim == 4 else y


def _back(wrong: Exact, restore) -> dict[str, Thunk]:
    """Results in the layout that the callable gives them in, LSE as [B, N, T]."""
    results: dict[str, Thunk] = {
        name: lambda name=name: restore(getattr(wrong, name))
        for name in TENSORS
        if name not in ("lse", "dbias")
    }
    per_head = {"lse": lambda: restore(wrong.lse), "dbias": lambda: wrong.dbias}
    return results | per_head


@ATTENTION.add(
    "KV tile dropped",
    "the keys of one tile take no part",
    "check the bounds of the loop over tiles",
    on_top=True,
)
def _(s: Setting):
    x, S = s.attention, s.problem.shape.key_length
    tiles = {(0, tile) for tile in TILES if tile < S}
    tiles |= {((S - 1) // tile * tile, S) for tile in TILES if tile < S}
    for start, stop in sorted(tiles):
        inside = (np.arange(S) >= start) & (np.arange(S) < stop)
        detail = f"keys {start} to {stop - 1}"
        mask = np.broadcast_to(~inside, (1, 1, s.problem.shape.query_length, S))
        yield from seen(s, mask & (True if x.visible is None else x.visible), detail)
        yield Wrong(
            f"{detail}, which still count in the normaliser",
            {"out": lambda inside=inside: x.weighted(x.probability * ~inside)},
        )


@ATTENTION.add(
    "last partial tile unmasked",
    "zeros beyond the last key take part as keys",
    "mask the last tile at the number of keys",
)
def _(s: Setting):
    x, shape = s.attention, s.problem.shape
    T, S = shape.query_length, shape.key_length
    if s.problem.rules.query_segment_ids is not None:
        return
    for length in sorted({-(-S // tile) * tile for tile in TILES} - {S}):
        pad = ((0, 0), (0, length - S), (0, 0), (0, 0))
        wrong = x.replaced(
            key=np.pad(x.key, pad),
            value=np.pad(x.value, pad),
            visible=visible(s.problem.rules, T, length),
            bias=None if x.bias is None else np.pad(x.bias, pad[:1] * 3 + pad[1:2]),
        )
        if wrong.visible is not None and not wrong.visible[..., S:].any():
            continue
        results = {n: functools.partial(_cut, wrong, n, S) for n in TENSORS}
        yield Wrong(f"up to {length}", results)


def _cut(wrong: Exact, name: str, S: int) -> np.ndarray:
    """A result without what is beyond the last key."""
    x = getattr(wrong, name)
    if name == "dbias":
        return x[..., :S]
    return x[:, :S] if name in ("dkey", "dvalue") else x
