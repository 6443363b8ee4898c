"""What a target is judged by: the recipe that fits it, or ordinary algorithms."""

from collections.abc import Mapping
from typing import NamedTuple

from attn_jax.audit import attribution
from attn_jax.audit.attribution import Fit
from attn_jax.audit.inputs import Shape
from attn_jax.audit.rows import Found
from attn_jax.formats import FP32, NumberFormat
from attn_jax.recipe import Recipe

# What `jnp.repeat` of keys and values gets.
BY_HEAD_IN_16_BITS = "jax_nn (gradients by query head, summed in 16 bits)"
PLAIN = "flash2", "jax_nn", BY_HEAD_IN_16_BITS, "eager_bf16"
"""Ordinary algorithms: what nobody is blamed for."""
# Of FP32 inputs no step is narrower than sums, and this is as ordinary as those.
_PLAIN_IN_FP32 = *PLAIN, "flash2 (delta of P dP)"


class Algorithms(NamedTuple):
    """Names of recipes: the one that fits, if one does, and those that count, too."""

    fitting: str | None
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*([] if self.fitting is None else [self.fitting]), *self.others)

    @property
    def is_alone(self) -> bool:
        """Whether what is allowed is what the fitting recipe has."""
        return not self.others

    def allowed(self, found: Found, predicted: Mapping[str, Found]) -> dict[str, float]:
        """By result the largest error in units of what was `predicted` of each; of LSE
        what FP32 leaves at most, or the fitting recipe's if that is more."""
        fitting = {name: x for name, x in predicted.items() if name == self.fitting}

        def largest(tensor: str) -> float:
            of = fitting if tensor == "lse" else predicted
            units = (x[tensor].errors.units for x in of.values() if tensor in x)
            return max(found[tensor].honest, *units, 0.0)

        return {tensor: largest(tensor) for tensor in found}


def ordinary(inputs: NumberFormat) -> tuple[str, ...]:
    """Names of recipes for inputs of that format."""
    return _PLAIN_IN_FP32 if inputs == FP32 else PLAIN


def judged_by(
    recipes: Mapping[str, Recipe],
    fit: Fit | None,
    inputs: NumberFormat,
    shape: Shape,
    compared: Shape,
) -> Algorithms:
    """On problems of `shape`, where recipes were compared on `compared`: the recipe
    that fits, or ordinary ones if none does or it does not run there.

    Errors of FP32 inputs are those of sums, whose order a recipe may have by chance:
    ordinary ones count, too. So does a sum of query heads' gradients in 16 bits where
    more are added than were compared: of two it is one in FP32, rounded.
    """
    plain = ordinary(inputs)
    if not (fit and fit.fits):
        return Algorithms(None, plain)
    recipe = recipes[fit.candidate]
    if not attribution.runs_on(recipe, shape):
        return Algorithms(None, plain)
    if inputs == FP32:
        return Algorithms(fit.candidate, plain)
    rounds_sums = recipe.group_gradient or recipe.dk_accumulator.format != FP32
    if rounds_sums and shape.group_size > compared.group_size:
        return Algorithms(fit.candidate, (BY_HEAD_IN_16_BITS,))
    return Algorithms(fit.candidate)
