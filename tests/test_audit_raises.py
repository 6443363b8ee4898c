"""What a target raises outside of the problems that are measured.

A refusal, or a fault that was once called one."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from attn_jax.audit import audit_attention, more, verdict
from attn_jax.audit.finding import Finding
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Runner
from attn_jax.audit.problem import MASKS, Problem
from attn_jax.audit.raised import WrongResultError, in_one_line
from attn_jax.audit.refusal import is_excused, is_refusal
from attn_jax.audit.target import Adapter, Target
from tests.planted import HONEST, honest, wrapped
from tests.test_audit_verdict import cell

PROBLEM = Problem(Shape(2, 64, 64, 4, 2, 16))


def raising(error: Exception, when):
    def of(function, query, *arrays, **rules):
        if when(query):
            raise error
        return function(query, *arrays, **rules)

    return wrapped(of)


def odd_batches(error: Exception):
    return raising(error, lambda query: len(query) % 2)


def said(rows) -> dict[str, str]:
    """By what is said, the kind."""
    return {f["says"]: f["kind"] for row in rows for f in row["findings"]}


def target(function, **adapter) -> Target:
    return Target("planted", function, Adapter(**adapter))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IndexError("no entry 1"), "fails"),
        pytest.param(
            RuntimeError("no kernel image"), "fails", marks=pytest.mark.thorough
        ),
        (TypeError("unsupported operand"), "fails"),
        (ValueError("even batches only"), "not taken"),
        pytest.param(
            *(NotImplementedError("even batches only"), "not taken"),
            marks=pytest.mark.thorough,
        ),
        (TypeError("f() got an unexpected keyword argument 'x'"), "not taken"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x"), "not taken"),
    ],
)
def test_what_is_no_refusal_at_another_batch_size_is_a_fault(error, kind):
    rows = more.vary(target(odd_batches(error)), PROBLEM, gradients=False)
    word = "failed" if kind == "fails" else "not run"
    name = type(error).__name__
    assert said(rows) == {f"invariance under batch size {word}: {name}: {error}": kind}


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x"), ["not taken"]),
        (IndexError("no entry 1"), ["fails"]),
        # The mask's own problems say that it is not taken.
        (ValueError("no causal mask"), []),
        (TypeError("f() got an unexpected keyword argument 'is_causal'"), []),
    ],
)
def test_what_is_no_refusal_of_a_mask_is_said_of_its_probe(error, kinds):
    """That memory did not hold it was not."""

    def of(function, *arrays, is_causal=False, **rules):
        if is_causal:
            raise error
        return function(*arrays, **rules)

    rows = more.probe(
        target(wrapped(of), lse=None), PROBLEM, masks=["causal"], gradients=False
    )
    found = said(rows)
    assert [*found.values()] == kinds
    assert all("large hidden keys, causal" in says for says in found)


def test_no_tile_for_a_length_is_a_fault():
    def of(function, query, *arrays, **rules):
        tile = 128 * (query.shape[1] != 320)
        return function(
            query[:, : query.shape[1] // tile * 0 or None], *arrays, **rules
        )

    rows = more.probe(target(wrapped(of)), PROBLEM, gradients=False)
    (says, kind), *more_said = said(rows).items()
    assert kind == "fails" and not more_said
    assert says.startswith("probes half a tile at extremes failed: ZeroDivisionError")


def test_parts_that_cannot_be_called_are_a_fault():
    function = raising(KeyError(4), lambda query: len(query) > 2)
    of = target(function, lse="return_residual")
    rows = more.guarded("merging", lambda: more.merge(of, PROBLEM))
    assert said(rows) == {"merging failed: KeyError: 4": "fails"}
    of = target(raising(OSError("no file"), lambda query: True), lse="return_residual")
    for look in (more.read, more.through_lse):
        ((says, kind),) = said(look(of, [PROBLEM])).items()
        assert kind == "fails" and says.endswith("under full failed: OSError: no file")


def of_the_callers_trace(query, key, value, *, scale):
    """A function of a `jax.custom_vjp` that holds an array of the trace around it."""
    shift = 0 * jnp.arange(query.shape[1]).sum()

    @jax.custom_vjp
    def same(x):
        return x + shift.astype(x.dtype)

    same.defvjp(lambda x: (same(x), None), lambda _, g: (g,))
    return same(honest()(query, key, value, scale=scale))


def test_an_array_of_another_trace_in_a_loop_over_layers_is_no_fault():
    rows = said(more.vary(target(of_the_callers_trace), PROBLEM))
    assert {*rows.values()} == {"not taken"}
    assert any("layers not run" in says and "racer" in says for says in rows)
    tracers = [
        jax.errors.UnexpectedTracerError("leaked"),
        TypeError("No constant handler for type: <class 'DynamicJaxprTracer'>"),
    ]
    for error in tracers:
        assert is_excused("layers", error) and is_excused("mapping", error)
        assert not is_excused("batch size", error) and not is_refusal(error)
    assert "pass it as an argument" in in_one_line(tracers[1])
    assert not is_excused("layers", IndexError())
    assert not is_refusal(WrongResultError("3 results"))


def plain(query, key, value, *, scale=None, is_causal=False):
    return honest()(query, key, value, scale=scale, is_causal=is_causal)


def passes_on(*arrays, **rules):
    return plain(*arrays, **rules)


def without_causal(*arrays, **rules):
    def bare(query, key, value, *, scale=None):
        return plain(query, key, value, scale=scale)

    return bare(*arrays, **rules)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        pytest.param(passes_on, {"full", "causal"}, marks=pytest.mark.ci),
        (without_causal, {"full"}),
    ],
)
def test_what_passes_on_whatever_it_is_given_refuses_by_a_type_error(function, taken):
    """The function within says which argument it has not. Once each is enough, and no
    mask is said to be passed by such an argument."""
    report = audit_attention(
        function,
        shapes=[(1, 32, 32, 2, 2, 16)],
        families=["normal"],
        gradients=False,
        against=[],
        adapter=Adapter(lse=None),
    )
    assert report.verdict == "trustworthy", report.findings
    status = {cell.mask: cell.status for cell in report.cells}
    assert status == {x: "measured" if x in taken else "not taken" for x in MASKS}
    assert set(report.settings["mask_arguments"]) == taken - {"full"}
    said = [finding.says for finding in report.findings]
    for why in {row.reason for row in report.cells} - {""}:
        assert len([says for says in said if says.endswith(why)]) == 1, why


def test_without_a_mask_a_type_error_is_a_fault():
    def asks_for_more(query, key, value):
        return plain(query, key, value, factor=1)

    for mask, status in (("full", "failed"), ("bias", "not taken")):
        problem = Problem(PROBLEM.shape, mask=mask)
        of = target(lambda *arrays, **rules: asks_for_more(*arrays), lse=None)
        assert Runner(of.on(problem))(problem).status == status


def test_an_error_of_its_own_under_a_mask_is_a_fault():
    problem = Problem(PROBLEM.shape, mask="window")
    of = target(raising(TypeError("unsupported operand"), lambda query: True), lse=None)
    assert Runner(of.on(problem))(problem).status == "failed"


@pytest.mark.parametrize("name", ["jax.nn", "keys repeated for every query head"])
def test_honest_functions_raise_nothing(name):
    of = target(HONEST[name], lse=None)
    assert not said(more.vary(of, PROBLEM, gradients=False))


def test_what_a_problem_has_said_is_not_said_of_its_parts():
    known = Finding(
        "fails", "failed", "failed on 1 of 2 problems, such as x: E: no", ()
    )
    same = Finding("fails", "P under x failed", "P under x failed: E: no", (), ("P",))
    (found,) = verdict.together([known], [same], [cell()])
    assert found.where == ("P",)
    other = Finding("fails", "P under x failed", "P under x failed: E: oh no", (), ())
    assert verdict.together([known], [other], [cell()]) == [known, other]
    says = "not taken on 1 of 2 problems, such as x: E: no"
    known = Finding("not taken", "not taken", says)
    same = Finding("not taken", "LSE under x not run", "LSE under x not run: E: no")
    assert verdict.together([known], [same], [cell()]) == [known]
    other = dataclasses.replace(same, says="LSE under x not run: E: oh no")
    assert verdict.together([known], [other], [cell()]) == [known, other]


def test_an_audit_of_what_fails_at_odd_batches_is_not_trustworthy():
    report = audit_attention(
        odd_batches(IndexError("no entry 1")),
        shapes=[(2, 32, 32, 2, 2, 16)],
        families=["normal"],
        masks=["full"],
        gradients=False,
        against=[],
    )
    assert report.verdict == "fails" and report.exit_code == 4
    assert "IndexError: no entry 1" in report.findings[0].says


@pytest.mark.ci
def test_a_value_error_is_a_fault_everywhere_or_nowhere():
    """It was a fault, not taken and a part that was not run in one report, and nobody
    said how to refuse what is asked for."""

    def found(error: type[Exception]):
        def of(function, query, key, *arrays, **rules):
            if query.shape[1] % 64 or key.shape[1] % 64:
                raise error(f"{query.shape[1]}, {key.shape[1]}: no multiple of 64")
            return function(query, key, *arrays, **rules)

        report = audit_attention(
            wrapped(of),
            shapes=[(2, 64, 64, 2, 2, 16), (1, 40, 40, 2, 2, 16)],
            families=["normal"],
            masks=["full", "causal", "lengths"],
            gradients=False,
            against=[],
        )
        says = [f for f in report.findings if "no multiple of 64" in f.says]
        status = {cell.status for cell in report.cells if cell.query_length == 40}
        return report, says, status

    report, (finding,), status = found(ValueError)
    assert report.verdict == finding.kind == "fails" and status == {"failed"}
    assert "(if that is a refusal, raise NotImplementedError): Value" in finding.says
    # A part that was not run for it.
    assert "merging" in finding.where
    report, (finding,), status = found(NotImplementedError)
    assert report.verdict == "trustworthy" and status == {"not taken"}
    assert "raise NotImplementedError" not in finding.says


def test_what_a_callback_raises_is_said_and_not_logged(caplog):
    """JAX logs a traceback each time, all of which came before the one line."""

    def calls_back(query, key, value, *, scale=None, is_causal=False):
        def broken(x):
            logging.getLogger("jax").warning("a warning of another")
            raise OSError("no such file")

        return jax.pure_callback(broken, query, query)

    report = audit_attention(
        calls_back,
        shapes=[(1, 32, 32, 2, 2, 16)],
        families=["normal"],
        masks=["full"],
        gradients=False,
        against=[],
    )
    assert "no such file" in report.cells[0].reason
    assert {record.message for record in caplog.records} == {"a warning of another"}
    # Whoever calls it by himself has the traceback.
    caplog.clear()
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(calls_back(*[jnp.ones((1, 2, 1, 2))] * 3))
    assert any(record.exc_info for record in caplog.records)
