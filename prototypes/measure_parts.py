"""Times the one-pass backward kernel with a key head's query heads in 1, 2, ... parts.

    python prototypes/measure_parts.py OUT_FOLDER

BF16, on an H100 or H200. A row for each problem and way, printed, and written to
OUT_FOLDER/parts.csv: CUPTI times of the whole backward pass, in ms, the median of
rounds of 0.4 s in all, taken in turn with cuDNN's and two kernels', and whether it is
what `Shapes.in_parts` chooses.
"""

import csv
import dataclasses
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

# B, T = S, N, K, H, causal
PROBLEMS = [
    *((1, n, 64, 8, 128, True) for n in (2048, 4096, 8192, 16384)),
    *((2, 1024, 32, 8, 128, True), (8, 2048, 32, 8, 128, True)),
    *((4, 8192, 32, 8, 128, True), (1, 32768, 32, 8, 128, True)),
    *((2, 1024, 32, 8, 64, True), (1, 8192, 64, 8, 64, True)),
    *((1, 4096, 16, 1, 64, True), (1, 2048, 16, 1, 128, False)),
    (1, 8192, 64, 8, 128, False),
]
COLUMNS = "B T N K H is_causal way chosen ms".split()


def times(problem) -> dict[str, float | str]:
    """Milliseconds of each way, or why there are none."""
    import jax

    from attn_jax.kernels import design
    from attn_jax.kernels.attention import attention
    from attn_jax.mask import Mask
    from attn_jax.timing import device_time, interleaved

    B, T, N, K, H, is_causal = problem
    mask = Mask(is_causal=is_causal)
    query, dout, key, value = (
        jax.random.normal(jax.random.key(seed), (B, T, heads, H), "bfloat16")
        for seed, heads in enumerate((N, N, K, K))
    )
    tilings = design.configuration_of("hopper", H, H, T, mask)
    plan = tilings.backward_fused
    assert plan is not None

    def ours(backward, parts=None):
        own = tilings._replace(backward_fused=dataclasses.replace(plan, parts=parts))
        options = {"mask": mask, "backward": backward, "tilings": own}
        return lambda *arrays: attention(*arrays, scale=H**-0.5, **options)[0]

    def cudnn(*arrays):
        options = {"is_causal": is_causal, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(*arrays, **options)

    parts = [n for n in (1, 2, 4, 8, 16) if (N // K) % n == 0]
    ways = {"cudnn": cudnn, "two_kernels": ours("two_kernels")}
    ways |= {f"parts {n}": ours("fused", n) for n in parts}
    measures = {}
    for name, attend in ways.items():
        _, pullback = jax.vjp(jax.jit(attend), query, key, value)
        pull = jax.jit(lambda pullback, dout: pullback(dout))
        measures[name] = lambda runs, pull=pull, pullback=pullback: device_time(
            pull, (pullback, dout), max(runs, 3)
        )[0]
    found = interleaved(measures, 0.4)
    return {
        name: times if isinstance(times, str) else statistics.median(times)
        for name, times in found.items()
    }


def chosen(problem) -> str:
    from attn_jax.kernels import tuning
    from attn_jax.kernels.attention import backward_of
    from attn_jax.kernels.hopper_fused_work import Shapes
    from attn_jax.mask import Mask

    B, T, N, K, H, is_causal = problem
    query, key = (B, T, N, H), (B, T, K, H)
    if backward_of(query, key, "hopper", Mask(is_causal)) == "two_kernels":
        return "two_kernels"
    plan = tuning.fused(H, T, is_causal=is_causal)
    return f"parts {Shapes.of(query, key).in_parts(plan, is_causal=is_causal).parts}"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "parts.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for problem in PROBLEMS:
            for way, ms in times(problem).items():
                row = [*problem, way, way == chosen(problem), ms]
                print(*row, flush=True)
                writer.writerow(row)
                file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
