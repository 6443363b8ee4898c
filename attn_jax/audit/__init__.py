"""How far an attention callable is from exact, why, and whether that is a fault."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_jax.audit.run import audit_attention

__all__ = ["audit_attention"]


def __getattr__(name: str) -> Any:
    # Imported on use: kernels and canaries take inputs and units of error from here,
    # and must not draw in the emulator.
    if name == "audit_attention":
        from attn_jax.audit.run import audit_attention

        return audit_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
