"""Which algorithm rounds as a target does: recipes' predictions against measurements.

Every candidate is run by the emulator on the inputs that the target was measured on.
For a result and a family of inputs that gives its error u in units of the unavoidable
rounding and its bias b, in the same units; u' and b' are the candidate's. The distance
of a target from a candidate is, of the result that is furthest, the root mean square
over families of

    log2(u / u') / s      and      (b - b') / (u' s)      s = u' / 1.5, from 1 to 4

Large errors come from a few roundings that everything else cancels against: two honest
orders of additions differ in them by a factor of two, which s allows for. A candidate
fits below `FITS`. Those that are as near as the nearest, to `ALIKE`, cannot be told
from it by this.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_jax import emulator
from attn_jax.audit import programs
from attn_jax.audit.alone import ALONE
from attn_jax.audit.finding import ROUNDED_QUERY
from attn_jax.audit.inputs import Shape
from attn_jax.audit.measure import Measured, measured
from attn_jax.audit.problem import Problem
from attn_jax.formats import BF16, FP16, FP32, NumberFormat, Rounding
from attn_jax.recipe import (
    ATTN_JAX,
    EAGER_OP_BY_OP,
    EXACT_FP32,
    FLASH2,
    JAX_NN,
    RECIPES,
    RING_FLASH_ATTN,
    TE_RING,
    Recipe,
    Step,
)
from attn_jax.xla_options import RUN_ONCE

FITS = 0.15
ALIKE = 0.05
# On which recipes differ. `repeated_max` is all luck.
FAMILIES = ("normal", "uniform", "outlier", "wide")

_WIDE = Step(FLASH2.carrier)
_CAST = Step(BF16)
_CUT = Step(BF16, Rounding.TOWARD_ZERO)
_FP32_OPERANDS = dict(probability=_WIDE, backward_probability=_WIDE, dlogits=_WIDE)
_KEYS_IN_16_BITS = dict(dk_accumulator=_CAST, dv_accumulator=_CAST)
_BY_HEAD_IN_16_BITS = dict(group_gradient=_CAST, group_accumulator=_CAST)
# What is often done wrong, or well, in an otherwise ordinary flash attention.
_ALTERED: tuple[tuple[str, Recipe, dict[str, Any]], ...] = (
    ("accumulator", FLASH2, dict(accumulator=_CAST)),
    ("accumulator, blocks of 16", FLASH2, dict(accumulator=_CAST, block_kv=16)),
    ("row_sum", FLASH2, dict(row_sum=_CAST)),
    ("row_sum, blocks of 16", FLASH2, dict(row_sum=_CAST, block_kv=16)),
    ("logits", FLASH2, dict(logits=_CAST)),
    (
        "operands cut off",
        FLASH2,
        dict(probability=_CUT, backward_probability=_CUT, dlogits=_CUT),
    ),
    ("output cut off", FLASH2, dict(output=_CUT)),
    ("output and gradients cut off", FLASH2, dict(output=_CUT, gradient=_CUT)),
    ("dk_accumulator", FLASH2, _KEYS_IN_16_BITS),
    # As chunks of queries, of which K and V are no arguments, are differentiated: by
    # `lax.scan` in a loop that adds up 16-bit numbers.
    (
        "dk_accumulator, chunks of 16",
        JAX_NN,
        _KEYS_IN_16_BITS | dict(backward_block_q=16),
    ),
    (
        "dk_accumulator, chunks of 64",
        JAX_NN,
        _KEYS_IN_16_BITS | dict(backward_block_q=64),
    ),
    (
        "dk_accumulator, chunks of 16, unrounded dS",
        JAX_NN,
        _KEYS_IN_16_BITS | dict(backward_block_q=16, dlogits=_WIDE),
    ),
    (
        "dk_accumulator, chunks of 64, unrounded dS",
        JAX_NN,
        _KEYS_IN_16_BITS | dict(backward_block_q=64, dlogits=_WIDE),
    ),
    # Each query head's, added up over those that share a key head.
    ("gradients by query head", FLASH2, dict(group_gradient=_CAST)),
    # As `jnp.repeat` of keys and values is differentiated, which textbooks have.
    ("gradients by query head, P normalised", JAX_NN, dict(group_gradient=_CAST)),
    # The transpose of `jnp.repeat` adds 16-bit numbers, in 16 bits where XLA has those.
    ("gradients by query head, summed in 16 bits", JAX_NN, _BY_HEAD_IN_16_BITS),
    (
        "gradients by query head, unrounded dS",
        JAX_NN,
        dict(group_gradient=_CAST, dlogits=_WIDE),
    ),
    (
        "gradients by query head, all else in FP32",
        FLASH2,
        _FP32_OPERANDS | dict(delta_source="o_f32", group_gradient=_CAST),
    ),
    (
        "gradients by query head, softmax in 16 bits",
        EAGER_OP_BY_OP,
        dict(group_gradient=_CAST),
    ),
    ("dq_accumulator", FLASH2, dict(dq_accumulator=_CAST)),
    ("delta", FLASH2, dict(delta=_CAST)),
    ("exact delta", FLASH2, dict(delta_source="o_f32")),
    ("exact delta, rounded", FLASH2, dict(delta_source="o_f32", delta=_CAST)),
    ("FP32 operands", FLASH2, _FP32_OPERANDS),
    # Finer than BF16, which is what takes it for FP32's on most inputs.
    (
        "P and dS in FP16",
        EXACT_FP32,
        dict(
            probability=Step(FP16),
            backward_probability=Step(FP16),
            dlogits=Step(FP16),
        ),
    ),
    ("delta of P dP", FLASH2, dict(delta_source="p_dp")),
    # As XLA's CPU compiler does it.
    ("unrounded dS", JAX_NN, dict(dlogits=_WIDE)),
    # By a scale that is no power of two, before the product.
    (ROUNDED_QUERY, FLASH2, dict(scaled_query=_CAST)),
    # JAX's `attention_mgpu`, as its users call it.
    (
        "query rounded after scaling, gradients by query head",
        FLASH2,
        dict(scaled_query=_CAST, group_gradient=_CAST),
    ),
    # `flax.linen.dot_product_attention`, by default and with its softmax in FP32.
    ("query rounded after scaling, too", EAGER_OP_BY_OP, dict(scaled_query=_CAST)),
    (
        "query rounded after scaling, FP32 P",
        JAX_NN,
        dict(
            scaled_query=_CAST,
            probability=_WIDE,
            backward_probability=_WIDE,
            dprobability=_WIDE,
        ),
    ),
    # With fewer key heads, which are repeated, and P and dS as XLA's CPU compiler has
    # them.
    (
        "query rounded after scaling, gradients by query head summed in 16 bits",
        JAX_NN,
        _BY_HEAD_IN_16_BITS | dict(scaled_query=_CAST, dlogits=_WIDE),
    ),
)
"""Recipes with a change, which are candidates of their own."""
# What rings round between their devices; one in FP32 throughout rounds as one device
# does. Where all keys are gathered forward there is one part, whose out is rounded.
_16_BITS = dict(ring_partial=_CAST, ring_gradient_partial=_CAST)
_GATHERED = dict(ring_partial=_WIDE, ring_gradient_partial=_CAST, delta_source="o")
_RINGS: tuple[tuple[str, Recipe, dict[str, Any]], ...] = (
    ("ring of {}", RING_FLASH_ATTN, {}),
    ("keys gathered forward, ring of {}", RING_FLASH_ATTN, _GATHERED),
    ("ring of {}", TE_RING, {}),
    ("parts in 16 bits, ring of {}", ATTN_JAX, _16_BITS),
    ("keys gathered forward, parts in 16 bits, ring of {}", ATTN_JAX, _GATHERED),
)
# How much nearer than the recipe itself a change of it has to be, and how near. Beyond
# twice `FITS` the nearest of all is as good as any.
_SUSPECT = 0.7
_SUSPECT_FITS = 2 * FITS
# Casts that candidates are named by, too.
_IN_WORDS = {
    "scaled_query": ROUNDED_QUERY,
    "group_accumulator": "query heads' gradients summed in 16 bits",
    "ring_partial": "out of parts in 16 bits",
    "ring_accumulator": "merged out in 16 bits",
    "ring_gradient_partial": "gradients of parts in 16 bits",
    "ring_gradient_accumulator": "sums of gradients in 16 bits",
}
# What nobody can leave out.
_UNAVOIDABLE = ("output", "gradient", "lse")


class Features(NamedTuple):
    """Of one result on one family: error and bias, in units."""

    units: float
    bias: float


# By family and result.
Profile = Mapping[tuple[str, str], Features]


def profile(found: Mapping[str, Mapping[str, Measured]]) -> dict:
    """Of measurements by family."""
    return {
        (family, name): Features(m.errors.units, m.bias)
        for family, of_family in found.items()
        for name, m in of_family.items()
        if name != "lse"
    }


def candidates(inputs: NumberFormat, shards: int = 1) -> dict[str, Recipe]:
    """Recipes by name that a kernel for such inputs may follow: those of the library
    on one device and in no 8-bit format, changes of `flash2` and, if the sequence is
    cut between `shards`, rings of so many that round between devices."""
    plain = {
        name: recipe
        for name, recipe in RECIPES.items()
        if recipe.inputs == BF16
        and recipe.ring_size == 1
        and recipe.carrier == FLASH2.carrier
        and min(_bits(recipe)) >= BF16.mantissa_bits
    } | {"exact_fp32": EXACT_FP32}
    for what, base, changes in _ALTERED:
        name = f"{base.name} ({what})"
        plain[name] = dataclasses.replace(base, name=name, **changes)
    for what, base, changes in _RINGS if shards > 1 else ():
        one = of_size(dataclasses.replace(base, **changes), shards, what)
        plain[one.name] = one
    return {name: for_inputs(recipe, inputs) for name, recipe in plain.items()}


def for_inputs(recipe: Recipe, inputs: NumberFormat) -> Recipe:
    """The recipe for inputs of a format; one for FP32 takes any."""
    return recipe if recipe.inputs == FP32 else recipe.with_inputs(inputs)


def of_size(recipe: Recipe, shards: int, what: str = "ring of {}") -> Recipe:
    """The recipe on a ring of so many devices, named so."""
    name = f"{recipe.name} ({what.format(shards)})"
    return dataclasses.replace(recipe, name=name, ring_size=shards)


def runs_on(recipe: Recipe, shape: Shape) -> bool:
    """Whether the recipe's ring divides the lengths."""
    lengths = shape.query_length, shape.key_length
    return all(length % recipe.ring_size == 0 for length in lengths)


def _bits(recipe: Recipe) -> list[int]:
    return [step.format.mantissa_bits for step in steps(recipe).values()]


def steps(recipe: Recipe) -> dict[str, Step]:
    """The recipe's steps by field."""
    found = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    return {name: x for name, x in found.items() if isinstance(x, Step)}


# Kept, so that one process may audit many targets: only figures, no arrays.
@functools.lru_cache(maxsize=1024)
def predict(
    recipe: Recipe, problems: tuple[Problem, ...], *, gradients: bool
) -> list[dict[str, Measured]]:
    """What the recipe gives on problems of one shape and mask: one program, in the
    default mode whatever the caller's."""
    first = problems[0]
    options = {"recipe": recipe, "mask": first.rules, "scale": first.scale}

    def attend(query, key, value, bias=None):
        return emulator.attention(query, key, value, bias=bias, **options)

    of_attend = functools.partial(programs.results, attend, gradients)
    found = []
    with jax.enable_x64(False):
        jitted = jax.jit(of_attend, compiler_options=RUN_ONCE)
        compiled = jitted.lower(*first.arrays).compile()
        for problem in problems:
            arrays = problem.arrays
            with ALONE:
                results = jax.device_get(compiled(*map(jnp.asarray, arrays)))
            found.append(measured(problem, results))
    return found


class Fit(NamedTuple):
    """How far a target is from a candidate, over the results of one pass."""

    candidate: str
    distance: float

    @property
    def fits(self) -> bool:
        return self.distance <= FITS


def fits(target: Profile, predictions: Mapping[str, Profile]) -> list[Fit]:
    """Of all candidates, the nearest first."""
    found = [
        Fit(name, distance(target, predicted))
        for name, predicted in predictions.items()
    ]
    return sorted(found, key=lambda fit: fit.distance)


def distance(target: Profile, predicted: Profile) -> float:
    """As the module says; over what both have."""
    squares: dict[str, list[float]] = {}
    for cell in target.keys() & predicted.keys():
        ratio, bias = _differences(target[cell], predicted[cell])
        squares.setdefault(cell[1], []).append(ratio * ratio + bias * bias)
    return max((math.sqrt(sum(x) / len(x)) for x in squares.values()), default=math.inf)


def _differences(here: Features, there: Features) -> tuple[float, float]:
    scale = min(max(there.units / 1.5, 1.0), 4.0)
    if here.units == there.units:
        ratio = 0.0
    elif min(here.units, there.units) <= 0 or not math.isfinite(here.units):
        ratio = math.inf
    else:
        ratio = math.log2(here.units / there.units)
    return ratio / scale, (here.bias - there.bias) / max(there.units, 1.0) / scale


class Cost(NamedTuple):
    """What a step of a recipe costs on a problem.

    `units` is the error with the step, `without` it without; `share` of the mean
    square error goes with it, which is negative where two steps' errors cancel.
    """

    step: str
    tensor: str
    units: float
    without: float

    @property
    def share(self) -> float:
        return 1 - (self.without / self.units) ** 2 if self.units > 0 else 0.0

    @property
    def acts(self) -> bool:
        """Whether the result is any other without the step: delta is not in out, and
        in FP32 the rounded output is the unrounded one."""
        return self.without != self.units


# Steps of one tensor.
JOINT = (("logits", "shifted"), ("product", "accumulator"))


def casts(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The recipe's casts by name, the fields of each: steps that it keeps in less than
    its carrier."""
    single = [
        name
        for name, step in steps(recipe).items()
        if step.format != recipe.carrier
        and step.format.mantissa_bits <= recipe.carrier.mantissa_bits
    ]
    found: dict[str, tuple[str, ...]] = {name: (name,) for name in single}
    for joint in JOINT:
        if set(joint) <= set(single):
            found["+".join(joint)] = joint
    return found


def without(recipe: Recipe, fields: Sequence[str]) -> Recipe:
    """The recipe with these steps in its carrier."""
    return dataclasses.replace(recipe, **dict.fromkeys(fields, Step(recipe.carrier)))


def suspect(fits: Sequence[Fit]) -> str:
    """What the nearest candidate does otherwise than the recipe that it is a change of;
    "" where it is none, that recipe is about as near, or neither is near."""
    if not fits or fits[0].distance > _SUSPECT_FITS:
        return ""
    by_name = {fit.candidate: fit.distance for fit in fits}
    for what, base, _ in _ALTERED:
        if fits[0].candidate == f"{base.name} ({what})":
            apart = by_name.get(base.name, math.inf)
            return what if fits[0].distance < _SUSPECT * apart else ""
    return ""


def better(recipe: Recipe) -> dict[str, Recipe]:
    """By a thing that it could do better, the recipe that does."""
    changed = [x for x in _ALTERED if recipe.name == f"{x[1].name} ({x[0]})"]
    # Where some of a change is for the better, its steps are looked at one by one.
    found = {
        what: for_inputs(base, recipe.inputs)
        for what, base, fields in changed
        if _WIDE not in fields.values()
    }
    # What undoing the change leaves out has the change's name alone.
    named = [tuple(fields) for *_, fields in changed]
    found |= {
        _IN_WORDS.get(name, name): without(recipe, fields)
        for name, fields in casts(recipe).items()
        if name not in _UNAVOIDABLE and fields not in named
    }
    if recipe.delta_source == "o":
        found["delta from the rounded output"] = dataclasses.replace(
            recipe, delta_source="o_f32"
        )
    if recipe.exponential == "exp2_polynomial":
        found["exp2 by a polynomial"] = dataclasses.replace(
            recipe, exponential="exp2", exp2_degree=None
        )
    return found


def costs(
    recipe: Mapping[str, Measured], better: Mapping[str, Mapping[str, Measured]]
) -> list[Cost]:
    """What each thing costs, for each result, the dearest first: of what a recipe gives
    on a problem, and what those of `better` do, by result."""
    found = [
        Cost(name, tensor, recipe[tensor].errors.units, m.errors.units)
        for name, of_better in better.items()
        for tensor, m in of_better.items()
        if tensor != "lse"
    ]
    return sorted(found, key=lambda cost: -cost.share)
