"""Functions that are wrong for some calls alone.

As many heads of K as of Q, one key head, one query, one key past a tile, positions or
segments beyond 16 bits."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from attn_jax.audit import invariance
from attn_jax.audit.finding import DEPENDS
from attn_jax.audit.inputs import Shape
from attn_jax.audit.plan import Group, plan, ragged
from attn_jax.audit.problem import HIDING_BIAS, Problem
from attn_jax.audit.target import Attend
from attn_jax.audit.wiring import recognise
from tests import planted
from tests.planted_masks import broadcast
from tests.test_audit_ragged import is_wrong

GROUPS = plan()
ALL = [*GROUPS, *ragged(GROUPS, takes_scale=True)]
PROBLEMS = list(dict.fromkeys(group.problems("bfloat16")[0] for group in ALL))


def alike(query, key) -> bool:
    return query.shape[2] == key.shape[2]


def without_rules(*names: str):
    """Rules that are not passed on where there is a key head for each query head."""

    def wrong(function, query, key, *arrays, **rules):
        if alike(query, key):
            rules |= dict.fromkeys(names)
        return function(query, key, *arrays, **rules)

    return planted.wrapped(wrong)


def bias_before_the_scale(function, query, key, value, bias=None, scale=None, **rules):
    if bias is not None and alike(query, key):
        bias = bias * (scale or query.shape[-1] ** -0.5)
    return function(query, key, value, bias, scale=scale, **rules)


def entries_mixed_up(function, query, key, value, *arrays, **rules):
    """The backward pass for as many heads of each reads K of another entry."""
    if alike(query, key):
        of_gradient = (jnp.roll(x, 1, 0) for x in (key, value))
        key, value = (
            y + x - jax.lax.stop_gradient(y)
            for x, y in zip(map(jax.lax.stop_gradient, (key, value)), of_gradient)
        )
    return function(query, key, value, *arrays, **rules)


def first_entry(function, query, key, value, *arrays, **rules):
    if key.shape[2] == 1:
        key, value = (jnp.broadcast_to(x[:1], x.shape) for x in (key, value))
    return function(query, key, value, *arrays, **rules)


def to_the_last_key(function, query, key, *arrays, **rules):
    """A causal mask aligned to the last key, in a kernel for whole tiles."""
    T, S = query.shape[1], key.shape[1]
    if rules.get("is_causal") and T % 64 == S % 64 == 0:
        rules["is_causal"] = False
        i, j = jnp.arange(T)[:, None], jnp.arange(S)
        hidden = jnp.where(j <= i + S - T, 0, -jnp.inf)
        arrays = [arrays[0], hidden[None, None].astype(query.dtype)]
    return function(query, key, *arrays, **rules)


def one_query(function, query, key, *arrays, **rules):
    """Query heads are dealt to key heads the other way round."""
    T, N, K = query.shape[1], query.shape[2], key.shape[2]
    if T > 1 or N == K:
        return function(query, key, *arrays, **rules)
    order = jnp.arange(N).reshape(N // K, K).T.ravel()
    out, lse = function(query[:, :, order], key, *arrays, **rules)
    back = jnp.argsort(order)
    return out[:, :, back], lse[:, :, back]


def last_key_lost(seen, _):
    """The loop over tiles ends one early where the last one has a single key."""
    return seen.at[..., -1].set(False) if seen.shape[-1] % 64 == 1 else seen


def window_of(dtype):
    def seen(visible, given):
        if given.window is None:
            return visible
        left, right = given.window
        i, j = (jnp.arange(n).astype(dtype) for n in visible.shape[-2:])
        band = (j >= i[:, None] - left) & (j <= i[:, None] + right)
        rest = broadcast(dataclasses.replace(given, window=None), visible)
        return rest & band

    return seen


IDS = "query_segment_ids", "key_value_segment_ids"


def segments_of(dtype):
    def seen(visible, given):
        if given.query_segment_ids is None:
            return visible
        ids = {name: getattr(given, name).astype(dtype) for name in IDS}
        return broadcast(dataclasses.replace(given, **ids), visible)

    return seen


class Fault(NamedTuple):
    """Where it shows, and what it is called there, if it has a name. `of_all`: so under
    every problem of that mask."""

    function: Callable
    mask: str
    cause: str = ""
    of_all: bool = False


LENGTHS = "query_seq_lengths", "key_value_seq_lengths"
MHA = "with as many heads of each"
FAULTS = {
    f"lengths ignored, {MHA}": Fault(
        without_rules(*LENGTHS), "lengths", "query and key lengths ignored"
    ),
    f"window ignored, {MHA}": Fault(
        without_rules("local_window_size"), "wide window", "window ignored"
    ),
    f"segments ignored, {MHA}": Fault(
        without_rules(*IDS), "packed", "segment ids ignored"
    ),
    f"bias before the scale, {MHA}": Fault(
        planted.wrapped(bias_before_the_scale),
        HIDING_BIAS,
        "bias added before the scale",
    ),
    f"entries mixed up, {MHA}": Fault(planted.wrapped(entries_mixed_up), "causal"),
    "the first entry's keys, with one key head": Fault(
        planted.wrapped(first_entry), "full"
    ),
    "causal to the last key, of whole tiles": Fault(
        planted.wrapped(to_the_last_key), "causal", "causal aligned to the last key"
    ),
    "heads of one query": Fault(
        planted.wrapped(one_query), "full", "GQA heads grouped wrongly"
    ),
    "a last key by itself": Fault(
        planted.honest(seen=last_key_lost), "full", "KV tile dropped"
    ),
    # One key of hundreds is no more than roundings might be.
    "window in BF16": Fault(
        planted.honest(seen=window_of(jnp.bfloat16)), "wide window"
    ),
    # In BF16 all eight documents have one number.
    "segments in BF16": Fault(
        planted.honest(seen=segments_of(jnp.bfloat16)),
        *("packed", "segment ids ignored", True),
    ),
    "segments in FP16": Fault(
        planted.honest(seen=segments_of(jnp.float16)),
        *("packed", "segment ids in 16 bits", True),
    ),
}


# What the others have is looked for in other tests, too.
ALWAYS = "heads of one query", "a last key by itself", "window in BF16"


@functools.cache
def is_honest(problem: Problem) -> bool:
    return not is_wrong(planted.honest(), problem)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(x, marks=[pytest.mark.ci] * (x not in ALWAYS)) for x in FAULTS],
)
def test_what_is_wrong_for_some_calls_alone_is_found(fault):
    function, mask, cause, of_all = FAULTS[fault]
    there = [x for x in PROBLEMS if x.mask == mask and x.shape.key_length < 1000]
    wrong = [x for x in there if is_wrong(function, x)]
    assert wrong and all(map(is_honest, wrong))
    # Not for others, which is why they are all needed.
    assert of_all or len(wrong) < len(there) or len(there) == 1
    found = {
        finding.cause
        for problem in wrong
        for finding in recognise(planted.results(function, problem), problem)
    }
    assert cause in found or not cause


def test_calls_are_of_the_kinds_that_the_shapes_given_are_of():
    """A function may be for grouped heads alone, or for as many queries as keys."""
    grouped, alike = Shape(2, 128, 128, 4, 2, 32), Shape(1, 64, 64, 2, 2, 32)
    masks = "full", "causal", "lengths"

    def shapes(*more):
        groups = [Group(grouped, mask, ("normal",)) for mask in masks]
        return [
            group.shape
            for group in ragged([*groups, *(Group(x, "full", ()) for x in more)])
        ]

    assert {(x.heads, x.key_heads) for x in shapes()} == {(4, 2)}
    assert {(x.heads, x.key_heads) for x in shapes(alike)} == {(2, 2)}
    # Of one key head there would be one of each.
    one = dataclasses.replace(grouped, key_heads=1)
    groups = [Group(one, "causal", ("normal",)), Group(alike, "full", ())]
    assert {(x.shape.heads, x.shape.key_heads) for x in ragged(groups)} == {(4, 4)}
    assert all(x.query_length == x.key_length for x in shapes(alike))
    unequal = dataclasses.replace(grouped, query_length=20)
    both = {(x.heads, x.key_heads) for x in shapes(alike, unequal)}
    assert both == {(4, 2), (2, 2)}
    lengths = [(x.query_length, x.key_length) for x in shapes(unequal)]
    assert {*lengths} == {(1, 65), (64, 128), (44, 65), (65, 65)}
    # Nothing is longer than what was asked for.
    longer = dataclasses.replace(unequal, key_length=300)
    assert max(x.key_length for x in shapes(unequal)) == 128
    assert max(x.key_length for x in shapes(longer)) == 300


SMALL = Problem(Shape(2, 64, 64, 2, 1, 32))


def honest(query, key, value):
    return planted.attend(planted.honest(), SMALL)(query, key, value)


_shared = jax.custom_batching.custom_vmap(honest)


@_shared.def_vmap
def _(size, mapped, query, key, value):
    """Keys that all have in common are read as if each had its own."""
    query, key, value = (
        x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip((query, key, value), mapped)
    )
    if not all(mapped):
        key = jnp.roll(key, 1, 2)
    return jax.lax.map(lambda x: _shared(*x), (query, key, value)), (True, True)


def _found(attend: Attend) -> set[str]:
    records = invariance.invariances(attend, SMALL, gradients=False)
    return {r.finding.cause for r in records if r.finding}


def test_keys_that_a_vmap_does_not_map_are_tried():
    assert _found(_shared) == {f"{DEPENDS} mapping"}


def test_a_function_that_refuses_them_is_mapped_with_its_keys():
    strict = jax.custom_batching.custom_vmap(honest)

    @strict.def_vmap
    def _(size, mapped, query, key, value):
        assert all(mapped)
        return jax.lax.map(lambda x: strict(*x), (query, key, value)), (True, True)

    assert _found(strict) == set()
