"""Numbers of a key head that both passes want, and V as FP16 numbers, for Hopper.

In one launch (sm_90a), before they start, and at the speed of memory.

`attn_jax.recipe_schema` defines c, w and v; e is the exponent of a power of two that
brings V into FP16's range:

    c           a centre of the keys         w = 2^k       what K' is scaled by
    v           of a bound of dS             half = V 2^e

Some CTAs of one cluster share a head, each some keys. They read K and V, tell each
other what they found, by way of memory, and scale V, which is still in shared memory
or else is read once more, for the most part from the L2 cache. TMA fills shared memory
some tiles ahead. Where there are many heads CTAs stay and take one after the other, so
that tiles of the next one arrive meanwhile (`plan_for`).

Where it rounds: all is FP32, added in an order that shapes and plan fix (no atomics):
two runs give the same bits.
  sums of K and of K * K: K * K is exact, short of underflow. A thread adds every 8th
    key of a CTA's share (in general every `Lanes.strip`-th) from first to last, then
    lanes add in pairs, then warps, then the CTAs' from first to last;
  maxima, powers of two: exact. What is not finite is none of the largest: rows that
    nobody sees may hold it;
  half: exact down to 2^-31 of the head's largest |V|, below that rounded to FP16.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16, Float32

from attn_jax.centre import centre_from
from attn_jax.formats import FP16, NumberFormat
from attn_jax.kernels import turns
from attn_jax.kernels.lanes import Lanes, read
from attn_jax.kernels.ring_order import MULTIPROCESSORS
from attn_jax.kernels.tiles import widen
from attn_jax.recipe_schema import MOST_HEAD_EXPONENT

# Bytes in which a warpgroup's warps add up what each of them has.
SCRATCH = 2048
# Of V, which no recipe scales: a power of two and its inverse are normal numbers of
# FP32, and BF16's largest still fits.
_MOST_VALUE_EXPONENT = 120


class KeyNumbers(NamedTuple):
    """Of a key head. What is one number is there once for each column, so that kernels
    take it as it lies.

    Attributes:
      centre: c, that comes off the keys.
      key_factor: w.
      value_norm: v.
      unscale: 2^-e.
    """

    centre: Float32[Array, "B K H"]
    key_factor: Float32[Array, "B K H"]
    value_norm: Float32[Array, "B K D"]
    unscale: Float32[Array, "B K D"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel goes about it.

    Attributes:
      elements: of a tile, about.
      key_stages, value_stages: tiles in shared memory, of which a multiprocessor has
        room for 28. If all of a CTA's V is among them it is read once.
      most_parts: CTAs of a cluster, at most; 8 is what any card takes.
      ctas: as many are wanted.
      stay: whether there are no more, and clusters take one head after the other.
        Otherwise each head has a cluster.
    """

    elements: int = 4096
    key_stages: int = 4
    value_stages: int = 8
    most_parts: int = 8
    ctas: int = 2 * MULTIPROCESSORS
    stay: bool = False

    def rows(self, width: int, unit: int) -> int:
        """Of a tile, a multiple of `unit`."""
        return min(max(self.elements // width // unit, 1) * unit, 256)

    def parts(self, heads: int, tiles: int) -> int:
        """CTAs of a head that has so many tiles of V, a power of two."""
        parts = 1
        while 2 * parts <= min(self.most_parts, tiles) and (
            parts * self.value_stages < tiles or heads * parts < self.ctas
        ):
            parts *= 2
        return parts


# V of a head fits beside that of two others; or alone, or with another CTA's help.
SHORT = Plan(
    key_stages=3, value_stages=6, most_parts=1, ctas=3 * MULTIPROCESSORS, stay=True
)
MANY = Plan(
    key_stages=6, value_stages=18, most_parts=2, ctas=MULTIPROCESSORS, stay=True
)


def plan_for(heads: int, keys: int, value_dim: int) -> Plan:
    """What was fastest on an H200 (`prototypes/measure_rows.py`). Clusters of four or
    more that stay are slower than such as end: it seems that they do not all find room
    at once."""
    tiles = _Tiles.of(keys, value_dim, SHORT).count
    if tiles <= SHORT.value_stages and heads >= 2 * MULTIPROCESSORS:
        return SHORT
    nearly_all = 0.9 * MULTIPROCESSORS
    return MANY if MANY.most_parts * heads >= nearly_all else Plan()


class _Tiles(NamedTuple):
    """Of K or V: `count` tiles of `rows` keys are a CTA's share."""

    lanes: Lanes
    rows: int
    count: int
    width: int

    @classmethod
    def of(cls, keys: int, width: int, plan: Plan) -> "_Tiles":
        """With all keys in one share."""
        # With 16 lanes to a row a strip is 8 rows. 4 columns are what Mosaic GPU can
        # add across warps at once.
        lanes = Lanes(math.gcd(width // 4, 16), 4)
        rows = plan.rows(width, lanes.strip)
        return cls(lanes, rows, pl.cdiv(keys, rows), width)

    def shared(self, parts: int) -> "_Tiles":
        return self._replace(count=pl.cdiv(self.count, parts))

    @property
    def shape(self) -> tuple[int, int]:
        return self.lanes.strip, self.width

    def zero(self, dtype=jnp.float32):
        zero = jnp.zeros(self.shape, dtype)
        return plgpu.layout_cast(zero, self.lanes.layout())

    def strips(self, tile):
        """Row of a tile, 16-bit values: strip after strip."""
        for row in range(0, self.rows, self.lanes.strip):
            part = tile.at[pl.ds(row, self.lanes.strip)]
            yield row, read(part, layout=self.lanes.layout())

    def over_head(self, columns, reduce):
        """One number of all columns, all over a strip."""
        x = lax.broadcast_in_dim(columns, self.shape, [1])
        x = reduce(plgpu.layout_cast(x, self.lanes.layout()), axis=1)
        x = lax.broadcast_in_dim(x, self.shape, [0])
        return plgpu.layout_cast(x, self.lanes.layout())


def key_numbers(
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    key_count: int,
    inputs: NumberFormat,
    *,
    half: bool,
    plan: Plan | None = None,
) -> tuple[KeyNumbers, Float16[Array, "B Spad K D"] | None]:
    """(numbers of K and V, V as FP16 numbers if `half`).

    K and V, of format `inputs`, are padded with zeros from `key_count` to a multiple of
    8. `plan`: None, for `plan_for`.
    """
    batch, keys, heads, head_dim = key.shape
    value_dim = value.shape[3]
    items = batch * heads
    plan = plan or plan_for(items, keys, value_dim)
    of_key, of_value = (_Tiles.of(keys, x, plan) for x in (head_dim, value_dim))
    parts = plan.parts(items, of_value.count)
    of_key, of_value = of_key.shared(parts), of_value.shared(parts)
    most = pl.cdiv(items, max(plan.ctas // parts, 1)) if plan.stay else 1
    clusters = pl.cdiv(items, most)
    key_stages = min(plan.key_stages, most * of_key.count)
    # The last tiles of V are still there when V is scaled, from the last to the first.
    stages = min(plan.value_stages, of_value.count)
    read_again = of_value.count - stages
    # What CTAs tell each other: of V the largest, of K sums, squares and the largest.
    found_shape = (batch, heads, parts)

    def attention_key_numbers(
        key_gmem, value_gmem, centre_gmem, key_factor_gmem, norm_gmem, unscale_gmem,
        found_key_gmem, found_value_gmem, half_gmem, smem, barriers,
    ):  # fmt: skip
        key_smem, value_smem = smem
        key_ready, value_ready, keys_told, values_told = barriers
        cluster = lax.axis_index("cluster")
        of_keys = lax.axis_index("warpgroup") == 0
        part = lax.axis_index("part") if parts > 1 else jnp.int32(0)
        # Items are dealt round.
        mine = lax.div(items - cluster + (clusters - 1), jnp.int32(clusters))

        def head_of(turn):
            number = cluster + turn * clusters
            return lax.div(number, jnp.int32(heads)), lax.rem(number, jnp.int32(heads))

        def rows_of(tiles, tile):
            """Of a CTA's tile, in global memory."""
            return pl.ds((part * tiles.count + tile) * tiles.rows, tiles.rows)

        def load_key(step):
            @pl.when(step < mine * of_key.count)
            def _():
                now = lax.rem(step, jnp.int32(key_stages))
                turn = lax.div(step, jnp.int32(of_key.count))
                tile = lax.rem(step, jnp.int32(of_key.count))
                b, n = head_of(turn)
                place = b, rows_of(of_key, tile), n
                plgpu.copy_gmem_to_smem(
                    key_gmem.at[place], key_smem.at[now], key_ready.at[now]
                )

        def load_value(turn, tile):
            @pl.when(turn < mine)
            def _():
                b, n = head_of(turn)
                now = slot(tile)
                plgpu.copy_gmem_to_smem(
                    value_gmem.at[b, rows_of(of_value, tile), n],
                    value_smem.at[now],
                    value_ready.at[now],
                )

        def slot(tile):
            return lax.rem(tile, jnp.int32(stages))

        @pl.when(of_keys)
        def _():
            for step in range(key_stages):
                load_key(jnp.int32(step))

        @pl.when(~of_keys)
        def _():
            for tile in range(stages):
                load_value(jnp.int32(0), jnp.int32(tile))

        def over_keys(step, found):
            sums, squares, largest = found
            now = lax.rem(step, jnp.int32(key_stages))
            plgpu.barrier_wait(key_ready.at[now])
            for _, x in of_key.strips(key_smem.at[now]):
                largest = jnp.maximum(largest, _rank(x))
                x = widen(x)
                sums, squares = sums + x, squares + x * x
            # All have read: here it is a barrier.
            plgpu.commit_smem()
            load_key(step + key_stages)
            return sums, squares, largest

        def over_values(turn, tile, largest):
            plgpu.barrier_wait(value_ready.at[slot(tile)])
            for _, x in of_value.strips(value_smem.at[slot(tile)]):
                largest = jnp.maximum(largest, _rank(x))
            if read_again or not half:
                plgpu.commit_smem()
            if read_again:
                pl.when(tile < read_again)(lambda: load_value(turn, tile + stages))
            if not half:
                pl.when(tile >= read_again)(lambda: load_value(turn + 1, slot(tile)))
            return largest

        def told(gmem, b, n, tiles, combine, *index):
            """Of all CTAs; their numbers are on their way together."""
            columns = tiles.lanes.layout().reduce(0)
            found = [
                read(gmem.at[b, n, other, *index], layout=columns)
                for other in range(parts)
            ]
            return functools.reduce(combine, found)

        def scale_values(turn, factor):
            """V of an item times a power of two, all over a strip."""
            b, n = head_of(turn)

            def scale(tile):
                """In place; the result goes as bits of V's format."""
                here = value_smem.at[slot(tile)]
                for row, x in of_value.strips(here):
                    x = lax.bitcast_convert_type(
                        (widen(x) * factor).astype(jnp.float16), value.dtype
                    )
                    here[pl.ds(row, of_value.lanes.strip)] = x
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    here, half_gmem.at[b, rows_of(of_value, tile), n]
                )

            def follow(tile):
                """What comes in its place."""
                if read_again:
                    again = tile - stages
                    pl.when(again >= 0)(lambda: load_value(turn, again))
                pl.when(tile < stages)(lambda: load_value(turn + 1, tile))

            @pl.loop(jnp.int32(0), jnp.int32(of_value.count))
            def _(done):
                tile = of_value.count - 1 - done
                if read_again:

                    @pl.when(tile < read_again)
                    def _():
                        plgpu.barrier_wait(value_ready.at[slot(tile)])

                scale(tile)
                # The tile before has left its place.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                pl.when(done > 0)(lambda: follow(tile + 1))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            follow(jnp.int32(0))

        def all_have_told(barrier):
            """One thread alone says so to each of the other CTAs."""
            plgpu.commit_smem()
            turns.fence()
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
            turns.fence()

        def sums_of_keys(turn):
            # Rows past the last key are zero here, which changes none of these.
            start = of_key.zero(), of_key.zero(), of_key.zero(jnp.int16)
            first = turn * of_key.count
            return lax.fori_loop(first, first + of_key.count, over_keys, start)

        def tell_of_keys(turn, found):
            b, n = head_of(turn)
            sums, squares, largest = found
            sums, squares = sums.sum(axis=0), squares.sum(axis=0)
            found = sums, squares, _of_rank(largest, key.dtype).max(axis=0)
            if parts > 1:
                for i, x in enumerate(found):
                    found_key_gmem[b, n, part, i] = x
                all_have_told(keys_told)

            @pl.when(part == 0)
            def _():
                total, squares_in_all, top = found
                if parts > 1:
                    of_all = functools.partial(told, found_key_gmem, b, n, of_key)
                    combine = jnp.add, jnp.add, jnp.maximum
                    total, squares_in_all, top = (
                        of_all(x, i) for i, x in enumerate(combine)
                    )
                # |K - c| is at most twice the largest key, which might overflow.
                keys = _into_range(of_key.over_head(top, jnp.max), doublings=1)
                mean, square = total / key_count, squares_in_all / key_count
                centre_gmem[b, n] = centre_from(mean, square, top, inputs)
                key_factor_gmem[b, n] = _power(keys).max(axis=0)

        def take_values(turn):
            b, n = head_of(turn)
            largest = lax.fori_loop(
                jnp.int32(0),
                jnp.int32(of_value.count),
                functools.partial(over_values, turn),
                of_value.zero(jnp.int16),
            )
            largest = _of_rank(largest, value.dtype).max(axis=0)
            if parts > 1:
                found_value_gmem[b, n, part] = largest
                all_have_told(values_told)
                largest = told(found_value_gmem, b, n, of_value, jnp.maximum)
            exponent = _into_range(
                of_value.over_head(largest, jnp.max), most=_MOST_VALUE_EXPONENT
            )
            if half:
                scale_values(turn, _power(exponent))

            @pl.when(part == 0)
            def _():
                # Squares of the scaled ones stay in range.
                unscale = _power(-exponent).max(axis=0)
                scaled = largest / unscale
                norm = jnp.sqrt(of_value.over_head(scaled * scaled, jnp.sum))
                norm_gmem[b, n] = norm.max(axis=0) * unscale
                unscale_gmem[b, n] = unscale

        @pl.loop(jnp.int32(0), mine)
        def _(turn):
            def values():
                take_values(turn)
                return of_key.zero(), of_key.zero(), of_key.zero(jnp.int16)

            def together(own):
                del own
                return lax.cond(of_keys, lambda: sums_of_keys(turn), values)

            # That place begins where what is allocated ends (Pallas): so the one for
            # values lies behind this, and the one for keys, which add up later, in it.
            found = pl.run_scoped(
                together,
                plgpu.SMEM((SCRATCH,), jnp.int8),
                collective_axes="warpgroup",
            )
            pl.when(of_keys)(lambda: tell_of_keys(turn, found))

        plgpu.wait_smem_to_gmem(0)

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    # Of a single head a tile is contiguous, and its copy does not stop at the end of a
    # batch entry.
    half_rows = parts * of_value.count * of_value.rows if heads == 1 else keys
    half_shape = batch, max(half_rows, keys), heads, value_dim
    together = parts > 1
    cluster = {"cluster": (parts,), "cluster_names": ("part",)} if together else {}
    told_barrier = plgpu.ClusterBarrier(collective_axes=("part",)) if together else None
    *numbers, _, _, half_value = plgpu.kernel(
        attention_key_numbers,
        out_type=[
            *[f32(batch, heads, head_dim)] * 2,
            *[f32(batch, heads, value_dim)] * 2,
            f32(*found_shape, 3, head_dim) if together else None,
            f32(*found_shape, value_dim) if together else None,
            jax.ShapeDtypeStruct(half_shape, value.dtype) if half else None,
        ],
        scratch_types=[
            (
                plgpu.SMEM((key_stages, of_key.rows, head_dim), key.dtype),
                plgpu.SMEM((stages, of_value.rows, value_dim), value.dtype),
            ),
            (
                plgpu.Barrier(num_barriers=key_stages),
                plgpu.Barrier(num_barriers=stages),
                told_barrier,
                told_barrier,
            ),
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        num_threads=2,
        thread_name="warpgroup",
        **cluster,
        # Where a copy or another CTA follows on reading or writing there is a barrier.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=SCRATCH
        ),
    )(key, value)
    if half_value is not None:
        half_value = lax.bitcast_convert_type(half_value[:, :keys], jnp.float16)
    return KeyNumbers(*numbers), half_value


def _rank(x: jax.Array) -> jax.Array:
    """A 16-bit integer that grows with |x|, and is negative where x is not finite: one
    instruction takes the larger ones of two pairs."""
    bits = lax.bitcast_convert_type(x, jnp.int16)
    return (bits & jnp.int16(0x7FFF)) + jnp.int16(_beyond(x.dtype))


def _of_rank(rank: jax.Array, dtype) -> jax.Array:
    """|x|; 0 where nothing was finite."""
    bits = jnp.maximum(rank - jnp.int16(_beyond(dtype)), jnp.int16(0))
    return widen(lax.bitcast_convert_type(bits, dtype))


def _beyond(dtype) -> int:
    """What takes the bits of infinity to 2^15, which is negative."""
    return 0x8000 - int(np.array(np.inf, dtype).view(np.uint16))


def _into_range(
    bound: jax.Array, doublings: int = 0, most: int = MOST_HEAD_EXPONENT
) -> jax.Array:
    """The exponent of the power of two that brings bound * 2^doublings below 2^15, by
    its bits. What is subnormal ends at `most` either way."""
    bits = lax.bitcast_convert_type(bound, jnp.int32)
    exponent = FP16.max_exponent - ((bits >> 23) - 126 + doublings)
    exponent = jnp.minimum(jnp.maximum(exponent, -most), most)
    return jnp.where(bound > 0.0, exponent, 0)


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent, a normal number."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
