"""The gradient of `layers.rms_norm` as one kernel (Pallas, Mosaic GPU).

XLA takes two passes: sums over the columns of a head, then the gradients. Here a
warpgroup has some rows, each of one head, in registers, and reads and writes each
number once.

Where it rounds: all is FP32. A row's sums are added in each thread, then over the
threads of a row by halves; sums over rows, for the scale, in each thread row by row,
then over a warpgroup's threads, then of cells of the grid in pairs, which have as many
rows whatever the card, then over devices. The gradient of x is rounded once, to its
format.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from attn_jax.kernels.lanes import LANES, Lanes, read
from attn_jax.pairwise import pairwise_sum
from train import layers
from train.sharding import AXES, BATCH

# Numbers of each array in a warpgroup's registers, and of a grid cell.
_STEP, _CELL = 2048, 32768
# Numbers that a thread loads together.
_VECTOR = 4


@dataclasses.dataclass(frozen=True)
class KernelHeadNorm:
    """`layers.rms_norm` on a mesh of GPUs, each of which has its own examples, tokens
    and heads. Rows whose number no step divides are left to `layers`."""

    mesh: Mesh

    def __call__(
        self, x: Float[Array, "B L N H"], scale: Float[Array, " H"], dtype: DTypeLike
    ) -> Float[Array, "B L N H"]:
        rows = _Rows(x.size // x.shape[-1] // self.mesh.size, x.shape[-1])
        if rows.width % _VECTOR or rows.count % rows.together:
            return layers.rms_norm(x, scale, dtype)
        return _head_norm(x, scale, jnp.dtype(dtype), self.mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _head_norm(x, scale, dtype, mesh):
    return layers.rms_norm(x, scale, dtype)


def _forward(x, scale, dtype, mesh):
    return layers.rms_norm(x, scale, dtype), (x, scale)


def _backward(dtype, mesh, kept, gradient):
    x, scale = kept
    heads = P(*BATCH, "seq" if mesh.shape["seq"] > 1 else None, "tensor")
    kernel = jax.shard_map(
        _backward_kernel,
        mesh=mesh,
        in_specs=(heads, heads, P()),
        out_specs=(heads, P(AXES)),
        check_vma=False,
    )
    dx, sums = kernel(x, gradient, scale.astype(jnp.float32))
    return dx, sums.sum(0).astype(scale.dtype)


_head_norm.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How the kernel goes over `count` rows of `width` numbers."""

    count: int
    width: int

    @property
    def lanes(self) -> Lanes:
        return Lanes(math.gcd(self.width // _VECTOR, LANES), _VECTOR)

    @property
    def together(self) -> int:
        """Rows of a step."""
        strip = self.lanes.strip
        return max(_STEP // self.width // strip, 1) * strip

    @property
    def cell(self) -> int:
        """Rows of a grid cell."""
        return max(_CELL // self.width // self.together, 1) * self.together


# What is jitted is traced and lowered once for all layers.
@jax.jit
def _backward_kernel(x, gradient, scale):
    """(the gradient of x; that of the scale, [1, H])"""
    rows = _Rows(math.prod(x.shape[:-1]), x.shape[-1])
    cells, tile = pl.cdiv(rows.count, rows.cell), (rows.together, rows.width)
    layout = rows.lanes.layout()

    def head_norm_backward(x_gmem, gradient_gmem, scale_gmem, dx_gmem, sums_gmem):
        cell = lax.axis_index("cell")
        first = cell * rows.cell
        count = jnp.minimum(rows.cell, rows.count - first)
        scale = read(scale_gmem, layout=layout)

        def mean(x):
            return x.sum(axis=1) * (1.0 / rows.width)

        def along(x):
            return lax.broadcast_in_dim(x, tile, (0,))

        def step(i, total):
            span = pl.ds(first + i * rows.together, rows.together)
            x, g = (
                read(ref.at[span], layout=layout).astype(jnp.float32)
                for ref in (x_gmem, gradient_gmem)
            )
            inner = g * scale
            square, product = mean(x * x), mean(inner * x)
            root = lax.rsqrt(square + layers.EPS)
            normal = x * along(root)
            dx = along(root) * (inner - normal * along(root * product))
            dx_gmem[span] = dx.astype(dx_gmem.dtype)
            return total + g * normal

        zero = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), layout)
        steps = lax.div(count, jnp.int32(rows.together))
        sums_gmem[cell] = lax.fori_loop(0, steps, step, zero).sum(axis=0)

    flat = rows.count, rows.width
    dx, sums = plgpu.kernel(
        head_norm_backward,
        out_type=(
            jax.ShapeDtypeStruct(flat, x.dtype),
            jax.ShapeDtypeStruct((cells, rows.width), jnp.float32),
        ),
        grid=(cells,),
        grid_names=("cell",),
    )(x.reshape(flat), gradient.reshape(flat), jnp.broadcast_to(scale, tile))
    return dx.reshape(x.shape), pairwise_sum(sums, 0, keepdims=True)
