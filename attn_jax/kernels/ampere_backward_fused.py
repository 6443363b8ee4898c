"""Backward attention for Ampere in one pass: five matrix products instead of seven.

A thread block (CTA) owns 128 keys of a key head and goes over all blocks of queries
that see them, of the query heads that attend to it. Tiles are transposed, keys down the
rows:

    S^T = K Q^T     P^T = exp(S^T - LSE)     dP^T = V dO^T     dS^T = P^T (dP^T - delta)
    dV += P^T dO    dK += dS^T Q             dQ[block] += dS K'   (in global memory)

One warpgroup at head dim 64, two at 128 with 64 keys each. P^T and dS^T become left
operands in the registers where they were made; dS for dQ goes by way of shared memory,
and each warpgroup makes 64 columns of the CTA's tile of dQ from it. A block's dQ is
made after the next barrier, so that one barrier a block is enough: by the first
warpgroup before the next block's S, by the second after its dS. So while one waits for
operands or for exponentials, the other has another product to make.

Two warpgroups keep V in registers, as left operands: it is read from shared memory once
instead of once a block, and its 32 KB are what blocks of 64 queries, instead of 32,
take more.

CTAs of a (batch, key head) pair walk from the last block of queries to the first they
see, so that all of a pair read the same ones at about the same time. Which tile a CTA
has says `ampere_fused_work`: the last ones may be shared by several CTAs, each of which
goes over some of the blocks. All but the last of them leave their dK and dV in FP32 in
global memory, and the last, which waits for them, adds them to its own in order.

dQ as a sum of integers
-----------------------
dQ gets a tile from every CTA that sees the block. What is added is rounded to int32,
whose sum is the same in any order: two runs give the same bits, and nobody waits for
another one's turn (`ampere_fixed_point`).

dS and K' for dQ are FP16, scaled by powers of two, and K' = K - c, as in
`hopper_backward_fused`, which says why. What bounds the sums, and what becomes of
infinity and NaN, `ampere_fixed_point` says.

The sums of the pairs that are dealt out first are zero when the kernel starts. A CTA
clears its part of those of the pairs that are dealt out next, and before it adds waits
until its own pair's are clear: a pass over memory less, and what is added to lies in
the L2 cache. Who is waited for has a lower number, was launched before (which CTAs are
in the order of their numbers) and clears before it waits for anything but such a one.

Where it rounds (16 bit: BF16, the inputs' format):
  S, P, dP, dS, delta and the accumulators of a tile are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS^T Q;
  dS is rounded to FP16 as the operand of dS K', and so is K';
  a tile of dQ, of 128 keys, is rounded to integers, which are added exactly;
  scale is applied to the sums, which are then rounded once (`ampere_query_gradient`).
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_fixed_point as fixed_point
from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels import architecture, internals, turns
from attn_jax.kernels.ampere_fused_work import deal
from attn_jax.kernels.ampere_query_gradient import query_gradient
from attn_jax.kernels.hopper_range import Range, power_of_two
from attn_jax.kernels.tiles import LOG2_E, smem_tile, write_tile
from attn_jax.kernels.tuning import FUSED_HEAD_DIMS, AmperePlan

KEY_TILE = 128
# Blocks of queries, and of dS, in shared memory.
STAGES = 2
# Columns of the strips that tiles are read in.
SWIZZLED = 64
# CTAs of a multiprocessor, by head dim.
SIDE_BY_SIDE = {64: 2, 128: 1}
# Queries of a block of two warpgroups: V lies where two such blocks will. Those that
# their dP is made of at a time.
PAIRED_QUERIES = 64
PAIRED_STRIP = 32
# Keys up to which the second warpgroup passes over the block whose queries are all
# before its keys. On an H200 0.6 % of both passes at 1024; at 4096 and 16 384 the
# branch costs 0.3 and 1.2 % (`results/prototypes/ampere_patches.csv`), and between them
# nothing was measured.
PASSES_OVER = 2048


def reason_against(
    query_shape: tuple[int, ...], value_shape: tuple[int, ...], *, is_causal: bool
) -> str | None:
    """Why the kernel does not take arrays of these shapes ([B, T, N, H], [B, S, K, D]),
    in one line, or None if it does. Any lengths will do without a mask."""
    _, query_count, _, head_dim = query_shape
    _, key_count, _, value_dim = value_shape
    if value_dim != head_dim:
        return f"head dim {head_dim} with one of {value_dim} for V"
    if head_dim not in FUSED_HEAD_DIMS:
        return f"head dim {head_dim}, not {' or '.join(map(str, FUSED_HEAD_DIMS))}"
    if query_count == 0 or key_count == 0:
        return "no query or no key"
    if is_causal and query_count != key_count:
        return f"a causal mask with {query_count} queries and {key_count} keys"
    return None


def reason_against_plan(plan: AmperePlan, head_dim: int) -> str | None:
    """Why blocks cannot be of so many queries, in one line, or None if they can."""
    if head_dim == 128 and plan.queries != PAIRED_QUERIES:
        return (
            f"blocks of {plan.queries} queries, not {PAIRED_QUERIES}, at head dim 128"
        )
    return None


def backward_fused(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K H"],
    dout: Float[Array, "B Tpad N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    row_sum: Float32[Array, "B N T"] | None,
    numbers: Range,
    *,
    query_count: int,
    key_count: int,
    scale: float,
    is_causal: bool,
    plan: AmperePlan,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """(dQ, dK, dV), of BF16 inputs. `row_sum` is what rows of dS sum to (None: 0),
    `numbers` are those of `hopper_range.range_of`, scaled.

    Sequences may be padded; `query_count` and `key_count` say how many rows are real.

    Raises:
      NotImplementedError: `reason_against` has one, inputs are not BF16, or the plan
        has other blocks at head dim 128 than those of 64 queries.
    """
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    reason = reason_against(
        (batch, query_count, query_heads, head_dim),
        (batch, key_count, key_heads, value.shape[3]),
        is_causal=is_causal,
    )
    if query.dtype != jnp.bfloat16:
        reason = f"inputs of type {query.dtype}"
    elif reason is None:
        reason = reason_against_plan(plan, head_dim)
    if reason is not None:
        raise NotImplementedError(f"the fused backward kernel does not take {reason}")
    exponent = jnp.repeat(numbers.row_exponent, query_heads // key_heads, axis=1)
    # Past the last query everything is zero: P = exp(0 - 0) = 1 meets dO = 0 there, and
    # dS = 1 * (0 - 0) = 0.
    queries = plan.queries
    query, dout = (tiles.join_heads(x[:, :query_count], queries) for x in (query, dout))
    key, value = (tiles.join_heads(x[:, :key_count], KEY_TILE) for x in (key, value))
    lse2 = lse * LOG2_E - exponent[..., None]
    statistics = tiles.by_block(lse2, delta, query.shape[1] // queries, queries)
    sums, dk, dv = _sums(
        *(query, key, value, dout, statistics, numbers),
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        plan=plan,
    )
    shift = jnp.zeros_like(lse) if row_sum is None else row_sum
    shift = jnp.where(fixed_point.is_held(lse, delta, numbers), shift, jnp.nan)
    dq = query_gradient(
        *(sums, numbers, shift, scale, query.dtype), query_count=query_count
    )
    dk, dv = (x.reshape(batch, -1, key_heads, head_dim) for x in (dk, dv))
    return dq, dk[:, :key_count], dv[:, :key_count]


def _sums(
    query: Float[Array, "B M NH"],
    key: Float[Array, "B L KH"],
    value: Float[Array, "B L KH"],
    dout: Float[Array, "B M NH"],
    statistics: Float32[Array, "B N blocks R size"],
    numbers: Range,
    *,
    key_count: int,
    scale: float,
    is_causal: bool,
    plan: AmperePlan,
):
    """(`ampere_fixed_point`'s sums over keys of dS K', scaled, dK, dV), of whole tiles
    with joined heads. `statistics` has LSE in units of log2, less log2 of what dS is
    scaled by."""
    batch, query_heads, query_blocks = statistics.shape[:3]
    _, key_heads, head_dim = numbers.centre.shape
    group = query_heads // key_heads
    dtype = query.dtype
    queries = plan.queries
    warpgroups = head_dim // fixed_point.COLUMNS
    paired = warpgroups == 2
    keys = KEY_TILE // warpgroups  # of a warpgroup
    strip = PAIRED_STRIP if paired else queries  # of dP
    key_tiles = key.shape[1] // KEY_TILE
    pairs = batch * key_heads
    work = deal(
        *(pairs, key_tiles, query_blocks * group),
        architecture.multiprocessors_or_a100s(),
        is_causal=is_causal,
        side_by_side=SIDE_BY_SIDE[head_dim],
    )
    most = work.together
    passes_over = is_causal and paired and key_count <= PASSES_OVER
    cleared = key_tiles * warpgroups  # parts of a pair's sums

    def attention_backward_fused(
        q_gmem, k_gmem, v_gmem, dout_gmem, statistics_gmem, centre_gmem, key_factor,
        row_divisor, _begun_gmem, sums_gmem, dk_gmem, dv_gmem, parts_gmem, smem,
    ):  # fmt: skip
        k_smem, v_smem, keys_smem, block_smem, statistics_smem, ds_smem = smem
        i32 = jnp.int32

        semaphores = turns.semaphores(pairs + work.cut)
        pair, tile, share = work.of(lax.axis_index("cta"))
        b, kv_head = lax.div(pair, i32(key_heads)), lax.rem(pair, i32(key_heads))
        warpgroup = lax.axis_index("warpgroup")
        first_key = tile * KEY_TILE + warpgroup * keys
        blocks = i32(query_blocks)
        if is_causal:
            blocks = blocks - tile * (KEY_TILE // queries)
        skipped, steps = work.turns(blocks * group, share)
        last_block = query_blocks - 1 - (skipped if group == 1 else 0)

        def slot(turn):
            """Of a block in shared memory, or of its dS."""
            return lax.rem(turn, i32(STAGES))

        def q_of(turn):
            return block_smem.at[slot(turn)]

        def dout_of(turn):
            return block_smem.at[STAGES + slot(turn)]

        def block_of(turn):
            """(query head, block of queries)"""
            if group == 1:
                return kv_head, last_block - turn
            in_group, i = (f(turn + skipped, blocks) for f in (lax.div, lax.rem))
            return kv_head * group + in_group, last_block - i

        def all_copies():
            """All that was copied is there for all; a barrier of the CTA."""
            tiles.wait_for_copies(0)
            if paired:
                tiles.cta_barrier(warpgroups)

        def own_rows(gmem):
            return tiles.head_rows(gmem, b, first_key, keys, kv_head, head_dim)

        def start(turn):
            """Copies a block, if there is one: Q and its rows' numbers the first
            warpgroup, dO the last."""
            head, block = block_of(turn)

            def if_own(number):
                exists = turn < steps
                return pl.when(exists & (warpgroup == number) if paired else exists)

            def rows(gmem):
                return tiles.head_rows(
                    gmem, b, block * queries, queries, head, head_dim
                )

            @if_own(0)
            def _():
                tiles.start_copy(rows(q_gmem), q_of(turn))
                tiles.start_copy(
                    statistics_gmem.at[b, head, block], statistics_smem.at[slot(turn)]
                )

            @if_own(warpgroups - 1)
            def _():
                tiles.start_copy(rows(dout_gmem), dout_of(turn))

        # Of CTAs that share a tile the last one does it.
        is_to_clear = pair + most < pairs
        if share is not None:
            is_to_clear &= share.part == work.parts - 1

        def clear_next():
            """A part of the sums of a pair of those that are dealt out next."""

            @pl.when(is_to_clear)
            def _():
                b, kv_head = (
                    f(pair + most, i32(key_heads)) for f in (lax.div, lax.rem)
                )
                heads = pl.ds(kv_head * group, group)
                part = tile * warpgroups + warpgroup
                fixed_point.clear(sums_gmem.at[b, heads], part, cleared)

        def say_it_is_clear():
            pl.when(is_to_clear)(lambda: turns.count_up(semaphores.at[pair + most]))

        def make_keys():
            """K' of one's own keys."""
            for k in range(0, head_dim, SWIZZLED):
                part = pl.ds(k, SWIZZLED)
                own = plgpu.load(
                    k_smem.at[warpgroup, :, part], layout=tiles.ACCUMULATOR
                )
                row = plgpu.load(
                    centre_gmem.at[b, kv_head, part],
                    layout=tiles.COLUMNS,
                    optimized=False,
                )
                wide = own.astype(jnp.float32)
                wide = wide - tiles.along_columns(row, wide.shape)
                wide = wide * key_factor[b, kv_head, 0]
                keys_smem[warpgroup, :, part] = wide.astype(jnp.float16)

        def add_dq(turn):
            """A block's dS K', 64 columns of it, to the sums."""
            columns = pl.ds(warpgroup * fixed_point.COLUMNS, fixed_point.COLUMNS)
            # Two warpgroups have few registers left.
            dq = fixed_point.product(
                [ds_smem.at[slot(turn), w] for w in range(warpgroups)],
                [keys_smem.at[w, :, columns] for w in range(warpgroups)],
                tiles.STRIP if paired else 64,
            )
            head, block = block_of(turn)
            groups = queries // fixed_point.GROUP
            width = 4 * fixed_point.COLUMNS
            own = pl.ds(block * groups, groups), slice(None)
            own = *own, pl.ds(warpgroup * width, width)
            fixed_point.add(sums_gmem.at[b, head, *own], dq)

        def add_dq_before(turn, number):
            """The dQ of the block before, if it is this warpgroup's time for that."""
            exists = turn > 0
            exists = exists & (warpgroup == number) if paired else exists
            pl.when(exists)(lambda: add_dq(turn - 1))

        def hide(block, s):
            """-inf where a key comes after its query or does not exist."""
            if is_causal:
                return tiles.hide_later_rows(s, first_key - block * queries)
            return tiles.hide_rows_from(s, key_count - first_key)

        def masked(block, s):
            if is_causal:
                partial = block * queries < first_key + (keys - 1)
            elif key_count % KEY_TILE:
                partial = first_key + keys > key_count
            else:
                return s
            return lax.cond(partial, lambda s: hide(block, s), lambda s: s, s)

        def make_dlogits(turn, p, column):
            """dS of some queries, FP32; P of all of them is at hand."""
            part = lax.slice(p, (0, column), (keys, column + strip))
            douts = dout_of(turn).at[pl.ds(column, strip)]
            dp = tiles.inner_products(v, douts, SWIZZLED)
            return part * (dp - statistic(turn, 1, column, strip))

        def statistic(turn, index, column, count):
            x = plgpu.load(
                statistics_smem.at[slot(turn), index, pl.ds(column, count)],
                layout=tiles.COLUMNS,
            )
            return tiles.along_columns(x, (keys, count))

        def see(turn, block, dk, dv):
            """dK and dV with what a block adds to them; its dS to shared memory."""
            q, dout = q_of(turn), dout_of(turn)
            s = masked(block, tiles.inner_products(k, q, SWIZZLED))
            p = jnp.exp2(s * (scale * LOG2_E) - statistic(turn, 0, 0, queries))
            dv = tiles.multiply(dv, p.astype(dtype), dout)
            for column in range(0, queries, strip):
                rows = pl.ds(column, strip)
                ds = make_dlogits(turn, p, column)
                ds_smem[slot(turn), warpgroup, :, rows] = ds.astype(jnp.float16)
                dk = tiles.multiply(dk, ds.astype(dtype), q.at[rows])
            return dk, dv

        def pass_over(turn, dk, dv):
            """Of a block whose queries are all before this warpgroup's keys."""
            none = jnp.zeros((keys, queries), jnp.float16)
            none = plgpu.layout_cast(none, tiles.ACCUMULATOR)
            ds_smem[slot(turn), warpgroup] = none
            return dk, dv

        def step(turn, carry):
            _, block = block_of(turn)
            # This block has arrived, as has dS of the one before, with which all are
            # done but for that.
            all_copies()
            start(turn + 1)
            add_dq_before(turn, 0)
            if passes_over:
                is_hidden = (block + 1) * queries <= first_key
                carry = lax.cond(
                    is_hidden,
                    lambda carry: pass_over(turn, *carry),
                    lambda carry: see(turn, block, *carry),
                    carry,
                )
            else:
                carry = see(turn, block, *carry)
            if paired:
                add_dq_before(turn, 1)
            return carry

        # To registers V goes by way of where the second blocks will lie.
        v_place = block_smem.at[1 + STAGES * warpgroup] if paired else v_smem
        tiles.start_copy(own_rows(k_gmem), k_smem.at[warpgroup])
        tiles.start_copy(own_rows(v_gmem), v_place)
        start(i32(0))
        clear_next()
        # All see that others have cleared what they will add to.
        pl.when(pair >= most)(
            lambda: turns.await_count_by_all(semaphores.at[pair], cleared)
        )
        tiles.wait_for_copies(2)  # K is there.
        make_keys()
        tiles.wait_for_copies(0)
        say_it_is_clear()
        k = k_smem.at[warpgroup]
        v = tiles.left_strips(v_place, SWIZZLED) if paired else v_place
        zero = tiles.accumulator(keys, head_dim)
        dk, dv = lax.fori_loop(i32(0), steps, step, (zero, zero))
        all_copies()
        add_dq(steps - 1)

        def leave(*sums):
            divisor = row_divisor[b, kv_head]
            factors = divisor * scale, divisor
            for x, factor, gmem in zip(sums, factors, (dk_gmem, dv_gmem)):
                x = (x * factor).astype(dtype)
                tiles.store_rows(x, k, own_rows(gmem), SWIZZLED)

        if share is None:
            return leave(dk, dv)
        others, number = work.parts - 1, jnp.maximum(share.number, 0)
        own_parts, are_there = parts_gmem.at[number], semaphores.at[pairs + number]
        is_last = share.part == others

        def hand_over():
            for i, x in enumerate((dk, dv)):
                write_tile(own_parts.at[share.part, i, warpgroup], x)
            tiles.wait_for_copies(0)  # as barrier
            turns.count_up(are_there)

        def take_over(*sums):
            turns.await_count_by_all(are_there, others * warpgroups)

            def add(part, sums):
                own = [own_parts.at[part, i, warpgroup] for i in range(2)]
                return tuple(
                    x + tiles.read_accumulator(y)
                    for x, y in zip(sums, own, strict=True)
                )

            return lax.fori_loop(i32(0), i32(others), add, sums)

        pl.when(~is_last)(hand_over)

        @pl.when(is_last)
        def _():
            leave(*lax.cond(share.number < 0, lambda *x: x, take_over, dk, dv))

    scratch = (
        smem_tile((warpgroups, keys, head_dim), dtype),
        None if paired else smem_tile((keys, head_dim), dtype),
        smem_tile((warpgroups, keys, head_dim), jnp.float16),
        smem_tile((2 * STAGES, queries, head_dim), dtype),
        plgpu.SMEM((STAGES, *statistics.shape[3:]), jnp.float32),
        smem_tile((STAGES, warpgroups, keys, queries), jnp.float16, strip),
    )
    dkv = jax.ShapeDtypeStruct(key.shape, dtype)
    sums = jax.ShapeDtypeStruct(
        fixed_point.shape_of_sums(batch, query_heads, query.shape[1], head_dim),
        jnp.int32,
    )
    operands = (
        *(query, key, value, dout, statistics, numbers.centre),
        numbers.key_factor,
        power_of_two(-numbers.row_exponent),
        fixed_point.begun(sums.shape, key_heads, min(pairs, most)),
    )
    parts = jax.ShapeDtypeStruct(
        (work.cut, work.parts - 1, 2, warpgroups, keys, head_dim), jnp.float32
    )
    sums, dk, dv, _ = internals.kernel(
        attention_backward_fused,
        aliases={len(operands) - 1: 0},
        out_type=[sums, dkv, dkv, parts if work.cut else None],
        scratch_types=[scratch],
        grid=(work.ctas,),
        grid_names=("cta",),
        compiler_params=tiles.COMPILER_PARAMS,
        num_threads=warpgroups,
        thread_name="warpgroup",
    )(*operands)
    return sums, dk, dv
