"""Masks and a bias at lengths that no tile divides, and a window wider than a tile."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attn_jax.audit import algorithms, attribution, programs
from attn_jax.audit.audit import Audit
from attn_jax.audit.course import carry_out
from attn_jax.audit.inputs import Shape, most_of_a_bias
from attn_jax.audit.measure import measured
from attn_jax.audit.parts import Parts
from attn_jax.audit.plan import Group, plan, ragged
from attn_jax.audit.problem import (
    DTYPES,
    HIDING_BIAS,
    MASKS,
    TOGETHER,
    Problem,
    made_of,
)
from attn_jax.audit.target import Target, resolve
from attn_jax.audit.wiring import recognise
from attn_jax.formats import BF16
from tests import planted
from tests.planted_masks import broadcast, without

SHAPE, TILE = Shape(2, 128, 128, 2, 1, 32), 32
GROUPS = [Group(SHAPE, mask, ("normal",)) for mask in MASKS]
BESIDE = {group.mask: group.problems("bfloat16")[0] for group in ragged(GROUPS)}


def partial(visible) -> bool:
    return visible.shape[-1] % TILE != 0


def lost(*fields: str):
    """Rules that are lost where the last tile is a partial one."""
    gone = without(**dict.fromkeys(fields))

    def seen(visible, given):
        return gone(visible, given) if partial(visible) else visible

    return seen


def neighbours(visible, given):
    """A window that sees no more than the tiles beside the query's."""
    if given.window is None:
        return visible
    i, j = (jnp.arange(n) // TILE for n in visible.shape[-2:])
    return broadcast(given, visible) & (abs(i[:, None] - j) <= 1)


def exchanged(visible, given):
    """Tiles of keys are chosen with a window's sides exchanged."""
    if given.window is None:
        return visible
    left, right = given.window
    i, j = (TILE * (jnp.arange(n) // TILE) for n in visible.shape[-2:])
    i, j = i[:, None], j[None]
    met = (j + TILE > i - right) & (j < i + TILE + left)
    return broadcast(given, visible) & met


def gradient_without_keys(function, query, key, value, bias=None, **rules):
    """LSE of rows that see nothing is a large negative number in the backward pass, as
    hidden logits are: P is the same for all keys."""
    out, lse = function(query, key, value, bias, **rules)
    lengths = rules.get("key_value_seq_lengths")
    if lengths is None:
        return out, lse
    mean = jnp.repeat(value.mean(1, keepdims=True), out.shape[2] // value.shape[2], 2)
    unseen = (lengths == 0)[:, None, None, None]
    return out + jnp.where(unseen, mean - jax.lax.stop_gradient(mean), 0), lse


def padded(function, query, key, value, bias=None, **rules):
    """A bias whose rows are read as if they filled whole tiles."""
    if bias is not None and bias.shape[-1] % TILE:
        more = ((0, 0),) * 3 + ((0, -bias.shape[-1] % TILE),)
        of_heads = jnp.pad(bias, more).reshape(*bias.shape[:2], -1)
        size = bias.shape[2] * bias.shape[3]
        bias = of_heads[..., :size].reshape(bias.shape)
    return function(query, key, value, bias, **rules)


def without_dbias(function, query, key, value, bias=None, **rules):
    if bias is not None and bias.shape[-1] % TILE:
        bias = jax.lax.stop_gradient(bias)
    return function(query, key, value, bias, **rules)


def not_guarded(function, query, key, value, bias=None, **rules):
    """Blocks of keys, in which exp(x - m) is NaN as long as m is -inf."""
    out, lse = function(query, key, value, bias, **rules)
    if bias is None:
        return out, lse
    unseen = jnp.isneginf(bias[..., :TILE]).all(-1).swapaxes(1, 2)
    return jnp.where(unseen[..., None], jnp.nan, out), jnp.where(unseen, jnp.nan, lse)


def of_numbers_alone(function, query, key, value, bias=None, **rules):
    """-inf is taken care of, and the least finite number gives -inf times log2(e)."""
    if bias is not None:
        least = jnp.finfo(bias.dtype).min
        unseen = (bias[..., :TILE] == least).all(-1).swapaxes(1, 2)
    out, lse = function(query, key, value, bias, **rules)
    if bias is None:
        return out, lse
    return jnp.where(unseen[..., None], jnp.nan, out), lse


FAULTS = {
    "wide window": [
        planted.honest(seen=neighbours),
        planted.honest(seen=exchanged),
        planted.honest(seen=lost("window")),
    ],
    "lengths": [planted.honest(seen=lost("key_value_lengths"))],
    "no keys": [planted.wrapped(gradient_without_keys)],
    "packed": [planted.honest(seen=lost("query_segment_ids", "key_value_segment_ids"))],
    HIDING_BIAS: [
        planted.wrapped(wrong)
        for wrong in (padded, without_dbias, not_guarded, of_numbers_alone)
    ],
}


# As an audit has them whose shapes differ so, of a target that takes a scale.
UNEQUAL = {
    group.mask: group.problems("bfloat16")[0]
    for group in ragged(
        [*GROUPS, Group(Shape(1, 20, 30, 2, 1, 32), "full", ("normal",))],
        takes_scale=True,
    )
}


def own_scale(function, query, *arrays, scale=None, **rules):
    """Where there is any rule, or a bias, the scale is not passed on."""
    rule = any(x is not None and x is not False for x in rules.values())
    if rule or len(arrays) > 2:
        scale = query.shape[-1] ** -0.5
    return function(query, *arrays, scale=scale, **rules)


def stride_of_queries(function, query, key, value, bias=None, **rules):
    """Rows of a bias, and K of batch entries, begin where they would if there were as
    many keys as queries."""
    T, S = query.shape[1], key.shape[1]
    if bias is not None:
        at = T * jnp.arange(T)[:, None] + jnp.arange(S)
        bias = bias.reshape(*bias.shape[:2], -1)[:, :, at % (T * S)]
    if rules.get("is_causal"):
        at = T * jnp.arange(len(key))[:, None] + jnp.arange(S)
        key, value = (x.reshape(-1, *x.shape[2:])[at] for x in (key, value))
    return function(query, key, value, bias, **rules)


# Other tests here find what is wrong under these masks.
IN_CI = {"causal", "no keys", HIDING_BIAS}


@pytest.mark.parametrize(
    "mask", [pytest.param(x, marks=[pytest.mark.ci] * (x in IN_CI)) for x in BESIDE]
)
def test_a_scale_that_is_not_passed_on_is_found(mask):
    """It was the usual one under all masks."""
    usual, other = BESIDE[mask], UNEQUAL[mask]
    assert other.scale == 0.75 * usual.scale and "0.75 / sqrt(32)" in str(other)
    wrong = planted.wrapped(own_scale)
    assert not is_wrong(planted.honest(), other)
    assert not is_wrong(wrong, usual) and is_wrong(wrong, other)
    found = recognise(planted.results(wrong, other), other)
    assert {f.cause for f in found} == {"scale not taken"}


def test_a_shape_of_the_users_that_is_one_of_these_keeps_its_scale():
    """They have another scale, and are called with it."""
    group = Group(Shape(2, 65, 65, 2, 2, 32), "lengths", ("normal",))
    (beside,) = (
        x
        for x in ragged([group], takes_scale=True)
        if (x.shape, x.mask) == (group.shape, group.mask)
    )
    target = resolve("xla")
    for of in (group, beside):
        (problem,) = of.problems("float32")
        out = programs.run(target.on(problem), problem.arrays, gradients=False)["out"]
        # FP32 is off by some 1e-7, another scale by 0.06.
        length = problem.rules.query_lengths[0]
        wanted = problem.exact().out[0, :length]
        np.testing.assert_allclose(out[0, :length], wanted, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", HIDING_BIAS])
def test_lengths_of_queries_for_those_of_keys_are_found(mask):
    """Under a bias, and under a mask with several batch entries, there were as many."""
    wrong = planted.wrapped(stride_of_queries)
    shape = UNEQUAL[mask].shape
    assert shape.query_length < shape.key_length and shape.batch > 1
    assert not is_wrong(wrong, BESIDE[mask]) and is_wrong(wrong, UNEQUAL[mask])


def test_every_grouping_of_heads_is_told_apart_in_the_plan(monkeypatch):
    """Of two query heads for each of two, n // 2 is n // K, too."""
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        first = plan()[0].shape
        n = range(first.heads)
        ways = [
            [x // (first.heads // first.key_heads) for x in n],
            [x // first.key_heads for x in n],
            [x % first.key_heads for x in n],
        ]
        assert all(ways.count(way) == 1 for way in ways)


def is_wrong(function, problem: Problem) -> bool:
    results = planted.results(function, problem)
    found = measured(problem, results)
    far = any(m.errors.units > 4 for name, m in found.items() if name != "lse")
    broken = any(m.not_finite for m in found.values())
    return far or broken or bool(recognise(results, problem))


# `test_the_audit_has_them` has packed ones, `test_audit_dispatch` a wide window.
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(x, marks=[pytest.mark.ci] * (x not in ("no keys", HIDING_BIAS)))
        for x in FAULTS
    ],
)
def test_what_is_wrong_at_such_lengths_alone_is_found(mask):
    """They were tried at one length, that tiles divide, and with a narrow window."""
    usual = Problem(SHAPE, mask=made_of(mask)[-1])
    assert not is_wrong(planted.honest(), BESIDE[mask])
    for function in FAULTS[mask]:
        assert not is_wrong(function, usual)
        assert is_wrong(function, BESIDE[mask])


def test_lengths_are_those_that_devices_divide_and_tiles_do_not():
    def lengths(groups, shards=1):
        return {
            (x.shape.query_length, x.shape.key_length) for x in ragged(groups, shards)
        }

    # Past whole tiles of every size there is one key.
    assert lengths(GROUPS) == {(65, 65)}
    assert lengths(GROUPS, 4) == {(64, 64)}
    long = Group(Shape(1, 16384, 16384, 2, 1, 128), "packed", ("normal",))
    assert lengths([long]) == {(897, 897)}
    assert lengths([Group(Shape(1, 3, 3, 1, 1, 8), "window", ("normal",))], 4) == set()
    assert ragged(GROUPS[:1]) == []
    assert {x.mask for x in ragged(plan())} == {*BESIDE, "full"}
    assert set(BESIDE) <= {*MASKS, *TOGETHER}
    # Nothing is measured twice.
    assert ragged([*GROUPS, *ragged(GROUPS)]) == []


def test_windows_there_are_wider_than_a_tile():
    for group in (x for x in ragged(plan()) if x.mask == "wide window"):
        window = group.problems("bfloat16")[0].rules.window
        assert window is not None and min(window) > 64 and window[0] > window[1] + 64
        assert sum(window) <= group.shape.key_length


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_hides_in_every_format(dtype):
    """Whole tiles of some queries, both ways, and the last key from none."""
    bias = Problem(SHAPE, dtype, mask=HIDING_BIAS).bias
    assert bias is not None and bias.dtype == DTYPES[dtype]
    for least in (-np.inf, ml_dtypes.finfo(bias.dtype).min):
        hidden = bias == least
        assert hidden[..., :TILE].all(-1).any() and not hidden[..., -1].any()
    assert 4 < most_of_a_bias(bias) < 20


def audit(function, mask: str):
    known = attribution.candidates(BF16)
    recipes = {name: known[name] for name in algorithms.PLAIN}
    groups = (Group(SHAPE, mask, ("normal",)),)
    with Parts() as parts:
        target = Target("planted", function)
        wanted = Audit(target, groups, "bfloat16", recipes, True, ("ragged",))
        return carry_out(wanted, parts)


def test_the_audit_has_them():
    result = audit(FAULTS["packed"][0], "packed")
    (finding,) = result.findings
    assert (finding.kind, finding.cause) == ("wrong wiring", "segment ids ignored")
    where = dataclasses.replace(BESIDE["packed"], scale_factor=0.75)
    assert finding.where == (str(where),)
    # They are beside what was asked for.
    assert [cell.problem.shape for cell in result.cells] == [SHAPE]
    assert audit(planted.honest(), "packed").findings == []


class Logged(Parts):
    """What recipes were begun, and in the end waited for, by part."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple[str, str]] = []

    def beside(self, name, make):
        self.log.append(("begun", name))
        part = super().beside(name, make)
        read = concurrent.futures.Future()
        read.result = functools.partial(self._read, name, part)
        return read

    def _read(self, name, part, timeout=None):
        self.log.append(("read", name))
        return part.result(timeout)


@pytest.mark.ci
def test_recipes_there_are_begun_before_one_is_waited_for():
    """At the end, one after the other, they would take as long as each together."""

    def poor(query, key, value, **rules):
        out, lse = planted.honest()(query, key, value, **rules)
        noise = jax.random.normal(jax.random.key(0), out.shape) / 16
        return (out * (1 + noise)).astype(out.dtype), lse

    known = attribution.candidates(BF16)
    recipes = {name: known[name] for name in algorithms.PLAIN}
    groups = tuple(Group(SHAPE, mask, ("normal",)) for mask in ("lengths", "packed"))
    with Logged() as parts:
        target = Target("planted", poor)
        wanted = Audit(target, groups, "bfloat16", recipes, False, ("ragged",))
        there = [f" on {group}" for group in wanted.beside]
        carry_out(wanted, parts)
    log = [(what, x) for what, x in parts.log if any(map(x.endswith, there))]
    whats = [what for what, _ in log]
    assert whats.count("begun") == len(there) * len(algorithms.PLAIN)
    assert whats == sorted(whats)
