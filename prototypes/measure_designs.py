"""Times both designs of the backward pass, Hopper's where one may leave the card idle.

    python prototypes/measure_designs.py OUT_FOLDER [--architecture ampere]

BF16, on an H100 or H200. A row for each shape, mask and design, printed, and written
to OUT_FOLDER/designs.csv: CUPTI times of the pass and of its own kernels, in ms, the
median of five rounds taken in turn, and, on Hopper, the share of the card's time that
one pass has tiles for (`ring_order.Ring.share`). `attn_jax.kernels.design` chooses by
that on Hopper, and by the number of keys on Ampere.
"""

import argparse
import csv
import itertools
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

# B, T = S, N, K, H
SHAPES = {
    "hopper": [
        *((1, 1000, 8, 8, 128), (1, 1000, 16, 16, 64), (2, 2000, 16, 8, 128)),
        *((1, 3000, 16, 16, 128), (4, 1500, 16, 16, 64), (1, 6000, 8, 8, 128)),
        *((2, 5000, 32, 8, 128), (1, 2048, 64, 8, 128), (1, 8192, 32, 8, 128)),
        *((8, 320, 12, 12, 64), (1, 12000, 8, 4, 128), (1, 4096, 16, 16, 64)),
    ],
    "ampere": [
        *((64, 256, 32, 32, 64), (128, 320, 6, 6, 64), (16, 1024, 32, 32, 64)),
        *((16, 1024, 16, 16, 128), (8, 2048, 16, 16, 128), (4, 4096, 16, 16, 128)),
        *((1, 16384, 32, 32, 64), (1, 16384, 16, 16, 128), (4, 4096, 32, 32, 64)),
        *((1, 1024, 8, 8, 64), (1, 4096, 8, 2, 128), (1, 2048, 64, 8, 128)),
    ],
}
DESIGNS = "fused", "two_kernels"
COLUMNS = "B T N K H is_causal design share ms ms_kernels".split()


def share(shape, is_causal: bool) -> float:
    from attn_jax.kernels import tuning
    from attn_jax.kernels.hopper_fused_work import Shapes

    B, T, N, K, H = shape
    shapes = Shapes.of((B, T, N, H), (B, T, K, H))
    plan = tuning.fused(H, T, is_causal=is_causal)
    return shapes.ring(plan, is_causal=is_causal).share()


def program(architecture: str, shape, is_causal: bool, design: str):
    """(compiled backward pass, its arguments)"""
    import jax

    from attn_jax.kernels.architecture import made_for
    from attn_jax.kernels.attention import attention
    from attn_jax.mask import Mask

    B, T, N, K, H = shape
    query, dout, key, value = (
        jax.random.normal(jax.random.key(seed), (B, T, heads, H), "bfloat16")
        for seed, heads in enumerate((N, N, K, K))
    )

    def attend(*arrays):
        options = {"mask": Mask(is_causal=is_causal), "backward": design}
        return attention(*arrays, scale=H**-0.5, **options)[0]

    with made_for(architecture):
        _, pullback = jax.vjp(jax.jit(attend), query, key, value)
        pull = jax.jit(lambda pullback, dout: pullback(dout))
        return pull.lower(pullback, dout).compile(), (pullback, dout)


def times(programs: dict) -> dict[str, tuple[float, float]]:
    """(ms, ms of our kernels) of each design."""
    from attn_jax.timing import device_time

    rounds: dict[str, list] = {design: [] for design in programs}
    for _, (design, (pull, given)) in itertools.product(range(5), programs.items()):
        ms, kernels = device_time(pull, given, 3)
        ours = sum(time for name, time in kernels if "attention" in name)
        rounds[design].append((ms, ours))
    return {
        design: tuple(map(statistics.median, zip(*found, strict=True)))
        for design, found in rounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=SHAPES, default="hopper")
    options = parser.parse_args()
    cases = list(itertools.product(SHAPES[options.architecture], (False, True)))
    options.folder.mkdir(parents=True, exist_ok=True)
    with (
        (options.folder / "designs.csv").open("w", newline="") as file,
        ThreadPoolExecutor() as pool,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        waits = {
            (case, design): pool.submit(program, options.architecture, *case, design)
            for case, design in itertools.product(cases, DESIGNS)
        }
        # Nothing else is to run on the card while it is timed.
        made = {of: wait.result() for of, wait in waits.items()}
        for shape, is_causal in cases:
            found = times({d: made[(shape, is_causal), d] for d in DESIGNS})
            part = None
            if options.architecture == "hopper":
                part = round(share(shape, is_causal), 3)
            for design, measured in found.items():
                row = [*shape, is_causal, design, part, *measured]
                print(*row, flush=True)
                writer.writerow(row)


if __name__ == "__main__":
    main()
