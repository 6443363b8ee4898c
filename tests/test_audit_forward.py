"""An audit of the forward pass alone looks at all that needs no gradient."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.audit import invariance, more, probes
from attn_jax.audit.inputs import Shape
from attn_jax.audit.merge import merge_audit
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import Adapter, Target
from tests.audit_targets import attend
from tests.planted import honest

SHAPE = Shape(2, 64, 128, 2, 2, 32)
PROBLEM = Problem(SHAPE)
TARGET = Target("honest", honest(), Adapter(lse="return_residual"))
GRADIENTS = {"dquery", "dkey", "dvalue"}


@jax.custom_vjp
def _undifferentiable(x):
    return x


def _raises(*_):
    raise AssertionError("nobody asked for gradients")


_undifferentiable.defvjp(lambda x: (x, None), _raises)


def _forward_alone(*arrays, return_residual=False, **rules):
    out, lse = honest()(*arrays, return_residual=True, **rules)
    out = _undifferentiable(out)
    return (out, lse) if return_residual else out


def test_what_needs_no_gradient_is_looked_at():
    target = Target("forward", _forward_alone, Adapter(lse="return_residual"))
    names = {}
    for part in (more.probe, more.vary, more.merge):
        rows = list(part(target, PROBLEM, gradients=False))
        assert not [x for row in rows for x in row["findings"]], rows
        names[part] = {row["name"] for row in rows if "name" in row}
        names[part] |= {row["tensor"] for row in rows if "parts" in row}
        tensors = {row["tensor"] for row in rows if "tensor" in row}
        assert not tensors & GRADIENTS
    assert names[more.probe] >= {"V = 1", "counted keys", "K + c: out", "K + c: lse"}
    assert names[more.probe] >= {"permuted keys: out", "half a tile at extremes"}
    assert names[more.probe] >= {"finite at extremes", "lse at +1000"}
    assert names[more.vary] >= {"re-run", "batch size", "padded keys", "head position"}
    assert names[more.vary] >= {"layers", "mapping", "padded queries"}
    assert names[more.merge] == {"out", "lse"}


def test_what_differs_now_and_then_is_found():
    """In every seventh call: of a forward pass there is time for nine."""
    calls = itertools.count(1)

    def bump(x):
        x = np.array(x)
        if next(calls) % 7 == 0:
            x[0, 0] *= np.asarray(1.01, x.dtype)
        return x

    def function(*arrays, return_residual=False, **rules):
        out, lse = honest()(*arrays, return_residual=True, **rules)
        like = jax.ShapeDtypeStruct(out.shape, out.dtype)
        out = jax.pure_callback(bump, like, out, vmap_method="sequential")
        return (out, lse) if return_residual else out

    target = Target("rare", function, Adapter(lse="return_residual"))
    rows = list(more.vary(target, PROBLEM, gradients=False))
    causes = {x["cause"] for row in rows for x in row["findings"]}
    assert "re-run" in causes


def test_faults_of_the_forward_pass_are_found_without_gradients():
    found = probes.probe(attend(PROBLEM.rules, "LSE in BF16"), PROBLEM, gradients=False)
    assert {f.finding.cause for f in found if f.finding} >= {"LSE in BF16"}
    records = invariance.invariances(
        attend(PROBLEM.rules, "batch position"), PROBLEM, gradients=False
    )
    assert {r.name for r in records if r.finding} & {"batch position", "batch size"}
    merged = merge_audit(
        lambda mask: attend(mask, "LSE in BF16", jnp.float32),
        *(PROBLEM,),
        parts=(2, 8),
        gradients=False,
    )
    assert {f.cause for f in merged.findings} == {"LSE in BF16"}
    assert merged.errors.keys() == {"out", "lse"} and merged.lse_gradient == {}
