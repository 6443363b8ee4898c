"""Exact values with bounds of their error: the arithmetic behind `attn_jax.bounds`.

A `Ball` holds exact numbers x and what is known of the error e of the computed ones,

    |e| <= worst                                                 always
    e = f + X,  |f| <= fixed,  E exp(tX) <= exp(t^2 spread^2 / 2)    if roundings are
                                                                     random

X collects the terms of first order: a sum of roundings d_k with known coefficients a_k,
|d_k| <= u_k, mean zero given those before. By Hoeffding's lemma and Azuma's inequality
spread^2 = sum (a_k u_k)^2, and P(|X| > L spread) <= 2 exp(-L^2 / 2). Terms of higher
order are bounded with the worst errors and go to `fixed`, as do errors that are not
random: rounding toward zero, underflow, saturation, the exponential's own. Where the
same rounding may enter twice, spreads add; else their squares do.

A bound that became infinite may turn into nan on its way, as inf - inf or, where the
computed number may be infinite too, 0 inf; nan stays nan and means as much as infinity.
Callers silence NumPy's warnings.

In the mode "order" `spread` is instead the RMS difference of two computations that
follow one recipe and differ only inside the carrier. A difference d before a rounding
to spacing h is a whole spacing with probability |d| / h after it, so its mean square
grows from s^2 to at most s^2 + h s.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np

from attn_jax.formats import NumberFormat, Rounding
from attn_jax.recipe_schema import Recipe, Step

Size = np.ndarray | float
Kind = Literal["deterministic", "probabilistic", "order"]

# Relative error of exp, exp2 and log in the carrier, in units of its unit roundoff:
# two units in the last place, as of CUDA's ex2.approx and of XLA on a CPU.
FUNCTION_ULPS = 4
# An addition inside a matrix product may truncate, as those of tensor cores do.
SUM_ROUNDOFFS = 2
# Largest relative error, rounded up, of a polynomial for 2^f, 0 <= f <= 1, by degree:
# that of the best one that is 1 at 0, and of FlashAttention-4's own cubic.
EXP2_POLYNOMIAL_ERROR = {2: 2.1e-3, 3: 9e-5, 4: 3e-6, 5: 9e-8}

# The step that rounds the first operand of a product; all others are inputs, or Q'.
_MADE_BY = {
    "product": "probability",
    "dq_accumulator": "dq_dlogits",
    "dk_accumulator": "dlogits",
    "dv_accumulator": "backward_probability",
}


class Ball(NamedTuple):
    value: np.ndarray
    worst: np.ndarray
    fixed: np.ndarray
    spread: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """Largest magnitude that the computed number can have."""
        return np.abs(self.value) + self.worst

    def __getitem__(self, index) -> "Ball":
        return Ball(*(field[index] for field in tuple(self)))

    def map(self, function) -> "Ball":
        """The same rearrangement of every field."""
        return Ball(*map(function, tuple(self)))


class Unit(NamedTuple):
    """Interval of the factor from computed numbers to the ones that a ball holds."""

    low: Size = 1.0
    high: Size = 1.0

    def times(self, factor: float) -> "Unit":
        return Unit(self.low * factor, self.high * factor)


ONE = Unit()


def exact(value) -> Ball:
    value = np.asarray(value, np.float64)
    return Ball(value, *(np.zeros(value.shape) for _ in range(3)))


def where(condition, x: Ball, y: Ball) -> Ball:
    return Ball(*(np.where(condition, a, b) for a, b in zip(tuple(x), tuple(y))))


def plus(x: Ball, y: Ball, *, shared: bool = False) -> Ball:
    """x + y; `shared` if one rounding may stand in both."""
    return Ball(
        x.value + y.value,
        x.worst + y.worst,
        x.fixed + y.fixed,
        x.spread + y.spread if shared else np.hypot(x.spread, y.spread),
    )


def times(x: Ball, y: Ball, *, shared: bool = False) -> Ball:
    a, b = np.abs(x.value), np.abs(y.value)
    second = x.worst * y.worst
    s, t = b * x.spread, a * y.spread
    return Ball(
        x.value * y.value,
        a * y.worst + b * x.worst + second,
        a * y.fixed + b * x.fixed + second,
        s + t if shared else np.hypot(s, t),
    )


def scaled(x: Ball, factor) -> Ball:
    """x times a number, or an array, known exactly."""
    size = np.abs(factor)
    return Ball(x.value * factor, *(size * e for e in tuple(x)[1:]))


def quotient(x: Ball, y: Ball) -> Ball:
    """x / y for y > 0, and 0 / 0 = 0; infinite worst where y may reach zero.

    The two may share roundings: (x + e) / (y + f) = q + (e - q f) / (y + f).
    """
    divisor = np.where(y.value > 0, y.value, 1.0)
    q = np.where(y.value > 0, x.value / divisor, 0.0)
    size = np.abs(q)
    least = divisor - y.worst
    first = x.worst + size * y.worst
    worst = np.where(first == 0, 0.0, np.where(least > 0, first / least, np.inf))
    second = np.where(np.isfinite(worst), worst - first / divisor, np.inf)
    return Ball(
        q,
        worst,
        (x.fixed + size * y.fixed) / divisor + np.maximum(second, 0.0),
        (x.spread + size * y.spread) / divisor,
    )


def exponential(x: Ball, base: float) -> Ball:
    """exp(base x): the error of the argument becomes a relative one."""
    value = np.exp(base * x.value)
    growth = np.expm1(base * x.worst)
    second = np.where(np.isfinite(growth), growth - base * x.worst, np.inf)
    # What underflows here may be computed as something else.
    normal = value >= np.finfo(np.float64).tiny
    largest = np.exp(base * (x.value + x.worst))
    return Ball(
        value,
        np.where(normal, value * growth, largest),
        np.where(normal, value * (base * x.fixed + second), largest),
        value * base * x.spread,
    )


def logarithm(x: Ball) -> Ball:
    ratio = np.minimum(x.worst / np.where(x.value > 0, x.value, 1.0), 1.0)
    worst = -np.log1p(-ratio)
    return Ball(
        np.log(x.value),
        worst,
        x.fixed / x.value + worst - ratio,
        x.spread / x.value,
    )


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a recipe's operations add to a ball's errors; collects what may overflow."""

    recipe: Recipe
    kind: Kind
    overflows: set[str] = dataclasses.field(default_factory=set)

    @property
    def roundoff(self) -> float:
        return self.recipe.carrier.unit_roundoff

    def step(
        self,
        name: str,
        x: Ball,
        unit: Unit = ONE,
        extra: Size = 0.0,
        extra_spread: Size = 0.0,
    ) -> Ball:
        """Rounding of `x` by the recipe's step `name`.

        `unit` is what one computed unit is worth in `x`. The computed number has
        further errors, held elsewhere: at most `extra`, and of spread `extra_spread`.
        """
        kept = self._kept(name)
        fmt, carrier = kept.format, self.recipe.carrier
        if (
            fmt.mantissa_bits >= carrier.mantissa_bits
            and fmt.exponent_bits >= carrier.exponent_bits
        ):
            return x
        nearest = kept.rounding is Rounding.NEAREST_EVEN
        u = fmt.unit_roundoff * (1 if nearest else 2)
        x = self.perturb(
            x,
            u,
            underflow(fmt, carrier, nearest) * unit.high,
            extra,
            # A stochastic rounding lies in an interval of one spacing, as one to
            # nearest does; only the latter's being centred is an assumption.
            None
            if kept.rounding is Rounding.TOWARD_ZERO
            else fmt.unit_roundoff * (np.abs(x.value) + extra),
            extra_spread,
        )
        return self.clipped(name, x, unit, extra)

    def _kept(self, name: str) -> Step:
        kept = getattr(self.recipe, name)
        return kept if isinstance(kept, Step) else Step(kept)  # `inputs`

    def clipped(self, name: str, x: Ball, unit: Unit = ONE, extra: Size = 0.0) -> Ball:
        """What the step `name` cuts off from beyond its format's range."""
        kept = self._kept(name)
        over = x.size + extra - kept.format.max_finite * unit.low
        if not np.any(over > 0):
            return x
        self.overflows.add(name)
        clips = kept.format.saturates or kept.rounding is Rounding.TOWARD_ZERO
        more = np.where(over > 0, over if clips else np.inf, 0.0)
        return x._replace(worst=x.worst + more, fixed=x.fixed + more)

    def whole(self, x: Ball, unit: Unit, extra_spread: Size) -> Ball:
        """`x` rounded to a multiple of a `unit`. Of terms far below it all may be lost,
        to one side: no part of the error is random."""
        error = np.where(x.size > 0, unit.high / 2, 0.0)
        if not np.isfinite(unit.high):
            self.overflows.add("dq_sum")
        if self.kind != "order":
            return self._add(x, error, None, error)
        spread = np.sqrt(x.spread**2 + unit.high * np.hypot(x.spread, extra_spread))
        return x._replace(worst=x.worst + error, spread=spread)

    def in_range(
        self, x: Ball, size: Size, unit: Unit = ONE, largest: float | None = None
    ) -> Ball:
        """`x`, unbounded where numbers up to `size` on its way may leave the carrier.

        That is, exceed its largest number or `largest`.
        """
        limit = self.recipe.carrier.max_finite if largest is None else largest
        # What is unbounded already has its reason elsewhere.
        over = np.isfinite(size) & (size > limit * unit.low)
        if not np.any(over):
            return x
        self.overflows.add("carrier")
        more = np.where(over, np.inf, 0.0)
        return x._replace(worst=x.worst + more, fixed=x.fixed + more)

    def carried(
        self, x: Ball, operations=1, unit: Unit = ONE, extra: Size = 0.0
    ) -> Ball:
        """`operations` roundings of the carrier, each of the size of x + `extra`."""
        u = np.expm1(operations * math.log1p(self.roundoff))
        tiny = operations * self.recipe.carrier.min_normal * unit.high
        size = math.sqrt(operations) * self.roundoff * (np.abs(x.value) + extra)
        x = self.perturb(x, u, tiny, extra, size)
        return self.in_range(x, x.size + extra, unit)

    def function(self, x: Ball, unit: Unit = ONE, extra: Size = 0.0) -> Ball:
        """The carrier's own error of exp, exp2 or log."""
        u = FUNCTION_ULPS * self.roundoff
        tiny = 2 * self.recipe.carrier.min_normal * unit.high
        size = u * np.abs(x.value) if self.kind == "order" else None
        x = self.perturb(x, u, tiny, extra, size)
        return self.in_range(x, x.size + extra, unit)

    def divided(self, x: Ball, y: Ball, unit: Unit = ONE) -> Ball:
        """x / y, where `unit` is y's."""
        return self.carried(quotient(x, self.divisor(y, unit)))

    def divisor(self, y: Ball, unit: Unit = ONE) -> Ball:
        """A compiler may multiply by 1 / y, which must not underflow."""
        return self.in_range(y, y.size, unit, 1 / self.recipe.carrier.min_normal)

    def exp(self, p: Ball, unit: Unit = ONE, extra: Size = 0.0) -> Ball:
        """The recipe's exp or exp2, given what it should be.

        A polynomial errs alike in every run, but for the roundings inside.
        """
        p = self.function(p, unit, extra)
        degree = self.recipe.exp2_degree
        if degree is None:
            return p
        p = self.carried(p, 2 * degree, unit, extra)
        if self.kind == "order":
            return p
        u = EXP2_POLYNOMIAL_ERROR[degree]
        return self.perturb(p, u, 0.0, extra, None)

    def dot(self, x: Ball, y: Ball, name: str, unit: Unit = ONE) -> Ball:
        """x @ y; errors of x are independent along the summed axis, y's not random."""
        size = np.abs(y.value)
        worst, fixed, variance = (
            a @ b
            for a, b in ((x.worst, size), (x.fixed, size), (x.spread**2, y.value**2))
        )
        if y.worst.any():
            more = x.size @ y.worst
            worst, fixed, size = worst + more, fixed + more, y.size
        result = Ball(x.value @ y.value, worst, fixed, np.sqrt(variance))
        n, squares = x.value.shape[-1], x.value**2 @ y.value**2
        aligned = self.aligned(x.size, size, name, unit)
        return self.summed(result, x.size @ size, squares, n, name, unit, aligned)

    def aligned(self, x, y, name: str, unit: Unit = ONE) -> Size:
        """At least 2^(sum of exponents) of every product, in a ball's units.

        `x` and `y` are the operands' sizes. The exponents are at most those of the
        operands themselves or, below their formats' normal range, of its lower end.
        """
        if self.recipe.dot_alignment is None:
            return 0.0
        recipe, made_by = self.recipe, _MADE_BY.get(name)
        made = recipe.query_format if name == "logits" else recipe.inputs
        if made_by is not None:
            # None is `dq_dlogits` alone.
            made = (getattr(recipe, made_by) or recipe.dlogits).format
        right = recipe.query_format if name == "dk_accumulator" else recipe.inputs
        x = np.maximum(x, made.min_normal * unit.high)
        return x @ np.maximum(y, right.min_normal)

    def row_sum(self, x: Ball, name: str, unit: Unit = ONE) -> Ball:
        """x summed over its last axis, which stays; errors are independent along it."""

        def over(terms):
            return terms.sum(-1, keepdims=True)

        spread = np.sqrt(over(x.spread**2))
        result = Ball(over(x.value), over(x.worst), over(x.fixed), spread)
        n = x.value.shape[-1]
        squares = over(x.value**2)
        return self.summed_row(result, over(x.size), squares, n, name, unit)

    def carrier_sum(self, x: Ball, absolute, squares, n: int, unit=ONE) -> Ball:
        """A sum x of n products in any order, of absolute values adding to `absolute`.

        `squares` is the sum of their squares. The partial sums are at most `absolute`;
        over all orders the mean of the sum of their squares is
        (n + 1) (squares / 6 + x^2 / 3), which the mode "order" takes.
        """
        u = SUM_ROUNDOFFS * self.roundoff
        tiny = 2 * n * self.recipe.carrier.min_normal * unit.high
        if self.kind == "order":
            size = u * np.sqrt((n + 1) * (squares / 6 + x.value**2 / 3))
        else:
            size = math.sqrt(n) * u * absolute
        error = np.expm1(n * math.log1p(u)) * absolute + np.where(absolute, tiny, 0.0)
        x = self._add(x, error, size, error - n * u * absolute)
        return self.in_range(x, absolute + error, unit)

    def summed(
        self,
        x: Ball,
        absolute,
        squares,
        n: int,
        name: str,
        unit: Unit = ONE,
        aligned: Size = 0.0,
        extra: tuple[Size, Size] = (0.0, 0.0),
    ) -> Ball:
        """As `carrier_sum`, and rounded on its way as `dot_accumulator` says.

        `aligned`, of the operands, is for `dot_alignment`. `extra` and its spread are
        errors of the sum that are held elsewhere; `absolute` counts them.
        """
        x = self.carrier_sum(x, absolute, squares, n, unit)
        if self.recipe.dot_alignment is not None:
            x = self._cut(x, absolute, n, unit, aligned)
        return self._chained("dot_accumulator", x, absolute, n, name, unit, extra)

    def summed_row(
        self, x: Ball, absolute, squares, n: int, name: str, unit: Unit = ONE
    ) -> Ball:
        """As `summed`, by `rowsum_accumulator`."""
        x = self.carrier_sum(x, absolute, squares, n, unit)
        return self._chained("rowsum_accumulator", x, absolute, n, name, unit)

    def _cut(self, x: Ball, absolute, n: int, unit: Unit, aligned: Size) -> Ball:
        """The sum x of addends that `dot_alignment` F cuts off: n, and one for a run.

        Each loses less than 2^(E - F) and 2^E is at most the largest of the running
        sum, the least normal number of its format and `aligned`. What was cut from the
        running sum, or rounded, left it no larger than all products' sizes rounded up.
        """
        assert self.recipe.dot_alignment is not None and self.recipe.dot_chunk
        rounds = math.ceil(n / self.recipe.dot_chunk)
        kept = self.recipe.dot_accumulator.format
        grown = np.exp(rounds * 2 * kept.unit_roundoff) * (
            absolute + rounds * kept.min_normal * unit.high
        )
        bit = 2.0**-self.recipe.dot_alignment * np.maximum(grown, aligned)
        error = np.where(absolute, (n + rounds) * bit, 0.0)
        # All are cut toward zero: not centred, whatever the kind of bound.
        if self.kind != "order":
            return self._add(x, error, None, error)
        size = math.sqrt(n + rounds) * bit / 2
        return self._add(x, error, np.where(absolute, size, 0.0), 0.0)

    def _chained(
        self,
        step: str,
        x: Ball,
        absolute,
        n: int,
        name: str,
        unit: Unit,
        extra: tuple[Size, Size] = (0.0, 0.0),
    ) -> Ball:
        """The sum x rounded to `step` after every run of n products."""
        kept = getattr(self.recipe, step)
        if kept.format == self.recipe.carrier:
            return x
        u = SUM_ROUNDOFFS * self.roundoff
        grown = np.expm1(n * math.log1p(u)) * absolute
        rounds = math.ceil(n / (self.recipe.dot_chunk or n))
        if rounds == 1:
            return self.step(step, x, unit, *extra)
        nearest = kept.rounding is Rounding.NEAREST_EVEN
        u = kept.format.unit_roundoff * (1 if nearest else 2)
        growth = np.exp(rounds * math.log1p(u))
        tiny = underflow(kept.format, self.recipe.carrier, nearest) * unit.high
        total = absolute + grown
        error = (growth - 1) * total + np.where(total, rounds * growth * tiny, 0.0)
        if np.any(growth * total > kept.format.max_finite * unit.low):
            self.overflows.add(f"{step} of {name}")
            over = growth * total > kept.format.max_finite * unit.low
            error = np.where(over, np.inf, error)
        if kept.rounding is Rounding.TOWARD_ZERO and self.kind != "order":
            return self._add(x, error, None, error)
        size = math.sqrt(rounds) * kept.format.unit_roundoff * absolute
        return self._add(x, error, size, error - rounds * u * absolute)

    def perturb(
        self,
        x: Ball,
        u: float,
        tiny: Size,
        extra: Size,
        random: Size | None,
        extra_spread: Size | None = None,
    ) -> Ball:
        """x + d with |d| <= u (|computed x| + extra) + tiny, and 0 stays 0.

        `random` bounds the part of d of first order that is random, None if none is.
        With `extra_spread` d is the rounding of a step, which may flip.
        """
        size = x.size + extra
        error = np.where(size > 0, u * size + tiny, 0.0)
        if self.kind == "order" and extra_spread is not None:
            spacing = 2 * u * np.abs(x.value)
            before = np.hypot(x.spread, extra_spread)
            spread = np.sqrt(x.spread**2 + spacing * before)
            return x._replace(worst=x.worst + error, spread=spread)
        return self._add(x, error, random, np.where(size > 0, u * x.worst + tiny, 0.0))

    def _add(self, x: Ball, error, random, rest) -> Ball:
        """x with an error of a random part up to `random`, and of a `rest`."""
        if random is None:
            rest, random = error, 0.0
        if self.kind == "order":
            rest = 0.0
        spread = np.hypot(x.spread, random)
        return Ball(x.value, x.worst + error, x.fixed + rest, spread)


def underflow(fmt: NumberFormat, carrier: NumberFormat, nearest: bool) -> float:
    """Error of a rounding in the subnormal range; a carrier may flush its own."""
    if fmt.exponent_bits >= carrier.exponent_bits or not fmt.has_subnormals:
        return fmt.min_normal
    return fmt.min_positive / 2 if nearest else fmt.min_positive
