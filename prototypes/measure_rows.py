"""Times `hopper_backward_rows` on an H100 or H200 beside XLA's passes, and checks it.

    python prototypes/measure_rows.py OUT_FOLDER
    python prototypes/measure_rows.py --dry-run        (compiles for sm_90a, no GPU)

16 384 tokens, heads * head dim = 2048, BF16, out in two parts, as many key heads as
heads. A row for each length and head dim, printed, and written to
OUT_FOLDER/hopper_backward_rows.csv: CUPTI times of the kernel, of it with what puts its
chunks together, and of XLA's program for the same six results, in ms, and TB/s of the
inputs read once; the largest error of each result against FP64 sums, in units of 2^-24
of the sum of what is added, in absolute value (of maxima: the largest difference);
`ok`: none is above its bound, and a second run gave the same bits.
"""

import argparse
import concurrent.futures
import csv
import itertools
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

TOKENS, COLUMNS = 16384, 2048
CASES = list(itertools.product((1024, 4096, 16384), (64, 128)))
RUNS = 20


def arrays_of(length, head_dim):
    """out, low, dout, key, value"""
    import jax

    shape = (TOKENS // length, length, COLUMNS // head_dim, head_dim)
    return [jax.ShapeDtypeStruct(shape, "bfloat16")] * 5


def with_kernel(*arrays):
    """The kernel's results, those of chunks put together."""
    from attn_jax.kernels.hopper_backward_rows import backward_rows

    sums = backward_rows(*arrays)
    over_keys = (sums.key_sums.sum(axis=1), sums.key_squares.sum(axis=1))
    largest = (sums.key_largest.max(axis=1), sums.value_largest.max(axis=1))
    return *sums[:2], *over_keys, *largest


def in_xla(out, low, dout, key, value, dtype="float32"):
    import jax.numpy as jnp

    out, low, dout, key, value = (x.astype(dtype) for x in (out, low, dout, key, value))
    return (
        jnp.sum(dout * (out + low), axis=-1).swapaxes(1, 2),
        jnp.sum(dout * dout, axis=-1).swapaxes(1, 2),
        key.sum(axis=1),
        jnp.square(key).sum(axis=1),
        jnp.abs(key).max(axis=1),
        jnp.abs(value).max(axis=1),
    )


def errors(found, again, arrays):
    """([the largest error of each result], whether both runs gave the same bits).

    Traced under x64.
    """
    import jax.numpy as jnp

    exact = in_xla(*arrays, dtype="float64")
    out, low, dout, key, value = arrays
    out = out.astype("float64") + low
    size = in_xla(*map(abs, (out, 0 * low, dout, key, value)), dtype="float64")
    units = [
        jnp.max(abs(a - b) / s) * 2.0**24
        for a, b, s in zip(found[:4], exact[:4], size[:4], strict=True)
    ]
    units += [jnp.max(abs(a - b)) for a, b in zip(found[4:], exact[4:], strict=True)]
    same = [
        jnp.all(a.view("int32") == b.view("int32"))
        for a, b in zip(found, again, strict=True)
    ]
    return jnp.stack(units), jnp.all(jnp.stack(same))


def bounds(arrays):
    """Of the errors, by the kernel's own order of additions and any of its chunks."""
    from attn_jax.kernels.hopper_backward_rows import tiles_of
    from attn_jax.kernels.hopper_backward_rows_plan import Plan

    out, low, dout, key, _ = arrays
    tiles = tiles_of(out, low, dout, key, Plan())
    over_keys = tiles.key_depth + tiles.chunks - 1
    # 1 for terms in u^2, which are smaller by far.
    return [x + 1 for x in (tiles.row_depth + 2, tiles.row_depth, over_keys, over_keys)]


def make_inputs(like):
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    out, dout, key, value = (jax.random.normal(k, like.shape) for k in keys)
    high = out.astype(like.dtype)
    low = out - high.astype(jnp.float32)
    return high, *(x.astype(like.dtype) for x in (low, dout, key + 0.5, value - 0.5))


def compile_all(pool):
    """{case: programs}. Lowering is Python's, one after the other; compiling is not."""
    import jax

    programs = {}
    for case in CASES:
        arrays = arrays_of(*case)
        results = jax.eval_shape(with_kernel, *arrays)
        lowered = [jax.jit(f).lower(*arrays) for f in (with_kernel, in_xla)]
        lowered.append(jax.jit(lambda x=arrays[0]: make_inputs(x)).lower())
        with jax.enable_x64(True):
            lowered.append(jax.jit(errors).lower(results, results, arrays))
        programs[case] = [pool.submit(x.compile) for x in lowered]
    return {case: [x.result() for x in found] for case, found in programs.items()}


def measured(case, program, xla, inputs, compare):
    from attn_jax.timing import device_time

    arrays = list(inputs())
    units, same = compare(program(*arrays), program(*arrays), arrays)
    units = [float(x) for x in units]
    # Kernel and the rest, one after the other: both see the same clock.
    alone, _ = device_time(program, tuple(arrays), RUNS, only="backward_rows")
    whole, _ = device_time(program, tuple(arrays), RUNS)
    other, _ = device_time(xla, tuple(arrays), RUNS)
    gigabytes = sum(x.nbytes for x in arrays) / 1e9
    near = all(x <= y for x, y in zip(units[:4], bounds(arrays), strict=True))
    return {
        "length": case[0],
        "head_dim": case[1],
        "kernel_ms": round(alone, 4),
        "all_ms": round(whole, 4),
        "xla_ms": round(other, 4),
        "kernel_tb_s": round(gigabytes / alone, 3),
        "xla_tb_s": round(gigabytes / other, 3),
        "ok": near and not any(units[4:]) and bool(same),
        "errors": " ".join(f"{x:.2f}" for x in units),
    }


def measure(folder):
    import jax

    if jax.default_backend() != "gpu":
        sys.exit("needs an H100 or H200; --dry-run does not")
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = compile_all(pool)
    rows = []
    for case in CASES:
        rows.append(measured(case, *programs[case]))
        print(rows[-1], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "hopper_backward_rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"{time.monotonic() - began:.0f} s")


def dry_run():
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    import jax

    from attn_jax.kernels.compiler import compiled

    for case in CASES:
        arrays = arrays_of(*case)
        (found,) = compiled(with_kernel, *arrays, machine_code=False).kernels
        compiled(in_xla, *arrays, machine_code=False)
        compiled(lambda x=arrays[0]: make_inputs(x), machine_code=False)
        results = jax.eval_shape(with_kernel, *arrays)
        with jax.enable_x64(True):
            jax.jit(errors).lower(results, results, arrays)
        print(
            f"{case}: {found.registers} registers, {found.spilled_bytes} bytes spilled,"
            f" {found.shared_memory} bytes of shared memory; bounds {bounds(arrays)}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("folder", nargs="?", type=Path, metavar="OUT_FOLDER")
    where.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
    else:
        measure(options.folder)


if __name__ == "__main__":
    main()
