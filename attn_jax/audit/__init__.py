"""How far an attention callable is from exact, why, and whether that is a fault."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_jax.audit.inputs import Shape
    from attn_jax.audit.report import Report
    from attn_jax.audit.run import audit_attention
    from attn_jax.audit.target import Adapter

__all__ = ["Adapter", "Report", "Shape", "audit_attention"]
_MODULES = {
    "Adapter": "target",
    "Report": "report",
    "Shape": "inputs",
    "audit_attention": "run",
}


def __getattr__(name: str) -> Any:
    # Imported on use: kernels and canaries take inputs and units of error from here,
    # and must not draw in the emulator.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
