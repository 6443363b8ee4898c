"""Forward attention for Hopper (sm_90a) in Mosaic GPU, with switches to be measured.

    S = scale * Q K^T        P = exp(S - m), m = rowmax(S)        l = rowsum(P)
    out = P V / l            LSE = m + log(l)

A CTA works off a list of tiles. Consumer warpgroups own 64 queries of a tile each; one
warpgroup feeds them Q, K and V by TMA, across the borders of tiles.

Blocks of keys are taken from the last to the first: only the first block that a
warpgroup meets can need a mask, so the loop over the others has no branch.

Where it rounds (16 bit: the inputs' format):
  S, m, l, the correction factors and the accumulator are FP32;
  P is rounded to 16 bit as the operand of P V; l sums the unrounded P;
  out is rounded once. With `residual`, what that rounding dropped is kept as a second
  16-bit tensor: out + out_low carries about 16 bits into the backward pass.
exp2 with scale * log2(e) folded in replaces exp, so m is kept in units of log2.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.tiles import (
    LN_2,
    LOG2_E,
    accumulator,
    along_rows,
    smem_tile,
    visible,
)

MULTIPROCESSORS = 132
ROWS_A_WARPGROUP = 64
# What K and V of the heads in flight may take of the L2 cache (50 MB).
L2_SHARE = 24 * 2**20
# Registers a thread (consumers, producer) by number of consumer warpgroups: setmaxnreg
# moves them from the loading warpgroup to the others.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32), 4: (112, 24)}
# Columns that share a register pair in a wgmma accumulator.
GROUP = 8
ROUND_BY_ADDING = 1.5 * 2.0**23
SMALLEST_EXPONENT = -126.0
# A hidden logit that stays a number when the lowest bits of its mantissa are written.
HIDDEN = -1e30


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the forward kernel cuts and orders its work.

    Attributes:
      columns: keys in a block, a multiple of 64.
      warpgroups: consumer warpgroups of a CTA, 64 queries each.
      stages, value_stages: blocks of K and of V in flight in shared memory.
      ahead: the logits of the next block are under way during a block's softmax (two
        sets of logits in registers); else only P V of the block before.
      persistent: one CTA a multiprocessor; else one CTA a tile.
      polynomial: eighths of the exponentials that a polynomial evaluates, not the
        special-function unit.
      degree: of that polynomial.
      partial_sums: l is kept per thread and summed across threads at the end.
      own_out: out has its own shared memory, so that its store overlaps with the next
        tile; else it takes Q's.
      snake: every other round of a persistent grid runs through the list backwards.
      q_registers: Q is an operand from registers, which leaves shared memory more time
        for K.
      arg_max: also returns the key with the largest logit of each row (up to 2**-16
        relative, int32, B N T).
    """

    columns: int = 128
    warpgroups: int = 2
    stages: int = 2
    value_stages: int = 2
    ahead: bool = False
    persistent: bool = True
    polynomial: int = 0
    degree: int = 5
    partial_sums: bool = True
    own_out: bool = True
    snake: bool = True
    q_registers: bool = False
    arg_max: bool = False

    @property
    def tile(self) -> int:
        return ROWS_A_WARPGROUP * self.warpgroups


# c_1, c_2, ... of 2**f = 1 + c_1 f + c_2 f**2 + ... on [-1/2, 1/2], smallest relative
# error: 1.0e-4, 2.9e-6, 1.7e-7 (in FP32; the special-function unit's is 2.4e-7).
EXP2_COEFFICIENTS = {
    3: (0.6932829, 0.24221095, 0.05500893),
    4: (0.6931242, 0.24024099, 0.055906426, 0.009582853),
    5: (0.693147, 0.24022242, 0.055507336, 0.009671513, 0.0013264727),
}


def forward(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K H"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    plan: Plan,
    residual: bool,
) -> tuple[
    Float[Array, "B T N H"], Float[Array, "B T N H"] | None, Float32[Array, "B N T"]
]:
    """Returns (out, what rounding dropped from out or None, LSE in natural log).

    Sequences are padded to a multiple of 8; `query_count` and `key_count` say how many
    rows are real. `scale` is not negative. A causal row i sees the keys j <= i.
    """
    batch, _, query_heads, head_dim = query.shape
    heads_a_key_head = query_heads // key.shape[2]
    dtype = query.dtype
    rows, columns, tile_rows = ROWS_A_WARPGROUP, plan.columns, plan.tile
    warpgroups = plan.warpgroups
    log2_scale = scale * LOG2_E
    tile_count = pl.cdiv(query_count, tile_rows)
    key_blocks = pl.cdiv(key_count, columns)
    kv_bytes = 2 * key.shape[1] * head_dim * dtype.itemsize
    work = WorkList(batch, query_heads, tile_count, is_causal, plan.snake, kv_bytes)
    ctas = min(MULTIPROCESSORS, work.count) if plan.persistent else work.count
    consumer_registers, producer_registers = REGISTERS[warpgroups]

    def blocks_seen(row_end):
        """How many key blocks the queries before `row_end` see."""
        if not is_causal:
            return jnp.int32(key_blocks)
        blocks = lax.div(row_end + jnp.int32(columns - 1), jnp.int32(columns))
        return jnp.minimum(blocks, jnp.int32(key_blocks))

    def blind_steps(tile):
        """1 if a block that no row sees is appended: `Plan.ahead` wants two blocks."""
        if not plan.ahead:
            return jnp.int32(0)
        fewest = blocks_seen(tile * tile_rows + rows)
        return (fewest == 1).astype(jnp.int32)

    hidden = HIDDEN if plan.arg_max else -jnp.inf
    may_be_blind = plan.ahead and (is_causal or key_blocks == 1)

    def slot(step):
        return lax.rem(step, jnp.int32(plan.stages))

    def v_slot(step):
        return lax.rem(step, jnp.int32(plan.value_stages))

    def attention_forward(
        q_gmem, k_gmem, v_gmem, out_gmem, low_gmem, lse_gmem, key_gmem, smem, barriers
    ):
        q_smem, k_smem, v_smem, out_smem, low_smem = smem
        q_ready, k_ready, v_ready, q_free, k_free, v_free = barriers
        cta = lax.axis_index("cta")
        warpgroup = lax.axis_index("warpgroup")
        turns = work.turns(cta, ctas)

        def consume_tile(turn, first_step):
            """Attention of a warpgroup's rows; returns the next tile's first step."""
            b, n, tile = work.place(cta, turn, ctas)
            first_row = tile * tile_rows + warpgroup * rows
            q_slice = (b, pl.ds(first_row, rows), n)
            q_tile = q_smem.at[warpgroup]
            tile_blocks = blocks_seen((tile + 1) * tile_rows)
            blocks = blocks_seen(first_row + rows)
            blind = blind_steps(tile)
            start = first_step + (tile_blocks - blocks)
            last = first_step + tile_blocks + blind - 1

            def block_of(step):
                return blocks - 1 - (step - start)

            def k_of(step):
                return k_smem.at[slot(step)].transpose((1, 0))

            def v_of(step):
                return v_smem.at[v_slot(step)]

            def hide(s):
                seen = visible(
                    s.shape,
                    query_start=first_row,
                    key_start=(blocks - 1) * columns,
                    key_count=key_count if key_count % columns else None,
                    is_causal=is_causal,
                )
                return jnp.where(seen, s, hidden)

            def softmax(s, block, state, eighths):
                """(state, P, correction); without a state it is the first block."""
                top, key_of_top = row_maximum(s, block * columns, plan.arg_max)
                top = top * log2_scale
                row_max, best_key = top, key_of_top
                if state is not None:
                    row_max = jnp.maximum(state.row_max, top)
                    if plan.arg_max:
                        rose = top > state.row_max
                        best_key = jnp.where(rose, key_of_top, state.best_key)
                shifted = s * log2_scale - along_rows(row_max, s.shape)
                p = exp2(shifted, eighths, plan.degree)
                row_sum = partial_sum(p) if plan.partial_sums else p.sum(axis=1)
                correction = None
                if state is not None:
                    correction = jnp.exp2(state.row_max - row_max)
                    factor = correction
                    if plan.partial_sums:
                        factor = along_rows(correction, row_sum.shape)
                    row_sum = state.row_sum * factor + row_sum
                return State(row_max, row_sum, best_key), p.astype(dtype), correction

            def rescale(acc, correction):
                old = acc[...]
                acc[...] = old * along_rows(correction, old.shape)

            def skip_blocks():
                """Blocks that only the warpgroups below see."""

                @pl.loop(first_step, start)
                def _(step):
                    plgpu.barrier_wait(k_ready.at[slot(step)])
                    plgpu.barrier_arrive(k_free.at[slot(step)])
                    plgpu.barrier_wait(v_ready.at[v_slot(step)])
                    plgpu.barrier_arrive(v_free.at[v_slot(step)])

            def first_logits(q):
                plgpu.barrier_wait(k_ready.at[slot(start)])

                def product(s_acc):
                    plgpu.wgmma(s_acc, q, k_of(start))
                    return s_acc[...]

                s = pl.run_scoped(product, accumulator(rows, columns))
                plgpu.barrier_arrive(k_free.at[slot(start)])
                return hide(s) if is_causal or key_count % columns else s

            def release_q():
                if plan.own_out:
                    plgpu.barrier_arrive(q_free)

            def steps(acc, q):
                """FlashAttention-3 (arXiv 2407.08608), Alg. 2: the softmax of a block
                overlaps with P V of the block before."""
                state, p, _ = softmax(first_logits(q), blocks - 1, None, 0)

                @pl.when(start < last)
                def _():
                    plgpu.barrier_wait(k_ready.at[slot(start + 1)])

                def step(now, carry):
                    state, p = carry

                    def products(s_acc):
                        plgpu.wgmma(s_acc, q, k_of(now))
                        plgpu.barrier_wait(v_ready.at[v_slot(now - 1)])
                        plgpu.wgmma(acc, p, v_of(now - 1))
                        # S is ready while P V still runs under the softmax below.
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                    s = pl.run_scoped(products, accumulator(rows, columns))
                    plgpu.barrier_arrive(k_free.at[slot(now)])
                    state, p, correction = softmax(
                        s, block_of(now), state, plan.polynomial
                    )

                    # This wait between the softmax and the wait for P V keeps ptxas
                    # from moving the latter above the exponentials.
                    @pl.when(now < last)
                    def _():
                        plgpu.barrier_wait(k_ready.at[slot(now + 1)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(v_free.at[v_slot(now - 1)])
                    rescale(acc, correction)
                    return state, p

                state, p = lax.fori_loop(start + 1, last + 1, step, (state, p))
                release_q()
                plgpu.barrier_wait(v_ready.at[v_slot(last)])
                return state, p

            def steps_ahead(acc, q):
                """The softmax of a block overlaps with P V of the block before and
                with Q K^T of the block after."""
                s = first_logits(q)

                def await_k(step):
                    @pl.when(step <= last)
                    def _():
                        plgpu.barrier_wait(k_ready.at[slot(step)])

                def under_products(step, s, state, eighths):
                    """Softmax of a block while products run. The wait before it keeps
                    ptxas from issuing them piecemeal under it; the one after it, from
                    awaiting them first."""
                    plgpu.barrier_wait(v_ready.at[v_slot(step)])
                    following = softmax(s, block_of(step), state, eighths)
                    await_k(step + 2)
                    plgpu.wgmma_wait(0)
                    return following

                def first(s_acc):
                    plgpu.barrier_wait(k_ready.at[slot(start + 1)])
                    plgpu.wgmma(s_acc, q, k_of(start + 1))
                    state, p, _ = under_products(start, s, None, 0)
                    plgpu.barrier_arrive(k_free.at[slot(start + 1)])
                    return state, p, plgpu.wgmma_accumulator_load(s_acc, wait_n=None)

                def step(now, carry):
                    state, p, s = carry

                    def products(s_acc):
                        plgpu.wgmma(acc, p, v_of(now - 1))
                        plgpu.wgmma(s_acc, q, k_of(now + 1))
                        following = under_products(now, s, state, plan.polynomial)
                        return plgpu.wgmma_accumulator_load(
                            s_acc, wait_n=None
                        ), following

                    s, (state, p, correction) = pl.run_scoped(
                        products, accumulator(rows, columns)
                    )
                    plgpu.barrier_arrive(v_free.at[v_slot(now - 1)])
                    plgpu.barrier_arrive(k_free.at[slot(now + 1)])
                    rescale(acc, correction)
                    return state, p, s

                carry = pl.run_scoped(first, accumulator(rows, columns))
                state, p, s = lax.fori_loop(start + 1, last, step, carry)
                release_q()
                if may_be_blind:
                    s = s + jnp.where(blind == 1, hidden, 0.0).astype(jnp.float32)
                plgpu.wgmma(acc, p, v_of(last - 1))
                state, p, correction = under_products(last, s, state, 0)
                plgpu.barrier_arrive(v_free.at[v_slot(last - 1)])
                rescale(acc, correction)
                return state, p

            def attend(acc):
                if is_causal and warpgroups > 1:
                    skip_blocks()
                plgpu.barrier_wait(q_ready.at[warpgroup])
                q = q_tile[...] if plan.q_registers else q_tile
                state, p = (steps_ahead if plan.ahead else steps)(acc, q)
                plgpu.wgmma(acc, p, v_of(last))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v_free.at[v_slot(last)])
                return acc[...], state

            acc, state = pl.run_scoped(attend, accumulator(rows, head_dim))
            row_sum = state.row_sum
            if plan.partial_sums:
                row_sum = row_sum.sum(axis=1)
            out = acc * along_rows(1.0 / row_sum, acc.shape)
            rounded = out.astype(dtype)
            # The stores of the tile before have been read out of shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_tile = out_smem.at[warpgroup] if plan.own_out else q_tile
            out_tile[...] = rounded
            row_slice = (b, n, pl.ds(first_row, rows))
            lse_gmem[row_slice] = state.row_max * LN_2 + jnp.log(row_sum)
            if plan.arg_max:
                key_gmem[row_slice] = state.best_key
            if residual:
                low_smem[warpgroup] = (out - rounded.astype(jnp.float32)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tile, out_gmem.at[q_slice])
            if residual:
                plgpu.copy_smem_to_gmem(low_smem.at[warpgroup], low_gmem.at[q_slice])
            if not plan.own_out:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free)
            return last + 1

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(consumer_registers, action="increase")
            lax.fori_loop(jnp.int32(0), turns, consume_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(producer_registers, action="decrease")

            def load(gmem, smem, ready, free, at, step, stages, b, n, block):
                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(free.at[at])

                keys = pl.ds(block * columns, columns)
                kv_head = lax.div(n, jnp.int32(heads_a_key_head))
                plgpu.copy_gmem_to_smem(
                    gmem.at[b, keys, kv_head], smem.at[at], ready.at[at]
                )

            def load_k(step, *what):
                k = (k_gmem, k_smem, k_ready, k_free, slot(step))
                load(*k, step, plan.stages, *what)

            def load_v(step, *what):
                v = (v_gmem, v_smem, v_ready, v_free, v_slot(step))
                load(*v, step, plan.value_stages, *what)

            def produce_tile(turn, carry):
                first_step, *before = carry
                b, n, tile = work.place(cta, turn, ctas)
                blocks = blocks_seen((tile + 1) * tile_rows)
                end = first_step + blocks + blind_steps(tile)

                def block_of(step):
                    return jnp.maximum(blocks - 1 - (step - first_step), 0)

                # V is needed a step later than K.
                load_k(first_step, b, n, block_of(first_step))

                @pl.when(turn > 0)
                def _():
                    load_v(first_step - 1, *before)
                    plgpu.barrier_wait(q_free)

                for index in range(warpgroups):
                    q_rows = pl.ds(tile * tile_rows + index * rows, rows)
                    plgpu.copy_gmem_to_smem(
                        q_gmem.at[b, q_rows, n], q_smem.at[index], q_ready.at[index]
                    )

                @pl.loop(first_step + 1, end)
                def _(step):
                    load_k(step, b, n, block_of(step))
                    load_v(step - 1, b, n, block_of(step - 1))

                return end, b, n, block_of(end - 1)

            zero = jnp.int32(0)
            end, *before = lax.fori_loop(
                zero, turns, produce_tile, (zero, zero, zero, zero)
            )
            load_v(end - 1, *before)
            # No barrier may be left with an arrival nobody saw.
            plgpu.barrier_wait(q_free)
            drain(end, plan.stages, lambda step: k_free.at[slot(step)])
            drain(end, plan.value_stages, lambda step: v_free.at[v_slot(step)])

    out_tile = (warpgroups, rows, head_dim)
    low = jax.ShapeDtypeStruct(query.shape, dtype) if residual else None
    free = functools.partial(plgpu.Barrier, num_arrivals=warpgroups)
    row_values = (batch, query_heads, tile_count * tile_rows)
    out, low, lse, best_key = plgpu.kernel(
        attention_forward,
        out_type=[
            jax.ShapeDtypeStruct(query.shape, dtype),
            low,
            # A plain store is not cut off at the array's end: whole tiles.
            jax.ShapeDtypeStruct(row_values, jnp.float32),
            jax.ShapeDtypeStruct(row_values, jnp.int32) if plan.arg_max else None,
        ],
        scratch_types=[
            (
                smem_tile(out_tile, dtype),
                smem_tile((plan.stages, columns, head_dim), dtype),
                smem_tile((plan.value_stages, columns, head_dim), dtype),
                smem_tile(out_tile, dtype) if plan.own_out else None,
                smem_tile(out_tile, dtype) if residual else None,
            ),
            (
                plgpu.Barrier(num_barriers=warpgroups),
                plgpu.Barrier(num_barriers=plan.stages),
                plgpu.Barrier(num_barriers=plan.value_stages),
                free(),
                free(num_barriers=plan.stages),
                free(num_barriers=plan.value_stages),
            ),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value)
    cut = slice(0, query_count)
    low = None if low is None else low[:, cut]
    results = out[:, cut], low, lse[:, :, cut]
    return (*results, best_key[:, :, cut]) if plan.arg_max else results


class State(NamedTuple):
    """Softmax over the blocks so far, of each row: m in units of log2, l (whole or
    `partial_sum`) and the key of the largest logit, if asked for."""

    row_max: jax.Array
    row_sum: jax.Array
    best_key: jax.Array | None


@dataclasses.dataclass(frozen=True)
class WorkList:
    """The order in which tiles are worked off.

    Tiles of a head stand together, so that CTAs that run together share K and V in the
    L2 cache. With a causal mask the last tiles see the most keys and come first, taken
    in turn from as many heads as fit in `L2_SHARE`.
    """

    batch: int
    heads: int
    tiles: int
    is_causal: bool
    snake: bool
    kv_bytes: int

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.tiles

    @property
    def group(self) -> int:
        """How many heads are taken together."""
        if not self.is_causal:
            return 1
        pairs = self.batch * self.heads
        most = max(1, L2_SHARE // self.kv_bytes)
        return max(size for size in range(1, min(most, pairs) + 1) if pairs % size == 0)

    def turns(self, cta, ctas):
        """How many tiles a CTA works off."""
        whole, rest = divmod(self.count, ctas)
        return jnp.int32(whole) + (cta < rest).astype(jnp.int32)

    def place(self, cta, turn, ctas):
        """(batch, head, tile) of a CTA's turn; with `snake`, every other whole round
        runs backwards, which evens out what a CTA gets of a falling list."""
        if self.snake and ctas < self.count:
            backwards = (turn & 1) * (turn < self.count // ctas).astype(jnp.int32)
            cta = cta + backwards * (ctas - 1 - 2 * cta)
        index = turn * ctas + cta
        group = jnp.int32(self.group)
        section = group * self.tiles
        place = lax.rem(index, section)
        tile = lax.div(place, group)
        if self.is_causal:
            tile = self.tiles - 1 - tile
        pair = lax.div(index, section) * group + lax.rem(place, group)
        return (
            lax.div(pair, jnp.int32(self.heads)),
            lax.rem(pair, jnp.int32(self.heads)),
            tile,
        )


def drain(end, stages: int, free) -> None:
    """Awaits the releases of the last `stages` steps before `end`."""
    for back in range(stages, 0, -1):

        @pl.when(end >= back)
        def _():
            plgpu.barrier_wait(free(end - back))


def column_groups(x: jax.Array) -> list[jax.Array]:
    """The slices of a tile that hold the same columns modulo `GROUP` in a thread."""
    rows, columns = x.shape
    return [
        lax.slice(x, (0, start), (rows, start + GROUP))
        for start in range(0, columns, GROUP)
    ]


def row_maximum(s: jax.Array, first_key, with_key: bool):
    """(row maximum, its key or None). To know the key, the maximum is taken over logits
    whose lowest bits are replaced by their column."""
    if not with_key:
        return s.max(axis=1), None
    columns = s.shape[1]
    low_bits = (1 << (columns - 1).bit_length()) - 1
    column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
    bits = lax.bitcast_convert_type(s, jnp.int32) & ~low_bits | column
    top = lax.bitcast_convert_type(bits, jnp.float32).max(axis=1)
    return top, first_key + (lax.bitcast_convert_type(top, jnp.int32) & low_bits)


def partial_sum(p: jax.Array) -> jax.Array:
    """Row sums over every GROUP-th column: additions within a thread."""
    return functools.reduce(jnp.add, column_groups(p))


def exp2(x: jax.Array, eighths: int, degree: int) -> jax.Array:
    """2**x for x <= 0, `eighths` of the columns by a polynomial."""
    if not eighths:
        return jnp.exp2(x)
    groups = column_groups(x)
    return jnp.concatenate(
        [
            exp2_polynomial(group, degree)
            if index * eighths % 8 < eighths
            else jnp.exp2(group)
            for index, group in enumerate(groups)
        ],
        axis=1,
    )


def exp2_polynomial(x: jax.Array, degree: int) -> jax.Array:
    """2**x for finite x <= 0 without the special-function unit: x = n + f, n whole,
    and 2**n is added to the exponent of 2**f. What is smaller than the smallest normal
    number becomes that."""
    x = jnp.maximum(x, SMALLEST_EXPONENT)
    # Adding pushes the fraction out; n stands in the lowest bits.
    pushed = x + ROUND_BY_ADDING
    f = x - (pushed - ROUND_BY_ADDING)
    *lower, p = EXP2_COEFFICIENTS[degree]
    for coefficient in reversed((1.0, *lower)):
        p = p * f + coefficient
    bits = lax.bitcast_convert_type(p, jnp.int32)
    n = lax.bitcast_convert_type(pushed, jnp.int32)
    return lax.bitcast_convert_type(bits + (n << 23), jnp.float32)
