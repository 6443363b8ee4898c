"""Attention whose mask is wired wrongly: its causal side, window, segments, lengths."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from attn_jax.audit.error import correctly_rounded
from attn_jax.audit.exact import visible
from attn_jax.audit.variant import Registry, Setting, Wrong, whole
from attn_jax.formats import BF16, FP16

RULES = Registry()


def seen(s: Setting, mask: np.ndarray | None, detail: str = "") -> Iterator[Wrong]:
    """Attention with another mask; both rules for queries that see no key."""
    now = s.attention.visible
    full = s.attention.products.shape
    if np.array_equal(
        np.broadcast_to(True if mask is None else mask, full),
        np.broadcast_to(True if now is None else now, full),
    ):
        return
    masked = s.attention.replaced(visible=mask)
    yield whole(masked, detail)
    if mask is not None and not mask.any(-1).all():
        other = whole(masked.replaced(empty="mean"), detail)
        # Where some see none by the right mask, too, "queries that see no key" besides.
        yield other._replace(twofold=bool(s.attention.sees_none.any()))


def _ruled(s: Setting, detail: str = "", **rules) -> Iterator[Wrong]:
    shape = s.problem.shape
    mask = dataclasses.replace(s.problem.rules, **rules)
    yield from seen(s, visible(mask, shape.query_length, shape.key_length), detail)


def _banded(s: Setting, left, right, detail: str = "") -> Iterator[Wrong]:
    """Keys i - left ... i + right; sides may be negative, as a mask's may not."""
    i = np.arange(s.problem.shape.query_length)[:, None]
    j = np.arange(s.problem.shape.key_length)
    band = np.ones((1, 1, i.size, j.size), bool)
    if left is not None:
        band &= j >= i - left
    if right is not None:
        band &= j <= i + right
    others = dataclasses.replace(s.problem.rules, is_causal=False, window=None)
    rest = visible(others, i.size, j.size)
    yield from seen(s, band if rest is None else band & rest, detail)


@RULES.add(
    "causal ignored",
    "queries see the keys after them",
    "apply is_causal",
)
def _(s: Setting):
    if s.problem.rules.is_causal:
        yield from _ruled(s, is_causal=False)


@RULES.add(
    "causal where it was not asked for",
    "queries do not see the keys after them",
    "apply a causal mask only where is_causal says so",
)
def _(s: Setting):
    if not s.problem.rules.is_causal:
        yield from _ruled(s, is_causal=True)


def _causal(make: Callable[[Setting, int | None], Iterator[Wrong]]):
    """For problems with a causal mask, with the left side of their window."""

    def of(s: Setting):
        if s.problem.rules.is_causal:
            yield from make(s, s.problem.rules.band[0])

    return of


RULES.add(
    "causal off by one (j < i)",
    "queries do not see the key at their own position",
    "use j <= i",
)(_causal(lambda s, left: _banded(s, left, -1)))
RULES.add(
    "causal off by one (j <= i + 1)",
    "queries see one key after them",
    "use j <= i",
)(_causal(lambda s, left: _banded(s, left, 1)))
RULES.add(
    "causal the other way round",
    "queries see the keys after them and not those before",
    "use j <= i",
)(_causal(lambda s, left: _banded(s, 0, None)))


@RULES.add(
    "causal aligned to the last key",
    "the last query sees up to the last key, as if queries ended where keys do",
    "align query 0 with key 0, as jax.nn does, or say so with query_offset",
)
def _(s: Setting):
    shape = s.problem.shape
    if s.problem.rules.is_causal:
        shift = np.full(shape.batch, shape.key_length - shape.query_length)
        yield from _ruled(s, query_offset=shift)


@RULES.add("mask inverted", "True hides a pair", "let True take part")
def _(s: Setting):
    if s.attention.visible is not None:
        yield from seen(s, ~s.attention.visible)


@RULES.add("window ignored", "keys outside of the window are seen", "apply the window")
def _(s: Setting):
    if s.problem.rules.window is not None:
        yield from _ruled(s, window=None)


def _windowed(make: Callable[..., Iterator[Wrong]]):
    def of(s: Setting):
        if s.problem.rules.window is not None:
            yield from make(s, *s.problem.rules.band)

    return of


@RULES.add(
    "window side ignored",
    "the window is open on one side",
    "apply both sides",
)
@_windowed
def _(s: Setting, left, right):
    if left is not None and right is not None:
        yield from _banded(s, None, right, "on the left")
        yield from _banded(s, left, None, "on the right")


def _moved(s: Setting, left, right, by: tuple[int, int]) -> Iterator[Wrong]:
    """The sides that `by` is not 0 for, one key further out and in."""
    if left is None and by[0] or right is None and by[1]:
        return
    for sign, detail in ((1, "one key more"), (-1, "one key less")):
        first = None if left is None else left + sign * by[0]
        last = None if right is None else right + sign * by[1]
        yield from _banded(s, first, last, detail)


for _where, _do, _by in (
    ("on the left", "see the keys from i - left on", (1, 0)),
    ("on the right", "see the keys up to i + right, that one included", (0, 1)),
    ("on both sides", "see the keys i - left to i + right, both included", (1, 1)),
):
    RULES.add(
        f"window off by one {_where}", f"the window is off by one key {_where}", _do
    )(_windowed(functools.partial(_moved, by=_by)))


@RULES.add(
    "window sides swapped",
    "left and right of the window are exchanged",
    "see the keys i - left to i + right",
)
@_windowed
def _(s: Setting, left, right):
    yield from _banded(s, right, left)


@RULES.add(
    "segment ids ignored",
    "queries see the keys of other segments",
    "apply the segment ids",
)
def _(s: Setting):
    if s.problem.rules.query_segment_ids is not None:
        yield from _ruled(s, query_segment_ids=None, key_value_segment_ids=None)


@RULES.add(
    "query lengths ignored",
    "queries beyond their length attend",
    "give zeros there, and no gradient",
)
def _(s: Setting):
    if s.problem.rules.query_lengths is not None:
        yield from _ruled(s, query_lengths=None)


@RULES.add(
    "key lengths ignored",
    "keys beyond their length are seen",
    "apply the key lengths",
)
def _(s: Setting):
    if s.problem.rules.key_value_lengths is not None:
        yield from _ruled(s, key_value_lengths=None)


@RULES.add(
    "query and key lengths ignored",
    "queries and keys beyond their lengths take part",
    "apply the lengths",
)
def _(s: Setting):
    rules = s.problem.rules
    if rules.query_lengths is not None and rules.key_value_lengths is not None:
        yield from _ruled(s, query_lengths=None, key_value_lengths=None)


def _longer(s: Setting, field: str, most: int, of: str):
    """One more and one less than a length says, where there is as much."""
    lengths = getattr(s.problem.rules, field)
    if lengths is not None:
        for by, detail in ((-1, f"one {of} less"), (1, f"one {of} more")):
            changed = np.clip(np.asarray(lengths) + by, 0, most)
            yield from _ruled(s, detail, **{field: changed})


@RULES.add(
    "key lengths off by one",
    "the number of keys is off by one",
    "see the keys j < length",
)
def _(s: Setting):
    yield from _longer(s, "key_value_lengths", s.problem.shape.key_length, "key")


@RULES.add(
    "query lengths off by one",
    "the number of queries is off by one",
    "let the queries i < length attend",
)
def _(s: Setting):
    yield from _longer(s, "query_lengths", s.problem.shape.query_length, "query")


@RULES.add(
    "lengths of another batch entry",
    "a batch entry has the lengths, or the segments, of another",
    "read them by the batch index",
)
def _(s: Setting):
    if s.attention.visible is not None and s.attention.visible.shape[0] > 1:
        yield from seen(s, s.attention.visible[::-1], "in reverse order")
        first = np.broadcast_to(s.attention.visible[:1], s.attention.visible.shape)
        yield from seen(s, first.copy(), "those of the first for all")


@RULES.add(
    "queries that see no key",
    "a query that sees no key gives the mean of V",
    "give zeros there, and no gradient",
)
def _(s: Setting):
    if s.attention.sees_none.any():
        yield whole(s.attention.replaced(empty="mean"))


@RULES.add(
    "segment ids in 16 bits",
    "segment ids are numbers of 16 bits, of which neighbours are the same",
    "compare them as int32",
)
def _(s: Setting):
    rules = s.problem.rules
    if rules.query_segment_ids is None:
        return
    for fmt in (BF16, FP16):
        of_queries, of_keys = (
            correctly_rounded(np.asarray(ids, np.float64), fmt).astype(np.int32)
            for ids in (rules.query_segment_ids, rules.key_value_segment_ids)
        )
        ids = {"query_segment_ids": of_queries, "key_value_segment_ids": of_keys}
        yield from _ruled(s, fmt.name.upper(), **ids)
