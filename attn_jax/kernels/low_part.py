"""What rounding drops from out, in one byte an element, for the backward pass.

`recipe_schema` has its definition ('o_hi_lo8'). With FP32's bits taken for integers,

    q = floor((bits(O) - bits(out)) / u + 1/2), at least -128 and at most 127
    bits(O') = bits(out) + q u

where u is a 256th of what an integer is from one number of out's format to the next:
2^8 for BF16, 2^5 for FP16. (Signs are alike, and cancel.)

Where it rounds: O to q alone. O' is NaN where out is not finite.

How bytes leave: a thread of an accumulator has two columns of every eight. The four
threads that share a row hand theirs round until each has 16 neighbours of every 64
(8 of 32 where fewer are left), which it stores at once, past shared memory.
"""

from typing import NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Float32, Int8, Int32

from attn_jax.kernels.tiles import Fragments, widen

DTYPE = jnp.dtype(jnp.int8)
# Of u, by out's format.
_PLACES = {jnp.dtype(jnp.bfloat16): 8, jnp.dtype(jnp.float16): 5}


def dropped(
    exact: Float32[Array, "*shape"], out: Float[Array, "*shape"]
) -> Int32[Array, "*shape"]:
    """Integers whose second lowest byte is q; `out` is `exact` rounded."""
    places = _PLACES[out.dtype]
    near = _bits(exact) - _bits(widen(out)) + (1 << places - 1)
    near = jnp.minimum(near, (128 << places) - 1)
    if out.dtype == jnp.bfloat16:  # of which no number is further below
        return near
    # FP16's subnormals have less bits than FP32's numbers next to them.
    return jnp.maximum(near, -128 << places) << 8 - places


def byte_of(integers: Int32[Array, "*shape"]) -> Int8[Array, "*shape"]:
    """q of `dropped`."""
    return (integers >> 8).astype(jnp.int8)


def completed(
    out: Float[Array, "*shape"], low: Int8[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """O'. Rounds nothing; NaN where out is not finite."""
    wide = widen(out)
    bits = _bits(wide) + (low.astype(jnp.int32) << _PLACES[out.dtype])
    # Next to infinity are finite numbers: infinity times 0 is NaN.
    return wide * 0.0 + lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)


def store(
    gmem, exact: jax.Array, out: jax.Array, rows: jax.Array, fragments: Fragments
) -> None:
    """What `out`, `exact` rounded, lacks: to int8 [rows, D] in global memory; both are
    accumulators. Of `rows` rows, the others are left as they are."""
    if out.dtype == jnp.bfloat16:
        kept, code = (exact, out), store_dropped
    else:
        kept, code = (dropped(exact, out),), store_bytes
    types = plgpu.RefType(), *len(kept) * [fragments.tile], plgpu.Layout.WG_SPLAT
    plgpu.inline_mgpu(arg_types=types)(code)(gmem, *kept, rows)


def store_dropped(
    context,
    gmem: ir.Value,
    exact: mgpu.FragmentedArray,
    out: mgpu.FragmentedArray,
    rows: mgpu.FragmentedArray,
) -> None:
    """The code behind `store`, for BF16: `dropped` in three instructions an element.
    The interpreter knows it by this function."""
    del context
    i32 = ir.IntegerType.get_signless(32)
    # 0x10000 less than there, which the second lowest byte does not feel.
    more, most = (utils.c(n, i32) for n in (0xFF80, 0x7FFF - 0x10000))

    def steps(pair: ir.Value, rounded: ir.Value) -> list[ir.Value]:
        words = utils.bitcast(pair, ir.VectorType.get((2,), i32))
        rounded = utils.bitcast(rounded, i32)
        return [
            arith.minsi(
                arith.subi(_element(words, i), _permuted(rounded, more, order)), most
            )
            for i, order in enumerate((0x1054, 0x3254))
        ]

    pairs = zip(exact.registers.flat, out.registers.flat, strict=True)
    _store(gmem, [steps(*pair) for pair in pairs], exact.shape, rows)


def store_bytes(
    context, gmem: ir.Value, steps: mgpu.FragmentedArray, rows: mgpu.FragmentedArray
) -> None:
    """The code behind `store`, of what `dropped` returns; the interpreter knows it by
    this function."""
    del context
    pairs = [[_element(pair, i) for i in range(2)] for pair in steps.registers.flat]
    _store(gmem, pairs, steps.shape, rows)


def _store(
    gmem: ir.Value,
    pairs: list[list[ir.Value]],
    shape: tuple[int, ...],
    rows: mgpu.FragmentedArray,
) -> None:
    """Second lowest bytes of an accumulator's registers."""
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    (pitch, _), _ = ir.MemRefType(gmem.type).get_strides_and_offset()

    def number(n: int) -> ir.Value:
        return utils.c(n, i32)

    # Not known to be the same each time: what is made of it would else stay in
    # registers through the loop over keys.
    thread = utils.inline_ptx(
        "mov.b32 $0, $1;", utils.thread_idx(), result_types=i32, has_side_effects=True
    )
    thread = arith.remui(thread, number(128))
    in_quad = arith.andi(thread, number(3))
    first = arith.addi(  # 16 rows a warp
        arith.muli(arith.shrui(thread, number(5)), number(16)),
        arith.andi(arith.shrui(thread, number(2)), number(7)),
    )
    quad = _Quad.of(in_quad)
    height, width = shape
    base = arith.addi(
        llvm.ptrtoint(i64, utils.memref_ptr(gmem)),
        arith.extui(i64, arith.muli(first, number(pitch))),
    )
    (count,) = rows.registers.flat
    left = arith.subi(count, first)
    across = width // 8
    for i in range(height // 32):  # Eight rows of each warp.
        below = 64 * (i // 2) + 8 * (i % 2)
        exists = arith.cmpi(arith.CmpIPredicate.sgt, left, number(below))
        # By 64 rows, groups of columns, halves of a warp's rows.
        start = (i // 2) * 2 * across + i % 2
        groups = pairs[start : start + 2 * across : 2]
        for column, size in _runs(width):
            words = quad.transposed(groups[column // 8 : (column + size) // 8])
            own = arith.muli(in_quad, number(size // 4))
            address = arith.addi(base, arith.extui(i64, own))
            _store_words(address, below * pitch + column, words, exists)


def _runs(width: int) -> list[tuple[int, int]]:
    """(first column, columns) of what four threads store at once: 64, or 32."""
    runs = [(column, 64) for column in range(0, width - 63, 64)]
    return runs + ([(width - 32, 32)] if width % 64 else [])


def _store_words(
    address: ir.Value, offset: int, words: list[ir.Value], predicate: ir.Value
) -> None:
    names = ", ".join(f"${1 + i}" for i in range(len(words)))
    utils.inline_ptx(
        f"st.global.v{len(words)}.b32 [$0 + {offset}], {{{names}}};",
        *(address, *words),
        predicate=predicate,
        has_side_effects=True,
    )


class _Quad(NamedTuple):
    """Four threads, that share a row, seen by one.

    Attributes:
      upper: whether it is one of the last two.
      order: bytes of two words, of its own and the neighbour's: those that it keeps.
    """

    upper: ir.Value
    order: ir.Value

    @classmethod
    def of(cls, index: ir.Value) -> "_Quad":
        i32 = ir.IntegerType.get_signless(32)
        zero, one, two = (utils.c(n, i32) for n in range(3))
        odd, upper = (
            arith.cmpi(arith.CmpIPredicate.ne, arith.andi(index, bit), zero)
            for bit in (one, two)
        )
        # The lower half of both words, or the upper one, the even thread's first.
        orders = utils.c(0x3276, i32), utils.c(0x5410, i32)
        return cls(upper, arith.select(odd, *orders))

    def transposed(self, groups: list[list[ir.Value]]) -> list[ir.Value]:
        """The second lowest bytes of neighbours, as words: of 4 n groups of 8 columns,
        of which a thread has two each, it gets n."""
        count = len(groups) // 4
        words = []
        for i in range(count):
            # Thread 2 a + b is to have group (2 a + b) count + i.
            low, high = (
                self._of_pair(groups[a * count + i], groups[(a + 1) * count + i])
                for a in (0, 2)
            )
            received = utils.shfl_bfly(arith.select(self.upper, low, high), 2)
            words += [
                arith.select(self.upper, received, low),
                arith.select(self.upper, high, received),
            ]
        return words

    def _of_pair(self, one: list[ir.Value], other: list[ir.Value]) -> ir.Value:
        """Half of a group, of `one` in even threads and of the other in odd ones."""
        lower, upper = (_permuted(pair[0], pair[1], 0x5151) for pair in (one, other))
        own = _permuted(lower, upper, 0x5410)
        return _permuted(own, utils.shfl_bfly(own, 1), self.order)


def _element(pair: ir.Value, i: int) -> ir.Value:
    return vector.extract(pair, dynamic_position=[], static_position=[i])


def _permuted(low: ir.Value, high: ir.Value, order: ir.Value | int) -> ir.Value:
    """Bytes of two words, numbered from the lowest on, in the order of `order`'s
    hexadecimal digits from the last on."""
    i32 = ir.IntegerType.get_signless(32)
    if isinstance(order, int):
        order = utils.c(order, i32)
    return utils.inline_ptx(
        "prmt.b32 $0, $1, $2, $3;", low, high, order, result_types=i32
    )
