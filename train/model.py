"""Single-stream transformer over text and image tokens (Flax NNX).

Caption tokens and image patches form one sequence that plain transformer blocks
attend over, without a mask: padding is a learned embedding like any other token.
Blocks as in DiT (Peebles and Xie, 2023) with one modulation vector for all blocks
plus a learned table in each (adaLN-single: Chen et al., PixArt-alpha, 2023), and
RMS-normalised queries and keys (Esser et al., 2024) unless `qk_norm` is off.

No key bias: softmax does not see it, so its gradient is rounding noise, which Adam
would turn into steps of full size. No dropout. No gather: tokens are embedded by a
product with one-hot vectors, whose backward pass needs no scatter.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from train.config import ModelConfig
from train.layers import Norms, Stream, gelu, modulated_norm
from train.precision import Policy

AttentionFn = Callable[[Array, Array, Array], Array]


_TIME_FREQUENCIES = 128


def sinusoids(
    positions: Float[Array, " n"] | np.ndarray, width: int
) -> Float[Array, "n width"]:
    """Sine and cosine of `positions * 10000**(-i / (width / 2))`, halves joined."""
    rates = jnp.exp(-np.log(1e4) * jnp.arange(width // 2) / (width // 2))
    angles = jnp.asarray(positions, jnp.float32)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def grid_positions(side: int, width: int) -> Float[Array, "{side}*{side} width"]:
    """Fixed positions of a square of patches: half the width for rows, half columns."""
    rows, columns = np.divmod(np.arange(side * side), side)
    return jnp.concatenate(
        [sinusoids(rows, width // 2), sinusoids(columns, width // 2)], axis=-1
    )


def patchify(
    images: Float[Array, "B R R 3"], patch: int
) -> Float[Array, "B n {patch}*{patch}*3"]:
    """Cuts images into patches, row by row."""
    batch, side = images.shape[:2]
    count = side // patch
    x = images.reshape(batch, count, patch, count, patch, 3)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(
        batch, count * count, patch * patch * 3
    )


def unpatchify(
    patches: Float[Array, "B n {patch}*{patch}*3"], patch: int
) -> Float[Array, "B R R 3"]:
    """Puts patches together again; the inverse of `patchify`."""
    batch, total, _ = patches.shape
    count = round(total**0.5)
    x = patches.reshape(batch, count, count, patch, patch, 3)
    side = count * patch
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, 3)


def _by_rows(
    layer: Callable[[Array], Array], x: Float[Array, "B L d"]
) -> Float[Array, "B L e"]:
    """`layer` of all tokens, as the rows of one matrix.

    On a CPU a product with batch and length apart does not run as one matrix product,
    and the backward pass of a step takes 3 times as long.
    """
    y = layer(x.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], -1)


class Block(nnx.Module):
    """Attention and feed-forward, each modulated by time; the gates start at 0."""

    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.mlp_ratio * config.width

        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=bias,
                dtype=policy.compute,
                param_dtype=policy.params,
                rngs=rngs,
            )

        self.heads = config.heads
        self.compute, self.attention = policy.compute, policy.attention
        self.query = linear(width, width, False)
        self.key = linear(width, width, False)
        self.value = linear(width, width, False)
        self.out = linear(width, width, False)
        head_dim = width // config.heads
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.query_scale = nnx.Param(jnp.ones((head_dim,), policy.params))
            self.key_scale = nnx.Param(jnp.ones((head_dim,), policy.params))
        self.up = linear(width, hidden, True)
        self.down = linear(hidden, width, True)
        self.modulation = nnx.Param(jnp.zeros((6, width), policy.params))

    def __call__(
        self,
        stream: Stream,
        modulation: Float[Array, "B 6*{stream.x.shape[-1]}"],
        attention_fn: AttentionFn,
        norms: Norms,
    ) -> Stream:
        """Adds the block's two updates to the fp32 residual stream."""
        # Numbers in one row: an axis of six makes XLA lay out the gradients, and with
        # them the network, with tokens along memory; norms then take more passes.
        table = self.modulation[...].astype(jnp.float32).reshape(-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            part[:, None] for part in jnp.split(modulation + table, 6, axis=-1)
        )
        x, y = norms.gated_norm(stream, scale1, shift1, self.compute)
        heads = (*x.shape[:2], self.heads, x.shape[-1] // self.heads)
        rows = y.reshape(-1, x.shape[-1])
        # Apart from the query's, whose product then adds the sum of the other two
        # gradients to its own; XLA has a product add one array, but no sum of products.
        others = jax.lax.optimization_barrier(rows)
        key, value = (layer(others).reshape(heads) for layer in (self.key, self.value))
        query = self.query(rows).reshape(heads)
        if self.qk_norm:
            query = norms.rms_norm(query, self.query_scale[...], self.attention)
            key = norms.rms_norm(key, self.key_scale[...], self.attention)
        attended = attention_fn(query, key, value).reshape(x.shape)
        stream = Stream(x, gate1, _by_rows(self.out, attended))
        x, y = norms.gated_norm(stream, scale2, shift2, self.compute)
        y = _by_rows(lambda rows: self.down(gelu(self.up(rows))), y)
        return Stream(x, gate2, y)


class Transformer(nnx.Module):
    """Maps noised images, times and captions to clean images (or velocities)."""

    def __init__(
        self,
        config: ModelConfig,
        policy: Policy,
        *,
        vocab_size: int,
        resolution: int,
        rngs: nnx.Rngs,
        norms: Norms = Norms(),
    ):
        self.config = config
        self.norms = norms
        self.compute = policy.compute
        self.vocab_size = vocab_size
        self.grid = resolution // config.patch
        width = config.width
        size = config.patch * config.patch * 3

        def linear(inputs: int, outputs: int, zero: bool = False) -> nnx.Linear:
            initial = (
                nnx.initializers.zeros if zero else nnx.initializers.lecun_normal()
            )
            return nnx.Linear(
                inputs,
                outputs,
                dtype=policy.compute,
                param_dtype=policy.params,
                kernel_init=initial,
                rngs=rngs,
            )

        normal = nnx.initializers.normal(1.0)
        self.embedding = nnx.Param(
            normal(rngs.params(), (vocab_size, width), policy.params)
        )
        self.patch_in = linear(size, width)
        self.time_in = linear(2 * _TIME_FREQUENCIES, width)
        self.time_out = linear(width, width)
        self.modulation = linear(width, 6 * width, zero=True)
        self.blocks = nnx.List(
            [Block(config, policy, rngs=rngs) for _ in range(config.depth)]
        )
        self.final_modulation = linear(width, 2 * width, zero=True)
        self.patch_out = linear(width, size, zero=True)

    def __call__(
        self,
        images: Float[Array, "B R R 3"],
        t: Float[Array, " B"],
        tokens: Int[Array, "B T"],
        attention_fn: AttentionFn,
    ) -> Float[Array, "B R R 3"]:
        """The network's output for images at times t in [0, 1].

        Args:
          images: noised images.
          t: times; 0 is a clean image, 1 is noise.
          tokens: captions, padded with 0.
          attention_fn: (q, k, v), each [B, L, N, H] fp32 or the compute format, to
            the attended values of the same shape, scaled by 1 / sqrt(H), no mask.
        """
        width = self.config.width
        one_hot = jax.nn.one_hot(tokens, self.vocab_size, dtype=jnp.float32)
        text = _by_rows(lambda x: x @ self.embedding[...].astype(jnp.float32), one_hot)
        text = text + sinusoids(np.arange(tokens.shape[1]), width)
        picture = _by_rows(self.patch_in, patchify(images, self.config.patch))
        picture = picture.astype(jnp.float32) + grid_positions(self.grid, width)
        stream = Stream(jnp.concatenate([text, picture], axis=1))

        # Times times 1000: the range the frequencies of `sinusoids` are made for.
        time = self.time_in(sinusoids(1000.0 * t, 2 * _TIME_FREQUENCIES))
        time = jax.nn.silu(self.time_out(jax.nn.silu(time)))
        modulation = self.modulation(time).astype(jnp.float32)

        def through(block: Block, stream: Stream, modulation: Array) -> Stream:
            return block(stream, modulation, attention_fn, self.norms)

        def alone(block: Block, x: Array, modulation: Array) -> Array:
            return through(block, Stream(x), modulation).summed()

        for block in self.blocks:
            if self.config.remat:
                # The sum: of each block that is kept, and not what it is made of.
                again = jax.checkpoint(functools.partial(alone, block))
                stream = Stream(again(stream.x, modulation))
            else:
                stream = through(block, stream, modulation)
        final = self.final_modulation(time).astype(jnp.float32)[:, None]
        shift, scale = jnp.split(final, 2, axis=-1)
        x = stream.summed()[:, tokens.shape[1] :]
        x = modulated_norm(x, scale, shift, self.compute)
        return unpatchify(_by_rows(self.patch_out, x), self.config.patch)
