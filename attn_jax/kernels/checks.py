"""Is a kernel right? Results against FP64 in units, and the same bits twice.

A unit is the RMS error of the exact result rounded once to the format
(`attn_jax.audit.error`). Inputs are N(0, 1), keys N(2, 1): far from zero, so that a
mean which dQ must not see shows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.audit.error import unit_error
from attn_jax.audit.mask_cases import (
    DTYPES,
    FORMATS,
    Case,
    bias_gradient_bound,
    mask_cases,
    sink_gradient_bound,
)
from attn_jax.kernels.architecture import made_for
from attn_jax.kernels.attention import attention
from attn_jax.mask import Mask
from attn_jax.recipe import Architecture
from attn_jax.reference import Golden, golden

# The project's bar. Under a soft cap the centre does not take up the error of delta.
UNITS, UNITS_SOFT_CAP_DQ = 1.7, 2.0
# No block divides the lengths; several heads to a key head, so that what runs over the
# end of one head's rows lands in the next one's.
T, S, N, K = 1000, 1337, 8, 2
# How often a program runs, bits compared.
RUNS = 3
# Results by name, and the field of `Golden` that is exact.
RESULTS = {
    "out": "out",
    "lse": "lse",
    "dq": "dquery",
    "dk": "dkey",
    "dv": "dvalue",
    "dbias": "dbias",
    "dsinks": "dsinks",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One problem: forward and backward.

    Attributes:
      head_dim, value_dim: of Q and K, and of V.
      feature: "full", "causal" or a name of `mask_cases`, which then says the format
        of the inputs.
      dtype: of the inputs, for "full" and "causal".
      out_dtype: "float32", or None for that of the inputs.
      backward: as of `attention`.
      queries, keys: lengths.
      batch: for "full" and "causal".
    """

    head_dim: int
    value_dim: int
    feature: str = "full"
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    backward: str | None = None
    queries: int = T
    keys: int = S
    batch: int = 1

    @property
    def name(self) -> str:
        dims = f"{self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f"x{self.value_dim}"
        parts = [f"head dim {dims}", self.feature, self.case.dtype]
        parts += [f"{self.out_dtype} out"] if self.out_dtype else []
        parts += [f"backward {self.backward}"] if self.backward else []
        parts += [f"{self.keys} keys"] if self.keys != S else []
        return ", ".join(parts)

    @property
    def case(self) -> Case:
        masks = {"full": Mask(), "causal": Mask(is_causal=True)}
        if self.feature in masks:
            mask = masks[self.feature]
            return Case(mask, self.head_dim, self.dtype, batch=self.batch)
        return mask_cases(self.queries, self.keys, N)[self.feature]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
      units: error of each result in units.
      same_bits: all runs agree bit by bit.
      failed: what does not hold, a line each.
    """

    units: dict[str, float]
    same_bits: bool
    failed: tuple[str, ...]


def run(
    check: Check,
    architecture: Architecture,
    results: tuple[str, ...] = tuple(RESULTS),
    *,
    training: bool = True,
    **options: Any,
) -> Outcome:
    """Compiles the kernels that make `results`, runs them, holds them against FP64.

    `options` go to `attention`. Without `training` it is the forward pass that leaves
    nothing for a backward pass.

    Raises:
      NotImplementedError, ValueError, RuntimeError: the kernels refuse the problem, do
        not compile, or fail when they run.
    """
    inputs = _inputs(check)
    missing = [n for n, x in zip(("dsinks", "dbias"), inputs[-2:]) if x is None]
    names = tuple(n for n in results if n not in missing)
    compiled = compile_for(
        architecture, program(check, names, training=training, **options), inputs
    )
    arrays = jax.device_put(inputs)
    first = jax.device_get(compiled(*arrays))
    same_bits = True
    for _ in range(RUNS - 1):
        again = jax.device_get(compiled(*arrays))
        same_bits &= all(first[x].tobytes() == again[x].tobytes() for x in names)
    return judged(check, first, same_bits)


def compile_for(
    architecture: Architecture, function: Callable, inputs: tuple
) -> jax.stages.Compiled:
    """A program of an architecture's kernels. What it raises is the kernels' refusal,
    or the compiler's."""
    with made_for(architecture):
        return jax.jit(function).lower(*inputs).compile()


def program(
    check: Check, names: tuple[str, ...], *, training: bool, **options: Any
) -> Callable:
    """(query, key, value, dout, dlse, mask, sinks, bias) -> results by name."""
    soft_cap = check.case.soft_cap
    dtype = None if check.out_dtype is None else jnp.dtype(check.out_dtype)
    options = {"backward": check.backward, "out_dtype": dtype, **options}

    def results(query, key, value, dout, dlse, mask, sinks, bias=None):
        def attend(query, key, value, bias, sinks):
            return attention(
                *(query, key, value),
                scale=check.head_dim**-0.5,
                bias=bias,
                mask=mask,
                sinks=sinks,
                soft_cap=soft_cap,
                **options,
            )

        if not training:
            out, lse = attend(query, key, value, bias, sinks)
            return {"out": out, "lse": lse}
        (out, lse), backward = jax.vjp(attend, query, key, value, bias, sinks)
        gradients = backward((dout.astype(out.dtype), dlse))
        found = dict(zip(RESULTS, (out, lse, *gradients), strict=True))
        return {name: found[name] for name in names}

    return results


def shapes(check: Check) -> list[jax.ShapeDtypeStruct]:
    """Of the arrays among a program's inputs, of a check without a mask's, sinks and
    bias."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _inputs(check)[:5]]


@functools.lru_cache(maxsize=8)
def _inputs(check: Check) -> tuple:
    """query, key, value, dout, dlse, mask, sinks, bias."""
    case = check.case
    rng = np.random.default_rng(0)

    def normal(length: int, heads: int, dim: int, mean: float = 0.0):
        x = rng.standard_normal((case.batch, length, heads, dim)) + mean
        return x.astype(np.float32).astype(DTYPES[case.dtype])

    query = normal(check.queries, N, check.head_dim)
    key = normal(check.keys, K, check.head_dim, 2.0)
    value = normal(check.keys, K, check.value_dim)
    dout = normal(check.queries, N, check.value_dim)
    dlse = rng.standard_normal((case.batch, N, check.queries)).astype(np.float32)
    sinks = None if case.sinks is None else np.asarray(case.sinks, np.float32)
    bias = None if case.bias is None else case.bias.array()
    return query, key, value, dout, dlse, case.mask, sinks, bias


@functools.lru_cache(maxsize=8)
def _exact(check: Check) -> Golden:
    *arrays, mask, sinks, bias = _inputs(check)
    options = {"mask": mask, "sinks": sinks, "bias": bias}
    return golden(*arrays, **options, soft_cap=check.case.soft_cap)


def judged(check: Check, found: dict[str, np.ndarray], same_bits: bool) -> Outcome:
    """Results against the exact ones."""
    case, exact = check.case, _exact(check)
    query, key, value, dout, dlse, _, sinks, _ = _inputs(check)
    units: dict[str, float] = {}
    failed = [] if same_bits else ["two runs differ in their bits"]
    for name in ("out", "dq", "dk", "dv"):
        if name not in found:
            continue
        got, want = found[name], getattr(exact, RESULTS[name])
        if not np.isfinite(got.astype(np.float32)).all():
            failed.append(f"{name} is not finite")
            continue
        units[name] = unit_error(got, want, FORMATS[case.dtype])
        limit = UNITS
        if name == "dq" and case.soft_cap is not None:
            limit = UNITS_SOFT_CAP_DQ
        if not units[name] <= limit:
            failed.append(f"{name} is off by {units[name]:.3g} units, {limit} allowed")
        # Where nothing is seen there is nothing to round. A row of dQ is zero, too,
        # where a query sees a single key.
        hidden = ~(exact.out if name in ("out", "dq") else want).any(axis=-1)
        if got[hidden].any():
            failed.append(f"{name} is not 0 where nothing is seen")
    if "lse" in found and not _lse_holds(found["lse"], exact, query, key):
        failed.append("lse is off by more than FP32 sums can be")
    if "dsinks" in found:
        bound = sink_gradient_bound(exact, sinks, dout, case.dtype)
        if not (np.abs(found["dsinks"] - exact.dsinks) <= bound).all():
            failed.append("dsinks is off by more than the error of out explains")
    if "dbias" in found:
        bound = bias_gradient_bound(case, (query, key, value, dout), dlse)
        got, want = found["dbias"].astype(np.float64), exact.dbias
        assert want is not None
        if not (np.abs(got - want) <= bound).all():
            failed.append("dbias is off by more than the error of out explains")
    return Outcome(units, same_bits, tuple(failed))


def _lse_holds(lse: np.ndarray, exact: Golden, query, key) -> bool:
    """FP32 sums of head_dim products, at most the largest row of |q| and |k| together
    (Cauchy and Schwarz), and of as many weights as there are keys."""
    empty = np.isneginf(exact.lse)
    if not np.array_equal(np.isneginf(lse), empty):
        return False
    if empty.all():
        return True
    head_dim = query.shape[-1]
    rows = (np.linalg.norm(x.astype(np.float64), axis=-1).max() for x in (query, key))
    size = np.abs(exact.lse[~empty]).max() + math.prod(rows) * head_dim**-0.5
    bound = (head_dim + key.shape[1]) * 2.0**-24 * size
    return bool(np.abs(lse[~empty] - exact.lse[~empty]).max() <= bound)
