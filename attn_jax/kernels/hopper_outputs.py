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
    ROWS,
    WGMMA,
    along_rows,
    columns_at_once,
    finite,
    read_tile,
    write_tile,
)


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
        row_max, undo = softmax.whole(state)
        row_sum = state.row_sum.sum(axis=1) * undo
        m, l = (  # noqa: E741
            plgpu.load(of_rows.at[place], layout=ROWS, optimized=False)
            for of_rows in cast(Any, self)[:2]
        )
        larger = jnp.maximum(m, row_max)
        base = finite(larger)
        shrink, weight = jnp.exp2(m - base), jnp.exp2(row_max - base)
        self.row_max[place] = larger
        self.row_sum[place] = shrink * l + weight * row_sum
        total = cast(Any, self.total).at[b, :, n]
        group = columns_at_once(rows, width)
        shape = rows, group
        shrink, weight = (along_rows(x, shape) for x in (shrink, weight * undo))
        for column in range(0, width, group):
            part = lax.slice(acc, (0, column), (rows, column + group))
            old = read_tile(total, first_row, column, shape)
            columns = pl.ds(column, group)
            part = old * shrink + part * (weight * unscale)
            write_tile(total.at[pl.ds(first_row, rows), columns], part)
