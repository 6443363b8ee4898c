"""Bounds of attention's rounding error under a recipe, known before it runs."""

from attn_jax.bounds.bounds import Bounds, bound, order_bound, two_term_law

__all__ = ["Bounds", "bound", "order_bound", "two_term_law"]
