"""Table names such as `pallas-no-cures`, as changes of our kernels' recipe."""

import dataclasses
from typing import Any

from attn_jax.formats import BF16, FP16
from attn_jax.mask import Mask
from attn_jax.recipe import Recipe, Step

_FUSED = dict(dq_centre="keys")
# P of the forward product, which is FP16 where it is differentiated.
_BF16_WEIGHTS = dict(probability=Step(BF16), probability_scale=1.0)
# Name -> fields of the kernels' own recipe that are others. The first two are the
# designs of the backward pass; in both `dq_dlogits` is the kernels' own.
OPTIONS: dict[str, dict[str, Any]] = {
    "pallas-fused": _FUSED,
    "pallas-two-kernels": dict(dq_centre="mean"),
    "pallas-no-cures": _BF16_WEIGHTS
    | dict(dq_centre="none", dq_dlogits=None, delta_source="o"),
    "pallas-row-centre": dict(dq_centre="row"),
    "pallas-p-dp": dict(delta_source="p_dp"),
    "pallas-bf16-weights": _BF16_WEIGHTS,
    "pallas-lazy-rescale": _BF16_WEIGHTS | dict(rescale_threshold=8.0),
    "pallas-repeated-max": _BF16_WEIGHTS | dict(repeated_max_factor=2.0),
}


def recipe_of(
    name: str,
    *,
    dtype,
    head_dim: int,
    lengths: tuple[int, int],
    pairs: int,
    mask: Mask,
    differentiated: bool,
    group: int = 1,
) -> Recipe | None:
    """What the kernels are asked for under a name: their own recipe for T queries and S
    keys (`lengths`) of `pairs` key heads of batch entries, each with a `group` of query
    heads, `differentiated` or not, but for the option; None for a name without one."""
    if name not in OPTIONS:
        return None
    # Imported on use: the kernels refuse a JAX that they do not know.
    from attn_jax.kernels.attention import declared_recipe

    queries, keys = lengths
    declared = declared_recipe(
        *(dtype, head_dim, keys, mask),
        query_length=queries,
        pairs=pairs,
        group=group,
        differentiated=differentiated,
    )
    recipe = dataclasses.replace(declared, **OPTIONS[name])
    if recipe.inputs == FP16:  # P is FP16 as it is.
        return dataclasses.replace(recipe, probability=Step(FP16))
    return recipe
