"""Forward attention for Hopper (sm_90a) in Mosaic GPU.

    S = scale * Q K^T        P = exp(S - m), m = rowmax(S)        l = rowsum(P)
    out = P V / l            LSE = m + log(l)

A persistent grid: a CTA works off the tiles of the output that `schedule` deals it.
Consumer warpgroups own 64 queries of a tile each; one more warpgroup feeds them Q, K
and V by TMA, across the borders of tiles. Inside a warpgroup the softmax of a block of
keys overlaps with the product P V of the block before (FlashAttention-3, arXiv
2407.08608, Alg. 2).

Blocks of keys are taken from the last to the first: only the first that a warpgroup
meets can need a mask, so the loop over the others has no branch.

Where it rounds (16 bit: the inputs' format):
  S, m, l, the correction factors and the accumulator are FP32;
  P is rounded to V's format as the operand of P V; l sums the unrounded P;
  out is rounded once. With `residual`, what that rounding dropped is kept as a second
  16-bit tensor: out + out_low carries about 16 bits into the backward pass.
exp2 with scale * log2(e) folded in replaces exp, so m is kept in units of log2. What
options change is said in `hopper_softmax`. P V of more than `hopper_links.KEYS` keys is
summed in parts.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import hopper_links, hopper_loads, internals, schedule
from attn_jax.kernels.hopper_hidden import Hidden
from attn_jax.kernels.hopper_outputs import Carried, Outputs
from attn_jax.kernels.hopper_softmax import LOG2_P_SCALE, Softmax, nothing
from attn_jax.kernels.tiles import LOG2_E, accumulator, along_rows, smem_tile
from attn_jax.kernels.tuning import ForwardTiling
from attn_jax.kernels.visibility import (
    Band,
    Counted,
    Rules,
    listed_pairs,
    whole_tiles,
)

# Registers a thread (consumers, producer) by number of consumer warpgroups: setmaxnreg
# moves them from the loading warpgroup to the others.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32), 4: (112, 24)}


def forward(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    tiling: ForwardTiling,
    out_dtype: jnp.dtype,
    residual: bool,
    window: Band | None = None,
    mask: Rules | None = None,
    band: Band = Band(None, None),
    sinks: Float32[Array, "1 N"] | None = None,
    soft_cap: float | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    rescale_threshold: float = 0.0,
    repeated_max_factor: float | None = None,
    unscale: Float32[Array, "B K D"] | None = None,
    carries: bool = False,
    before: Carried | None = None,
    first_row: int = 0,
    chosen: schedule.Chosen | None = None,
) -> (
    tuple[
        Float[Array, "B T N D"], Float[Array, "B T N D"] | None, Float32[Array, "B N T"]
    ]
    | Carried
):
    """Returns (out, what rounding dropped from out or None, LSE in natural log).

    Sequences are padded to a multiple of 8; `query_count` and `key_count` say how many
    rows are real. `scale` is not negative. A causal row i sees the keys j <= i;
    `window`, of `visibility.window_of`, takes the place of `is_causal`. With `mask` it
    is that and `band` which say what is seen, and neither of these does; a `bias` comes
    with one. `rescale_threshold` and `repeated_max_factor` are `Recipe`'s.
    `unscale` comes with V as FP16 numbers (`hopper_key_numbers`): P then is FP16, too,
    times `hopper_softmax.P_SCALE`. `carries`: returns `Carried`, of whole tiles, or
    `before` with these added where it lies, from `first_row` on, only what is `chosen`.
    """
    batch, padded, query_heads, head_dim = query.shape
    value_dim, dtype = value.shape[-1], query.dtype
    rows, columns, stages = tiling.rows, tiling.columns, tiling.stages
    warpgroups, group = tiling.warpgroups, query_heads // key.shape[2]
    # Lists are of whole tiles; and a lazy rescaling's waits only then stay in place.
    whole = mask is not None or rescale_threshold > 0
    strips = schedule.strips(query_count, tiling, whole_tiles=whole)
    tile_count, key_blocks = strips.tiles, pl.cdiv(key_count, columns)
    # Of logits in the exponent: capped ones are in units of log2.
    unit = scale * LOG2_E if soft_cap is None and bias is None else 1.0
    counted = Counted(
        window or Band(None, 0 if is_causal else None), *(key_count, rows, columns)
    )
    blind = mask is not None or counted.blind
    softmax = Softmax(
        *(unit, value.dtype, blind, rescale_threshold, repeated_max_factor),
        log2_scale=0 if unscale is None else LOG2_P_SCALE,
        whole_maxima=carries,
    )
    wide_out = out_dtype == jnp.float32
    keep_low = residual and not wide_out
    stored = tiling.stored(value_dim)
    counts = counted.by_tile(strips.ends, key_blocks)
    # Blocks in a link of the sum, and whether there can be more than one link.
    link_blocks = pl.cdiv(hopper_links.KEYS, columns)
    in_links = max(counts) > link_blocks
    # Of out, which then has no place of its own.
    by_key = tiling.out_by_key and not (wide_out or carries)
    # When the next tile begins, not when this one ends: at 16 384 keys that is faster
    # under a causal mask, and slower without one (H200). Why is not known.
    released_late = by_key and counted.band.right is not None

    # All warpgroups begin with a tile's first block, and go on to its last.
    together = counted.band == Band(None, None) and not (whole or strips.idle)
    ahead = tiling.ahead and together and not (by_key or wide_out or carries)
    # Where the last block is masked ptxas would wait for each product.
    ahead = ahead and key_count % columns == 0 and not in_links

    pairs = None
    if mask is not None:
        pairs = listed_pairs(
            *(mask, band),
            query_count=query_count,
            key_count=key_count,
            query_tile=tiling.tile,
            key_tile=columns,
            last_first=True,
        )
    if bias is not None:
        bias = whole_tiles(bias, tiling.tile, columns)

    table = schedule.forward_table(
        batch * query_heads,
        counts,
        key.shape[1] * (head_dim + value_dim) * dtype.itemsize,
        singly=carries and not in_links,
        chosen=chosen,
        tiling=tiling,
    )

    def attention_forward(
        q_gmem, k_gmem, v_gmem, table_gmem, pairs, sinks_gmem, bias_gmem, unscale_gmem,
        before_gmem, out_gmem, low_gmem, lse_gmem, row_sum_gmem, sums_gmem, smem,
        barriers,
    ):  # fmt: skip
        q_smem, k_smem, v_smem, out_smem, low_smem = smem
        q_ready, k_ready, v_ready, q_free, k_free, v_free = barriers
        q = hopper_loads.Loaded(q_gmem, q_smem, q_ready, q_free)
        k = hopper_loads.Loaded(k_gmem, k_smem, k_ready, k_free)
        v = hopper_loads.Loaded(v_gmem, v_smem, v_ready, v_free)
        steps = hopper_loads.Stages(k, v, stages)
        cta = lax.axis_index("cta")
        warpgroup = lax.axis_index("warpgroup")
        all_blocks = table_gmem[cta, table.shape[1] - 1] if chosen else key_blocks

        def blocks_seen(start, end):
            """The first block of keys that some queries see, and one past the last."""
            return map(jnp.int32, counted.seen(start, end, jnp.int32(all_blocks)))

        def tile_seen(tile):
            start, end = (strips.first(tile + i) * rows for i in range(2))
            return blocks_seen(start, end)

        for_each_tile = functools.partial(
            hopper_loads.for_each_tile, table_gmem, cta, tile_count, query_heads
        )

        def release_kept(end):
            """The last block before `end`, by way of which out has left."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            steps.release(k, end - 1)

        def logits_ahead(step, turn, meanwhile):
            """Logits of a tile's first block; `meanwhile()` is done under their
            product. After a CTA's last tile they are of what lies there, for nobody."""
            there = turn < table_gmem[cta, 0]

            @pl.when(there)
            def _():
                steps.await_block(k, step)
                plgpu.barrier_wait(q_ready.at[warpgroup])

            def product(s_acc):
                plgpu.wgmma(s_acc, q_smem.at[warpgroup], steps.keys(step))
                meanwhile()
                return s_acc[...]

            s = pl.run_scoped(product, accumulator(rows, columns))
            pl.when(there)(lambda: steps.release(k, step))
            return s

        def consume_tile(turn, b, n, tile, carry):
            """Attention of a warpgroup's rows; the result is the next first step, with
            the logits there if they are made ahead."""
            first_step, s_ahead = carry
            row = strips.strip(tile, warpgroup) * rows
            q_tile = q_smem.at[warpgroup]
            if pairs is None:
                tile_first, tile_end = tile_seen(tile)
                listed, (first, end) = None, blocks_seen(row, row + rows)
                if strips.idle:
                    first = jnp.where(row < query_count, first, tile_first)
                    end = jnp.where(row < query_count, end, tile_end)
            else:
                listed = pairs.entries(b, n, tile)
                tile_first = first = jnp.int32(0)
                tile_end = end = listed[0]
            tile_last = first_step + (tile_end - tile_first) - 1
            start = first_step + (tile_end - end)
            last = first_step + (tile_end - first) - 1

            hidden = Hidden(
                *(b, n, row, counted, pairs, listed, band, first_step, start, end),
                *(in_links, bias_gmem, scale, soft_cap),
            )

            def release_k(step):
                """The tile's last one is kept: a barrier counts who has read it."""
                place = steps.slot(step)
                if by_key:
                    place = jnp.where(step == tile_last, jnp.int32(stages), place)
                plgpu.barrier_arrive(k_free.at[place])

            def load_q():
                """Q as a left operand, once the warpgroup's first block is next."""
                if released_late:
                    pl.when(turn > 0)(lambda: release_kept(first_step))
                if counted.band.right is not None and warpgroups > 1:
                    steps.skip(first_step, start)
                if not ahead:
                    plgpu.barrier_wait(q_ready.at[warpgroup])
                if not tiling.q_registers:
                    return q_tile
                q = q_tile[...]
                # Orders the read before TMA's next write to the tile.
                plgpu.commit_smem()
                plgpu.barrier_arrive(q_free)
                return q

            floor = None
            if sinks_gmem is not None and rescale_threshold:
                floor = softmax.of_sink(sinks_gmem[0, n])

            def await_k(step, last):
                @pl.when(step <= last)
                def _():
                    steps.await_block(k, step)

            def begin(q, first, last):
                """Logits of the first block of some."""
                # There always is one. Without the branch ptxas makes another loop: 709
                # TFLOP/s for 729 at 16 384 keys, no mask (H200, not in the same run).
                await_k(first, last)

                def product(s_acc):
                    plgpu.wgmma(s_acc, q, steps.keys(first))
                    return s_acc[...]

                s = pl.run_scoped(product, accumulator(rows, columns))
                release_k(first)
                return s

            def go_on(q, acc, s, first, last, before):
                """(state, P of the last block): all products but that one's P V of the
                blocks first, ..., last. `before`: the state of those before them."""
                state, p, _ = softmax.add(hidden.first(s, first), before, floor)
                await_k(first + 1, last)

                def step(now, carry):
                    state, p, listed_as = carry
                    following = hidden.entry(now + 1)

                    def products(s_acc):
                        plgpu.wgmma(s_acc, q, steps.keys(now))
                        steps.await_block(v, now - 1)
                        plgpu.wgmma(acc, p, steps.values(now - 1))
                        # S is ready while P V still runs under the softmax below.
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                    s = pl.run_scoped(products, accumulator(rows, columns))
                    release_k(now)
                    s = hidden.later(s, now, listed_as)
                    state, p, correction = softmax.add(s, state)
                    # This wait between the softmax and the wait for P V keeps ptxas
                    # from moving the latter above the exponentials.
                    await_k(now + 1, last)
                    plgpu.wgmma_wait(0)
                    steps.release(v, now - 1)
                    assert correction is not None
                    acc[...] = softmax.rescaled(acc[...], correction)
                    return state, p, following

                state, p, _ = lax.fori_loop(
                    first + 1, last + 1, step, (state, p, hidden.entry(first + 1))
                )
                if not tiling.q_registers and not in_links:
                    plgpu.barrier_arrive(q_free)
                return state, p

            def add_last(acc, p, last):
                """Issues the last P V."""
                steps.await_block(v, last)
                plgpu.wgmma(acc, p, steps.values(last))

            def attend(q, acc, first, last, before):
                """(sum of P V, state) of the blocks first, ..., last."""
                s = begin(q, first, last)
                state, p = go_on(q, acc, s, first, last, before)
                add_last(acc, p, last)
                plgpu.wgmma_wait(0)
                steps.release(v, last)
                return acc[...], state

            def leave(acc, state):
                """The results of the rows."""
                own_rows = pl.ds(row, rows)
                if carries:
                    unscale = 1.0
                    if unscale_gmem is not None:
                        unscale = unscale_gmem[b, lax.div(n, jnp.int32(group)), 0]
                    after = Carried(lse_gmem, row_sum_gmem, out_gmem)
                    keep = after.begin if before_gmem is None else after.add
                    keep(acc, state, softmax, unscale, b, n, first_row + row)
                    return
                sink = None if sinks_gmem is None else sinks_gmem[0, n]
                inverse, lse_gmem[b, n, own_rows] = softmax.finished(state, sink)
                out = acc * along_rows(inverse, acc.shape)
                if unscale_gmem is not None:
                    out *= unscale_gmem[b, lax.div(n, jnp.int32(group)), 0]
                if wide_out:
                    # Two FP32 tiles do not fit in shared memory beside K and V.
                    out_gmem[b, own_rows, n] = out
                    return
                tiles = (x and x.at[warpgroup] for x in (out_smem, low_smem))
                if by_key:
                    place = pl.ds(pl.multiple_of(warpgroup * rows, rows), rows)
                    plgpu.barrier_wait(k_free.at[stages])
                    tiles = k_smem.at[steps.slot(tile_last), place], None
                Outputs(out_gmem, low_gmem, *tiles).write(out, b, n, own_rows, stored)
                if by_key and not released_late:
                    release_kept(tile_last + 1)

            if ahead:
                yield

                def attend_ahead(acc):
                    state, p = go_on(load_q(), acc, s_ahead, start, last, None)
                    add_last(acc, p, last)

                    def meanwhile():
                        total = plgpu.wgmma_accumulator_load(acc, wait_n=1)
                        steps.release(v, last)
                        leave(total, state)

                    return logits_ahead(last + 1, turn + 1, meanwhile)

                s = pl.run_scoped(attend_ahead, accumulator(rows, value_dim))
                yield tile_last + 1, s
                return

            def attend_in_links():
                assert sums_gmem is not None
                q = load_q()
                found = hopper_links.attend_in_links(
                    functools.partial(attend, q),
                    sums_gmem.at[cta, warpgroup],
                    start,
                    last,
                    link_steps=link_blocks,
                    softmax=softmax,
                    floor=floor,
                )
                if not tiling.q_registers:
                    plgpu.barrier_arrive(q_free)
                return found

            def attend_once():
                return pl.run_scoped(
                    lambda acc: attend(load_q(), acc, start, last, None),
                    accumulator(rows, value_dim),
                )

            def stand_by():
                """Without rows: lets go of what the others multiply."""
                load_q()
                if not tiling.q_registers:
                    plgpu.barrier_arrive(q_free)

                @pl.loop(start, last + 1)
                def _(step):
                    steps.await_block(k, step)
                    release_k(step)
                    steps.await_block(v, step)
                    steps.release(v, step)

                return nothing(rows, value_dim)

            found = attend_in_links if in_links else attend_once
            if strips.idle:
                acc, state = lax.cond(row < query_count, found, stand_by)
            else:
                acc, state = found()
            if counted.is_window and warpgroups > 1:
                steps.skip(last + 1, tile_last + 1)
            yield
            leave(acc, state)
            yield tile_last + 1, None

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(REGISTERS[warpgroups][0], action="increase")
            start = jnp.int32(0)
            s_ahead = logits_ahead(start, start, lambda: None) if ahead else None
            end, _ = for_each_tile(consume_tile, (start, s_ahead))
            if released_late:
                pl.when(end > 0)(lambda: release_kept(end))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(REGISTERS[warpgroups][1], action="decrease")

            def blocks_of(b, n, tile):
                if pairs is not None:
                    listed = pairs.entries(b, n, tile)
                    return listed[0], lambda i: lax.div(listed[i + 1], jnp.int32(2))
                first, end = tile_seen(tile)
                return end - first, lambda i: end - 1 - i

            hopper_loads.load(for_each_tile, blocks_of, strips, tiling, group, q, steps)

    out_smem = low_smem = None
    if not (wide_out or by_key):
        out_smem = smem_tile((warpgroups, rows, stored), dtype)
        low_smem = out_smem if keep_low and stored == value_dim else None
    tile_rows = tile_count * tiling.tile
    shaped = jax.ShapeDtypeStruct
    # TMA stores drop what lies outside an array; plain stores (FP32 out, LSE) do not.
    out_rows = tile_rows if wide_out else padded
    out = shaped((batch, out_rows, query_heads, value_dim), out_dtype)
    low = shaped((*query.shape[:3], value_dim), dtype)
    of_rows = shaped((batch, query_heads, tile_rows), jnp.float32)
    sums = shaped((table.shape[0], warpgroups, rows, value_dim), jnp.float32)
    operands = query, key, value, table, pairs, sinks, bias, unscale, before
    aliases = {}
    if before is not None:
        of_rows, _, out = before
        count = len(jax.tree.leaves(operands))
        # Of row_max, row_sum and total, the last ones: LSE's place, its own, and out's.
        aliases = {count - 3: 1, count - 2: 2, count - 1: 0}
    out, low, lse, row_sum, _ = internals.kernel(
        attention_forward,
        aliases=aliases,
        out_type=[
            out,
            low if keep_low else None,
            of_rows,
            of_rows if carries else None,
            sums if in_links else None,
        ],
        scratch_types=[
            (*hopper_loads.places(tiling, query, value), out_smem, low_smem),
            hopper_loads.barriers(tiling, keeps_last=by_key),
        ],
        grid=(table.shape[0],),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)
    if carries:
        return Carried(lse, row_sum, out)
    low = None if low is None else low[:, :query_count]
    return out[:, :query_count], low, lse[:, :, :query_count]
