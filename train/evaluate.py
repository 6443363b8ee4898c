"""Held-out loss and scored samples, both from the average of the weights.

Neither depends on the mesh or on when it is asked for: the examples are the first of
the split, times, noise and captions are fixed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt8

from train.config import Config
from train.data.source import Source
from train.data.tokenizer import Tokenizer
from train.diffusion import flow_losses, from_pixels, sample, to_pixels
from train.model import AttentionFn
from train.sharding import batch_shards, put_whole, replicated
from train.state import EVAL_STREAM, SAMPLE_STREAM, ModelParts, stream

TIMES = (np.arange(8) + 0.5) / 8


class Evaluator:
    """Compiles the two programs once and runs them on any weights of the model."""

    def __init__(
        self,
        parts: ModelParts,
        attention_fn: AttentionFn,
        mesh: Mesh,
        tokenizer: Tokenizer,
    ):
        self._config = parts.config
        self._mesh = mesh
        self._tokenizer = tokenizer
        shards = batch_shards(mesh)
        self._loss_rows = -(-parts.config.batch_size // shards) * shards
        self._sample_rows = -(-parts.config.eval.batch_size // shards) * shards
        everywhere = replicated(mesh)
        self._losses = jax.jit(
            _losses_function(parts, attention_fn), out_shardings=everywhere
        )
        self._sample = jax.jit(
            _sample_function(parts, attention_fn), out_shardings=everywhere
        )

    def loss(self, average: Any, source: Source) -> float:
        """Mean flow loss over the first examples of a split, at 8 fixed times.

        Every example and time has noise of its own, the same in every evaluation, so
        two losses differ through the weights alone.
        """
        count = min(self._config.eval.examples, len(source))
        total = 0.0
        for start in range(0, count, self._loss_rows):
            indices = range(start, min(start + self._loss_rows, count))
            examples = [source[index] for index in indices]
            losses = self._losses(
                average,
                self._whole([item["image"] for item in examples], self._loss_rows),
                self._tokens([item["caption"] for item in examples], self._loss_rows),
                jnp.int32(start),
            )
            total += float(np.asarray(losses)[: len(examples)].sum(dtype=np.float64))
        return total / count

    def samples(
        self, average: Any, captions: Sequence[str], seed: int = 0
    ) -> UInt8[np.ndarray, "n R R 3"]:
        """One image for each caption; the noise of image i depends on (seed, i)."""
        images = []
        for start in range(0, len(captions), self._sample_rows):
            part = captions[start : start + self._sample_rows]
            tokens = self._tokens(part, self._sample_rows)
            drawn = self._sample(average, tokens, jnp.int32(seed), jnp.int32(start))
            images.append(np.asarray(drawn)[: len(part)])
        return np.concatenate(images)

    def _tokens(self, captions: Sequence[str], rows: int) -> jax.Array:
        return self._whole([self._tokenizer.encode(text) for text in captions], rows)

    def _whole(self, items: Sequence[np.ndarray], rows: int) -> jax.Array:
        """Stacks the items, repeats the last up to `rows`, spreads them."""
        filled = [*items, *[items[-1]] * (rows - len(items))]
        return put_whole(self._mesh, np.stack(filled))


def _row_noise(key: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard Gaussian rows start, start + 1, ...; a row depends on its number."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(
        start + jnp.arange(shape[0])
    )
    return jax.vmap(lambda one: jax.random.normal(one, shape[1:]))(keys)


def _losses_function(
    parts: ModelParts, attention_fn: AttentionFn
) -> Callable[..., jax.Array]:
    def losses(average: Any, images: Any, tokens: Any, start: Any) -> jax.Array:
        model = parts.merge(average)
        clean = from_pixels(images)

        def at_time(index_and_time: tuple[jax.Array, jax.Array]) -> jax.Array:
            index, time = index_and_time
            key = jax.random.fold_in(stream(parts.config.seed, EVAL_STREAM), index)
            return flow_losses(
                lambda x, t, text: model(x, t, text, attention_fn),
                clean,
                tokens,
                jnp.full((clean.shape[0],), time, jnp.float32),
                _row_noise(key, start, clean.shape),
                parts.config.model.prediction,
            )

        times = jnp.asarray(TIMES, jnp.float32)
        return jax.lax.map(at_time, (jnp.arange(len(times)), times)).mean(0)

    return losses


def _sample_function(
    parts: ModelParts, attention_fn: AttentionFn
) -> Callable[..., jax.Array]:
    config = parts.config

    def draw(average: Any, tokens: Any, seed: Any, start: Any) -> jax.Array:
        model = parts.merge(average)
        key = jax.random.fold_in(stream(config.seed, SAMPLE_STREAM), seed)
        side = config.data.resolution
        noise = _row_noise(key, start, (tokens.shape[0], side, side, 3))
        images = sample(
            lambda x, t, text: model(x, t, text, attention_fn),
            tokens,
            noise,
            steps=config.eval.sampler_steps,
            guidance=config.eval.guidance,
            prediction=config.model.prediction,
        )
        return to_pixels(images)

    return draw


def captions_of(source: Source, count: int) -> list[str]:
    """Captions of the first examples of a split."""
    return [source[index]["caption"] for index in range(min(count, len(source)))]


def satisfied(
    config: Config, images: UInt8[np.ndarray, "n R R 3"], captions: Sequence[str]
) -> list[bool] | None:
    """Whether each image shows its caption; None where the data set has no check.

    Rendered shapes are read back by rules, digits by a classifier.
    """
    if config.data.name == "shapes":
        from train.data.score import score_all

        return [score.all for score in score_all(images, captions)]
    if config.data.name == "digits":
        from train.data.digits import digit_agreement

        return digit_agreement(images, captions)
    return None


def rates(
    config: Config, images: UInt8[np.ndarray, "n R R 3"], captions: Sequence[str]
) -> dict[str, Any]:
    """Shares of images that show what their caption says; empty without a check."""
    if config.data.name == "shapes":
        from train.data.score import score_batch

        scores = score_batch(images, captions)
        interval = [round(bound, 4) for bound in scores["all"].interval]
        shares: dict[str, Any] = {name: rate.rate for name, rate in scores.items()}
        return shares | {"all_95_percent_interval": interval}
    verdicts = satisfied(config, images, captions)
    return {} if verdicts is None else {"all": sum(verdicts) / len(verdicts)}
