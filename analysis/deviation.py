"""How far results lie from each other and from exact ones, in the columns of a sweep.

Recipes run forward on all seeds at once, and recipes that are given together are one
compiled program: on a CPU compiling costs more than running.
"""

import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from analysis.inputs import Problem
from analysis.record import Row
from attn_jax import emulator
from attn_jax.audit import error
from attn_jax.audit.inputs import Inputs
from attn_jax.emulator_tiles import rounded
from attn_jax.formats import FP64, NumberFormat
from attn_jax.recipe import Recipe


def forward(
    recipes: Mapping[str, Recipe], inputs: Inputs
) -> dict[str, Float[np.ndarray, "B T N H"]]:
    """The output of each recipe, rounded as the recipe says, in its carrier.

    Raises ValueError unless all recipes have one carrier.
    """
    return _run(_forward, recipes, inputs)


def rescales(
    recipes: Mapping[str, Recipe], inputs: Inputs
) -> dict[str, Integer[np.ndarray, "B N T"]]:
    """How often each row's running maximum moved after its first block of keys."""
    return _run(_rescales, recipes, inputs)


def _run(program: Callable, recipes: Mapping[str, Recipe], inputs: Inputs):
    carriers = {recipe.carrier for recipe in recipes.values()}
    if len(carriers) > 1:
        raise ValueError("recipes that run together must have one carrier")
    wide = carriers == {FP64}
    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        arrays = [x.astype(dtype) for x in inputs[:3]]
        found = jax.device_get(program(tuple(recipes.values()), *arrays))
    return dict(zip(recipes, found, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _forward(recipes: tuple[Recipe, ...], query, key, value):
    return [emulator.attention(query, key, value, recipe=r)[0] for r in recipes]


@functools.partial(jax.jit, static_argnums=0)
def _rescales(recipes: tuple[Recipe, ...], query, key, value):
    return [_count(recipe, query, key) for recipe in recipes]


def _count(recipe: Recipe, query, key):
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest")
    logits = rounded(logits * query.shape[-1] ** -0.5, recipe.logits)
    B, N, T, S = logits.shape
    size = min(recipe.block_kv or S, S)
    full = jnp.pad(
        logits, ((0, 0), (0, 0), (0, 0), (0, -S % size)), constant_values=-jnp.inf
    )
    largest = full.reshape(B, N, T, -1, size).max(-1)
    running = rounded(jax.lax.cummax(largest, axis=3), recipe.row_max)
    return (running[..., 1:] > running[..., :-1]).sum(-1)


def compare(
    problem: Problem,
    recipes: Mapping[str, Recipe],
    baseline: str,
    exact: np.ndarray | None = None,
) -> Iterator[Row]:
    """One row for each recipe and seed: `measure`, rescalings, and `recipe`, `seed`.

    `from_baseline_*` are the columns of `difference` to the result of the recipe named
    `baseline`, without its name. `exact` takes the place of the problem's own exact
    output, for the first queries if it has fewer.
    """
    outs, counts = (f(recipes, problem.inputs) for f in (forward, rescales))
    exact = problem.exact.out if exact is None else exact
    for name, recipe in recipes.items():
        for seed, out in enumerate(outs[name]):
            sums = None if problem.sums is None else problem.sums.out[seed]
            apart = difference(out, outs[baseline][seed])
            yield {
                "recipe": name,
                "seed": seed,
                **measure(
                    out[: exact.shape[1]], exact[seed], recipe.output.format, sums
                ),
                **{f"from_baseline_{column}": x for column, x in apart.items()},
                "rescales_mean": float(counts[name][seed].mean()),
                "rescales_max": int(counts[name][seed].max()),
            }


def difference(x: np.ndarray, y: np.ndarray) -> Row:
    """Columns for e = x - y of one draw, computed in FP64 or what is wider.

    rel             Frobenius norm of e over that of y; None where y vanishes
    max_abs, mean_abs, std     largest and mean |e|, standard deviation of e
    signed_mean     mean of e
    directionality  A = |sum e| / sqrt(sum e^2); random signs give 0.8 on average
    """
    wide = np.promote_types(y.dtype, np.float64)
    e = (x.astype(wide) - y).astype(np.float64)
    size = float(np.linalg.norm(y.astype(np.float64)))
    root = float(np.linalg.norm(e))
    return {
        "rel": root / size if size else None,
        "max_abs": float(np.abs(e).max()),
        "mean_abs": float(np.abs(e).mean()),
        "std": float(e.std()),
        "signed_mean": float(e.mean()),
        "directionality": float(abs(e.sum()) / root) if root else 0.0,
    }


def measure(
    out: np.ndarray,
    golden: np.ndarray,
    fmt: NumberFormat,
    absolute: np.ndarray | None = None,
) -> Row:
    """The columns of `difference` to the exact result of one draw, and `units`.

    One unit is the error of the exact result rounded once to `fmt` (`error.unit`). It
    is None for FP64, the format of the exact result itself.
    """
    units = None
    if fmt != FP64:
        units = error.unit_error(out, golden, fmt, absolute)
    return {**difference(out, golden), "units": units}
