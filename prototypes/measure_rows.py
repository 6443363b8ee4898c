"""Times the kernels that only read, on an H100 or H200, beside XLA's passes.

    python prototypes/measure_rows.py OUT_FOLDER

16 384 tokens, heads * head dim = 2048, and `small`'s 128 x 320 of 6 x 64; BF16, out in
two parts, as many key heads as heads. A row for each length, head dim and kernel,
printed, and written to OUT_FOLDER/sums.csv: CUPTI times in ms, and TB/s of what has to
be read and written. `row_sums`: `hopper_row_sums`. `key_numbers ...`:
`hopper_key_numbers`, V made FP16 numbers, by its plans. `xla`: the same V by two of
XLA's passes. Their results are for the tests.

Then OUT_FOLDER/key_numbers.csv: forward and backward pass in one program, medians of
rounds of SECONDS in turn: cuDNN's, `each`, where every head has a cluster for its
numbers, and `ours`, by `plan_for`. Whether their bits are the same is in the last
column.
"""

import concurrent.futures
import csv
import dataclasses
import itertools
import math
import statistics
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import measure_variants  # noqa: E402

# B, T, N, H
CASES = [(128, 320, 6, 64)] + [
    (16384 // length, length, 2048 // head_dim, head_dim)
    for length, head_dim in itertools.product((1024, 4096, 16384), (64, 128))
]
# and is_causal
BOTH = [
    *((16, 1024, heads, 2048 // heads, mask) for heads in (16, 32) for mask in (1, 0)),
    (128, 320, 6, 64, 0),
    (32, 1088, 12, 64, 0),
    (4, 4096, 16, 128, 1),
    (4, 4096, 32, 64, 1),
]
RUNS = 20
SECONDS = 1.0
FIELDS = "length head_dim kernel ms tb_s".split()
BOTH_FIELDS = "B T N H is_causal cudnn each ours same_bits".split()


def programs(case: tuple[int, ...]):
    """name: (function, number of arrays, bytes read and written)"""
    import jax.numpy as jnp

    from attn_jax.formats import BF16
    from attn_jax.kernels.hopper_key_numbers import MANY, SHORT, Plan, key_numbers
    from attn_jax.kernels.hopper_row_sums import row_sums

    size = 2 * math.prod(case)
    yield "row_sums", row_sums, 3, 3 * size

    def xla(key, value):
        del key
        wide = value.astype(jnp.float32)
        largest = jnp.abs(wide).max(axis=(1, 3), keepdims=True)
        factor = jnp.ldexp(jnp.ones_like(largest), 15 - jnp.frexp(largest)[1])
        return (wide * factor).astype(jnp.float16)

    yield "xla", xla, 2, 3 * size
    alone = dataclasses.replace(MANY, most_parts=1)
    plans = {"ours": None, "each": Plan(), "many": MANY, "alone": alone, "short": SHORT}
    for name, plan in plans.items():
        if name == "short" and case[1] > 384:
            continue

        def numbers(key, value, plan=plan):
            return key_numbers(key, value, case[1], BF16, half=True, plan=plan)

        yield f"key_numbers {name}", numbers, 2, 3 * size


def lowered(case):
    import jax

    array = jax.ShapeDtypeStruct(case, "bfloat16")
    for name, function, count, size in programs(case):
        yield case, name, size, count, jax.jit(function).lower(*[array] * count)


def compiled(programs) -> list:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(lambda x: x.compile(), programs))


def both_passes(case):
    """name: lowered forward and backward pass"""
    from attn_jax.kernels import hopper_key_numbers
    from attn_jax.kernels.attention import attention
    from attn_jax.mask import Mask
    from tests.altered_kernels import fresh_programs

    *shape, is_causal = case

    def ours(*qkv):
        mask = Mask(is_causal=bool(is_causal))
        return attention(*qkv, scale=shape[-1] ** -0.5, mask=mask)[0]

    found = {
        "cudnn": measure_variants.both_passes(
            measure_variants.cudnn(bool(is_causal)), shape
        )
    }
    each = hopper_key_numbers.Plan()
    with (
        fresh_programs(),
        mock.patch.object(hopper_key_numbers, "plan_for", lambda *_: each),
    ):
        found["each"] = measure_variants.both_passes(ours, shape)
    with fresh_programs():
        found["ours"] = measure_variants.both_passes(ours, shape)
    return found


def arrays(shape, count):
    import jax

    keys = jax.random.split(jax.random.key(0), count)
    return tuple(jax.random.normal(x, shape, "bfloat16") for x in keys)


def write_both(file) -> None:
    import jax

    from attn_jax.timing import device_time, interleaved

    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(BOTH_FIELDS)
    found = {case: both_passes(case) for case in BOTH}
    all_compiled = iter(compiled([x for ways in found.values() for x in ways.values()]))
    for case, ways in found.items():
        made = dict(zip(ways, all_compiled))
        given = arrays(case[:-1], 4)
        each, ours = (jax.device_get(made[x](*given)) for x in ("each", "ours"))
        pairs = zip(*map(jax.tree.leaves, (each, ours)), strict=True)
        same = all(a.tobytes() == b.tobytes() for a, b in pairs)
        times = {
            name: lambda runs, x=program: device_time(x, given, max(runs, 3))[0]
            for name, program in made.items()
        }
        row = []
        for name, ms in interleaved(times, SECONDS).items():
            assert not isinstance(ms, str), f"{name}: {ms}"
            row.append(round(statistics.median(ms), 4))
        writer.writerow([*case, *row, same])
        print(*case, *row, same, flush=True)


def main(folder: Path) -> None:
    from attn_jax.timing import device_time

    folder.mkdir(parents=True, exist_ok=True)
    found = list(itertools.chain.from_iterable(map(lowered, CASES)))
    made = compiled([x[-1] for x in found])
    with (folder / "sums.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for (case, name, size, count, _), program in zip(found, made, strict=True):
            ms, _ = device_time(program, arrays(case, count), RUNS)
            row = case[1], case[3], name, round(ms, 4), round(size / ms / 1e9, 3)
            writer.writerow(row)
            print(*row, flush=True)
    with (folder / "key_numbers.csv").open("w", newline="") as file:
        write_both(file)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
