"""Softmax of a block of logits in Hopper's forward kernel, and what it does to the sums
so far.

`Recipe` defines the options. A row's maximum m, in units of log2, is renewed only where
it grows by more than `rescale_threshold` (FlashAttention-4, arXiv 2603.05451), and what
is summed is then rescaled only by warps that have such a row. `repeated_max_factor`
raises the maximum of a block that has it more than once (Qiu & Yao, arXiv 2510.04212),
which takes one more comparison for each logit.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_jax.formats import FP16
from attn_jax.kernels.tiles import (
    LN_2,
    LOG2_E,
    along_rows,
    any_of_warp,
    finite,
    partial_sum,
)

# Of `Recipe.probability_scale` where P is FP16 and inputs are BF16: P below 2^-14 of a
# row's largest would lose bits.
LOG2_P_SCALE = FP16.max_exponent
P_SCALE = 2.0**LOG2_P_SCALE

# Where the maximum of a row is this far from 0 its unit is a coarser one
# (`Softmax.placed`).
FAR = 2.0**27


class State(NamedTuple):
    """Softmax of each row over the blocks so far: m in units of log2 (`Softmax.placed`
    says where it is not), and l, whose sum over a row's threads is still to be taken
    (`partial_sum`)."""

    row_max: jax.Array
    row_sum: jax.Array


class Softmax(NamedTuple):
    """How blocks are added to a `State`.

    Attributes:
      unit: what logits are multiplied by in the exponent.
      dtype: of P as an operand.
      blind_rows: whether a row may have seen nothing so far.
      rescale_threshold, repeated_max_factor: those of `Recipe`.
      log2_scale: log2 of its `probability_scale`, which P and l have.
      whole_maxima: m is rounded to a whole number, so that every correction of what is
        summed is a power of two, and exact, where the hardware's exp2 is off by some
        2^-22. P is at most 2^(1/2) then.
    """

    unit: float
    dtype: jnp.dtype
    blind_rows: bool
    rescale_threshold: float = 0.0
    repeated_max_factor: float | None = None
    log2_scale: int = 0
    whole_maxima: bool = False

    def add(
        self, s: jax.Array, before: State | None, floor: jax.Array | None = None
    ) -> tuple[State, jax.Array, jax.Array | None]:
        """(state, P, correction of what is summed already or None).

        `before`: None for the first block. `floor`: where m starts then, a sink's
        logit in units of log2; None: below everything.
        """
        top = s.max(axis=1)
        row_max = top * self.unit
        if self.repeated_max_factor is not None:
            row_max = self._raised(s, row_max, self.repeated_max_factor)
        if self.log2_scale:
            row_max = not_below(row_max)
        if self.whole_maxima:
            row_max = lax.round(row_max, lax.RoundingMethod.TO_NEAREST_EVEN)
        row_max = self.placed(row_max, top)
        m = floor if before is None else before.row_max
        if m is not None:
            larger = jnp.maximum(m, row_max)
            row_max = larger
            if self.rescale_threshold:
                row_max = jnp.where(larger - m <= self.rescale_threshold, m, larger)
        base = finite(row_max) if self.blind_rows else row_max
        unit, origin = self.unit, base - self.log2_scale if self.log2_scale else base
        if self._has_far_rows:
            far = is_far(base)
            unit = along_rows(jnp.where(far, self._coarse, unit), s.shape)
            origin = jnp.where(far, base, origin)
        p = jnp.exp2(s * unit - along_rows(origin, s.shape))
        row_sum = partial_sum(p)
        correction = None
        if before is not None:
            correction = jnp.exp2(before.row_max - base)
            row_sum += before.row_sum * along_rows(correction, row_sum.shape)
        return State(row_max, row_sum), p.astype(self.dtype), correction

    def of_sink(self, sink: jax.Array) -> jax.Array:
        """m of a row that has this sink alone."""
        if not self._has_far_rows:
            return sink * LOG2_E
        return self.placed(sink * LOG2_E, sink * (LOG2_E / self.unit))

    def placed(self, row_max: jax.Array, top: jax.Array) -> jax.Array:
        """m of a row whose largest logit is `top`: `row_max`, unless that is far.

        The product in P = 2^(top unit - m) is not rounded, and m is. Where FP32 numbers
        lie 8 apart and more P so is anything, which as an FP16 number may be infinite
        or nothing, and trainings that lost their hold do have logits of 1e9. There the
        unit is a power of two, 1.5 to 3 times as large, so that both are exact and P is
        1. Of the next smaller logit it is 2^-8 at most, and 2^-2.7 by the unit itself,
        but to tell the two apart logits are rounded too far. m grows with the logit all
        the same, and between a far row and one that is not 2^(m - m') is 0.
        """
        if not self._has_far_rows:
            return row_max
        coarse = top * self._coarse
        return jnp.where(is_far(coarse), coarse, row_max)

    @property
    def _has_far_rows(self) -> bool:
        """Not where all logits are 0, or maxima raised beyond them anyway."""
        return self.unit > 0.0 and self.repeated_max_factor is None

    @property
    def _coarse(self) -> float:
        return 2.0 ** math.frexp(1.5 * self.unit)[1]

    def in_log2(self, row_max: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """(m in units of log2 wherever it is, what undoes the scale of P and l)."""
        if not self._has_far_rows:
            return row_max, 2.0**-self.log2_scale
        far = is_far(row_max)
        undo = jnp.where(far, 1.0, 2.0**-self.log2_scale)
        return jnp.where(far, row_max * (self.unit / self._coarse), row_max), undo

    def _raised(self, s: jax.Array, row_max: jax.Array, factor: float) -> jax.Array:
        """A block's maxima, those that repeat times the factor or, below 0, as 0."""
        repeated = jnp.where(s * self.unit == along_rows(row_max, s.shape), 1.0, 0.0)
        count = partial_sum(repeated).sum(axis=1)
        raised = jnp.where(row_max > 0.0, row_max * factor, 0.0)
        # Where all is hidden each key repeats -inf.
        raised = jnp.where(row_max == -jnp.inf, row_max, raised)
        return jnp.where(count > 1.0, raised, row_max)

    def rescaled(self, total: jax.Array, correction: jax.Array) -> jax.Array:
        """What is summed already, times the correction of its rows."""

        def rescale(total):
            return total * along_rows(correction, total.shape)

        if not self.rescale_threshold:
            return rescale(total)
        moved = jnp.where(correction == 1.0, 0, 1)
        return lax.cond(any_of_warp(moved) > 0, rescale, lambda x: x, total)

    def finished(
        self, state: State, sink: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """(what P V of all blocks is multiplied by, LSE in natural log) of each row.

        `sink`: the logit of one more key, without a value. Where it is all there is,
        LSE is the sink to the bit: dQ is to be 0 there.
        """
        row_sum = of_keys = state.row_sum.sum(axis=1)
        row_max, shrink = state.row_max, 1.0
        if sink is not None:
            of_sink = self.of_sink(sink)
            row_max = jnp.maximum(row_max, of_sink)
        if self.blind_rows:
            row_max = finite(row_max)
        in_log2, undo = self.in_log2(row_max)
        if sink is not None:
            shrink = jnp.exp2(state.row_max - row_max)
            row_sum = row_sum * shrink + jnp.exp2(of_sink - row_max) / undo
        inverse = shrink / row_sum
        # A raised maximum may leave nothing of a row.
        if self.blind_rows or self.repeated_max_factor is not None:
            inverse = jnp.where(row_sum == 0.0, 0.0, inverse)
        lse = in_log2 * LN_2 + jnp.log(row_sum * undo)
        if self.blind_rows and sink is not None:
            # With a threshold m began with the sink.
            by_sum = bool(self.rescale_threshold)
            alone = of_keys == 0.0 if by_sum else state.row_max == -jnp.inf
            lse = jnp.where(alone, sink, lse)
        return inverse, lse


def not_below(row_max: jax.Array) -> jax.Array:
    """The next number of FP32: one that no logit, times its unit, is above.

    Where a product with the unit is rounded down by 1, P is 2, and 2^15 P infinite as
    an FP16 number: so it is from logits of 1e7 on, which trainings that lose their hold
    do have.
    """
    # 3/4 to 3/2 of the last place, which rounds to 1. What is infinite stays so.
    more = jnp.minimum(jnp.abs(row_max), 2.0**126) * (1.5 * 2.0**-24)
    return row_max + more


def is_far(row_max: jax.Array) -> jax.Array:
    """Whether its unit is the coarse one."""
    return jnp.abs(row_max) >= FAR
