"""What Hopper's kernels for dQ and for dK and dV both know of a call."""

import dataclasses

import jax.numpy as jnp

from attn_jax.kernels.tiles import LOG2_E
from attn_jax.kernels.tilings import Tiling
from attn_jax.kernels.tuning import PLENTY_OF_REGISTERS
from attn_jax.kernels.visibility import Band


@dataclasses.dataclass(frozen=True)
class BackwardForm:
    """A call as it is known when it is compiled; with `wide` what a kernel gives is
    FP32."""

    query_count: int
    head_dim: int
    value_dim: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    has_bias: bool
    is_causal: bool
    band: Band
    tiling: Tiling
    wide: bool

    @property
    def unit(self) -> float:
        """What logits are yet to be multiplied by to be exponents of 2."""
        plain = self.soft_cap is None and not self.has_bias
        return self.scale * LOG2_E if plain else 1.0

    @property
    def saves_registers(self) -> bool:
        return (self.head_dim, self.value_dim) not in PLENTY_OF_REGISTERS
