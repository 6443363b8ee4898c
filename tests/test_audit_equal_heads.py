"""Functions that take as many heads of keys as of queries alone are audited on such."""

import jax
import jax.numpy as jnp
import pytest

from attn_jax.audit import audit_attention, plan
from attn_jax.audit.inputs import Shape
from attn_jax.audit.summary import verdict

SHAPES = Shape(1, 64, 64, 4, 2, 16), Shape(1, 48, 80, 4, 1, 16)
MASKS = ["full", "causal"]


def ungrouped(largest, refused: type[Exception] = NotImplementedError):
    """Attention that raises for grouped heads; `largest` comes off the logits."""

    def attend(query, key, value, *, scale, is_causal=False):
        if query.shape != (*query.shape[:2], *key.shape[2:]):
            raise refused("as many heads of keys as of queries, please")
        f32 = jnp.float32
        s = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=f32)
        s = s * scale
        if is_causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        p = jnp.exp(s - largest(s))
        p = (p / p.sum(-1, keepdims=True)).astype(value.dtype)
        return jnp.einsum("bnts,bsnh->btnh", p, value)

    return attend


def stable(s):
    return s.max(-1, keepdims=True)


@pytest.fixture
def short(monkeypatch):
    """The plan, at toy size."""
    monkeypatch.setattr(plan, "_ON_A_CPU", SHAPES)


@pytest.mark.parametrize("refused", [NotImplementedError, ValueError])
def test_problems_have_equal_heads_and_one_says_that_others_are_refused(short, refused):
    report = audit_attention(
        ungrouped(stable, refused), masks=MASKS, families=["normal"], gradients=False
    )
    *cells, last = report.cells
    assert [c.sizes for c in cells] == [
        (1, 64, 64, 4, 4, 16),
        (1, 64, 64, 4, 4, 16),
        (1, 48, 80, 4, 4, 16),
        (1, 48, 80, 4, 4, 16),
    ]
    assert {c.status for c in cells} == {"measured"}
    assert last.sizes == (1, 64, 64, 4, 2, 16)
    taken = refused is NotImplementedError
    assert last.status == ("not taken" if taken else "failed")
    assert "as many heads of keys" in last.reason
    assert report.verdict == ("trustworthy" if taken else "fails")
    assert len(report.probes) > 5 and len(report.invariances) > 5


def test_exponents_without_their_maximum_are_found_all_the_same(short):
    report = audit_attention(ungrouped(lambda s: 0.0), masks=["full"], gradients=False)
    assert report.exit_code == 4
    said = [f.says for f in report.findings if f.kind == "not finite"]
    assert any("lse-130" in says for says in said)


def test_who_takes_grouped_heads_is_given_them(short):
    def attend(query, key, value, *, scale, is_causal=False):
        return jax.nn.dot_product_attention(
            query, key, value, scale=scale, is_causal=is_causal
        )

    report = audit_attention(
        attend, masks=["full"], families=["normal"], gradients=False
    )
    assert [c.sizes[3:5] for c in report.cells] == [(4, 2), (4, 1)]


def test_little_more_than_nothing_measured_is_no_success():
    """Probes and changes are of the first shape alone."""
    report = audit_attention(
        ungrouped(stable),
        shapes=[SHAPES[0], (1, 64, 64, 2, 2, 16)],
        masks=["full"],
        families=["normal"],
        gradients=False,
    )
    assert [c.status for c in report.cells] == ["not taken", "measured"]
    assert report.exit_code == 4 and report.verdict == "not taken"
    assert "nothing was measured of the first shape, (1, 64, 64, 4, 2" in verdict(
        report
    )
