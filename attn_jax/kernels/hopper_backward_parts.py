"""Hopper's one-pass backward kernel where keys come part after part.

The sums of dQ stay where they are, and each part's keys are added to them by the
additions that the kernel makes anyway: no pass over memory adds up parts. Queries and
rows are those of a device, of which a part may see some; they are read where they lie.
Where it rounds: as `hopper_backward_fused`, each block of keys' tile of dQ being added
to the sum of all before it, in FP32.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import tuning
from attn_jax.kernels.hopper_backward_fused import sums_over_keys
from attn_jax.kernels.hopper_fused_work import QUERIES
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.tiles import LOG2_E


def added_in_place(head_dim: int, first: int, count: int, rows: int) -> bool:
    """Whether `add_to` takes these of so many rows: whole blocks."""
    block = QUERIES[head_dim]
    return first % block == 0 and count % block == 0 and rows % block == 0


def add_to(
    sums: Float32[Array, "B T N H"],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    dout: Float[Array, "B T N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    numbers: Range,
    *,
    first_query: int,
    query_count: int,
    scale: float,
    is_causal: bool,
    dq_dtype: jnp.dtype = jnp.dtype(jnp.float16),
) -> tuple[
    Float32[Array, "B T N H"], Float32[Array, "B S K H"], Float32[Array, "B S K H"]
]:
    """(`sums`, dK, dV): to the sums of dS K' of `query_count` rows from the first on,
    which `added_in_place` says it takes, those over these keys are added where they
    lie. Of all keys `query_gradient` makes dQ of them.

    Raises:
      NotImplementedError: `reason_against` has one.
    """
    plan = tuning.fused(query.shape[3], key.shape[1], is_causal=is_causal)
    group = query.shape[2] // key.shape[2]
    exponent = jnp.repeat(numbers.row_exponent, group, axis=1)[..., None]
    (sums,), dk, dv = sums_over_keys(
        *(query, key, value, dout, lse * LOG2_E - exponent, delta),
        numbers,
        sums,
        first_query=first_query,
        query_count=query_count,
        key_count=key.shape[1],
        scale=scale,
        is_causal=is_causal,
        window=None,
        # What is kept apart has no place in the sums.
        plan=dataclasses.replace(plan, apart=False),
        dq_dtype=dq_dtype,
        wide=True,
    )
    return sums, dk, dv
