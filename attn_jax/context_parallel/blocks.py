"""Block-level attention: what context parallelism asks of an implementation.

A block takes some queries and some keys that one `Mask` describes. It leaves O and LSE
in FP32 (or FP64) forward, and takes LSE and delta of whole rows backward.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from attn_jax import emulator
from attn_jax.emulator import partial
from attn_jax.emulator.partial import Partial
from attn_jax.formats import carrier_dtype
from attn_jax.mask import Mask
from attn_jax.recipe_schema import Recipe


@runtime_checkable
class Block(Protocol):
    """One way to compute parts of attention; hashable, compiled in.

    `recipe` says what is rounded where between parts (its `ring_*` fields, `lse`,
    `gradient`), and `scale` is that of the logits.
    """

    @property
    def recipe(self) -> Recipe: ...

    @property
    def scale(self) -> float: ...

    def attention(
        self, query: Array, key: Array, value: Array, mask: Mask, out_dtype: Any
    ) -> tuple[Array, Array]:
        """(out, LSE) of all keys at once, differentiable: the plain implementation."""
        ...

    def forward(
        self, query: Array, key: Array, value: Array, mask: Mask
    ) -> tuple[Array, Array]:
        """(O, LSE) of these keys, unrounded; 0 and -inf where they are hidden."""
        ...

    def backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        dout: Array,
        lse: Array,
        excess: Array,
        mask: Mask,
    ) -> Partial:
        """What these keys bring to the gradients; `excess` is delta - dLSE."""
        ...


@dataclasses.dataclass(frozen=True)
class Emulated:
    """A recipe's roundings in plain JAX, on any device."""

    recipe: Recipe
    scale: float

    def attention(self, query, key, value, mask, out_dtype):
        return emulator.attention(
            *(query, key, value),
            recipe=self._alone,
            mask=mask,
            scale=self.scale,
            out_dtype=out_dtype,
        )

    def forward(self, query, key, value, mask):
        return partial.forward(
            query, key, value, recipe=self._alone, scale=self.scale, mask=mask
        )

    def backward(self, query, key, value, dout, lse, excess, mask):
        return partial.backward(
            *(query, key, value, dout, lse, excess),
            recipe=self._alone,
            scale=self.scale,
            mask=mask,
        )

    @property
    def _alone(self) -> Recipe:
        """What the recipe says of one device."""
        return dataclasses.replace(self.recipe, ring_size=1)


def carrier(block: Block) -> jnp.dtype:
    """The type of what goes from part to part."""
    return jnp.dtype(carrier_dtype(block.recipe.carrier))


def no_gradients(
    block: Block,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
) -> Partial:
    """What no keys bring to the gradients."""
    B, T, N, H = query.shape
    K, dtype = key.shape[2], carrier(block)
    return Partial(
        dquery=jnp.zeros(query.shape, dtype),
        dkey=jnp.zeros(key.shape, dtype),
        dvalue=jnp.zeros(value.shape, dtype),
        row_sum=jnp.zeros((B, N, T), dtype),
        key_sum=jnp.zeros((B, T, K, H), dtype),
        key_count=jnp.zeros((B, T), dtype),
    )
