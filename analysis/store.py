"""Rows of a sweep on disk: `attn_jax.store`, with this program's complaints."""

from attn_jax import store
from train.config import UsageError


class Store(store.Store):
    """Of rows of seeds. Raises UsageError where the other raises StoreError."""

    Error = UsageError
    needed = ("seed",)
