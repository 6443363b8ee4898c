"""Backward attention for Hopper in one pass: five matrix products instead of seven.

A thread block (CTA) owns 128 keys of a key head at a time and goes over all blocks of
queries that see them, of the query heads that attend to it. Where that leaves CTAs
without work these heads are dealt to several CTAs, in *parts*: each has sums of its own
for dK and dV, added after the kernel. Tiles are transposed, keys down the rows:

    S^T = K Q^T     P^T = exp(S^T - LSE)     dP^T = V dO^T     dS^T = P^T (dP^T - delta)
    dV += P^T dO    dK += dS^T Q             dQ[block] += dS K'   (in global memory)

dQ gets an FP32 tile from every CTA that sees the block, added by TMA, by warps that do
nothing else. So that two runs give the same bits the additions to a block are made in a
fixed order, by a semaphore for each block of queries: the order in which tiles arrive
by themselves (`ring_order`, which also says why nobody waits for ever). The first one
is stored and not added, so dQ needs no zeroing; but where there is a sum already all
are added to that.

dS for dQ, and the centre
-------------------------
dQ is what rounding spoils most: its operand dS is FP16, whatever the inputs are, which
has three bits more than BF16, and so is K'. Both are scaled by powers of two of their
head (`hopper_range`): K' where it is made, dS by way of LSE, so that P, dV and dK
have it as well and lose it in the end, dQ after the kernel. FP16 inputs are not scaled:
P is rounded to their format.

Rows of dS sum to dLSE in exact arithmetic; rounded ones do not, and what is left over
multiplies the mean of K (see `hopper_backward_dq`, which sums it). Here K' = K - c
takes the place of K in that product, and dLSE * c is added at the end: a row sum of
rounding errors then meets keys of mean near zero. c is zero in columns whose mean is
below a quarter of their spread, and has few digits, so that most differences are exact
(`attn_jax.centre`).

On request c is zero, or dS and K' have the inputs' format and are not scaled
(`dq_dtype`): one pass without either cure has both.

Where it rounds (16 bit: the inputs' format):
  S, P, dP, dS, delta and the accumulators of a tile are FP32;
  P is rounded to 16 bit as the operand of P^T dO, dS as that of dS^T Q;
  dS is rounded to FP16 as the operand of dS K', and so is K';
  tiles of dQ are added in FP32, as are dK and dV of the parts of a key head;
  scale is applied to the sums, which are then rounded once (`hopper_query_gradient`).
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import internals, tuning, turns
from attn_jax.kernels.hopper_fused_copies import leave_zeros, load, store
from attn_jax.kernels.hopper_fused_products import Products
from attn_jax.kernels.hopper_fused_work import (
    KEY_TILE,
    WARPGROUPS,
    Barriers,
    Memory,
    Shapes,
    Work,
    picked,
    reason_against,
    ways_of,
)
from attn_jax.kernels.hopper_query_gradient import query_gradient
from attn_jax.kernels.hopper_range import Range, power_of_two
from attn_jax.kernels.tiles import LOG2_E, pad_rows
from attn_jax.kernels.tilings import Plan
from attn_jax.kernels.visibility import Band
from attn_jax.pairwise import pairwise_sum
from attn_jax.span import Chosen

# By the number of warpgroups that copy. What a CTA has is 128 for each of 512 threads,
# or 168 for each of 384: who asks for more than others give up waits for ever.
CONSUMER_REGISTERS = {1: 240, 2: 232}
OTHER_REGISTERS = 24


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
    window: Band | None = None,
    plan: Plan | None = None,
    dq_dtype: jnp.dtype = jnp.dtype(jnp.float16),
    wide: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """(dQ, dK, dV). `row_sum` is what rows of dS sum to (None: 0), `numbers` are those
    of `hopper_range.range_of`. `window`: instead of `is_causal`, bounded on both sides.
    `plan`: None, for `tuning.fused`.
    `dq_dtype`: of dS and K' as dQ's operands, FP16 or the inputs' type. `wide`:
    gradients are FP32, as those of parts of the keys are.

    Sequences are padded to a multiple of 8; `query_count` and `key_count` say how many
    rows are real.

    Raises:
      NotImplementedError: `reason_against` has one.
    """
    batch, _, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    reason = reason_against(
        (batch, query_count, query_heads, head_dim),
        (batch, key_count, key_heads, value.shape[3]),
        is_causal=is_causal,
        window=window,
    )
    if reason is not None:
        raise NotImplementedError(f"the fused backward kernel does not take {reason}")
    if plan is None:
        masked = is_causal or window is not None
        plan = tuning.fused(head_dim, key_count, is_causal=masked)
    group = query_heads // key_heads
    exponent = jnp.repeat(numbers.row_exponent, group, axis=1)[..., None]
    sums, dk, dv = sums_over_keys(
        *(query, key, value, dout, lse * LOG2_E - exponent, delta),
        numbers,
        query_count=query_count,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        window=window,
        plan=plan,
        dq_dtype=dq_dtype,
        wide=wide,
    )
    dq = query_gradient(sums, numbers, row_sum, scale, query.dtype, wide=wide)
    dq = dq[:, :query_count]
    return dq, dk[:, :key_count], dv[:, :key_count]


def sums_over_keys(
    query, key, value, dout, lse2, delta, numbers: Range, before=None,
    *, query_count: int, key_count: int, scale: float, is_causal: bool,
    window: Band | None, plan: Plan, dq_dtype: jnp.dtype, wide: bool,
    first_query: int = 0, first_key: int = 0, chosen: Chosen | None = None,
):  # fmt: skip
    """(sums over keys of dS K' in FP32, scaled, dK, dV), padded: of all keys, or of
    long tiles and, for the last queries, of short ones. `lse2` is LSE in units of log2,
    less log2 of what dS is scaled by. `before`: sums that these are added to. Keys and
    values may be the first two of some planes, which the `key` is then. `chosen`: no
    more than that of these queries and keys, whole blocks, without a mask; of the rest
    all is 0 but the sums before."""
    batch, rows_in_all, query_heads, head_dim = query.shape
    dtype = query.dtype
    shapes = Shapes(batch, query_count, key_count, query_heads, key.shape[-2], head_dim)
    shapes = shapes._replace(first_query=first_query, first_key=first_key)
    ways = ways_of(shapes, plan, chosen, is_causal=is_causal, window=window)
    shapes = ways[0].shapes
    ctas = max(way.ctas for way in ways)
    in_fp32 = wide or shapes.parts > 1  # dK and dV
    # Past the last query everything is zero, read from memory or filled in by TMA:
    # P = exp(0 - 0) = 1 meets dO = 0 there, and dS = 1 * (0 - 0) = 0. What is added to
    # dQ past its end TMA leaves out.
    of_rows = max(shapes.blocks * shapes.queries, lse2.shape[2])
    rows = (pad_rows(x, of_rows) for x in (lse2, delta))

    def attention_backward_fused(chosen_gmem, given, *results):
        way = picked(ways, chosen_gmem)
        *dqs, dk_gmem, dv_gmem, _smem, _barriers = results
        semaphores = turns.semaphores(len(dqs) * batch * query_heads * shapes.blocks)
        take = functools.partial(
            of_way, *given, *results, way=way, semaphores=semaphores
        )
        if chosen_gmem is None:
            take()
            return
        leave_zeros(way, ctas, dqs[0] if before is None else None, dk_gmem, dv_gmem)
        pl.when(lax.axis_index("cta") < way.ctas)(take)

    def of_way(
        q_gmem, k_gmem, v_gmem, dout_gmem, lse_gmem, delta_gmem, centre_gmem,
        key_factor, row_unscale, before_gmem, *results, way, semaphores,
    ):  # fmt: skip
        del before_gmem  # Lies where dQ does.
        keys_at, values_at = (k_gmem, ()), (v_gmem, ())
        if value is None:
            keys_at, values_at = (k_gmem, (0,)), (k_gmem, (1,))
        *dq_gmem, dk_gmem, dv_gmem, smem, barriers = results
        work = Work.of(lax.axis_index("cta"), way.shapes, way.ring)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < WARPGROUPS)
        def multiply():
            registers = CONSUMER_REGISTERS[plan.copiers]
            plgpu.set_max_registers(registers, action="increase")
            products = Products.of(
                warpgroup,
                work,
                smem=smem,
                barriers=barriers,
                scale=scale,
                dtype=dtype,
                dq_dtype=dq_dtype,
                in_fp32=in_fp32,
                storers=plan.storers,
            )
            products.make_all(row_unscale, dk_gmem, dv_gmem)

        def produce():
            load(
                *(work, smem, barriers, keys_at, (centre_gmem, key_factor), values_at),
                (q_gmem, lse_gmem),
                (dout_gmem, delta_gmem),
            )

        if plan.copiers > 1:

            @pl.when(warpgroup == WARPGROUPS)
            def copy_in():
                plgpu.set_max_registers(OTHER_REGISTERS, action="decrease")
                produce()

        @pl.when(warpgroup == WARPGROUPS + plan.copiers - 1)
        def add_dq():
            plgpu.set_max_registers(OTHER_REGISTERS, action="decrease")
            of_sums = dq_gmem, semaphores, before is not None
            beside = produce if plan.copiers == 1 else None
            store(work, plan, smem, barriers, *of_sums, beside)

    dkv = jax.ShapeDtypeStruct(key.shape, dq_dtype)
    if in_fp32:  # TMA leaves out what lies past the end; other stores do not.
        dkv = batch, shapes.tiles * KEY_TILE, shapes.key_parts, head_dim
        dkv = jax.ShapeDtypeStruct(dkv, jnp.float32)

    def sum_of_parts(x):
        x = x.reshape(*x.shape[:2], shapes.key_heads, shapes.parts, head_dim)
        x = pairwise_sum(x, 3)
        return x if wide else x.astype(dtype)

    # Of all queries and, apart, of those that see a short tile.
    firsts = [0, ways[0].ring.long_tiles * KEY_TILE] if ways[0].ring.apart else [0]
    lengths = [rows_in_all - first for first in firsts]
    of_dq = [(batch, length, *query.shape[2:]) for length in lengths]
    dqs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in of_dq]
    unscale = power_of_two(-numbers.row_exponent)
    columns = numbers.centre, numbers.key_factor
    operands = (
        None if chosen is None else (chosen.which, jnp.reshape(chosen.at, 1)),
        (query, key, value, dout, *rows, *columns, unscale, before),
    )
    count = len(jax.tree.leaves(operands))
    aliases = {} if before is None else {count - 1: 0}
    kernel = internals.kernel(
        attention_backward_fused,
        aliases=aliases,
        out_type=[*dqs, dkv, dkv],
        scratch_types=[Memory.scratch(shapes, dtype, dq_dtype), Barriers.scratch(plan)],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + plan.copiers,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True
        ),
    )
    # Semaphores begin as zeros.
    *sums, dk, dv = internals.in_place(kernel)(*operands)
    if in_fp32:
        dk, dv = (sum_of_parts(x) for x in (dk, dv))
    else:
        dk, dv = (lax.bitcast_convert_type(x, dtype) for x in (dk, dv))
    return sums, dk, dv
