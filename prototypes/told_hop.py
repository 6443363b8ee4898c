"""What a hop of a ring's backward pass takes where the kernel knows beforehand which
queries meet which keys, and where it is told on the device.

    python prototypes/told_hop.py

on a Hopper GPU. Milliseconds of a call, the median, least and most of the rounds: for
8192 queries and keys (32 heads of 128 over 8) all queries with the first half of the
keys, and the second half of the queries with all keys. "no zeros": without clearing dK
and dV of the other keys. Rounds are in a random order, some time apart, and short, so
that the card's power does not decide. With `told_apart.patch` applied told kernels have
code of their own for either, with `told_copies.patch` those warpgroups that copy have.
"""

import random
import statistics
import time
from unittest.mock import patch

import jax
import jax.numpy as jnp

from attn_jax.kernels import hopper_backward_fused, partial
from attn_jax.span import Chosen, Span

T, N, K, H = 8192, 32, 8, 128
SPANS = Span(0, T, T // 2), Span(T // 2, T // 2, T)
ROUNDS, CALLS = 14, 10


def _inputs() -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    return {
        "query": normal(1, T, N, H),
        "dout": normal(1, T, N, H),
        "planes": normal(2, 1, T, K, H),
        "lse": normal(1, N, T, dtype=jnp.float32) + 9,
        "excess": normal(1, N, T, dtype=jnp.float32),
    }


def _compiled(x: dict[str, jax.Array], span: Span, *, told: bool):
    """hop(sums, number of the span) -> sums with it."""
    centre, largest = jnp.zeros((1, K, H)), jnp.full((1, K, H), 5.0)
    rows, count = (span.first_query, span.queries), span.keys
    if told:
        rows, count = (0, T), T

    def hop(sums, number):
        norms = jnp.full((1, N, T), 12.0)
        ranges = partial.ranges(centre, largest, largest, x["excess"], norms)
        key, value = x["planes"][:, :, :count]
        return partial.backward_in_place(
            sums,
            x["query"],
            partial.Keys(key, value, 0, x["planes"]),
            *(x["dout"], x["lse"], x["excess"], ranges, rows),
            scale=H**-0.5,
            is_causal=False,
            chosen=Chosen(SPANS, number[None], jnp.int32(0)) if told else None,
        )[0]

    sums = jax.ShapeDtypeStruct((1, T, N, H), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(hop, donate_argnums=0).lower(sums, number).compile()


def _milliseconds(name: str, hops: dict, sums: dict) -> float:
    hop, number = hops[name]
    for call in range(-3, CALLS):
        if call == 0:
            jax.block_until_ready(sums[name])
            began = time.perf_counter()
        sums[name] = hop(sums[name], jnp.int32(number))
    jax.block_until_ready(sums[name])
    return (time.perf_counter() - began) / CALLS * 1e3


def main() -> None:
    x = _inputs()
    told = _compiled(x, SPANS[0], told=True)
    with patch.object(hopper_backward_fused, "leave_zeros", lambda *given: None):
        without = _compiled(x, SPANS[0], told=True)
    hops = {}
    for number, span in enumerate(SPANS):
        name = f"{span.queries} x {span.keys}"
        hops[f"{name}, known"] = _compiled(x, span, told=False), number
        hops[f"{name}, told"] = told, number
        hops[f"{name}, told, no zeros"] = without, number
    sums = {name: jnp.zeros((1, T, N, H)) for name in hops}
    times: dict[str, list[float]] = {name: [] for name in hops}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for name in order.sample(list(hops), len(hops)):
            time.sleep(0.05)
            times[name].append(_milliseconds(name, hops, sums))
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"{name:28s} {middle:.4f} {min(found):.4f} {max(found):.4f}")


if __name__ == "__main__":
    main()
