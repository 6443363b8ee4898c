"""Times Hopper's forward kernel at head dim 128 with blocks of 128 and of 192 keys, and
with the first logits of a tile made while the one before it ends.

    python prototypes/measure_blocks.py OUT_FOLDER [LENGTH ...]

BF16, on an H100 or H200, 16 heads and at most 16 384 tokens, or one longer sequence. A
row for each problem and tiling, printed, and written to OUT_FOLDER/blocks.csv: CUPTI
times, in ms, and TFLOP/s, the median of rounds of 0.3 s in all, taken in turn with
cuDNN's; alone, and where the call is differentiated, which leaves more for the backward
pass; and whether it is what the table has. Of all lengths below, or of those named.
"""

import csv
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

HEADS, HEAD_DIM, TOKENS = 16, 128, 16_384
FULL = 512, 768, 1024, 1152, 1280, 1536, 2048, 4096, 8192, 16_384, 32_768
CAUSAL = 1024, 2048, 4096, 8192, 16_384, 32_768
PROBLEMS = [(n, False) for n in FULL] + [(n, True) for n in CAUSAL]
COLUMNS = "length is_causal differentiated way chosen ms tflops".split()


def batch(length: int) -> int:
    """Sequences, of 16 384 tokens at the most, or one."""
    return max(1, TOKENS // length)


def times(length: int, is_causal: bool, differentiated: bool):
    """(name, milliseconds or why there are none, whether the table has it) of each."""
    import jax

    from attn_jax.kernels import design
    from attn_jax.kernels.attention import attention
    from attn_jax.kernels.tuning import ForwardTiling
    from attn_jax.mask import Mask
    from attn_jax.timing import device_time, interleaved

    mask = Mask(is_causal=is_causal)
    shape = batch(length), length, HEADS, HEAD_DIM
    qkv = (
        *(jax.random.normal(jax.random.key(i), shape, "bfloat16") for i in range(3)),
    )
    table = design.configuration_of("hopper", HEAD_DIM, HEAD_DIM, length, mask)

    def ours(tiling):
        own = table._replace(forward=tiling)
        scale = HEAD_DIM**-0.5
        return lambda *x: attention(*x, scale=scale, mask=mask, tilings=own)[0]

    def cudnn(*x):
        options = {"is_causal": is_causal, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(*x, **options)

    tilings = [
        ForwardTiling(64, 128, 2, 2, q_registers=True),
        ForwardTiling(64, 128, 2, 2, q_registers=True, ahead=True),
        ForwardTiling(64, 128, 2, 3, q_registers=True, out_by_key=True),
        ForwardTiling(64, 192, 2, 2, out_by_key=True),
    ]
    if is_causal:  # It changes nothing there.
        tilings = [x for x in tilings if not x.ahead]
    measures = {}
    for name, attend in {"cudnn": cudnn, **{str(x): ours(x) for x in tilings}}.items():
        run = jax.jit(lambda *x, f=attend: jax.vjp(f, *x)) if differentiated else None
        run = run or jax.jit(attend)
        measures[name] = lambda runs, run=run: device_time(run, qkv, max(runs, 3))[0]
    for name, found in interleaved(measures, 0.3).items():
        ms = found if isinstance(found, str) else statistics.median(found)
        yield name, ms, name == str(table.forward)


def main(folder: Path, *lengths: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "blocks.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for length, is_causal in PROBLEMS:
            if lengths and str(length) not in lengths:
                continue
            tokens = batch(length) * length
            pairs = tokens * length * HEADS / (2 if is_causal else 1)
            for differentiated in (False, True):
                problem = length, is_causal, differentiated
                for name, ms, chosen in times(*problem):
                    speed = "" if isinstance(ms, str) else 4e-9 * pairs * HEAD_DIM / ms
                    row = [*problem, name, chosen, ms, speed]
                    print(*row, flush=True)
                    writer.writerow(row)
                    file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
