"""The end of dQ after Hopper's one-pass backward kernel: FP32 sums become 16 bits.

They are multiplied by powers of two and scale, at the speed of memory.

The backward kernel goes over (batch, key head) pairs from the first to the last. What
it wrote last may still be in the L2 cache (50 MB), so this one begins at the end. Tiles
are read by TMA, some ahead, by a grid whose CTAs stay.

Where it rounds: the factors that undo `hopper_range` are powers of two, and exact short
of FP32's range; scale times that rounds to FP32, and the result to its format. Sums of
long and of short tiles (`ring_order.Ring.apart`) are added before, which rounds, too.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.integers import rem
from attn_jax.kernels.lanes import LANES, Lanes, read
from attn_jax.kernels.tiles import pad_rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel goes about it.

    Attributes:
      elements: of a tile.
      stages: tiles in shared memory.
      ctas: of the grid; twice the multiprocessors: two on each.
    """

    elements: int = 4096
    stages: int = 4
    ctas: int = 2 * H100_MULTIPROCESSORS


def query_gradient(
    sums: Sequence[Float32[Array, "B _ N H"]],
    numbers: Range,
    row_sum: Float32[Array, "B N T"] | None,
    scale: float,
    dtype,
    *,
    wide: bool = False,
    plan: Plan = Plan(),
) -> Float[Array, "B _ N H"]:
    """dQ of `sums` over keys of dS K', in `dtype`, or FP32 if `wide`.

    A second array of sums is added to the last rows. `row_sum` is what rows of dS sum
    to (None: 0), which meets the centre that came off the keys. That, FP32 and a single
    query head are left to XLA.
    """
    total, *apart = sums
    if row_sum is not None or wide or total.shape[2] == 1:
        return by_xla(sums, numbers, row_sum, scale, jnp.float32 if wide else dtype)
    part = apart[0] if apart else None
    return _in_one_pass(total, part, numbers.undone(), scale, dtype, plan)


def by_xla(
    sums: Sequence[Float32[Array, "B _ N H"]],
    numbers: Range,
    row_sum: Float32[Array, "B N T"] | None,
    scale: float,
    dtype,
) -> Float[Array, "B _ N H"]:
    """The same, to the bit, in any case."""
    total, *apart = sums
    for part in apart:
        first = total.shape[1] - part.shape[1]
        total += jnp.pad(part, ((0, 0), (first, 0), (0, 0), (0, 0)))
    group = total.shape[2] // numbers.centre.shape[1]
    for power in numbers.undone():
        total = total * jnp.repeat(power, group, axis=1)[:, None, :, None]
    if row_sum is not None:
        shift = pad_rows(row_sum, total.shape[1]).swapaxes(1, 2)[..., None]
        total += shift * jnp.repeat(numbers.centre, group, axis=1)[:, None]
    return (scale * total).astype(dtype)


def _in_one_pass(
    sums: Float32[Array, "B T N H"],
    apart: Float32[Array, "B T' N H"] | None,
    factors: tuple[Float32[Array, "B K"], Float32[Array, "B K"]],
    scale: float,
    dtype,
    plan: Plan,
) -> Float[Array, "B T N H"]:
    """(sums + apart) times the factors, in their order, times scale, as `dtype`.

    `apart` is added to the last T' rows, which begin at a multiple of a tile's. Of one
    head a tile is contiguous, and its copy would not stop at the end of a batch entry.
    """
    batch, count, heads, head_dim = sums.shape
    assert heads > 1
    group = heads // factors[0].shape[1]
    rows = plan.elements // head_dim
    blocks = pl.cdiv(count, rows)
    items = batch * heads * blocks
    ctas, stages = min(plan.ctas, items), plan.stages
    lanes = Lanes(min(head_dim // 4, LANES // 2), 4)
    layout, strip = lanes.layout(), lanes.strip
    first = count if apart is None else count - apart.shape[1]
    assert rows % strip == 0 and (apart is None or first % rows == 0)

    def attention_query_gradient(
        sums_gmem, apart_gmem, small_gmem, large_gmem, out_gmem, smem, barriers
    ):
        tiles_smem, apart_smem, out_smem = smem
        ready, apart_ready = barriers
        cta = lax.axis_index("cta")
        steps = lax.div(items - cta + (ctas - 1), jnp.int32(ctas))

        def slot(step):
            return rem(step, stages)

        def item(step):
            """(batch entry, head, first row)"""
            number = items - 1 - (cta + step * ctas)
            pair, block = lax.div(number, jnp.int32(blocks)), lax.rem(number, blocks)
            b, n = lax.div(pair, jnp.int32(heads)), lax.rem(pair, jnp.int32(heads))
            return b, n, block * rows

        def place(step, first_row=0):
            b, n, row = item(step)
            return b, pl.ds(row - first_row, rows), pl.ds(n * head_dim, head_dim)

        def load(step):
            @pl.when(step < steps)
            def _():
                now = slot(step)
                plgpu.copy_gmem_to_smem(
                    sums_gmem.at[place(step)], tiles_smem.at[now], ready.at[now]
                )
                if apart_gmem is None:
                    return

                @pl.when(item(step)[2] >= first)
                def _():
                    plgpu.copy_gmem_to_smem(
                        apart_gmem.at[place(step, first)],
                        apart_smem.at[now],
                        apart_ready.at[now],
                    )

        for step in range(stages):
            load(jnp.int32(step))

        @pl.loop(0, steps)
        def _(step):
            now, buffer = slot(step), rem(step, 2)
            b, n, row = item(step)
            kv_head = lax.div(n, jnp.int32(group))
            small, large = small_gmem[b, kv_head], large_gmem[b, kv_head]
            plgpu.barrier_wait(ready.at[now])
            # What this buffer held has left; the other one's store may be under way.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            def end(added):
                for at in range(0, rows, strip):
                    part = pl.ds(at, strip)
                    x = read(tiles_smem.at[now, part], layout=layout)
                    if added:
                        x = x + read(apart_smem.at[now, part], layout=layout)
                    x = x * small * large * scale
                    out_smem[buffer, part] = x.astype(dtype)

            if apart_gmem is None:
                end(added=False)
            else:
                pl.when(row < first)(lambda: end(added=False))

                @pl.when(row >= first)
                def _():
                    plgpu.barrier_wait(apart_ready.at[now])
                    end(added=True)

            # All have read and written.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[buffer], out_gmem.at[place(step)])
            load(step + stages)

        plgpu.wait_smem_to_gmem(0)

    def tiles(number, dtype):
        return plgpu.SMEM((number, rows, head_dim), dtype)

    barrier = plgpu.Barrier(num_barriers=stages)
    extra = apart is not None
    kernel = plgpu.kernel(
        attention_query_gradient,
        out_type=jax.ShapeDtypeStruct((batch, count, heads * head_dim), dtype),
        scratch_types=[
            (
                tiles(stages, jnp.float32),
                tiles(stages, jnp.float32) if extra else None,
                tiles(2, dtype),
            ),
            (barrier, barrier if extra else None),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        # Where a copy follows on reading or writing there is a barrier.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    flat = (None if x is None else x.reshape(*x.shape[:2], -1) for x in (sums, apart))
    return kernel(*flat, *factors).reshape(sums.shape)
