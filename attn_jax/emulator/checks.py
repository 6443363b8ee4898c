"""What the emulator refuses, each in one line that says what would do."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.formats import FP64, Rounding
from attn_jax.recipe_checks import check_fit, steps_of
from attn_jax.recipe_schema import Recipe


def check_recipe(
    recipe: Recipe,
    query,
    key,
    value,
    scale: float,
    soft_cap: float | None = None,
    rounding_key=None,
) -> None:
    """Raises NotImplementedError or ValueError for what the emulator does not run."""
    check_fit(recipe, query, key, value, scale, soft_cap)
    if recipe.carrier == FP64 and not jax.config.jax_enable_x64:
        raise ValueError(
            f"recipe {recipe.name!r} carries FP64: turn jax_enable_x64 on, or use "
            "'exact_fp32'"
        )
    drawn = [
        name
        for name, step in steps_of(recipe).items()
        if step.rounding is Rounding.STOCHASTIC
    ]
    if drawn and rounding_key is None:
        raise ValueError(
            f"recipe {recipe.name!r} rounds {drawn[0]} stochastically: pass "
            "rounding_key=jax.random.key(0) or another key"
        )
    if rounding_key is not None and not _is_key(rounding_key):
        shape = f"{np.shape(rounding_key)}" if hasattr(rounding_key, "shape") else ""
        raise ValueError(
            "rounding_key must be one key of jax.random, such as jax.random.key(0), "
            f"got {getattr(rounding_key, 'dtype', repr(rounding_key))}{shape}"
        )
    if rounding_key is not None and not drawn:
        raise ValueError(
            f"recipe {recipe.name!r} rounds nothing stochastically: leave rounding_key "
            "out, or set the rounding of one of its steps to STOCHASTIC"
        )


def _is_key(x) -> bool:
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.ndim == 0
    # How many numbers make an old-style key is the default generator's business.
    return x.dtype == np.uint32 and x.shape == jax.eval_shape(_old_style_key).shape


def _old_style_key():
    return jax.random.PRNGKey(0)
