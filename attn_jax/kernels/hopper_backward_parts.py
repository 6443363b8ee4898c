"""Hopper's one-pass backward kernel where keys come part after part.

The sums of dQ stay where they are, and each part's keys are added to them by the
additions that the kernel makes anyway: no pass over memory adds up parts. Queries and
rows are those of a device, of which a part may see some; they are read where they lie.
Where it rounds: as `hopper_backward_fused`, each block of keys' tile of dQ being added
to the sum of all before it, in FP32.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from attn_jax.kernels import tuning
from attn_jax.kernels.hopper_backward_fused import sums_over_keys
from attn_jax.kernels.hopper_fused_work import KEY_TILE, QUERIES
from attn_jax.kernels.hopper_range import Range
from attn_jax.kernels.tiles import LOG2_E, SEQUENCE_MULTIPLE
from attn_jax.span import Chosen


class Keys(NamedTuple):
    """Some keys and values. With `planes` they are those of its first two planes, from
    the `first` on, and kernels read them there."""

    key: Float[Array, "B s K H"]
    value: Float[Array, "B s K D"]
    first: int = 0
    planes: Float[Array, "P B S K H"] | None = None


def added_in_place(
    head_dim: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
    query_length: int,
    key_length: int,
) -> bool:
    """Whether `add_to` takes (first, number of) queries and keys of arrays so long:
    whole blocks, beyond which it would read what is others'."""
    block = QUERIES[head_dim]
    of_queries = *queries, query_length
    (first, count), multiple = keys, SEQUENCE_MULTIPLE
    to_the_end = first + count == key_length and key_length % multiple == 0
    return all(x % block == 0 for x in of_queries) and (
        to_the_end or count % KEY_TILE == 0
    )


def fits(chosen: Chosen, head_dim: int) -> bool:
    """Whether `add_to` takes it: whole blocks of queries and tiles of keys."""
    return chosen.fit(QUERIES[head_dim], KEY_TILE)


def add_to(
    sums: Float32[Array, "B T N H"] | None,
    query: Float[Array, "B T N H"],
    keys: Keys,
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
    chosen: Chosen | None = None,
) -> tuple[
    Float32[Array, "B T N H"], Float32[Array, "B s K H"], Float32[Array, "B s K H"]
]:
    """(`sums`, dK, dV): to the sums of dS K' of `query_count` rows from the first on,
    which `added_in_place` says it takes, those over these keys are added where they
    lie. Of all keys `query_gradient` makes dQ of them. None: of no keys, for all rows.
    `chosen`: of all rows and all these keys that alone, which `fits`, without a mask.

    Raises:
      NotImplementedError: `reason_against` has one.
    """
    key, value, first_key, planes = keys
    _, key_count, key_heads, _ = key.shape
    if planes is not None:
        key, value = planes, None
    plan = tuning.fused(query.shape[3], key_count, is_causal=is_causal)
    group = query.shape[2] // key_heads
    exponent = jnp.repeat(numbers.row_exponent, group, axis=1)[..., None]
    (total,), dk, dv = sums_over_keys(
        *(query, key, value, dout, lse * LOG2_E - exponent, delta),
        numbers,
        sums,
        first_query=first_query,
        query_count=query_count,
        first_key=first_key if planes is not None else 0,
        key_count=key_count,
        scale=scale,
        is_causal=is_causal,
        window=None,
        # What is kept apart has no place in the sums.
        plan=dataclasses.replace(plan, apart=False),
        dq_dtype=dq_dtype,
        wide=True,
        chosen=chosen,
    )
    return total, dk, dv
