"""What a training run is, as frozen dataclasses, and their form in a file.

Plain Python: neither JAX nor Flax is imported here, so that the help text and the
checks of the command line answer at once.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

Attention = Literal["pallas", "baseline", "emulated", "reference", "xla", "cudnn"]
ContextParallel = Literal[
    "contiguous",
    "zigzag",
    "striped",
    "all_gather",
    "all_gather+ring",
    "ulysses",
    "ring+ulysses",
]
Width = Literal["fp32", "16-bit"]
PresetName = Literal["tiny", "small", "small-long", "base", "base-long", "large"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure"]
Shadow = Literal["none", "reference", "xla", "emulated"]
AttentionInputs = Literal["compute", "bf16", "fp16", "fp32"]


class UsageError(Exception):
    """A command that cannot run, in one line that says what would work (exit 2)."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which captioned images to train on."""

    name: Literal["shapes", "digits", "folder", "webdataset", "parquet"] = "shapes"
    """Source of the images; the last three read --data.path."""
    path: str | None = None
    """Folder (or pattern of shards) of image and caption files."""
    family: Literal["pos", "rel", "cnt", "all"] = "all"
    """What captions name: place (pos), relation of two shapes (rel), number (cnt)."""
    resolution: int = 64
    """Side of the square images in pixels."""
    seed: int = 0
    """Seed of the images and of their order."""
    workers: int = 0
    """Processes that render or decode images; 0 reads in this process."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Size of the transformer."""

    width: int = 384
    """Width of the residual stream."""
    depth: int = 8
    """Number of blocks."""
    heads: int = 6
    """Attention heads; the head dim is width / heads."""
    mlp_ratio: int = 4
    """Hidden width of the feed-forward layer over the model width."""
    patch: int = 4
    """Side of an image patch in pixels."""
    tokenizer: Literal["word", "byte"] = "byte"
    """word knows the captions of shapes and digits only; byte takes any text."""
    text_length: int = 64
    """Text tokens a caption is padded to."""
    prediction: Literal["x", "v"] = "x"
    """What the network outputs: the clean image or the velocity."""
    qk_norm: bool = True
    """RMS-normalise queries and keys; without it attention logits are unbounded."""
    remat: bool = False
    """Recompute every block in the backward pass: less memory, more time."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or SGD, with warm-up, a constant stretch and a linear decay to zero."""

    rule: Literal["adamw", "sgd"] = "adamw"
    """sgd has momentum beta1 and divides by nothing: beta2 and eps are Adam's. It
    takes another lr."""
    warmup: int = 200
    """Steps of linear warm-up."""
    decay_fraction: float = 0.5
    """Last part of the run over which the learning rate falls to zero."""
    beta1: float = 0.9
    """Decay of Adam's mean of gradients; SGD's momentum."""
    beta2: float = 0.99
    """Decay of Adam's mean of squared gradients."""
    eps: float = 1e-8
    """Added to Adam's root mean square; sets how strongly tiny gradients act."""
    weight_decay: float = 0.01
    """Applied to matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradient."""
    ema: float = 0.999
    """Largest decay of the moving average of the weights."""
    static_loss_scale: float | None = None
    """fp16 only: a fixed loss scale, overflow is an error; default is dynamic."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; their product is the device count."""

    data: int = 0
    """Copies of the model; 0 takes every device the other axes leave."""
    fsdp: int = 1
    """Devices over which weights and optimiser state are spread, batch as well."""
    tensor: int = 1
    """Devices over which heads and hidden units are spread."""
    seq: int = 1
    """Devices over which tokens are spread (see --context-parallel)."""
    ulysses: int | None = None
    """How many of these deal out heads, with ring+ulysses alone; 2 if not given."""


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Start of several processes; Slurm, Open MPI and Kubernetes are detected."""

    enabled: bool = False
    """Start jax.distributed; on by itself under Slurm with several tasks."""
    coordinator: str | None = None
    """host:port of process 0, where no cluster is detected."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out loss during training; captions scored at its end."""

    every: int = 1000
    """Steps between held-out losses and sample grids; 0 for the end only."""
    examples: int = 256
    """Held-out examples in the loss."""
    captions: int = 1000
    """Captions of the val split that are sampled and scored at the end."""
    novel: int = 1000
    """The same for unseen pairs of colour and shape; 0 for none."""
    batch_size: int = 250
    """Images sampled at once."""
    grid: int = 16
    """Images in a sample grid."""
    sampler_steps: int = 25
    """Euler steps from noise to image."""
    guidance: float = 3.0
    """Scale of classifier-free guidance; 1 is none."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved."""

    every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints kept; raise it to compare weights, or capture, over time."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a text-to-image transformer: python -m train --attn=pallas.

    Run the same command again to resume. --config FILE starts from the config.json
    of a run instead of a preset. Draw from a trained run with
    python -m train sample --run-dir DIR --caption "a blue circle in the center".
    """

    attn: Attention = "pallas"
    """Attention. baseline is the materialised softmax (the same as xla)."""
    preset: PresetName = "tiny"
    """Starting values of all other options; tiny trains on a CPU in minutes."""
    recipe: str | None = None
    """Name of the emulated algorithm, with --attn=emulated; kernels if not given."""
    context_parallel: ContextParallel = "contiguous"
    """Attention over --mesh.seq devices: a ring on tokens dealt so, or one of four."""
    partials: Width = "fp32"
    """What each of those devices' parts hands over; 16-bit to see what that costs."""
    wire: Width = "fp32"
    """dK and dV on their way between them; 16-bit: half the bytes, a larger error."""
    precision: Precision = "fp32"
    """Of everything but attention; 16-bit policies but bf16_pure keep fp32 weights."""
    attention_inputs: AttentionInputs = "compute"
    """Format query, key and value are rounded to; compute is that of the policy."""
    shadow: Shadow = "none"
    """Attention to compare that of the run with, in every layer, on the same inputs."""
    shadow_every: int = 100
    """Steps between such comparisons; each takes the time of both attentions."""
    profile: Literal["fast", "exact"] = "fast"
    """exact sets the XLA flags that make two runs on a GPU bit-identical."""
    steps: int = 10_000
    """Training steps."""
    seed: int = 0
    """Seed of the weights and of the noise."""
    batch_size: int = 256
    """Images a step, over all devices."""
    lr: float = 1e-3
    """Largest learning rate."""
    time_mean: float = 0.0
    """Mean of logit(t); larger trains more on noise, where layouts are decided."""
    time_std: float = 1.0
    """Standard deviation of logit(t)."""
    caption_dropout: float = 0.1
    """Share of captions emptied, for classifier-free guidance."""
    init_from: str | None = None
    """Run or checkpoint folder whose weights a new run starts from, at step 0."""
    run_dir: str | None = None
    """Folder of the run; default runs/PRESET-ATTN-seedSEED."""
    log_every: int = 100
    """Steps between log lines."""
    print_config: bool = False
    """Print the resolved configuration as JSON and stop."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Draw images for captions from a trained run and write them as one PNG."""

    run_dir: str
    """Folder of the run."""
    caption: tuple[str, ...]
    """One caption or several."""
    out: str | None = None
    """PNG to write; default sample.png in the folder of the run."""
    seed: int = 0
    """Seed of the starting noise."""
    sampler_steps: int | None = None
    """Euler steps; default as in training."""
    guidance: float | None = None
    """Scale of classifier-free guidance; default as in training."""


# Fields that may differ when a run is taken up again. All others decide the result.
EXTENDABLE = frozenset(
    {
        "steps",
        "log_every",
        "run_dir",
        "print_config",
        "shadow",
        "shadow_every",
        "data.workers",
        "eval.every",
        "checkpoint.every",
        "checkpoint.keep",
        "distributed.enabled",
        "distributed.coordinator",
        "distributed.processes",
        "distributed.process_id",
    }
)


def head_dim(config: Config) -> int:
    """Width of one attention head."""
    return config.model.width // config.model.heads


def ulysses(config: Config) -> int | None:
    """Devices that deal out heads beside a ring; None where there are not both."""
    if config.mesh.seq == 1 or config.context_parallel != "ring+ulysses":
        return None
    return 2 if config.mesh.ulysses is None else config.mesh.ulysses


def image_tokens(config: Config) -> int:
    """Patches in one image."""
    return (config.data.resolution // config.model.patch) ** 2


def run_dir(config: Config) -> Path:
    """Folder of the run, as given or after preset, attention and seed."""
    name = f"{config.preset}-{config.attn}-seed{config.seed}"
    return Path(config.run_dir) if config.run_dir else Path("runs") / name


def attention_format(config: Config) -> str:
    """Format query, key and value are rounded to: bf16, fp16 or fp32."""
    if config.attention_inputs != "compute":
        return config.attention_inputs
    return {"tf32": "fp32", "bf16_pure": "bf16"}.get(config.precision, config.precision)


def to_json(config: Config) -> str:
    """The whole configuration as JSON; `from_dict` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_dict(values: dict[str, Any]) -> Config:
    """The configuration that `to_json` wrote.

    Raises:
      UsageError: a field is unknown or of another program version.
    """

    def build(kind: Any, values: dict[str, Any]) -> Any:
        fields = {field.name: field for field in dataclasses.fields(kind)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise UsageError(f"the configuration has no field {unknown[0]!r}")
        built = {
            name: build(fields[name].type, value) if isinstance(value, dict) else value
            for name, value in values.items()
        }
        return kind(**built)

    return build(Config, values)


def load(path: Path) -> Config:
    """Reads a config.json.

    Raises:
      UsageError: the file cannot be read or is no configuration.
    """
    try:
        return from_dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no {path}: name the folder of a run, as `python -m train` "
            "leaves it (--run-dir)"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot read the configuration {path}: {error}") from error


def flatten(config: Config) -> dict[str, Any]:
    """Every field by its dotted name."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat


def difference(old: Config, new: Config) -> list[str]:
    """Fields that decide the result and differ, as 'name: old -> new'."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in after
        if name not in EXTENDABLE and before[name] != after[name]
    ]
