"""Backward attention for Ampere in one pass at head dim 128: ways to cut the work.

Variants of `attn_jax/kernels/ampere_backward_fused.py`, whose docstring says what is
made and how it rounds; `Cut` says what differs. Measured by ampere_backward_h128.py.

Two warpgroups of 64 keys each and blocks of 64 queries, mostly, which an A100 has room
for where something else goes: V into registers, or the second stage of dO and of dS.
The first warpgroup copies Q and the statistics, the second dO.
"""

import contextlib
import dataclasses
import functools
from typing import Literal
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn_jax.kernels import ampere_backward_fused as fused
from attn_jax.kernels import ampere_fixed_point as fixed_point
from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels import internals
from attn_jax.kernels.ampere_backward_fused import KEY_TILE, SWIZZLED
from attn_jax.kernels.hopper_range import power_of_two
from attn_jax.kernels.tiles import LOG2_E, Fragments, smem_tile
from attn_jax.kernels.tuning import AmperePlan

HEAD_DIM = 128
WARPGROUPS = 2
KEYS = KEY_TILE // WARPGROUPS

# Fragments with two warps down the rows and two side by side.
_TWO = {"m_warps": 2}
ACCUMULATOR_2 = plgpu.Layout.MMA_ACC(jnp.bfloat16, **_TWO)
LEFT_2 = plgpu.Layout.MMA_LHS(jnp.bfloat16, **_TWO)
RIGHT_2 = plgpu.Layout.MMA_RHS(jnp.bfloat16, **_TWO)
MMA_2 = Fragments(
    ACCUMULATOR_2, ACCUMULATOR_2.reduce(1), ACCUMULATOR_2.reduce(0), is_default=False
)

Schedule = Literal["two_stages", "one_stage", "exchanged", "two_by_two"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the kernel cuts its work.

    Attributes:
      schedule:
        two_stages: of Q, dO and dS; one barrier of the CTA a block, as the package.
        one_stage: of dO and dS; a second barrier once dP is made.
        exchanged: two stages of Q and dO, one of dS. P^T and dS^T reach dV and dK by
          way of shared memory, where a warp has 32 keys and 64 columns.
        two_by_two: one stage of all. S and dP, too, have warps of 32 keys, and of half
          of the queries.
      queries: in a block.
      s_strip, strip: queries of S, and of dP and what follows it, at a time.
      v_registers: V is kept as fragments in registers.
      depth: keys of dQ's operands that are loaded at a time.
      apart: the second warpgroup makes dQ at the end of a block, or before the barrier
        in it, so that the two are at different products; not of two_by_two.
    """

    schedule: Schedule = "two_stages"
    queries: int = 64
    s_strip: int = 32
    strip: int = 32
    v_registers: bool = False
    depth: int = 64
    apart: bool = False

    def bytes_read(self) -> dict[str, float]:
        """From shared memory for a query, by ldmatrix, of each product; `written`: to
        it, by all, cp.async's, too."""
        warps = 4 * WARPGROUPS
        n = self.queries

        def of_warp(rows, columns, depth, *, left=1, right=1):
            return warps * 2 * depth * (rows * left + columns * right) / n

        wide = self.schedule == "two_by_two"
        shape = (32, n / 2) if wide else (16, n)
        s = of_warp(*shape, HEAD_DIM, left=n / self.s_strip)
        dp = of_warp(*shape, HEAD_DIM, left=0 if self.v_registers else n / self.strip)
        if self.schedule in ("exchanged", "two_by_two"):
            dkv = of_warp(32, HEAD_DIM / 2, n)
        else:
            dkv = of_warp(16, HEAD_DIM, n, left=0)
        written = 2 * KEY_TILE + 4 * HEAD_DIM + 8
        if self.schedule in ("exchanged", "two_by_two"):
            written += 4 * KEY_TILE
        dq = of_warp(n / 2, fixed_point.COLUMNS / 2, KEY_TILE)
        return {"S": s, "dP": dp, "dV": dkv, "dK": dkv, "dQ": dq, "written": written}


@contextlib.contextmanager
def used(cut: Cut | None):
    """`fused.backward_fused`, traced inside with `plan_of(cut)`, is this variant."""
    if cut is None:
        yield
        return
    with mock.patch.object(fused, "_sums", functools.partial(_sums, cut=cut)):
        yield


def plan_of(cut: Cut | None) -> AmperePlan:
    return AmperePlan() if cut is None else AmperePlan(cut.queries)


def _sums(
    query,
    key,
    value,
    dout,
    statistics,
    numbers,
    *,
    key_count: int,
    scale: float,
    is_causal: bool,
    plan: AmperePlan,
    cut: Cut,
):
    """As `ampere_backward_fused._sums`."""
    batch, query_heads, query_blocks = statistics.shape[:3]
    _, key_heads, head_dim = numbers.centre.shape
    assert head_dim == HEAD_DIM and plan.queries == cut.queries
    group = query_heads // key_heads
    dtype = query.dtype
    queries = cut.queries
    key_tiles = key.shape[1] // KEY_TILE
    unit = scale * LOG2_E
    q_stages = 1 if cut.schedule == "two_by_two" else 2
    dout_stages = 2 if cut.schedule in ("two_stages", "exchanged") else 1
    ds_stages = 2 if cut.schedule == "two_stages" else 1
    exchanged = cut.schedule in ("exchanged", "two_by_two")
    wide = MMA_2 if cut.schedule == "two_by_two" else tiles.MMA
    assert not cut.v_registers or dout_stages == 2

    def attention_backward_h128(
        q_gmem, k_gmem, v_gmem, dout_gmem, statistics_gmem, centre_gmem, key_factor,
        row_divisor, _zeros_gmem, sums_gmem, dk_gmem, dv_gmem, smem,
    ):  # fmt: skip
        k_smem, v_smem, keys_smem, block_smem, statistics_smem, ds_smem, p_smem = smem
        i32 = jnp.int32
        pair = lax.div(lax.axis_index("cta"), i32(key_tiles))
        tile = lax.rem(lax.axis_index("cta"), i32(key_tiles))
        b, kv_head = lax.div(pair, i32(key_heads)), lax.rem(pair, i32(key_heads))
        warpgroup = lax.axis_index("warpgroup")
        first_key = tile * KEY_TILE + warpgroup * KEYS
        blocks = i32(query_blocks)
        if is_causal:
            blocks = blocks - tile * (KEY_TILE // queries)
        steps = blocks * group

        def slot(turn, stages):
            return lax.rem(turn, i32(stages)) if stages > 1 else 0

        def q_of(turn):
            return block_smem.at[slot(turn, q_stages)]

        def dout_of(turn):
            return block_smem.at[q_stages + slot(turn, dout_stages)]

        def ds_of(turn):
            return ds_smem.at[slot(turn, ds_stages)]

        def block_of(turn):
            """(query head, block of queries)"""
            if group == 1:
                return kv_head, query_blocks - 1 - turn
            in_group, i = lax.div(turn, blocks), lax.rem(turn, blocks)
            return kv_head * group + in_group, query_blocks - 1 - i

        def barrier():
            """Of the CTA."""
            tiles.cta_barrier(WARPGROUPS)

        def all_copies():
            """All that was copied is there for all; a barrier of the CTA."""
            tiles.wait_for_copies(0)
            barrier()

        def own_barrier():
            """Of the warpgroup; copies go on."""
            tiles.wait_for_copies(4)

        def own_rows(gmem):
            return tiles.head_rows(gmem, b, first_key, KEYS, kv_head, head_dim)

        def start_q(turn):
            @pl.when(jnp.logical_and(warpgroup == 0, turn < steps))
            def _():
                head, block = block_of(turn)
                rows = (b, block * queries, queries, head, head_dim)
                tiles.start_copy(tiles.head_rows(q_gmem, *rows), q_of(turn))
                tiles.start_copy(
                    statistics_gmem.at[b, head, block],
                    statistics_smem.at[slot(turn, 2)],
                )

        def start_dout(turn):
            @pl.when(jnp.logical_and(warpgroup == 1, turn < steps))
            def _():
                head, block = block_of(turn)
                rows = (b, block * queries, queries, head, head_dim)
                tiles.start_copy(tiles.head_rows(dout_gmem, *rows), dout_of(turn))

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
                own = own.astype(jnp.float32)
                own = own - tiles.along_columns(row, own.shape)
                own = own * key_factor[b, kv_head]
                keys_smem[warpgroup, :, part] = own.astype(jnp.float16)

        def add_dq(turn):
            """A block's dS K', 64 columns of it, to the sums."""
            dq = plgpu.layout_cast(
                jnp.zeros((queries, fixed_point.COLUMNS), jnp.float32),
                fixed_point.ACCUMULATOR,
            )
            columns = pl.ds(warpgroup * fixed_point.COLUMNS, fixed_point.COLUMNS)
            for w in range(WARPGROUPS):
                for k in range(0, KEYS, cut.depth):
                    part = pl.ds(k, cut.depth)
                    ds = ds_of(turn).at[w, part].transpose((1, 0))
                    left = plgpu.load(ds, layout=fixed_point.LEFT)
                    right = plgpu.load(
                        keys_smem.at[w, part, columns], layout=fixed_point.RIGHT
                    )
                    dq = plgpu.mma(dq, left, right)
            head, block = block_of(turn)
            groups = queries // fixed_point.GROUP
            width = 4 * fixed_point.COLUMNS
            own = pl.ds(block * groups, groups), slice(None)
            own = *own, pl.ds(warpgroup * width, width)
            fixed_point.add(sums_gmem.at[b, head, *own], dq)

        def masked(block, s, column):
            """-inf where a key comes after its query or does not exist."""

            def hide(s):
                index = plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=wide.rows)
                if is_causal:
                    start = index + (first_key - block * queries - column)
                    seen = wide.positions(s.shape, 1) >= wide.along_rows(start, s.shape)
                else:
                    seen = wide.along_rows(index < key_count - first_key, s.shape)
                return jnp.where(seen, s, -jnp.inf)

            if is_causal:
                partial = block * queries + column < first_key + (KEYS - 1)
            elif key_count % KEY_TILE:
                partial = first_key + KEYS > key_count
            else:
                return s
            return lax.cond(partial, hide, lambda s: s, s)

        def statistic(turn, index, column, shape):
            x = plgpu.load(
                statistics_smem.at[slot(turn, 2), index, pl.ds(column, shape[1])],
                layout=wide.columns,
            )
            return wide.along_columns(x, shape)

        def inner(left, right):
            """left @ right^T; `left` may be strips in registers."""
            if cut.schedule != "two_by_two":
                return tiles.inner_products(left, right, SWIZZLED)
            acc = _zero(KEYS, right.shape[0], wide)
            for k in range(0, head_dim, SWIZZLED):
                part = pl.ds(k, SWIZZLED)
                x = plgpu.load(left.at[:, part], layout=LEFT_2)
                y = plgpu.load(right.at[:, part].transpose((1, 0)), layout=RIGHT_2)
                acc = plgpu.mma(acc, x, y)
            return acc

        def multiply(acc, left, right):
            """acc + left @ right, `left` in registers or in shared memory."""
            if not exchanged:
                return tiles.multiply(acc, left, right)
            for k in range(0, queries, EXCHANGED):
                part = pl.ds(k, EXCHANGED)
                x = plgpu.load(left.at[:, part], layout=LEFT_2)
                for i in range(0, EXCHANGED, tiles.STRIP):
                    rows = pl.ds(k + i, tiles.STRIP)
                    y = plgpu.load(right.at[rows], layout=RIGHT_2)
                    strip = lax.slice(x, (0, i), (KEYS, i + tiles.STRIP))
                    acc = plgpu.mma(acc, strip, y)
            return acc

        tiles.start_copy(own_rows(k_gmem), k_smem.at[warpgroup])
        v_place = v_smem.at[warpgroup] if v_smem is not None else None
        if v_place is None:
            # What the second block is to be copied to.
            v_place = block_smem.at[1 + 2 * warpgroup]
        tiles.start_copy(own_rows(v_gmem), v_place)
        start_q(i32(0))
        start_dout(i32(0))
        tiles.wait_for_copies(0)
        make_keys()
        k = k_smem.at[warpgroup]
        v = tiles.left_strips(v_place, SWIZZLED) if cut.v_registers else v_place

        def probabilities(turn, column):
            """P of some queries, FP32."""
            _, block = block_of(turn)
            s = inner(k, q_of(turn).at[pl.ds(column, cut.s_strip)])
            s = masked(block, s, column)
            return jnp.exp2(s * unit - statistic(turn, 0, column, s.shape))

        def dlogits(turn, p, column):
            dp = inner(v, dout_of(turn).at[pl.ds(column, cut.strip)])
            return p * (dp - statistic(turn, 1, column, dp.shape))

        def strips_of(p, start):
            """(column, P) in strips."""
            for i in range(0, cut.s_strip, cut.strip):
                part = lax.slice(p, (0, i), (KEYS, i + cut.strip))
                yield start + i, part

        def add_dq_first(turn):
            is_first = turn > 0
            if cut.apart:
                is_first = jnp.logical_and(is_first, warpgroup == 0)
            pl.when(is_first)(lambda: add_dq(turn - 1))

        def add_dq_last(turn):
            if cut.apart:
                is_last = jnp.logical_and(turn > 0, warpgroup == 1)
                pl.when(is_last)(lambda: add_dq(turn - 1))

        def two_stages(turn, carry):
            dk, dv = carry
            # This block has arrived, as has dS of the one before, with which all are
            # done but for that.
            all_copies()
            start_q(turn + 1)
            start_dout(turn + 1)
            add_dq_first(turn)
            for start in range(0, queries, cut.s_strip):
                p = probabilities(turn, start)
                rows = pl.ds(start, cut.s_strip)
                dv = multiply(dv, p.astype(dtype), dout_of(turn).at[rows])
                for column, part in strips_of(p, start):
                    rows = pl.ds(column, cut.strip)
                    ds = dlogits(turn, part, column)
                    ds_of(turn)[warpgroup, :, rows] = ds.astype(jnp.float16)
                    dk = multiply(dk, ds.astype(dtype), q_of(turn).at[rows])
            add_dq_last(turn)
            return dk, dv

        def one_stage(turn, carry):
            dk, dv = carry
            all_copies()
            start_q(turn + 1)
            add_dq_first(turn)
            kept = []
            for start in range(0, queries, cut.s_strip):
                p = probabilities(turn, start)
                rows = pl.ds(start, cut.s_strip)
                dv = multiply(dv, p.astype(dtype), dout_of(turn).at[rows])
                for column, part in strips_of(p, start):
                    rows = pl.ds(column, cut.strip)
                    ds = dlogits(turn, part, column)
                    kept.append((rows, ds.astype(jnp.float16)))
                    if column + cut.strip < queries:
                        dk = multiply(dk, ds.astype(dtype), q_of(turn).at[rows])
            add_dq_last(turn)
            # All are done with dO, and with dS of the block before.
            barrier()
            start_dout(turn + 1)
            for rows, half in kept:
                ds_of(turn)[warpgroup, :, rows] = half
            dk = multiply(dk, ds.astype(dtype), q_of(turn).at[rows])
            return dk, dv

        def exchange(turn, carry):
            dk, dv = carry
            own = p_smem.at[warpgroup]
            all_copies()
            start_q(turn + 1)
            start_dout(turn + 1)
            add_dq_first(turn)
            found = []
            for start in range(0, queries, cut.s_strip):
                p = probabilities(turn, start)
                own[:, pl.ds(start, cut.s_strip)] = p.astype(dtype)
                found += strips_of(p, start)
            own_barrier()
            dv = multiply(dv, own, dout_of(turn))
            found = [(column, dlogits(turn, p, column)) for column, p in found]
            add_dq_last(turn)
            # All are done with P, and with dS of the block before.
            barrier()
            for column, ds in found:
                rows = pl.ds(column, cut.strip)
                own[:, rows] = ds.astype(dtype)
                ds_of(turn)[warpgroup, :, rows] = ds.astype(jnp.float16)
            own_barrier()
            dk = multiply(dk, own, q_of(turn))
            return dk, dv

        def two_by_two(turn, carry):
            dk, dv = carry
            own = p_smem.at[warpgroup]
            # dS of the block before is there, and all are done with its Q.
            barrier()
            pl.when(turn > 0)(lambda: start_q(turn))
            add_dq_first(turn)
            # This block has arrived, and all are done with the sums before.
            all_copies()
            p = probabilities(turn, 0)
            own[...] = p.astype(dtype)
            ds = dlogits(turn, p, 0)
            own_barrier()
            dv = multiply(dv, own, dout_of(turn))
            # All are done with dO and P.
            barrier()
            start_dout(turn + 1)
            own[...] = ds.astype(dtype)
            ds_of(turn)[warpgroup] = ds.astype(jnp.float16)
            own_barrier()
            dk = multiply(dk, own, q_of(turn))
            return dk, dv

        step = {
            "two_stages": two_stages,
            "one_stage": one_stage,
            "exchanged": exchange,
            "two_by_two": two_by_two,
        }[cut.schedule]
        zero = _zero(KEYS, head_dim, MMA_2 if exchanged else tiles.MMA)
        dk, dv = lax.fori_loop(i32(0), steps, step, (zero, zero))
        all_copies()
        add_dq(steps - 1)
        divisor = row_divisor[b, kv_head]
        dk, dv = dk * (divisor * scale), dv * divisor
        for x, gmem in ((dk, dk_gmem), (dv, dv_gmem)):
            tiles.store_rows(x.astype(dtype), k, own_rows(gmem), SWIZZLED)

    tile_smem = smem_tile((WARPGROUPS, KEYS, head_dim), dtype)
    scratch = (
        tile_smem,
        None if cut.v_registers else tile_smem,
        smem_tile((WARPGROUPS, KEYS, head_dim), jnp.float16),
        smem_tile((q_stages + dout_stages, queries, head_dim), dtype),
        plgpu.SMEM((2, *statistics.shape[3:]), jnp.float32),
        smem_tile((ds_stages, WARPGROUPS, KEYS, queries), jnp.float16, cut.strip),
        smem_tile((WARPGROUPS, KEYS, queries), dtype, EXCHANGED) if exchanged else None,
    )
    dkv = jax.ShapeDtypeStruct(key.shape, dtype)
    sums = jax.ShapeDtypeStruct(
        fixed_point.shape_of_sums(batch, query_heads, query.shape[1], head_dim),
        jnp.int32,
    )
    operands = (
        *(query, key, value, dout, statistics, numbers.centre),
        numbers.key_factor[..., 0],
        power_of_two(-numbers.row_exponent),
        jnp.zeros(sums.shape, sums.dtype),
    )
    return internals.kernel(
        attention_backward_h128,
        aliases={len(operands) - 1: 0},
        out_type=[sums, dkv, dkv],
        scratch_types=[scratch],
        grid=(batch * key_heads * key_tiles,),
        grid_names=("cta",),
        compiler_params=tiles.COMPILER_PARAMS,
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
    )(*operands)


# Queries of P and dS that are loaded from shared memory at a time.
EXCHANGED = 32


def _zero(rows: int, columns: int, fragments: Fragments) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), fragments.tile)
