"""Does the error of ring attention become a catastrophe in a deep model?

ring-flash-attention's issue #42 says that errors of Llama 405B, which has 126 layers,
are catastrophic at ring size 4 to 8. Here a narrow decoder of as many layers
(`analysis.decoder`; random weights) computes its loss and gradients, in FP64 but for
its attention, which rounds as libraries do on 1 to 8 devices (`analysis.libraries`),
causal, zigzag. It is compared with the same decoder with exact attention, in FP64.

`inputs` says what Q, K and V are:

    fp32    as they come: what differs is attention's own arithmetic
    bf16    rounded, in the reference, too, as kernels need them. A number beside the
            boundary of a rounding is then rounded the other way by a difference as
            small as any: roundings of two decoders part with depth, even where
            attention has FP32. That is a floor to all errors

dO, out, dQ, dK and dV are BF16 numbers for all but the reference. `rounded` is exact
attention but for that, the least that BF16 kernels can have. Settings:

    plain       no bias: K, V and logits as random weights make them
    hard        K and V have a bias, the logits are four times as large: where delta
                from a rounded O spoils dQ
    cancelling  hard, and the bias of V changes its sign from document to document
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from analysis import decoder, sweep
from analysis.decoder import Attention, Layers, Setting, Shape
from analysis.figures import Panel
from analysis.libraries import (
    LIBRARIES,
    Variant,
    simulated,
    with_inputs_as_they_are,
)
from analysis.record import Row
from analysis.summary import pivot, summarise
from attn_jax.formats import BF16, NumberFormat, carrier_dtype, round_to
from attn_jax.recipe import RECIPES
from attn_jax.recipe_schema import Step
from train.config import UsageError

SUMMARY = "loss and gradients of a deep decoder by attention and number of devices"
SETTINGS = {
    "plain": Setting(),
    "hard": Setting(sharpness=4.0, key_bias=8.0, value_bias=3.0),
    "cancelling": Setting(sharpness=4.0, key_bias=8.0, value_bias=3.0, documents=16),
}
EXACT = Variant(RECIPES["exact_fp64"])
_ROUNDED = dataclasses.replace(
    EXACT.recipe,
    name="rounded",
    output=Step(BF16),
    delta_source="o_f32",
    gradient=Step(BF16),
)
VARIANTS = {"rounded": Variant(_ROUNDED), **LIBRARIES}
# Whose one device each one's devices are. Those of FlashAttention-2 are the same there,
# and `te_ring` has its own.
_KERNELS = {"ring_flash_attn": "flash2", "issue_42": "flash2", "llama3": "flash2"}
_ALONE = ("rounded",)
_LAST = tuple(f"last dW{name}" for name in "qkvo")
_FIRST = tuple(f"first dW{name}" for name in "qkvo")
TENSORS = ("loss", "dx", *_LAST, *_FIRST)
_SHOWN = ("loss", "dx", "last dWq", "last dWv")
# What we take for a catastrophe: a gradient of which nothing is left, or one that the
# cut of the sequence makes ten times worse.
_NOTHING_LEFT, _MANY_TIMES = 1.0, 10.0
_LAYERS = {"toy": (2, 3), "default": (32, 126), "full": (32, 126)}
_SHARDS = {"toy": (1, 2), "default": (1, 2, 4, 8), "full": (1, 2, 4, 8)}
_SIZES = {"toy": (16, 2, 8), "default": (256, 2, 32), "full": (1024, 4, 64)}
_SEEDS = {"toy": 2, "default": 3, "full": 4}
_BY = ("inputs", "layers", "setting", "tensor", "variant", "shards")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One decoder with one attention."""

    inputs: str
    layers: int
    variant: str
    shards: int
    setting: str


class Found(NamedTuple):
    """The loss, dL/dx of the embedded tokens, and dL/dW of attention's weights."""

    loss: np.ndarray
    dx: np.ndarray
    first: Layers
    last: Layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "depth", None, seeds=_SEEDS)
    add = parser.add_argument
    add(
        "--layers",
        nargs="+",
        type=int,
        help="depths of the model (default 32 126; toy 2 3)",
    )
    help = "numbers of devices, the first one 1 (default 1 2 4 8; toy 1 2)"
    add("--shards", nargs="+", type=int, help=help)
    help = "how delicate attention is (default: all)"
    add("--settings", nargs="+", choices=SETTINGS, help=help)
    add("--variants", nargs="+", choices=VARIANTS, help="attentions (default: all)")


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`).

    Raises:
      UsageError: depths or numbers of devices that cannot be.
    """
    preset = options.preset
    length, heads, head_dim = _SIZES[preset]
    depths = sorted(set(options.layers or _LAYERS[preset]))
    shards = tuple(dict.fromkeys(options.shards or _SHARDS[preset]))
    if shards[0] != 1 or min(shards) < 1:
        raise UsageError("--shards begins with 1, which ratios are to")
    if any(length % (2 * W) for W in shards):
        raise UsageError(
            f"--shards: each device needs two runs of the {length} positions"
        )
    if depths[0] < 1:
        raise UsageError("--layers: a decoder has at least one")
    seeds = sweep.seeds(options)
    settings = options.settings or list(SETTINGS)

    def sized(layers: int) -> Shape:
        return Shape(layers, length, heads, head_dim)

    @functools.lru_cache(len(settings))
    def draws(layers: int, setting: str) -> list[decoder.Decoder]:
        shape = sized(layers)
        return [decoder.draw(shape, SETTINGS[setting], seed) for seed in range(seeds)]

    @functools.lru_cache(len(settings))
    def exact(inputs: str, layers: int, setting: str) -> list[Found]:
        program = _program("exact", 1, inputs)
        return [program(draw) for draw in draws(layers, setting)]

    def measure(cell: Cell) -> Iterator[Row]:
        program = _program(cell.variant, cell.shards, cell.inputs)
        of = exact(cell.inputs, cell.layers, cell.setting)
        for seed, draw in enumerate(draws(cell.layers, cell.setting)):
            for tensor, error in errors(program(draw), of[seed]).items():
                yield {"seed": seed, "tensor": tensor, "error": error}

    cells = _cells(depths, shards, settings, options.variants or list(VARIANTS))
    return sweep.run("depth", cells, measure, report, options, command)


def _cells(
    depths: Sequence[int],
    shards: Sequence[int],
    settings: Sequence[str],
    variants: Sequence[str],
) -> list[Cell]:
    """What has one program side by side; rounded inputs at the ends of depth and W."""
    cells = []
    for layers in depths:
        for inputs in ("fp32", "bf16"):
            if inputs == "fp32":
                sizes = list(shards)
            elif layers == max(depths):
                sizes = sorted({1, max(shards)})
            else:
                continue
            for variant in variants:
                kernel = _KERNELS.get(variant, variant)
                for W in sizes:
                    # One device has it already, or more say nothing.
                    known = W == 1 and kernel != variant and kernel in variants
                    if not known and (W == 1 or variant not in _ALONE):
                        cells += [Cell(inputs, layers, variant, W, s) for s in settings]
    return cells


@functools.lru_cache(2)
def _program(name: str, shards: int, inputs: str) -> Callable[[decoder.Decoder], Found]:
    """The decoder's results with one attention, compiled for each depth."""
    variant = EXACT if name == "exact" else VARIANTS[name]
    attend = attention(variant, shards, rounds_inputs=inputs == "bf16")
    compute = jax.jit(value_and_gradients(attend))

    def results(draw: decoder.Decoder) -> Found:
        with jax.enable_x64(True):
            return jax.device_get(compute(*draw))

    return results


def attention(variant: Variant, shards: int, *, rounds_inputs: bool) -> Attention:
    """(q, k, v) -> out in FP64, and gradients in it, rounded as a variant says.

    Q, K and V are rounded to BF16 or used as they come. dO is rounded to the format of
    the output.
    """
    output, carrier = variant.recipe.output.format, variant.recipe.carrier
    if not rounds_inputs:
        variant = with_inputs_as_they_are(variant, carrier)
    dtype = carrier_dtype(carrier)
    # A wide output would have a wide O for delta, too.
    out_dtype = jnp.bfloat16 if output == BF16 else dtype

    def attend(*inputs):
        if rounds_inputs:
            inputs = map(_rounded, inputs)
        inputs = (x.astype(dtype) for x in inputs)
        out, _ = simulated(variant, *inputs, shards=shards, out_dtype=out_dtype)
        return cast(Array, _gradient_rounded(out.astype(jnp.float64), output))

    return attend


def _rounded(x):
    """x rounded to BF16, and its gradient as it comes."""
    plain = lax.stop_gradient(x)
    # Exact: two numbers next to each other.
    return x + (round_to(plain, BF16) - plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gradient_rounded(x, fmt: NumberFormat):
    """x, and its gradient rounded. A cast does so, or not, as the compiler likes."""
    return x


_gradient_rounded.defvjp(
    lambda x, fmt: (x, None), lambda fmt, _, gradient: (round_to(gradient, fmt),)
)


def value_and_gradients(attend: Attention) -> Callable[..., Found]:
    """The loss of a decoder, computed in FP64, and its gradients at both ends.

    To be called under x64, with what `decoder.draw` returns.
    """

    def results(embedded, layers, rest) -> Found:
        arrays = embedded, layers, rest
        embedded, layers, rest = jax.tree.map(
            lambda x: x if x.dtype.kind == "i" else x.astype(jnp.float64), arrays
        )
        loss, (dx, dlayers) = jax.value_and_grad(decoder.loss, argnums=(0, 1))(
            embedded, layers, rest, attend
        )
        first, last = (jax.tree.map(lambda x: x[i], dlayers) for i in (0, -1))
        return Found(loss, dx, first, last)

    return results


def errors(found: Found, exact: Found) -> dict[str, float]:
    """Relative error of the loss, relative L2 errors of gradients."""
    pairs = {"loss": (found.loss, exact.loss), "dx": (found.dx, exact.dx)}
    for names, ours, theirs in (
        (_LAST, found.last, exact.last),
        (_FIRST, found.first, exact.first),
    ):
        pairs |= dict(zip(names, zip(ours, theirs, strict=True), strict=True))
    return {
        name: float(np.linalg.norm(x - of) / np.linalg.norm(of))
        for name, (x, of) in pairs.items()
    }


def report(rows: Sequence[Row]) -> sweep.Report:
    """Errors and their ratios to one device, by depth, setting and devices."""
    found = summarise(_with_kernels(rows), _BY, ["error"], baseline=("shards", 1))
    tables: dict[str, list[Row]] = {}
    panels = []
    for inputs, layers in dict.fromkeys((r["inputs"], r["layers"]) for r in found):
        for setting in dict.fromkeys(row["setting"] for row in found):
            here = _those(found, inputs=inputs, layers=layers, setting=setting)
            title = f"{setting}, {layers} layers"
            if inputs == "fp32":
                panels += [_panel(title, name, here) for name in _SHOWN]
            else:
                title += ", inputs rounded"
            most = max(row["shards"] for row in here)
            tables[f"{title}: error on one device"] = _table(here, 1, "error")
            if most > 1:
                on = f"on {most} devices"
                tables[f"{title}: error {on}"] = _table(here, most, "error")
                tables[f"{title}: error {on} over that on one"] = _table(
                    *(here, most, "error_ratio")
                )
    return sweep.Report(tables, panels, _claims(found), columns=len(_SHOWN))


def _with_kernels(rows: Sequence[Row]) -> list[Row]:
    """The rows, with those of one device under each name that has the same there."""
    measured = {(row["variant"], row["shards"]) for row in rows}
    copies = [
        {**row, "variant": variant}
        for variant, kernel in _KERNELS.items()
        if any(name == variant for name, _ in measured) and (variant, 1) not in measured
        for row in rows
        if (row["variant"], row["shards"]) == (kernel, 1)
    ]
    return [*rows, *copies]


def _table(rows: Sequence[Row], shards: int, column: str) -> list[Row]:
    """A line for each attention; a terminal has no room for the first layer."""
    left_out = set(_FIRST)
    if column == "error_ratio":
        # One number may be right by chance, and then a ratio to it is any size.
        left_out.add("loss")
    shown = [r for r in _those(rows, shards=shards) if r["tensor"] not in left_out]
    known = [row for row in shown if row[column] is not None]
    return pivot(known, ["variant"], "tensor", column)


def _those(rows: Sequence[Row], **values: Any) -> list[Row]:
    return [row for row in rows if values.items() <= row.items()]


def _panel(title: str, tensor: str, rows: Sequence[Row]) -> Panel:
    return Panel(
        f"{title}: {tensor}",
        # Those of one device may come last, and lines follow the rows.
        sorted(_those(rows, tensor=tensor), key=lambda row: row["shards"]),
        *("shards", "error", "variant", "devices W", "relative error"),
    )


def _claims(found: Sequence[Row]) -> list[sweep.Claim]:
    """What issue #42 says, of each attention; inputs as they are."""
    found = _those(found, inputs="fp32")
    depths = sorted({row["layers"] for row in found})
    deep, most = depths[-1], max(row["shards"] for row in found)
    source = "ring-flash-attention, issue #42"
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in found):
        for setting in dict.fromkeys(row["setting"] for row in found):
            here = _those(found, variant=variant, setting=setting)
            cut = [r for r in _those(here, layers=deep) if r["shards"] >= min(4, most)]
            name = f"{variant}, {setting}"
            if cut and most > 1:
                claims.append(_catastrophe(source, name, cut, deep))
            if deep > depths[0]:
                claims.append(_compounding(name, here, depths[0], deep))
    return sorted(claims, key=lambda claim: claim.says)


def _catastrophe(
    source: str, name: str, rows: Sequence[Row], layers: int
) -> sweep.Claim:
    gradients = [row for row in rows if row["tensor"] != "loss"]
    error = max(gradients, key=lambda row: row["error"])
    ratios = [row for row in gradients if row["error_ratio"] is not None]
    grown = max(ratios, key=lambda row: row["error_ratio"], default=None)
    loss = max(row["error"] for row in _those(rows, tensor="loss"))
    least = min(row["shards"] for row in rows)
    text = f"{layers} layers, W from {least}: loss off by up to {loss:.1e}, "
    text += f"{error['tensor']} by {error['error']:.2g}"
    if grown is not None:
        text += f"; {grown['tensor']} {grown['error_ratio']:.2f} times one device's"
    return sweep.Claim(
        source,
        "The error at ring size 4 to 8 is catastrophic (here: a gradient is off by its "
        "own size, or 10 times as much as on one device).",
        name,
        text,
        error["error"] >= _NOTHING_LEFT
        or grown is not None
        and grown["error_ratio"] >= _MANY_TIMES,
    )


def _compounding(name: str, rows: Sequence[Row], few: int, many: int) -> sweep.Claim:
    """By dx, which every layer has gone into; of the rows with the most devices."""
    W = max(row["shards"] for row in rows)
    ends = [
        _those(rows, tensor="dx", layers=layers, shards=W)[0]["error"]
        for layers in (few, many)
    ]
    growth = ends[1] / ends[0] if ends[0] else None
    return sweep.Claim(
        "what a catastrophe of deep models would take",
        "The error compounds with depth (here: that of dx grows by half or more).",
        name,
        f"dx at {few} and {many} layers, W = {W}: {ends[0]:.2e}, {ends[1]:.2e}",
        None if growth is None else growth >= 1.5,
    )
