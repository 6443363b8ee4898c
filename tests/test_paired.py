"""Paired trainings: what arms share with the reference, and what they do not."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis import paired
from analysis.arms import ARMS, MAIN, REFERENCE, Arm, configured, find
from analysis.paired_measures import Instruments, measure
from train.config import UsageError
from train.presets import PRESETS
from train.state import TrainState

pytestmark = pytest.mark.ci

STEPS = 6
TINY = PRESETS["tiny"]
CONFIG = dataclasses.replace(
    TINY,
    attn="baseline",
    steps=STEPS,
    batch_size=4,
    model=dataclasses.replace(TINY.model, width=64, depth=1),
    data=dataclasses.replace(TINY.data, resolution=16),
    optimizer=dataclasses.replace(TINY.optimizer, warmup=2),
)
OPTIONS = ("pallas-no-cures",)
RINGS = ("ring-2-16", "ring-2-32")
WILD = Arm("wild", "a learning rate that ends in NaN", {"lr": 1e30})


def weights(training: paired.Training):
    return jax.tree.map(np.asarray, training.state.params)


@pytest.fixture(scope="module")
def rings(request):
    """For the suite's time one of them."""
    return RINGS if request.config.getoption("--thorough") else RINGS[:1]


@pytest.fixture(scope="module")
def trained(rings):
    """By step, of every arm: weights, losses, and the step at which it diverged."""
    names = "re-run", "ulp", "graph", "pallas", "order", "init", "mesh-2"
    arms = [*map(find, (*names, *OPTIONS, *rings)), WILD]
    return {
        step: {
            name: (weights(t), list(t.losses), t.diverged) for name, t in every.items()
        }
        for step, _, every in paired.train(CONFIG, arms)
    }


def test_weights_are_compared_at_powers_of_two_and_eighths():
    assert paired.snapshots(2000) == sorted(
        {2**k for k in range(11)} | {250 * k for k in range(1, 9)}
    )
    assert paired.snapshots(6) == [1, 2, 3, 4, 5, 6]
    assert paired.snapshots(1) == [1]


def test_a_run_of_the_same_is_the_same(trained):
    for found in trained.values():
        for name in ("re-run", "graph"):
            chex.assert_trees_all_equal(found[name], found[REFERENCE])
    assert sorted(trained) == list(range(STEPS + 1))
    assert all(len(found[REFERENCE][1]) == step for step, found in trained.items())


def test_a_nudge_is_one_unit_in_the_last_place(trained):
    of, nudged = (trained[0][name][0] for name in (REFERENCE, "ulp"))
    pairs = list(zip(jax.tree.leaves(of), jax.tree.leaves(nudged), strict=True))
    apart = np.concatenate([(a != b).ravel() for a, b in pairs])
    assert apart.sum() == 1
    (a, b), *_ = [(a[a != b], b[a != b]) for a, b in pairs if (a != b).any()]
    assert abs(b[0] - a[0]) == np.spacing(abs(a[0])) and abs(b[0]) > abs(a[0])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(trained[STEPS]["ulp"], trained[STEPS][REFERENCE])


@pytest.mark.parametrize("seen", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_nudge_is_seen_by_the_network(seen):
    """One FP32 unit would be gone where weights are rounded to 16 bits first."""
    weights = {"a": jnp.zeros(3), "b": jnp.array([0, -0.3, 0.7])}
    state = TrainState(weights, None, None, None, None)
    before, after = (s.params["b"] for s in (state, paired._nudged(state, seen)))
    assert after.dtype == jnp.float32 and after[0] == 0 and after[2] == before[2]
    x, y = (np.asarray(w[1]).astype(seen) for w in (before, after))
    assert y < x < 0 and y == np.nextafter(x, np.asarray(-np.inf, x.dtype))


def test_arms_differ_in_what_they_say_alone(trained, rings):
    first = {name: of[0] for name, of in trained[0].items()}
    for name in ("pallas", *OPTIONS, *rings, "order", "mesh-2", "wild"):
        chex.assert_trees_all_equal(first[name], first[REFERENCE])
    one = {name: of[1][0] for name, of in trained[1].items()}
    # At first the gates of attention are closed: all arms have the loss of the same
    # weights and noise. Later its rounding to BF16, 2^-9, is a share of the loss.
    assert one["pallas"] == one[REFERENCE]
    losses = [trained[STEPS][name][1] for name in ("pallas", REFERENCE)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2.0**-9)
    # Other roundings than the default's, and as near.
    for name in (*OPTIONS, *rings):
        other = trained[STEPS][name][1]
        assert other not in losses
        assert other == pytest.approx(losses[1], rel=2.0**-9)
        losses.append(other)
    # Sums over a mesh are added up otherwise: means of 3072 FP32 numbers, in halves of
    # halves or in rows of them, are 16 roundings of 2^-24 apart at the most.
    assert one["mesh-2"] == pytest.approx(one[REFERENCE], rel=2.0**-20)
    # Other images and other noise for them: no rounding of the same.
    assert abs(one["order"] / one[REFERENCE] - 1) > 2.0**-9
    ours, other = (
        np.concatenate([x.ravel() for x in jax.tree.leaves(first[name]) if x.ndim > 1])
        for name in (REFERENCE, "init")
    )
    drawn = ours != 0
    assert drawn.mean() > 0.5 and (ours != other)[drawn].mean() > 0.999


def test_an_arm_that_diverges_ends_alone(trained):
    *_, last = trained.values()
    _, losses, diverged = last["wild"]
    assert diverged is not None and len(losses) == diverged + 1 < STEPS
    assert last[REFERENCE][2] is None


def test_weights_that_stand_still_are_not_compared():
    rows = measure(CONFIG, [WILD], Instruments(0))["wild"]
    ends = [row for row in rows if row["table"] == "runs"]
    stop = ends[-1]["diverged"]
    assert stop is not None and [r["step"] for r in ends] == paired.snapshots(STEPS)
    assert all((row["diverged"] is None) == (row["step"] <= stop) for row in ends)
    late = [row for row in ends if row["step"] > stop]
    assert late and all(math.isnan(row["loss"]) for row in late)
    assert all(row["function"] is row["direct"] is None for row in late)
    compared = {row["step"] for row in rows if row["table"] == "weights"}
    assert compared == {row["step"] for row in ends if row["step"] <= stop}


def test_a_reference_that_diverges_ends_alone():
    """The arms go on; what is known of them has nothing to be compared with."""
    tame = Arm("tame", "a learning rate that learns", {"lr": 2e-3})
    rows = measure(dataclasses.replace(CONFIG, lr=1e30), [tame], Instruments(2))
    reference, arm = rows[REFERENCE], rows["tame"]
    at = reference[-1]["diverged"]
    assert at is not None and math.isnan(reference[-1]["loss"])
    assert reference[-1]["held_out_loss"] is None
    ends = [row for row in arm if row["table"] == "runs"]
    assert [row["step"] for row in ends] == paired.snapshots(STEPS)
    assert ends[-1]["diverged"] is None and ends[-1]["held_out_loss"] > 0
    assert math.isfinite(ends[-1]["loss"]) and ends[-1]["loss_difference"] is None
    compared = [row["step"] for row in arm if row["table"] == "weights"]
    assert max(compared) <= at < STEPS


def test_a_step_from_another_state_keeps_that_state():
    for step, batch, every in paired.train(
        dataclasses.replace(CONFIG, steps=1), [find("re-run")]
    ):
        if step == 0:
            reference, again = every.values()
            once = again.from_state(reference.state, batch)
            kept = weights(reference)
    # From the same state one step of the same arm is what the reference did.
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, once), weights(reference))
    assert not all(
        jnp.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(once), strict=True)
    )


def test_names_of_arms():
    assert set(MAIN) < set(ARMS) and all(arm.name == n for n, arm in ARMS.items())
    assert find("emulated:flash2").changes == {"attn": "emulated", "recipe": "flash2"}
    for wrong in ("flash2", "emulated:nothing"):
        with pytest.raises(UsageError, match="emulated:RECIPE"):
            find(wrong)
    for arm in ARMS.values():
        configured(CONFIG, arm)
    with pytest.raises(UsageError, match="16 devices are wanted"):
        config = dataclasses.replace(CONFIG, batch_size=16)
        next(paired.train(config, [Arm("mesh-16", "", devices=16)]))
