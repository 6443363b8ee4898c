"""Times Hopper's forward kernel with blocks of some numbers of keys.

Without a mask also with a tile's first logits made while the one before it ends.

    python prototypes/measure_blocks.py OUT_FOLDER [LENGTH ...] [--head-dim 64] [--full]

BF16, on an H100 or H200, 16 heads and at most 16 384 tokens, or one longer sequence; at
head dim 64 twice the heads. A row for each problem and tiling, printed, and written to
OUT_FOLDER/blocks.csv: CUPTI times, in ms, and TFLOP/s, the median of rounds of 0.3 s in
all, taken in turn with cuDNN's; alone, and where the call is differentiated, which
leaves more for the backward pass; and whether it is what the table has. Of all lengths
below, or of those named; with `--full` without a mask only.
"""

import argparse
import concurrent.futures
import csv
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

WIDTH, TOKENS = 2048, 16_384  # heads * head dim
FULL = 512, 768, 1024, 1152, 1280, 1536, 2048, 4096, 8192, 16_384, 32_768
CAUSAL = 1024, 2048, 4096, 8192, 16_384, 32_768
PROBLEMS = [(n, False) for n in FULL] + [(n, True) for n in CAUSAL]
SHORT = 256, 320, 384, 448, 512, 576, 640, 768, 1024, 1088, 2048
COLUMNS = "head_dim length is_causal differentiated way chosen ms tflops".split()


def batch(length: int) -> int:
    """Sequences, of 16 384 tokens at the most, or one."""
    return max(1, TOKENS // length)


def tilings_of(head_dim: int, is_causal: bool):
    from attn_jax.kernels.tilings import ForwardTiling

    if head_dim == 64:
        tilings = [
            ForwardTiling(64, *way, 4) for way in ((64, 3), (64, 4), (128, 2), (128, 3))
        ]
        ahead = [ForwardTiling(64, *way, 4, ahead=True) for way in ((64, 4), (128, 3))]
        return tilings if is_causal else tilings + ahead
    tilings = [
        ForwardTiling(64, 128, 2, 2, q_registers=True),
        ForwardTiling(64, 128, 2, 3, q_registers=True, out_by_key=True),
        ForwardTiling(64, 192, 2, 2, out_by_key=True),
    ]
    # Under a causal mask it changes nothing.
    ahead = ForwardTiling(64, 128, 2, 2, q_registers=True, ahead=True)
    return tilings if is_causal else [*tilings, ahead]


def times(head_dim: int, length: int, is_causal: bool, differentiated: bool):
    """(name, milliseconds or why there are none, whether the table has it) of each."""
    import jax

    from attn_jax.kernels import design
    from attn_jax.kernels.attention import attention
    from attn_jax.mask import Mask
    from attn_jax.timing import device_time, interleaved

    mask = Mask(is_causal=is_causal)
    shape = batch(length), length, WIDTH // head_dim, head_dim
    qkv = (
        *(jax.random.normal(jax.random.key(i), shape, "bfloat16") for i in range(3)),
    )
    table = design.configuration_of("hopper", head_dim, head_dim, length, mask)

    def ours(tiling):
        own = table._replace(forward=tiling)
        scale = head_dim**-0.5
        return lambda *x: attention(*x, scale=scale, mask=mask, tilings=own)[0]

    def cudnn(*x):
        options = {"is_causal": is_causal, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(*x, **options)

    tilings = tilings_of(head_dim, is_causal)
    ways = {"cudnn": cudnn, **{str(x): ours(x) for x in tilings}}

    def compiled(attend):
        run = jax.jit(lambda *x: jax.vjp(attend, *x)) if differentiated else None
        try:
            return (run or jax.jit(attend)).lower(*qkv).compile()
        except Exception as error:  # One that does not fit says so in its row.
            return error

    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = dict(zip(ways, pool.map(compiled, ways.values()), strict=True))

    def timed(program):
        def time(runs: int) -> float:
            if isinstance(program, Exception):
                raise program
            return device_time(program, qkv, max(runs, 3))[0]

        return time

    found = interleaved({name: timed(x) for name, x in programs.items()}, 0.3)
    for name, of_way in found.items():
        ms = of_way if isinstance(of_way, str) else statistics.median(of_way)
        yield name, ms, name == str(table.forward)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("lengths", type=int, nargs="*")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    problems = PROBLEMS
    if options.head_dim == 64:
        problems = [(n, mask) for mask in (False, True) for n in SHORT]
    if options.full:
        problems = [(n, is_causal) for n, is_causal in problems if not is_causal]
    options.folder.mkdir(parents=True, exist_ok=True)
    with (options.folder / "blocks.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for length, is_causal in problems:
            if options.lengths and length not in options.lengths:
                continue
            tokens = batch(length) * length
            flops = 4 * tokens * length * WIDTH / (2 if is_causal else 1)
            for differentiated in (False, True):
                problem = options.head_dim, length, is_causal, differentiated
                for name, ms, chosen in times(*problem):
                    speed = "" if isinstance(ms, str) else flops / ms / 1e9
                    row = [*problem, name, chosen, ms, speed]
                    print(*row, flush=True)
                    writer.writerow(row)
                    file.flush()


if __name__ == "__main__":
    main()
