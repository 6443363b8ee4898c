"""Parts of an audit: where they run, what is kept, and what more runs show."""

import concurrent.futures
import dataclasses
import itertools
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import emulator, reference
from attn_jax.audit import algorithms, attribution, more, problem, programs
from attn_jax.audit.alone import ALONE
from attn_jax.audit.audit import Audit
from attn_jax.audit.course import carry_out
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Runner
from attn_jax.audit.parts import Parts
from attn_jax.audit.plan import Group
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import Adapter, Target, resolve
from attn_jax.formats import BF16
from attn_jax.mask import Mask
from attn_jax.recipe import FLASH2
from attn_jax.store import Store
from tests.test_audit_problem import every_pair_that_is_seen

PROBLEM = Problem(Shape(2, 64, 64, 4, 2, 16))


def where(name="part"):
    """A part whose row says in which thread it is made."""
    yield {"name": name, "thread": threading.get_ident()}


def test_a_target_stays_in_the_callers_thread():
    """Where contexts such as `jax.enable_x64` are."""
    with Parts() as parts:
        (row,) = parts.here("part", where())
        (beside,) = parts.beside("beside", where()).result()
    assert row["thread"] == threading.get_ident() != beside["thread"]


def test_what_is_kept_is_not_made_again(tmp_path):
    told = []

    def run(make):
        store = Store(tmp_path / "parts.jsonl", {}, fresh=False)
        with Parts(store, lambda progress: told.append(progress.part)) as parts:
            parts.expect(3)
            beside = [parts.beside(f"beside {i}", make(str(i))) for i in range(2)]
            rows = [parts.here("here", make("here")), *(x.result() for x in beside)]
        store.close()
        return [row["name"] for (row,) in rows]

    def fails(name):
        raise AssertionError(name)
        yield

    assert run(where) == run(fails) == ["here", "0", "1"]
    assert sorted(told) == ["beside 0", "beside 1", "here"]


def test_a_part_that_fails_beside_fails_where_it_is_read():
    def fails():
        raise ValueError("no rows")
        yield

    with Parts() as parts:
        part = parts.beside("part", fails())
        with pytest.raises(ValueError, match="no rows"):
            part.result()


def test_exact_results_are_compiled_once_and_while_others_run(monkeypatch):
    compiled = []

    def lower_golden(*arguments, **options):
        program = reference.lower_golden(*arguments, **options)

        def compile():
            program.compile()
            compiled.append(options["absolute"])
            both.release()

        return SimpleNamespace(compile=compile)

    both = threading.Semaphore(0)
    monkeypatch.setattr(problem, "lower_golden", lower_golden)
    found = [Problem(Shape(1, 24, n, 2, 1, 8), mask=m, family=f) for n, m, f in SHARED]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with ALONE:
            threads = [pool.submit(x.yardstick, "out", x.format) for x in found]
            # One of each shape, whichever of these keeps the others waiting.
            assert both.acquire(timeout=50)
        yardsticks = [x.result() for x in threads]
    # For any mask.
    assert len(compiled) == 2 * len({keys for keys, *_ in SHARED})
    for x, yardstick in zip(found, yardsticks, strict=True):
        mask = Mask(dense=every_pair_that_is_seen(x))
        right = reference.golden(*x.inputs, mask=mask, scale=x.scale)
        assert np.array_equal(yardstick.golden, right.out)


SHARED = (40, "full", "normal"), (40, "causal", "uniform"), (48, "full", "normal")


def test_what_is_compiled_for_exact_results_is_what_they_run():
    """Under any mask, or a bias."""
    compiled = []

    def listener(event, seconds, **of):
        if "backend_compile" in event and "_golden_head" in of["fun_name"]:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    for mask in ("lengths", "packed", "window", "bias"):
        compiled.clear()
        x = Problem(Shape(2, 24, 32, 4, 2, 8), mask=mask)
        options = {"mask": x.rules, "scale": x.scale}
        shape = 2, 24, 32, 8, 8
        reference.lower_golden(shape, bias=x.has_bias, **options).compile()
        assert len(compiled) == 1
        reference.golden(*x.inputs, bias=x.bias, **options)
        assert len(compiled) == 1, mask


def test_what_is_compiled_side_by_side_is_what_runs():
    """Of parts that are merged, gradients through LSE, P, and keys that are hidden."""
    compiled, me = [], threading.get_ident()

    def listener(event, seconds, **of):
        if "backend_compile" in event:
            compiled.append((of["fun_name"], threading.get_ident() == me))

    jax.monitoring.register_event_duration_secs_listener(listener)
    target = resolve("reference")
    shape = Shape(2, 24, 24, 2, 1, 8)
    masks = [Problem(shape, mask=mask) for mask in ("full", "causal", "lengths")]
    looks = (
        (more.merge(target, masks[0], gradients=True), "_merge", 2),
        (more.through_lse(target, masks), "_gradients", 2),
        (more.read(target, masks), "results", 3),
        # Four masks and half a tile; without a mask it was one of the parts.
        (more.probe(target, masks[0], gradients=True), "results", 5),
    )
    for look, name, number in looks:
        compiled.clear()
        rows = list(look)
        assert not any(row["findings"] for row in rows)
        # The first of those through LSE has to be right before others are begun.
        alone = compiled.count((f"jit({name})", True))
        assert alone == (name == "_gradients"), name
        assert compiled.count((f"jit({name})", False)) == number, name


def _flash2(query, key, value, *, scale, mask=None):
    return emulator.attention(query, key, value, recipe=FLASH2, scale=scale)[0]


def _racing(runs):
    """dK and dV, of one head, twice as large in some rows in every other run."""

    def factor() -> np.ndarray:
        rows = np.ones((64, 1), np.float32)
        if next(runs) % 2:
            rows[40:44] = 2
        return rows

    @jax.custom_vjp
    def attend(query, key, value):
        return _flash2(query, key, value, scale=0.25)

    def backward(inputs, dout):
        dquery, dkey, dvalue = jax.vjp(lambda *x: _flash2(*x, scale=0.25), *inputs)[1](
            dout
        )
        wrong = jax.pure_callback(factor, jax.ShapeDtypeStruct((64, 1), jnp.float32))
        wrong = wrong.astype(dkey.dtype)
        return dquery, *(x.at[:, :, 1].multiply(wrong) for x in (dkey, dvalue))

    attend.defvjp(lambda *inputs: (attend(*inputs), inputs), backward)
    return Target("racing", attend, Adapter(scale="none"))


def test_more_runs_tell_a_race_and_its_rows():
    tensors = ("out", "dquery", "dkey")
    rows = {
        row["tensor"]: row
        for row in more.again(_racing(itertools.count(1)), PROBLEM, tensors)
    }
    assert rows.keys() == set(tensors)
    assert not (rows["out"]["rows"] or rows["dquery"]["rows"])
    assert "positions 40 to 43 of heads 1" in rows["dkey"]["rows"]
    (finding,) = (finding for row in rows.values() for finding in row["findings"])
    assert (finding["kind"], finding["cause"]) == ("not reproducible", "re-run")
    assert finding["tensors"] == ("dkey", "dvalue")
    assert finding["says"].startswith("dK, dV have other bits in 3 of 5 more runs")


def test_a_race_is_said_once():
    """Not for each result, nor again where a wrong result is run more often."""
    group = Group(PROBLEM.shape, "full", ("normal",))
    looks = ("P", "again")
    with Parts() as parts:
        candidates = attribution.candidates(BF16)
        plain = {name: candidates[name] for name in algorithms.PLAIN}
        target = _racing(itertools.count(1))
        wanted = Audit(target, (group,), "bfloat16", plain, True, looks)
        found = carry_out(wanted, parts)
    said = [f.tensors for f in found.findings if f.kind == "not reproducible"]
    assert said == [("dkey", "dvalue")]
    assert "worse than its algorithm allows" in {f.kind for f in found.findings}


def test_what_differs_from_run_to_run_is_not_blamed_on_the_mode():
    findings = itertools.chain.from_iterable(
        row["findings"]
        for row in more.other_mode(_racing(itertools.count()), PROBLEM, gradients=True)
    )
    assert not list(findings)
    follows = dataclasses.replace(
        _racing(itertools.count()),
        function=lambda q, k, v: (
            _flash2(q, k, v, scale=0.25)
            * (1 + jnp.asarray(0.02).astype(q.dtype) * (jnp.asarray(1.0).itemsize == 8))
        ),
    )
    (row,) = more.other_mode(follows, PROBLEM, gradients=False)
    assert {f["cause"] for f in row["findings"]} == {"x64 mode"}


def test_what_fails_in_the_other_mode_under_another_mask_is_said():
    """Only the first mask was tried there."""

    def attend(query, key, value, is_causal=False):
        if is_causal:
            # The carry would follow the mode.
            step, zero = jnp.arange(1)[0], jnp.int32(0)
            n = jax.lax.fori_loop(0, 3, lambda i, n: n + step, zero)
            query = query + n.astype(query.dtype)
        return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)

    target = Target("planted", attend, Adapter(lse=None))
    # The problem's own is looked at as a whole; it has no argument for the last one.
    masks = ["full", "causal", "window"]
    (row,) = more.other_mode(target, PROBLEM, masks, gradients=True)
    (found,) = row["findings"]
    assert (found["kind"], found["cause"]) == ("fails", "x64 mode")
    assert found["says"].startswith("under causal it fails with jax_enable_x64 on")


def test_a_program_is_compiled_once_for_all_who_want_it():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **more: (
            compiled.append(event) if "backend_compile" in event else None
        )
    )
    target = Target("flash2", _flash2)
    jnp.asarray(PROBLEM.inputs.query)
    runner = Runner(target.on(PROBLEM))
    programs.compile_each([lambda: runner.lowered(PROBLEM)])
    other = runner(PROBLEM)
    before = len(compiled)
    again = Runner(target.on(PROBLEM))(dataclasses.replace(PROBLEM, family="wide"))
    assert before and len(compiled) == before
    assert other.results.keys() == again.results.keys() >= {"out", "dquery"}
    found = programs.run_forward(target.on(PROBLEM), *PROBLEM.inputs[:3])
    assert np.array_equal(found["out"], other.results["out"])


def test_what_cannot_be_traced_fails_when_it_is_run():
    def fails(query, key, value, *, scale):
        raise RuntimeError("no kernel image")

    runner = Runner(Target("fails", fails).on(PROBLEM))
    programs.compile_each([lambda: runner.lowered(PROBLEM)])
    outcome = runner(PROBLEM)
    assert (outcome.status, outcome.reason) == (
        "failed",
        "RuntimeError: no kernel image",
    )


@pytest.mark.parametrize("says", ["INTERNAL: out of memory", "RESOURCE_EXHAUSTED: x"])
def test_no_memory_for_a_gradient_is_no_fault(says):
    @jax.custom_jvp
    def attend(query):
        return query

    @attend.defjvp
    def raises(primals, tangents):
        raise jax.errors.JaxRuntimeError(says)

    def function(query, key, value, *, scale):
        return attend(_flash2(query, key, value, scale=scale))

    outcome = Runner(Target("too large", function).on(PROBLEM))(PROBLEM)
    assert outcome.status == "out of memory" and not outcome.no_gradients


def test_what_a_target_will_not_be_run_for_hides_nothing_else():
    def no_lengths(query, key, value, *, scale, key_value_seq_lengths=None):
        if key_value_seq_lengths is not None:
            raise ValueError("no lengths today")
        return _flash2(query, key, value, scale=scale)

    rows = list(more.vary(Target("no lengths", no_lengths), PROBLEM))
    assert {row.get("name") for row in rows} >= {"re-run", "head position"}
    (finding,) = (f for row in rows for f in row["findings"])
    assert finding["kind"] == "not taken"
    assert finding["says"] == (
        "invariance under padded keys not run: ValueError: no lengths today"
    )


def test_probes_of_the_forward_pass_run_without_a_backward_pass():
    def forward_alone(query, key, value, *, scale):
        out = jax.pure_callback(
            lambda *qkv: np.asarray(_flash2(*qkv, scale=scale)),
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            *(query, key, value),
        )
        return out

    rows = list(more.probe(Target("forward alone", forward_alone), PROBLEM))
    passed = {row["name"]: row["passed"] for row in rows if "name" in row}
    assert passed["V = 1"] and passed["counted keys"]
    (finding,) = (f for row in rows for f in row["findings"])
    assert finding["kind"] == "not taken" and "ones column of K" in finding["says"]
