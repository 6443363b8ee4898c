"""Which cast costs what, in any recipe: one cast at a time, and all casts but one.

A cast is a step that the recipe keeps in less than its carrier. "alone" has this one
cast and every other step in the carrier; "all but" has every cast but this one; "all"
is the recipe and "none" has no cast but that of the inputs. `logits+shifted` and
`product+accumulator` are the two steps of one tensor, S and O. Gradients are measured
up to 1024 keys, and the casts that act on them alone only there.

`rel` is the error's norm over that of the exact result. Where "alone" is near "all" and
"all but" far below it, that cast is the error; squares of "alone" add up to that of
"all" where the casts' errors are independent and none makes another worse.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from analysis import gradients, inputs, sweep
from analysis.figures import Panel
from analysis.record import Row
from analysis.summary import plus_minus, summarise
from attn_jax.audit import attribution
from attn_jax.audit.attribution import without
from attn_jax.recipe import RECIPES, Recipe
from train.config import UsageError

SUMMARY = "what each cast of a recipe costs alone, and what leaving it out saves"
LENGTHS = {"toy": (96,), "default": (1024, 8192), "full": (1024, 8192, 32768)}
_LONGEST_BACKWARD = 1024
# A relative error below every cast's, above that of FP32 throughout.
_NOTHING = 1e-5
# Steps that nothing of the forward pass depends on.
BACKWARD = (
    *("softmax_probability", "backward_probability", "delta", "dprobability"),
    *("dlogits", "dq_dlogits"),
    *("dq_accumulator", "dk_accumulator", "dv_accumulator"),
    *("group_gradient", "group_accumulator", "gradient"),
    *("ring_gradient_partial", "ring_gradient_accumulator"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cast ("all": the recipe itself, and none of it) of one problem."""

    family: str
    N: int
    cast: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    sweep.add_options(parser, "attribution", ("normal",))
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="flash2_op_by_op",
        help="whose casts are taken apart (default %(default)s)",
    )


def casts(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """`attn_jax.audit.attribution.casts`.

    Raises:
      UsageError: it has none.
    """
    found = attribution.casts(recipe)
    if not found:
        raise UsageError(f"--recipe {recipe.name} keeps every step in its carrier")
    return found


def variants(recipe: Recipe, cast: str) -> dict[str, Recipe]:
    """The recipes of a cell: "all" and "none", or "alone" and "all but"."""
    every = casts(recipe)
    single = [name for name, fields in every.items() if len(fields) == 1]
    if cast == "all":
        return {"all": recipe, "none": without(recipe, single)}
    fields = every[cast]
    others = [name for name in single if name not in fields]
    return {"alone": without(recipe, others), "all but": without(recipe, fields)}


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    recipe = RECIPES[options.recipe]
    source = inputs.open_inputs(options)
    cells = [
        Cell(label, N, cast)
        for N in source.lengths(LENGTHS[options.preset])
        for label in source.labels
        for cast in ("all", *casts(recipe))
        if N <= _LONGEST_BACKWARD or cast not in BACKWARD
    ]

    def measure(cell: Cell) -> Iterator[Row]:
        problem = inputs.problem(source, cell.family, cell.N, recipe.inputs)
        backward = cell.N <= _LONGEST_BACKWARD
        for how, one in variants(recipe, cell.cast).items():
            for row in gradients.errors(one, problem, backward=backward):
                yield {"recipe": recipe.name, "how": how, **row}

    return sweep.run("attribution", cells, measure, report, options, command)


def report(rows: Sequence[Row]) -> sweep.Report:
    """A table for each problem and tensor, a panel for each tensor, and claims."""
    found = summarise(
        rows, ["recipe", "family", "N", "tensor", "cast", "how"], ["rel", "units"]
    )
    tables, panels, claims = {}, [], []
    for family, N, tensor in dict.fromkeys(
        (row["family"], row["N"], row["tensor"]) for row in rows
    ):
        here = [
            row
            for row in found
            if (row["family"], row["N"], row["tensor"]) == (family, N, tensor)
        ]
        if tensor == "out":
            here = [row for row in here if row["cast"] not in BACKWARD]
        title = f"{here[0]['recipe']}, {family}, {N} keys: {tensor}"
        tables[f"{title}, relative error x 1000"] = _table(here)
        # Casts that change nothing would only stretch the axis.
        alone = {
            row["cast"]: row["rel"] or 0.0 for row in here if row["how"] == "alone"
        }
        shown = [row for row in here if alone.get(row["cast"], 0.0) > _NOTHING]
        panels.append(_panel(title, shown))
        claims += _claims(title, here)
    # What is said once is shown once, with everything found on it below.
    claims.sort(key=lambda claim: claim.says)
    return sweep.Report(tables, panels, claims)


def _panel(title: str, shown: Sequence[Row]) -> Panel:
    return Panel(
        title,
        shown,
        "cast",
        "rel",
        "how",
        "",
        "relative error",
        log_x=False,
        joined=False,
    )


def _table(here: Sequence[Row]) -> list[Row]:
    """Alone and all but, for each cast; the recipe is all casts, and all but none."""
    columns = {"all": "alone", "none": "all but"}
    lines = {}
    for row in here:
        name = "all casts" if row["cast"] == "all" else row["cast"]
        line = lines.setdefault(name, {"cast": name, "alone": "", "all but": ""})
        line[columns.get(row["how"], row["how"])] = _thousandths(row)
    return list(lines.values())


def _thousandths(row: Row) -> str:
    if row["rel"] is None:
        return ""
    scaled = {name: 1000 * row[name] for name in ("rel", "rel_ci")}
    return plus_minus(scaled, "rel")


def _claims(title: str, here: Sequence[Row]) -> list[sweep.Claim]:
    """What is said to be the main source of error, against the largest "alone"."""
    alone = {
        row["cast"]: row["rel"]
        for row in here
        if row["how"] == "alone" and row["rel"] is not None
    }
    if not alone:
        return []
    order = sorted(alone, key=lambda cast: -alone[cast])
    found = ", ".join(f"{cast} {1000 * alone[cast]:.2g}" for cast in order[:5])
    claims = []
    if here[0]["tensor"] == "out" and "correction" in alone:
        source = "paper, Sec. IV-A"
        says = "The deviation comes from rescaling what was summed before."
        claims.append(sweep.Claim(source, says, title, found, order[0] == "correction"))
    ds = "dlogits"
    if here[0]["tensor"] == "dq" and "dq_dlogits" in alone:
        ds = "dq_dlogits"
    if here[0]["tensor"] in ("dq", "dk") and ds in alone:
        source = "SageBwd, arXiv 2603.02170"
        says = "The main error of the backward pass is that of dS."
        claims.append(sweep.Claim(source, says, title, found, order[0] == ds))
    return claims
