"""AdamW or SGD with clipped gradients, the learning rate, the average of weights."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from train.config import Config


def make_schedule(config: Config) -> optax.Schedule:
    """Linear warm-up to `lr`, a constant stretch, linear decay to zero at `steps`."""
    warmup = min(config.optimizer.warmup, config.steps - 1)
    decay = round(config.optimizer.decay_fraction * config.steps)
    decay_start = max(warmup, config.steps - decay)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.lr, warmup),
            optax.constant_schedule(config.lr),
            optax.linear_schedule(config.lr, 0.0, max(config.steps - decay_start, 1)),
        ],
        [warmup, decay_start],
    )


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW, or SGD with momentum; weight decay, apart
    from the gradient (Loshchilov & Hutter, arXiv 1711.05101), on matrices only."""
    settings, schedule = config.optimizer, make_schedule(config)
    decay: dict[str, Any] = {
        "weight_decay": settings.weight_decay,
        "mask": lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
    }
    if settings.rule == "sgd":
        rule = optax.chain(
            optax.trace(settings.beta1),
            optax.add_decayed_weights(**decay),
            optax.scale_by_learning_rate(schedule),
        )
    else:
        rule = optax.adamw(
            schedule, b1=settings.beta1, b2=settings.beta2, eps=settings.eps, **decay
        )
    return optax.chain(optax.clip_by_global_norm(settings.clip), rule)


def update_average(
    average: Any, params: Any, step: Int[Array, ""], largest_decay: float
) -> Any:
    """Exponential moving average in fp32, decay min(largest, (1 + s) / (10 + s))."""
    decay = jnp.minimum(largest_decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(
        lambda mean, new: mean + (1.0 - decay) * (new.astype(jnp.float32) - mean),
        average,
        params,
    )
