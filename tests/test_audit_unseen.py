"""Mistakes that an audit once did not see, or took for others."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.audit import more, probes, verdict
from attn_jax.audit.finding import HIDDEN_KEYS, HIDDEN_PAIRS, PAST_THE_LAST, Finding
from attn_jax.audit.hidden_keys import HIDDEN_BY, hidden_keys
from attn_jax.audit.inputs import Shape
from attn_jax.audit.invariance import invariances
from attn_jax.audit.judge import WORSE
from attn_jax.audit.measure import measured
from attn_jax.audit.plan import plan
from attn_jax.audit.problem import MASKS, Problem
from attn_jax.audit.target import Adapter, Target
from attn_jax.audit.verdict import POOR_UNITS
from attn_jax.audit.wiring import recognise
from attn_jax.formats import BF16
from tests import audit_targets, planted
from tests.planted_masks import without
from tests.test_audit_verdict import cell

WHOLE = Problem(Shape(1, 128, 128, 2, 1, 32))


def with_padded_maximum(function, query, key, value, *, return_residual=False, **rules):
    """The row's largest logit is at least 0 where keys do not fill the last tile, as
    if it were of zeros there; P comes after it, in FP32."""
    out, lse = function(query, key, value, return_residual=True, **rules)
    if key.shape[1] % 128:
        # exp(x - 0) is nothing where all x are far below 0.
        gone = lse < -80
        out = jnp.where(gone[..., None], 0, out).astype(out.dtype)
        lse = jnp.where(gone, -80.0, lse)
    return (out, lse) if return_residual else out


def test_a_largest_logit_of_what_lies_past_the_last_key_is_found():
    """All is finite, and every length that a tile divides is right."""
    target = planted.wrapped(with_padded_maximum)

    def attend_of(problem):
        return planted.attend(target, problem)

    found = probes.probe(attend_of(WHOLE), WHOLE, attend_of=attend_of, gradients=False)
    blamed = {(r.name, r.finding.cause) for r in found if r.finding}
    names = {
        "320 keys, out at -125",
        "320 keys, out at -1000",
        "320 keys, lse at -1000",
    }
    assert {(name, PAST_THE_LAST) for name in names} <= blamed
    assert {cause for name, cause in blamed if name.startswith("320")} == {
        PAST_THE_LAST
    }


def read(function, problems) -> list[str]:
    target = Target("planted", function, Adapter(lse="return_residual"))
    return [f["cause"] for row in more.read(target, problems) for f in row["findings"]]


def test_p_of_long_sequences_is_read_at_their_beginning():
    """It was left out, without a word."""

    problem = Problem(Shape(1, 640, 640, 1, 1, 32), mask="causal+window")
    assert read(planted.honest(), [problem]) == []
    assert read(planted.honest(seen=without(is_causal=False)), [problem]) == [
        HIDDEN_PAIRS
    ]


def test_query_lengths_alone_are_looked_at():
    def ignored(function, *arrays, query_seq_lengths=None, **rules):
        if rules.get("key_value_seq_lengths") is not None:
            rules["query_seq_lengths"] = query_seq_lengths
        return function(*arrays, **rules)

    problem = Problem(Shape(2, 48, 64, 2, 2, 32), mask="query lengths")
    assert read(planted.honest(), [problem]) == []
    assert read(planted.wrapped(ignored), [problem])


def test_documents_of_the_first_entry_are_told_from_those_of_each():
    def first(function, *arrays, **rules):
        for name in ("query_segment_ids", "key_value_segment_ids"):
            if rules.get(name) is not None:
                ids = rules[name]
                rules[name] = jnp.broadcast_to(ids[:1], ids.shape)
        return function(*arrays, **rules)

    problem = Problem(planted.SQUARE, mask="packed")
    ids = problem.rules.query_segment_ids
    assert (np.diff(ids, axis=1) >= 0).all() and (ids[0] != ids[1]).any()
    (found,) = recognise(planted.results(planted.wrapped(first), problem), problem)
    assert found.cause == "lengths of another batch entry"


def test_what_a_large_negative_number_hides_is_looked_at_where_logits_are_below():
    first = {group.mask: group.families for group in plan()[: len(MASKS)]}
    assert "lse-130" in first["causal"]

    def by_minus_100(query, key, value, *, is_causal, **rules):
        logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=float)
        logits *= query.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones(logits.shape[2:], bool))
        p = jax.nn.softmax(jnp.where(seen, logits, -100.0), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", p.astype(value.dtype), value)

    shape = Shape(1, 64, 64, 1, 1, 32)
    for family, is_off in (("normal", False), ("lse-130", True)):
        problem = Problem(shape, family=family, mask="causal")
        query, key, value, _ = problem.inputs
        off = by_minus_100(query, key, value, is_causal=True) - problem.exact().out
        assert (np.abs(np.asarray(off, float)).max() > 0.5) == is_off


def test_a_scale_in_16_bits_is_seen_at_a_head_dim_of_the_plan(monkeypatch):
    """All head dims of a CPU's had a scale that is a power of two."""

    def in_bfloat16(function, query, key, value, *, scale=None, **rules):
        scale = jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
        return function(query * scale, key, value, scale=1.0, **rules)

    exact = planted.honest(narrow=planted.same, delta_from="unrounded out")

    def units(function, head_dim: int) -> float:
        problem = Problem(Shape(1, 64, 96, 2, 1, head_dim))
        found = measured(problem, planted.results(function, problem))
        return found["dquery"].errors.units

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    seen = {shape.head_dim for shape in {group.shape for group in plan()}}
    rounded = planted.wrapped(in_bfloat16, exact)
    most = verdict.allowance(BF16)
    assert units(rounded, 64) < most < POOR_UNITS < max(units(rounded, H) for H in seen)
    assert max(units(exact, H) for H in seen) < most


def test_what_differs_from_run_to_run_is_no_dependence():
    """A race is in every comparison, and was taken for three mistakes beside."""
    calls = itertools.count()

    def racing(dq):
        def host(x):
            x = np.array(x)
            if next(calls) % 3 == 1:
                x[:, -8:] *= 1.25
            return x

        return jax.pure_callback(
            host, jax.ShapeDtypeStruct(dq.shape, dq.dtype), dq, vmap_method="sequential"
        )

    @jax.custom_vjp
    def same(query):
        return query

    same.defvjp(lambda query: (query, None), lambda _, dq: (racing(dq),))

    def attend(query, key, value):
        return planted.attend(planted.honest(), WHOLE)(same(query), key, value)

    records = invariances(attend, WHOLE, with_scale=lambda scale: attend)
    of_query = [r for r in records if r.tensor == "dquery"]
    assert {r.name for r in of_query if not r.bit_equal} > {"re-run"}
    blamed = {(r.name, r.tensor) for r in records if r.finding}
    # The scale is not followed at all here, which is seen beside.
    assert ("re-run", "dquery") in blamed
    assert not {name for name, tensor in blamed if tensor == "dquery"} - {
        "re-run",
        "scale, half of it for twice the query",
    }


def test_what_is_no_number_is_found_though_re_runs_are_the_same():
    """NaN exceeds no bound, and is within none."""

    def attend_of(mask):
        def attend(query, key, value):
            out, lse = planted.attend(planted.honest(), WHOLE)(query, key, value)
            return out * jnp.nan if mask.key_value_lengths is not None else out, lse

        return attend

    records = invariances(
        attend_of(WHOLE.rules), WHOLE, attend_of=attend_of, gradients=False
    )
    found = {
        r.tensor: r.finding.kind
        for r in records
        if r.name == "padded keys" and r.finding is not None
    }
    assert found["out"] == "not finite"


def test_an_lse_of_padded_keys_is_said_to_depend_on_them():
    def all_keys(function, *arrays, key_value_seq_lengths=None, **rules):
        return function(*arrays, **rules)

    target = planted.wrapped(all_keys)
    # As many keys as are added: each was there twice, and out did not show it.
    problem = Problem(Shape(1, 64, 64, 1, 1, 32))

    def attend_of(mask):
        rules = {"key_value_seq_lengths": mask.key_value_lengths}
        return functools.partial(_with_lse, target, **rules)

    records = invariances(attend_of(problem.rules), problem, attend_of=attend_of)
    blamed = {
        r.tensor: r.finding
        for r in records
        if r.name == "padded keys" and r.finding is not None
    }
    assert {"out", "lse"} <= blamed.keys()
    assert {f.cause for f in blamed.values()} == {"result depends on the padded keys"}


def _with_lse(function, query, key, value, **rules):
    out, lse = function(query, key, value, return_residual=True, **rules)
    return out, lse.swapaxes(1, 2)


def with_maximum_of_all(query, key, value, *, mask=True, scale):
    """The row's largest logit is taken before the mask is applied."""
    x = scale * jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=float)
    p = jnp.where(mask, jnp.exp(x - x.max(-1, keepdims=True)), 0.0)
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bnts,bsnh->btnh", p.astype(value.dtype), value)


def test_large_keys_that_are_hidden_are_looked_at():
    """Rows became zeros where a hidden logit is above theirs by a hundred."""
    shape = Shape(2, 64, 96, 2, 2, 32)

    def rows(function):
        target = Target("planted", function, Adapter(lse=None))
        return list(more.probe(target, Problem(shape), gradients=False))

    found = rows(with_maximum_of_all)
    names = {f"large hidden keys, {mask}: out" for mask in HIDDEN_BY}
    blamed = {f["cause"]: f["where"] for row in found for f in row["findings"]}
    assert {*blamed} == {HIDDEN_KEYS}
    assert {row["name"] for row in found if not row.get("passed", True)} == names
    passed = {
        row.get("name"): row.get("passed") for row in rows(planted.HONEST["jax.nn"])
    }
    assert all(passed[name] for name in names)

    # Its own problems say that a target has no such mask.
    def unmasked(query, key, value, *, scale):
        return planted.HONEST["exp2"](query, key, value, scale=scale)

    assert not [f for row in rows(unmasked) for f in row["findings"]]


def test_a_centre_of_hidden_keys_is_not_accused():
    """That of a block of queries is of all keys that one of them sees."""
    problem = Problem(Shape(2, 64, 96, 2, 2, 32))
    for mask in HIDDEN_BY:
        found = hidden_keys(
            lambda problem: audit_targets.honest("attn_jax", problem.rules),
            problem,
            mask=mask,
        )
        assert len(found) == 4 and not [x for x in found if x.finding], mask


def test_a_single_query_has_no_hidden_keys():
    """No row was looked at, and the mean of none is NaN: not finite, it was said."""
    problem = Problem(Shape(1, 1, 64, 1, 1, 16))
    target = Target("planted", planted.HONEST["jax.nn"], Adapter(lse=None))
    rows = list(more.probe(target, problem, masks=["causal"], gradients=False))
    assert not [f for row in rows for f in row["findings"]]
    assert not [row for row in rows if "hidden" in row.get("name", "")]
    # Nor where nobody asks for such a mask.
    problem = Problem(Shape(1, 32, 64, 1, 1, 16))
    rows = list(more.probe(target, problem, masks=["full"], gradients=False))
    assert not [row for row in rows if "hidden" in row.get("name", "")]


def test_a_mask_that_is_ignored_explains_what_it_hides():
    cells = [cell(), *(cell(mask=x) for x in ("causal", "window"))]
    where = {c.problem.mask: str(c.problem) for c in cells[1:]}
    large = Finding(
        WORSE, HIDDEN_KEYS, "", ("out",), ("large hidden keys, causal: out",)
    )
    for mask, place in where.items():
        known = Finding("wrong wiring", "ignored", "", ("out",), (place,))
        left = verdict.together([known], [large], cells)
        assert len(left) == (1 if mask == "causal" else 2)
