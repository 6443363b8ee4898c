"""Which number format each part of a training step uses, and loss scaling for fp16."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from train.config import Config, attention_format

FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}

# Doubling interval and start follow Micikevicius et al., "Mixed Precision Training"
# (2018), section 3.2; the floor is where halving further cannot help any more.
_START_SCALE = 2.0**15
_LARGEST_SCALE = 2.0**24
_SMALLEST_SCALE = 1.0
_DOUBLE_AFTER = 2000


@dataclasses.dataclass(frozen=True)
class Policy:
    """Formats of one training step.

    Attributes:
      params: the weights and Adam's moments (the moving average is always fp32).
      compute: inputs and outputs of matrix products outside attention; the residual
        stream, normalisations, the loss and the softmax are always fp32.
      attention: query, key and value as handed to the attention function.
      matmul: JAX's precision name for products of fp32 arrays. Both "default" and
        "high" mean TF32 on an NVIDIA GPU, so true fp32 has to be asked for.
      loss_scale: the first loss scale, or None for no scaling.
      dynamic: the loss scale follows overflows.
    """

    params: Any
    compute: Any
    attention: Any
    matmul: str
    loss_scale: float | None = None
    dynamic: bool = False


def make_policy(config: Config) -> Policy:
    """The policy that `config.precision` and `config.attention_inputs` name."""
    half = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "bf16_pure": jnp.bfloat16}
    static = config.optimizer.static_loss_scale
    scaled = config.precision == "fp16"
    return Policy(
        params=jnp.bfloat16 if config.precision == "bf16_pure" else jnp.float32,
        compute=half.get(config.precision, jnp.float32),
        attention=FORMATS[attention_format(config)],
        matmul="tensorfloat32" if config.precision == "tf32" else "highest",
        loss_scale=(static or _START_SCALE) if scaled else None,
        dynamic=scaled and static is None,
    )


class LossScale(NamedTuple):
    """Factor the loss is multiplied by before the backward pass."""

    scale: Float[Array, ""]
    clean_steps: Int[Array, ""]


def start_loss_scale(policy: Policy) -> LossScale:
    """The loss scale of step 0; 1 where the policy scales nothing."""
    return LossScale(jnp.float32(policy.loss_scale or 1.0), jnp.int32(0))


def update_loss_scale(state: LossScale, finite: Bool[Array, ""]) -> LossScale:
    """Halves the scale after an overflow, doubles it after 2000 clean steps."""
    clean = jnp.where(finite, state.clean_steps + 1, 0)
    double = clean >= _DOUBLE_AFTER
    factor = jnp.where(finite, jnp.where(double, 2.0, 1.0), 0.5)
    scale = jnp.clip(state.scale * factor, _SMALLEST_SCALE, _LARGEST_SCALE)
    return LossScale(scale, jnp.where(double, 0, clean))


def exhausted(state: LossScale) -> Bool[Array, ""]:
    """The scale is as small as it gets: a further overflow is a divergence."""
    return state.scale <= _SMALLEST_SCALE


def select(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` where the condition holds, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
