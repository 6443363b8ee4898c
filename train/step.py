"""One training step, compiled ahead of time for its mesh."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, UInt32

from train.config import Config
from train.diffusion import draw_times, drop_captions, flow_losses, from_pixels
from train.model import AttentionFn
from train.optimizer import make_schedule, update_average
from train.precision import exhausted, select, update_loss_scale
from train.shadow import ShadowedFn, layer_by_layer, make_probes
from train.sharding import BATCH, replicated
from train.state import STEP_STREAM, ModelParts, TrainState, stream

Batch = dict[str, Array]
Metrics = dict[str, Array]


class Examples(NamedTuple):
    """What the loss of a step is taken of: clean images, and all that is drawn."""

    images: Float[Array, "B R R 3"]
    tokens: Int[Array, "B L"]
    times: Float[Array, " B"]
    noise: Float[Array, "B R R 3"]


def draw_examples(
    config: Config,
    batch: Batch,
    step: Int[Array, ""] | int,
    seed: UInt32[Array, ""] | None = None,
) -> Examples:
    """Times, noise and emptied captions of a step: a function of (seed, step) alone.

    `seed` takes the place of the configuration's.
    """
    own = stream(config.seed if seed is None else seed, STEP_STREAM)
    key = jax.random.fold_in(own, step)
    time_key, noise_key, drop_key = jax.random.split(key, 3)
    images = from_pixels(batch["image"])
    count = images.shape[0]
    dropped = jax.random.bernoulli(drop_key, config.caption_dropout, (count,))
    return Examples(
        images,
        drop_captions(batch["tokens"], dropped),
        draw_times(time_key, count, config.time_mean, config.time_std),
        jax.random.normal(noise_key, images.shape),
    )


def example_losses(
    parts: ModelParts, attention_fn: AttentionFn, params: Any, examples: Examples
) -> Float[Array, " B"]:
    """The flow loss of each example; training minimises their mean."""
    model = parts.merge(params)
    return flow_losses(
        lambda x, t, tokens: model(x, t, tokens, attention_fn),
        *examples,
        parts.config.model.prediction,
    )


def make_train_step(
    parts: ModelParts,
    optimizer: optax.GradientTransformation,
    attention_fn: AttentionFn,
    shadowed: ShadowedFn | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The step as a pure function of state and batch, and of a seed where one is given
    in the place of the configuration's.

    With `shadowed` the model calls that instead of `attention_fn`, which changes no
    result, and the metrics have its statistics, "shadow" [layers, 4, statistics].

    The noise of a step is a function of (seed, step) alone, so a run taken up again
    draws what the unbroken one would have drawn, on any mesh. An update with a
    gradient that is not finite is left out: with a dynamic loss scale the scale is
    halved, otherwise `ok` is false and the run ends.
    """
    config, policy = parts.config, parts.policy
    schedule = make_schedule(config)

    def loss_of(params: Any, probes: Any, examples: Examples, scale: Array) -> Array:
        attend = attention_fn
        if shadowed is not None:
            attend = layer_by_layer(shadowed, probes)
        losses = example_losses(parts, attend, params, examples)
        return losses.mean() * scale

    def step(
        state: TrainState, batch: Batch, seed: UInt32[Array, ""] | None = None
    ) -> tuple[TrainState, Metrics]:
        examples = draw_examples(config, batch, state.step, seed)
        scale = state.loss_scale.scale
        probes = None if shadowed is None else make_probes(config)
        loss, (scaled, statistics) = jax.value_and_grad(loss_of, argnums=(0, 1))(
            state.params, probes, examples, scale
        )
        # Unscaled in fp32, before clipping sees the gradient.
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / scale, scaled)
        norm = optax.tree.norm(gradients)
        # One not finite makes the norm so: no other pass, and one kernel less for each
        # tensor. So does a norm above 2^64, whose square overflows.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        gradients = jax.tree.map(
            lambda gradient, leaf: gradient.astype(leaf.dtype), gradients, state.params
        )
        updates, inner = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        average = update_average(
            state.average, params, state.step, config.optimizer.ema
        )
        params, average, inner = select(
            finite,
            (params, average, inner),
            (state.params, state.average, state.optimizer),
        )
        ok, loss_scale = finite, state.loss_scale
        if policy.dynamic:
            ok = finite | ~exhausted(state.loss_scale)
            loss_scale = update_loss_scale(state.loss_scale, finite)
        metrics = {
            "loss": loss / scale,
            "grad_norm": norm,
            "lr": schedule(state.step),
            "loss_scale": scale,
            "applied": finite,
            "ok": ok,
        }
        if statistics is not None:
            metrics["shadow"] = statistics
        return TrainState(params, average, inner, loss_scale, state.step + 1), metrics

    return step


def compile_step(
    step: Callable[..., tuple[TrainState, Metrics]],
    state: TrainState,
    shardings: TrainState,
    batch: Mapping[str, Any],
    mesh: Mesh,
    *seed: UInt32[Array, ""],
    options: Mapping[str, bool | int | str] | None = None,
    donate: bool = True,
) -> Any:
    """Compiles a step for its mesh; unless told not to `donate`, it uses the state up
    that is given to it.

    The result is called like the step, with a seed if there is one here, and shows its
    program with `as_text()`. `options` are the compiler's, for this program alone.
    """
    everywhere = replicated(mesh)
    jitted = jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, BATCH), *[everywhere] * len(seed)),
        out_shardings=(shardings, everywhere),
        donate_argnums=(0,) if donate else (),
    )
    return jitted.lower(state, batch, *seed).compile(
        compiler_options=dict(options or {})
    )
