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
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import ampere_fixed_point as fixed_point
from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels import architecture, internals, turns
from attn_jax.kernels.ampere_fused_tile import (
    KEY_TILE,
    PAIRED_QUERIES,
    STAGES,
    SWIZZLED,
    Blocks,
    Form,
    Memory,
    Tile,
    key_numbers_of,
    make_keys,
)
from attn_jax.kernels.ampere_fused_work import deal
from attn_jax.kernels.ampere_query_gradient import query_gradient
from attn_jax.kernels.hopper_range import Range, power_of_two
from attn_jax.kernels.tiles import LOG2_E, write_tile
from attn_jax.kernels.tilings import AmperePlan
from attn_jax.kernels.tuning import FUSED_HEAD_DIMS

# CTAs of a multiprocessor, by head dim.
SIDE_BY_SIDE = {64: 2, 128: 1}


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
    form = Form(
        dtype=dtype,
        head_dim=head_dim,
        queries=plan.queries,
        blocks=query_blocks,
        group=group,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
    )
    keys, warpgroups = form.keys, form.warpgroups
    key_tiles = key.shape[1] // KEY_TILE
    pairs = batch * key_heads
    work = deal(
        *(pairs, key_tiles, query_blocks * group),
        architecture.multiprocessors_or_a100s(),
        is_causal=is_causal,
        side_by_side=SIDE_BY_SIDE[head_dim],
    )
    most = work.together
    cleared = key_tiles * warpgroups  # parts of a pair's sums

    def attention_backward_fused(
        q_gmem, k_gmem, v_gmem, dout_gmem, statistics_gmem, centre_gmem, key_factor,
        row_unscale, _begun_gmem, sums_gmem, dk_gmem, dv_gmem, parts_gmem, memory,
    ):  # fmt: skip
        i32 = jnp.int32
        semaphores = turns.semaphores(pairs + work.cut)
        pair, tile, share = work.of(lax.axis_index("cta"))
        b, kv_head = lax.div(pair, i32(key_heads)), lax.rem(pair, i32(key_heads))
        warpgroup = lax.axis_index("warpgroup")
        first_key = tile * KEY_TILE + warpgroup * keys
        seen = i32(query_blocks)
        if is_causal:
            seen = seen - tile * (KEY_TILE // plan.queries)
        skipped, steps = work.turns(seen * group, share)
        blocks = Blocks.of(
            *(form, memory, q_gmem, dout_gmem, statistics_gmem, warpgroup),
            *(b, kv_head, seen),
            skipped=skipped,
            steps=steps,
        )

        def own_rows(gmem):
            return tiles.head_rows(gmem, b, first_key, keys, kv_head, head_dim)

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

        # To registers V goes by way of where the second blocks will lie.
        k = memory.k.at[warpgroup]
        v = memory.blocks.at[1 + STAGES * warpgroup] if form.paired else memory.v
        tiles.start_copy(own_rows(k_gmem), k)
        tiles.start_copy(own_rows(v_gmem), v)
        blocks.start(i32(0))

        def key_numbers():
            of_head = centre_gmem.at[b, kv_head], key_factor.at[b, kv_head]
            return key_numbers_of(form, *of_head)

        # On their way while copies are awaited, here and at the end, where registers
        # allow: one warpgroup has none for them, and where tiles are shared more of the
        # former would be spilled.
        of_head = key_numbers() if form.paired and share is None else None
        early = row_unscale[b, kv_head] if form.paired else None
        clear_next()
        # All see that others have cleared what they will add to.
        pl.when(pair >= most)(
            lambda: turns.await_count_by_all(semaphores.at[pair], cleared)
        )
        tiles.wait_for_copies(2)  # K is there.
        make_keys(form, memory, warpgroup, *(of_head or key_numbers()))
        tiles.wait_for_copies(0)
        say_it_is_clear()
        v = tiles.left_strips(v, SWIZZLED) if form.paired else v
        own = Tile(form, memory, blocks, warpgroup, first_key, v, sums_gmem)
        dk, dv = own.gradients()

        def leave(*sums):
            unscale = row_unscale[b, kv_head] if early is None else early
            factors = unscale * scale, unscale
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
        scratch_types=[Memory.scratch(form, statistics.shape[3:])],
        grid=(work.ctas,),
        grid_names=("cta",),
        compiler_params=tiles.COMPILER_PARAMS,
        num_threads=warpgroups,
        thread_name="warpgroup",
    )(*operands)
    return sums, dk, dv
