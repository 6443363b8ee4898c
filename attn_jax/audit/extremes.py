"""Probes of logits beyond the range of exp."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from attn_jax.audit.finding import EXTREME, ON_WHAT_ALL_SHARE, PAST_THE_LAST
from attn_jax.audit.inputs import Inputs
from attn_jax.audit.judge import POOR, ProbeResult, by_rows, count
from attn_jax.audit.noise import logit_extent
from attn_jax.audit.problem import Problem, Results, at_extremes
from attn_jax.audit.programs import run
from attn_jax.audit.target import Attend
from attn_jax.audit.tiers import at, lse_result, noise_of, pair_tiers
from attn_jax.audit.visible import counted

# A length that ends in the middle of a tile of 128, and of 256 keys.
_HALF_A_TILE = 320
# By what the largest shift is divided, exactly, where logits in 16 bits still tell keys
# apart: 125 is beyond exp in FP32, whose largest is that of 88.7, and BF16 is off by
# 1/4 there at most, or 1/2 above 128.
_LESS = 8

AttendOf = Callable[[Problem], Attend]


def extremes(
    attend: Attend, problem: Problem, *, gradients: bool = True
) -> tuple[ProbeResult, ...]:
    """Logits of about +1000 and -1000, beyond the range of exp: all stays finite.

    One channel shifts every logit by the same. Counts values of out and gradients that
    are not finite and LSE that are not where a key is seen (bound 0); rows that see
    nothing must give out = 0, LSE = -inf and dQ = 0, else they count, too. LSE must
    move by the shift, and out stay, to the bounds of `shifted_keys`.
    """
    s = problem.shape
    signed, shift = at_extremes(problem)
    results = [run(attend, inputs, gradients=gradients) for inputs in signed]
    broken, blind = 0, 0
    for x in results:
        broken += sum(int((~np.isfinite(x[n])).sum()) for n in x if n != "lse")
    for start, stop, seen in counted(problem.rules, s, np.zeros(s.key_length, int), 1):
        seen = np.broadcast_to(seen > 0, (s.batch, stop - start, s.heads, 1))
        for x in results:
            for name in ("out", "dquery") if gradients else ("out",):
                blind += int(((x[name][:, start:stop] != 0) & ~seen).sum())
            if "lse" in x:
                lse = x["lse"][..., start:stop].swapaxes(1, 2)
                broken += int((~np.isfinite(lse) & seen[..., 0]).sum())
                blind += int((~np.isneginf(lse) & ~seen[..., 0]).sum())
    found = [
        count(
            "finite at extremes",
            broken,
            EXTREME,
            "{measured:.0f} values are not finite where logits are about +1000 or "
            "-1000: take the row's largest logit off before exp, in each term of the "
            "sum, of padding, too",
        ),
        count(
            "rows that see nothing",
            blind,
            "rows that see nothing",
            "{measured:.0f} values of rows that see no key are not out = 0, dQ = 0 and "
            "LSE = -inf: divide by 1 where the row's sum is 0",
        ),
    ]
    if not broken:
        found += _outs(attend, problem, signed, results, gradients)
        found += _lses(problem, signed, shift, results)
    return tuple(found)


def _lses(
    problem: Problem, signed: list[Inputs], shift: float, results: list[Results]
) -> Iterator[ProbeResult]:
    """How far LSE moves from no shift to -c and to +c."""
    if "lse" not in results[0]:
        return
    for index, sign in ((0, -1), (2, 1)):
        pair = 1, index
        yield lse_result(
            f"lse at {sign * 1000:+}",
            tuple(results[i] for i in pair),
            np.float64(sign * shift),
            [logit_extent(signed[i], problem.rules, problem.scale) for i in pair],
            problem,
        )


def _outs(
    attend: Attend,
    problem: Problem,
    signed: list[Inputs],
    results: list[Results],
    gradients: bool,
) -> list[ProbeResult]:
    """out at -c and +c, and at an eighth of either, against out with no shift.

    RMS over sampled rows of the change, in units of what rounding allows the two runs
    (`noise.rounding_noise`, whose FP32 logits are of the size that they have here; 64
    and c are numbers of the format, so the inputs say the same). At c logits in 16 bits
    are off by units, and out may be any mean of V: (max V - min V)^2 is allowed them
    besides. At an eighth they are off by a part of one, which does not explain logits
    that are clipped; and what is not named there is no cause at c.
    """
    s = problem.shape
    span = np.ptp(problem.inputs.value.astype(np.float64), axis=1)
    any_mean = np.square(np.repeat(span, s.group_size, 1))[:, None]
    found = []
    before = noise_of(problem, signed[1])
    for sign, index in ((-1, 0), (1, 2)):
        less = signed[index].key.copy()
        less[..., 0] /= _LESS
        smaller = signed[index]._replace(key=less)
        again = run(attend, smaller, gradients=gradients)
        for amount, inputs, x in (
            (sign * 1000 // _LESS, smaller, again),
            (sign * 1000, signed[index], results[index]),
        ):
            noises = [before, noise_of(problem, inputs)]
            tiers = pair_tiers(problem, [signed[1], inputs], noises, "out")
            if inputs is not smaller:
                named = found[-1].finding and found[-1].finding.cause
                tiers = [
                    (cause, of + any_mean if cause else of)
                    for cause, of in tiers
                    if cause in ("", named)
                ]
            found.append(
                by_rows(
                    f"out at {amount:+}",
                    at(before, x["out"]) - at(before, results[1]["out"]),
                    tiers,
                    before,
                    ("out",),
                    ON_WHAT_ALL_SHARE,
                    {
                        "": "out changes by {measured:.3g} times what rounding allows "
                        f"when all logits move by about {amount:+}, which a softmax "
                        "without a sink does not see: do not clip logits, leave no "
                        "sink in, and take the row's largest off in FP32"
                    },
                )
            )
    return found


def ending_inside(problem: Problem) -> Problem:
    """What `half_a_tile` looks at."""
    ends = dict(query_length=_HALF_A_TILE, key_length=_HALF_A_TILE)
    shape = dataclasses.replace(problem.shape, **ends)
    return dataclasses.replace(problem, shape=shape, mask="full")


def half_a_tile(
    attend_of: AttendOf, problem: Problem, *, gradients: bool = True
) -> tuple[ProbeResult, ...]:
    """Logits of about +1000 and -1000 where keys end inside a tile: all stays finite,
    out stays and LSE moves, as in `extremes`.

    What is read past the last key is often zero, a logit of 0, and left out later. Then
    exp(0 - LSE) may be infinite, and 0 times it is NaN (cuDNN 9.19's dQ is NaN there);
    or the row's largest logit is that 0, and exp of the others is nothing. Without a
    mask; counts values of out, LSE and gradients that are not finite.
    """
    problem = ending_inside(problem)
    attend, (signed, shift) = attend_of(problem), at_extremes(problem)
    runs = [run(attend, inputs, gradients=gradients) for inputs in signed]
    broken = sum(int((~np.isfinite(x)).sum()) for r in runs for x in r.values())
    found = count(
        "half a tile at extremes",
        broken,
        PAST_THE_LAST,
        f"{{measured:.0f}} values are not finite where logits are about +1000 or "
        f"-1000 and {_HALF_A_TILE} keys end inside a tile: hide what is past the "
        "last key before exp, in the backward pass, too",
    )
    if broken:
        return (found,)
    moved = _outs(attend, problem, signed, runs, gradients)
    moved += _lses(problem, signed, shift, runs)
    return found, *map(_past_the_last, moved)


def _past_the_last(result: ProbeResult) -> ProbeResult:
    """One of `half_a_tile`'s. What rounding allows is said of the other lengths."""
    finding, ends = result.finding, f"{_HALF_A_TILE} keys, "
    if finding is not None and finding.kind == POOR:
        finding = None
    if finding is not None:
        what = finding.says.partition(":")[0]
        says = f"where {_HALF_A_TILE} keys end inside a tile, {what}: look for a "
        says += "largest logit or a sum that takes in what is past the last key"
        where = tuple(ends + place for place in finding.where)
        finding = dataclasses.replace(
            finding, cause=PAST_THE_LAST, says=says, where=where
        )
    return dataclasses.replace(result, name=ends + result.name, finding=finding)
