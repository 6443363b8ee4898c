"""Errors of a ring of shards, simulated on one GPU by the kernels, over one shard's.

    python prototypes/measure_maxima.py OUT_FOLDER SHARDS ...

Causal, zigzag, 4096 tokens, 8 query and 4 key heads of 128, BF16, without a gradient of
LSE, against FP64. RMS of what each result is off, over that of the plain kernels:
printed, and written to OUT_FOLDER/maxima.csv.
"""

import csv
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from analysis import parallel
from attn_jax import context_parallel, dot_product_attention

LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 4096, 8, 4, 128
OPTIONS = {"is_causal": True, "implementation": "pallas"}


def alone(query, key, value):
    out, lse = dot_product_attention(query, key, value, return_residual=True, **OPTIONS)
    return out, lse.swapaxes(1, 2)


def errors(attend, inputs, exact) -> dict[str, float]:
    @jax.jit
    def both(query, key, value, dout):
        results, pullback = jax.vjp(attend, query, key, value)
        return *results, *pullback((dout, jnp.zeros_like(results[1])))

    rows = parallel.errors_by_seed(jax.device_get(both(*inputs)), exact)
    return {row["tensor"]: row["rms"] for row in rows}


def main() -> None:
    folder, *shards = sys.argv[1:]
    table = []
    for family in ("normal", "sink", "alternating"):
        drawn = parallel.draw(family, 0, LENGTH, HEAD_DIM, HEADS)
        inputs, exact = parallel.stacked([drawn], KEY_HEADS)
        of_one = errors(alone, inputs, exact)
        for count in map(int, shards):
            ring = functools.partial(
                context_parallel.simulate, shards=count, layout="zigzag", **OPTIONS
            )
            found = errors(ring, inputs, exact)
            ratios = {name: f"{x / of_one[name]:.4f}" for name, x in found.items()}
            table.append({"family": family, "shards": count} | ratios)
            print(table[-1], flush=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "maxima.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
