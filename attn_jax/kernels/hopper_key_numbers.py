"""Kernel that finds centre and scales of K and V and makes V FP16, on Hopper (sm_90a).

In one launch, before either pass starts, and at the speed of memory.

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
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16, Float32

from attn_jax.formats import NumberFormat
from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.hopper_key_numbers_work import Cta, Keys, Tiles, Values

# Bytes in which a warpgroup's warps add up what each of them has.
SCRATCH = 2048
# Rows behind the last key of `Prepared`: TMA reads 16-bit tiles in groups of 8 rows.
BESIDE = 8


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
    ctas: int = 2 * H100_MULTIPROCESSORS
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
    key_stages=3, value_stages=6, most_parts=1, ctas=3 * H100_MULTIPROCESSORS, stay=True
)
MANY = Plan(
    key_stages=6, value_stages=18, most_parts=2, ctas=H100_MULTIPROCESSORS, stay=True
)


def plan_for(heads: int, keys: int, value_dim: int) -> Plan:
    """What was fastest on an H200 (`prototypes/measure_rows.py`). Clusters of four or
    more that stay are slower than such as end: it seems that they do not all find room
    at once."""
    tiles = Tiles.of(keys, value_dim, SHORT.rows).count
    if tiles <= SHORT.value_stages and heads >= 2 * H100_MULTIPROCESSORS:
        return SHORT
    nearly_all = 0.9 * H100_MULTIPROCESSORS
    return MANY if MANY.most_parts * heads >= nearly_all else Plan()


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
    numbers, half_value, _ = _made(
        key, value, key_count, inputs, half=half, planes=False, plan=plan
    )
    return numbers, half_value


class Prepared(NamedTuple):
    """Keys as they are and values as FP16 numbers, in one array, to be sent.

    Attributes:
      planes: of K's format, with `BESIDE` rows behind the keys: K, the bits of V 2^e.
        What lies in the second behind the last key is 2^-e of the head in each column,
        and then anything.
    """

    planes: Float[Array, "2 B rows K H"]

    @property
    def count(self) -> int:
        """Of keys."""
        return self.planes.shape[2] - BESIDE

    def some(self, first: int, count: int) -> tuple[Array, Array]:
        """So many keys, and values as FP16 numbers."""
        keys = slice(first, first + count)
        return self.planes[0, :, keys], self.value_planes[1, :, keys]

    @property
    def value_planes(self) -> Float16[Array, "2 B rows K H"]:
        """The same bits, of which the second plane is V 2^e."""
        return lax.bitcast_convert_type(self.planes, jnp.float16)

    @property
    def unscale(self) -> Float32[Array, "B K H"]:
        """2^-e."""
        return self.planes[1, :, self.count].astype(jnp.float32)


def prepared(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K H"], inputs: NumberFormat
) -> Prepared | None:
    """K and V of format `inputs` prepared, or None where tiles do not divide them."""
    batch, keys, heads, head_dim = key.shape
    plan = plan_for(batch * heads, keys, head_dim)
    of_value = Tiles.of(keys, head_dim, plan.rows)
    parts = plan.parts(batch * heads, of_value.count)
    shared = of_value.shared(parts)
    # What is stored past the last key would meet what lies there.
    if key.shape != value.shape or parts * shared.count * shared.rows != keys:
        return None
    _, _, planes = _made(key, value, keys, inputs, half=True, planes=True, plan=plan)
    assert planes is not None
    return Prepared(planes)


def _made(
    key: Float[Array, "B Spad K H"],
    value: Float[Array, "B Spad K D"],
    key_count: int,
    inputs: NumberFormat,
    *,
    half: bool,
    planes: bool,
    plan: Plan | None,
) -> tuple[
    KeyNumbers,
    Float16[Array, "B Spad K D"] | None,
    Float[Array, "2 B Spad+8 K H"] | None,
]:
    """Both, the latter if `planes` are asked for."""
    batch, keys, heads, head_dim = key.shape
    value_dim = value.shape[3]
    items = batch * heads
    plan = plan or plan_for(items, keys, value_dim)
    of_key, of_value = (Tiles.of(keys, x, plan.rows) for x in (head_dim, value_dim))
    parts = plan.parts(items, of_value.count)
    of_key, of_value = of_key.shared(parts), of_value.shared(parts)
    most = pl.cdiv(items, max(plan.ctas // parts, 1)) if plan.stay else 1
    clusters = pl.cdiv(items, most)
    key_stages = min(plan.key_stages, most * of_key.count)
    stages = min(plan.value_stages, of_value.count)
    # What CTAs tell each other: of V the largest, of K sums, squares and the largest.
    found_shape = (batch, heads, parts)

    def attention_key_numbers(
        key_gmem, value_gmem, centre_gmem, key_factor_gmem, norm_gmem, unscale_gmem,
        found_key_gmem, found_value_gmem, half_gmem, planes_gmem, smem, barriers,
    ):  # fmt: skip
        key_smem, value_smem = smem
        copy_gmem = beside_gmem = None
        if planes:
            copy_gmem, half_gmem = planes_gmem.at[0], planes_gmem.at[1]
            beside_gmem = half_gmem.at[:, keys]
        key_ready, value_ready, keys_told, values_told = barriers
        cluster = lax.axis_index("cluster")
        of_keys = lax.axis_index("warpgroup") == 0
        cta = Cta(
            parts=parts,
            part=lax.axis_index("part") if parts > 1 else jnp.int32(0),
            cluster=cluster,
            clusters=clusters,
            heads=heads,
            mine=lax.div(items - cluster + (clusters - 1), jnp.int32(clusters)),
        )
        on_keys = Keys(
            *(cta, of_key, key_stages, key_count, inputs),
            *(key_gmem, key_smem, key_ready, found_key_gmem, keys_told),
            *(centre_gmem, key_factor_gmem, copy_gmem),
        )
        on_values = Values(
            *(cta, of_value, stages, value_gmem, value_smem, value_ready),
            *(found_value_gmem, values_told, norm_gmem, unscale_gmem, half_gmem),
            beside_gmem,
        )
        pl.when(of_keys)(on_keys.begin)
        pl.when(~of_keys)(on_values.begin)

        @pl.loop(jnp.int32(0), cta.mine)
        def _(turn):
            def take_values():
                on_values.take(turn)
                return on_keys.nothing()

            def together(own):
                del own
                return lax.cond(of_keys, lambda: on_keys.sums(turn), take_values)

            # That place begins where what is allocated ends (Pallas): so the one for
            # values lies behind this, and the one for keys, which add up later, in it.
            found = pl.run_scoped(
                together,
                plgpu.SMEM((SCRATCH,), jnp.int8),
                collective_axes="warpgroup",
            )
            pl.when(of_keys)(lambda: on_keys.tell(turn, found))

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
    *numbers, _, _, half_value, found_planes = plgpu.kernel(
        attention_key_numbers,
        out_type=[
            *[f32(batch, heads, head_dim)] * 2,
            *[f32(batch, heads, value_dim)] * 2,
            f32(*found_shape, 3, head_dim) if together else None,
            f32(*found_shape, value_dim) if together else None,
            jax.ShapeDtypeStruct(half_shape, value.dtype)
            if half and not planes
            else None,
            jax.ShapeDtypeStruct((2, batch, keys + BESIDE, heads, head_dim), key.dtype)
            if planes
            else None,
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
    return KeyNumbers(*numbers), half_value, found_planes
