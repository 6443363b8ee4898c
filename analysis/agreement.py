"""Two computations of one attention problem: how far they lie apart and from exact.

All figures are in units of the final rounding: the RMS error of the exact result
rounded once to the format it is returned in (`attn_jax.audit.error`), FP32 for LSE.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from analysis import ExperimentError
from attn_jax import canaries, emulator
from attn_jax.audit import error
from attn_jax.audit.inputs import Inputs, Shape, documents, make_inputs
from attn_jax.bounds import order_bound
from attn_jax.formats import BF16, FP16, FP32, NumberFormat
from attn_jax.mask import Mask
from attn_jax.recipe import Recipe
from attn_jax.reference import golden

FORMATS = {"bfloat16": BF16, "float16": FP16}
# The family whose exact results vanish or are machine numbers, by construction.
VANISHING = "zero_k_one_v"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Lengths T and S, head counts N and K, head dim H, mask and input format.

    With a `window` a query sees no key further back than the last so many, its own
    included; `packed`: no key of another of the sequence's documents.
    """

    T: int
    S: int
    N: int
    K: int
    H: int
    is_causal: bool
    dtype: str = "bfloat16"
    window: int | None = None
    packed: bool = False

    @property
    def mask(self) -> Mask:
        return self.mask_of(1)

    def mask_of(self, batch: int) -> Mask:
        """The same for each entry of a batch."""
        query_ids, key_ids = (
            np.tile(documents(length), (batch, 1)) if self.packed else None
            for length in (self.T, self.S)
        )
        return Mask(
            is_causal=self.is_causal,
            window=None if self.window is None else (self.window - 1, None),
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
        )

    @property
    def format(self) -> NumberFormat:
        return FORMATS[self.dtype]


class Results(NamedTuple):
    """out, dq [B, T, N, H]; lse [B, N, T]; dk, dv [B, S, K, H]: arrays or figures."""

    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


# (query, key, value) -> (out, LSE), differentiable.
Attention = Callable[..., tuple[jax.Array, jax.Array]]


def certified() -> dict[str, Any]:
    """The verdict of the canaries on this backend, under jit.

    Raises:
      ExperimentError: one of them failed.
    """
    try:
        return dataclasses.asdict(canaries.certify())
    except canaries.CanaryError as failed:
        raise ExperimentError(f"canary {failed}") from None


def draw(problem: Problem, family: str, seeds: int) -> Inputs:
    """Independent draws of a family, stacked along the batch axis."""
    shape = Shape(1, problem.T, problem.S, problem.N, problem.K, problem.H)
    dtype = jnp.dtype(problem.dtype).type
    draws = [make_inputs(family, seed, shape, dtype) for seed in range(seeds)]
    return Inputs(*(np.concatenate(arrays) for arrays in zip(*draws, strict=True)))


def lower(attend: Attention, problem: Problem, seeds: int) -> jax.stages.Lowered:
    """(query, key, value, dout) -> `Results`, forward and backward, ready to compile.

    Raises what `attend` raises.
    """

    def both(query, key, value, dout):
        (out, lse), backward = jax.vjp(attend, query, key, value)
        return Results(out, lse, *backward((dout, jnp.zeros_like(lse))))

    query = (seeds, problem.T, problem.N, problem.H)
    key = (seeds, problem.S, problem.K, problem.H)
    shapes = (
        jax.ShapeDtypeStruct(shape, problem.dtype) for shape in (query, key, key, query)
    )
    return jax.jit(both).lower(*shapes)


def emulated(recipe: Recipe, problem: Problem, scale: float | None = None) -> Attention:
    """Attention as `recipe` computes it."""

    def attend(query, key, value):
        return emulator.attention(
            query, key, value, recipe=recipe, mask=problem.mask, scale=scale
        )

    return attend


def exact(problem: Problem, family: str, inputs: Inputs) -> tuple[Results, Results]:
    """The FP64 results on these inputs, and the unit of error of each."""
    true = _results(golden(*inputs, mask=problem.mask))
    sums = Results(*(None,) * 5)
    if family == VANISHING:
        sums = _results(golden(*inputs, mask=problem.mask, absolute=True))
    units = {
        name: error.unit(
            getattr(true, name),
            FP32 if name == "lse" else problem.format,
            getattr(sums, name),
        )[0]
        for name in Results._fields
    }
    return true, Results(**units)


def order_sizes(recipe: Recipe, problem: Problem, inputs: Inputs) -> Results:
    """RMS difference of two correct implementations of `recipe` on these inputs.

    The RMS over all entries of `bounds.order_bound`, in the results' own scale.
    """
    found = _results(order_bound(recipe, *inputs, mask=problem.mask))
    return Results(*(rms(x) for x in found))


def _results(found: Any) -> Results:
    return Results(found.out, found.lse, found.dquery, found.dkey, found.dvalue)


def rms(x: ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def apart(x: ArrayLike, y: ArrayLike, unit: float) -> dict[str, float]:
    """RMS and largest difference in units, and the share of values that differ."""
    difference = np.asarray(x).astype(np.float64) - np.asarray(y).astype(np.float64)
    return {
        "rms": rms(difference) / unit,
        "max": float(np.abs(difference).max()) / unit,
        "differ": float(np.mean(difference != 0)),
    }


@jax.jit
def same_bits(first: dict[str, Array], second: dict[str, Array]) -> Bool[Array, ""]:
    """Whether two sets of results are the same bit by bit, NaN and zeros' signs too."""

    def bits(x):
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    return jnp.all(
        jnp.stack([jnp.all(bits(x) == bits(second[k])) for k, x in first.items()])
    )


def failures(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """The rows whose verdict is FAIL, named by some columns; '' if there are none."""
    failed = [row for row in rows if row["verdict"] == "FAIL"]
    names = [" ".join(str(row[c]) for c in columns) for row in failed[:3]]
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return "; ".join(names) + more
