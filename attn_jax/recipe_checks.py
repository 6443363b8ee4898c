"""Which recipes, arrays and scales go together: what emulator and bounds refuse."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from attn_jax.formats import BF16, FP16, FP32, FP64
from attn_jax.recipe_schema import Recipe, Step

_NARROW_INPUTS = {np.dtype(jnp.bfloat16): BF16, np.dtype(np.float16): FP16}


def steps_of(recipe: Recipe) -> dict[str, Step]:
    return {
        field.name: step
        for field in dataclasses.fields(recipe)
        if isinstance(step := getattr(recipe, field.name), Step)
    }


def check_is_recipe(recipe: Recipe) -> None:
    if not isinstance(recipe, Recipe):
        raise ValueError(
            "recipe must be a Recipe, such as attn_jax.RECIPES['flash2'], got "
            f"{recipe!r}"
        )


def check_fit(recipe: Recipe, query, key, value, scale: float, soft_cap=None) -> None:
    """Raises ValueError, or NotImplementedError for a carrier; arrays are [B, T, ...].

    What `reference.check_arguments` checks is taken to hold.
    """
    carrier = recipe.carrier
    if carrier not in (FP32, FP64):
        raise NotImplementedError(
            f"recipe {recipe.name!r}: values are carried in FP32 or FP64, not "
            f"{carrier.name}; give the steps that format"
        )
    for name, step in steps_of(recipe).items():
        if (
            step.format.mantissa_bits > carrier.mantissa_bits
            or step.format.exponent_bits > carrier.exponent_bits
        ):
            raise ValueError(
                f"recipe {recipe.name!r}: a {carrier.name} carrier cannot hold "
                f"{name} in {step.format.name}; set carrier=FP64"
            )
    for x in (query, key, value):
        given = _NARROW_INPUTS.get(np.dtype(x.dtype))
        if given is not None and not (
            given.mantissa_bits <= recipe.inputs.mantissa_bits
            and given.exponent_bits <= recipe.inputs.exponent_bits
        ):
            raise ValueError(
                f"recipe {recipe.name!r} takes {recipe.inputs.name} inputs, got "
                f"{given.name}; use recipe.with_inputs({given.name.upper()})"
            )
    for axis, length in (("T", query.shape[1]), ("S", key.shape[1])):
        if length % recipe.ring_size:
            raise ValueError(
                f"recipe {recipe.name!r}: a ring of {recipe.ring_size} needs {axis} to "
                f"be a multiple of it, got {axis}={length}"
            )
    _check_constants(recipe, scale, soft_cap)


def _check_constants(recipe: Recipe, scale: float, soft_cap: float | None) -> None:
    """Numbers that are compiled in must be such of the carrier, and not subnormal."""
    on_logits = recipe.gradient_scale_at == "logits"
    factor = recipe.dlogits_scale if on_logits else 1 / recipe.dlogits_scale
    carrier = recipe.carrier
    given, further = f"scale={scale}", f"dlogits_scale={recipe.dlogits_scale}"
    found = [(given, scale), (f"soft_cap={soft_cap}", soft_cap or 0.0)]
    if recipe.scaled_query is None:
        found.append((f"{given} in units of log2", scale / math.log(2)))
        found.append((f"{given} with {further}", scale * factor))
    for text, x in found:
        if x != 0 and not carrier.min_normal <= abs(x) <= carrier.max_finite:
            raise ValueError(
                f"recipe {recipe.name!r}: {text} lies outside {carrier.min_normal:.2g} "
                f"to {carrier.max_finite:.2g}, which a {carrier.name} carrier holds"
            )
