"""The emulator's results and their errors, to hold against bounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import emulator
from attn_jax.bounds import Bounds
from attn_jax.formats import FP32, Rounding
from attn_jax.mask import Mask
from attn_jax.recipe_schema import Recipe, Step

RESULTS = ("out", "lse", "dquery", "dkey", "dvalue")


def run(query, key, value, dout, extra, noise, *, recipe):
    """The emulator's results by name; FP32 inputs give an FP32 output."""

    def forward(query, key, value, bias):
        more = {"mask": extra["mask"]} | ({} if bias is None else {"bias": bias})
        return emulator.attention(
            query, key, value, recipe=recipe, rounding_key=noise, **more
        )

    bias = extra.get("bias")
    (out, lse), pull = jax.vjp(forward, query, key, value, bias)
    grads = pull((dout.astype(out.dtype), jnp.zeros_like(lse)))
    results = dict(zip(RESULTS, (out, lse, *grads[:3])))
    return results if bias is None else results | {"dbias": grads[3]}


run_compiled = jax.jit(run, static_argnames="recipe")


def computed(
    recipe: Recipe, inputs, bias=None, mask=Mask(), jit=False
) -> dict[str, np.ndarray]:
    dtype = jnp.float32 if recipe.inputs == FP32 else None
    arrays = [jnp.asarray(x, dtype) for x in inputs]
    stochastic = any(
        getattr(recipe, f.name).rounding is Rounding.STOCHASTIC
        for f in dataclasses.fields(recipe)
        if isinstance(getattr(recipe, f.name), Step)
    )
    noise = jax.random.key(0) if stochastic else None
    extra = {"mask": mask} | ({} if bias is None else {"bias": bias})
    # Op by op, recipes share most of their operations as long as shapes and tiles are
    # the same. Where those differ too, one program compiles faster than its parts.
    if jit:
        results = run_compiled(*arrays, extra, noise, recipe=recipe)
    else:
        with jax.disable_jit():
            results = run(*arrays, extra, noise, recipe=recipe)
    return {k: np.asarray(v).astype(np.float64) for k, v in results.items()}


def errors(results: dict[str, np.ndarray], golden) -> dict[str, np.ndarray]:
    """|computed - exact|, infinite where the result is no number and should be."""

    def error(x, exact):
        with np.errstate(invalid="ignore"):
            e = np.abs(x - exact)
        e = np.where(x == exact, 0.0, e)  # LSE = -inf of a row that sees nothing.
        # Golden's own error: FP64 sums of at most some thousand terms.
        e = np.maximum(e - 2.0**-40 * np.abs(exact[np.isfinite(exact)]).max(), 0.0)
        return np.where(np.isnan(e), np.inf, e)

    return {name: error(x, getattr(golden, name)) for name, x in results.items()}


def excess(found: dict[str, np.ndarray], limits: Bounds) -> dict[str, float]:
    """Per result, the largest error in units of its bound."""

    def ratio(e, limit):
        assert np.isfinite(limit).all() or not np.isnan(limit).any()
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(e == 0, 0.0, np.where(limit == np.inf, 0.0, e / limit))

    return {k: float(ratio(e, getattr(limits, k)).max()) for k, e in found.items()}
