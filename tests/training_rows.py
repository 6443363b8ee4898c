"""Rows of paired trainings whose answers are known."""

import math

STEPS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = range(3)


def weights_row(arm, seed, step, size, **more):
    row = {"arm": arm, "seed": seed, "step": step, "kind": "all", "scope": "all"}
    sizes = dict.fromkeys(("max_abs", "w1", "rel_l2", "w1_over_sigma", "drift"), size)
    return row | sizes | {"cosine": 1.0} | more


def runs_row(arm, seed, loss, **more):
    row = {"arm": arm, "seed": seed, "step": STEPS[-1], "diverged": None}
    none = dict.fromkeys(("function", "direct", "feedback", "aligned", "accuracy"))
    losses = {"loss": loss, "loss_difference": 0.0, "held_out_loss": 2 * loss}
    return row | none | losses | more


def stopping(arm, seed, stop, last=STEPS[-1]):
    """Rows of both tables of a run that stopped; as they were once written, its frozen
    weights are compared to the end."""
    weights = [weights_row(arm, seed, step, min(step, stop)) for step in STEPS]
    runs = []
    for step in STEPS:
        over = step > stop
        measured = {"function": 0.1 * min(step, stop), "direct": None if over else 0.2}
        measured |= {"diverged": stop if over else None, "held_out_loss": None}
        runs.append(runs_row(arm, seed, math.nan if over else 1.0, **measured))
        runs[-1]["step"] = step
    return weights, runs


def going_on(arm, seed, size=1.0, loss=1.0):
    weights = [weights_row(arm, seed, step, size * step) for step in STEPS]
    measured = {"function": 0.1 * size, "direct": 0.2 * size}
    runs = [runs_row(arm, seed, loss, **measured) | {"step": step} for step in STEPS]
    return weights, runs
