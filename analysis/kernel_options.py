"""Our kernels with an option of theirs, by the name of a row in a table."""

import dataclasses
from typing import Any

from attn_jax.formats import FP16
from attn_jax.mask import Mask
from attn_jax.recipe import Recipe, Step

_FUSED = dict(dq_centre="keys")
_FP16_WEIGHTS = dict(probability=Step(FP16), probability_scale=2.0**FP16.max_exponent)
# Name -> fields of the kernels' own recipe that are others. The first two are the
# designs of the backward pass; in both `dq_dlogits` is the kernels' own.
OPTIONS: dict[str, dict[str, Any]] = {
    "pallas-fused": _FUSED,
    "pallas-two-kernels": dict(dq_centre="mean"),
    "pallas-no-cures": dict(dq_centre="none", dq_dlogits=None, delta_source="o"),
    "pallas-row-centre": dict(dq_centre="row"),
    "pallas-p-dp": dict(delta_source="p_dp"),
    "pallas-fp16-weights": _FP16_WEIGHTS,
    "pallas-fused-fp16-weights": _FUSED | _FP16_WEIGHTS,
    "pallas-lazy-rescale": dict(rescale_threshold=8.0),
    "pallas-repeated-max": dict(repeated_max_factor=2.0),
}


def recipe_of(
    name: str,
    *,
    dtype,
    head_dim: int,
    lengths: tuple[int, int],
    pairs: int,
    mask: Mask,
) -> Recipe | None:
    """What the kernels are asked for under a name: their own recipe for T queries and S
    keys (`lengths`) of `pairs` heads of batch entries, but for the option; None for a
    name that has none."""
    if name not in OPTIONS:
        return None
    # Imported on use: the kernels refuse a JAX that they do not know.
    from attn_jax.kernels.attention import declared_recipe

    queries, keys = lengths
    declared = declared_recipe(
        dtype, head_dim, keys, mask, query_length=queries, pairs=pairs
    )
    return dataclasses.replace(declared, **OPTIONS[name])
