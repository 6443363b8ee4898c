"""The checks of a target that are not error measurements, by name."""

import dataclasses
from collections.abc import Iterator, Sequence

from attn_jax.audit import calls, more
from attn_jax.audit.plan import Group, ragged
from attn_jax.audit.problem import Problem
from attn_jax.audit.target import Target
from attn_jax.store import Row

# What takes longest on a GPU, to compile, goes side by side.
LOOKS = (
    *("P", "P together", "merging", "through LSE", "calls"),
    *("invariances", "x64", "probes", "again", "ragged"),
)
# Not by `look`: they are of problems.
OF_PROBLEMS = "again", "ragged"
# Most of their programs are of other shapes than the first group's.
OF_OTHER_SHAPES = "merging", "invariances"


def look(
    name: str,
    target: Target,
    groups: Sequence[Group],
    dtype: str,
    *,
    gradients: bool,
) -> Iterator[Row]:
    """What a target is looked at for by itself, on the first group's shape and mask; P
    and the gradient through LSE under all masks of that shape, other calls without a
    mask and under a causal one. In the other mode it is looked at with the group's
    bias, too; the rest is of attention without one."""
    group = groups[0]
    problem = Problem(group.shape, dtype, "normal", group.mask)
    plain, of = problem.unbiased, {"gradients": gradients}
    here = [x.mask for x in groups if x.shape == group.shape]
    with_bias = [dataclasses.replace(problem, mask=mask) for mask in here]
    of_masks = dict.fromkeys(x.unbiased for x in with_bias)
    # Where its other results are looked at.
    beside = {x.mask: x.shape for x in ragged(groups, target.adapter.shards)}
    pairs = [
        dataclasses.replace(x, shape=beside.get(x.mask, x.shape))
        for x in plain.together(here)
    ]
    called = [x.problems(dtype)[0] for x in calls.called(groups)]
    looks = {
        "P": lambda: more.read(target, of_masks),
        "P together": lambda: more.read(target, pairs),
        "x64": lambda: more.other_mode(target, problem, here, **of),
        "probes": lambda: more.probe(target, plain, masks=here, **of),
        "invariances": lambda: more.vary(target, plain, **of),
        "merging": lambda: more.merge(target, plain, **of),
        "through LSE": lambda: more.through_lse(target, with_bias if gradients else ()),
        "calls": lambda: calls.measure(target, called, **of),
    }
    return more.guarded(name, looks[name])
