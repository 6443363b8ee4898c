"""Tuning of the fused backward kernel: what is checked, timed and put in the table."""

import contextlib

import pytest

from attn_jax.kernels import checks, ring_order, tuning
from attn_jax.kernels.accept import parts
from attn_jax.kernels.attention import backward_of
from attn_jax.kernels.checks import Check
from attn_jax.kernels.hopper_fused_work import QUERIES, Shapes
from attn_jax.kernels.tilings import Plan
from attn_jax.kernels.tune import trial, winners
from attn_jax.kernels.tune.candidates import KERNELS, candidates, groups, head_dims
from attn_jax.kernels.tune.search import SECONDS_FOR_A_CANDIDATE, Search
from attn_jax.kernels.tune.trial import Candidate
from attn_jax.kernels.tune.winners import new_table
from attn_jax.kernels.tuning import Group
from attn_jax.store import Store
from tests.tune_fakes import FakeWorker, measured

CAUSAL = Group("hopper", "backward_fused", 64, 64, is_causal=True)
FULL = CAUSAL._replace(is_causal=False)


def _ring(check: Check, plan: Plan) -> ring_order.Ring:
    """As the kernel makes it."""
    shapes = Shapes(
        *(check.batch, check.queries, check.keys, checks.N, checks.K, check.head_dim)
    )
    is_causal = check.feature == "causal"
    return shapes.in_parts(plan, is_causal=is_causal).ring(plan, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", QUERIES)
@pytest.mark.parametrize(("group", "orders"), [(FULL, 3), (CAUSAL, 2)])
def test_the_fused_kernel_is_checked_where_its_plans_differ(group, orders, head_dim):
    group = group._replace(head_dim=head_dim, value_dim=head_dim)
    tried = trial.checks_of(group)
    for check in tried:
        query = check.batch, check.queries, checks.N, head_dim
        value = check.batch, check.keys, checks.K, head_dim
        mask = check.case.mask
        assert mask.is_causal == group.is_causal
        # Else another kernel would be checked under its name.
        assert backward_of(query, value, "hopper", mask, wanted="fused") == "fused"
    # All but how many copy, and store, is another order of additions.
    rings = {tuple(_ring(check, plan) for check in tried) for plan in candidates(group)}
    assert len(rings) == orders
    if group.is_causal:
        plan = tuning.fused(head_dim, tried[0].keys, is_causal=True)
        assert {bool(_ring(check, plan).double_rings) for check in tried} == {
            False,
            True,
        }
    # Somebody waits for somebody.
    assert all(ring.size > 1 for found in rings for ring in found)
    assert checks.RUNS > 2


@pytest.mark.parametrize("head_dim", QUERIES)
def test_a_card_is_accepted_with_rings_and_with_double_rings(head_dim):
    found = set()
    for check in parts.all_checks("hopper", 132):
        of = check.head_dim, check.feature, check.backward
        if of == (head_dim, "causal", "fused"):
            plan = tuning.fused(head_dim, check.keys, is_causal=True)
            found.add(bool(_ring(check, plan).double_rings))
    assert found == {False, True}


def test_few_keys_are_those_of_the_entry():
    few = [p.name for p in trial.problems(CAUSAL, ["few"])]
    many = [p.name for p in trial.problems(CAUSAL, ["many"])]
    assert (few, many) == (["1024 causal"], ["2048 causal", "16384 causal"])
    forward = Group("hopper", "forward", 64, 64, False)
    few = [p.name for p in trial.problems(forward, ["few"])]
    # Of 1024 queries three warpgroups would leave a ninth of theirs without rows.
    assert few == ["256 full", "1024 full"]
    few = [p.name for p in trial.problems(forward._replace(is_causal=True), ["few"])]
    assert few == ["1024 causal", "2048 causal"]
    for architecture, kernels in KERNELS.items():
        for name in kernels:
            for group in groups(architecture, name, head_dims(architecture)):
                assert all(trial.problems(group, [c]) for c in trial.CLASSES)


def test_a_plan_that_wins_takes_the_place_of_its_entry_alone(tmp_path):
    few, many = (trial.problems(CAUSAL, [c])[0].name for c in trial.CLASSES)
    now = tuning.few_and_many(CAUSAL)[1:]
    best = Plan(storing_warps=2, apart=True)

    def attempt(candidate, classes, *_):
        row = measured(1.0)
        if candidate.tiling == best:
            for name in (p.name for p in trial.problems(CAUSAL, ["many"])):
                row["times"][name] = measured(1.1)["times"][name]
        return row

    assert best not in now and few != many
    worker = FakeWorker()
    with contextlib.closing(Store(tmp_path / "trials", {}, fresh=False)) as store:
        search = Search(store, worker, seconds=0.1, attempt=attempt)
        decisions, complete = search.run([CAUSAL])
    assert complete and [d.verdict for d in decisions] == ["keeps", "wins"]
    # A wrong order of semaphores would wait for ever.
    assert {seconds for _, seconds in worker.calls} == {SECONDS_FOR_A_CANDIDATE}
    table = new_table(tuning.ENTRIES, decisions)
    assert tuning.read(tuning.write(table)) == table
    new = {e.keys_seen: e.tiling for e in table if e.group == CAUSAL}
    assert new == {1023: now[0], None: best}
    assert [e for e in table if e.group != CAUSAL] == [
        e for e in tuning.ENTRIES if e.group != CAUSAL
    ]
    text = winners.as_markdown(decisions)
    assert "| 64, 64, causal | to 1023 |" in text and "| above 1023 |" in text


@pytest.mark.parametrize(
    "kernel", ["attention_backward_fused", "attention_backward_dq"]
)
def test_the_whole_backward_pass_is_timed_if_the_kernel_is_in_it(kernel, monkeypatch):
    seen = [("convert", 1.0), (kernel, 2.0)]
    left_out: list = []

    def fake(program, inputs, runs, only="", without=None):
        left_out.append((only, without))
        return 3.0, seen

    monkeypatch.setattr(trial, "device_time", fake)
    monkeypatch.setattr(trial, "_drawn", lambda *_: ())
    monkeypatch.setattr(checks, "compile_for", lambda *_: None)
    time_of = trial._arm(Candidate(CAUSAL, Plan()), trial.problems(CAUSAL)[0])
    if kernel == "attention_backward_fused":
        assert time_of(3) == 3.0
    else:
        with pytest.raises(RuntimeError, match="fused is not among"):
            time_of(3)
    assert left_out == [("", "attention_forward")]
