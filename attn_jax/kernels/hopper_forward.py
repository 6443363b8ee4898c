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
  out is rounded once. With `residual`, what that rounding dropped is kept in one byte
  (`low_part`): the two carry some 16 bits into the backward pass.
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
from jaxtyping import Array, Float, Float32, Int8

from attn_jax.kernels import hopper_loads, internals, low_part, schedule
from attn_jax.kernels.hopper_forward_form import Form, Refs, Seen
from attn_jax.kernels.hopper_forward_work import Consumer
from attn_jax.kernels.hopper_outputs import Carried
from attn_jax.kernels.hopper_softmax import LOG2_P_SCALE, Softmax
from attn_jax.kernels.tiles import LOG2_E, smem_tile
from attn_jax.kernels.tilings import ForwardTiling
from attn_jax.kernels.visibility import (
    Band,
    Counted,
    Rules,
    listed_pairs,
    whole_tiles,
)
from attn_jax.span import Chosen, Ended, Ending

# Registers a thread (consumers, producer) by number of consumer warpgroups: setmaxnreg
# moves them from the loading warpgroup to the others.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32), 4: (112, 24)}


def forward(
    query: Float[Array, "B Tpad N H"],
    key: Float[Array, "*planes B Spad K H"],
    value: Float[Array, "*planes B Spad K D"],
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
    unscale: Float32[Array, "B K D"] | int | None = None,
    carries: bool = False,
    before: Carried | None = None,
    first_row: int = 0,
    chosen: Chosen | None = None,
    ending: Ending | None = None,
) -> (
    tuple[
        Float[Array, "B T N D"], Int8[Array, "B T N D"] | None, Float32[Array, "B N T"]
    ]
    | Carried
    | Ended
):
    """Returns (out, what rounding dropped from out or None, LSE in natural log).

    Sequences are padded to a multiple of 8; `query_count` and `key_count` say how many
    rows are real. Keys may be the first of several planes, and values the second.
    `scale` is not negative. A causal row i sees the keys j <= i; `window`, of
    `visibility.window_of`, takes the place of `is_causal`. With `mask` it is that and
    `band` which say what is seen, and neither of these does; a `bias` comes with one.
    `rescale_threshold` and `repeated_max_factor` are `Recipe`'s. `unscale` comes with V
    as FP16 numbers (`hopper_key_numbers`): P then is FP16, too, times
    `hopper_softmax.P_SCALE`. A number is that of the row of the second plane of `key`
    which has it.
    `carries`: returns `Carried`, of whole tiles, or `before` with these added where it
    lies, from `first_row` on, only what is `chosen`. `ending`: that of all rows, with
    what is `chosen` added to some.
    """
    batch, padded, query_heads, head_dim = query.shape
    value_dim, dtype = value.shape[-1], query.dtype
    rows, columns, warpgroups = tiling.rows, tiling.columns, tiling.warpgroups
    # Lists are of whole tiles; and a lazy rescaling's waits only then stay in place.
    whole = mask is not None or rescale_threshold > 0
    strips = schedule.strips(query_count, tiling, whole_tiles=whole)
    tile_count, key_blocks = strips.tiles, pl.cdiv(key_count, columns)
    counted = Counted(
        window or Band(None, 0 if is_causal else None), *(key_count, rows, columns)
    )
    counts = counted.by_tile(strips.ends, key_blocks)
    # Of logits in the exponent: capped ones are in units of log2.
    unit = scale * LOG2_E if soft_cap is None and bias is None else 1.0
    blind = mask is not None or counted.blind
    softmax = Softmax(
        *(unit, value.dtype, blind, rescale_threshold, repeated_max_factor),
        log2_scale=0 if unscale is None else LOG2_P_SCALE,
    )
    form = Form(
        tiling=tiling,
        value_dim=value_dim,
        group=query_heads // key.shape[-2],
        query_count=query_count,
        strips=strips,
        softmax=softmax,
        counted=counted,
        listed=mask is not None,
        band=band,
        most_blocks=max(counts),
        scale=scale,
        soft_cap=soft_cap,
        wide_out=out_dtype == jnp.float32,
        keeps_low=residual and out_dtype != jnp.float32,
        carries=carries,
        ends=ending is not None,
        first_row=first_row,
    )
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
        key.shape[-3] * (head_dim + value_dim) * dtype.itemsize,
        singly=carries and not form.in_links,
        chosen=chosen,
        tiling=tiling,
        ends=form.ends,
    )

    def attention_forward(
        q_gmem, k_gmem, v_gmem, tables, chosen_gmem, pairs, sinks_gmem, bias_gmem,
        unscale_gmem, before_gmem, out_gmem, low_gmem, lse_gmem, row_sum_gmem,
        sums_gmem, smem, barriers,
    ):  # fmt: skip
        q_smem, k_smem, v_smem, out_smem = smem
        q_ready, k_ready, v_ready, q_free, k_free, v_free = barriers
        q = hopper_loads.Loaded(q_gmem, q_smem, q_ready, q_free)
        first, second = (0,) * (key.ndim - 4), (1,) * (value.ndim - 4)
        k = hopper_loads.Loaded(k_gmem, k_smem, k_ready, k_free, first)
        v = hopper_loads.Loaded(v_gmem, v_smem, v_ready, v_free, second)
        steps = hopper_loads.Stages(k, v, tiling.stages, warpgroups)
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        table_gmem, last = tables, table.shape[-1] - 1
        if chosen_gmem is not None:
            which_gmem, at_gmem = chosen_gmem
            table_gmem = tables.at[which_gmem[at_gmem[0]]]
        all_blocks = table_gmem[cta, last] if chosen else key_blocks
        some = (table_gmem[cta, last - 2], table_gmem[cta, last - 1])
        seen = Seen(form, all_blocks, some if form.ends else None)
        for_each_tile = functools.partial(
            hopper_loads.for_each_tile, table_gmem, cta, tile_count, query_heads
        )

        def unscaled_by(b, n):
            head = lax.div(n, jnp.int32(form.group))
            if unscale_gmem is not None:
                return unscale_gmem[b, head, 0]
            return k_gmem[1, b, unscale, head, 0].astype(jnp.float32)

        @pl.when(warpgroup < warpgroups)
        def consume():
            plgpu.set_max_registers(REGISTERS[warpgroups][0], action="increase")
            refs = Refs(
                *(pairs, sinks_gmem, bias_gmem),
                None if unscale is None else unscaled_by,
                *(before_gmem, out_gmem, low_gmem, lse_gmem, row_sum_gmem, sums_gmem),
                out_smem,
            )
            Consumer(
                *(form, q, steps, refs, seen, cta, warpgroup),
                turns=lambda: table_gmem[cta, 0],
            ).consume(for_each_tile)

        @pl.when(warpgroup == warpgroups)
        def produce():
            plgpu.set_max_registers(REGISTERS[warpgroups][1], action="decrease")

            def blocks_of(b, n, tile):
                if pairs is not None:
                    listed = pairs.entries(b, n, tile)
                    return listed[0], lambda i: lax.div(listed[i + 1], jnp.int32(2))
                first, end = seen.of_tile(tile)
                return end - first, lambda i: end - 1 - i

            hopper_loads.load(
                *(for_each_tile, blocks_of, strips, tiling, form.group, q, steps),
                some_see_none=form.ends,
            )

    out_smem = None
    if not (form.wide_out or form.out_by_key):
        stored = tiling.stored(value_dim)
        out_smem = smem_tile((warpgroups, rows, stored), dtype)
    tile_rows = tile_count * tiling.tile
    shaped = jax.ShapeDtypeStruct
    # TMA stores drop what lies outside an array; plain stores (FP32 out, LSE) do not.
    out_rows = tile_rows if form.wide_out else padded
    out = shaped((batch, out_rows, query_heads, value_dim), out_dtype)
    low = shaped((batch, query_count, query_heads, value_dim), low_part.DTYPE)
    of_rows = shaped((batch, query_heads, tile_rows), jnp.float32)
    ctas = table.shape[-2]
    sums = shaped((ctas, warpgroups, rows, value_dim), jnp.float32)
    factors = None if isinstance(unscale, int) else unscale
    numbers = None if chosen is None else (chosen.which, jnp.reshape(chosen.at, 1))
    operands = query, key, value, table, numbers, pairs, sinks, bias, factors, before
    aliases = {}
    if before is not None:
        of_rows, _, total = before
        count = len(jax.tree.leaves(operands))
        # Of row_max, row_sum and total, the last ones: LSE's place, its own, and out's.
        aliases = {count - 3: 1, count - 2: 2, count - 1: 0}
        out = total
    rounded = None
    if ending is not None:
        assert before is not None and chosen is not None
        if ending.dtype is not None:
            rounded = shaped(out.shape, ending.dtype)
        # LSE lies in place of m, and the exact O in that of A.
        aliases = {count - 3: ending.exact + (rounded is not None)}
        if ending.exact:
            aliases[count - 1] = 0
        out = out if ending.exact else None
    out, low, lse, row_sum, _ = internals.kernel(
        attention_forward,
        aliases=aliases,
        out_type=[
            out,
            low if form.keeps_low else rounded,
            of_rows,
            of_rows if carries and not form.ends else None,
            sums if form.in_links else None,
        ],
        scratch_types=[
            (*hopper_loads.places(tiling, query, value), out_smem),
            hopper_loads.barriers(tiling, keeps_last=form.out_by_key),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)
    if form.ends:
        return Ended(low, out, lse)
    if carries:
        return Carried(lse, row_sum, out)
    return out[:, :query_count], low, lse[:, :, :query_count]
