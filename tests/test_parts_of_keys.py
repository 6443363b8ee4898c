"""What Hopper's kernels do with some of the keys, without a GPU: states that they carry
on, sums that they add to, keys that another device has prepared."""

import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.formats import BF16
from attn_jax.kernels import hopper_outputs, partial, tuning
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.hopper_key_numbers import key_numbers
from attn_jax.kernels.interpreter import interpreted
from attn_jax.mask import Mask
from attn_jax.span import Chosen, Ending, Span
from tests.child_process import in_child_process

pytestmark = pytest.mark.ci

TIME_LIMIT = 240  # seconds; a case takes six to ten alone on a core
N, K, H = 2, 1, 64


def _number(spans: tuple[Span, ...], number: int) -> Chosen:
    """One of them, as the last of some shards is told it."""
    return Chosen(spans, jnp.asarray([99, 99, number], jnp.int32), jnp.int32(2))


# Logits of a part's only key, by row: hundreds apart, above the 88 where FP32's exp
# ends, and below what may be seen (-inf).
_HIDDEN = -np.inf
LOGITS = np.float32(
    [[0, 200, _HIDDEN], [1, -300, _HIDDEN], [_HIDDEN] * 3, [2, 199, _HIDDEN]]
)


def _carried(order: tuple[int, ...]):
    """(O, LSE) of three rows over parts of one key each, and V of the keys."""
    rows, heads = LOGITS.shape[1], 1
    values = np.random.default_rng(0).integers(-8, 9, (4, 1, 1, heads, H))
    # One column of the query for each row.
    query = 64 * jnp.eye(rows, H, dtype="bfloat16")[None, :, None]
    state = None
    with made_for("hopper"), interpreted():
        for part in order:
            seen = np.isfinite(LOGITS[part])
            columns = np.where(seen, LOGITS[part], 0.0) / 64
            key = np.pad(columns, (0, H - rows))[None, None, None]
            mask = Mask(
                query_segment_ids=np.where(seen, 0, 1).astype(np.int32)[None],
                key_value_segment_ids=np.zeros((1, 1), np.int32),
            )
            state = partial.carry_on(
                *(state, query, jnp.asarray(key, "bfloat16")),
                jnp.asarray(values[part], "bfloat16"),
                scale=1.0,
                mask=mask,
            )
        return *jax.device_get(partial.finished(state)), values[:, 0, 0]


@pytest.mark.parametrize(
    "order",
    [
        (2, 0, 3, 1),
        pytest.param((0, 1, 2, 3), marks=pytest.mark.thorough),
        pytest.param((3, 2, 1, 0), marks=pytest.mark.thorough),
    ],
)
def test_parts_of_any_size_are_carried(order):
    """By the forward kernel, also such as see nothing, first, last or all of them."""
    out, lse, values = in_child_process(_carried, order, seconds=TIME_LIMIT)
    logits = LOGITS[:, :2].astype(np.float64)
    exact = np.logaddexp.reduce(logits, axis=0)
    wanted = np.einsum("pt,phd->thd", np.exp(logits - exact), values)
    # P, rounded to FP16, times integers up to 8, over its unrounded sum.
    atol = 2.0**-11 * 8
    np.testing.assert_allclose(out[0, :2], wanted, rtol=0, atol=atol)
    np.testing.assert_allclose(lse[0, 0, :2], exact, rtol=4 * 2.0**-24)
    assert not out[0, 2].any() and lse[0, 0, 2] == -np.inf


def _alone():
    """What a row gets that sees one key, for logits that are not whole, and the value
    of that key."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((1, 128, 1, H)), "bfloat16")
    key, value = (
        jnp.asarray(rng.standard_normal((1, 1, 1, H)), "bfloat16") for _ in range(2)
    )
    with made_for("hopper"), interpreted():
        state = partial.carry_on(None, query, key, value, scale=0.3)
        maxima = jax.device_get(state.row_max)
        assert np.array_equal(maxima, np.round(maxima))
        return jax.device_get(partial.finished(state)[0]), np.float32(value)


def test_a_key_alone_gives_its_value():
    """Its weight is 1 as an FP16 number, whatever m is rounded to behind P V."""
    out, value = in_child_process(_alone, seconds=TIME_LIMIT)
    # As an FP32 number, in l, the weight is off by what its exponent is: m - 15, of
    # size below 32, is rounded, and its difference to a logit, and m is a place above
    # (`Softmax.origin`): ln 2 (2^-20 + 2^-21 + 2^-20). A, l and their ratio, too.
    rtol = math.log(2) * 2.5 * 2.0**-20 + 3 * 2.0**-24
    np.testing.assert_allclose(out, np.broadcast_to(value, out.shape), rtol=rtol)


def _in_place(count: int):
    """The state with some keys added to rows in its middle, those rows by themselves,
    and what there was."""
    rng = np.random.default_rng(0)
    heads, rows, first = 2, 3 * 128, 128

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), "bfloat16")

    m = jnp.asarray(rng.integers(-3, 4, (1, heads, rows)), jnp.float32)
    l = jnp.asarray(rng.uniform(1, 2, (1, heads, rows)), jnp.float32)  # noqa: E741
    total = jnp.asarray(rng.standard_normal((1, rows, heads, H)), jnp.float32)
    query, key = normal(1, count, heads, H), normal(1, 64, heads, H)
    value = normal(1, 64, heads, H)
    with made_for("hopper"), interpreted():
        before = partial.Carried(m, l, total)
        add = functools.partial(partial.carry_on, scale=0.1)
        found = add(before, query, key, value, first=first)
        alone = add(before.rows(first, count), query, key, value)
        return jax.device_get((found, alone, before))


@pytest.mark.parametrize("count", [128, 120])
def test_other_rows_of_a_state_stay(count):
    """Of whole tiles, which the kernel adds to in place, and of others."""
    found, alone, before = in_child_process(_in_place, count, seconds=TIME_LIMIT)
    chex.assert_trees_all_equal(found.rows(128, count), alone)
    for first, more in ((0, 128), (128 + count, 3 * 128 - 128 - count)):
        chex.assert_trees_all_equal(found.rows(first, more), before.rows(first, more))
    assert not np.array_equal(alone.total, before.rows(128, count).total)


def _chosen():
    """Spans, a state, and for each span the state with what it adds when it is chosen
    on the device, and with what its rows get by themselves."""
    rng = np.random.default_rng(0)
    tiling = tuning.configuration("hopper", H, H, 256, is_causal=False, listed=False)
    tile, columns = tiling.forward.tile, tiling.forward.columns
    rows, keys = 3 * tile, 2 * columns
    spans = Span(0, 2 * tile, columns), Span(tile, 2 * tile, keys), Span(0, 0, 0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), "bfloat16")

    m = jnp.asarray(rng.integers(-3, 4, (1, N, rows)), jnp.float32)
    l = jnp.asarray(rng.uniform(1, 2, (1, N, rows)), jnp.float32)  # noqa: E741
    total = jnp.asarray(rng.standard_normal((1, rows, N, H)), jnp.float32)
    query, key, value = (
        normal(1, rows, N, H),
        normal(1, keys, K, H),
        normal(1, keys, K, H),
    )
    found = []
    with made_for("hopper"), interpreted():
        before = partial.Carried(m, l, total)
        add = functools.partial(partial.carry_on, scale=0.1)
        for number, span in enumerate(spans):
            chosen = _number(spans, number)
            assert partial.takes(query, key, value, chosen)
            some = add(before, query, key, value, chosen=chosen)
            alone = None
            if span.queries:
                cut = slice(span.first_query, span.first_query + span.queries)
                alone = add(
                    before.rows(span.first_query, span.queries),
                    *(query[:, cut], key[:, : span.keys], value[:, : span.keys]),
                )
            found.append(jax.device_get((some, alone)))
        uneven = _number((Span(0, tile, columns // 2),), 0)
        assert not partial.takes(query, key, value, uneven)
        return spans, jax.device_get(before), found


def test_what_is_added_may_be_known_on_the_device_alone():
    """In one program for all shards, which meet other keys at a hop."""
    spans, before, found = in_child_process(_chosen, seconds=TIME_LIMIT)
    rows = before.total.shape[1]
    for span, (some, alone) in zip(spans, found, strict=True):
        first, count = span.first_query, span.queries
        if count:
            chex.assert_trees_all_equal(some.rows(first, count), alone)
            assert not np.array_equal(alone.total, before.rows(first, count).total)
        for start, more in ((0, first), (first + count, rows - first - count)):
            chex.assert_trees_all_equal(
                some.rows(start, more), before.rows(start, more)
            )


def _ended(length: int, exact: bool, rounds: bool, heads: int):
    """For spans of more tiles than there are CTAs, or fewer: what is left of a state
    that ends with them, as `finished` has it, and which rows saw nothing at all."""
    rng = np.random.default_rng(0)
    tiling = tuning.configuration("hopper", H, H, 256, is_causal=False, listed=False)
    tile, columns = tiling.forward.tile, tiling.forward.columns
    rows, keys = length * tile, 2 * columns
    spans = Span(0, rows, columns), Span(tile, rows - tile, keys), Span(0, 0, 0)
    m = rng.integers(-3, 4, (1, heads, rows)).astype(np.float32)
    l = rng.uniform(1, 2, (1, heads, rows)).astype(np.float32)  # noqa: E741
    total = rng.standard_normal((1, rows, heads, H)).astype(np.float32)
    m[..., 5], l[..., 5], total[:, 5] = -np.inf, 0.0, 0.0
    query, key, value = (
        jnp.asarray(rng.standard_normal((1, *shape, H)), "bfloat16")
        for shape in ((rows, heads), (keys, K), (keys, K))
    )
    found = []
    with made_for("hopper"), interpreted():
        before = partial.Carried(*map(jnp.asarray, (m, l, total)))
        ending = Ending(jnp.bfloat16 if rounds else None, exact=exact)
        for number in range(len(spans)):
            given = before, query, key, value
            options = dict(scale=0.1, chosen=_number(spans, number))
            ended = partial.end_with(*given, ending=ending, **options)
            wanted = partial.finished(partial.carry_on(*given, **options))
            found.append(jax.device_get((ended, wanted)))
    return found


@pytest.mark.parametrize(
    ("length", "exact", "rounds", "heads"),
    [(3, True, True, 2), (3, False, True, 2), (67, True, False, 2)],
)
def test_rows_may_end_in_the_kernel_that_adds_the_last_keys(
    length, exact, rounds, heads
):
    """Rows that these keys are hidden from, too; on some devices that is all rows."""
    given = _ended, length, exact, rounds, heads
    found = in_child_process(*given, seconds=TIME_LIMIT)
    for number, (ended, (out, lse)) in enumerate(found):
        # 1 / l, its products, and FP32's sums in another order.
        np.testing.assert_allclose(ended.lse, lse, rtol=4 * 2.0**-24, atol=2.0**-22)
        close = functools.partial(np.testing.assert_allclose, atol=8 * 2.0**-24)
        if exact:
            close(ended.exact, out, rtol=8 * 2.0**-24)
        if rounds:
            assert ended.out.dtype == jnp.bfloat16
            close(np.float32(ended.out), out, rtol=2.0**-8)
            if exact:
                chex.assert_trees_all_equal(ended.out, ended.exact.astype(jnp.bfloat16))
        assert [x is None for x in ended] == [not rounds, not exact, False]
        if number:  # Rows of the first tile saw no keys; one never did.
            assert not out[:, 5].any() and np.isneginf(ended.lse[..., 5]).all()
            left = ended.exact if exact else ended.out
            assert not np.float32(left[:, 5]).any()


def test_lse_of_a_carried_row_has_fp32s_digits(monkeypatch):
    """Also where log2 is off by 2^-22 of itself, as the hardware's is: of l, some
    thousands, that was more than FP32 itself is off by. Powers of two are exact there,
    and not here."""

    def off(of_x: np.ndarray) -> np.ndarray:
        sign = np.where(np.arange(of_x.size) % 2, 1, -1)
        return of_x + sign * 2.0**-22 * np.maximum(np.abs(of_x), 1)

    rng = np.random.default_rng(0)
    m = rng.integers(-40, 40, 4000).astype(np.float32)
    l = np.exp2(rng.uniform(-1, 17, 4000)).astype(np.float32)  # noqa: E741
    exact = m * np.log(2.0) + np.log(np.float64(l))
    for name, base in (("log2", 1.0), ("log", np.log(2.0))):

        def by_hardware(x, base=base):
            found = off(np.log2(np.asarray(x, np.float64))) * base
            return jnp.asarray(found, jnp.float32)

        monkeypatch.setattr(jnp, name, by_hardware)
    monkeypatch.setattr(jnp, "exp2", np.exp2)
    found = np.float64(hopper_outputs.lse_of(jnp.asarray(m), jnp.asarray(l)))
    # log of what is near 1, and roundings: of the sum, and of the three numbers that
    # the rest comes from, each below 0.4.
    allowed = 2.0**-24 * (np.abs(exact) + 1.2) + np.log(2.0) * 2.0**-22
    assert (np.abs(found - exact) <= allowed).all()


def _prepared():
    """Numbers and FP16 values of keys, alone and as they are sent; and what a state
    gets of them, for keys from the first on and others, masked or chosen on the device.
    """
    rng = np.random.default_rng(0)
    tiling = tuning.configuration("hopper", H, H, 512, is_causal=False, listed=False)
    tile, columns = tiling.forward.tile, tiling.forward.columns
    keys = 4 * columns
    shapes = (1, tile, N, H), (1, keys, K, H), (1, keys, K, H)
    # Beyond FP16's range.
    sizes = 1, 1, 2.0**20
    query, key, value = (
        jnp.asarray(size * rng.standard_normal(shape), "bfloat16")
        for size, shape in zip(sizes, shapes, strict=True)
    )
    spans = Span(0, 0, 0), Span(0, tile, 3 * columns)
    ways = [
        (0, keys, dict(mask=Mask(is_causal=True))),
        (columns, columns, {}),
        (0, columns - 8, {}),
        (0, keys, dict(chosen=_number(spans, 1))),
    ]
    found = []
    with made_for("hopper"), interpreted():
        sent = partial.prepared(key, value)
        assert sent is not None and sent.count == keys
        numbers, halves = key_numbers(key, value, keys, BF16, half=True)
        alone = key, halves, numbers.unscale
        together = *sent.some(0, keys), sent.unscale
        state = partial.carry_on(None, query, key, value, scale=0.1)
        for first, count, more in ways:
            some = slice(first, first + count)
            plain = key[:, some], value[:, some]
            for keys_of, given in (
                (plain, {}),
                (sent.some(first, count), dict(first_key=first, prepared=sent)),
            ):
                found.append(
                    partial.carry_on(
                        *(state, query, *keys_of), scale=0.1, **more, **given
                    )
                )
        return jax.device_get((alone, together, found))


def test_keys_that_are_prepared_are_the_same():
    """By who sends them: K as it is, V as FP16 numbers and what undoes their scale."""
    alone, together, found = in_child_process(_prepared, seconds=TIME_LIMIT)
    chex.assert_trees_all_equal(alone, together)
    assert found
    for plain, sent in zip(found[::2], found[1::2], strict=True):
        # Of all values one power of two, and of some another, and none is so small that
        # it is subnormal.
        chex.assert_trees_all_equal(plain, sent)


class _ForGradients(NamedTuple):
    """What `backward_in_place` takes besides keys, K and V as planes of `planes`."""

    sums: Any
    query: Any
    dout: Any
    lse: Any
    excess: Any
    planes: Any

    @classmethod
    def random(cls, length: int) -> "_ForGradients":
        """So many queries, and keys."""
        rng = np.random.default_rng(0)

        def normal(*shape, dtype="bfloat16"):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        query, dout = normal(1, length, N, H), normal(1, length, N, H)
        lse, excess = (normal(1, N, length, dtype="float32") for _ in range(2))
        sums = normal(1, length, N, H, dtype="float32")
        planes = normal(3, 1, length, K, H)
        return cls(sums, query, dout, lse + 7, excess, planes)

    @property
    def ranges(self) -> partial.Ranges:
        norm = jnp.sqrt((self.dout.astype("float32") ** 2).sum(-1)).swapaxes(1, 2)
        centre, largest = jnp.zeros((1, K, H)), jnp.full((1, K, H), 5.0)
        return partial.ranges(centre, largest, largest, self.excess, norm)


def _added_in_place():
    """Sums of dS K', dK and dV of some keys and rows, of planes and where they lie; and
    of arrays that are no more than these, added afterwards."""
    first, count = (128, 256), (256, 128)
    sums, query, dout, lse, excess, planes = x = _ForGradients.random(512)
    of_rows, of_keys = (slice(a, a + n) for a, n in zip(first, count, strict=True))
    key, value = planes[0, :, of_keys], planes[1, :, of_keys]
    with made_for("hopper"), interpreted():
        ranges = x.ranges
        where = partial.Keys(key, value, first[1], planes)
        add = functools.partial(partial.backward_in_place, scale=0.1, is_causal=False)
        at = first[0], count[0]
        there = add(sums, query, where, dout, lse, excess, ranges, at)
        there = jax.tree.map(jnp.array, there)
        cut = query[:, of_rows], dout[:, of_rows]
        of_cut = lse[..., of_rows], excess[..., of_rows]
        zero, at = jnp.zeros_like(sums[:, of_rows]), (0, count[0])
        where = partial.Keys(key, value)
        given = cut[0], where, cut[1], *of_cut, ranges, at
        more, *of_these = add(zero, *given)
        begun = add(None, *given)[0]
        return jax.device_get((there, sums, more, begun, of_these)), of_rows


def test_gradients_are_added_where_they_lie():
    (there, before, more, begun, of_keys), rows = in_child_process(
        _added_in_place, seconds=TIME_LIMIT
    )
    sums, *found = there
    chex.assert_trees_all_equal(found, of_keys)
    assert np.abs(more).max() > 1
    # Of no keys before, where nothing need be there.
    np.testing.assert_array_equal(begun, more)
    # A tile is added to the sum before it: of one, to the last bit.
    np.testing.assert_array_equal(sums[:, rows], before[:, rows] + more)
    others = np.ones(sums.shape[1], bool)
    others[rows] = False
    np.testing.assert_array_equal(sums[:, others], before[:, others])


def _chosen_gradients():
    """Of each of some spans, told on the device: what they add to sums, or to none, and
    what the kernel that is told it beforehand adds."""
    length = 256
    x = _ForGradients.random(length)
    sums, planes = x.sums, x.planes
    # The first goes over fewer blocks than the second.
    spans = Span(128, 128, 256), Span(0, 256, 128), Span(0, 0, 0)
    found = []
    with made_for("hopper"), interpreted():
        ranges = x.ranges
        for number, (first, queries, keys) in enumerate(spans):

            def add(to, keys, rows, chosen=None):
                where = partial.Keys(*planes[:2, :, :keys], 0, planes)
                given = to, x.query, where, x.dout, x.lse, x.excess, ranges, rows
                options = dict(scale=0.1, is_causal=False, chosen=chosen)
                made = partial.backward_in_place(*given, **options)
                return jax.device_get(made)

            chosen = _number(spans, number)
            told = [add(to, length, (0, length), chosen) for to in (sums, None)]
            zeros, no_keys = jnp.zeros_like(sums), [np.zeros((1, 0, K, H))] * 2
            known = [(to, *no_keys) for to in jax.device_get((sums, zeros))]
            if queries:
                known = [add(to, keys, (first, queries)) for to in (sums, zeros)]
            found += zip(told, known, strict=True)
    return found


def test_gradients_of_some_keys_that_a_device_is_told_of():
    """All bits are those of kernels that know which; of other keys, and of other rows
    where there are no sums, they are 0."""
    found = in_child_process(_chosen_gradients, seconds=TIME_LIMIT)
    for (sums, *told), (expected, *known) in found:
        np.testing.assert_array_equal(sums, expected)
        for of_all, of_some in zip(told, known, strict=True):
            count = of_some.shape[1]
            np.testing.assert_array_equal(of_all[:, :count], of_some)
            assert not of_all[:, count:].any()
    assert sum(known.shape[1] for _, (_, known, _) in found) == 2 * (128 + 256)
