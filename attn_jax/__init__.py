"""Attention for JAX whose rounding error is known: kernels, emulator, reference."""

from attn_jax.api import IMPLEMENTATIONS, dot_product_attention
from attn_jax.audit.shadow import shadow
from attn_jax.mask import Mask
from attn_jax.recipe import RECIPES, Recipe, on_tensor_cores

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "RECIPES",
    "Mask",
    "Recipe",
    "dot_product_attention",
    "on_tensor_cores",
    "shadow",
]
