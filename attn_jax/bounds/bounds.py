"""A-priori bounds of the rounding error of attention under a recipe, and a law.

Known beforehand are the recipe and the exact quantities; no computed result is looked
at. Each operation of the recipe is followed with its exact result and a bound of the
computed one's error (`arithmetic.Ball`). With u the unit roundoff of the format
a result is kept in (2u for rounding toward zero or stochastic), eta half its smallest
positive number, and hats on what is computed:

    rounding        |fl(x) - x^| <= u (|x| + e) + eta,  e the error that x^ came with;
                    beyond max_finite the excess if it saturates, infinity if not
    sum of n terms  e <= sum e_j + ((1 + u)^n - 1) sum |x_j|   in any order [1]
    exp             e <= exp(x) (exp(e_x) - 1) + its own, 4 u
    s exp(x)        e_x has u |log s| more, as kernels have a power of two s in the
                    exponent: the scale of P and, in the backward pass, of a head's dS
    x / y           e <= (e_x + |x / y| e_y) / (y - e_y)
    logits          e <= ((1 + 2 u)^H - 1) scale |Q| |K|^T and the steps' roundings;
                    for a scaled_query u |Q'| |K|^T of its own
    O = A / l       A and l of each block, as above; the maximum m cancels [2], so its
                    error counts only as size: underflow, saturation, |x - m|
    LSE             -log(1 - e_l / l) and roundings
    tanh (soft cap) e <= e_x tanh' + 0.39 e_x^2 + its own, 12 u in all
    a sink          a first key: m = z as rounded, l = 1 with error exp(|e_z|) - 1
    dS              P (e_dP + e_delta) + |dP - delta| e_P + products of errors, with
                    e_P <= P (exp(e_x + e_LSE) - 1) as P = exp(x - LSE) [2]
    dQ              sum_j e_ij |K_j - C| + e_LSE |dQ| + e_delta |sum_j P_ij (K_j - C)|

C is the centre (0 without one) and e_ij what is not common to a row; in dQ it is that
of `dq_dlogits`, whose eta is divided by the power of two that scales the head, whatever
that may be where roundings decide on it. Keys that are centred before they are rounded
(dq_centre 'keys') add sum_j |dS_ij| u |K_j - C| over those K_j - C that the format does
not hold; where roundings decide on C, whatever it may be counts. T tiles bring T
roundings of every running sum, and of its factor exp(m - m') where m may have moved.

"probabilistic" takes roundings as independent and of mean zero [3], which stochastic
rounding makes true: terms of first order d_k a_k, |d_k| <= u_k, then stay below
L sqrt(sum (a_k u_k)^2), sqrt(n) in place of n, with probability 1 - 2 exp(-L^2 / 2)
(Azuma, Hoeffding) for each entry. Terms of second order and what is not random keep
their deterministic bounds. Where roundings repeat (a row sum that stagnates, equal
keys) the assumption, and with it the probability, fails. The roundings of Q' are in
all logits of a row and keep their deterministic bounds, too.

[1] Higham, Accuracy and Stability of Numerical Algorithms, 2002.
[2] Blanchard, Higham & Higham, IMA J. Numer. Anal. 41, 2021: the shifted softmax.
[3] Higham & Mary, SIAM J. Sci. Comput. 41, 2019: probabilistic error analysis.
"""

import dataclasses
import math
import numbers
from typing import Literal

import numpy as np
from jax.typing import ArrayLike

from attn_jax.audit.error import correctly_rounded
from attn_jax.bounds.arithmetic import Arithmetic, Ball, Kind, exact
from attn_jax.bounds.backward import backward
from attn_jax.bounds.centre import centre_of
from attn_jax.bounds.forward import Head, forward
from attn_jax.bounds.ring import forward as ring_forward
from attn_jax.formats import NumberFormat
from attn_jax.mask import Mask
from attn_jax.recipe_checks import check_fit, check_is_recipe
from attn_jax.recipe_schema import Recipe
from attn_jax.reference import check_arguments, default_scale, python_float


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of |computed - exact| as FP64 arrays; infinite where none can be given.

    out [B, T, N, D], lse [B, N, T], dquery, dkey and dvalue like query, key and value,
    dbias like the bias, dsinks [N]; gradients are None without `dout`, dbias without a
    bias, dsinks without sinks.
    `overflows` names the steps whose numbers may leave their format's range: clipped,
    which the bounds include, or infinite; "carrier" is what no step rounds. A hidden
    key's dP counts as well, since P = 0 times infinity is no number.
    """

    out: np.ndarray
    lse: np.ndarray
    dquery: np.ndarray | None
    dkey: np.ndarray | None
    dvalue: np.ndarray | None
    dbias: np.ndarray | None
    overflows: tuple[str, ...]
    dsinks: np.ndarray | None = None


def bound(
    recipe: Recipe,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    dout: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    mask: Mask = Mask(),
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    centre: tuple[np.ndarray, np.ndarray] | None = None,
    kind: Literal["deterministic", "probabilistic"] = "deterministic",
    confidence: float = 0.999,
) -> Bounds:
    """How far the result under `recipe` may be from the exact one, entry by entry.

    The exact result is that on the inputs as rounded to `recipe.inputs`. A bound that
    is "deterministic" holds always, one that is "probabilistic" for each entry with
    probability `confidence`, under the assumptions of this module's docstring.
    Arguments as of `emulator.attention`, with cotangents `dout` [B, T, N, D] and `dlse`
    [B, N, T] (zero if None); a result is taken to be returned in a type that holds its
    step's format, dbias and dsinks in the carrier. FP64 NumPy, a few dozen T x S arrays
    for each of the query heads that share a key head.

    `centre` holds what a kernel subtracts from the keys in dQ, where that is not the
    recipe's own, and a bound of the error of computing it: [B, T, K, H] each. Under a
    soft cap it is taken from the roundings of dS alone.

    Raises ValueError for arguments that do not fit together or to the recipe, a `kind`
    that does not exist or a confidence outside (0, 1), and NotImplementedError for a
    carrier that is not FP32 or FP64, and for sinks in a ring.
    """
    if kind not in ("deterministic", "probabilistic"):
        raise ValueError(
            f"kind must be 'deterministic' or 'probabilistic', got {kind!r}"
        )
    if not isinstance(confidence, numbers.Real) or not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}")
    with np.errstate(all="ignore"):
        more = _More(dlse, soft_cap, sinks, centre)
        balls = _balls(recipe, kind, query, key, value, dout, bias, mask, scale, more)
    spreads = math.sqrt(2 * math.log(2 / (1 - confidence)))

    def read(ball: Ball) -> np.ndarray:
        worst = _unless_nan(ball.worst)
        if kind == "deterministic":
            return worst
        return np.fmin(worst, ball.fixed + spreads * ball.spread)

    return balls.read(read)


def order_bound(
    recipe: Recipe,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    dout: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    mask: Mask = Mask(),
    scale: float | None = None,
) -> Bounds:
    """RMS difference, entry by entry, of two correct implementations of `recipe`.

    They differ where the recipe leaves room: in the order of additions, in contracted
    products and sums, and in the last bits of exp and log, all of the carrier's size;
    and in the roundings of steps that fall to the other side because of that. A
    difference d before a rounding to spacing h is a whole spacing after it with
    probability |d| / h, so that mean squares grow from s^2 to s^2 + h s. Tensor cores
    truncate their sums, which moves LSE by up to sum_j P_ij d_ij, d_ij the bits cut off
    a logit (left out for a ring).

    An expected size under random roundings and not a bound of each entry: compare RMS
    values over many entries. Errors common to an output's channels are added up as if
    they had one sign, so it is some times too large, and yet far below what another
    recipe changes: one in which P or O is rounded differently is told apart.

    Arguments and what is raised as of `bound`; without `dout` there are no gradients.
    """
    with np.errstate(all="ignore"):
        balls = _balls(recipe, "order", query, key, value, dout, bias, mask, scale)
    return balls.read(lambda ball: _unless_nan(ball.spread))


def two_term_law(
    recipe: Recipe | NumberFormat, tiles: ArrayLike, baseline: ArrayLike
) -> np.ndarray | np.floating:
    """Relative RMS error of the output where the running sums are kept narrow.

    rel^2 = baseline^2 + eps_O^2 T / 2 + eps_l^2 T / 3 for T tiles of keys, with
    eps = `rms_roundoff` of the format of `accumulator` and of `row_sum` (0 for one as
    wide as the carrier; a NumberFormat stands for both). `baseline` is the relative RMS
    error of the same steps with the sums in the carrier, or of the eager baseline.

    Each of the T additions to O rounds a number that has grown, for values of mean
    zero, as a random walk, sqrt(t / T) of its final size: in all eps^2 sum_t t / T.
    The row sum grows as t / T, in all eps^2 sum_t (t / T)^2. For op-by-op recipes such
    as flash2_op_by_op on N(0, 1) inputs it is within 20 % for 4 <= T <= 64, and low.
    It fails where a tile's share of l, 1 / T, comes near the format's last bit: from
    T = 2^mantissa_bits on (128 for BF16) an addition is rounded away more often than
    not, at twice that (256) always; the error is then a bias and grows faster. Nor does
    it hold for values of one sign, of which O stagnates as l does.
    """
    if isinstance(recipe, NumberFormat):
        accumulator = row_sum = recipe.rms_roundoff
    else:
        accumulator, row_sum = (
            0.0
            if step.format.mantissa_bits >= recipe.carrier.mantissa_bits
            else step.format.rms_roundoff
            for step in (recipe.accumulator, recipe.row_sum)
        )
    tiles, baseline = np.asarray(tiles, np.float64), np.asarray(baseline, np.float64)
    terms = accumulator**2 / 2 + row_sum**2 / 3
    return np.sqrt(baseline**2 + terms * tiles)


@dataclasses.dataclass(frozen=True)
class _More:
    """What not every call has; see `bound`."""

    dlse: ArrayLike | None = None
    soft_cap: float | None = None
    sinks: ArrayLike | None = None
    centre: tuple[np.ndarray, np.ndarray] | None = None

    def sink(self, n: int) -> float | None:
        """The logit of a head's sink; one of -inf takes no weight."""
        logit = -math.inf if self.sinks is None else float(np.asarray(self.sinks)[n])
        return None if logit == -math.inf else logit

    def dlse_of(self, b: int, n: int) -> np.ndarray | None:
        if self.dlse is None:
            return None
        return np.asarray(self.dlse)[b, n, :, None].astype(np.float64)


@dataclasses.dataclass
class _Results:
    """Balls of every head, joined as they come."""

    out: Ball
    lse: Ball
    dquery: Ball | None
    dkey: Ball | None
    dvalue: Ball | None
    dbias: Ball | None
    overflows: set[str]
    dsinks: Ball | None = None

    def read(self, of) -> Bounds:
        dquery, dkey, dvalue, dbias, dsinks = (
            None if ball is None else of(ball)
            for ball in (self.dquery, self.dkey, self.dvalue, self.dbias, self.dsinks)
        )
        overflows = tuple(sorted(self.overflows))
        return Bounds(
            of(self.out), of(self.lse), dquery, dkey, dvalue, dbias, overflows, dsinks
        )


def _balls(
    recipe, kind: Kind, query, key, value, dout, bias, mask, scale, more=_More()
) -> _Results:
    given = query, key, value
    query, key, value = (np.asarray(x) for x in given)
    bias = None if bias is None else np.asarray(bias)
    cap = python_float(more.soft_cap)
    sinks = None if more.sinks is None else np.asarray(more.sinks)
    check_arguments(query, key, value, bias=bias, mask=mask, soft_cap=cap, sinks=sinks)
    check_is_recipe(recipe)
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    scale = default_scale(scale, H)
    check_fit(recipe, query, key, value, scale, cap)
    if sinks is not None and recipe.ring_size > 1:
        raise NotImplementedError("there are no bounds for sinks in a ring")
    out_shape = (B, T, N, value.shape[-1])
    if dout is not None and np.shape(dout) != out_shape:
        raise ValueError(
            f"dout must have the shape {out_shape} of out, got {np.shape(dout)}"
        )
    arithmetic = Arithmetic(recipe, kind)
    visible = mask.materialise(T, S)
    visible = True if visible is None else np.asarray(visible)
    visible = np.broadcast_to(visible, (B, N, T, S))
    q, k, v = (_rounded(x, recipe) for x in (query, key, value))
    do = None if dout is None else _rounded(np.asarray(dout), recipe)
    wide_bias = None
    if bias is not None:
        wide_bias = np.broadcast_to(_carried(bias, recipe), (B, N, T, S))

    results = _Results(
        _empty(*out_shape), _empty(B, N, T), None, None, None, None, set()
    )
    if do is not None:
        results.dquery, results.dkey, results.dvalue = (
            _empty(*x.shape) for x in (query, key, value)
        )
    dlogits: list[list[Ball]] = []
    dsinks: list[list[Ball | None]] = []
    for b in range(B):
        dlogits.append([])
        for kv in range(K):
            group = range(kv * (N // K), (kv + 1) * (N // K))
            heads = [
                _with_scaled_query(
                    arithmetic,
                    Head(
                        q[b, :, n],
                        k[b, :, kv],
                        v[b, :, kv],
                        None if wide_bias is None else wide_bias[b, n],
                        visible[b, n],
                        scale,
                        cap,
                        more.sink(n),
                    ),
                )
                for n in group
            ]
            row = recipe.dq_centre == "row" and do is not None
            columns = k[b, :, kv] if row else np.zeros((S, 0))
            run = ring_forward if recipe.ring_size > 1 else forward
            forwards = [run(arithmetic, head, columns) for head in heads]
            for n, fwd in zip(group, forwards):
                _write(results.out, (b, slice(None), n), fwd.out)
                _write(results.lse, (b, n), fwd.lse[:, 0])
            if do is None:
                continue
            interval = mask.is_interval
            centres = [
                centre_of(arithmetic, head, fwd, interval)
                if more.centre is None
                else (more.centre[0][b, :, kv], more.centre[1][b, :, kv])
                for head, fwd in zip(heads, forwards)
            ]
            douts = [do[b, :, n] for n in group]
            dlses = [more.dlse_of(b, n) for n in group]
            grads = backward(arithmetic, heads, forwards, douts, dlses, centres)
            dsinks.append(grads.dsinks)
            for n, dquery in zip(group, grads.dquery):
                _write(results.dquery, (b, slice(None), n), dquery)
            _write(results.dkey, (b, slice(None), kv), grads.dkey)
            _write(results.dvalue, (b, slice(None), kv), grads.dvalue)
            if bias is not None:
                dlogits[b] += grads.dlogits
    if bias is not None and do is not None:
        results.dbias = _dbias(arithmetic, bias.shape, dlogits)
    if sinks is not None and do is not None:
        results.dsinks = _dsinks(arithmetic, dsinks, B, T)
    results.overflows = arithmetic.overflows
    return results


def _with_scaled_query(arithmetic: Arithmetic, head: Head) -> Head:
    """The head with Q' for Q where the recipe makes one: Q itself times a power of two,
    unless that leaves the format's range."""
    step, scale = arithmetic.recipe.scaled_query, head.scale
    if step is None:
        return head
    query = exact(head.query * scale)
    made = arithmetic.step("scaled_query", arithmetic.carried(query, 2))
    held = correctly_rounded(query.value, step.format) == query.value
    held &= abs(math.frexp(scale)[0]) == 0.5
    return head._replace(
        query=query.value,
        query_error=np.where(held, 0.0, made.worst),
        scale=1.0,
        query_scale=scale,
    )


def _dsinks(
    arithmetic: Arithmetic, terms: list[list[Ball | None]], B: int, T: int
) -> Ball:
    """Each head's terms, [T, 1] for each batch entry, added up: [N]."""
    zero = exact(np.zeros((T, 1)))
    entries = [zero if x is None else x for heads in terms for x in heads]
    x = Ball(
        *(
            np.reshape(field, (B, -1, T)).swapaxes(0, 1).reshape(-1, B * T)
            for field in zip(*map(tuple, entries))
        )
    )
    spread = np.sqrt((x.spread**2).sum(-1))
    total = Ball(x.value.sum(-1), x.worst.sum(-1), x.fixed.sum(-1), spread)
    squares = (x.value**2).sum(-1)
    return arithmetic.carrier_sum(total, x.size.sum(-1), squares, B * T)


def _dbias(arithmetic: Arithmetic, shape, dlogits: list[list[Ball]]) -> Ball:
    """dS [B, N, T, S] summed over the axes along which the bias was broadcast."""
    full = Ball(
        *(
            np.array([[tuple(ball)[field] for ball in heads] for heads in dlogits])
            for field in range(4)
        )
    )
    axes = tuple(axis for axis in range(4) if shape[axis] == 1)
    if not axes:
        return full

    def added(x):
        return x.sum(axes, keepdims=True)

    # What is common to a row is not independent along it: spreads add there.
    spread = full.spread
    if 3 in axes:
        spread = spread.sum(3, keepdims=True)
    others = tuple(axis for axis in axes if axis != 3)
    spread = np.sqrt((spread**2).sum(others, keepdims=True))
    total = Ball(added(full.value), added(full.worst), added(full.fixed), spread)
    n = full.value.size // total.value.size
    return arithmetic.carrier_sum(total, added(full.size), added(full.value**2), n)


def _unless_nan(bound: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(bound), np.inf, bound)


def _empty(*shape: int) -> Ball:
    return Ball(*(np.zeros(shape) for _ in range(4)))


def _write(whole: Ball | None, index, part: Ball) -> None:
    assert whole is not None
    for old, new in zip(tuple(whole), tuple(part)):
        old[index] = new


def _carried(x: np.ndarray, recipe: Recipe) -> np.ndarray:
    return correctly_rounded(x.astype(np.float64), recipe.carrier)


def _rounded(x: np.ndarray, recipe: Recipe) -> np.ndarray:
    return correctly_rounded(_carried(x, recipe), recipe.inputs)
