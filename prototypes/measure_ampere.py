"""Times the Ampere kernels and variants of them on an H200 (or an A100).

    python prototypes/measure_ampere.py OUT_FOLDER SECONDS [--only TEXT] [--workers N]
    python prototypes/measure_ampere.py --dry-run [--only TEXT]   (compiles for sm_80)

16 384 tokens, heads * head dim = 2048, BF16. A row of OUT_FOLDER/ampere.csv for each
(kernel, case, variant) as soon as it is known; `base` is the package's kernel, which
the others are checked against: `off` is the RMS of the difference over that of the
result, the largest of a kernel's results. TFLOP/s are those of the products that the
kernel makes: 2 in the forward pass, 3 for dQ, 4 for dK and dV. Workers, processes,
compile side by side; one at a time has the GPU. What is not begun after SECONDS is
left out; what fails costs its own row.

`backward` is the whole pass: `base` the package's two kernels, the others the kernel in
one pass, each with all that XLA does before and after. `ms` is all of it, `ms_kernels`
the kernels' part, TFLOP/s those of five products in `ms`. These jobs come first. Their
kernels wait for each other: one that is not done with in 20 s is killed with its
process, and what is left of its job goes on in another.
"""

import argparse
import csv
import fcntl
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import one_pass  # noqa: E402

TOKENS, WIDTH = 16384, 2048
# Most informative first.
CASES = [
    (head_dim, length, is_causal)
    for length, is_causal in (
        *((4096, False), (4096, True), (16384, False)),
        *((1024, True), (1024, False), (16384, True)),
    )
    for head_dim in (64, 128)
]
PRODUCTS = {"backward": 5, "forward": 2, "dq": 3, "dkv": 4}
# kernel -> head dim -> rows x columns [stages], and the options of a variant; none is
# the package's kernel with that tiling.
VARIANTS = {
    # Queries in a block x at a time; see `ampere_backward_fused.Cut`.
    "backward": {
        64: [
            "32x32 integers", "32x32 integers walk=up", "32x32 integers walk=apart",
            "32x32 integers walk=down", "64x32 integers walk=apart",
            "32x32", "64x32 integers", "32x32 load",
            "32x32 buffers=1", "32x32 unordered",
            "64x32 buffers=1", "64x32 buffers=1 load", "32x32 registers=1",
        ],
        128: [
            "64x64 integers", "64x64 integers walk=up", "64x64 integers walk=apart",
            "64x64 integers walk=down", "32x32 integers walk=apart",
            "64x32 integers walk=apart", "64x64", "32x32 integers", "64x64 load",
            "64x64 buffers=1", "64x64 unordered",
            "32x32", "32x32 registers=01", "64x32",
        ],
    },
    "forward": {
        64: ["128x32 pipe q_registers"],
        128: ["128x64 2", "128x32 2", "64x64 pipe"],
    },
    "dq": {
        64: ["128x32 registers=01 packed", "128x64 4 split", "256x16 4 split"],
        128: ["64x32 registers=01 packed", "128x32 packed peeled", "128x32 4 split"],
    },
    "dkv": {
        64: ["128x32 registers=0", "64x64 2", "128x64 3 split", "256x16 4 split late"],
        128: ["64x64", "64x32 registers=0", "128x16 4 split late", "128x32 3 split"],
    },
}  # fmt: skip
# Of `backward` at other lengths than 4096: so many of the first.
FEW = 6
LIMIT = 20  # seconds, of a variant of `backward` on the GPU, its inputs included
COLUMNS = (
    "kernel", "head_dim", "length", "causal", "variant", "ms", "ms_kernels", "tflops",
    "of_base", "off", "same_bits", "registers", "spilled", "why",
)  # fmt: skip


def shapes(case):
    """query, dout, [B N T], centre"""
    import jax

    head_dim, length, _ = case
    batch, heads = TOKENS // length, WIDTH // head_dim
    big = jax.ShapeDtypeStruct((batch, length, heads, head_dim), "bfloat16")
    row = jax.ShapeDtypeStruct((batch, heads, length), "float32")
    centre = jax.ShapeDtypeStruct((batch, heads, 1, head_dim), "float32")
    return big, row, centre


def program(kernel, case, name):
    """(function of arrays, its arguments' shapes)"""
    import ampere_split_dkv
    import ampere_split_dq
    import jax.numpy as jnp
    from ampere_variants import Options
    from ampere_variants import backward_dkv as dkv_variant
    from ampere_variants import backward_dq as dq_variant
    from ampere_variants import forward as forward_variant

    from attn_jax.kernels import (
        ampere_backward_dkv,
        ampere_backward_dq,
        ampere_forward,
        tuning,
    )
    from attn_jax.kernels.tilings import Tiling

    head_dim, length, is_causal = case
    if kernel == "backward":
        big, row, _ = shapes(case)
        return one_pass.program(case, name, big, row)
    long = {"forward": "forward", "dq": "backward_dq", "dkv": "backward_dkv"}[kernel]
    table = long, is_causal if kernel == "forward" else None
    own = tuning.tiling(tuning.LONG[table], "ampere", head_dim, head_dim)
    size, *words = name.split()
    options = dict.fromkeys(("q_registers", "peeled", "packed"), False)
    options = {word: True for word in words if word in options}
    for word in words:
        if word.startswith("registers="):
            options["registers"] = tuple(map(int, word.partition("=")[2]))
    options |= {"late": True} if "late" in words else {}
    split = "split" in words
    varied = bool(options) or "pipe" in words
    if size != "base":
        rows, columns = map(int, size.split("x"))
        stages = next((int(word) for word in words if word.isdigit()), 2)
        own = Tiling(rows, columns, 1 + split, stages, 1 + split)
    common = {"query_count": length, "key_count": length, "scale": head_dim**-0.5}
    common |= {"is_causal": is_causal, "tiling": own}
    if split:
        common |= options
    elif varied:
        common["variant"] = Options(**options)
    big, row, centre = shapes(case)
    if kernel == "forward":
        run = forward_variant if varied else ampere_forward.forward
        common |= {"out_dtype": jnp.dtype("bfloat16"), "residual": False}

        def function(query, key, value):
            out, _, lse = run(query, key, value, **common)
            return out, lse

        return function, (big,) * 3
    if kernel == "dq":
        run = dq_variant if varied else ampere_backward_dq.backward_dq
        run = ampere_split_dq.backward_dq if split else run
        return (
            lambda *x: (run(*x, **common),),
            (big,) * 4 + (row,) * 3 + (centre,),
        )
    run = dkv_variant if varied else ampere_backward_dkv.backward_dkv
    run = ampere_split_dkv.backward_dkv if split else run
    return (lambda *x: run(*x, **common)), (big,) * 4 + (row,) * 2


def flops(kernel, case):
    head_dim, length, is_causal = case
    pairs = TOKENS * length * (0.5 if is_causal else 1.0)
    return 2.0 * PRODUCTS[kernel] * WIDTH * pairs


def names(kernel, case, only):
    if kernel == "products":
        return ["mma 128", "mma 64", "mma 128 smem", "mma 64 smem"]
    found = VARIANTS[kernel][case[0]]
    if kernel == "backward" and case[1] != 4096:
        found = found[:FEW]
    return ["base", *(n for n in found if only in f"{kernel} {case} {n}")]


def jobs(only):
    first = [("backward", case) for case in CASES]
    others = (k for k in PRODUCTS if k != "backward")
    then = [(kernel, case) for case, kernel in itertools.product(CASES, others)]
    for kernel, case in first + then:
        if len(names(kernel, case, only)) > 1:
            yield kernel, case
    if not only:
        yield "products", CASES[0]


def built(kernel, case, name):
    """(compiled program or None, columns)"""
    import jax

    from attn_jax.kernels.architecture import made_for
    from attn_jax.kernels.compiler import UnreadableReport, reported

    if kernel == "products":
        from ampere_variants import products

        _, rows, *smem = name.split()
        function, _ = products(int(rows), bool(smem), STEPS)
        arguments = (jax.ShapeDtypeStruct((64, 64), "bfloat16"),)
    else:
        function, arguments = program(kernel, case, name)
    compiled, row, reports = None, {}, []
    try:
        with reported(machine_code=False) as reports, made_for("ampere"):
            compiled = jax.jit(function).lower(*arguments).compile()
    except UnreadableReport:
        pass
    except Exception as error:
        row["why"] = f"{type(error).__name__}: {str(error).strip()[:160]}"
    reports = [r for r in reports if r.name.startswith("attention_")]
    if reports:
        row["registers"] = max(r.registers for r in reports)
        row["spilled"] = max(r.spilled_bytes for r in reports)
    return compiled, row


STEPS = 20000


def inputs_of(case, forward):
    """All that kernels are given, by the package's forward kernel."""
    import jax
    import jax.numpy as jnp

    big, _, _ = shapes(case)
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, dout = (jax.random.normal(k, big.shape, big.dtype) for k in keys)
    out, lse = forward(query, key, value)
    delta = jnp.sum(dout.astype("float32") * out, axis=-1).swapaxes(1, 2)
    centre = key.astype("float32").mean(axis=1)[:, :, None]
    return query, key, value, dout, lse, delta, jnp.zeros_like(lse), centre, out


def off(found, base):
    import jax.numpy as jnp

    wide = [[x.astype("float32") for x in pair] for pair in zip(found, base)]
    sizes = [jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2)) for a, b in wide]
    return float(max(sizes))


def run_backward(case, only, lock, write, begun):
    """`begun`: variants that a process before this one has begun, and where to add."""
    import jax

    arguments = base = None
    common = {"kernel": "backward"} | dict(zip(("head_dim", "length", "causal"), case))
    old, base_row = built("backward", case, "base")
    base_row |= common | {"variant": "base"}
    base_written = lost = False
    forward, _ = built("forward", case, "base")
    for name in names("backward", case, only)[1:]:
        if name in begun.read():
            continue
        new, row = built("backward", case, name)
        row |= common | {"variant": name}
        try:
            if new is not None:
                with lock, one_pass.limited(LIMIT):
                    if arguments is None:
                        query, key, value, dout, lse, _, zero, _, out = inputs_of(
                            case, forward
                        )
                        arguments = query, key, value, dout, lse, zero, out
                        base = jax.block_until_ready(old(*arguments))
                    begun.add(name)
                    found = one_pass.timed(old, new, base, arguments, off)
                    row |= found[0]
                    base_row |= found[1]
        except Exception as error:
            row["why"] = f"{type(error).__name__}: {str(error)[:160]}"
            lost = True  # The context may be.
        for columns in (base_row, row):
            if "ms" in columns:
                rate = flops("backward", case) / columns["ms"] / 1e9
                columns["tflops"] = round(rate, 1)
        if "ms" in base_row and not base_written:
            base_written = True
            write(base_row)
        write(row)
        if lost:
            os.kill(os.getpid(), signal.SIGKILL)


def run_job(kernel, case, only, lock, write):
    import jax
    import numpy as np

    from attn_jax.timing import device_time, interleaved

    rows, programs = {}, {}
    for name in names(kernel, case, only):
        programs[name], rows[name] = built(kernel, case, name)
    forward = built("forward", case, "base")[0] if kernel != "products" else None
    with lock:
        if kernel == "products":
            arguments = (jax.random.normal(jax.random.key(0), (64, 64), "bfloat16"),)
        else:
            count = {"forward": 3, "dq": 8, "dkv": 6}[kernel]
            arguments = inputs_of(case, forward)[:count]
        timers, base = {}, None
        for name, compiled in programs.items():
            if compiled is None:
                continue
            try:
                found = jax.block_until_ready(compiled(*arguments))
                if kernel != "products":
                    again = compiled(*arguments)
                    rows[name]["same_bits"] = all(
                        bool((a == b).all()) for a, b in zip(found, again)
                    )
                    base = found if name == "base" else base
                    if base is not None:
                        rows[name]["off"] = off(found, base)
            except Exception as error:
                rows[name]["why"] = f"{type(error).__name__}: {str(error)[:160]}"
                break  # The context may be lost.
            if not rows[name].get("off", 0.0) < 2.0**-6:
                rows[name]["why"] = "wrong"
            timers[name] = lambda runs, p=compiled: device_time(
                p, arguments, runs, only="attention_"
            )[0]
        times = interleaved(timers, 0.2)
    for name, taken in times.items():
        if isinstance(taken, str):
            rows[name]["why"] = taken
            continue
        ms = float(np.median(taken))
        work = flops(kernel, case) if kernel != "products" else product_flops(name)
        base_ms = np.median(times["base"]) if "base" in times else ms
        rows[name] |= {"ms": round(ms, 4), "ms_kernels": round(ms, 4)}
        rows[name] |= {"tflops": round(work / ms / 1e9, 1)}
        rows[name] |= {"of_base": round(float(base_ms) / ms, 3)}
    for name, row in rows.items():
        common = {"kernel": kernel, "variant": name}
        if kernel != "products":
            common |= dict(zip(("head_dim", "length", "causal"), case))
        write(common | row)


def product_flops(name):
    return 2.0 * 264 * STEPS * int(name.split()[1]) * 64 * 64


class Lock:
    """Of all workers."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.file = open(self.path, "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self.file.close()


def work(folder, index, only):
    """A worker's one job."""
    kernel, case = list(jobs(only))[index]
    table, lock = folder / "ampere.csv", Lock(folder / "lock")

    def write(row):
        row = {name: row.get(name, "") for name in COLUMNS}
        row["why"] = re.sub(r"\s+", " ", str(row["why"]))
        with open(table, "a", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            csv.DictWriter(file, COLUMNS).writerow(row)
        print(" ".join(f"{x}" for x in row.values()), flush=True)

    if kernel == "backward":
        begun = one_pass.Begun(folder / f"begun_{index}")
        run_backward(case, only, lock, write, begun)
    else:
        run_job(kernel, case, only, lock, write)


def measure(folder, seconds, only, workers):
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "ampere.csv"
    if not table.exists():
        table.write_text(",".join(COLUMNS) + "\n")
    end = time.monotonic() + seconds
    waiting = list(range(len(list(jobs(only)))))
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    turn = threading.Lock()

    def serve():
        while True:
            with turn:
                if not waiting or time.monotonic() > end:
                    return
                index = waiting.pop(0)
            command = [sys.executable, __file__, str(folder), "0", "--only", only]
            command += ["--job", str(index)]
            killed = True
            while killed and time.monotonic() < end:
                killed = False
                try:
                    done = subprocess.run(
                        command, env=environment, stderr=subprocess.PIPE, text=True,
                        timeout=max(30.0, end + 30 - time.monotonic()),
                    )  # fmt: skip
                except subprocess.TimeoutExpired:
                    print(f"job {index}: no time", flush=True)
                    continue
                killed = done.returncode == -signal.SIGKILL
                if killed:
                    names = one_pass.Begun(folder / f"begun_{index}").read()[-1:]
                    print(f"job {index}: killed in {names}", flush=True)
                elif done.returncode:
                    print(f"job {index}: {done.stderr[-1500:]}", flush=True)

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"left out: {[list(jobs(only))[i] for i in waiting]}")


def dry_run(only):
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    import jax
    from ampere_variants import products

    from attn_jax.kernels.compiler import compiled

    def report(name, function, arguments):
        try:
            # The least code that the sizes allow: one length says it all.
            kernels = compiled(
                function, *arguments, gpu="a100", machine_code=False
            ).kernels
            found = max(kernels, key=lambda kernel: kernel.spilled_bytes)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
            return
        print(
            f"{name}: {found.registers} registers, {found.spilled_bytes} spilled, "
            f"{found.shared_memory} bytes",
            flush=True,
        )

    for name in names("products", None, only):
        _, rows, *smem = name.split()
        function, _ = products(int(rows), bool(smem), STEPS)
        report(name, function, (jax.ShapeDtypeStruct((64, 64), "bfloat16"),))
    for kernel, case in jobs(only):
        if kernel == "products" or case[1] != 4096:
            continue
        for name in names(kernel, case, only):
            report(f"{kernel} {case} {name}", *program(kernel, case, name))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="OUT_FOLDER")
    parser.add_argument("seconds", nargs="?", type=float, metavar="SECONDS")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run:
        dry_run(options.only)
    elif options.folder is None or options.seconds is None:
        parser.error("OUT_FOLDER and SECONDS, or --dry-run")
    elif options.job is not None:
        work(options.folder, options.job, options.only)
    else:
        measure(options.folder, options.seconds, options.only, options.workers)


if __name__ == "__main__":
    main()
