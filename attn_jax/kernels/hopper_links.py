"""Splits long P V sums into links, as tensor cores cut off what they add up.

They cut an accumulator off toward zero at every addition
(`attn_jax.on_tensor_cores`): where P V adds up to something, the sum shrinks in
proportion to the number of keys, and delta, made of it, leaves rows of dS that do not
sum to zero. Here the blocks of `KEYS` keys are summed in one accumulator; the sums of
such links are added to nearest, in global memory, where a warpgroup has one place for
all its tiles.

Between links products and softmax do not overlap. On an H200 links of 4096 keys cost
9.8 % of the time at 16 384 keys, head dim 128 and no mask (each way against cuDNN in
its own run), and took dQ from 2.5 to 1.6 units on keys that drift (`drift` in
`audit.inputs`); longer ones have fewer such gaps, what they cost is not measured.
"""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels.hopper_softmax import Softmax, State
from attn_jax.kernels.tiles import (
    GROUP,
    ROWS,
    accumulator,
    along_rows,
    finite,
    read_tile,
)

# In one accumulator, or as many as fill their last block.
KEYS = 16_384


def attend_in_links(
    attend: Callable[..., tuple[jax.Array, State]],
    sums,
    first_step: jax.Array,
    last_step: jax.Array,
    *,
    link_steps: int,
    softmax: Softmax,
    floor: jax.Array | None,
) -> tuple[jax.Array, State]:
    """(sum of P V, state) of the steps first_step, ..., last_step.

    `attend(acc, first, last, before)` gives those of some steps, with the state of the
    steps before them. `sums` [rows, D] is FP32 in global memory. `floor`: where a row's
    largest logit starts, if not at -inf.
    """
    rows, value_dim = sums.shape
    # In groups of columns, for the registers.
    group_shape = rows, GROUP
    starts = range(0, value_dim, GROUP)
    zeros = plgpu.layout_cast(jnp.zeros(group_shape, jnp.float32), plgpu.Layout.WGMMA)
    for start in starts:
        sums[:, pl.ds(start, GROUP)] = zeros

    def link(number, before):
        first = first_step + number * link_steps
        last = jnp.minimum(first + (link_steps - 1), last_step)
        acc, state = pl.run_scoped(
            lambda acc: attend(acc, first, last, before), accumulator(rows, value_dim)
        )
        base = finite(state.origin) if softmax.blind_rows else state.origin
        shrink = along_rows(jnp.exp2(before.origin - base), group_shape)
        for start in starts:
            part = lax.slice(acc, (0, start), (rows, start + GROUP))
            old = read_tile(sums, 0, start, group_shape)
            sums[:, pl.ds(start, GROUP)] = old * shrink + part
        return state

    least = jnp.full((rows,), -jnp.inf if floor is None else floor, jnp.float32)
    least = plgpu.layout_cast(least, ROWS)
    nothing = State(least, softmax.origin(least), zeros)
    links = lax.div(last_step - first_step + link_steps, jnp.int32(link_steps))
    state = lax.fori_loop(jnp.int32(0), links, link, nothing)
    return read_tile(sums, 0, 0, (rows, value_dim)), state
