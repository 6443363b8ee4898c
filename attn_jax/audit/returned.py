"""What a target returns, checked and brought into the canonical layout."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attn_jax.audit.raised import WrongResultError

_LSE_TYPES = jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16


def checked(
    out: Any, dtype, shape: tuple[int, ...], layout: Literal["BTNH", "BNTH"]
) -> Float[Array, "B T N D"]:
    """`out`, which comes in a layout, as an array of `shape`.

    Raises WrongResultError for what is no attention of inputs of `dtype`.
    """
    by_layout = {"BTNH": shape, "BNTH": tuple(shape[i] for i in (0, 2, 1, 3))}
    if (found := _shape(out)) != by_layout[layout]:
        hint = ""
        if isinstance(out, tuple | list) and len(out) == 2:
            hint = " (--lse always, if the second is LSE)"
        elif found in by_layout.values():
            (name,) = by_layout.keys() - {layout}
            hint = f" (--layout {name}, if query, key and value are so, too)"
        raise WrongResultError(
            f"it returns {described(out)}, not an array of {by_layout[layout]}{hint}"
        )
    if out.dtype not in (dtype, jnp.float32, jnp.float64):
        raise WrongResultError(f"it returns {out.dtype} for inputs of {dtype}")
    return out.swapaxes(1, 2) if layout == "BNTH" else out


def checked_lse(
    lse: Any,
    shape: tuple[int, ...],
    layout: Literal["BTN", "BNT"],
    base: Literal["e", "2"],
) -> Float[Array, "B N T"]:
    """`lse`, which comes in a layout and to a base, as an array of `shape` to base e.

    Raises WrongResultError for what is no LSE.
    """
    by_layout = {"BNT": shape, "BTN": tuple(shape[i] for i in (0, 2, 1))}
    if (found := _shape(lse)) != by_layout[layout]:
        (name,) = by_layout.keys() - {layout}
        hint = f": --lse-layout {name}" if found == by_layout[name] else ""
        raise WrongResultError(
            f"it returns {described(lse)} for LSE, not an array of "
            f"{by_layout[layout]} ({layout}){hint}"
        )
    if lse.dtype not in _LSE_TYPES:
        raise WrongResultError(f"it returns {lse.dtype} for LSE")
    lse = lse if layout == "BNT" else lse.swapaxes(1, 2)
    return lse * np.log(2.0).astype(lse.dtype) if base == "2" else lse


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if hasattr(x, "shape") else None


def described(x: Any) -> str:
    """What it is, in a few words."""
    if isinstance(x, tuple | list):
        return f"{len(x)} results"
    return (
        f"{x.dtype} of {tuple(x.shape)}"
        if hasattr(x, "shape")
        else repr(type(x).__name__)
    )
