"""A-priori bounds of the rounding error of attention under a recipe, and a law."""

from attn_jax.bounds.bounds import Bounds, bound, order_bound, two_term_law

__all__ = ["Bounds", "bound", "order_bound", "two_term_law"]
