"""`layers.gated_norm` as one kernel forward and one backward (Pallas, Mosaic GPU).

XLA makes two passes over the residual stream of it forward and up to five backward:
sums over tokens, which scale, shift and gate get, are no part of the fusions that make
the gradients of tokens. Here a warpgroup has a few tokens at a time in registers, reads
and writes each of their arrays once, and carries its part of those sums from token to
token. A grid cell is `_CHUNK` tokens of an example, whatever the card, so two runs on
any two cards add up in the same order.

Where it rounds: all is FP32. A row's sums are added in each thread (every 128th number,
or pair or four of them), then over a warpgroup's threads by halves; sums over tokens
one token after the other, then of chunks in pairs. The norm and the gradient of the
update are rounded once, to their format. The bits are not those of `layers`: as far
from exact, other orders.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from attn_jax.pairwise import pairwise_sum
from train import layers
from train.layers import Stream
from train.sharding import BATCH

_THREADS = 128
_CHUNK = 32
# The widest streams of which a warpgroup has registers for two tokens, so that it waits
# for the memory of both together, and for one.
_WIDTH_OF_TWO, _WIDTH_OF_ONE = 2048, 3072


@dataclasses.dataclass(frozen=True)
class KernelNorm:
    """`layers.gated_norm` on a mesh of GPUs, each of which has its own examples: a
    kernel is opaque to XLA's partitioner. A stream that is no FP32, or whose width is
    no multiple of 128 or above 3072, is left to `layers`."""

    mesh: Mesh

    def __call__(
        self,
        stream: Stream,
        scale: Float[Array, "B 1 d"],
        shift: Float[Array, "B 1 d"],
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "B L d"], Float[Array, "B L d"]]:
        kind, width = stream.x.dtype, stream.x.shape[-1]
        if kind != jnp.float32 or width % _THREADS or width > _WIDTH_OF_ONE:
            return layers.gated_norm(stream, scale, shift, dtype)
        return _gated_norm(stream, scale, shift, jnp.dtype(dtype), self.mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gated_norm(stream, scale, shift, dtype, mesh):
    return _forward(stream, scale, shift, dtype, mesh)[0]


def _forward(stream, scale, shift, dtype, mesh):
    x, gate, update = stream
    kernel = functools.partial(_forward_kernel, dtype=dtype)
    summed, out = _on_each(kernel, mesh)((x, update), (gate, scale, shift))
    x = x if summed is None else summed
    return (x, out), (Stream(x, gate, update), scale)


def _backward(dtype, mesh, kept, gradients):
    (x, gate, update), scale = kept
    kernel = _on_each(_backward_kernel, mesh)
    dx, dupdate, sums = kernel((x, update, *gradients), (gate, scale))
    dscale, dshift, *others = jnp.split(sums, sums.shape[1], axis=1)
    dgate = others[0] if others else None
    return Stream(dx, dgate, dupdate), dscale, dshift


_gated_norm.defvjp(_forward, _backward)


def _on_each(kernel, mesh: Mesh):
    """`kernel` of each device's examples. Tokens are spread in attention alone: to
    spread them here, too, means to gather them for the products that follow."""
    return jax.shard_map(
        kernel, mesh=mesh, in_specs=BATCH, out_specs=BATCH, check_vma=False
    )


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How a kernel goes over arrays [B, L, d]."""

    batch: int
    length: int
    width: int

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.length, _CHUNK)

    @property
    def together(self) -> int:
        return math.gcd(self.length, 2 if self.width <= _WIDTH_OF_TWO else 1)

    @property
    def layout(self) -> Any:
        vector = math.gcd(self.width // _THREADS, 4)
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=vector)

    def read(self, ref) -> Float[Array, " d"]:
        row = plgpu.load(ref, layout=self.layout, optimized=False)
        return row.astype(jnp.float32)

    def tokens(self, chunk):
        """(the first token of a chunk, how many times `together` there are)"""
        first = chunk * _CHUNK
        count = jnp.minimum(_CHUNK, self.length - first)
        return first, lax.div(count, jnp.int32(self.together))

    def at(self, first, i):
        """Those that are read together in step `i`."""
        return [first + i * self.together + j for j in range(self.together)]

    def mean(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        return x.sum() * (1.0 / self.width)

    def normal(self, x: Float[Array, " d"]):
        """(x with zero mean and unit variance, 1 / sqrt(variance)); by one pass, as
        `layers` does."""
        mean, square = self.mean(x), self.mean(x * x)
        root = lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + layers.EPS)
        return (x - mean) * root, root

    def kernel(self, body, out_type):
        return plgpu.kernel(
            body,
            out_type=out_type,
            grid=(self.batch, self.chunks),
            grid_names=("example", "chunk"),
        )


# What is jitted is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnames="dtype")
def _forward_kernel(of_tokens, of_example, *, dtype):
    """(x + gate update, or None; its norm)"""
    x, update = of_tokens
    rows = _Rows(*x.shape)

    def gated_norm_forward(tokens_gmem, example_gmem, summed_gmem, out_gmem):
        x_gmem, update_gmem = tokens_gmem
        gate_gmem, scale_gmem, shift_gmem = example_gmem
        b = lax.axis_index("example")
        first, count = rows.tokens(lax.axis_index("chunk"))
        gate = None if update is None else rows.read(gate_gmem.at[b, 0])
        scale, shift = (rows.read(x.at[b, 0]) for x in (scale_gmem, shift_gmem))

        @pl.loop(0, count)
        def _(i):
            tokens = rows.at(first, i)
            streams = [rows.read(x_gmem.at[b, token]) for token in tokens]
            if gate is not None:
                updates = [rows.read(update_gmem.at[b, token]) for token in tokens]
                streams = [x + gate * y for x, y in zip(streams, updates, strict=True)]
                for token, x in zip(tokens, streams, strict=True):
                    summed_gmem[b, token] = x
            normals = [rows.normal(x)[0] for x in streams]
            for token, normal in zip(tokens, normals, strict=True):
                out_gmem[b, token] = (normal * (1.0 + scale) + shift).astype(dtype)

    summed = None if update is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = jax.ShapeDtypeStruct(x.shape, dtype)
    return rows.kernel(gated_norm_forward, (summed, out))(of_tokens, of_example)


@jax.jit
def _backward_kernel(of_tokens, of_example):
    """(the whole gradient of x, of the update or None, and sums over tokens for the
    gradients of scale, shift and gate: [B, 2 or 3, d])

    Given are what was normalised and its gradient by other ways, beside the norm's.
    """
    x, update, *_ = of_tokens
    rows = _Rows(*x.shape)
    number = 2 if update is None else 3

    def gated_norm_backward(
        tokens_gmem, example_gmem, dx_gmem, dupdate_gmem, sums_gmem
    ):
        x_gmem, update_gmem, given_gmem, dout_gmem = tokens_gmem
        gate_gmem, scale_gmem = example_gmem
        b, chunk = lax.axis_index("example"), lax.axis_index("chunk")
        first, count = rows.tokens(chunk)
        gate = None if update is None else rows.read(gate_gmem.at[b, 0])
        factor = 1.0 + rows.read(scale_gmem.at[b, 0])

        def step(i, sums):
            tokens = rows.at(first, i)
            # All that is waited for comes first, so that it is at once.
            streams, given, douts = (
                [rows.read(ref.at[b, token]) for token in tokens]
                for ref in (x_gmem, given_gmem, dout_gmem)
            )
            updates = []
            if update is not None:
                updates = [rows.read(update_gmem.at[b, token]) for token in tokens]
            normals = [rows.normal(x) for x in streams]
            inner = [dout * factor for dout in douts]
            means = [
                (rows.mean(h * normal), rows.mean(h))
                for h, (normal, _) in zip(inner, normals, strict=True)
            ]
            for j, token in enumerate(tokens):
                (normal, root), (along, offset) = normals[j], means[j]
                dx = given[j] + root * (inner[j] - offset - normal * along)
                dx_gmem[b, token] = dx
                more = [douts[j] * normal, douts[j]]
                if gate is not None and update is not None:
                    dupdate_gmem[b, token] = (gate * dx).astype(update.dtype)
                    more.append(dx * updates[j])
                sums = tuple(x + y for x, y in zip(sums, more, strict=True))
            return sums

        zero = plgpu.layout_cast(jnp.zeros((rows.width,), jnp.float32), rows.layout)
        sums = lax.fori_loop(0, count, step, (zero,) * number)
        for k, total in enumerate(sums):
            sums_gmem[b, chunk, k] = total

    dx, sums = (
        jax.ShapeDtypeStruct(shape, x.dtype)
        for shape in (x.shape, (rows.batch, rows.chunks, number, rows.width))
    )
    dupdate = None
    if update is not None:
        dupdate = jax.ShapeDtypeStruct(update.shape, update.dtype)
    kernel = rows.kernel(gated_norm_backward, (dx, dupdate, sums))
    dx, dupdate, sums = kernel(of_tokens, of_example)
    return dx, dupdate, pairwise_sum(sums, 1)
