"""Numbers of K and V that scale Ampere's one-pass backward kernel (sm_80), of BF16.

As `hopper_key_numbers` defines them, V left as it is: c, one centre for all keys of a
head, w = 2^k, that K' is scaled by, and v, the norm of the largest |V| of each column.
Here w is NaN where a key of the head is infinite or NaN, and v infinite or NaN where V
is: integers, which dQ is a sum of, would not show it.

Two launches. In `attention_key_parts` a CTA has a chunk of keys of one head, reads its
K and V once, straight to registers, and writes, by columns,

    sum K        sum K * K        max |K|        max |V|

In `attention_key_numbers` a CTA has a head and adds up its chunks.

Where it rounds: all is FP32, u = 2^-24, added in an order that shapes fix (no atomics):
two runs give the same bits.
  sums of K and of K * K: K * K is exact, short of underflow. A thread adds every
    `Lanes.strip`-th key of a chunk (every 4th for head dim 128, every 8th for 64) from
    first to last, then lanes add in pairs, then warps; chunks likewise, every 4th or
    8th of them. No term is in more than `additions`, so a sum is off by at most so many
    u times the sum of the absolute values, to first order; a mean by 4 u of itself more
    (two units in the last place: PTX ISA, div.full);
  maxima, powers of two: exact;
  v: squares, of columns scaled into range by a power of two, and their sum, of so many
    additions as a head has columns at most; then a root, off by up to 2^-23.
"""

import functools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.centre import centre_from
from attn_jax.formats import BF16
from attn_jax.kernels import ampere_tiles as tiles
from attn_jax.kernels.hopper_key_numbers import KeyNumbers
from attn_jax.kernels.hopper_key_numbers_work import into_range, power
from attn_jax.kernels.lanes import LANES, Lanes, read
from attn_jax.kernels.tiles import widen, write_tile

# Values of K in a chunk, and as many of V: 128 of each are a thread's, in 64 loads, of
# which ptxas has some twenty under way before it waits for the first.
ELEMENTS = 16384
# Columns of a thread: as many FP32 numbers Mosaic GPU can add across warps at once.
VECTOR = 4
# Of chunks that a warpgroup reads at a time, at most, all four numbers of them.
STRIPS = 8
INFINITY = 0x7F800000  # its bits


def key_numbers(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K H"]
) -> KeyNumbers:
    """As the module says; H is 64 or 128. `unscale` is 1."""
    batch, count, heads, head_dim = key.shape
    chunks = pl.cdiv(count, rows_of(head_dim))
    numbers = _of_head(_parts(key, value), chunks, count)
    ones = jnp.ones((batch, heads, head_dim), jnp.float32)
    return KeyNumbers(*numbers, unscale=ones)


def rows_of(head_dim: int) -> int:
    """Keys of a chunk."""
    return ELEMENTS // head_dim


def additions(count: int, head_dim: int) -> int:
    """How many additions a key takes part in, at most: with those of its thread, of
    other lanes and of other warps, in its chunk and then among chunks."""
    strip = _lanes(head_dim).strip
    chunks = pl.cdiv(count, rows_of(head_dim))
    of_threads = (rows_of(head_dim) // strip - 1) + (pl.cdiv(chunks, strip) - 1)
    return of_threads + 2 * (strip.bit_length() - 1)


def _lanes(head_dim: int) -> Lanes:
    return Lanes(math.gcd(head_dim // VECTOR, LANES), VECTOR)


def _parts(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K H"]
) -> Float32[Array, "B K 4 P H"]:
    """Of each chunk of a head what the module says. P is as many as `_of_head` reads;
    those past the last chunk are whatever memory holds."""
    batch, count, heads, head_dim = key.shape
    lanes, rows = _lanes(head_dim), rows_of(head_dim)
    strip, layout = lanes.strip, lanes.layout()
    shape = strip, head_dim
    chunks = pl.cdiv(count, rows)

    def attention_key_parts(key_gmem, value_gmem, parts_gmem):
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        chunk = lax.axis_index("chunk")
        start = chunk * rows
        # The last chunk is the last rows there are, of which the first are another
        # one's.
        first = jnp.minimum(start, key_gmem.shape[1] - rows)

        def strips(gmem):
            own = tiles.head_rows(gmem, b, first, rows, n, head_dim)
            x = read(own, layout=layout)
            return [
                lax.slice(x, (at, 0), (at + strip, head_dim))
                for at in range(0, rows, strip)
            ]

        # Before all else: as many are under way as registers hold.
        keys, values = strips(key_gmem), strips(value_gmem)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)

        def own_keys(at, x):
            x = widen(x)
            if count > rows and count % rows:
                x = jnp.where(row >= start - first - at, x, 0.0)
            return x

        wide = [own_keys(i * strip, x) for i, x in enumerate(keys)]
        sums = functools.reduce(jnp.add, wide)
        squares = functools.reduce(jnp.add, (x * x for x in wide))
        top, top_value = (_largest(x) for x in (keys, values))
        found = [sums.sum(axis=0), squares.sum(axis=0)]
        found += [_number(x.max(axis=0)) for x in (top, top_value)]
        for i, x in enumerate(found):
            write_tile(parts_gmem.at[b, n, i, chunk], x)

    def flat(x):
        x = jnp.pad(x, ((0, 0), (0, max(rows - count, 0)), (0, 0), (0, 0)))
        return x.reshape(*x.shape[:2], -1)

    at_once = strip * _strips_at_once(chunks, strip)
    held = pl.cdiv(chunks, at_once) * at_once
    return plgpu.kernel(
        attention_key_parts,
        out_type=jax.ShapeDtypeStruct((batch, heads, 4, held, head_dim), jnp.float32),
        grid=(batch, chunks, heads),
        grid_names=("batch", "chunk", "head"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(flat(key), flat(value))


def _of_head(
    parts: Float32[Array, "B K 4 P H"], chunks: int, count: int
) -> list[Float32[Array, "B K H"]]:
    """[c, w, v] from what each of `chunks` of `count` keys has."""
    batch, heads, _, held, head_dim = parts.shape
    lanes = _lanes(head_dim)
    strip, layout = lanes.strip, lanes.layout()
    shape = strip, head_dim
    at_once = _strips_at_once(chunks, strip)

    def attention_key_numbers(parts_gmem, centre_gmem, factor_gmem, norm_gmem):
        b, n = lax.axis_index("batch"), lax.axis_index("head")
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)

        def take(turn, found):
            starts = [(turn * at_once + i) * strip for i in range(at_once)]
            some = [
                [
                    read(parts_gmem.at[b, n, i, pl.ds(start, strip)], layout=layout)
                    for i in range(4)
                ]
                for start in starts
            ]
            for start, (total, square, *tops) in zip(starts, some, strict=True):
                news = [total, square, *map(_bits, tops)]
                if chunks < held:
                    there = row < chunks - start
                    news = [jnp.where(there, x, jnp.zeros_like(x)) for x in news]
                combine = jnp.add, jnp.add, jnp.maximum, jnp.maximum
                found = tuple(f(*x) for f, *x in zip(combine, found, news, strict=True))
            return found

        def zero(dtype):
            return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)

        def over_columns(x, reduce):
            """One number of all columns, there once for each."""
            x = plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), layout)
            x = lax.broadcast_in_dim(reduce(x, axis=1), shape, [0])
            return plgpu.layout_cast(x, layout).max(axis=0)

        kinds = jnp.float32, jnp.float32, jnp.int32, jnp.int32
        found = lax.fori_loop(
            jnp.int32(0),
            jnp.int32(held // (strip * at_once)),
            take,
            tuple(map(zero, kinds)),
        )
        sums, squares, top, top_value = found
        sums, squares = sums.sum(axis=0), squares.sum(axis=0)
        top, top_value = top.max(axis=0), top_value.max(axis=0)
        mean, square = sums / count, squares / count
        write_tile(centre_gmem.at[b, n], centre_from(mean, square, _number(top), BF16))
        most = over_columns(top, jnp.max)
        # |K - c| is at most twice the largest key, which might overflow.
        factor = power(into_range(_number(most), doublings=1))
        write_tile(factor_gmem.at[b, n], jnp.where(most < INFINITY, factor, jnp.nan))
        # Squares of the scaled ones stay in range.
        exponent = into_range(_number(over_columns(top_value, jnp.max)))
        scaled = _number(top_value) * power(exponent)
        norm = jnp.sqrt(over_columns(scaled * scaled, jnp.sum))
        write_tile(norm_gmem.at[b, n], norm * power(-exponent))

    of_columns = jax.ShapeDtypeStruct((batch, heads, head_dim), jnp.float32)
    return plgpu.kernel(
        attention_key_numbers,
        out_type=[of_columns] * 3,
        grid=(heads, batch),
        grid_names=("head", "batch"),
        compiler_params=tiles.COMPILER_PARAMS,
    )(parts)


def _strips_at_once(chunks: int, strip: int) -> int:
    return min(pl.cdiv(chunks, strip), STRIPS)


def _largest(strips: list[jax.Array]) -> jax.Array:
    """Bits, as of FP32, of the largest |x| of each place of strips: integers that grow
    with it, infinity and NaN the largest. Maxima of numbers may pass over NaN."""
    sizes = (
        lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.int16) & jnp.int16(0x7FFF), x.dtype
        )
        for x in strips
    )
    return _bits(widen(functools.reduce(jnp.maximum, sizes)))


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
