"""Passes of recipes forward and back, and their errors in the columns of a sweep."""

import functools
from collections.abc import Iterator

import jax
import numpy as np

from analysis.inputs import Problem
from analysis.record import Row
from attn_jax import emulator
from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import Inputs
from attn_jax.formats import FP64
from attn_jax.recipe import Recipe

# Column value -> field of the exact result.
TENSORS = {"out": "out", "dq": "dquery", "dk": "dkey", "dv": "dvalue"}


def results(
    recipe: Recipe, inputs: Inputs, *, backward: bool = True
) -> dict[str, np.ndarray]:
    """out, and with `backward` dq, dk and dv for the cotangent `inputs.dout`.

    Rounded as the recipe says, in its carrier.
    """
    wide = recipe.carrier == FP64
    program = _both if backward else _forward
    with jax.enable_x64(wide):
        arrays = [x.astype(np.float64 if wide else np.float32) for x in inputs]
        found = jax.device_get(program(recipe, *arrays))
    return dict(zip(TENSORS, found))


@functools.partial(jax.jit, static_argnums=0)
def _forward(recipe: Recipe, query, key, value, dout):
    del dout
    return (emulator.attention(query, key, value, recipe=recipe)[0],)


@functools.partial(jax.jit, static_argnums=0)
def _both(recipe: Recipe, query, key, value, dout):
    def attend(q, k, v):
        return emulator.attention(q, k, v, recipe=recipe)[0]

    out, pullback = jax.vjp(attend, query, key, value)
    return out, *pullback(dout)


def errors(recipe: Recipe, problem: Problem, *, backward: bool = True) -> Iterator[Row]:
    """For each seed and tensor, `rel` and `units`, pooled over heads.

    rel     Frobenius norm of the error over that of the exact result
    units   RMS error over that of the exact result rounded once to the format
            of the recipe's inputs (`audit.error.unit`), in whatever format the recipe
            returns it
    Both are None where the exact result vanishes and no sums of absolute values stand
    in for it, as for the gradients of a dO of zero.
    """
    found = results(recipe, problem.inputs, backward=backward)
    for tensor, result in found.items():
        exact = getattr(problem.exact, TENSORS[tensor])
        sums = None
        if problem.sums is not None:
            sums = getattr(problem.sums, TENSORS[tensor])
        for seed, (one, golden) in enumerate(zip(result, exact, strict=True)):
            row: Row = {"seed": seed, "tensor": tensor, "rel": None, "units": None}
            if golden.any():
                row["rel"] = _norm(one - golden) / _norm(golden)
            if golden.any() or sums is not None:
                absolute = None if sums is None else sums[seed]
                row["units"] = unit_error(one, golden, recipe.inputs, absolute)
            yield row


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))
