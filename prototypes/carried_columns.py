"""What it costs to read (m, l, A) some columns at a time, on a Hopper GPU.

    python prototypes/carried_columns.py

Times the forward kernel that adds 4096 keys to all of 8192 queries, and 8192 keys to
half of them, 32 and 8 heads of 128, as a zigzag ring's hops do. Which of the two is
known on the device alone. Says whether the bits are the same, too.
"""

import statistics
from unittest.mock import patch

import jax
import jax.numpy as jnp

from attn_jax.kernels import hopper_outputs, partial
from attn_jax.span import Chosen, Span
from attn_jax.timing import device_events

QUERIES, KEYS, HEADS, KEY_HEADS, HEAD_DIM = 8192, 8192, 32, 8, 128
SPANS = Span(0, QUERIES, KEYS // 2), Span(QUERIES // 2, QUERIES // 2, KEYS)
COLUMNS, RUNS = (8, 16, 32, 64, 128), 15


def program(columns: int, *inputs):
    def run(query, key, value, which):
        state = partial.carry_on(None, query, key[:, :1024], value[:, :1024], scale=0.1)
        chosen = Chosen(SPANS, jnp.arange(len(SPANS)), which)
        return partial.carry_on(state, query, key, value, scale=0.1, chosen=chosen)

    with patch.object(hopper_outputs, "columns_at_once", lambda *_: columns):
        return jax.jit(run).lower(*inputs).compile()


def milliseconds(compiled, *inputs) -> float:
    (events,) = device_events(
        lambda: [jax.block_until_ready(compiled(*inputs)) for _ in range(RUNS)]
    )
    ours = [event for event in events if "attention_forward" in event.name]
    ours.sort(key=lambda event: event.start)
    # The state is made by every other one.
    return statistics.median(event.end - event.start for event in ours[1::2])


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (
        jax.random.normal(key, (1, length, heads, HEAD_DIM), jnp.bfloat16)
        for key, length, heads in zip(
            keys, (QUERIES, KEYS, KEYS), (HEADS, KEY_HEADS, KEY_HEADS), strict=True
        )
    )
    for which, span in enumerate(SPANS):
        inputs = query, key, value, jnp.int32(which)
        first = None
        for columns in COLUMNS:
            compiled = program(columns, *inputs)
            found = jax.device_get(compiled(*inputs))
            first = found if first is None else first
            same = all((a == b).all() for a, b in zip(found, first, strict=True))
            took = milliseconds(compiled, *inputs)
            print(f"{span}, {columns} columns: {took:.3f} ms, same bits: {same}")


if __name__ == "__main__":
    main()
