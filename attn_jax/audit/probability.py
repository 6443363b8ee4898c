"""P itself, read from a callable with a V of ones, and what is wrong with it.

Weight where a mask hides, or none where it shows, is seen whatever made it so; and what
is random, as dropout is, which lies at no exact result.
"""

import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from attn_jax.audit.exact import Exact
from attn_jax.audit.finding import (
    BLIND_WEIGHTS,
    HIDDEN_PAIRS,
    P_CLIPPED,
    ROWS_NOT_ONE,
    Finding,
    Kind,
)
from attn_jax.audit.programs import run_forward
from attn_jax.formats import BF16, E4M3FN, E5M2, FP32, NumberFormat

# How often a lost entry of P is the smaller one where there is a threshold. Tiles may
# have thresholds of their own, each for its turn's maximum.
_THRESHOLD = 0.9
# What of the squares of P's error its zeros have to explain, to be what is wrong: with
# less, most of it is something else.
_MOST = 0.5
# Standard deviations that the sum of independent roundings may be off.
_CONFIDENCE = 6.0


def probabilities(
    attend: Callable,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *bias: Float[Array, "1 N T S"],
    width: int | None = None,
) -> Float[np.ndarray, "B N T S"]:
    """P as `attend(query, key, value[, bias]) -> (out, lse)` applies it, in FP64.

    Column h of V is 1 for key `start + h` and 0 for all others, so that column h of the
    output is that key's column of P, rounded as outputs are. One call for `width` keys
    (H if None), all compiled as one; for short sequences.
    """
    B, S, K = key.shape[:3]
    width = query.shape[-1] if width is None else width
    columns = []
    for start in range(0, S, width):
        ones = np.arange(S)[:, None] == start + np.arange(width)
        value = np.broadcast_to(ones[None, :, None], (B, S, K, width))
        arrays = query, key, jnp.asarray(value, key.dtype), *bias
        out = run_forward(attend, *arrays)["out"]
        columns.append(out.astype(np.float64).swapaxes(1, 2))
    return np.concatenate(columns, -1)[..., :S]


def of_probabilities(
    p: Float[np.ndarray, "B N T S"],
    right: Float[np.ndarray, "B N T S"],
    visible: Bool[np.ndarray, "#B #N T S"] | None,
    fmt: NumberFormat = BF16,
    where: tuple[str, ...] = (),
    of_logits: Float[np.ndarray, "B N T"] | float = 0.0,
) -> list[Finding]:
    """What is wrong with P as it was read, by `probabilities`, against the exact P.

    `fmt` is the format of P and of the output: what is less than twice its smallest
    normal number may vanish, and rows may be off one by 4 unit roundoffs, for the
    roundings of P, of its normaliser and of the output, by `of_logits` (`in_fp32`), and
    by what entries in fewer bits add up to. Says nothing of a P that is not finite.
    """
    if not np.isfinite(p).all():
        return []
    visible = np.broadcast_to(True if visible is None else visible, p.shape)
    least = 2 * fmt.min_normal
    sees = visible.any(-1, keepdims=True)
    weighty = visible & (right > least)
    lost, shown = weighty & (p == 0), ~visible & sees & (p > least)
    found = []

    def add(kind: Kind, cause: str, says: str, **evidence):
        figures = {name: float(x) for name, x in evidence.items()}
        found.append(Finding(kind, cause, says, ("out",), where, figures))

    if (blind := (~sees & (p > least)).any((1, 3))).any():
        rows = int(blind.sum())
        entry, first = (int(x[0]) for x in np.nonzero(blind))
        says = f"{rows} queries that see no key, the first of them {first} of batch "
        says += f"entry {entry}, put weight on keys: give zeros there"
        add("wrong wiring", BLIND_WEIGHTS, says, rows=rows)
    if shown.any():
        says = f"{_pairs(shown, ~visible & sees)}, which the mask hides, carry weight, "
        says += f"{p[shown].max():.1e} at most: apply the mask to the logits, as -inf"
        add("wrong wiring", HIDDEN_PAIRS, says, pairs=shown.sum())
    if lost.any():
        _lost(p, right, lost, weighty, add)
    off = abs(p.sum(-1) - 1)
    allowed = 4 * fmt.unit_roundoff + of_logits + _of_few_bits(p, right, fmt)
    beyond = off[sees[..., 0] & (off > allowed)]
    if not found and beyond.size:
        says = f"rows of P are off a sum of one by up to {beyond.max():.1e}: divide by "
        says += "the sum of the weights that are applied to V"
        add("wrong wiring", ROWS_NOT_ONE, says, off=beyond.max())
    return found


def in_fp32(right: Exact) -> Float[np.ndarray, "B N T"]:
    """How far FP32 may put the sum of a row of P = exp(x - LSE) off one, at most.

    In units of 2^-24, weighted with P where they are of x:
        4 |LSE|, 4 |x|   each rounded, multiplied by log2(e), the rounding of that
                         factor, and the rounding of x - LSE
        8 + log(S)       exp, twice, and log
        S / 8            the sum in LSE, in steps of 8 as in `noise`
    Errors of x itself cancel, since LSE is of the same x.
    """
    p, S = right.probability, right.probability.shape[-1]
    of_x = (p * np.where(p > 0, abs(right.logits), 0.0)).sum(-1)
    of_lse = np.where(right.sees_none, 0.0, abs(right.lse))
    return FP32.unit_roundoff * (4 * (of_lse + of_x) + 8 + np.log(S) + S / 8)


def _of_few_bits(p, right, fmt: NumberFormat) -> Float[np.ndarray, "B N T"]:
    """What rounding of single entries may put a row's sum off: six standard deviations
    of independent ones, as large as they are, sqrt(sum d^2). 0 if they are no rounding,
    or one to `fmt` and no fewer bits, which the unit roundoffs of `of_probabilities`
    are for.

    d is what is left without the row's common factor, which a wrong normaliser is. In a
    format |d| / P = u U / s, with U uniform in [0, 1] and significands s in [1, 2),
    uniform in log s: median u ln(2) / 2, largest u, 2.9 times that. So no rounding is
    more than 8 times the median over all rows, with twice that for the factor's own
    error; nor of more than twice the unit roundoff of E5M2. Where the median is that of
    8 bits, E4M3's smallest number may be lost besides.
    """
    factor = p.sum(-1, keepdims=True)
    d = p / np.where(factor > 0, factor, 1.0) - right
    typical = np.median(abs(d[right > 0]) / right[right > 0]) if right.any() else 0.0
    if typical <= fmt.unit_roundoff:
        return np.zeros(factor.shape[:-1])
    share = min(8 * typical, 2 * E5M2.unit_roundoff)
    in_8_bits = typical >= E4M3FN.unit_roundoff / 8
    least = E4M3FN.min_positive / 2 if in_8_bits else fmt.min_positive
    spread = _CONFIDENCE * factor[..., 0] * np.sqrt((d**2).sum(-1))
    return np.where((abs(d) <= share * right + least).all(-1), spread, 0.0)


def _lost(p, right, lost, weighty, add) -> None:
    """Why visible pairs have no weight: a pattern, their size, or chance."""
    share = lost.sum() / weighty.sum()
    kept = weighty & ~lost
    # Of none that are kept it cannot be told how the lost ones differ.
    scattered = not _pattern(lost, weighty) and kept.any()
    smaller = _smaller(right, lost, kept)
    if scattered and smaller > _THRESHOLD:
        explained = _explained(p, right, lost)
        if explained < _MOST:
            return
        below = right[lost].max()
        says = f"{_percent(share)} of P is zero, small entries of up to {below:.1e}: "
        says += "apply what the softmax gives without a threshold"
        kind = "worse than its algorithm allows"
        figures = dict(share=share, below=below, explained=explained)
        add(kind, P_CLIPPED, says, **figures)
    elif (
        scattered
        and lost.sum() >= 10
        # Five standard deviations of a difference of means of uniform ranks.
        and abs(smaller - 0.5) < 5 * ((1 / lost.sum() + 1 / kept.sum()) / 12) ** 0.5
        and _is_chance(lost, weighty)
    ):
        gain = np.median(p[kept] / right[kept])
        says = f"{share:.1%} of P, or of P V, is zero, of large and small entries "
        says += f"alike, and the others are {gain:.3f} times what they should be: turn "
        says += "dropout off"
        add("wrong wiring", "dropout left on", says, share=share, gain=gain)
    else:
        says = f"{_pairs(lost, weighty)}, which the mask shows, carry no weight: "
        says += "compare the bounds of loops and masks with the rules asked for"
        add("wrong wiring", "visible pairs carry none", says, pairs=lost.sum())


def _explained(p, right, lost) -> float:
    """Of the squares of P's error the share that is gone if P is held against one with
    the same zeros; a factor for each row, as normalising gives, is left out of both. It
    is that of the squares of out's error where the V of different keys are independent.
    """

    def off(q):
        total = q.sum(-1, keepdims=True)
        factor = p.sum(-1, keepdims=True) / np.where(total > 0, total, 1.0)
        return ((p - factor * q) ** 2).sum()

    return float(1 - off(np.where(lost, 0.0, right)) / off(right))


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else f"{100 * share:.1g}%"


def _smaller(right, lost, kept) -> float:
    """Of a lost and a kept entry of a row, how often the lost one is smaller: always
    where there is a threshold, half of the time by chance."""
    counts = lost.sum(-1), kept.sum(-1)
    pairs = counts[0] * counts[1]
    if not pairs.any():
        return 0.5
    # Mann and Whitney's U. Neither lost nor kept are last.
    order = np.argsort(np.where(lost | kept, right, np.inf), axis=-1)
    is_kept = np.take_along_axis(kept, order, -1)
    is_lost = np.take_along_axis(lost, order, -1)
    return float((is_lost.cumsum(-1) * is_kept).sum() / pairs.sum())


def _is_chance(lost: np.ndarray, weighty: np.ndarray) -> bool:
    """Whether each pair may be lost with the same probability, whatever its query, key,
    distance or head, and whether its neighbours are: chi-squared, each of them, within
    six standard deviations. One throw may serve several heads and batch entries."""
    planes: list[tuple[np.ndarray, np.ndarray]] = []
    for plane in zip(*(x.reshape(-1, *x.shape[2:]) for x in (lost, weighty))):
        if not any((~plane[1] | y & (plane[0] == x)).all() for x, y in planes):
            planes.append(plane)
    lost, weighty = (np.stack(x) for x in zip(*planes))
    share = lost.sum() / weighty.sum()
    if share == 1:
        return False

    def is_even(missing: np.ndarray, of: np.ndarray, mean: float, variance: float):
        """Both of one; a few of many have Poisson's fourth moment."""
        missing, of = missing[of > 0], of[of > 0]
        squares = ((missing - mean * of) ** 2 / (variance * of)).sum()
        spread = (2 + 1 / (variance * of)).sum() ** 0.5
        return bool(squares <= of.size + 6 * spread)

    T, S = lost.shape[1:]
    diagonal = (np.arange(S) - np.arange(T)[:, None] + T - 1).ravel()

    def of_diagonals(x: np.ndarray) -> np.ndarray:
        return np.bincount(diagonal, x.sum(0).ravel())

    together = np.array(
        [
            [_with_neighbour(x, *by) for x in (lost, weighty)]
            for by in itertools.product(range(3), range(-2, 3))
            if by > (0, 0)
        ]
    )
    counts = [
        (lost.sum(others), weighty.sum(others)) for others in ((1, 2), (0, 2), (0, 1))
    ]
    counts.append((of_diagonals(lost), of_diagonals(weighty)))
    variance = share * (1 - share)
    # As the share is that of what was lost, so is the variance of two at a time.
    return all(is_even(*x, share, variance) for x in counts) and is_even(
        together[:, 0], together[:, 1], share**2, variance**2
    )


def _with_neighbour(x: np.ndarray, down: int, right: int) -> int:
    """How many are true together with the one so far away."""
    T, S = x.shape[1:]
    here = x[:, : T - down, max(0, -right) : S - max(0, right)]
    there = x[:, down:, max(0, right) : S + min(0, right)]
    return int((here & there).sum())


def _pairs(which: np.ndarray, of: np.ndarray) -> str:
    b, n, i, j = (int(x[0]) for x in np.nonzero(which))
    first = f"the first query {i}, key {j} of head {n}, batch entry {b}"
    pattern = _pattern(which, of)
    return f"{which.sum()} pairs ({pattern + '; ' if pattern else ''}{first})"


def _pattern(which: np.ndarray, of: np.ndarray) -> str:
    """Which diagonals or keys among `of`, and of which heads and entries, where they
    are all of these; "" otherwise."""
    B, N = which.shape[:2]
    entries, heads = (np.flatnonzero(which.any(x)) for x in ((1, 2, 3), (0, 2, 3)))
    some = np.ix_(entries, heads)
    which, of = which[some], of[some]
    of_heads = f" of {_listed('head', heads)}" if heads.size < N else ""
    if found := _lines(which, of):
        among = f" of {_listed('batch entry', entries)}" if entries.size < B else ""
        return f"{found}{of_heads}{among}"
    each = [_lines(which[i : i + 1], of[i : i + 1]) for i in range(entries.size)]
    if all(each):
        said = (f"{x} of batch entry {b}" for x, b in zip(each, entries, strict=True))
        return f"{', '.join(said)}{of_heads}"
    return ""


def _lines(which: np.ndarray, of: np.ndarray) -> str:
    """All of a few diagonals, or of keys that are a row or equally far apart, or ""."""
    T, S = which.shape[2:]
    distance = np.arange(S) - np.arange(T)[:, None]
    steps = np.unique(distance[which.any((0, 1))])
    neighbours = steps[-1] - steps[0] + 1 == steps.size
    few = steps.size <= 3 or neighbours and 2 * steps.size < T
    if T > 1 and few and np.array_equal(which, of & np.isin(distance, steps)):
        if neighbours and steps.size > 1:
            return f"all with j - i = {steps[0]} to {steps[-1]}"
        return f"all with j - i = {' and '.join(map(str, steps))}"
    some = which.any((0, 1, 2))
    keys = np.flatnonzero(some)
    if keys.size == S or not np.array_equal(which, of & some):
        return ""
    between = np.isin(np.arange(S), np.arange(keys[0], keys[-1] + 1))
    if np.array_equal(which, of & between):
        return f"all of keys {keys[0]} to {keys[-1]}"
    if np.unique(np.diff(keys)).size == 1:
        return f"every {keys[1] - keys[0]} keys from {keys[0]} on"
    return ""


def _listed(what: str, numbers: np.ndarray) -> str:
    several = {"head": "heads", "batch entry": "batch entries"}
    name = what if numbers.size == 1 else several[what]
    return f"{name} {', '.join(map(str, numbers))}"
