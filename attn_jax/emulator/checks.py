"""What the emulator refuses, each in one line that says what would do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.formats import BF16, FP16, FP32, FP64, Rounding
from attn_jax.recipe_schema import Recipe, Step

_NARROW_INPUTS = {np.dtype(jnp.bfloat16): BF16, np.dtype(np.float16): FP16}


def check_recipe(recipe: Recipe, query, key, value, rounding_key=None) -> None:
    """Raises NotImplementedError or ValueError for what the emulator does not run."""
    steps = {
        field.name: step
        for field in dataclasses.fields(recipe)
        if isinstance(step := getattr(recipe, field.name), Step)
    }
    if recipe.carrier not in (FP32, FP64):
        raise NotImplementedError(
            f"recipe {recipe.name!r}: the emulator carries values in FP32 or FP64, not "
            f"{recipe.carrier.name}; give the steps that format"
        )
    for name, step in steps.items():
        if (
            step.format.mantissa_bits > recipe.carrier.mantissa_bits
            or step.format.exponent_bits > recipe.carrier.exponent_bits
        ):
            raise ValueError(
                f"recipe {recipe.name!r}: a {recipe.carrier.name} carrier cannot hold "
                f"{name} in {step.format.name}; set carrier=FP64"
            )
    if recipe.carrier == FP64 and not jax.config.jax_enable_x64:
        raise ValueError(
            f"recipe {recipe.name!r} carries FP64: turn jax_enable_x64 on, or use "
            "'exact_fp32'"
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
    drawn = [n for n, s in steps.items() if s.rounding is Rounding.STOCHASTIC]
    if drawn and rounding_key is None:
        raise ValueError(
            f"recipe {recipe.name!r} rounds {drawn[0]} stochastically: pass "
            "rounding_key=jax.random.key(0) or another key"
        )
    if rounding_key is not None and not _is_key(rounding_key):
        raise ValueError(
            "rounding_key must be one key of jax.random, such as jax.random.key(0), "
            f"got {jnp.asarray(rounding_key).dtype}{jnp.shape(rounding_key)}"
        )
    if rounding_key is not None and not drawn:
        raise ValueError(
            f"recipe {recipe.name!r} rounds nothing stochastically: leave rounding_key "
            "out, or set the rounding of one of its steps to STOCHASTIC"
        )


def _is_key(x) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.ndim == 0
    return x.dtype == np.uint32 and x.ndim == 1
