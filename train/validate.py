"""Checks of a configuration that need neither a device nor the data."""

import math

from train.config import (
    Config,
    UsageError,
    attention_format,
    flatten,
    image_tokens,
    ulysses,
)

_SIXTEEN_BIT_ATTENTION = ("pallas", "cudnn")
_AT_LEAST_ONE = (
    "steps",
    "batch_size",
    "log_every",
    "shadow_every",
    "data.resolution",
    "model.width",
    "model.depth",
    "model.heads",
    "model.mlp_ratio",
    "model.patch",
    "model.text_length",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.seq",
    "eval.examples",
    "eval.captions",
    "eval.batch_size",
    "eval.grid",
    "eval.sampler_steps",
    "checkpoint.every",
    "checkpoint.keep",
)
_NOT_NEGATIVE = (
    "seed",
    "data.seed",
    "mesh.data",
    "data.workers",
    "eval.every",
    "eval.novel",
    "optimizer.warmup",
)
# The generator of JAX keeps 32 bits of a seed: larger ones would repeat.
_SEED_LIMITS = {"seed": 2**32, "data.seed": 2**63}
_IN_UNIT_INTERVAL = ("caption_dropout", "optimizer.decay_fraction", "optimizer.ema")
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")
_POSITIVE = (
    "lr",
    "time_std",
    "optimizer.eps",
    "optimizer.clip",
    "optimizer.static_loss_scale",
)


def validate(config: Config) -> None:
    """Checks everything that can be checked without a device or a data set.

    Raises:
      UsageError: naming the field at fault and values that would work.
    """
    _validate_numbers(config)
    _validate_processes(config)
    model, mesh = config.model, config.mesh
    if model.width % model.heads:
        raise UsageError(
            f"--model.width {model.width} is no multiple of --model.heads {model.heads}"
        )
    if model.width % 4:
        raise UsageError(f"--model.width {model.width} must be a multiple of 4")
    if config.data.resolution % model.patch:
        raise UsageError(
            f"--data.resolution {config.data.resolution} is no multiple of "
            f"--model.patch {model.patch}"
        )
    needs_path = config.data.name in ("folder", "webdataset", "parquet")
    if needs_path and config.data.path is None:
        raise UsageError(f"--data.name={config.data.name} needs --data.path")
    if not needs_path and config.data.path is not None:
        raise UsageError(
            f"--data.path={config.data.path} needs --data.name=folder, webdataset or "
            f"parquet: --data.name={config.data.name} reads no files"
        )
    if model.tokenizer == "word" and needs_path:
        raise UsageError(
            "--model.tokenizer=word knows the captions of shapes and digits only: "
            f"with --data.name={config.data.name} use --model.tokenizer=byte"
        )
    if config.recipe is not None and config.attn != "emulated":
        raise UsageError("--recipe needs --attn=emulated")
    if config.shadow == {"baseline": "xla"}.get(config.attn, config.attn):
        raise UsageError(
            f"--shadow={config.shadow} would compare --attn={config.attn} with itself: "
            f"use --shadow={'xla' if config.shadow == 'reference' else 'reference'}"
        )
    if config.optimizer.static_loss_scale is not None and config.precision != "fp16":
        raise UsageError("--optimizer.static-loss-scale needs --precision=fp16")
    _validate_between_devices(config)
    if mesh.seq > 1:
        _validate_context_parallel(config)
    if model.heads % mesh.tensor:
        raise UsageError(
            f"--model.heads {model.heads} cannot be spread over --mesh.tensor "
            f"{mesh.tensor}: it must divide the heads"
        )
    check_batch(config.batch_size, max(mesh.data, 1), mesh.fsdp)
    _validate_attention(config)


def _validate_numbers(config: Config) -> None:
    flat = flatten(config)
    for name in (*_AT_LEAST_ONE, *_NOT_NEGATIVE):
        least = int(name in _AT_LEAST_ONE)
        check_number(name, flat[name], flat[name] >= least, f"be at least {least}")
    for name, limit in _SEED_LIMITS.items():
        check_number(name, flat[name], flat[name] < limit, f"be below {limit}")
    for name in _IN_UNIT_INTERVAL:
        check_number(name, flat[name], 0.0 <= flat[name] <= 1.0, "lie in [0, 1]")
    for name in _BELOW_ONE:
        check_number(name, flat[name], 0.0 <= flat[name] < 1.0, "lie in [0, 1)")
    for name in _POSITIVE:
        if flat[name] is not None:
            works = flat[name] > 0 and math.isfinite(flat[name])
            check_number(name, flat[name], works, "be positive and finite")
    decay = config.optimizer.weight_decay
    works = decay >= 0 and math.isfinite(decay)
    check_number("optimizer.weight_decay", decay, works, "be at least 0 and finite")
    for name in ("time_mean", "eval.guidance"):
        check_number(name, flat[name], math.isfinite(flat[name]), "be finite")


def check_number(name: str, value: int | float, works: bool, what: str) -> None:
    """Refuses a number that does not work, by its flag and what it must be.

    Raises:
      UsageError: `works` is false.
    """
    if not works:
        flag = name.replace("_", "-")
        raise UsageError(f"--{flag} is {value}; it must {what}")


def check_batch(size: int, data: int, fsdp: int) -> None:
    """Refuses a batch that these axes of the mesh do not divide.

    Raises:
      UsageError: naming batch and axes.
    """
    if size % (data * fsdp):
        raise UsageError(
            f"--batch-size {size} cannot be spread over data x fsdp = {data} x {fsdp} "
            "devices: it must be a multiple"
        )


def _validate_processes(config: Config) -> None:
    given = config.distributed
    number, count = given.process_id, given.processes
    if number is None and count is None and given.coordinator is None:
        return
    if number is None or count is None or given.coordinator is None:
        raise UsageError(
            "--distributed.coordinator, --distributed.processes and "
            "--distributed.process-id go together: give all three, or none where "
            "the cluster is detected"
        )
    if not given.enabled:
        raise UsageError("--distributed.coordinator needs --distributed.enabled")
    host, _, port = given.coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
            f"--distributed.coordinator={given.coordinator} must be host:port, such as "
            "host0:55527"
        )
    check_number("distributed.processes", count, count >= 1, "be at least 1")
    works = 0 <= number < count
    what = f"lie in [0, {count}), --distributed.processes being {count}"
    check_number("distributed.process_id", number, works, what)


def _validate_between_devices(config: Config) -> None:
    """Options of context parallelism that have nothing to say."""
    devices, how, given = config.mesh.seq, config.context_parallel, config.mesh.ulysses
    if devices == 1 and how != "contiguous":
        raise UsageError(f"--context-parallel={how} needs --mesh.seq 2 or more")
    if given is not None:
        if how != "ring+ulysses":
            raise UsageError(
                f"--mesh.ulysses needs --context-parallel=ring+ulysses, not {how}"
            )
        check_number("mesh.ulysses", given, given >= 1, "be at least 1")
    dealt = given or ulysses(config) or 1
    what = f"divide --mesh.seq {devices}, with --context-parallel=ring+ulysses"
    check_number("mesh.ulysses", dealt, devices % dealt == 0, what)
    parts = 1 if how == "ulysses" else devices // dealt
    for name in ("partials", "wire"):
        if getattr(config, name) == "fp32" or parts > 1:
            continue
        if devices == 1:
            raise UsageError(f"--{name}=16-bit needs --mesh.seq 2 or more")
        raise UsageError(
            f"--{name}=16-bit needs keys that are cut in parts, and --mesh.seq "
            f"{devices} with --context-parallel={how} cuts none: use "
            "--context-parallel=contiguous"
        )


def _validate_context_parallel(config: Config) -> None:
    devices, how = config.mesh.seq, config.context_parallel
    if config.attn not in ("pallas", "emulated"):
        raise UsageError(
            f"--mesh.seq {devices} needs --attn=pallas or --attn=emulated, not "
            f"--attn={config.attn}"
        )
    if config.shadow != "none":
        raise UsageError(f"--shadow={config.shadow} needs --mesh.seq 1")
    tokens = config.model.text_length + image_tokens(config)
    parts = devices * (2 if how == "zigzag" else 1)
    if tokens % parts:
        longer = config.model.text_length + -tokens % parts
        raise UsageError(
            f"{tokens} tokens (--model.text-length and patches) cannot be spread over "
            f"--mesh.seq {devices} with --context-parallel={how}: they must be a "
            f"multiple of {parts}, as with --model.text-length {longer}"
        )


def _validate_attention(config: Config) -> None:
    if config.attn not in _SIXTEEN_BIT_ATTENTION:
        return
    if attention_format(config) == "fp32":
        raise UsageError(
            f"--attn={config.attn} takes 16-bit inputs: add "
            "--attention-inputs=bf16, or use --attn=xla"
        )
