"""Attention under a recipe, step by step and rounding by rounding, in plain JAX."""

from attn_jax.emulator.emulator import attention, rescales

__all__ = ["attention", "rescales"]
