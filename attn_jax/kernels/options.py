"""Options of the kernels: what a `Recipe` may ask them for, and what they refuse."""

import dataclasses
from typing import Literal, NamedTuple

from attn_jax.formats import BF16, FP16, NumberFormat
from attn_jax.kernels.hopper_softmax import P_SCALE
from attn_jax.kernels.tuning import Backward
from attn_jax.recipe import Architecture, Recipe, Step

DeltaSource = Literal["o", "o_hi_lo", "o_hi_lo8", "o_f32", "p_dp"]
DqCentre = Literal["none", "mean", "row", "keys"]


class Options(NamedTuple):
    """Variants of the algorithm, as fields of `Recipe` define them.

    Attributes:
      dq_centre: None: "keys" in the one-pass kernel and "mean" in two.
      half_dq: on Hopper, and in Ampere's one-pass kernel, dQ of BF16 inputs is made of
        FP16 dS and K', each scaled into range for its head (`dq_dlogits`), and not of
        such as the inputs are.
      half_weights: P of the forward product is FP16 though the inputs are BF16, and so
        is V (`hopper_key_numbers`). None: where it is differentiated, since dQ gains
        by it more than out does. Ampere's kernels do not have it.
    """

    dq_centre: DqCentre | None = None
    half_dq: bool = True
    delta_source: DeltaSource = "o_hi_lo8"
    rescale_threshold: float = 0.0
    repeated_max_factor: float | None = None
    half_weights: bool | None = None

    def design(self, wanted: Backward | None, target: Architecture) -> Backward | None:
        """The design of the backward pass: that which has these options, or `wanted`
        where both have."""
        of_two: tuple[DqCentre, ...] = ("mean", "row")
        if target == "ampere":  # One pass has integers alone, in units of K'.
            of_two = "mean", "none"
        if self.dq_centre in of_two:
            return "two_kernels"
        return "fused" if self.dq_centre == "keys" else wanted

    def halves_dq(
        self, inputs: NumberFormat, target: Architecture, made: Backward
    ) -> bool:
        """Whether dQ has dS and K' in FP16 where they are not so by themselves."""
        there = target == "hopper" or made == "fused"
        return self.half_dq and inputs != FP16 and there

    def on(
        self,
        declared: Recipe,
        made: Backward,
        target: Architecture,
        *,
        differentiated: bool,
    ) -> Recipe:
        """The recipe of the kernels of a design, `declared` but for the options."""
        centre = self.dq_centre or ("keys" if made == "fused" else "mean")
        scaled = self.halves_dq(declared.inputs, target, made)
        half = differentiated if self.half_weights is None else self.half_weights
        half = half and target == "hopper" and declared.inputs == BF16
        weights = _HALF_WEIGHTS if half else {}
        return dataclasses.replace(
            declared,
            **weights,
            dq_centre=centre,
            dq_dlogits=Step(FP16) if scaled else None,
            dq_sum="integers" if target == "ampere" and made == "fused" else "numbers",
            delta_source=self.delta_source,
            rescale_threshold=self.rescale_threshold,
            repeated_max_factor=self.repeated_max_factor,
        )


DEFAULT = Options()
_HALF_WEIGHTS = {"probability": Step(FP16), "probability_scale": P_SCALE}
# What kernels have, by field.
_HAVE: dict[Architecture, dict[str, tuple]] = {
    "ampere": {
        "dq_centre": ("keys", "mean", "none"),
        "delta_source": ("o_hi_lo8", "o"),
        "rescale_threshold": (0.0,),
        "repeated_max_factor": (None,),
        "dq_dlogits": (None, Step(FP16)),
        "dq_sum": ("numbers", "integers"),
    },
    "hopper": {
        "dq_centre": ("keys", "mean", "row", "none"),
        "delta_source": ("o_hi_lo8", "o", "p_dp"),
        "dq_dlogits": (None, Step(FP16)),
        "dq_sum": ("numbers",),
    },
}
_OPTIONS = {field for have in _HAVE.values() for field in have}
# The kernels' own, whatever a recipe says.
_THEIR_OWN = {"name", "source", "kv_order", "loop_order"}
_THEIR_OWN |= {"block_q", "block_kv", "backward_block_q", "backward_block_kv"}


def of_recipe(recipe: Recipe | None) -> Options:
    """What a recipe asks for that `reason_against` has nothing against."""
    if recipe is None:
        return DEFAULT
    return Options(
        recipe.dq_centre,
        recipe.dq_dlogits is not None,
        recipe.delta_source,
        recipe.rescale_threshold,
        recipe.repeated_max_factor,
        recipe.inputs == BF16 and recipe.probability.format == FP16,
    )


def reason_against(
    recipe: Recipe,
    declared: Recipe,
    target: Architecture,
    *,
    fused_taken: bool,
    wanted: Backward | None = None,
) -> str | None:
    """Why the kernels cannot follow a recipe, in one line, or None if they can.

    `declared` is that of the kernels for the same arguments, `fused_taken` whether the
    one-pass kernel takes those, `wanted` a design that was asked for besides.
    """
    has_half = target == "hopper" and recipe.inputs == BF16
    half = has_half and _HALF_WEIGHTS == {k: getattr(recipe, k) for k in _HALF_WEIGHTS}
    for field in dataclasses.fields(Recipe):
        name = field.name
        if name in _THEIR_OWN or name.startswith("ring_") and recipe.ring_size == 1:
            continue
        asked, theirs = getattr(recipe, name), getattr(declared, name)
        if name in _OPTIONS:
            if asked in _HAVE[target].get(name, (asked,)):
                continue
            have = " or ".join(_said(x) for x in _HAVE[target][name])
        elif asked == theirs or name in _HALF_WEIGHTS and half:
            continue
        else:
            have = _said(theirs)
            if name in _HALF_WEIGHTS and has_half:
                both = (f"{k} {_said(x)}" for k, x in _HALF_WEIGHTS.items())
                have += f", or {' with '.join(both)}"
        return _refusal(
            recipe, name, f"the kernels for {target.capitalize()} have {have}"
        )
    if half and recipe.rescale_threshold:
        why = "P as FP16 numbers, times probability_scale, needs 0"
        return _refusal(recipe, "rescale_threshold", why)
    if recipe.dq_dlogits is not None and recipe.inputs != BF16:
        return _refusal(recipe, "dq_dlogits", "for FP16 inputs the kernels have None")
    if target == "ampere":
        in_one_pass = recipe.dq_centre == "keys"
        for name, have in (("dq_dlogits", Step(FP16)), ("dq_sum", "integers")):
            if (getattr(recipe, name) == have) != in_one_pass:
                why = f"the kernels for Ampere have {_said(have)} with dq_centre "
                return _refusal(recipe, name, why + "'keys', and only with it")
    needed = of_recipe(recipe).design(None, target)
    if needed == "fused" and not fused_taken:
        why = "it is the one-pass kernel's, which does not take these arguments; two "
        have = "'mean', 'row' or 'none'"
        if target == "ampere":
            have = "'mean' or 'none', with dq_dlogits None and dq_sum 'numbers'"
        why += f"kernels have dq_centre {have}"
        return _refusal(recipe, "dq_centre", why)
    if None not in (needed, wanted) and needed != wanted:
        return _refusal(recipe, "dq_centre", f"backward={wanted!r} does not have it")
    return None


def _refusal(recipe: Recipe, field: str, why: str) -> str:
    asked = _said(getattr(recipe, field))
    return f"recipe {recipe.name!r} on 'pallas': {field}={asked}, but {why}"


def _said(value) -> str:
    if isinstance(value, Step):
        return f"Step({value.format.name}, {value.rounding.value})"
    return getattr(value, "name", None) or repr(value)
