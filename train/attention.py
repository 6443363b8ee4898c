"""Chooses the attention of a run and wraps it for the mesh.

The model is handed one function of (query, key, value); every arm goes through the
same `shard_map` and the same barriers, so that two runs differ in attention alone.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from attn_jax import RECIPES, context_parallel, dot_product_attention
from attn_jax.api import Implementation
from attn_jax.formats import FP16
from attn_jax.recipe import Recipe
from train.config import (
    Attention,
    Config,
    ContextParallel,
    UsageError,
    Width,
    head_dim,
    image_tokens,
    ulysses,
)
from train.model import AttentionFn
from train.precision import Policy
from train.sharding import seq_in_two

# Stands for no name of `RECIPES`, but for the recipe that the kernels declare for the
# run's shapes.
KERNELS_RECIPE = "kernels"
# Strategy and layout. No token is masked here, so none has to be moved for a layout.
_PARALLEL: dict[ContextParallel, tuple[context_parallel.Strategy, Any]] = {
    "contiguous": ("ring", "contiguous"),
    "zigzag": ("ring", "zigzag"),
    "striped": ("ring", "striped"),
    "all_gather": ("all_gather", "contiguous"),
    "all_gather+ring": ("all_gather+ring", "contiguous"),
    "ulysses": ("ulysses", "contiguous"),
    "ring+ulysses": ("ring+ulysses", "contiguous"),
}
# Patterns of custom-call names by which the compiled program shows its attention.
_MARKS = {"pallas": r"mosaic_gpu_v\d:attention_", "cudnn": "fmha"}
# Mosaic's calls have one target: the kernel's own name is that of an operation's scope.
_CALL = re.compile(
    r'custom_call_target="([^"]+)"(?:(?<=mosaic_gpu_v\d").*?op_name="[^"]*?(\w+)/\w+")?'
)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How attention works on the devices that tokens are spread over.

    Attributes:
      how: the value of `--context-parallel`.
      ulysses: how many of them deal out heads beside a ring; None: not both.
      partials, wire: as `context_parallel.attention` has them.
    """

    how: ContextParallel
    ulysses: int | None
    partials: Width
    wire: Width


@dataclasses.dataclass(frozen=True)
class ResolvedAttention:
    """What `--attn` comes to on this machine.

    Attributes:
      requested: the value of `--attn`.
      implementation: name given to `attn_jax.dot_product_attention`.
      recipe: name of the emulated recipe, or `KERNELS_RECIPE`, if emulated.
      note: the line to say where this is not what was requested, else None.
      parallel: how it works on the devices that tokens are spread over; None: they
        are not.
    """

    requested: Attention
    implementation: Implementation
    recipe: str | None
    note: str | None
    parallel: Parallel | None = None


def has_kernels(device: Any) -> bool:
    """True on the GPUs that the Pallas kernels are made for: A100, H100, H200."""
    if device.platform != "gpu":
        return False
    # Imported on use: it refuses a JAX that the kernels do not know.
    from attn_jax.kernels import architecture

    return architecture.of_device(device) is not None


def resolve_attention(config: Config, device: Any) -> ResolvedAttention:
    """Settles `--attn`, without a device program.

    Only `pallas` ever stands for something else: off its GPUs, the kernels' recipe
    in the emulator, with a note.

    Raises:
      UsageError: the implementation or the recipe does not exist here, or the kernels
        have no such head dim.
    """
    found = _resolved(config, device)
    if config.mesh.seq == 1:
        return found
    parallel = Parallel(
        *(config.context_parallel, ulysses(config), config.partials, config.wire)
    )
    return dataclasses.replace(found, parallel=parallel)


def _resolved(config: Config, device: Any) -> ResolvedAttention:
    name = config.attn
    if name == "cudnn" and device.platform != "gpu":
        raise UsageError(
            f"--attn=cudnn needs an NVIDIA GPU, this is a {device.platform}: use "
            "--attn=xla or --attn=pallas"
        )
    if name == "pallas":
        _check_head_dim(config, device)
        if not has_kernels(device):
            note = (
                f"--attn=pallas: no A100 or Hopper GPU here ({device.device_kind}), "
                "the kernels' algorithm runs in the emulator"
            )
            return ResolvedAttention(name, "emulated", KERNELS_RECIPE, note)
    if name == "emulated":
        recipe = config.recipe or KERNELS_RECIPE
        known = KERNELS_RECIPE, *sorted(RECIPES)
        if recipe not in known:
            raise UsageError(
                f"--recipe {recipe} does not exist; choose from {', '.join(known)}"
            )
        return ResolvedAttention(name, "emulated", recipe, None)
    implementation = "xla" if name == "baseline" else name
    note = None
    if name == "cudnn" and config.profile == "exact":
        note = (
            "--attn=cudnn: XLA finds no deterministic backward pass of cuDNN's for "
            "such shapes, so the step is compiled without: its bits may differ from "
            "run to run"
        )
    return ResolvedAttention(name, implementation, None, note)


def compiler_options(
    resolved: ResolvedAttention, devices: Sequence[Any], *, in_rings: bool
) -> dict[str, bool | int | str]:
    """XLA's options for the training step, beside the flags of the profile.

    Query, key and value of a layer are products with the same array. Made one product,
    as XLA likes to, they have to be cut apart again, and their gradients joined, which
    takes longer than it gains in narrow models.

    Products go to cuBLAS and none to Triton, which is the faster one for hardly any
    here: cuBLAS adds a bias and a product's gradient by itself, each a pass less over
    what it makes.

    Asked for cuDNN's deterministic backward pass, which either flag does, a step of 8
    layers compiles and dies at its first call ("raw_hash_map::at"; jaxlib 0.11.2, an
    H200; one layer of attention alone runs).
    """
    if devices[0].platform != "gpu":
        return {}
    options: dict[str, bool | int | str] = {
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_enable_triton_gemm": False,
    }
    if in_rings:
        options |= context_parallel.compiler_options(devices)
    if resolved.implementation == "cudnn":
        flags = "xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"
        options |= dict.fromkeys(flags, False)
    return options


def _check_head_dim(config: Config, device: Any) -> None:
    """Refuses a head dim that the kernels do not have: those for `device`, or Hopper's
    where the emulator stands for them, so that a run can go on on a GPU."""
    try:
        from attn_jax.kernels import architecture, tuning
    except ImportError:
        return  # A JAX that the kernels do not know; the emulator takes any head dim.
    target = architecture.of_device(device) or "hopper"
    known, given = tuning.HEAD_DIMS[target], head_dim(config)
    if given not in known:
        raise UsageError(
            f"--attn=pallas takes head dims {known} ({target.capitalize()}), not "
            f"{given} (width {config.model.width} / heads {config.model.heads}): "
            "change --model.heads or use --attn=xla"
        )


def make_attention(
    resolved: ResolvedAttention, policy: Policy, recipe: Recipe | None = None
) -> AttentionFn:
    """The library's attention as a function of (query, key, value), [B, L, N, H], in
    the policy's attention format; the output has that format. `recipe` takes the place
    of the one that is named."""
    if recipe is None and resolved.recipe in RECIPES:
        recipe = RECIPES[resolved.recipe]
    if recipe is not None and policy.attention == jnp.float16:
        recipe = recipe.with_inputs(FP16)

    def in_parts(query: Array, key: Array, value: Array) -> Array:
        parallel = resolved.parallel
        assert parallel is not None
        strategy, layout = _PARALLEL[parallel.how]
        out, _ = context_parallel.attention(
            query,
            key,
            value,
            axis_name="seq" if parallel.ulysses is None else ("seq", "ulysses"),
            strategy=strategy,
            layout=layout,
            implementation="pallas"
            if resolved.implementation == "pallas"
            else "emulated",
            recipe=recipe,
            partials=parallel.partials,
            wire=parallel.wire,
        )
        return out

    def attention(query: Array, key: Array, value: Array) -> Array:
        out = dot_product_attention(
            query,
            key,
            value,
            implementation=resolved.implementation,
            recipe=recipe,
        )
        return cast(Array, out)

    return attention if resolved.parallel is None else in_parts


def shard_attention(
    attention: Callable[..., Array],
    mesh: Mesh,
    kind: Any,
    *more: P,
    ulysses: int | None = None,
) -> Callable[..., Array]:
    """Rounds query, key and value to the format `kind` and runs an attention function
    of them on each device's own rows and heads.

    `more` places what it takes beside query, key and value. Where the mesh spreads
    tokens a device has some of them, and the function communicates
    (`ResolvedAttention.parallel`); with `ulysses` it finds these devices as two mesh
    axes, `seq` and `ulysses`, the last of that size.

    A kernel is opaque to XLA's partitioner, which would gather its inputs onto every
    device; inside `shard_map` each device calls it on its part. The barriers keep
    XLA from fusing across attention's boundary, so the program around it is the same
    whatever the implementation. Rounding lies before them, where XLA joins it to what
    made the three: behind them it would read FP32 arrays once more.
    """
    tokens: Any = "seq" if mesh.shape["seq"] > 1 else None
    if ulysses is not None:
        mesh, tokens = seq_in_two(mesh, ulysses), ("seq", "ulysses")
    spec = P(("data", "fsdp"), tokens, "tensor", None)
    mapped = jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(spec, spec, spec, *more),
        out_specs=spec,
        check_vma=False,
    )

    def attention_fn(
        query: Float[Array, "B L N H"],
        key: Float[Array, "B L N H"],
        value: Float[Array, "B L N H"],
        *others: Array,
    ) -> Float[Array, "B L N H"]:
        rounded = tuple(x.astype(kind) for x in (query, key, value))
        query, key, value = jax.lax.optimization_barrier(rounded)
        return jax.lax.optimization_barrier(mapped(query, key, value, *others))

    return attention_fn


def check_attention(
    config: Config, attention: AttentionFn, kind: Any, batch: int = 1
) -> None:
    """Traces the attention on the run's shapes and their format, `batch` examples, so
    that it can refuse them early.

    Raises:
      UsageError: with the reason the library gives.
    """
    length = config.model.text_length + image_tokens(config)
    shape = (batch, length, config.model.heads, head_dim(config))
    one = jax.ShapeDtypeStruct(shape, kind)
    try:
        jax.eval_shape(attention, one, one, one)
    except (ValueError, NotImplementedError, TypeError) as error:
        raise UsageError(f"--attn={config.attn}: {error}") from error


def lowered_kernels(program: str) -> dict[str, int]:
    """Custom calls in a compiled program's text, by name, with their number."""
    calls = (":".join(filter(None, x)) for x in _CALL.findall(program))
    return dict(collections.Counter(calls))


def check_lowered(resolved: ResolvedAttention, calls: dict[str, int]) -> str:
    """Compares the compiled program with what was resolved; returns a line about it.

    Raises:
      RuntimeError: the attention kernel is missing, or there is one not asked for.
    """
    found = {
        name: [call for call in calls if re.search(mark, call)]
        for name, mark in _MARKS.items()
    }
    for name, present in found.items():
        wanted = name == resolved.implementation
        if wanted and not present:
            raise RuntimeError(
                f"--attn={resolved.requested}: the compiled step has no {name} kernel; "
                f"its custom calls are {sorted(calls) or 'none'}"
            )
        if present and not wanted:
            raise RuntimeError(
                f"--attn={resolved.requested}: the compiled step has the {name} kernel "
                f"{present[0]}, which was not asked for"
            )
    lowered = [call for present in found.values() for call in present]
    if lowered:
        return "attention lowered to " + ", ".join(
            f"{call} ({calls[call]} calls)" for call in lowered
        )
    if resolved.recipe:
        whose = f"recipe {resolved.recipe}"
        if resolved.recipe == KERNELS_RECIPE:
            whose = "the kernels' recipe"
        return f"attention lowered to XLA operations, {whose} emulated"
    return f"attention lowered to XLA operations ({resolved.implementation})"
