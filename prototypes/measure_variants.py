"""Times patches of this folder, both passes or one, beside the package and cuDNN.

On an H100 or H200, in turn, in one process:

    python prototypes/measure_variants.py OUT_FOLDER SECONDS VARIANT ...
        [--cases CASE ...] [--architecture ampere] [--forward]

Of Ampere's kernels the one-pass backward one is taken, whatever the length, and cuDNN
is left out. With `--forward` it is the forward pass that nobody differentiates. A
VARIANT is the names of patches with + between them, `main` for none. `main` goes first
in any case: a row says how many of out, dQ, dK and dV have its bits.
A row for each case, variant and kernel, medians of rounds in ms by CUPTI, printed, and
written to OUT_FOLDER/variants.csv; `all` is the sum of a program's kernels.
"""

import argparse
import concurrent.futures
import csv
import importlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
# B, T, N = K, H, is_causal; or a number: a local window of so many keys to the left
CASES = {
    "h128-1k-causal": (16, 1024, 16, 128, True),
    "h128-1k-full": (16, 1024, 16, 128, False),
    "h64-1k-causal": (16, 1024, 32, 64, True),
    "h64-1k-full": (16, 1024, 32, 64, False),
    "small": (128, 320, 6, 64, False),
    "base": (32, 1088, 12, 64, False),
    "base-long": (8, 4160, 12, 64, False),
    "h128-4k-causal": (4, 4096, 16, 128, True),
    "h128-4k-full": (4, 4096, 16, 128, False),
    "h64-4k-full": (4, 4096, 32, 64, False),
    "h64-16k-full": (1, 16384, 32, 64, False),
    "h128-16k-causal": (1, 16384, 16, 128, True),
    "h128-16k-full": (1, 16384, 16, 128, False),
    "h64-4k-causal": (4, 4096, 32, 64, True),
    "h64-16k-causal": (1, 16384, 32, 64, True),
    "h128-1152-causal": (16, 1152, 16, 128, True),
    "h64-1088-causal": (16, 1088, 32, 64, True),
    "h128-4k-window": (4, 4096, 16, 128, 1023),
    "h128-16k-window": (1, 16384, 16, 128, 1023),
    "h64-4k-window": (4, 4096, 32, 64, 1023),
}
FIELDS = "case variant kernel ms same_bits".split()


def patched(variant: str, folder: Path) -> Path:
    """A copy of the package with the patches; of these only what concerns it."""
    folder = folder / variant
    shutil.copytree(HERE.parent / "attn_jax", folder / "attn_jax")
    for name in [] if variant == "main" else variant.split("+"):
        files = (HERE / f"{name}.patch").read_text().split("diff --git ")
        patch = "".join(f"diff --git {x}" for x in files if x.startswith("a/attn_jax"))
        command = ["patch", "--silent", "--strip=1"]
        subprocess.run(command, cwd=folder, input=patch, text=True, check=True)
    return folder


def package_of(folder: Path):
    """`attention`, `Mask` and `made_for` of a copy, imported beside others."""
    for name in [name for name in sys.modules if name.split(".")[0] == "attn_jax"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    names = "kernels.attention", "mask", "kernels.architecture"
    attention, mask, architecture = (
        importlib.import_module(f"attn_jax.{name}") for name in names
    )
    sys.path.pop(0)
    assert Path(attention.__file__ or "").is_relative_to(folder)
    return attention.attention, mask.Mask, architecture.made_for


def cudnn(mask: bool | int):
    import jax

    # cuDNN's window is a causal one.
    window = None if isinstance(mask, bool) else (mask, 0)
    return lambda *qkv: jax.nn.dot_product_attention(
        *qkv,
        is_causal=bool(mask),
        local_window_size=window,
        implementation="cudnn",
    )


def lowered(attend, shape, forward: bool):
    """The forward pass alone, or forward and backward pass in one program."""
    import jax

    array = jax.ShapeDtypeStruct(tuple(shape), "bfloat16")
    if forward:
        return jax.jit(attend).lower(*[array] * 3)

    def both(query, key, value, dout):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(dout)

    return jax.jit(both).lower(*[array] * 4)


def programs(variants, cases, architecture: str, forward: bool, folder: Path):
    """(case, variant, lowered program)"""
    options = {"backward": "fused"} if architecture == "ampere" else {}
    for variant in variants:
        attention, make_mask, made_for = package_of(patched(variant, folder))
        for case in cases:
            *shape, mask = CASES[case]
            rule = {"is_causal": mask} if isinstance(mask, bool) else {}
            mask, scale = make_mask(**rule or {"window": (mask, 0)}), shape[-1] ** -0.5

            def ours(*qkv, attention=attention, mask=mask, scale=scale):
                return attention(*qkv, scale=scale, mask=mask, **options)[0]

            with made_for(architecture):
                program = lowered(ours, shape, forward)
            yield case, variant, program
    for case in cases if architecture == "hopper" else ():
        *shape, mask = CASES[case]
        yield case, "cudnn", lowered(cudnn(mask), shape, forward)


def measured(case: str, made: dict, forward: bool, seconds: float):
    """Rows of a case: all kernels together, and each."""
    import jax

    from attn_jax.timing import device_time, interleaved

    shape = CASES[case][:-1]
    keys = jax.random.split(jax.random.key(0), 4)
    keys = keys[:3] if forward else keys
    given = tuple(jax.random.normal(x, shape, "bfloat16") for x in keys)
    bits = {
        variant: [x.tobytes() for x in jax.tree.leaves(jax.device_get(program(*given)))]
        for variant, program in made.items()
    }
    kernels = {variant: defaultdict(list) for variant in made}

    def timed(variant, program):
        def time(runs: int) -> float:
            ms, found = device_time(program, given, max(runs, 3))
            for name, of_kernel in found:
                kernels[variant][name].append(of_kernel)
            return ms

        return time

    times = interleaved({n: timed(n, program) for n, program in made.items()}, seconds)
    for variant, found in times.items():
        assert not isinstance(found, str), f"{variant}: {found}"
        pairs = zip(bits["main"], bits[variant], strict=True)
        same = sum(one == other for one, other in pairs)
        yield case, variant, "all", round(statistics.median(found), 5), same
        for name, of_kernel in kernels[variant].items():
            yield case, variant, name, round(statistics.median(of_kernel), 5), None


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    architectures = ("hopper", "ampere")
    parser.add_argument("--architecture", choices=architectures, default="hopper")
    parser.add_argument("--forward", action="store_true")
    options = parser.parse_args()
    variants = list(dict.fromkeys(["main", *options.variants]))
    with tempfile.TemporaryDirectory() as folder:
        of_ours = variants, options.cases, options.architecture, options.forward
        found = list(programs(*of_ours, Path(folder)))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = list(pool.map(lambda x: x[2].compile(), found))
        options.folder.mkdir(parents=True, exist_ok=True)
        with (options.folder / "variants.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(FIELDS)
            for case in options.cases:
                pairs = zip(found, compiled, strict=True)
                made = {name: x for (of, name, _), x in pairs if of == case}
                for row in measured(case, made, options.forward, options.seconds):
                    writer.writerow(row)
                    if row[2] == "all":
                        print(*row, flush=True)


if __name__ == "__main__":
    main()
