"""Times both designs of the backward pass where one may leave the card idle.

    python prototypes/measure_designs.py OUT_FOLDER

BF16, on an H100 or H200. A row for each shape, mask and design, printed, and written
to OUT_FOLDER/designs.csv: CUPTI times of the pass and of its own kernels, in ms, the
median of five rounds taken in turn, and the share of the card's time that one pass has
tiles for (`ring_order.Ring.share`), by which `attn_jax.kernels.design` chooses.
"""

import csv
import itertools
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

# B, T = S, N, K, H
SHAPES = [
    *((1, 1000, 8, 8, 128), (1, 1000, 16, 16, 64), (2, 2000, 16, 8, 128)),
    *((1, 3000, 16, 16, 128), (4, 1500, 16, 16, 64), (1, 6000, 8, 8, 128)),
    *((2, 5000, 32, 8, 128), (1, 2048, 64, 8, 128), (1, 8192, 32, 8, 128)),
    *((8, 320, 12, 12, 64), (1, 12000, 8, 4, 128), (1, 4096, 16, 16, 64)),
]
DESIGNS = "fused", "two_kernels"
COLUMNS = "B T N K H is_causal design share ms ms_kernels".split()


def share(shape, is_causal: bool) -> float:
    from attn_jax.kernels import tuning
    from attn_jax.kernels.hopper_fused_work import Shapes

    B, T, N, K, H = shape
    shapes = Shapes.of((B, T, N, H), (B, T, K, H))
    plan = tuning.fused(H, T, is_causal=is_causal)
    return shapes.ring(plan, is_causal=is_causal).share(shapes.pairs)


def times(shape, is_causal: bool) -> dict[str, tuple[float, float]]:
    """(ms, ms of our kernels) of each design."""
    import jax

    from attn_jax.kernels.attention import attention
    from attn_jax.mask import Mask
    from attn_jax.timing import device_time

    B, T, N, K, H = shape
    query, dout, key, value = (
        jax.random.normal(jax.random.key(seed), (B, T, heads, H), "bfloat16")
        for seed, heads in enumerate((N, N, K, K))
    )
    pull = jax.jit(lambda pullback, dout: pullback(dout))
    pullbacks = {}
    for design in DESIGNS:

        def attend(*arrays, design=design):
            options = {"mask": Mask(is_causal=is_causal), "backward": design}
            return attention(*arrays, scale=H**-0.5, **options)[0]

        _, pullbacks[design] = jax.vjp(jax.jit(attend), query, key, value)
    rounds: dict[str, list] = {design: [] for design in DESIGNS}
    for _, (design, pullback) in itertools.product(range(5), pullbacks.items()):
        ms, kernels = device_time(pull, (pullback, dout), 3)
        ours = sum(time for name, time in kernels if "attention" in name)
        rounds[design].append((ms, ours))
    return {
        design: tuple(map(statistics.median, zip(*found, strict=True)))
        for design, found in rounds.items()
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "designs.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for shape, is_causal in itertools.product(SHAPES, (False, True)):
            found = times(shape, is_causal)
            for design, measured in found.items():
                part = round(share(shape, is_causal), 3)
                row = [*shape, is_causal, design, part, *measured]
                print(*row, flush=True)
                writer.writerow(row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
