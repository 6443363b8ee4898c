"""Arms of a paired training: what each does otherwise than the reference.

The reference is the preset with `--attn=baseline`. Unless an arm says otherwise, all
train on the same batches, from the same first weights, with the same noise, and with
barriers around attention (`train.attention.shard_attention`), so that the program
around it is the same.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from attn_jax import RECIPES
from attn_jax.formats import FP32
from attn_jax.recipe import RING_FLASH_ATTN, Recipe, Step
from train.config import Config, UsageError
from train.validate import validate

REFERENCE = "reference"
_EMULATED = "emulated:"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A training beside the reference.

    Attributes:
      name: in tables and figures.
      says: what it does otherwise.
      changes: values of fields of `Config` by their dotted names.
      weights: added to the seed of the first weights; the noise of the steps stays.
      data: added to the seed of the data and of their order.
      nudged: one weight is one unit in the last place larger at first, of the format
        that the network computes in.
      rewritten: attention differentiates itself (`jax.custom_vjp`), by the same
        operations: another program, the same arithmetic.
      kernels: one of `kernel_options.OPTIONS` for our kernels, None for none.
      recipe: what the emulator runs, None for what `changes` say.
      devices: of the mesh, along its data axis.
    """

    name: str
    says: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: int = 0
    data: int = 0
    nudged: bool = False
    rewritten: bool = False
    kernels: str | None = None
    recipe: Recipe | None = None
    devices: int = 1


def _ring(size: int, wide: bool) -> Arm:
    recipe = dataclasses.replace(RING_FLASH_ATTN, ring_size=size)
    if wide:
        recipe = dataclasses.replace(
            recipe, ring_partial=Step(FP32), ring_gradient_partial=Step(FP32)
        )
    bits = 32 if wide else 16
    return Arm(
        f"ring-{size}-{bits}",
        f"ring attention of {size} devices, emulated, partial results of {bits} bits",
        {"attn": "emulated"},
        recipe=recipe,
    )


def _precision(name: str, says: str, **changes: Any) -> Arm:
    fields = {"attention_inputs": "compute", **changes}
    return Arm(name, says, {"precision": name, **fields})


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, "materialised softmax, the preset as it is"),
        Arm("re-run", "the reference again"),
        Arm("ulp", "one weight larger by a unit in the last place", nudged=True),
        Arm("graph", "the reference's arithmetic, another program", rewritten=True),
        Arm("pallas", "our kernels", {"attn": "pallas"}),
        *(
            Arm(name, f"our kernels, {says}", {"attn": "pallas"}, kernels=name)
            for name, says in (
                ("pallas-no-cures", "without what keeps dQ exact"),
                ("pallas-repeated-max", "maxima that occur twice subtracted shifted"),
            )
        ),
        Arm("cudnn", "cuDNN's fused attention", {"attn": "cudnn"}),
        *(_ring(size, wide) for size in (2, 4, 8) for wide in (False, True)),
        Arm("order", "other data, in another order", data=1),
        Arm("init", "other first weights", weights=1),
        _precision("fp32", "everything in FP32"),
        _precision("tf32", "matrix products of TF32"),
        _precision("bf16", "everything but weights in BF16"),
        _precision("fp16", "everything but weights in FP16, dynamic loss scale"),
        dataclasses.replace(
            _precision("fp16", "FP16, a loss scale of 2^10"),
            name="fp16-static",
            changes={
                "precision": "fp16",
                "attention_inputs": "compute",
                "optimizer.static_loss_scale": 2.0**10,
            },
        ),
        _precision("bf16_pure", "weights in BF16, too"),
        Arm("mesh-2", "on a mesh of two devices", devices=2),
        Arm("mesh-4", "on a mesh of four devices", devices=4),
    )
}
# What shows whether attention matters: with the bands it is to be held against.
MAIN = ("re-run", "ulp", "pallas", "fp32", "init")


def find(name: str) -> Arm:
    """The arm of a name, one of `ARMS` or emulated:RECIPE, or of several with + between
    them, for what they say together: bf16+pallas.

    Raises:
      UsageError: there is none, or two say different things of the same.
    """
    found, *others = map(_find, name.split("+"))
    for other in others:
        found = _together(found, other)
    return found


def _find(name: str) -> Arm:
    if name in ARMS:
        return ARMS[name]
    recipe = name.removeprefix(_EMULATED)
    if name.startswith(_EMULATED) and recipe in RECIPES:
        changes = {"attn": "emulated", "recipe": recipe}
        return Arm(name, f"the emulator under recipe {recipe}", changes)
    raise UsageError(
        f"--arms: no arm {name!r}; there are {', '.join(ARMS)} and emulated:RECIPE, "
        f"RECIPE one of {', '.join(RECIPES)}, and several with + between them"
    )


def _together(one: Arm, other: Arm) -> Arm:
    """What is left at its default says nothing."""
    changes = {**one.changes, **other.changes}
    for name in one.changes.keys() & other.changes.keys():
        if one.changes[name] != other.changes[name]:
            raise UsageError(_twice(one, other, name))
    said: dict[str, Any] = {}
    for field in dataclasses.fields(Arm):
        if field.name in ("name", "says", "changes"):
            continue
        values = [getattr(arm, field.name) for arm in (one, other)]
        values = [x for x in values if x != field.default]
        if len(values) > 1:
            raise UsageError(_twice(one, other, field.name))
        said |= {field.name: x for x in values}
    # Said in two ways: each would be passed over for the other.
    if "rewritten" in said and "attn" in changes:
        raise UsageError(_twice(one, other, "attn"))
    if "recipe" in said and "recipe" in changes:
        raise UsageError(_twice(one, other, "recipe"))
    name, says = f"{one.name}+{other.name}", f"{one.says}; {other.says}"
    return Arm(name, says, changes, **said)


def _twice(one: Arm, other: Arm, name: str) -> str:
    return (
        f"--arms: {one.name} and {other.name} both set {name}; put together with + "
        "what sets different things"
    )


def configured(reference: Config, arm: Arm) -> Config:
    """What the arm trains.

    Raises:
      UsageError: the two do not go together.
    """
    config = reference
    for name, value in arm.changes.items():
        config = _replaced(config, name.split("."), value)
    data = dataclasses.replace(config.data, seed=config.data.seed + arm.data)
    mesh = dataclasses.replace(config.mesh, data=arm.devices)
    config = dataclasses.replace(config, data=data, mesh=mesh)
    validate(config)
    return config


def _replaced(config: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if rest:
        value = _replaced(getattr(config, name), rest, value)
    return dataclasses.replace(config, **{name: value})
