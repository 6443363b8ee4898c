"""Size, sign and direction of the error of delta: the bias of arXiv 2510.04212.

Qiu & Yao find that low-precision training fails where rounding O errs in one direction,
row after row: two equal maxima make P exactly 1 twice, values of one sign add with a
carry, and the bit that is shifted out is a tie which the faint rest of the row decides.
O feeds delta = rowsum(dO O), and delta dQ and dK. Three scenarios, on 512 keys:

    iid             logits N(0, 1), V and dO N(0, 1)
    sinks           logits N(-10, 1.5^2); two of the first 64 keys at exactly 4, so that
                    all others weigh about 1e-3; in 8 columns V about -2.3 and dO < 0
    sinks, small V  the same, and V of the first 64 keys halved in those columns

Logits are set, not products of drawn Q and K: Q is S and K the identity, head dim 512,
scale 1, V padded by zeros, all in FP32, as are the logits and the maximum of every
recipe here (S is where the published emulation begins). Then dQ is dS. delta itself is
read from the gradient of an attention sink, dz = -P_z delta; with a logit of -20 it
weighs less than 1e-9. Every query is a head, so each has a dz of its own. This gives
delta to about 2e-6 of itself.

    delta_error    (delta - exact) / sum_j |P_j dP_j|, its mean over queries
    row_sum_of_ds  sum_j dS_j / sum_j |dS_j|, mean; 0 in exact arithmetic
    normalisation  slope of the error of O on O, mean: the weights' sum less 1
    A              |sum e| / sqrt(sum e^2) of delta_error over all queries of all draws.
                   Random signs give 1, at most 1.96 in 95 % of cases; it says nothing
                   of an error of no size.
    typical        delta - exact over the mean of sum_j |P_j dP_j| over a draw's
                   queries, and typical_A the same of it. With small V the two sinks'
                   dP may both be next to 0; delta_error then has a heavy tail, one
                   query in 4096 can be half of the sum of squares, and other draws give
                   an A of 5 to 25.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from analysis import sweep
from analysis.figures import Panel
from analysis.record import Row
from analysis.summary import summarise
from attn_jax import emulator
from attn_jax.audit.error import DIRECTIONALITY_NULL_95, correctly_rounded
from attn_jax.formats import BF16, FP32
from attn_jax.recipe import RECIPES, Recipe, Step

SUMMARY = "sign, size and directionality of the error of delta (Qiu & Yao)"
SCENARIOS = ("iid", "sinks", "sinks, small V")
_QUERIES = {"toy": 64, "default": 256, "full": 1024}
_KEYS, _COLUMNS, _BIASED, _SINKS = 512, 64, 8, 64
# Their own sums need many draws of V: 16 of 256 queries each.
_SEEDS = 16
_FAINT = -20.0
# Ten times what is lost in reading delta, a tenth of the smallest bias that counts.
_NO_SIZE = 1e-5
_VALUES = ("delta_error", "typical", "row_sum_of_ds", "normalisation")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One scenario, all recipes."""

    scenario: str


class Drawn(NamedTuple):
    """FP32 arrays; V and dO are BF16 numbers."""

    logits: Float[np.ndarray, "T S"]
    value: Float[np.ndarray, "S H"]
    dout: Float[np.ndarray, "T H"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment's options."""
    seeds = dict.fromkeys(sweep.SEEDS, _SEEDS)
    sweep.add_options(parser, "bias", None, seeds=seeds)


def recipes() -> dict[str, Recipe]:
    """What is measured, given S in FP32, by the name of its rows."""

    def from_logits(name: str, **changes) -> Recipe:
        same = {"inputs": FP32, "logits": Step(FP32), "row_max": Step(FP32)}
        return dataclasses.replace(RECIPES[name], **same, **changes)

    return {
        "qiu_yao": from_logits("qiu_yao"),
        "qiu_yao, cure 2 m": from_logits("qiu_yao", repeated_max_factor=2.0),
        "flash2": from_logits("flash2"),
        "flash2, o_f32": from_logits("flash2", delta_source="o_f32"),
        "flash2, o_hi_lo": from_logits("flash2", delta_source="o_hi_lo"),
        "flash2, p_dp": from_logits("flash2", delta_source="p_dp"),
        "eager_bf16": from_logits("eager_bf16"),
    }


def draw(scenario: str, seed: int, queries: int) -> Drawn:
    """One draw of a scenario."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((queries, _KEYS))
    value = rng.standard_normal((_KEYS, _COLUMNS))
    dout = rng.standard_normal((queries, _COLUMNS))
    if scenario != "iid":
        logits = 1.5 * logits - 10
        two = np.stack([rng.permutation(_SINKS)[:2] for _ in range(queries)])
        np.put_along_axis(logits, two, 4.0, axis=1)
        value[:, :_BIASED] = -abs(2.3 + 0.35 * value[:, :_BIASED])
        dout[:, :_BIASED] = -abs(dout[:, :_BIASED])
        if scenario == "sinks, small V":
            value[:_SINKS, :_BIASED] *= 0.5
    return Drawn(
        logits.astype(np.float32),
        correctly_rounded(value, BF16).astype(np.float32),
        correctly_rounded(0.01 * dout, BF16).astype(np.float32),
    )


class Found(NamedTuple):
    """O, dS and delta of a recipe."""

    out: Float[np.ndarray, "T H"]
    dlogits: Float[np.ndarray, "T S"]
    delta: Float[np.ndarray, " T"]


def emulate(recipe: Recipe, drawn: Drawn) -> Found:
    """Runs a recipe on logits, and reads dS and delta from its gradients."""
    queries, keys = drawn.logits.shape
    columns = drawn.value.shape[1]
    padding = ((0, 0), (0, keys - columns))
    # [1, 1, T, S]: each query a head; [1, S, 1, S]: one head of keys for all.
    query = drawn.logits[None, None]
    key = np.eye(keys, dtype=np.float32)[None, :, None]
    value = np.pad(drawn.value, padding)[None, :, None]
    dout = np.pad(drawn.dout, padding)[None, None]
    sinks = np.full(queries, _FAINT, np.float32)
    found = jax.device_get(_emulate(recipe, query, key, value, dout, sinks))
    out, lse, dquery, dsinks = found
    weight = np.exp(_FAINT - lse[0, :, 0].astype(np.float64))
    return Found(out[0, 0, :, :columns], dquery[0, 0], -dsinks / weight)


@functools.partial(jax.jit, static_argnums=0)
def _emulate(recipe: Recipe, query, key, value, dout, sinks):
    def attend(query, sinks):
        return emulator.attention(
            query, key, value, recipe=recipe, scale=1.0, sinks=sinks
        )

    (out, lse), pullback = jax.vjp(attend, query, sinks)
    return out, lse, *pullback((dout, jax.numpy.zeros_like(lse)))


def measure(recipe: Recipe, drawn: Drawn) -> Row:
    """Means over the queries of one draw, and the mean square for A."""
    logits, value, dout = (x.astype(np.float64) for x in drawn)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ value
    terms = weights * (dout @ value.T)
    found = emulate(recipe, drawn)
    ds = found.dlogits.astype(np.float64)
    error, size = found.delta - terms.sum(-1), abs(terms).sum(-1)
    delta_error, typical = error / size, error / size.mean()
    slope = ((found.out - out) * out).sum(-1) / np.square(out).sum(-1)
    return {
        "delta_error": float(delta_error.mean()),
        "delta_error_square": float(np.square(delta_error).mean()),
        "typical": float(typical.mean()),
        "typical_square": float(np.square(typical).mean()),
        "row_sum_of_ds": float((ds.sum(-1) / abs(ds).sum(-1)).mean()),
        "normalisation": float(slope.mean()),
        "queries": len(logits),
    }


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures and reports (see `sweep.run`)."""
    queries = _QUERIES[options.preset]

    def rows_of(cell: Cell) -> Iterator[Row]:
        for seed in range(sweep.seeds(options)):
            drawn = draw(cell.scenario, seed, queries)
            for name, recipe in recipes().items():
                yield {"recipe": name, "seed": seed, **measure(recipe, drawn)}

    cells = [Cell(scenario) for scenario in SCENARIOS]
    return sweep.run("bias", cells, rows_of, report, options, command)


def report(rows: Sequence[Row]) -> sweep.Report:
    """A table for each scenario, in units of 1e-4, and what Qiu & Yao say."""
    found = summarise(rows, ["scenario", "recipe"], _VALUES)
    tables, claims = {}, []
    for row in found:
        draws = [
            draw
            for draw in rows
            if (draw["scenario"], draw["recipe"]) == (row["scenario"], row["recipe"])
        ]
        row["A"] = directionality(draws, "delta_error")
        row["typical_A"] = directionality(draws, "typical")
        row["sized"] = max(draw["delta_error_square"] for draw in draws) > _NO_SIZE**2
        line = {"recipe": row["recipe"]}
        for name in _VALUES:
            line[name] = f"{1e4 * row[name]:+.2f} ± {1e4 * row[f'{name}_ci']:.2f}"
        for name in ("A", "typical_A"):
            line[name] = f"{row[name]:.1f}" if row["sized"] else ""
        tables.setdefault(f"{row['scenario']}: means x 1e-4, and A", []).append(line)
        claims += _claims(row)
    claims.sort(key=lambda claim: claim.says)
    label = "mean error of delta"
    panel = Panel(
        "error of delta",
        found,
        "recipe",
        "delta_error",
        "scenario",
        "",
        label,
        log_x=False,
        log_y=False,
        joined=False,
    )
    return sweep.Report(tables, [panel], claims)


def directionality(draws: Sequence[Row], name: str) -> float:
    """A = |sum e| / sqrt(sum e^2) over the queries of all draws, of a column e."""
    total = sum(draw["queries"] * draw[name] for draw in draws)
    squares = sum(draw["queries"] * draw[f"{name}_square"] for draw in draws)
    return abs(total) / math.sqrt(squares) if squares else 0.0


def _claims(row: Row) -> list[sweep.Claim]:
    if row["scenario"] == "iid":
        return []
    size, width = row["delta_error"], row["delta_error_ci"]
    biased = abs(size) > max(width, _NO_SIZE) and row["A"] > DIRECTIONALITY_NULL_95
    cured = row["recipe"].endswith(("o_f32", "o_hi_lo", "p_dp"))
    if cured:
        says = "delta from a finer O, or rowsum(P dP), is without the bias."
    else:
        says = "The error of delta has one sign: low-precision O is biased."
    return [
        sweep.Claim(
            "Qiu & Yao, arXiv 2510.04212",
            says,
            f"{row['recipe']}, {row['scenario']}",
            f"{1e4 * size:+.2f} ± {1e4 * width:.2f} x 1e-4"
            + (f", A = {row['A']:.1f}" if row["sized"] else ""),
            biased != cured,
        )
    ]
