"""Times ways to cut Ampere's fused backward kernel at head dim 128, on an H200 or A100.

    python prototypes/ampere_backward_h128.py --out FILE.csv [--lengths 1024 4096 16384]
        [--causal both] [--seconds 0.2] [--only NAME ...]
    python prototypes/ampere_backward_h128.py --dry-run a100    (or h200: no GPU needed)
    NPROC=16 PJRT_NPROC=16 python prototypes/ampere_backward_h128.py --interpret

16 384 tokens, 16 heads, BF16. A row for each length, mask and variant (`VARIANTS`,
`ampere_h128_kernel.Cut`), printed and written to FILE.csv; `package` is
`ampere_backward_fused`, which the others are checked against, and are timed in turn
with. CUPTI times, medians: `ms` of all kernels that `backward_fused` takes, zeros and
what ends dQ, too; `ms_kernel` of the kernel itself; `tflops` and `tflops_kernel` those
of its five products; `of_package` by `ms_kernel`. `same_dq`: whether dQ has the
package's bits, `again`: whether a second run has all of the first one's; `off`: RMS of
what a result is off by over its own, the largest.

--dry-run says what ptxas makes of the variants, and bytes of shared memory that are
read and written for a query; --interpret runs them in the kernels' interpreter.
"""

import argparse
import concurrent.futures
import csv
import functools
import itertools
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from ampere_h128_kernel import HEAD_DIM, Cut, plan_of, used  # noqa: E402

TOKENS, HEADS = 16384, 16
VARIANTS: dict[str, Cut | None] = {
    "package": None,
    "v_registers": Cut(v_registers=True, depth=16),
    "v_registers_s64": Cut(v_registers=True, s_strip=64, depth=16),
    "v_registers_apart": Cut(v_registers=True, s_strip=64, depth=16, apart=True),
    "one_stage": Cut("one_stage", s_strip=64, depth=16),
    "one_stage_apart": Cut("one_stage", s_strip=64, strip=64, depth=16, apart=True),
    "exchanged": Cut("exchanged", v_registers=True, depth=16),
    "two_by_two": Cut("two_by_two", s_strip=64, strip=64, depth=16),
}
COLUMNS = (
    *("length", "causal", "variant", "ms", "ms_kernel", "tflops", "tflops_kernel"),
    *("of_package", "same_dq", "again", "off", "why"),
)
# The largest that rounding in another order makes of `off`.
MOST_OFF = 2.0**-7


def function(cut: Cut | None, length: int, is_causal: bool):
    from attn_jax.kernels.ampere_backward_fused import backward_fused

    return functools.partial(
        backward_fused,
        query_count=length,
        key_count=length,
        scale=HEAD_DIM**-0.5,
        is_causal=is_causal,
        plan=plan_of(cut),
    )


def shapes(length: int, tokens: int = TOKENS, heads: int = HEADS) -> tuple:
    """Of what `backward_fused` is given."""
    import jax

    from attn_jax.kernels.hopper_range import Range

    def array(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = tokens // length
    big = array(batch, length, heads, HEAD_DIM, dtype="bfloat16")
    row = array(batch, heads, length)
    columns = array(batch, heads, HEAD_DIM)
    numbers = Range(columns, columns, array(batch, heads, dtype="int32"))
    return (big,) * 4 + (row,) * 3 + (numbers,)


def lowered(cut: Cut | None, length: int, is_causal: bool):
    import jax

    from attn_jax.kernels.architecture import made_for

    with made_for("ampere"), used(cut):
        program = jax.jit(function(cut, length, is_causal))
        return program.lower(*shapes(length))


def forward(length: int, is_causal: bool):
    """The package's forward kernel, compiled: what `backward_fused` is given."""
    import jax
    import jax.numpy as jnp

    from attn_jax.kernels import ampere_forward, tuning
    from attn_jax.kernels.architecture import made_for
    from attn_jax.kernels.hopper_key_numbers import KeyNumbers
    from attn_jax.kernels.hopper_range import range_of

    def run(query, key, value, dout):
        table = tuning.LONG["forward", is_causal]
        out, _, lse = ampere_forward.forward(
            *(query, key, value),
            query_count=length,
            key_count=length,
            scale=HEAD_DIM**-0.5,
            is_causal=is_causal,
            tiling=tuning.tiling(table, "ampere", HEAD_DIM, HEAD_DIM),
            out_dtype=jnp.dtype("bfloat16"),
            residual=False,
        )
        wide = dout.astype("float32")
        delta = jnp.sum(wide * out, axis=-1).swapaxes(1, 2)
        most, large = (jnp.abs(x.astype("float32")).max(axis=1) for x in (key, value))
        factor = jnp.exp2(14.0 - jnp.frexp(most.max(axis=2))[1])

        def columns(x):
            return jnp.broadcast_to(x[..., None], (*x.shape, HEAD_DIM))

        numbers = KeyNumbers(
            centre=key.astype("float32").mean(axis=1),
            key_factor=columns(factor),
            value_norm=columns(jnp.linalg.norm(large, axis=2)),
            unscale=jnp.ones(0),
        )
        norm = jnp.linalg.norm(wide, axis=-1).swapaxes(1, 2)
        zero = jnp.zeros_like(lse)
        return lse, delta, zero, range_of(numbers, norm, zero, key)

    with made_for("ampere"):
        return jax.jit(run).lower(*shapes(length)[:4])


def arrays(length: int) -> list:
    import jax

    big = shapes(length)[0]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(k, big.shape, big.dtype) for k in keys]


def off(found, base) -> float:
    import jax.numpy as jnp

    wide = [[x.astype("float32") for x in pair] for pair in zip(found, base)]
    return max(
        float(jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2))) for a, b in wide
    )


def same(a, b) -> bool:
    import jax.numpy as jnp

    return bool((a.view(jnp.uint16) == b.view(jnp.uint16)).all())


def timed_in_turn(programs: dict, arguments: tuple, seconds: float) -> dict[str, dict]:
    """Columns of each that is right."""
    import jax

    from attn_jax.timing import device_time, interleaved

    rows: dict[str, dict] = {}

    def time_of(name, only, runs):
        return device_time(programs[name], arguments, max(runs, 2), only=only)[0]

    base, timers = None, {}
    for name, program in programs.items():
        found, again = (jax.block_until_ready(program(*arguments)) for _ in "12")
        base = found if base is None else base
        rows[name] = {
            "same_dq": same(found[0], base[0]),
            "again": all(map(same, found, again)),
            "off": off(found, base),
        }
        if rows[name]["off"] < MOST_OFF:
            for column, only in (("ms", ""), ("ms_kernel", "attention_backward")):
                timers[name, column] = functools.partial(time_of, name, only)
        else:
            rows[name]["why"] = "wrong"
    for (name, column), taken in interleaved(timers, seconds).items():
        if isinstance(taken, str):
            rows[name]["why"] = taken
        else:
            rows[name][column] = round(statistics.median(taken), 4)
    return rows


def measure(args) -> None:
    import jax

    began = time.monotonic()
    names = ["package", *(n for n in VARIANTS if n in args.only and n != "package")]
    masks = {"both": (False, True), "full": (False,), "causal": (True,)}[args.causal]
    cases = list(itertools.product(args.lengths, masks))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Traced here, since `used` is for all threads, and compiled there.
        jobs, errors = {}, {}
        for case in cases:
            jobs[case, "forward"] = pool.submit(forward(*case).compile)
            for name in names:
                try:
                    job = lowered(VARIANTS[name], *case)
                    jobs[case, name] = pool.submit(job.compile)
                except Exception as error:
                    errors[case, name] = f"{type(error).__name__}: {error}"[:160]
        print(f"lowered in {time.monotonic() - began:.0f} s", flush=True)
        concurrent.futures.wait(jobs.values())
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for case in cases:
            length, is_causal = case
            qkv = arrays(length)
            rest = jobs[case, "forward"].result()(*qkv)
            programs = {}
            for name in names:
                if (case, name) in errors:
                    continue
                try:
                    programs[name] = jobs[case, name].result()
                except Exception as error:
                    errors[case, name] = f"{type(error).__name__}: {error}"[:160]
            arguments = jax.block_until_ready((*qkv, *rest))
            rows = timed_in_turn(programs, arguments, args.seconds)
            pairs = TOKENS * length * (0.5 if is_causal else 1.0)
            work = 2e-9 * 5 * HEADS * HEAD_DIM * pairs
            for name in names:
                row = rows.get(name, {"why": errors.get((case, name), "")})
                row |= {"length": length, "causal": int(is_causal), "variant": name}
                if {"ms", "ms_kernel"} <= row.keys() and "ms_kernel" in rows["package"]:
                    base = rows["package"]["ms_kernel"]
                    row["of_package"] = round(base / row["ms_kernel"], 3)
                    row["tflops"] = round(work / row["ms"], 1)
                    row["tflops_kernel"] = round(work / row["ms_kernel"], 1)
                table.writerow(row)
                file.flush()
                print(*(f"{k}={row[k]}" for k in COLUMNS if k in row), flush=True)
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


def dry_run(args) -> None:
    """Without a GPU; another process for each kind of GPU."""
    import jax

    from attn_jax.kernels.architecture import made_for
    from attn_jax.kernels.compiler import compiled

    leaves, tree = jax.tree.flatten(shapes(1024, 2048, 4))
    for name in args.only:
        cut = VARIANTS[name]
        read = (cut or Cut(queries=32)).bytes_read()
        written = read.pop("written")
        print(name, f"{sum(read.values()):.0f} bytes read, {written:.0f} written")
        for is_causal in (False, True):
            with made_for("ampere"), used(cut):
                run = function(cut, 1024, is_causal)
                program = compiled(
                    lambda *x, run=run: run(*jax.tree.unflatten(tree, x)),
                    *leaves,
                    gpu=args.dry_run,
                )
            kernel = program.kernels[0]
            loads = sum(x.startswith("LDL") for x in kernel.instructions)
            print(
                f"  {'causal' if is_causal else 'full'}: {kernel.shared_memory} bytes, "
                f"{kernel.registers} registers, {kernel.spilled_bytes} bytes spilled, "
                f"{loads} LDL, {len(kernel.instructions)} instructions, {kernel.order}",
                flush=True,
            )


def interpret(args) -> None:
    """dQ's bits, and how far results are from the package's kernel's."""
    import dataclasses

    import jax
    import numpy as np

    from attn_jax.kernels.architecture import made_for
    from attn_jax.kernels.internals import interpreted
    from tests import test_ampere_fused as test

    shapes = ((1, 150, 200, 2, 1, HEAD_DIM), False), ((1, 136, 136, 2, 2, 128), True)
    for shape, is_causal in shapes:
        base = None
        for name in args.only:
            cut = VARIANTS[name]
            # BLAS adds in another order where depth is another.
            cut = cut and dataclasses.replace(cut, depth=64)
            case = test.Case(shape, is_causal, plan=plan_of(cut))
            program = jax.jit(
                lambda *x, case=case: test.fused.backward_fused(
                    *x, **test._options(case)
                )
            )
            operands = test._operands(case)[0]
            with made_for("ampere"), interpreted(detect_races=True), used(cut):
                found = [np.asarray(x) for x in program(*operands)]
            base = base or found
            far = (f"{off([a], [b]):.1e}" for a, b in zip(found, base))
            equal = found[0].tobytes() == base[0].tobytes()
            print(shape, is_causal, name, f"same dQ: {equal}, off", *far, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("ampere_backward_h128.csv"))
    lengths = [1024, 4096, 16384]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--causal", choices=("both", "full", "causal"), default="both")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--dry-run", choices=("a100", "h200"))
    parser.add_argument("--interpret", action="store_true")
    args = parser.parse_args()
    run = dry_run if args.dry_run else interpret if args.interpret else measure
    run(args)


if __name__ == "__main__":
    main()
