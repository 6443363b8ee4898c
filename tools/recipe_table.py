"""Prints the tables of named recipes that docs/recipes.md shows, as Markdown.

    python tools/recipe_table.py

Everything in it is read from `attn_jax.recipe.RECIPES`: formats from the fields, the
predicted errors from the laws below. What was measured comes from the table that
`python -m analysis sequence-length --preset=full` left.

The law of the output is for N(0, 1) inputs and head dims whose logits have variance 1.
An error of relative size e in each weight p_j adds e^2 sum p^2 v^2 to a sum whose own
square is sum p^2 v^2: it counts in full. With eps the RMS roundoff of a step's format:

    P, its product and the output    eps^2 each, once
    logits                           an error eps |s| of the logit s is one of p; under
                                     the weights p^2 ~ exp(2 s) a logit has mean 2 and
                                     variance 1, so 5 eps^2
    O and l carried over T tiles     eps_O^2 T / 2 and eps_l^2 T / 3
                                     (`attn_jax.bounds.two_term_law`)
    a ring of W, partial results     eps^2 in all; summed in a narrow format
                                     eps^2 (W + 1) / 2 more
"""

import csv
import math
from pathlib import Path

from attn_jax.bounds import two_term_law
from attn_jax.formats import FP64, NumberFormat
from attn_jax.recipe import RECIPES, Recipe, Step

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "results" / "sequence-length" / "full.csv"
# Of the predicted and measured errors.
KEYS, BLOCK = 4096, 64
# Heading -> the fields of `Recipe` that it stands for, one step after the other.
STEPS = {
    "Q, K, V": ("inputs",),
    "S": ("logits",),
    "m": ("row_max",),
    "l": ("row_sum",),
    "rescaling": ("correction",),
    "P": ("probability",),
    "P V": ("product",),
    "O carried": ("accumulator",),
    "out": ("output",),
    "LSE": ("lse",),
    "P, backward": ("backward_probability",),
    "delta": ("delta",),
    "dP": ("dprobability",),
    "dS": ("dlogits",),
    "dS of dQ": ("dq_dlogits",),
    "sums of dQ, dK, dV": ("dq_accumulator", "dk_accumulator", "dv_accumulator"),
    "gradients": ("gradient",),
}
DELTA = {
    "o": "from out",
    "o_hi_lo": "from O as two numbers",
    "o_hi_lo8": "from O as a number and a byte",
    "o_f32": "from O unrounded",
    "p_dp": "from P dP",
}


def _format(value: Step | NumberFormat | None) -> str:
    if value is None:
        return "as dS"
    return (value.format if isinstance(value, Step) else value).name


def _narrow(recipe: Recipe, step: str) -> float:
    """eps of a step: 0 for one that rounds nothing the carrier has not."""
    fmt = getattr(recipe, step).format
    wide = fmt.mantissa_bits >= recipe.carrier.mantissa_bits
    return 0.0 if wide else fmt.rms_roundoff


def _formats(recipe: Recipe, steps: tuple[str, ...]) -> str:
    text = ", ".join(dict.fromkeys(_format(getattr(recipe, step)) for step in steps))
    if steps == ("delta",):
        return f"{text}, {DELTA[recipe.delta_source]}"
    if steps == ("probability",) and recipe.probability_scale != 1:
        return f"{text}, times 2^{math.log2(recipe.probability_scale):g}"
    return text


def further(recipe: Recipe) -> str:
    """What is not a format: tiles, order, exponential, cures, the ring."""
    tiles = "whole rows"
    if recipe.block_kv is not None:
        tiles = f"{recipe.block_q} x {recipe.block_kv} tiles"
    said = [tiles]
    if recipe.kv_order == "reverse":
        said.append("keys from the last")
    if recipe.normalise == "each_step":
        said.append("O divided by l at each step")
    if recipe.exponential == "exp2_polynomial":
        said.append(f"2^x by a polynomial of degree {recipe.exp2_degree}")
    if recipe.rescale_threshold:
        said.append(f"m kept until it grows by {recipe.rescale_threshold:g} (log2)")
    if recipe.dq_centre != "none":
        said.append(f"dQ about a centre: {recipe.dq_centre}")
    if recipe.ring_size > 1:
        partial, total = recipe.ring_partial, recipe.ring_accumulator
        said.append(
            f"ring of {recipe.ring_size}, partial results {_format(partial)} summed in "
            f"{_format(total)} ({recipe.ring_merge})"
        )
    return "; ".join(said)


def squares(recipe: Recipe) -> tuple[float, float] | None:
    """Squared relative error of out, and what each tile of keys adds to it.

    None where the law does not reach: O divided at each step, sums rounded after every
    term, row sums that are narrow without tiles, P in a format with a range so small
    that its subnormals count.
    """
    tiled = recipe.block_kv is not None
    narrow_sums = _narrow(recipe, "accumulator") or _narrow(recipe, "row_sum")
    chained = _narrow(recipe, "dot_accumulator") or _narrow(
        recipe, "rowsum_accumulator"
    )
    small = recipe.probability.format.exponent_bits < 5
    if recipe.normalise == "each_step" or chained or small:
        return None
    if narrow_sums and not tiled:
        return None
    once = sum(_narrow(recipe, step) ** 2 for step in ("probability", "output"))
    once += 5 * _narrow(recipe, "logits") ** 2
    if recipe.ring_size > 1:
        once += _narrow(recipe, "ring_partial") ** 2
        total = _narrow(recipe, "ring_accumulator")
        once += total**2 * (recipe.ring_size + 1) / 2
    with_sums = float(two_term_law(recipe, 1.0, 0.0)) ** 2
    return once, with_sums


def law(recipe: Recipe) -> tuple[str, float | None]:
    """The law in words, and its value at `KEYS` keys in blocks of `BLOCK`."""
    found = squares(recipe)
    if found is None:
        return "none known", None
    once, per_tile = found
    value = math.sqrt(once + per_tile * KEYS / BLOCK)
    if value == 0 or recipe.carrier == FP64:
        return "exact but for the carrier", None
    eps = recipe.output.format.rms_roundoff or 1.0
    under = f"{once / eps**2:.3g}"
    if per_tile:
        under = f"({under} + {per_tile / eps**2:.2g} T)"
    return f"eps √{under}", value


def growth(recipe: Recipe) -> str:
    """How dQ's error grows with the keys where K and V have a mean.

    A delta from an O that was rounded is off by as much in all of a row, and the row of
    dS no longer sums to zero: that sum times K's mean is in dQ, whose exact size falls
    as 1 / sqrt(keys). A centre takes the mean away, an unrounded O or P dP the sum.
    """
    if not _narrow(recipe, "output") or recipe.dq_centre != "none":
        return "flat"
    if _narrow(recipe, "delta"):
        return "no law"
    return "√keys" if recipe.delta_source == "o" else "flat"


def measured() -> dict[str, float]:
    """Relative error of out on N(0, 1) at `KEYS` keys by recipe, as far as measured."""
    with MEASURED.open(newline="") as file:
        return {
            row["series"]: float(row["y"])
            for row in csv.DictReader(file)
            if row["panel"] == "normal: error against FP64" and row["x"] == str(KEYS)
        }


def table() -> str:
    """Laws and what is no format, formats, and where each comes from."""
    found = measured()
    laws = [["recipe", "law of out", "predicted", "measured", "dQ", "further"]]
    formats = [["recipe", *STEPS]]
    for name, recipe in RECIPES.items():
        words, value = law(recipe)
        laws.append(
            [
                f"`{name}`",
                words,
                "" if value is None else f"{value:.2e}",
                f"{found[name]:.2e}" if name in found else "",
                growth(recipe),
                further(recipe),
            ]
        )
        steps = (_formats(recipe, fields) for fields in STEPS.values())
        formats.append([f"`{name}`", *steps])
    sources = [f"- `{name}`: {recipe.source}." for name, recipe in RECIPES.items()]
    both = "Formats of the steps:", "", *_rows(formats), "", "Where each comes from:"
    return "\n".join([*_rows(laws), "", *both, "", *sources])


def _rows(lines: list[list[str]]) -> list[str]:
    """A table of Markdown, whose first line is its head."""
    head, *others = lines
    every = [head, ["---"] * len(head), *others]
    return [f"| {' | '.join(line)} |" for line in every]


if __name__ == "__main__":
    print(table())
