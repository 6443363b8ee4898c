"""Q, K, V and dO of a training run, as its attention layers saw them.

A run is taken up at a step: weights from its checkpoint (the raw ones, not their
average), images, captions, times and noise of that step as training drew them. One
forward and backward pass of the training loss gives, for some layers and examples, the
query, key and value handed to the attention function (after QK-norm, rounded to its
format) and the cotangent of its output. Examples do not see each other, so a few of
the batch are enough; the loss keeps the mean over the whole batch.

Step 0 is the freshly initialised model. Its dO is zero: the gates start closed.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from analysis.capture_file import (
    CAPTURE,
    Capture,
    Captured,
    captured,
    label,
    read,
    save,
)
from analysis.record import Row, check_writable, environment, show, write, written
from attn_jax.audit.inputs import Inputs
from train.assemble import Assembly, assemble, open_split
from train.checkpoint import load_state, saved_steps
from train.config import (
    Config,
    UsageError,
    attention_format,
    head_dim,
    image_tokens,
)
from train.config import load as load_config
from train.data.loader import batch_at
from train.model import AttentionFn
from train.sharding import put_whole
from train.state import TrainState
from train.step import Examples, draw_examples, example_losses

SUMMARY = "Q, K, V and dO of the attention layers of a training run"
DEFAULT_LAYERS = "first,middle,last"
DEFAULT_EXAMPLES = 2
_LARGEST_FILE = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add(
        "--run",
        type=Path,
        required=True,
        help="run folder of python -m train, which keeps the newest two checkpoints: "
        "give the training --checkpoint.every 2500 --checkpoint.keep 100 to keep all",
    )
    add(
        "--steps",
        default="all",
        help="all, or some such as 0,2500,last; 0 is the model before training, all "
        "is every checkpoint kept (the default)",
    )
    add(
        "--layers",
        default=DEFAULT_LAYERS,
        help=f"all, or some such as 0,2,last (default {DEFAULT_LAYERS})",
    )
    add(
        "--examples",
        type=int,
        default=DEFAULT_EXAMPLES,
        help=f"of the batch of each step (default {DEFAULT_EXAMPLES})",
    )
    add("--out", type=Path, help=f"file to write; default RUN/{CAPTURE}")
    add(
        "--max-megabytes",
        type=float,
        default=_LARGEST_FILE,
        help=f"refuse to write a larger file (default {_LARGEST_FILE:g} MiB)",
    )


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Writes the captures, and beside them a table of their sizes.

    Raises:
      UsageError: the run, a step or a layer does not exist, the file would be too
        large or cannot be written; raised before anything is computed.
    """
    config = load_config(options.run / "config.json")
    out = options.run / CAPTURE if options.out is None else options.out
    if out.suffix != ".npz":
        raise UsageError(f"--out {out} must end in .npz")
    steps, layers = wanted(options.run, config, options.steps, options.layers)
    _check_size(config, steps, layers, options.examples, options.max_megabytes)
    _check_examples(config, options.examples)
    check_writable(out)
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder")
    captures = capture(options.run, steps, layers, options.examples)
    with written(out):
        save(captures, config, out)
    rows = [_row(one) for one in captures]
    show(rows, f"Attention inputs of {options.run}")
    files = write(rows, environment(command), out.with_suffix(""))
    return {
        "rows": len(rows),
        "files": [str(path) for path in files],
        "capture": str(out),
        "megabytes": round(out.stat().st_size / 2**20, 2),
    }


def load(path: Path) -> Captured:
    """What a file that `save` wrote holds, or what a run folder will give.

    Of a run folder, every checkpoint kept, its first, middle and last layer and two
    examples are taken. They are captured when the arrays are first asked for.

    Raises:
      UsageError: the path is neither.
    """
    if path.is_dir():
        return _to_capture(path)
    return captured({one.label: one.inputs for one in read(path)})


def _to_capture(root: Path) -> Captured:
    config = load_config(root / "config.json")
    steps, layers = wanted(root, config, "all", DEFAULT_LAYERS)
    _check_examples(config, DEFAULT_EXAMPLES)

    @cache
    def arrays() -> Mapping[str, Inputs]:
        captures = capture(root, steps, layers, DEFAULT_EXAMPLES)
        return {one.label: one.inputs for one in captures}

    return Captured(
        tuple(label(step, layer) for step in steps for layer in layers),
        DEFAULT_EXAMPLES * config.model.heads,
        config.model.text_length + image_tokens(config),
        head_dim(config),
        arrays,
    )


def capture(
    root: Path, steps: Sequence[int], layers: Sequence[int], examples: int
) -> list[Capture]:
    """Captures of a run folder, step by step, on the first device.

    The attention is that of the run (--attn=pallas off its GPU: its recipe in the
    emulator). The pass runs without recomputation of blocks, whatever the run did.

    Raises:
      UsageError: a checkpoint is damaged or the data cannot be read.
    """
    config = load_config(root / "config.json")
    _check_examples(config, examples)
    # One device, like drawing samples; recomputation would hide the values of a
    # layer from the function around it.
    config = dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, data=1, fsdp=1, tensor=1),
        model=dataclasses.replace(config.model, remat=False),
    )
    assembly = assemble(config, devices=jax.devices()[:1])
    if assembly.attention.note:
        print(assembly.attention.note, file=sys.stderr)
    source = open_split(config, "train")
    record = jax.jit(partial(_record, assembly, tuple(layers), examples))
    captures = []
    with jax.default_matmul_precision(assembly.policy.matmul):
        for step in steps:
            batch = batch_at(
                source,
                assembly.tokenizer,
                batch_size=config.batch_size,
                seed=config.data.seed,
                step=step,
            )
            state = _state(assembly, root, step)
            placed = {
                name: put_whole(assembly.mesh, np.asarray(rows))
                for name, rows in batch.items()
            }
            loss, seen = record(state.params, state.loss_scale.scale, placed, step)
            for layer, arrays in zip(layers, jax.device_get(seen), strict=True):
                captures.append(Capture(step, layer, float(loss), Inputs(*arrays)))
    return captures


def _state(assembly: Assembly, root: Path, step: int) -> TrainState:
    if step:
        path = saved_steps(root / "checkpoints")[step]
        return load_state(path, assembly.abstract_state())
    if assembly.config.init_from is not None:
        raise UsageError(
            f"step 0 of {root} has the weights of {assembly.config.init_from}: capture "
            "from that run"
        )
    return assembly.fresh_state()


def _record(
    assembly: Assembly,
    layers: tuple[int, ...],
    count: int,
    params: Any,
    scale: Array,
    batch: dict[str, Array],
    step: Array,
) -> tuple[Array, list[tuple[Array, Array, Array, Array]]]:
    """Mean loss of the first examples, and (Q, K, V, dO) of each of the layers."""
    config = assembly.config
    drawn = draw_examples(config, batch, step)
    some = Examples(*(x[:count] for x in drawn))
    kind = assembly.policy.attention
    length = config.model.text_length + image_tokens(config)
    shape = (count, length, config.model.heads, head_dim(config))

    def loss(zeros: dict[int, Array]) -> tuple[Array, tuple[Array, dict[int, Any]]]:
        seen: dict[int, Any] = {}
        attention = _observed(assembly.attention_fn, kind, zeros, seen)
        losses = example_losses(assembly.parts, attention, params, some)
        # The step takes the mean over its whole batch.
        return losses.sum() / config.batch_size * scale, (losses.mean(), seen)

    zeros = {layer: jnp.zeros(shape, kind) for layer in layers}
    cotangents, (mean, seen) = jax.grad(loss, has_aux=True)(zeros)
    return mean, [(*seen[layer], cotangents[layer]) for layer in layers]


def _observed(
    attention_fn: AttentionFn, kind: Any, zeros: dict[int, Array], seen: dict[int, Any]
) -> AttentionFn:
    """The attention function, which also files what it is given, layer by layer.

    The layers in `zeros` have these added to their output: the gradient with respect
    to them is the cotangent of the output.
    """
    calls = iter(range(sys.maxsize))

    def attention(query: Array, key: Array, value: Array) -> Array:
        layer = next(calls)
        # Filed and used are the same numbers, not two results of one expression.
        query, key, value = jax.lax.optimization_barrier((query, key, value))
        out = attention_fn(query, key, value)
        if layer not in zeros:
            return out
        seen[layer] = tuple(x.astype(kind) for x in (query, key, value))
        return out + zeros[layer]

    return attention


def wanted(
    root: Path, config: Config, steps: str, layers: str
) -> tuple[list[int], list[int]]:
    """The steps and layers that `--steps` and `--layers` ask for of a run folder.

    Raises:
      UsageError: one of them does not exist.
    """
    saved = sorted(saved_steps(root / "checkpoints"))
    depth = list(range(config.model.depth))
    return (
        choose("--steps", steps, saved, {0, *saved}),
        choose("--layers", layers, depth, set(depth)),
    )


def choose(option: str, text: str, all_of: list[int], allowed: set[int]) -> list[int]:
    """Numbers and the words all, first, middle and last, in order, each once.

    Raises:
      UsageError: `text` names something that is not in `allowed`.
    """
    named = {"all": all_of}
    if all_of:
        named["first"], named["last"] = all_of[:1], all_of[-1:]
        named["middle"] = [all_of[len(all_of) // 2]]
    chosen: set[int] = set()
    for word in text.split(","):
        numbers = named.get(word) or ([int(word)] if word.isdecimal() else [])
        if not numbers or not allowed.issuperset(numbers):
            there = ", ".join(map(str, sorted(allowed)))
            raise UsageError(
                f"{option} {text}: {word!r} is not among {there} (or all, first, "
                "middle, last of those of the run)"
            )
        chosen.update(numbers)
    return sorted(chosen)


def _check_examples(config: Config, examples: int) -> None:
    if not 1 <= examples <= config.batch_size:
        raise UsageError(
            f"--examples {examples}: the run has batches of 1 to {config.batch_size}"
        )


def _check_size(
    config: Config,
    steps: Sequence[int],
    layers: Sequence[int],
    examples: int,
    limit: float,
) -> None:
    length = config.model.text_length + image_tokens(config)
    width = 4 if attention_format(config) == "fp32" else 2
    each = len(Inputs._fields) * length * config.model.width * width / 2**20
    size = each * len(steps) * len(layers) * examples
    if size > limit:
        raise UsageError(
            f"{len(steps)} steps x {len(layers)} layers x {examples} examples would be "
            f"{size:.3g} MiB, more than --max-megabytes {limit:g}: choose "
            f"{max(int(limit / each), 1)} of these, with --steps, --layers and "
            "--examples"
        )


def _row(one: Capture) -> Row:
    """Root mean squares, and how much of K and V is a mean over the keys."""
    wide = [np.asarray(x).astype(np.float64) for x in one.inputs]
    sizes = dict(zip(("q", "k", "v", "do"), map(_rms, wide), strict=True))
    means = {
        f"mean of {name} / {name}": _rms(x.mean(1)) / _rms(x)
        for name, x in (("k", wide[1]), ("v", wide[2]))
    }
    return {"step": one.step, "layer": one.layer, "loss": one.loss} | sizes | means


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
