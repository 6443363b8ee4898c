"""Attention over sequences that are cut between devices, forward and backward."""

from attn_jax.context_parallel.arguments import STRATEGIES, Strategy
from attn_jax.context_parallel.compiling import compiler_options
from attn_jax.context_parallel.layouts import (
    LAYOUTS,
    Layout,
    from_layout,
    order,
    to_layout,
)
from attn_jax.context_parallel.sharded import attention
from attn_jax.context_parallel.simulation import simulate
from attn_jax.context_parallel.whole import dot_product_attention

__all__ = [
    "LAYOUTS",
    "STRATEGIES",
    "Layout",
    "Strategy",
    "attention",
    "compiler_options",
    "dot_product_attention",
    "from_layout",
    "order",
    "simulate",
    "to_layout",
]
