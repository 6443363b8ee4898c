"""How far results lie from each other and from exact ones, in the columns of a sweep.

Recipes run forward on all seeds at once, and recipes that are given together are one
compiled program: on a CPU compiling costs more than running.
"""

import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jaxtyping import Float, Integer

from analysis.inputs import Problem
from analysis.record import Row
from attn_jax import emulator
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Inputs
from attn_jax.formats import FP64, NumberFormat
from attn_jax.recipe import Recipe

# What the running maximum depends on; every other field of a recipe comes after it.
_OF_THE_MAXIMUM = (
    *("inputs", "carrier", "dot_accumulator", "dot_chunk", "dot_alignment"),
    *("block_kv", "kv_order", "exponential", "exp2_degree"),
    *("scaled_query", "scale_at"),
    *("rescale_threshold", "repeated_max_factor", "logits", "row_max"),
)
_DIFFERENCE = ("rel", "max_abs", "mean_abs", "std", "signed_mean", "directionality")
_LONG_DOUBLE_ROWS = 16


def forward(
    recipes: Mapping[str, Recipe], inputs: Inputs
) -> dict[str, Float[np.ndarray, "B T N H"]]:
    """The output of each recipe, rounded as the recipe says, in its carrier.

    Raises ValueError unless all recipes have one carrier.
    """
    outs = _run(_forward, tuple(recipes.values()), inputs)
    return dict(zip(recipes, outs, strict=True))


def rescales(
    recipes: Mapping[str, Recipe], inputs: Inputs
) -> dict[str, Integer[np.ndarray, "B N T"]]:
    """How often each row's running maximum moved after the first key it saw.

    Recipes that find the maximum in the same way are counted once.
    """
    ways = {
        name: Recipe(
            name="maximum",
            source="",
            **{field: getattr(recipe, field) for field in _OF_THE_MAXIMUM},
        )
        for name, recipe in recipes.items()
    }
    once = tuple(dict.fromkeys(ways.values()))
    counts = dict(zip(once, _run(_rescales, once, inputs), strict=True))
    return {name: counts[way] for name, way in ways.items()}


def _run(program: Callable, recipes: tuple[Recipe, ...], inputs: Inputs):
    carriers = {recipe.carrier for recipe in recipes}
    if len(carriers) > 1:
        raise ValueError("recipes that run together must have one carrier")
    wide = carriers == {FP64}
    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        return jax.device_get(program(recipes, *(x.astype(dtype) for x in inputs[:3])))


@functools.partial(jax.jit, static_argnums=0)
def _forward(recipes: tuple[Recipe, ...], query, key, value):
    return [emulator.attention(query, key, value, recipe=r)[0] for r in recipes]


@functools.partial(jax.jit, static_argnums=0)
def _rescales(recipes: tuple[Recipe, ...], query, key, value):
    del value
    return [emulator.rescales(query, key, recipe=r) for r in recipes]


def compare(
    problem: Problem, recipes: Mapping[str, Recipe], baseline: str
) -> Iterator[Row]:
    """One row for each recipe and seed: `measure`, rescalings, and `recipe`, `seed`.

    `from_baseline_*` are the columns of `difference` to the result of the recipe named
    `baseline`; `rel_over_baseline` and `max_over_baseline` are `rel` and `max_abs` over
    those of that recipe, None where it is exact.

    Recipes that carry FP64 are no worse than the FP64 result, so their errors are
    against `long_double`, on the first queries; None where there is no such type.
    """
    outs, counts = (f(recipes, problem.inputs) for f in (forward, rescales))
    exact = problem.exact.out
    if recipes[baseline].carrier == FP64:
        exact = long_double(problem.inputs)

    def error_of(name: str, seed: int) -> Row:
        if exact is None:
            return dict.fromkeys((*_DIFFERENCE, "units"))
        sums = None if problem.sums is None else problem.sums.out[seed]
        out, fmt = outs[name][seed], recipes[name].output.format
        return measure(out[: exact.shape[1]], exact[seed], fmt, sums)

    for seed in range(len(problem.exact.out)):
        below = error_of(baseline, seed)
        for name in recipes:
            error = error_of(name, seed)
            apart = difference(outs[name][seed], outs[baseline][seed])
            yield {
                "recipe": name,
                "seed": seed,
                **error,
                "rel_over_baseline": _ratio(error["rel"], below["rel"]),
                "max_over_baseline": _ratio(error["max_abs"], below["max_abs"]),
                **{f"from_baseline_{column}": x for column, x in apart.items()},
                "rescales_mean": float(counts[name][seed].mean()),
                "rescales_max": int(counts[name][seed].max()),
            }


def long_double(inputs: Inputs) -> np.ndarray | None:
    """The output of the first queries in NumPy's long double; None if that is FP64.

    [B, up to 16, N, H]; long double has no matrix product faster than a loop.
    """
    if np.finfo(np.longdouble).nmant <= np.finfo(np.float64).nmant:
        return None
    query = inputs.query[:, :_LONG_DOUBLE_ROWS]
    q, k, v = (
        x.astype(np.longdouble).swapaxes(1, 2)
        for x in (query, inputs.key, inputs.value)
    )
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = q @ k.swapaxes(2, 3) / np.sqrt(np.longdouble(q.shape[-1]))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return (p @ v / p.sum(-1, keepdims=True)).swapaxes(1, 2)


def _ratio(x: float | None, of: float | None) -> float | None:
    return x / of if x is not None and of else None


def difference(x: np.ndarray, y: np.ndarray) -> Row:
    """Columns for e = x - y of one draw, computed in FP64 or what is wider.

    rel             Frobenius norm of e over that of y; None where y vanishes
    max_abs, mean_abs, std     largest and mean |e|, standard deviation of e
    signed_mean     mean of e
    directionality  A = |sum e| / sqrt(sum e^2); random signs give 0.8 on average
    """
    wide = np.promote_types(y.dtype, np.float64)
    e = (x.astype(wide) - y).astype(np.float64)
    size, root = (float(np.sqrt(np.square(x).sum())) for x in (y.astype(np.float64), e))
    columns = (
        root / size if size else None,
        float(np.abs(e).max()),
        float(np.abs(e).mean()),
        float(e.std()),
        float(e.mean()),
        float(abs(e.sum()) / root) if root else 0.0,
    )
    return dict(zip(_DIFFERENCE, columns, strict=True))


def measure(
    out: np.ndarray,
    golden: np.ndarray,
    fmt: NumberFormat,
    absolute: np.ndarray | None = None,
) -> Row:
    """The columns of `difference` to the exact result of one draw, and `units`.

    One unit is the error of the exact result rounded once to `fmt`; see
    `audit.error.unit`. It is None for FP64, the format of the exact result itself.
    """
    units = None
    if fmt != FP64:
        units = unit_error(out, golden, fmt, absolute)
    return {**difference(out, golden), "units": units}
