"""Softmax of a block of logits, and of the sums so far, in Hopper's forward kernel.

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

# Where the maximum of a row is this far from 0, in units of log2, its unit is a coarser
# one (`Softmax.origin`).
FAR = 2.0**27


class State(NamedTuple):
    """Softmax of each row over the blocks so far.

    Attributes:
      top: the largest logit.
      origin: what is subtracted in the exponent, -inf of a row without keys.
      row_sum: l, whose sum over a row's threads is still to be taken (`partial_sum`).
    """

    top: jax.Array
    origin: jax.Array
    row_sum: jax.Array


class Softmax(NamedTuple):
    """How blocks are added to a `State`.

    Attributes:
      unit: what logits are multiplied by in the exponent, above 0.
      dtype: of P as an operand.
      blind_rows: whether a row may have seen nothing so far.
      rescale_threshold, repeated_max_factor: those of `Recipe`.
      log2_scale: log2 of its `probability_scale`, which P and l have.
    """

    unit: float
    dtype: jnp.dtype
    blind_rows: bool
    rescale_threshold: float = 0.0
    repeated_max_factor: float | None = None
    log2_scale: int = 0

    def add(
        self, s: jax.Array, before: State | None, floor: jax.Array | None = None
    ) -> tuple[State, jax.Array, jax.Array | None]:
        """(state, P, correction of what is summed already or None).

        `before`: None for the first block. `floor`: where the largest logit starts
        then (`of_sink`); None: below everything.
        """
        top = s.max(axis=1)
        if self.repeated_max_factor is not None:
            top = self._raised(s, top, self.repeated_max_factor)
        earlier = floor if before is None else before.top
        if earlier is not None:
            top = jnp.maximum(earlier, top)
        origin = self.origin(top)
        if self.rescale_threshold and earlier is not None:
            start = self.origin(earlier) if before is None else before.origin
            stays = origin - start <= self.rescale_threshold
            top = jnp.where(stays, earlier, top)
            origin = jnp.where(stays, start, origin)
        base = finite(origin) if self.blind_rows else origin
        unit = jnp.where(self._is_far(top), self._coarse, self.unit)
        p = jnp.exp2(s * along_rows(unit, s.shape) - along_rows(base, s.shape))
        row_sum = partial_sum(p)
        correction = None
        if before is not None:
            correction = jnp.exp2(before.origin - base)
            row_sum += before.row_sum * along_rows(correction, row_sum.shape)
        return State(top, origin, row_sum), p.astype(self.dtype), correction

    def origin(self, top: jax.Array) -> jax.Array:
        """What is subtracted in the exponent of rows with these largest logits.

        m less log2 of P's scale, unless that is far from 0. The product in
        P = 2^(top unit - m) is not rounded, and m is. Where FP32 numbers lie 8 apart
        and more P so is anything, which as an FP16 number may be infinite or nothing,
        and trainings that lost their hold do have logits of 1e9. There the unit is a
        power of two, 1.5 to 3 times as large, so that both are exact, and P is 1
        whatever its scale. Of the next smaller logit it is 2^-8 at most, and 2^-2.7 by
        the unit itself, but to tell the two apart logits are rounded too far. The
        origin grows with the logit all the same, and between a far row and one that is
        not the correction is 0.
        """
        row_max = top * self.unit
        if self.log2_scale:
            # The next number of FP32, one that no logit, times its unit, is above: by
            # 3/4 to 3/2 of the last place, which rounds to 1. With the product rounded
            # down by 1, P would be 2, and 2^15 P infinite as an FP16 number: so it is
            # from logits of 1e7 on. What is infinite, and NaN here, is far.
            row_max = jnp.abs(row_max) * (1.5 * 2.0**-24) + row_max
        if self.log2_scale:
            row_max = row_max - self.log2_scale
        return jnp.where(self._is_far(top), top * self._coarse, row_max)

    def of_sink(self, sink: jax.Array) -> jax.Array:
        """What a logit would be, before `unit`, to be this sink."""
        return sink * (LOG2_E / self.unit)

    def _is_far(self, top: jax.Array) -> jax.Array:
        return jnp.abs(top) >= FAR / self.unit

    @property
    def _coarse(self) -> float:
        return 2.0 ** math.frexp(1.5 * self.unit)[1]

    def in_log2(self, top: jax.Array, origin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(m in units of log2 wherever it is, what undoes the scale of P and l)."""
        far = self._is_far(top)
        undo = jnp.where(far, 1.0, 2.0**-self.log2_scale)
        return jnp.where(far, top * self.unit, origin + self.log2_scale), undo

    def whole(self, state: State) -> tuple[jax.Array, jax.Array]:
        """(m rounded to a whole number, what undoes that, too, in P and l)."""
        row_max, undo = self.in_log2(state.top, state.origin)
        whole = lax.round(row_max, lax.RoundingMethod.TO_NEAREST_EVEN)
        return whole, undo * jnp.exp2(row_max - finite(whole))

    def _raised(self, s: jax.Array, top: jax.Array, factor: float) -> jax.Array:
        """A block's maxima, those that repeat times the factor or, below 0, as 0."""
        repeated = jnp.where(s == along_rows(top, s.shape), 1.0, 0.0)
        count = partial_sum(repeated).sum(axis=1)
        raised = jnp.where(top > 0.0, top * factor, 0.0)
        # Where all is hidden each key repeats -inf.
        raised = jnp.where(top == -jnp.inf, top, raised)
        return jnp.where(count > 1.0, raised, top)

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
        top, origin, shrink = state.top, state.origin, 1.0
        if sink is not None:
            of_sink = self.of_sink(sink)
            top = jnp.maximum(top, of_sink)
            origin = self.origin(top)
        if self.blind_rows:
            origin = finite(origin)
        in_log2, undo = self.in_log2(top, origin)
        if sink is not None:
            far = self._is_far(top)
            exponent = jnp.where(far, of_sink * self._coarse, sink * LOG2_E)
            # P's scale as a factor: in the exponent it would cost 4 of its last bits.
            weight = jnp.exp2(exponent - jnp.where(far, origin, in_log2))
            weight *= jnp.where(far, 1.0, 2.0**self.log2_scale)
            shrink = jnp.exp2(state.origin - origin)
            row_sum = row_sum * shrink + weight
        inverse = shrink / row_sum
        # A raised maximum may leave nothing of a row.
        if self.blind_rows or self.repeated_max_factor is not None:
            inverse = jnp.where(row_sum == 0.0, 0.0, inverse)
        lse = in_log2 * LN_2 + jnp.log(row_sum * undo)
        if self.blind_rows and sink is not None:
            # With a threshold m began with the sink.
            by_sum = bool(self.rescale_threshold)
            alone = of_keys == 0.0 if by_sum else state.top == -jnp.inf
            lse = jnp.where(alone, sink, lse)
        return inverse, lse
