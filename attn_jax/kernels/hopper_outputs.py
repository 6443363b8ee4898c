"""How a warpgroup of Hopper's forward kernel leaves the results of its rows."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from attn_jax.kernels import low_part
from attn_jax.kernels.hopper_softmax import Softmax, State
from attn_jax.kernels.tiles import (
    LN_2,
    ROWS,
    WGMMA,
    along_rows,
    columns_at_once,
    finite,
    read_tile,
    write_tile,
)
from attn_jax.span import Ended

LN_2_HIGH = 355 / 512  # Nine digits of log(2)


class Outputs(NamedTuple):
    """Of 16 bits, by way of shared memory, and what rounding drops, straight to memory.

    Attributes:
      out_gmem, low_gmem: out and `low_part`, or None.
      out_smem: a tile of the warpgroup, of `stored` columns.
    """

    out_gmem: Any
    low_gmem: Any
    out_smem: Any

    def write(self, out: jax.Array, b, n, first_row, stored: int) -> None:
        height, width = out.shape
        rows = pl.ds(first_row, height)
        for column in range(0, width, stored):
            part = lax.slice(out, (0, column), (height, column + stored))
            rounded = part.astype(self.out_gmem.dtype)
            # The stores before have been read out of shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.out_smem[...] = rounded
            plgpu.commit_smem()
            place = rows, n, pl.ds(column, stored)
            plgpu.copy_smem_to_gmem(self.out_smem, self.out_gmem.at[b, *place])
            if self.low_gmem is not None:
                low_part.store(
                    self.low_gmem.at[b, *place],
                    part,
                    rounded,
                    self.low_gmem.shape[1] - first_row,
                    WGMMA,
                )


def lse_of(row_max: jax.Array, row_sum: jax.Array) -> jax.Array:
    """log(2) m + log(l) of a whole m, rounded as FP32 is and off by 2^-23 or so.

    The hardware's log2 is off by some 2^-22 of itself, or below 1 by that: of l's
    exponent nothing is left to it. What whole numbers are multiplied by has nine
    digits, and is exact but for the rest.
    """
    exponent = lax.round(jnp.log2(row_sum), lax.RoundingMethod.TO_NEAREST_EVEN)
    near_one = row_sum * jnp.exp2(-exponent)
    exponent = row_max + exponent
    rest = exponent * (LN_2 - LN_2_HIGH) + jnp.log(near_one)
    return exponent * LN_2_HIGH + rest


class Carried(NamedTuple):
    """Rows over the keys so far, not yet divided: with logits S in units of log2

        m = max S        l = sum of 2^(S - m)        A = sum of 2^(S - m) V

    all FP32, and m rounded to a whole number: what is carried on is multiplied by
    powers of two alone, where the hardware's exp2 is off by some 2^-22. Rounded only
    here, behind P V: P of a row's largest logit is to be 1, which 16 bits hold. Of no
    keys m is -inf, l and A are 0. In a kernel, where they lie.
    """

    row_max: Float32[Array, "B N T"]
    row_sum: Float32[Array, "B N T"]
    total: Float32[Array, "B T N D"]
    AXES = 2, 2, 1  # of the rows

    def rows(self, first: int, count: int) -> "Carried":
        """So many of them."""
        return self._each(
            lambda x, axis: lax.slice_in_dim(x, first, first + count, axis=axis)
        )

    def padded(self, more: int) -> "Carried":
        """With more rows, of zeros, at the end."""
        return self._each(
            lambda x, axis: jnp.pad(
                x, [(0, more if i == axis else 0) for i in range(x.ndim)]
            )
        )

    def with_rows(self, new: "Carried", first: int) -> "Carried":
        """With other rows from the `first` on."""
        return Carried(
            *(
                lax.dynamic_update_slice_in_dim(x, rows, first, axis)
                for x, rows, axis in zip(self, new, self.AXES, strict=True)
            )
        )

    def _each(self, function: Callable[[Array, int], Array]) -> "Carried":
        return Carried(*map(function, self, self.AXES))

    def begin(
        self, acc: jax.Array, state: State, softmax: Softmax, unscale, b, n, first_row
    ) -> None:
        """Leaves here the keys of (acc, state), of some rows.

        `unscale`: what the values of `acc` are multiplied by, but for P's scale.
        """
        rows = pl.ds(first_row, acc.shape[0])
        row_max, undo = softmax.whole(state)
        self.row_max[b, n, rows] = row_max
        self.row_sum[b, n, rows] = state.row_sum.sum(axis=1) * undo
        self.total[b, rows, n] = acc * along_rows(undo * unscale, acc.shape)

    def add(
        self, acc: jax.Array, state: State, softmax: Softmax, unscale, b, n, first_row
    ) -> None:
        """Adds them to what is here."""
        rows, width = acc.shape
        place = b, n, pl.ds(first_row, rows)
        larger, row_sum, shrink, weight = self._with(state, softmax, place)
        self.row_max[place] = larger
        self.row_sum[place] = row_sum
        total = cast(Any, self.total).at[b, :, n]
        group = columns_at_once(rows, width)
        shape = rows, group
        shrink, weight = (along_rows(x, shape) for x in (shrink, weight))
        for column in range(0, width, group):
            part = lax.slice(acc, (0, column), (rows, column + group))
            old = read_tile(total, first_row, column, shape)
            columns = pl.ds(column, group)
            part = old * shrink + part * (weight * unscale)
            write_tile(total.at[pl.ds(first_row, rows), columns], part)

    def end(
        self, acc: jax.Array, state: State, softmax: Softmax, unscale, b, n, first_row,
        ended: Ended,
    ) -> None:  # fmt: skip
        """Leaves O and LSE of what is here and them: A / l, and log(2) m + log(l)."""
        rows, width = acc.shape
        place = b, n, pl.ds(first_row, rows)
        larger, row_sum, shrink, weight = self._with(state, softmax, place)
        inverse = self._leave_lse(larger, row_sum, place, ended)
        shrink, weight = shrink * inverse, weight * inverse

        def with_new(old, column):
            part = lax.slice(acc, (0, column), (rows, column + old.shape[1]))
            new = part * (along_rows(weight, old.shape) * unscale)
            return old * along_rows(shrink, old.shape) + new

        self._leave_out(with_new, (rows, width), b, n, first_row, ended)

    def end_alone(self, shape: tuple[int, int], b, n, first_row, ended: Ended) -> None:
        """The same of what is here, for rows that no more keys meet."""
        place = b, n, pl.ds(first_row, shape[0])
        m, l = self._of_rows(place)  # noqa: E741
        inverse = self._leave_lse(m, l, place, ended)

        def divided(old, column):
            del column
            return old * along_rows(inverse, old.shape)

        self._leave_out(divided, shape, b, n, first_row, ended)

    def _of_rows(self, place) -> list[jax.Array]:
        """m and l that are here."""
        return [
            plgpu.load(of_rows.at[place], layout=ROWS, optimized=False)
            for of_rows in cast(Any, self)[:2]
        ]

    def _with(self, state: State, softmax: Softmax, place) -> tuple[jax.Array, ...]:
        """(m, l) with these keys, and what A here, and theirs, are multiplied by."""
        row_max, undo = softmax.whole(state)
        row_sum = state.row_sum.sum(axis=1) * undo
        m, l = self._of_rows(place)  # noqa: E741
        larger = jnp.maximum(m, row_max)
        base = finite(larger)
        shrink, weight = jnp.exp2(m - base), jnp.exp2(row_max - base)
        return larger, shrink * l + weight * row_sum, shrink, weight * undo

    def _leave_lse(self, row_max, row_sum, place, ended: Ended) -> jax.Array:
        """LSE of rows; what their A is to be multiplied by is returned."""
        lse = lse_of(row_max, row_sum)
        seen = row_sum > 0.0
        cast(Any, ended.lse)[place] = jnp.where(seen, lse, -jnp.inf)
        return jnp.where(seen, 1.0 / row_sum, 0.0)

    def _leave_out(
        self, out: Callable, shape: tuple[int, int], b, n, first_row, ended: Ended
    ) -> None:
        """out(A, its first column) of some columns at a time, rounded and as it is."""
        rows, width = shape
        group = columns_at_once(rows, width)
        total = cast(Any, self.total).at[b, :, n]
        for column in range(0, width, group):
            old = read_tile(total, first_row, column, (rows, group))
            found = out(old, column)
            place = pl.ds(first_row, rows), n, pl.ds(column, group)
            for to in (ended.exact, ended.out):
                if to is not None:
                    to = cast(Any, to).at[b, *place]
                    write_tile(to, found.astype(to.dtype))
