"""What `jax.shard_map(check_vma=True)` asks of a function with its own VJP."""

from typing import Any

import jax


def varying_alike(*operands: Any) -> tuple[Any, ...]:
    """Marks arrays as varying over the manual mesh axes over which any of them varies.

    Inside `jax.shard_map` with `check_vma=True` the rules of a `jax.custom_vjp` see the
    result, so that the cotangent of an array which was the same on all devices is
    summed over them by the transpose of this function. Elsewhere it does nothing.
    Operands are pytrees; None stays None.
    """
    leaves, structure = jax.tree.flatten(operands)
    varying = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    union = frozenset().union(*varying)
    return structure.unflatten(
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying")
        for x, axes in zip(leaves, varying, strict=True)
    )
