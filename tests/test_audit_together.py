"""Rules that are right one by one and wrong together, and lengths of 0."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attn_jax.audit import more
from attn_jax.audit.finding import HIDDEN_PAIRS, SEES_NO_KEY, Finding
from attn_jax.audit.inputs import Shape
from attn_jax.audit.problem import (
    HIDING_BIAS,
    MASKS,
    TOGETHER,
    Problem,
    made_of,
)
from attn_jax.audit.rows import findings_of
from attn_jax.audit.target import Adapter, Target
from tests.planted import honest
from tests.planted_masks import broadcast

SHAPE = Shape(2, 48, 64, 2, 2, 32)
PLAIN = [Problem(SHAPE, mask=mask) for mask in MASKS if mask != "bias"]


def read(function) -> dict[str, list[str]]:
    """Causes by mask."""
    target = Target("planted", function, Adapter(lse="return_residual"))
    masks = [problem.mask for problem in PLAIN]
    rows = [*more.read(target, [*PLAIN, *PLAIN[0].together(MASKS)])]
    names = [row["mask"] for row in rows if "mask" in row]
    assert names == [*masks, *TOGETHER]
    return {
        row["mask"]: [f["cause"] for f in row["findings"]]
        for row in rows
        if "mask" in row and row["findings"]
    }


def without_causal_if(field: str):
    """The causal mask is lost where another rule is given."""

    def seen(visible, given):
        if getattr(given, field) is None:
            return visible
        return broadcast(dataclasses.replace(given, is_causal=False), visible)

    return seen


def without_window_if_causal(visible, given):
    window = None if given.is_causal else given.window
    return broadcast(dataclasses.replace(given, window=window), visible)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("causal+packed", without_causal_if("query_segment_ids")),
        ("causal+lengths", without_causal_if("key_value_lengths")),
        ("causal+window", without_causal_if("window")),
        ("causal+window", without_window_if_causal),
    ],
)
def test_a_rule_that_another_makes_void_is_found(mask, seen):
    found = read(honest(seen=seen))
    assert found == {mask: [HIDDEN_PAIRS]}


def without_a_last_whole_tile(visible, given):
    """A loop that counts tiles ends one short where the last is whole."""
    if given.key_value_lengths is None:
        return visible
    ends = jnp.asarray(given.key_value_lengths)[:, None, None, None]
    key = jnp.arange(visible.shape[-1])
    return visible & ~((ends % 16 == 0) & (key >= ends - 16))


def test_key_lengths_of_whole_tiles_are_read():
    """Others hid it: only keys that pad them were said to change results."""
    found = read(honest(seen=without_a_last_whole_tile))
    assert found == {"key lengths": ["visible pairs carry none"]}


def not_a_number_without_keys(*arrays, key_value_seq_lengths=None, **rules):
    rules["key_value_seq_lengths"] = key_value_seq_lengths
    out, lse = honest()(*arrays, **rules)
    if key_value_seq_lengths is not None:
        none = (key_value_seq_lengths == 0)[:, None, None, None]
        out = jnp.where(none, jnp.nan, out)
    return out, lse


def clipped_bias(*arrays, bias=None, **rules):
    bias = None if bias is None else jnp.maximum(bias, -6)
    return honest()(*arrays, bias=bias, **rules)


def test_pairs_that_a_bias_hides_carry_no_weight():
    """P was read without a bias alone, and no bias was beyond some 8."""
    assert read(clipped_bias) == {HIDING_BIAS: [HIDDEN_PAIRS]}


def test_out_without_keys_is_read_too():
    assert read(not_a_number_without_keys) == {"no keys": [SEES_NO_KEY]}


def test_an_honest_function_has_none():
    assert read(honest()) == {}
    assert read(jax.nn.dot_product_attention) == {}


def test_what_a_mask_hides_is_no_consequence_of_what_is_wrong_without_one():
    def row(cause, **mask):
        finding = Finding("wrong wiring", cause, "", ("out",), ("P",))
        return {**mask, "findings": [dataclasses.asdict(finding)]}

    rows = [row("crash"), row("rows do not sum to one", mask="full")]
    rows += [row(HIDDEN_PAIRS, mask="causal"), row("dropout left on", mask="causal")]
    read = [(row.get("mask"), findings_of([row])) for row in rows]
    said = {
        spoilt: [f.cause for f in more.of_read(read, {spoilt})]
        for spoilt in ("full", "causal", "window")
    }
    assert said == {
        "full": ["crash", HIDDEN_PAIRS],
        "causal": ["crash", "rows do not sum to one"],
        "window": [f["findings"][0]["cause"] for f in rows],
    }


def test_what_the_measurements_say_is_not_finite_is_not_said_again():
    broken, other = (
        Finding("not finite", "", ""),
        Finding("wrong wiring", HIDDEN_PAIRS, ""),
    )
    rows = [("causal", [broken]), ("window", [broken, other])]
    assert more.of_read(rows, set(), {"window"}) == [broken, other]
    assert more.of_read(rows, set()) == [broken, broken, other]


def test_what_one_mask_does_is_not_said_again_of_two():
    finding = Finding("wrong wiring", HIDDEN_PAIRS, "says", ("out",))
    rows = [
        ("full", []),
        ("causal", [finding]),
        ("causal+window", [finding]),
        ("no keys", [finding]),
        (None, []),
    ]
    assert more.of_read(rows, set()) == [finding] * 2
    assert more.of_read(rows, {"lengths"}) == [finding]
    assert more.of_read(rows, {"full"}) == [finding] * 2
    assert more.of_read(rows, {"causal", "lengths"}) == []
    assert made_of("no keys") == ("lengths",) and made_of("full") == ("full",)


def test_masks_together_need_both():
    masks = PLAIN[0].together(["causal", "packed"])
    assert [p.mask for p in masks] == ["causal+packed", "packed apart"]
    assert PLAIN[0].together(["full"]) == []


def test_masks_may_come_one_by_one():
    """As the audit gives them. Only the first of those together was read."""
    one_by_one = (mask for mask in MASKS)
    assert [p.mask for p in PLAIN[0].together(one_by_one)] == [*TOGETHER]


def test_ids_of_keys_that_are_never_read_are_found():
    def seen(visible, given):
        if given.query_segment_ids is None or visible.shape[-2] != visible.shape[-1]:
            return visible
        same = dict(key_value_segment_ids=given.query_segment_ids)
        return broadcast(dataclasses.replace(given, **same), visible)

    square = dataclasses.replace(SHAPE, query_length=64)
    target = Target("planted", honest(seen=seen), Adapter(lse="return_residual"))
    packed = Problem(square, mask="packed")
    rows = more.read(target, [packed, *packed.together(["packed"])])
    causes = {row["mask"]: row["findings"] for row in rows if "mask" in row}
    assert not causes["packed"]
    assert HIDDEN_PAIRS in [f["cause"] for f in causes["packed apart"]]


def test_lengths_of_keys_alone_are_read():
    """A kernel that decodes takes none of queries."""

    def decode(query, key, value, *, scale=None, key_value_seq_lengths=None):
        lengths = key_value_seq_lengths
        if lengths is not None:
            lengths = jnp.full_like(lengths, lengths[0])
        options = dict(scale=scale, key_value_seq_lengths=lengths)
        return jax.nn.dot_product_attention(query, key, value, **options)

    target = Target("planted", decode, Adapter(lse=None))
    lengths = Problem(SHAPE, mask="lengths")
    rows = more.read(target, [lengths, *lengths.together(["lengths"])])
    causes = {row["mask"]: row["findings"] for row in rows if "mask" in row}
    assert [f["cause"] for f in causes["key lengths"]] == [HIDDEN_PAIRS]
