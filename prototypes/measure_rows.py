"""Times the kernels that only read, on an H100 or H200, beside XLA's passes.

    python prototypes/measure_rows.py OUT_FOLDER

16 384 tokens, heads * head dim = 2048, and `small`'s 128 x 320 of 6 x 64; BF16, out in
two parts, as many key heads as heads. A row for each length, head dim and kernel,
printed, and written to OUT_FOLDER/sums.csv: CUPTI times in ms, and TB/s of what has to
be read and written. `row_sums`: `hopper_row_sums`. `key_numbers ...`:
`hopper_key_numbers`, V made FP16 numbers, by the package's plan and by others (key
stages, value stages, elements of a tile). `xla`: the same V by two of XLA's passes.
Their results are for the tests.
"""

import concurrent.futures
import csv
import itertools
import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

# B, T, N, H
CASES = [(128, 320, 6, 64)] + [
    (16384 // length, length, 2048 // head_dim, head_dim)
    for length, head_dim in itertools.product((1024, 4096, 16384), (64, 128))
]
PLANS = [(4, 8, 4096), (2, 4, 4096), (4, 4, 4096), (3, 6, 4096)]
PLANS += [(2, 8, 4096), (1, 8, 4096), (4, 16, 2048), (2, 16, 2048)]
RUNS = 20
FIELDS = "length head_dim kernel ms tb_s".split()


def programs(length: int, elements: int):
    """name: (function, number of arrays, bytes read and written)"""
    import jax.numpy as jnp

    from attn_jax.formats import BF16
    from attn_jax.kernels.hopper_key_numbers import Plan, key_numbers
    from attn_jax.kernels.hopper_row_sums import row_sums

    size = 2 * elements
    yield "row_sums", row_sums, 3, 3 * size

    def xla(key, value):
        del key
        wide = value.astype(jnp.float32)
        largest = jnp.abs(wide).max(axis=(1, 3), keepdims=True)
        factor = jnp.ldexp(jnp.ones_like(largest), 15 - jnp.frexp(largest)[1])
        return (wide * factor).astype(jnp.float16)

    yield "xla", xla, 2, 3 * size
    for keys, values, tile in PLANS:
        plan = Plan(key_stages=keys, value_stages=values, elements=tile)

        def numbers(key, value, plan=plan):
            return key_numbers(key, value, length, BF16, half=True, plan=plan)

        yield f"key_numbers {keys} {values} {tile}", numbers, 2, 3 * size


def lowered(case):
    import jax

    array = jax.ShapeDtypeStruct(case, "bfloat16")
    for name, function, count, size in programs(case[1], math.prod(case)):
        yield case, name, size, count, jax.jit(function).lower(*[array] * count)


def main(folder: Path) -> None:
    import jax

    from attn_jax.timing import device_time

    folder.mkdir(parents=True, exist_ok=True)
    found = list(itertools.chain.from_iterable(map(lowered, CASES)))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda x: x[-1].compile(), found))
    with (folder / "sums.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for (case, name, size, count, _), program in zip(found, compiled, strict=True):
            keys = jax.random.split(jax.random.key(0), count)
            arrays = tuple(jax.random.normal(x, case, "bfloat16") for x in keys)
            ms, _ = device_time(program, arrays, RUNS)
            row = case[1], case[3], name, round(ms, 4), round(size / ms / 1e9, 3)
            writer.writerow(row)
            print(*row, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
